"""Plans of moves: half of a database, or as many shards as make all databases equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.admin.shard_balance import PlannedMove, plan_balance, plan_split, why_no_balance, why_no_split
from tao.model.errors import TopologyError
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.topology import edits

_SERVERS = {kind: CacheServer(name=kind, grpc="127.0.0.1:1") for kind in ("leader", "follower")}
REGION = Region(
    name="east",
    leaders=Tier(name="leaders", servers=(_SERVERS["leader"],)),
    followers=(Tier(name="web", servers=(_SERVERS["follower"],)),),
)


def topology(**shards: tuple[int, int]) -> Topology:
    databases = tuple(
        Database(
            name=name, master_region="east", servers={"east": DatabaseServer(name=f"east-{name}")}, shards=(found,)
        )
        for name, found in shards.items()
    )
    count = max(last for _, last in shards.values()) + 1
    return Topology(version=1, shards=count, regions=(REGION,), databases=databases)


def test_a_split_moves_half_of_the_shards_with_about_half_of_the_load() -> None:
    loads = {shard: float(shard + 1) for shard in range(8)}
    moves = plan_split(topology(one=(0, 7), two=(8, 15)), "one", "two", loads)
    assert [move.shard for move in moves] == [0, 2, 4, 6]
    assert sum(move.load for move in moves) == 16.0, "of 36"
    assert {(move.source, move.target) for move in moves} == {("one", "two")}
    for source, target in (("one", "one"), ("one", "three"), ("three", "one")):
        with pytest.raises(TopologyError):
            plan_split(topology(one=(0, 7), two=(8, 15)), source, target, {})


def test_a_split_that_was_interrupted_is_finished_and_not_made_again_with_the_rest() -> None:
    loads = dict.fromkeys(range(8), 1.0)
    before = topology(one=(0, 7), two=(8, 15))
    planned = plan_split(before, "one", "two", loads)
    assert [move.shard for move in planned] == [1, 3, 5, 7]
    # The first one has moved, the second one was switched and not cleared away, the third one has a copy at the target.
    after = edits.move_to_database(edits.move_to_database(before, 1, "two"), 3, "two")
    left_behind = {(1, "one"), (3, "one")}
    begun = [PlannedMove(3, "one", "two"), PlannedMove(5, "one", "two"), PlannedMove(9, "two", "one")]
    moves = plan_split(after, "one", "two", loads, begun, left_behind)
    assert [move.shard for move in moves[:2]] == [3, 5]
    assert len(moves) == 3
    assert moves[2].shard in {0, 2, 4, 6, 7}
    done = edits.move_to_database(edits.move_to_database(after, 5, "two"), moves[2].shard, "two")
    gone = {*left_behind, (5, "one"), (moves[2].shard, "one")}
    assert plan_split(done, "one", "two", loads, (), gone) == []


def test_a_split_moves_no_shard_to_where_its_former_copy_stands() -> None:
    left_behind = {(shard, "two") for shard in (1, 3, 5)}
    moves = plan_split(topology(one=(0, 3), two=(4, 7)), "one", "two", {}, (), left_behind)
    assert [move.shard for move in moves] == [0, 2]
    assert (
        plan_split(topology(one=(0, 3), two=(4, 7)), "one", "two", {}, (), {(each, "two") for each in range(4)}) == []
    )


def test_a_split_leaves_out_what_is_on_its_way_to_a_third_database() -> None:
    begun = [PlannedMove(shard, "one", "three") for shard in (1, 3)]
    moves = plan_split(topology(one=(0, 3), two=(4, 7), three=(8, 9)), "one", "two", {}, begun)
    assert [move.shard for move in moves] == [0, 2]


@given(st.integers(0, 40), st.data())
def test_a_split_is_finished_with_half_wherever_it_was_interrupted(count: int, data: st.DataObject) -> None:
    now = topology(one=(0, count), two=(count + 1, count + 2))
    shards, gone = count + 1, set[tuple[int, str]]()
    moves = plan_split(now, "one", "two", {})
    while moves:
        done = data.draw(st.integers(1, len(moves)))
        for move in moves[:done]:
            now = edits.move_to_database(now, move.shard, "two")
            gone.add((move.shard, "one"))
        begun = [moves[done]._replace(load=0.0)] if done < len(moves) and data.draw(st.booleans()) else []
        moves = plan_split(now, "one", "two", {}, begun, gone)
        assert not begun or moves[0] == begun[0]
    assert len(gone) == shards // 2


def test_what_was_begun_comes_first_in_a_balance_and_does_not_move_twice() -> None:
    loads = {"one": {0: 4.0, 1: 4.0, 2: 4.0, 3: 4.0}, "two": {4: 4.0}}
    assert plan_balance(loads) == [PlannedMove(0, "one", "two", 4.0)]
    # Shard 4 was switched and not cleared away: it is only that.
    begun = [PlannedMove(2, "one", "two"), PlannedMove(4, "one", "two")]
    assert plan_balance(loads, (), begun) == [PlannedMove(2, "one", "two", 4.0), PlannedMove(4, "one", "two", 0.0)]


def test_a_shard_with_two_moves_begun_is_planned_once_and_the_one_that_was_switched_comes_first() -> None:
    loads = {"one": {0: 4.0, 1: 4.0}, "two": {}, "three": {2: 8.0}}
    begun = [PlannedMove(0, "one", "two"), PlannedMove(0, "one", "three")]
    assert plan_balance(loads, (), begun) == [PlannedMove(0, "one", "two", 4.0)]
    # Shard 2 is at the third database already, where only something is left to clear away.
    begun = [PlannedMove(2, "three", "two"), PlannedMove(2, "one", "three")]
    moves = plan_balance(loads, (), begun)
    assert moves[0] == PlannedMove(2, "one", "three", 0.0)
    assert [move.shard for move in moves].count(2) == 1


def test_a_split_without_moves_says_why() -> None:
    one_shard = topology(one=(0, 0), two=(1, 4))
    assert why_no_split(one_shard, "one", "two") == "one has one shard, of which there is no half"
    done = edits.move_to_database(edits.move_to_database(topology(one=(0, 3), two=(4, 7)), 1, "two"), 3, "two")
    gone = {(1, "one"), (3, "one")}
    assert plan_split(done, "one", "two", {}, (), gone) == []
    assert why_no_split(done, "one", "two", (), gone) == (
        "2 of the 4 shards that one had are at two already; to split what is left, first drop what they have left "
        "behind (`tao database drop-moved`)"
    )
    before, begun = topology(one=(0, 3), two=(4, 7), three=(8, 9)), [PlannedMove(0, "one", "three")]
    kept = {(shard, "two") for shard in range(1, 4)}
    assert plan_split(before, "one", "two", {}, begun, kept) == []
    assert why_no_split(before, "one", "two", begun, kept) == (
        "none of the shards of one can move: two keeps former copies of 3 of them: `tao database drop-moved` drops "
        "these; moves of 1 of them were begun and are not finished: finish these (`tao database move SHARD --to "
        "DATABASE`), or undo them (--undo)"
    )
    arrived = [PlannedMove(0, "three", "one"), PlannedMove(1, "three", "one")]
    assert plan_split(topology(one=(0, 1), two=(2, 3), three=(4, 5)), "one", "two", {}, arrived) == []
    assert why_no_split(topology(one=(0, 1), two=(2, 3), three=(4, 5)), "one", "two", arrived).startswith(
        "none of the shards of one can move: moves of 2 of them were begun and are not finished"
    )


@pytest.mark.parametrize(
    ("loads", "left_behind", "why"),
    [
        ({"one": {0: 1.0}}, (), "only one database"),
        ({"one": {0: 0.0}, "two": {}}, (), "no load"),
        ({"one": {0: 5.0, 1: 5.0}, "two": {2: 10.1}}, (), "equal to within 1.0% of their mean, and 5% is enough"),
        ({"one": {0: 100.0}, "two": {}}, (), "one has more than two, but no shard so small"),
        ({"one": {0: 9.0, 1: 9.0}, "two": {}}, {(0, "two"), (1, "two")}, "two, which keeps former copies"),
    ],
)
def test_a_balance_without_moves_says_why(
    loads: dict[str, dict[int, float]], left_behind: set[tuple[int, str]], why: str
) -> None:
    assert plan_balance(loads, left_behind) == []
    assert why in why_no_balance(loads, left_behind)


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


@given(st.data())
def test_no_shard_is_planned_twice_whatever_was_begun(data: st.DataObject) -> None:
    names = ("one", "two", "three")
    loads: dict[str, dict[int, float]] = {name: {} for name in names}
    for shard in range(data.draw(st.integers(1, 8))):
        loads[data.draw(st.sampled_from(names))][shard] = float(data.draw(st.integers(0, 100)))
    one_move = st.builds(PlannedMove, st.integers(0, 7), st.sampled_from(names), st.sampled_from(names))
    begun = data.draw(st.lists(one_move.filter(lambda move: move.source != move.target), max_size=6))
    planned = [move.shard for move in plan_balance(loads, (), begun)]
    assert len(set(planned)) == len(planned)
    assert {move.shard for move in begun} <= set(planned)


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
