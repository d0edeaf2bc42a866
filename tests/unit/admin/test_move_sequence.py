"""Moves that were planned are made one after the other, and repeated while that can help."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import pytest

from tao.admin import move_sequence
from tao.admin.move_sequence import run_moves
from tao.admin.shard_balance import PlannedMove
from tao.admin.shard_mover import MoveResult, ShardMover
from tao.model.errors import RetryableError, TaoError, Unavailable
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.replication.locks import LockTaken
from tao.replication.shard_move_plan import AlreadyMoved, CopyBehind, MoveAborted, MovedElsewhere, MoveRefused

MOVES = [PlannedMove(shard, "one", "two", 1.0) for shard in (1, 2)]
ATTEMPTS = 7
_SERVERS = {kind: CacheServer(name=kind, grpc="127.0.0.1:1") for kind in ("leader", "follower")}
REGION = Region(
    name="east",
    leaders=Tier(name="leaders", servers=(_SERVERS["leader"],)),
    followers=(Tier(name="web", servers=(_SERVERS["follower"],)),),
)


class Mover:
    """Moves shards, each after the errors that it is to meet."""

    def __init__(self, **errors: list[TaoError]) -> None:
        """``errors``: of ``shard_1`` and so on."""
        self._errors = errors
        self.attempts: list[int] = []
        databases = tuple(
            Database(
                name=name, master_region="east", servers={"east": DatabaseServer(name=f"east-{name}")}, shards=shards
            )
            for name, shards in (("one", ((0, 3),)), ("two", ((4, 5),)), ("three", ((6, 7),)))
        )
        self.topology = Topology(version=1, shards=8, regions=(REGION,), databases=databases)

    async def load_topology(self) -> Topology:
        return self.topology

    async def move(self, shard: int, target: str, planned_from: str) -> MoveResult:
        assert planned_from == "one"
        self.attempts.append(shard)
        left = self._errors.get(f"shard_{shard}", [])
        if left:
            raise left.pop(0)
        return MoveResult(shard=shard, source="one", target=target, topology_version=1)


async def done(mover: Mover, moves: Sequence[PlannedMove] = MOVES) -> list[int]:
    """Make moves, and return the shards of whose move there was a result, even if a later one has failed."""
    moved: list[int] = []
    with suppress(TaoError):
        async for result in run_moves(cast("ShardMover", mover), moves):
            moved += [result.shard]
    return moved


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move_sequence, "_PAUSES_SECONDS", (0.0,) * (ATTEMPTS - 1))


@pytest.mark.parametrize("error", [Unavailable("no answer"), MoveAborted("a new master"), LockTaken("renewed")])
async def test_a_move_is_repeated_after_an_error_that_may_pass(error: TaoError) -> None:
    passing = Mover(shard_1=[error] * (ATTEMPTS - 1))
    assert await done(passing) == [1, 2]
    assert passing.attempts == [1] * ATTEMPTS + [2]
    lasting = Mover(shard_2=[error] * 99)
    assert await done(lasting) == [1]
    assert lasting.attempts == [1] + [2] * ATTEMPTS


@pytest.mark.parametrize("error", [MoveRefused("one and the same"), CopyBehind("too many writes")])
async def test_a_sequence_ends_at_a_move_that_no_repetition_can_mend(error: TaoError) -> None:
    mover = Mover(shard_1=[error])
    assert await done(mover) == []
    assert mover.attempts == [1]


async def test_a_move_that_was_made_before_its_last_answer_was_lost_has_succeeded() -> None:
    mover = Mover(shard_1=[Unavailable("no answer"), AlreadyMoved("two holds shard 1 already")])
    assert await done(mover) == [1, 2]


async def test_why_an_attempt_has_failed_is_shown_at_once() -> None:
    shown: list[tuple[str, float]] = []
    mover = Mover(shard_1=[Unavailable("no answer")])

    def show(error: RetryableError, pause_seconds: float) -> None:
        shown.append((error.reason, pause_seconds))

    assert [result.shard async for result in run_moves(cast("ShardMover", mover), MOVES, show)] == [1, 2]
    assert shown == [("UNAVAILABLE", 0.0)]


@pytest.mark.parametrize("error", [AlreadyMoved("two holds it"), MovedElsewhere("three holds it")])
async def test_a_shard_that_another_process_has_moved_since_the_plan_ends_no_sequence(error: TaoError) -> None:
    mover = Mover(shard_1=[error])
    assert await done(mover) == [2]
    assert mover.attempts == [1, 2]


async def test_a_shard_that_another_process_moves_elsewhere_between_two_attempts_stays_there() -> None:
    mover = Mover(shard_1=[LockTaken("it is moving"), MovedElsewhere("three holds it")])
    assert await done(mover) == [2]
    assert mover.attempts == [1, 1, 2]
