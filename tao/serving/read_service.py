"""Serve a batch of reads: hits at once, misses as they are fetched.

A miss never delays a hit: the first answer carries what the cache has, and what is fetched follows under the same
request number, whatever is ready in one tick of the loop together.

A request of a hundred kilobytes can ask for gigabytes, or for a hundred thousand fetches. So a batch is bounded in
queries, its answer in bytes, and only some of its misses are fetched at a time, within its caller's share. A value that
does not fit the answer fails as ANSWER_FULL: the caller has the others by then, and asks again for less.

`answer_hits`, one synchronous pass over the columns of a batch, is the hottest loop of the system. It checks only what
an answer needs. Whether this server serves the shard, and whether the type exists, is checked for misses only: nothing
is cached of a closed shard or of an unknown type. Values that no query may carry are searched for once per column; such
a query counts as a miss, and the miss path rejects it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import inf
from typing import Final

from tao.cache import GraphCache
from tao.cache.answers import has_foreign_id, has_foreign_number, has_foreign_type
from tao.model.edge_block import mark_cut
from tao.model.errors import AnswerFull, DeadlineExceeded, TooLarge
from tao.model.graph import MAX_ID2_SET, MAX_TIME
from tao.model.ids import SHARD_SHIFT
from tao.schema.registry import Schema
from tao.serving.access import SERVERS, ReadCheck
from tao.serving.miss_answers import TOO_MANY_BYTES
from tao.serving.misses import Misses, ReadPolicy
from tao.serving.shares import WorkShares
from tao.serving.single_flight import SingleFlight
from tao.serving.traffic import Traffic
from tao.wire.convert import error_to_pb
from tao.wire.read_batch import (
    OPERATIONS,
    MissedQueries,
    OperationSizes,
    id1s_of,
    minimums_of,
    missed_queries,
    operation_sizes,
    operation_slots,
    shards_in,
)
from tao.wire.session import AnswerAtOnce, Reply
from tao.wire.v1 import session_pb2 as pb

try:
    from tao.serving.hit_batches_core import HitBatches
except ImportError:  # built without a compiler: every batch is for `ReadService.handle`
    HitBatches = None  # type: ignore[assignment, misc]


class ReadCounters:
    """The counters of queries, by operation in slot order. Metrics collect them when they are scraped."""

    __slots__ = ("failures", "hits", "misses")

    def __init__(self, failures: list[int]) -> None:
        """``failures`` is shared with the `Misses` that count in it."""
        self.hits = [0] * len(OPERATIONS)
        self.misses = [0] * len(OPERATIONS)
        self.failures = failures


class ReadService:
    """Serves `pb.ReadBatch` requests from one cache and from the fetches that fill it."""

    def __init__(
        self,
        cache: GraphCache,
        single_flight: SingleFlight,
        schema: Schema,
        policy: ReadPolicy,
        *,
        traffic: Traffic,
        shares: WorkShares | None = None,
    ) -> None:
        """``traffic`` samples the queries. ``shares`` starts misses, and the other costly work of this server."""
        self._cache: Final = cache
        self._version_epoch: Final = cache.version_epoch
        self._settings: Final = policy.bounds
        self._staleness_ms: Final = policy.staleness_ms
        self.traffic: Final = traffic
        self._access: Final = policy.access
        self.shares: Final = shares or WorkShares()
        self.misses: Final = Misses(single_flight, schema, policy, self.shares)
        self.counters: Final = ReadCounters(self.misses.failures)
        self.use_schema(schema)

    def use_schema(self, schema: Schema) -> None:
        """Use this schema from the next batch on."""
        self.misses.schema = schema
        self._limits = {atype.number: atype.limit for atype in schema.assocs}
        if HitBatches is not None:
            self._hit_batches = HitBatches(self._cache, self._limits, self._settings.max_part_bytes)

    def answer_at_once(self, request: bytes, caller: str, topology_version: int) -> AnswerAtOnce | None:
        """Return the answer to an encoded request, as far as it is cached; None when the request is for `handle`.

        ``topology_version`` is that of this server, ``caller`` the application that asks."""
        check = None
        if self._access is not None and (readers := self._access.readers) is not None:
            check = readers[caller]
        return self._answer_at_once(request, topology_version, check, for_fill=False)

    def fill_at_once(self, request: bytes, topology_version: int) -> AnswerAtOnce | None:
        """Do as `answer_at_once` for a cache that asks for itself. It checks what its own callers may read."""
        return self._answer_at_once(request, topology_version, None, for_fill=True)

    def _answer_at_once(
        self, request: bytes, topology_version: int, check: ReadCheck | None, *, for_fill: bool
    ) -> AnswerAtOnce | None:
        if HitBatches is None:
            return None
        traffic = self.traffic
        found = self._hit_batches.answer(
            request,
            topology_version,
            self._settings.max_queries,
            traffic.rates,
            check,
            for_fill,
        )
        if found is None:
            return None
        encoded, by_operation, slots, queries, minimums, hit_bytes = found
        sizes = tuple.__new__(OperationSizes, by_operation)  # in half the time of its constructor
        traffic.left -= sum(sizes)
        if traffic.left <= 0:
            traffic.sample(pb.Request.FromString(request).read, sizes, check)
        if not slots:
            self._count(self.counters.hits, sizes)
            return tuple.__new__(AnswerAtOnce, (encoded, None))  # in half the time of its constructor
        if encoded:
            self._count_each(sizes, slots, ())
        else:  # nothing is cached of it
            self._count(self.counters.misses, sizes)
        missed = MissedQueries(slots, iter(queries), minimums)
        return AnswerAtOnce(encoded, partial(self._answer_missed, sizes, missed, hit_bytes, check))

    def _answer_missed(
        self,
        sizes: OperationSizes,
        missed: MissedQueries,
        hit_bytes: int,
        check: ReadCheck | None,
        request: pb.Request,
        reply: Reply,
    ) -> None:
        if check is not None:
            check = check.asked_by(reply.peer)
        self.misses.answer(request, sizes, missed, reply, self._settings.max_answer_bytes - hit_bytes, check)

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Answer the hits now, and the misses when they have been fetched."""
        batch = request.read
        if not request.deadline_ms:
            raise DeadlineExceeded("the request's deadline is zero: nothing can be read in no time")
        sizes = operation_sizes(batch)
        queries = sum(sizes)
        settings, access = self._settings, self._access
        if queries > settings.max_queries:
            raise TooLarge(f"{queries} queries in one batch; send at most {settings.max_queries} at a time")
        check = None
        if access is not None and (readers := access.readers) is not None:
            peer = reply.peer
            check = access.reader(request, peer) if peer.role in SERVERS else readers[peer.caller]
            if check is not None:
                check = check.asked_by(peer)
        traffic = self.traffic
        traffic.left -= queries
        if traffic.left <= 0:
            traffic.sample(batch, sizes, check)
        if batch.critical and queries:
            # No pass over the slots before the caller's share has room for them.
            self._count(self.counters.misses, sizes)
            missed = missed_queries(batch, sizes, range(queries))
            self.misses.answer(request, sizes, missed, reply, settings.max_answer_bytes, check)
            return
        minimums = minimums_of(batch)
        values = answer_hits(self._cache, batch, sizes, self._limits, settings.max_answer_bytes, minimums, check)
        if batch.max_staleness_ms:
            if check is not None:
                check.check_bound(request)
            self._leave_out_stale(batch, values)
        if minimums and batch.known_slots:
            leave_out_known(batch, values, minimums)
        if len(values) == queries and _size_of_hits(values) <= settings.max_part_bytes:
            # Without slots the values answer slots 0, 1, 2, … in order.
            answer = pb.Answer()
            answer.read.values.extend(values)  # type: ignore[arg-type]  # none is None, or they had no size
            if batch.for_fill:
                self._add_epochs(answer.read, shards_in(batch))
            elif traffic.rates.hot:
                traffic.add_hot_items(batch, sizes, answer.read, values, check)
            reply.send(answer)
            self._count(self.counters.hits, sizes)
            return
        self._answer_in_parts(request, sizes, values, reply, check)

    def _leave_out_stale(self, batch: pb.ReadBatch, values: list[bytes | None]) -> None:
        stale = {shard for shard in shards_in(batch) if self._staleness_ms(shard) > batch.max_staleness_ms}
        if stale:
            leave_out(batch, values, stale)

    def _answer_in_parts(
        self,
        request: pb.Request,
        sizes: OperationSizes,
        values: list[bytes | None],
        reply: Reply,
        check: ReadCheck | None,
    ) -> None:
        """Send the hits in messages of bounded size, and then fetch the misses."""
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
                self.traffic.add_hot_items(batch, sizes, answer.read, values, check)
            reply.send(answer)
        if beyond:
            answer = pb.Answer(more=bool(missed))
            answer.read.failed_slots.extend(beyond)
            answer.read.errors.extend([error_to_pb(AnswerFull(TOO_MANY_BYTES))] * len(beyond))
            reply.send(answer)
        self._count_each(sizes, missed, beyond)
        if missed:
            room = settings.max_answer_bytes - sum(map(len, hits[:sent]))
            self.misses.answer(request, sizes, missed_queries(batch, sizes, missed), reply, room, check)

    def _add_epochs(self, answer: pb.ReadAnswer, shards: Collection[int]) -> None:
        answer.epoch_shards.extend(shards)
        answer.version_epochs.extend(map(self._version_epoch, shards))

    def _count_each(self, sizes: OperationSizes, missed: Sequence[int], unsent: Sequence[int]) -> None:
        """Count the queries of a batch as misses, as failures for lack of room, and as hits."""
        counters = self.counters
        for operation, start, end in operation_slots(sizes):
            not_there = bisect_left(missed, end) - bisect_left(missed, start)
            not_sent = bisect_left(unsent, end) - bisect_left(unsent, start)
            counters.misses[operation] += not_there
            counters.failures[operation] += not_sent
            counters.hits[operation] += end - start - not_there - not_sent

    def _count(self, counters: list[int], sizes: OperationSizes) -> None:
        for operation, size in enumerate(sizes):
            if size:
                counters[operation] += size


def _size_of_hits(values: list[bytes | None]) -> float:
    """Return the bytes of all hits; infinite when not all values are hits."""
    try:
        return sum(map(len, values))  # type: ignore[arg-type]  # for None, len raises
    except TypeError:
        return inf


def answer_hits(
    cache: GraphCache,
    batch: pb.ReadBatch,
    sizes: OperationSizes,
    limits: Mapping[int, int],
    max_list_bytes: int,
    minimums: Mapping[int, int],
    check: ReadCheck | None = None,
) -> list[bytes | None]:
    """Return one value per slot, None for a miss.

    ``limits`` maps association types to the bound on a query's limit. Parts of lists are copied: the values end with
    the one that exceeds ``max_list_bytes`` in total. ``minimums`` is `minimums_of` the batch. ``check`` makes misses of
    what the caller may not read.
    """
    values: list[bytes | None] = []
    objects, counts, ranges, windows, gets, exists = sizes
    if objects:
        ids = batch.obj_ids[:]
        values.extend(cache.objects(ids))
        if minimums:
            leave_out_older(values, minimums)
        if check is not None and check.otypes is not None and has_foreign_type(values, check.otypes):
            check.hide(ids, values, minimums)
    if counts:
        count = cache.count
        atypes = batch.count_atypes[:]
        for slot, (id1, atype) in enumerate(zip(batch.count_id1s[:], atypes, strict=True), objects):
            values.append(count(id1, atype, minimums.get(slot, 0) if minimums else 0))
        if check is not None and check.atypes is not None and has_foreign_number(atypes, check.atypes):
            check.leave_out(atypes, values, objects)
    room = max_list_bytes
    if ranges:
        room = _answer_ranges(cache, batch, limits, minimums, values, room, check)
    if windows and room >= 0:
        room = _answer_windows(cache, batch, limits, minimums, values, room, check)
    if gets and room >= 0:
        room = _answer_gets(cache, batch, minimums, values, room, check)
    if exists and room >= 0:
        _answer_exists(cache, batch, minimums, values, check)
    return values


def _answer_ranges(
    cache: GraphCache,
    batch: pb.ReadBatch,
    limits: Mapping[int, int],
    minimums: Mapping[int, int],
    values: list[bytes | None],
    room: int,
    check: ReadCheck | None,
) -> int:
    """Append the values of the range queries. Returns the bytes left; below 0 the rest of the batch has no values."""
    first = len(values)
    append, bound_of, get_range = values.append, limits.get, cache.range
    positions, atypes = batch.range_positions[:], batch.range_atypes[:]
    columns = zip(batch.range_id1s[:], atypes, positions, batch.range_limits[:], strict=True)
    for slot, (id1, atype, pos, limit) in enumerate(columns, first):
        minimum = minimums.get(slot, 0) if minimums else 0
        if limit <= (bound := bound_of(atype, limit)):
            value = get_range(id1, atype, pos, limit, minimum)
        else:
            value = get_range(id1, atype, pos, bound, minimum)
            value = mark_cut(value) if value is not None else None
        append(value)
        if value is not None:
            room -= len(value)
            if room < 0:
                break
    if max(positions) > MAX_TIME:
        _unanswer(values, first, [pos > MAX_TIME for pos in positions])
    if check is not None and check.atypes is not None and has_foreign_number(atypes, check.atypes):
        check.leave_out(atypes, values, first)
    return room


def _answer_windows(
    cache: GraphCache,
    batch: pb.ReadBatch,
    limits: Mapping[int, int],
    minimums: Mapping[int, int],
    values: list[bytes | None],
    room: int,
    check: ReadCheck | None,
) -> int:
    """Append the values of the time range queries. Returns the bytes left, as `_answer_ranges` does."""
    first = len(values)
    id1s, highs, lows = batch.time_range_id1s[:], batch.time_range_highs[:], batch.time_range_lows[:]
    starts, atypes = batch.time_range_starts[:] or [0] * len(id1s), batch.time_range_atypes[:]
    columns = zip(id1s, atypes, highs, lows, batch.time_range_limits[:], starts, strict=True)
    for slot, (id1, atype, high, low, limit, start) in enumerate(columns, first):
        bound = limits.get(atype, limit)
        value = cache.time_range(id1, atype, high, low, min(limit, bound), minimums.get(slot, 0), start)
        if value is not None:
            if limit > bound:
                value = mark_cut(value)
            room -= len(value)
        values.append(value)
        if room < 0:
            break
    if max(highs) > MAX_TIME or max(lows) > MAX_TIME:
        _unanswer(values, first, [max(bounds) > MAX_TIME for bounds in zip(highs, lows, strict=True)])
    if check is not None and check.atypes is not None and has_foreign_number(atypes, check.atypes):
        check.leave_out(atypes, values, first)
    return room


def _answer_gets(
    cache: GraphCache,
    batch: pb.ReadBatch,
    minimums: Mapping[int, int],
    values: list[bytes | None],
    room: int,
    check: ReadCheck | None,
) -> int:
    """Append the values of the queries for edges. Returns the bytes left, as `_answer_ranges` does."""
    first = len(values)
    all_id2s, sizes = batch.get_id2s[:], batch.get_id2_counts[:]
    highs, lows = batch.get_highs[:], batch.get_lows[:]
    get_edge, atypes = cache.edge, batch.get_atypes[:]
    start = 0
    columns = zip(batch.get_id1s[:], atypes, sizes, highs, lows, strict=True)
    for slot, (id1, atype, size, high, low) in enumerate(columns, first):
        minimum = minimums.get(slot, 0) if minimums else 0
        value = None
        if size == 1:
            value = get_edge(id1, atype, all_id2s[start], high, low, minimum)
        elif size <= MAX_ID2_SET:
            id2s = all_id2s if size == len(all_id2s) else all_id2s[start : start + size]
            found = cache.edges(id1, atype, id2s, high, low, minimum)
            value = found.block if found is not None and not found.missing else None
        start += size
        values.append(value)
        if value is None:
            continue
        room -= len(value)
        if room < 0:
            break
    if max(highs) > MAX_TIME or max(lows) > MAX_TIME:
        _unanswer(values, first, [high > MAX_TIME or low > MAX_TIME for high, low in zip(highs, lows, strict=True)])
    if has_foreign_id(all_id2s):
        ends = list(accumulate(sizes, initial=0))
        _unanswer(values, first, [has_foreign_id(all_id2s[start:end]) for start, end in pairwise(ends)])
    if check is not None and check.atypes is not None and has_foreign_number(atypes, check.atypes):
        check.leave_out(atypes, values, first)
    return room


def _answer_exists(
    cache: GraphCache,
    batch: pb.ReadBatch,
    minimums: Mapping[int, int],
    values: list[bytes | None],
    check: ReadCheck | None,
) -> None:
    """Append the values of the queries whether an edge exists. They take a byte each, which needs no bound."""
    first = len(values)
    id1s, atypes, id2s = batch.exist_id1s[:], batch.exist_atypes[:], batch.exist_id2s[:]
    if minimums:
        for slot, (id1, atype, id2) in enumerate(zip(id1s, atypes, id2s, strict=True), first):
            values.append(cache.exists(id1, atype, id2, minimums.get(slot, 0)))
    else:
        values.extend(cache.exist_all(id1s, atypes, id2s))
    if has_foreign_id(id2s):
        _unanswer(values, first, [has_foreign_id([id2]) for id2 in id2s])
    if check is not None and check.atypes is not None and has_foreign_number(atypes, check.atypes):
        check.leave_out(atypes, values, first)


def _unanswer(values: list[bytes | None], first: int, wrong: Sequence[bool]) -> None:
    """Turn the answers of invalid queries into misses; ``wrong`` begins with slot ``first``."""
    for slot, is_wrong in zip(range(first, len(values)), wrong, strict=False):
        if is_wrong:
            values[slot] = None


def leave_out(batch: pb.ReadBatch, values: list[bytes | None], shards: Collection[int]) -> None:
    """Turn the answers of these shards into misses."""
    # There may be fewer values than slots.
    _unanswer(values, 0, [id1 >> SHARD_SHIFT in shards for id1 in id1s_of(batch)])


def leave_out_older(values: list[bytes | None], minimums: Mapping[int, int]) -> None:
    """Turn the answers that are older than the version that their slot asks for into misses."""
    for slot, minimum in minimums.items():
        value = values[slot] if slot < len(values) else None
        if value is not None and int.from_bytes(value[:8], "little") < minimum:
            values[slot] = None


def leave_out_known(batch: pb.ReadBatch, values: list[bytes | None], versions: Mapping[int, int]) -> None:
    """Empty the answers that the client holds already, at just the version that it named."""
    for slot in batch.known_slots:
        value = values[slot] if slot < len(values) else None
        if value and int.from_bytes(value[:8], "little") == versions.get(slot):
            values[slot] = b""


def runs_within(values: Sequence[bytes], max_run_bytes: int, max_bytes: int) -> list[tuple[int, int]]:
    """Return runs ``(start, end)`` of values, each of at most ``max_run_bytes`` or of one larger value, until
    ``max_bytes`` are used. The first value is always in a run: sending it shows whether it fits a message."""
    runs: list[tuple[int, int]] = []
    start = in_run = total = 0
    for at, size in enumerate(map(len, values)):
        if at and total + size > max_bytes:
            runs.append((start, at))
            return runs
        if at > start and in_run + size > max_run_bytes:
            runs.append((start, at))
            start, in_run = at, 0
        in_run += size
        total += size
    if start < len(values):
        runs.append((start, len(values)))
    return runs
