"""Answers from a cached list: pure functions on edge blocks.

A cached block is a contiguous prefix of its list. It answers queries that lie wholly within the prefix, and every query
when it is complete. None means that the prefix cannot decide. Answers carry the list's version and count; their flags
say ``PREFIX`` when they start at position 0 and ``COMPLETE`` when they are the whole list.

Ranges and single edges, the most frequent queries, are compiled where there is a compiler (`hatch_build.py`), and
answered by the implementation in Python elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from tao.cache.answers_python import ends_within
from tao.cache.filters import MembershipFilter
from tao.cache.outcomes import EdgesAnswer
from tao.model.edge_block import (
    COMPLETE,
    empty_block,
    header,
    id2_column,
    pick_edges,
    position_of,
    slice_block,
    time_column,
)
from tao.model.graph import MAX_TIME, version_of

try:
    from tao.cache.answers_core import (
        Hits,
        edge_answer,
        has_foreign_number,
        has_foreign_type,
        range_answer,
        time_range_answer,
    )
except ImportError:  # built without a compiler
    from tao.cache.answers_python import (  # type: ignore[assignment]
        Hits,
        edge_answer,
        has_foreign_number,
        has_foreign_type,
        range_answer,
        time_range_answer,
    )


def edges_answer(block: bytes, id2s: Sequence[int], high: int, low: int) -> EdgesAnswer | None:
    """Return the edges to ``id2s`` with ``high >= time >= low``, and the ids that the prefix cannot decide; None when
    it decides none."""
    if len(id2s) == 1:  # "Does she like this?", the most frequent query.
        answer = edge_answer(block, id2s[0], high, low)
        return None if answer is None else EdgesAnswer(answer)
    version, count, n, flags = header(block)
    # One byte search costs as much as a step through a dozen edges. Both give indexes in list order.
    if 12 * len(id2s) <= n + 24:
        found = sorted({position_of(block, id2) for id2 in id2s} - {-1})
    else:
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


def filtered_answer(known: EdgesAnswer | None, id2s: Sequence[int], held: MembershipFilter) -> EdgesAnswer | None:
    """Complete ``known`` (an answer with missing ids, or None) by the filter: remove the ids that the filter denies.
    The filter speaks only of its own version."""
    if known is not None and version_of(known.block) != held.version:
        return known
    missing = known.missing if known is not None else dict.fromkeys(id2s)
    left = tuple(id2 for id2 in missing if held.may_have(id2))
    if known is not None:
        return EdgesAnswer(known.block, left)
    return None if len(left) == len(missing) else EdgesAnswer(empty_block(held.version, held.count, 0), left)


__all__ = [
    "Hits",
    "edge_answer",
    "edges_answer",
    "filtered_answer",
    "has_foreign_number",
    "has_foreign_type",
    "range_answer",
    "time_range_answer",
]
