"""One subscriber as a leader sees it: a cursor per shard, what it is owed, and a window of unacknowledged bytes.

Everything that is sent comes out of `Subscription.pump`, which compares each owed shard's cursor with its stream at
that moment. Because nothing is decided earlier, a closed shard or an overflown log leaves nothing to clean up.

A cursor that is none of the stream's (another leader's, another run's, or left behind by the log) goes on by its
position in the binlog: from the log, or through the spool into the log, or once the tailer has told again what is
missing. Until then the shard *waits*: nothing is said of it, so the subscriber knows that it is not confirmed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from tao.delivery.catching_up import CatchUp
from tao.delivery.message_log import estimated_bytes
from tao.model.changes import ShardMessages
from tao.model.delivery import Delivery, Position, ShardDelivery
from tao.model.errors import ProtocolError, TaoError

if TYPE_CHECKING:
    from tao.delivery.message_log import Stream
    from tao.delivery.publisher import Publisher
    from tao.delivery.settings import DeliverySettings


@dataclass(slots=True, eq=False)
class _Wait:
    """For the tailer."""

    asked: bool = False
    asked_when_whole: bool = False
    over: bool = False


class Subscription:
    """The deliveries of one subscriber on one connection, numbered from 1. Made by `Publisher.subscribe`."""

    def __init__(
        self, subscriber: str, publisher: Publisher, deliver: Callable[[Delivery], None], settings: DeliverySettings
    ) -> None:
        self.subscriber = subscriber
        self.resets = 0
        self.continued = 0
        """Shards that went on warm by their position in the binlog."""
        self.unacknowledged_bytes = 0
        self._publisher = publisher
        self._deliver = deliver
        self._settings = settings
        self._cursors: dict[int, Position] = {}
        self._owed: dict[int, None] = {}  # in order of need: a shard that has had its turn goes to the end
        self._asked: dict[int, None] = {}  # to be confirmed or refused in the next delivery
        self._waiting: dict[int, _Wait] = {}
        self._catching_up: dict[int, CatchUp] = {}
        self._joining: set[int] = set()  # have come through the spool, and not to the end of the log yet
        self._in_flight: deque[tuple[int, int]] = deque()
        self._number = 0
        self._proofs_told = 0
        self._pumping = False
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def followed(self) -> int:
        """How many shards are followed."""
        return len(self._cursors)

    @property
    def owed(self) -> int:
        """How many of them have news that has not been sent."""
        return len(self._owed)

    @property
    def waiting(self) -> int:
        """How many are neither confirmed nor refused yet."""
        return len(self._waiting) + len(self._catching_up)

    def waits_for(self, shard: int) -> bool:
        """Whether the shard waits for the tailer."""
        return shard in self._waiting

    def add(self, positions: Sequence[Position]) -> None:
        """Follow more shards, or these ones from another position (after a gap). The next delivery, made at once
        whatever is unacknowledged, confirms or refuses each of them. Raises `ProtocolError` once closed."""
        if self._closed:
            raise ProtocolError(f"the subscription of {self.subscriber} is closed; subscribe again")
        for position in positions:
            self._forget(position.shard)
            self._cursors[position.shard] = position
            self._asked[position.shard] = None
            self._publisher.follow(position.shard, self)
        self.pump()

    def drop(self, shards: Sequence[int]) -> None:
        """Follow these no longer."""
        for shard in shards:
            self._forget(shard)
            self._publisher.unfollow(shard, self)

    def _forget(self, shard: int) -> None:
        kept: tuple[dict[int, Any], ...] = (self._cursors, self._owed, self._asked, self._waiting)
        for of_shards in kept:
            of_shards.pop(shard, None)
        self._joining.discard(shard)
        if shard in self._catching_up:
            self._end_catching_up(shard)

    def acknowledge(self, number: int) -> None:
        """The subscriber has applied every delivery up to ``number``. Old numbers are harmless; one that was never
        sent raises `ProtocolError`."""
        if number > self._number:
            raise ProtocolError(f"{self.subscriber} acknowledged delivery {number}; {self._number} is the last sent")
        while self._in_flight and self._in_flight[0][0] <= number:
            self.unacknowledged_bytes -= self._in_flight.popleft()[1]
        self.pump()

    def close(self) -> None:
        """Deliver nothing more. What was not acknowledged is delivered again when the subscriber comes back with its
        positions. May be called twice."""
        if not self._closed:
            self._closed = True
            self.drop(tuple(self._cursors))
            self._in_flight.clear()
            self.unacknowledged_bytes = 0
            self._publisher.forget(self)

    def owe(self, shard: int) -> None:
        """The shard has news; `pump` will send it."""
        self._owed[shard] = None

    def pump(self) -> None:
        """Answer what was asked, then send what is owed, as far as the window allows."""
        if self._pumping:  # a subscriber in the same process may acknowledge from within its `deliver`
            return
        self._pumping = True
        try:
            while self._asked or (self._owed and self._window_open()):
                self._send()
            self._tell_proofs()
        finally:
            self._pumping = False

    def _tell_proofs(self) -> None:
        """Up to when everything has been told: true once nothing is owed, and not a moment earlier."""
        publisher = self._publisher
        behind = self._owed or self._waiting or self._catching_up or self._closed
        if self._proofs_told != publisher.proofs and not behind and self._window_open():
            self._proofs_told = publisher.proofs
            if publisher.proven:
                proven = tuple(publisher.proven.items())
                self._hand_over(Delivery(self._number + 1, proven=proven, reached=publisher.reached), 0)

    def _window_open(self) -> bool:
        return self.unacknowledged_bytes < self._settings.window_unacknowledged_bytes

    def _send(self) -> None:
        """One delivery: a word on each shard asked about, then as much of what is owed as fits."""
        asked, self._asked = self._asked, {}
        room = self._settings.max_delivery_messages
        room_bytes = self._settings.max_delivery_bytes if self._window_open() else 0
        size = 0
        parts: list[ShardDelivery] = []
        refused: list[int] = []
        # Every part takes room, so no more of the owed ones can have their turn.
        for shard in dict.fromkeys((*asked, *islice(self._owed, room))):
            fits = room > 0 and room_bytes > 0
            if not fits and shard not in asked:
                break
            stream = self._publisher.stream(shard)
            if stream is None:
                refused.append(shard)
                continue
            told = self._part(stream, room if fits else 0, room_bytes)
            if told is None:  # it waits
                continue
            part, part_bytes = told
            parts.append(part)
            size += part_bytes
            room_bytes -= part_bytes
            room -= max(1, len(part.messages.messages) if part.messages else 0)
        self.drop(refused)
        if parts or asked or refused:
            self._hand_over(Delivery(self._number + 1, tuple(parts), tuple(refused)), size)

    def _part(self, stream: Stream, room: int, room_bytes: int) -> tuple[ShardDelivery, int] | None:
        """The next words on one shard, with their size: a reset, a run of at most ``room`` messages, or "nothing new"
        (which still tells the version epoch). None: there is nothing to be said of it yet."""
        shard = stream.shard
        self._owed.pop(shard, None)
        continued = False
        if (catch_up := self._catching_up.get(shard)) is not None:
            if catch_up.rows and catch_up.stream is stream:
                if room:
                    return self._spooled_part(catch_up)
                self.owe(shard)
                return None
            if catch_up.stream is stream and not catch_up.complete:
                self._read_on()
                return None
            self._end_catching_up(shard)
            continued = catch_up.stream is stream
            if continued:
                self._joining.add(shard)
                number = self._publisher.log.number_at(stream, catch_up.joined)
                self._go_on(stream, catch_up.cursor, number)
        cursor = self._cursors[shard]
        if cursor.stream != stream.name or not stream.first - 1 <= cursor.sequence <= stream.last:
            match self._continuation(stream, cursor):
                case "wait":
                    return None
                case "reset":
                    return self._reset(stream), 0
                case "go on":
                    continued = True
                    cursor = self._cursors[shard]
        run, run_bytes = ShardMessages(shard, stream.version_epoch, ()), 0
        sequence = cursor.sequence
        if room and sequence < stream.last:
            run, run_bytes = self._publisher.log.read(stream, sequence, room, room_bytes)
            sequence += len(run.messages)
        source, reached, coverage = cursor.source, cursor.reached, stream.coverage
        if sequence < stream.last:
            self._owed[shard] = None
        else:
            self._joining.discard(shard)
            if coverage.linked:
                source, reached = coverage.source, coverage.head
        cursor = self._cursors[shard] = Position(shard, stream.name, sequence, source, reached)
        return ShardDelivery(cursor, False, run, continued), run_bytes

    def _reset(self, stream: Stream) -> ShardDelivery:
        self.resets += 1
        self._waiting.pop(stream.shard, None)
        coverage = stream.coverage
        source, reached = (coverage.source, coverage.head) if coverage.linked else ("", 0)
        cursor = Position(stream.shard, stream.name, stream.last, source, reached)
        self._cursors[stream.shard] = cursor
        return ShardDelivery(cursor, True, ShardMessages(stream.shard, stream.version_epoch, ()))

    def _continuation(self, stream: Stream, cursor: Position) -> Literal["go on", "wait", "reset"]:
        """What becomes of a cursor that is not in the log by its number."""
        shard, coverage = stream.shard, stream.coverage
        wait = self._waiting.get(shard)
        # One that the log has left behind again before it had all: the spool would be read for ever.
        if not cursor.source or (wait is not None and wait.over) or shard in self._joining:
            self._joining.discard(shard)
            return "reset"
        if coverage.whole:
            if coverage.source != cursor.source:
                return "reset"
            if coverage.memory_after <= cursor.reached:
                self._go_on(stream, cursor, self._publisher.log.number_at(stream, cursor.reached))
                return "go on"
            if coverage.has_after(cursor.reached):
                self._waiting.pop(shard, None)
                self._catching_up[shard] = CatchUp(stream, cursor)
                self._read_on()
                return "wait"
        if self._publisher.later is None:
            return "reset"
        if wait is None:
            wait = self._waiting[shard] = _Wait()
            self._publisher.later(self._settings.continue_seconds, partial(self._waited, shard, wait))
        if not wait.asked or (coverage.whole and not wait.asked_when_whole):
            wait.asked, wait.asked_when_whole = True, coverage.whole
            self._publisher.want(shard, cursor.source, cursor.reached)
        return "wait"

    def _go_on(self, stream: Stream, cursor: Position, number: int) -> None:
        self.continued += 1
        self._waiting.pop(stream.shard, None)
        self._cursors[stream.shard] = Position(stream.shard, stream.name, number, cursor.source, cursor.reached)

    def _waited(self, shard: int, wait: _Wait) -> None:
        """The tailer has said nothing that helps: start cold."""
        if self._waiting.get(shard) is wait:
            wait.over = True
            self.owe(shard)
            self.pump()

    # ---- through the spool -----------------------------------------------------------------------------------------

    def _read_on(self) -> None:
        """A few shards at a time, in the order in which they came."""
        spool = self._publisher.spool
        for shard, catch_up in tuple(islice(self._catching_up.items(), self._settings.catching_up_shards)):
            if spool is not None and not (catch_up.reading or catch_up.rows or catch_up.complete):
                catch_up.read(spool, self._settings.max_delivery_bytes, partial(self._rows_came, shard, catch_up))

    def _rows_came(self, shard: int, catch_up: CatchUp, there: bool) -> None:
        if self._catching_up.get(shard) is catch_up:
            if not there:
                self._end_catching_up(shard)
                self._cursors[shard] = Position(shard)
            self.owe(shard)
            self.pump()

    def _end_catching_up(self, shard: int) -> None:
        """Whoever leaves the spool, and however, makes room for the next."""
        del self._catching_up[shard]
        if not self._closed:
            self._read_on()

    def _spooled_part(self, catch_up: CatchUp) -> tuple[ShardDelivery, int]:
        part = catch_up.next_part()
        self.owe(catch_up.stream.shard)
        messages = part.messages.messages if part.messages is not None else ()
        return part, sum(map(estimated_bytes, messages))

    def _hand_over(self, delivery: Delivery, size: int) -> None:
        self._number = delivery.number
        # Even a delivery without messages takes some of the window: a subscriber that never acknowledges gets no more.
        size += 64 * (1 + len(delivery.shards) + len(delivery.refused))
        self._in_flight.append((delivery.number, size))
        self.unacknowledged_bytes += size
        try:
            self._deliver(delivery)
        except TaoError:  # the subscriber has been told why; a commit must not fail for that
            self.close()
