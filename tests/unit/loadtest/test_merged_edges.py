"""The operations of `chaos` on edges with states: lists that are not their join, and states that nothing wrote, are
found."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loadtest.faults.history import ReadVerdict
from loadtest.faults.merged_edges import NEAR_TYPE, MergedEdges
from loadtest.faults.record import RunRecord
from tao.client import Consistency, Unavailable
from tao.model.edge_states import State
from tao.model.ids import SHARD_SHIFT

REGIONS = cast(Any, SimpleNamespace(routes=SimpleNamespace(shards=1)))
Row = tuple[int, int, int, int]
"""The state of an edge, the time of the operation, that of the payload's operation, and the edge's time."""


class Graph:
    """Edges and nodes that join operations, each after one failed attempt. ``loses``: which operation on an edge is
    acknowledged and not made."""

    def __init__(self, loses: int = -1) -> None:
        self.edges: dict[tuple[int, int], Row] = {}
        self.nodes: dict[int, tuple[int, int]] = {}
        self.calls = 0
        self.made = 0
        self.loses = loses
        self.later = self
        self.next_id = 0
        self.added: list[tuple[int, str, int, int]] = []
        self.jobs: list[tuple[str, int, int]] = []

    async def reserve_ids(self, number: int, *, shard: int) -> list[int]:
        first, self.next_id = self.next_id + 1, self.next_id + number
        return [shard << SHARD_SHIFT | each for each in range(first, first + number)]

    async def assoc_set_state(
        self, user: int, _: str, page: int, label: str, at: int, time: int | None
    ) -> SimpleNamespace:
        self._fail_at_first()
        self.made += 1
        if self.made != self.loses:
            state, state_us, payload_us, had = self.edges.get((user, page), (0, 0, 0, 0))
            state_us, state = max((state_us, state), (at, State[label.upper()]))
            if time is not None:
                payload_us, had = max((payload_us, had), (at, time))
            self.edges[user, page] = (state, state_us, payload_us, had)
        return SimpleNamespace(applied=self._applied)

    async def node_set_state(self, node: int, label: str, _: list[str], at: int) -> SimpleNamespace:
        self._fail_at_first()
        self.nodes[node] = max(self.nodes.get(node, (0, 0)), (at, State[label.upper()]))
        return SimpleNamespace(applied=self._applied)

    async def assoc_range(self, node: int, atype: str, _: int, __: int, state: str, **___: Consistency) -> Any:
        found = self._list(node, atype, state)
        return SimpleNamespace(id2s=[id2 for id2, _ in found], times=[time for _, time in found])

    async def assoc_count(self, node: int, atype: str, state: str, **_: Consistency) -> int:
        return len(self._list(node, atype, state))

    async def assoc_state(self, id1: int, atype: str, id2: int) -> Any:
        row = self.edges.get((id1, id2) if atype == NEAR_TYPE else (id2, id1))
        return row and SimpleNamespace(own=State(row[0]).label, state_us=row[1])

    async def assoc_add_many(self, edges: list[tuple[int, str, int, int]]) -> None:
        self._fail_at_first()
        self.added.extend(edges)

    async def add_job(self, kind: str, _: dict[str, Any], *, near: int, id: int) -> SimpleNamespace:  # noqa: A002
        self._fail_at_first()
        self.jobs.append((kind, near, id))
        return SimpleNamespace(applied=self._applied)

    async def _applied(self, _: float) -> None:
        return None

    def _fail_at_first(self) -> None:
        self.calls += 1
        if self.calls % 2:
            raise Unavailable("the database is away")

    def _list(self, node: int, atype: str, state: str) -> list[tuple[int, int]]:
        found = []
        for (user, page), (own, _, payload_us, time) in self.edges.items():
            shown = max(own, *(self.nodes.get(each, (0, 0))[1] for each in (user, page)))
            if State(shown if payload_us else State.REMOVED).label == state:
                near, far = (user, page) if atype == NEAR_TYPE else (page, user)
                found += [(far, time)] if near == node else []
        return found


async def operations_on(graph: Graph, number: int, monkeypatch: pytest.MonkeyPatch) -> tuple[MergedEdges, RunRecord]:
    monkeypatch.setattr("loadtest.faults.merged_edges._PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("loadtest.faults.merged_edges._ENDS_PER_SHARD", 4)
    record = RunRecord()
    merged = MergedEdges(REGIONS, record, Random(1), [cast(Any, graph)])
    await merged.prepare()
    for _ in range(number):
        await merged._set_edge(cast(Any, graph))
        await merged._set_node(cast(Any, graph))
        await merged._read(cast(Any, graph))
    return merged, record


async def test_the_join_of_all_operations_is_expected_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    merged, record = await operations_on(Graph(), 200, monkeypatch)
    assert await merged.differences() == 0
    assert (record.lost, record.examples, record.violations.total()) == (0, [], 0)
    assert record.operations.total() == 400
    assert set(record.operations) == {"edge", "edge, journaled", "node", "node, journaled"}
    assert record.refused.total() == 400


async def test_a_job_is_added_while_the_topology_file_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.faults.merged_edges._PAUSE_SECONDS", 0.0)

    class Regions:
        file_is_gone = False

        @property
        def routes(self) -> SimpleNamespace:
            if self.file_is_gone:
                raise FileNotFoundError("topology.json")
            return SimpleNamespace(shards=1)

    regions, graph = Regions(), Graph()
    merged = MergedEdges(cast(Any, regions), RunRecord(), Random(1), [cast(Any, graph)])
    regions.file_is_gone = True
    await merged._add_job(cast(Any, graph))
    ((kind, owner, _),) = graph.jobs
    assert kind == "each_edge"
    assert {edge[0] for edge in graph.added} == {owner}


async def test_an_acknowledged_operation_that_was_not_made_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    merged, record = await operations_on(Graph(loses=5), 5, monkeypatch)
    assert await merged.differences() == 0
    assert record.lost == 2  # the list that lacks the edge, at both ends


async def test_a_state_that_is_older_than_an_acknowledged_one_or_that_nothing_wrote_is_a_violation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = Graph()
    merged, record = await operations_on(graph, 50, monkeypatch)
    graph.edges = dict.fromkeys(graph.edges, (0, 0, 0, 0))
    for _ in range(50):
        await merged._read(cast(Any, graph))
    assert record.violations[ReadVerdict.STALE, "state"] > 0
    graph.edges = dict.fromkeys(graph.edges, (2, 7, 7, 7))
    await merged._read(cast(Any, graph))
    assert record.violations[ReadVerdict.WRONG, "state"] == 1
