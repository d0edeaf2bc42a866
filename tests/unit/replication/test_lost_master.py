"""A master that is being replaced is asked all the time, and nobody waits for an answer that does not come."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from tao.replication import lost_master
from tao.replication.locks import LockLost
from tao.replication.lost_master import MAX_QUESTIONS, SILENT_SECONDS, LostMaster
from tao.replication.promotion import PromotionSettings
from tao.replication.promotion_plan import MasterAnswers, PromotionRequest, SetMember, check_lost
from tao.replication.replication_set import ReplicationSet
from tests.rigs.pacing import ManualClock, loop_clock, until
from tests.unit.replication.members import master
from tests.unit.replication.test_replication_set import replication_set_of


class Answers:
    """What a master answers: the questions wait until there is something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.waiting: list[int] = []
        """The questions under way, by number."""
        self.given: asyncio.Queue[SetMember | Exception] = asyncio.Queue()
        monkeypatch.setattr(ReplicationSet, "member", self._member)
        monkeypatch.setattr(lost_master, "_PAUSE_SECONDS", 0.0)

    async def _member(self, region: str, seconds: float) -> SetMember:
        assert region == "east"
        assert seconds > PromotionSettings().statement_seconds, "one that is slow answers late"
        self.asked += 1
        number = self.asked
        self.waiting.append(number)
        try:
            given = await self.given.get()
            if isinstance(given, Exception):
                raise given
            return given
        finally:
            self.waiting.remove(number)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    return Answers(monkeypatch)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    return loop_clock(monkeypatch)


async def _turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_question_that_is_unanswered_for_a_while_is_not_waited_for(
    answers: Answers, clock: ManualClock
) -> None:
    lost = LostMaster(replication_set_of("east", "west"))
    async with lost.asked():
        await _turns()
        certain = asyncio.ensure_future(lost.until_certain())
        await _turns()
        assert not certain.done()
        clock.now += SILENT_SECONDS
        assert (await certain).state is None
        assert (await lost.until_certain()).state is None
    assert answers.asked == 1


async def test_a_master_that_refused_an_earlier_question_is_asked_again(answers: Answers, clock: ManualClock) -> None:
    lost = LostMaster(replication_set_of("east", "west"))
    async with lost.asked():
        answers.given.put_nowait(master(None))
        await _turns()
        clock.now += 0.1
        certain = asyncio.ensure_future(lost.until_certain())
        await _turns()
        assert not certain.done(), "it may have been started meanwhile"
        answers.given.put_nowait(master(None))
        await _turns()
        assert not certain.done(), "this question was sent before"
        answers.given.put_nowait(master(None))
        assert (await certain).state is None


async def test_a_master_that_refuses_the_watcher_is_there(answers: Answers, clock: ManualClock) -> None:
    """Its account may have been changed since it was reported lost."""
    lost = LostMaster(replication_set_of("east", "west"))
    async with lost.asked():
        answers.given.put_nowait(dataclasses.replace(master(None), refuses=True))
        await lost.answered.wait()
        assert (await lost.until_certain()).refuses
    with pytest.raises(MasterAnswers, match="refuses this process"):
        check_lost(lost.found, PromotionRequest(master_lost=True))


async def test_an_answer_is_known_at_once(answers: Answers, clock: ManualClock) -> None:
    lost = LostMaster(replication_set_of("east", "west"))
    async with lost.asked():
        await _turns()
        clock.now += 0.1
        answers.given.put_nowait(master("1-1-1"))
        await lost.answered.wait()
        assert (await lost.until_certain()).state is not None


async def test_a_slow_master_answers_a_question_after_others_were_sent(answers: Answers, clock: ManualClock) -> None:
    """They are sent because a new connection may find a way that is mended."""
    lost = LostMaster(replication_set_of("east", "west"))
    async with lost.asked():
        await _turns()
        for asked in (2, 3):
            clock.now += 1.0
            await until(lambda asked=asked: answers.asked == asked)  # type: ignore[misc]
        assert (await lost.until_certain()).state is None
        answers.given.put_nowait(master("1-1-1"))
        await lost.answered.wait()
        assert (await lost.until_certain()).state is not None


async def test_a_master_that_hangs_has_a_bounded_number_of_questions_and_the_oldest_are_kept(
    answers: Answers, clock: ManualClock
) -> None:
    """Each has a connection, and the first one is what a slow master answers first."""
    lost = LostMaster(replication_set_of("east", "west"))
    async with lost.asked():
        await _turns()
        for asked in range(2, 3 * MAX_QUESTIONS):
            clock.now += 1.0
            await until(lambda asked=asked: answers.asked == asked)  # type: ignore[misc]
        await until(lambda: len(answers.waiting) == MAX_QUESTIONS)
        newest = answers.asked
        assert answers.waiting == [*range(1, MAX_QUESTIONS), newest]
    assert answers.waiting == []


async def test_nobody_is_certain_of_a_master_that_is_not_asked_any_more(answers: Answers, clock: ManualClock) -> None:
    lost = LostMaster(replication_set_of("west", "east"))  # which the rig takes for an error
    async with lost.asked():
        await _turns()
        clock.now += SILENT_SECONDS
        with pytest.raises(AssertionError):
            await lost.until_certain()


async def _until_the_first_is_late(answers: Answers, clock: ManualClock) -> None:
    """Wait until a second question is under way beside the first one."""
    await _turns()
    clock.now += 1.0
    await until(lambda: answers.asked == 2)


async def _fail_the_late_one(answers: Answers, error: Exception) -> None:
    answers.given.put_nowait(error)
    await until(lambda: answers.waiting == [2])
    await _turns()


async def test_a_late_question_that_fails_is_logged_and_nobody_is_certain(
    answers: Answers, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The master may have answered it, and may not be replaced as one that is silent."""
    lost = LostMaster(replication_set_of("east", "west"))
    async with lost.asked():
        await _until_the_first_is_late(answers, clock)
        assert (await lost.until_certain()).state is None
        await _fail_the_late_one(answers, ValueError("an answer of a kind that nobody knows"))
        with pytest.raises(ValueError, match="of a kind that nobody knows"):
            await lost.until_certain()
    assert [record.message for record in caplog.records] == ["the question failed: does east-db answer"]


async def test_a_late_question_that_fails_changes_nothing_for_a_master_that_has_answered(
    answers: Answers, clock: ManualClock
) -> None:
    lost = LostMaster(replication_set_of("east", "west"))
    async with lost.asked():
        await _until_the_first_is_late(answers, clock)
        await _fail_the_late_one(answers, ValueError("an answer of a kind that nobody knows"))
        answers.given.put_nowait(master("1-1-1"))
        await lost.answered.wait()
        assert (await lost.until_certain()).state is not None


async def test_a_late_question_that_has_lost_its_lock_is_not_an_error(
    answers: Answers, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    lost = LostMaster(replication_set_of("east", "west"))
    async with lost.asked():
        await _until_the_first_is_late(answers, clock)
        await _fail_the_late_one(answers, LockLost("somebody else has it"))
        assert (await lost.until_certain()).state is None
    assert caplog.records == []
