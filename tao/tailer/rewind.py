"""The binlog read again, for a leader that has taken shards over and lacks what its subscribers were not told (§7).

The messages were told to another leader, which acknowledged them and is gone. A second reader goes back to where the
oldest subscriber is and comes forward to what was acknowledged; only the shards asked for are told of. It is bounded in
time, transactions and memory: beyond that a cold start is cheaper, and the leader, which waits no longer than it says
in its settings, makes it one. The first reader goes on meanwhile.
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
from tao.planning.row_events import Translated
from tao.tailer.binlog import BinlogSource, BinlogTransaction
from tao.tailer.continuity import Continuity
from tao.tailer.delivery_path import DeliveryPath
from tao.tailer.relay_parts import Content, contents_of
from tao.tailer.settings import DeliverySettings, RewindSettings


class Rewind:
    """Answers what leaders want to know. One reading at a time; what is asked for meanwhile is in the next."""

    def __init__(
        self,
        source: BinlogSource,
        continuity: Continuity,
        delivery: DeliveryPath,
        meaning_of: Callable[[BinlogTransaction], Translated],
        rewound: Callable[[str, int], str],
        parts: DeliverySettings,
        settings: RewindSettings,
        log: Logger,
    ) -> None:
        """``rewound``: the position at transaction ``number`` of a source."""
        self._source: Final = source
        self._continuity: Final = continuity
        self._delivery: Final = delivery
        self._meaning_of: Final = meaning_of
        self._rewound: Final = rewound
        self._parts: Final = parts
        self._settings: Final = settings
        self._log: Final = log
        self._wanted: dict[int, Span] = {}
        self._woken: Final = asyncio.Event()
        self.shards = 0
        """Told again."""
        self.refused = 0
        """Could not be."""
        self.transactions = 0
        """Read again."""

    def wanted(self, spans: Iterable[Span]) -> None:
        """Say at once what needs no reading, and read the rest soon."""
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
            self._delivery.tell_again(links)

    async def run(self) -> None:
        """Until cancelled."""
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
            async with aclosing(self._source.batches(self._rewound(source, after))) as batches:
                async with asyncio.timeout(self._settings.seconds):
                    told = await self._collect(batches, source, spans, until)
                # Before the reader ends, which takes until the server says its next word.
                self.shards += len(spans)
                self._log.info(
                    "told_again", source=source, after=after, until=until, shards=len(spans), parts=len(told)
                )
                self._delivery.tell_again(told)
        except (TaoError, TimeoutError) as error:
            self.refused += len(spans)
            reason = error.message if isinstance(error, TaoError) else f"not done in {self._settings.seconds} s"
            self._log.warning("not_told_again", source=source, after=after, shards=len(spans), reason=reason)
            for span in spans.values():
                self._continuity.unreadable(span)

    async def _collect(
        self, batches: AsyncIterable[Sequence[BinlogTransaction]], source: str, spans: dict[int, Span], until: int
    ) -> list[tuple[Content, int, Span]]:
        """Everything, or an error: half of it is of no use."""
        reached = {shard: span.after for shard, span in spans.items()}
        told: list[tuple[Content, int, Span]] = []
        room_bytes = self._settings.max_bytes
        transactions = 0
        await self._source.current_position()
        async for batch in batches:
            for transaction in batch:
                place = self._continuity.place_of(transaction.gtid)
                if place is None or place[0] != source:
                    raise NotReadAgain(f"{transaction.gtid or 'a transaction without a GTID'} is of another history")
                transactions += 1
                self.transactions += 1
                number = place[1]
                for shard, content, size in contents_of(self._meaning_of(transaction), self._parts):
                    if shard in spans and reached[shard] < number <= spans[shard].number:
                        room_bytes -= size
                        # The last one of a shard reaches to the end of what was asked for.
                        span = Span(shard, source, reached[shard], number - 1, more=True)
                        told.append((_told_again(content), size, span))
                        reached[shard] = number - 1
                if room_bytes < 0 or transactions > self._settings.max_transactions:
                    raise NotReadAgain(f"it is more than {self._settings.max_transactions} transactions or "
                                       f"{self._settings.max_bytes} bytes")  # fmt: skip
                if number >= until:
                    return told + [
                        (ShardMessages(shard, 0, ()), 0, Span(shard, source, reached[shard], span.number))
                        for shard, span in spans.items()
                    ]
        raise NotReadAgain("the binlog ended")


class NotReadAgain(TaoError):
    """A reading that has to be given up; subscribers start cold."""

    reason = "NOT_READ_AGAIN"


def _told_again(content: Content) -> Content:
    """A key that someone else changed has been given its version long ago: to drop it is enough."""
    if isinstance(content, ShardMessages | int):
        return content
    dropped = (
        ObjectInvalidation(content.id, NEVER_WRITTEN)
        if content.kind is TouchKind.OBJECT
        else ListInvalidation(content.id, content.atype, NEVER_WRITTEN)
    )
    return ShardMessages(content.shard, 0, (dropped,))
