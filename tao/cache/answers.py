"""Answers from a cached list: pure functions on edge blocks.

A cached block is a contiguous prefix of its list. It answers queries that lie wholly within the prefix, and every query
when it is complete. None means that the prefix cannot decide. Answers carry the list's version and count; their flags
say ``PREFIX`` when they start at position 0 and ``COMPLETE`` when they are the whole list.

Compiled where there is a compiler (`hatch_build.py`); without one the implementation in Python answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from tao.cache.bloom_filter import MASKS
from tao.cache.filters import MembershipFilter
from tao.cache.outcomes import EdgesAnswer
from tao.model.edge_block import empty_block
from tao.model.graph import version_of
from tao.model.queries import EdgesQuery, RangeQuery, TimeRangeQuery

try:
    from tao.cache.answers_core import (
        Hits,
        edge_answer,
        edges_answer,
        has_foreign_id,
        has_foreign_number,
        has_foreign_type,
        merged_block,
        possible_ids,
        range_answer,
        time_range_answer,
    )
except ImportError:  # built without a compiler
    from tao.cache.answers_python import (  # type: ignore[assignment]
        Hits,
        edge_answer,
        edges_answer,
        has_foreign_id,
        has_foreign_number,
        has_foreign_type,
        merged_block,
        possible_ids,
        range_answer,
        time_range_answer,
    )


def filtered_answer(known: EdgesAnswer | None, id2s: Sequence[int], held: MembershipFilter) -> EdgesAnswer | None:
    """Complete ``known`` (an answer with missing ids, or None) by the filter: remove the ids that the filter denies.
    The filter speaks only of its own version."""
    if known is not None and version_of(known.block) != held.version:
        return known
    missing = known.missing if known is not None else tuple(dict.fromkeys(id2s))
    left = possible_ids(held.words, MASKS, missing)
    if known is not None:
        return EdgesAnswer(known.block, left)
    return None if len(left) == len(missing) else EdgesAnswer(empty_block(held.version, held.count, 0), left)


def prefix_answer(block: bytes, query: RangeQuery | TimeRangeQuery | EdgesQuery) -> bytes | None:
    """Return the answer to the query, or None when this prefix of the list does not decide all of it."""
    match query:
        case RangeQuery():
            return range_answer(block, query.pos, query.limit)
        case TimeRangeQuery():
            return time_range_answer(block, query.high, query.low, query.limit, query.start)
        case EdgesQuery():
            found = edges_answer(block, query.id2s, query.high, query.low)
            return None if found is None or found.missing else found.block


__all__ = [
    "Hits",
    "edge_answer",
    "edges_answer",
    "filtered_answer",
    "has_foreign_id",
    "has_foreign_number",
    "has_foreign_type",
    "merged_block",
    "possible_ids",
    "prefix_answer",
    "range_answer",
    "time_range_answer",
]
