"""Edges with states whose ends are at two leaders: both join, and the intent stays until they agree."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tao.model.edge_states import EdgeRegisters, State
from tao.model.errors import Unavailable
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.rows import IntentRow, ListRow
from tao.model.writes import AssocAdd, AssocDelete, AssocMerge, ReadState
from tests.rigs.leader_rig import LeaderRig, OtherRigs, make_id
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import until

LOW, HIGH = make_id(64, 0), make_id(64, 1)
SUBSCRIBES, SUBSCRIBERS = 15, 16
NORMAL, NEGATIVE, ARCHIVED, REMOVED = State


class TwoLeaders:
    """The coordinator owns the shard of `LOW`, the other leader that of `HIGH`."""

    def __init__(self) -> None:
        self.store, self.others = MemoryStore(4), OtherRigs()
        self.coordinator = LeaderRig(self.store, self.store, others=self.others)
        self.far = LeaderRig(self.store, self.store, name="leader-2", clock=self.coordinator.clock)
        self.others.rigs = {0: self.coordinator, 1: self.far}

    @property
    def now_us(self) -> int:
        return self.coordinator.clock.unix_ms() * 1000

    def rows(self) -> list[tuple[int, EdgeRegisters]]:
        return sorted((key.atype, registers) for key, registers in self.store.rows.registers.items())

    def put(self, key: EdgeKey, registers: EdgeRegisters) -> None:
        """Put a row and its list, as another leader has left them."""
        rows = self.store.rows
        rows.edges[key], rows.registers[key] = Edge(key.id2, registers.time, registers.data), registers
        rows.lists[ListKey(key.id1, key.atype)] = ListRow(1, 1 << 48 | 1)

    async def settled(self) -> None:
        await until(lambda: not self.store.rows.intents)


@pytest.fixture
async def two() -> AsyncIterator[TwoLeaders]:
    leaders = TwoLeaders()
    await leaders.coordinator.take(0)
    await leaders.far.take(1)
    yield leaders
    await leaders.coordinator.close()
    await leaders.far.close()
    assert leaders.coordinator.tasks.errors + leaders.far.tasks.errors == []


def merge(two: TwoLeaders, state: State, at: int, time: int = 0) -> AssocMerge:
    payload_us = two.now_us + at if time else 0
    return AssocMerge(LOW, SUBSCRIBES, HIGH, state, two.now_us + at, bool(time), payload_us, time)


async def test_both_ends_have_the_same_registers_and_the_intent_is_removed(two: TwoLeaders) -> None:
    await two.coordinator.write(AssocAdd(HIGH, SUBSCRIBERS, LOW, 7, b""))
    written, pending = await two.coordinator.write(AssocDelete(LOW, SUBSCRIBES, HIGH))
    assert not pending
    assert written.outcome.found
    near, far = two.rows()
    assert (near[0], far[0]) == (153, 163)
    assert near[1] == far[1]
    await two.settled()


async def test_lists_that_a_write_turns_out_to_change_go_on_from_their_rows(two: TwoLeaders) -> None:
    """An add reads the lists of normal edges, and finds its edge among those of another state."""
    await two.coordinator.write(merge(two, NORMAL, 1, 7))
    await two.coordinator.write(merge(two, ARCHIVED, 2))
    archived = ListKey(LOW, 152)
    before = two.store.rows.lists[archived]
    assert before.count == 1
    await two.coordinator.write(AssocAdd(LOW, SUBSCRIBES, HIGH, 9, b""))
    assert two.store.rows.lists[archived] == ListRow(0, before.version + 1)
    assert [atype for atype, _ in two.rows()] == [15, 16]
    await two.settled()


async def test_a_far_side_that_cannot_be_reached_gets_the_join_later(two: TwoLeaders) -> None:
    await two.coordinator.write(merge(two, NORMAL, 5, 7))
    two.others.faults.append(Unavailable("away"))
    _, pending = await two.coordinator.write(merge(two, ARCHIVED, 6))
    assert pending
    _, pending = await two.coordinator.write(merge(two, NEGATIVE, 4, 9))
    assert not pending
    expected = EdgeRegisters(ARCHIVED, two.now_us + 6, two.now_us + 5, 7)
    assert two.rows() == [(152, expected), (162, expected)]
    await two.settled()


async def test_an_intent_of_a_former_leader_is_settled_from_the_rows_as_they_are(two: TwoLeaders) -> None:
    two.others.faults.append(Unavailable("away"))
    await two.coordinator.write(merge(two, NORMAL, 5, 7))
    (intent,) = two.store.rows.intents.values()
    assert intent.atypes == (SUBSCRIBES,)
    await two.coordinator.inverses.settle_pair(intent, 5.0)
    expected = EdgeRegisters(NORMAL, two.now_us + 5, two.now_us + 5, 7)
    assert two.rows() == [(15, expected), (16, expected)]
    await two.settled()


async def test_the_coordinator_joins_what_the_far_side_knows_better(two: TwoLeaders) -> None:
    """A promotion has lost the coordinator's newest commits, and the far side had received them."""
    known = EdgeRegisters(ARCHIVED, two.now_us + 9, two.now_us + 5, 7)
    two.put(EdgeKey(HIGH, 162, LOW), known)
    written, pending = await two.coordinator.write(merge(two, NORMAL, 8, 3))
    assert not pending
    expected = EdgeRegisters(ARCHIVED, two.now_us + 9, two.now_us + 8, 3)
    assert two.rows() == [(152, expected), (162, expected)]
    assert written.outcome.superseded
    assert written.outcome.registers == expected
    await two.settled()


@pytest.mark.parametrize("named_from", ["LOW", "HIGH"])
async def test_the_outcome_of_a_write_is_that_of_its_own_edge(two: TwoLeaders, named_from: str) -> None:
    """A copy of two edges of the pair finds a newer operation on the other one."""
    two.others.faults.append(Unavailable("away"))
    await two.coordinator.write(AssocMerge(LOW, SUBSCRIBERS, HIGH, NORMAL, two.now_us + 5, has_payload=True, time=7))
    known = EdgeRegisters(ARCHIVED, two.now_us + 9, two.now_us + 5, 7)
    two.put(EdgeKey(HIGH, 152, LOW), known)
    ends = (LOW, SUBSCRIBES, HIGH) if named_from == "LOW" else (HIGH, SUBSCRIBERS, LOW)
    written, pending = await two.coordinator.write(AssocMerge(*ends, NORMAL, two.now_us + 8, has_payload=True, time=3))
    own = EdgeRegisters(NORMAL, two.now_us + 8, two.now_us + 8, 3)
    assert not pending
    assert (written.outcome.registers, written.outcome.superseded) == (own, False)
    assert two.rows() == [(15, own), (16, own), (152, known), (162, known)]
    await two.settled()


async def test_repair_joins_an_edge_that_only_the_larger_id_has(two: TwoLeaders) -> None:
    known = EdgeRegisters(NORMAL, two.now_us + 9, two.now_us + 5, 7)
    two.put(EdgeKey(HIGH, 16, LOW), known)
    await two.coordinator.inverses.settle_pair(IntentRow(LOW, HIGH, (SUBSCRIBES,), 0, 0), 5.0)
    assert two.rows() == [(15, known), (16, known)]


async def test_a_state_is_read_at_the_end_that_is_named(two: TwoLeaders) -> None:
    two.others.faults.append(Unavailable("away"))
    await two.coordinator.write(merge(two, NORMAL, 5, 7))
    near, _ = await two.coordinator.write(ReadState(LOW, SUBSCRIBES, HIGH))
    far, _ = await two.far.write(ReadState(HIGH, SUBSCRIBERS, LOW))
    assert near.outcome.registers == EdgeRegisters(NORMAL, two.now_us + 5, two.now_us + 5, 7)
    assert far.outcome.registers == EdgeRegisters()
