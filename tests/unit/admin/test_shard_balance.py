"""Plans of moves: half of a database, or as many shards as make all databases equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.admin.shard_balance import plan_balance, plan_split
from tao.model.errors import TopologyError
from tao.model.topology import Database, DatabaseServer, Topology


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
