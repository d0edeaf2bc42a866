"""Which of a shard's guaranteed messages a leader has, by their positions in the region's binlog (DESIGN.md §7).

The tailer says of all that it tells of a shard from where to where it reaches (`tao.model.delivery.Span`). Put
together, these spans show whether anything is missing, whoever was told it, and whichever leader that was. Messages are
kept in the order in which they came, each under the position reached by then: so "all that came later than position P
was reached" is a piece off the end, and holds everything after P even when some of it came twice or late.
"""

from __future__ import annotations

from tao.model.delivery import Span


class Coverage:
    """One shard's. All messages after `memory_after` up to `head` are in the memory log, all after `spool_after` up to
    `head` in the spool (None: nothing is)."""

    __slots__ = ("_aside", "head", "linked", "memory_after", "owing", "source", "spool_after")

    def __init__(self, source: str = "", head: int = 0, spool_after: int | None = None) -> None:
        self.source = source
        self.head = head
        self.memory_after = head
        self.spool_after = spool_after
        self.linked = False
        """The tailer goes on from `head` with this leader."""
        self.owing = False
        """Others have been told something after `head`, which is told again and has not all come yet."""
        self._aside: tuple[int, int] | None = None  # read again from further back, and not joined with the rest yet

    def take(self, span: Span) -> bool:
        """What the span reaches over has come. False: it continues nothing, so the coverage begins with it, and whoever
        was told what came before may have missed something in between."""
        if not span.source or span.source != self.source or span.after > self.head:
            self.source, self.head = span.source, span.number
            self.memory_after = span.after
            self.spool_after = None
            self.linked = bool(span.source)
            self.owing = span.more
            self._aside = None
            return False
        self.linked = True
        if span.number >= self.head:
            self.owing = span.more
        first, last = span.after, span.number
        if self._aside is not None and self._aside[0] <= first <= self._aside[1]:
            first, last = self._aside[0], max(last, self._aside[1])
        self._aside = (first, last)
        if first < self.memory_after <= last:
            self.memory_after = first
        if self.spool_after is not None and first < self.spool_after <= last:
            self.spool_after = first
        self.head = max(self.head, span.number)
        return True

    @property
    def whole(self) -> bool:
        """Nobody else has been told anything after `head`."""
        return self.linked and not self.owing

    def has_after(self, number: int) -> bool:
        """Whether everything after it that has been told is at hand."""
        return self.memory_after <= number or (self.spool_after is not None and self.spool_after <= number)

    def prove(self, source: str, number: int) -> bool:
        """There is nothing more up to this position. Returns whether that is said of this shard, too."""
        if not self.whole or source != self.source:
            return False
        self.head = max(self.head, number)
        return True

    def evicted(self, number: int) -> None:
        """A message kept under this position has left the memory log."""
        self.memory_after = max(self.memory_after, number)
        self._aside = None

    def dropped(self, number: int) -> None:
        """One has left the spool."""
        if self.spool_after is not None:
            self.spool_after = max(self.spool_after, number)
        self._aside = None

    def spool_lost(self) -> None:
        """Nothing that was spooled can be relied on."""
        self.spool_after = None
        self._aside = None

    def unlink(self) -> None:
        """Somebody else may be told, or have been told, what comes after `head`."""
        self.linked = False
        self.owing = False
        self._aside = None

    def forget_memory(self) -> None:
        """The memory log is empty."""
        self.memory_after = self.head
        self._aside = None
