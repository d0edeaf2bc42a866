"""The messages that a leader has published and still holds in memory: one numbered stream per shard.

All streams share one memory budget. Messages are evicted in the order of their arrival, whatever their shard, so that
old messages of a busy shard make room and those of an idle shard stay. Every message has a number of its own, so that
a subscriber can tell from the length and the last number of a run whether a message is missing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict

from tao.delivery.coverage import Coverage
from tao.delivery.settings import DeliverySettings
from tao.model.changes import ListChange, Message, ObjectChange, ShardMessages

_MESSAGE_BYTES = 240  # a message without edges or data: its struct, its integers and its entry in the log
_EDGE_BYTES = 120  # one edge struct with its integers


class Stream:
    """The numbering of one shard's messages under one generation of ownership.

    Messages ``first … last`` are still held (none when ``first == last + 1``). ``coverage`` is the range of binlog
    positions that they cover."""

    __slots__ = (
        *("coverage", "first", "generation", "last", "must_be_gapless", "name", "positions_after", "shard"),
        "version_epoch",
    )

    def __init__(self, shard: int, name: str, generation: int, version_epoch: int, coverage: Coverage) -> None:
        self.shard = shard
        self.name = name
        self.generation = generation
        self.version_epoch = version_epoch
        self.coverage = coverage
        self.first = 1
        self.last = 0
        self.positions_after = 0
        """Messages up to this number came before the coverage began, and their positions mean nothing."""
        self.must_be_gapless = False
        """Subscribers rely on the coverage: a gap in it has to start a new stream."""


class MessageLog:
    """The messages of all streams, bounded per shard and in total. Evicts the oldest messages to make room."""

    __slots__ = ("_held", "_settings", "bytes", "evicted")

    def __init__(self, settings: DeliverySettings) -> None:
        self._settings = settings
        # Keyed by (shard, number) for direct access; the order of arrival is the order of eviction.
        self._held: OrderedDict[tuple[int, int], tuple[Stream, int, Message, int, int]] = OrderedDict()
        self.bytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._held)

    def append(self, stream: Stream, batch: ShardMessages) -> None:
        """Number the batch's messages and keep them, evicting the oldest where a bound is reached."""
        stream.version_epoch = max(stream.version_epoch, batch.version_epoch)
        position = stream.coverage.head
        for message in batch.messages:
            stream.last += 1
            size = estimated_bytes(message)
            self._held[stream.shard, stream.last] = (stream, batch.version_epoch, message, size, position)
            self.bytes += size
            if stream.last - stream.first >= self._settings.log_messages_per_shard:
                self._evict(stream)
        while self.bytes > self._settings.log_bytes_total and self._held:
            self._evict(next(iter(self._held.values()))[0])

    def drop(self, stream: Stream) -> None:
        """Evict all messages of a stream that has ended."""
        while stream.first <= stream.last:
            self._evict(stream)
        stream.coverage.clear_memory()

    def number_at(self, stream: Stream, position: int) -> int:
        """Return the number of the last message that was kept under the binlog position or an earlier one."""
        first = max(stream.first, stream.positions_after + 1)
        numbers = range(first, stream.last + 1)
        return first - 1 + bisect_right(numbers, position, key=lambda number: self._held[stream.shard, number][4])

    def read(self, stream: Stream, after: int, max_messages: int, max_bytes: int) -> tuple[ShardMessages, int]:
        """Return the messages after number ``after``, which must still be held, with their estimated size in bytes.

        The run ends at ``max_messages``, at ``max_bytes`` or where the version epoch changes; it has at least one
        message."""
        taken: list[Message] = []
        total = 0
        run_epoch = stream.version_epoch
        for number in range(after + 1, min(stream.last, after + max_messages) + 1):
            _, epoch, message, size, _ = self._held[stream.shard, number]
            if taken and (epoch != run_epoch or total + size > max_bytes):
                break
            run_epoch = epoch
            taken.append(message)
            total += size
        return ShardMessages(stream.shard, run_epoch, tuple(taken)), total

    def _evict(self, stream: Stream) -> None:
        *_, size, position = self._held.pop((stream.shard, stream.first))
        self.bytes -= size
        if stream.first > stream.positions_after:
            stream.coverage.note_evicted(position)
        stream.first += 1
        self.evicted += 1


def estimated_bytes(message: Message) -> int:
    """Return the estimated size of a message in memory, in bytes; its encoded form is smaller."""
    match message:
        case ObjectChange(data=data):
            return _MESSAGE_BYTES + len(data or b"")
        case ListChange(gone=gone, put=put):
            return _MESSAGE_BYTES + _EDGE_BYTES * (len(gone) + len(put)) + sum([len(edge.data) for edge in put])
        case _:
            return _MESSAGE_BYTES
