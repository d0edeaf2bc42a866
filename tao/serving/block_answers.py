"""What a fetched block says to a query: the same rules by which a cached one is asked (`tao.cache.answers`)."""

from __future__ import annotations

from tao.cache.answers import edges_answer, range_answer, time_range_answer
from tao.model.changes import sort_edges
from tao.model.edge_block import decode_block, encode_block, header
from tao.model.queries import EdgesQuery, RangeQuery, TimeRangeQuery


def answer_from_block(block: bytes, query: RangeQuery | TimeRangeQuery | EdgesQuery) -> bytes | None:
    """The answer to the query, or None when this prefix does not decide it (all of it)."""
    match query:
        case RangeQuery():
            return range_answer(block, query.pos, query.limit)
        case TimeRangeQuery():
            return time_range_answer(block, query.high, query.low, query.limit, query.below_id2)
        case EdgesQuery():
            found = edges_answer(block, query.id2s, query.high, query.low)
            return None if found is None or found.missing else found.block


def missing_id2s(block: bytes, query: EdgesQuery) -> tuple[int, ...]:
    """The ids of the query that this prefix cannot decide."""
    found = edges_answer(block, query.id2s, query.high, query.low)
    return query.id2s if found is None else found.missing


def merge_edges(held: bytes, found: bytes, query: EdgesQuery) -> bytes:
    """The answer out of a prefix and of what was fetched for the ids that it could not decide, both of one version."""
    known = edges_answer(held, query.id2s, query.high, query.low)
    version, count, _, _ = header(found)
    edges = decode_block(known.block) if known is not None else []
    return encode_block(version, count, sort_edges([*edges, *decode_block(found)]), 0)
