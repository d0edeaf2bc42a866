"""The misses of one request: all of them are answered once, whatever becomes of the tasks that see to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from tao.model.errors import Overloaded
from tao.model.queries import Fetched, ObjectQuery
from tao.serving.batch_settings import BatchSettings
from tao.serving.late_answers import LateAnswers
from tao.serving.missed_slots import MissedSlots
from tao.wire.identity import PeerIdentity
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.pacing import Gate, Tasks, until


class Heard:
    """A `Reply` that keeps what is sent."""

    peer = PeerIdentity("", "")
    closed = False

    def __init__(self) -> None:
        self.answers: list[pb.Answer] = []

    def send(self, answer: pb.Answer) -> None:
        self.answers.append(answer)

    def fail(self, error: Exception) -> None:
        raise error

    def on_close(self, callback: object) -> None:
        """Nobody closes it."""

    @property
    def is_whole(self) -> bool:
        return bool(self.answers) and not self.answers[-1].more

    @property
    def values(self) -> list[int]:
        return [slot for answer in self.answers for slot in answer.read.slots]

    @property
    def reasons(self) -> dict[int, str]:
        return {
            slot: error.reason
            for answer in self.answers
            for slot, error in zip(answer.read.failed_slots, answer.read.errors, strict=True)
        }


class Misses:
    """Slots of which ``stuck`` wait for ``gate`` and ``broken`` raises what nobody expects."""

    def __init__(self, slots: list[int], stuck: int = -1, broken: int = -1) -> None:
        self.reply = Heard()
        self.gate = Gate()
        self.cancelled = 0
        self._stuck, self._broken = stuck, broken
        settings = BatchSettings()
        self._answers = LateAnswers(self.reply, len(slots), False, settings, settings.max_answer_bytes)
        self.slots = MissedSlots(slots, self.reply, self._answers, self._answer)

    async def _answer(self, slot: int) -> None:
        if slot == self._broken:
            await until(self.gate.arrived.is_set)
            raise RuntimeError("nobody expects this")
        if slot == self._stuck:
            try:
                await self.gate.pass_through()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        self._answers.value(slot, ObjectQuery(slot + 1), Fetched(b"value", 1, "database"))


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    tasks = Tasks()
    yield tasks
    await tasks.close()


async def test_what_is_not_there_when_the_time_is_over_fails_and_is_given_up(tasks: Tasks) -> None:
    misses = Misses([0, 1, 2], stuck=1)
    misses.slots.start(tasks, 3, 0.2)
    await until(lambda: misses.reply.is_whole)
    assert misses.reply.values == [0, 2]
    assert misses.reply.reasons == {1: "DEADLINE_EXCEEDED"}
    await until(lambda: not tasks.running)
    assert misses.cancelled == 1


async def test_slots_that_nobody_had_begun_fail_with_the_others(tasks: Tasks) -> None:
    misses = Misses([0, 1, 2], stuck=0)
    misses.slots.start(tasks, 1, 0.01)
    await until(lambda: misses.reply.is_whole)
    assert misses.reply.reasons == dict.fromkeys(range(3), "DEADLINE_EXCEEDED")


async def test_an_error_that_nobody_expects_ends_all_and_is_heard_of(tasks: Tasks) -> None:
    misses = Misses([0, 1, 2], stuck=1, broken=2)
    misses.slots.start(tasks, 3, 60.0)
    await until(lambda: misses.reply.is_whole)
    assert misses.reply.values == [0]
    assert misses.reply.reasons == dict.fromkeys((1, 2), "INTERNAL")
    await until(lambda: not tasks.running)
    assert misses.cancelled == 1
    assert [type(error) for error in tasks.errors] == [RuntimeError]


async def test_when_tasks_run_out_those_that_were_had_see_to_the_rest(tasks: Tasks) -> None:
    misses = Misses([0, 1, 2])

    def one_only(job: Coroutine[Any, Any, None]) -> object:
        tasks.refuses = bool(tasks.running)
        return tasks(job)

    misses.slots.start(one_only, 3, 60.0)
    await until(lambda: misses.reply.is_whole)
    assert misses.reply.values == [0, 1, 2]


async def test_without_any_task_whoever_asked_hears_of_it(tasks: Tasks) -> None:
    tasks.refuses = True
    with pytest.raises(Overloaded):
        Misses([0]).slots.start(tasks, 1, 60.0)
