"""Control of time and order in tests: a clock that stands still, gates, and tasks that can be awaited."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, Final

import pytest

from tao.model.errors import Overloaded

PATIENT_SECONDS: Final = 90.0
"""The longest wait for a condition, and for an answer that has to come. Where nothing is broken no test waits so long:
a machine that is slow, or busy with other tests, must fail none of them."""
_TURNS: Final = 1_000
_PAUSE_SECONDS: Final = 0.001


class ManualClock:
    """A `Clock` that advances only when ``now`` is set."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def unix_ms(self) -> int:
        return 1_700_000_000_000 + int(self.now * 1000)


def loop_clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """Replace the clock of the running loop: timers wait until the test sets ``now``."""
    clock = ManualClock()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", clock.monotonic)
    return clock


class Gate:
    """A place where the code under test stops until the test lets it go on."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self._open = asyncio.Event()

    async def pass_through(self) -> None:
        self.arrived.set()
        await self._open.wait()

    def open(self) -> None:
        self._open.set()


class SetTimers:
    """The timers that are set in the running loop from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = asyncio.get_running_loop()
        self.timers: list[asyncio.TimerHandle] = []
        call_at = self._loop.call_at

        def kept(*arguments: Any, **options: Any) -> asyncio.TimerHandle:
            timer = call_at(*arguments, **options)
            self.timers.append(timer)
            return timer

        monkeypatch.setattr(self._loop, "call_at", kept)

    def waiting(self) -> int:
        """Return how many of them are still to come."""
        now = self._loop.time()
        return sum(not timer.cancelled() and timer.when() > now for timer in self.timers)


class Tasks:
    """A spawner like `BackgroundTasks`. ``refuses`` makes it full; an exception of a task is kept for the test."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[None]] = set()
        self.errors: list[BaseException] = []
        self.refuses = False

    def __call__(self, job: Coroutine[Any, Any, None]) -> object:
        if self.refuses:
            job.close()
            raise Overloaded("no more tasks")
        task = asyncio.ensure_future(job)
        self.running.add(task)
        task.add_done_callback(self._ended)
        return task.cancel

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)

    async def close(self) -> None:
        for task in list(self.running):
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until the condition holds; pytest's timeout is the bound.

    What has not come when everything has run that could waits for a timer or for another thread."""
    for turn in itertools.count():
        if condition():
            return
        await asyncio.sleep(0 if turn < _TURNS else _PAUSE_SECONDS)


async def quiet() -> None:
    """Let everything run that can run now."""
    for _ in range(40):
        await asyncio.sleep(0)
