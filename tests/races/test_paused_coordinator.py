"""A leader that coordinates a pair commits its side, pauses, is deposed, and resumes with the copy still to send.

leader-1 (coordinates)             leader-2 (has the other end)
add, commit, intent
… paused …                         takes the coordinator's shard over
                                   delete: both ends gone, intent settled, acknowledged
sends its copy of the edge         must reject it: else half an edge, for ever
"""

from __future__ import annotations

import asyncio

import pytest

from tao.leader.remote_inverses import Deposed
from tao.model.changes import ShardMessages
from tao.model.errors import Fenced, Unauthorized
from tao.model.rows import IntentRow
from tao.model.writes import AssocAdd, AssocDelete
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import LIKED_BY, LIKES, LeaderRig, OtherRigs, make_id
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import PATIENT_SECONDS, Gate, until

LOW, HIGH = make_id(64, 0), make_id(64, 1)


async def test_the_copy_of_a_deposed_coordinator_is_refused() -> None:
    store, others = MemoryStore(4), OtherRigs()
    one = LeaderRig(store, store, name="leader-1", others=others)
    two = LeaderRig(store, store, name="leader-2", others=OtherRigs())
    await one.take(0)
    await two.take(1)
    others.rigs = {1: two}
    two.others.rigs = {0: two, 1: two}
    gate = others.gate = Gate()
    paused = asyncio.ensure_future(one.write(AssocAdd(LOW, LIKES, HIGH, 1, b"")))
    await gate.arrived.wait()
    await two.take(0, 1)
    await two.write(AssocDelete(LOW, LIKES, HIGH))
    assert store.edges(HIGH, LIKED_BY) == []
    gate.open()
    _, pending = await paused
    assert pending
    assert (store.edges(LOW, LIKES), store.edges(HIGH, LIKED_BY)) == ([], [])
    await one.close()
    await two.close()


async def test_the_writer_learns_the_outcome_when_a_shard_is_handed_over_between_the_two_sides() -> None:
    store, others = MemoryStore(4), OtherRigs()
    one = LeaderRig(store, store, name="leader-1", others=others)
    two = LeaderRig(store, store, name="leader-2", others=OtherRigs())
    await one.take(0)
    await two.take(1)
    two.others.rigs = {0: two, 1: two}
    others.rigs = {0: two, 1: two}
    gate = others.gate = Gate()
    writing = asyncio.ensure_future(one.write(AssocAdd(LOW, LIKES, HIGH, 1, b"")))
    await gate.arrived.wait()
    # As in a drain: one leader gives the shard up, the other takes it.
    one.ownership.want(())
    await two.take(0, 1)
    gate.open()
    written, pending = await writing
    assert not pending
    assert [len(store.edges(LOW, LIKES)), len(store.edges(HIGH, LIKED_BY))] == [1, 1]
    assert {messages.shard for messages in written.messages} == {0, 1}, "caches hear of both ends before the writer"
    (intent,) = others.handed_over
    assert (intent.low_id, intent.high_id) == (LOW, HIGH)
    async with asyncio.timeout(PATIENT_SECONDS):
        while await store.old_intents([0], before_unix_ms=1 << 62, limit=1):  # noqa: ASYNC110 - the new owner forgets it
            await asyncio.sleep(0)
    await one.close()
    await two.close()


async def test_the_writer_learns_the_outcome_when_a_leader_retakes_a_shard_between_the_two_sides() -> None:
    """A leader retakes a shard after another write's commit of unknown outcome. No other leader can take the pair."""

    class NobodyElse(OtherRigs):
        async def hand_over(self, intent: IntentRow, timeout_seconds: float) -> list[ShardMessages]:
            self.handed_over.append(intent)
            raise Deposed("it is being taken anew here")

    store, others = MemoryStore(4), NobodyElse()
    one = LeaderRig(store, store, name="leader-1", others=others)
    two = LeaderRig(store, store, name="leader-2", others=OtherRigs(), clock=one.clock)
    await one.take(0)
    await two.take(1)
    others.rigs = {0: one, 1: two}
    gate = others.gate = Gate()
    others.faults.append(Deposed("as its own generation says"))
    writing = asyncio.ensure_future(one.write(AssocAdd(HIGH, LIKED_BY, LOW, 1, b"")))
    await gate.arrived.wait()
    one.ownership.retake(0)
    gate.open()
    await until(lambda: others.handed_over)
    await one.take(0)
    _, pending = await writing
    assert not pending
    assert [len(store.edges(LOW, LIKES)), len(store.edges(HIGH, LIKED_BY))] == [1, 1]
    await until(lambda: not store.rows.intents)
    await one.close()
    await two.close()


async def test_a_leader_that_has_just_started_asks_the_database_who_coordinates() -> None:
    store = MemoryStore(4)
    former, owner, started = (LeaderRig(store, store, name=f"leader-{n}") for n in (1, 2, 3))
    await former.take(0)
    deposed = former.ownership.row(0).generation
    await owner.take(0)
    await started.take(1)
    with pytest.raises(Fenced):
        await started.inverse_fence.admit(batch_of(deposed))
    await started.inverse_fence.admit(batch_of(owner.ownership.row(0).generation))
    for rig in (former, owner, started):
        await rig.close()


async def test_a_copy_without_a_coordinator_is_refused() -> None:
    store = MemoryStore(4)
    rig = LeaderRig(store, store)
    with pytest.raises(Unauthorized):
        await rig.inverse_fence.admit(pb.WriteBatch())
    await rig.close()


def batch_of(generation: int) -> pb.WriteBatch:
    return pb.WriteBatch(coordinator=pb.Coordinator(shard=0, generation=generation))
