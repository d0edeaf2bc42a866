"""States of edges in the SDK: which message a call sends, which list a read names, and which calls are refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tao.client import EdgeState, EdgeWrite, Graph, InvalidArgument, InvalidField
from tao.model.graph import Edge
from tao.wire.session import AnswerHandler
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import FakeCluster, FakeLink

SUBSCRIBES, SUBSCRIBERS, ARCHIVED = 15, 16, 152


def last_write(cluster: FakeCluster) -> pb.Write:
    return cluster.batches()[-1].write.writes[-1]


def answering(result: pb.WriteResult) -> Callable[[FakeLink, pb.Request, AnswerHandler], None]:
    def answer(_: FakeLink, __: pb.Request, on_answer: AnswerHandler) -> None:
        on_answer(pb.Answer(write=pb.WriteAnswer(results=[result])))

    return answer


@pytest.fixture
async def graph(cluster: FakeCluster) -> Graph:
    return await cluster.connect()


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


async def test_reads_name_the_list_of_the_state(graph: Graph, cluster: FakeCluster) -> None:
    cluster.lists[1, SUBSCRIBES] = [Edge(7, 3)]
    cluster.lists[1, ARCHIVED] = [Edge(8, 5), Edge(9, 4)]
    assert (await graph.assoc_range(1, "subscribes", 0, 10)).id2s == [7]
    archived = await graph.assoc_range(1, "subscribes", 0, 10, state="archived")
    assert archived.id2s == [8, 9]
    assert archived[0].atype == "subscribes"
    assert (await graph.assoc_time_range(1, "subscribes", None, None, 10, state="archived")).id2s == [8, 9]
    assert (await graph.assoc_get(1, "subscribes", [7, 9], state="archived")).id2s == [9]
    assert await graph.assoc_count(1, "subscribes", state="archived") == 2
    assert await graph.assoc_count_many([(1, "subscribes"), (1, "subscribes", "archived")]) == [1, 2]
    assert [edge.id2 async for edge in graph.assoc_iter(1, "subscribes", page=1, state="archived")] == [8, 9]
    ranges = await graph.assoc_range_many([(1, "subscribes", 0, 9, "archived"), (1, "subscribes", 0, 9, "normal")])
    assert [found.id2s for found in ranges] == [[8, 9], [7]]


async def test_writes_are_operations_with_or_without_a_time(graph: Graph, cluster: FakeCluster) -> None:
    await graph.assoc_archive(1, "subscribes", 2)
    assert last_write(cluster).assoc_merge == pb.AssocMerge(id1=1, atype=SUBSCRIBES, id2=2, state=2)
    await graph.assoc_restore(1, "subscribes", 2, at=9)
    assert last_write(cluster).assoc_merge == pb.AssocMerge(id1=1, atype=SUBSCRIBES, id2=2, state_us=9)
    await graph.assoc_set_state(1, "subscribes", 2, "negative", at=9, time=4)
    merge = last_write(cluster).assoc_merge
    assert (merge.state, merge.has_payload, merge.time, merge.payload_us) == (1, True, 4, 0)
    await graph.assoc_add(1, "subscribes", 2, 5, at=9)
    assert last_write(cluster).assoc_merge == pb.AssocMerge(
        id1=1, atype=SUBSCRIBES, id2=2, state_us=9, has_payload=True, time=5
    )
    await graph.assoc_add(1, "subscribes", 2, 5)
    assert last_write(cluster).HasField("assoc_add")
    await graph.assoc_delete(1, "subscribes", 2, at=9)
    assert last_write(cluster).assoc_merge.state == 3
    await graph.assoc_set_state_many([(1, "subscribes", 2, "archived", 9)])
    assert last_write(cluster).assoc_merge.state_us == 9


async def test_a_write_says_which_list_holds_the_edge_and_whether_it_lost(graph: Graph, cluster: FakeCluster) -> None:
    result = pb.WriteResult(found=True, effective_state=2, superseded=True, registers=pb.EdgeRegisters(state_us=5))
    cluster.link("near-1").behaviour = answering(result)
    assert await graph.assoc_restore(1, "subscribes", 2, at=4) == EdgeWrite(True, False, "archived", True)


async def test_the_state_of_an_edge_is_read_with_both_times(graph: Graph, cluster: FakeCluster) -> None:
    link = cluster.link("near-1")
    link.behaviour = answering(pb.WriteResult(registers=pb.EdgeRegisters(own_state=2, state_us=5), effective_state=3))
    assert await graph.assoc_state(1, "subscribes", 2) == EdgeState("archived", "removed", 5, 0)
    assert last_write(cluster).HasField("read_state")
    link.behaviour = answering(pb.WriteResult(registers=pb.EdgeRegisters()))
    assert await graph.assoc_state(1, "subscribes", 2) is None


Call = Callable[[Graph], Awaitable[object]]


@pytest.mark.parametrize(
    ("call", "error", "why"),
    [
        (lambda g: g.assoc_range(1, "likes", 0, 9, state="archived"), InvalidArgument, "'likes' has no states"),
        (lambda g: g.assoc_range(1, "subscribes", 0, 9, state="gone"), InvalidArgument, "state must be one of"),
        (lambda g: g.assoc_archive(1, "likes", 2), InvalidArgument, "'likes' has no states"),
        (lambda g: g.assoc_state(1, "likes", 2), InvalidArgument, "'likes' has no states"),
        (lambda g: g.assoc_add(1, "likes", 2, at=5), InvalidArgument, "'likes' has no states"),
        (lambda g: g.assoc_archive(1, "subscribes", 2, at=-1), InvalidArgument, "at is -1"),
        (lambda g: g.assoc_archive(1, "subscribes", 2, at=1.5), InvalidArgument, "at must be an int"),
        (lambda g: g.assoc_set_state(1, "subscribes", 2, 2), InvalidArgument, "state must be one of"),
        (lambda g: g.assoc_add(1, "subscribes", 2, 5, {"x": 1}, at=5), InvalidField, "x"),
    ],
)
async def test_a_wrong_call_is_refused_and_nothing_is_sent(
    graph: Graph, cluster: FakeCluster, call: Call, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        await call(graph)
    assert cluster.batches() == []
