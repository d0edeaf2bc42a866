"""Variants of `tests.sim.variants`: moves of shards between databases without one of their rules."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final
from unittest.mock import patch

from tao.admin import move_sequence
from tao.admin.copy_follower import CopyComparison
from tao.admin.shard_balance import PlannedMove, plan_balance, plan_split
from tao.admin.shard_contents import ShardContents
from tao.admin.shard_mover import ShardMover
from tao.model.rows import ShardRow
from tao.model.topology import Topology
from tao.replication import move_statements
from tao.replication.locks import LockHold
from tao.replication.replication_set import find_database
from tao.replication.shard_move import ShardMoves
from tao.replication.shard_move_plan import MoveView, fenced_row, master_of
from tests.sim.broken import Variant
from tests.sim.plans import Shape


def fence_left_out() -> AbstractContextManager[object]:
    """Let leaders write to the source of a move while its copy becomes the shard."""

    async def read(moves: ShardMoves, view: MoveView, hold: LockHold) -> tuple[ShardRow, str]:
        source = moves.servers(view.source, hold)
        async with source.session(view.source.master_region) as session:
            there = await move_statements.read_shard(session, view.shard, deadline=source.statement_deadline())
            position = await move_statements.binlog_position(session, deadline=source.statement_deadline())
        assert there.row is not None, "the plan has seen it"
        return fenced_row(there.row, master_of(view.target)), position

    return patch.object(ShardMoves, "fence", read)


def position_read_before_the_fence() -> AbstractContextManager[object]:
    """Read the position to wait for while leaders still write, and fence the shard then."""
    fence = ShardMoves.fence

    async def fence_late(moves: ShardMoves, view: MoveView, hold: LockHold) -> tuple[ShardRow, str]:
        source = moves.servers(view.source, hold)
        async with source.session(view.source.master_region) as session:
            position = await move_statements.binlog_position(session, deadline=source.statement_deadline())
        row, _ = await fence(moves, view, hold)
        return row, position

    return patch.object(ShardMoves, "fence", fence_late)


def switched_before_the_copy_has_all() -> AbstractContextManager[object]:
    """Rename the copy without waiting for what was written before the fence."""
    fence = ShardMoves.fence

    async def fence_alone(moves: ShardMoves, view: MoveView, hold: LockHold) -> tuple[ShardRow, str]:
        row, _ = await fence(moves, view, hold)
        return row, ""

    return patch.object(ShardMoves, "fence", fence_alone)


def followed_from_the_end_of_the_copy() -> AbstractContextManager[object]:
    """Follow the source from where it is when its rows are copied, and not from the snapshot that they are of."""
    copy = ShardMover._copy

    async def copy_and_skip(mover: ShardMover, view: MoveView) -> None:
        await copy(mover, view)
        position = await mover._position(view.source)
        async with mover._at_target(view.target)() as session:
            await move_statements.store_position(session, view.shard, position, deadline=mover._deadline())

    return patch.object(ShardMover, "_copy", copy_and_skip)


def copy_not_compared() -> AbstractContextManager[object]:
    """Take a copy for right."""

    async def compare_nothing(*_: object) -> None:
        """Compare nothing."""

    return patch.object(CopyComparison, "compare_all", compare_nothing)


@contextmanager
def promotion_does_not_abort() -> Iterator[None]:
    """Go on with a move, and with its copy, although a database has another master than when it began."""

    def may_be_continued(view: MoveView) -> bool:
        return view.copy is not None and bool(view.copy.position)

    with (
        patch.object(ShardMoves, "check_unchanged", staticmethod(lambda *_: None)),
        patch.object(MoveView, "is_copy_usable", property(may_be_continued)),
    ):
        yield


def undone_after_the_switch() -> AbstractContextManager[object]:
    """Undo a switch that was made while its answer was waited for."""

    async def let_write(moves: ShardMoves, shard: int, source: str, hold: LockHold) -> bool:
        database = find_database(await moves.store.load(), source)
        servers = moves.servers(database, hold)
        async with servers.session(database.master_region) as session:
            await move_statements.unfence_shard(
                session,
                shard,
                master_of(database),
                database.version_epoch,
                deadline=servers.statement_deadline(),
            )
        return True

    return patch.object(ShardMoves, "let_write", let_write)


def replicas_not_waited_for() -> AbstractContextManager[object]:
    """Switch before the replicas of the target have the renamed copy."""

    async def wait_for_none(*_: object) -> None:
        """Wait for nobody."""

    return patch.object(ShardMoves, "wait_for_replicas", wait_for_none)


def copy_of_an_earlier_fence_switched() -> AbstractContextManager[object]:
    """Switch to a renamed copy although leaders have written at the source since."""
    return patch.object(MoveView, "may_be_switched", property(lambda view: view.is_renamed))


def split_planned_anew() -> AbstractContextManager[object]:
    """Halve what an interrupted split has left, as if nothing had left the source."""

    def plan(
        topology: Topology,
        source: str,
        target: str,
        loads: Mapping[int, float],
        begun: Sequence[PlannedMove],
        left_behind: Collection[tuple[int, str]],
    ) -> list[PlannedMove]:
        elsewhere = {each for each in left_behind if each[1] != source}
        return plan_split(topology, source, target, loads, begun, elsewhere)

    return patch.object(move_sequence, "plan_split", plan)


def balanced_towards_former_copies() -> AbstractContextManager[object]:
    """Plan moves to databases that still keep what the shard was."""
    return patch.object(move_sequence, "plan_balance", lambda loads, _, begun: plan_balance(loads, (), begun))


def begun_moves_forgotten() -> AbstractContextManager[object]:
    """Plan without what an interrupted run has begun."""

    async def find_nothing(*_: object) -> list[PlannedMove]:
        return []

    return patch.object(ShardContents, "find_begun", find_nothing)


_MANY_SHARDS: Final = Shape(leaders=2, shards=8)
_MOVED: Final = {"move to database": 1}

MOVE_VARIANTS: Final[Sequence[Variant]] = (
    Variant("fence left out", fence_left_out, frozenset({"1", "3", "5", "6", "copy"}), _MOVED, first=2),
    Variant(
        "position read before the fence", position_read_before_the_fence, frozenset({"1", "copy"}), _MOVED, first=15
    ),
    Variant(
        "switched before the copy has all", switched_before_the_copy_has_all, frozenset({"1", "copy"}), _MOVED, first=1
    ),
    Variant("followed from the end of the copy", followed_from_the_end_of_the_copy, frozenset({"copy"}), _MOVED),
    Variant("copy not compared", copy_not_compared, frozenset({"1"}), _MOVED),
    Variant(
        "promotion does not abort a move",
        promotion_does_not_abort,
        frozenset({"1", "2", "7", "copy"}),
        {"move to database": 2, "promotion": 2, "master lost": 1},
        first=20,
    ),
    Variant("move undone after the switch", undone_after_the_switch, frozenset({"1", "6", "7"}), _MOVED, first=3),
    Variant("replicas not waited for at the switch", replicas_not_waited_for, frozenset({"1"}), _MOVED, first=1),
    Variant(
        "copy of an earlier fence switched",
        copy_of_an_earlier_fence_switched,
        frozenset({"1"}),
        {"move dies": 1},
        Shape(leaders=2, watchers=1),
        first=1,
    ),
    Variant(
        "interrupted split planned anew",
        split_planned_anew,
        frozenset({"sequence"}),
        {"split database": 1},
        _MANY_SHARDS,
        first=4,
    ),
    Variant(
        "balanced towards former copies",
        balanced_towards_former_copies,
        frozenset({"sequence"}),
        {"split database": 1, "balance databases": 2},
        _MANY_SHARDS,
        first=4,
    ),
    Variant(
        "begun moves of a sequence forgotten",
        begun_moves_forgotten,
        frozenset({"sequence"}),
        {"split database": 1, "balance databases": 1},
        _MANY_SHARDS,
        first=4,
    ),
)
