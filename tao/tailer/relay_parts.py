"""What one transaction means, cut into parts by shard, and parts put together into relays (DESIGN.md §7)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from tao.delivery.message_log import estimated_bytes
from tao.model.changes import ListChange, ListInvalidation, Message, ObjectChange, ObjectInvalidation, ShardMessages
from tao.model.delivery import Span
from tao.model.relay import Relay, Touch
from tao.planning.row_events import Translated
from tao.storage.gtid import joined
from tao.tailer.settings import DeliverySettings

_FINISHED_RECEIPTS: Final = 64
"""So few are not worth merging."""

_PART_BYTES = 200  # a touch, a shard number or the proof of a time, with its place in a queue

Content = ShardMessages | Touch | int
"""Messages, a touch, or a shard that is void."""


class Receipt(msgspec.Struct, gc=False):
    """How many parts of a transaction are not acknowledged yet. ``gtids`` are behind us when there are none, nor of
    any earlier receipt."""

    gtids: list[str]
    unacknowledged: int = 0

    def absorb(self, later: Receipt) -> None:
        """Stand for the next receipt, too, when nothing of both is unacknowledged."""
        for gtid in later.gtids:
            for at in range(len(self.gtids) - 1, -1, -1):
                both = joined(self.gtids[at], gtid)
                if both is not None:
                    self.gtids[at] = both
                    break
            else:
                self.gtids.append(gtid)


class Receipts:
    """Those of all transactions that are not behind us, in their order."""

    def __init__(self) -> None:
        self._waiting: deque[Receipt] = deque()
        self.finished = 0
        """Of those here."""

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, gtids: list[str]) -> Receipt:
        """One more, behind all others."""
        receipt = Receipt(gtids)
        self._waiting.append(receipt)
        return receipt

    def forget_gtids(self) -> None:
        """Those here count for no position any more."""
        for receipt in self._waiting:
            receipt.gtids.clear()

    def settle(self) -> list[str]:
        """The GTIDs that are behind us by now, in their order; their receipts are here no longer."""
        waiting, behind = self._waiting, list[str]()
        while waiting and not waiting[0].unacknowledged:
            self.finished -= 1
            behind += waiting.popleft().gtids
        # Unfinished receipts are bounded by their parts. Two of three merge here, so each costs a constant.
        if self.finished > 2 * (len(waiting) - self.finished) + _FINISHED_RECEIPTS:
            self._merge()
        return behind

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
    """What goes to the leader of one shard; ``content=None`` proves a time to any leader, and its span a number."""

    receipt: Receipt
    shard: int
    content: Content | None
    size_bytes: int
    span: Span
    proven_unix_ms: int = 0


def is_proof(part: Part) -> bool:
    """Whether the part only proves a time."""
    return part.content is None


def is_void(parts: Iterable[Part]) -> bool:
    """Whether the parts say so little that it cannot be less."""
    return all(part.content is None or isinstance(part.content, int) for part in parts)


def contents_of(translated: Translated, settings: DeliverySettings) -> Iterator[tuple[int, Content, int]]:
    """``(shard, content, bytes)``."""
    for of_shard in translated.messages:
        for run, size in _runs(of_shard, settings):
            yield of_shard.shard, run, size
    for touch in translated.touches:
        yield touch.shard, touch, _PART_BYTES
    for shard in translated.bulk_shards:
        yield shard, shard, _PART_BYTES


def proof(receipt: Receipt, unix_ms: int, reached: tuple[str, int]) -> Part:
    """A part that tells only that all commits up to then, up to that transaction of a history, have come."""
    source, number = reached
    return Part(receipt, -1, None, _PART_BYTES, Span(-1, source, number, number), unix_ms)


def link(receipt: Receipt, span: Span) -> Part:
    """A part that tells only where the shard's other parts go on."""
    return Part(receipt, span.shard, ShardMessages(span.shard, 0, ()), _PART_BYTES, span)


def relay_of(parts: Iterable[Part], source: str) -> Relay:
    """One relay. Within a shard messages keep their order; of one shard and epoch they are put together."""
    messages: dict[tuple[int, int], list[Message]] = {}
    touches: dict[Touch, None] = {}
    void: dict[int, None] = {}
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
                void[shard] = None
            case None:
                pass
    return Relay(
        changes=tuple(ShardMessages(shard, epoch, tuple(run)) for (shard, epoch), run in messages.items()),
        touches=tuple(touches),
        bulk_shards=tuple(void),
        source=source,
        source_unix_ms=proven_unix_ms,
        position=position,
        spans=tuple(span for of_shard in spans.values() for span in of_shard),
        reached=reached,
    )


def _add_span(spans: list[Span], span: Span) -> None:
    """Spans that follow each other are one."""
    if spans and spans[-1].source == span.source and spans[-1].after <= span.after <= spans[-1].number:
        before = spans[-1]
        last = span if span.number >= before.number else before
        spans[-1] = Span(span.shard, span.source, before.after, last.number, last.more)
    else:
        spans.append(span)


def _runs(of_shard: ShardMessages, settings: DeliverySettings) -> Iterator[tuple[ShardMessages, int]]:
    """The messages in runs that a relay can hold."""
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
