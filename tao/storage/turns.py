"""So many at a time, the others in line: what bounds connections and statements."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final


class Turns:
    """First come, first served, as with an `asyncio.Semaphore`; but a turn that is free is taken without a coroutine,
    of which a read had half a dozen for this alone."""

    __slots__ = ("_free", "_line")

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._line: Final[deque[asyncio.Future[None]]] = deque()

    def take(self) -> bool:
        """Take one if it is free; while somebody waits none is: it is his."""
        if not self._free:
            return False
        self._free -= 1
        return True

    async def wait(self) -> None:
        """Take one, when it is free. The caller bounds the time."""
        if self.take():
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(waiter)
        try:
            await waiter
        except BaseException:
            if waiter.cancelled():
                if waiter in self._line:
                    self._line.remove(waiter)
            else:
                self.give_back()  # it came while its taker was being cancelled
            raise

    def give_back(self) -> None:
        """It goes to the next in line."""
        while self._line:
            waiter = self._line.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1
