"""Results of writes: never too large to say, and each said once."""

from __future__ import annotations

from tao.model.changes import ObjectChange, ShardMessages
from tao.serving.write_results import FLUSH_BYTES, WriteResults
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.links_rig import MemoryReply
from tests.rigs.pacing import quiet


async def test_many_large_changes_of_one_turn_leave_in_several_answers() -> None:
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
