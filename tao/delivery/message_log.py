"""What a leader remembers of the messages it has published: one numbered stream per shard (DESIGN.md §7).

All streams share one memory budget and leave in the order they came, whichever shard they belong to, so that a busy
shard's past makes room and an idle shard's stays. Each message is numbered by itself, so that whoever receives a run of
them can tell from its length and its last number whether anything is missing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict

from tao.delivery.coverage import Coverage
from tao.delivery.settings import DeliverySettings
from tao.model.changes import ListChange, Message, ObjectChange, ShardMessages

_MESSAGE_BYTES = 240  # a message without edges or data: its struct, its integers and its place in the log
_EDGE_BYTES = 120  # one edge struct with its integers


class Stream:
    """The numbering of one shard under one generation of ownership: messages ``first … last`` are still held
    (none when ``first == last + 1``). ``coverage``: what of the binlog is among them."""

    __slots__ = ("counted_after", "coverage", "first", "generation", "last", "name", "relied", "shard", "version_epoch")

    def __init__(self, shard: int, name: str, generation: int, version_epoch: int, coverage: Coverage) -> None:
        self.shard = shard
        self.name = name
        self.generation = generation
        self.version_epoch = version_epoch
        self.coverage = coverage
        self.first = 1
        self.last = 0
        self.counted_after = 0
        """Messages up to here are from before the coverage began, and their positions mean nothing."""
        self.relied = False
        """The coverage has been told to subscribers: whoever follows the stream must miss nothing of it."""


class MessageLog:
    """The streams' messages, bounded per shard and in total. Never refuses: it forgets the oldest instead."""

    __slots__ = ("_held", "_settings", "bytes", "evicted")

    def __init__(self, settings: DeliverySettings) -> None:
        self._settings = settings
        # Keyed by (shard, number): direct access for readers, and the order of arrival for eviction.
        self._held: OrderedDict[tuple[int, int], tuple[Stream, int, Message, int, int]] = OrderedDict()
        self.bytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._held)

    def append(self, stream: Stream, batch: ShardMessages) -> None:
        """Number the batch's messages and keep them, making room where a bound is reached."""
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
        """Forget the whole stream: its numbering is over."""
        while stream.first <= stream.last:
            self._evict(stream)
        stream.coverage.forget_memory()

    def number_at(self, stream: Stream, position: int) -> int:
        """The number of the last message that was kept under that position of the binlog, or an earlier one."""
        first = max(stream.first, stream.counted_after + 1)
        numbers = range(first, stream.last + 1)
        return first - 1 + bisect_right(numbers, position, key=lambda number: self._held[stream.shard, number][4])

    def read(self, stream: Stream, after: int, max_messages: int, max_bytes: int) -> tuple[ShardMessages, int]:
        """The run of messages that follows number ``after`` (which must still be held), as long as they fit and share
        one version epoch, with its estimated bytes. The first is always there."""
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
        if stream.first > stream.counted_after:
            stream.coverage.evicted(position)
        stream.first += 1
        self.evicted += 1


def estimated_bytes(message: Message) -> int:
    """About what a message costs in memory; its encoded form is smaller."""
    match message:
        case ObjectChange(data=data):
            return _MESSAGE_BYTES + len(data or b"")
        case ListChange(gone=gone, put=put):
            return _MESSAGE_BYTES + _EDGE_BYTES * (len(gone) + len(put)) + sum([len(edge.data) for edge in put])
        case _:
            return _MESSAGE_BYTES
