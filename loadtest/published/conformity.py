"""Comparison of the properties that a workload asks for with those that were generated.

The properties are counted from requests as they were sent and answers as they came, so the comparison covers the
generator, the graph as it was loaded, and the server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from loadtest.published.graph_plan import GraphPlan
from loadtest.published.requests import LARGE_LIMIT, WorkloadRequest
from loadtest.published.workload import LONG_LIST, READS, Kind, Workload


class RequestTally(msgspec.Struct, kw_only=True):
    """Counts of requests and of what they found. The counts of several processes add up."""

    requests: dict[Kind, int] = msgspec.field(default_factory=Counter)
    found: dict[Kind, int] = msgspec.field(default_factory=Counter)
    """Requests of reads whose answer was not empty."""
    of_which: dict[str, int] = msgspec.field(default_factory=Counter)
    """Counts of `LONG_LIST` or more (``long``); ranges that want one edge (``limit one``). Of the other ranges, those
    with a `LARGE_LIMIT` (``limit large``), and with an answer (``roomy``): of one edge, or as long as the limit
    (``one edge``, ``full``)."""

    def note(self, request: WorkloadRequest, found: int) -> None:
        """Count a request; ``found`` is the number of edges or objects of its answer, or the count."""
        kind, of_which = request.kind, self.of_which
        self.requests[kind] += 1
        if found:
            self.found[kind] += 1
        if kind is Kind.ASSOC_COUNT:
            of_which["long"] += found >= LONG_LIST
        elif kind is Kind.ASSOC_RANGE and request.limit == 1:
            of_which["limit one"] += 1
        elif kind is Kind.ASSOC_RANGE:
            of_which["limit large"] += request.limit >= LARGE_LIMIT
            of_which["roomy"] += found > 0
            of_which["one edge"] += found == 1
            of_which["full"] += found == request.limit

    @property
    def answered(self) -> int:
        """The number of all requests."""
        return sum(self.requests.values())

    @property
    def reads(self) -> int:
        """The number of requests that read."""
        return sum(self.requests.get(kind, 0) for kind in READS)

    def add(self, other: RequestTally) -> None:
        """Add the counts of another process."""
        for mine, more in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True):
            mine.update(more)


@dataclass(frozen=True, slots=True)
class Line:
    """One property: the value ``asked`` for, and the value ``generated`` in a sample of so many requests, or nodes and
    edges of the graph. ``generated`` is None when the run has nothing to measure it by."""

    name: str
    asked: float
    generated: float | None
    sample: int


def compare(workload: Workload, plan: GraphPlan, tally: RequestTally) -> Iterator[Line]:
    """Yield the workload's shares beside those of the run, then the published properties of the graph beside the
    generated ones."""
    requests, found, of_which = (Counter(each) for each in msgspec.structs.astuple(tally))
    single, ranges = workload.degrees.single_share, requests[Kind.ASSOC_RANGE]
    lengths = [plan.degree(node) for node in range(plan.nodes)]
    non_empty = [length for length in lengths if length]
    edges = list(plan.edge_sizes())
    with_data = [size for size in edges if size]
    for kind, share in workload.mix.items():
        yield _share(f"share of {kind}", share, requests[kind], tally.answered)
    for kind, share in workload.non_empty.items():
        if workload.mix.get(kind):
            yield _share(f"{kind} that finds something", share, found[kind], requests[kind])
    if workload.long_counts:
        name = f"counts of {LONG_LIST:,} and more, of those above 0"
        yield _share(name, workload.long_counts, of_which["long"], found[Kind.ASSOC_COUNT])
    if workload.limit_one and ranges:
        yield _share("assoc_range with limit 1", workload.limit_one, of_which["limit one"], ranges)
        name, rest = "of the others, limit 1,000 and above", ranges - of_which["limit one"]
        yield _share(name, workload.large_limit, of_which["limit large"], rest)
    if workload.non_empty.get(Kind.ASSOC_RANGE):
        yield _share("ranges that find one edge, of those with room", single, of_which["one edge"], of_which["roomy"])
    yield _share("nodes without edges", workload.degrees.points[0][1], lengths.count(0), plan.nodes)
    yield _share("lists of one edge", single, lengths.count(1), len(non_empty))
    yield _mean("edges a node", workload.degrees.mean(), lengths)
    yield _mean("bytes of an object", workload.object_bytes.mean, [plan.object_size(n) for n in range(plan.nodes)])
    yield _share("edges without data", workload.link_without_data, edges.count(0), len(edges))
    if with_data:
        yield _mean("bytes of an edge's data", workload.link_bytes.mean, with_data)


def _share(name: str, asked: float, part: int, whole: int) -> Line:
    return Line(name, asked, part / whole if whole else None, whole)


def _mean(name: str, asked: float, values: Sequence[int]) -> Line:
    return Line(name, asked, sum(values) / len(values), len(values))


_PARTS: Final = {
    Kind.OBJ_GET: 0,
    Kind.READ_MANY: 0,
    Kind.ASSOC_COUNT: 1,
    Kind.ASSOC_RANGE: 2,
    Kind.ASSOC_TIME_RANGE: 2,
    Kind.ASSOC_GET: 2,
}
"""What a read asks for of each node: its object, its list's count, or its list."""


class FirstReads:
    """The objects, lists and counts that a process has asked for; this process brings nothing else into any cache."""

    def __init__(self, *, counts_apart: bool = False) -> None:
        """With ``counts_apart``, a cache that has a list still has to ask for its count. Without it, a list brings its
        count along, but a count does not bring its list."""
        self._counts_apart = counts_apart
        self._known: tuple[set[int], set[int], set[int]] = (set(), set(), set())
        self.first_time = 0

    def note(self, request: WorkloadRequest) -> None:
        """Count the objects, lists and counts that the request is the first to ask for."""
        part = _PARTS.get(request.kind)
        if part is None:
            return
        known = self._known[part]
        before = len(known)
        known.update(request.others if request.kind is Kind.READ_MANY else (request.node,))
        self.first_time += len(known) - before
        if part == 2 and not self._counts_apart:
            self._known[1].add(request.node)
