"""`SyncGraph`: the same operations as `Graph`, from any thread, before and after a fork."""

from __future__ import annotations

import inspect
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import assert_type

import pytest

from tao.client import (
    DeadlineExceeded,
    Graph,
    InvalidArgument,
    SyncAccepted,
    SyncGraph,
    Unavailable,
    UnknownJob,
    WriteToken,
)
from tao.model.graph import encode_object
from tao.model.receipts import Receipt
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import SCHEMA, FakeCluster, make_id


def sync_graph(cluster: FakeCluster | None = None) -> SyncGraph:
    used = cluster or FakeCluster()
    return SyncGraph("fake:1", opener=used.connect)


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_both_graphs_have_the_same_operations_with_the_same_signatures() -> None:
    followed = {"use_routes", "use_schema"}  # called by the configuration, not by applications
    assert public(SyncGraph) == public(Graph) - followed
    for name in public(SyncGraph):
        one, other = inspect.getattr_static(Graph, name), inspect.getattr_static(SyncGraph, name)
        assert isinstance(one, property) == isinstance(other, property), name
        if not isinstance(one, property):
            blocking = str(inspect.signature(one)).replace("-> 'AsyncIterator", "-> 'Iterator")
            blocking = blocking.replace("-> 'EdgeSet'", "-> 'SyncEdgeSet'").replace("-> 'Job'", "-> 'SyncJob'")
            assert blocking == str(inspect.signature(other)), name


def test_operations_work_without_a_loop() -> None:
    with sync_graph() as graph:
        alice = graph.obj_add("user", {"name": "Alice"})
        graph.assoc_add(alice, "friend", 7, time=3)
        found = graph.obj_get(alice)
        assert found is not None
        assert found.fields["name"] == "Alice"
        assert graph.assoc_range(alice, "friend", 0, 9).id2s == [7]
        assert graph.obj_update(alice, {"home": "x"}) is True
        assert graph.assoc_count(alice, "friend") == 1
        assert graph.servers()["near-1"] == {"health": "up"}
        assert len(graph.reserve_ids(3)) == 3
        with graph.trace() as trace:
            graph.obj_get_many([alice])
        assert [each.operation for each in trace] == ["obj_get"]
        assert (graph.topology.version, graph.region, graph.stats.topology_version) == (1, "east", 1)
        with pytest.raises(InvalidArgument, match="id is 0"):
            graph.obj_get(0)


def test_receipts_of_journaled_writes_block_until_the_write_is_made() -> None:
    cluster = FakeCluster()
    near = cluster.link("near-1")
    accepted = pb.WriteResult(accepted=Receipt("near-1", "journal", 1, b"x").encoded())
    near.behaviour = lambda _, request, on_answer: on_answer(
        pb.Answer(write=pb.WriteAnswer(results=[accepted] * len(request.write.writes)))
    )
    with sync_graph(cluster) as graph:
        late = graph.later.obj_add("user", None, make_id(9))
        many = graph.later.obj_add_many([("user", None, make_id(10))])
        with graph.journaled():
            added = graph.obj_add("user", {"name": "Alice"}, id=make_id(11))
            (other,) = graph.obj_add_many([("user", None, None, make_id(13))])
            edge = graph.assoc_delete(make_id(9), "subscribes", make_id(10))
            (other_edge,) = graph.assoc_delete_many([(make_id(9), "subscribes", make_id(10))])
            job = graph.add_job("walk", {}, near=make_id(9), id=make_id(12))
        # A check of types would otherwise ask for an `await`, and pass a receipt that is never waited for.
        assert_type(added.receipt, SyncAccepted | None)
        assert_type(other.receipt, SyncAccepted | None)
        assert_type(edge.receipt, SyncAccepted | None)
        assert_type(other_edge.receipt, SyncAccepted | None)
        receipts = (added.receipt, other.receipt, edge.receipt, other_edge.receipt, job.receipt)
        for receipt in (late, *many, *receipts):
            assert isinstance(receipt, SyncAccepted)
            assert isinstance(receipt.applied(timeout=1.0), WriteToken)
            assert graph.applied(receipt) == receipt.applied()
        near.of_receipts = DeadlineExceeded("it still waits")
        with pytest.raises(DeadlineExceeded, match="still waits"):
            late.applied()
        near.of_receipts = pb.WriteResult(found=True)
        near.behaviour = lambda _, __, on_answer: on_answer(
            pb.Answer(write=pb.WriteAnswer(results=[pb.WriteResult(found=True, job=pb.Job(id=job.id, state=1))]))
        )
        assert repr(job) == f"<SyncJob {job.id}: unknown, 0 edges>"
        assert job.wait(timeout=5.0).done, "it waits for its receipt first"


def test_many_threads_share_one_graph() -> None:
    cluster = FakeCluster()
    cluster.objects = {make_id(n): encode_object(1, 1, b"") for n in range(1, 201)}
    with sync_graph(cluster) as graph, ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda n: graph.obj_get(make_id(n)), range(1, 201)))
    assert [each.id for each in found if each] == [make_id(n) for n in range(1, 201)]


def test_a_graph_opens_on_first_use_and_closes_once() -> None:
    before = threading.active_count()
    graph = sync_graph()
    assert threading.active_count() == before
    assert graph.obj_get(1) is None
    assert threading.active_count() == before + 1
    graph.close()
    graph.close()
    assert threading.active_count() == before
    with pytest.raises(Unavailable, match="closed"):
        graph.obj_get(1)


def test_a_graph_that_could_not_be_opened_leaves_no_thread_and_may_be_tried_again() -> None:
    cluster = FakeCluster()
    failures = [Unavailable("not yet")]

    async def opener() -> Graph:
        if failures:
            raise failures.pop()
        return await cluster.connect()

    before = threading.active_count()
    with SyncGraph("fake:1", opener=opener) as graph:
        with pytest.raises(Unavailable, match="not yet"):
            graph.obj_get(1)
        assert threading.active_count() == before
        assert graph.obj_get(1) is None


def test_after_a_fork_parent_and_child_use_a_loop_of_their_own() -> None:
    cluster = FakeCluster()
    cluster.objects = {make_id(1): encode_object(1, 1, b"")}
    with sync_graph(cluster) as graph:
        assert graph.obj_get(make_id(1)) is not None
        child = os.fork()
        if child == 0:
            status = 1
            try:
                found = graph.obj_get(make_id(1))
                graph.close()
                status = 0 if found is not None and found.id == make_id(1) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert graph.obj_get(make_id(1)) is not None


def test_a_recording_holds_the_writes_of_its_own_thread() -> None:
    friend = SCHEMA.atype("friend").number
    with sync_graph() as graph, ThreadPoolExecutor(8) as threads:

        def write(number: int) -> WriteToken:
            with graph.recording() as recording:
                graph.assoc_add(make_id(number), "friend", 7)
                graph.obj_delete_many([make_id(number)])
            return recording.token

        tokens = list(threads.map(write, range(1, 9)))
        everything = graph.token
    for number, token in enumerate(tokens, 1):
        assert token == WriteToken([(make_id(number), friend, 1), (make_id(number), 0, 1)])
        assert everything.minimum_of_object(make_id(number)) == 1


def test_reads_take_tokens_without_a_loop() -> None:
    cluster = FakeCluster()
    with sync_graph(cluster) as graph:
        graph.obj_get(make_id(1), after=WriteToken([(make_id(1), 0, 5)]).text())
        with pytest.raises(InvalidArgument, match="token"):
            graph.obj_get_many([make_id(1)], after="garbage")
    (request,) = cluster.batches()
    assert list(request.read.minimum_versions) == [5]


def test_a_job_is_followed_without_a_loop() -> None:
    with sync_graph() as graph:
        job = graph.job(9)
        assert (job.id, job.state, job.done, job.edges, job.error) == (9, "unknown", False, 0, "")
        added = graph.add_job("walk", {}, near=1)
        with pytest.raises(UnknownJob):  # the followers here keep no jobs
            added.wait()
        assert not job.refresh().cancel()
