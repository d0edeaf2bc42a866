"""Read queries as rows, and a message's columns and slots made of them.

Gathering keeps one tuple per query, ``(id1, …)``, in a list per operation, because a batch is turned into columns at
the speed of C when it is sent, and a row is all that is needed to ask for it again elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from itertools import chain
from typing import Any, Final

from tao.wire.v1 import session_pb2 as pb

Row = tuple[Any, ...]
"""``(id,)`` · ``(id1, atype)`` · ``(id1, atype, pos, limit)`` · ``(id1, atype, high, low, limit,
below_id2)`` · ``(id1, atype, id2s, high, low)``, by the kind below. The shard of the first item decides who is asked.
(Any: five shapes go the same way, and what they hold has been checked.)"""

OBJECT: Final = 0
COUNT: Final = 1
RANGE: Final = 2
TIME_RANGE: Final = 3
EDGES: Final = 4

OPERATIONS: Final = ("obj_get", "assoc_count", "assoc_range", "assoc_time_range", "assoc_get")
"""By kind."""

Groups = Sequence[Sequence[Row]]
"""Rows by kind. A row's slot is its place when the groups are laid end to end."""


def write_batch(
    batch: pb.ReadBatch,
    groups: Groups,
    critical: bool,
    minimums: Mapping[int, int],
    max_staleness_ms: int = 0,
    known: Iterable[int] = (),
) -> None:
    """Write these rows into an empty message. ``minimums``: slot → the least version that may answer it.
    ``max_staleness_ms``: 0 for no bound. ``known``: slots whose answer at just that version the asker has."""
    if critical:
        batch.critical = True
    if max_staleness_ms:
        batch.max_staleness_ms = max_staleness_ms
    objects, counts, ranges, time_ranges, edges = groups
    if objects:
        # `_extend` makes an iterator per row, which shows where there is but one column to make of them.
        batch.obj_ids.extend([object_id for (object_id,) in objects])
    if counts:
        _extend(counts, batch.count_id1s, batch.count_atypes)
    if ranges:
        _extend(ranges, batch.range_id1s, batch.range_atypes, batch.range_positions, batch.range_limits)
    if time_ranges:
        below = [row[5] for row in time_ranges]
        _extend(
            [row[:5] for row in time_ranges],
            batch.time_range_id1s,
            batch.time_range_atypes,
            batch.time_range_highs,
            batch.time_range_lows,
            batch.time_range_limits,
        )
        if any(below):
            batch.time_range_below_id2s.extend(below)
    if edges:
        id1s, atypes, id2_sets, highs, lows = zip(*edges, strict=True)
        batch.get_id1s.extend(id1s)
        batch.get_atypes.extend(atypes)
        batch.get_id2_counts.extend(map(len, id2_sets))
        batch.get_id2s.extend(chain.from_iterable(id2_sets))
        batch.get_highs.extend(highs)
        batch.get_lows.extend(lows)
    if minimums:
        batch.minimum_slots.extend(minimums)
        batch.minimum_versions.extend(minimums.values())
    if known:
        batch.known_slots.extend(known)


def kind_and_row(groups: Groups, slot: int) -> tuple[int, Row]:
    """What was asked in a slot. Raises `IndexError`."""
    for kind, rows in enumerate(groups):
        if slot < len(rows):
            return kind, rows[slot]
        slot -= len(rows)
    raise IndexError("no such slot")


def _extend(rows: Sequence[Row], *columns: MutableSequence[int]) -> None:
    for column, values in zip(columns, zip(*rows, strict=True), strict=True):
        column.extend(values)
