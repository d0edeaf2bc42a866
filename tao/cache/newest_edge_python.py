"""Put one new edge in front of a cached list, as most changes of lists do. `tao.cache.newest_edge_core` is the compiled
twin, and `tao.cache.splices` chooses between them. Here it takes 1.5 µs, compiled a sixth of that.
"""

from __future__ import annotations

import struct
from typing import Final

from tao.model.changes import ListChange
from tao.model.edge_block import COMPLETE, HAS_DATA, HEADER_BYTES, PREFIX, header, position_of

_HEADER: Final = struct.Struct("<QQII")
_U64: Final = struct.Struct("<Q")


def with_newest(block: bytes, change: ListChange, limit: int) -> bytes:
    """Return what `tao.cache.splices.splice` does for one new edge in front of all others; empty for any other
    change."""
    _, _, n, flags = header(block)
    if len(change.put) != 1 or change.gone or n >= limit:
        return b""
    edge = change.put[0]
    id2, time, m = edge.id2, edge.time, n + 1
    if m > change.count or (m != change.count if flags & COMPLETE else not n):
        return b""
    times_at = HEADER_BYTES + 8 * n
    if n:
        first = _U64.unpack_from(block, times_at)[0]
        if time < first or (time == first and id2 < _U64.unpack_from(block, HEADER_BYTES)[0]):
            return b""
        if position_of(block, id2) >= 0:
            return b""
    ends_at = times_at + 8 * n
    data: tuple[bytes, ...] = ()
    now = COMPLETE | PREFIX if m == change.count else PREFIX
    if edge.data or flags & HAS_DATA:
        now |= HAS_DATA
        size = len(edge.data)
        ends = memoryview(block)[ends_at : ends_at + 4 * n].cast("I") if flags & HAS_DATA else (0,) * n
        packed = struct.pack(f"<{m}I", size, *([end + size for end in ends] if size else ends))
        data = packed, edge.data, block[ends_at + 4 * n :]
    return b"".join(
        (
            _HEADER.pack(change.after, change.count, m, now),
            _U64.pack(id2),
            block[HEADER_BYTES:times_at],
            _U64.pack(time),
            block[times_at:ends_at],
            *data,
        )
    )
