"""One direction of a slow line, without the line: chunks in order, each with the time at which it may go on.

Sleeping once per read would add the delays of chunks that follow each other closely, and a transfer would crawl; a
queue of due times delays every chunk by the same, however many are on their way. Time is passed in.
"""

from __future__ import annotations

from collections import deque
from typing import Final


class DelayQueue:
    """Bounded in bytes: whoever fills it stops reading while it `is_full` and goes on once it `has_room`."""

    __slots__ = ("_chunks", "_end_due", "_latest_due", "_max_bytes", "held_bytes")

    def __init__(self, max_bytes: int, first_due: float = 0.0) -> None:
        """``max_bytes`` may be exceeded by one chunk. Nothing is due before ``first_due``: the handshake's cost."""
        self._chunks: Final = deque[tuple[float, bytes]]()
        self._max_bytes: Final = max_bytes
        self._latest_due = first_due
        self._end_due: float | None = None
        self.held_bytes = 0

    def put(self, chunk: bytes, due: float) -> None:
        """Append. A chunk is never due before the one in front of it: a delay made shorter overtakes nothing."""
        self._latest_due = max(due, self._latest_due)
        self._chunks.append((self._latest_due, chunk))
        self.held_bytes += len(chunk)

    def end(self, due: float) -> None:
        """Say that nothing follows; the end travels as slowly as the chunks. The first word counts."""
        if self._end_due is None:
            self._latest_due = self._end_due = max(due, self._latest_due)

    def take(self, now: float) -> bytes:
        """Everything that is due, in order; empty when nothing is."""
        taken: list[bytes] = []
        while self._chunks and self._chunks[0][0] <= now:
            taken.append(self._chunks.popleft()[1])
        found = taken[0] if len(taken) == 1 else b"".join(taken)
        self.held_bytes -= len(found)
        return found

    def has_ended(self, now: float) -> bool:
        """True once everything was taken and the end is due."""
        return not self._chunks and self._end_due is not None and self._end_due <= now

    @property
    def next_due(self) -> float | None:
        """When there is something to do next: a chunk's time, or the end's; None when the queue waits for more."""
        return self._chunks[0][0] if self._chunks else self._end_due

    @property
    def is_full(self) -> bool:
        """True from the bound on."""
        return self.held_bytes >= self._max_bytes

    @property
    def has_room(self) -> bool:
        """True at half the bound and below: some distance, so that reading is not stopped and started per chunk."""
        return self.held_bytes * 2 <= self._max_bytes
