"""The subscriber's side of delivery: the position of each shard, what is new in a delivery, and what is proved.

Messages are numbered one by one within a stream, so a run that does not start right after the held position shows that
messages are missing. The cache then drops the shard as a whole and subscribes it again: a lost message costs hits,
never correctness. A binlog position is a claim of the leader; the inbox stores it only once everything before it has
arrived.

A leader proves times by database and positions by source, for all shards whose subscription it has confirmed. The inbox
keeps a proof once, with its leader, and not with each shard: every second each leader proves something of each
database, and a subscriber has thousands of shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

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


class _Proofs:
    """What one leader has proved to this subscriber in one stream: the newest time of each database and the newest
    transaction of each source, each with the number of the proof that said so last."""

    __slots__ = ("count", "numbers", "times")

    def __init__(self) -> None:
        self.count = 0
        self.times: dict[str, tuple[int, int]] = {}
        self.numbers: dict[str, tuple[int, int]] = {}

    def add(self, times: Iterable[tuple[str, int]], numbers: Iterable[tuple[str, int]]) -> None:
        """Add a proof. What is older than a former proof says nothing new."""
        self.count += 1
        for known, proved in ((self.times, times), (self.numbers, numbers)):
            for key, value in proved:
                if value >= known.get(key, _NOTHING)[0]:
                    known[key] = value, self.count


_NOTHING: Final = (0, 0)


class Inbox:
    """The positions of one subscriber in all shards that it hosts, and the times up to which it has everything. They
    outlive connections and leaders. Memory: one `Position`, one time and one pair per shard."""

    __slots__ = ("_database_of", "_joined", "_positions", "_proofs", "_proven_unix_ms")

    def __init__(self, database_of: Callable[[int], str]) -> None:
        """``database_of`` returns the name of a shard's database."""
        self._database_of = database_of
        self._positions: dict[int, Position] = {}
        self._proven_unix_ms: dict[int, int] = {}  # by shard, of proofs that it does not follow any more
        self._proofs: dict[str, _Proofs] = {}  # by leader
        # Shard that a leader has confirmed → its proofs, and how many of them came before, and do not count.
        self._joined: dict[int, tuple[_Proofs, int]] = {}

    def positions_for(self, shards: Iterable[int]) -> list[Position]:
        """Return the positions from which a subscription to these shards continues.

        From now on `receive` accepts deliveries of these shards. It ignores deliveries of shards that were never passed
        here or were forgotten since."""
        return [self._raised(self._positions.setdefault(shard, Position(shard))) for shard in shards]

    def forget(self, shard: int) -> None:
        """Remove a shard that is no longer hosted here. When it comes back it starts with a reset."""
        for by_shard in (self._positions, self._joined, self._proven_unix_ms):
            by_shard.pop(shard, None)

    def begin_stream(self, leader: str) -> None:
        """Begin a stream of deliveries of a leader. What it proves holds for the shards that it confirms from now
        on."""
        self._proofs[leader] = _Proofs()

    def end_stream(self, leader: str) -> None:
        """Forget the stream of a leader. Its shards keep their positions and times."""
        self._proofs.pop(leader, None)

    def confirm(self, leader: str, shards: Iterable[int]) -> None:
        """Have the proofs of the leader's stream hold for these shards, from the next one on: the leader has confirmed
        that it sends all of their changes."""
        proofs = self._proofs[leader]
        known = self._joined
        from_now_on = proofs, proofs.count
        for shard in shards:
            joined = known.get(shard)
            if joined is None or joined[0] is not proofs:
                if joined is not None:
                    self.suspend((shard,))
                known[shard] = from_now_on

    def suspend(self, shards: Iterable[int]) -> None:
        """Have no further proof hold for these shards, until a leader has confirmed them again. They keep what has been
        proved."""
        for shard in shards:
            if shard in self._joined:
                self._proven_unix_ms[shard] = self.proven_unix_ms(shard)
                held = self._positions.get(shard)
                if held is not None:
                    self._positions[shard] = self._raised(held)
                del self._joined[shard]

    def prove(self, leader: str, delivery: Delivery) -> None:
        """Keep what a delivery of the leader proves, once its messages are applied. The cost does not depend on the
        number of shards."""
        if delivery.proven or delivery.reached:
            self._proofs[leader].add(delivery.proven, delivery.reached)

    def proven_unix_ms(self, shard: int) -> int:
        """Return the time up to which every change of the shard has been received; 0 when nothing is known."""
        kept = self._proven_unix_ms.get(shard, 0)
        joined = self._joined.get(shard)
        if joined is None:
            return kept
        proofs, before = joined
        unix_ms, count = proofs.times.get(self._database_of(shard), _NOTHING)
        return max(kept, unix_ms) if count > before else kept

    def _raised(self, held: Position) -> Position:
        """Return the position with what has been proved since the shard was confirmed."""
        joined = self._joined.get(held.shard)
        if joined is not None:
            proofs, before = joined
            number, count = proofs.numbers.get(held.source, _NOTHING)
            if count > before and number > held.reached:
                return msgspec.structs.replace(held, reached=number)
        return held

    def receive(self, delivery: Delivery) -> Received:
        """Process a delivery. The inbox counts its messages as applied, so the caller must apply them at once.

        The cost grows with the delivery's parts and with nothing else: a first delivery has one for each shard."""
        outcomes: dict[int, _Outcome] = {}
        for part in delivery.shards:
            held = self._positions.get(part.position.shard)
            if held is not None:
                self._take(part, self._raised(held) if held.stream else held, outcomes)
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
        start = position.sequence - part.repeated - len(run)
        # Within one stream as well: what lies between was left out as repeats, and has left the leader's log since.
        new_stream = part.reset or part.continued
        if part.reset:
            outcomes[shard] = _Outcome(reset=True)
        elif not held.stream:
            return  # sent before the reset that answers our new subscription after a gap
        elif (not position.source or position.source != held.source) if new_stream else _is_gap(position, start, held):
            self.suspend((shard,))
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
        if shard in self._joined and (part.reset or position.source != held.source):
            self.suspend((shard,))  # former proofs say nothing about the new position
        self._positions[shard] = position
        if part.messages is not None:
            # Which numbers were left out is not said: a part with some is applied whole, for the second time in part.
            known = 0 if new_stream or part.repeated else held.sequence - start
            fresh = msgspec.structs.replace(part.messages, messages=run[known:]) if known else part.messages
            outcome.messages += (fresh,)


class _Outcome(msgspec.Struct, gc=False):
    """What the parts of one delivery for one shard come to. A reset or a gap replaces what earlier parts came to: the
    whole cache content of the shard is about to be dropped."""

    reset: bool = False
    gap: bool = False
    confirmed: bool = False
    messages: tuple[ShardMessages, ...] = ()


def _is_gap(position: Position, start: int, held: Position) -> bool:
    return position.stream != held.stream or start > held.sequence
