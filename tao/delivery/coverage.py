"""The binlog positions that a leader's guaranteed messages cover, and the shards whose positions it does not know yet.

Everything that the tailer sends about a shard carries the range of binlog positions that it covers
(`tao.model.delivery.Span`). Joined together, these spans show whether any message is missing, whichever leader received
it. Messages are kept in the order of arrival, each under the position covered at that moment, or under the next one
while messages of the next transaction may be among them (`Coverage.arriving`). The messages after position P are
therefore a suffix of the log, which holds everything after P even when some of it came twice or late.

Each database has a tailer of its own, which reads nothing of the shards of other databases. A leader must ask only that
tailer about a shard: any other tailer would answer that there is nothing new, and messages that another leader received
would be missed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

from tao.model.delivery import Span

_MAX_WANTED: Final = 4_096
"""Shards in one answer to a tailer; the next answer has the rest."""


class Coverage:
    """The covered positions of one shard.

    The memory log has all messages after `memory_after` up to `head`, the spool all after `spool_after` up to `head`
    (``None``: the spool has none)."""

    __slots__ = ("_detached", "_inside", "head", "linked", "memory_after", "pending", "source", "spool_after")

    def __init__(self, source: str = "", head: int = 0, spool_after: int | None = None) -> None:
        self.source = source
        self.head = head
        self.memory_after = head
        self.spool_after = spool_after
        self.linked = False
        """The tailer sends this leader everything that follows `head`."""
        self.pending = False
        """Messages after `head` are on their way here, and some of the next transaction may have come."""
        self._detached: tuple[int, int] | None = None  # read again from an earlier position, not joined with the rest
        self._inside: int | None = None  # the end of the last span, if more was to follow it

    def extend(self, span: Span) -> bool:
        """Add the span, whose messages have all arrived.

        Returns False when the span does not continue the coverage, which then restarts with the span: a subscriber that
        received what came before may have missed messages in between."""
        # What came before of the span's first transaction came here, too.
        is_whole = not span.within or (span.source == self.source and span.after == self._inside)
        self._inside = span.number if span.more else None
        first, last = span.after, span.number
        is_gap = first > self.head or (first == self.head and not is_whole)
        if not span.source or span.source != self.source or is_gap:
            self.source, self.head = span.source, last
            self.memory_after = first + span.within
            self.spool_after = None
            self.linked = bool(span.source)
            self.pending = span.more
            self._detached = None
            return False
        self.linked = True
        if last >= self.head:
            self.pending = span.more
        if self._detached is not None and is_whole and self._detached[0] <= first <= self._detached[1]:
            first, last = self._detached[0], max(last, self._detached[1])
        else:
            first += span.within  # the messages that came before may have left the log or the spool
        self._detached = (first, last)
        if first < self.memory_after <= last:
            self.memory_after = first
        if self.spool_after is not None and first < self.spool_after <= last:
            self.spool_after = first
        self.head = max(self.head, span.number)
        return True

    @property
    def arriving(self) -> int:
        """The position under which messages are kept that arrive now: no earlier than their own."""
        return self.head + self.pending

    @property
    def complete(self) -> bool:
        """True when no other leader has received anything after `head`."""
        return self.linked and not self.pending

    def has_after(self, number: int) -> bool:
        """Return whether the memory log or the spool has every message received after position ``number``."""
        return self.memory_after <= number or (self.spool_after is not None and self.spool_after <= number)

    def prove(self, source: str, number: int) -> bool:
        """Raise `head` to a position up to which no more messages exist. Returns whether that holds for this shard."""
        if not self.complete or source != self.source:
            return False
        self.head = max(self.head, number)
        return True

    def note_evicted(self, number: int) -> None:
        """Record that a message kept under position ``number`` has left the memory log."""
        self.memory_after = max(self.memory_after, number)
        self._detached = None

    def note_spool_dropped(self, number: int) -> None:
        """Record that a message kept under position ``number`` has left the spool."""
        if self.spool_after is not None:
            self.spool_after = max(self.spool_after, number)
        self._detached = None

    def note_spool_lost(self) -> None:
        """Record that no spooled message can be relied on."""
        self.spool_after = None
        self._detached = None

    def unlink(self) -> None:
        """Record that another leader may receive, or may have received, what follows `head`."""
        self.linked = False
        self.pending = False
        self._detached = None
        self._inside = None

    def clear_memory(self) -> None:
        """Record that the memory log is empty."""
        self.memory_after = self.head
        self._detached = None


class _DatabaseShards:
    """The unconfirmed shards of one database.

    ``unlinked``: shards whose next position is unknown. ``asked``: the unlinked shards that the tailer has been asked
    about since its last proof of time. ``pending``: shards of which other leaders may have received messages that have
    not arrived here. ``replays``: by shard and source, the position after which messages have to be sent again."""

    __slots__ = ("asked", "pending", "replays", "unlinked")

    def __init__(self) -> None:
        self.unlinked: dict[int, None] = {}
        self.asked: set[int] = set()
        self.pending: set[int] = set()
        self.replays: dict[int, dict[str, int]] = {}


class UnconfirmedShards:
    """The open shards of a leader about which it waits for the tailers, and what it asks each tailer for."""

    def __init__(self, database_of: Callable[[int], str]) -> None:
        """``database_of`` returns the name of a shard's database."""
        self._database_of: Final = database_of
        self._databases: Final[defaultdict[str, _DatabaseShards]] = defaultdict(_DatabaseShards)

    @property
    def unlinked(self) -> int:
        """The number of shards whose next position is unknown."""
        return sum(len(each.unlinked) for each in self._databases.values())

    def is_unlinked(self, shard: int) -> bool:
        """Return whether the shard's next position is unknown."""
        return shard in self._of(shard).unlinked

    def has_times(self, database: str) -> bool:
        """Return whether a time that was proved for the database holds for all its shards."""
        return not self._databases[database].pending

    def has_positions(self, database: str) -> bool:
        """Return whether a position that was proved for the database holds for all its shards."""
        return self.has_times(database) and not self._databases[database].unlinked

    def add(self, shard: int) -> None:
        """Add a shard that has just been opened, or that other leaders may have led in between."""
        shards = self._of(shard)
        shards.unlinked[shard] = None
        shards.pending.add(shard)

    def remove(self, shard: int) -> None:
        """Remove a shard that has been closed."""
        shards = self._of(shard)
        shards.unlinked.pop(shard, None)
        shards.asked.discard(shard)
        shards.pending.discard(shard)
        shards.replays.pop(shard, None)

    def update(self, shard: int, coverage: Coverage) -> None:
        """Take over the shard's state from its coverage, which has just been extended by a span of the tailer."""
        shards = self._of(shard)
        if coverage.pending:
            shards.pending.add(shard)
        else:
            shards.pending.discard(shard)
        if coverage.linked:
            shards.unlinked.pop(shard, None)
        else:
            shards.unlinked[shard] = None

    def request_replay(self, shard: int, source: str, number: int) -> None:
        """Have the tailer send the messages after position ``number`` of ``source`` again."""
        replays = self._of(shard).replays.setdefault(shard, {})
        replays[source] = min(number, replays.get(source, number))

    def take_wanted(self, database: str, coverages: Mapping[int, Coverage]) -> list[Span]:
        """See `tao.delivery.publisher.Publisher.take_wanted`."""
        shards = self._databases[database]
        wanted: dict[tuple[int, str], int] = {}
        for shard in islice([shard for shard in shards.unlinked if shard not in shards.asked], _MAX_WANTED):
            shards.asked.add(shard)
            if shard not in shards.replays:  # the answer to a replay request says where the shard continues, too
                wanted[shard, coverages[shard].source] = coverages[shard].head
        for shard in tuple(islice(shards.replays, _MAX_WANTED)):
            for source, number in shards.replays.pop(shard).items():
                wanted[shard, source] = number
        return [Span(shard, source, number, number) for (shard, source), number in wanted.items()]

    def ask_again(self, database: str) -> None:
        """Repeat the unanswered questions about the database's shards with the next `take_wanted`."""
        self._databases[database].asked.clear()

    def _of(self, shard: int) -> _DatabaseShards:
        return self._databases[self._database_of(shard)]
