"""Writes that need nothing but their transaction: begun without a task, and answered as any other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from tao.leader import service
from tao.leader.write_path import WritePathSettings
from tao.model.errors import DeadlineExceeded, InvalidArgument, OutcomeUnknown, Overloaded, Unavailable, UnknownShard
from tao.model.rows import IntentKey
from tao.model.writes import AssocAdd, AssocChangeType, AssocDelete, ObjAdd, ObjUpdate, Write
from tao.wire.convert import write_to_pb
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, FRIEND, LIKED_BY, LIKES, NOTE, USER, LeaderRig, OtherRigs, make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import Gate, quiet, until

LOW, HIGH = make_id(64), make_id(64, 1)


@pytest.fixture
async def rig() -> AsyncIterator[LeaderRig]:
    store, others = MemoryStore(4), OtherRigs()
    rig = LeaderRig(store, store, others=others, writes=WritePathSettings(lanes_per_server=1))
    others.rigs[1] = rig
    await rig.take(0)
    yield rig
    await rig.close()
    assert rig.tasks.errors == []


def friend(time: int, id2: int = HIGH) -> AssocAdd:
    return AssocAdd(LOW, FRIEND, id2, time, b"")


def times(rig: LeaderRig, id1: int = HIGH, atype: int = FRIEND) -> list[int]:
    assert isinstance(rig.store, MemoryStore)
    return [edge.time for edge in rig.store.edges(id1, atype)]


def send(
    rig: LeaderRig, *writes: Write, on_answer: Callable[[pb.Answer], None] = lambda _: None
) -> list[pb.WriteResult]:
    """Send writes in one request. Returns the list that receives their results."""
    received: list[pb.WriteResult] = []

    def take(answer: pb.Answer) -> None:
        received.extend(answer.write.results)
        on_answer(answer)

    batch = pb.WriteBatch(want_changes=True, writes=list(map(write_to_pb, writes)))
    rig.service.handle(pb.Request(number=2, deadline_ms=5_000, write=batch), MemoryReply(take, peer="near-1"))
    return received


class BrokenReply(MemoryReply):
    """A reply that cannot be sent."""

    def __init__(self) -> None:
        super().__init__(lambda _: None, peer="near-1")
        self.sent: list[list[str]] = []

    def send(self, answer: pb.Answer) -> None:
        self.sent.append(reasons(answer.write.results))
        raise ValueError


async def answered(rig: LeaderRig, write: Write) -> list[pb.WriteResult]:
    results = send(rig, write)
    await until(lambda: results)
    return results


def reasons(results: Sequence[pb.WriteResult]) -> list[str]:
    return [result.error.reason for result in results]


async def leave_an_intent(rig: LeaderRig) -> None:
    """Leave the far side of an edge of another type unwritten, and take the far side's shard afterwards."""
    rig.others.faults.append(Unavailable("away"))
    await rig.write(AssocAdd(LOW, LIKES, HIGH, 7, b""))
    await rig.take(0, 1)


async def test_the_writes_of_a_request_share_the_task_of_their_transaction(rig: LeaderRig) -> None:
    await rig.take(0, 1)
    results = send(rig, *(friend(time, HIGH + time) for time in range(1, 9)))
    assert not rig.tasks.running, "nothing but the transaction needs one"
    await until(lambda: len(results) == 8)
    assert reasons(results) == [""] * 8
    assert [times(rig, HIGH + time) for time in range(1, 9)] == [[time] for time in range(1, 9)]


@pytest.mark.parametrize("requests", [1, 2])
async def test_a_write_without_a_task_does_not_overtake_one_that_got_a_task(rig: LeaderRig, requests: int) -> None:
    await rig.write(AssocAdd(LOW, COMMENT, HIGH, 1, b""))
    change, delete = AssocChangeType(LOW, COMMENT, HIGH, NOTE), AssocDelete(LOW, NOTE, HIGH)
    received = [send(rig, change, delete)] if requests == 1 else [send(rig, change), send(rig, delete)]
    await until(lambda: sum(map(len, received)) == 2)
    assert times(rig, LOW, NOTE) == []
    assert [result.found for results in received for result in results] == [True, True]


async def test_an_object_is_added_before_the_next_write_updates_it(rig: LeaderRig) -> None:
    reserved = await rig.allocate(0)
    results = send(rig, ObjAdd(reserved, USER, b"", allocated=False), ObjUpdate(reserved, USER, b""))
    await until(lambda: len(results) == 2)
    assert (reasons(results), results[1].found) == (["", ""], True)


async def test_an_object_is_added_without_a_task_if_its_id_is_reserved(rig: LeaderRig) -> None:
    reserved = await rig.allocate(0)
    results = send(rig, ObjAdd(reserved, USER, b"", allocated=False))
    assert not rig.tasks.running
    await until(lambda: results)
    assert (reasons(results), results[0].id) == ([""], reserved)


async def test_a_write_is_begun_without_a_task_once_the_tasks_before_it_have_run(rig: LeaderRig) -> None:
    await rig.write(AssocAdd(LOW, COMMENT, HIGH, 1, b""))
    await answered(rig, AssocChangeType(LOW, COMMENT, HIGH, NOTE))
    await until(lambda: not rig.tasks.running)
    send(rig, AssocAdd(LOW, COMMENT, HIGH, 2, b""))
    assert not rig.tasks.running


async def test_a_write_that_gets_no_task_does_not_slow_later_ones(rig: LeaderRig) -> None:
    rig.tasks.refuses = True
    assert reasons(await answered(rig, AssocChangeType(LOW, COMMENT, HIGH, NOTE))) == [Overloaded.reason]
    rig.tasks.refuses = False
    send(rig, AssocAdd(LOW, COMMENT, HIGH, 2, b""))
    assert not rig.tasks.running


async def test_a_write_that_is_refused_before_it_is_queued_fails_alone(rig: LeaderRig) -> None:
    await rig.take(0, 1)
    results = send(rig, friend(1), friend(1, 0), friend(1, make_id(64, 9)))
    await until(lambda: len(results) == 3)
    assert sorted(reasons(results)) == ["", InvalidArgument.reason, UnknownShard.reason]


async def test_a_change_is_delivered_before_its_writer_is_answered(rig: LeaderRig) -> None:
    events: list[str] = []
    subscribe = pb.Subscribe(subscriber="near-1", takes_repeats=True, positions=[pb.Position(shard=0)])
    reply = MemoryReply(lambda answer: events.append("delivery"), peer="near-1")
    rig.service.handle(pb.Request(number=1, subscribe=subscribe), reply)
    await quiet()
    events.clear()
    send(rig, AssocAdd(LOW, COMMENT, HIGH, 1, b""), on_answer=lambda _: events.append("answer"))
    await until(lambda: "answer" in events)
    assert events == ["delivery", "answer"]


async def test_of_queued_writes_the_one_with_the_earliest_deadline_is_refused_first(rig: LeaderRig) -> None:
    assert isinstance(rig.store, MemoryStore)
    gate = Gate()
    rig.store.before_commit = gate.pass_through
    committing = asyncio.ensure_future(rig.write(AssocAdd(LOW, COMMENT, 1, 1, b"")))
    await gate.arrived.wait()
    patient = asyncio.ensure_future(rig.write(AssocAdd(LOW, COMMENT, 2, 1, b""), within=60))
    hasty = asyncio.ensure_future(rig.write(AssocAdd(LOW, COMMENT, 3, 1, b""), within=0.02))
    with pytest.raises(DeadlineExceeded):
        await hasty
    assert not patient.done()
    gate.open()
    await committing
    await patient


async def test_a_write_of_both_ends_is_answered_without_the_pair_s_older_intent_which_is_settled_later(
    rig: LeaderRig,
) -> None:
    assert isinstance(rig.store, MemoryStore)
    await leave_an_intent(rig)
    rows = rig.store.rows
    (older,) = rows.intents.values()
    results = await answered(rig, friend(8))
    assert not results[0].inverse_pending
    assert (times(rig), times(rig, HIGH, FRIEND)) == ([8], [8])
    assert (list(rows.intents), times(rig, HIGH, LIKED_BY)) == ([IntentKey(LOW, HIGH)], [])
    await rig.inverses.settle_pair(older, 5.0)
    await until(lambda: not rows.intents)
    assert times(rig, HIGH, LIKED_BY) == [7]


@pytest.mark.parametrize("write", [AssocDelete(LOW, COMMENT, HIGH), AssocChangeType(LOW, COMMENT, HIGH, NOTE)])
async def test_a_committed_write_without_a_result_has_an_unknown_outcome(
    rig: LeaderRig, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    def fail(*_: object) -> None:
        raise ValueError

    await rig.write(AssocAdd(LOW, COMMENT, HIGH, 1, b""))
    monkeypatch.setattr(service, "outcome_to_pb", fail)
    answers: list[pb.Answer] = []
    results = send(rig, write, on_answer=answers.append)
    await until(lambda: results)
    assert times(rig, LOW, COMMENT) == []
    assert reasons(results) == [OutcomeUnknown.reason]
    assert results[0].error.message.startswith("written, but ")
    assert [change.shard for change in answers[0].write.changes] == [0], "its caches apply what was written"


async def test_a_bug_in_a_write_that_has_a_task_is_an_unknown_outcome(
    rig: LeaderRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = rig.inverses.write

    async def fail(*arguments: Any) -> None:
        await write(*arguments)
        raise ValueError

    monkeypatch.setattr(rig.inverses, "write", fail)
    results = await answered(rig, AssocChangeType(LOW, COMMENT, HIGH, NOTE))
    assert reasons(results) == [OutcomeUnknown.reason]
    await until(lambda: rig.tasks.errors)
    assert isinstance(rig.tasks.errors.pop(), ValueError)


async def test_a_result_that_could_not_be_sent_is_not_answered_again(rig: LeaderRig) -> None:
    batch = pb.WriteBatch(writes=[write_to_pb(AssocAdd(LOW, COMMENT, HIGH, 1, b""))])
    reply = BrokenReply()
    rig.service.handle(pb.Request(number=2, deadline_ms=5_000, write=batch), reply)
    await until(lambda: reply.sent)
    await quiet()
    assert reply.sent == [[""]], "an error would say that nothing was written"


async def test_a_copy_between_both_ends_waits_for_a_transaction_that_writes_them(rig: LeaderRig) -> None:
    assert isinstance(rig.store, MemoryStore)
    await leave_an_intent(rig)
    (intent,) = rig.store.rows.intents.values()
    gate = Gate()
    rig.store.before_commit = gate.pass_through
    results = send(rig, friend(8))
    await gate.arrived.wait()
    copied = len(rig.others.settled)
    settling = asyncio.ensure_future(rig.inverses.settle_pair(intent, 5.0))
    await quiet()
    assert len(rig.others.settled) == copied, "the copy would overtake what is being committed"
    gate.open()
    await until(lambda: results)
    await settling
    assert (times(rig), times(rig, HIGH, LIKED_BY)) == ([8], [7])
