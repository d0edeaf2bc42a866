"""One subscriber's way through the spool: what came after its position, until the memory log has the rest (§7)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from tao.delivery.message_log import Stream
from tao.model.delivery import Position, ShardDelivery, SpoolRow
from tao.model.ports import Spool

_PAST_ALL_ROWS: Final = (1 << 63) - 1
"""In the place of a row: of that number none is asked for."""


class CatchUp:
    """Of one shard. What is told is numbered in a stream of its own; the position in the binlog stays that of the
    beginning until all is told, since rows may have come in another order than they were committed in."""

    def __init__(self, stream: Stream, cursor: Position) -> None:
        self.stream: Final = stream
        self.cursor: Final = cursor
        """Where it began."""
        self.rows: deque[SpoolRow] = deque()
        self.reading = False
        self._told = 0
        self._last = (cursor.reached, _PAST_ALL_ROWS)
        self._read_up_to = -1
        self._ended = False

    @property
    def complete(self) -> bool:
        """The memory log has all that has not been told."""
        memory_after = self.stream.coverage.memory_after
        if self.rows or self.reading:
            return False
        return self._last[0] > memory_after or (self._ended and self._read_up_to >= memory_after)

    def read(self, spool: Spool, max_bytes: int, came: Callable[[bool], None]) -> None:
        """Ask for the next rows. ``came``: they are there, or (False) cannot be had."""

        def answer(rows: Sequence[SpoolRow] | None) -> None:
            self.reading = False
            if rows:
                self.rows.extend(rows)
                self._last = (rows[-1].number, rows[-1].place)
            self._ended = not rows
            came(rows is not None)

        self.reading = True
        self._read_up_to = self.stream.coverage.head
        spool.read(self.stream.shard, self.cursor.source, self._last, max_bytes, answer)

    def next_part(self) -> ShardDelivery:
        """The first row."""
        run = self.rows.popleft().messages
        first = not self._told
        self._told += len(run.messages)
        shard, name = self.stream.shard, f"{self.stream.name}~"
        position = Position(shard, name, self._told, self.cursor.source, self.cursor.reached)
        return ShardDelivery(position, False, run, continued=first)

    @property
    def joined(self) -> int:
        """Where to go on in the stream. Some of it may have been told, which harms nobody."""
        return max(self.cursor.reached, self.stream.coverage.memory_after)
