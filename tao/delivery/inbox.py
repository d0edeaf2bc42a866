"""The subscriber's side of delivery: the position of each shard, and the part of a delivery that is new.

Messages are numbered one by one within a stream, so a run that does not start right after the held position shows that
messages are missing. The cache then drops the shard as a whole and subscribes it again: a lost message costs hits,
never correctness. A binlog position is a claim of the leader; the inbox stores it only once everything before it has
arrived.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from tao.model.changes import ShardMessages
from tao.model.delivery import Delivery, Position, ShardDelivery


@dataclass(frozen=True, slots=True)
class Received:
    """The actions that a delivery requires, in this order.

    Bump the epoch of the shards in ``resets``, apply ``messages``, mark the shards in ``confirmed`` as subscribed and
    those in ``refused`` as not subscribed, subscribe the ``gaps`` again (they are among the resets), and acknowledge
    the delivery's number."""

    resets: list[int] = field(default_factory=list)
    messages: list[ShardMessages] = field(default_factory=list)
    confirmed: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)


class Inbox:
    """The positions of one subscriber in all shards that it hosts. They outlive connections and leaders. Memory: one
    `Position` per shard."""

    __slots__ = ("_positions",)

    def __init__(self) -> None:
        self._positions: dict[int, Position] = {}

    def positions_for(self, shards: Iterable[int]) -> list[Position]:
        """Return the positions from which a subscription to these shards continues.

        From now on `receive` accepts deliveries of these shards. It ignores deliveries of shards that were never passed
        here or were forgotten since."""
        return [self._positions.setdefault(shard, Position(shard)) for shard in shards]

    def forget(self, shard: int) -> None:
        """Remove a shard that is no longer hosted here. When it comes back it starts with a reset."""
        self._positions.pop(shard, None)

    def prove(self, reached: Iterable[tuple[str, int]], shards: Iterable[int]) -> None:
        """Raise the positions of ``shards`` to ``reached``, which has a position per source.

        The leader that proves these positions delivers all of ``shards``, and has delivered every message up to
        there."""
        numbers = dict(reached)
        if not numbers:
            return
        for shard in shards:
            held = self._positions.get(shard)
            if held is not None and held.reached < numbers.get(held.source, 0):
                self._positions[shard] = msgspec.structs.replace(held, reached=numbers[held.source])

    def receive(self, delivery: Delivery) -> Received:
        """Process a delivery. The inbox counts its messages as applied, so the caller must apply them at once.

        The cost grows with the delivery's parts and with nothing else: a first delivery has one for each shard."""
        outcomes: dict[int, _Outcome] = {}
        for part in delivery.shards:
            held = self._positions.get(part.position.shard)
            if held is not None:
                self._take(part, held, outcomes)
        return Received(
            resets=[shard for shard, outcome in outcomes.items() if outcome.reset],
            messages=[messages for outcome in outcomes.values() for messages in outcome.messages],
            confirmed=[shard for shard, outcome in outcomes.items() if outcome.confirmed],
            refused=list(delivery.refused),
            gaps=[shard for shard, outcome in outcomes.items() if outcome.gap],
        )

    def _take(self, part: ShardDelivery, held: Position, outcomes: dict[int, _Outcome]) -> None:
        position = part.position
        shard = position.shard
        run = part.messages.messages if part.messages is not None else ()
        start = position.sequence - len(run)
        new_stream = part.reset or (part.continued and position.stream != held.stream)
        if part.reset:
            outcomes[shard] = _Outcome(reset=True)
        elif not held.stream:
            return  # sent before the reset that answers our new subscription after a gap
        elif (not position.source or position.source != held.source) if new_stream else _is_gap(position, start, held):
            outcomes[shard] = _Outcome(reset=True, gap=True)
            self._positions[shard] = Position(shard)
            return
        outcome = outcomes.get(shard)
        if outcome is None:
            outcome = outcomes[shard] = _Outcome()
        outcome.confirmed = True
        if not new_stream and position.sequence < held.sequence:
            return  # all of its messages were received before
        if not part.reset and position.source == held.source and position.reached < held.reached:
            position = msgspec.structs.replace(position, reached=held.reached)  # a proof has raised it meanwhile
        self._positions[shard] = position
        if part.messages is not None:
            known = 0 if new_stream else held.sequence - start
            fresh = msgspec.structs.replace(part.messages, messages=run[known:]) if known else part.messages
            outcome.messages.append(fresh)


@dataclass(slots=True)
class _Outcome:
    """What the parts of one delivery for one shard come to. A reset or a gap replaces what earlier parts came to: the
    whole cache content of the shard is about to be dropped."""

    reset: bool = False
    gap: bool = False
    confirmed: bool = False
    messages: list[ShardMessages] = field(default_factory=list)


def _is_gap(position: Position, start: int, held: Position) -> bool:
    return position.stream != held.stream or start > held.sequence
