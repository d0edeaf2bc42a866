"""The working copy to which a batch's writes are applied one after the other.

Each write sees what those before it in the batch did; nothing is compared with the stored rows until the end, so that
an add followed by a delete leaves no trace. Beside the values it keeps what the plan needs to know of the way: which
keys the current write named, and which edges were written at the coordinator's side alone.
"""

from __future__ import annotations

from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.rows import ExistingRows, IntentKey, IntentRow, ObjectRow

TouchedKey = int | ListKey
"""An object by its id, or a list."""


class Draft:
    """``objects``, ``lists`` and ``intents`` hold what was written so far, on top of ``existing``; what is in
    ``objects`` or ``lists`` may equal the stored row. ``one_sided``: by pair, the coordinator's edges that were written
    without their mirrors. ``touched``: the keys that the current write named."""

    __slots__ = ("existing", "intents", "lists", "objects", "one_sided", "touched")

    def __init__(self, existing: ExistingRows) -> None:
        self.existing = existing
        self.objects: dict[int, ObjectRow] = {}
        self.lists: dict[ListKey, dict[EdgeKey, Edge | None]] = {}
        self.intents: dict[IntentKey, IntentRow | None] = {}
        self.one_sided: dict[IntentKey, set[EdgeKey]] = {}
        self.touched: list[TouchedKey] = []

    def object(self, object_id: int) -> ObjectRow | None:
        """The object's row as it is now. The write names it."""
        self.touched.append(object_id)
        return self.objects.get(object_id) or self.existing.objects.get(object_id)

    def set_object(self, row: ObjectRow) -> None:
        """``row`` carries the version that it had before; the plan gives it the next one."""
        self.objects[row.id] = row

    def edge(self, key: EdgeKey) -> Edge | None:
        """The edge as it is now."""
        edges = self.lists.get(ListKey(key.id1, key.atype))
        return edges[key] if edges is not None and key in edges else self.existing.edges.get(key)

    def set_edge(self, key: EdgeKey, edge: Edge | None) -> Edge | None:
        """Put or (None) remove the edge; returns what was there. The write names its list."""
        list_key = ListKey(key.id1, key.atype)
        self.touched.append(list_key)
        edges = self.lists.get(list_key)
        if edges is None:
            self.lists[list_key] = {key: edge}
            return self.existing.edges.get(key)
        previous = edges[key] if key in edges else self.existing.edges.get(key)
        edges[key] = edge
        return previous

    def name_list(self, key: EdgeKey) -> None:
        """The write names the edge's list without changing it."""
        self.touched.append(ListKey(key.id1, key.atype))

    def intent(self, key: IntentKey) -> IntentRow | None:
        """The pair's intent as it is now."""
        return self.intents[key] if key in self.intents else self.existing.intents.get(key)
