"""A naive model of the graph, in dictionaries, with which clusters are compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

INVERSES = {"friend": "friend", "likes": "liked_by", "follows": "followed_by", "comment": None, "note": None}
Fields = dict[str, Any]


@dataclass
class GraphModel:
    """Objects and edges as plain dictionaries; every operation is written the obvious way."""

    objects: dict[int, tuple[str, Fields]] = field(default_factory=dict)
    edges: dict[tuple[int, str, int], tuple[int, Fields]] = field(default_factory=dict)

    def assoc_add(self, id1: int, atype: str, id2: int, time: int, fields: Fields) -> None:
        self.edges[id1, atype, id2] = (time, fields)
        inverse = inverse_of(atype)
        if inverse is not None:
            self.edges[id2, inverse, id1] = (time, fields)

    def assoc_delete(self, id1: int, atype: str, id2: int) -> bool:
        inverse = inverse_of(atype)
        if inverse is not None:
            self.edges.pop((id2, inverse, id1), None)
            if (id1, atype, id2) == (id2, inverse, id1):
                return True
        return self.edges.pop((id1, atype, id2), None) is not None

    def assoc_change_type(self, id1: int, atype: str, id2: int, new_atype: str) -> bool:
        edge = self.edges.get((id1, atype, id2))
        if edge is None:
            return False
        if atype != new_atype:
            self.assoc_delete(id1, atype, id2)
            self.assoc_add(id1, new_atype, id2, *edge)
        return True

    def assoc_list(self, id1: int, atype: str) -> list[tuple[int, int, Fields]]:
        """Return ``(id2, time, fields)`` of each edge, newest first."""
        found = [
            (id2, time, fields)
            for (source, kind, id2), (time, fields) in self.edges.items()
            if source == id1 and kind == atype
        ]
        return sorted(found, key=lambda edge: (edge[1], edge[0]), reverse=True)


def inverse_of(atype: str) -> str | None:
    """Return the name of the inverse type, also for a name that is itself an inverse."""
    for forward, back in INVERSES.items():
        if atype == forward:
            return back
        if atype == back:
            return forward
    raise KeyError(atype)
