"""The parts of a transaction's messages by shard, and their combination into relays."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from tao.delivery.message_log import estimated_bytes
from tao.model.changes import ListChange, ListInvalidation, Message, ObjectChange, ObjectInvalidation, ShardMessages
from tao.model.delivery import Span
from tao.model.relay import Relay, Touch
from tao.planning.row_events import Translated
from tao.replication.gtid import joined
from tao.tailer.settings import OutboxSettings

_MIN_FINISHED_RECEIPTS: Final = 64
"""Fewer finished receipts are not worth merging."""

_PART_BYTES: Final = 200
"""Estimated size of a touch, a shard number or the proof of a time, with its entry in a queue."""

Content = ShardMessages | Touch | int
"""Messages, a touch, or the number of a shard to invalidate as a whole."""


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


def is_minimal(parts: Iterable[Part]) -> bool:
    """Return whether the parts are bulk invalidations and proofs only, which cannot be reduced any further."""
    return all(part.content is None or isinstance(part.content, int) for part in parts)


def contents_of(translated: Translated, settings: OutboxSettings) -> Iterator[ShardContent]:
    """Cut a transaction's messages, touches and bulk invalidations into pieces that a relay can hold."""
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
    """Combine parts into one relay. Messages of a shard keep their order, and those of one epoch become one run."""
    messages: dict[tuple[int, int], list[Message]] = {}
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
                messages.setdefault((of_shard.shard, of_shard.version_epoch), []).extend(of_shard.messages)
            case Touch() as touch:
                touches[touch] = None
            case int() as shard:
                bulk_shards[shard] = None
            case None:
                pass
    return Relay(
        changes=tuple(ShardMessages(shard, epoch, tuple(run)) for (shard, epoch), run in messages.items()),
        touches=tuple(touches),
        bulk_shards=tuple(bulk_shards),
        source=source,
        source_unix_ms=proven_unix_ms,
        position=position,
        spans=tuple(span for of_shard in spans.values() for span in of_shard),
        reached=reached,
    )


def _add_span(spans: list[Span], span: Span) -> None:
    """Append a span, joining it with the last one if it follows."""
    if spans and spans[-1].source == span.source and spans[-1].after <= span.after <= spans[-1].number:
        before = spans[-1]
        last = span if span.number >= before.number else before
        spans[-1] = Span(span.shard, span.source, before.after, last.number, last.more)
    else:
        spans.append(span)


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
    size = estimated_bytes(message)
    if size > large_bytes:
        match message:
            case ObjectChange():
                message = ObjectInvalidation(message.id, message.after)
            case ListChange():
                message = ListInvalidation(message.id1, message.atype, message.after)
            case _:
                return message, size
        size = estimated_bytes(message)
    return message, size
