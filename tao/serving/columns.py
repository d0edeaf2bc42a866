"""Queries into the columns of a read batch, for a cache that asks the tier above (DESIGN.md §11)."""

from __future__ import annotations

from collections.abc import Sequence

from tao.model.queries import CountQuery, EdgesQuery, ObjectQuery, Query, RangeQuery, TimeRangeQuery
from tao.wire.v1 import session_pb2 as pb

_SLOT_ORDER: dict[type[Query], int] = {ObjectQuery: 0, CountQuery: 1, RangeQuery: 2, TimeRangeQuery: 3, EdgesQuery: 4}


def put_queries(queries: Sequence[tuple[Query, int]], batch: pb.ReadBatch) -> list[int]:
    """Make the empty batch one for ``(query, minimum version)`` pairs; returns for each slot the index of its query."""
    order = sorted(range(len(queries)), key=lambda index: _SLOT_ORDER[type(queries[index][0])])
    batch.for_fill = True
    below_id2s: list[int] = []
    for slot, index in enumerate(order):
        query, minimum = queries[index]
        if minimum:
            batch.minimum_slots.append(slot)
            batch.minimum_versions.append(minimum)
        match query:
            case ObjectQuery():
                batch.obj_ids.append(query.id)
            case CountQuery():
                batch.count_id1s.append(query.id1)
                batch.count_atypes.append(query.atype)
            case RangeQuery():
                batch.range_id1s.append(query.id1)
                batch.range_atypes.append(query.atype)
                batch.range_positions.append(query.pos)
                batch.range_limits.append(query.limit)
            case TimeRangeQuery():
                batch.time_range_id1s.append(query.id1)
                batch.time_range_atypes.append(query.atype)
                batch.time_range_highs.append(query.high)
                batch.time_range_lows.append(query.low)
                batch.time_range_limits.append(query.limit)
                below_id2s.append(query.below_id2)
            case EdgesQuery():
                batch.get_id1s.append(query.id1)
                batch.get_atypes.append(query.atype)
                batch.get_id2_counts.append(len(query.id2s))
                batch.get_id2s.extend(query.id2s)
                batch.get_highs.append(query.high)
                batch.get_lows.append(query.low)
    if any(below_id2s):
        batch.time_range_below_id2s.extend(below_id2s)
    return order
