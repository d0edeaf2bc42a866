"""The parts that one leader has not acknowledged: their queues, and the relays in which they are sent.

A transaction's messages are cut into parts by shard; a relay combines the parts at the head of a queue. Undecoded rows
are a part, too, and a relay names their transaction (`Reference`). An outbox does no I/O. A shard that the leader does
not accept is *held*: its parts wait in a queue of their own and are sent alone, so that they delay no other shard.
Parts that do not fit in memory, because the leader is away or takes them too slowly, are replaced by bulk invalidations
of their shards. A touch is not: it is a write, and no invalidation stands for it. Touches that nobody accepts are given
up when all outboxes together reach their bound. A proof of a time holds for every shard of the leader, so no proof is
sent while a shard is held, and of the waiting proofs only the newest is worth sending.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from typing import Final, NamedTuple

import msgspec

from tao.delivery.message_log import estimated_bytes
from tao.model.changes import ListChange, ListInvalidation, Message, ObjectChange, ObjectInvalidation, ShardMessages
from tao.model.delivery import Span
from tao.model.relay import ChangeRuns, Relay, Relayed, Touch
from tao.planning.row_events import Translated
from tao.replication.gtid import joined
from tao.tailer.binlog import UndecodedRows
from tao.tailer.settings import OutboxSettings

_MIN_FINISHED_RECEIPTS: Final = 64
"""Fewer finished receipts are not worth merging."""

_PART_BYTES: Final = 200
"""Estimated size of a touch, a shard number or the proof of a time, with its entry in a queue."""

_NOT_ASKED_SECONDS: Final = 1.0
"""How long a leader is not asked for messages of its own after it was missing all that a relay named. A tailer that
catches up then wastes one relay a second, and one that has caught up decodes a second's commits."""

Content = ShardMessages | UndecodedRows | Touch | int
"""Messages, rows that may be messages of the leader's own, a touch, or the number of a shard to invalidate as a
whole."""


class ShardContent(NamedTuple):
    """A piece of a transaction that concerns one shard, with its estimated size."""

    shard: int
    content: Content
    size_bytes: int


class Receipt(msgspec.Struct, gc=False):
    """The number of a transaction's parts that are not acknowledged yet. The transactions ``gtids`` are finished when
    there are none here, nor in any earlier receipt."""

    gtids: list[str]
    unacknowledged: int = 0

    def absorb(self, later: Receipt) -> None:
        """Take over the GTIDs of the next receipt; neither may have unacknowledged parts."""
        for gtid in later.gtids:
            for at in range(len(self.gtids) - 1, -1, -1):
                both = joined(self.gtids[at], gtid)
                if both is not None:
                    self.gtids[at] = both
                    break
            else:
                self.gtids.append(gtid)


class Receipts:
    """The receipts of all unfinished transactions, in their order."""

    def __init__(self) -> None:
        self._waiting: deque[Receipt] = deque()
        self.finished = 0
        """The number of receipts here without unacknowledged parts: an earlier one still has some."""

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, gtids: list[str]) -> Receipt:
        """Append a new receipt and return it."""
        receipt = Receipt(gtids)
        self._waiting.append(receipt)
        return receipt

    def forget_gtids(self) -> None:
        """Make the present receipts count for no position."""
        for receipt in self._waiting:
            receipt.gtids.clear()

    def settle(self) -> list[str]:
        """Remove the finished receipts at the head. Returns their GTIDs in order."""
        waiting, gtids = self._waiting, list[str]()
        while waiting and not waiting[0].unacknowledged:
            self.finished -= 1
            gtids += waiting.popleft().gtids
        # Unfinished receipts are bounded by their parts. Merging waits until two of three receipts are finished, so its
        # amortised cost per receipt is constant.
        if self.finished > 2 * (len(waiting) - self.finished) + _MIN_FINISHED_RECEIPTS:
            self._merge()
        return gtids

    def _merge(self) -> None:
        merged: deque[Receipt] = deque()
        for receipt in self._waiting:
            if merged and not (merged[-1].unacknowledged or receipt.unacknowledged):
                merged[-1].absorb(receipt)
                self.finished -= 1
            else:
                merged.append(receipt)
        self._waiting = merged


class Part(msgspec.Struct, gc=False):
    """A piece of a relay to the leader of one shard. A part with ``content=None`` proves a time to any leader, and the
    number of its span."""

    receipt: Receipt
    shard: int
    content: Content | None
    size_bytes: int
    span: Span
    proven_unix_ms: int = 0


def is_proof(part: Part) -> bool:
    """Return whether the part only proves a time."""
    return part.content is None


def is_undecoded(part: Part) -> bool:
    """Return whether the part is a reference to messages that the leader may have."""
    return isinstance(part.content, UndecodedRows)


def is_minimal(parts: Iterable[Part]) -> bool:
    """Return whether the parts are bulk invalidations and proofs only, which cannot be reduced any further."""
    return all(part.content is None or isinstance(part.content, int) for part in parts)


def contents_of(
    translated: Translated, settings: OutboxSettings, undecoded: Iterable[UndecodedRows] = ()
) -> Iterator[ShardContent]:
    """Cut a transaction's messages, touches and bulk invalidations into pieces that a relay can hold."""
    for rows in undecoded:
        yield ShardContent(rows.shard, rows, rows.size_bytes)
    for of_shard in translated.messages:
        for run, size in _runs(of_shard, settings):
            yield ShardContent(of_shard.shard, run, size)
    for touch in translated.touches:
        yield ShardContent(touch.shard, touch, _PART_BYTES)
    for shard in translated.bulk_shards:
        yield ShardContent(shard, shard, _PART_BYTES)


def proof(receipt: Receipt, unix_ms: int, reached: tuple[str, int]) -> Part:
    """Return a part that proves only that all commits up to ``unix_ms``, and up to transaction ``reached`` of a source,
    have been sent."""
    source, number = reached
    return Part(receipt, -1, None, _PART_BYTES, Span(-1, source, number, number), unix_ms)


def relay_of(parts: Iterable[Part], source: str) -> Relay:
    """Combine parts into one relay. Messages of a shard keep their order."""
    runs = ChangeRuns()
    touches: dict[Touch, None] = {}
    bulk_shards: dict[int, None] = {}
    spans: dict[int, list[Span]] = {}
    proven_unix_ms = 0
    reached = ("", 0)
    position = ""
    for part in parts:
        position = part.receipt.gtids[-1] if part.receipt.gtids else position
        if is_proof(part):
            if part.proven_unix_ms > proven_unix_ms:
                proven_unix_ms, reached = part.proven_unix_ms, (part.span.source, part.span.number)
        else:
            _add_span(spans.setdefault(part.shard, []), part.span)
        match part.content:
            case ShardMessages() as of_shard:
                runs.add(of_shard)
            case UndecodedRows():
                runs.refer(part.shard, part.span.source, part.span.number)
            case Touch() as touch:
                touches[touch] = None
            case int() as shard:
                bulk_shards[shard] = None
            case None:
                pass
    changes, references = runs.gathered()
    return Relay(
        changes=changes,
        references=references,
        touches=tuple(touches),
        bulk_shards=tuple(bulk_shards),
        source=source,
        source_unix_ms=proven_unix_ms,
        position=position,
        spans=tuple(span for of_shard in spans.values() for span in of_shard),
        reached=reached,
    )


def decoded_parts(part: Part, translated: Translated, settings: OutboxSettings) -> list[Part]:
    """Return the parts that take the place of an undecoded one. Together they cover its span, and only the last of them
    its transaction."""
    nothing = ShardContent(part.shard, ShardMessages(part.shard, 0, ()), 0)
    contents = list(contents_of(translated, settings)) or [nothing]
    span = part.span
    before = span.number - 1
    last = len(contents) - 1
    parts: list[Part] = []
    for place, (shard, content, size) in enumerate(contents):
        of_content = Span(
            shard,
            span.source,
            before if place else span.after,
            span.number if place == last else before,
            more=span.more or place < last,
            within=span.within or place > 0,
        )
        parts.append(Part(part.receipt, shard, content, size, of_content))
    return parts


def _add_span(spans: list[Span], span: Span) -> None:
    """Append a span, joining it with the last one if it follows."""
    before = spans[-1] if spans else None
    if before is None or before.source != span.source or not before.after <= span.after <= before.number:
        spans.append(span)
        return
    last = span if span.number >= before.number else before
    spans[-1] = Span(span.shard, span.source, before.after, last.number, last.more, before.within)


def _runs(of_shard: ShardMessages, settings: OutboxSettings) -> Iterator[tuple[ShardMessages, int]]:
    """Cut the messages into runs that a relay can hold, each with its size in bytes."""
    run: list[Message] = []
    size = 0
    for message in of_shard.messages:
        message, message_bytes = _bounded(message, settings.large_message_bytes)
        if run and (size + message_bytes > settings.relay_bytes or len(run) >= settings.relay_parts):
            yield ShardMessages(of_shard.shard, of_shard.version_epoch, tuple(run)), size
            run, size = [], 0
        run.append(message)
        size += message_bytes
    yield ShardMessages(of_shard.shard, of_shard.version_epoch, tuple(run)), size


def _bounded(message: Message, large_bytes: int) -> tuple[Message, int]:
    """Replace a message above ``large_bytes`` by an invalidation. Returns the message and its size in bytes."""
    size = estimated_bytes((message,))
    if size > large_bytes:
        match message:
            case ObjectChange():
                message = ObjectInvalidation(message.id, message.after)
            case ListChange():
                message = ListInvalidation(message.id1, message.atype, message.after)
            case _:
                return message, size
        size = estimated_bytes((message,))
    return message, size


class LeaderOutbox:
    """The queues of one leader. All parts of a shard are in one queue and keep their order."""

    __slots__ = (
        *(
            "asks_from",
            "bytes",
            "collapsed",
            "decoding",
            "failures",
            "held",
            "held_attempts",
            "leader",
            "parts",
            "proof",
        ),
        *("rejected", "relay_seconds", "retry_at", "running", "sending", "sending_bytes", "sending_count"),
        *(
            "sending_touches",
            "sent_at",
            "takes_references",
            "timer",
            "topology_version",
            "touch_bytes",
            "urgent_parts",
            "woken",
        ),
    )

    def __init__(self, leader: str) -> None:
        self.leader: Final = leader
        self.parts: deque[Part] = deque()
        """The parts of shards that are not held."""
        self.held: Final[dict[int, deque[Part]]] = {}
        self.rejected: Final[set[int]] = set()
        """The held shards that were not accepted alone either."""
        self.proof: Part | None = None
        """The newest proof, which waits until no shard is held."""
        self.failures = 0
        """Consecutive failures of the leader as a whole. Above zero the leader counts as away."""
        self.held_attempts = 0
        """Consecutive attempts after which a shard was still held."""
        self.retry_at = 0.0
        """Loop time of the next attempt for held shards."""
        self.takes_references = False
        """The leader has said that it has messages of commits of its own."""
        self.asks_from = 0.0
        """Loop time from which it is asked for them."""
        self.decoding: Final = asyncio.Lock()
        """Held while waiting parts are decoded, so that no part is sent or decoded by another task meanwhile."""
        self.topology_version = 0
        """The version of the topology under which the shards here were routed to this leader."""
        self.bytes = 0
        """Estimated size of all parts here, those under way included."""
        self.touch_bytes = 0
        """The share of touches in it."""
        self.running = False
        """True while a task is sending."""
        self.urgent_parts = 0
        """The number of parts at the head of `parts` that must be sent without waiting for more."""
        self.timer: asyncio.TimerHandle | None = None
        """Starts sending the deferred parts; set while there are some and no task is sending."""
        self.sending: deque[Part] | None = None
        """The queue whose first ``sending_count`` parts are being sent."""
        self.sending_count = 0
        self.sending_bytes = 0
        """Estimated size of the parts that are being sent, without touches."""
        self.sending_touches = False
        """The relay that was sent last has touches."""
        self.sent_at = 0.0
        """Loop time at which the relay under way was sent."""
        self.relay_seconds = 0.0
        """Time that the leader took for the last relay that it acknowledged. 0 once everything was acknowledged, and
        after a relay with touches: that takes as long as their commits, and says nothing of the leader's pace."""
        self.collapsed = ""
        """Why parts were replaced by invalidations since everything was acknowledged last; empty if none were."""
        self.woken: Final = asyncio.Event()
        """Set when a part was added."""

    @property
    def empty(self) -> bool:
        """True when no parts are left to send."""
        return not self.parts and not self.held

    @property
    def waiting_bytes(self) -> int:
        """Estimated size of the parts that are not under way, without touches."""
        return self.bytes - self.touch_bytes - self.sending_bytes

    def asks(self, now: float) -> bool:
        """Return whether the leader is asked for messages of its own."""
        return self.takes_references and now >= self.asks_from

    def take_answer(self, relay: Relay, relayed: Relayed, now: float) -> None:
        """Note what an answer says about messages of the leader's own. A leader that was missing all of them is not
        asked for a moment: what is read now it has committed long ago, or another program has."""
        self.takes_references = relayed.takes_references
        missing, named = (sum(len(each.numbers) for each in some) for some in (relayed.missing, relay.references))
        if missing and missing == named:
            self.asks_from = now + _NOT_ASKED_SECONDS

    def slow_at(self, settings: OutboxSettings) -> float:
        """Return the loop time from which the leader counts as slow (`OutboxSettings.slow_seconds`); infinite while
        nothing says so."""
        message_bytes = self.bytes - self.touch_bytes
        messages = len(self.parts) - self.touch_bytes // _PART_BYTES
        relays = max(1.0, message_bytes / settings.relay_bytes, messages / settings.relay_parts)
        allowed_seconds = settings.slow_seconds / relays
        if self.relay_seconds >= allowed_seconds:
            return -inf
        return self.sent_at + allowed_seconds if self.sending is not None and not self.sending_touches else inf

    def begin_relay(self, queue: deque[Part], parts: Sequence[Part], now: float) -> None:
        """Note that the first parts of a queue are being sent."""
        self.sending, self.sending_count, self.sent_at = queue, len(parts), now
        self.sending_bytes = sum(part.size_bytes for part in parts if not isinstance(part.content, Touch))
        self.sending_touches = any(isinstance(part.content, Touch) for part in parts)

    def end_relay(self) -> None:
        """Note that no parts are being sent any more."""
        self.sending, self.sending_count, self.sending_bytes = None, 0, 0

    def waiting_undecoded(self, max_bytes: int) -> list[Part]:
        """Return the first undecoded parts that are not under way, of all queues: as many as ``max_bytes`` hold."""
        found: list[Part] = []
        size = 0
        for queue in (self.parts, *self.held.values()):
            for part in islice(queue, self.sending_count if queue is self.sending else 0, None):
                if is_undecoded(part):
                    size += part.size_bytes
                    if found and size > max_bytes:
                        return found
                    found.append(part)
        return found

    def put_in_place(self, queue: deque[Part], decoded: Mapping[int, list[Part]], *, first: int = 0) -> list[Part]:
        """Put decoded parts in the place of undecoded ones, named by their ``id``, from place ``first`` of a queue on.
        Returns those that were still there."""
        replaced: list[Part] = []
        parts, urgent_parts = list(queue), self.urgent_parts
        queue.clear()
        for place, part in enumerate(parts):
            instead = decoded.get(id(part)) if place >= first else None
            if instead is None:
                queue.append(part)
                continue
            queue.extend(instead)
            replaced.append(part)
            self._count(part, -1)
            for each in instead:
                self._count(each)
            if queue is self.parts and place < urgent_parts:
                self.urgent_parts += len(instead) - 1
        return replaced

    def take_acknowledged(self, queue: deque[Part], count: int, now: float) -> Iterator[Part]:
        """Remove and return the first parts of a queue, which the leader has acknowledged."""
        self.relay_seconds = 0.0 if self.sending_touches else now - self.sent_at
        if queue is self.parts:
            self.urgent_parts -= count
        for _ in range(count):
            part = queue.popleft()
            self._count(part, -1)
            yield part

    def reduce(self, parts: Iterable[Part]) -> None:
        """Replace the content of parts here by bulk invalidations."""
        for part in parts:
            if not is_proof(part):
                self._count(part, -1)
                part.content = part.shard
                self._count(part)

    def _count(self, part: Part, sign: int = 1) -> None:
        """Add or subtract the size of a part."""
        self.bytes += sign * part.size_bytes
        if isinstance(part.content, Touch):
            self.touch_bytes += sign * part.size_bytes

    def may_pause(self, settings: OutboxSettings) -> bool:
        """Return whether no parts are left, or only parts that may wait for more."""
        if not self.parts:
            self.urgent_parts = 0
        deferrable = not (self.failures or self.held) and self.urgent_parts <= 0
        return (deferrable and len(self.parts) < settings.gather_parts) or self.empty

    def add(self, part: Part, *, deferrable: bool = False) -> Part | None:
        """Queue a part, which may wait for more parts if it is ``deferrable``.

        Returns the proof that the part replaces, if any."""
        self._count(part)
        replaced = None
        if self.held and is_proof(part):
            replaced, self.proof = self.proof, part
            self.bytes -= 0 if replaced is None else replaced.size_bytes
        else:
            self.held.get(part.shard, self.parts).append(part)
        if not deferrable:
            self.urgent_parts = len(self.parts)
        self.woken.set()
        return replaced

    def invalidate_proofs(self) -> None:
        """Make the waiting proofs prove nothing; a later proof may hold again."""
        under_way = self.sending_count if self.parts is self.sending else 0
        for part in (*islice(self.parts, under_way, None), *filter(None, (self.proof,))):
            part.proven_unix_ms = 0

    def hold(self, shards: Iterable[int]) -> list[Part]:
        """Move the parts of each of these shards into a queue of its own. Returns the proofs that were replaced."""
        for shard in shards:
            self.held.setdefault(shard, deque())
        replaced = []
        parts, self.parts = self.parts, deque()
        for part in parts:
            self._count(part, -1)
            proof = self.add(part)
            if proof is not None:
                replaced.append(proof)
        return replaced

    def release(self, shard: int) -> None:
        """Append the remaining parts of a held shard, which is accepted again or gone, to the common queue."""
        self.parts.extend(self.held.pop(shard))
        self.rejected.discard(shard)
        if not self.held:
            self.held_attempts = 0
            if self.proof is not None:
                self.parts.append(self.proof)
                self.proof = None
        self.urgent_parts = len(self.parts)  # these parts have waited long enough

    def take_all(self) -> list[Part]:
        """Remove and return all parts, those of each shard in their order, then the proof."""
        parts = list(self.parts)
        for queue in self.held.values():
            parts.extend(queue)
        if self.proof is not None:
            parts.append(self.proof)
        self.parts.clear()
        self.held.clear()
        self.rejected.clear()
        self.proof = None
        self.bytes = self.touch_bytes = 0
        return parts

    def collapse(self, *, is_slow: bool = False, with_touches: bool = False) -> tuple[list[Part], int]:
        """Replace the parts of the rejected shards, or of all shards when the leader is away or slow, by bulk
        invalidations. Parts that are under way stay as they are, and so do touches and undecoded parts, which may be
        touches, except that those of a leader that is away and of rejected shards are replaced, too, ``with_touches``.

        Returns the parts that are dropped, and the bytes freed by the parts that stay in their place. The first part of
        each shard, and the first after a touch of it, stays, since it belongs to the earliest receipt."""
        dropped: list[Part] = []
        freed_bytes = 0
        every_shard = is_slow or self.failures > 0
        if every_shard:
            freed_bytes += self._collapse(self.parts, dropped, with_touches=with_touches and self.failures > 0)
            self.urgent_parts = len(self.parts)  # the invalidations have waited long enough
        for shard, queue in self.held.items():
            is_stuck = self.failures > 0 or shard in self.rejected
            if every_shard or is_stuck:
                freed_bytes += self._collapse(queue, dropped, with_touches=with_touches and is_stuck)
        return dropped, freed_bytes

    def _collapse(self, queue: deque[Part], dropped: list[Part], *, with_touches: bool) -> int:
        under_way = self.sending_count if queue is self.sending else 0
        waiting = [queue.pop() for _ in range(len(queue) - under_way)]
        waiting.reverse()
        newest_proof = next((part for part in reversed(waiting) if is_proof(part)), None)
        # Keyed by shard and source, because a span has one source. A promotion changes the source of a database.
        invalidations: dict[tuple[int, str], Part] = {}
        freed_bytes = 0
        for part in waiting:
            span = part.span
            if isinstance(part.content, Touch | UndecodedRows) and not with_touches:
                # What follows a touch gets an invalidation of its own, so that the spans keep their order.
                invalidations.pop((part.shard, span.source), None)
                queue.append(part)
                continue
            self._count(part, -1)
            kept = invalidations.get((part.shard, span.source))
            if kept is not None and not is_proof(part):
                # The invalidation covers what is dropped. Under its first position alone, a subscriber that has reached
                # that position would go on without it.
                number = max(kept.span.number, span.number)
                kept.span = msgspec.structs.replace(kept.span, number=number, more=span.more)
            if kept is not None or (is_proof(part) and part is not newest_proof):
                dropped.append(part)
                continue
            if not is_proof(part):
                invalidations[part.shard, span.source] = part
                part.content = part.shard
            # Few parts stay for each shard, or as many as it has touches. They count as zero bytes, or they could fill
            # the room they make.
            freed_bytes += part.size_bytes
            part.size_bytes = 0
            queue.append(part)
        for kept in invalidations.values():
            kept.span = msgspec.structs.replace(kept.span, more=False)  # the parts that would follow are dropped
        return freed_bytes


def head_of(queue: deque[Part], settings: OutboxSettings) -> list[Part]:
    """Return the first parts of a queue, as many as one relay holds."""
    taken: list[Part] = []
    size = weight = 0
    for part in queue:
        size += part.size_bytes
        weight += part.content.messages if isinstance(part.content, UndecodedRows) else 1
        if taken and (size > settings.relay_bytes or weight > settings.relay_parts):
            break
        taken.append(part)
    return taken
