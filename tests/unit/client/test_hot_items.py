"""Hot items: their answers are kept, shared and checked by version, and are never staler than those of other items."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tao.client import ClientSettings, Graph, SomeFailed, StaleRead, Unavailable, WriteLost, WriteToken
from tao.model.errors import TaoError
from tao.model.graph import Edge, encode_object
from tao.wire.convert import error_to_pb
from tao.wire.session import AnswerHandler
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.pacing import quiet
from tests.unit.client.fakes import FakeCluster, FakeLink, make_id, until

A, B = make_id(1), make_id(2)


def user(name: str, version: int) -> bytes:
    return encode_object(version, 1, b"\x81\x01" + bytes([0xA0 | len(name)]) + name.encode())


class Hot:
    """A follower that reports every item as hot while ``is_hot``, and leaves out the values that the client holds."""

    def __init__(self, pause_ms: int = 0) -> None:
        self.is_hot = True
        self.pause_ms = pause_ms
        self.left_out = 0
        self.error: TaoError | None = None

    def __call__(self, link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        if not request.HasField("read"):
            on_answer(link.answer(request))
            return
        values = link.values(request.read)
        minimums = dict(zip(request.read.minimum_slots, request.read.minimum_versions, strict=True))
        answer = pb.ReadAnswer()
        for slot in request.read.known_slots:
            if int.from_bytes(values[slot][:8], "little") == minimums[slot]:
                values[slot] = b""
                self.left_out += 1
        if self.error is not None and minimums:
            answer.failed_slots.extend(range(len(values)))
            answer.errors.extend([error_to_pb(self.error)] * len(values))
        else:
            answer.values.extend(values)
        if self.is_hot:
            answer.hot_slots.extend(range(len(values)))
            answer.hot_rates.extend([5_000] * len(values))
            answer.slow_down_ms.extend([self.pause_ms] * len(values))
        on_answer(pb.Answer(read=answer))


@pytest.fixture
async def hot(cluster: FakeCluster) -> Hot:
    cluster.objects = {A: user("ada", 7), B: user("bob", 7)}
    hot = Hot()
    cluster.link("near-1").behaviour = hot
    return hot


@pytest.fixture
async def graph(cluster: FakeCluster, hot: Hot) -> AsyncIterator[Graph]:
    async with await cluster.connect() as opened:
        assert await name_of(opened) == "ada"  # the first answer reports the item as hot
        yield opened


async def name_of(graph: Graph, key: int = A) -> object:
    found = await graph.obj_get(key)
    return found and found.fields["name"]


async def test_an_unchanged_value_travels_once(graph: Graph, cluster: FakeCluster, hot: Hot) -> None:
    assert [await name_of(graph) for _ in range(3)] == ["ada"] * 3
    assert (hot.left_out, graph.stats.hot_unchanged) == (3, 3)
    cluster.objects[A] = user("eve", 8)
    assert await name_of(graph) == "eve"
    assert hot.left_out == 3
    assert await name_of(graph) == "eve"
    assert hot.left_out == 4


async def test_a_clone_that_is_behind_the_kept_version_does_not_answer(graph: Graph, cluster: FakeCluster) -> None:
    await name_of(graph)
    sent = cluster.batches()[-1].read
    assert (list(sent.known_slots), list(sent.minimum_versions)) == ([0], [7])


async def test_reads_of_one_tick_share_one_query_and_each_is_answered(graph: Graph) -> None:
    before = graph.stats.queries
    names = await asyncio.gather(*(name_of(graph) for _ in range(5)), graph.obj_get_many([A, B, A]))
    assert names[:5] == ["ada"] * 5
    assert [each and each.fields["name"] for each in names[5]] == ["ada", "bob", "ada"]  # type: ignore[attr-defined]
    assert graph.stats.queries - before == 2
    assert graph.stats.hot_joined == 6


async def test_a_read_made_after_the_query_was_sent_does_not_get_its_answer(graph: Graph, cluster: FakeCluster) -> None:
    before = len(cluster.batches())
    first = asyncio.ensure_future(name_of(graph))
    await until(lambda: len(cluster.batches()) == before + 1)
    second = asyncio.ensure_future(name_of(graph))
    await asyncio.gather(first, second)
    assert len(cluster.batches()) == before + 2


async def test_an_item_that_is_no_longer_hot_is_read_like_any_other(
    graph: Graph, cluster: FakeCluster, hot: Hot
) -> None:
    hot.is_hot = False
    await name_of(graph)
    await name_of(graph)
    assert not cluster.batches()[-1].read.known_slots


async def test_critical_bounded_and_token_reads_share_no_query(graph: Graph, cluster: FakeCluster) -> None:
    token = WriteToken([(A, 0, 7)])
    await asyncio.gather(
        graph.obj_get(A, critical=True), graph.obj_get(A, max_staleness_ms=100), graph.obj_get(A, after=token)
    )
    last = cluster.batches()[-3:]
    assert [list(sent.read.known_slots) for sent in last] == [[], [], []]
    assert graph.stats.hot_joined == graph.stats.hot_unchanged == 0


async def test_own_writes_are_seen_although_an_older_answer_is_kept(graph: Graph, cluster: FakeCluster) -> None:
    cluster.versions[A, 0] = 7
    assert await graph.obj_update(A, {"name": "eve"}, "user")
    await name_of(graph)
    sent = cluster.batches()[-1].read
    assert (list(sent.known_slots), list(sent.minimum_versions)) == ([], [8])


async def test_reads_during_the_pause_that_a_follower_asks_for_share_one_query_after_it(
    cluster: FakeCluster, hot: Hot
) -> None:
    hot.pause_ms = 200
    async with await cluster.connect() as graph:
        await name_of(graph)
        asked = []
        for _ in range(5):
            asked.append(asyncio.ensure_future(name_of(graph)))
            await quiet()
        assert len(cluster.batches()) == 1
        assert await asyncio.gather(*asked) == ["ada"] * 5
        assert len(cluster.batches()) == 2


async def test_hot_unchecked_ms_saves_the_query_until_an_own_write(cluster: FakeCluster, hot: Hot) -> None:
    cluster.versions[A, 0] = 7
    async with await cluster.connect(ClientSettings(hot_unchecked_ms=60_000)) as graph:
        await name_of(graph)
        assert [await name_of(graph) for _ in range(3)] == ["ada"] * 3
        assert (len(cluster.batches()), graph.stats.hot_unchecked) == (1, 3)
        await graph.obj_update(A, {"name": "eve"}, "user")
        cluster.objects[A] = user("eve", 8)
        assert await name_of(graph) == "eve"


@pytest.mark.parametrize("error", [StaleRead("nobody has version 7"), WriteLost("version 7 is lost")])
async def test_a_version_that_was_lost_with_its_master_fails_no_read(
    graph: Graph, cluster: FakeCluster, hot: Hot, error: TaoError
) -> None:
    cluster.objects[A] = user("old", 6)
    hot.error = error
    for link in ("near-1", "far-1"):
        cluster.link(link).behaviour = hot
    assert await name_of(graph) == "old"


async def test_a_lost_write_of_a_hot_item_is_reported_once(graph: Graph, hot: Hot) -> None:
    await graph.obj_update(B, {"name": "Bob"}, "user")
    hot.error = WriteLost("the write is lost")
    with pytest.raises(SomeFailed) as failed:
        await graph.obj_get_many([A, B])
    assert failed.value.errors.keys() == {1}
    assert await name_of(graph, B) == "bob"


async def test_hot_items_are_bounded_in_number_and_bytes(cluster: FakeCluster, hot: Hot) -> None:
    cluster.objects = {make_id(n): user(f"u{n}", 7) for n in range(1, 30)}
    for settings in (ClientSettings(hot_items=4), ClientSettings(hot_items_bytes=4 * len(user("u1", 7)))):
        async with await cluster.connect(settings) as graph:
            await graph.obj_get_many(list(cluster.objects))
            before = hot.left_out
            await graph.obj_get_many(list(cluster.objects))
            assert 1 <= hot.left_out - before <= 4


async def test_keep_hot_items_switches_hot_items_off(cluster: FakeCluster, hot: Hot) -> None:
    async with await cluster.connect(ClientSettings(keep_hot_items=False)) as graph:
        await asyncio.gather(name_of(graph), name_of(graph))
        await asyncio.gather(name_of(graph), name_of(graph))
        assert (graph.stats.queries, hot.left_out) == (4, 0)


async def test_reads_that_wait_for_the_end_of_a_pause_fail_when_the_graph_is_closed(
    cluster: FakeCluster, hot: Hot
) -> None:
    hot.pause_ms = 60_000
    graph = await cluster.connect()
    await name_of(graph)
    waiting = asyncio.ensure_future(name_of(graph))
    await asyncio.sleep(0)
    await graph.close()
    with pytest.raises(Unavailable):
        await waiting


async def test_a_caller_that_is_cancelled_leaves_the_query_to_the_others(graph: Graph) -> None:
    asked = [asyncio.ensure_future(name_of(graph)) for _ in range(2)]
    await asyncio.sleep(0)
    asked[0].cancel()
    assert await asked[1] == "ada"


async def test_checks_of_a_hot_list_share_one_query_and_are_never_compared_by_version(
    graph: Graph, cluster: FakeCluster
) -> None:
    """The byte that answers a check has no version."""
    cluster.lists[A, 3] = [Edge(B, 1)]
    atype = graph.schema.atype(3).name
    assert await graph.assoc_exists(A, atype, B)
    before = graph.stats.queries
    assert await asyncio.gather(*(graph.assoc_exists(A, atype, B) for _ in range(5))) == [True] * 5
    assert graph.stats.queries - before == 1
    sent = cluster.batches()[-1].read
    assert (list(sent.known_slots), list(sent.minimum_slots)) == ([], [])
    cluster.lists[A, 3] = []
    assert not await graph.assoc_exists(A, atype, B)


async def test_an_unchecked_check_does_not_hide_the_graphs_own_write(cluster: FakeCluster, hot: Hot) -> None:
    cluster.lists[A, 3] = []
    settings = ClientSettings(hot_unchecked_ms=60_000.0)
    async with await cluster.connect(settings) as graph:
        atype = graph.schema.atype(3).name
        for _ in range(3):
            assert not await graph.assoc_exists(A, atype, B)
        assert graph.stats.hot_unchecked == 2
        await graph.assoc_add(A, atype, B, fields=None)
        assert await graph.assoc_exists(A, atype, B)
