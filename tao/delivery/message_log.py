"""The messages that a leader has published and still holds in memory: one numbered stream per shard.

All streams share one memory budget. Messages are evicted in the order of their arrival, whatever their shard, so that
old messages of a busy shard make room and those of an idle shard stay. Every message has a number of its own, so that
a subscriber sees from the length and the last number of a run whether a message is missing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from typing import NamedTuple

import msgspec

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


class _Held(msgspec.Struct, frozen=True, gc=False):
    """A message that is held, with its estimated size and the binlog position under which it is kept.

    ``repeats``: the number under which the same message was appended to the stream before, and is still held; 0: it was
    not."""

    stream: Stream
    version_epoch: int
    message: Message
    size_bytes: int
    position: int
    repeats: int


class Run(NamedTuple):
    """Messages of a stream up to number ``last``, with their estimated size in bytes.

    ``repeated``: so many of them are left out, because their receiver has them."""

    messages: ShardMessages
    size_bytes: int
    last: int
    repeated: int


class MessageLog:
    """The messages of all streams, bounded per shard and in total. Evicts the oldest messages to make room.

    A leader's own commit comes twice: when it is committed, and under its position in the binlog when the tailer relays
    it. The second entry is a *repeat*, known by its message being the same object. A subscriber that has received the
    first need not receive it."""

    __slots__ = ("_first_numbers", "_held", "_settings", "bytes", "evicted")

    def __init__(self, settings: DeliverySettings) -> None:
        self._settings = settings
        # Keyed by (shard, number) for direct access; the order of arrival is the order of eviction.
        self._held: OrderedDict[tuple[int, int], _Held] = OrderedDict()
        # Shard and identity of a held message → the number of its first entry. An identity means nothing once the
        # entry is evicted, and leaves with it.
        self._first_numbers: dict[tuple[int, int], int] = {}
        self.bytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._held)

    def append(self, stream: Stream, batch: ShardMessages) -> None:
        """Number the batch's messages and keep them, evicting the oldest where a bound is reached."""
        version_epoch, most = batch.version_epoch, self._settings.log_messages_per_shard
        stream.version_epoch = max(stream.version_epoch, version_epoch)
        shard, position = stream.shard, self._position_of_next(stream)
        held, first_numbers = self._held, self._first_numbers
        for message in batch.messages:
            stream.last = number = stream.last + 1
            first = first_numbers.setdefault((shard, id(message)), number)
            if first == number:
                size, repeats = estimated_bytes(message), 0
            else:
                size, repeats = held[shard, first].size_bytes, first
            held[shard, number] = _Held(stream, version_epoch, message, size, position, repeats)
            self.bytes += size
            if number - stream.first >= most:
                self._evict(stream)
        while self.bytes > self._settings.log_bytes_total and self._held:
            self._evict(next(iter(self._held.values())).stream)

    def _position_of_next(self, stream: Stream) -> int:
        """Return the position of what arrives now. Positions never fall, also when a shard loses its link within a
        transaction."""
        position = stream.coverage.arriving
        if stream.last > stream.positions_after and stream.last >= stream.first:
            position = max(position, self._held[stream.shard, stream.last].position)
        return position

    def holds(self, shard: int, message: Message) -> bool:
        """Return whether this message, and not only an equal one, is held in the shard's stream."""
        return (shard, id(message)) in self._first_numbers

    def drop(self, stream: Stream) -> None:
        """Evict all messages of a stream that has ended."""
        while stream.first <= stream.last:
            self._evict(stream)
        stream.coverage.clear_memory()

    def number_at(self, stream: Stream, position: int) -> int:
        """Return the number of the last message that was kept under the binlog position or an earlier one."""
        first = max(stream.first, stream.positions_after + 1)
        numbers = range(first, stream.last + 1)
        return first - 1 + bisect_right(numbers, position, key=lambda number: self._held[stream.shard, number].position)

    def read(self, stream: Stream, after: int, max_messages: int, max_bytes: int, received_after: int) -> Run:
        """Return the messages after number ``after``, which must still be held.

        The run ends at ``max_messages``, at ``max_bytes`` or where the version epoch changes; unless all are left out,
        it has at least one message. Left out are repeats of what came after number ``received_after``: the receiver has
        received all that followed it."""
        taken: list[Message] = []
        total = 0
        run_epoch = stream.version_epoch
        last, repeated = after, 0
        for number in range(after + 1, min(stream.last, after + max_messages) + 1):
            held = self._held[stream.shard, number]
            if held.repeats > received_after:
                repeated += 1
            elif taken and (held.version_epoch != run_epoch or total + held.size_bytes > max_bytes):
                break
            else:
                run_epoch = held.version_epoch
                taken.append(held.message)
                total += held.size_bytes
            last = number
        return Run(ShardMessages(stream.shard, run_epoch, tuple(taken)), total, last, repeated)

    def _evict(self, stream: Stream) -> None:
        held = self._held.pop((stream.shard, stream.first))
        place = stream.shard, id(held.message)
        if self._first_numbers.get(place) == stream.first:
            del self._first_numbers[place]
        self.bytes -= held.size_bytes
        if stream.first > stream.positions_after:
            stream.coverage.note_evicted(held.position)
        stream.first += 1
        self.evicted += 1


def estimated_bytes(message: Message) -> int:
    """Return the estimated size of a message in memory, in bytes; its encoded form is smaller."""
    if isinstance(message, ListChange):
        edges_bytes = _EDGE_BYTES * (len(message.gone) + len(message.put))
        for edge in message.put:
            edges_bytes += len(edge.data)
        return _MESSAGE_BYTES + edges_bytes
    if isinstance(message, ObjectChange):
        return _MESSAGE_BYTES + len(message.data or b"")
    return _MESSAGE_BYTES
