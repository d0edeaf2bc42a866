"""The working copy to which a batch's writes are applied one after the other.

Each write sees what those before it in the batch did; nothing is compared with the stored rows until the end, so that
an add followed by a delete leaves no trace. Beside the values it keeps what the plan needs to know of the way: which
keys the current write named, and which edges were written at the coordinator's side alone.
"""

from __future__ import annotations

from tao.model.graph import ABSENT, Edge, EdgeKey, ListKey
from tao.model.rows import ExistingRows, IntentKey, IntentRow, ObjectRow
from tao.model.versions import NEVER_WRITTEN

TouchedKey = int | ListKey
"""An object by its id, or a list."""


class Draft:
    """``objects``, ``lists`` and ``intents`` hold what was written so far, on top of ``existing``; what is in
    ``objects`` or ``lists`` may equal the stored row. ``one_sided``: by pair, the coordinator's edges that were written
    without their mirrors. ``touched``: the keys that the current write named. ``raised``: keys whose version must rise
    above this one, whether or not their rows change."""

    __slots__ = ("existing", "intents", "lists", "objects", "one_sided", "raised", "touched")

    def __init__(self, existing: ExistingRows) -> None:
        self.existing = existing
        self.objects: dict[int, ObjectRow] = {}
        self.lists: dict[ListKey, dict[EdgeKey, Edge | None]] = {}
        self.intents: dict[IntentKey, IntentRow | None] = {}
        self.one_sided: dict[IntentKey, set[EdgeKey]] = {}
        self.touched: list[TouchedKey] = []
        self.raised: dict[TouchedKey, int] = {}

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

    def raise_version(self, key: TouchedKey, above: int) -> None:
        """Have the key's version rise, a list's count be what its edges are. An object without a row gets a tombstone.
        The write names the key."""
        self.raised[key] = max(above, self.raised.get(key, NEVER_WRITTEN))
        if isinstance(key, int):
            self.objects[key] = self.object(key) or ObjectRow(key, ABSENT, NEVER_WRITTEN, True, b"")
        else:
            self.touched.append(key)
            self.lists.setdefault(key, {})

    def intent(self, key: IntentKey) -> IntentRow | None:
        """The pair's intent as it is now."""
        return self.intents[key] if key in self.intents else self.existing.intents.get(key)
