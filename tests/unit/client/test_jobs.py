"""Background jobs in the SDK: what a call sends, what a job says of itself, and which calls are refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import pytest

from tao.client import AddedObject, DeadlineExceeded, Graph, InvalidArgument, TooLarge, UnknownJob
from tao.model.receipts import Receipt
from tao.wire.session import AnswerHandler
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import FakeCluster, FakeLink


def answering(*jobs: pb.Job | None) -> Callable[[FakeLink, pb.Request, AnswerHandler], None]:
    """Answer writes with these jobs, one after the other, and then with the last one."""
    left = list(jobs)

    def answer(_: FakeLink, __: pb.Request, on_answer: AnswerHandler) -> None:
        job = left.pop(0) if len(left) > 1 else left[0]
        on_answer(pb.Answer(write=pb.WriteAnswer(results=[pb.WriteResult(found=job is not None, job=job)])))

    return answer


def last_write(cluster: FakeCluster) -> pb.Write:
    return cluster.batches()[-1].write.writes[-1]


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
async def graph(cluster: FakeCluster) -> Graph:
    return await cluster.connect()


async def test_a_job_is_added_on_the_shard_of_its_neighbour(graph: Graph, cluster: FakeCluster) -> None:
    cluster.link("near-1").behaviour = answering(pb.Job(id=9, kind="walk"))
    job = await graph.add_job("walk", {"list": AddedObject(7)}, near=1, priority="low")
    sent = last_write(cluster).add_job
    assert (sent.id, sent.shard, sent.kind, sent.priority) == (0, 0, "walk", 2)
    assert msgspec.msgpack.decode(sent.body) == {"list": 7}
    assert (job.id, job.state, job.done, job.edges) == (9, "waiting", False, 0)
    await graph.add_job("walk", {}, near=1, id=5)
    assert last_write(cluster).add_job.id == 5


async def test_a_job_is_waited_for_until_it_ends(graph: Graph, cluster: FakeCluster) -> None:
    cluster.link("near-1").behaviour = answering(
        pb.Job(id=9, edges=1), pb.Job(id=9, edges=2, worker="w"), pb.Job(id=9, edges=3, state=1)
    )
    job = graph.job(9)
    assert (job.state, job.done) == ("unknown", False)
    assert await job.wait() is job
    assert (job.state, job.done, job.edges) == ("done", True, 3)
    assert last_write(cluster).read_job.id == 9


async def test_a_job_that_is_parked_or_that_nobody_knows_ends_the_waiting(graph: Graph, cluster: FakeCluster) -> None:
    cluster.link("near-1").behaviour = answering(pb.Job(id=9, state=2, error="ValueError: broken"))
    job = await graph.job(9).wait()
    assert (job.state, job.error, job.done) == ("parked", "ValueError: broken", False)
    cluster.link("near-1").behaviour = answering(None)
    with pytest.raises(UnknownJob, match="there is no job 9; one that has ended is kept for a week"):
        await job.wait()
    assert job.state == "unknown"


async def test_waiting_ends_at_its_timeout(graph: Graph, cluster: FakeCluster) -> None:
    cluster.link("near-1").behaviour = answering(pb.Job(id=9))
    with pytest.raises(DeadlineExceeded, match="job 9 is not done"):
        await graph.job(9).wait(timeout=0.01)


async def test_a_job_that_is_done_is_not_cancelled(graph: Graph, cluster: FakeCluster) -> None:
    cluster.link("near-1").behaviour = answering(pb.Job(id=9, state=3), pb.Job(id=9, state=1))
    job = graph.job(9)
    assert await job.cancel()
    assert not await job.cancel()
    assert last_write(cluster).cancel_job.id == 9


async def test_a_job_is_read_and_cancelled_at_once_in_a_journaled_block(graph: Graph, cluster: FakeCluster) -> None:
    cluster.link("near-1").behaviour = answering(pb.Job(id=9), pb.Job(id=9, state=3))
    with graph.journaled():
        assert (await graph.job(9).refresh()).state == "waiting"
        assert await graph.job(9).cancel()
    assert not any(batch.write.accept for batch in cluster.batches())


async def test_a_job_that_a_journal_has_accepted_is_waited_for_once_it_is_added(
    graph: Graph, cluster: FakeCluster
) -> None:
    receipt = Receipt("near-1", "journal", 1, b"x").encoded()

    def answer(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        if request.write.accept:
            result = pb.WriteResult(accepted=receipt)
        elif any(each.WhichOneof("body") == "await_applied" for each in link.sent):
            result = pb.WriteResult(found=True, job=pb.Job(id=9, state=1))
        else:
            result = pb.WriteResult(found=False)
        on_answer(pb.Answer(write=pb.WriteAnswer(results=[result])))

    cluster.link("near-1").behaviour = answer
    with graph.journaled():
        job = await graph.add_job("walk", {}, near=1, id=9)
    assert (await job.wait()).done


async def test_the_job_of_a_journaled_state_of_a_node_says_how_to_wait_for_it(
    graph: Graph, cluster: FakeCluster
) -> None:
    accepted = pb.WriteResult(accepted=Receipt("near-1", "journal", 1, b"x").encoded())
    cluster.link("near-1").behaviour = lambda _, __, on_answer: on_answer(
        pb.Answer(write=pb.WriteAnswer(results=[accepted]))
    )
    with graph.journaled():
        job = await graph.node_set_state(1, "archived")
    sent = len(cluster.batches())
    for call in (job.wait, job.refresh, job.cancel):
        with pytest.raises(InvalidArgument, match=r"job\.receipt\.applied"):
            await call()
    assert len(cluster.batches()) == sent


Call = Callable[[Graph], Awaitable[object]]


@pytest.mark.parametrize(
    ("call", "error", "why"),
    [
        (lambda g: g.add_job("walk", {}, near=1, priority="urgent"), InvalidArgument, "'urgent' is no priority"),
        (lambda g: g.add_job("Walk", {}, near=1), InvalidArgument, "'Walk' is no kind"),
        (lambda g: g.add_job("walk", {}, near=0), InvalidArgument, "near is 0"),
        (lambda g: g.add_job("walk", {}, near=1, id=1 << 48), InvalidArgument, "is on another shard"),
        (lambda g: g.add_job("walk", {"x": object()}, near=1), InvalidArgument, "cannot be stored"),
        (lambda g: g.add_job("walk", {"x": b"x" * 70_000}, near=1), TooLarge, "at most 65536"),
    ],
)
async def test_a_wrong_call_is_refused_and_nothing_is_sent(
    graph: Graph, cluster: FakeCluster, call: Call, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        await call(graph)
    assert cluster.batches() == []
