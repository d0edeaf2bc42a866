"""The misses of one batch, answered side by side until they are all answered or the request's time is over.

Each is in the hands of a task from the start: a task above them, to wait for them, would cost every miss two more turns
of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

from tao.model.errors import DeadlineExceeded, InternalError, Overloaded
from tao.serving.late_answers import LateAnswers
from tao.wire.session import Reply


class MissedSlots:
    """Made for one request, and started once."""

    __slots__ = ("_answer", "_answers", "_over", "_reply", "_slots", "_tasks", "_timer", "_waiting", "_working")

    def __init__(
        self, slots: Sequence[int], reply: Reply, answers: LateAnswers, answer: Callable[[int], Awaitable[None]]
    ) -> None:
        """``answer`` fetches what a slot asks for and gives it to ``answers``; it handles every `TaoError`."""
        self._slots: Final = slots
        self._reply: Final = reply
        self._answers: Final = answers
        self._answer: Final = answer
        self._waiting = iter(slots)
        self._tasks: list[asyncio.Task[None]] = []
        self._working = 0
        self._over = False
        self._timer: asyncio.TimerHandle

    def start(self, spawn: Callable[[Coroutine[Any, Any, None]], object], at_once: int, seconds: float) -> None:
        """Work for so long, at so many slots at a time. Raises `Overloaded` when there is no task to be had."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)
        for _ in range(min(at_once, len(self._slots))):
            self._working += 1
            try:
                spawn(self._answer_some())
            except Overloaded:
                self._ended()
                if not self._working:
                    raise
                return  # those under way see to the rest

    async def _answer_some(self) -> None:
        # Side by side with the others like it, so that a slow query holds up none behind it.
        task = asyncio.current_task()
        assert task is not None
        self._tasks.append(task)
        try:
            for slot in self._waiting:
                if self._over or self._reply.closed:
                    return
                await self._answer(slot)
        except Exception as error:
            self._end()
            message = f"{type(error).__name__} while reading; see the server's log"
            self._answers.error_rest(self._slots, InternalError(message))
            raise
        finally:
            self._tasks.remove(task)
            self._ended()

    def _ended(self) -> None:
        self._working -= 1
        if not self._working:
            self._timer.cancel()

    def _expire(self) -> None:
        self._end()
        late = DeadlineExceeded("not answered within the time that the request had left")
        self._answers.error_rest(self._slots, late)

    def _end(self) -> None:
        """Nobody begins another slot, and nobody goes on with the one in hand, but whoever says so."""
        self._over = True
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
