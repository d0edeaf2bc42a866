"""Read your writes: the versions that the SDK attaches by itself, those of tokens, and the tokens of recordings."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tao.client import ClientSettings, Graph, InvalidArgument, SomeFailed, StaleRead, TaoError, WriteLost, WriteToken
from tao.client.operations import token_without_result
from tao.client.own_writes import OwnWrites
from tao.model.ids import SHARD_SHIFT
from tao.model.tokens import MAX_KEYS, PendingShard
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import SCHEMA, FakeCluster, failing, make_id, make_topology, until

FRIEND = SCHEMA.atype("friend").number
ALICE, BOB = make_id(1), make_id(2, shard=1)


def reads(cluster: FakeCluster) -> list[pb.ReadBatch]:
    return [request.read for request in cluster.batches() if request.HasField("read")]


def minimums(batch: pb.ReadBatch) -> dict[int, int]:
    return dict(zip(batch.minimum_slots, batch.minimum_versions, strict=True))


async def read_everything(graph: Graph, **options: Any) -> None:
    await asyncio.gather(
        graph.assoc_get(ALICE, "friend", [BOB], **options),
        graph.assoc_time_range(ALICE, "friend", None, None, 5, **options),
        graph.assoc_range(ALICE, "friend", 0, 5, **options),
        graph.assoc_count(ALICE, "friend", **options),
        graph.obj_get(ALICE, **options),
    )


async def read_everything_many(graph: Graph, **options: Any) -> None:
    await asyncio.gather(
        graph.assoc_get_many([(ALICE, "friend", [BOB])], **options),
        graph.assoc_time_range_many([(ALICE, "friend", None, None, 5)], **options),
        graph.assoc_range_many([(ALICE, "friend", 0, 5)], **options),
        graph.assoc_count_many([(ALICE, "friend")], **options),
        graph.obj_get_many([ALICE], **options),
    )


EVERY_READ = pytest.mark.parametrize("read", [read_everything, read_everything_many])
TOKEN = WriteToken([(ALICE, 0, 7), (ALICE, FRIEND, 9)])
ALL_OF_TOKEN = {0: 7, 1: 9, 2: 9, 3: 9, 4: 9}


@EVERY_READ
async def test_every_read_of_a_written_key_asks_for_the_version_of_the_write(
    cluster: FakeCluster, graph: Graph, read: Any
) -> None:
    cluster.versions = {(ALICE, 0): 40, (ALICE, FRIEND): 50}
    await graph.obj_update(ALICE, {"name": "Alice"}, "user")
    await graph.assoc_add(ALICE, "friend", BOB)
    await read(graph)
    assert minimums(reads(cluster)[-1]) == {0: 41, 1: 51, 2: 51, 3: 51, 4: 51}


async def test_reads_of_other_keys_ask_for_no_version(cluster: FakeCluster, graph: Graph) -> None:
    await graph.assoc_add(ALICE, "friend", BOB)
    await asyncio.gather(
        graph.obj_get(ALICE), graph.assoc_count(BOB, "friend"), graph.assoc_range(ALICE, "likes", 0, 5)
    )
    assert all(minimums(batch) == {} for batch in reads(cluster))


async def test_in_a_many_form_only_written_rows_ask_for_a_version_and_answers_stay_in_order(
    cluster: FakeCluster, graph: Graph
) -> None:
    written = await graph.obj_add("user", {"name": "written"})
    other = make_id(7, shard=written >> SHARD_SHIFT)
    found = await graph.obj_get_many([other, written, other])
    assert [each and each.fields["name"] for each in found] == [None, "written", None]
    (batch,) = reads(cluster)
    assert [batch.obj_ids[slot] for slot in minimums(batch)] == [written]


async def test_a_critical_read_names_the_written_version_so_that_a_lost_write_is_reported(
    cluster: FakeCluster, graph: Graph
) -> None:
    await read_everything(graph, critical=True, after=TOKEN)
    await read_everything_many(graph, critical=True, after=TOKEN.text())
    assert [(batch.critical, minimums(batch)) for batch in reads(cluster)] == [(True, ALL_OF_TOKEN)] * 2


async def test_a_read_that_is_critical_by_its_token_names_no_version(cluster: FakeCluster, graph: Graph) -> None:
    token = WriteToken(shards=[ALICE >> SHARD_SHIFT])
    await read_everything(graph, critical=True, after=token)
    await read_everything_many(graph, after=token)
    assert [(batch.critical, minimums(batch)) for batch in reads(cluster)] == [(True, {})] * 2


@pytest.mark.parametrize("form", [lambda token: token, WriteToken.text], ids=["a token", "its text"])
@EVERY_READ
async def test_every_read_takes_a_token(graph: Graph, cluster: FakeCluster, read: Any, form: Any) -> None:
    await read(graph, after=form(TOKEN))
    assert minimums(reads(cluster)[-1]) == ALL_OF_TOKEN


@EVERY_READ
async def test_a_token_that_names_a_shard_makes_its_reads_critical(
    graph: Graph, cluster: FakeCluster, read: Any
) -> None:
    await read(graph, after=WriteToken(shards=[ALICE >> SHARD_SHIFT]))
    assert [batch.critical for batch in reads(cluster)] == [True]


async def test_in_a_many_form_only_rows_of_critical_shards_are_read_critically(
    graph: Graph, cluster: FakeCluster
) -> None:
    await graph.obj_get_many([ALICE, BOB], after=WriteToken(shards=[1]))
    assert {batch.critical: list(batch.obj_ids) for batch in reads(cluster)} == {True: [BOB], False: [ALICE]}


async def test_the_higher_version_of_token_and_own_write_is_asked_for(cluster: FakeCluster, graph: Graph) -> None:
    cluster.versions = {(ALICE, 0): 40}
    await graph.obj_update(ALICE, {"name": "Alice"}, "user")
    for version, expected in ((7, 41), (77, 77)):
        await graph.obj_get(ALICE, after=WriteToken([(ALICE, 0, version)]))
        assert minimums(reads(cluster)[-1]) == {0: expected}


@pytest.mark.parametrize("garbage", ["x", "not a token", b"bytes", 7])
async def test_a_text_that_is_no_token_fails_before_the_network(
    cluster: FakeCluster, graph: Graph, garbage: Any
) -> None:
    with pytest.raises(InvalidArgument, match="token"):
        await graph.obj_get(ALICE, after=garbage)
    with pytest.raises(InvalidArgument, match="token"):
        await graph.obj_get_many([ALICE], after=garbage, critical=True)
    assert reads(cluster) == []


async def test_an_empty_text_asks_for_no_version(cluster: FakeCluster, graph: Graph) -> None:
    await graph.obj_get(ALICE, after="")
    assert minimums(reads(cluster)[-1]) == {}


async def test_a_retry_after_a_stale_read_asks_for_the_same_version(cluster: FakeCluster, graph: Graph) -> None:
    cluster.link("near-1").behaviour = failing(StaleRead("not yet"))
    await asyncio.gather(graph.obj_get(make_id(9)), graph.assoc_count(ALICE, "friend", after=TOKEN))
    (again,) = cluster.batches("far-1")
    assert (list(again.read.obj_ids), minimums(again.read)) == ([make_id(9)], {1: 9})


async def test_a_row_that_is_retried_alone_keeps_its_version(cluster: FakeCluster, graph: Graph) -> None:
    def one_is_stale(link: Any, request: pb.Request, on_answer: Any) -> None:
        answer = pb.ReadAnswer(slots=[0], values=link.values(request.read)[:1], failed_slots=[1])
        answer.errors.add(reason=StaleRead.reason)
        on_answer(pb.Answer(read=answer))

    cluster.link("near-1").behaviour = one_is_stale
    await asyncio.gather(graph.obj_get(make_id(9)), graph.assoc_count(ALICE, "friend", after=TOKEN))
    (again,) = cluster.batches("far-1")
    assert (list(again.read.count_id1s), minimums(again.read)) == ([ALICE], {0: 9})


async def test_a_token_of_one_graph_serves_another(cluster: FakeCluster, graph: Graph) -> None:
    await graph.assoc_add(ALICE, "friend", BOB)
    other_region = FakeCluster()
    async with await other_region.connect() as other:
        await other.assoc_count(ALICE, "friend", after=graph.token.text())
    assert minimums(reads(other_region)[-1]) == {0: 1}


async def test_without_attach_own_writes_tokens_exist_and_nothing_is_attached(cluster: FakeCluster) -> None:
    async with await cluster.connect(ClientSettings(attach_own_writes=False)) as graph:
        await graph.assoc_add(ALICE, "friend", BOB)
        await graph.assoc_count(ALICE, "friend")
        assert graph.token == WriteToken([(ALICE, FRIEND, 1)])
    assert minimums(reads(cluster)[-1]) == {}


async def test_a_recording_holds_the_writes_of_its_own_tasks_only(graph: Graph) -> None:
    entered, written = asyncio.Event(), asyncio.Event()

    async def neighbour() -> None:
        await entered.wait()
        await graph.assoc_add(BOB, "friend", ALICE)
        written.set()

    other = asyncio.create_task(neighbour())
    with graph.recording() as recording:
        entered.set()
        await asyncio.gather(
            graph.assoc_add(ALICE, "friend", BOB),
            graph.obj_delete_many([make_id(5), make_id(6)]),
        )
        await written.wait()
        with graph.recording() as inner:
            await graph.assoc_add(ALICE, "likes", BOB)
    await other
    await graph.obj_delete(make_id(8))
    likes = (ALICE, SCHEMA.atype("likes").number, 1)
    assert inner.token == WriteToken([likes])
    assert recording.token == WriteToken([(ALICE, FRIEND, 1), (make_id(5), 0, 1), (make_id(6), 0, 1), likes])


async def test_a_recording_ignores_the_writes_of_other_graphs(graph: Graph) -> None:
    async with await FakeCluster().connect() as other:
        with graph.recording() as recording, other.recording() as others:
            await graph.obj_delete(ALICE)
    assert recording.token == WriteToken([(ALICE, 0, 1)])
    assert not others.token


async def test_more_writes_than_a_token_names_make_their_shards_critical(cluster: FakeCluster, graph: Graph) -> None:
    with graph.recording() as recording:
        await graph.obj_delete_many([make_id(n, shard=3) for n in range(1, MAX_KEYS + 3)])
    assert recording.token.is_critical(3)
    await graph.obj_get(make_id(1, shard=3), after=recording.token)
    assert reads(cluster)[-1].critical


async def test_own_writes_are_bounded_in_number(cluster: FakeCluster) -> None:
    async with await cluster.connect(ClientSettings(own_writes_keys=2)) as graph:
        for number in (1, 2, 1, 3):
            await graph.obj_delete(make_id(number))
        await graph.obj_get_many([make_id(number) for number in (1, 2, 3)])
    assert minimums(reads(cluster)[-1]).keys() == {
        reads(cluster)[-1].obj_ids[:].index(make_id(number)) for number in (1, 3)
    }


async def test_own_writes_are_forgotten_after_their_time() -> None:
    own = OwnWrites(asyncio.get_running_loop(), max_keys=10, seconds=0.01)
    own.record([pb.WriteResult(changed_ids=[ALICE], changed_atypes=[0], changed_versions=[1])])
    assert own.versions == {(ALICE,): 1}
    await until(lambda: not own.versions)
    own.record([pb.WriteResult(changed_ids=[BOB], changed_atypes=[0], changed_versions=[1])])
    await until(lambda: not own.versions)
    own.close()


async def test_an_older_answer_that_arrives_late_lowers_no_version() -> None:
    own = OwnWrites(asyncio.get_running_loop(), max_keys=10, seconds=60)
    for version in (5, 4):
        own.record([pb.WriteResult(changed_ids=[ALICE], changed_atypes=[0], changed_versions=[version])])
    assert own.versions == {(ALICE,): 5}
    own.close()
    assert not own.token()


async def test_minimums_stay_with_their_rows_when_a_batch_is_cut(cluster: FakeCluster) -> None:
    settings = ClientSettings(max_batch_queries=2)
    async with await cluster.connect(settings) as graph:
        rows = [(make_id(number), "friend") for number in range(1, 6)]
        token = WriteToken([(id1, FRIEND, number) for number, (id1, _) in enumerate(rows, 1)])
        await asyncio.gather(*(graph.assoc_count(*row, after=token) for row in rows))
    asked = {batch.count_id1s[slot]: version for batch in reads(cluster) for slot, version in minimums(batch).items()}
    assert asked == {id1: number for number, (id1, _) in enumerate(rows, 1)}


async def test_rows_for_two_servers_keep_their_minimums() -> None:
    cluster = FakeCluster(make_topology(near=("near-1", "near-2")))
    async with await cluster.connect() as graph:
        ids = [make_id(1, shard) for shard in range(16)]
        await graph.obj_get_many(ids, after=WriteToken([(each, 0, each >> SHARD_SHIFT | 1) for each in ids]))
    asked = {batch.obj_ids[slot]: version for batch in reads(cluster) for slot, version in minimums(batch).items()}
    assert len(reads(cluster)) == 2
    assert asked == {each: each >> SHARD_SHIFT | 1 for each in ids}


async def test_a_lost_own_write_is_reported_once_and_then_forgotten(cluster: FakeCluster, graph: Graph) -> None:
    await graph.assoc_add(ALICE, "friend", BOB)
    await graph.assoc_add(BOB, "friend", ALICE)
    cluster.link("near-1").behaviour = failing(WriteLost("lost"), times=2)
    with pytest.raises(WriteLost):
        await graph.assoc_count(ALICE, "friend")
    with pytest.raises(SomeFailed) as failed:
        await graph.assoc_count_many([(BOB, "friend")])
    assert not failed.value.all_retryable
    assert await graph.assoc_count(ALICE, "friend") == 1
    assert await graph.assoc_count_many([(BOB, "friend")]) == [1]
    assert minimums(reads(cluster)[-1]) == {}
    assert cluster.batches("far-1") == [], "no other server has the version either"


async def test_a_lost_write_of_a_token_forgets_no_own_write(cluster: FakeCluster, graph: Graph) -> None:
    await graph.assoc_add(ALICE, "friend", BOB)
    cluster.link("near-1").behaviour = failing(WriteLost("lost"), times=2)
    for read in (read_everything, read_everything_many):
        with pytest.raises(TaoError):
            await read(graph, after=WriteToken([(ALICE, 0, 7), (ALICE, FRIEND, 9)]))
    await graph.assoc_count(ALICE, "friend")
    assert minimums(reads(cluster)[-1]) == {0: 1}


def test_token_of_a_write_whose_result_is_not_kept_has_an_owed_inverse_settled() -> None:
    for shards in ((2, 5), (5, 2)):
        token = token_without_result(shards)
        assert token.pending_at(5) == [PendingShard(5, 2)], "the list of the greater id may lack the edge"
        assert not token.pending_at(2)
    assert not token_without_result((2,)).has_pending
