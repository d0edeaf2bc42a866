"""Are answers right? Every contestant's are held against the planned graph, ids, times and sizes, and against each
other's, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from loadtest.driving import WrongAnswer
from loadtest.peers.asking import Answer, Peer
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.requests import Request
from loadtest.published.workload import Kind

CHECKABLE: Final = (Kind.OBJ_GET, Kind.ASSOC_COUNT, Kind.ASSOC_RANGE, Kind.ASSOC_TIME_RANGE, Kind.ASSOC_GET)
"""The reads of which `planned` knows the answer."""

Planned = int | list[tuple[int, int, int]]
"""A count, an object's size, or edges: node, time, size."""


def planned(plan: GraphPlan, request: Request) -> Planned:
    """What a read finds in the graph as planned."""
    node = request.node
    edges = [(edge.other, edge.time, edge.size) for edge in plan.list_of(node)]
    match request.kind:
        case Kind.OBJ_GET:
            return plan.object_size(node)
        case Kind.ASSOC_COUNT:
            return plan.degree(node)
        case Kind.ASSOC_RANGE:
            return edges[: request.limit]
        case Kind.ASSOC_TIME_RANGE:
            return [edge for edge in edges if request.low <= edge[1] <= request.high][: request.limit]
        case _:
            return [edge for edge in edges if edge[0] in request.others]


def expected_of(plan: GraphPlan, request: Request) -> int:
    """How much a read finds: edges, the count, or objects."""
    found = planned(plan, request)
    if request.kind is Kind.OBJ_GET:
        return 1
    return found if isinstance(found, int) else len(found)


def as_planned(answer: Answer, nodes: Mapping[int, int]) -> Planned:
    """An answer in the plan's terms. ``nodes``: id → node."""
    if isinstance(answer, bytes):
        return len(answer)
    if isinstance(answer, list):
        return [(nodes[each[0]], each[1], len(each[2])) for each in answer if isinstance(each, tuple)]
    return -1 if answer is None else answer


async def check(
    peers: Mapping[str, Peer],
    plan: GraphPlan,
    ids: Sequence[int],
    requests: Sequence[Request],
    written: AbstractSet[int] = frozenset(),
) -> int:
    """Ask everybody the same; what concerns nodes that were ``written`` is left out. Returns how many requests were
    compared. Raises `WrongAnswer`."""
    nodes = {each: node for node, each in enumerate(ids)}
    asked = [each for each in requests if each.kind in CHECKABLE and each.node not in written]
    for request in asked:
        expected, first = planned(plan, request), None
        for name, peer in peers.items():
            answer = await peer.answer(request)
            if as_planned(answer, nodes) != expected:
                raise WrongAnswer(
                    f"{name} found {as_planned(answer, nodes)!r:.300} for {request}, not {expected!r:.300}"
                )
            if first is not None and answer != first:
                raise WrongAnswer(f"{name} found other bytes than the others for {request}")
            first = answer
    return len(asked)
