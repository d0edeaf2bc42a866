"""Pairs with sides at two leaders: one write at a time, mirrors that are written or pending, and their settlement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest

from tao.leader.inverse_path import InverseSettings
from tao.leader.remote_inverses import Copied, RemoteOutcomeUnknown
from tao.model.errors import (
    DatabaseDown,
    DeadlineExceeded,
    Fenced,
    InvalidArgument,
    MasterReadOnly,
    NotMine,
    OutcomeUnknown,
    Overloaded,
    ShardBlocked,
    TaoError,
    Unavailable,
)
from tao.model.ids import SHARD_SHIFT
from tao.model.rows import IntentKey, IntentRow
from tao.model.writes import AssocAdd, AssocChangeType, AssocDelete, Coordinator, SettleEdge
from tao.runtime.clock import LoopClock
from tests.rigs.leader_rig import COMMENT, FRIEND, LIKED_BY, LIKES, LeaderRig, OtherRigs, make_id
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import PATIENT_SECONDS, Gate, ManualClock, quiet, until
from tests.rigs.server_context import SilentTopology

LOW, HIGH = make_id(64, 0), make_id(64, 1)
PAIR = IntentKey(LOW, HIGH)
QUICK = InverseSettings(settle_timeout_seconds=0.0, settle_linger_seconds=0.0)
OFTEN = InverseSettings(repair_seconds=0.001, contact_seconds=0.001)


@dataclass
class TwoLeaders:
    """The coordinator of the pair owns shard 0, the other leader shard 1."""

    store: MemoryStore
    coordinator: LeaderRig
    far: LeaderRig
    others: OtherRigs

    def times(self, atype: int = FRIEND, inverse: int = FRIEND) -> tuple[list[int], list[int]]:
        near = [edge.time for edge in self.store.edges(LOW, atype) if edge.id2 == HIGH]
        return near, [edge.time for edge in self.store.edges(HIGH, inverse) if edge.id2 == LOW]

    async def settled(self) -> None:
        await until(lambda: not self.store.rows.intents)


@pytest.fixture
async def two() -> AsyncIterator[TwoLeaders]:
    store, others = MemoryStore(4), OtherRigs()
    coordinator = LeaderRig(store, store, others=others)
    far = LeaderRig(store, store, name="leader-2", clock=coordinator.clock)
    others.rigs = {0: coordinator, 1: far}
    await coordinator.take(0)
    await far.take(1)
    yield TwoLeaders(store, coordinator, far, others)
    await coordinator.close()
    await far.close()
    assert coordinator.tasks.errors + far.tasks.errors == []


def add(time: int, atype: int = FRIEND) -> AssocAdd:
    return AssocAdd(LOW, atype, HIGH, time, b"")


async def test_both_sides_are_written_and_the_intent_is_removed(two: TwoLeaders) -> None:
    written, pending = await two.coordinator.write(AssocAdd(HIGH, LIKED_BY, LOW, 7, b""))
    assert not pending
    assert two.times(LIKES, LIKED_BY) == ([7], [7])
    assert {messages.shard for messages in written.messages} == {0, 1}, "the writer's tier hears of both sides"
    await two.settled()


@pytest.mark.parametrize("fault", [Unavailable("away"), OutcomeUnknown("cut"), InvalidArgument("no")])
async def test_a_mirror_that_cannot_be_written_stays_pending_and_the_write_is_acknowledged(
    two: TwoLeaders, fault: TaoError
) -> None:
    two.others.faults.append(fault)
    _, pending = await two.coordinator.write(add(7))
    assert pending
    assert two.times() == ([7], [])
    assert list(two.store.rows.intents) == [PAIR]
    assert two.coordinator.inverses.left_pending == 1


async def test_a_far_side_that_changes_hands_is_retried_as_long_as_the_writer_waits(two: TwoLeaders) -> None:
    two.others.faults += [NotMine("given up"), Fenced("another generation"), MasterReadOnly("being promoted")]
    _, pending = await two.coordinator.write(add(7))
    assert not pending
    assert two.times() == ([7], [7])


@pytest.mark.parametrize("fault", [Unavailable, DeadlineExceeded, ShardBlocked, Overloaded, OutcomeUnknown])
@pytest.mark.parametrize("after_writing", [False, True])
async def test_a_writer_that_names_the_far_side_is_answered_once_that_side_is_written_despite_earlier_failures(
    two: TwoLeaders, fault: type[TaoError], after_writing: bool
) -> None:
    """The writer reads that list next. Without the mirror, the only answer would be an unknown outcome."""
    two.others.after_writing = after_writing
    two.others.faults += [fault("once"), fault("and again")]
    _, pending = await two.coordinator.write(AssocAdd(HIGH, LIKED_BY, LOW, 7, b""))
    assert not pending
    assert two.times(LIKES, LIKED_BY) == ([7], [7])
    await two.settled()


async def test_retries_of_a_far_side_that_refuses_at_once_back_off() -> None:
    """An overloaded server refuses at once, and retries of many pairs would make it worse."""
    store, others = MemoryStore(4), OtherRigs()
    leader = LeaderRig(store, store, others=others, clock=LoopClock())
    await leader.take(0)
    others.faults += [Overloaded("its queue is full") for _ in range(100)]
    _, pending = await leader.write(AssocAdd(HIGH, LIKED_BY, LOW, 7, b""), within=0.5)
    assert pending
    assert len(others.timeouts) <= 4, "at once, and after 0.05, 0.1 and 0.2 seconds"
    await leader.close()


async def test_a_far_side_that_stays_unavailable_is_retried_until_the_writers_deadline_and_no_longer(
    two: TwoLeaders,
) -> None:
    clock, settle, left = two.coordinator.clock, two.others.settle, list[float]()
    assert isinstance(clock, ManualClock)
    deadline = clock.monotonic() + 5.0

    async def settle_slowly(
        shard: int,
        settles: Sequence[SettleEdge],
        coordinator: Coordinator,
        timeout_seconds: float,
        *,
        background: bool = False,
    ) -> Copied:
        left.append(deadline - clock.monotonic())
        clock.now += timeout_seconds
        two.others.faults.append(OutcomeUnknown("silence"))
        return await settle(shard, settles, coordinator, timeout_seconds, background=background)

    two.others.settle = settle_slowly  # type: ignore[method-assign]
    _, pending = await two.coordinator.write(AssocAdd(HIGH, LIKED_BY, LOW, 7, b""), within=5.0)
    assert pending
    assert left == pytest.approx([5.0, 3.0, 1.0])
    assert list(two.store.rows.intents) == [PAIR]


async def test_a_write_does_not_wait_for_a_database_that_is_known_to_be_down(two: TwoLeaders) -> None:
    two.others.faults.append(DatabaseDown("away"))
    _, pending = await two.coordinator.write(AssocAdd(HIGH, LIKED_BY, LOW, 7, b""))
    assert pending


async def test_an_unanswered_copy_keeps_the_pair_held_even_when_the_next_copy_is_acknowledged(
    two: TwoLeaders,
) -> None:
    """The copy may still arrive, and would undo what a later write of the pair has copied."""
    two.others.faults.append(OutcomeUnknown("cut"))
    _, pending = await two.coordinator.write(AssocAdd(HIGH, LIKED_BY, LOW, 7, b""))
    assert not pending
    with pytest.raises(DeadlineExceeded, match="lasted until the deadline"):
        await two.coordinator.write(AssocAdd(HIGH, LIKED_BY, LOW, 8, b""), within=0.001)
    assert two.times(LIKES, LIKED_BY) == ([7], [7])


@pytest.mark.parametrize("insists", [False, True])
async def test_a_copy_whose_outcome_the_other_leader_does_not_know_does_not_keep_the_pair_held(
    two: TwoLeaders, insists: bool
) -> None:
    """A promotion interrupts commits that wait for a replica. The shard's next owner knows their outcome before it
    writes anything, so no later copy is overtaken, however long that takes."""
    first = AssocAdd(HIGH, LIKED_BY, LOW, 7, b"") if insists else AssocAdd(LOW, LIKES, HIGH, 7, b"")
    two.others.faults += [RemoteOutcomeUnknown("in COMMIT"), RemoteOutcomeUnknown("in COMMIT")]
    _, pending = await two.coordinator.write(first)
    assert pending is not insists
    assert two.coordinator.inverses.pairs_held == 0
    _, pending = await two.coordinator.write(AssocAdd(HIGH, LIKED_BY, LOW, 8, b""), within=1.0)
    assert not pending
    assert two.times(LIKES, LIKED_BY) == ([8], [8])


async def test_the_timeout_of_a_copy_does_not_exceed_the_writers_deadline(two: TwoLeaders) -> None:
    """Otherwise a committed write would end with an unknown outcome because a server that it does not need hangs."""
    await two.coordinator.write(add(7), within=1.0)
    await two.coordinator.write(add(8), within=60.0)
    assert two.others.timeouts[0] <= 1.0
    assert two.others.timeouts[1] == InverseSettings().settle_timeout_seconds
    await two.coordinator.write(AssocChangeType(HIGH, FRIEND, LOW, COMMENT), within=1.0)
    assert max(two.others.timeouts[2:]) <= 1.0


async def test_the_next_write_of_the_pair_also_settles_a_pending_intent_of_another_type(two: TwoLeaders) -> None:
    two.others.faults.append(Unavailable("away"))
    await two.coordinator.write(add(7, LIKES))
    _, pending = await two.coordinator.write(add(8))
    assert not pending
    assert two.times() == ([8], [8])
    assert two.times(LIKES, LIKED_BY) == ([7], [7])
    await two.settled()


async def test_a_mirror_known_not_to_be_written_releases_the_pair(two: TwoLeaders) -> None:
    two.others.faults.append(Unavailable("away"))
    await two.coordinator.write(add(7))
    assert two.coordinator.inverses.pairs_held == 0


async def test_the_pair_is_not_written_while_a_copy_may_be_in_progress(two: TwoLeaders) -> None:
    """Otherwise the older copy could arrive last."""
    two.coordinator.inverses._settings = InverseSettings(  # type: ignore[misc]
        settle_timeout_seconds=0.1, settle_linger_seconds=0.1
    )
    two.others.faults.append(OutcomeUnknown("cut"))
    await two.coordinator.write(add(7))
    assert two.coordinator.inverses.pairs_held == 1
    with pytest.raises(DeadlineExceeded, match="lasted until the deadline"):
        await two.coordinator.write(add(8), within=0.001)
    assert two.times() == ([7], [])
    await two.coordinator.write(add(9))
    assert two.times() == ([9], [9])
    await until(lambda: two.coordinator.inverses.pairs_held == 0)


async def test_a_held_pair_is_released_even_when_no_task_can_be_started(two: TwoLeaders) -> None:
    two.coordinator.inverses._settings = QUICK  # type: ignore[misc]
    two.others.faults.append(OutcomeUnknown("cut"))
    writing = asyncio.ensure_future(two.coordinator.write(add(7)))
    await until(lambda: not two.others.faults)
    two.coordinator.tasks.refuses = True
    await writing
    await until(lambda: two.coordinator.inverses.pairs_held == 0)


async def test_a_committed_write_is_acknowledged_even_when_its_intent_cannot_be_removed(two: TwoLeaders) -> None:
    gate = two.others.gate = Gate()
    writing = asyncio.ensure_future(two.coordinator.write(add(7)))
    await gate.arrived.wait()
    two.coordinator.tasks.refuses = True
    gate.open()
    _, pending = await writing
    assert not pending
    assert list(two.store.rows.intents) == [PAIR], "repair will meet it"


async def test_writes_of_one_pair_run_one_at_a_time_in_order_of_arrival(two: TwoLeaders) -> None:
    gate = two.others.gate = Gate()
    tasks = [asyncio.ensure_future(two.coordinator.write(add(time))) for time in (1, 2, 3)]
    await gate.arrived.wait()
    await quiet()
    assert two.times() == ([1], []), "the second waits for the first one's mirror"
    gate.open()
    await asyncio.gather(*tasks)
    assert [settles[0].time for settles in two.others.settled] == [1, 2, 3]


async def test_a_cancelled_waiter_for_a_pair_is_skipped(two: TwoLeaders) -> None:
    gate = two.others.gate = Gate()
    first, gone, last = [asyncio.ensure_future(two.coordinator.write(add(time))) for time in (1, 2, 3)]
    await gate.arrived.wait()
    await quiet()
    gone.cancel()
    gate.open()
    await asyncio.gather(first, last)
    assert two.times() == ([3], [3])
    assert [settles[0].time for settles in two.others.settled] == [1, 3]


async def test_the_number_of_writes_waiting_for_a_pair_is_bounded(two: TwoLeaders) -> None:
    coordinator = LeaderRig(two.store, two.store, others=two.others, inverses=InverseSettings(max_waiting_per_pair=1))
    await coordinator.take(0)
    gate = two.others.gate = Gate()
    tasks = [asyncio.ensure_future(coordinator.write(add(time))) for time in (1, 2)]
    await gate.arrived.wait()
    await quiet()
    with pytest.raises(Overloaded, match="wait for the edges between"):
        await coordinator.write(add(3))
    gate.open()
    await asyncio.gather(*tasks)
    await coordinator.close()


@dataclass
class Successor:
    """A leader that has taken shard 0, and knows nothing of the intents there."""

    leader: LeaderRig

    def advance_when_idle(self, seconds: float) -> None:
        """Advance its clock, unless a deadline could pass meanwhile."""
        if len(self.leader.tasks.running) == 2 and not self.leader.inverses.pairs_held:
            self.leader.clock.now += seconds  # type: ignore[attr-defined]  # a ManualClock


async def test_the_intents_of_a_dead_leader_are_found_and_settled_despite_failures(two: TwoLeaders) -> None:
    two.others.faults.append(Unavailable("away"))
    await two.coordinator.write(add(7))
    successor = Successor(LeaderRig(two.store, two.store, name="leader-3", others=two.others, inverses=OFTEN))
    await successor.leader.take(0)
    two.others.faults.extend([Unavailable("away")] * 3)
    successor.leader.tasks(successor.leader.inverses.repair())
    successor.leader.tasks(successor.leader.inverses.settle_pending())

    def settled_after_a_while() -> bool:
        successor.advance_when_idle(20)
        return not two.store.rows.intents

    await until(settled_after_a_while)
    assert two.times() == ([7], [7])
    await until(lambda: successor.leader.inverses.settled_later >= 1)
    await successor.leader.close()


async def test_intents_of_a_type_that_the_schema_lacks_stay_and_hold_up_no_others(two: TwoLeaders) -> None:
    """The leader before has had the newer schema, and this one has not polled it yet."""
    rows, rig = two.store.rows, two.coordinator
    unknown = {IntentKey(make_id(64 + each), HIGH) for each in range(1, 6)}
    for pair in unknown:
        rows.intents[pair] = IntentRow(pair.low_id, pair.high_id, (60_000,), 1, 1)
    two.others.faults.append(Unavailable("away"))
    await rig.write(add(7))
    await rig.inverses._find_intents([rig.ownership.row(0)], are_searched=False)
    rig.inverses._settings = OFTEN  # type: ignore[misc]
    rig.tasks(rig.inverses.settle_pending())
    await until(lambda: rows.intents.keys() == unknown)
    await until(lambda: not rig.inverses._pending.due(rig.others.leader_name, lambda _: False, rig.clock.monotonic()))
    assert two.times() == ([7], [7])
    assert rig.inverses.pairs_pending == len(unknown)
    _, pending = await rig.write(AssocAdd(make_id(65), FRIEND, HIGH, 8, b""))
    assert pending, "acknowledged, and written later"


async def test_a_leader_settles_what_it_remembers_on_contact_and_leaves_the_database_alone(two: TwoLeaders) -> None:
    two.others.faults.append(Unavailable("away"))
    await two.coordinator.write(add(7))
    assert two.coordinator.inverses.pairs_pending == 1
    two.coordinator.inverses._settings = OFTEN  # type: ignore[misc]
    two.coordinator.tasks(two.coordinator.inverses.settle_pending())
    await quiet()
    assert two.times() == ([7], []), "not before the pause after the failure is over"
    two.coordinator.clock.now += 1  # type: ignore[attr-defined]  # a ManualClock
    await two.settled()
    assert two.times() == ([7], [7])
    assert two.coordinator.inverses.pairs_pending == 0


async def test_a_pair_that_a_lost_copy_keeps_held_is_settled_by_sending_the_same_copy_again(two: TwoLeaders) -> None:
    """Waiting for the end of the hold would take as long as a copy may take to be executed."""
    two.others.faults.append(OutcomeUnknown("cut"))
    await two.coordinator.write(add(7))
    assert two.coordinator.inverses.pairs_held == 1
    intent = next(iter(two.store.rows.intents.values()))
    messages = await two.coordinator.inverses.settle_pair(intent, 5.0)
    assert {each.shard for each in messages} == {1}
    assert two.times() == ([7], [7])
    assert two.coordinator.inverses.pairs_held == 1, "the lost copy may still be executed"
    await two.settled()


async def test_the_same_copy_is_sent_again_after_the_shard_was_taken_again(two: TwoLeaders) -> None:
    """At the end of a cut many commits have an unknown outcome, for which the leader takes its shards again."""
    two.others.faults.append(OutcomeUnknown("cut"))
    await two.coordinator.write(add(7))
    intent = next(iter(two.store.rows.intents.values()))
    two.coordinator.ownership.retake(0)
    await two.coordinator.take(0)
    await two.coordinator.inverses.settle_pair(intent, 5.0)
    assert two.times() == ([7], [7])
    assert two.coordinator.inverses.pairs_held == 1, "the lost copy may still be executed"


async def test_no_other_copy_is_sent_while_one_of_before_the_shard_was_taken_again_may_be_executed(
    two: TwoLeaders,
) -> None:
    two.others.faults.append(OutcomeUnknown("cut"))
    await two.coordinator.write(add(7))
    intent = next(iter(two.store.rows.intents.values()))
    two.coordinator.ownership.retake(0)
    successor = LeaderRig(two.store, two.store, name="leader-3", others=two.others)
    await successor.take(0)
    two.others.faults.append(Unavailable("away"))
    await successor.write(add(8))
    await two.coordinator.take(0)
    with pytest.raises(Unavailable, match="an earlier copy"):
        await two.coordinator.inverses.settle_pair(intent, 5.0)
    assert two.times() == ([8], [])
    await successor.close()


async def test_the_intents_of_a_shard_are_looked_for_as_soon_as_it_is_taken(two: TwoLeaders) -> None:
    """The next regular look may be as far away as a reader of the far end waits."""
    two.others.faults.append(Unavailable("away"))
    await two.coordinator.write(add(7))
    successor = LeaderRig(two.store, two.store, name="leader-3", others=two.others)
    successor.tasks(successor.inverses.search_taken())
    await successor.take(0)
    await until(lambda: successor.inverses.pairs_pending == 1)
    await successor.close()


async def test_a_leader_that_remembers_nothing_waits_for_the_first_pair(two: TwoLeaders) -> None:
    inverses = two.coordinator.inverses
    inverses._settings = OFTEN  # type: ignore[misc]
    two.coordinator.tasks(inverses.settle_pending())
    for time in (7, 8):
        await quiet()
        two.others.faults.append(Unavailable("away"))
        await two.coordinator.write(add(time))
        assert inverses.pairs_pending == 1
        two.coordinator.clock.now += 1  # type: ignore[attr-defined]  # a ManualClock
        await two.settled()
        assert two.times() == ([time], [time])


async def test_the_pairs_of_a_shard_that_was_taken_are_tried_before_the_next_look(two: TwoLeaders) -> None:
    two.others.faults.append(Unavailable("away"))
    await two.coordinator.write(add(7))
    successor = LeaderRig(two.store, two.store, name="leader-3", others=two.others)
    successor.inverses._settings = InverseSettings(contact_seconds=1e6)  # type: ignore[misc]
    successor.tasks(successor.inverses.settle_pending())
    successor.tasks(successor.inverses.search_taken())
    await successor.take(0)
    await until(lambda: not two.store.rows.intents)
    assert two.times() == ([7], [7])
    await successor.close()


async def test_the_intent_of_a_lost_copy_is_found_when_the_shard_is_taken_again(two: TwoLeaders) -> None:
    """The pair is still held for the copy, but nobody is at work on it."""
    two.others.faults.append(OutcomeUnknown("cut"))
    await two.coordinator.write(add(7))
    inverses = two.coordinator.inverses
    two.coordinator.ownership.retake(0)
    inverses._pending.keep_only(lambda _: False)
    two.coordinator.tasks(inverses.search_taken())
    await two.coordinator.take(0)
    await until(lambda: inverses.pairs_pending == 1)


async def test_all_pairs_between_two_shards_are_settled_and_no_others(two: TwoLeaders) -> None:
    others = [AssocAdd(LOW, FRIEND, make_id(64 + number, shard), 7, b"") for number in (1, 2) for shard in (1, 2)]
    two.others.faults += [Unavailable("away")] * 5
    for write in (add(7), *others):
        assert (await two.coordinator.write(write))[1]
    two.others.faults.append(Unavailable("away"))
    with pytest.raises(Unavailable, match="away"):
        await two.coordinator.inverses.settle_between(0, 1, 5.0)
    messages = await two.coordinator.inverses.settle_between(0, 1, 5.0)
    assert two.times() == ([7], [7])
    assert {each.shard for each in messages} == {1}
    await until(lambda: len(two.store.rows.intents) == 2)
    assert {pair.high_id >> SHARD_SHIFT for pair in two.store.rows.intents} == {2}
    assert await two.coordinator.inverses.settle_between(0, 1, 5.0) == []


async def test_of_too_many_pairs_between_two_shards_some_are_settled_and_the_reader_tries_again(
    two: TwoLeaders,
) -> None:
    two.coordinator.inverses._settings = InverseSettings(repair_batch=2)  # type: ignore[misc]
    two.others.faults += [Unavailable("away")] * 3
    for number in range(3):
        await two.coordinator.write(AssocAdd(LOW, FRIEND, make_id(64 + number, 1), 7, b""))
    with pytest.raises(Unavailable, match="more than 2 pairs are pending"):
        await two.coordinator.inverses.settle_between(0, 1, 5.0)
    await until(lambda: len(two.store.rows.intents) == 1)
    await two.coordinator.inverses.settle_between(0, 1, 5.0)
    await two.settled()


async def test_intents_that_a_former_master_was_asked_for_are_asked_for_again_by_the_topology_of_then(
    two: TwoLeaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.others.faults.append(Unavailable("away"))
    await two.coordinator.write(add(7))
    refreshed = []

    async def refresh(_: float) -> bool:
        refreshed.append(len(two.store.intent_faults))
        return True

    monkeypatch.setattr(two.coordinator.configuration, "refresh", refresh)
    two.store.intent_faults += [MasterReadOnly("closed"), MasterReadOnly("being opened")]
    await two.coordinator.inverses.settle_between(0, 1, 5.0)
    assert two.times() == ([7], [7])
    assert refreshed == [1, 0], "once after each refusal"
    two.store.intent_faults += [MasterReadOnly("closed")] * 10
    with pytest.raises(MasterReadOnly):
        await two.coordinator.inverses.settle_between(0, 1, 0.08)
    assert len(two.store.intent_faults) == 8, "at once, and after 0.05 seconds"


async def test_a_topology_that_cannot_be_read_takes_no_settlement_its_time(
    two: TwoLeaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent etcd must not keep a reader from a master that is opened meanwhile, and is not asked again and again."""
    two.others.faults.append(Unavailable("away"))
    await two.coordinator.write(add(7))
    silent = SilentTopology()
    monkeypatch.setattr(two.coordinator.configuration, "_load", silent)
    two.store.intent_faults += [MasterReadOnly("closed"), MasterReadOnly("being opened")]
    async with asyncio.timeout(PATIENT_SECONDS):
        await two.coordinator.inverses.settle_between(0, 1, 10 * PATIENT_SECONDS)
    assert two.times() == ([7], [7])
    assert (two.store.intent_faults, silent.reads) == ([], 1)


async def test_those_who_ask_for_a_pair_at_the_same_time_share_one_settlement(two: TwoLeaders) -> None:
    two.others.faults.append(Unavailable("away"))
    await two.coordinator.write(add(7))
    intent = next(iter(two.store.rows.intents.values()))
    gate = two.others.gate = Gate()
    asking = [asyncio.ensure_future(two.coordinator.inverses.settle_pair(intent, 5.0)) for _ in range(3)]
    await gate.arrived.wait()
    with pytest.raises(DeadlineExceeded, match="were not settled before the deadline"):
        await two.coordinator.inverses.settle_pair(intent, 0.001)
    gate.open()
    first, second, third = await asyncio.gather(*asking)
    assert first is second is third
    assert len(two.others.settled) == 1
    assert set(two.others.timeouts) == {InverseSettings().settle_timeout_seconds}, "and no reader's deadline"


async def test_readers_do_not_keep_a_pair_from_a_write_that_waits_for_it(two: TwoLeaders) -> None:
    """Each copy without an answer keeps the pair held for longer."""
    two.coordinator.inverses._settings = InverseSettings(  # type: ignore[misc]
        settle_timeout_seconds=0.02, settle_linger_seconds=0.02
    )
    two.others.faults.append(OutcomeUnknown("cut"))
    await two.coordinator.write(add(7))
    intent = next(iter(two.store.rows.intents.values()))
    writing = asyncio.ensure_future(two.coordinator.write(add(9)))
    await quiet()
    with pytest.raises(Overloaded, match="writes wait"):
        await two.coordinator.inverses.settle_pair(intent, 5.0)
    await writing
    assert two.times() == ([9], [9])


async def test_a_pair_is_not_released_while_its_copy_is_sent_again(two: TwoLeaders) -> None:
    """Otherwise the next write of the pair could be overtaken by that copy."""
    two.coordinator.inverses._settings = InverseSettings(  # type: ignore[misc]
        settle_timeout_seconds=0.01, settle_linger_seconds=0.0
    )
    two.others.faults.append(OutcomeUnknown("cut"))
    await two.coordinator.write(add(7))
    intent = next(iter(two.store.rows.intents.values()))
    gate = two.others.gate = Gate()
    again = asyncio.ensure_future(two.coordinator.inverses.settle_pair(intent, 5.0))
    await gate.arrived.wait()
    writing = asyncio.ensure_future(two.coordinator.write(add(9)))
    await asyncio.wait([writing], timeout=0.05)
    assert not writing.done()
    gate.open()
    await again
    await writing
    assert two.times() == ([9], [9])


async def test_a_leader_of_both_shards_writes_both_sides_in_one_transaction_and_leaves_older_intents_to_be_settled(
    two: TwoLeaders,
) -> None:
    two.others.faults.append(Unavailable("away"))
    await two.coordinator.write(add(7, LIKES))
    await two.coordinator.take(0, 1)
    two.others.rigs[1] = two.coordinator
    await two.coordinator.write(add(8))
    assert two.times() == ([8], [8])
    (intent,) = two.store.rows.intents.values()
    await two.coordinator.inverses.settle_pair(intent, 5.0)
    await two.settled()
    assert two.times(LIKES, LIKED_BY) == ([7], [7])


@pytest.mark.parametrize(("old", "new"), [(LIKED_BY, COMMENT), (COMMENT, LIKED_BY)])
async def test_an_edge_at_the_other_leader_changes_between_a_type_with_an_inverse_and_one_without(
    two: TwoLeaders, old: int, new: int
) -> None:
    writer = two.coordinator if old == LIKED_BY else two.far
    await writer.write(AssocAdd(HIGH, old, LOW, 7, b""))
    written, pending = await two.coordinator.write(AssocChangeType(HIGH, old, LOW, new))
    assert written.outcome.found
    assert not pending
    assert [edge.time for edge in two.store.edges(HIGH, new)] == [7]
    assert two.store.edges(HIGH, old) == []
    assert [edge.time for edge in two.store.edges(LOW, LIKES)] == ([7] if new == LIKED_BY else [])


async def test_a_change_of_type_that_is_interrupted_leaves_the_edge_and_can_be_repeated(two: TwoLeaders) -> None:
    await two.coordinator.write(AssocAdd(HIGH, LIKED_BY, LOW, 7, b""))
    move = AssocChangeType(HIGH, LIKED_BY, LOW, COMMENT)
    two.others.faults.append(DatabaseDown("away"))
    with pytest.raises(DatabaseDown):
        await two.coordinator.write(move)
    assert [edge.time for edge in two.store.edges(HIGH, LIKED_BY)] == [7]
    await two.coordinator.write(move)
    assert [edge.time for edge in two.store.edges(HIGH, COMMENT)] == [7]
    assert two.store.edges(HIGH, LIKED_BY) == two.store.edges(LOW, LIKES) == []


@pytest.mark.parametrize("is_reported", [True, False])
async def test_a_change_of_type_whose_copy_may_have_been_written_has_an_unknown_outcome(
    two: TwoLeaders, is_reported: bool
) -> None:
    """The refusal of the last attempt says nothing about the first one."""
    await two.coordinator.write(AssocAdd(HIGH, LIKED_BY, LOW, 7, b""))
    clock, settle = two.coordinator.clock, two.others.settle
    assert isinstance(clock, ManualClock)
    faults: list[TaoError] = [OutcomeUnknown("silence"), Unavailable("marked down")]
    if is_reported:
        faults = [Unavailable("its last try")]
        faults[0].__cause__ = RemoteOutcomeUnknown("in COMMIT")

    async def settle_slowly(
        shard: int,
        settles: Sequence[SettleEdge],
        coordinator: Coordinator,
        timeout_seconds: float,
        *,
        background: bool = False,
    ) -> Copied:
        clock.now += 6.0 / len(faults)
        return await settle(shard, settles, coordinator, timeout_seconds, background=background)

    two.others.settle = settle_slowly  # type: ignore[method-assign]
    two.others.after_writing = True
    two.others.faults += faults
    with pytest.raises(OutcomeUnknown):
        await two.coordinator.write(AssocChangeType(HIGH, LIKED_BY, LOW, COMMENT), within=5.0)
    assert [edge.time for edge in two.store.edges(HIGH, COMMENT)] == [7]
    assert two.others.faults == []


async def test_changing_the_type_of_a_missing_edge_reports_it(two: TwoLeaders) -> None:
    written, _ = await two.coordinator.write(AssocChangeType(HIGH, LIKED_BY, LOW, COMMENT))
    assert not written.outcome.found
    await two.coordinator.write(AssocDelete(LOW, FRIEND, HIGH))
    assert two.store.rows.intents == {}
