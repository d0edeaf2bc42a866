"""A batch of reads, from request to answers: hits at once, misses as they come (DESIGN.md §5, §11).

A miss never holds up a hit: what the cache has leaves in the first answer, what was fetched follows under the same
number, whatever is ready in one tick of the loop together.

A request of a hundred kilobytes can ask for gigabytes, or for a hundred thousand fetches. So a batch is bounded in
queries, its answer in bytes, and few of its misses are fetched at a time. What does not go into the answer fails as
ANSWER_FULL: whoever asked has the rest by then, and asks again for less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection
from math import inf
from typing import Final

from tao.cache import GraphCache
from tao.model.errors import (
    AnswerFull,
    DeadlineExceeded,
    TaoError,
    TooLarge,
)
from tao.schema.registry import Schema
from tao.serving.batch_settings import BatchSettings
from tao.serving.fills import Fills
from tao.serving.late_answers import TOO_MANY_BYTES
from tao.serving.missed_slots import Misses
from tao.serving.read_batch import (
    OPERATIONS,
    answer_hits,
    leave_out,
    leave_out_known,
    minimums_of,
    operation_bounds,
    operation_sizes,
    runs_within,
    shards_in,
)
from tao.serving.traffic import Traffic
from tao.wire.convert import error_to_pb
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb


def _unknown_staleness(_: int) -> float:
    return inf


class ReadCounters:
    """Plain counters by operation, in slot order; collected when metrics are scraped."""

    __slots__ = ("failures", "hits", "misses")

    def __init__(self) -> None:
        self.hits = [0] * len(OPERATIONS)
        self.misses = [0] * len(OPERATIONS)
        self.failures = [0] * len(OPERATIONS)


class ReadService:
    """Serves `pb.ReadBatch` requests from one cache and its fills."""

    def __init__(
        self,
        cache: GraphCache,
        fills: Fills,
        schema: Schema,
        admit: Callable[[int], TaoError | None],
        version_epoch: Callable[[int], int],
        settings: BatchSettings | None = None,
        staleness_ms: Callable[[int], float] = _unknown_staleness,
        *,
        traffic: Traffic,
    ) -> None:
        """``admit``: shard → why this server does not serve it, or None. ``version_epoch``: that of a shard.
        ``staleness_ms``: how far behind its master the shard is here at most. ``traffic`` samples what is asked."""
        self._cache: Final = cache
        self._version_epoch: Final = version_epoch
        self._settings: Final = settings or BatchSettings()
        self._staleness_ms: Final = staleness_ms
        self.traffic: Final = traffic
        self.counters: Final = ReadCounters()
        self.misses: Final = Misses(fills, schema, admit, staleness_ms, self._settings, self.counters.failures)
        self.use_schema(schema)

    def use_schema(self, schema: Schema) -> None:
        """Serve by this schema from the next batch on."""
        self.misses.schema = schema
        self._limits = {atype.number: atype.limit for atype in schema.assocs}

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Answer the hits now, and the rest when it has come."""
        batch = request.read
        if not request.deadline_ms:
            raise DeadlineExceeded("the request's deadline is zero: nothing can be read in no time")
        sizes = operation_sizes(batch)
        queries = sum(sizes)
        settings = self._settings
        if queries > settings.max_queries:
            raise TooLarge(f"{queries} queries in one batch; send at most {settings.max_queries} at a time")
        traffic = self.traffic
        traffic.left -= queries
        if traffic.left <= 0:
            traffic.sample(batch, sizes)
        values: list[bytes | None]
        if batch.critical:
            values = [None] * queries
        else:
            minimums = minimums_of(batch)
            values = answer_hits(self._cache, batch, sizes, self._limits, settings.max_answer_bytes, minimums)
            if batch.max_staleness_ms:
                self._leave_out_stale(batch, values)
            if minimums and batch.known_slots:
                leave_out_known(batch, values, minimums)
            if len(values) == queries and _size_of_hits(values) <= settings.max_part_bytes:
                # No slots: the values answer 0, 1, 2, … in order.
                answer = pb.Answer()
                answer.read.values.extend(values)  # type: ignore[arg-type]  # none is None, or they had no size
                if batch.for_fill:
                    self._add_epochs(answer.read, shards_in(batch))
                elif traffic.rates.hot:
                    traffic.tell_hot(batch, sizes, answer.read)
                reply.send(answer)
                self._count(self.counters.hits, sizes)
                return
        self._answer_in_parts(request, sizes, values, reply)

    def _leave_out_stale(self, batch: pb.ReadBatch, values: list[bytes | None]) -> None:
        stale = {shard for shard in shards_in(batch) if self._staleness_ms(shard) > batch.max_staleness_ms}
        if stale:
            leave_out(batch, values, stale)

    def _answer_in_parts(
        self, request: pb.Request, sizes: tuple[int, int, int, int, int], values: list[bytes | None], reply: Reply
    ) -> None:
        """What is there, in messages of bounded size; then what is not."""
        batch, settings = request.read, self._settings
        slots = [slot for slot, value in enumerate(values) if value is not None]
        hits = [value for value in values if value is not None]
        missed = [slot for slot, value in enumerate(values) if value is None]
        runs = runs_within(hits, settings.max_part_bytes, settings.max_answer_bytes)
        sent = runs[-1][1] if runs else 0
        beyond = [*slots[sent:], *range(len(values), sum(sizes))]
        shards = shards_in(batch) if batch.for_fill and runs else ()
        for start, end in runs:
            answer = pb.Answer(more=bool(missed or beyond or end < sent))
            answer.read.slots.extend(slots[start:end])
            answer.read.values.extend(hits[start:end])
            self._add_epochs(answer.read, shards)
            if start == 0 and self.traffic.rates.hot and not batch.for_fill:
                self.traffic.tell_hot(batch, sizes, answer.read)
            reply.send(answer)
        if beyond:
            answer = pb.Answer(more=bool(missed))
            answer.read.failed_slots.extend(beyond)
            answer.read.errors.extend([error_to_pb(AnswerFull(TOO_MANY_BYTES))] * len(beyond))
            reply.send(answer)
        counters = self.counters
        for operation, start, end in operation_bounds(sizes):
            not_there = bisect_left(missed, end) - bisect_left(missed, start)
            unsent = bisect_left(beyond, end) - bisect_left(beyond, start)
            counters.misses[operation] += not_there
            counters.failures[operation] += unsent
            counters.hits[operation] += end - start - not_there - unsent
        if missed:
            room = settings.max_answer_bytes - sum(map(len, hits[:sent]))
            self.misses.answer(request, sizes, missed, reply, room)

    def _add_epochs(self, answer: pb.ReadAnswer, shards: Collection[int]) -> None:
        answer.epoch_shards.extend(shards)
        answer.version_epochs.extend(map(self._version_epoch, shards))

    def _count(self, counters: list[int], sizes: tuple[int, int, int, int, int]) -> None:
        for operation, size in enumerate(sizes):
            if size:
                counters[operation] += size


def _size_of_hits(values: list[bytes | None]) -> float:
    """Bytes; infinite when not all are hits."""
    try:
        return sum(map(len, values))  # type: ignore[arg-type]  # what a None does is the point: one pass tells both
    except TypeError:
        return inf
