"""From the reader's thread to the loop: a bounded queue whose full end holds the thread, hence the binlog, back."""

from __future__ import annotations

import asyncio
import threading
from typing import Final

from tao.model.errors import TaoError
from tao.tailer.binlog import BinlogTransaction


class HandOff:
    """One producer, the thread; one consumer, the loop. Bounded by estimated memory; a transaction that is larger
    passes alone."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes: Final = max_bytes
        self._loop: Final = asyncio.get_running_loop()
        self._some: Final = asyncio.Event()
        self._room: Final = threading.Condition()
        self._waiting: list[BinlogTransaction] = []
        self._bytes = 0
        self._failure: TaoError | None = None
        self.stopped: Final = threading.Event()
        """Set by the loop: the thread has to end."""

    @property
    def waiting_bytes(self) -> int:
        """Waiting for the loop, estimated."""
        return self._bytes

    def put(self, transaction: BinlogTransaction) -> bool:
        """In the thread: wait for room and hand over. False when the thread has to end."""
        weight = transaction.size_bytes
        with self._room:
            while self._bytes and self._bytes + weight > self._max_bytes and not self.stopped.is_set():
                self._room.wait()
            if self.stopped.is_set():
                return False
            self._waiting.append(transaction)
            self._bytes += weight
            first = len(self._waiting) == 1
        if first:
            self._wake()
        return True

    def fail(self, error: TaoError) -> None:
        """In the thread, as its last word: raised in the loop after what was put before."""
        with self._room:
            self._failure = error
        self._wake()

    async def take(self) -> list[BinlogTransaction]:
        """In the loop: all that is there, waiting for something. Raises the thread's last word."""
        while True:
            with self._room:
                self._some.clear()
                if self._waiting:
                    taken, self._waiting, self._bytes = self._waiting, [], 0
                    self._room.notify()
                    return taken
                if self._failure is not None:
                    raise self._failure
            await self._some.wait()

    def stop(self) -> None:
        """In the loop: let the thread end, wherever it waits."""
        self.stopped.set()
        with self._room:
            self._room.notify()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._some.set)
        except RuntimeError:
            # The loop is closed, so nobody waits for anything any more.
            self.stopped.set()
