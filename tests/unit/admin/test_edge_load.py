"""A load of edges waits for inverse edges that are pending, and counts those that stay so."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tao.admin.documents import example_schema_file
from tao.admin.load import records
from tao.admin.load.csv_files import CsvSource
from tao.admin.load.key_map import KeyMap
from tao.admin.load.records import EdgeColumns, EdgeLoad, EndColumn, NewEdge
from tao.client import AssocList, Consistency, EdgeWrite, Graph, SomeFailed
from tao.model.edge_block import encode_block
from tao.model.errors import OutcomeUnknown, Overloaded, StaleRead, TaoError
from tao.model.graph import Edge
from tao.schema.registry import load_schema
from tao.wire.convert import error_to_pb
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import FakeCluster

SCHEMA = load_schema(example_schema_file().read_text(), "schema")
FRIEND = SCHEMA.atype("friend")
EDGES = [NewEdge(1, 11, 5, {}), NewEdge(2, 11, 5, {}), NewEdge(3, 12, 5, {})]


class FakeGraph:
    """Adds edges with these results, and has the inverse edges of ``rounds``, one element for each look at them."""

    schema = SCHEMA
    topology = SimpleNamespace(shards=4)

    def __init__(self, results: list[EdgeWrite | TaoError], rounds: list[set[tuple[int, int]] | TaoError]) -> None:
        self._results = results
        self._rounds = rounds
        self.asked: list[dict[int, set[int]]] = []

    async def assoc_add_many(self, edges: Iterable[object]) -> list[EdgeWrite]:
        if any(isinstance(each, TaoError) for each in self._results):
            raise SomeFailed(self._results)
        return cast("list[EdgeWrite]", self._results)

    async def assoc_get_many(
        self, queries: list[tuple[int, str, set[int]]], *, consistency: Consistency
    ) -> list[AssocList]:
        assert consistency.critical
        assert {name for _, name, _ in queries} == {"friend"}
        self.asked.append({id1: set(id2s) for id1, _, id2s in queries})
        there = self._rounds.pop(0)
        if isinstance(there, TaoError):
            raise SomeFailed([there] * len(queries))
        lists = []
        for id1, _, id2s in queries:
            found = [Edge(id2, 5, b"") for id2 in sorted(id2s, reverse=True) if (id1, id2) in there]
            lists.append(AssocList(id1, FRIEND, encode_block(1, len(found), found, 0)))
        return lists


def load_of(graph: FakeGraph, folder: Path) -> EdgeLoad:
    source = CsvSource(io.BytesIO(b"a,b\n"), "edges.csv")
    ends = (EndColumn("a", None), EndColumn("b", None))
    with KeyMap(folder / "keys.sqlite") as keys:
        return EdgeLoad(cast(Graph, graph), source, FRIEND, EdgeColumns(ends, 5), {}, keys)


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_SETTLE_PAUSE_SECONDS", 0.0)


async def test_edges_that_are_stored_at_both_ends_are_not_read_again(tmp_path: Path) -> None:
    graph = FakeGraph([EdgeWrite(False)] * 3, [])
    load = load_of(graph, tmp_path)
    assert await load.write(EDGES) == [None] * 3
    assert (graph.asked, load.inverse_pending) == ([], 0)


async def test_pending_inverses_are_awaited_until_the_database_has_each(tmp_path: Path) -> None:
    graph = FakeGraph([EdgeWrite(False, True)] * 3, [{(11, 1)}, StaleRead("busy"), {(11, 2), (12, 3)}])
    load = load_of(graph, tmp_path)
    assert await load.write(EDGES) == [None] * 3
    assert graph.asked == [{11: {1, 2}, 12: {3}}, {11: {2}, 12: {3}}, {11: {2}, 12: {3}}]
    assert load.inverse_pending == 0


async def test_what_is_pending_when_the_time_is_over_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "SETTLE_SECONDS", 0.0)
    results: list[Any] = [EdgeWrite(False, True), Overloaded("full"), EdgeWrite(False, True)]
    load = load_of(FakeGraph(results, [set()]), tmp_path)
    assert await load.write(EDGES) == [None, results[1], None]
    assert load.inverse_pending == 2


async def test_a_pending_inverse_is_counted_where_another_edge_of_its_batch_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the SDK's own error of some items, and not one made here."""
    monkeypatch.setattr(records, "SETTLE_SECONDS", 0.0)
    cluster = FakeCluster()
    failed = pb.WriteResult(error=error_to_pb(OutcomeUnknown("no answer")))
    answer = pb.Answer(write=pb.WriteAnswer(results=[pb.WriteResult(inverse_pending=True), failed]))
    async with await cluster.connect() as graph:
        cluster.link("near-1").behaviour = lambda _, __, on_answer: on_answer(answer)
        source = CsvSource(io.BytesIO(b"a,b\n"), "edges.csv")
        columns = EdgeColumns((EndColumn("a", None), EndColumn("b", None)), 5)
        with KeyMap(tmp_path / "keys.sqlite") as keys:
            load = EdgeLoad(graph, source, graph.schema.atype("likes"), columns, {}, keys)
        errors = await load.write(EDGES[:2])
    assert [type(each) for each in errors] == [type(None), OutcomeUnknown]
    assert load.inverse_pending == 1
