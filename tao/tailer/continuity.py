"""What each shard's leader was told of the binlog, so that nothing is missed when another one goes on (DESIGN.md §7).

Every part of a relay says what it is everything of, from where to where (`tao.model.delivery.Span`). A leader that has
just got a shard, or has come back, asks where that goes on. When nobody has been told anything after the position that
it names, saying so is enough; when somebody has, it is read again (`tao.tailer.rewind`).

A history is named by the database, its version epoch, and whoever numbered the transactions (in MariaDB's GTIDs a
domain and a server, in MySQL's a server): so what a lost master numbered is never mistaken for its successor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from tao.model.delivery import Span
from tao.model.errors import OperatorError
from tao.storage.gtid import history_of


class _Shard(msgspec.Struct, gc=False):
    """``source`` is its history after ``since``, before which nothing can be read again; ``queued`` and
    ``acknowledged`` are the newest transactions."""

    source: str
    since: int
    queued: int
    acknowledged: int


class Continuity:
    """Of all shards of one database. Memory: an entry for each that has changed."""

    def __init__(self, database: str, version_epoch: Callable[[], int], holds: Callable[[int], bool]) -> None:
        """``holds``: whether the shard is the database's."""
        self._database: Final = database
        self._holds: Final = holds
        self._version_epoch: Final = version_epoch
        self._begun: dict[str, int] = {}
        self._latest = ("", 0)
        self._broken_after: dict[int, tuple[str, int]] = {}
        self._shards: Final[dict[int, _Shard]] = {}

    def begin(self, position: str) -> None:
        """Reading begins there, all before it is acknowledged, and all after it is told from now on."""
        self._begun = dict(filter(None, map(self.place_of, position.split(","))))
        self._shards.clear()
        self._broken_after.clear()

    def place_of(self, gtid: str) -> tuple[str, int] | None:
        """``(source, number)``, or None for what no history counts."""
        try:
            history, number = history_of(gtid.strip())
        except OperatorError:
            return None
        return f"{self._database}@{self._version_epoch()}:{history}", number

    def proven(self, gtid: str) -> tuple[str, int]:
        """What a proof in this transaction proves by number."""
        self._latest = self.place_of(gtid) or ("", 0)
        if self._latest[0]:
            self._begun.setdefault(self._latest[0], self._latest[1] - 1)
        return self._latest

    def spans_of(self, gtid: str, shards: Iterable[int]) -> list[Span]:
        """For the parts of a transaction in their order, by their shards. Only the last part of a shard reaches to the
        transaction: one that was told half of it has not been told it."""
        place = self.place_of(gtid)
        if place is None:
            return [self._broken(shard) for shard in shards]
        source, number = place
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
            # What the process before this one told is in the binlog, too.
            begun = min(self._begun[source], number - 1)
            known = self._shards[shard] = _Shard(source, 0, begun, begun)
        elif known.source != source or known.queued >= number:
            known = self._shards[shard] = _Shard(source, number - 1, number - 1, number - 1)
        return known

    def _broken(self, shard: int) -> Span:
        self._shards[shard] = _Shard("", 0, 0, 0)
        self._broken_after[shard] = self._latest
        return Span(shard, "", 0, 0)

    def acknowledged(self, span: Span) -> None:
        """A leader has it."""
        known = self._shards.get(span.shard)
        if known is not None and known.source == span.source:
            known.acknowledged = max(known.acknowledged, span.number)

    def answer(self, wanted: Span) -> tuple[Span | None, Span | None]:
        """What to say at once, and what has to be read again before anything can be said. Neither: what is queued says
        it, or nothing is known yet."""
        shard = wanted.shard
        if not self._holds(shard):
            return None, None  # another tailer knows; what this one does not read may have been told by that
        known = self._shards.get(shard)
        if known is None:
            # Nothing has been told of it since reading began.
            source = wanted.source if wanted.source in self._begun else self._latest[0]
            begun = self._begun.get(source)
            if begun is not None and source == wanted.source and wanted.number < begun:
                return None, Span(shard, source, wanted.number, begun)
            return (None if begun is None else Span(shard, source, begun, begun)), None
        if not known.source:
            source, number = self._latest
            if not source or self._latest == self._broken_after[shard]:
                return None, None
            # What no position counts lies before the newest heartbeat, and its part is told before what is said here.
            known = self._shards[shard] = _Shard(source, number, number, number)
        told = known.acknowledged
        if known.source == wanted.source and known.since <= wanted.number < told:
            return None, Span(shard, wanted.source, wanted.number, told)
        if known.queued > told:
            return None, None
        return Span(shard, known.source, told, told), None

    def unreadable(self, span: Span) -> None:
        """What was told of the shard cannot be read again."""
        known = self._shards.get(span.shard)
        if known is None:
            self._shards[span.shard] = _Shard(span.source, span.number, span.number, span.number)
        else:
            known.since = known.acknowledged
