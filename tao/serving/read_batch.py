"""The hits of a read batch: one synchronous pass over its columns (DESIGN.md §5: a hit is one synchronous call).

This is the hottest loop of the system. It checks only what the answer needs: whether a shard is this server's, or a
type exists, is asked of what was missed - a closed shard and an unknown type have nothing cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
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
) -> tuple[list[bytes | None], int]:
    """One value per slot, None where the cache cannot tell, and how many those are. ``limits``: association type →
    bound on a limit."""
    minimums = minimums_of(batch)
    values: list[bytes | None] = []
    append = values.append
    objects, counts, ranges, windows, gets = sizes
    if objects:
        if minimums:
            get_object = cache.object
            for slot, object_id in enumerate(batch.obj_ids):
                append(get_object(object_id, minimums.get(slot, 0)))
        else:
            values.extend(cache.objects(batch.obj_ids[:]))
    if counts:
        count = cache.count
        for slot, (id1, atype) in enumerate(zip(batch.count_id1s, batch.count_atypes, strict=True), objects):
            append(count(id1, atype, minimums.get(slot, 0)))
    if ranges:
        get_range = cache.range
        columns = zip(batch.range_id1s, batch.range_atypes, batch.range_positions, batch.range_limits, strict=True)
        for slot, (id1, atype, pos, limit) in enumerate(columns, objects + counts):
            bound = limits.get(atype, limit)
            if limit <= bound:
                append(get_range(id1, atype, pos, limit, minimums.get(slot, 0)))
            else:
                value = get_range(id1, atype, pos, bound, minimums.get(slot, 0))
                append(mark_cut(value) if value is not None else None)
    slot = objects + counts + ranges
    if windows:
        _answer_windows(cache, batch, slot, limits, minimums, append)
    if gets:
        _answer_gets(cache, batch, slot + windows, minimums, append)
    return values, values.count(None)


def _answer_windows(
    cache: GraphCache,
    batch: pb.ReadBatch,
    first_slot: int,
    limits: Mapping[int, int],
    minimums: Mapping[int, int],
    append: Callable[[bytes | None], None],
) -> None:
    columns = zip(
        batch.time_range_id1s,
        batch.time_range_atypes,
        batch.time_range_highs,
        batch.time_range_lows,
        batch.time_range_limits,
        strict=True,
    )
    for slot, (id1, atype, high, low, limit) in enumerate(columns, first_slot):
        bound = limits.get(atype, limit)
        value = cache.time_range(id1, atype, high, low, min(limit, bound), minimums.get(slot, 0))
        append(mark_cut(value) if value is not None and limit > bound else value)


def _answer_gets(
    cache: GraphCache,
    batch: pb.ReadBatch,
    first_slot: int,
    minimums: Mapping[int, int],
    append: Callable[[bytes | None], None],
) -> None:
    all_id2s = batch.get_id2s[:]
    start = 0
    columns = zip(batch.get_id1s, batch.get_atypes, batch.get_id2_counts, batch.get_highs, batch.get_lows, strict=True)
    for slot, (id1, atype, size, high, low) in enumerate(columns, first_slot):
        id2s = all_id2s[start : start + size]
        start += size
        found = cache.edges(id1, atype, id2s, high, low, minimums.get(slot, 0)) if size <= MAX_ID2_SET else None
        append(None if found is None or found.missing else found.block)


class BatchQueries:
    """The queries of a batch as values, built only for the slots that are asked for (those that missed)."""

    __slots__ = ("_batch", "_id2_starts", "_starts", "minimums")

    def __init__(self, batch: pb.ReadBatch, sizes: tuple[int, int, int, int, int]) -> None:
        self._batch = batch
        self._starts = tuple(accumulate(sizes, initial=0))
        self._id2_starts = tuple(accumulate(batch.get_id2_counts, initial=0)) if sizes[4] else (0,)
        self.minimums = minimums_of(batch)

    def shard(self, slot: int) -> int:
        """The shard asked at ``slot``."""
        batch, starts = self._batch, self._starts
        columns = (batch.obj_ids, batch.count_id1s, batch.range_id1s, batch.time_range_id1s, batch.get_id1s)
        for column, start, end in zip(columns, starts, starts[1:], strict=False):
            if slot < end:
                return int(column[slot - start]) >> SHARD_SHIFT
        raise InvalidArgument(f"slot {slot} is outside the batch")

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
            return TimeRangeQuery(id1, atype, high, low, batch.time_range_limits[i])
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
