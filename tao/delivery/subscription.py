"""The deliveries of one subscriber: a cursor per shard, the pending shards, and a window of unacknowledged bytes.

`Subscription.pump` makes every delivery. It compares the cursor of each pending shard with the shard's stream at that
moment. Because nothing is decided earlier, a closed shard or an overflowing log leaves nothing to clean up.

A cursor may not point into the stream: it comes from another leader or an earlier run, or the log has evicted what
follows it. Such a cursor continues by its position in the binlog: from the log; through the spool into the log; or once
the tailer has sent the missing messages again. Until then the shard *waits*: no delivery mentions it, so the subscriber
knows that the shard is not confirmed yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, Literal, NamedTuple, Protocol

from tao.delivery.message_log import MessageLog, Run, Stream, estimated_bytes
from tao.delivery.settings import DeliverySettings
from tao.model.changes import ShardMessages
from tao.model.delivery import Delivery, Position, ShardDelivery, SpoolRow
from tao.model.errors import ProtocolError, TaoError
from tao.model.ports import Spool

_AFTER_ALL_PLACES: Final = (1 << 63) - 1
"""A place in the spool behind all rows of the same position: reading starts with the next position."""

_DELIVERY_BYTES: Final = 64
"""What a delivery, and each of its parts, takes of the window beside its messages."""

Later = Callable[[float, Callable[[], None]], object]
"""Calls a function after so many seconds."""


class Proof(NamedTuple):
    """Says up to where everything has been published: ``proven`` by ``(database, Unix milliseconds)``, and ``reached``
    by ``(source, transaction)``."""

    proven: tuple[tuple[str, int], ...]
    reached: tuple[tuple[str, int], ...]


class StreamSource(Protocol):
    """The part of the publisher that its subscriptions use."""

    @property
    def log(self) -> MessageLog:
        """The messages that cursors point into."""

    @property
    def spool(self) -> Spool | None:
        """The messages on disk, behind the log."""

    @property
    def later(self) -> Later | None:
        """The clock for shards that wait; None: no shard waits."""

    @property
    def proofs(self) -> int:
        """A number that changes whenever there is a new `proof` to deliver."""

    @property
    def proof(self) -> Proof:
        """What is proved now."""

    def stream(self, shard: int) -> Stream | None:
        """Return the open stream of a shard, if any."""

    def request_replay(self, shard: int, source: str, reached: int) -> None:
        """Have the tailer send again what follows a subscriber's position."""

    def follow(self, shard: int, subscription: Subscription) -> None:
        """Wake the subscription when the shard has messages."""

    def unfollow(self, shard: int, subscription: Subscription) -> None:
        """Stop waking the subscription for this shard."""

    def remove(self, subscription: Subscription) -> None:
        """Remove a closed subscription."""


class SpoolReplay:
    """Reads one shard's messages after a cursor from the spool, until the memory log has the rest.

    The replayed messages are numbered in a stream of their own. Their binlog position stays the position of the cursor
    until all are delivered, since spooled rows may have arrived in another order than they were committed in."""

    def __init__(self, stream: Stream, cursor: Position) -> None:
        self.stream: Final = stream
        self.cursor: Final = cursor
        """The position at which the replay began."""
        self.rows: deque[SpoolRow] = deque()
        self.reading = False
        self._delivered = 0
        self._last = (cursor.reached, _AFTER_ALL_PLACES)
        self._read_up_to = -1
        self._ended = False
        self._lacks_rows = False

    @property
    def complete(self) -> bool:
        """True when the memory log has all messages that have not been delivered."""
        memory_after = self.stream.coverage.memory_after
        if self.rows or self.reading:
            return False
        return self._last[0] > memory_after or (self._ended and self._read_up_to >= memory_after)

    @property
    def has_nothing_to_read(self) -> bool:
        """True when the last read found no rows, and the coverage has not grown since. Before more of a transaction
        comes, of which the memory log has lost a part, reading again would find nothing for ever."""
        return self._ended and self._read_up_to >= self.stream.coverage.head

    def read(self, spool: Spool, max_bytes: int, on_read: Callable[[bool], None]) -> None:
        """Read the next rows, then call ``on_read`` with whether these are the rows that follow: the spool could be
        read, and has dropped none that was not read."""

        def take(rows: Sequence[SpoolRow] | None) -> None:
            self.reading = False
            if rows and not self._lacks_rows:
                self.rows.extend(rows)
                self._last = (rows[-1].number, rows[-1].place)
            self._ended = not rows
            on_read(rows is not None and not self._lacks_rows)

        self.reading = True
        self._read_up_to = self.stream.coverage.head
        spool.read(self.stream.shard, self.cursor.source, self._last, max_bytes, take)

    def note_dropped(self, number: int) -> None:
        """Note that the spool has dropped rows up to this position. It makes room while a replay waits for its turn,
        and between two reads; what it has dropped is reported before what was read afterwards."""
        # Of the transaction at which the last read broke off, it may have been a row that was not read.
        self._lacks_rows = self._lacks_rows or (number, _AFTER_ALL_PLACES) > self._last

    def note_lost(self) -> None:
        """Note that nothing in the spool can be relied on."""
        self._lacks_rows = True

    def next_part(self) -> ShardDelivery:
        """Remove the first row and return it as a part of a delivery."""
        run = self.rows.popleft().messages
        first = not self._delivered
        self._delivered += len(run.messages)
        shard, name = self.stream.shard, f"{self.stream.name}~"
        position = Position(shard, name, self._delivered, self.cursor.source, self.cursor.reached)
        return ShardDelivery(position, False, run, continued=first)

    @property
    def end(self) -> int:
        """The binlog position from which the stream continues. Some messages after it may have been delivered already,
        which is harmless."""
        return max(self.cursor.reached, self.stream.coverage.memory_after)


@dataclass(slots=True, eq=False)
class _Wait:
    """The state of a shard that waits for the tailer."""

    asked: bool = False
    asked_when_complete: bool = False
    expired: bool = False


class Subscription:
    """The deliveries of one subscriber on one connection, numbered from 1. Created by `Publisher.subscribe`."""

    def __init__(
        self,
        subscriber: str,
        source: StreamSource,
        deliver: Callable[[Delivery], None],
        settings: DeliverySettings,
        *,
        takes_repeats: bool,
    ) -> None:
        """``takes_repeats``: the subscriber knows that repeats may be left out."""
        self.subscriber = subscriber
        self._takes_repeats = takes_repeats
        self.resets = 0
        self.continued = 0
        """Shards that continued by their position in the binlog, without a reset."""
        self.unacknowledged_bytes = 0
        """Size of the deliveries, without those that only prove, which a subscriber acknowledges at leisure."""
        self._unacknowledged_proofs = 0
        self._source = source
        self._deliver = deliver
        self._settings = settings
        self._cursors: dict[int, Position] = {}
        self._pending: dict[int, None] = {}  # shards with messages to send; one that had its turn goes to the end
        self._unanswered: dict[int, None] = {}  # shards that the next deliveries confirm or refuse
        self._answers_later = False  # the next of them are answered at another turn of the event loop
        self._waits: dict[int, _Wait] = {}
        self._replays: dict[int, SpoolReplay] = {}
        # The number after which the subscriber has received all of the stream, and the repeats left out since its last
        # delivery.
        self._received_after: dict[int, int] = {}
        self._left_out: dict[int, int] = {}
        self._joining: set[int] = set()  # replayed from the spool, and not at the end of the log yet
        # (number, bytes) of the unacknowledged deliveries; no bytes: it only proves
        self._in_flight: deque[tuple[int, int]] = deque()
        self._number = 0
        self._proofs_delivered = 0
        self._pumping = False
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def followed(self) -> int:
        """The number of shards that are followed."""
        return len(self._cursors)

    @property
    def pending(self) -> int:
        """The number of followed shards with messages that have not been sent."""
        return len(self._pending)

    @property
    def waiting(self) -> int:
        """The number of followed shards that are neither confirmed nor refused yet."""
        return len(self._waits) + len(self._replays)

    def waits_for(self, shard: int) -> bool:
        """Return whether the shard waits for the tailer, or is replayed: what the tailer sends may end that, too."""
        return shard in self._waits or shard in self._replays

    def add(self, positions: Sequence[Position]) -> None:
        """Follow more shards, or followed ones from another position (after a gap).

        The next delivery, which is made at once however much is unacknowledged, confirms or refuses the first shards
        (`max_delivery_shards`), and the deliveries of the next turns of the event loop the others. Raises
        `ProtocolError` once the subscription is closed."""
        if self._closed:
            raise ProtocolError(f"the subscription of {self.subscriber} is closed; subscribe again")
        for position in positions:
            self._forget(position.shard)
            self._cursors[position.shard] = position
            self._unanswered[position.shard] = None
            self._source.follow(position.shard, self)
        self.pump()

    def drop(self, shards: Sequence[int]) -> None:
        """Stop following these shards."""
        for shard in shards:
            self._forget(shard)
            self._source.unfollow(shard, self)

    def _forget(self, shard: int) -> None:
        by_shard: tuple[dict[int, Any], ...] = (self._cursors, self._pending, self._unanswered, self._waits)
        for states in (*by_shard, self._received_after, self._left_out):
            states.pop(shard, None)
        self._joining.discard(shard)
        if shard in self._replays:
            self._end_replay(shard)

    def acknowledge(self, number: int) -> None:
        """Record that the subscriber has applied every delivery up to ``number``.

        Old numbers are harmless. Raises `ProtocolError` for a number that was never sent."""
        if number > self._number:
            raise ProtocolError(f"{self.subscriber} acknowledged delivery {number}; {self._number} is the last sent")
        while self._in_flight and self._in_flight[0][0] <= number:
            _, size = self._in_flight.popleft()
            self.unacknowledged_bytes -= size
            self._unacknowledged_proofs -= not size
        self.pump()

    def close(self) -> None:
        """Stop delivering. Unacknowledged messages are delivered again when the subscriber comes back with its
        positions. May be called twice."""
        if not self._closed:
            self._closed = True
            self.drop(tuple(self._cursors))
            self._in_flight.clear()
            self.unacknowledged_bytes = self._unacknowledged_proofs = 0
            self._source.remove(self)

    def mark_pending(self, shard: int) -> None:
        """Have the next `pump` send the shard's new messages."""
        self._pending[shard] = None

    def pump(self, proof: Proof | None = None) -> None:
        """Answer the new shards, as many as one turn of the event loop has time for, then send the pending ones as far
        as the window allows.

        ``proof``: what the source proves now, which is the same for all of its subscriptions; else it is asked."""
        if self._pumping:  # a subscriber in the same process may acknowledge from within its `deliver`
            return
        self._pumping = True
        try:
            while (self._unanswered and not self._answers_later) or (self._pending and self._window_open()):
                self._send()
                if self._unanswered and not self._answers_later and self._source.later is not None:
                    self._answers_later = True
                    self._source.later(0, self._answer_more)
            self._deliver_proof(proof)
        finally:
            self._pumping = False

    def _answer_more(self) -> None:
        self._answers_later = False
        self.pump()

    def _deliver_proof(self, proof: Proof | None) -> None:
        """Deliver the time up to which everything has been delivered. It holds once nothing is pending, not before."""
        source = self._source
        behind = self._unanswered or self._pending or self._waits or self._replays or self._closed
        if self._proofs_delivered != source.proofs and not behind and self._window_open():
            self._proofs_delivered = source.proofs
            proven, reached = proof or source.proof
            if proven:
                self._hand_over(Delivery(self._number + 1, proven=proven, reached=reached), 0)

    def _window_open(self) -> bool:
        unacknowledged_bytes = self.unacknowledged_bytes + _DELIVERY_BYTES * self._unacknowledged_proofs
        return unacknowledged_bytes < self._settings.window_unacknowledged_bytes

    def _send(self) -> None:
        """Make one delivery: a part for each of the next unanswered shards, then as many pending shards as fit."""
        unanswered: dict[int, None] = {}
        if not self._answers_later:
            unanswered = dict.fromkeys(islice(self._unanswered, self._settings.max_delivery_shards))
        room = self._settings.max_delivery_messages
        room_bytes = self._settings.max_delivery_bytes if self._window_open() else 0
        size = 0
        parts: list[ShardDelivery] = []
        refused: list[int] = []
        # Every part takes at least one message's room, so no more than `room` pending shards can have their turn.
        for shard in dict.fromkeys((*unanswered, *islice(self._pending, room))):
            fits = room > 0 and room_bytes > 0
            if not fits and shard not in unanswered:
                break
            self._unanswered.pop(shard, None)
            stream = self._source.stream(shard)
            if stream is None:
                refused.append(shard)
                continue
            sized = self._next_part(stream, room if fits else 0, room_bytes, is_answer=shard in unanswered)
            if sized is None:  # the shard waits, or has nothing that the subscriber lacks
                continue
            part, part_bytes = sized
            parts.append(part)
            size += part_bytes
            room_bytes -= part_bytes
            room -= max(1, len(part.messages.messages) if part.messages else 0)
        self.drop(refused)
        if parts or unanswered or refused:
            self._hand_over(Delivery(self._number + 1, tuple(parts), tuple(refused)), size)

    def _next_part(
        self, stream: Stream, room: int, room_bytes: int, *, is_answer: bool
    ) -> tuple[ShardDelivery, int] | None:
        """Return the next part for a shard and its size in bytes, or None when the shard has to wait, or has nothing
        new but repeats and needs no answer.

        The part is a reset, a run of at most ``room`` messages, or an empty run, which still carries the version
        epoch."""
        shard = stream.shard
        self._pending.pop(shard, None)
        continued = False
        if (replay := self._replays.get(shard)) is not None:
            if replay.rows and replay.stream is stream:
                if room:
                    return self._replayed_part(replay)
                self.mark_pending(shard)
                return None
            if replay.stream is stream and not replay.complete:
                self._read_spool()
                return None
            self._end_replay(shard)
            continued = replay.stream is stream
            if continued:
                self._joining.add(shard)
                number = self._source.log.number_at(stream, replay.end)
                self._continue(stream, replay.cursor, number)
        cursor = self._cursors[shard]
        if cursor.stream != stream.name or not stream.first - 1 <= cursor.sequence <= stream.last:
            match self._find_continuation(stream, cursor):
                case "wait":
                    return None
                case "reset":
                    return self._reset(stream), 0
                case "continue":
                    continued = True
                    cursor = self._cursors[shard]
        run = Run(ShardMessages(shard, stream.version_epoch, ()), 0, cursor.sequence, 0)
        if room and cursor.sequence < stream.last:
            after = self._received_after.setdefault(shard, cursor.sequence) if self._takes_repeats else stream.last
            run = self._source.log.read(stream, cursor.sequence, room, room_bytes, after)
        source, reached, coverage = cursor.source, cursor.reached, stream.coverage
        if run.last < stream.last:
            self._pending[shard] = None
        else:
            self._joining.discard(shard)
            if coverage.linked:
                source, reached = coverage.source, coverage.head
        is_known = not (is_answer or continued or run.messages.messages) and source == cursor.source
        cursor = self._cursors[shard] = Position(shard, stream.name, run.last, source, reached)
        left_out = self._left_out.pop(shard, 0) + run.repeated
        if run.repeated and is_known:
            # The next part counts them. What this one would say of the position, the next proof says as well.
            self._left_out[shard] = left_out
            return None
        return ShardDelivery(cursor, False, run.messages, continued, left_out), run.size_bytes

    def _reset(self, stream: Stream) -> ShardDelivery:
        self.resets += 1
        self._waits.pop(stream.shard, None)
        coverage = stream.coverage
        source, reached = (coverage.source, coverage.head) if coverage.linked else ("", 0)
        cursor = Position(stream.shard, stream.name, stream.last, source, reached)
        self._join(cursor)
        return ShardDelivery(cursor, True, ShardMessages(stream.shard, stream.version_epoch, ()))

    def _find_continuation(self, stream: Stream, cursor: Position) -> Literal["continue", "wait", "reset"]:
        """Continue a cursor that does not point into the log by its binlog position; or it must wait, or be reset."""
        shard, coverage = stream.shard, stream.coverage
        wait = self._waits.get(shard)
        # A joining shard that the log has overtaken once more is reset, or it would read the spool for ever.
        if not cursor.source or (wait is not None and wait.expired) or shard in self._joining:
            self._joining.discard(shard)
            return "reset"
        if coverage.complete:
            if coverage.source != cursor.source:
                return "reset"
            if coverage.memory_after <= cursor.reached:
                self._continue(stream, cursor, self._source.log.number_at(stream, cursor.reached))
                return "continue"
            if coverage.has_after(cursor.reached):
                self._waits.pop(shard, None)
                self._replays[shard] = SpoolReplay(stream, cursor)
                self._read_spool()
                return "wait"
        if self._source.later is None:
            return "reset"
        if wait is None:
            wait = self._waits[shard] = _Wait()
            self._source.later(self._settings.continue_seconds, partial(self._wait_expired, shard, wait))
        # Ask once more when the coverage is complete: only then is it known what is missing.
        if not wait.asked or (coverage.complete and not wait.asked_when_complete):
            wait.asked, wait.asked_when_complete = True, coverage.complete
            self._source.request_replay(shard, cursor.source, cursor.reached)
        return "wait"

    def _continue(self, stream: Stream, cursor: Position, number: int) -> None:
        self.continued += 1
        self._waits.pop(stream.shard, None)
        self._join(Position(stream.shard, stream.name, number, cursor.source, cursor.reached))

    def _join(self, cursor: Position) -> None:
        """Go on in a stream: the subscriber has received none of its messages but by way of another stream."""
        self._cursors[cursor.shard] = cursor
        self._received_after[cursor.shard] = cursor.sequence
        self._left_out.pop(cursor.shard, None)

    def _wait_expired(self, shard: int, wait: _Wait) -> None:
        """Have the shard start cold: the tailer has sent nothing that continues it."""
        if self._waits.get(shard) is wait:
            wait.expired = True
            self.mark_pending(shard)
            self.pump()

    # ---- replays from the spool ------------------------------------------------------------------------------------

    def _read_spool(self) -> None:
        """Read the next rows of the first few replays, in the order in which the replays began."""
        spool = self._source.spool
        for shard, replay in tuple(islice(self._replays.items(), self._settings.catching_up_shards)):
            is_idle = not (replay.reading or replay.rows or replay.complete or replay.has_nothing_to_read)
            if spool is not None and is_idle:
                replay.read(spool, self._settings.max_delivery_bytes, partial(self._rows_read, shard, replay))

    def note_spool_dropped(self, shard: int, source: str, number: int) -> None:
        """Note that the spool has dropped a shard's rows up to this position of a source."""
        replay = self._replays.get(shard)
        if replay is not None and replay.cursor.source == source:
            replay.note_dropped(number)

    def note_spool_lost(self) -> None:
        """Note that nothing in the spool can be relied on."""
        for replay in self._replays.values():
            replay.note_lost()

    def _rows_read(self, shard: int, replay: SpoolReplay, readable: bool) -> None:
        if self._replays.get(shard) is replay:
            if not readable:
                self._end_replay(shard)
                self._cursors[shard] = Position(shard)
            self.mark_pending(shard)
            self.pump()

    def _end_replay(self, shard: int) -> None:
        """End a replay, completed or not, and let the next one read."""
        del self._replays[shard]
        if not self._closed:
            self._read_spool()

    def _replayed_part(self, replay: SpoolReplay) -> tuple[ShardDelivery, int]:
        part = replay.next_part()
        self.mark_pending(replay.stream.shard)
        messages = part.messages.messages if part.messages is not None else ()
        return part, estimated_bytes(messages)

    def _hand_over(self, delivery: Delivery, size: int) -> None:
        self._number = delivery.number
        # A delivery without messages takes some of the window, too: a subscriber that never acknowledges gets no more.
        if delivery.proven:
            self._unacknowledged_proofs += 1
        else:
            size += _DELIVERY_BYTES * (1 + len(delivery.shards) + len(delivery.refused))
        self._in_flight.append((delivery.number, size))
        self.unacknowledged_bytes += size
        try:
            self._deliver(delivery)
        except TaoError:  # `deliver` has sent the error to the subscriber; a commit must not fail for it
            self.close()
