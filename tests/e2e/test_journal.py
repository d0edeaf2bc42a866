"""Journaled writes on real processes and a real database: outages, kills at every step, parking, several clients."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from click.testing import CliRunner

from tao.admin.connection import operator_links
from tao.admin.journal import hand_over, journal_followers, waiting_in
from tao.cli.commands import tao
from tao.client import Accepted, Graph, NotCommutative, SomeFailed, SyncGraph, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape
from tao.model.errors import DeadlineExceeded, InvalidArgument, OutcomeUnknown, RetryableError
from tao.wire.v1 import graph_pb2 as pb_graph
from tao.wire.v1 import graph_pb2_grpc as graph_grpc
from tao.wire.v1 import session_pb2 as pb_session
from tests.e2e.cluster_access import PATIENT, assert_converges, running_cluster
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    shape = Shape(tiers=1, followers=2, leaders=2, databases=2, shards=8)
    async with running_cluster(tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


@pytest.mark.asyncio(loop_scope="function")
async def test_sibling_makes_what_a_lost_acceptor_has_accepted(tmp_path: Path) -> None:
    shape = Shape(tiers=1, followers=2, leaders=1, databases=1, shards=4)

    def settings_of(name: str) -> dict[str, Any]:
        return {"journal": {"folder": str(tmp_path / "journals" / name), "copies": 2, "takeover_seconds": 6.0}}

    settings = ClusterSettings(
        state_dir=tmp_path / "cluster",
        shape=shape,
        durability=Durability.RELAXED,
        log_level="info",
        server_settings={name: settings_of(name) for name in ("follower-1a", "follower-1b")},
    )
    async with (
        DevCluster(settings) as cluster,
        connect(str(cluster.topology_path), settings=PATIENT) as graph,
    ):
        user, *pages = await ids_on(graph, 1, 21)
        await cluster.kill("db-1")
        receipts = [await accept(graph, user, page, 1) for page in pages]
        acceptors = {receipt.id.partition("/")[0] for receipt in receipts}
        assert len(acceptors) == 1, "the home of the shard accepts its writes"
        (acceptor,) = acceptors
        await cluster.kill(acceptor)
        shutil.rmtree(tmp_path / "journals" / acceptor)
        await cluster.restart("db-1")
        tokens = [await receipt.applied(timeout=PATIENT_SECONDS) for receipt in receipts]
        await cluster.restart(acceptor)
        for receipt in receipts:
            await receipt.applied(timeout=PATIENT_SECONDS)  # the acceptor knows nothing of it any more
        await edges_reach(graph, user, "subscribes", [(page, 1) for page in pages])
        assert await graph.assoc_count(user, "subscribes", after=tokens[-1]) == len(pages)
        await (await accept(graph, user, pages[0], 2)).applied(timeout=PATIENT_SECONDS)
        await assert_converges(cluster)


@pytest_asyncio.fixture(loop_scope="module")
async def graph(cluster: DevCluster) -> AsyncIterator[Graph]:
    async with connect(str(cluster.topology_path), settings=PATIENT) as graph:
        yield graph


async def ids_on(graph: Graph, shard: int, count: int) -> list[int]:
    """Return ids on a shard, once its leader can reserve them."""
    async with asyncio.timeout(PATIENT_SECONDS):
        while True:
            try:
                return await graph.reserve_ids(count, shard=shard)
            except RetryableError:
                await asyncio.sleep(0.1)


async def accept(graph: Graph, id1: int, id2: int, time: int) -> Accepted:
    """Have an edge accepted, however often a follower that was killed must be asked again."""
    async with asyncio.timeout(PATIENT_SECONDS):
        while True:
            try:
                return await graph.later.assoc_add(id1, "subscribes", id2, time)
            except (RetryableError, OutcomeUnknown):
                await asyncio.sleep(0.05)


async def edges_reach(graph: Graph, user: int, atype: str, expected: list[tuple[int, int]]) -> None:
    """Wait until the master has just these edges."""
    async with asyncio.timeout(PATIENT_SECONDS):
        while True:
            try:
                found = await graph.assoc_range(user, atype, 0, 500, critical=True)
            except RetryableError:
                found = None
            if found is not None and sorted((edge.id2, edge.time) for edge in found) == sorted(expected):
                return
            await asyncio.sleep(0.1)


async def test_receipts_give_tokens_of_accepted_writes(graph: Graph) -> None:
    user, page, other = [(await ids_on(graph, shard, 1))[0] for shard in (0, 5, 5)]
    added = await graph.later.obj_add("user", {"name": "late"}, user)
    assert await added.applied()
    found = await graph.obj_get(user)
    assert found is not None
    receipt = await graph.later.assoc_add(user, "subscribes", page, 7)
    token = await receipt.applied()
    assert receipt.id.startswith("follower")
    assert [edge.id2 for edge in await graph.assoc_range(user, "subscribes", 0, 10, after=token)] == [page]
    assert [edge.id2 for edge in await graph.assoc_range(page, "subscribers", 0, 10, after=token)] == [user]
    receipts = await graph.later.assoc_add_many([(user, "subscribes", other, 8), (user, "subscribes", page, 9)])
    await asyncio.gather(*(each.applied() for each in receipts))
    await (await graph.later.assoc_archive(user, "subscribes", page)).applied()
    await (await graph.later.assoc_delete(user, "subscribes", other)).applied()
    assert not await graph.assoc_range(user, "subscribes", 0, 10, critical=True)
    assert await graph.assoc_count(user, "subscribes", state="archived") == 1
    assert await receipt.applied() == token, "the result is kept"


async def test_every_write_of_a_journaled_block_is_accepted_and_those_that_do_not_commute_are_refused(
    graph: Graph,
) -> None:
    user, page = await ids_on(graph, 1, 2)
    with graph.journaled(priority="low"):
        added = await graph.obj_add("user", {"name": "block"}, id=user)
        edge = await graph.assoc_add(user, "subscribes", page, 1)
        with pytest.raises(NotCommutative):
            await graph.assoc_add(user, "friend", page, 1)
        with pytest.raises(NotCommutative):
            await graph.obj_add("user", {"name": "no id"})
        with pytest.raises(SomeFailed) as caught:
            await graph.assoc_delete_many([(user, "subscribes", page), (user, "friend", page)])
    assert list(caught.value.errors) == [1]
    assert isinstance(caught.value.errors[1], NotCommutative)
    assert added.receipt is not None
    assert edge.receipt is not None
    await added.receipt.applied()
    await edge.receipt.applied()
    with pytest.raises(InvalidArgument, match="priority"), graph.journaled(priority="urgent"):
        pass
    assert (await graph.assoc_add(user, "subscribes", page, 1)).receipt is None, "after the block writes are made"


async def test_states_of_nodes_and_jobs_are_accepted_and_made_later(cluster: DevCluster, graph: Graph) -> None:
    user, job_id, other_id, *others = await ids_on(graph, 1, 6)
    await graph.assoc_add_many([(user, "subscribes", other, 1) for other in others])
    archived = await graph.later.node_set_state(user, "archived")
    await archived.applied(timeout=PATIENT_SECONDS)
    late = await graph.assoc_add(user, "subscribes", others[0], 2)
    assert late.state == "archived", "an edge of an archived node lands in its state"
    for _ in range(2):  # the same job again changes nothing
        added = await graph.later.add_job("each_object", {"function": "none", "shard": 1}, near=user, id=job_id)
        await added.applied(timeout=PATIENT_SECONDS)
    assert (await graph.job(job_id).refresh()).state == "waiting"
    with graph.journaled():
        job = await graph.add_job("each_object", {"function": "none", "shard": 1}, near=user, id=other_id)
        assert job.receipt is not None
        await job.receipt.applied(timeout=PATIENT_SECONDS)
        assert (await job.refresh()).state == "waiting", "a job is read at once"
        of_node = await graph.node_set_state(user, "normal")
        assert of_node.receipt is not None
        await of_node.receipt.applied(timeout=PATIENT_SECONDS)
        with pytest.raises(NotCommutative):
            await graph.add_job("each_object", {"function": "none", "shard": 1}, near=user)
    for each in (job_id, other_id):
        await graph.job(each).cancel()

    def block() -> tuple[str | None, str]:
        with SyncGraph(str(cluster.topology_path), settings=PATIENT) as blocking:
            receipt = blocking.later.node_set_state(user, "archived")
            blocking.applied(receipt, PATIENT_SECONDS)
            added = blocking.later.add_job("each_object", {"function": "none", "shard": 1}, near=user, id=job_id)
            blocking.applied(added, PATIENT_SECONDS)
            return blocking.assoc_add(user, "subscribes", others[1], 3).state, blocking.job(job_id).refresh().state

    assert await asyncio.to_thread(block) == ("archived", "cancelled")
    # Nobody does the jobs of the node here: leave no edge whose ends lie in different lists.
    await graph.assoc_delete_many([(user, "subscribes", other) for other in others])


async def test_sync_graph_accepts_and_waits(cluster: DevCluster, graph: Graph) -> None:
    user, page = await ids_on(graph, 2, 2)

    def work() -> None:
        with SyncGraph(str(cluster.topology_path), settings=PATIENT) as sync:
            token = sync.applied(sync.later.assoc_add(user, "subscribes", page, 3))
            assert sync.assoc_count(user, "subscribes", after=token) == 1
            with sync.journaled():
                receipt = sync.assoc_delete(user, "subscribes", page).receipt
            assert receipt is not None
            sync.applied(receipt)

    await asyncio.to_thread(work)
    assert await graph.assoc_count(user, "subscribes", critical=True) == 0


async def test_accepted_operation_is_applied_whatever_fails_in_between(cluster: DevCluster, graph: Graph) -> None:
    user, *pages = await ids_on(graph, 3, 61)
    receipts = [await accept(graph, user, page, 1) for page in pages[:20]]
    # The database of shards 0 to 3 is away: writes are accepted, and wait.
    await cluster.kill("db-1")
    receipts += [await accept(graph, user, page, 1) for page in pages[20:40]]
    with pytest.raises(DeadlineExceeded):
        await receipts[-1].applied(timeout=0.5)
    # The acceptors die with what they hold, and so do the leaders later.
    await asyncio.gather(*map(cluster.kill, ("follower-1a", "follower-1b")))
    # They accept again at once, but are ready only when leaders confirm all shards, for which the database is asked.
    ready = [asyncio.create_task(cluster.restart(name)) for name in ("follower-1a", "follower-1b")]
    receipts += [await accept(graph, user, page, 1) for page in pages[40:]]
    await asyncio.gather(*map(cluster.kill, ("leader-1", "leader-2")))
    await cluster.restart("db-1")
    await asyncio.gather(*map(cluster.restart, ("leader-1", "leader-2")), *ready)
    await edges_reach(graph, user, "subscribes", [(page, 1) for page in pages])
    tokens = [await receipt.applied(timeout=PATIENT_SECONDS) for receipt in receipts]
    assert await graph.assoc_count(user, "subscribes", after=tokens[-1]) == len(pages)
    await assert_converges(cluster)


async def test_acceptors_killed_at_any_moment_lose_nothing_accepted(cluster: DevCluster, graph: Graph) -> None:
    user, *pages = await ids_on(graph, 6, 400)
    accepted: list[int] = []
    stopped = asyncio.Event()

    async def write() -> None:
        for page in pages:
            if stopped.is_set():
                return
            await accept(graph, user, page, 1)
            accepted.append(page)
            await asyncio.sleep(0.005)

    writing = asyncio.create_task(write())
    for follower in ("follower-1a", "follower-1b", "follower-1a", "follower-1b"):
        reached = len(accepted) + 20
        async with asyncio.timeout(PATIENT_SECONDS):
            while len(accepted) < reached and not writing.done():  # noqa: ASYNC110 - counts the writes of another task
                await asyncio.sleep(0.005)
        await cluster.kill(follower)
        await cluster.restart(follower)
    stopped.set()
    await writing
    # A write whose answer was lost in a kill may have been accepted, too.
    async with asyncio.timeout(PATIENT_SECONDS):
        while True:
            found = {edge.id2 for edge in await graph.assoc_range(user, "subscribes", 0, 500, critical=True)}
            count = await graph.assoc_count(user, "subscribes", critical=True)
            # Nothing takes effect twice. It may take effect between the two reads.
            if found >= set(accepted) and count == len(found):
                break
            await asyncio.sleep(0.1)
    await assert_converges(cluster)


async def test_unary_calls_accept_writes_and_ask_any_follower_for_them(cluster: DevCluster, graph: Graph) -> None:
    user, page = await ids_on(graph, 7, 2)
    ports = [cluster.record.ports[name]["grpc"] for name in ("follower-1a", "follower-1b")]
    for number, port in enumerate(ports):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = graph_grpc.GraphStub(channel)
            add = pb_graph.AssocAddRequest(id1=user, atype=15, id2=page, time=number + 1, accept=True, priority=1)
            accepted = (await stub.AssocAdd(add, timeout=PATIENT_SECONDS)).accepted
            assert accepted
        for other in ports:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{other}") as channel:
                asked = pb_session.AwaitApplied(accepted=accepted)
                reply = await graph_grpc.GraphStub(channel).Applied(asked, timeout=PATIENT_SECONDS)
                assert reply.token
    assert [edge.time for edge in await graph.assoc_range(user, "subscribes", 0, 9, critical=True)] == [2]


async def test_journal_is_moved_to_another_follower_and_receipts_follow(cluster: DevCluster, graph: Graph) -> None:
    user, *pages = await ids_on(graph, 2, 21)
    topology = await cluster.topology()
    await cluster.kill("db-1")
    try:
        receipts = [await accept(graph, user, page, 1) for page in pages]
        names = {receipt.id.partition("/")[0] for receipt in receipts}
        (acceptor,) = names
        (other,) = {"follower-1a", "follower-1b"} - names
        async with operator_links(topology, "") as links:
            (server,) = journal_followers(topology, [acceptor])
            report = await hand_over(links, server, other)
            assert report["trouble"] == ""
            assert waiting_in(report) == 0 or report["moved"] >= len(pages)
    finally:
        await cluster.restart("db-1")
    for receipt in receipts:
        await receipt.applied(timeout=PATIENT_SECONDS)
    await edges_reach(graph, user, "subscribes", [(page, 1) for page in pages])


async def test_operators_see_what_was_given_up_and_decide(cluster: DevCluster, graph: Graph) -> None:
    (user,) = await ids_on(graph, 4, 1)
    await graph.obj_add("user", {"name": "first"}, id=user)
    receipt = await graph.later.obj_add("user", {"name": "second"}, user)
    with pytest.raises(InvalidArgument, match="other content"):
        await receipt.applied(timeout=PATIENT_SECONDS)

    async def journal(*words: str) -> tuple[int, Any]:  # Any: a JSON document
        options = ["--connect", str(cluster.topology_path), "--json"]
        ended = await asyncio.to_thread(CliRunner().invoke, tao, ["journal", *words, *options])
        return ended.exit_code, json.loads(ended.stdout)

    async def parked() -> list[str]:
        return [each["id"] for each in (await journal("parked"))[1]]

    assert await parked() == [receipt.id]
    assert (await journal("status"))[0] == 1
    assert (await journal("inject", receipt.id, "--yes"))[0] == 0
    async with asyncio.timeout(PATIENT_SECONDS):
        while len(again := await parked()) != 1 or again == [receipt.id]:  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.1)
    code, report = await journal("discard", again[0], "--yes")
    assert (code, report["write"]["write"]["obj_add"]["id"]) == (0, str(user))
    assert await parked() == []
    assert (await journal("status"))[0] == 0
    follower = receipt.id.partition("/")[0]
    assert (await journal("drain", follower, "--timeout", str(PATIENT_SECONDS)))[0] == 0
