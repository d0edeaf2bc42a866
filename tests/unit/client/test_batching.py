"""Queries of one tick travel in one message, and every answer reaches its caller."""

from __future__ import annotations

import asyncio

import pytest

from tao.client import ClientSettings, Graph, Overloaded, ProtocolError, SomeFailed, Unavailable, WrongType
from tao.model.errors import InvalidArgument
from tao.model.graph import encode_count, encode_object
from tao.wire.convert import error_to_pb
from tao.wire.session import AnswerHandler
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import FakeCluster, FakeLink, failing, make_id, make_topology, silent, until


def user(name: str) -> bytes:
    return encode_object(1, 1, b"\x81\x01" + bytes([0xA0 | len(name)]) + name.encode())


async def test_queries_of_one_tick_to_one_server_are_one_message(graph: Graph, cluster: FakeCluster) -> None:
    cluster.objects = {make_id(n): user(f"u{n}") for n in range(1, 4)}
    found = await asyncio.gather(*(graph.obj_get(make_id(n)) for n in range(1, 4)), graph.assoc_count(1, "friend"))
    assert [each.fields["name"] for each in found[:3]] == ["u1", "u2", "u3"]  # type: ignore[union-attr]
    assert found[3] == 0
    assert len(cluster.batches()) == 1
    assert graph.stats.queries == 4


async def test_each_server_gets_one_message_per_tick() -> None:
    cluster = FakeCluster(make_topology(near=("n1", "n2", "n3")))
    async with await cluster.connect() as graph:
        await asyncio.gather(*(graph.obj_get(make_id(1, shard)) for shard in range(16)))
        asked = {name: len(cluster.batches(name)) for name in cluster.links if cluster.batches(name)}
    assert asked == {"n1": 1, "n2": 1, "n3": 1}


async def test_all_operations_of_a_tick_share_a_message_and_keep_their_answers(
    graph: Graph, cluster: FakeCluster
) -> None:
    await asyncio.gather(*(graph.assoc_add(1, "follows", n, time=n) for n in range(1, 6)))
    assert len(cluster.batches()) == 1
    edges, page, window, count, nobody = await asyncio.gather(
        graph.assoc_get(1, "follows", [2, 4, 9, 2]),
        graph.assoc_range(1, "follows", 1, 2),
        graph.assoc_time_range(1, "follows", 4, 2, 10),
        graph.assoc_count(1, "follows"),
        graph.obj_get(1),
    )
    assert edges.id2s == [4, 2]
    assert page.id2s == [4, 3]
    assert window.id2s == [4, 3, 2]
    assert (count, nobody) == (5, None)
    assert list(cluster.batches()[1].read.get_id2s) == [2, 4, 9]


async def test_critical_reads_travel_apart_from_the_others(graph: Graph, cluster: FakeCluster) -> None:
    await asyncio.gather(graph.obj_get(1), graph.obj_get(1, critical=True))
    assert sorted(sent.read.critical for sent in cluster.batches()) == [False, True]


async def test_a_full_batch_is_sent_and_the_rest_follows(cluster: FakeCluster) -> None:
    async with await cluster.connect(ClientSettings(max_batch_queries=10)) as graph:
        await asyncio.gather(*(graph.obj_get(n) for n in range(1, 26)))
    assert [len(sent.read.obj_ids) for sent in cluster.batches()] == [10, 10, 5]


async def test_a_batch_is_bounded_by_the_edges_it_asks_for(cluster: FakeCluster) -> None:
    async with await cluster.connect(ClientSettings(max_batch_edges=10_000)) as graph:
        await graph.assoc_range_many([(1, "follows", 0, 6000)] * 4)
    assert [len(sent.read.range_id1s) for sent in cluster.batches()] == [2, 2]


async def test_writes_are_bounded_by_their_bytes(cluster: FakeCluster) -> None:
    async with await cluster.connect(ClientSettings(max_batch_bytes=3000)) as graph:
        await graph.obj_add_many([("user", {"name": "x" * 1000}, 1)] * 5)
    assert [len(sent.write.writes) for sent in cluster.batches()] == [2, 2, 1]


async def test_callers_receive_hits_before_the_misses_of_their_batch(graph: Graph, cluster: FakeCluster) -> None:
    later: list[AnswerHandler] = []

    def two_parts(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        on_answer(pb.Answer(more=True, read=pb.ReadAnswer(slots=[1], values=[user("hit")])))
        later.append(on_answer)

    cluster.link("near-1").behaviour = two_parts
    miss, quick = asyncio.ensure_future(graph.obj_get(1)), asyncio.ensure_future(graph.obj_get(2))
    hit = await quick
    assert hit is not None
    assert not miss.done()
    later[0](pb.Answer(read=pb.ReadAnswer(slots=[0], values=[user("miss")])))
    found = await miss
    assert found is not None
    assert found.fields["name"] == "miss"


async def test_one_failed_query_does_not_fail_the_others_of_its_batch(graph: Graph, cluster: FakeCluster) -> None:
    def one_fails(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        errors = [error_to_pb(InvalidArgument("no"))]
        on_answer(pb.Answer(read=pb.ReadAnswer(slots=[1], values=[user("b")], failed_slots=[0], errors=errors)))

    cluster.link("near-1").behaviour = one_fails
    bad, good = await asyncio.gather(graph.obj_get(1), graph.obj_get(2), return_exceptions=True)
    assert isinstance(bad, InvalidArgument)
    assert not isinstance(good, BaseException)
    with pytest.raises(SomeFailed, match="1 of 2 items failed; the first is item 0: INVALID_ARGUMENT: no") as caught:
        await graph.obj_get_many([1, 2])
    assert list(caught.value.errors) == [0]
    assert caught.value.results[1] == good
    assert not caught.value.all_retryable


@pytest.mark.parametrize(
    "answer",
    [
        pb.ReadAnswer(slots=[7], values=[b"x"]),
        pb.ReadAnswer(slots=[0, 1], values=[b"x"]),
        pb.ReadAnswer(values=[b"x" * 12] * 3),
        pb.ReadAnswer(),
        pb.ReadAnswer(failed_slots=[9], errors=[pb.Error(reason="OVERLOADED")]),
        pb.ReadAnswer(values=[b"short"]),
    ],
)
async def test_an_answer_that_does_not_fit_its_request_is_a_protocol_error(
    graph: Graph, cluster: FakeCluster, answer: pb.ReadAnswer
) -> None:
    cluster.link("near-1").behaviour = lambda link, request, on_answer: on_answer(pb.Answer(read=answer))
    with pytest.raises(ProtocolError):
        await graph.obj_get(1)


async def test_a_cancelled_caller_does_not_disturb_the_others_of_its_batch(graph: Graph, cluster: FakeCluster) -> None:
    handlers: list[AnswerHandler] = []
    cluster.link("near-1").behaviour = lambda link, request, on_answer: handlers.append(on_answer)
    first, second = asyncio.ensure_future(graph.obj_get(1)), asyncio.ensure_future(graph.obj_get(2))
    await until(lambda: handlers)
    first.cancel()
    await asyncio.wait([first])
    handlers[0](pb.Answer(read=pb.ReadAnswer(values=[user("a"), user("b")])))
    found = await second
    assert found is not None
    assert found.fields["name"] == "b"


async def test_a_batch_whose_callers_were_all_cancelled_is_forgotten(cluster: FakeCluster) -> None:
    async with await cluster.connect(ClientSettings(max_waiting_queries=2)) as graph:
        cluster.link("near-1").behaviour = silent
        many = asyncio.ensure_future(graph.obj_get_many([1, 2]))
        await until(cluster.batches)
        with pytest.raises(Overloaded, match="2 queries are waiting already, at most 2"):
            await graph.obj_get(3)
        many.cancel()
        await asyncio.wait([many])
        await asyncio.sleep(0)
        cluster.link("near-1").behaviour = None
        assert await graph.obj_get(3) is None


async def test_queries_that_wait_for_a_retry_count_as_unanswered(
    cluster: FakeCluster,
) -> None:
    settings = ClientSettings(max_waiting_queries=2, retry_backoff_seconds=0.001)
    async with await cluster.connect(settings) as graph:
        cluster.link("near-1").behaviour = cluster.link("far-1").behaviour = failing(Unavailable("down"))
        cluster.link("near-1").is_down = cluster.link("far-1").is_down = True
        many = asyncio.ensure_future(graph.obj_get_many([1, 2]))
        await until(lambda: graph.stats.batches == 2)  # both have been asked, and a read waits until one is back
        with pytest.raises(Overloaded, match="2 queries are waiting already, at most 2"):
            await graph.obj_get(3)
        cluster.link("near-1").behaviour = cluster.link("far-1").behaviour = None
        cluster.link("near-1").is_down = cluster.link("far-1").is_down = False
        assert await many == [None, None]
        assert await graph.obj_get_many([3, 4]) == [None, None]


async def test_queries_in_flight_fail_when_the_graph_is_closed(cluster: FakeCluster) -> None:
    graph = await cluster.connect()
    cluster.link("near-1").behaviour = silent
    waiting = asyncio.ensure_future(graph.obj_get(1))
    await until(cluster.batches)
    await graph.close()
    with pytest.raises(Unavailable, match="the graph was closed"):
        await waiting
    with pytest.raises(Unavailable, match="the graph is closed"):
        await graph.obj_get(1)
    assert cluster.is_closed


async def test_an_empty_many_form_sends_nothing(graph: Graph, cluster: FakeCluster) -> None:
    assert await graph.obj_get_many([]) == []
    assert await graph.obj_add_many([]) == []
    assert cluster.batches() == []


async def test_an_object_of_another_type_than_the_one_asked_for_is_an_error(graph: Graph, cluster: FakeCluster) -> None:
    cluster.objects[1] = user("a")
    with pytest.raises(WrongType, match="object 1 is of type 'user', not 'page'"):
        await graph.obj_get(1, "page")


async def test_counts_are_decoded_from_count_values(graph: Graph, cluster: FakeCluster) -> None:
    answer = pb.Answer(read=pb.ReadAnswer(values=[encode_count(3, 77), encode_count(3, 78)]))
    cluster.link("near-1").behaviour = lambda link, request, on_answer: on_answer(answer)
    assert await graph.assoc_count_many([(1, "friend"), (2, "friend")]) == [77, 78]


async def test_reads_share_a_message_with_reads_of_the_same_bound_on_staleness(
    graph: Graph, cluster: FakeCluster
) -> None:
    await asyncio.gather(
        graph.obj_get(1),
        graph.obj_get(2, max_staleness_ms=5_000),
        graph.obj_get_many([3, 4], max_staleness_ms=5_000),
        graph.obj_get(5, max_staleness_ms=9_000),
        graph.obj_get(6, max_staleness_ms=9_000, critical=True),
    )
    sent = [(each.read.max_staleness_ms, each.read.critical, list(each.read.obj_ids)) for each in cluster.batches()]
    assert sorted(sent) == [(0, False, [1]), (0, True, [6]), (5_000, False, [2, 3, 4]), (9_000, False, [5])]


async def test_every_read_takes_a_bound_on_staleness(graph: Graph, cluster: FakeCluster) -> None:
    await graph.obj_get(1, max_staleness_ms=7)
    await graph.obj_get_many([1], max_staleness_ms=7)
    await graph.assoc_get(1, "follows", [2], max_staleness_ms=7)
    await graph.assoc_get_many([(1, "follows", [2])], max_staleness_ms=7)
    await graph.assoc_count(1, "follows", max_staleness_ms=7)
    await graph.assoc_count_many([(1, "follows")], max_staleness_ms=7)
    await graph.assoc_range(1, "follows", 0, 5, max_staleness_ms=7)
    await graph.assoc_range_many([(1, "follows", 0, 5)], max_staleness_ms=7)
    await graph.assoc_time_range(1, "follows", None, None, 5, max_staleness_ms=7)
    await graph.assoc_time_range_many([(1, "follows", None, None, 5)], max_staleness_ms=7)
    assert [each.read.max_staleness_ms for each in cluster.batches()] == [7] * 10
