"""The write path over a store in memory: batching, failures, and the state after them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from tao.leader.write_path import WritePathSettings
from tao.model.changes import ListChange, ObjectChange
from tao.model.errors import (
    DeadlineExceeded,
    Fenced,
    InternalError,
    InvalidArgument,
    NotMine,
    OutcomeUnknown,
    Overloaded,
    ShardBlocked,
    TaoError,
    Unavailable,
)
from tao.model.graph import version_of
from tao.model.ids import MAX_RESERVED_IDS
from tao.model.rows import ObjectRow
from tao.model.writes import AssocAdd, ObjAdd, ObjUpdate
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, USER, LeaderRig, make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import Gate, quiet, until

A, B, OTHER = make_id(64), make_id(128), make_id(64, 1)


@pytest.fixture
async def store() -> MemoryStore:
    return MemoryStore(4)


@pytest.fixture
async def rig(store: MemoryStore) -> AsyncIterator[LeaderRig]:
    rig = LeaderRig(store, store, writes=WritePathSettings(lanes_per_server=1))
    await rig.take(0, 1)
    yield rig
    await rig.close()
    assert rig.tasks.errors == []


@pytest.mark.parametrize("count", [0, MAX_RESERVED_IDS + 1])
async def test_a_reservation_of_more_ids_than_the_bound_is_an_invalid_argument(rig: LeaderRig, count: int) -> None:
    answers: list[pb.Answer] = []
    with pytest.raises(InvalidArgument, match=f"{count} ids cannot be reserved at once; reserve 1 to 10000"):
        rig.service.handle(reservation(count), MemoryReply(answers.append, peer="near-1"))
    rig.service.handle(reservation(MAX_RESERVED_IDS), MemoryReply(answers.append, peer="near-1"))
    await until(lambda: answers)
    (answer,) = answers
    assert len(set(answer.reserved_ids.ids)) == MAX_RESERVED_IDS


def reservation(count: int) -> pb.Request:
    return pb.Request(deadline_ms=5_000, reserve_ids=pb.ReserveIds(shard=0, count=count))


def edge(id1: int = A, id2: int = B, time: int = 1) -> AssocAdd:
    return AssocAdd(id1, COMMENT, id2, time, b"")


def start(rig: LeaderRig, *writes: AssocAdd | ObjAdd, within: float = 5.0) -> list[asyncio.Task[object]]:
    return [asyncio.ensure_future(rig.write(write, within=within)) for write in writes]


async def results(*tasks: asyncio.Task[object]) -> list[object]:
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_writes_that_arrive_together_are_one_transaction_with_one_version(
    store: MemoryStore, rig: LeaderRig
) -> None:
    await results(*start(rig, *(edge(id2=B + n) for n in range(10)), edge(OTHER)))
    assert store.transactions == [[0, 1]]
    assert version_of(rig.cache.count(A, COMMENT) or b"") & 0xFFFF == 1
    assert rig.writes.committed_transactions == 1
    assert rig.writes.committed_writes == 11


async def test_writes_that_arrive_during_a_transaction_wait_for_the_next(store: MemoryStore, rig: LeaderRig) -> None:
    gate = Gate()
    store.before_commit = gate.pass_through
    first = start(rig, edge(time=1))
    await gate.arrived.wait()
    rest = start(rig, edge(time=2), edge(time=3), edge(time=4))
    gate.open()
    await results(*first, *rest)
    assert len(store.transactions) == 2
    assert store.edges(A, COMMENT)[0].time == 4


async def test_a_fenced_shard_fails_alone_and_the_rest_of_its_batch_is_committed(
    store: MemoryStore, rig: LeaderRig
) -> None:
    await store.take_ownership([1], "leader-2", timeout_seconds=1)
    lost, kept = await results(*start(rig, edge(OTHER), edge()))
    assert isinstance(lost, Fenced)
    assert not isinstance(kept, Exception)
    assert store.edges(OTHER, COMMENT) == []
    assert list(rig.ownership.owned) == [0]


async def test_a_shard_with_a_lock_timeout_fails_alone(store: MemoryStore, rig: LeaderRig) -> None:
    store.lock_faults.append(ShardBlocked("locked by hand", 1))
    blocked, kept = await results(*start(rig, edge(OTHER), edge()))
    assert isinstance(blocked, ShardBlocked)
    assert not isinstance(kept, Exception)
    assert list(rig.ownership.owned) == [0, 1], "a lock is no reason to give a shard up"


async def test_a_lock_timeout_of_an_unknown_shard_fails_the_batch(store: MemoryStore, rig: LeaderRig) -> None:
    store.lock_faults.append(ShardBlocked("somewhere"))
    assert [type(each) for each in await results(*start(rig, edge(OTHER), edge()))] == [ShardBlocked] * 2


async def test_an_invalid_write_fails_alone(store: MemoryStore, rig: LeaderRig) -> None:
    store.rows.objects[A] = ObjectRow(A, USER, 5, True, b"")
    wrong, kept = await results(*start(rig, ObjAdd(A, USER, b"", allocated=False), edge()))
    assert isinstance(wrong, InvalidArgument)
    assert not isinstance(kept, Exception)
    assert rig.writes.failed_writes == 1
    assert rig.writes.committed_writes == 1


async def test_a_taken_id_is_replaced_by_another(store: MemoryStore, rig: LeaderRig) -> None:
    taken = await rig.allocate(0)
    store.rows.objects[taken] = ObjectRow(taken, USER, 5, False, b"theirs")
    written, _ = await rig.write(ObjAdd(taken, USER, b"", allocated=True))
    assert written.outcome.id not in (0, taken)
    assert store.rows.objects[taken].data == b"theirs"


async def test_the_number_of_ids_tried_is_bounded(store: MemoryStore, rig: LeaderRig) -> None:
    first = await rig.allocate(0)
    for step in range(20):
        store.rows.objects[first + step] = ObjectRow(first + step, USER, 5, False, b"theirs")
    with pytest.raises(Unavailable, match="8 ids in a row"):
        await rig.write(ObjAdd(first, USER, b"", allocated=True))
    assert len(store.transactions) == 1 + 8, "the first reserves time for ids"


async def test_a_write_that_is_queued_beyond_its_deadline_is_refused_and_writes_nothing(
    store: MemoryStore, rig: LeaderRig
) -> None:
    gate = Gate()
    store.before_commit = gate.pass_through
    first = start(rig, edge(time=1))
    await gate.arrived.wait()
    late = start(rig, edge(time=2), within=1.0)
    await quiet()
    rig.clock.now += 2.0  # type: ignore[attr-defined]  # a ManualClock
    gate.open()
    assert isinstance((await results(*first, *late))[1], DeadlineExceeded)
    assert [each.time for each in store.edges(A, COMMENT)] == [1]


async def test_an_expired_write_in_a_requeued_batch_does_not_affect_the_others(
    store: MemoryStore, rig: LeaderRig
) -> None:
    """The expired write keeps its place among the lanes, and is found a second time."""
    gate = Gate()
    store.before_commit = gate.pass_through
    first = start(rig, edge(time=1))
    await gate.arrived.wait()
    late = start(rig, edge(time=2), within=1.0)
    blocked = start(rig, edge(OTHER))
    kept = start(rig, edge(id2=B + 1))
    await quiet()
    rig.clock.now += 2.0  # type: ignore[attr-defined]  # a ManualClock
    store.lock_faults.append(ShardBlocked("locked by hand", 1))
    gate.open()
    found = await results(*first, *late, *blocked, *kept)
    assert [type(each) for each in found[1:3]] == [DeadlineExceeded, ShardBlocked]
    assert not isinstance(found[3], Exception)
    assert rig.writes.waiting == 0


async def test_a_cancelled_caller_withdraws_a_write_that_still_waits(store: MemoryStore, rig: LeaderRig) -> None:
    gate = Gate()
    store.before_commit = gate.pass_through
    first = start(rig, edge(time=1))
    await gate.arrived.wait()
    (gone,) = start(rig, edge(time=2))
    await quiet()
    gone.cancel()
    await quiet()
    assert rig.writes.waiting == 1
    gate.open()
    await results(*first, gone)
    assert [each.time for each in store.edges(A, COMMENT)] == [1]


async def test_the_write_of_a_caller_cancelled_in_a_requeued_batch_is_not_executed(
    store: MemoryStore, rig: LeaderRig
) -> None:
    gate = Gate()
    store.before_lock = gate.pass_through
    store.lock_faults.append(ShardBlocked("locked by hand", 1))
    gone, _, kept = tasks = start(rig, edge(time=2), edge(OTHER), edge(id2=B + 1))
    await gate.arrived.wait()
    gone.cancel()
    await quiet()
    gate.open()
    await results(*tasks)
    assert not kept.exception()
    assert [each.id2 for each in store.edges(A, COMMENT)] == [B + 1]
    assert rig.writes.waiting == 0


async def test_an_unexpected_error_before_the_commit_ends_the_batch_and_frees_its_keys(
    store: MemoryStore, rig: LeaderRig
) -> None:
    async def broken() -> None:
        raise ZeroDivisionError

    store.before_lock = broken
    (failed,) = await results(*start(rig, edge()))
    assert isinstance(failed, InternalError)
    assert list(rig.ownership.owned) == [0, 1], "nothing was written: caches are right"
    store.before_lock = quiet
    await rig.write(edge())
    assert len(store.edges(A, COMMENT)) == 1


@pytest.mark.parametrize("fault", [OutcomeUnknown("the connection is gone"), ZeroDivisionError()])
async def test_an_unknown_outcome_stops_serving_the_shard_until_it_is_taken_again(
    store: MemoryStore, rig: LeaderRig, fault: BaseException
) -> None:
    await rig.write(edge(time=1))
    store.commit_fault = fault
    with capture_logs() as logs:
        (failed,) = await results(*start(rig, edge(time=2)))
    assert isinstance(failed, OutcomeUnknown)
    assert list(rig.ownership.owned) == [1]
    assert rig.cache.peek_list(A, COMMENT) is None
    assert store.edges(A, COMMENT)[0].time == 2, "here it had happened"
    assert rig.writes.unknown_outcomes == 1
    (line,) = [each for each in logs if each["event"] == "outcome_unknown"]
    assert (line["shards"], line["writes"], bool(line["database"])) == ([0], 1, True)
    assert str(fault) in line["reason"]


async def test_a_failure_to_update_caches_after_a_commit_closes_the_shard_and_makes_the_outcome_unknown(
    store: MemoryStore, rig: LeaderRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(rig.publisher, "publish_all", broken)
    (failed,) = await results(*start(rig, edge()))
    assert isinstance(failed, OutcomeUnknown)
    assert list(rig.ownership.owned) == [1]
    assert tuple(rig.cache.open_shards()) == (1,)


async def test_a_transaction_cancelled_in_its_commit_counts_as_unknown(store: MemoryStore, rig: LeaderRig) -> None:
    """This happens when the server closes."""
    gate = Gate()
    store.before_commit = gate.pass_through
    (waiting,) = start(rig, edge())
    await gate.arrived.wait()
    await rig.tasks.close()
    (failed,) = await results(waiting)
    assert isinstance(failed, OutcomeUnknown)
    assert list(rig.ownership.owned) == [1]


async def test_a_batch_for_which_no_task_can_be_started_fails_and_frees_its_keys(
    store: MemoryStore, rig: LeaderRig
) -> None:
    rig.tasks.refuses = True
    (failed,) = await results(*start(rig, edge()))
    assert isinstance(failed, Overloaded)
    rig.tasks.refuses = False
    await rig.write(edge())
    assert rig.writes.waiting == 0


async def test_too_many_waiting_writes_are_refused_at_once(store: MemoryStore) -> None:
    rig = LeaderRig(store, store, writes=WritePathSettings(lanes_per_server=1, max_waiting_per_shard=2))
    await rig.take(0)
    gate = Gate()
    store.before_commit = gate.pass_through
    tasks = start(rig, edge())
    await gate.arrived.wait()
    tasks += start(rig, edge(), edge())
    await quiet()
    with pytest.raises(Overloaded):
        await rig.write(edge())
    gate.open()
    assert not any(isinstance(each, TaoError) for each in await results(*tasks))


async def test_a_write_of_a_shard_that_is_not_owned_is_refused(rig: LeaderRig) -> None:
    with pytest.raises(NotMine):
        await rig.write(edge(make_id(64, 3)))


async def test_the_cache_and_the_subscribers_have_a_write_before_its_writer_is_answered(
    store: MemoryStore, rig: LeaderRig
) -> None:
    order: list[str] = []
    publish = rig.publisher.publish_all

    def noting(batches):  # type: ignore[no-untyped-def]
        assert rig.cache.count(A, COMMENT) is not None
        order.append("published")
        publish(batches)

    rig.publisher.publish_all = noting  # type: ignore[method-assign]
    written, _ = await rig.write(edge())
    order.append("answered")
    assert order == ["published", "answered"]
    (change,) = written.messages[0].messages
    assert isinstance(change, ListChange)


async def test_a_large_object_is_written_and_left_out_of_its_message(store: MemoryStore) -> None:
    rig = LeaderRig(store, store, writes=WritePathSettings(inline_object_bytes=8))
    await rig.take(0)
    store.rows.objects[A] = ObjectRow(A, USER, 5, False, b"")
    written, _ = await rig.write(ObjUpdate(A, USER, b"\x81\x01\xa9long-name"))
    assert getattr(written.messages[0].messages[0], "data", b"?") is None
    assert b"long-name" in store.rows.objects[A].data
    await until(lambda: not rig.tasks.running)


async def test_the_messages_of_a_commit_are_kept_for_the_tailer_under_its_transaction(
    store: MemoryStore, rig: LeaderRig
) -> None:
    data = b"\x81\x01\xda\xff\xff" + b"x" * 65_535  # more than a message to a follower has
    await rig.write(ObjAdd(A, USER, data, False))
    await rig.write(edge(OTHER))
    committed = rig.publisher.committed
    added, linked = committed.find("db@1:0-1", 1, 0), committed.find("db@1:0-1", 2, 1)
    assert added is not None
    assert linked is not None
    (change,) = added.messages
    assert isinstance(change, ObjectChange)
    assert change.data == data
    assert added.version_epoch == 1
    assert isinstance(linked.messages[0], ListChange)
    assert committed.find("db@1:0-1", 2, 0) is None
    assert not committed.commits("db")


async def test_a_write_that_changes_nothing_or_whose_outcome_is_unknown_keeps_nothing(
    store: MemoryStore, rig: LeaderRig
) -> None:
    await rig.write(edge())
    await rig.write(edge())
    store.commit_fault = OutcomeUnknown("lost")
    with pytest.raises(OutcomeUnknown):
        await rig.write(edge(OTHER))
    assert rig.publisher.committed.find("db@1:0-1", 1, 0) is not None
    assert not any(rig.publisher.committed.find("db@1:0-1", number, shard) for number in (2, 3) for shard in (0, 1))
    assert not rig.publisher.committed.commits("db")
