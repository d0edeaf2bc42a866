"""Which rows a write names, and who coordinates it (DESIGN.md §6).

An edge whose type has an inverse is two rows, one at each end, often on two shards. Were each end written by whoever
is called there, an add from one end and a delete from the other could pass each other and leave half an edge for ever.
So every such write of a *pair* of ids has one coordinator, the shard of the smaller id, whichever way the caller named
the edge; the row at that end is the truth, and the other one its mirror.
"""

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
"""What a touched key counts for among data: its edges are counted one by one, under lock."""


@dataclass(frozen=True, slots=True)
class PlannedWrite:
    """A write as its leader will do it. ``both_sides``: this leader owns the shards of both ends on one database
    server, so both rows are written in this transaction; otherwise the coordinator's alone, and an intent. It says
    nothing for writes that `coordinator_side` knows no pair of."""

    write: Write
    both_sides: bool


def coordinator_side(write: Write, schema: Schema) -> tuple[int, int] | None:
    """``(low_id, high_id)`` of a write that concerns two ids' rows; None for all others, an edge from an id to itself
    among them: both its rows lie in one place. Raises `UnknownType`."""
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
    """Whether the id that the caller names first is the one whose rows are a copy of the coordinator's."""
    pair = coordinator_side(write, schema)
    return pair is not None and getattr(write, "id1", pair[0]) == pair[1]


def coordinating_shard(write: Write, schema: Schema) -> int:
    """The shard whose owner does the write. Raises `UnknownType`."""
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
    """Every shard that the write touches when both sides are one transaction. Raises `UnknownType`."""
    pair = coordinator_side(write, schema)
    if pair is None:
        return frozenset((coordinating_shard(write, schema),))
    return frozenset((pair[0] >> SHARD_SHIFT, pair[1] >> SHARD_SHIFT))


def edges_of(write: Write, schema: Schema) -> Sequence[EdgeKey]:
    """The edges that the write may read or change, of both sides. Raises `UnknownType`."""
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
    """The edges of the sides that are written here."""
    edges = edges_of(planned.write, schema)
    if pair is None or planned.both_sides:
        return edges
    return [edge for edge in edges if edge.id1 == pair[0]]


def lane_keys(planned: PlannedWrite, schema: Schema) -> frozenset[Hashable]:
    """What no other open transaction may hold meanwhile: object ids, `ListKey`s and the `IntentKey` of the pair (so
    that the writes of a pair are one at a time). Raises `UnknownType`."""
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
    """The object's id, or the list."""
    return touch.id if touch.kind is TouchKind.OBJECT else ListKey(touch.id, touch.atype)


def mixes_touches(writes: Sequence[PlannedWrite], schema: Schema) -> bool:
    """Whether one of the writes changes a key that another touches. Who reads the binlog could not tell such a
    transaction from a foreign one, and would have the key touched again."""
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
                continue  # its own write fails of it
            if not touched.isdisjoint(keys):
                return True
    return False


def data_bytes_of(write: Write) -> int:
    """How much of a transaction the write takes up, in bytes of data."""
    match write:
        case ObjAdd(data=data) | AssocAdd(data=data) | SettleEdge(data=data) | ObjUpdate(patch=data):
            return len(data)
        case TouchKeys(touches=touches):
            return TOUCHED_KEY_BYTES * len(touches)
        case _:
            return 0


def keys_of(writes: Iterable[PlannedWrite], schema: Schema) -> WriteKeys:
    """The rows that a batch has to lock and read before it can be planned.

    A pair's intent is among them always: one may stand from before. A write of a type that has left the schema since
    it was queued names nothing here; `plan` gives it its error."""
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
