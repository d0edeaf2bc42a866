"""One subscriber as a leader sees it: a cursor per shard, what it is owed, and a window of unacknowledged bytes.

Everything that is sent comes out of `Subscription.pump`, which compares each owed shard's cursor with its stream at
that moment. Because nothing is decided earlier, a closed shard or an overflown log leaves nothing to clean up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from tao.model.changes import ShardMessages
from tao.model.delivery import Delivery, Position, ShardDelivery
from tao.model.errors import ProtocolError, TaoError

if TYPE_CHECKING:
    from tao.delivery.message_log import Stream
    from tao.delivery.publisher import Publisher
    from tao.delivery.settings import DeliverySettings


class Subscription:
    """The deliveries of one subscriber on one connection, numbered from 1. Made by `Publisher.subscribe`."""

    def __init__(
        self, subscriber: str, publisher: Publisher, deliver: Callable[[Delivery], None], settings: DeliverySettings
    ) -> None:
        self.subscriber = subscriber
        self.resets = 0
        self.unacknowledged_bytes = 0
        self.failure: TaoError | None = None
        """Why ``deliver`` ended the subscription, when it did."""
        self._publisher = publisher
        self._deliver = deliver
        self._settings = settings
        self._cursors: dict[int, Position] = {}
        self._owed: dict[int, None] = {}  # in order of need: a shard that has had its turn goes to the end
        self._asked: dict[int, None] = {}  # to be confirmed or refused in the next delivery
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

    def add(self, positions: Sequence[Position]) -> None:
        """Follow more shards, or these ones from another position (after a gap). The next delivery, made at once
        whatever is unacknowledged, confirms or refuses each of them. Raises `ProtocolError` once closed."""
        if self._closed:
            raise ProtocolError(f"the subscription of {self.subscriber} is closed; subscribe again")
        for position in positions:
            self._cursors[position.shard] = position
            self._asked[position.shard] = None
            self._publisher.follow(position.shard, self)
        self.pump()

    def drop(self, shards: Sequence[int]) -> None:
        """Follow these no longer."""
        for shard in shards:
            self._cursors.pop(shard, None)
            self._owed.pop(shard, None)
            self._asked.pop(shard, None)
            self._publisher.unfollow(shard, self)

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
        if self._proofs_told != publisher.proofs and not (self._owed or self._closed) and self._window_open():
            self._proofs_told = publisher.proofs
            if publisher.proven:
                self._hand_over(Delivery(self._number + 1, proven=tuple(publisher.proven.items())), 0)

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
            part, part_bytes = self._part(stream, room if fits else 0, room_bytes)
            parts.append(part)
            size += part_bytes
            room_bytes -= part_bytes
            room -= max(1, len(part.messages.messages) if part.messages else 0)
        self.drop(refused)
        self._hand_over(Delivery(self._number + 1, tuple(parts), tuple(refused)), size)

    def _part(self, stream: Stream, room: int, room_bytes: int) -> tuple[ShardDelivery, int]:
        """The next words on one shard, with their size: a reset, a run of at most ``room`` messages, or "nothing new"
        (which still tells the version epoch)."""
        shard = stream.shard
        self._owed.pop(shard, None)
        cursor = self._cursors[shard]
        nothing = ShardMessages(shard, stream.version_epoch, ())
        if cursor.stream != stream.name or not stream.first - 1 <= cursor.sequence <= stream.last:
            self.resets += 1
            cursor = self._cursors[shard] = Position(shard, stream.name, stream.last)
            return ShardDelivery(cursor, True, nothing), 0
        run, run_bytes = nothing, 0
        if room and cursor.sequence < stream.last:
            run, run_bytes = self._publisher.log.read(stream, cursor.sequence, room, room_bytes)
            cursor = self._cursors[shard] = Position(shard, stream.name, cursor.sequence + len(run.messages))
        if cursor.sequence < stream.last:
            self._owed[shard] = None
        return ShardDelivery(cursor, False, run), run_bytes

    def _hand_over(self, delivery: Delivery, size: int) -> None:
        self._number = delivery.number
        # Even a delivery without messages takes some of the window: a subscriber that never acknowledges gets no more.
        size += 64 * (1 + len(delivery.shards) + len(delivery.refused))
        self._in_flight.append((delivery.number, size))
        self.unacknowledged_bytes += size
        try:
            self._deliver(delivery)
        except TaoError as error:  # its connection is gone; a commit must not fail for that
            self.failure = error
            self.close()
