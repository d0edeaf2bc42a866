"""The draft of a write transaction: a working copy of the rows, and how each kind of write changes it.

The writes of a batch are applied to the draft one after the other, so each write sees the changes of those before it.
The draft is compared with the stored rows only at the end, so an add followed by a delete leaves no trace. The draft
also records what the plan needs to know: which keys the current write named, and which edges were written at the
coordinator's side alone.

All checks of a write come before its first change, so a write that raises has changed nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from tao.model.errors import InvalidArgument, RetryableError, Unavailable, UnknownType, WrongType
from tao.model.graph import ABSENT, Edge, EdgeKey, ListKey
from tao.model.rows import ExistingRows, IntentKey, IntentRow, ObjectRow
from tao.model.versions import NEVER_WRITTEN
from tao.model.writes import (
    AssocAdd,
    AssocChangeType,
    AssocDelete,
    ForgetIntent,
    ObjAdd,
    ObjDelete,
    ObjUpdate,
    SettleEdge,
    WriteOutcome,
)
from tao.schema.codec import merge_data, validate_new, validate_patch
from tao.schema.registry import Schema

VersionedKey = int | ListKey
"""An object's id, or the key of a list. Each has a version of its own."""


class Draft:
    """The rows as the writes so far have left them.

    ``objects``, ``lists`` and ``intents`` hold what was written, on top of ``existing``; an entry of ``objects`` or
    ``lists`` may equal the stored row. ``one_sided`` maps a pair to the coordinator's edges that were written
    without their mirrors. ``named_keys`` are the keys that the current write named. ``raised`` maps a key to a
    version that its next version must exceed, whether or not its rows change."""

    __slots__ = ("existing", "intents", "lists", "named_keys", "objects", "one_sided", "raised")

    def __init__(self, existing: ExistingRows) -> None:
        self.existing = existing
        self.objects: dict[int, ObjectRow] = {}
        self.lists: dict[ListKey, dict[EdgeKey, Edge | None]] = {}
        self.intents: dict[IntentKey, IntentRow | None] = {}
        self.one_sided: dict[IntentKey, set[EdgeKey]] = {}
        self.named_keys: list[VersionedKey] = []
        self.raised: dict[VersionedKey, int] = {}

    def object(self, object_id: int) -> ObjectRow | None:
        """Return the object's current row, and count the object as named by the current write."""
        self.named_keys.append(object_id)
        return self.objects.get(object_id) or self.existing.objects.get(object_id)

    def set_object(self, row: ObjectRow) -> None:
        """Put a row. It carries the version that it had before; the plan gives it the next one."""
        self.objects[row.id] = row

    def edge(self, key: EdgeKey) -> Edge | None:
        """Return the current edge, or None."""
        edges = self.lists.get(ListKey(key.id1, key.atype))
        return edges[key] if edges is not None and key in edges else self.existing.edges.get(key)

    def set_edge(self, key: EdgeKey, edge: Edge | None) -> Edge | None:
        """Put an edge, or remove it when ``edge`` is None; return the previous edge. The write names the edge's
        list."""
        list_key = ListKey(key.id1, key.atype)
        self.named_keys.append(list_key)
        edges = self.lists.get(list_key)
        if edges is None:
            self.lists[list_key] = {key: edge}
            return self.existing.edges.get(key)
        previous = edges[key] if key in edges else self.existing.edges.get(key)
        edges[key] = edge
        return previous

    def name_list(self, key: EdgeKey) -> None:
        """Count the edge's list as named by the current write, without changing it."""
        self.named_keys.append(ListKey(key.id1, key.atype))

    def raise_version(self, key: VersionedKey, above: int) -> None:
        """Raise the key's version above ``above``, and recount a list's edges. The write names the key.

        An object without a row gets a tombstone."""
        self.raised[key] = max(above, self.raised.get(key, NEVER_WRITTEN))
        if isinstance(key, int):
            self.objects[key] = self.object(key) or ObjectRow(key, ABSENT, NEVER_WRITTEN, True, b"")
        else:
            self.named_keys.append(key)
            self.lists.setdefault(key, {})

    def intent(self, key: IntentKey) -> IntentRow | None:
        """Return the pair's current intent, or None."""
        return self.intents[key] if key in self.intents else self.existing.intents.get(key)


class IdTaken(RetryableError):
    """The id that the leader allocated is in use.

    The leader allocates the next one and plans again. This error never leaves the leader."""

    reason: ClassVar[str] = "ID_TAKEN"


def add_object(draft: Draft, write: ObjAdd) -> WriteOutcome:
    """Add an object. Raises `IdTaken`, or `InvalidArgument` for a reserved id that was used for something else."""
    row = draft.object(write.id)
    if row is None:
        draft.set_object(ObjectRow(write.id, write.otype, NEVER_WRITTEN, False, write.data))
        return WriteOutcome(write.id)
    if write.allocated:
        raise IdTaken(f"id {write.id} is taken; allocate another")
    if row.deleted:
        raise InvalidArgument(f"object {write.id} was deleted, and ids are not used again; reserve a new id")
    if row.otype != write.otype or row.data != write.data:
        raise InvalidArgument(f"object {write.id} exists with other content; update it instead of adding it")
    return WriteOutcome(write.id, True)


def update_object(draft: Draft, write: ObjUpdate, schema: Schema) -> WriteOutcome:
    """Apply a patch. Raises `WrongType`, `InvalidField`, `UnknownType`, or `TooLarge` for the merged data."""
    row = draft.object(write.id)
    if row is None or row.deleted:
        return WriteOutcome(write.id)
    if not write.writable >> row.otype & 1:
        return WriteOutcome(write.id, otype=row.otype)
    otype = schema.otype(row.otype)
    _check_type(row, write.otype, schema)
    if not write.otype:
        # The fields can be validated only now that the type is known.
        validate_patch(otype, write.patch)
    data = merge_data(otype, row.data, write.patch)
    draft.set_object(ObjectRow(row.id, row.otype, row.version, False, data))
    return WriteOutcome(write.id, True, otype=row.otype)


def delete_object(draft: Draft, write: ObjDelete, schema: Schema) -> WriteOutcome:
    """Replace the object by a tombstone, so that its version never goes back. Its edges stay. Raises `WrongType`."""
    row = draft.object(write.id)
    if row is None or row.deleted:
        return WriteOutcome(write.id)
    if not write.writable >> row.otype & 1:
        return WriteOutcome(write.id, otype=row.otype)
    _check_type(row, write.otype, schema)
    draft.set_object(ObjectRow(row.id, row.otype, row.version, True, b""))
    return WriteOutcome(write.id, True, otype=row.otype)


def _check_type(row: ObjectRow, expected: int, schema: Schema) -> None:
    if expected not in (0, row.otype):
        actual, named = schema.otype(row.otype).name, schema.otype(expected).name
        raise WrongType(f"object {row.id} is of type {actual!r}, not {named!r}")


def add_edge(draft: Draft, write: AssocAdd, pair: IntentKey | None, schema: Schema) -> WriteOutcome:
    """Add an edge. ``pair`` is given when only the side of ``pair.low_id`` is written here."""
    id1, id2 = write.id1, write.id2
    inverse = schema.atype(write.atype).inverse
    if pair is not None and inverse is not None:
        own = _coordinator_edge(id1, write.atype, id2, inverse)
        edge = Edge(own.id2, write.time, write.data)
        return WriteOutcome(found=_set_one_side(draft, pair, own, edge) is not None)
    previous = draft.set_edge(EdgeKey(id1, write.atype, id2), Edge(id2, write.time, write.data))
    if inverse is None or (id1 == id2 and inverse == write.atype):
        return WriteOutcome(found=previous is not None)
    mirrored = draft.set_edge(EdgeKey(id2, inverse, id1), Edge(id1, write.time, write.data))
    return WriteOutcome(found=(previous if id1 <= id2 else mirrored) is not None)


def delete_edge(draft: Draft, write: AssocDelete, pair: IntentKey | None, schema: Schema) -> WriteOutcome:
    """Delete an edge. Deleting a missing edge succeeds; ``found`` says whether there was one."""
    id1, id2 = write.id1, write.id2
    inverse = schema.atype(write.atype).inverse
    if pair is not None and inverse is not None:
        own = _coordinator_edge(id1, write.atype, id2, inverse)
        return WriteOutcome(found=_set_one_side(draft, pair, own, None) is not None)
    previous = draft.set_edge(EdgeKey(id1, write.atype, id2), None)
    if inverse is None or (id1 == id2 and inverse == write.atype):
        return WriteOutcome(found=previous is not None)
    mirrored = draft.set_edge(EdgeKey(id2, inverse, id1), None)
    return WriteOutcome(found=(previous if id1 <= id2 else mirrored) is not None)


def change_edge_type(
    draft: Draft, write: AssocChangeType, pair: IntentKey | None, both_sides: bool, schema: Schema
) -> WriteOutcome:
    """Move the coordinator's edge and its mirror to another type.

    Raises `InvalidField` or `TooLarge` when the data does not fit the new type, `InvalidArgument` when no intent
    could express the move, and `Unavailable` when an older intent of the pair must be settled first."""
    id1, id2 = write.id1, write.id2
    old, new = schema.atype(write.atype), schema.atype(write.new_atype)
    if pair is not None and id1 != pair.low_id and (old.inverse is None) != (new.inverse is None):
        # The type without an inverse has its edge at the other side only, so a settler has nothing here to copy from.
        if both_sides:
            raise Unavailable(f"another write between {id1} and {id2} is still being settled; try again")
        raise InvalidArgument(
            f"the edge from {id1} to {id2} cannot change between {old.name!r} and {new.name!r}: one of them has an"
            " inverse and one has not, and the two ids live on different database servers; add the edge under the"
            " new type and delete the old one"
        )
    edge = draft.edge(_coordinator_edge(id1, old.number, id2, old.inverse))
    if edge is None or old.number == new.number:
        for key in _both_ends(id1, old.number, id2, old.inverse):
            if pair is None or key.id1 == pair.low_id:
                draft.name_list(key)
        return WriteOutcome(found=edge is not None)
    validate_new(new, edge.data)
    for atype, keep in ((old, False), (new, True)):
        for key in _both_ends(id1, atype.number, id2, atype.inverse):
            value = Edge(key.id2, edge.time, edge.data) if keep else None
            if pair is None:
                draft.set_edge(key, value)
            elif key.id1 == pair.low_id and atype.inverse is not None:
                _set_one_side(draft, pair, key, value)
            elif key.id1 == pair.low_id:
                draft.set_edge(key, value)
    return WriteOutcome(found=True)


def set_settled_edge(draft: Draft, write: SettleEdge) -> WriteOutcome:
    """Make one row equal to the coordinator's, without looking at any other row."""
    edge = Edge(write.id2, write.time, write.data) if write.present else None
    return WriteOutcome(found=draft.set_edge(EdgeKey(write.id1, write.atype, write.id2), edge) is not None)


def forget_intent(draft: Draft, write: ForgetIntent) -> WriteOutcome:
    """Remove the intent unless the pair was written since the intent was read.

    One intent too many costs a repair, one too few loses an edge."""
    key = IntentKey(write.low_id, write.high_id)
    intent = draft.intent(key)
    if intent is None or intent.token != write.token or key in draft.one_sided:
        return WriteOutcome()
    draft.intents[key] = None
    return WriteOutcome(found=True)


def settle_in_place(draft: Draft, pair: IntentKey, intent: IntentRow, schema: Schema) -> None:
    """Copy the coordinator's current edges to the other side, and drop the intent. The rows of both sides are known."""
    for settle in _settlement(intent, draft.edge, schema):
        set_settled_edge(draft, settle)
    draft.intents[pair] = None


def settle_writes(intent: IntentRow, coordinator_edges: Mapping[EdgeKey, Edge], schema: Schema) -> list[SettleEdge]:
    """Return the writes that make the other side of the pair equal to the coordinator's side.

    ``coordinator_edges`` holds the current rows of `coordinator_edges_of` the intent; an edge that is missing from
    it does not exist. Each write is idempotent, but of two settlements of one pair the older one must not arrive
    last."""
    return _settlement(intent, coordinator_edges.get, schema)


def coordinator_edges_of(intent: IntentRow) -> list[EdgeKey]:
    """Return the keys of the rows from which an intent is settled."""
    return [EdgeKey(intent.low_id, atype, intent.high_id) for atype in intent.atypes]


def _settlement(intent: IntentRow, edge_of: Callable[[EdgeKey], Edge | None], schema: Schema) -> list[SettleEdge]:
    writes: list[SettleEdge] = []
    for key in coordinator_edges_of(intent):
        try:
            inverse = schema.atype(key.atype).inverse
        except UnknownType:
            # The type has left the schema. Its edges are shown to nobody, and must not block the settlement of other
            # types.
            continue
        if inverse is None:
            continue
        edge = edge_of(key)
        if edge is None:
            writes.append(SettleEdge(key.id2, inverse, key.id1, False))
        else:
            writes.append(SettleEdge(key.id2, inverse, key.id1, True, edge.time, edge.data))
    return writes


def _coordinator_edge(id1: int, atype: int, id2: int, inverse: int | None) -> EdgeKey:
    """Return the key of the row that is authoritative when the two sides differ."""
    return EdgeKey(id1, atype, id2) if inverse is None or id1 <= id2 else EdgeKey(id2, inverse, id1)


def _both_ends(id1: int, atype: int, id2: int, inverse: int | None) -> tuple[EdgeKey, ...]:
    edge = EdgeKey(id1, atype, id2)
    return (edge,) if inverse is None else (edge, EdgeKey(id2, inverse, id1))


def _set_one_side(draft: Draft, pair: IntentKey, key: EdgeKey, edge: Edge | None) -> Edge | None:
    draft.one_sided.setdefault(pair, set()).add(key)
    return draft.set_edge(key, edge)
