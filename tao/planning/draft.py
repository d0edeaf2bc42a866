"""The draft of a write transaction: a working copy of the rows, and how each kind of write changes it.

The writes of a batch are applied to the draft one after the other, so each write sees the changes of those before it.
The draft is compared with the stored rows only at the end, so an add followed by a delete leaves no trace. The draft
also records what the plan needs to know: which keys the current write named, and which edges were written at the
coordinator's side alone.

All checks of a write come before its first change, so a write that raises has changed nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, NamedTuple

from tao.model.edge_states import NO_OPERATION, UNSET_NODE, EdgeRegisters, NodeState
from tao.model.errors import InvalidArgument, ListFull, ObjectDeleted, RetryableError, Unavailable, WrongType
from tao.model.graph import ABSENT, Edge, EdgeKey, ListKey
from tao.model.jobs import JobRow, PausedKind
from tao.model.rows import ExistingRows, IntentKey, IntentRow, ObjectRow
from tao.model.versions import NEVER_WRITTEN
from tao.model.writes import (
    AnnounceIntent,
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
from tao.schema.types import AssocType

_NO_REGISTERS: Final[Mapping[EdgeKey, EdgeRegisters]] = {}
VersionedKey = int | ListKey
"""An object's id, or the key of a list. Each has a version of its own."""


class PlacedEdge(NamedTuple):
    """The registers of a written edge of a type with states, and the type in whose list it is."""

    registers: EdgeRegisters
    place: int


class Draft:
    """The rows as the writes so far have left them.

    ``objects``, ``lists`` and ``intents`` hold what was written, on top of ``existing``; an entry of ``objects`` or
    ``lists`` may equal the stored row. ``one_sided`` maps a pair to the coordinator's edges that were written
    without their mirrors. ``named_keys`` are the keys that the current write named. ``raised`` maps a key to a
    version that its next version must exceed, whether or not its rows change. ``announced`` maps a pair to the types
    of edges whose intent is recorded before they are written. ``grown`` is the number of edges that a list has gained,
    where that is not 0. ``states`` maps written edges of types with states, by their type, to their registers and
    places (`tao.planning.edge_states`), and ``nodes`` nodes to the states that were written. ``jobs`` maps written jobs
    to their rows, None for those that are removed (`tao.planning.jobs`), and ``paused_jobs`` the written kinds to
    whether they are paused."""

    __slots__ = (
        *("announced", "existing", "grown", "intents", "lists", "named_keys", "objects", "one_sided", "raised"),
        *("jobs", "nodes", "paused_jobs", "states"),
    )

    def __init__(self, existing: ExistingRows) -> None:
        self.existing = existing
        self.objects: dict[int, ObjectRow] = {}
        self.lists: dict[ListKey, dict[EdgeKey, Edge | None]] = {}
        self.intents: dict[IntentKey, IntentRow | None] = {}
        self.one_sided: dict[IntentKey, set[EdgeKey]] = {}
        self.named_keys: list[VersionedKey] = []
        self.raised: dict[VersionedKey, int] = {}
        self.announced: dict[IntentKey, tuple[int, ...]] = {}
        self.grown: dict[ListKey, int] = {}
        self.states: dict[EdgeKey, PlacedEdge] = {}
        self.nodes: dict[ListKey, NodeState] = {}
        self.jobs: dict[int, JobRow | None] = {}
        self.paused_jobs: dict[PausedKind, bool] = {}

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
            previous = self.existing.edges.get(key)
        else:
            previous = edges[key] if key in edges else self.existing.edges.get(key)
            edges[key] = edge
        if (edge is None) is not (previous is None):
            self.grown[list_key] = self.grown.get(list_key, 0) + (1 if previous is None else -1)
        return previous

    def delete_oldest(self, key: EdgeKey) -> None:
        """Remove an edge of a list that a write has named, on behalf of that write."""
        list_key = ListKey(key.id1, key.atype)
        self.lists[list_key][key] = None
        self.grown[list_key] -= 1

    def length(self, key: ListKey) -> int:
        """Return the current number of edges of a list whose row was read."""
        row = self.existing.lists.get(key)
        return (0 if row is None else row.count) + self.grown.get(key, 0)

    def name_list(self, key: EdgeKey) -> None:
        """Count the edge's list as named by the current write, without changing it."""
        self.named_keys.append(ListKey(key.id1, key.atype))

    def node(self, key: ListKey) -> NodeState:
        """Return the current state of a node for its edges of a type with states."""
        return self.nodes.get(key) or self.existing.nodes.get(key, UNSET_NODE)

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

    def job(self, job_id: int) -> JobRow | None:
        """Return the current row of a job, or None."""
        return self.jobs[job_id] if job_id in self.jobs else self.existing.jobs.get(job_id)

    def is_paused(self, key: PausedKind) -> bool:
        """Return whether the kind of jobs is paused on the shard."""
        return self.paused_jobs.get(key, key in self.existing.paused_jobs)


class IdTaken(RetryableError):
    """The id that the leader allocated is in use.

    The leader allocates the next one and plans again. This error never leaves the leader."""

    reason: ClassVar[str] = "ID_TAKEN"


class SchemaBehind(Unavailable):
    """The schema here lacks a type of an intent, which another server has had already."""


def add_object(draft: Draft, write: ObjAdd) -> WriteOutcome:
    """Add an object. Raises `IdTaken`, and for a reserved id that was used `ObjectDeleted` or `InvalidArgument`."""
    row = draft.object(write.id)
    if row is None:
        draft.set_object(ObjectRow(write.id, write.otype, NEVER_WRITTEN, False, write.data))
        return WriteOutcome(write.id)
    if write.allocated:
        raise IdTaken(f"id {write.id} is taken; allocate another")
    if row.deleted:
        raise ObjectDeleted(f"object {write.id} was deleted, and ids are not used again; reserve a new id")
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


def check_room(draft: Draft, key: EdgeKey, atype: AssocType) -> None:
    """Raise `ListFull` for a new edge of a list that has as many as its type allows."""
    if atype.max_edges is None or draft.edge(key) is not None:
        return
    length = draft.length(ListKey(key.id1, key.atype))
    if length >= atype.max_edges:
        raise ListFull(
            f"list {atype.name!r} of {key.id1} has {length} edges, and its type allows {atype.max_edges}: delete one "
            "before you add another"
        )


def add_edge(draft: Draft, write: AssocAdd, atype: AssocType, pair: IntentKey | None, schema: Schema) -> WriteOutcome:
    """Add an edge of type ``atype``. ``pair`` is given when only the side of ``pair.low_id`` is written here. Raises
    `ListFull`."""
    id1, id2, inverse = write.id1, write.id2, atype.inverse
    ends = _both_ends(id1, write.atype, id2, inverse)
    _check_rooms(draft, ends, atype, pair, schema)
    if pair is not None and inverse is not None:
        own = _coordinator_edge(id1, write.atype, id2, inverse)
        edge = Edge(own.id2, write.time, write.data)
        return WriteOutcome(found=_set_one_side(draft, pair, own, edge) is not None)
    previous = draft.set_edge(ends[0], Edge(id2, write.time, write.data))
    if inverse is None or (id1 == id2 and inverse == write.atype):
        return WriteOutcome(found=previous is not None)
    mirrored = draft.set_edge(ends[1], Edge(id1, write.time, write.data))
    return WriteOutcome(found=(previous if id1 <= id2 else mirrored) is not None)


def _check_rooms(
    draft: Draft, ends: Sequence[EdgeKey], atype: AssocType, pair: IntentKey | None, schema: Schema
) -> None:
    """Check the lists of `_both_ends` that are written here. A far side that is written elsewhere was checked there
    before."""
    for end, of_end in zip(ends, (atype, schema.inverse_of(atype)), strict=False):
        if of_end is not None and of_end.max_edges is not None and (pair is None or end.id1 == pair.low_id):
            check_room(draft, end, of_end)


def delete_edge(draft: Draft, write: AssocDelete, atype: AssocType, pair: IntentKey | None) -> WriteOutcome:
    """Delete an edge of type ``atype``. Deleting a missing edge succeeds; ``found`` says whether there was one."""
    id1, id2, inverse = write.id1, write.id2, atype.inverse
    if pair is not None and inverse is not None:
        own = _coordinator_edge(id1, write.atype, id2, inverse)
        return WriteOutcome(found=_set_one_side(draft, pair, own, None) is not None)
    previous = draft.set_edge(EdgeKey(id1, write.atype, id2), None)
    if inverse is None or (id1 == id2 and inverse == write.atype):
        return WriteOutcome(found=previous is not None)
    mirrored = draft.set_edge(EdgeKey(id2, inverse, id1), None)
    return WriteOutcome(found=(previous if id1 <= id2 else mirrored) is not None)


def change_edge_type(draft: Draft, write: AssocChangeType, pair: IntentKey | None, schema: Schema) -> WriteOutcome:
    """Move the coordinator's edge and its mirror to another type.

    Raises `InvalidField` or `TooLarge` when the data does not fit the new type, and `InvalidArgument` when no intent
    could express the move."""
    id1, id2 = write.id1, write.id2
    old, new = schema.atype(write.atype), schema.atype(write.new_atype)
    if pair is not None and id1 != pair.low_id and (old.inverse is None) != (new.inverse is None):
        # The type without an inverse has its edge at the other side only, so a settler has nothing here to copy from.
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
    _check_rooms(draft, _both_ends(id1, new.number, id2, new.inverse), new, pair, schema)
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


def set_settled_edge(draft: Draft, write: SettleEdge, schema: Schema) -> WriteOutcome:
    """Make one row equal to the coordinator's, without looking at any other row. Raises `ListFull` for one that is
    written before the coordinator's."""
    if write.if_room and write.present:
        check_room(draft, EdgeKey(write.id1, write.atype, write.id2), schema.atype(write.atype))
    edge = Edge(write.id2, write.time, write.data) if write.present else None
    return WriteOutcome(found=draft.set_edge(EdgeKey(write.id1, write.atype, write.id2), edge) is not None)


def announce_intent(draft: Draft, write: AnnounceIntent, schema: Schema) -> WriteOutcome:
    """Record the intent of a pair, or add types to it. Raises `ListFull` when the coordinator's own list has no room,
    before the other side is asked."""
    check_room(draft, EdgeKey(write.low_id, write.adds, write.high_id), schema.atype(write.adds))
    draft.announced[IntentKey(write.low_id, write.high_id)] = write.atypes
    return WriteOutcome(found=True)


def forget_intent(draft: Draft, write: ForgetIntent) -> WriteOutcome:
    """Remove the intent unless the pair was written since the intent was read.

    One intent too many costs a repair, one too few loses an edge."""
    key = IntentKey(write.low_id, write.high_id)
    intent = draft.intent(key)
    if intent is None or intent.token != write.token or key in draft.one_sided or key in draft.announced:
        return WriteOutcome()
    draft.intents[key] = None
    return WriteOutcome(found=True)


def settle_writes(
    intent: IntentRow,
    coordinator_edges: Mapping[EdgeKey, Edge],
    schema: Schema,
    registers: Mapping[EdgeKey, EdgeRegisters] = _NO_REGISTERS,
) -> list[SettleEdge]:
    """Return the writes that make the other side of the pair equal to the coordinator's side.

    ``coordinator_edges`` holds the current rows of `coordinator_edges_of` the intent, ``registers`` those of types with
    states, as the far side is to join them; an edge that is missing there does not exist. Each write is idempotent, but
    of two settlements of one pair the older one must not arrive last, except of types with states. Raises
    `SchemaBehind`: the intent has to stay."""
    lacking = atypes_lacking(intent, schema)
    if lacking:
        raise SchemaBehind(
            f"the schema here lacks the association types {lacking} of edges between {intent.low_id} and "
            f"{intent.high_id}: they can be settled when it is the newest one"
        )
    writes: list[SettleEdge] = []
    for key in coordinator_edges_of(intent):
        if not schema.knows_atype(key.atype):
            # The type has left the schema. Its edges are shown to nobody, and must not block the settlement of other
            # types.
            continue
        known = schema.atype(key.atype)
        inverse = known.inverse
        if inverse is None:
            continue
        if known.states:
            found = registers.get(key, NO_OPERATION)
            present = found.has_operation
            writes.append(SettleEdge(key.id2, inverse, key.id1, present, found.time, found.data, registers=found))
            continue
        edge = coordinator_edges.get(key)
        if edge is None:
            writes.append(SettleEdge(key.id2, inverse, key.id1, False))
        else:
            writes.append(SettleEdge(key.id2, inverse, key.id1, True, edge.time, edge.data))
    return writes


def atypes_lacking(intent: IntentRow, schema: Schema) -> list[int]:
    """Return the types of an intent that the schema does not have yet: they are not among those that have left it."""
    return [each for each in intent.atypes if not schema.knows_atype(each) and each not in schema.reserved_atypes]


def coordinator_edges_of(intent: IntentRow) -> list[EdgeKey]:
    """Return the keys of the rows from which an intent is settled."""
    return [EdgeKey(intent.low_id, atype, intent.high_id) for atype in intent.atypes]


def _coordinator_edge(id1: int, atype: int, id2: int, inverse: int | None) -> EdgeKey:
    """Return the key of the row that is authoritative when the two sides differ."""
    return EdgeKey(id1, atype, id2) if inverse is None or id1 <= id2 else EdgeKey(id2, inverse, id1)


def _both_ends(id1: int, atype: int, id2: int, inverse: int | None) -> tuple[EdgeKey, ...]:
    edge = EdgeKey(id1, atype, id2)
    return (edge,) if inverse is None else (edge, EdgeKey(id2, inverse, id1))


def _set_one_side(draft: Draft, pair: IntentKey, key: EdgeKey, edge: Edge | None) -> Edge | None:
    draft.one_sided.setdefault(pair, set()).add(key)
    return draft.set_edge(key, edge)
