"""Fair mutual exclusion of the writes of one pair of ids."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tao.model.errors import DeadlineExceeded, Overloaded
from tao.model.rows import IntentKey


class PairLocks:
    """Fair mutual exclusion per pair of ids. It uses memory only for pairs being written.

    Writes of both sides in one transaction *share* a pair, because the commit lanes serialise them. A copy from one
    side to the other holds the pair exclusively: otherwise the far side would undo a shared write that was committed
    between the copy's read and its write."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting: Final = max_waiting
        self._held: dict[IntentKey, deque[asyncio.Future[None]]] = {}
        self._shared: dict[IntentKey, int] = {}
        self._drained: dict[IntentKey, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, pair: IntentKey) -> bool:
        """Return whether the pair is held exclusively."""
        return pair in self._held

    def is_awaited(self, pair: IntentKey) -> bool:
        """Return whether anyone waits for the pair."""
        return any(not turn.done() for turn in self._held.get(pair, ()))

    async def acquire(self, pair: IntentKey, timeout_seconds: float) -> None:
        """Hold the pair exclusively.

        Raises `Overloaded` when too many writes wait for it, `DeadlineExceeded` when it does not become free in
        time."""
        if pair not in self._held and pair not in self._shared:  # mostly: without a timer
            self._held[pair] = deque()
            return
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._turn(pair)
                if pair in self._shared:
                    await self._drain(pair)
        except TimeoutError:
            raise DeadlineExceeded(
                f"other writes of the edges between {pair.low_id} and {pair.high_id} lasted until the deadline"
            ) from None

    async def _turn(self, pair: IntentKey) -> None:
        queue = self._held.get(pair)
        if queue is None:
            self._held[pair] = deque()
            return
        if len(queue) >= self._max_waiting:
            raise Overloaded(f"{len(queue)} writes wait for the edges between {pair.low_id} and {pair.high_id}")
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(pair)
            raise

    async def _drain(self, pair: IntentKey) -> None:
        drained = self._drained[pair] = asyncio.get_running_loop().create_future()
        try:
            await drained
        except asyncio.CancelledError:
            self._drained.pop(pair, None)
            self.release(pair)
            raise

    @contextmanager
    def shared(self, pair: IntentKey) -> Iterator[None]:
        """Share the pair meanwhile. See `share`."""
        self.share(pair)
        try:
            yield
        finally:
            self.unshare(pair)

    def share(self, pair: IntentKey) -> None:
        """Share the pair until `unshare`. The caller must have checked that no write `holds` it."""
        self._shared[pair] = self._shared.get(pair, 0) + 1

    def unshare(self, pair: IntentKey) -> None:
        """End one `share` of the pair."""
        self._shared[pair] -= 1
        if not self._shared[pair]:
            del self._shared[pair]
            drained = self._drained.pop(pair, None)
            if drained is not None and not drained.done():
                drained.set_result(None)

    def release(self, pair: IntentKey) -> None:
        """Pass the pair to the next waiting write, or free it."""
        queue = self._held[pair]
        while queue:
            turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._held[pair]
