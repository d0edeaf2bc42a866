"""Ids of new objects at a leader: what costs a commit, and which answer a caller gets."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tao.leader.write_path import WritePathSettings
from tao.model.errors import (
    DeadlineExceeded,
    IdNotReserved,
    InvalidField,
    NotMine,
    OutcomeUnknown,
    Overloaded,
    ShardBlocked,
    Unavailable,
)
from tao.model.ids import (
    CLOCKS_DIFFER_MS,
    MAX_RESERVED_IDS,
    RESERVED_AHEAD_MS,
    WINDOW_MS,
    LostTimes,
    make_id,
    unix_ms_of,
)
from tao.storage.failures import TablesMissing
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import USER, LeaderRig
from tests.rigs.links_rig import MemoryReply
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import Gate, ManualClock, quiet, until


@pytest.fixture
async def store() -> MemoryStore:
    return MemoryStore(4)


@pytest.fixture
async def rig(store: MemoryStore) -> AsyncIterator[LeaderRig]:
    rig = LeaderRig(store, store, clock=ManualClock())
    await rig.take(0, 1)
    yield rig
    await rig.close()
    assert rig.tasks.errors == []


async def reserve(rig: LeaderRig, count: int, *, as_interval: bool = True, deadline_ms: int = 5_000) -> pb.Answer:
    asked = pb.ReserveIds(shard=0, count=count, as_interval=as_interval)
    answers: list[pb.Answer] = []
    rig.service.handle(
        pb.Request(number=1, deadline_ms=deadline_ms, reserve_ids=asked), MemoryReply(answers.append, peer="near-1")
    )
    await until(lambda: answers)
    return answers[0]


async def add(rig: LeaderRig, object_id: int = 0, data: bytes = b"", *, deadline_ms: int = 5_000) -> pb.WriteResult:
    write = pb.Write(obj_add=pb.ObjAdd(id=object_id, shard=0, otype=USER, data=data))
    answers: list[pb.Answer] = []
    request = pb.Request(number=1, deadline_ms=deadline_ms, write=pb.WriteBatch(writes=[write]))
    rig.service.handle(request, MemoryReply(answers.append, peer="near-1"))
    await until(lambda: answers)
    return answers[0].write.results[0]


async def test_a_reservation_is_answered_as_an_interval(rig: LeaderRig) -> None:
    first = (await reserve(rig, MAX_RESERVED_IDS)).reserved_ids
    again = (await reserve(rig, 5)).reserved_ids
    assert (first.count, again.count, list(first.ids)) == (MAX_RESERVED_IDS, 5, [])
    assert again.first == first.first + MAX_RESERVED_IDS


async def test_a_client_of_the_former_version_reads_the_ids_one_by_one(rig: LeaderRig) -> None:
    reserved = (await reserve(rig, 3, as_interval=False)).reserved_ids
    assert list(reserved.ids) == [reserved.first, reserved.first + 1, reserved.first + 2]


async def test_an_owner_commits_every_half_minute_and_not_for_each_object(store: MemoryStore, rig: LeaderRig) -> None:
    for _ in range(20):
        assert not (await add(rig)).HasField("error")
    await reserve(rig, 100)
    assert len(store.transactions) == 21, "twenty objects and one reservation of time"
    rig.clock.now += RESERVED_AHEAD_MS / 1000 * 0.6  # type: ignore[attr-defined]  # a ManualClock
    await reserve(rig, 1)
    await quiet()
    assert len(store.transactions) == 22, "before the time has run out"
    await reserve(rig, 1)
    assert len(store.transactions) == 22


async def test_shards_that_need_time_together_share_a_commit(store: MemoryStore, rig: LeaderRig) -> None:
    gate = Gate()
    store.before_lock = gate.pass_through
    waiting = [asyncio.ensure_future(rig.allocate(shard)) for shard in (0, 1, 0, 1)]
    await gate.arrived.wait()
    gate.open()
    ids = await asyncio.gather(*waiting)
    assert store.transactions == [[0, 1]]
    assert len(set(ids)) == 4


async def test_a_commit_raises_the_time_of_other_shards_in_use(store: MemoryStore, rig: LeaderRig) -> None:
    clock = rig.clock
    assert isinstance(clock, ManualClock)
    await asyncio.gather(rig.allocate(0), rig.allocate(1))
    clock.now += RESERVED_AHEAD_MS / 1000 * 0.3
    await rig.allocate(1)
    await quiet()
    assert store.transactions == [[0, 1]], "no shard needs time for its own sake"
    clock.now += RESERVED_AHEAD_MS / 1000 * 0.3
    await rig.allocate(0)
    await quiet()
    assert store.transactions == [[0, 1]] * 2
    await rig.allocate(1)
    clock.now += RESERVED_AHEAD_MS / 1000 * 0.2
    await rig.take(0, 1)
    await rig.allocate(0)
    assert store.transactions[2:] == [[0]], "the time of a former ownership is not raised"


async def test_a_commit_does_not_raise_the_time_of_shards_that_are_not_used(store: MemoryStore, rig: LeaderRig) -> None:
    clock = rig.clock
    assert isinstance(clock, ManualClock)
    await asyncio.gather(rig.allocate(0), rig.allocate(1))
    for _ in range(4):
        clock.now += RESERVED_AHEAD_MS / 1000 * 0.6
        await rig.allocate(0)
        await quiet()
    # Ids begin a minute ahead of the clock here, and count as used until the clock has come to them.
    assert store.transactions == [[0, 1], [0, 1], [0, 1], [0], [0]]


async def test_an_id_is_waited_for_until_the_deadline(store: MemoryStore, rig: LeaderRig) -> None:
    gate = Gate()
    store.before_lock = gate.pass_through
    late = [
        (await add(rig, deadline_ms=50)).error.reason,
        (await add(rig, make_id(0, rig.clock.unix_ms(), 0), deadline_ms=50)).error.reason,
        (await reserve(rig, 5, deadline_ms=50)).error.reason,
    ]
    assert late == [DeadlineExceeded.reason] * 3
    gate.open()
    assert (await add(rig)).id, "the reservation went on"
    assert len(store.transactions) == 2


async def test_callers_that_wait_for_ids_are_bounded(store: MemoryStore) -> None:
    rig = LeaderRig(store, store, clock=ManualClock(), writes=WritePathSettings(max_waiting_per_shard=2))
    await rig.take(0, 1)
    gate = Gate()
    store.before_lock = gate.pass_through
    gone, kept = (asyncio.ensure_future(rig.allocate(0)) for _ in range(2))
    await gate.arrived.wait()
    with pytest.raises(Overloaded, match="2 callers wait for ids of shard 0"):
        await rig.allocate(0)
    gone.cancel()
    await quiet()
    again, other = (asyncio.ensure_future(rig.allocate(shard)) for shard in (0, 1))
    await quiet()
    gate.open()
    assert len(set(await asyncio.gather(kept, again, other))) == 3
    await rig.close()


async def test_an_invalid_object_costs_no_reservation(store: MemoryStore, rig: LeaderRig) -> None:
    assert (await add(rig, data=b"\xff")).error.reason == InvalidField.reason
    assert store.transactions == []


async def test_a_cancelled_caller_does_not_take_the_others_along(store: MemoryStore, rig: LeaderRig) -> None:
    gate = Gate()
    store.before_lock = gate.pass_through
    first, second = (asyncio.ensure_future(rig.allocate(0)) for _ in range(2))
    await gate.arrived.wait()
    first.cancel()
    gate.open()
    assert await second


async def test_an_id_of_the_future_is_refused(rig: LeaderRig) -> None:
    reserved = (await reserve(rig, 10)).reserved_ids
    assert (await add(rig, reserved.first + 9)).id == reserved.first + 9
    refused = await add(rig, reserved.first + 10)
    assert refused.error.reason == IdNotReserved.reason
    assert (await add(rig)).id == reserved.first + 10


async def test_an_id_of_long_ago_is_accepted(rig: LeaderRig) -> None:
    assert (await add(rig, make_id(0, 1_600_000_000_000, 0))).found is False


async def test_an_object_that_exists_under_the_id_is_reported_also_with_equal_content(rig: LeaderRig) -> None:
    reserved = (await reserve(rig, 1)).reserved_ids
    assert [(await add(rig, reserved.first)).found for _ in range(2)] == [False, True]


async def test_a_commit_of_unknown_outcome_gives_nothing_out_and_can_be_repeated(
    store: MemoryStore, rig: LeaderRig
) -> None:
    store.commit_fault = OutcomeUnknown("the connection was lost")
    with pytest.raises(Unavailable, match="no ids could be reserved"):
        await rig.allocate(0)
    stored = store.rows.reserved_times[0]
    assert unix_ms_of(await rig.allocate(0)) > stored, "what was perhaps reserved is not used"
    assert list(rig.ownership.owned) == [0, 1]


async def test_a_blocked_shard_is_reported_and_tried_again(store: MemoryStore, rig: LeaderRig) -> None:
    store.lock_faults.append(ShardBlocked("locked by hand", 0))
    with pytest.raises(ShardBlocked):
        await rig.allocate(0)
    assert await rig.allocate(0)


async def test_a_blocked_shard_does_not_fail_the_others(store: MemoryStore, rig: LeaderRig) -> None:
    store.lock_faults.append(ShardBlocked("shard 1 is locked", 1))
    other, blocked = await asyncio.gather(rig.allocate(0), rig.allocate(1), return_exceptions=True)
    assert (type(other), type(blocked)) == (int, ShardBlocked)
    assert store.transactions == [[0, 1], [0]]


async def test_a_shard_without_tables_does_not_fail_the_others(store: MemoryStore, rig: LeaderRig) -> None:
    missing = [TablesMissing("a table does not exist") for _ in range(2)]
    store.lock_faults += missing
    other, lacking = await asyncio.gather(rig.allocate(0), rig.allocate(1), return_exceptions=True)
    assert (type(other), lacking) == (int, missing[1])
    assert store.transactions == [[0, 1], [1], [0]]


async def test_a_server_that_is_down_fails_all_shards_with_one_transaction(store: MemoryStore, rig: LeaderRig) -> None:
    down = Unavailable("no connection")
    store.lock_faults.append(down)
    failed = await asyncio.gather(rig.allocate(0), rig.allocate(1), return_exceptions=True)
    assert list(failed) == [down, down]
    assert store.transactions == [[0, 1]]


async def test_a_leader_that_stops_fails_those_who_wait(store: MemoryStore, rig: LeaderRig) -> None:
    store.before_lock = Gate().pass_through
    waiting = asyncio.ensure_future(rig.allocate(0))
    await quiet()
    await rig.tasks.close()
    with pytest.raises(Unavailable, match="stopped"):
        await waiting


async def test_the_error_of_a_reservation_that_nobody_waits_for_any_more_is_no_fault(
    store: MemoryStore, rig: LeaderRig
) -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    store.before_lock = Gate().pass_through
    waiting = asyncio.ensure_future(rig.allocate(0))
    await quiet()
    waiting.cancel()
    await quiet()
    await rig.tasks.close()
    gc.collect()  # a future that is collected with an error that nobody took is reported
    await quiet()
    assert faults == []


async def test_a_leader_that_can_start_nothing_fails_those_who_wait(rig: LeaderRig) -> None:
    rig.tasks.refuses = True
    with pytest.raises(Unavailable.__mro__[1], match="no more tasks"):
        await rig.allocate(0)
    rig.tasks.refuses = False
    assert await rig.allocate(0)


async def test_a_shard_of_another_leader_gives_out_no_ids(store: MemoryStore, rig: LeaderRig) -> None:
    with pytest.raises(NotMine):
        await rig.allocate(2)
    await store.take_ownership([0], "leader-2", timeout_seconds=1)
    with pytest.raises(NotMine):
        await rig.allocate(0)
    assert 0 not in store.rows.reserved_times
    assert list(rig.ownership.owned) == [1]


async def test_a_master_that_returns_with_the_same_generation_does_not_revive_the_ids_before(
    store: MemoryStore, rig: LeaderRig
) -> None:
    await rig.allocate(0)
    row = store.shards[0]
    store.shards[0] = msgspec.structs.replace(row, generation=row.generation - 1, version_epoch=row.version_epoch + 1)
    begin = LostTimes.at(rig.clock.unix_ms()).begin(store.rows.reserved_times[0], lacks_epoch=False)
    store.rows.reserved_times[0] = begin
    await rig.take(0)
    assert store.shards[0].generation == row.generation
    assert unix_ms_of(await rig.allocate(0)) > begin


async def test_ids_of_a_restored_shard_are_refused_until_the_clock_has_gone_on(
    store: MemoryStore, rig: LeaderRig
) -> None:
    clock = rig.clock
    assert isinstance(clock, ManualClock)
    begin = LostTimes.at(clock.unix_ms()).begin(0, lacks_epoch=True)
    store.rows.reserved_times[0] = begin
    with pytest.raises(Overloaded, match="ahead of the clock of this leader"):
        await rig.allocate(0)
    with pytest.raises(Overloaded):
        await rig.allocate(0)
    assert not (await add(rig, make_id(0, clock.unix_ms(), 0))).HasField("error"), "it was chosen by its caller"
    assert await rig.allocate(1), "another shard has ids"
    assert store.rows.reserved_times[0] == begin
    assert store.transactions == [[0], [0], [1]], "nothing is tried that is known to be refused"
    clock.now += (CLOCKS_DIFFER_MS + WINDOW_MS) / 1000
    assert unix_ms_of(await rig.allocate(0)) > begin


async def test_a_shard_whose_row_is_missing_is_given_up(store: MemoryStore, rig: LeaderRig) -> None:
    del store.shards[0]
    with pytest.raises(NotMine):
        await rig.allocate(0)
    assert list(rig.ownership.owned) == [1]
