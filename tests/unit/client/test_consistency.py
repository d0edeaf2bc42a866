"""`Consistency`: what each demand on freshness sends, how demands combine, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Awaitable, Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from tao.client import ClientSettings, Consistency, Graph, InvalidArgument, SyncGraph, WriteToken
from tao.model.graph import encode_object
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import SCHEMA, FakeCluster, make_id

ALICE, BOB = make_id(1), make_id(2, shard=1)
FRIEND = SCHEMA.atype("friend").number
TOKEN = WriteToken([(ALICE, 0, 7), (ALICE, FRIEND, 9)])
OTHER_TOKEN = WriteToken([(BOB, 0, 3)])

READS: dict[str, Callable[..., Awaitable[object]]] = {
    "obj_get": lambda graph, **how: graph.obj_get(ALICE, **how),
    "obj_get_many": lambda graph, **how: graph.obj_get_many([ALICE], **how),
    "assoc_get": lambda graph, **how: graph.assoc_get(ALICE, "friend", [BOB], **how),
    "assoc_get_many": lambda graph, **how: graph.assoc_get_many([(ALICE, "friend", [BOB])], **how),
    "assoc_count": lambda graph, **how: graph.assoc_count(ALICE, "friend", **how),
    "assoc_count_many": lambda graph, **how: graph.assoc_count_many([(ALICE, "friend")], **how),
    "assoc_range": lambda graph, **how: graph.assoc_range(ALICE, "friend", 0, 5, **how),
    "assoc_range_many": lambda graph, **how: graph.assoc_range_many([(ALICE, "friend", 0, 5)], **how),
    "assoc_time_range": lambda graph, **how: graph.assoc_time_range(ALICE, "friend", None, None, 5, **how),
    "assoc_time_range_many": lambda graph, **how: graph.assoc_time_range_many(
        [(ALICE, "friend", None, None, 5)], **how
    ),
    "assoc_page": lambda graph, **how: graph.assoc_page(ALICE, "friend", 5, **how),
    "assoc_iter": lambda graph, **how: walk(graph, **how),  # noqa: PLW0108 - defined below
}
EVERY_READ = pytest.mark.parametrize("name", READS)


async def walk(graph: Graph, **how: Any) -> None:
    async for _ in graph.assoc_iter(ALICE, "friend", **how):
        raise AssertionError("the list is empty")


def demand_of(cluster: FakeCluster) -> tuple[bool, list[int], int]:
    """What the only message sent asks for: whether it is critical, the least versions, and the bound on staleness."""
    (request,) = cluster.batches()
    batch: pb.ReadBatch = request.read
    return batch.critical, list(batch.minimum_versions), batch.max_staleness_ms


@EVERY_READ
@pytest.mark.parametrize(
    ("consistency", "expected"),
    [
        (Consistency.cached(), (False, 0)),
        (Consistency.master(), (True, 0)),
        (Consistency.max_staleness(5_000), (False, 5_000)),
        (Consistency.max_staleness(5_000) & Consistency.max_staleness(900), (False, 900)),
        (Consistency.master() & Consistency.max_staleness(5_000), (True, 0)),
    ],
    ids=str,
)
async def test_every_read_sends_the_demand_it_is_given(
    graph: Graph, cluster: FakeCluster, name: str, consistency: Consistency, expected: tuple[bool, int]
) -> None:
    await READS[name](graph, consistency=consistency)
    critical, minimums, max_staleness_ms = demand_of(cluster)
    assert (critical, max_staleness_ms) == expected
    assert not minimums


@EVERY_READ
async def test_every_read_takes_a_token_and_a_bound_at_once(graph: Graph, cluster: FakeCluster, name: str) -> None:
    await READS[name](graph, consistency=Consistency.at_least(TOKEN.text()) & Consistency.max_staleness(5_000))
    critical, minimums, max_staleness_ms = demand_of(cluster)
    assert not critical
    assert minimums == [7 if name.startswith("obj") else 9]
    assert max_staleness_ms == 5_000


@EVERY_READ
@pytest.mark.parametrize(
    ("keywords", "consistency"),
    [
        ({"critical": True}, Consistency.master()),
        ({"after": TOKEN}, Consistency.at_least(TOKEN)),
        ({"after": TOKEN.text()}, Consistency.at_least(TOKEN)),
        ({"max_staleness_ms": 70}, Consistency.max_staleness(70)),
        ({"after": TOKEN, "max_staleness_ms": 70}, Consistency.at_least(TOKEN) & Consistency.max_staleness(70)),
        ({"after": TOKEN, "critical": True}, Consistency.at_least(TOKEN) & Consistency.master()),
    ],
    ids=["critical", "after", "after text", "max_staleness_ms", "after and max_staleness_ms", "after and critical"],
)
async def test_the_keywords_are_short_forms_of_the_value(
    name: str, keywords: dict[str, Any], consistency: Consistency
) -> None:
    by_keywords, by_value = FakeCluster(), FakeCluster()
    async with await by_keywords.connect() as graph:
        await READS[name](graph, **keywords)
    async with await by_value.connect() as graph:
        await READS[name](graph, consistency=consistency)
    assert demand_of(by_keywords) == demand_of(by_value)


@EVERY_READ
@pytest.mark.parametrize("keywords", [{"critical": True}, {"after": TOKEN}, {"max_staleness_ms": 5}], ids=str)
async def test_both_forms_at_once_are_refused_with_the_way_out(
    graph: Graph, cluster: FakeCluster, name: str, keywords: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument, match=f"either consistency or {next(iter(keywords))}, not both; combine"):
        await READS[name](graph, consistency=Consistency.cached(), **keywords)
    assert cluster.batches() == []


@EVERY_READ
async def test_the_default_of_the_graph_holds_for_reads_that_say_nothing(name: str) -> None:
    cluster = FakeCluster()
    async with await cluster.connect(ClientSettings(consistency=Consistency.max_staleness(8_000))) as graph:
        await READS[name](graph)
    assert demand_of(cluster) == (False, [], 8_000)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"consistency": Consistency.cached()}, (False, [], 0)),
        ({"consistency": Consistency.at_least(TOKEN)}, (False, [7], 0)),
        ({"after": TOKEN}, (False, [7], 0)),
        ({"critical": True}, (True, [], 0)),
    ],
)
async def test_a_demand_of_a_read_replaces_the_default(
    how: dict[str, Any], expected: tuple[bool, list[int], int]
) -> None:
    cluster = FakeCluster()
    async with await cluster.connect(ClientSettings(consistency=Consistency.max_staleness(8_000))) as graph:
        await graph.obj_get(ALICE, **how)
    assert demand_of(cluster) == expected


async def test_an_update_looks_its_object_up_in_the_cache_whatever_the_default_is() -> None:
    cluster = FakeCluster()
    cluster.objects[ALICE] = encode_object(1, SCHEMA.otype("user").number, b"")
    async with await cluster.connect(ClientSettings(consistency=Consistency.master())) as graph:
        assert await graph.obj_update(ALICE, {"home": "x"})
        assert await graph.obj_update_many([(ALICE, {"home": "y"})]) == [True]
    assert [sent.read.critical for sent in cluster.batches() if sent.HasField("read")] == [False, False]


def test_a_synchronous_graph_takes_both_forms() -> None:
    cluster = FakeCluster()
    with SyncGraph("fake:1", opener=cluster.connect) as graph:
        graph.obj_get(ALICE, consistency=Consistency.max_staleness(5))
        graph.assoc_page(ALICE, "friend", 5, max_staleness_ms=6)
        assert list(graph.assoc_iter(ALICE, "friend", consistency=Consistency.max_staleness(7))) == []
        with pytest.raises(InvalidArgument, match="either consistency or critical, not both"):
            graph.obj_get(ALICE, consistency=Consistency.cached(), critical=True)
    assert [sent.read.max_staleness_ms for sent in cluster.batches()] == [5, 6, 7]


def test_plain_reads_share_one_value() -> None:
    assert Consistency.cached() is Consistency.cached()
    assert ClientSettings().consistency is Consistency.cached()
    assert Consistency.at_least(None) is Consistency.cached()
    assert Consistency.at_least("") is Consistency.cached()
    assert Consistency.at_least(WriteToken()) is Consistency.cached()


def test_demands_combine_into_one_that_meets_both() -> None:
    both = Consistency.at_least(TOKEN) & Consistency.at_least(OTHER_TOKEN)
    assert both.token == TOKEN.merged(OTHER_TOKEN)
    assert Consistency.at_least(TOKEN) & Consistency.cached() == Consistency.at_least(TOKEN)
    assert Consistency.cached() & Consistency.at_least(TOKEN) == Consistency.at_least(TOKEN)
    assert (Consistency.master() & Consistency.max_staleness(9)).critical
    with pytest.raises(TypeError):
        Consistency.master() & True  # type: ignore[operator]


def test_a_demand_is_a_value() -> None:
    demand = Consistency.at_least(TOKEN) & Consistency.max_staleness(9)
    assert demand == Consistency.max_staleness(9) & Consistency.at_least(TOKEN.text())
    assert len({demand, Consistency.max_staleness(9) & Consistency.at_least(TOKEN)}) == 1
    assert pickle.loads(pickle.dumps(demand)) == demand
    with pytest.raises(FrozenInstanceError):
        demand.critical = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("token must be a write token or its text, not int", lambda: Consistency.at_least(5)),  # type: ignore[arg-type]
        ("no write token", lambda: Consistency.at_least("?")),
        ("max_staleness_ms is 0; it must be 1 to", lambda: Consistency.max_staleness(0)),
        ("max_staleness_ms must be an int", lambda: Consistency.max_staleness(0.5)),  # type: ignore[arg-type]
        ("token must be a WriteToken, not str", lambda: Consistency(token=TOKEN.text())),  # type: ignore[arg-type]
        ("consistency must be a Consistency, not str", lambda: ClientSettings(consistency="master")),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_demand_is_refused_where_it_is_made(message: str, make: Callable[[], object]) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make()


async def test_a_wrong_argument_of_a_read_is_named(graph: Graph) -> None:
    with pytest.raises(InvalidArgument, match="after must be a write token or its text, not int"):
        await graph.obj_get(ALICE, after=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="consistency must be a Consistency, not bool"):
        await graph.obj_get(ALICE, consistency=True)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="consistency must be a Consistency, not str"):
        await graph.assoc_get_many([(ALICE, "friend", [BOB])], consistency="master")  # type: ignore[arg-type]
