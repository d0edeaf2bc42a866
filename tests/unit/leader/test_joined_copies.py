"""Copies of edges with states that another leader sends in one request: they are joined in one write."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from tao.leader import service
from tao.model.edge_states import EdgeRegisters, State
from tao.model.graph import EdgeKey
from tao.model.writes import NodeSetState, SettleEdge
from tao.wire.convert import node_state_from_pb, registers_from_pb, write_to_pb
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import FRIEND, LeaderRig, make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import until

NEAR = make_id(64, 0)
FAR = [make_id(64 + number, 1) for number in range(5)]
SUBSCRIBES, SUBSCRIBERS = 15, 16
AT = 1_000_000
REGISTERS = EdgeRegisters(State.ARCHIVED, AT, AT, 7)


@pytest.fixture
async def far() -> AsyncIterator[LeaderRig]:
    store = MemoryStore(4)
    rig = LeaderRig(store, store, name="leader-2")
    await rig.take(1)
    yield rig
    await rig.close()
    assert rig.tasks.errors == []


def copy(far_id: int, atype: int = SUBSCRIBERS) -> SettleEdge:
    return SettleEdge(far_id, atype, NEAR, True, 7, b"", registers=REGISTERS if atype == SUBSCRIBERS else None)


async def settle(rig: LeaderRig, copies: Sequence[SettleEdge], generation: int = 1) -> dict[int, pb.WriteResult]:
    """Send copies as another leader does. Returns the results by slot."""
    results: dict[int, pb.WriteResult] = {}
    messages: list[pb.ShardMessages] = []

    def take(answer: pb.Answer) -> None:
        results.update(zip(answer.write.slots, answer.write.results, strict=True))
        messages.extend(answer.write.changes)

    batch = pb.WriteBatch(
        want_changes=True,
        writes=list(map(write_to_pb, copies)),
        coordinator=pb.Coordinator(shard=0, generation=generation),
        background=True,
    )
    request = pb.Request(number=2, deadline_ms=5_000, write=batch)
    rig.service.handle(request, MemoryReply(take, peer="leader-1"))
    await until(lambda: len(results) == len(copies))
    failed = [each for each in results.values() if each.HasField("error")]
    assert bool(messages) is (len(failed) < len(copies))
    return results


def places(rig: LeaderRig) -> dict[int, int]:
    assert isinstance(rig.store, MemoryStore)
    return {key.id1: key.atype for key in rig.store.rows.edges}


async def test_copies_of_one_request_are_one_write_and_have_a_result_each(far: LeaderRig) -> None:
    await far.write(NodeSetState(FAR[1], (SUBSCRIBERS,), State.REMOVED, 0, make_id(1_000, 1)))
    before = far.writes.committed_writes
    results = await settle(far, [copy(each) for each in FAR])
    assert far.writes.committed_writes - before == 1
    assert [registers_from_pb(results[slot].registers) for slot in range(5)] == [REGISTERS] * 5
    assert [node_state_from_pb(results[slot].node).state for slot in range(5)] == [0, State.REMOVED, 0, 0, 0]
    assert places(far) == dict.fromkeys(FAR, 162) | {FAR[1]: 163}


async def test_copies_of_edges_without_states_are_written_beside_them(far: LeaderRig) -> None:
    copies = [copy(FAR[0], FRIEND), copy(FAR[1]), copy(FAR[2], FRIEND), copy(FAR[3])]
    results = await settle(far, copies)
    assert [results[slot].HasField("registers") for slot in range(4)] == [False, True, False, True]
    assert places(far) == {FAR[0]: FRIEND, FAR[1]: 162, FAR[2]: FRIEND, FAR[3]: 162}


async def test_more_copies_than_a_transaction_takes_are_several_writes(
    far: LeaderRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "JOINED_EDGES", 2)
    await settle(far, [copy(each) for each in FAR])
    assert far.writes.committed_writes == 3
    assert places(far) == dict.fromkeys(FAR, 162)


async def test_copies_of_a_deposed_leader_are_refused_each(far: LeaderRig) -> None:
    await settle(far, [copy(FAR[0])], generation=2)
    results = await settle(far, [copy(each) for each in FAR])
    assert [results[slot].error.reason for slot in range(5)] == ["FENCED"] * 5
    assert places(far) == {FAR[0]: 162}


async def test_newer_operations_of_the_far_end_are_in_the_results(far: LeaderRig) -> None:
    assert isinstance(far.store, MemoryStore)
    await settle(far, [copy(FAR[0]), copy(FAR[1])])
    newer = EdgeRegisters(State.NORMAL, AT + 1, AT, 7)
    key = EdgeKey(FAR[0], 162, NEAR)
    far.store.rows.registers[key] = newer
    results = await settle(far, [copy(FAR[0]), copy(FAR[1])])
    assert [registers_from_pb(results[slot].registers) for slot in range(2)] == [newer, REGISTERS]
