"""The messages that a leader has published and still holds in memory: one numbered stream per shard.

All streams share one memory budget. Messages are evicted in the order of their arrival, whatever their shard, so that
old messages of a busy shard make room and those of an idle shard stay. Every message has a number of its own, so that
a subscriber sees from the length and the last number of a run whether a message is missing. What arrives together is
held together: a commit under load has many messages of a shard, and each is appended and evicted twice.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tao.delivery.coverage import Coverage
from tao.delivery.settings import DeliverySettings
from tao.model.changes import ListChange, Message, ObjectChange, ShardMessages

_MESSAGE_BYTES = 240  # a message without edges or data: its struct, its integers and its place in the log
_EDGE_BYTES = 120  # one edge struct with its integers


class _HeldRun:
    """Messages that were appended together, or what is still held of them.

    ``first``: the number of the first of them. ``position``: the binlog position under which they are kept.
    ``repeats``: for each message the number under which it was appended to the stream before and was still held then,
    else 0; empty when none of them is a repeat."""

    __slots__ = ("first", "messages", "place", "position", "repeats", "size_bytes", "stream", "version_epoch")

    def __init__(self, stream: Stream, batch: ShardMessages, place: int, position: int) -> None:
        self.stream = stream
        self.first = stream.last + 1
        self.messages = batch.messages
        self.version_epoch = batch.version_epoch
        self.place = place  # in the order of arrival
        self.position = position
        self.size_bytes = estimated_bytes(batch.messages)
        known = stream.first_numbers
        first_numbers = [known.setdefault(id(each), number) for number, each in enumerate(batch.messages, self.first)]
        self.repeats: list[int] = []
        if first_numbers[0] != self.first or len(first_numbers) > 1:
            numbered = enumerate(first_numbers, self.first)
            repeats = [0 if first == number else first for number, first in numbered]
            self.repeats = repeats if any(repeats) else []

    @property
    def last(self) -> int:
        """Return the number of the last message."""
        return self.first + len(self.messages) - 1

    def cut(self, count: int) -> int:
        """Remove the first messages. Returns their size."""
        is_whole = count == len(self.messages)
        removed = self.messages if is_whole else self.messages[:count]
        size_bytes = self.size_bytes if is_whole else estimated_bytes(removed)
        known = self.stream.first_numbers
        for number, message in enumerate(removed, self.first):
            if known.get(id(message)) == number:
                del known[id(message)]
        self.first += count
        self.messages = () if is_whole else self.messages[count:]
        if self.repeats:
            self.repeats = self.repeats[count:]
        self.size_bytes -= size_bytes
        return size_bytes


class Stream:
    """The numbering of one shard's messages under one generation of ownership.

    Messages ``first … last`` are still held (none when ``first == last + 1``), in ``runs``. ``first_numbers``: the
    identity of a held message → the number of its first entry; an identity means nothing once the entry is evicted, and
    leaves with it. ``coverage`` is the range of binlog positions that they cover."""

    __slots__ = (
        *("coverage", "first", "first_numbers", "generation", "last", "must_be_gapless", "name", "positions_after"),
        *("runs", "shard", "version_epoch"),
    )

    def __init__(self, shard: int, name: str, generation: int, version_epoch: int, coverage: Coverage) -> None:
        self.shard = shard
        self.name = name
        self.generation = generation
        self.version_epoch = version_epoch
        self.coverage = coverage
        self.first = 1
        self.last = 0
        self.runs: deque[_HeldRun] = deque()
        self.first_numbers: dict[int, int] = {}
        self.positions_after = 0
        """Messages up to this number came before the coverage began, and their positions mean nothing."""
        self.must_be_gapless = False
        """Subscribers rely on the coverage: a gap in it has to start a new stream."""

    def holds(self, batch: ShardMessages) -> bool:
        """Return whether all of these messages, and not only equal ones, are held. False for none."""
        return bool(batch.messages) and all(map(self.first_numbers.__contains__, map(id, batch.messages)))

    def runs_after(self, number: int) -> Iterator[_HeldRun]:
        """Return the runs that have messages after a number, in order. Subscribers are mostly near the end."""
        found: list[_HeldRun] = []
        for run in reversed(self.runs):
            if run.last <= number:
                break
            found.append(run)
        return reversed(found)


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

    __slots__ = ("_arrived", "_messages", "_runs", "_settings", "bytes", "evicted")

    def __init__(self, settings: DeliverySettings) -> None:
        self._settings = settings
        self._runs: OrderedDict[int, _HeldRun] = OrderedDict()  # of all streams, in the order of arrival
        self._arrived = 0
        self._messages = 0
        self.bytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return self._messages

    def append(self, stream: Stream, batch: ShardMessages) -> None:
        """Number the batch's messages and keep them, evicting the oldest where a bound is reached."""
        stream.version_epoch = max(stream.version_epoch, batch.version_epoch)
        count = len(batch.messages)
        if not count:
            return
        self._arrived += 1
        run = self._runs[self._arrived] = _HeldRun(stream, batch, self._arrived, self._position_of_next(stream))
        stream.runs.append(run)
        stream.last += count
        self._messages += count
        self.bytes += run.size_bytes
        excess = stream.last - stream.first + 1 - self._settings.log_messages_per_shard
        while excess > 0:
            excess -= self._evict(stream, excess)
        while self.bytes > self._settings.log_bytes_total and self._runs:
            oldest = next(iter(self._runs.values()))
            too_much = self.bytes - self._settings.log_bytes_total
            self._evict(oldest.stream, len(oldest.messages) if oldest.size_bytes <= too_much else 1)

    def _position_of_next(self, stream: Stream) -> int:
        """Return the position of what arrives now. Positions never fall, also when a shard loses its link within a
        transaction."""
        position = stream.coverage.arriving
        if stream.last > stream.positions_after and stream.runs:
            position = max(position, stream.runs[-1].position)
        return position

    def drop(self, stream: Stream) -> None:
        """Evict all messages of a stream that has ended."""
        while stream.runs:
            self._evict(stream, len(stream.runs[0].messages))
        stream.coverage.clear_memory()

    def number_at(self, stream: Stream, position: int) -> int:
        """Return the number of the last message that was kept under the binlog position or an earlier one."""
        number = stream.last
        for run in reversed(stream.runs):
            if run.position <= position or number <= stream.positions_after:
                break
            number = run.first - 1
        return max(number, stream.positions_after)

    def read(self, stream: Stream, after: int, max_messages: int, max_bytes: int, received_after: int) -> Run:
        """Return the messages after number ``after``, which must still be held.

        The run ends at ``max_messages``, at ``max_bytes`` or where the version epoch changes; unless all are left out,
        it has at least one message. Left out are repeats of what came after number ``received_after``: the receiver has
        received all that followed it."""
        taken: list[Message] = []
        total = 0
        run_epoch = stream.version_epoch
        last, repeated, end = after, 0, after + max_messages
        for held in stream.runs_after(after):
            is_whole = held.first > last and held.last <= end
            if is_whole and not held.repeats and total + held.size_bytes <= max_bytes:
                if taken and held.version_epoch != run_epoch:
                    break
                run_epoch = held.version_epoch
                taken += held.messages
                total += held.size_bytes
                last = held.last
                continue
            if is_whole and held.repeats and min(held.repeats) > received_after:
                repeated += len(held.repeats)
                last = held.last
                continue
            start = last + 1 - held.first
            repeats = held.repeats or [0] * len(held.messages)
            for message, repeats_number in zip(held.messages[start:], repeats[start:], strict=True):
                if last == end:
                    break
                if repeats_number > received_after:
                    repeated += 1
                else:
                    size = estimated_bytes((message,))
                    if taken and (held.version_epoch != run_epoch or total + size > max_bytes):
                        break
                    run_epoch = held.version_epoch
                    taken.append(message)
                    total += size
                last += 1
            if last < held.last:
                break
        return Run(ShardMessages(stream.shard, run_epoch, tuple(taken)), total, last, repeated)

    def _evict(self, stream: Stream, most: int) -> int:
        """Evict the oldest messages of a stream, so many of its oldest run at most. Returns how many."""
        run = stream.runs[0]
        count = min(most, len(run.messages))
        self.bytes -= run.cut(count)
        stream.first += count
        if stream.first - 1 > stream.positions_after:
            stream.coverage.note_evicted(run.position)
        if not run.messages:
            stream.runs.popleft()
            del self._runs[run.place]
        self._messages -= count
        self.evicted += count
        return count


def estimated_bytes(messages: Sequence[Message]) -> int:
    """Return the estimated size of messages in memory, in bytes; their encoded form is smaller."""
    size = _MESSAGE_BYTES * len(messages)
    for message in messages:
        if isinstance(message, ListChange):
            size += _EDGE_BYTES * (len(message.gone) + len(message.put))
            for edge in message.put:
                size += len(edge.data)
        elif isinstance(message, ObjectChange):
            size += len(message.data or b"")
    return size
