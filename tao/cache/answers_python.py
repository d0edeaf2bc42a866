"""Answers to single queries from a cached list: the implementation in Python, and the specification.

`tao.cache.answers_core` is the compiled implementation; `tao.cache.answers` chooses between them. One suite
(`tests/conformance/test_answers.py`) holds both to the same answers. Numbers are 0 to 2^64-1. A block that
`tao.model.edge_block.check_block` would reject has no defined answer here; the compiled implementation never reads
beyond its end.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from tao.cache.bloom_filter import may_have
from tao.cache.eviction import MOST_CREDIT, USE_CREDIT
from tao.cache.outcomes import EdgesAnswer
from tao.model.changes import sort_edges
from tao.model.edge_block import (
    COMPLETE,
    PREFIX,
    decode_block,
    empty_block,
    encode_block,
    first_after,
    first_not_newer,
    header,
    id2_column,
    pick_edges,
    position_of,
    slice_block,
    time_column,
)
from tao.model.graph import (
    COUNT_VALUE_BYTES,
    EXISTS,
    EXISTS_NOT,
    MAX_TIME,
    OBJECT_HEADER_BYTES,
    decode_count,
    version_of,
)
from tao.model.ids import MAX_ID, SHARD_SHIFT
from tao.model.queries import AT_POSITION

if TYPE_CHECKING:
    from tao.cache.shard import CachedShard


def range_answer(block: bytes, pos: int, limit: int) -> bytes | None:
    """Return the edges at positions ``pos`` to ``pos + limit - 1``."""
    version, count, n, flags = header(block)
    if not flags & COMPLETE and pos + limit > n:
        return empty_block(version, count, 0) if pos >= count else None
    return _slice(block, n, pos, pos + limit)


def time_range_answer(block: bytes, high: int, low: int, limit: int, start: int = 0) -> bytes | None:
    """Return at most ``limit`` edges with ``high >= time >= low``, from ``start`` on, which is that of
    `tao.model.queries.TimeRangeQuery`."""
    version, count, n, flags = header(block)
    if 0 < start < AT_POSITION:
        first = first_after(block, high, start)
    else:
        first = 0 if high >= MAX_TIME else first_not_newer(block, high)
        if start:
            first += start - AT_POSITION
    stop = max(first, first_not_newer(block, low - 1) if low > 0 else n)
    if stop - first < limit and not flags & COMPLETE and not ends_within(block, n, low):
        return empty_block(version, count, 0) if first >= count else None
    return _slice(block, n, first, min(stop, first + limit))


def edge_answer(block: bytes, id2: int, high: int, low: int) -> bytes | None:
    """Return the edge to ``id2``, if there is one with ``high >= time >= low``."""
    version, count, n, flags = header(block)
    at = position_of(block, id2)
    if at < 0 and not flags & COMPLETE and not ends_within(block, n, low):
        return None
    if at >= 0 and (low > 0 or high < MAX_TIME) and not high >= time_column(block)[at] >= low:
        at = -1
    if n == (at >= 0):
        return block
    return slice_block(block, at, at + 1, 0) if at >= 0 else empty_block(version, count, 0)


def edges_answer(block: bytes, id2s: Sequence[int], high: int, low: int) -> EdgesAnswer | None:
    """Return the edges to ``id2s`` with ``high >= time >= low``, and the ids that the prefix cannot decide; None when
    it decides none. ``id2s`` is a list or tuple in any order; time grows with the sum of its length and the block's."""
    version, count, n, flags = header(block)
    wanted = frozenset(id2s)
    found = [index for index, id2 in enumerate(id2_column(block)) if id2 in wanted]
    missing: tuple[int, ...] = ()
    if not flags & COMPLETE and not ends_within(block, n, low):
        column = id2_column(block)
        known = {column[index] for index in found}
        missing = tuple(dict.fromkeys(id2 for id2 in id2s if id2 not in known))
        if missing and not found:
            return None
    if found and (low > 0 or high < MAX_TIME):
        times = time_column(block)
        found = [index for index in found if high >= times[index] >= low]
    if len(found) == n:
        return EdgesAnswer(block, missing)
    if not found:
        return EdgesAnswer(empty_block(version, count, 0), missing)
    if len(found) == 1:
        return EdgesAnswer(slice_block(block, found[0], found[0] + 1, 0), missing)
    return EdgesAnswer(pick_edges(block, found, 0), missing)


def existence_answer(block: bytes, id2: int) -> bytes | None:
    """Return whether there is an edge to ``id2``, in one byte."""
    if position_of(block, id2) >= 0:
        return EXISTS
    return EXISTS_NOT if header(block)[3] & COMPLETE else None


def beyond_answer(count_value: bytes, pos: int) -> bytes | None:
    """Return the empty answer to a range that begins at or after the end of the list, from the count alone."""
    version, count = decode_count(count_value)
    if count == 0:
        return empty_block(version)
    return empty_block(version, count, 0) if pos >= count else None


def merged_block(one: bytes, other: bytes) -> bytes:
    """Return the edges of two parts of a list in list order, under the version and count of ``other``. No edge is in
    both."""
    version, count, _, _ = header(other)
    return encode_block(version, count, sort_edges([*decode_block(one), *decode_block(other)]), 0)


def possible_ids(words: array[int], masks: array[int], ids: Sequence[int]) -> tuple[int, ...]:
    """Return those of the ids that a filter may have; see `tao.cache.bloom_filter`, whose words and masks these
    are."""
    return tuple(id2 for id2 in ids if may_have(words, masks, id2))


def has_foreign_id(ids: list[int]) -> bool:
    """Return whether one of the numbers is no object id (`tao.model.ids.check_id`)."""
    return bool(ids) and not 0 < min(ids) <= max(ids) <= MAX_ID


def has_foreign_number(numbers: list[int], known: bytes) -> bool:
    """Return whether the bit of one of the numbers is not set in ``known``, lowest bit first."""
    return any(each >> 3 >= len(known) or not known[each >> 3] >> (each & 7) & 1 for each in numbers)


def has_foreign_type(values: list[bytes | None], otypes: bytes) -> bool:
    """Return whether one of the object values is of a type whose bit is not set in ``otypes``, lowest bit first. None
    and values without a header are of no type."""
    for value in values:
        if value is not None and len(value) >= OBJECT_HEADER_BYTES:
            otype = int.from_bytes(value[8:OBJECT_HEADER_BYTES], "little")
            if otype >> 3 >= len(otypes) or not otypes[otype >> 3] >> (otype & 7) & 1:
                return True
    return False


def ends_within(block: bytes, n: int, low: int) -> bool:
    """Return whether all edges with ``time >= low`` are in the prefix. More edges of the oldest time may follow beyond
    it."""
    return n > 0 and low > time_column(block)[n - 1]


def _slice(block: bytes, n: int, start: int, stop: int) -> bytes:
    if n == 0 or (start == 0 and stop >= n):
        return block
    return slice_block(block, start, stop, PREFIX if start == 0 else 0)


class Hits:
    """Answers queries from the entries of open shards, and credits the entries with the use. None means that the cache
    cannot decide. Values older than ``minimum``, a version, are not answered. Numbers are 0 to 2^64-1."""

    __slots__ = ("_credit", "_shards")

    def __init__(self, shards: dict[int, CachedShard], credit: bytearray) -> None:
        """``shards`` maps shard numbers to shards, and may change between calls. ``credit`` holds a byte for (id +
        type) modulo its length."""
        self._shards: Final = shards
        self._credit: Final = credit

    def use(self, key: int) -> None:
        """Credit the entry of ``key`` (id and type together); see `tao.cache.eviction`."""
        place = key % len(self._credit)
        if self._credit[place] < MOST_CREDIT:
            self._credit[place] += USE_CREDIT

    def object(self, id: int, minimum: int = 0) -> bytes | None:  # noqa: A002
        """Return the object value."""
        shard = self._shards.get(id >> SHARD_SHIFT)
        if shard is None:
            return None
        value = shard.objects.get(id) or (shard.held_object(id) if shard.other_objects else None)
        return self._used(value, id, minimum)

    def objects(self, ids: Sequence[int]) -> list[bytes | None]:
        """Return what `object` returns for each of the ids."""
        return list(map(self.object, ids))

    def count(self, id1: int, atype: int, minimum: int = 0) -> bytes | None:
        """Return the count value of the list."""
        shard = self._shards.get(id1 >> SHARD_SHIFT)
        if shard is None or atype not in shard.counts:
            return None
        value = shard.counts[atype].get(id1) or shard.lists[atype].get(id1, b"")[:COUNT_VALUE_BYTES]
        return self._used(value, id1 + atype, minimum)

    def block(self, id1: int, atype: int, minimum: int = 0) -> bytes | None:
        """Return the cached prefix of the list."""
        shard = self._shards.get(id1 >> SHARD_SHIFT)
        if shard is None or atype not in shard.lists:
            return None
        return self._used(shard.lists[atype].get(id1), id1 + atype, minimum)

    def range(self, id1: int, atype: int, pos: int, limit: int, minimum: int = 0) -> bytes | None:
        """See `range_answer`."""
        block = self.block(id1, atype, minimum)
        return self._beyond(id1, atype, pos, minimum) if block is None else range_answer(block, pos, limit)

    def time_range(
        self, id1: int, atype: int, high: int, low: int, limit: int, minimum: int = 0, start: int = 0
    ) -> bytes | None:
        """See `time_range_answer`."""
        block = self.block(id1, atype, minimum)
        if block is None:
            return self._beyond(id1, atype, max(0, start - AT_POSITION), minimum)
        return time_range_answer(block, high, low, limit, start)

    def edge(self, id1: int, atype: int, id2: int, high: int, low: int, minimum: int = 0) -> bytes | None:
        """See `edge_answer`."""
        block = self.block(id1, atype, minimum)
        return self._beyond(id1, atype, 0, minimum) if block is None else edge_answer(block, id2, high, low)

    def edges(self, id1: int, atype: int, id2s: bytes, high: int, low: int, minimum: int = 0) -> bytes | None:
        """Return the edges to the ids of a column, as blocks have them (`tao.model.edge_block`); None when the cache
        cannot decide all of them. See `edges_answer`."""
        block = self.block(id1, atype, minimum)
        if block is None:
            return self._beyond(id1, atype, 0, minimum)
        found = edges_answer(block, memoryview(id2s).cast("Q").tolist(), high, low)
        return None if found is None or found.missing else found.block

    def exists(self, id1: int, atype: int, id2: int, minimum: int = 0) -> bytes | None:
        """See `existence_answer`."""
        block = self.block(id1, atype, minimum)
        if block is not None:
            return existence_answer(block, id2)
        return None if self._beyond(id1, atype, 0, minimum) is None else EXISTS_NOT

    def exist_all(self, id1s: bytes, atypes: bytes, id2s: bytes) -> list[bytes | None]:
        """Return what `exists` returns for each of the edges, which are columns of 64-bit numbers. Checks of one list
        that follow each other take one pass over the list in the compiled implementation."""
        if not len(id1s) == len(atypes) == len(id2s):
            raise ValueError("columns differ in length")
        return list(map(self.exists, *(memoryview(column).cast("Q") for column in (id1s, atypes, id2s))))

    def _beyond(self, id1: int, atype: int, pos: int, minimum: int) -> bytes | None:
        count = self.count(id1, atype, minimum)
        return None if count is None else beyond_answer(count, pos)

    def _used(self, value: bytes | None, key: int, minimum: int) -> bytes | None:
        if not value or (minimum and version_of(value) < minimum):
            return None
        self.use(key)
        return value
