"""Apply a change to a cached list: from the prefix at ``before`` to a prefix at ``after``.

It works on the columns: edges that stay are copied in slices, and no edge object is made. Everything newer than the
oldest cached edge is known, so an edge that is added or removed there can be placed. A change beyond it changes the
count alone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import itemgetter

from tao.model.changes import ListChange, sort_edges
from tao.model.edge_block import (
    COMPLETE,
    HAS_DATA,
    HEADER_BYTES,
    PREFIX,
    empty_block,
    header,
    position_of,
    slice_block,
)
from tao.model.graph import Edge

try:
    from tao.cache.newest_edge_core import with_newest
except ImportError:  # built without a compiler (`hatch_build.py`)
    from tao.cache.newest_edge_python import with_newest

_HEADER = struct.Struct("<QQII")
_U64 = struct.Struct("<Q")
_FEW_EDGES = 2
"""Edges of a change up to which each is searched for in the block by itself. One pass over the block for the ids of
more edges costs as much as 2 searches in 6,000 edges, and as 3 in 100."""
_Piece = tuple[int, int] | Edge  # edges start … stop-1 of the old block, or a new edge


def splice(block: bytes, change: ListChange, limit: int) -> bytes | None:
    """Return the prefix after ``change``, at most ``limit`` edges; it may be empty although the list is not.

    ``block`` is the prefix at ``change.before``. Returns None when block and change contradict each other, so that
    nothing can be said about the list.
    """
    spliced = with_newest(block, change, limit)
    if spliced:
        return spliced
    _, _, n, flags = header(block)
    return _splice(block, n, flags, change, limit)


def _splice(block: bytes, n: int, flags: int, change: ListChange, limit: int) -> bytes | None:
    pieces = _pieces(block, n, bool(flags & COMPLETE), change)
    if pieces is None:
        return None
    m = 0
    for piece in pieces:
        m += piece[1] - piece[0] if isinstance(piece, tuple) else 1
    if m > change.count or (flags & COMPLETE and m != change.count):
        return None
    if m == 0:
        return empty_block(change.after, change.count, PREFIX | (0 if change.count else COMPLETE))
    spliced = _build(block, n, m, flags & HAS_DATA, pieces, change)
    return slice_block(spliced, 0, limit, PREFIX) if m > limit else spliced


def _pieces(block: bytes, n: int, complete: bool, change: ListChange) -> list[_Piece] | None:
    """Return the pieces of the new block; None when the change does not fit the block."""
    columns = memoryview(block)[HEADER_BYTES : HEADER_BYTES + 16 * n].cast("Q")
    # (place, 0, edge) inserts before the edge at the place; (place, 1, edge or None) replaces it.
    edits: list[tuple[int, int, Edge | None]] = []
    removed: set[int] = set()
    removed_ids: set[int] = set()
    for gone in change.gone:
        at, found = _locate(columns, n, gone.time, gone.id2)
        if found:
            removed.add(at)
            removed_ids.add(gone.id2)
            edits.append((at, 1, None))
        elif complete or at < n:
            return None
    ids = frozenset([edge.id2 for edge in change.put])
    # A job moves a page of edges at a time, each of which would be searched for in the whole block.
    are_many = len(ids) > _FEW_EDGES
    held = (ids.intersection(columns[:n]) if are_many else ids) - removed_ids
    for edge in change.put if len(change.put) < 2 else sort_edges(change.put):
        at, found = _locate(columns, n, edge.time, edge.id2)
        if found and at not in removed:
            edits.append((at, 1, edge))
            continue
        if edge.id2 in held and (are_many or position_of(block, edge.id2) >= 0):
            return None
        if complete or at < n:
            edits.append((at, 0, edge))
    if len(edits) > 1:
        edits.sort(key=itemgetter(0, 1))
    pieces: list[_Piece] = []
    copied = 0
    for at, takes_place, put in edits:
        if at > copied:
            pieces.append((copied, at))
        if put is not None:
            pieces.append(put)
        copied = at + takes_place
    if copied < n:
        pieces.append((copied, n))
    return pieces


def _locate(columns: Sequence[int], n: int, time: int, id2: int) -> tuple[int, bool]:
    """Return the place of ``(time, id2)`` in list order, and whether that edge is there. ``columns``: id2 * n, time *
    n."""
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        other = columns[n + middle]
        if other > time or (other == time and columns[middle] > id2):
            low = middle + 1
        else:
            high = middle
    return low, low < n and columns[n + low] == time and columns[low] == id2


def _build(block: bytes, n: int, m: int, has_data: int, pieces: list[_Piece], change: ListChange) -> bytes:
    times_at = HEADER_BYTES + 8 * n
    parts: list[bytes] = [b""]
    time_parts: list[bytes] = []
    for piece in pieces:
        if isinstance(piece, tuple):
            start, stop = 8 * piece[0], 8 * piece[1]
            parts.append(block[HEADER_BYTES + start : HEADER_BYTES + stop])
            time_parts.append(block[times_at + start : times_at + stop])
        else:
            parts.append(_U64.pack(piece.id2))
            time_parts.append(_U64.pack(piece.time))
            if piece.data:
                has_data = HAS_DATA
    parts += time_parts
    flags = COMPLETE | PREFIX if m == change.count else PREFIX
    if has_data and (data_parts := _data_parts(block, n, m, pieces)):
        flags |= HAS_DATA
        parts += data_parts
    parts[0] = _HEADER.pack(change.after, change.count, m, flags)
    return b"".join(parts)


def _data_parts(block: bytes, n: int, m: int, pieces: list[_Piece]) -> list[bytes]:
    """Return offsets and data of the new block; nothing when no edge of it has data."""
    ends_at = HEADER_BYTES + 16 * n
    data_at = ends_at + 4 * n
    old = memoryview(block)[ends_at:data_at].cast("I") if header(block)[3] & HAS_DATA else None
    ends: list[int] = []
    parts: list[bytes] = []
    end = 0
    for piece in pieces:
        if not isinstance(piece, tuple):
            end += len(piece.data)
            ends.append(end)
            parts.append(piece.data)
        elif old is None:
            ends.extend([end] * (piece[1] - piece[0]))
        else:
            start, stop = piece
            first = old[start - 1] if start else 0
            shift = end - first
            ends.extend([each + shift for each in old[start:stop]] if shift else old[start:stop])
            parts.append(block[data_at + first : data_at + old[stop - 1]])
            end = ends[-1]
    return [struct.pack(f"<{m}I", *ends), *parts] if end else []
