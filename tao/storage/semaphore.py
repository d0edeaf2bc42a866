"""A fair semaphore that bounds connections and statements."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final


class Semaphore:
    """Admits callers first come, first served, as `asyncio.Semaphore` does. A free permit is acquired without a
    coroutine, which would otherwise cost each read half a dozen of them."""

    __slots__ = ("_free", "_waiters")

    def __init__(self, permits: int) -> None:
        self._free = permits
        self._waiters: Final[deque[asyncio.Future[None]]] = deque()

    def try_acquire(self) -> bool:
        """Acquire a permit if one is free. While somebody waits, none is: it goes to the first waiter."""
        if not self._free:
            return False
        self._free -= 1
        return True

    async def acquire(self) -> None:
        """Acquire a permit, waiting until one is free. The caller bounds the time."""
        if self.try_acquire():
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except BaseException:
            if waiter.cancelled():
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
            else:
                self.release()  # the permit arrived while this waiter was being cancelled
            raise

    def release(self) -> None:
        """Release a permit to the first waiter."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1
