"""The servers of one database, as an administrator observes, closes and attaches them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from tao.model.errors import DeadlineExceeded, ShardBlocked, TaoError, TopologyError
from tao.model.topology import Database, DatabaseServer, Topology, region_of_place
from tao.replication.accounts import Account
from tao.replication.kept_sessions import KEEP_ALIVE_SECONDS, KeptSessions
from tao.replication.lease import LeaseTerms, lease_terms, revoke_lease, server_unix_ms
from tao.replication.locks import SESSION_IDLE_SECONDS, LockHold, LockLost
from tao.replication.promotion_plan import PromotionRefused, SetMember, check_has_all
from tao.replication.server_statements import (
    MemberState,
    ReplicationSource,
    SourceTls,
    acknowledge_as_replica,
    attach,
    detach,
    executed_position,
    fence,
    highest_epoch,
    member_state,
    receive_again,
    set_semi_sync,
    stop_receiving,
    wait_for_position,
)
from tao.storage.dialect import SessionSetup
from tao.storage.failures import ConnectionLost, NotListening, TablesMissing
from tao.storage.session import DatabaseSession, ServerAccount, open_session

_PAUSE_SECONDS: Final = 0.05
_RETRY_SHARE: Final = 0.25
"""The share of the statement timeout that a server gets after it did not answer last time: about a second, far more
than a healthy server needs."""


class NotCaughtUp(DeadlineExceeded):
    """The server follows its master, and has not yet applied everything that the master had when the wait began."""


@dataclass(frozen=True, slots=True)
class SetAccounts:
    """The administrator's account for promotions, and the account by which replicas connect to their master."""

    administrator: Account
    replicator: Account


class ReplicationSet:
    """The servers of one database according to one topology document."""

    def __init__(
        self,
        database: Database,
        accounts: SetAccounts,
        *,
        seen_from: str,
        statement_seconds: float,
        silent: set[str] | None = None,
        hold: LockHold | None = None,
        sessions: KeptSessions | None = None,
    ) -> None:
        """``seen_from``: the region whose addresses are used, or empty for the default ones.

        ``statement_seconds``: bound on each statement and on a connection. ``silent``: names of servers that did not
        answer last time, updated here and shared by a caller that observes the set several times. ``hold``: the hold of
        the mastership lock, for a caller that changes the master; no session is used once it is lost. ``sessions``:
        those that are used again; None: each use opens one.
        """
        self.database: Final = database
        self._accounts: Final = accounts
        self._seen_from: Final = seen_from
        self._statement_seconds: Final = statement_seconds
        self._silent: Final = set[str]() if silent is None else silent
        self._hold: Final = hold
        self._sessions: Final = sessions

    @property
    def master(self) -> DatabaseServer:
        """The master according to the topology."""
        return self.database.servers[self.database.master_region]

    @property
    def shards(self) -> list[int]:
        """All shards of the database."""
        return [shard for first, last in self.database.shards for shard in range(first, last + 1)]

    def statement_deadline(self) -> float:
        """Return a deadline for one statement, in the loop's time."""
        return asyncio.get_running_loop().time() + self._statement_seconds

    def region_of(self, name: str) -> str:
        """Return the place of a server, which is what all methods here take for its region."""
        return next(place for place, server in self.database.places.items() if server.name == name)

    def login(self, region: str, account: Account | None = None) -> ServerAccount:
        """Return the address of a region's server with an account; None: with an administrator's."""
        server = self.database.places[region].seen_from(self._seen_from)
        return (account or self._accounts.administrator).at(server)

    @asynccontextmanager
    async def session(self, region: str, *, deadline: float | None = None) -> AsyncIterator[DatabaseSession]:
        """Use an administrator's session at the server of a region.

        ``deadline``: for the connection; None means `statement_deadline`. Raises `TaoError`, including `LockLost`.
        """
        name, sessions = self.database.places[region].name, self._sessions
        session = None if sessions is None else sessions.take(name)
        if session is None:
            setup = SessionSetup(writes=True, under_lock_seconds=0 if self._hold is None else SESSION_IDLE_SECONDS)
            deadline = deadline or self.statement_deadline()
            session = await open_session(self.login(region), name, setup, deadline=deadline)
        is_clean = False
        try:
            # If the lock is lost after this, the session ends before another process acts: its server ends it once it
            # has been idle for so long, since it was opened or since its last use.
            self.check_hold()
            yield session
            is_clean = True
        finally:
            if is_clean and sessions is not None:
                sessions.give(name, session)
            else:
                session.quit()

    async def wait(self, seconds: float, unless: asyncio.Event) -> None:
        """Wait for some time, or until ``unless`` is set, and keep the sessions open meanwhile. Raises `LockLost`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0 and not unless.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(unless.wait(), min(left, KEEP_ALIVE_SECONDS))
            if left > KEEP_ALIVE_SECONDS and self._sessions is not None:
                self.check_hold()
                await self._sessions.keep_alive(deadline=end)

    def check_hold(self) -> None:
        """Raise `LockLost` when another process may be changing the mastership by now. Call this before each step."""
        if self._hold is not None:
            self._hold.check()

    async def members(self) -> list[SetMember]:
        """Return the current state of all servers, queried concurrently.

        A server that was silent last time gets less time: a promotion calls this several times, and the writers of the
        whole database wait for each call.
        """
        return list(await asyncio.gather(*map(self.member, self.database.places)))

    async def beside_master(self, region: str) -> tuple[SetMember, SetMember]:
        """Return the state of a server and of the master. The master is queried afterwards, so it has everything that a
        follower was found to have, and what it lacks it never had."""
        member = await self.member(region)
        return member, await self.member(self.database.master_region)

    async def member(self, region: str, seconds: float | None = None) -> SetMember:
        """Return the current state of a server. ``seconds``: a time limit of its own, also for one that was silent."""
        name, is_master = self.database.places[region].name, region == self.database.master_region
        patience = self._statement_seconds * (_RETRY_SHARE if name in self._silent else 1.0)
        deadline = asyncio.get_running_loop().time() + (seconds or patience)
        try:
            state = await self._state(region, deadline)
        except LockLost:
            raise
        except TaoError as error:
            self._silent.add(name)
            return SetMember(
                name,
                region,
                None,
                error.message,
                is_master=is_master,
                is_refused=isinstance(error, NotListening),
                refuses=error.is_refusal,
                is_silent=is_silence(error),
            )
        self._silent.discard(name)
        return SetMember(name, region, state, is_master=is_master, seen_at=asyncio.get_running_loop().time())

    async def _state(self, region: str, deadline: float) -> MemberState:
        sessions, name = self._sessions, self.database.places[region].name
        is_kept = sessions is not None and sessions.has(name)
        try:
            async with self.session(region, deadline=deadline) as session:
                return await member_state(session, deadline=deadline)
        except ConnectionLost:
            if not is_kept:
                raise
        # A server that has restarted has ended the sessions that were kept, and answers.
        if sessions is not None:
            sessions.drop(name)
        async with self.session(region, deadline=deadline) as session:
            return await member_state(session, deadline=deadline)

    def follows(self, member: SetMember, master_region: str) -> bool:
        """Return whether the member follows the server of that region, at the address that the member's own region
        uses."""
        master = self.database.servers[master_region].seen_from(region_of_place(member.region))
        following = None if member.state is None else member.state.following
        return following is not None and following.source == f"{master.host}:{master.port}"

    def acknowledging(self, members: Iterable[SetMember]) -> list[str]:
        """Return the servers for which commits of the master may wait: they acknowledge, have everything earlier, and
        are in use.

        A marked server may be about to be stopped, and then all writes would stop.
        """
        return [
            member.name
            for member in members
            if member.acknowledges
            and member.is_complete
            and not self.database.places[member.region].down
            and self.follows(member, self.database.master_region)
        ]

    def has_lost_acknowledgements(self, members: Iterable[SetMember]) -> bool:
        """Return whether commits of the master wait although a replica that acknowledges has everything in its binlog.

        That state passes within a round trip, or never. When a connection is lost together with an acknowledgement, the
        replica connects again and asks for what follows the transaction. MariaDB 10.11 goes on to wait, and with
        AFTER_SYNC all other commits wait behind it. This is not looked for on MySQL.
        """
        found = {member.name: member for member in members}
        master = found[self.master.name].state
        return (
            self.database.semi_sync
            and master is not None
            and master.waiting_commits > 0
            and any(
                state.received >= master.executed
                for name in self.acknowledging(found.values())
                if (state := found[name].state) is not None
            )
        )

    def is_followed_by_all(self, members: Iterable[SetMember]) -> bool:
        """Return whether commits of the master wait for a replica, and every other server receives from it.

        Then no promotion has gone beyond the point where it stops the server that it chooses from receiving, and one
        that goes beyond it counts with renewals of the lease until then. So the lease may be renewed by a watcher that
        cannot see who holds the lock.
        """
        found = {member.region: member for member in members}
        master = found[self.database.master_region]
        others = [found[region] for region in self.database.places if region != master.region]
        return (
            master.state is not None
            and master.state.waits_for_replica
            and all(member.receives and self.follows(member, master.region) for member in others)
        )

    async def let_master_go(self) -> bool:
        """Make commits of the master wait for no replica when no replica in use acknowledges. Returns whether that was
        so.

        This runs before the last acknowledging replica is stopped. Otherwise all writes would stop, and with them a
        copy that waits for commits to end. The caller holds the lock of the database, or a watcher undoes this. Raises
        `TaoError`.
        """
        if not self.database.semi_sync or self.acknowledging(await self.members()):
            return False
        async with self.session(self.database.master_region) as session:
            await set_semi_sync(session, waits=False, deadline=self.statement_deadline())
        return True

    async def close(self, region: str) -> None:
        """Revoke the lease and close the server to writes, until it is opened again. Raises `TaoError`."""
        async with self.session(region) as session, self.session(region) as other:
            # Revoking is refused while the server closes itself and commits that wait for a replica hold that up. The
            # fence ends them.
            with suppress(ShardBlocked):
                await revoke_lease(session, deadline=self.statement_deadline())
            await fence(session, other, deadline=self.statement_deadline())

    async def stop_receiving(self, region: str) -> SetMember:
        """Stop a server from receiving more from its master. Returns its state then. Raises `TaoError`."""
        async with self.session(region) as session:
            state = await stop_receiving(session, deadline=self.statement_deadline())
        return SetMember(self.database.places[region].name, region, state)

    async def stop_receiving_again(self, region: str) -> tuple[SetMember, bool]:
        """Stop a server from receiving that was stopped before. Returns its state then, and whether it had begun again,
        as one does that restarts. Raises `TaoError`.

        All steps share a session: a restart between them ends it.
        """
        async with self.session(region) as session:
            before = (await member_state(session, deadline=self.statement_deadline())).following
            state = await stop_receiving(session, deadline=self.statement_deadline())
        has_begun = before is not None and not before.receiving_stopped
        return SetMember(self.database.places[region].name, region, state), has_begun

    async def catch_up(self, target: SetMember, timeout_seconds: float) -> None:
        """Wait until a server has everything of the master, which is closed. Raises `PromotionRefused` when it does not
        follow."""
        master_region = self.database.master_region
        async with self.session(master_region) as session:
            executed = (await member_state(session, deadline=self.statement_deadline())).executed
            position = await executed_position(session, deadline=self.statement_deadline())
        async with self.session(target.region) as session:
            state = await member_state(session, deadline=self.statement_deadline())
            if state.received >= executed:
                return  # after an interrupted run the server may follow no master
            if not self.follows(target, master_region):
                raise PromotionRefused(
                    f"{target.name} does not follow {self.master.name}: tao rejoin {target.name} first"
                )
            await receive_again(session, deadline=self.statement_deadline())
            deadline = asyncio.get_running_loop().time() + timeout_seconds
            await wait_for_position(session, position, deadline=deadline)

    async def until_applied(self, region: str, timeout_seconds: float) -> None:
        """Wait until a follower has applied everything that its master has now. Raises `NotCaughtUp`."""
        async with self.session(self.database.master_region) as session:
            executed = (await member_state(session, deadline=self.statement_deadline())).executed
        async with self.session(region) as session:
            deadline = asyncio.get_running_loop().time() + timeout_seconds
            while not (await member_state(session, deadline=self.statement_deadline())).executed >= executed:
                if asyncio.get_running_loop().time() >= deadline:
                    raise NotCaughtUp("it follows, and has not caught up yet: `tao status` shows how far it is")
                await asyncio.sleep(_PAUSE_SECONDS)

    async def lease_terms(self, region: str) -> LeaseTerms:
        """Return the terms of the server's leases. Raises `TaoError`."""
        async with self.session(region) as session:
            return await lease_terms(session, deadline=self.statement_deadline())

    async def unix_ms(self, region: str) -> int:
        """Return the server's clock (`server_unix_ms`). Raises `TaoError`."""
        async with self.session(region) as session:
            return await server_unix_ms(session, deadline=self.statement_deadline())

    async def forget_master(self, region: str, chosen: SetMember) -> None:
        """Make a server that has stopped receiving follow no master, so that it receives from none when it restarts.

        Raises `PromotionRefused` when it has received meanwhile what the server that was chosen to be master lacks, or
        another `TaoError`. Both steps share a session: it would end with the server.
        """
        name = self.database.places[region].name
        async with self.session(region) as session:
            state = await stop_receiving(session, deadline=self.statement_deadline())
            check_has_all(chosen, SetMember(name, region, state))
            await detach(session, deadline=self.statement_deadline())

    async def follow(self, region: str, master_region: str) -> None:
        """Make a server a replica of another, whatever it was before. Raises `TaoError`."""
        master = self.database.places[master_region].seen_from(region_of_place(region))
        replicator = self._accounts.replicator
        tls = SourceTls.of(replicator.tls)
        source = ReplicationSource(master.host, master.port, replicator.user, replicator.password, tls)
        async with self.session(region) as session:
            if self.database.semi_sync:
                await acknowledge_as_replica(session, deadline=self.statement_deadline())
            await revoke_lease(session, deadline=self.statement_deadline())
            await attach(session, source, deadline=self.statement_deadline())

    async def epoch_as_master(self, region: str, *, taken: bool = False) -> int:
        """Return the highest version epoch in the shard rows that name the server itself as master; 0 for none.
        ``taken``: in those that a leader has taken under that epoch, so that the server was open.

        Other rows say nothing about a promotion of the server: a shard that was moved here has an epoch of its own,
        above the database's. Raises `TaoError`."""
        name = self.database.places[region].name
        async with self.session(region) as session:
            deadline = self.statement_deadline()
            return await highest_epoch(session, self.shards, master=name, taken=taken, deadline=deadline)

    async def was_opened(self, promoted: SetMember) -> bool:
        """Return whether a server that the topology does not know as master is open, or was, under the epoch of its
        own rows: each write needs a leader that has taken the shard. Raises `TaoError`."""
        is_open = promoted.state is not None and not promoted.state.read_only
        return is_open or await self.epoch_as_master(promoted.region, taken=True) > self.database.version_epoch

    async def as_successor(self, member: SetMember) -> SetMember:
        """Return the server, marked as outdated (`SetMember.is_outdated`) if it does not follow the present master and
        its shard rows do not name that one either. A replica that an interrupted promotion detached still has those
        rows. Raises `TaoError`."""
        follows = self.follows(member, self.database.master_region)
        if member.is_master or member.state is None or follows or not self.shards:
            return member
        async with self.session(member.region) as session:
            try:
                of_master = await highest_epoch(
                    session, self.shards, master=self.master.name, deadline=self.statement_deadline()
                )
            except TablesMissing:  # it is seeded, which its state says
                return member
        # One that was promoted, and of which the topology does not know yet, names itself.
        own = await self.epoch_as_master(member.region)
        return replace(member, is_outdated=max(of_master, own) < self.database.version_epoch)

    async def compared(self, members: Sequence[SetMember], region: str) -> list[SetMember]:
        """Return the servers as `overtaking` compares them. The master and the region's server are asked again, after
        the others: either may be open, and then what a replica has received from it meanwhile would seem to be lacking.
        Raises `TaoError`."""
        last = [each.region for each in members if each.state is not None and (each.is_master or each.region == region)]
        again = {each.region: each for each in await asyncio.gather(*map(self.member, last))}
        return await asyncio.gather(*(self.as_successor(again.get(each.region, each)) for each in members))

    def places_of_replicas(self, members: Iterable[SetMember]) -> list[str]:
        """Return the places of the whole servers that follow the master, whether they receive just now or not."""
        master_region = self.database.master_region
        return [each.region for each in members if each.is_complete and self.follows(each, master_region)]

    async def epochs_as_masters(self, members: Iterable[SetMember]) -> tuple[dict[str, int], dict[str, str]]:
        """Return `epoch_as_master` of each server that answers, and the errors of servers without shard tables.

        A server that is being seeded has no tables, for example. Raises `TaoError` for any other failure.
        """
        epochs: dict[str, int] = {}
        without_tables: dict[str, str] = {}
        for member in members:
            if member.state is not None:
                try:
                    epochs[member.name] = await self.epoch_as_master(member.region)
                except TablesMissing as error:
                    without_tables[member.name] = error.message
        return epochs, without_tables


def is_silence(error: TaoError) -> bool:
    """Return whether a server has not answered, so that another question may take as long. Any other failure, as where
    nothing listens or connections are used up, is known at once."""
    return isinstance(error, ConnectionLost | DeadlineExceeded) and not isinstance(error, NotListening)


def find_database(topology: Topology, name: str) -> Database:
    """Return the database of that name. Raises `TopologyError` when there is none."""
    for database in topology.databases:
        if database.name == name:
            return database
    known = [database.name for database in topology.databases]
    raise TopologyError(f"there is no database {name!r}; there are {', '.join(known)}")
