"""The codec of read batches: six read operations, their columns in a `pb.ReadBatch`, and the slots of a batch.

A batch holds the queries of each operation in columns of their own. The operations follow each other in the order of
`OPERATIONS`; a query's *slot* is its place when all queries of a batch are laid end to end in that order. Answers name
queries by slot.

The client keeps queries as rows (`QueryRow`), a list per operation, and writes them with `encode_rows`. A cache that
asks the tier above writes `tao.model.queries` with `encode_queries`. A server reads the sizes of a batch first
(`operation_sizes`), and builds queries only for the slots that it cannot answer from memory (`BatchQueries`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from itertools import accumulate, chain, groupby
from typing import Any, Final, NamedTuple, cast

from tao.model.errors import InvalidArgument, TooLarge
from tao.model.graph import MAX_ID2_SET, MAX_TIME
from tao.model.ids import MAX_ID, SHARD_SHIFT
from tao.model.queries import CountQuery, EdgesQuery, ObjectQuery, Query, RangeQuery, TimeRangeQuery
from tao.wire.v1 import session_pb2 as pb

OBJECT: Final = 0
COUNT: Final = 1
RANGE: Final = 2
TIME_RANGE: Final = 3
EDGES: Final = 4
EXISTS: Final = 5

OPERATIONS: Final = ("obj_get", "assoc_count", "assoc_range", "assoc_time_range", "assoc_get", "assoc_exists")
"""Names of the operations, in slot order. The constants above are their numbers."""

ObjectRow = tuple[int]
"""``(id,)``. A plain tuple, because thousands of ids become rows at the speed of `zip`."""


class CountRow(NamedTuple):
    """Arguments of `assoc_count`."""

    id1: int
    atype: int


class RangeRow(NamedTuple):
    """Arguments of `assoc_range`."""

    id1: int
    atype: int
    pos: int
    limit: int


class TimeRangeRow(NamedTuple):
    """Arguments of `assoc_time_range`; ``start``: see `tao.model.queries.TimeRangeQuery`."""

    id1: int
    atype: int
    high: int
    low: int
    limit: int
    start: int


class EdgesRow(NamedTuple):
    """Arguments of `assoc_get`."""

    id1: int
    atype: int
    id2s: Sequence[int]
    high: int
    low: int


class ExistsRow(NamedTuple):
    """Arguments of `assoc_exists`."""

    id1: int
    atype: int
    id2: int


ListQueryRow = CountRow | RangeRow | TimeRangeRow | EdgesRow | ExistsRow
"""The arguments of one query on an association list."""

QueryRow = ObjectRow | ListQueryRow
"""The arguments of one query. The shard of the first one decides which server is asked."""

RowKey = tuple[int, ...]
"""The item that a row reads: ``(id,)`` of an object, ``(id1, atype)`` of a list; equal to ``row[:2]``."""


RowGroups = Sequence[Sequence[QueryRow]]
"""The rows of a batch, a sequence for each operation, in slot order."""


def no_rows() -> tuple[list[Any], ...]:  # Any: what is collected for rows, the rows themselves or their waiters
    """Return an empty list for each operation, in slot order."""
    return [], [], [], [], [], []


class OperationSizes(NamedTuple):
    """The number of queries of each operation in a batch, in slot order."""

    objects: int
    counts: int
    ranges: int
    time_ranges: int
    edges: int
    exists: int


class OperationSlots(NamedTuple):
    """The slots of one operation in a batch: ``first`` to ``end - 1``."""

    operation: int
    first: int
    end: int


def encode_rows(
    batch: pb.ReadBatch,
    groups: RowGroups,
    critical: bool,
    minimums: Mapping[int, int],
    max_staleness_ms: int = 0,
    known: Iterable[int] = (),
) -> None:
    """Write rows into an empty batch.

    ``minimums`` maps slots to the lowest version that may answer them. ``max_staleness_ms`` bounds the age of answers;
    0 means no bound. ``known`` lists the slots whose answer the client holds at just its minimum version.
    """
    if critical:
        batch.critical = True
    if max_staleness_ms:
        batch.max_staleness_ms = max_staleness_ms
    objects, counts, ranges, time_ranges, edges, exists = groups
    if objects:
        # One column needs no iterator for each row, which `_extend` makes, and one row no list.
        if len(objects) == 1:
            batch.obj_ids.append(objects[0][0])
        else:
            batch.obj_ids.extend([row[0] for row in objects])
    if counts:
        _extend(counts, batch.count_id1s, batch.count_atypes)
    if ranges:
        _extend(ranges, batch.range_id1s, batch.range_atypes, batch.range_positions, batch.range_limits)
    if time_ranges:
        starts = [row.start for row in cast("Sequence[TimeRangeRow]", time_ranges)]
        _extend(
            [row[:5] for row in time_ranges],
            batch.time_range_id1s,
            batch.time_range_atypes,
            batch.time_range_highs,
            batch.time_range_lows,
            batch.time_range_limits,
        )
        if any(starts):
            batch.time_range_starts.extend(starts)
    if edges:
        id1s, atypes, id2_sets, highs, lows = zip(*cast("Sequence[EdgesRow]", edges), strict=True)
        batch.get_id1s.extend(id1s)
        batch.get_atypes.extend(atypes)
        batch.get_id2_counts.extend(map(len, id2_sets))
        batch.get_id2s.extend(chain.from_iterable(id2_sets))
        batch.get_highs.extend(highs)
        batch.get_lows.extend(lows)
    if exists:
        _extend(exists, batch.exist_id1s, batch.exist_atypes, batch.exist_id2s)
    if minimums:
        batch.minimum_slots.extend(minimums)
        batch.minimum_versions.extend(minimums.values())
    if known:
        batch.known_slots.extend(known)


# Any: rows of five shapes, of which each column takes the values of one field.
def _extend(rows: Sequence[tuple[Any, ...]], *columns: MutableSequence[int]) -> None:
    for column, values in zip(columns, zip(*rows, strict=True), strict=True):
        column.extend(values)


def row_at(groups: RowGroups, slot: int) -> tuple[int, QueryRow]:
    """Return the operation and the row of a slot. Raises `IndexError` for a slot that the batch does not have."""
    for operation, rows in enumerate(groups):
        if slot < len(rows):
            return operation, rows[slot]
        slot -= len(rows)
    raise IndexError("no such slot")


_OPERATION_OF: Final[dict[type[Query], int]] = {
    ObjectQuery: OBJECT,
    CountQuery: COUNT,
    RangeQuery: RANGE,
    TimeRangeQuery: TIME_RANGE,
    EdgesQuery: EDGES,
}


def encode_queries(queries: Sequence[tuple[Query, int]], batch: pb.ReadBatch) -> list[int]:
    """Write pairs of a query and its minimum version into an empty batch that asks on behalf of a cache.

    Returns, for each slot, the index of its query. Protobuf takes a column at the cost of a few values."""
    order = [0]
    if len(queries) != 1:
        order = sorted(range(len(queries)), key=[_OPERATION_OF[type(query)] for query, _ in queries].__getitem__)
    batch.for_fill = True
    minimums = {slot: minimum for slot, index in enumerate(order) if (minimum := queries[index][1])}
    if minimums:
        batch.minimum_slots.extend(minimums)
        batch.minimum_versions.extend(minimums.values())
    for kind, group in groupby([queries[index][0] for index in order], type):
        _COLUMNS_OF[kind](batch, list(group))
    return order


# Any: each of these is given queries of its own type alone.


def _write_objects(batch: pb.ReadBatch, queries: list[Any]) -> None:
    batch.obj_ids.extend([query.id for query in queries])


def _write_counts(batch: pb.ReadBatch, queries: list[Any]) -> None:
    batch.count_id1s.extend([query.id1 for query in queries])
    batch.count_atypes.extend([query.atype for query in queries])


def _write_ranges(batch: pb.ReadBatch, queries: list[Any]) -> None:
    batch.range_id1s.extend([query.id1 for query in queries])
    batch.range_atypes.extend([query.atype for query in queries])
    batch.range_positions.extend([query.pos for query in queries])
    batch.range_limits.extend([query.limit for query in queries])


def _write_time_ranges(batch: pb.ReadBatch, queries: list[Any]) -> None:
    batch.time_range_id1s.extend([query.id1 for query in queries])
    batch.time_range_atypes.extend([query.atype for query in queries])
    batch.time_range_highs.extend([query.high for query in queries])
    batch.time_range_lows.extend([query.low for query in queries])
    batch.time_range_limits.extend([query.limit for query in queries])
    starts = [query.start for query in queries]
    if any(starts):
        batch.time_range_starts.extend(starts)


def _write_edges(batch: pb.ReadBatch, queries: list[Any]) -> None:
    batch.get_id1s.extend([query.id1 for query in queries])
    batch.get_atypes.extend([query.atype for query in queries])
    batch.get_id2_counts.extend([len(query.id2s) for query in queries])
    batch.get_id2s.extend(chain.from_iterable(query.id2s for query in queries))
    batch.get_highs.extend([query.high for query in queries])
    batch.get_lows.extend([query.low for query in queries])


_COLUMNS_OF: Final[dict[type[Query], Callable[[pb.ReadBatch, list[Any]], None]]] = {
    ObjectQuery: _write_objects,
    CountQuery: _write_counts,
    RangeQuery: _write_ranges,
    TimeRangeQuery: _write_time_ranges,
    EdgesQuery: _write_edges,
}


_numbers = {field.name: field.number for field in pb.ReadBatch.DESCRIPTOR.fields}
_OBJ_IDS: Final = _numbers["obj_ids"]
_COUNT_ID1S: Final = _numbers["count_id1s"]
_RANGE_ID1S: Final = _numbers["range_id1s"]
_TIME_RANGE_ID1S: Final = _numbers["time_range_id1s"]
_TIME_RANGE_STARTS: Final = _numbers["time_range_starts"]
_GET_ID1S: Final = _numbers["get_id1s"]
_GET_ID2S: Final = _numbers["get_id2s"]
_LAST_COLUMN: Final = _numbers["minimum_versions"]
_EXIST_ID1S: Final = _numbers["exist_id1s"]
_PARALLEL_COLUMNS: Final = {
    _numbers[first]: tuple(_numbers[name] for name in others.split())
    for first, others in {
        "obj_ids": "",
        "count_id1s": "count_atypes",
        "range_id1s": "range_atypes range_positions range_limits",
        "time_range_id1s": "time_range_atypes time_range_highs time_range_lows time_range_limits",
        "get_id1s": "get_atypes get_id2_counts get_highs get_lows",
        "exist_id1s": "exist_atypes exist_id2s",
        "minimum_slots": "minimum_versions",
    }.items()
}
"""Maps the first column of a group to the other columns of the group, which must have its length."""
_UNEVEN: Final = "the columns of a read batch differ in length: send one value per query in each column"
_new: Final = tuple.__new__  # makes a named tuple in half the time of its constructor


def operation_sizes(batch: pb.ReadBatch) -> OperationSizes:
    """Return how many queries of each operation the batch holds. Raises `InvalidArgument` when columns of one
    operation differ in length."""
    # Reading a column that was not sent creates it, for 0.15 µs. Only the columns that were sent are read, so that a
    # batch of one query is served in half the time.
    sent = batch.ListFields()
    if len(sent) == 1 and sent[0][0].number == _OBJ_IDS:
        return _new(OperationSizes, (len(sent[0][1]), 0, 0, 0, 0, 0))
    lengths = {
        number: len(column)
        for field, column in sent
        if (number := field.number) <= _LAST_COLUMN or number >= _EXIST_ID1S
    }
    length_of = lengths.get
    matched = 0
    for first, length in lengths.items():
        others = _PARALLEL_COLUMNS.get(first)
        if others is not None:
            for other in others:
                if length_of(other) != length:
                    raise InvalidArgument(_UNEVEN)
            matched += 1 + len(others)
    if _TIME_RANGE_STARTS in lengths:  # which may be left out
        if lengths[_TIME_RANGE_STARTS] != length_of(_TIME_RANGE_ID1S):
            raise InvalidArgument(_UNEVEN)
        matched += 1
    if _GET_ID2S in lengths or _GET_ID1S in lengths:
        if sum(batch.get_id2_counts) != length_of(_GET_ID2S, 0):
            raise InvalidArgument(_UNEVEN)
        matched += _GET_ID2S in lengths
    if matched != len(lengths):  # a column without the first of its group
        raise InvalidArgument(_UNEVEN)
    sizes = (
        length_of(_OBJ_IDS, 0),
        length_of(_COUNT_ID1S, 0),
        length_of(_RANGE_ID1S, 0),
        length_of(_TIME_RANGE_ID1S, 0),
        length_of(_GET_ID1S, 0),
        length_of(_EXIST_ID1S, 0),
    )
    return _new(OperationSizes, sizes)


def operation_slots(sizes: OperationSizes) -> list[OperationSlots]:
    """Return the slots of each operation that the batch asks for."""
    found, start = [], 0
    for operation, size in enumerate(sizes):
        if size:
            found.append(OperationSlots(operation, start, start + size))
        start += size
    return found


def operation_at(sizes: OperationSizes, slot: int) -> int:
    """Return the operation of a slot."""
    return next(slots.operation for slots in operation_slots(sizes) if slots.first <= slot < slots.end)


def minimums_of(batch: pb.ReadBatch) -> dict[int, int]:
    """Return the lowest version that may answer a slot, for the slots that name one."""
    if not batch.minimum_slots:
        return {}
    return dict(zip(batch.minimum_slots, batch.minimum_versions, strict=True))


def id1s_of(batch: pb.ReadBatch) -> Iterable[int]:
    """Return the object's id or the list's id1 of every query, in slot order."""
    columns = (
        *(batch.obj_ids, batch.count_id1s, batch.range_id1s),
        *(batch.time_range_id1s, batch.get_id1s, batch.exist_id1s),
    )
    return (id1 for column in columns for id1 in column[:])


def shards_in(batch: pb.ReadBatch) -> set[int]:
    """Return all shards that the batch reads."""
    return {id1 >> SHARD_SHIFT for id1 in id1s_of(batch)}


class MissedQueries(NamedTuple):
    """The queries of a batch that a cache could not answer."""

    slots: Sequence[int]
    queries: Iterator[Query]
    """The query of each of the slots, in their order. One that nobody may ask is raised as `InvalidArgument` or
    `TooLarge`, and the next one follows it."""
    minimums: Mapping[int, int]
    """The lowest version that may answer a slot, for the slots that name one."""


def missed_queries(batch: pb.ReadBatch, sizes: OperationSizes, slots: Sequence[int]) -> MissedQueries:
    """Return the queries of these slots, each of which is built when it is asked for."""
    queries = BatchQueries(batch, sizes)
    return MissedQueries(slots, map(queries.query, slots), queries.minimums)


class BatchQueries:
    """The queries of a batch, each built when its slot is asked for: those that missed the cache."""

    __slots__ = ("_batch", "_id2_starts", "_starts", "minimums")

    def __init__(self, batch: pb.ReadBatch, sizes: OperationSizes) -> None:
        self._batch = batch
        self._starts = tuple(accumulate(sizes, initial=0))
        self._id2_starts = tuple(accumulate(batch.get_id2_counts, initial=0)) if sizes.edges else (0,)
        self.minimums = minimums_of(batch)

    def query(self, slot: int) -> Query:
        """Return the query at ``slot`` after checking its numbers; that of `assoc_exists` is one for the edge. Raises
        `InvalidArgument` or `TooLarge`."""
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
            begin = batch.time_range_starts[i] if batch.time_range_starts else 0
            return TimeRangeQuery(id1, atype, high, low, batch.time_range_limits[i], begin)
        if slot >= starts[5]:
            i = slot - starts[5]
            id1, id2 = _checked_id(batch.exist_id1s[i], "id1"), _checked_id(batch.exist_id2s[i], "id2")
            return EdgesQuery(id1, batch.exist_atypes[i], (id2,))
        i = slot - starts[4]
        first, last = self._id2_starts[i], self._id2_starts[i + 1]
        if last - first > MAX_ID2_SET:
            raise TooLarge(f"{last - first} id2s in one assoc_get; ask for at most {MAX_ID2_SET} at a time")
        id2s = tuple(dict.fromkeys(batch.get_id2s[first:last]))
        if id2s:  # of hundreds, most are right: two passes without a call for each
            _checked_id(min(id2s), "id2")
            _checked_id(max(id2s), "id2")
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
