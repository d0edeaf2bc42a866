"""The hits of a read batch: one synchronous pass over its columns (DESIGN.md §5: a hit is one synchronous call).

This is the hottest loop of the system. It checks only what the answer needs: whether a shard is this server's, or a
type exists, is asked of what was missed - a closed shard and an unknown type have nothing cached. What no query may
carry is looked for once per column; such a query counts as missed, so that it is refused whatever is cached.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final

from tao.cache import GraphCache
from tao.model.edge_block import LIMIT_CUT, header, with_flags
from tao.model.errors import InvalidArgument, TooLarge
from tao.model.graph import MAX_ID2_SET, MAX_TIME
from tao.model.ids import MAX_ID, SHARD_SHIFT
from tao.model.queries import CountQuery, EdgesQuery, ObjectQuery, Query, RangeQuery, TimeRangeQuery
from tao.wire.v1 import session_pb2 as pb

OPERATIONS: Final = ("obj_get", "assoc_count", "assoc_range", "assoc_time_range", "assoc_get")
"""Operations in slot order."""


_numbers = {field.name: field.number for field in pb.ReadBatch.DESCRIPTOR.fields}
_OBJ_IDS: Final = _numbers["obj_ids"]
_COUNT_ID1S: Final = _numbers["count_id1s"]
_RANGE_ID1S: Final = _numbers["range_id1s"]
_TIME_RANGE_ID1S: Final = _numbers["time_range_id1s"]
_BELOW_ID2S: Final = _numbers["time_range_below_id2s"]
_GET_ID1S: Final = _numbers["get_id1s"]
_GET_ID2S: Final = _numbers["get_id2s"]
_LAST_COLUMN: Final = _numbers["minimum_versions"]
_PARALLEL_COLUMNS: Final = {
    _numbers[first]: tuple(_numbers[name] for name in others.split())
    for first, others in {
        "obj_ids": "",
        "count_id1s": "count_atypes",
        "range_id1s": "range_atypes range_positions range_limits",
        "time_range_id1s": "time_range_atypes time_range_highs time_range_lows time_range_limits",
        "get_id1s": "get_atypes get_id2_counts get_highs get_lows",
        "minimum_slots": "minimum_versions",
    }.items()
}
"""First column of a group → the others, which are as long."""
_UNEVEN: Final = "the columns of a read batch differ in length: send one value per query in each column"


def operation_sizes(batch: pb.ReadBatch) -> tuple[int, int, int, int, int]:
    """How many queries of each operation, in slot order. Raises `InvalidArgument` when columns differ in length."""
    # A column that is merely looked at costs 0.15 µs to make, so only those that were sent are: a batch of one query
    # is served in half the time.
    sent = batch.ListFields()
    if len(sent) == 1 and sent[0][0].number == _OBJ_IDS:
        return len(sent[0][1]), 0, 0, 0, 0
    lengths = {number: len(column) for field, column in sent if (number := field.number) <= _LAST_COLUMN}
    length_of = lengths.get
    matched = 0
    for first, length in lengths.items():
        others = _PARALLEL_COLUMNS.get(first)
        if others is not None:
            for other in others:
                if length_of(other) != length:
                    raise InvalidArgument(_UNEVEN)
            matched += 1 + len(others)
    if _BELOW_ID2S in lengths:  # which may be left out
        if lengths[_BELOW_ID2S] != length_of(_TIME_RANGE_ID1S):
            raise InvalidArgument(_UNEVEN)
        matched += 1
    if _GET_ID2S in lengths or _GET_ID1S in lengths:
        if sum(batch.get_id2_counts) != length_of(_GET_ID2S, 0):
            raise InvalidArgument(_UNEVEN)
        matched += _GET_ID2S in lengths
    if matched != len(lengths):  # a column without the first of its group
        raise InvalidArgument(_UNEVEN)
    return (
        length_of(_OBJ_IDS, 0),
        length_of(_COUNT_ID1S, 0),
        length_of(_RANGE_ID1S, 0),
        length_of(_TIME_RANGE_ID1S, 0),
        length_of(_GET_ID1S, 0),
    )


def operation_bounds(sizes: tuple[int, int, int, int, int]) -> list[tuple[int, int, int]]:
    """Operation, its first slot, and the one after its last, of those that are asked for."""
    bounds, start = [], 0
    for operation, size in enumerate(sizes):
        if size:
            bounds.append((operation, start, start + size))
        start += size
    return bounds


def operation_at(sizes: tuple[int, int, int, int, int], slot: int) -> int:
    """The operation of a slot."""
    return next(operation for operation, start, end in operation_bounds(sizes) if start <= slot < end)


def minimums_of(batch: pb.ReadBatch) -> dict[int, int]:
    """Slot → lowest version that may answer it, for the slots that say so."""
    if not batch.minimum_slots:
        return {}
    return dict(zip(batch.minimum_slots, batch.minimum_versions, strict=True))


def mark_cut(value: bytes) -> bytes:
    """The block, flagged to say that the limit was above the type's bound."""
    return with_flags(value, header(value)[3] | LIMIT_CUT)


def answer_hits(
    cache: GraphCache,
    batch: pb.ReadBatch,
    sizes: tuple[int, int, int, int, int],
    limits: Mapping[int, int],
    max_list_bytes: int,
    minimums: Mapping[int, int],
) -> list[bytes | None]:
    """One value per slot, None where the cache cannot tell. ``limits``: association type → bound on a limit. Parts of
    lists are copies: with those that go beyond ``max_list_bytes`` in all, the values end. ``minimums``:
    `minimums_of` it."""
    values: list[bytes | None] = []
    objects, counts, ranges, windows, gets = sizes
    if objects:
        if minimums:
            get_object = cache.object
            for slot, object_id in enumerate(batch.obj_ids):
                values.append(get_object(object_id, minimums.get(slot, 0)))
        else:
            values.extend(cache.objects(batch.obj_ids[:]))
    if counts:
        count = cache.count
        for slot, (id1, atype) in enumerate(zip(batch.count_id1s[:], batch.count_atypes[:], strict=True), objects):
            values.append(count(id1, atype, minimums.get(slot, 0) if minimums else 0))
    room = max_list_bytes
    if ranges:
        room = _answer_ranges(cache, batch, limits, minimums, values, room)
    if windows and room >= 0:
        room = _answer_windows(cache, batch, limits, minimums, values, room)
    if gets and room >= 0:
        _answer_gets(cache, batch, minimums, values, room)
    return values


def _answer_ranges(
    cache: GraphCache,
    batch: pb.ReadBatch,
    limits: Mapping[int, int],
    minimums: Mapping[int, int],
    values: list[bytes | None],
    room: int,
) -> int:
    """Returns the bytes left; below 0 the rest of the batch has no values."""
    first = len(values)
    append, bound_of, get_range = values.append, limits.get, cache.range
    positions = batch.range_positions[:]
    columns = zip(batch.range_id1s[:], batch.range_atypes[:], positions, batch.range_limits[:], strict=True)
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
    return room


def _answer_windows(
    cache: GraphCache,
    batch: pb.ReadBatch,
    limits: Mapping[int, int],
    minimums: Mapping[int, int],
    values: list[bytes | None],
    room: int,
) -> int:
    """As `_answer_ranges`."""
    first = len(values)
    id1s, highs, lows = batch.time_range_id1s[:], batch.time_range_highs[:], batch.time_range_lows[:]
    below = batch.time_range_below_id2s[:] or [0] * len(id1s)
    columns = zip(id1s, batch.time_range_atypes[:], highs, lows, batch.time_range_limits[:], below, strict=True)
    for slot, (id1, atype, high, low, limit, below_id2) in enumerate(columns, first):
        bound = limits.get(atype, limit)
        value = cache.time_range(id1, atype, high, low, min(limit, bound), minimums.get(slot, 0), below_id2)
        if value is not None:
            if limit > bound:
                value = mark_cut(value)
            room -= len(value)
        values.append(value)
        if room < 0:
            break
    if max(highs) > MAX_TIME or max(lows) > MAX_TIME or max(below) > MAX_ID:
        bounds = zip(highs, lows, below, strict=True)
        _unanswer(values, first, [max(high, low) > MAX_TIME or id2 > MAX_ID for high, low, id2 in bounds])
    return room


def _answer_gets(
    cache: GraphCache,
    batch: pb.ReadBatch,
    minimums: Mapping[int, int],
    values: list[bytes | None],
    room: int,
) -> None:
    first = len(values)
    all_id2s, sizes = batch.get_id2s[:], batch.get_id2_counts[:]
    highs, lows = batch.get_highs[:], batch.get_lows[:]
    get_edge = cache.edge
    start = 0
    columns = zip(batch.get_id1s[:], batch.get_atypes[:], sizes, highs, lows, strict=True)
    for slot, (id1, atype, size, high, low) in enumerate(columns, first):
        minimum = minimums.get(slot, 0) if minimums else 0
        value = None
        if size == 1:
            value = get_edge(id1, atype, all_id2s[start], high, low, minimum)
        elif size <= MAX_ID2_SET:
            found = cache.edges(id1, atype, all_id2s[start : start + size], high, low, minimum)
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
    if all_id2s and (min(all_id2s) < 1 or max(all_id2s) > MAX_ID):
        ends = list(accumulate(sizes, initial=0))
        sets = (all_id2s[start:end] for start, end in pairwise(ends))
        _unanswer(values, first, [any(not 0 < id2 <= MAX_ID for id2 in id2s) for id2s in sets])


def _unanswer(values: list[bytes | None], first: int, wrong: Sequence[bool]) -> None:
    """Take the answers of wrong queries back; ``wrong`` begins with slot ``first``."""
    for slot, is_wrong in zip(range(first, len(values)), wrong, strict=False):
        if is_wrong:
            values[slot] = None


def leave_out(batch: pb.ReadBatch, values: list[bytes | None], shards: Collection[int]) -> None:
    """Take the answers of these shards back: others must be had."""
    columns = (batch.obj_ids, batch.count_id1s, batch.range_id1s, batch.time_range_id1s, batch.get_id1s)
    id1s = (id1 for column in columns for id1 in column[:])
    # Values may end early.
    _unanswer(values, 0, [id1 >> SHARD_SHIFT in shards for id1 in id1s])


def leave_out_known(batch: pb.ReadBatch, values: list[bytes | None], versions: Mapping[int, int]) -> None:
    """Empty the answers that the asker has already, at just the version that it named."""
    for slot in batch.known_slots:
        value = values[slot] if slot < len(values) else None
        if value and int.from_bytes(value[:8], "little") == versions.get(slot):
            values[slot] = b""


def shards_in(batch: pb.ReadBatch) -> set[int]:
    """All shards that the batch asks of."""
    columns = (batch.obj_ids, batch.count_id1s, batch.range_id1s, batch.time_range_id1s, batch.get_id1s)
    return {id1 >> SHARD_SHIFT for column in columns for id1 in column[:]}


def runs_within(values: Sequence[bytes], max_run_bytes: int, max_bytes: int) -> list[tuple[int, int]]:
    """The values in runs ``(start, end)`` of at most ``max_run_bytes``, or one larger value, until ``max_bytes``. The
    first value always has a place: whether it fits a message at all is seen when it is sent."""
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


class BatchQueries:
    """The queries of a batch as values, built only for the slots that are asked for (those that missed)."""

    __slots__ = ("_batch", "_id2_starts", "_starts", "minimums")

    def __init__(self, batch: pb.ReadBatch, sizes: tuple[int, int, int, int, int]) -> None:
        self._batch = batch
        self._starts = tuple(accumulate(sizes, initial=0))
        self._id2_starts = tuple(accumulate(batch.get_id2_counts, initial=0)) if sizes[4] else (0,)
        self.minimums = minimums_of(batch)

    def query(self, slot: int) -> Query:
        """The query at ``slot``, its numbers checked. Raises `InvalidArgument` or `TooLarge`."""
        batch, starts = self._batch, self._starts
        if slot < starts[1]:
            return ObjectQuery(_checked_id(batch.obj_ids[slot], "id"))
        if slot < starts[2]:
            i = slot - starts[1]
            return CountQuery(_checked_id(batch.count_id1s[i], "id1"), batch.count_atypes[i])
        if slot < starts[3]:
            i = slot - starts[2]
            pos = batch.range_positions[i]
            if pos > MAX_TIME:
                raise InvalidArgument(f"pos {pos} is above 2^63 - 1")
            return RangeQuery(
                _checked_id(batch.range_id1s[i], "id1"), batch.range_atypes[i], pos, batch.range_limits[i]
            )
        if slot < starts[4]:
            i = slot - starts[3]
            high, low = _checked_times(batch.time_range_highs[i], batch.time_range_lows[i])
            id1, atype = _checked_id(batch.time_range_id1s[i], "id1"), batch.time_range_atypes[i]
            below_id2 = batch.time_range_below_id2s[i] if batch.time_range_below_id2s else 0
            if below_id2:
                _checked_id(below_id2, "below_id2")
            return TimeRangeQuery(id1, atype, high, low, batch.time_range_limits[i], below_id2)
        i = slot - starts[4]
        first, last = self._id2_starts[i], self._id2_starts[i + 1]
        if last - first > MAX_ID2_SET:
            raise TooLarge(f"{last - first} id2s in one assoc_get; ask for at most {MAX_ID2_SET} at a time")
        id2s = tuple(dict.fromkeys(batch.get_id2s[first:last]))
        for id2 in id2s:
            _checked_id(id2, "id2")
        high, low = _checked_times(batch.get_highs[i], batch.get_lows[i])
        return EdgesQuery(_checked_id(batch.get_id1s[i], "id1"), batch.get_atypes[i], id2s, high, low)


def _checked_id(value: int, name: str) -> int:
    if not 0 < value <= MAX_ID:
        raise InvalidArgument(f"{name} {value} is not an object id (1 … 2^63 - 1)")
    return value


def _checked_times(high: int, low: int) -> tuple[int, int]:
    if high > MAX_TIME or low > MAX_TIME:
        raise InvalidArgument(f"a time bound is at most 2^63 - 1; high is {high}, low is {low}")
    return high, low
