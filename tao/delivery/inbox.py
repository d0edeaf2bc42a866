"""The subscriber's side of delivery: how far each shard has been told, and what of a delivery is new (DESIGN.md §7).

Messages are numbered one by one within a stream, so a run whose start does not follow what is held shows that
something is missing. The cache then drops the shard as a whole and subscribes it anew: a lost message costs hits,
never correctness. The position in the binlog is the leader's claim, believed once everything before it has come.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from tao.model.changes import ShardMessages
from tao.model.delivery import Delivery, Position, ShardDelivery


@dataclass(frozen=True, slots=True)
class Received:
    """What to do with a delivery, in this order: bump the epoch of the shards in ``resets``, apply ``messages``, take
    the shards in ``confirmed`` as subscribed and those in ``refused`` as not, subscribe the ``gaps`` again (they are
    among the resets), and acknowledge the delivery's number."""

    resets: list[int] = field(default_factory=list)
    messages: list[ShardMessages] = field(default_factory=list)
    confirmed: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)


class Inbox:
    """Positions of one subscriber over all shards it hosts; outlives connections and leaders. Memory: one `Position`
    a shard."""

    __slots__ = ("_positions",)

    def __init__(self) -> None:
        self._positions: dict[int, Position] = {}

    def positions_for(self, shards: Iterable[int]) -> list[Position]:
        """Where to continue, for a subscription to these shards. From now on their deliveries are expected; those of
        shards that were never named here, or were forgotten since, are passed over."""
        return [self._positions.setdefault(shard, Position(shard)) for shard in shards]

    def forget(self, shard: int) -> None:
        """The shard is no longer hosted here; when it comes back it starts with a reset."""
        self._positions.pop(shard, None)

    def prove(self, reached: Iterable[tuple[str, int]], told: Iterable[int]) -> None:
        """Of the shards in ``told`` everything up to these positions has been told, as far as they are of the source.
        Whoever says so tells of them all, and has told what came before."""
        numbers = dict(reached)
        if not numbers:
            return
        for shard in told:
            held = self._positions.get(shard)
            if held is not None and held.reached < numbers.get(held.source, 0):
                self._positions[shard] = msgspec.structs.replace(held, reached=numbers[held.source])

    def receive(self, delivery: Delivery) -> Received:
        """Take a delivery in. Its messages count as applied from here on, so the caller applies them at once."""
        received = Received(refused=list(delivery.refused))
        for part in delivery.shards:
            held = self._positions.get(part.position.shard)
            if held is not None:
                self._take(part, held, received)
        return received

    def _take(self, part: ShardDelivery, held: Position, received: Received) -> None:
        position = part.position
        shard = position.shard
        run = part.messages.messages if part.messages is not None else ()
        start = position.sequence - len(run)
        anew = part.reset or (part.continued and position.stream != held.stream)
        if part.reset:
            _void(received, shard)
            received.resets.append(shard)
        elif not held.stream:
            return  # a gap was found and the new subscription's reset is on its way; this was sent before it
        elif (not position.source or position.source != held.source) if anew else _is_gap(position, start, held):
            _void(received, shard)
            received.resets.append(shard)
            received.gaps.append(shard)
            self._positions[shard] = Position(shard)
            return
        received.confirmed.append(shard)
        if not anew and position.sequence < held.sequence:
            return  # all of it was told before
        if not part.reset and position.source == held.source and position.reached < held.reached:
            position = msgspec.structs.replace(position, reached=held.reached)  # proved meanwhile
        self._positions[shard] = position
        if part.messages is not None:
            known = 0 if anew else held.sequence - start
            fresh = msgspec.structs.replace(part.messages, messages=run[known:]) if known else part.messages
            received.messages.append(fresh)


def _is_gap(position: Position, start: int, held: Position) -> bool:
    return position.stream != held.stream or start > held.sequence


def _void(received: Received, shard: int) -> None:
    """What the same delivery said of the shard before no longer counts: everything held of it is dropped."""
    received.messages[:] = [messages for messages in received.messages if messages.shard != shard]
    for told in (received.resets, received.confirmed, received.gaps):
        if shard in told:
            told.remove(shard)
