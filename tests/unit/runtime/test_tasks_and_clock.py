"""Background tasks are held, bounded, heard when they fail and gone on close; the clock is the loop's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from tao.model.errors import Overloaded
from tao.model.ports import Clock
from tao.observability.logs import logger
from tao.runtime.clock import LoopClock
from tao.runtime.tasks import BackgroundTasks


async def forever() -> None:
    await asyncio.Event().wait()


async def turns_until(true: Callable[[], bool]) -> None:
    """Let the loop turn until the condition holds; a few turns are all that any of this takes."""
    for _ in range(100):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition did not come true in 100 turns of the loop")


async def test_a_task_that_fails_is_logged_and_counted_and_the_others_go_on() -> None:
    async def fail() -> None:
        raise RuntimeError("broken job")

    tasks = BackgroundTasks("leader", logger("test"))
    with capture_logs() as logs:
        tasks.start(forever(), "other")
        tasks.start(fail(), "failing")
        await turns_until(lambda: tasks.failed == 1)
    assert [(line["event"], line["task"]) for line in logs] == [("background task failed", "leader: failing")]
    assert (tasks.failed, len(tasks)) == (1, 1)
    await tasks.close()


async def test_close_cancels_all_and_nothing_starts_afterwards() -> None:
    cleaned: list[int] = []

    async def job() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(1)

    tasks = BackgroundTasks("leader", logger("test"))
    tasks.start(job(), "job")
    await asyncio.sleep(0)
    await tasks.close()
    assert (len(tasks), cleaned) == (0, [1])
    with pytest.raises(Overloaded, match="closing"):
        tasks.start(forever(), "late")


async def test_one_task_can_be_cancelled_by_what_start_returns() -> None:
    tasks = BackgroundTasks("leader", logger("test"))
    cancel = tasks.start(forever(), "one")
    tasks.start(forever(), "two")
    assert cancel()
    await turns_until(lambda: len(tasks) == 1)
    await tasks.close()


async def test_tasks_are_bounded() -> None:
    tasks = BackgroundTasks("leader", logger("test"), limit=1)
    tasks.start(forever(), "one")
    with pytest.raises(Overloaded, match="1 background tasks already: two"):
        tasks.start(forever(), "two")
    await tasks.close()


async def test_the_clock_is_the_loops() -> None:
    clock: Clock = LoopClock()
    before = asyncio.get_running_loop().time()
    assert before <= clock.monotonic() <= asyncio.get_running_loop().time()
    assert abs(clock.unix_ms() - time.time() * 1000) < 60_000
