"""Plans of moves: half of a database, or as many shards as make all databases equal."""

from __future__ import annotations

from contextlib import suppress
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.admin import shard_balance
from tao.admin.shard_balance import PlannedMove, plan_balance, plan_split, run_moves
from tao.admin.shard_mover import MoveResult, ShardMover
from tao.model.errors import TaoError, TopologyError, Unavailable
from tao.model.topology import Database, DatabaseServer, Topology
from tao.replication.locks import LockTaken
from tao.replication.shard_move_plan import MoveRefused


def topology(**shards: tuple[int, int]) -> Topology:
    databases = tuple(
        Database(
            name=name, master_region="east", servers={"east": DatabaseServer(name=f"east-{name}")}, shards=(found,)
        )
        for name, found in shards.items()
    )
    return Topology(version=1, shards=16, regions=(), databases=databases)


def test_a_split_moves_half_of_the_shards_with_about_half_of_the_load() -> None:
    loads = {shard: float(shard + 1) for shard in range(8)}
    moves = plan_split(topology(one=(0, 7), two=(8, 15)), "one", "two", loads)
    assert [move.shard for move in moves] == [0, 2, 4, 6]
    assert sum(move.load for move in moves) == 16.0, "of 36"
    assert {(move.source, move.target) for move in moves} == {("one", "two")}
    for source, target in (("one", "one"), ("one", "three"), ("three", "one")):
        with pytest.raises(TopologyError):
            plan_split(topology(one=(0, 7), two=(8, 15)), source, target, {})


def test_equal_databases_and_single_shards_stay_where_they_are() -> None:
    assert plan_balance({"one": {0: 5.0, 1: 5.0}, "two": {2: 10.0}}) == []
    assert plan_balance({"one": {0: 100.0}, "two": {}}) == [], "it would be the same the other way"
    assert plan_balance({"one": {0: 0.0, 1: 0.0}, "two": {}}) == []
    assert plan_balance({}) == []


def test_a_shard_does_not_move_to_where_its_former_copy_stands() -> None:
    loads = {"one": {0: 10.0, 1: 9.0, 2: 1.0}, "two": {}}
    assert [move.shard for move in plan_balance(loads)] == [0]
    assert [move.shard for move in plan_balance(loads, {(0, "two"), (1, "one")})] == [1, 2]
    assert plan_balance(loads, {(shard, "two") for shard in range(3)}) == []


@given(st.lists(st.lists(st.integers(1, 1_000), max_size=12), min_size=2, max_size=4))
def test_balancing_moves_each_shard_once_and_narrows_the_gap(sizes: list[list[int]]) -> None:
    numbers = iter(range(1_000))
    loads = {f"db-{at}": {next(numbers): float(size) for size in each} for at, each in enumerate(sizes)}
    totals = {name: sum(shards.values()) for name, shards in loads.items()}
    before = max(totals.values()) - min(totals.values())
    moves = plan_balance(loads)
    for move in moves:
        assert loads[move.source][move.shard] == move.load
        totals[move.source] -= move.load
        totals[move.target] += move.load
    assert len({move.shard for move in moves}) == len(moves)
    assert max(totals.values()) - min(totals.values()) <= before


class Mover:
    """Moves shards, each after the errors that it is to meet."""

    def __init__(self, **errors: list[TaoError]) -> None:
        """``errors``: of ``shard_1`` and so on."""
        self._errors = errors
        self.attempts: list[int] = []

    async def move(self, shard: int, target: str) -> MoveResult:
        self.attempts.append(shard)
        left = self._errors.get(f"shard_{shard}", [])
        if left:
            raise left.pop(0)
        return MoveResult(shard=shard, source="one", target=target, topology_version=1)


async def done(mover: Mover) -> list[int]:
    """Move shards 1 and 2, and return those of whose move there was a result, even if a later one has failed."""
    moves = [PlannedMove(shard, "one", "two", 1.0) for shard in (1, 2)]
    moved: list[int] = []
    with suppress(TaoError):
        async for result in run_moves(cast("ShardMover", mover), moves):
            moved += [result.shard]
    return moved


async def test_a_move_of_a_sequence_is_tried_again_after_an_error_that_may_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_balance, "_PAUSE_SECONDS", 0.0)
    passing = Mover(shard_1=[Unavailable("no answer")] * 4)
    assert await done(passing) == [1, 2]
    assert passing.attempts == [1] * 5 + [2]
    lasting = Mover(shard_2=[Unavailable("no answer")] * 9)
    assert await done(lasting) == [1]
    assert lasting.attempts == [1] + [2] * 5


@pytest.mark.parametrize("error", [LockTaken("another process moves it"), MoveRefused("one and the same")])
async def test_a_sequence_ends_at_a_move_that_is_refused_or_that_another_process_makes(error: TaoError) -> None:
    mover = Mover(shard_1=[error])
    assert await done(mover) == []
    assert mover.attempts == [1]
