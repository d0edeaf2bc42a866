"""The generated load equals the published one, as closely as a sample of that size can show, also in what no table of
shares shows: skew, repetition and the tail of counts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from loadtest.published.conformity import Line, RequestTally, compare
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.requests import RequestStream, WorkloadRequest
from loadtest.published.shapes import Concentration, Zipf
from loadtest.published.workload import LONG_LIST, Kind, Workload, tao_atc13, workload_named, workload_names

NODES = 20_000
REQUESTS = 100_000
RELATIVE = 0.08
"""What sizes that are drawn once and dealt out again, and lists cut at the graph's size, may be off by themselves."""


def is_close(line: Line, deviations: float = 4.0) -> bool:
    """The tolerance is a `RELATIVE` part of the value and, for chance, so many standard ``deviations`` of a share in a
    sample of that size."""
    if line.generated is None:
        return False
    share = min(1.0, line.asked)
    chance = deviations * math.sqrt(share * (1 - share) / line.sample)
    return abs(line.generated - line.asked) <= RELATIVE * line.asked + chance


def found_by(plan: GraphPlan, request: WorkloadRequest) -> int:
    """Edges, or objects, before anything is written."""
    degree = plan.degree(request.node)
    match request.kind:
        case Kind.OBJ_GET:
            return 1
        case Kind.ASSOC_COUNT:
            return degree
        case Kind.ASSOC_RANGE:
            return min(degree, request.limit)
        case Kind.ASSOC_TIME_RANGE:
            return min(degree, request.limit) if request.low <= plan.newest_time(request.node) else 0
        case Kind.ASSOC_GET:
            neighbours = {plan.neighbour(request.node, index) for index in range(degree)}
            return len(neighbours & {*request.others})
    return 0


def stream(workload: Workload, plan: GraphPlan, count: int = REQUESTS) -> list[WorkloadRequest]:
    return list(islice(RequestStream(workload, plan, 1, 0, shards=50), count))


@pytest.mark.parametrize("name", workload_names())
def test_every_property_is_the_published_one_within_what_chance_does_to_a_sample_of_its_size(name: str) -> None:
    workload = workload_named(name)
    plan, tally = GraphPlan(workload, NODES, 1), RequestTally()
    for request in stream(workload, plan):
        tally.note(request, found_by(plan, request))
    lines = list(compare(workload, plan, tally))
    assert len(lines) > 10
    assert [line for line in lines if not is_close(line)] == []


def test_small_shares_can_fail() -> None:
    assert is_close(Line("", 0.001, 0.0012, 200_000))
    assert not is_close(Line("", 0.001, 0.0020, 200_000))
    assert not is_close(Line("", 0.028, 0.033, 200_000))
    assert not is_close(Line("", 0.1, None, 0))


def test_the_most_asked_for_keys_take_what_they_took_at_taos_followers() -> None:
    workload = tao_atc13()
    once = replace(workload, assumed=replace(workload.assumed, again=0.0))
    plan = GraphPlan(workload, NODES, 1)
    requests = stream(once, plan, 2 * REQUESTS)
    asked = Counter(request.node for request in requests if request.kind is Kind.OBJ_GET)
    of_all = asked.total()
    by_rank = [count for _, count in asked.most_common()]
    assert isinstance(workload.object_skew, Concentration)
    for share, published in workload.object_skew.points:
        if 0.03 <= share <= 0.1:  # above, those are first which a sample happened to ask for
            taken = sum(by_rank[: round(NODES * share)]) / of_all
            assert taken == pytest.approx(published, abs=0.02), share


def test_so_many_requests_repeat_a_recent_key() -> None:
    workload = replace(tao_atc13(), object_skew=Zipf(0.0))
    plan = GraphPlan(workload, NODES, 1)
    nodes = [request.node for request in stream(workload, plan) if request.kind is Kind.OBJ_GET]
    again = workload.assumed.again
    window = round(512 / (1 - again))
    last: dict[int, int] = {}
    repeated = 0
    for turn, node in enumerate(nodes):
        repeated += turn - last.get(node, -NODES) <= window
        last[node] = turn
    # A repetition leads a key on for longer than the window now and then, and chance alone brings one back sometimes.
    assert repeated / len(nodes) == pytest.approx(again + (1 - again) * 512 / NODES, abs=0.03)


@pytest.mark.parametrize("nodes", [6_000, NODES])
def test_one_in_a_hundred_of_the_counts_that_are_not_zero_is_of_one_of_the_longest_lists(nodes: int) -> None:
    workload = tao_atc13()
    plan = GraphPlan(workload, nodes, 1)
    counts = [plan.degree(request.node) for request in stream(workload, plan) if request.kind is Kind.ASSOC_COUNT]
    some = sorted(count for count in counts if count)
    assert 1 - len(some) / len(counts) == pytest.approx(0.45, abs=0.02)
    tail = sum(count >= LONG_LIST for count in some) / len(some)
    assert tail == pytest.approx(workload.long_counts, rel=0.4)
    assert len({count for count in some if count >= LONG_LIST}) > 2
    assert some[len(some) // 2] < 10
