"""Adding, deleting, changing and settling edges, on the working copy (DESIGN.md §2, §6).

Every check stands before the first change, so a write that raises has written nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tao.model.errors import InvalidArgument, Unavailable, UnknownType
from tao.model.graph import Edge, EdgeKey
from tao.model.rows import IntentKey, IntentRow
from tao.model.writes import AssocAdd, AssocChangeType, AssocDelete, ForgetIntent, SettleEdge, WriteOutcome
from tao.planning.draft import Draft
from tao.schema.codec import validate_data
from tao.schema.registry import Schema


def add_edge(draft: Draft, write: AssocAdd, pair: IntentKey | None, schema: Schema) -> WriteOutcome:
    """``pair`` is given when only the side of ``pair.low_id`` is written here."""
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
    """Deleting what is not there succeeds; ``found`` tells."""
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
    """Move the coordinator's edge and its mirror. Raises `InvalidField` or `TooLarge` when the data does not fit the
    new type; `InvalidArgument` when no intent could express the move (below)."""
    id1, id2 = write.id1, write.id2
    old, new = schema.atype(write.atype), schema.atype(write.new_atype)
    if pair is not None and id1 != pair.low_id and (old.inverse is None) != (new.inverse is None):
        # The type without inverse has its edge at the other side alone: nothing here for a settler to copy.
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
    validate_data(new, edge.data)
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
    """Make one row what the coordinator's says; no other row is looked at."""
    edge = Edge(write.id2, write.time, write.data) if write.present else None
    return WriteOutcome(found=draft.set_edge(EdgeKey(write.id1, write.atype, write.id2), edge) is not None)


def forget_intent(draft: Draft, write: ForgetIntent) -> WriteOutcome:
    """Remove the intent unless the pair was written since it was read: an intent too many costs a repair, one too
    few an edge."""
    key = IntentKey(write.low_id, write.high_id)
    intent = draft.intent(key)
    if intent is None or intent.token != write.token or key in draft.one_sided:
        return WriteOutcome()
    draft.intents[key] = None
    return WriteOutcome(found=True)


def settle_in_place(draft: Draft, pair: IntentKey, intent: IntentRow, schema: Schema) -> None:
    """Both sides are at hand: copy the coordinator's current edges to the other side, and drop the intent."""
    for settle in _settlement(intent, draft.edge, schema):
        set_settled_edge(draft, settle)
    draft.intents[pair] = None


def settle_writes(intent: IntentRow, coordinator_edges: Mapping[EdgeKey, Edge], schema: Schema) -> list[SettleEdge]:
    """The writes that make the other side of the pair equal to the coordinator's.

    ``coordinator_edges`` are the current rows for `coordinator_edges_of` the intent; what is missing in it does not
    exist. Each write is idempotent, but of two settlements of one pair the older must not arrive last."""
    return _settlement(intent, coordinator_edges.get, schema)


def coordinator_edges_of(intent: IntentRow) -> list[EdgeKey]:
    """The rows from which an intent is settled."""
    return [EdgeKey(intent.low_id, atype, intent.high_id) for atype in intent.atypes]


def _settlement(intent: IntentRow, edge_of: Callable[[EdgeKey], Edge | None], schema: Schema) -> list[SettleEdge]:
    writes: list[SettleEdge] = []
    for key in coordinator_edges_of(intent):
        try:
            inverse = schema.atype(key.atype).inverse
        except UnknownType:
            # The type has been retired since: its edges are shown to nobody, and must not hold up the others'.
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
    """The row that counts when the two differ."""
    return EdgeKey(id1, atype, id2) if inverse is None or id1 <= id2 else EdgeKey(id2, inverse, id1)


def _both_ends(id1: int, atype: int, id2: int, inverse: int | None) -> tuple[EdgeKey, ...]:
    edge = EdgeKey(id1, atype, id2)
    return (edge,) if inverse is None else (edge, EdgeKey(id2, inverse, id1))


def _set_one_side(draft: Draft, pair: IntentKey, key: EdgeKey, edge: Edge | None) -> Edge | None:
    draft.one_sided.setdefault(pair, set()).add(key)
    return draft.set_edge(key, edge)
