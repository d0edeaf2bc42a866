"""Find the rows that a write names, and the shard that coordinates it.

An edge whose type has an inverse is stored as two rows, one at each end, often on two shards. If each end were
written by the leader that the caller happens to reach, an add from one end and a delete from the other could pass
each other and leave half an edge for ever. So all writes of a *pair* of ids have one coordinator: the shard of the
smaller id, whichever id the caller names first. The row at that end is authoritative, and the row at the other end
is its mirror."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tao.model.errors import UnknownType
from tao.model.graph import EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.relay import Touch, TouchKind
from tao.model.rows import IntentKey, WriteKeys
from tao.model.writes import (
    AssocAdd,
    AssocChangeType,
    AssocDelete,
    ForgetIntent,
    ObjAdd,
    ObjDelete,
    ObjUpdate,
    SettleEdge,
    TouchKeys,
    Write,
)
from tao.schema.registry import Schema

TOUCHED_KEY_BYTES: Final = 8 << 10
"""Bytes that a touched key counts against the size bound of a transaction: its edges are counted one by one under
lock."""


@dataclass(frozen=True, slots=True)
class PlannedWrite:
    """A write, and where its leader executes it.

    ``both_sides``: this leader owns the shards of both ends on one database server, so one transaction writes both
    rows. Otherwise it writes only the coordinator's row and an intent. The field has no meaning for writes for which
    `coordinator_side` returns None."""

    write: Write
    both_sides: bool


def coordinator_side(write: Write, schema: Schema) -> tuple[int, int] | None:
    """Return ``(low_id, high_id)`` of a write that changes the rows of two ids, else None.

    An edge from an id to itself gives None, too: both of its rows are stored in one place. Raises `UnknownType`."""
    match write:
        case AssocAdd(id1=id1, id2=id2, atype=atype) | AssocDelete(id1=id1, id2=id2, atype=atype):
            paired = schema.atype(atype).inverse is not None
        case AssocChangeType(id1=id1, id2=id2, atype=atype, new_atype=new):
            paired = schema.atype(atype).inverse is not None or schema.atype(new).inverse is not None
        case _:
            return None
    if not paired or id1 == id2:
        return None
    return (id1, id2) if id1 < id2 else (id2, id1)


def names_far_side(write: Write, schema: Schema) -> bool:
    """Return whether the id that the caller names first is the larger one, whose rows mirror the coordinator's."""
    pair = coordinator_side(write, schema)
    return pair is not None and getattr(write, "id1", pair[0]) == pair[1]


def coordinating_shard(write: Write, schema: Schema) -> int:
    """Return the shard whose owner executes the write. Raises `UnknownType`."""
    pair = coordinator_side(write, schema)
    if pair is not None:
        return pair[0] >> SHARD_SHIFT
    match write:
        case ObjAdd(id=home) | ObjUpdate(id=home) | ObjDelete(id=home) | ForgetIntent(low_id=home):
            return home >> SHARD_SHIFT
        case AssocAdd(id1=home) | AssocDelete(id1=home) | AssocChangeType(id1=home) | SettleEdge(id1=home):
            return home >> SHARD_SHIFT
        case TouchKeys(shard=shard):
            return shard


def shards_of(write: Write, schema: Schema) -> frozenset[int]:
    """Return every shard that the write changes when one transaction writes both sides. Raises `UnknownType`."""
    pair = coordinator_side(write, schema)
    if pair is None:
        return frozenset((coordinating_shard(write, schema),))
    return frozenset((pair[0] >> SHARD_SHIFT, pair[1] >> SHARD_SHIFT))


def edges_of(write: Write, schema: Schema) -> Sequence[EdgeKey]:
    """Return the edges of both sides that the write may read or change. Raises `UnknownType`."""
    match write:
        case AssocAdd(id1=id1, id2=id2, atype=atype) | AssocDelete(id1=id1, id2=id2, atype=atype):
            return _with_inverse(id1, atype, id2, schema)
        case AssocChangeType(id1=id1, id2=id2, atype=atype, new_atype=new):
            return (*_with_inverse(id1, atype, id2, schema), *_with_inverse(id1, new, id2, schema))
        case SettleEdge(id1=id1, atype=atype, id2=id2):
            return (EdgeKey(id1, atype, id2),)
        case _:
            return ()


def _with_inverse(id1: int, atype: int, id2: int, schema: Schema) -> Sequence[EdgeKey]:
    inverse = schema.atype(atype).inverse
    edge = EdgeKey(id1, atype, id2)
    return (edge,) if inverse is None else (edge, EdgeKey(id2, inverse, id1))


def _edges_within(planned: PlannedWrite, pair: tuple[int, int] | None, schema: Schema) -> Iterable[EdgeKey]:
    """Return the edges of the sides that this leader writes."""
    edges = edges_of(planned.write, schema)
    if pair is None or planned.both_sides:
        return edges
    return [edge for edge in edges if edge.id1 == pair[0]]


def lane_keys(planned: PlannedWrite, schema: Schema) -> frozenset[Hashable]:
    """Return the keys that no other open transaction may hold meanwhile. Raises `UnknownType`.

    They are object ids, `ListKey`s and the `IntentKey` of the pair, so that only one write of a pair runs at a time."""
    write = planned.write
    match write:
        case ObjAdd(id=home) | ObjUpdate(id=home) | ObjDelete(id=home):
            return frozenset((home,))
        case ForgetIntent(low_id=low, high_id=high):
            return frozenset((IntentKey(low, high),))
        case TouchKeys(touches=touches):
            return frozenset(touched_key(touch) for touch in touches)
        case _:
            pair = coordinator_side(write, schema)
            keys: list[Hashable] = [ListKey(edge.id1, edge.atype) for edge in _edges_within(planned, pair, schema)]
            if pair is not None:
                keys.append(IntentKey(*pair))
            return frozenset(keys)


def touched_key(touch: Touch) -> int | ListKey:
    """Return the object's id, or the key of the list."""
    return touch.id if touch.kind is TouchKind.OBJECT else ListKey(touch.id, touch.atype)


def mixes_touches(writes: Sequence[PlannedWrite], schema: Schema) -> bool:
    """Return whether one of the writes changes a key that another one touches.

    A reader of the binlog could not tell such a transaction from a foreign one, and would have the key touched
    again."""
    touched: set[Hashable] = set()
    for planned in writes:
        if isinstance(planned.write, TouchKeys):
            touched |= lane_keys(planned, schema)
    if not touched:
        return False
    for planned in writes:
        if not isinstance(planned.write, TouchKeys):
            try:
                keys = lane_keys(planned, schema)
            except UnknownType:
                continue  # planning reports the error of this write
            if not touched.isdisjoint(keys):
                return True
    return False


def data_bytes_of(write: Write) -> int:
    """Return the share of a transaction's size bound that the write uses, in bytes of data."""
    match write:
        case ObjAdd(data=data) | AssocAdd(data=data) | SettleEdge(data=data) | ObjUpdate(patch=data):
            return len(data)
        case TouchKeys(touches=touches):
            return TOUCHED_KEY_BYTES * len(touches)
        case _:
            return 0


def keys_of(writes: Iterable[PlannedWrite], schema: Schema) -> WriteKeys:
    """Return the rows that a batch has to lock and read before it can be planned.

    They always include the intents of the pairs, because an earlier transaction may have left one. A write of a type
    that has left the schema since it was queued names no rows here; `plan_writes` gives it its error."""
    keys = WriteKeys()
    for planned in writes:
        write = planned.write
        match write:
            case ObjAdd(id=home) | ObjUpdate(id=home) | ObjDelete(id=home):
                keys.objects.add(home)
            case ForgetIntent(low_id=low, high_id=high):
                keys.intents.add(IntentKey(low, high))
            case TouchKeys(touches=touches):
                for key in map(touched_key, touches):
                    if isinstance(key, int):
                        keys.objects.add(key)
                    elif schema.knows_atype(key.atype):
                        keys.lists.add(key)
                        keys.recounts.add(key)
            case _:
                try:
                    pair = coordinator_side(write, schema)
                    edges = _edges_within(planned, pair, schema)
                except UnknownType:
                    continue
                if pair is not None:
                    keys.intents.add(IntentKey(*pair))
                for edge in edges:
                    keys.edges.add(edge)
                    keys.lists.add(ListKey(edge.id1, edge.atype))
    return keys
