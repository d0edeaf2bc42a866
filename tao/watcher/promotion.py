"""A promotion, step by step (DESIGN.md §9).

Every step may be repeated, and the process may end after any: who is master is decided by one compare-and-set of the
topology, before which everything can be undone (`restore`) and after which only the new master is still to be opened,
which `restore` does too. The one thing that cannot be undone is a new version epoch in shard rows of a server that is
not master yet: such a promotion is finished by the next run.

Writes fail with `MASTER_READ_ONLY` from the first step to the last; reads go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from typing import Final

import msgspec

from tao.model.errors import OperatorError, TaoError, TopologyConflict
from tao.model.ports import TopologyStore
from tao.storage.lease import EVENT_SECONDS, grant_lease, server_unix_ms
from tao.storage.promotion import (
    apply_received,
    highest_epoch,
    open_to_writes,
    raise_epoch,
)
from tao.storage.replication import detach
from tao.storage.semi_sync import acknowledging_replicas, set_semi_sync
from tao.topology import edits
from tao.watcher.locks import Hold, Locks, held_alone, mastership_lock
from tao.watcher.promotion_plan import (
    Member,
    PromotionRefused,
    Wish,
    check_before,
    check_lost,
    check_rejoin,
    check_seeded,
    choose,
    choose_target,
    unfinished,
)
from tao.watcher.replication_set import ReplicationSet, SetAccounts, find_database
from tao.watcher.settings import PromotionSettings

_PAUSE_SECONDS: Final = 0.05
_MAX_CONFLICTS: Final = 20
"""Other changes of the document that may come between: each takes milliseconds, and nothing is open to writes."""


class Step(StrEnum):
    """In their order."""

    FENCE = "closing the old master to writes"
    CATCH_UP = "waiting until the new master has everything of the old one"
    STOP_RECEIVING = "stopping all replicas from receiving"
    COMPARE = "comparing what the servers have received"
    APPLY = "applying what the new master has received"
    DETACH = "having the new master follow nobody"
    RAISE_EPOCH = "raising the version epoch of its shards"
    TOPOLOGY = "changing the topology"
    REPOINT = "having the others follow the new master"
    SETTLE = "giving the servers time to see it"
    OPEN = "opening the new master to writes"


class Promoted(msgspec.Struct, frozen=True, kw_only=True):
    """What a promotion has done. ``following``: servers that follow the master now; ``left``: name → why it does not.
    ``waits_for_replica``: each commit is with a replica before it is acknowledged. ``without_tables``: name → what a
    server said that has no shard rows, and so no promotion that was interrupted."""

    database: str
    master: str
    region: str
    version_epoch: int
    topology_version: int
    following: list[str]
    left: dict[str, str]
    waits_for_replica: bool
    without_tables: dict[str, str] = {}


OnStep = Callable[[Step], Awaitable[None]]
Renewed = Callable[[], Awaitable[float]]


class Promoter:
    """Changes of mastership, each under the lock of its database."""

    def __init__(
        self,
        store: TopologyStore,
        locks: Locks,
        accounts: SetAccounts,
        settings: PromotionSettings,
        *,
        seen_from: str = "",
        on_step: OnStep | None = None,
    ) -> None:
        """``on_step`` is called before each step, for whoever shows progress."""
        self._store: Final = store
        self._locks: Final = locks
        self._accounts: Final = accounts
        self._settings: Final = settings
        self._seen_from: Final = seen_from
        self._on_step: Final = on_step
        self._silent: Final = set[str]()
        self._holds: Final[dict[str, Hold]] = {}

    async def look(self, database: str) -> list[Member]:
        """The servers of a database as they are. Raises `TopologyError` when there is no such database."""
        return await (await self._set(database)).members()

    async def promote(self, database: str, wish: Wish, *, renewed: Renewed | None = None) -> Promoted:
        """Make another server master; a lost one's place is taken only while it does not answer. ``renewed``: asked
        once no renewal can begin any more, says when, on the loop's clock, the old master's lease was renewed last;
        None: it may be a moment ago.

        Raises `PromotionRefused` with everything as before; another `TaoError` when a step failed: whatever had been
        done then is finished or undone by the next run. `LockTaken` when another run is under way,
        `LockLost` when this process stood still and another one may be at it.
        """
        async with self._alone(database):
            replicas = await self._set(database)
            if wish.region == replicas.database.master_region:
                return await self._restore(replicas)
            if wish.master_lost:
                self._silent.add(replicas.master.name)  # whoever says so has waited for it
            members = await replicas.members()
            check_before(members, wish)
            try:
                chosen = await self._choose(replicas, members, wish, renewed)
                await self._free(replicas, chosen)
                lost = await self._lost_master(replicas, wish)
            except TaoError:
                # Nothing irrevocable has happened: let a master that is in reach, by now perhaps, go on.
                with suppress(PromotionRefused):
                    await self._restore(replicas)
                raise
            return await self._enthrone(replicas, chosen, lost)

    async def restore(self, database: str) -> Promoted:
        """Bring the database into the state that the topology states: finish or undo a promotion that was interrupted,
        open a master that restarted. Raises as `promote`."""
        async with self._alone(database):
            return await self._restore(await self._set(database))

    async def wait_for_replicas(self, database: str) -> None:
        """Have commits of the master wait for a replica again, as the topology says, whatever had them wait for none.
        Raises `OperatorError` when there is none to wait for."""
        async with self._alone(database):
            # By the topology as it is now: whoever takes a replica out of use marks it, and then wants this lock.
            replicas = await self._set(database)
            if not replicas.database.semi_sync or not replicas.acknowledging(await replicas.members()):
                raise OperatorError(f"{replicas.master.name} has no replica in use that acknowledges")
            await self._wait_for_replicas_again(replicas)

    async def rejoin(self, database: str, server: str) -> None:
        """Have a server follow the master of its set again, and wait until it has caught up. Raises `ServerDiverged`
        when it cannot, with nothing changed but that it is closed to writes; `NotCaughtUp` after ``catch_up_seconds``,
        with its mark as it was."""
        async with self._alone(database):
            replicas = await self._set(database)
            region = replicas.region_of(server)
            if region == replicas.database.master_region:
                raise PromotionRefused(f"{server} is the master of {database} by the topology: it follows nobody")
            # Not even closed: on MySQL that would end the loading.
            check_seeded((await replicas.beside_master(region))[0])
            # Closed first, so that what is compared is all that it will ever have had.
            await replicas.close(region)
            member, master = await replicas.beside_master(region)
            check_rejoin(member, master)
            await replicas.follow(region, master.region)
            await replicas.until_applied(region, self._settings.catch_up_seconds)
            if replicas.database.semi_sync:
                # Not before: commits would wait until it has received all that it lacks.
                await self._wait_for_replicas_again(replicas)
            topology = await self._store.load()
            if find_database(topology, database).servers[region].down:
                await self._store.change(topology.version, edits.mark_database_server(topology, server, down=False))

    # ---- until one is chosen: everything here can be undone ----------------------------------------------------------

    async def _choose(
        self, replicas: ReplicationSet, members: list[Member], wish: Wish, renewed: Renewed | None
    ) -> Member:
        master = next(member for member in members if member.is_master)
        others = [member for member in members if not member.is_master and member.is_whole]
        await self._begin(replicas, Step.FENCE)
        if wish.master_lost:
            await self._wait_for_lease(replicas, others, renewed)
        else:
            await replicas.close(master.region)
            await self._begin(replicas, Step.CATCH_UP)
            await replicas.catch_up(choose_target(others, wish), self._settings.catch_up_seconds)
        await self._begin(replicas, Step.STOP_RECEIVING)
        await asyncio.gather(*(replicas.stop_receiving(member.region) for member in others))
        await self._begin(replicas, Step.COMPARE)
        return choose(await replicas.members(), wish)

    async def _wait_for_lease(self, replicas: ReplicationSet, others: list[Member], renewed: Renewed | None) -> None:
        """Until a master that cannot be told has closed itself. All servers of a set keep leases, or none does."""
        lasts = max([await replicas.lease_seconds(member.region) for member in others])
        if lasts:
            loop = asyncio.get_running_loop()
            since = loop.time() if renewed is None else await renewed()
            over = since + lasts + 2 * EVENT_SECONDS
            await asyncio.sleep(max(0.0, over - loop.time()))

    async def _free(self, replicas: ReplicationSet, chosen: Member) -> None:
        """Have it apply all that it has, and follow nobody."""
        async with replicas.session(chosen.region) as session:
            await self._begin(replicas, Step.APPLY)
            deadline = asyncio.get_running_loop().time() + self._settings.catch_up_seconds
            await apply_received(session, deadline=deadline)
            await self._begin(replicas, Step.DETACH)
            await detach(session, deadline=replicas.soon())

    async def _lost_master(self, replicas: ReplicationSet, wish: Wish) -> str:
        """Its name, empty when it answers. Asked before the epoch is raised: from then until the topology is changed
        reads may find nobody who has what they know of, and a master that hangs holds up whoever asks it for seconds.
        Raises `MasterAnswers`."""
        master = next(member for member in await replicas.members() if member.is_master)
        check_lost(master, wish)
        return "" if master.state is not None else master.name

    # ---- from here on it can only be finished ------------------------------------------------------------------------

    async def _enthrone(self, replicas: ReplicationSet, chosen: Member, lost: str) -> Promoted:
        """``lost``: the old master, when it does not answer."""
        region, shards = chosen.region, replicas.shards
        async with replicas.session(region) as session:
            await self._begin(replicas, Step.RAISE_EPOCH)
            # Above the document's, under which the old master may have given out versions nobody here has heard of.
            # Rows above it are of a run that was interrupted, and whoever they were for was never opened.
            known = await highest_epoch(session, shards, deadline=replicas.soon())
            epoch = max(replicas.database.version_epoch + 1, known)
            deadline = asyncio.get_running_loop().time() + self._settings.catch_up_seconds
            await raise_epoch(session, shards, chosen.name, epoch, deadline=deadline)
        await self._begin(replicas, Step.TOPOLOGY)
        await self._change_topology(replicas, region, epoch, lost)
        changed = await self._set(replicas.database.name)
        return await self._open(changed, settle=True)

    async def _change_topology(self, replicas: ReplicationSet, region: str, epoch: int, lost: str) -> None:
        """By compare-and-set, again when something else in the document was changed at the same time: marks are, when
        a region goes."""
        database = replicas.database
        for left in reversed(range(_MAX_CONFLICTS)):
            topology = await self._store.load()
            replicas.check_hold()
            found = find_database(topology, database.name)
            if found.master_region != database.master_region:
                raise OperatorError(f"the master region of {database.name} was changed by somebody else meanwhile")
            try:
                await self._store.change(topology.version, edits.promote(topology, database.name, region, epoch, lost))
                return
            except TopologyConflict:
                if not left:
                    raise

    # ---- the state that the topology states --------------------------------------------------------------------------

    async def _restore(self, replicas: ReplicationSet) -> Promoted:
        members = await replicas.members()
        master = next(member for member in members if member.is_master)
        others = [member for member in members if not member.is_master and member.state is not None]
        epochs, without_tables = await replicas.highest_epochs(members)
        region = unfinished(members, epochs, replicas.database.version_epoch)
        if region is not None:
            if master.state is not None:
                await replicas.close(master.region)
            chosen = next(member for member in others if member.region == region)
            await self._free(replicas, chosen)
            done = await self._enthrone(replicas, chosen, "" if master.state is not None else master.name)
            return msgspec.structs.replace(done, without_tables=without_tables)
        if master.state is None:
            raise PromotionRefused(f"the master {master.name} does not answer: {master.error}")
        if master.state.following is not None:
            raise PromotionRefused(
                f"{master.name} is the master by the topology, and follows {master.state.following.source}: somebody "
                "has made it a replica by hand. Promote the right one by `tao promote`"
            )
        return msgspec.structs.replace(await self._open(replicas, settle=False), without_tables=without_tables)

    async def _open(self, replicas: ReplicationSet, *, settle: bool) -> Promoted:
        """Others follow the master of the topology, and it takes writes."""
        loop = asyncio.get_running_loop()
        opened_at = loop.time() + (self._settings.settle_seconds if settle else 0.0)
        database = replicas.database
        await self._begin(replicas, Step.REPOINT)
        following, left = await self._repoint(replicas)
        await self._begin(replicas, Step.SETTLE)
        await asyncio.sleep(max(0.0, opened_at - loop.time()))
        await self._begin(replicas, Step.OPEN)
        async with replicas.session(database.master_region) as session:
            await raise_epoch(
                session, replicas.shards, replicas.master.name, database.version_epoch, deadline=replicas.soon()
            )
        waits = database.semi_sync and await self._acknowledged_in_use(replicas, following)
        async with replicas.session(database.master_region) as session:
            now = await server_unix_ms(session, deadline=replicas.soon())
            if await replicas.lease_seconds(database.master_region):
                await grant_lease(session, now, deadline=replicas.soon())
            await open_to_writes(session, semi_sync=waits, deadline=replicas.soon())
        version = (await self._store.load()).version
        return Promoted(
            database=database.name,
            master=replicas.master.name,
            region=database.master_region,
            version_epoch=database.version_epoch,
            topology_version=version,
            following=following,
            left=left,
            waits_for_replica=waits,
        )

    async def _repoint(self, replicas: ReplicationSet) -> tuple[list[str], dict[str, str]]:
        members = await replicas.members()
        master = next(member for member in members if member.is_master)
        following: list[str] = []
        left: dict[str, str] = {}
        for member in members:
            if member.is_master:
                continue
            try:
                await self._bring_in_line(replicas, member, master)
                following.append(member.name)
            except TaoError as error:
                left[member.name] = error.message
        return following, left

    async def _bring_in_line(self, replicas: ReplicationSet, member: Member, master: Member) -> None:
        """Have a server that answers follow the master. Raises `ServerDiverged` when it must not."""
        arrives = member.acknowledges if replicas.database.semi_sync else member.receives
        if replicas.follows(member, master.region) and arrives:
            return  # and its connection stays: a master that is open would hold up all commits until it has a new one
        check_seeded(member)
        if member.state is not None and member.state.following is None:
            # Perhaps an old master, open still: closed first, so that what is compared is all it will ever have had.
            await replicas.close(member.region)
        check_rejoin(*await replicas.beside_master(member.region))
        await replicas.follow(member.region, master.region)

    async def _acknowledged_in_use(self, replicas: ReplicationSet, following: list[str]) -> bool:
        """Whether a replica in use acknowledges. One that is marked may be about to be stopped, and every write would
        stand still."""
        marked = {server.name for server in replicas.database.servers.values() if server.down}
        if marked.issuperset(following) or not await self._acknowledged(replicas, True):
            return False
        return not marked or bool(replicas.acknowledging(await replicas.members()))

    async def _acknowledged(self, replicas: ReplicationSet, expected: bool) -> bool:
        """Whether a replica acknowledges what the master tells it, by now or in a moment."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._settings.acknowledging_seconds if expected else 0.0)
        async with replicas.session(replicas.database.master_region) as session:
            while not await acknowledging_replicas(session, deadline=replicas.soon()):
                if loop.time() >= deadline:
                    return False
                await asyncio.sleep(_PAUSE_SECONDS)
        return True

    async def _wait_for_replicas_again(self, replicas: ReplicationSet) -> None:
        """A master that was alone waits for its replicas again, now that one is back."""
        if not await self._acknowledged(replicas, True):
            raise OperatorError(f"{replicas.master.name} has no replica that acknowledges; it waits for none")
        async with replicas.session(replicas.database.master_region) as session:
            await set_semi_sync(session, waits=True, deadline=replicas.soon())

    @asynccontextmanager
    async def _alone(self, database: str) -> AsyncIterator[None]:
        async with held_alone(self._locks, mastership_lock(database), self._settings.lock_seconds) as hold:
            self._holds[database] = hold
            try:
                yield
            except TaoError:
                hold.check()  # a process that stood still finds time-outs and sessions that are closed: that is why
                raise
            finally:
                del self._holds[database]

    async def _set(self, database: str) -> ReplicationSet:
        topology = await self._store.load()
        return ReplicationSet(
            find_database(topology, database),
            self._accounts,
            seen_from=self._seen_from,
            statement_seconds=self._settings.statement_seconds,
            silent=self._silent,
            hold=self._holds.get(database),
        )

    async def _begin(self, replicas: ReplicationSet, step: Step) -> None:
        replicas.check_hold()
        if self._on_step is not None:
            await self._on_step(step)
