"""Moves a shard to another database while it is read and written: `tao database move`.

The decisions are those of `tao.replication.shard_move_plan`, and the steps that change who may write those of
`tao.replication.shard_move`. Here they are put together with the copy. Until the shard is fenced nobody notices the
move; from the fence to the new topology the writes of the shard wait.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from tao.admin.copy_follower import CopyComparison, CopyFollower, Sessions
from tao.model.errors import RetryableError, TaoError
from tao.model.topology import Database, Topology
from tao.observability.logs import Logger
from tao.replication.accounts import Account
from tao.replication.locks import LockHold
from tao.replication.move_statements import (
    begin_copy,
    binlog_position,
    copied_tables,
    copy_tables,
    data_bytes,
    free_bytes,
    read_shard,
    store_position,
)
from tao.replication.replication_set import ReplicationSet
from tao.replication.row_copy import CopyEnds, CopyPace, copy_rows
from tao.replication.shard_move import MoveSettings, ShardMoves, move_lock
from tao.replication.shard_move_plan import (
    CopyBehind,
    CopySpoiled,
    CopyState,
    MoveAborted,
    MovedElsewhere,
    MoveRefused,
    MoveStep,
    MoveView,
    check_room,
    holder_of,
    master_of,
    next_step,
)
from tao.storage.names import incoming_schema_name, schema_name
from tao.storage.session import DatabaseSession, ServerAccount, open_session
from tao.storage.writes import WRITE_SETUP
from tao.tailer.binlog import BinlogLost
from tao.tailer.reader import BinlogReader
from tao.tailer.settings import ReaderSettings

_UPPER_HALF: Final = 1 << 31
_PAUSE_SECONDS: Final = 0.2
_LAG_CHECK_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.02
_READER: Final = ReaderSettings(max_transaction_bytes=1 << 30)
"""A larger transaction aborts the move: its rows are not kept."""


class MovePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a move would do. ``step``: where it would go on; ``about_bytes``: the source's estimate of its data;
    ``free_bytes``: of the target's fullest disk, None when no server of the target reports it."""

    shard: int
    source: str
    target: str
    step: str
    about_bytes: int
    free_bytes: int | None


class MoveResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a move. ``copy_seconds``, ``copied_bytes``: of the first copy; 0 when an interrupted run had made
    it. ``writes_stood_seconds``: from the fence until a leader had taken the shard at the target; None when this run
    did not fence it, or no leader has taken it yet."""

    shard: int
    source: str
    target: str
    topology_version: int
    copied_bytes: int = 0
    copy_seconds: float = 0.0
    followed_rows: int = 0
    compared_rows: int = 0
    writes_stood_seconds: float | None = None


@dataclass(slots=True)
class _Figures:
    copied_bytes: int = 0
    copy_seconds: float = 0.0
    followed_rows: int = 0
    compared_rows: int = 0
    fenced_at: float | None = None


@dataclass(frozen=True, slots=True)
class MoverAccounts:
    """The accounts of a move beside the administrator's: the leaders', which writes rows of the copy (a server that is
    closed because its master is being replaced refuses it), and the one that reads the binlog of the source."""

    leader: Account
    replicator: Account


OnStep = Callable[[MoveStep], Awaitable[None]]


class ShardMover:
    """Moves shards, one at a time."""

    def __init__(
        self,
        moves: ShardMoves,
        settings: MoveSettings,
        accounts: MoverAccounts,
        log: Logger,
        *,
        on_step: OnStep | None = None,
        on_copied: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``on_step`` is called before each step, and ``on_copied`` with the bytes of rows that are copied."""
        self._moves: Final = moves
        self._settings: Final = settings
        self._accounts: Final = accounts
        self._log: Final = log
        self._on_step: Final = on_step
        self._on_copied: Final = on_copied
        self._figures = _Figures()
        self._hold: LockHold | None = None

    async def load_topology(self) -> Topology:
        """Return the present topology."""
        return await self._moves.store.load()

    async def plan(self, shard: int, target: str) -> MovePlan:
        """Return what `move` would do, without changing anything. Raises `MoveRefused`."""
        view = await self._moves.view(shard, target)
        step, size, free = next_step(view), await self._size_of(view), await self._free_bytes(view.target)
        if step is MoveStep.COPY:
            check_room(shard, size, free)
        return MovePlan(
            shard=shard,
            source=view.source.name,
            target=view.target.name,
            step=step.value,
            about_bytes=size,
            free_bytes=min(free.values(), default=None),
        )

    async def move(self, shard: int, target: str, planned_from: str = "") -> MoveResult:
        """Move a shard, from wherever an interrupted run has left it. ``planned_from``: the database that held it when
        the move was planned; empty: whichever holds it now.

        Raises `MoveRefused` with nothing changed, also as `AlreadyMoved` and `MovedElsewhere`. Raises `MoveAborted` or
        another `TaoError` when a step failed: what was done has been undone then, as far as the servers could be
        reached, and the next run goes on with the copy. Raises `LockTaken` while another run is under way."""
        self._figures = _Figures()
        async with self._moves.move_held(shard) as self._hold:
            if planned_from:
                await self._check_holder(shard, (planned_from, target))
            while True:
                view = await self._moves.view(shard, target)
                step = next_step(view)
                if step is MoveStep.NOTHING:
                    break
                await self._do(step, view)
                if step is MoveStep.CLEAR:
                    break
        return await self._result(view)

    async def _check_holder(self, shard: int, planned: Collection[str]) -> None:
        holder = holder_of(await self.load_topology(), shard).name
        if holder not in planned:
            raise MovedElsewhere(f"{holder} holds shard {shard} since this move was planned: plan it anew")

    async def _do(self, step: MoveStep, view: MoveView) -> None:
        moves = self._moves
        match step:
            case MoveStep.RENAME_BACK | MoveStep.UNFENCE:
                await self._begin(step)
                await moves.undo_switch(view.shard, view.target.name)
            case MoveStep.DROP_COPY:
                await self._begin(step)
                await moves.drop_copy(view)
            case MoveStep.COPY:
                await self._begin(step)
                await self._copy(view)
            case MoveStep.FOLLOW:
                await self._follow_and_switch(view)
            case MoveStep.SWITCH:
                await self._finish_switch(view)
            case MoveStep.CLEAR:
                await self._begin(step)
                await moves.clear(view)
            case _:
                raise AssertionError(f"{step} is a part of {MoveStep.FOLLOW}")

    async def _result(self, view: MoveView) -> MoveResult:
        figures = self._figures
        stood = None if figures.fenced_at is None else await self._until_taken(view, figures.fenced_at)
        return MoveResult(
            shard=view.shard,
            source=view.source.name,
            target=view.target.name,
            topology_version=(await self._moves.store.load()).version,
            copied_bytes=figures.copied_bytes,
            copy_seconds=round(figures.copy_seconds, 3),
            followed_rows=figures.followed_rows,
            compared_rows=figures.compared_rows,
            writes_stood_seconds=stood,
        )

    # ---- the copy ----------------------------------------------------------------------------------------------------

    async def _copy(self, view: MoveView) -> None:
        """Copy the shard in one snapshot, and note the position of that."""
        loop = asyncio.get_running_loop()
        source = self._moves.servers(view.source)
        state = CopyState(
            source=view.source.name,
            source_epoch=view.source.version_epoch,
            target_epoch=view.target.version_epoch,
        )
        check_room(view.shard, await self._size_of(view), await self._free_bytes(view.target))
        async with (
            self._moves.administrating(view.target) as there,
            source.session(view.source.master_region) as here,
        ):
            if here.dialect is not there.dialect:
                raise MoveRefused(
                    f"{view.source.name} runs {here.dialect.value} and {view.target.name} {there.dialect.value}: "
                    "shards move between servers of one kind"
                )
            deadline = loop.time() + self._settings.drop_seconds
            await begin_copy(there, view.shard, state, deadline=deadline)
            await copy_tables(here, there, view.shard, deadline=deadline)
            tables = await copied_tables(here, schema_name(view.shard), deadline=deadline)
        began = loop.time()
        region = await self._region_to_copy(source)
        ends = CopyEnds(
            view.shard,
            source.login(region),
            view.source.places[region].name,
            self._leader_login(view.target),
            master_of(view.target),
        )
        pace = CopyPace(
            self._settings.stall_seconds,
            self._settings.megabytes_per_second * 1_000_000,
            partial(self._wait_for_replicas, source, [0.0]),
        )
        copied_bytes, position = await copy_rows(ends, tables, pace, self._on_copied)
        self._check_hold()  # another run may have begun another copy
        self._figures.copied_bytes = copied_bytes
        self._figures.copy_seconds = loop.time() - began
        async with self._at_target(view.target)() as session:
            await store_position(session, view.shard, position, deadline=self._deadline())

    async def _size_of(self, view: MoveView) -> int:
        """Return about how many bytes the shard takes at the source."""
        async with self._at_master(view.source)() as session:
            return (await data_bytes(session, [view.shard], deadline=self._deadline()))[view.shard]

    async def _free_bytes(self, database: Database) -> dict[str, int]:
        """Return the free bytes of the disks of a database's servers, of those that answer and report them."""
        servers = self._moves.servers(database)
        found: dict[str, int] = {}
        for place, server in database.places.items():
            with suppress(RetryableError):  # a copy that cannot be written fails by itself
                async with servers.session(place) as session:
                    free = await free_bytes(session, deadline=self._deadline())
                if free is not None:
                    found[server.name] = free
        return found

    async def _region_to_copy(self, source: ReplicationSet) -> str:
        """Return the region whose server is read: one with a replica that keeps up, else the master's."""
        for member in await source.members():
            following = None if member.state is None else member.state.following
            if (
                not member.is_master
                and member.is_complete
                and not source.database.places[member.region].down
                and following is not None
                and following.receiving
                and following.applying
                and not following.lag_seconds
            ):
                return member.region
        return source.database.master_region

    async def _wait_for_replicas(self, source: ReplicationSet, checked_at: list[float]) -> None:
        """Return when no replica of the source is far behind. It asks once a second."""
        self._check_hold()
        loop = asyncio.get_running_loop()
        if loop.time() < checked_at[0] + _LAG_CHECK_SECONDS:
            return
        while True:
            lags = [
                member.state.following.lag_seconds or 0
                for member in await source.members()
                if member.state is not None and member.state.following is not None and member.state.following.applying
            ]
            checked_at[0] = loop.time()
            if max(lags, default=0) <= self._settings.max_lag_seconds:
                return
            await asyncio.sleep(_LAG_CHECK_SECONDS)

    # ---- following, and the switch -----------------------------------------------------------------------------------

    async def _follow_and_switch(self, view: MoveView) -> None:
        await self._begin(MoveStep.FOLLOW)
        target = self._at_target(view.target)
        async with target() as session:
            there = await read_shard(session, view.shard, deadline=self._deadline())
            tables = await copied_tables(session, incoming_schema_name(view.shard), deadline=self._deadline())
        assert there.copy is not None, "the plan has seen it"
        follower = CopyFollower(self._binlog_of(view), view.shard, tables, target, there.copy.position, self._settings)
        comparison = CopyComparison(self._at_master(view.source), target, view.shard, tables, follower, self._settings)
        try:
            async with follower.following():
                await self._until_steady(view, follower)
                await self._begin(MoveStep.COMPARE)
                await comparison.compare_all()
                await self._compare_changed(view, comparison)
                await self._until_steady(view, follower, seconds=0.0)
                await self._switch(view, follower, comparison)
        except (CopySpoiled, BinlogLost):
            self._check_hold()  # another run may be using the copy
            async with target() as session:
                await store_position(session, view.shard, "", deadline=self._deadline())
            raise
        except RetryableError:
            # A database that is getting another master refuses the copy: report that.
            self._moves.check_unchanged(await self._moves.store.load(), view)
            raise
        finally:
            self._figures.followed_rows = follower.rows
            self._figures.compared_rows = comparison.compared_rows

    async def _compare_changed(self, view: MoveView, comparison: CopyComparison) -> None:
        """Compare what has changed, until little is left. Raises `MoveAborted` when that never comes."""
        loop, settings = asyncio.get_running_loop(), self._settings
        until = loop.time() + settings.catch_up_seconds
        while await comparison.compare_changed() > settings.fenced_rows:
            self._check_hold()
            self._moves.check_unchanged(await self._moves.store.load(), view)
            if loop.time() >= until:
                raise CopyBehind(
                    f"shard {view.shard} changes faster than its copy is compared: move it when less is written"
                )

    async def _until_steady(self, view: MoveView, follower: CopyFollower, seconds: float | None = None) -> None:
        """Wait until the copy has been close behind for some time. Raises `MoveAborted` when it never is, or when a
        database gets another master."""
        loop, settings = asyncio.get_running_loop(), self._settings
        wanted = settings.steady_seconds if seconds is None else seconds
        until, since = loop.time() + settings.catch_up_seconds, None
        while True:
            self._check_hold()
            self._moves.check_unchanged(await self._moves.store.load(), view)
            asked = loop.time()
            position = await self._position(view.source)
            await follower.until(position, max(1.0, until - asked))
            now = loop.time()
            if now - asked > settings.max_behind_seconds:
                since = None
            else:
                since = asked if since is None else since
                if now - since >= wanted:
                    return
            if now >= until:
                raise CopyBehind(
                    f"the copy of shard {view.shard} does not catch up with its writers: move it when less is written"
                )
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _switch(self, view: MoveView, follower: CopyFollower, comparison: CopyComparison) -> None:
        """Take the steps from the fence to the new topology together, or undo them."""
        moves, limit = self._moves, self._settings.switch_seconds
        async with self._switching(view) as hold:
            now = await moves.view(view.shard, view.target.name)
            moves.check_unchanged(await moves.store.load(), view)
            if next_step(now) is not MoveStep.FOLLOW:
                raise MoveAborted("another process has changed the shard meanwhile: repeat the move")
            await self._begin(MoveStep.FENCE, hold)
            self._figures.fenced_at = asyncio.get_running_loop().time()
            fenced, position = await moves.fence(view, hold)
            await self._begin(MoveStep.CATCH_UP, hold)
            await follower.until(position, limit)
            await comparison.compare_fenced()
            await self._begin(MoveStep.RENAME, hold)
            position = await moves.rename(view, fenced, hold)
            await self._replicas_and_switch(view, position, hold)

    async def _finish_switch(self, view: MoveView) -> None:
        """Switch to a copy that an interrupted run has renamed behind the fence that still stands, or undo it."""
        async with self._switching(view) as hold:
            now = await self._moves.view(view.shard, view.target.name)
            if next_step(now) is MoveStep.SWITCH:
                position = await self._position(view.target)
                await self._replicas_and_switch(now, position, hold)

    async def _replicas_and_switch(self, view: MoveView, position: str, hold: LockHold) -> None:
        """Have the topology name the target once its replicas have the renamed copy, which the position has."""
        await self._begin(MoveStep.REPLICAS, hold)
        await self._moves.wait_for_replicas(view, position, self._settings.switch_seconds)
        await self._begin(MoveStep.SWITCH, hold)
        await self._moves.switch(view, hold)

    @asynccontextmanager
    async def _switching(self, view: MoveView) -> AsyncIterator[LockHold]:
        """Hold both masterships, for a limited time, and undo what was begun when it fails."""
        moves, settings = self._moves, self._settings
        await moves.wait_for_replicas(view, await self._position(view.target), settings.statement_seconds)
        async with moves.exclusively(view.source, view.target) as hold:
            try:
                async with asyncio.timeout(settings.switch_seconds):
                    yield hold
            except (TaoError, TimeoutError) as error:
                await self._undo(view, hold, error)

    async def _position(self, database: Database) -> str:
        async with self._at_master(database)() as session:
            return await binlog_position(session, deadline=self._deadline())

    async def _undo(self, view: MoveView, hold: LockHold, error: TaoError | TimeoutError) -> None:
        """Undo what was done of a switch, unless it was done to its end. Raises why it failed."""
        limit = self._settings.switch_seconds
        failure = error if isinstance(error, TaoError) else MoveAborted(f"the switch took more than {limit:g} s")
        hold.check()  # a process that was paused sees closed sessions: report the cause
        with suppress(TaoError):  # the next run, or a watcher, undoes what cannot be undone now
            if not await self._moves.give_up_switch(view, hold):
                return  # it was made
        raise failure

    async def _until_taken(self, view: MoveView, since: float) -> float | None:
        """Return the seconds from a time until a leader has taken the shard at the target, or None."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._settings.takeover_seconds
        async with self._at_master(view.target)() as session:
            while loop.time() < end:
                there = await read_shard(session, view.shard, deadline=self._deadline())
                if there.row is not None and there.row.owner:
                    return round(loop.time() - since, 3)
                await asyncio.sleep(_POLL_SECONDS)
        return None

    # ---- servers -----------------------------------------------------------------------------------------------------

    def _at_master(self, database: Database) -> Sessions:
        servers = self._moves.servers(database)

        @asynccontextmanager
        async def session() -> AsyncIterator[DatabaseSession]:
            async with servers.session(database.master_region) as opened:
                yield opened

        return session

    def _at_target(self, database: Database) -> Sessions:
        login, name = self._leader_login(database), master_of(database)

        @asynccontextmanager
        async def session() -> AsyncIterator[DatabaseSession]:
            opened = await open_session(login, name, WRITE_SETUP, deadline=self._deadline())
            try:
                yield opened
            finally:
                opened.quit()

        return session

    def _leader_login(self, database: Database) -> ServerAccount:
        return self._moves.servers(database).login(database.master_region, self._accounts.leader)

    def _binlog_of(self, view: MoveView) -> BinlogReader:
        """Return a reader of the shard's rows in the binlog of the source's master."""
        login = self._moves.servers(view.source).login(view.source.master_region, self._accounts.replicator)
        server_id = _UPPER_HALF | zlib.crc32(f"{view.source.name}/{move_lock(view.shard)}".encode())
        return BinlogReader(login, server_id, _READER, self._log, schemas=frozenset({schema_name(view.shard)}))

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._settings.statement_seconds

    def _check_hold(self) -> None:
        """Raise `LockLost` when another process may be moving the shard by now."""
        assert self._hold is not None, "each step is taken under the lock of the move"
        self._hold.check()

    async def _begin(self, step: MoveStep, hold: LockHold | None = None) -> None:
        self._check_hold()
        if hold is not None:
            hold.check()
        if self._on_step is not None:
            await self._on_step(step)
