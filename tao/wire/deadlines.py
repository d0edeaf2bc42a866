"""A timer wheel for deadlines: coarse, at the price of two dictionary operations a request.

Nearly every request is answered long before its deadline, so the cost of setting and cancelling is what matters; a
timer of the event loop for each request costs several times more. The wheel has a fixed number of slots. A deadline
further away than one turn stays in its slot for the next turn. The loop is woken for the earliest deadline only:
seldom, as long as answers come in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SLOTS = 512


class DeadlineWheel:
    """Calls ``on_expired(key)`` at most one tick after the key's deadline."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tick_seconds: float, on_expired: Callable[[int], None]) -> None:
        self._loop = loop
        self._tick_seconds = tick_seconds
        self._on_expired = on_expired
        self._slots: list[dict[int, int]] = [{} for _ in range(SLOTS)]
        self._count = 0
        self._swept_tick = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_tick = 0

    def add(self, key: int, timeout_seconds: float) -> int:
        """Add a deadline. Returns its tick, which `discard` needs."""
        now = self._loop.time()
        tick = int((now + timeout_seconds) / self._tick_seconds) + 1
        if self._timer is None and not self._count:  # during a sweep there may be other keys that are due by now
            self._swept_tick = int(now / self._tick_seconds)
        self._slots[tick % SLOTS][key] = tick
        self._count += 1
        if self._timer is None or tick < self._timer_tick:  # as `_wake_at` compares, without a call for each request
            self._wake_at(tick)
        return tick

    def discard(self, key: int, tick: int) -> None:
        """Remove a key whose deadline has not been reported yet."""
        if self._slots[tick % SLOTS].pop(key, None) is not None:
            self._count -= 1

    def stop(self) -> None:
        """Stop reporting deadlines."""
        for slot in self._slots:
            slot.clear()
        self._count = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake_at(self, tick: int) -> None:
        if self._timer is not None:
            if self._timer_tick <= tick:
                return
            self._timer.cancel()
        self._timer_tick = tick
        self._timer = self._loop.call_at(tick * self._tick_seconds, self._sweep)

    def _sweep(self) -> None:
        # A timer may be called early by the clock's resolution; the tick that it was set for has come all the same.
        now_tick = max(int(self._loop.time() / self._tick_seconds), self._timer_tick)
        first = max(self._swept_tick + 1, now_tick - SLOTS + 1)
        expired: list[int] = []
        for at in range(first, now_tick + 1):
            slot = self._slots[at % SLOTS]
            due = [key for key, tick in slot.items() if tick <= now_tick]
            for key in due:
                del slot[key]
            expired += due
        self._count -= len(expired)
        self._swept_tick = now_tick
        self._timer = None
        for key in expired:
            self._on_expired(key)
        if self._count:
            # The next slot that is not empty. It may be due in a later turn, and is then checked again.
            self._wake_at(next(at for at in range(now_tick + 1, now_tick + SLOTS + 1) if self._slots[at % SLOTS]))
