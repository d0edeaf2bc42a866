"""The pairs of ids whose edges are being written, one write at a time (DESIGN.md §6)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tao.model.errors import DeadlineExceeded, OutcomeUnknown, Overloaded
from tao.model.rows import IntentKey


class PairQueue:
    """Fair mutual exclusion per pair; memory only for pairs being written.

    Writes of both sides in one transaction *share* a pair: lanes keep those apart. Whoever copies from one side to the
    other has it alone, or a shared write between its reading and its writing would be undone at the far side."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting: Final = max_waiting
        self._held: dict[IntentKey, deque[asyncio.Future[None]]] = {}
        self._shared: dict[IntentKey, int] = {}
        self._drained: dict[IntentKey, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, pair: IntentKey) -> bool:
        return pair in self._held

    async def acquire(self, pair: IntentKey, timeout_seconds: float) -> None:
        """Raises `Overloaded` when too many wait, `DeadlineExceeded` when the turn does not come in time."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._turn(pair)
                if pair in self._shared:
                    await self._drain(pair)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the edges between {pair.low_id} and {pair.high_id} were being written until the deadline had passed"
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
        """To be entered while nobody `holds` the pair."""
        self._shared[pair] = self._shared.get(pair, 0) + 1
        try:
            yield
        finally:
            self._shared[pair] -= 1
            if not self._shared[pair]:
                del self._shared[pair]
                drained = self._drained.pop(pair, None)
                if drained is not None and not drained.done():
                    drained.set_result(None)

    def release(self, pair: IntentKey) -> None:
        queue = self._held[pair]
        while queue:
            turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._held[pair]


class Hold:
    """A pair being written. ``deadline``: whoever writes it waits no longer. ``insists``: it has named the far side,
    and cannot be told that the write is done before that has it. ``until``: keep it held till then, because a copy may
    still be under way. ``unknown``: of a copy that may have been written, whatever became of those sent after it."""

    __slots__ = ("deadline", "insists", "unknown", "until")

    def __init__(self, deadline: float, *, insists: bool = False) -> None:
        self.deadline = deadline
        self.insists = insists
        self.until: float | None = None
        self.unknown: OutcomeUnknown | None = None
