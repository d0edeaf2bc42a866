"""The edge block: a run of an association list, packed in columns.

The same bytes are a cache entry, a message between tiers and an answer to a client, so that a list travels without
being taken apart. Layout, little-endian::

    version u64 | count u64 | n u32 | flags u32 | id2 u64 * n | time u64 * n [ | data_end u32 * n | data ]

``count`` is the length of the whole list at ``version``; ``n`` the number of edges here, newest first (time, then id2,
descending). The bracketed part is there only when some edge has data; ``data_end`` is cumulative.

Blocks have columns, because queries ask for columns: an id2 is found by one C-level byte search over 8 n bytes, a time
bound by bisection, and a page is one slice per column.
"""

from __future__ import annotations

import struct
import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from operator import neg
from typing import Final

from tao.model.errors import ProtocolError
from tao.model.graph import Edge

if sys.byteorder != "little":  # pragma: no cover - every platform that we support is little-endian
    raise ImportError("tao packs edge columns in native order and supports little-endian machines only")

COMPLETE: Final = 1
"""The block holds the whole list."""
LIMIT_CUT: Final = 2
"""The query's limit was above the type's bound and was cut to it."""
HAS_DATA: Final = 4
PREFIX: Final = 8
"""The block starts at position 0: it may be cached as a prefix."""

_HEADER = struct.Struct("<QQII")
HEADER_BYTES: Final = _HEADER.size


def encode_block(version: int, count: int, edges: Sequence[Edge], flags: int) -> bytes:
    """Pack edges, which must be newest first. ``HAS_DATA`` is set here."""
    n = len(edges)
    id2s = [edge.id2 for edge in edges]
    times = [edge.time for edge in edges]
    return pack_columns(version, count, flags, id2s, times, [edge.data for edge in edges] if n else ())


def pack_columns(
    version: int, count: int, flags: int, id2s: Sequence[int], times: Sequence[int], data: Sequence[bytes]
) -> bytes:
    """Pack columns of equal length. ``data`` may also be empty: no edge has any."""
    n = len(id2s)
    blob = b"".join(data)
    if not blob:
        return struct.pack(f"<QQII{n}Q{n}Q", version, count, n, flags & ~HAS_DATA, *id2s, *times)
    ends = accumulate(map(len, data))
    head = struct.pack(f"<QQII{n}Q{n}Q{n}I", version, count, n, flags | HAS_DATA, *id2s, *times, *ends)
    return head + blob


def empty_block(version: int, count: int = 0, flags: int = COMPLETE | PREFIX) -> bytes:
    """Return a block without edges; by default that of an empty list."""
    return _HEADER.pack(version, count, 0, flags)


def header(block: bytes) -> tuple[int, int, int, int]:
    """Return ``(version, count, n, flags)``."""
    return _HEADER.unpack_from(block)


def with_flags(block: bytes, flags: int) -> bytes:
    """Return the same block with these flags instead of its own (``HAS_DATA`` stays as it is)."""
    version, count, n, old = _HEADER.unpack_from(block)
    new = (flags & ~HAS_DATA) | (old & HAS_DATA)
    return block if new == old else _HEADER.pack(version, count, n, new) + block[HEADER_BYTES:]


def mark_cut(block: bytes) -> bytes:
    """Return the block with the flag which says that the query's limit was above the type's bound."""
    return with_flags(block, header(block)[3] | LIMIT_CUT)


def check_block(block: bytes) -> bytes:
    """Return the block, or raise `ProtocolError` when its length and columns do not agree."""
    checked_header(block)
    return block


def checked_header(block: bytes) -> tuple[int, int, int, int]:
    """Return the `header` of a block that `check_block` would return; raises as that does."""
    if len(block) < HEADER_BYTES:
        raise ProtocolError(f"an edge block has at least {HEADER_BYTES} bytes, this one {len(block)}")
    version, count, n, flags = _HEADER.unpack_from(block)
    size = HEADER_BYTES + 16 * n
    if flags & HAS_DATA and n:
        if len(block) < size + 4 * n:
            raise ProtocolError(f"an edge block of {n} edges with data ends within its columns")
        ends = memoryview(block)[size : size + 4 * n].cast("I").tolist()
        if ends != sorted(ends):  # a run that is in order is sorted by one pass in C
            raise ProtocolError("the data offsets of an edge block decrease")
        size += 4 * n + ends[-1]
    if len(block) != size or n > count:
        raise ProtocolError(f"an edge block of {n} edges of {count} should have {size} bytes, not {len(block)}")
    return version, count, n, flags


def id2_column(block: bytes) -> memoryview:
    """Return the id2 column as a typed view (items are int)."""
    n = int.from_bytes(block[16:20], "little")
    return memoryview(block)[HEADER_BYTES : HEADER_BYTES + 8 * n].cast("Q")


def time_column(block: bytes) -> memoryview:
    """Return the time column as a typed view (items are int)."""
    n = int.from_bytes(block[16:20], "little")
    return memoryview(block)[HEADER_BYTES + 8 * n : HEADER_BYTES + 16 * n].cast("Q")


def data_at(block: bytes, index: int) -> bytes:
    """Return the data of the edge at ``index`` of this block."""
    _, _, n, flags = _HEADER.unpack_from(block)
    if not flags & HAS_DATA:
        return b""
    ends_at = HEADER_BYTES + 16 * n
    data_starts = ends_at + 4 * n
    start = int.from_bytes(block[ends_at + 4 * index - 4 : ends_at + 4 * index], "little") if index else 0
    end = int.from_bytes(block[ends_at + 4 * index : ends_at + 4 * index + 4], "little")
    return block[data_starts + start : data_starts + end]


def decode_block(block: bytes) -> list[Edge]:
    """Return all edges, newest first."""
    return list(map(Edge, *columns_of(block)))


def columns_of(block: bytes) -> tuple[Sequence[int], Sequence[int], Iterable[bytes]]:
    """Return the id2s, times and data of all edges, newest first."""
    _, _, n, flags = _HEADER.unpack_from(block)
    if not flags & HAS_DATA:
        numbers = struct.unpack_from(f"<{2 * n}Q", block, HEADER_BYTES)
        return numbers[:n], numbers[n:], repeat(b"", n)
    numbers = struct.unpack_from(f"<{2 * n}Q{n}I", block, HEADER_BYTES)
    ends = numbers[2 * n :]
    data = block[HEADER_BYTES + 20 * n :]
    return numbers[:n], numbers[n : 2 * n], [data[start:end] for start, end in zip((0, *ends), ends, strict=False)]


def position_of(block: bytes, id2: int) -> int:
    """Return the index of the edge to ``id2`` in this block, or -1. One byte search, whatever the length."""
    n = int.from_bytes(block[16:20], "little")
    needle = id2.to_bytes(8, "little")
    end = HEADER_BYTES + 8 * n
    at = block.find(needle, HEADER_BYTES, end)
    while at != -1:
        if not (at - HEADER_BYTES) & 7:
            return (at - HEADER_BYTES) >> 3
        at = block.find(needle, at + 1, end)
    return -1


def first_not_newer(block: bytes, time: int) -> int:
    """Return the index of the first edge whose time is ≤ ``time``; n when there is none."""
    return bisect_left(time_column(block), -time, key=neg)  # newest first: their negatives ascend


def first_after(block: bytes, time: int, id2: int) -> int:
    """Return the index of the first edge that comes after ``(time, id2)`` in list order; n when there is none."""
    times, id2s = time_column(block), id2_column(block)
    low, high = 0, len(times)
    while low < high:
        middle = (low + high) // 2
        if times[middle] < time or (times[middle] == time and id2s[middle] < id2):
            high = middle
        else:
            low = middle + 1
    return low


def slice_block(block: bytes, start: int, stop: int, flags: int) -> bytes:
    """Return the edges at ``start`` to ``stop - 1`` (clamped to the block) with the block's version and count, under
    the given flags."""
    version, count, n, old = _HEADER.unpack_from(block)
    if stop > n:  # `min` would take a fifth of the time of a page
        stop = n
    if start > stop:
        start = stop
    if start == 0 and stop == n:
        return with_flags(block, flags)
    m = stop - start
    id2s = block[HEADER_BYTES + 8 * start : HEADER_BYTES + 8 * stop]
    times_at = HEADER_BYTES + 8 * n
    times = block[times_at + 8 * start : times_at + 8 * stop]
    if not (old & HAS_DATA and m):
        return _HEADER.pack(version, count, m, flags & ~HAS_DATA) + id2s + times
    ends_at = HEADER_BYTES + 16 * n
    ends = memoryview(block)[ends_at : ends_at + 4 * n].cast("I")
    first = ends[start - 1] if start else 0
    last = ends[stop - 1]
    if first == last:
        return _HEADER.pack(version, count, m, flags & ~HAS_DATA) + id2s + times
    if first:
        shifted = struct.pack(f"<{m}I", *[end - first for end in ends[start:stop]])
    else:
        shifted = block[ends_at + 4 * start : ends_at + 4 * stop]
    data_at_byte = ends_at + 4 * n
    head = _HEADER.pack(version, count, m, flags | HAS_DATA)
    return head + id2s + times + shifted + block[data_at_byte + first : data_at_byte + last]


def pick_edges(block: bytes, indexes: Iterable[int], flags: int) -> bytes:
    """Return the edges at these indexes, in the order given, with the block's version and count."""
    version, count, _, _ = _HEADER.unpack_from(block)
    id2s, times = id2_column(block), time_column(block)
    chosen = list(indexes)
    return pack_columns(
        version,
        count,
        flags,
        [id2s[i] for i in chosen],
        [times[i] for i in chosen],
        [data_at(block, i) for i in chosen],
    )
