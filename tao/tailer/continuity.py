"""The binlog position that each shard's leaders have received, so that a new leader of a shard misses nothing.

Every part of a relay carries the range of positions that it covers (`tao.model.delivery.Span`). A leader that has just
taken over a shard, or has come back, asks where the shard continues, naming its own position. If no leader has received
anything after that position, an empty part answers it. Otherwise the binlog is read again (`tao.tailer.rewind`).

A history of transactions is named by the database, its version epoch, and the server that numbered them (in MariaDB's
GTIDs a domain and a server, in MySQL's a server). So transactions of a lost master are never mistaken for those of its
successor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from tao.model.delivery import Span
from tao.model.errors import OperatorError
from tao.replication.gtid import history_of


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

    def source_position(self, gtid: str) -> tuple[str, int] | None:
        """Return the ``(source, number)`` of a transaction, or None when no history counts it."""
        try:
            history, number = history_of(gtid.strip())
        except OperatorError:
            return None
        return f"{self._database}@{self._version_epoch()}:{history}", number

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
                spans[parts[shard]] = Span(shard, source, before.after, number - 1)
                spans.append(Span(shard, source, number - 1, number))
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
