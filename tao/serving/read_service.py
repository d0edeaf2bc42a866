"""A batch of reads, from request to answers: hits at once, misses as they come (DESIGN.md §5, §11).

A miss never holds up a hit: what the cache has leaves in the first answer, what was fetched follows under the same
number, whatever is ready in one tick of the loop together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from tao.cache import GraphCache
from tao.model.errors import DeadlineExceeded, InternalError, TaoError
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import EdgesQuery, Fetched, ObjectQuery, Query, RangeQuery, TimeRangeQuery
from tao.schema.registry import Schema
from tao.serving.fills import Fills
from tao.serving.read_batch import OPERATIONS, BatchQueries, answer_hits, mark_cut, operation_sizes
from tao.wire.convert import error_to_pb
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb


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
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """``admit``: shard → why this server does not serve it, or None. ``version_epoch``: that of a shard."""
        self._cache: Final = cache
        self._fills: Final = fills
        self._admit: Final = admit
        self._version_epoch: Final = version_epoch
        self._spawn: Final = spawn
        self.counters: Final = ReadCounters()
        self.use_schema(schema)

    def use_schema(self, schema: Schema) -> None:
        """Serve by this schema from the next batch on."""
        self._schema = schema
        self._limits = {atype.number: atype.limit for atype in schema.assocs}

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Answer the hits now, and start a task for the rest."""
        batch = request.read
        if not request.deadline_ms:
            raise DeadlineExceeded("the request's deadline is zero: nothing can be read in no time")
        sizes = operation_sizes(batch)
        values: list[bytes | None]
        if batch.critical:
            values = [None] * sum(sizes)
            missed = len(values)
        else:
            values, missed = answer_hits(self._cache, batch, sizes, self._limits)
        answer = pb.Answer()
        if not missed:
            # No slots: the values answer 0, 1, 2, … in order.
            answer.read.values.extend(values)  # type: ignore[arg-type]  # none is None when none missed
            if batch.for_fill:
                self._add_epochs(answer.read, batch, sizes, range(len(values)))
            reply.send(answer)
            self._count(self.counters.hits, sizes)
            return
        hit_slots = [slot for slot, value in enumerate(values) if value is not None]
        if hit_slots:
            answer.more = True
            answer.read.slots.extend(hit_slots)
            answer.read.values.extend(values[slot] for slot in hit_slots)  # type: ignore[misc]  # not None by choice
            if batch.for_fill:
                self._add_epochs(answer.read, batch, sizes, hit_slots)
            reply.send(answer)
        missed_slots = [slot for slot, value in enumerate(values) if value is None]
        self._spawn(self._answer_misses(request, sizes, missed_slots, reply))

    async def _answer_misses(
        self, request: pb.Request, sizes: tuple[int, int, int, int, int], slots: list[int], reply: Reply
    ) -> None:
        batch = request.read
        queries = BatchQueries(batch, sizes)
        answers = _LateAnswers(reply, len(slots), batch.for_fill, self._version_epoch)
        counters = self.counters
        for operation, start, end in _operation_bounds(sizes):
            missed = sum(start <= slot < end for slot in slots)
            counters.misses[operation] += missed
            counters.hits[operation] += end - start - missed

        async def answer(slot: int) -> None:
            try:
                query = queries.query(slot)
                value = await self._answer_one(query, queries.minimums.get(slot, 0), critical=batch.critical)
                answers.value(slot, query, value)
            except TaoError as error:
                counters.failures[_operation_at(sizes, slot)] += 1
                answers.error(slot, error)

        tasks = [asyncio.ensure_future(answer(slot)) for slot in slots]
        try:
            async with asyncio.timeout(request.deadline_ms / 1000):
                await asyncio.gather(*tasks)
        except TimeoutError:
            late = DeadlineExceeded(f"not answered within the {request.deadline_ms} ms that the request had left")
            answers.error_rest(slots, late)
        except Exception as error:
            answers.error_rest(slots, InternalError(f"{type(error).__name__} while reading; see the server's log"))
            raise
        finally:
            for task in tasks:
                task.cancel()

    async def _answer_one(self, query: Query, minimum: int, *, critical: bool) -> Fetched:
        id1 = query.id if isinstance(query, ObjectQuery) else query.id1
        refusal = self._admit(id1 >> SHARD_SHIFT)
        if refusal is not None:
            raise refusal
        if isinstance(query, ObjectQuery):
            return await self._fills.answer(query, minimum, critical=critical)
        if isinstance(query, EdgesQuery) and not query.id2s:
            query = RangeQuery(query.id1, query.atype, 0, 0)
        bound = self._schema.atype(query.atype).limit
        cut: Query = query
        if isinstance(query, RangeQuery) and query.limit > bound:
            cut = RangeQuery(query.id1, query.atype, query.pos, bound)
        elif isinstance(query, TimeRangeQuery) and query.limit > bound:
            cut = TimeRangeQuery(query.id1, query.atype, query.high, query.low, bound)
        fetched = await self._fills.answer(cut, minimum, critical=critical)
        if cut is query:
            return fetched
        return Fetched(mark_cut(fetched.value), fetched.version_epoch, fetched.origin)

    def _add_epochs(
        self, answer: pb.ReadAnswer, batch: pb.ReadBatch, sizes: tuple[int, int, int, int, int], slots: Any
    ) -> None:
        queries = BatchQueries(batch, sizes)
        shards = {queries.shard(slot) for slot in slots}
        answer.epoch_shards.extend(shards)
        answer.version_epochs.extend(map(self._version_epoch, shards))

    def _count(self, counters: list[int], sizes: tuple[int, int, int, int, int]) -> None:
        for operation, size in enumerate(sizes):
            if size:
                counters[operation] += size


def _operation_bounds(sizes: tuple[int, int, int, int, int]) -> list[tuple[int, int, int]]:
    bounds, start = [], 0
    for operation, size in enumerate(sizes):
        if size:
            bounds.append((operation, start, start + size))
        start += size
    return bounds


def _operation_at(sizes: tuple[int, int, int, int, int], slot: int) -> int:
    return next(operation for operation, start, end in _operation_bounds(sizes) if start <= slot < end)


class _LateAnswers:
    """Collects what is ready within one tick of the loop into one answer per origin; the last one says so."""

    def __init__(self, reply: Reply, expected: int, for_fill: bool, version_epoch: Callable[[int], int]) -> None:
        self._reply = reply
        self._open = expected
        self._for_fill = for_fill
        self._version_epoch = version_epoch
        self._answered: set[int] = set()
        self._by_origin: dict[str, pb.Answer] = {}
        self._scheduled = False

    def value(self, slot: int, query: Query, fetched: Fetched) -> None:
        if slot in self._answered:
            return
        answer = self._of_origin(fetched.origin).read
        answer.slots.append(slot)
        answer.values.append(fetched.value)
        answer.missed_slots.append(slot)
        answer.served_by = fetched.origin
        if self._for_fill:
            shard = (query.id if isinstance(query, ObjectQuery) else query.id1) >> SHARD_SHIFT
            answer.epoch_shards.append(shard)
            answer.version_epochs.append(fetched.version_epoch)
        self._one_less(slot)

    def error(self, slot: int, error: TaoError) -> None:
        if slot in self._answered:
            return
        answer = self._of_origin("").read
        answer.failed_slots.append(slot)
        answer.errors.append(error_to_pb(error))
        self._one_less(slot)

    def error_rest(self, slots: list[int], error: TaoError) -> None:
        """The same error for every slot not answered yet."""
        for slot in slots:
            self.error(slot, error)

    def _of_origin(self, origin: str) -> pb.Answer:
        return self._by_origin.setdefault(origin, pb.Answer())

    def _one_less(self, slot: int) -> None:
        self._answered.add(slot)
        self._open -= 1
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        answers, self._by_origin = list(self._by_origin.values()), {}
        for index, answer in enumerate(answers, 1):
            answer.more = self._open > 0 or index < len(answers)
            self._reply.send(answer)
