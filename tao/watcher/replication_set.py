"""The servers of one database, as an administrator reaches them: asked, closed, attached (DESIGN.md §9)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from tao.model.errors import DeadlineExceeded, ShardBlocked, TaoError, TopologyError
from tao.model.topology import Database, DatabaseServer, Topology
from tao.storage.accounts import Account
from tao.storage.dialect import SessionSetup
from tao.storage.failures import TablesMissing
from tao.storage.lease import lease_seconds, revoke_lease
from tao.storage.promotion import fence, highest_epoch, member_state, receive_again, stop_receiving
from tao.storage.replication import ReplicationSource, attach, executed_position, wait_for_position
from tao.storage.semi_sync import acknowledge_as_replica, set_semi_sync
from tao.storage.session import ServerAccount, Session, open_session
from tao.watcher.locks import SESSION_SECONDS, Hold, LockLost
from tao.watcher.promotion_plan import Member, PromotionRefused

_PAUSE_SECONDS: Final = 0.05
_AGAIN_SHARE: Final = 0.25
"""Of the time for an answer, for a server that has let all of it pass before: a second, far above what one that is well
takes."""


class NotCaughtUp(DeadlineExceeded):
    """The server follows its master, and does not have all that the master had when it began."""


@dataclass(frozen=True, slots=True)
class SetAccounts:
    """As whom a promotion comes in, and as whom replicas do at their master."""

    administrator: Account
    replicator: Account


class ReplicationSet:
    """The servers of one database under one topology document."""

    def __init__(
        self,
        database: Database,
        accounts: SetAccounts,
        *,
        seen_from: str,
        statement_seconds: float,
        silent: set[str] | None = None,
        hold: Hold | None = None,
    ) -> None:
        """``seen_from``: the region whose addresses are used; empty for the usual ones. ``statement_seconds``: bound on
        each statement, and on a connection. ``silent``: servers that did not answer when they were asked last, kept
        up here for whoever looks several times. ``hold``: of the lock of its mastership, for whoever changes it: no
        session is used when that is lost."""
        self.database: Final = database
        self._accounts: Final = accounts
        self._seen_from: Final = seen_from
        self._statement_seconds: Final = statement_seconds
        self._silent: Final = set[str]() if silent is None else silent
        self._hold: Final = hold

    @property
    def master(self) -> DatabaseServer:
        """By the topology."""
        return self.database.servers[self.database.master_region]

    @property
    def shards(self) -> list[int]:
        """All that lie on the database."""
        return [shard for first, last in self.database.shards for shard in range(first, last + 1)]

    def soon(self) -> float:
        """A deadline for one statement."""
        return asyncio.get_running_loop().time() + self._statement_seconds

    def region_of(self, name: str) -> str:
        """The region of one of the servers."""
        return next(region for region, server in self.database.servers.items() if server.name == name)

    def login(self, region: str) -> ServerAccount:
        """Where the server of a region is, and an administrator of it."""
        server = self.database.servers[region].seen_from(self._seen_from)
        administrator = self._accounts.administrator
        return ServerAccount(server.host, server.port, administrator.user, administrator.password, server.socket)

    @asynccontextmanager
    async def session(self, region: str, *, deadline: float | None = None) -> AsyncIterator[Session]:
        """An administrator's, at the server of a region. ``deadline``: for the connection; None: `soon`. Raises
        `TaoError`, `LockLost` among it."""
        name = self.database.servers[region].name
        setup = SessionSetup(writes=True, under_lock_seconds=0 if self._hold is None else SESSION_SECONDS)
        session = await open_session(self.login(region), name, setup, deadline=deadline or self.soon())
        try:
            self.check_hold()  # and should it be lost from here on, the session ends before anybody else acts
            yield session
        finally:
            # Without a word of good-bye, for which a server that hangs would have to be waited.
            session.abort()

    def check_hold(self) -> None:
        """Before each deed. Raises `LockLost` when somebody else may be changing the mastership by now."""
        if self._hold is not None:
            self._hold.check()

    async def members(self) -> list[Member]:
        """All servers as they are now, asked side by side. One that was silent the last time is not waited for as long
        again: a promotion looks several times, and each costs the writers of the whole database as much."""
        return list(await asyncio.gather(*map(self._member, self.database.servers)))

    async def beside_master(self, region: str) -> tuple[Member, Member]:
        """A server and the master, which is asked afterwards: so it has whatever one that follows it was found to
        have, and what it lacks it never had."""
        member = await self._member(region)
        return member, await self._member(self.database.master_region)

    async def _member(self, region: str) -> Member:
        name, is_master = self.database.servers[region].name, region == self.database.master_region
        patience = _AGAIN_SHARE if name in self._silent else 1.0
        deadline = asyncio.get_running_loop().time() + patience * self._statement_seconds
        try:
            async with self.session(region, deadline=deadline) as session:
                state = await member_state(session, deadline=deadline)
        except LockLost:
            raise
        except TaoError as error:
            self._silent.add(name)
            return Member(name, region, None, error.message, is_master=is_master)
        self._silent.discard(name)
        return Member(name, region, state, is_master=is_master)

    def follows(self, member: Member, master_region: str) -> bool:
        """Whether the member follows the server of that region, as its own region reaches it."""
        master = self.database.servers[master_region].seen_from(member.region)
        following = None if member.state is None else member.state.following
        return following is not None and following.source == f"{master.host}:{master.port}"

    def acknowledging(self, members: Iterable[Member]) -> list[str]:
        """The servers for which commits of the master may wait: they acknowledge what it tells them, have all that came
        before, and are in use. One that is marked may be about to be stopped, and every write would stand still."""
        return [
            member.name
            for member in members
            if member.acknowledges
            and member.is_whole
            and not self.database.servers[member.region].down
            and self.follows(member, self.database.master_region)
        ]

    async def let_master_go(self) -> bool:
        """Have commits of the master wait for none where no replica in use acknowledges, before the last one that does
        is stopped: every write would stand still, and a copy that waits for the end of commits with them. Returns
        whether that was so. Under the lock of the database, or a watcher undoes it. Raises `TaoError`."""
        if not self.database.semi_sync or self.acknowledging(await self.members()):
            return False
        async with self.session(self.database.master_region) as session:
            await set_semi_sync(session, waits=False, deadline=self.soon())
        return True

    async def close(self, region: str) -> None:
        """Take the lease and close the server to writes, for good. Raises `TaoError`."""
        async with self.session(region) as session, self.session(region) as other:
            # Refused while the server closes itself and is held up by commits that wait for a replica.
            # The fence ends them.
            with suppress(ShardBlocked):
                await revoke_lease(session, deadline=self.soon())
            await fence(session, other, deadline=self.soon())

    async def stop_receiving(self, region: str) -> None:
        """Have a server take no more from its master. Raises `TaoError`."""
        async with self.session(region) as session:
            await stop_receiving(session, deadline=self.soon())

    async def catch_up(self, target: Member, patience_seconds: float) -> None:
        """Return when a server has everything of the master, which is closed. Raises `PromotionRefused` when it does
        not follow it."""
        master_region = self.database.master_region
        async with self.session(master_region) as session:
            executed = (await member_state(session, deadline=self.soon())).executed
            position = await executed_position(session, deadline=self.soon())
        async with self.session(target.region) as session:
            state = await member_state(session, deadline=self.soon())
            if state.received >= executed:
                return  # and it may follow nobody any more, after a run that was interrupted
            if not self.follows(target, master_region):
                raise PromotionRefused(
                    f"{target.name} does not follow {self.master.name}: tao rejoin {target.name} first"
                )
            await receive_again(session, deadline=self.soon())
            deadline = asyncio.get_running_loop().time() + patience_seconds
            await wait_for_position(session, position, deadline=deadline)

    async def until_applied(self, region: str, patience_seconds: float) -> None:
        """Return when a server that follows has applied what its master has now. Raises `NotCaughtUp`."""
        async with self.session(self.database.master_region) as session:
            executed = (await member_state(session, deadline=self.soon())).executed
        async with self.session(region) as session:
            deadline = asyncio.get_running_loop().time() + patience_seconds
            while not (await member_state(session, deadline=self.soon())).executed >= executed:
                if asyncio.get_running_loop().time() >= deadline:
                    raise NotCaughtUp("it follows, and has not caught up yet: `tao status` shows how far it is")
                await asyncio.sleep(_PAUSE_SECONDS)

    async def lease_seconds(self, region: str) -> float:
        """How long a lease of the server lasts; 0: it keeps none. Raises `TaoError`."""
        async with self.session(region) as session:
            return await lease_seconds(session, deadline=self.soon())

    async def follow(self, region: str, master_region: str) -> None:
        """Make a server a replica of another, whatever it was. Raises `TaoError`."""
        master = self.database.servers[master_region].seen_from(region)
        replicator = self._accounts.replicator
        source = ReplicationSource(master.host, master.port, replicator.user, replicator.password)
        async with self.session(region) as session:
            if self.database.semi_sync:
                await acknowledge_as_replica(session, deadline=self.soon())
            await revoke_lease(session, deadline=self.soon())
            await attach(session, source, deadline=self.soon())

    async def highest_epoch(self, region: str) -> int:
        """The highest version epoch in the shard rows of a server. Raises `TaoError`."""
        async with self.session(region) as session:
            return await highest_epoch(session, self.shards, deadline=self.soon())

    async def highest_epochs(self, members: Iterable[Member]) -> tuple[dict[str, int], dict[str, str]]:
        """By server that answers; and the servers that have no tables to say it, as one that is being seeded, with what
        they answered. Raises `TaoError` for whatever else keeps it from being known."""
        epochs: dict[str, int] = {}
        without_tables: dict[str, str] = {}
        for member in members:
            if member.state is not None:
                try:
                    epochs[member.name] = await self.highest_epoch(member.region)
                except TablesMissing as error:
                    without_tables[member.name] = error.message
        return epochs, without_tables


def find_database(topology: Topology, name: str) -> Database:
    """Raises `TopologyError` when there is none of that name."""
    for database in topology.databases:
        if database.name == name:
            return database
    known = [database.name for database in topology.databases]
    raise TopologyError(f"there is no database {name!r}; there are {', '.join(known)}")
