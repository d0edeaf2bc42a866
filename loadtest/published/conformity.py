"""What a workload asked for and what was generated, side by side.

Counted from requests as they were sent and answers as they came, so that the comparison covers the generator, the graph
as it was loaded, and the server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from loadtest.published.graph_plan import GraphPlan
from loadtest.published.requests import LARGE_LIMIT, Request
from loadtest.published.workload import READS, Kind, Workload


class Tally(msgspec.Struct, kw_only=True):
    """Requests and what they found. Tallies of several processes add up."""

    requests: dict[Kind, int] = {}
    found: dict[Kind, int] = {}
    """Requests of reads whose answer was not empty."""
    limit_one: int = 0
    """Ranges that wanted one edge."""
    large_limits: int = 0
    one_edge: int = 0
    """Ranges with room for more whose answer was one edge."""
    full: int = 0
    """Ranges with room for more than one that were answered with as many edges as they wanted."""
    roomy: int = 0
    """Ranges with room for more than one that found something."""

    def note(self, request: Request, found: int) -> None:
        """``found``: edges, or the count, or the objects of the answer."""
        kind = request.kind
        self.requests[kind] = self.requests.get(kind, 0) + 1
        if found:
            self.found[kind] = self.found.get(kind, 0) + 1
        if kind is Kind.ASSOC_RANGE:
            if request.limit == 1:
                self.limit_one += 1
            else:
                self.large_limits += request.limit >= LARGE_LIMIT
                self.roomy += found > 0
                self.one_edge += found == 1
                self.full += found == request.limit

    @property
    def answered(self) -> int:
        """Requests in all."""
        return sum(self.requests.values())

    def add(self, other: Tally) -> None:
        """Count another process' as well."""
        self.requests = dict(Counter(self.requests) + Counter(other.requests))
        self.found = dict(Counter(self.found) + Counter(other.found))
        self.limit_one += other.limit_one
        self.large_limits += other.large_limits
        self.one_edge += other.one_edge
        self.full += other.full
        self.roomy += other.roomy


@dataclass(frozen=True, slots=True)
class Line:
    """One property: ``asked`` for, and as ``generated`` (None: too few requests to say)."""

    name: str
    asked: float
    generated: float | None


def compare(workload: Workload, plan: GraphPlan, tally: Tally) -> Iterator[Line]:
    """The workload's shares beside the run's, then the graph's properties beside the published ones."""
    total = tally.answered
    for kind, share in workload.mix.items():
        yield Line(f"share of {kind}", share, _share(tally.requests.get(kind, 0), total))
    for kind, share in workload.non_empty.items():
        if workload.mix.get(kind):
            yield Line(
                f"{kind} that finds something", share, _share(tally.found.get(kind, 0), tally.requests.get(kind, 0))
            )
    ranges = tally.requests.get(Kind.ASSOC_RANGE, 0)
    if workload.limit_one and ranges:
        yield Line("assoc_range with limit 1", workload.limit_one, _share(tally.limit_one, ranges))
        rest = ranges - tally.limit_one
        yield Line("of the others, limit 1,000 and above", workload.large_limit, _share(tally.large_limits, rest))
    if workload.non_empty.get(Kind.ASSOC_RANGE):
        single = workload.degrees.single_share
        yield Line("ranges that find one edge, of those with room", single, _share(tally.one_edge, tally.roomy))
    yield from _of_the_graph(workload, plan)


def _of_the_graph(workload: Workload, plan: GraphPlan) -> Iterator[Line]:
    lengths = [plan.degree(node) for node in range(plan.nodes)]
    none = workload.degrees.points[0][1]
    non_empty = [length for length in lengths if length]
    yield Line("nodes without edges", none, _share(plan.nodes - len(non_empty), plan.nodes))
    yield Line("lists of one edge", workload.degrees.single_share, _share(lengths.count(1), len(non_empty)))
    yield Line("edges a node", workload.degrees.mean(), sum(lengths) / plan.nodes)
    sizes = [plan.object_size(node) for node in range(plan.nodes)]
    yield Line("bytes of an object", workload.object_bytes.mean, sum(sizes) / len(sizes))
    edges = list(plan.edge_sizes())
    with_data = [size for size in edges if size]
    yield Line("edges without data", workload.link_without_data, _share(len(edges) - len(with_data), len(edges)))
    if with_data:
        yield Line("bytes of an edge's data", workload.link_bytes.mean, sum(with_data) / len(with_data))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def reads_of(tally: Tally) -> int:
    """How many of the requests read."""
    return sum(tally.requests.get(kind, 0) for kind in READS)
