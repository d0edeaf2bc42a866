"""The misses of a batch, answered side by side as they come, until all are or the request's time is over
(DESIGN.md §5).

One timer is set for all of them. Whoever asked may be gone before: then nothing more is begun for him, and what is
under way is left to those who joined it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from tao.model.errors import (
    AnswerFull,
    DeadlineExceeded,
    InternalError,
    StaleRead,
    TaoError,
    Unavailable,
    WriteLost,
)
from tao.model.graph import version_of
from tao.model.queries import EdgesQuery, Fetched, ObjectQuery, Query, RangeQuery, TimeRangeQuery, shard_of
from tao.routing.deadlines import work_seconds
from tao.schema.registry import Schema
from tao.serving.batch_settings import BatchSettings
from tao.serving.fills import Fills
from tao.serving.late_answers import TOO_MANY_BYTES, LateAnswers
from tao.serving.read_batch import BatchQueries, mark_cut, operation_at
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb

_LOST: Final = (
    "the write that the token stands for was lost with the master database that had acknowledged it, before a replica "
    "had it: do it again, or read without the token"
)


class Misses:
    """Those of all batches of a server."""

    def __init__(
        self,
        fills: Fills,
        schema: Schema,
        admit: Callable[[int], TaoError | None],
        staleness_ms: Callable[[int], float],
        settings: BatchSettings,
        failures: list[int],
    ) -> None:
        """As `tao.serving.read_service.ReadService`. ``failures``: by operation, counted here."""
        self.fills: Final = fills
        self.schema = schema
        self.admit: Final = admit
        self.staleness_ms: Final = staleness_ms
        self.settings: Final = settings
        self.failures: Final = failures
        self.call_later: Final = asyncio.get_running_loop().call_later
        self.too_stale = 0
        """Queries that asked for fresher data than there were known to be here."""

    def answer(
        self,
        request: pb.Request,
        sizes: tuple[int, int, int, int, int],
        slots: list[int],
        reply: Reply,
        room: int,
    ) -> None:
        """Answer these slots, now or later. ``room``: bytes of values that still go into the answer."""
        batch = request.read
        answers = LateAnswers(reply, len(slots), batch.for_fill, self.settings, room)
        try:
            seconds = work_seconds(request.deadline_ms)
        except DeadlineExceeded as refused:
            answers.error_rest(slots, refused)
        else:
            _MissedSlots(self, batch, sizes, slots, reply, answers).begin(seconds)


class _MissedSlots:
    """Those of one batch."""

    __slots__ = (
        "_answers",
        "_bound_ms",
        "_critical",
        "_for_fill",
        "_is_beginning",
        "_is_over",
        "_misses",
        "_queries",
        "_reply",
        "_sizes",
        "_slots",
        "_timer",
        "_under_way",
        "_waiting",
    )

    def __init__(
        self,
        misses: Misses,
        batch: pb.ReadBatch,
        sizes: tuple[int, int, int, int, int],
        slots: Sequence[int],
        reply: Reply,
        answers: LateAnswers,
    ) -> None:
        self._misses: Final = misses
        self._queries: Final = BatchQueries(batch, sizes)
        self._sizes: Final = sizes
        self._slots: Final = slots
        self._reply: Final = reply
        self._answers: Final = answers
        self._critical: Final = batch.critical
        self._bound_ms: Final = batch.max_staleness_ms
        self._for_fill: Final = batch.for_fill
        self._waiting = iter(slots)
        self._under_way = 0
        self._is_beginning = False
        self._is_over = False
        self._timer: asyncio.TimerHandle

    @property
    def gone(self) -> bool:
        return self._is_over or self._reply.closed

    def begin(self, seconds: float) -> None:
        """Work for so long."""
        self._timer = self._misses.call_later(seconds, self._expire)
        self._begin_some()

    def _begin_some(self) -> None:
        """As many as may be under way. What is answered at once comes back here, so it is no recursion."""
        self._is_beginning = True
        at_once = self._misses.settings.max_misses_at_once
        try:
            while self._under_way < at_once and not self.gone:
                slot = next(self._waiting, None)
                if slot is None:
                    break
                self._under_way += 1
                try:
                    self._begin(slot)
                except TaoError as refused:
                    self._done(slot, refused)
        except Exception as error:
            message = f"{type(error).__name__} while reading; see the server's log"
            self._end(InternalError(message))
            raise
        finally:
            self._is_beginning = False
        if not self._under_way:
            self._timer.cancel()

    def _begin(self, slot: int) -> None:
        misses = self._misses
        if self._answers.is_full:
            raise AnswerFull(TOO_MANY_BYTES)
        query = asked = self._queries.query(slot)
        shard = shard_of(query)
        refusal = misses.admit(shard)
        if refusal is not None:
            raise refusal
        if not isinstance(query, ObjectQuery):
            if isinstance(query, EdgesQuery) and not query.id2s:
                query = asked = RangeQuery(query.id1, query.atype, 0, 0)
            bound = misses.schema.atype(query.atype).limit
            if isinstance(query, RangeQuery | TimeRangeQuery) and query.limit > bound:
                asked = _cut(query, bound)
        critical, behind_ms = self._critical, 0.0
        if self._bound_ms and not critical:
            behind_ms = misses.staleness_ms(shard)
            if behind_ms > self._bound_ms:
                misses.too_stale += 1
                critical = True
            else:
                behind_ms = 0.0
        minimum = self._queries.minimums.get(slot, 0)
        missed = _MissedSlot(self, slot, minimum, query, is_cut=asked is not query, behind_ms=behind_ms)
        misses.fills.answer(asked, minimum, missed, critical=critical)

    def take(self, missed: _MissedSlot, answer: Fetched | TaoError) -> None:
        """What has become of one of them."""
        if self._is_over:
            return
        if isinstance(answer, TaoError):
            if missed.behind_ms and isinstance(answer, Unavailable | DeadlineExceeded):
                answer = _stale(missed, self._bound_ms, answer)
        # A cache that asks decides for its own readers: what it asks for is not what they ask for.
        elif missed.minimum and not self._for_fill and version_of(answer.value) < missed.minimum:
            answer = WriteLost(_LOST)
        else:
            if missed.is_cut:
                answer = Fetched(mark_cut(answer.value), answer.version_epoch, answer.origin)
            try:
                self._answers.value(missed.slot, missed.query, answer)
            except AnswerFull as full:
                answer = full
        self._done(missed.slot, answer)

    def _done(self, slot: int, answer: Fetched | TaoError) -> None:
        if isinstance(answer, TaoError):
            self._misses.failures[operation_at(self._sizes, slot)] += 1
            self._answers.error(slot, answer)
        self._under_way -= 1
        if not self._is_beginning:
            self._begin_some()

    def _expire(self) -> None:
        self._end(DeadlineExceeded("not answered within the time that the request had left"))

    def _end(self, error: TaoError) -> None:
        self._is_over = True
        self._timer.cancel()
        self._answers.error_rest(self._slots, error)


class _MissedSlot:
    """One of them: an `Asker`. ``behind_ms``: of its shard, where that is more than the batch accepts."""

    __slots__ = ("_slots", "behind_ms", "is_cut", "minimum", "query", "slot")

    def __init__(
        self, slots: _MissedSlots, slot: int, minimum: int, query: Query, *, is_cut: bool, behind_ms: float
    ) -> None:
        self._slots: _MissedSlots | None = slots
        self.slot: Final = slot
        self.minimum: Final = minimum
        self.query: Final = query
        self.is_cut: Final = is_cut
        self.behind_ms: Final = behind_ms

    @property
    def gone(self) -> bool:
        return self._slots is None or self._slots.gone

    def take(self, answer: Fetched | TaoError) -> None:
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.take(self, answer)


def _cut(query: RangeQuery | TimeRangeQuery, bound: int) -> Query:
    if isinstance(query, RangeQuery):
        return RangeQuery(query.id1, query.atype, query.pos, bound)
    return TimeRangeQuery(query.id1, query.atype, query.high, query.low, bound, query.below_id2)


def _stale(missed: _MissedSlot, bound_ms: int, error: TaoError) -> StaleRead:
    behind = "an unknown time" if missed.behind_ms == inf else f"up to {missed.behind_ms / 1000:.1f} s"
    return StaleRead(
        f"shard {shard_of(missed.query)} is behind its master by {behind} here, max_staleness_ms is {bound_ms}, and "
        f"the master could not be read: {error.message}"
    )
