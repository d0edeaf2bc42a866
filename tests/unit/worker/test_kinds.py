"""The kinds of jobs that every worker knows: what they ask for, where the next page begins, and what they refuse."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tao.client import Graph
from tao.model.errors import InvalidArgument, SettingsError, UnknownType
from tao.model.graph import Edge, EdgeKey
from tao.model.jobs import KINDS_OF_EVERY_WORKER, JobRow
from tao.model.writes import ReportJob
from tao.worker.each import EachEdge, EachObject, load_functions
from tao.worker.kinds import JobKind, Page, kinds_by_name
from tao.worker.leaders import RoutinePage, ScannedEdge, ShardPage
from tao.worker.routines import routines
from tao.worker.server import known_kinds
from tests.unit.client.fakes import FakeCluster

FRIEND, SUBSCRIBES_ARCHIVED, USER = 1, 152, 1


class ScannedShard:
    """Leaders that answer pages of rows, and note what they are asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.page = ShardPage([ScannedEdge(1, 2, 3)], [5, 6], EdgeKey(1, FRIEND, 2), done=False)

    async def lease(self, kinds: Sequence[str], limits: Sequence[int], lease_ms: int) -> list[JobRow]:
        raise NotImplementedError

    async def report(self, report: ReportJob) -> JobRow | None:
        raise NotImplementedError

    async def scan(self, shard: int, atype: int, otype: int, after: EdgeKey, limit: int) -> ShardPage:
        self.asked.append((shard, atype, otype, after.id1, limit))
        return self.page

    async def purge(self, shard: int, after: EdgeKey, limit: int) -> RoutinePage:
        self.asked.append((shard, after.id1, limit))
        return RoutinePage(4, EdgeKey(9, FRIEND, 9), done=True)

    async def fold(self, shard: int, after: EdgeKey, limit: int) -> RoutinePage:
        self.asked.append((shard, after.id1, limit))
        return RoutinePage(3, EdgeKey(9, FRIEND, 9), done=True)


class Called:
    """A function of an application that notes its pages."""

    def __init__(self) -> None:
        self.edges: list[list[ScannedEdge]] = []
        self.ids: list[list[int]] = []

    async def on_edges(self, _: Graph, edges: Sequence[ScannedEdge]) -> None:
        self.edges.append(list(edges))

    async def on_ids(self, _: Graph, ids: Sequence[int]) -> None:
        self.ids.append(list(ids))


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
async def graph(cluster: FakeCluster) -> Graph:
    return await cluster.connect()


def body(**fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


async def test_the_edges_of_a_list_come_page_by_page_through_the_sdk(graph: Graph, cluster: FakeCluster) -> None:
    cluster.lists[1, FRIEND] = [Edge(7, 3), Edge(8, 2), Edge(9, 1)]
    called, leaders = Called(), ScannedShard()
    kind = EachEdge({"f": called.on_edges}, leaders)
    job = body(function="f", atype="friend", id1=1)
    first = await kind.page(graph, job, b"", 2)
    second = await kind.page(graph, job, first.cursor, 2)
    assert called.edges == [[ScannedEdge(1, 7, 3), ScannedEdge(1, 8, 2)], [ScannedEdge(1, 9, 1)]]
    assert (first.edges, first.done, second.edges, second.done) == (2, False, 1, True)
    assert leaders.asked == []
    # A follower's cache may lack edges that were committed before the job was added.
    assert [batch.read.critical for batch in cluster.batches()] == [True, True]


async def test_the_edges_of_a_shard_come_from_its_leader_and_go_on_after_the_last_row(graph: Graph) -> None:
    called, leaders = Called(), ScannedShard()
    kind = EachEdge({"f": called.on_edges}, leaders)
    page = await kind.page(graph, body(function="f", atype="friend", shard=3), b"", 10)
    assert page.edges == 1
    leaders.page = leaders.page._replace(edges=[], done=True)
    last = await kind.page(graph, body(function="f", atype="subscribes", shard=3, state="archived"), page.cursor, 10)
    assert leaders.asked == [(3, FRIEND, 0, 0, 10), (3, SUBSCRIBES_ARCHIVED, 0, 1, 10)]
    assert (last.edges, last.done, len(called.edges)) == (0, True, 1)


async def test_the_objects_of_a_shard_are_those_of_a_type_or_all(graph: Graph) -> None:
    called, leaders = Called(), ScannedShard()
    kind = EachObject({"f": called.on_ids}, leaders)
    assert (await kind.page(graph, body(function="f", otype="user", shard=3), b"", 10)).edges == 2
    await kind.page(graph, body(function="f", shard=3), b"", 10)
    assert called.ids == [[5, 6], [5, 6]]
    assert [asked[1:3] for asked in leaders.asked] == [(0, USER), (0, 0)]


async def test_a_purge_and_a_fold_ask_the_leader_of_their_shard(graph: Graph) -> None:
    leaders = ScannedShard()
    pages = [await kind.page(graph, body(shard=2), b"", 10) for kind in routines(leaders)]
    assert [(page.edges, page.done) for page in pages] == [(4, True), (3, True)]
    assert leaders.asked == [(2, 0, 10)] * 2


async def test_a_wrong_body_and_an_unknown_function_or_type_fail_the_page(graph: Graph) -> None:
    called, leaders = Called(), ScannedShard()
    edges, objects = EachEdge({"f": called.on_edges}, leaders), EachObject({}, leaders)
    with pytest.raises(InvalidArgument, match=r"no function 'g'.*it has: f"):
        await edges.page(graph, body(function="g", atype="friend", shard=1), b"", 10)
    with pytest.raises(InvalidArgument, match="it has: none"):
        await objects.page(graph, body(function="f", shard=1), b"", 10)
    with pytest.raises(InvalidArgument, match="not that of its kind"):
        await edges.page(graph, b"\xc1", b"", 10)
    with pytest.raises(UnknownType):
        await edges.page(graph, body(function="f", atype="fiend", shard=1), b"", 10)
    assert called.edges == []


def test_functions_are_loaded_from_entry_points_and_one_that_is_broken_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "some_jobs-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: some-jobs\nVersion: 1\n")
    (tmp_path / "jobs_of_this_test.py").write_text("async def f(graph, ids): ...\n")
    points = installed / "entry_points.txt"
    points.write_text("[tao.jobs]\nf = jobs_of_this_test:f\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(load_functions()) == ["f"]
    points.write_text("[tao.jobs]\nf = jobs_of_this_test:g\n")
    with pytest.raises(SettingsError, match="f = jobs_of_this_test:g"):
        load_functions()
    sys.modules.pop("jobs_of_this_test")


def test_kinds_of_an_application_are_loaded_from_entry_points_that_have_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "some_kinds-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: some-kinds\nVersion: 1\n")
    kind = "class Walk:\n    name = 'walk'\n    async def page(self, graph, body, cursor, limit): ...\n"
    (tmp_path / "kinds_of_this_test.py").write_text(kind)
    points = installed / "entry_points.txt"
    points.write_text("[tao.job_kinds]\nwalk = kinds_of_this_test:Walk\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert sorted(known_kinds(ScannedShard())) == [*KINDS_OF_EVERY_WORKER, "walk"]
    for wrong in ("walk = kinds_of_this_test:Gone", "other = kinds_of_this_test:Walk"):
        points.write_text(f"[tao.job_kinds]\n{wrong}\n")
        with pytest.raises(SettingsError, match=wrong):
            known_kinds(ScannedShard())
    sys.modules.pop("kinds_of_this_test")


def test_two_kinds_of_one_name_are_refused() -> None:
    class Same:
        name = "purge"

        async def page(self, graph: Graph, body: bytes, cursor: bytes, limit: int) -> Page:
            raise NotImplementedError

    known: JobKind = routines(ScannedShard())[0]
    assert list(kinds_by_name([known])) == ["purge"]
    with pytest.raises(SettingsError, match="two kinds of jobs have the name 'purge'"):
        kinds_by_name([known, Same()])
