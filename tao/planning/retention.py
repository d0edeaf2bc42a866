"""Lists that keep only their newest edges (``keep`` in the schema).

A list may grow to ``keep`` edges and ``keep_slack`` more. The add that exceeds this deletes the oldest edges down to
``keep``, in its own transaction, so that one add in ``keep_slack`` pays for all of them. Such types have no inverse:
the edges that are deleted have no other end.

A list that was long when ``keep`` was introduced is trimmed by many adds, each of which deletes some of its oldest
edges: to lock all of them would take longer than other transactions may wait.

An add that is older than every edge of a list of ``keep`` edges succeeds and changes nothing. So it does when it is
repeated after a trim, which it would otherwise undo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from tao.model.changes import sort_edges
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.rows import ExistingRows, ListRow
from tao.model.writes import AssocAdd, AssocChangeType, AssocDelete
from tao.planning.coordination import PlannedWrite
from tao.planning.draft import Draft
from tao.schema.registry import Schema

TRIMMED_AT_ONCE: Final = 1_000
"""Edges above what its lists keep that one transaction deletes. To lock and delete so many takes some milliseconds."""
_EMPTY: Final = ListRow(0, 0)


def oldest_wanted(existing: ExistingRows, writes: Sequence[PlannedWrite], schema: Schema) -> dict[ListKey, int]:
    """Return how many of their oldest edges have to be locked of the lists that the writes may make too long.

    Each write of a list may delete or move one of the edges that are read, so one more is read for each. That is
    enough for a list to lose more than it gains also when others have taken all of `TRIMMED_AT_ONCE`."""
    wanted: dict[ListKey, int] = {}
    retention = schema.retention
    if not retention:
        return wanted
    adds, named = Counter[ListKey](), Counter[ListKey]()
    for planned in writes:
        match planned.write:
            case AssocAdd(id1=id1, atype=atype):
                if atype in retention:
                    adds[ListKey(id1, atype)] += 1
            case AssocChangeType(id1=id1, atype=old, new_atype=atype):
                if atype in retention:
                    adds[ListKey(id1, atype)] += 1
                named[ListKey(id1, old)] += 1
            case AssocDelete(id1=id1, atype=atype):
                named[ListKey(id1, atype)] += 1
    left = TRIMMED_AT_ONCE
    for key, added in adds.items():
        keep, slack = retention[key.atype]
        excess = existing.lists.get(key, _EMPTY).count + added - keep
        if excess > 0:
            trimmed = min(excess, left) if excess > slack else 0
            left -= trimmed
            wanted[key] = 1 + added + named[key] + trimmed
    return wanted


def trim(draft: Draft, schema: Schema) -> None:
    """Delete the oldest edges of each list that the writes have made too long, as far as they were read."""
    if not draft.existing.oldest:
        return
    for key, grown in list(draft.grown.items()):
        bounds = schema.retention.get(key.atype) if grown > 0 else None
        length = draft.length(key)
        oldest = draft.existing.oldest.get(key)
        if bounds is None or oldest is None or length <= sum(bounds):
            continue
        keep, _ = bounds
        edges = by_age(draft, key)
        excess = length - keep
        if oldest.are_all:  # a count that was changed by hand must not cost edges that are to be kept
            excess = min(excess, len(edges) - keep)
        else:
            # What was written may be newer than edges that were not read, and those come first.
            last = oldest.edges[-1]
            edges = [edge for edge in edges if (edge.time, edge.id2) <= (last.time, last.id2)]
        for edge in edges[: max(0, excess)]:
            edge_key = EdgeKey(key.id1, key.atype, edge.id2)
            if edge_key not in draft.lists[key]:
                draft.existing.edges[edge_key] = edge
            draft.delete_oldest(edge_key)


def is_too_old(draft: Draft, key: EdgeKey, time: int, schema: Schema) -> bool:
    """Return whether a new edge is older than all edges of a list that has as many as it keeps."""
    list_key = ListKey(key.id1, key.atype)
    bounds, read = schema.retention.get(key.atype), draft.existing.oldest.get(list_key)
    if bounds is None or read is None or draft.length(list_key) < bounds[0] or draft.edge(key) is not None:
        return False
    place = time, key.id2
    if read.edges:
        # Nearly every add is newer than the edges that were read. The last of them is still there to be compared with.
        last = read.edges[-1]
        if place > (last.time, last.id2) and EdgeKey(key.id1, key.atype, last.id2) not in draft.lists.get(list_key, ()):
            return False
    oldest = by_age(draft, list_key)[:1]
    return bool(oldest) and place < (oldest[0].time, oldest[0].id2)


def by_age(draft: Draft, key: ListKey) -> list[Edge]:
    """Return the edges of a list as far as they are known, oldest first: the oldest ones stored, and those written."""
    written = draft.lists.get(key, {})
    stored = [edge for edge in draft.existing.oldest[key].edges if EdgeKey(key.id1, key.atype, edge.id2) not in written]
    edges = sort_edges([*stored, *(edge for edge in written.values() if edge is not None)])
    edges.reverse()
    return edges
