"""The binlog position that each shard's leaders have received, so that a new leader of a shard misses nothing.

Every part of a relay carries the range of positions that it covers (`tao.model.delivery.Span`). A leader that has just
taken over a shard, or has come back, asks where the shard continues, naming its own position. If no leader has received
anything after that position, an empty part answers it. Otherwise another leader, which is gone, had acknowledged
messages that this leader's subscribers have missed, and the binlog is read again.

A second reader goes back to the position of the subscriber that is furthest behind and reads up to the acknowledged
position; only the wanted shards are sent again. The reading is bounded in time, transactions and memory. Beyond these
bounds a cold start is cheaper: the leader waits no longer than its settings say and then resets its subscribers. The
first reader continues meanwhile.

A history of transactions is named by the database, its version epoch, and the server that numbered them (in MariaDB's
GTIDs a domain and a server, in MySQL's a server). So transactions of a lost master are never mistaken for those of its
successor.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from tao.model.changes import ListInvalidation, ObjectInvalidation, ShardMessages
from tao.model.delivery import Span
from tao.model.errors import TaoError
from tao.model.relay import Touch, TouchKind
from tao.model.versions import NEVER_WRITTEN
from tao.observability.logs import Logger
from tao.replication.gtid import source_position
from tao.tailer.binlog import BinlogSource, BinlogTransaction
from tao.tailer.leader_outbox import Content, ShardContent
from tao.tailer.settings import RewindSettings


class _Shard(msgspec.Struct, gc=False):
    """The newest transactions of ``source`` that were ``queued`` for the shard's leader and ``acknowledged`` by it.
    Nothing up to ``since`` can be read again."""

    source: str
    since: int
    queued: int
    acknowledged: int


class Continuity:
    """The positions of all shards of one database. Memory: one entry for each shard that has changed."""

    def __init__(self, database: str, version_epoch: Callable[[], int], has_shard: Callable[[int], bool]) -> None:
        """``has_shard`` returns whether the database holds a shard."""
        self._database: Final = database
        self._has_shard: Final = has_shard
        self._version_epoch: Final = version_epoch
        self._begun: dict[str, int] = {}
        self._latest = ("", 0)
        self._broken_after: dict[int, tuple[str, int]] = {}
        self._shards: Final[dict[int, _Shard]] = {}

    def begin(self, position: str) -> None:
        """Begin at ``position``: everything before it is acknowledged, and everything after it will be queued."""
        self._begun = dict(filter(None, map(self.source_position, position.split(","))))
        self._shards.clear()
        self._broken_after.clear()

    def gain(self, shards: Iterable[int]) -> None:
        """Begin the histories of shards that another database has held until now. This database may have held them
        before, and what was written in between is not in its binlog: no position from then can be continued."""
        for shard in shards:
            self._break(shard)

    def source_position(self, gtid: str) -> tuple[str, int] | None:
        """Return the ``(source, number)`` of a transaction, or None when no history counts it."""
        return source_position(self._database, self._version_epoch(), gtid)

    def proven(self, gtid: str) -> tuple[str, int]:
        """Return the ``(source, number)`` that a proof of time in this transaction proves, too."""
        self._latest = self.source_position(gtid) or ("", 0)
        if self._latest[0]:
            self._begun.setdefault(self._latest[0], self._latest[1] - 1)
        return self._latest

    def spans_of(self, gtid: str, shards: Iterable[int]) -> list[Span]:
        """Return a span for each part of a transaction; ``shards`` has the parts' shards in order.

        Only the last part of a shard covers the transaction: a leader with half of its parts does not have it."""
        position = self.source_position(gtid)
        if position is None:
            return [self._break(shard) for shard in shards]
        source, number = position
        self._begun.setdefault(source, number - 1)
        parts: dict[int, int] = {}
        spans: list[Span] = []
        for shard in shards:
            known = self._shard(shard, source, number)
            if shard in parts:
                before = spans[parts[shard]]
                spans[parts[shard]] = Span(shard, source, before.after, number - 1, more=True, within=before.within)
                spans.append(Span(shard, source, number - 1, number, within=True))
            else:
                spans.append(Span(shard, source, known.queued, number))
            parts[shard] = len(spans) - 1
        for shard in parts:
            self._shards[shard].queued = number
        return spans

    def _shard(self, shard: int, source: str, number: int) -> _Shard:
        known = self._shards.get(shard)
        if known is None:
            # Messages sent by the process before this one are in the binlog, too, and can be read again.
            begun = min(self._begun[source], number - 1)
            known = self._shards[shard] = _Shard(source, 0, begun, begun)
        elif known.source != source or known.queued >= number:
            known = self._shards[shard] = _Shard(source, number - 1, number - 1, number - 1)
        return known

    def _break(self, shard: int) -> Span:
        """Break the shard's history at a part that no position counts."""
        self._shards[shard] = _Shard("", 0, 0, 0)
        self._broken_after[shard] = self._latest
        return Span(shard, "", 0, 0)

    def acknowledge(self, span: Span) -> None:
        """Record that a leader has acknowledged a part with this span."""
        known = self._shards.get(span.shard)
        if known is not None and known.source == span.source:
            known.acknowledged = max(known.acknowledged, span.number)

    def answer(self, wanted: Span) -> tuple[Span | None, Span | None]:
        """Answer a leader that asks where a shard continues.

        Returns a span to send at once in an empty part, or a span to read again first. Neither: a queued part answers
        the question, or the answer is not known yet."""
        shard = wanted.shard
        if not self._has_shard(shard):
            return None, None  # only the shard's own tailer knows; it may have sent messages that this one never reads
        known = self._shards.get(shard)
        if known is None:
            # Nothing has been queued for the shard since reading began.
            source = wanted.source if wanted.source in self._begun else self._latest[0]
            begun = self._begun.get(source)
            if begun is not None and source == wanted.source and wanted.number < begun:
                return None, Span(shard, source, wanted.number, begun)
            return (None if begun is None else Span(shard, source, begun, begun)), None
        if not known.source:
            source, number = self._latest
            if not source or self._latest == self._broken_after[shard]:
                return None, None
            # The uncounted part precedes the newest heartbeat, and leaders receive it before the answer given here.
            known = self._shards[shard] = _Shard(source, number, number, number)
        acknowledged = known.acknowledged
        if known.source == wanted.source and known.since <= wanted.number < acknowledged:
            return None, Span(shard, wanted.source, wanted.number, acknowledged)
        if known.queued > acknowledged:
            return None, None
        return Span(shard, known.source, acknowledged, acknowledged), None

    def mark_unreadable(self, span: Span) -> None:
        """Record that the messages of ``span`` cannot be read again."""
        known = self._shards.get(span.shard)
        if known is None:
            self._shards[span.shard] = _Shard(span.source, span.number, span.number, span.number)
        else:
            known.since = known.acknowledged


class SpansAgain:
    """The spans of the parts that are sent again, for shards that want what a span of theirs covers.

    Only the empty part that comes last covers the last transaction, since nobody knows which part of it is the last."""

    def __init__(self, wanted: Mapping[int, Span]) -> None:
        """``wanted``: by shard, all of one source."""
        self._wanted: Final = wanted
        self._reached: Final = {shard: span.after for shard, span in wanted.items()}
        self._begun: Final[set[int]] = set()  # shards that have had a part

    def of_part(self, shard: int, number: int) -> Span | None:
        """Return the span of the shard's next part, which is of transaction ``number``; None: nobody wants it."""
        wanted = self._wanted.get(shard)
        if wanted is None or not wanted.after < number <= wanted.number:
            return None
        reached, self._reached[shard] = self._reached[shard], number - 1
        is_first = shard not in self._begun
        self._begun.add(shard)
        return Span(shard, wanted.source, reached, number - 1, more=True, within=not is_first)

    def ends(self) -> list[Span]:
        """Return the spans of the last parts, which are empty."""
        return [
            Span(shard, wanted.source, self._reached[shard], wanted.number, within=shard in self._begun)
            for shard, wanted in self._wanted.items()
        ]


class Rewind:
    """Answers leaders that ask where shards continue. Runs one reading at a time; spans that become wanted meanwhile
    are read by the next."""

    def __init__(
        self,
        source: BinlogSource,
        continuity: Continuity,
        resend: Callable[[Iterable[tuple[Content, int, Span]]], None],
        contents_of: Callable[[BinlogTransaction], Iterable[ShardContent]],
        position_at: Callable[[str, int], str],
        settings: RewindSettings,
        log: Logger,
    ) -> None:
        """``resend`` queues contents again, with their sizes: `DeliveryPath.resend`. ``contents_of`` returns a
        transaction's messages, touches and bulk invalidations, cut for relays. ``position_at`` returns the binlog
        position at a transaction number of a source."""
        self._source: Final = source
        self._continuity: Final = continuity
        self._resend: Final = resend
        self._contents_of: Final = contents_of
        self._position_at: Final = position_at
        self._settings: Final = settings
        self._log: Final = log
        self._wanted: dict[int, Span] = {}
        self._woken: Final = asyncio.Event()
        self.shards = 0
        """Shards whose messages were sent again."""
        self.failed_shards = 0
        """Shards whose messages could not be sent again."""
        self.transactions = 0
        """Transactions read again."""

    def request(self, spans: Iterable[Span]) -> None:
        """Answer the spans that need no reading at once, and have `run` read the others."""
        links: list[tuple[Content, int, Span]] = []
        for span in spans:
            link, again = self._continuity.answer(span)
            if link is not None:
                links.append((ShardMessages(link.shard, 0, ()), 0, link))
            if again is not None:
                before = self._wanted.get(again.shard)
                if before is None or before.source != again.source or before.after > again.after:
                    self._wanted[again.shard] = again
                self._woken.set()
        if links:
            self._resend(links)

    async def run(self) -> None:
        """Read the wanted spans again, until cancelled."""
        while True:
            self._woken.clear()
            while self._wanted:
                wanted, self._wanted = self._wanted, {}
                by_source: dict[str, dict[int, Span]] = {}
                for shard, span in wanted.items():
                    by_source.setdefault(span.source, {})[shard] = span
                for source, spans in by_source.items():
                    await self._read(source, spans)
            await self._woken.wait()

    async def _read(self, source: str, spans: dict[int, Span]) -> None:
        after = min(span.after for span in spans.values())
        until = max(span.number for span in spans.values())
        try:
            async with aclosing(self._source.batches(self._position_at(source, after))) as batches:
                async with asyncio.timeout(self._settings.seconds):
                    parts = await self._collect(batches, source, spans, until)
                # Resend before the reader is closed, which takes until the server's next heartbeat.
                self.shards += len(spans)
                self._log.info("binlog_reread", source=source, after=after, until=until, shards=len(spans),
                               parts=len(parts))  # fmt: skip
                self._resend(parts)
        except (TaoError, TimeoutError) as error:
            self.failed_shards += len(spans)
            reason = error.message if isinstance(error, TaoError) else f"not done in {self._settings.seconds} s"
            self._log.warning("binlog_not_reread", source=source, after=after, shards=len(spans), reason=reason)
            for span in spans.values():
                self._continuity.mark_unreadable(span)

    async def _collect(
        self, batches: AsyncIterable[Sequence[BinlogTransaction]], source: str, spans: dict[int, Span], until: int
    ) -> list[tuple[Content, int, Span]]:
        """Return all parts of the spans, or raise `NotReadAgain`: a fraction of them is of no use."""
        again = SpansAgain(spans)
        parts: list[tuple[Content, int, Span]] = []
        room_bytes = self._settings.max_bytes
        transactions = 0
        await self._source.current_position()
        async for batch in batches:
            for transaction in batch:
                position = self._continuity.source_position(transaction.gtid)
                if position is None or position[0] != source:
                    raise NotReadAgain(
                        f"{transaction.gtid or 'a transaction without a GTID'} belongs to another history"
                    )
                transactions += 1
                self.transactions += 1
                number = position[1]
                for shard, content, size in self._contents_of(transaction):
                    span = again.of_part(shard, number)
                    if span is not None:
                        room_bytes -= size
                        parts.append((_resendable(content), size, span))
                if room_bytes < 0 or transactions > self._settings.max_transactions:
                    raise NotReadAgain(
                        f"more than {self._settings.max_transactions} transactions (max_transactions) or "
                        f"{self._settings.max_bytes} bytes (max_bytes) to read again"
                    )
                if number >= until:
                    return parts + [(ShardMessages(span.shard, 0, ()), 0, span) for span in again.ends()]
        raise NotReadAgain("the binlog ended")


class NotReadAgain(TaoError):
    """The binlog cannot be read again as far as needed; subscribers start cold."""

    reason = "NOT_READ_AGAIN"


def _resendable(content: Content) -> Content:
    """Replace a touch by an invalidation: the key that was changed without a version has long been given one, so it is
    enough to drop it."""
    if not isinstance(content, Touch):
        return content
    dropped = (
        ObjectInvalidation(content.id, NEVER_WRITTEN)
        if content.kind is TouchKind.OBJECT
        else ListInvalidation(content.id, content.atype, NEVER_WRITTEN)
    )
    return ShardMessages(content.shard, 0, (dropped,))
