"""Signals that end a run: the first one stops it, and nothing that comes after cuts the clean-up short.

A terminal that is closed (SIGHUP) means the same as Ctrl-C. Further signals are ignored: an impatient user who presses
Ctrl-C again would be left with servers' files and no word about them.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """A signal that may come, and the task that it stops."""

    def __init__(self) -> None:
        self.happened = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    @contextmanager
    def stopping_this_task(self) -> Iterator[None]:
        """Let the first signal cancel the current task while this context lasts; at once when it has come already."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            if self.happened:
                self._cancel()
            yield
        finally:
            self._loop = self._task = None

    def hear(self, _number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        if not self.happened:
            self.happened = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Hear signals until the end of this context. What was ignored from the start (nohup) still is; and once one has
    come none is heard any more, because the process only has to say how it went, and to exit."""
    interruption = Interruption()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    heard = [number for number in _SIGNALS if before[number] is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, interruption.hear)
    try:
        yield interruption
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_IGN if interruption.happened else before[number])
