"""Reads of lists whose inverse edges are pending: settled first, then read at the version that has the edge."""

from __future__ import annotations

from typing import Any

import pytest

from tao.client import EdgeWrite, Graph, SomeFailed, StaleRead, WriteToken
from tao.model.changes import ListChange, ShardMessages
from tao.model.errors import DatabaseDown, PermissionDenied, Unavailable
from tao.model.graph import ListKey, encode_count
from tao.model.ids import SHARD_SHIFT
from tao.model.tokens import MAX_PENDING, PendingInverse
from tao.wire.convert import error_to_pb, shard_messages_to_pb
from tao.wire.read_batch import ExistsRow
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import SCHEMA, FakeCluster, FakeLink, make_id

LIKES, LIKED_BY = SCHEMA.atype("likes").number, SCHEMA.atype("liked_by").number
LOW, HIGH, OTHER = make_id(1), make_id(2, shard=1), make_id(3, shard=1)
PENDING = PendingInverse(HIGH, LIKED_BY, LOW)


class Coordinator:
    """What the followers of a fake cluster answer when a pair is to be settled."""

    def __init__(self) -> None:
        self.asked: list[pb.Pair] = []
        self.asked_shards: list[tuple[int, int]] = []
        self.knows_shards = True
        self.error: Unavailable | None = None
        self.version = 9

    def settle(self, request: pb.Request) -> pb.Answer:
        self.asked += request.settle_pairs.pairs
        shards = request.settle_pairs.shards
        self.asked_shards += [(each.low_shard, each.high_shard) for each in shards]
        if self.error is not None:
            raise self.error
        if shards:
            return pb.Answer(settled_pairs=pb.SettledPairs(settled=int(self.knows_shards)))
        change = ListChange(HIGH, LIKED_BY, self.version - 1, self.version, 1)
        changes = [shard_messages_to_pb(ShardMessages(HIGH >> SHARD_SHIFT, 0, (change,)))] if self.version else []
        return pb.Answer(settled_pairs=pb.SettledPairs(settled=1, changes=changes))


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    found, answer = Coordinator(), FakeLink.answer

    def answer_pairs(link: FakeLink, request: pb.Request) -> pb.Answer:
        return found.settle(request) if request.HasField("settle_pairs") else answer(link, request)

    monkeypatch.setattr(FakeLink, "answer", answer_pairs)
    return found


async def write_pending(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> EdgeWrite:
    done = FakeLink.done

    def pending(link: FakeLink, write: pb.Write) -> pb.WriteResult:
        result = done(link, write)
        result.inverse_pending = True
        result.pending.add(id1=PENDING.id1, atype=PENDING.atype, coordinator_id=PENDING.coordinator_id)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(FakeLink, "done", pending)
        return await graph.assoc_add(LOW, "likes", HIGH, 5)


def last_read(cluster: FakeCluster) -> pb.ReadBatch:
    return [request.read for request in cluster.batches() if request.HasField("read")][-1]


async def test_a_read_of_the_master_that_only_the_token_demands_is_not_denied(
    cluster: FakeCluster, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(_: FakeLink, request: pb.Request) -> pb.Answer:
        size = len(request.read.count_id1s)
        error = error_to_pb(PermissionDenied("grants critical"))
        return pb.Answer(read=pb.ReadAnswer(failed_slots=range(size), errors=[error] * size))

    monkeypatch.setattr(FakeLink, "answer", deny)
    token = WriteToken(shards=[HIGH >> SHARD_SHIFT])
    with pytest.raises(StaleRead, match=r"the token demands a read of the master.*grants critical"):
        await graph.assoc_count(HIGH, "liked_by", after=token)
    with pytest.raises(SomeFailed) as caught:
        await graph.assoc_count_many([(HIGH, "liked_by")], after=token)
    assert isinstance(caught.value.errors[0], StaleRead)
    with pytest.raises(PermissionDenied):
        await graph.assoc_count(HIGH, "liked_by", critical=True)


async def test_a_read_after_an_own_pending_write_settles_the_pair_once_and_asks_for_its_version(
    graph: Graph, cluster: FakeCluster, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = await write_pending(graph, monkeypatch)
    assert (written.existed, written.is_new, written.inverse_pending) == (True, False, True)
    for _ in range(2):
        await graph.assoc_count(HIGH, "liked_by")
        assert list(last_read(cluster).minimum_versions) == [9]
    assert [(each.low_id, each.high_id, list(each.atypes)) for each in coordinator.asked] == [(LOW, HIGH, [LIKES])]


async def test_a_read_of_another_list_settles_nothing(
    graph: Graph, cluster: FakeCluster, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write_pending(graph, monkeypatch)
    await graph.assoc_count(OTHER, "liked_by")
    await graph.obj_get(HIGH)
    assert coordinator.asked == []


@pytest.mark.parametrize("demand", [{}, {"critical": True}, {"max_staleness_ms": 50}])
async def test_a_token_has_its_pair_settled_before_each_read_whatever_else_is_demanded(
    graph: Graph, cluster: FakeCluster, coordinator: Coordinator, demand: dict[str, Any]
) -> None:
    token = WriteToken.from_text(WriteToken(pending=[PENDING]).text())
    await graph.assoc_range(HIGH, "liked_by", 0, 5, after=token, **demand)
    await graph.assoc_range_many([(HIGH, "liked_by", 0, 5)], after=token.text(), **demand)
    assert len(coordinator.asked) == 2
    assert list(last_read(cluster).minimum_versions) == [9]


async def test_a_pair_that_is_not_settled_fails_the_reads_of_its_list_alone(
    graph: Graph, cluster: FakeCluster, coordinator: Coordinator
) -> None:
    coordinator.error = Unavailable("cut off")
    token = WriteToken(pending=[PENDING])
    with pytest.raises(StaleRead, match=r"lacks the inverse of an edge at .*cut off"):
        await graph.assoc_count(HIGH, "liked_by", after=token)
    with pytest.raises(SomeFailed) as caught:
        await graph.assoc_count_many([(OTHER, "liked_by"), (HIGH, "liked_by"), (OTHER, "likes")], after=token)
    assert list(caught.value.errors) == [1]
    assert isinstance(caught.value.errors[1], StaleRead)


async def test_a_settled_pair_without_a_version_makes_the_read_critical(
    graph: Graph, cluster: FakeCluster, coordinator: Coordinator
) -> None:
    coordinator.version = 0
    await graph.assoc_count(HIGH, "liked_by", after=WriteToken(pending=[PENDING]))
    assert last_read(cluster).critical


MANY = WriteToken(pending=[PendingInverse(HIGH + number, LIKED_BY, LOW) for number in range(MAX_PENDING + 1)])
"""The oldest of these is not named."""


async def test_a_pair_that_was_settled_without_a_version_is_read_from_the_master_and_not_settled_again(
    graph: Graph, cluster: FakeCluster, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write_pending(graph, monkeypatch)
    coordinator.version = 0
    answer = FakeLink.answer

    def refuse(link: FakeLink, request: pb.Request) -> pb.Answer:
        if not request.HasField("read"):
            return answer(link, request)
        return pb.Answer(read=pb.ReadAnswer(failed_slots=[0], errors=[error_to_pb(DatabaseDown("no master"))]))

    with monkeypatch.context() as patch:
        patch.setattr(FakeLink, "answer", refuse)
        with pytest.raises(DatabaseDown):
            await graph.assoc_count(HIGH, "liked_by")
    coordinator.error = Unavailable("cut off")
    await graph.assoc_count(HIGH, "liked_by")
    assert last_read(cluster).critical
    assert len(coordinator.asked) == 1
    await write_pending(graph, monkeypatch)
    with pytest.raises(StaleRead, match="cut off"):
        await graph.assoc_count(HIGH, "liked_by")


@pytest.mark.parametrize("many", [False, True])
async def test_a_read_of_the_master_returns_the_version_that_later_reads_ask_for(
    graph: Graph, cluster: FakeCluster, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    """Otherwise a list that this graph goes on writing is read from its master for ever."""
    await write_pending(graph, monkeypatch)
    coordinator.version = 0
    for is_critical in (True, False):
        before = len(cluster.batches())
        if many:
            await graph.assoc_range_many([(HIGH, "liked_by", 0, 5), (OTHER, "liked_by", 0, 5)])
        else:
            await graph.assoc_count(HIGH, "liked_by")
        assert any(request.read.critical for request in cluster.batches()[before:]) is is_critical
    await graph.assoc_count(HIGH, "liked_by")
    assert list(last_read(cluster).minimum_versions) == [1]
    assert len(coordinator.asked) == 1


async def test_an_answer_about_existence_has_no_version(
    graph: Graph, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write_pending(graph, monkeypatch)
    graph._own_writes.settled({PENDING: 0}, (), before=1)
    row = ExistsRow(HIGH, LIKED_BY, LOW)
    written = graph._pending_inverses.written([row], graph._own_writes.pending)
    written.note_read([row], [b"\x01"])
    assert graph._own_writes.pending == {(HIGH, LIKED_BY): {PENDING: 0}}
    written.note_read([row], [encode_count(9, 1)])
    assert graph._own_writes.pending == {}


async def test_a_write_that_leaves_the_inverse_pending_while_the_master_is_read_is_not_forgotten(
    graph: Graph, cluster: FakeCluster, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write_pending(graph, monkeypatch)
    coordinator.version = 0
    values = FakeLink.values

    def meanwhile(link: FakeLink, batch: pb.ReadBatch) -> list[bytes]:
        result = pb.WriteResult(inverse_pending=True)
        result.pending.add(id1=PENDING.id1, atype=PENDING.atype, coordinator_id=PENDING.coordinator_id)
        graph._own_writes.record([result])
        return values(link, batch)

    with monkeypatch.context() as patch:
        patch.setattr(FakeLink, "values", meanwhile)
        await graph.assoc_count(HIGH, "liked_by")
    await graph.assoc_count(HIGH, "liked_by")
    assert len(coordinator.asked) == 2


async def test_of_pending_writes_that_a_token_cannot_name_all_between_the_two_shards_are_settled(
    graph: Graph, cluster: FakeCluster, coordinator: Coordinator
) -> None:
    await graph.assoc_count(HIGH, "liked_by", after=MANY)
    assert coordinator.asked == []
    assert coordinator.asked_shards == [(0, 1)]
    assert last_read(cluster).critical, "no version is known of what was settled"
    coordinator.error = Unavailable("cut off")
    with pytest.raises(StaleRead, match=r"lists of shard 1 may lack inverse edges .*cut off"):
        await graph.assoc_count(HIGH, "liked_by", after=MANY)
    coordinator.error, coordinator.knows_shards = None, False
    with pytest.raises(StaleRead, match="could not settle it"):
        await graph.assoc_count(HIGH, "liked_by", after=MANY)


async def test_the_token_of_the_next_request_does_not_name_what_this_one_has_had_written(
    graph: Graph, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = WriteToken([(LOW, 0, 3)], pending=[PENDING, PendingInverse(OTHER, LIKED_BY, LOW)])
    with graph.recording() as recording:
        await graph.assoc_count(HIGH, "liked_by", after=known)
        await graph.obj_delete(LOW)
    renewed = recording.renewed(known)
    assert renewed.named_pending == (PendingInverse(OTHER, LIKED_BY, LOW),)
    assert renewed.minimum_of_list(ListKey(HIGH, LIKED_BY)) == 9
    assert renewed.minimum_of_object(LOW) == 3
    coordinator.asked.clear()
    await graph.assoc_count(HIGH, "liked_by", after=renewed)
    assert coordinator.asked == []
    with graph.recording() as recording:
        await graph.assoc_count(HIGH + MAX_PENDING, "liked_by", after=MANY)
    renewed = recording.renewed(MANY)
    assert len(renewed.named_pending) == MAX_PENDING - 1
    assert renewed.pending_at(1) == []
    assert renewed.is_critical(1)


async def test_a_token_names_on_what_could_not_be_written(graph: Graph, coordinator: Coordinator) -> None:
    coordinator.error = Unavailable("cut off")
    known = WriteToken(pending=[PENDING])
    with graph.recording() as recording, pytest.raises(StaleRead):
        await graph.assoc_count(HIGH, "liked_by", after=known)
    assert recording.renewed(known) == known
    assert recording.renewed(None) == WriteToken()


async def test_a_write_that_leaves_the_inverse_pending_during_a_settlement_is_not_forgotten(
    graph: Graph, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write_pending(graph, monkeypatch)
    graph._own_writes.settled({PENDING: 9}, (), before=0)  # began before the write was answered
    await graph.assoc_count(HIGH, "liked_by")
    assert len(coordinator.asked) == 1
