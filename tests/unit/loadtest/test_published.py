"""The published workloads: what is generated is what was published."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from random import Random

import pytest

from loadtest.peers.arena import CHECKABLE, planned
from loadtest.published.conformity import RequestTally, compare
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.requests import RequestStream
from loadtest.published.shapes import (
    Concentration,
    CutExponential,
    Degrees,
    Geometric,
    LogNormal,
    Popularity,
    Zipf,
)
from loadtest.published.workload import Kind, Workload, workload_named, workload_names
from tao.model.errors import OperatorError

NODES = 20_000
REQUESTS = 25_000


def generated(workload: Workload, count: int = REQUESTS, seed: int = 1) -> tuple[GraphPlan, RequestTally]:
    plan = GraphPlan(workload, NODES, seed)
    tally = RequestTally()
    for request in islice(RequestStream(workload, plan, seed, 0, shards=50), count):
        found = planned(plan, request) if request.kind in CHECKABLE else 0
        edges = found if isinstance(found, int) else len(found)
        tally.note(request, 1 if request.kind is Kind.OBJ_GET else edges)
    return plan, tally


@pytest.mark.parametrize("name", workload_names())
def test_the_same_seed_gives_the_same_requests_and_another_stream_gives_others(name: str) -> None:
    workload = workload_named(name)
    plan = GraphPlan(workload, 500, 3)
    first, again, other = (
        RequestStream(workload, GraphPlan(workload, 500, 3), 3, stream).take(500) for stream in (0, 0, 1)
    )
    assert first == again
    assert first != other
    assert all(request.node < plan.nodes for request in first)


def test_few_ranges_with_room_are_answered_with_as_many_edges_as_they_wanted() -> None:
    _, tally = generated(workload_named("tao_atc13"))
    assert tally.of_which["full"] <= 0.01 * tally.of_which["roomy"]
    assert tally.reads > 0.99 * tally.answered


def test_a_planned_list_holds_distinct_neighbours_newest_first_and_knows_who_is_not_in_it() -> None:
    plan = GraphPlan(workload_named("linkbench"), 301, 5)
    for node in range(plan.nodes):
        edges = list(plan.list_of(node))
        assert len({edge.other for edge in edges} | {node}) == plan.degree(node) + 1
        assert [edge.time for edge in edges] == sorted({edge.time for edge in edges}, reverse=True)
        strangers = {plan.neighbour(node, index) for index in range(plan.degree(node), plan.nodes - 1)}
        assert not strangers & {edge.other for edge in edges}
    assert plan.edges == sum(plan.degree(node) for node in range(plan.nodes))


def test_the_edges_in_order_of_time_are_those_of_all_lists() -> None:
    plan = GraphPlan(workload_named("linkbench"), 301, 5)
    edges = list(plan.in_order_of_time())
    assert [edge.time for _, edge in edges] == sorted(edge.time for _, edge in edges)
    assert sorted(edges) == sorted((node, edge) for node in range(plan.nodes) for edge in plan.list_of(node))


def test_a_workload_that_skews_shards_sends_most_requests_to_the_busiest() -> None:
    workload = workload_named("taobench_o")
    plan = GraphPlan(workload, NODES, 1)
    nodes = [
        request.node
        for request in RequestStream(workload, plan, 1, 0, shards=50).take(8_000)
        if request.kind is Kind.OBJ_GET
    ]
    shares = [sum(node % 50 == shard for node in nodes) / len(nodes) for shard in range(3)]
    assert shares == pytest.approx([0.578, 0.223, 0.022], abs=0.02)


def test_deletions_take_back_what_the_same_stream_has_added() -> None:
    workload = workload_named("linkbench")
    plan = GraphPlan(workload, 5_000, 1)
    added: set[tuple[int, tuple[int, ...]]] = set()
    taken_back = deleted = 0
    for request in RequestStream(workload, plan, 1, 0).take(20_000):
        key = (request.node, request.others)
        if request.kind is Kind.ASSOC_ADD:
            added.add(key)
        elif request.kind is Kind.ASSOC_DELETE:
            deleted += 1
            taken_back += key in added
    assert deleted > 400
    assert taken_back > 0.95 * deleted


@pytest.mark.parametrize(("mean", "most"), [(97.8, 249), (8, 240), (75, 240)])
def test_cut_sizes_have_their_mean(mean: float, most: int) -> None:
    sizes = list(islice(CutExponential(mean, most).drawer(Random(1)), 20_000))
    assert sum(sizes) / len(sizes) == pytest.approx(mean, rel=0.08)
    assert min(sizes) >= 1
    assert max(sizes) <= most


def test_lognormal_sizes_have_their_mean_and_stay_below_their_bound() -> None:
    sizes = list(islice(LogNormal(673, 1.0, 64 << 10).drawer(Random(1)), 20_000))
    assert sum(sizes) / len(sizes) == pytest.approx(673, rel=0.05)
    assert max(sizes) <= 64 << 10


def test_drawn_degrees_have_the_mean_that_is_computed() -> None:
    degrees = Degrees(((0, 0.4), (1, 0.7), (10, 0.95), (100, 1.0)))
    chance = Random(1)
    drawn = degrees.drawn(50_000, chance)
    assert sum(drawn) / len(drawn) == pytest.approx(degrees.mean(), rel=0.02)
    assert max(drawn) == 100
    assert degrees.with_single_share(0.64).single_share == pytest.approx(0.64)


def test_popularity_follows_its_exponent_and_repeats_what_was_drawn_lately() -> None:
    def draws(**options: float) -> Iterator[int]:
        chooser = Popularity(range(1000), Zipf(1.0), Random(2), **options)
        return (chooser.draw() for _ in range(30_000))

    drawn = list(draws())
    assert drawn.count(0) / drawn.count(9) == pytest.approx(10, rel=0.3)
    assert max(drawn) > 900
    repeating = list(draws(again=0.9))
    assert repeating[1:].count(repeating[0]) > 10


@pytest.mark.parametrize("keys", [2_000, 40_000])
def test_measured_skew_gives_a_share_of_the_keys_what_it_took_however_many_keys_there_are(keys: int) -> None:
    skew = workload_named("tao_atc13").object_skew
    assert isinstance(skew, Concentration)
    cumulated = skew.cumulated(keys)
    for share, asked in skew.points:
        if share >= 0.03:  # below that, of so few keys, none takes more than the hottest did
            assert cumulated[round(keys * share) - 1] == pytest.approx(asked, abs=0.001)
    assert max(after - before for before, after in pairwise([0.0, *cumulated])) == pytest.approx(skew.hottest)
    assert cumulated[-1] == pytest.approx(1)


def test_nothing_to_choose_from_is_refused() -> None:
    with pytest.raises(ValueError, match="more objects"):
        Popularity([], Zipf(1.0), Random(1))
    with pytest.raises(ValueError, match="at least 3 nodes"):
        GraphPlan(workload_named("linkbench"), 2, 1)


def test_small_draws_stay_within_their_bounds() -> None:
    chance = Random(4)
    numbers = [Geometric(mean=1 / 0.382, most=6).draw(chance) for _ in range(2000)]
    assert {Geometric().draw(chance) for _ in range(10)} == {1}
    assert set(numbers) == {1, 2, 3, 4, 5, 6}
    assert numbers.count(1) / len(numbers) == pytest.approx(0.382, abs=0.04)


def test_an_unknown_workload_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(OperatorError, match="tao_atc13, linkbench, taobench_a, taobench_o"):
        workload_named("tao")


def test_tallies_of_several_processes_add_up() -> None:
    workload = workload_named("tao_atc13")
    plan, first = generated(workload, 3_000)
    _, second = generated(workload, 3_000, seed=2)
    both = RequestTally()
    both.add(first)
    both.add(second)
    assert both.answered == 6_000
    assert both.of_which["limit one"] == first.of_which["limit one"] + second.of_which["limit one"] > 0
    assert {line.name for line in compare(workload, plan, both)} == {
        line.name for line in compare(workload, plan, first)
    }
