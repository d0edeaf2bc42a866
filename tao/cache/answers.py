"""Which answers follow from a cached list: pure functions on edge blocks (DESIGN.md §4 "semantics").

A cached block is a contiguous prefix of its list. It answers what lies wholly within the prefix, and everything when it
is complete. None means that the prefix cannot decide. Answers carry the list's version and count; their flags say
``PREFIX`` when they start at position 0 and ``COMPLETE`` when they are the whole list.
"""

from __future__ import annotations

from collections.abc import Sequence

from tao.cache.membership import MembershipFilter
from tao.cache.outcomes import EdgesAnswer
from tao.model.edge_block import (
    COMPLETE,
    PREFIX,
    empty_block,
    first_after,
    first_not_newer,
    header,
    id2_column,
    pick_edges,
    position_of,
    slice_block,
    time_column,
)
from tao.model.graph import MAX_TIME, decode_count, version_of


def range_answer(block: bytes, pos: int, limit: int) -> bytes | None:
    """The edges at ``pos … pos+limit-1``."""
    version, count, n, flags = header(block)
    if not flags & COMPLETE and pos + limit > n:
        return empty_block(version, count, 0) if pos >= count else None
    return _slice(block, n, flags, pos, pos + limit)


def time_range_answer(block: bytes, high: int, low: int, limit: int, below_id2: int = 0) -> bytes | None:
    """At most ``limit`` edges with ``high ≥ time ≥ low``; with ``below_id2`` those after the edge
    ``(high, below_id2)``."""
    _, _, n, flags = header(block)
    if below_id2:
        start = first_after(block, high, below_id2)
    else:
        start = 0 if high >= MAX_TIME else first_not_newer(block, high)
    stop = max(start, first_not_newer(block, low - 1)) if low > 0 else n
    if stop - start < limit and not flags & COMPLETE and not _ends_within(block, n, low):
        return None
    return _slice(block, n, flags, start, min(stop, start + limit))


def edges_answer(block: bytes, id2s: Sequence[int], high: int, low: int) -> EdgesAnswer | None:
    """The edges to ``id2s`` with ``high ≥ time ≥ low``, and which of the ids the prefix cannot decide. None: all."""
    version, count, n, flags = header(block)
    # One byte search costs as much as a step through a dozen edges; all three give indexes in list order.
    if len(id2s) == 1:  # "does she like this?", the question asked most
        at = position_of(block, id2s[0])
        found = [at] if at >= 0 else []
    elif 12 * len(id2s) <= n + 24:
        found = sorted({position_of(block, id2) for id2 in id2s} - {-1})
    else:
        wanted = frozenset(id2s)
        found = [index for index, id2 in enumerate(id2_column(block)) if id2 in wanted]
    missing: tuple[int, ...] = ()
    if not flags & COMPLETE and not _ends_within(block, n, low):
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


def beyond_answer(count_value: bytes, pos: int) -> bytes | None:
    """The empty answer to a range that begins at or after the end of the list, by its count alone."""
    version, count = decode_count(count_value)
    if count == 0:
        return empty_block(version)
    return empty_block(version, count, 0) if pos >= count else None


def filtered_answer(known: EdgesAnswer | None, id2s: Sequence[int], held: MembershipFilter) -> EdgesAnswer | None:
    """``known``, an answer with ids missing, or None; without the ids that the filter denies, which tells only of its
    own version."""
    if known is not None and version_of(known.block) != held.version:
        return known
    missing = known.missing if known is not None else dict.fromkeys(id2s)
    left = tuple(id2 for id2 in missing if held.may_have(id2))
    if known is not None:
        return EdgesAnswer(known.block, left)
    return None if len(left) == len(missing) else EdgesAnswer(empty_block(held.version, held.count, 0), left)


def _slice(block: bytes, n: int, flags: int, start: int, stop: int) -> bytes:
    if n == 0 or (start == 0 and stop >= n):
        return block
    return slice_block(block, start, stop, PREFIX if start == 0 else 0)


def _ends_within(block: bytes, n: int, low: int) -> bool:
    """Whether all edges with ``time ≥ low`` are in the prefix. At the oldest time itself, more may follow beyond it."""
    return n > 0 and low > time_column(block)[n - 1]
