"""How many writes one batch may have, at either kind of server."""

from __future__ import annotations

import pytest

from tao.model.errors import TooLarge
from tao.serving.write_results import MAX_WRITES_PER_BATCH
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import LeaderRig, make_id, make_topology
from tests.rigs.links_rig import MemoryReply
from tests.rigs.memory_store import MemoryStore
from tests.rigs.region_rig import FollowerRig

TOO_MANY = pb.Request(
    number=1,
    deadline_ms=5_000,
    write=pb.WriteBatch(writes=[pb.Write(obj_delete=pb.ObjDelete(id=make_id(64)))] * (MAX_WRITES_PER_BATCH + 1)),
)


async def test_a_leader_begins_none_of_more_writes_than_a_batch_may_have() -> None:
    store = MemoryStore(4)
    rig = LeaderRig(store, store)
    with pytest.raises(TooLarge, match="6000"):
        rig.service.handle(TOO_MANY, MemoryReply(lambda _: None, peer="near-1"))
    assert not rig.tasks.running


async def test_a_follower_forwards_none_of_more_writes_than_a_batch_may_have() -> None:
    rig = FollowerRig("near-1", make_topology())
    with pytest.raises(TooLarge, match="6000"):
        rig.writes.handle(TOO_MANY, MemoryReply(lambda _: None))
    assert not rig.links["leader-1"].sent
