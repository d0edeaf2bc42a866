"""The steps of a move that change who may write: fence, rename, switch, and how each is undone.

`tao.admin.shard_mover` puts them together with the copy; a watcher uses `ShardMoves.fenced` and `ShardMoves.release`
alone, for a move whose process has died. Every step may be repeated.

The masterships of both databases are locked from the fence to the switch, so that no promotion comes in between. That
is short, because the leases of both masters are not renewed meanwhile. A process that hangs loses the locks, and may go
on later. Its sessions at the databases have ended by then. Its change of the topology fails the compare-and-set,
because an undo makes a new version of the topology first. A process that undoes its own move does the same: the change
of the topology that it stopped waiting for may still be made.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from tao.model.errors import DeadlineExceeded, TopologyConflict
from tao.model.ports import TopologyStore
from tao.model.rows import ShardRow
from tao.model.topology import Database, Topology
from tao.replication.locks import MASTERSHIP, LockHold, Locks, LockTaken, hold_exclusively, keep_alive, mastership_lock
from tao.replication.move_statements import (
    binlog_position,
    drop_schema,
    fence_shard,
    fenced_shards,
    mark_moved,
    read_shard,
    rename_back,
    rename_copy,
    shards_held,
    unfence_shard,
)
from tao.replication.replication_set import ReplicationSet, SetAccounts, find_database
from tao.replication.server_statements import wait_for_position
from tao.replication.shard_move_plan import (
    AlreadyMoved,
    MoveAborted,
    MoveRefused,
    MoveStep,
    MoveView,
    arrived_row,
    check_move,
    holder_of,
    master_of,
    not_arrived,
    steps_to_undo,
)
from tao.storage.names import incoming_schema_name
from tao.storage.session import DatabaseSession
from tao.topology import edits
from tao.topology.edits import shards_of

_FREE_LOCK_SECONDS: Final = 1.0
"""Time limit for a lock that was free a moment ago. Renewals of leases hold it for a few round trips."""

_MAX_CONFLICTS: Final = 20
"""Bound on conflicting changes of the topology; each takes milliseconds, and the writers of the shard wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveSettings:
    """Time limits of a move, and its pace."""

    statement_seconds: float = 4.0
    """Time limit for a connection and for each statement of the steps: above the second for which a server waits for a
    lock."""

    lock_seconds: float = 10.0
    """Time limit for the locks of both databases. Renewals of leases hold them for a few round trips each second."""

    switch_seconds: float = 3.0
    """Time limit from the fence to the new topology. Writes of the shard wait meanwhile, and the leases of both
    masters, which last 5 s, are not renewed. A move that takes longer is undone."""

    undo_seconds: float = 1.5
    """Time limit for undoing a move. Both leases are not renewed meanwhile either, so the sum is below 5 s."""

    takeover_seconds: float = 10.0
    """How long the result of a move waits for a leader to take the shard at the target. It says how long writes stood
    still, and nothing else depends on it."""

    drop_seconds: float = 600.0
    """Time limit for making the tables of a copy and for dropping a schema, which delay nobody. A busy MySQL takes half
    a second for a table, and the files of a large table take a while to delete."""

    stall_seconds: float = 300.0
    """How long a statement of the copy may wait for its server: for a lock on the source's tables, or a lost
    network."""

    compare_seconds: float = 60.0
    """Time limit for one statement of a comparison. A list of a million edges is one range."""

    rows_per_range: int = 5_000
    """The most rows that are compared with one statement: some ten milliseconds at the source, if they are small."""

    least_rows_per_range: int = 50
    """The fewest rows that are compared with one statement, however long it takes."""

    range_seconds: float = 0.5
    """Rows that take longer to compare are followed by half as many: what reads much at once holds up others, and large
    rows would take a minute."""

    steady_seconds: float = 10.0
    """How long the copy must have been less than a second behind before the shard is fenced. It has caught up then, and
    applies changes as fast as they come."""

    max_behind_seconds: float = 1.0
    """How far behind the copy may be when the shard is fenced. Writers wait at least as long."""

    catch_up_seconds: float = 3_600.0
    """How long the copy may take to get there. A copy that never does is slower than the writers of the shard."""

    max_changed_rows: int = 1_000_000
    """Rows that may change while the copy is compared, each of which is compared again. They take some 100 bytes each
    in this process; beyond it the move is aborted."""

    fenced_rows: int = 2_000
    """Rows that may be left to compare behind the fence: some 50 milliseconds."""

    max_lag_seconds: int = 5
    """The copy pauses while a replica of the source is further behind than this."""

    megabytes_per_second: float = 0.0
    """The most that is copied in a second, of rows as they are sent. 0: as fast as the servers can."""

    paced_share: float = 0.125
    """The part of the time in which a move with such a bound compares, and rests otherwise. It compares one server
    after the other then."""

    paced_range_seconds: float = 0.01
    """`range_seconds` of such a move: whatever needs a core that the comparison uses waits for a part of that."""

    paced_gather_seconds: float = 0.1
    """How long such a move lets changes of the shard gather before it applies them to the copy, unless it waits for
    them: each commit at the target holds up those of other shards. Below `max_behind_seconds`."""

    @property
    def is_paced(self) -> bool:
        """Whether the move has to leave room for other work, even where it takes longer."""
        return self.megabytes_per_second > 0


class ShardMoves:
    """The steps that change who may write a shard, on the databases of one topology."""

    def __init__(
        self, store: TopologyStore, locks: Locks, accounts: SetAccounts, settings: MoveSettings, *, seen_from: str = ""
    ) -> None:
        """``seen_from``: the region whose addresses are used, or empty for the default ones."""
        self.store: Final = store
        self.locks: Final = locks
        self._accounts: Final = accounts
        self._settings: Final = settings
        self._seen_from: Final = seen_from

    async def view(self, shard: int, target: str) -> MoveView:
        """Return what the topology and the masters show. Raises `MoveRefused` when the shard cannot be moved there, or
        is there and no move has left anything."""
        topology = await self.store.load()
        source, found = check_move(topology, shard, target)
        async with self.servers(found).session(found.master_region) as session:
            there = await read_shard(session, shard, deadline=self._deadline())
        is_switched = source.name == found.name
        if is_switched:
            if there.copy is None or not there.copy.source:
                raise AlreadyMoved(f"{target} holds shard {shard} already")
            source = find_database(topology, there.copy.source)
        async with self.servers(source).session(source.master_region) as session:
            here = await read_shard(session, shard, deadline=self._deadline())
        if not is_switched and there.copy is None and here.row is not None:
            self._check_not_moving(topology, shard, here.row, source)
        return MoveView(
            shard=shard,
            source=source,
            target=found,
            is_switched=is_switched,
            at_source=here.row,
            at_target=there.row,
            copy=there.copy,
            is_marked=here.is_marked,
        )

    def servers(self, database: Database, hold: LockHold | None = None) -> ReplicationSet:
        """Return the servers of a database. ``hold``: of the lock of its mastership, for steps under it."""
        return ReplicationSet(
            database,
            self._accounts,
            seen_from=self._seen_from,
            statement_seconds=self._settings.statement_seconds,
            hold=hold,
        )

    @asynccontextmanager
    async def move_held(self, shard: int) -> AsyncIterator[LockHold]:
        """Lock the move of a shard. Raises `LockTaken` while another process holds that lock."""
        async with AsyncExitStack() as stack:
            try:
                hold = await stack.enter_async_context(self.locks.held(move_lock(shard), exclusive=True))
            except LockTaken as error:
                raise LockTaken(
                    f"another process moves shard {shard}, undoes its move, or drops what it has left behind: wait "
                    f"until that process has ended, and repeat the command ({error.message})"
                ) from error
            yield hold

    @asynccontextmanager
    async def exclusively(self, source: Database, target: Database) -> AsyncIterator[LockHold]:
        """Lock the masterships of both databases. Raises `LockTaken` while one of them is being changed.

        Each is waited for alone first: while one is held and the other waited for, the lease of the first would end."""
        locks = [mastership_lock(name) for name in sorted((source.name, target.name))]
        for lock in locks:
            async with hold_exclusively(self.locks, lock, self._settings.lock_seconds):
                pass
        async with AsyncExitStack() as stack:
            # In one order, or two moves could wait for each other.
            yield _BothHolds(
                [
                    await stack.enter_async_context(hold_exclusively(self.locks, lock, _FREE_LOCK_SECONDS))
                    for lock in locks
                ]
            )

    async def fence(self, view: MoveView, hold: LockHold) -> tuple[ShardRow, str]:
        """Fence the shard at the source. Returns its row, and the position that has everything ever written there.

        The position is read *after* the fence is committed: a transaction that held the row is in it, or never
        happens. Raises `MoveAborted`, and other `TaoError`."""
        source = self.servers(view.source, hold)
        async with source.session(view.source.master_region) as session:
            row = await fence_shard(
                session,
                view.shard,
                master_of(view.source),
                master_of(view.target),
                deadline=source.statement_deadline(),
            )
            return row, await binlog_position(session, deadline=source.statement_deadline())

    async def rename(self, view: MoveView, fenced: ShardRow, hold: LockHold) -> str:
        """Make the copy the shard, under its new row. Returns a position of the target that has this."""
        target = self.servers(view.target, hold)
        async with target.session(view.target.master_region) as session:
            row = arrived_row(fenced, view.target.version_epoch)
            await rename_copy(session, row, deadline=target.statement_deadline())
            return await binlog_position(session, deadline=target.statement_deadline())

    async def wait_for_replicas(self, view: MoveView, position: str, timeout_seconds: float) -> None:
        """Wait until every replica of the target that is in use has a position: readers of its region ask it as soon as
        they learn of the switch, and a standby that is promoted later has to have the renamed copy. Raises
        `DeadlineExceeded`, or `OperatorError` for one that has stopped."""
        target = self.servers(view.target)
        deadline = asyncio.get_running_loop().time() + timeout_seconds

        async def wait(place: str) -> None:
            async with target.session(place) as session:
                await wait_for_position(session, position, deadline=deadline)

        others = [
            place
            for place, server in view.target.places.items()
            if place != view.target.master_region and not server.down
        ]
        await asyncio.gather(*map(wait, others))

    async def switch(self, view: MoveView, hold: LockHold) -> int:
        """Have the topology say that the target holds the shard. Returns the new version.

        Raises `MoveAborted` when a database was changed meanwhile, and other `TaoError`; the outcome may then be
        unknown, and `view` shows it."""

        def moved(topology: Topology) -> Topology:
            self.check_unchanged(topology, view)
            return edits.move_to_database(topology, view.shard, view.target.name)

        changed = await self._change(moved, hold)
        assert changed is not None, "it is checked, and changed"
        return changed.version

    @asynccontextmanager
    async def master_kept(self, database: Database) -> AsyncIterator[LockHold]:
        """Keep the master of a database from being replaced, for statements that change schemas.

        On MariaDB an administrator may write to a server that is closed, and a master that is being replaced would then
        have what its successor lacks. So the mastership is locked, shared as renewals of leases do. Rows are written by
        the account of leaders, which a closed server refuses. The lock is kept alive, since dropping a schema takes a
        while. Raises `LockTaken` while the master is being changed, and `MoveAborted` when it was."""
        async with (
            self.locks.held(mastership_lock(database.name), exclusive=False) as hold,
            keep_alive(hold, MASTERSHIP),
        ):
            if master_of(find_database(await self.store.load(), database.name)) != master_of(database):
                raise MoveAborted(f"{database.name} has got another master: repeat the command")
            yield hold

    @asynccontextmanager
    async def administrating(self, database: Database) -> AsyncIterator[DatabaseSession]:
        """Open an administrator's session at the master, which is kept. Raises as `master_kept`."""
        async with (
            self.master_kept(database) as hold,
            self.servers(database, hold).session(database.master_region) as session,
        ):
            yield session

    async def clear(self, view: MoveView) -> None:
        """Clear away what a finished move has left: note at the source that the shard has left, and drop what remains
        of the incoming copy, by which a next run would see that there is something to do. Raises `MoveRefused` when the
        target has nothing but that copy."""
        await self._check_arrived(view)
        async with self.administrating(view.source) as session:
            await mark_moved(session, view.shard, view.target.name, deadline=self._deadline())
        async with self.administrating(view.target) as session:
            await drop_schema(session, incoming_schema_name(view.shard), deadline=self._deadline())

    # ---- undoing -----------------------------------------------------------------------------------------------------

    async def take_back(self, view: MoveView, hold: LockHold) -> None:
        """Make a renamed copy an incoming one again; nobody uses it before the switch."""
        target = self.servers(view.target, hold)
        async with target.session(view.target.master_region) as session:
            await rename_back(session, view.shard, deadline=target.statement_deadline())

    async def drop_copy(self, view: MoveView) -> None:
        """Drop an incoming copy. Raises `MoveRefused` when it is all that the shard's database has."""
        await self._check_arrived(view)
        deadline = asyncio.get_running_loop().time() + self._settings.drop_seconds
        async with self.administrating(view.target) as session:
            await drop_schema(session, incoming_schema_name(view.shard), deadline=deadline)

    async def _check_arrived(self, view: MoveView) -> None:
        """Raise `MoveRefused` when the topology says that the target holds the shard, and it does not. That would be a
        fault, and what the copy and the source have is all that is left then."""
        if view.shard not in shards_of(find_database(await self.store.load(), view.target.name)):
            return
        async with self.servers(view.target).session(view.target.master_region) as session:
            if (await read_shard(session, view.shard, deadline=self._deadline())).row is None:
                raise not_arrived(view)

    async def undo(self, shard: int, target: str) -> list[MoveStep]:
        """Undo what is there of a move, and return the steps that this took. Raises `MoveRefused` after the switch, and
        `LockTaken` while a move of the shard is under way."""
        async with self.move_held(shard):
            steps = await self.undo_switch(shard, target)
            view = await self.view(shard, target)
            if MoveStep.DROP_COPY in steps_to_undo(view):
                await self.drop_copy(view)
                steps.append(MoveStep.DROP_COPY)
            return steps

    async def undo_switch(self, shard: int, target: str) -> list[MoveStep]:
        """Undo what a run has done from its fence on, for one who holds the lock of the move. The copy stays. Leaders
        write again also when the target does not answer. Raises as `undo`."""
        steps: list[MoveStep] = []
        source, _ = check_move(await self.store.load(), shard, target)
        if source.name != target and await self.release(shard):
            steps.append(MoveStep.UNFENCE)
        view = await self.view(shard, target)
        if MoveStep.RENAME_BACK in steps_to_undo(view):
            async with self.exclusively(view.source, view.target) as hold:
                if not await self.give_up_switch(view, hold):
                    raise MoveRefused(f"{target} holds shard {shard} by now")
            steps.append(MoveStep.RENAME_BACK)
        return steps

    async def give_up_switch(self, view: MoveView, hold: LockHold) -> bool:
        """Undo what was done from the fence on, in the time that the leases of both masters leave. Returns False when
        the topology says by now that the target holds the shard. Raises `DeadlineExceeded`, and other `TaoError`.

        Leaders write first, so that the target does not matter to them; the copy that was renamed is of no use then."""
        try:
            async with asyncio.timeout(self._settings.undo_seconds):
                if not await self.let_write(view.shard, view.source.name, hold):
                    return False
                now = await self.view(view.shard, view.target.name)
                if now.is_renamed:
                    await self.take_back(now, hold)
                return True
        except TimeoutError:
            raise DeadlineExceeded(f"the move of shard {view.shard} could not be undone in time") from None

    async def let_write(self, shard: int, source: str, hold: LockHold) -> bool:
        """Let leaders write to the source again, if it holds the shard. Returns whether it does.

        A new version of the topology comes first: the switch that a process has asked for, or would ask for when it
        goes on, is refused from then on. The target is not asked, since it may be lost."""
        changed = await self._change(
            lambda topology: topology if shard in shards_of(find_database(topology, source)) else None, hold
        )
        if changed is None:
            return False
        database = find_database(changed, source)
        servers = self.servers(database, hold)
        async with servers.session(database.master_region) as session:
            await unfence_shard(
                session, shard, master_of(database), database.version_epoch, deadline=servers.statement_deadline()
            )
        return True

    async def fenced(self, database: Database) -> list[int]:
        """Return the shards of a database that are on their way to another one, so that nobody may write them."""
        return await self._fenced(await self.store.load(), database, sorted(shards_of(database)))

    async def release(self, shard: int) -> bool:
        """Let leaders write to the source again, if the process that fenced the shard is gone, or hangs. Returns
        whether it was fenced.

        A process that is at it holds the masterships of both databases, for some seconds at most, so one of them is
        enough here. This is all that a watcher may do, and all that is urgent; the next run of the move sees to the
        rest. Raises `LockTaken`."""
        source = holder_of(await self.store.load(), shard)
        async with hold_exclusively(self.locks, mastership_lock(source.name), self._settings.lock_seconds) as hold:
            topology = await self.store.load()
            if holder_of(topology, shard).name != source.name:
                return False
            if not await self._fenced(topology, find_database(topology, source.name), [shard]):
                return False
            return await self.let_write(shard, source.name, hold)

    async def _fenced(self, topology: Topology, database: Database, shards: list[int]) -> list[int]:
        others = [each.server.name for each in topology.database_servers if each.database.name != database.name]
        async with self.servers(database).session(database.master_region) as session:
            held, _ = await shards_held(session, deadline=self._deadline())
            there = sorted(set(held) & set(shards))
            return await fenced_shards(session, there, others, deadline=self._deadline())

    async def _change(self, edit: Callable[[Topology], Topology | None], hold: LockHold) -> Topology | None:
        """Change the topology, and retry when something else in it changed at the same time: marks do. Returns None
        when ``edit`` does, which changes nothing."""
        for left in reversed(range(_MAX_CONFLICTS)):
            topology = await self.store.load()
            hold.check()
            edited = edit(topology)
            if edited is None:
                return None
            try:
                return await self.store.change(topology.version, edited)
            except TopologyConflict:
                if not left:
                    raise
        raise AssertionError("the last attempt returns or raises")

    @staticmethod
    def check_unchanged(topology: Topology, view: MoveView) -> None:
        """Raise `MoveAborted` when one of the databases has got another master, or the shard another database."""
        for before in (view.source, view.target):
            now = find_database(topology, before.name)
            if (now.version_epoch, master_of(now)) != (before.version_epoch, master_of(before)):
                raise MoveAborted(
                    f"{master_of(now)} has become the master of {now.name}: repeat the move, which begins anew"
                )
        if view.shard not in shards_of(find_database(topology, view.source.name)):
            raise MoveAborted(f"{view.source.name} does not hold shard {view.shard} any more")

    @staticmethod
    def _check_not_moving(topology: Topology, shard: int, row: ShardRow, source: Database) -> None:
        others = [
            each.name
            for each in topology.databases
            if each.name != source.name and master_of(each) == row.master_server
        ]
        if others:
            raise MoveRefused(
                f"shard {shard} is on its way to {others[0]}: finish that move, or undo it "
                f"(`tao database move {shard} --to {others[0]} --undo`)"
            )

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._settings.statement_seconds


def move_lock(shard: int) -> str:
    """Return the name of the lock under which a shard is moved."""
    return f"move-of-shard-{shard}"


class _BothHolds:
    """Implements `LockHold` for two locks."""

    def __init__(self, holds: list[LockHold]) -> None:
        self._holds: Final = holds

    def is_held(self) -> bool:
        return all(hold.is_held() for hold in self._holds)

    def check(self) -> None:
        for hold in self._holds:
            hold.check()

    async def touch(self) -> None:
        for hold in self._holds:
            await hold.touch()
