"""The bound on the writes of a batch, and their results: none exceeds a message, and each is sent once."""

from __future__ import annotations

import pytest

from tao.model.changes import ObjectChange, ShardMessages
from tao.model.errors import TooLarge
from tao.serving.forward_path import FLUSH_BYTES, MAX_WRITES_PER_BATCH, ForwardSettings, WriteResults
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import LeaderRig, make_id, make_topology
from tests.rigs.links_rig import MemoryReply
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import quiet
from tests.rigs.region_rig import FollowerRig


async def test_many_large_changes_of_one_tick_leave_in_several_answers() -> None:
    sent: list[pb.Answer] = []
    reply = MemoryReply(sent.append)
    results = WriteResults(reply, 200, want_changes=True)
    for slot in range(200):
        change = ObjectChange(slot + 1, 0, 1, 1, b"x" * 60_000)
        results.add(slot, pb.WriteResult(), (ShardMessages(0, 1, (change,)),))
    await quiet()
    assert [slot for answer in sent for slot in answer.write.slots] == list(range(200))
    assert [answer.more for answer in sent] == [True] * (len(sent) - 1) + [False]
    assert max(answer.ByteSize() for answer in sent) < 2 * FLUSH_BYTES
    assert len(sent) > 2


TOO_MANY = pb.Request(
    number=1,
    deadline_ms=5_000,
    write=pb.WriteBatch(writes=[pb.Write(obj_delete=pb.ObjDelete(id=make_id(64)))] * (MAX_WRITES_PER_BATCH + 1)),
)


async def test_a_leader_starts_no_write_of_a_batch_that_is_too_large() -> None:
    store = MemoryStore(4)
    rig = LeaderRig(store, store)
    with pytest.raises(TooLarge, match="6000"):
        rig.service.handle(TOO_MANY, MemoryReply(lambda _: None, peer="near-1"))
    assert not rig.tasks.running


async def test_a_follower_forwards_no_write_of_a_batch_that_is_too_large() -> None:
    rig = FollowerRig("near-1", make_topology())
    with pytest.raises(TooLarge, match="6000"):
        rig.service.handle(TOO_MANY, MemoryReply(lambda _: None))
    assert rig.reads.shares.outcomes == {"started": 0, "waited": 0, "refused": 0}
    assert not rig.links["leader-1"].sent


async def test_a_write_whose_leader_is_dead_fails_with_the_leader_s_name_and_what_to_do() -> None:
    rig = FollowerRig("near-1", make_topology(), forwarding=ForwardSettings(max_wait_seconds=0.0))
    sent: list[pb.Answer] = []
    rig.subscriptions.follow_routes(rig.configuration.routes)
    write = pb.Write(obj_delete=pb.ObjDelete(id=make_id(1)))
    request = pb.Request(number=1, deadline_ms=5_000, write=pb.WriteBatch(writes=[write]))
    rig.links["leader-1"].down = True
    rig.writes.handle(request, MemoryReply(sent.append))
    await quiet()
    (answer,) = sent
    (result,) = answer.write.results
    assert result.error.reason == "UNAVAILABLE"
    assert "leader-1 leads the shard and cannot be reached" in result.error.message
    assert "tao topology mark-down leader-1" in result.error.message
