"""Comparison of the properties that a workload asks for with those that were generated.

The properties are counted from requests as they were sent and answers as they came, so the comparison covers the
generator, the graph as it was loaded, and the server.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from loadtest.published.graph_plan import GraphPlan
from loadtest.published.requests import LARGE_LIMIT, WorkloadRequest
from loadtest.published.workload import LONG_LIST, READS, Kind, Workload


class RequestTally(msgspec.Struct, kw_only=True):
    """Counts of requests and of what they found. The counts of several processes add up."""

    requests: dict[Kind, int] = {}
    found: dict[Kind, int] = {}
    """Requests of reads whose answer was not empty."""
    limit_one: int = 0
    """Ranges that wanted one edge."""
    large_limits: int = 0
    long_counts: int = 0
    """Counts whose answer was `LONG_LIST` or more."""
    one_edge: int = 0
    """Ranges with a limit above one whose answer was one edge."""
    full: int = 0
    """Ranges with a limit above one whose answer was as long as the limit."""
    roomy: int = 0
    """Ranges with a limit above one whose answer was not empty."""

    def note(self, request: WorkloadRequest, found: int) -> None:
        """Count a request; ``found`` is the number of edges or objects of its answer, or the count."""
        kind = request.kind
        self.requests[kind] = self.requests.get(kind, 0) + 1
        if found:
            self.found[kind] = self.found.get(kind, 0) + 1
        if kind is Kind.ASSOC_COUNT:
            self.long_counts += found >= LONG_LIST
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
        """The number of all requests."""
        return sum(self.requests.values())

    def add(self, other: RequestTally) -> None:
        """Add the counts of another process."""
        self.requests = dict(Counter(self.requests) + Counter(other.requests))
        self.found = dict(Counter(self.found) + Counter(other.found))
        self.limit_one += other.limit_one
        self.large_limits += other.large_limits
        self.long_counts += other.long_counts
        self.one_edge += other.one_edge
        self.full += other.full
        self.roomy += other.roomy


@dataclass(frozen=True, slots=True)
class Line:
    """One property: the value ``asked`` for, and the value ``generated`` in a sample of so many requests, or nodes and
    edges of the graph. ``generated`` is None when the run has nothing to measure it by."""

    name: str
    asked: float
    generated: float | None
    sample: int

    def within(self, relative: float, deviations: float = 4.0) -> bool:
        """Tell whether the generated value is close to the one asked for.

        The tolerance is a ``relative`` part of the value and, for chance, so many standard ``deviations`` of a share in
        a sample of that size.
        """
        if self.generated is None:
            return False
        share = min(1.0, self.asked)
        chance = deviations * math.sqrt(share * (1 - share) / self.sample)
        return abs(self.generated - self.asked) <= relative * self.asked + chance


def compare(workload: Workload, plan: GraphPlan, tally: RequestTally) -> Iterator[Line]:
    """Yield the workload's shares beside those of the run, then the published properties of the graph beside the
    generated ones."""
    total = tally.answered
    for kind, share in workload.mix.items():
        yield _share(f"share of {kind}", share, tally.requests.get(kind, 0), total)
    for kind, share in workload.non_empty.items():
        if workload.mix.get(kind):
            found, asked = tally.found.get(kind, 0), tally.requests.get(kind, 0)
            yield _share(f"{kind} that finds something", share, found, asked)
    if workload.long_counts:
        counted = tally.found.get(Kind.ASSOC_COUNT, 0)
        yield _share(
            f"counts of {LONG_LIST:,} and more, of those above 0", workload.long_counts, tally.long_counts, counted
        )
    ranges = tally.requests.get(Kind.ASSOC_RANGE, 0)
    if workload.limit_one and ranges:
        yield _share("assoc_range with limit 1", workload.limit_one, tally.limit_one, ranges)
        rest = ranges - tally.limit_one
        yield _share("of the others, limit 1,000 and above", workload.large_limit, tally.large_limits, rest)
    if workload.non_empty.get(Kind.ASSOC_RANGE):
        single = workload.degrees.single_share
        yield _share("ranges that find one edge, of those with room", single, tally.one_edge, tally.roomy)
    yield from _of_the_graph(workload, plan)


def _of_the_graph(workload: Workload, plan: GraphPlan) -> Iterator[Line]:
    nodes = plan.nodes
    lengths = [plan.degree(node) for node in range(nodes)]
    none = workload.degrees.points[0][1]
    non_empty = [length for length in lengths if length]
    yield _share("nodes without edges", none, nodes - len(non_empty), nodes)
    yield _share("lists of one edge", workload.degrees.single_share, lengths.count(1), len(non_empty))
    yield Line("edges a node", workload.degrees.mean(), sum(lengths) / nodes, nodes)
    sizes = [plan.object_size(node) for node in range(nodes)]
    yield Line("bytes of an object", workload.object_bytes.mean, sum(sizes) / nodes, nodes)
    edges = list(plan.edge_sizes())
    with_data = [size for size in edges if size]
    yield _share("edges without data", workload.link_without_data, len(edges) - len(with_data), len(edges))
    if with_data:
        mean = sum(with_data) / len(with_data)
        yield Line("bytes of an edge's data", workload.link_bytes.mean, mean, len(with_data))


def _share(name: str, asked: float, part: int, whole: int) -> Line:
    return Line(name, asked, part / whole if whole else None, whole)


def reads_of(tally: RequestTally) -> int:
    """Count the requests that read."""
    return sum(tally.requests.get(kind, 0) for kind in READS)


class FirstReads:
    """The objects, lists and counts that a process has asked for; this process brings nothing else into any cache."""

    def __init__(self, *, counts_apart: bool = False) -> None:
        """With ``counts_apart``, a cache that has a list still has to ask for its count. Without it, a list brings its
        count along, but a count does not bring its list."""
        self._counts_apart = counts_apart
        self._objects = set[int]()
        self._lists = set[int]()
        self._counts = set[int]()
        self.first_time = 0

    def note(self, request: WorkloadRequest) -> None:
        """Count the request when it is the first for its object, list or count."""
        node = request.node
        match request.kind:
            case Kind.OBJ_GET:
                known = self._objects
            case Kind.ASSOC_COUNT:
                known = self._counts
            case Kind.ASSOC_RANGE | Kind.ASSOC_TIME_RANGE | Kind.ASSOC_GET:
                if not self._counts_apart:
                    self._counts.add(node)
                known = self._lists
            case Kind.READ_MANY:
                self.first_time += len({*request.others} - self._objects)
                self._objects.update(request.others)
                return
            case _:
                return
        if node not in known:
            known.add(node)
            self.first_time += 1
