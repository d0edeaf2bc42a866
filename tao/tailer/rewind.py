"""Read the binlog again, for a leader that has taken over shards and lacks messages that its subscribers have missed.

Another leader, which is gone, had acknowledged these messages. A second reader goes back to the position of the
subscriber that is furthest behind and reads up to the acknowledged position; only the wanted shards are sent again. The
reading is bounded in time, transactions and memory. Beyond these bounds a cold start is cheaper: the leader waits no
longer than its settings say and then resets its subscribers. The first reader continues meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Final

from tao.model.changes import ListInvalidation, ObjectInvalidation, ShardMessages
from tao.model.delivery import Span
from tao.model.errors import TaoError
from tao.model.relay import TouchKind
from tao.model.versions import NEVER_WRITTEN
from tao.observability.logs import Logger
from tao.tailer.binlog import BinlogSource, BinlogTransaction
from tao.tailer.continuity import Continuity
from tao.tailer.delivery_path import DeliveryPath
from tao.tailer.leader_outbox import Content, ShardContent
from tao.tailer.settings import RewindSettings


class Rewind:
    """Answers leaders that ask where shards continue. Runs one reading at a time; spans that become wanted meanwhile
    are read by the next."""

    def __init__(
        self,
        source: BinlogSource,
        continuity: Continuity,
        delivery: DeliveryPath,
        contents_of: Callable[[BinlogTransaction], Iterable[ShardContent]],
        position_at: Callable[[str, int], str],
        settings: RewindSettings,
        log: Logger,
    ) -> None:
        """``contents_of`` returns a transaction's messages, touches and bulk invalidations, cut for relays.
        ``position_at`` returns the binlog position at a transaction number of a source."""
        self._source: Final = source
        self._continuity: Final = continuity
        self._delivery: Final = delivery
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
            self._delivery.resend(links)

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
                self._delivery.resend(parts)
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
        reached = {shard: span.after for shard, span in spans.items()}
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
                    if shard in spans and reached[shard] < number <= spans[shard].number:
                        room_bytes -= size
                        # The empty part that is appended last for each shard covers the rest of the wanted span.
                        span = Span(shard, source, reached[shard], number - 1, more=True)
                        parts.append((_resendable(content), size, span))
                        reached[shard] = number - 1
                if room_bytes < 0 or transactions > self._settings.max_transactions:
                    raise NotReadAgain(
                        f"more than {self._settings.max_transactions} transactions (max_transactions) or "
                        f"{self._settings.max_bytes} bytes (max_bytes) to read again"
                    )
                if number >= until:
                    return parts + [
                        (ShardMessages(shard, 0, ()), 0, Span(shard, source, reached[shard], span.number))
                        for shard, span in spans.items()
                    ]
        raise NotReadAgain("the binlog ended")


class NotReadAgain(TaoError):
    """The binlog cannot be read again as far as needed; subscribers start cold."""

    reason = "NOT_READ_AGAIN"


def _resendable(content: Content) -> Content:
    """Replace a touch by an invalidation: the key that was changed without a version has long been given one, so it is
    enough to drop it."""
    if isinstance(content, ShardMessages | int):
        return content
    dropped = (
        ObjectInvalidation(content.id, NEVER_WRITTEN)
        if content.kind is TouchKind.OBJECT
        else ListInvalidation(content.id, content.atype, NEVER_WRITTEN)
    )
    return ShardMessages(content.shard, 0, (dropped,))
