"""Find the rows that a write names, and the shard that coordinates it.

An edge whose type has an inverse is stored as two rows, one at each end, often on two shards. If each end were
written by the leader that the caller happens to reach, an add from one end and a delete from the other could pass
each other and leave half an edge for ever. So all writes of a *pair* of ids have one coordinator: the shard of the
smaller id, whichever id the caller names first. The row at that end is authoritative, and the row at the other end
is its mirror."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from tao.model.counters import FOLDED_SLOT
from tao.model.edge_states import State
from tao.model.errors import UnknownType
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import PausedKind, node_job_id
from tao.model.relay import Touch, TouchKind
from tao.model.rows import IntentKey, WriteKeys
from tao.model.writes import (
    AddJob,
    AnnounceIntent,
    AssocAdd,
    AssocChangeType,
    AssocDelete,
    AssocMerge,
    CancelJob,
    FlushCounter,
    FoldCounter,
    ForgetIntent,
    ForgetJob,
    JoinEdges,
    LeaseJob,
    NodeSetState,
    ObjAdd,
    ObjDelete,
    ObjUpdate,
    PauseJobs,
    PlaceEdges,
    PurgeEdge,
    ReadJob,
    ReadState,
    ReportJob,
    ResumeJob,
    SettleEdge,
    TouchKeys,
    Write,
)
from tao.schema.registry import Schema

TOUCHED_KEY_BYTES: Final = 8 << 10
"""Bytes that a touched key counts against the size bound of a transaction: its edges are counted one by one under
lock."""

PLACED_EDGE_BYTES: Final = 1 << 10
"""Bytes that an edge of a page counts against the size bound of a transaction: its row is locked, and may move."""

JOINED_EDGE_BYTES: Final = 64 << 10
"""The same for an edge that is joined together with others. So a transaction has as many of them as it may have writes:
their lists are those of as many nodes, for whose other writes they are locked."""


class PlannedWrite(msgspec.Struct, frozen=True):
    """A write, and where its leader executes it.

    ``both_sides``: this leader owns the shards of both ends on one database server, so one transaction writes both
    rows. Otherwise it writes only the coordinator's row and an intent. All writes of a pair that are under way agree
    on it (`tao.leader.pair_locks`). The field has no meaning for writes for which `coordinator_side` returns None."""

    write: Write
    both_sides: bool


def coordinator_side(write: Write, schema: Schema) -> tuple[int, int] | None:
    """Return ``(low_id, high_id)`` of a write that changes the rows of two ids, else None.

    An edge from an id to itself gives None, too: both of its rows are stored in one place. Raises `UnknownType`."""
    match write:
        case (
            AssocAdd(id1=id1, id2=id2, atype=atype)
            | AssocDelete(id1=id1, id2=id2, atype=atype)
            | AssocMerge(id1=id1, id2=id2, atype=atype)
        ):
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
    return _home_shard(write) if pair is None else pair[0] >> SHARD_SHIFT


def _home_shard(write: Write) -> int:
    match write:
        case ObjAdd(id=home) | ObjUpdate(id=home) | ObjDelete(id=home) | NodeSetState(id=home):
            return home >> SHARD_SHIFT
        case FlushCounter(id=home) | FoldCounter(id=home):
            return home >> SHARD_SHIFT
        case AnnounceIntent(low_id=home) | ForgetIntent(low_id=home):
            return home >> SHARD_SHIFT
        case AssocAdd(id1=home) | AssocDelete(id1=home) | AssocChangeType(id1=home) | SettleEdge(id1=home):
            return home >> SHARD_SHIFT
        case AssocMerge(id1=home) | ReadState(id1=home) | PlaceEdges(id1=home) | PurgeEdge(id1=home):
            return home >> SHARD_SHIFT
        case JoinEdges(edges=edges):
            return edges[0].id1 >> SHARD_SHIFT
        case TouchKeys(shard=shard) | PauseJobs(shard=shard):
            return shard
        case AddJob(job=job):
            return job.id >> SHARD_SHIFT
        case LeaseJob() | ReportJob() | ReadJob() | CancelJob() | ResumeJob() | ForgetJob():
            return write.id >> SHARD_SHIFT


class Scope(NamedTuple):
    """Where a write acts. ``pair``: `coordinator_side`. ``home``: `coordinating_shard`. ``shards``: `shards_of`."""

    pair: tuple[int, int] | None
    home: int
    shards: frozenset[int]


def scope_of(write: Write, schema: Schema) -> Scope:
    """Return where the write acts, for callers that need more than a part of it. Raises `UnknownType`."""
    pair = coordinator_side(write, schema)
    if pair is None:
        home = _home_shard(write)
        return Scope(None, home, frozenset((home,)))
    home = pair[0] >> SHARD_SHIFT
    return Scope(pair, home, frozenset((home, pair[1] >> SHARD_SHIFT)))


def shards_of(write: Write, schema: Schema) -> frozenset[int]:
    """Return every shard that the write changes when one transaction writes both sides. Raises `UnknownType`."""
    return scope_of(write, schema).shards


def bounds_length(write: AssocChangeType, schema: Schema) -> bool:
    """Return whether the type that an edge changes to, or its inverse, bounds the length of lists."""
    new = schema.atype(write.new_atype)
    inverse = schema.inverse_of(new)
    return new.max_edges is not None or (inverse is not None and inverse.max_edges is not None)


def edges_of(write: Write, schema: Schema) -> Sequence[EdgeKey]:
    """Return the edges of both sides that the write may read or change. Raises `UnknownType`."""
    return _with_state_types(_ends_of(write, schema), schema)


def _ends_of(write: Write, schema: Schema) -> Sequence[EdgeKey]:
    """Return the same edges, each once, under the type that has the states. Raises `UnknownType`."""
    match write:
        case (
            AssocAdd(id1=id1, id2=id2, atype=atype)
            | AssocDelete(id1=id1, id2=id2, atype=atype)
            | AssocMerge(id1=id1, id2=id2, atype=atype)
        ):
            return _with_inverse(id1, atype, id2, schema)
        case AssocChangeType(id1=id1, id2=id2, atype=atype, new_atype=new):
            return (*_with_inverse(id1, atype, id2, schema), *_with_inverse(id1, new, id2, schema))
        case (
            SettleEdge(id1=id1, atype=atype, id2=id2)
            | ReadState(id1=id1, atype=atype, id2=id2)
            | PurgeEdge(id1=id1, atype=atype, id2=id2)
        ):
            return (EdgeKey(id1, atype, id2),)
        case JoinEdges(edges=copies):
            return [EdgeKey(copy.id1, copy.atype, copy.id2) for copy in copies]
        case FlushCounter(id=home, counter=counter, slot=slot):
            return (EdgeKey(home, counter, slot),)
        case FoldCounter(id=home, counter=counter, slots=slots):
            return [EdgeKey(home, counter, slot) for slot in (FOLDED_SLOT, *slots)]
        case _:
            return ()


def _with_inverse(id1: int, atype: int, id2: int, schema: Schema) -> Sequence[EdgeKey]:
    inverse = schema.atype(atype).inverse
    edge = EdgeKey(id1, atype, id2)
    return (edge,) if inverse is None else (edge, EdgeKey(id2, inverse, id1))


def _with_state_types(ends: Sequence[EdgeKey], schema: Schema) -> Sequence[EdgeKey]:
    """Return the keys of the rows that may hold these edges: one in each state type of a type with states."""
    found: list[EdgeKey] = []
    for end in ends:
        known = schema.atype(end.atype)
        if known.states:
            found += [EdgeKey(end.id1, number, end.id2) for number in known.state_numbers]
        else:
            found.append(end)
    return found


def _pair_and_ends(planned: PlannedWrite, schema: Schema) -> tuple[tuple[int, int] | None, Sequence[EdgeKey]]:
    """Return `coordinator_side`, and the ends of edges that this leader writes. Raises `UnknownType`."""
    write = planned.write
    pair: tuple[int, int] | None
    ends: Sequence[EdgeKey]
    if isinstance(write, (AssocAdd, AssocDelete)):  # most writes: with one look at the type
        id1, id2 = write.id1, write.id2
        ends = _with_inverse(id1, write.atype, id2, schema)
        pair = None if len(ends) == 1 or id1 == id2 else (id1, id2) if id1 < id2 else (id2, id1)
    else:
        pair, ends = coordinator_side(write, schema), _ends_of(write, schema)
    if pair is None or planned.both_sides:
        return pair, ends
    return pair, [end for end in ends if end.id1 == pair[0]]


def lane_keys(planned: PlannedWrite, schema: Schema) -> frozenset[Hashable]:
    """Return the keys that no other open transaction may hold meanwhile. Raises `UnknownType`.

    They are object ids, `ListKey`s and the `IntentKey` of the pair, so that only one write of a pair runs at a time.
    The lists of all states of a type have one key: a write of an edge may turn out to change any of them, and locks
    those it did not expect after the others, which keeps no order that two writes would share."""
    write = planned.write
    match write:
        case AssocAdd() | AssocDelete():  # first, because most writes are one of these
            return _lane_keys_of_edges(planned, schema)
        case ObjAdd(id=home) | ObjUpdate(id=home) | ObjDelete(id=home):
            return frozenset((home,))
        case ForgetIntent(low_id=low, high_id=high):
            return frozenset((IntentKey(low, high),))
        case AnnounceIntent(low_id=low, high_id=high, atypes=atypes):
            return frozenset((IntentKey(low, high), *(ListKey(low, atype) for atype in atypes)))
        case TouchKeys(touches=touches):
            return frozenset(_lane_key_of(touched_key(touch), schema) for touch in touches)
        case NodeSetState(id=home, atypes=atypes):
            return frozenset((*_node_jobs(write), *(ListKey(home, atype) for atype in atypes)))
        case PlaceEdges(id1=home, atype=atype):
            return frozenset((ListKey(home, atype),))
        case AddJob(job=job):
            return frozenset((job.id,))
        case LeaseJob() | ReportJob() | ReadJob() | CancelJob() | ResumeJob() | ForgetJob():
            return frozenset((write.id,))
        case PauseJobs(shard=shard, kind=kind):
            return frozenset((PausedKind(shard, kind),))
        case _:
            return _lane_keys_of_edges(planned, schema)


def _lane_keys_of_edges(planned: PlannedWrite, schema: Schema) -> frozenset[Hashable]:
    pair, ends = _pair_and_ends(planned, schema)
    keys: list[Hashable] = [ListKey(end.id1, end.atype) for end in ends]
    if pair is not None:
        keys.append(IntentKey(*pair))
    elif isinstance(planned.write, PurgeEdge):
        keys.extend(intent_here(planned.write))
    return frozenset(keys)


def _lane_key_of(key: int | ListKey, schema: Schema) -> int | ListKey:
    return key if isinstance(key, int) else ListKey(key.id1, schema.declared((key.atype,))[0])


def intent_here(write: PurgeEdge) -> Sequence[IntentKey]:
    """Return the key of the intent of the pair, if it would be in the shard of the edge's end."""
    low_id, high_id = sorted((write.id1, write.id2))
    return (IntentKey(low_id, high_id),) if low_id >> SHARD_SHIFT == write.id1 >> SHARD_SHIFT else ()


def touched_key(touch: Touch) -> int | ListKey:
    """Return the object's id, or the key of the list."""
    return touch.id if touch.kind is TouchKind.OBJECT else ListKey(touch.id, touch.atype)


def mixes_touches(writes: Sequence[PlannedWrite], schema: Schema) -> bool:
    """Return whether one of the writes changes a key that another one touches.

    A reader of the binlog would take such a transaction for a foreign one, and would have the key touched again."""
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
        case ObjAdd(data=data) | AssocAdd(data=data) | AssocMerge(data=data) | SettleEdge(data=data):
            return len(data)
        case ObjUpdate(patch=data):
            return len(data)
        case AddJob(job=job):
            return len(job.body)
        case TouchKeys(touches=touches):
            return TOUCHED_KEY_BYTES * len(touches)
        case PlaceEdges(limit=limit):
            return PLACED_EDGE_BYTES * limit
        case JoinEdges(edges=edges):
            return JOINED_EDGE_BYTES * len(edges)
        case FoldCounter(slots=slots):
            return PLACED_EDGE_BYTES * len(slots)
        case _:
            return 0


def keys_of(writes: Iterable[PlannedWrite], schema: Schema) -> WriteKeys:
    """Return the rows that a batch has to lock and read before it can be planned.

    A write of one side reads the intent of its pair, to which it adds its types: an earlier transaction may have left
    one. A write of both sides leaves none, and what an older one stands for it leaves to be settled. A write of a type
    that has left the schema since it was queued names no rows here; `draft_writes` gives it its error."""
    keys = WriteKeys()
    for planned in writes:
        write = planned.write
        match write:
            case AssocAdd() | AssocDelete():  # first, because most writes are one of these
                _add_keys_of_edges(keys, planned, schema)
            case ObjAdd(id=home) | ObjUpdate(id=home) | ObjDelete(id=home):
                keys.objects.add(home)
            case ForgetIntent(low_id=low, high_id=high):
                keys.intents.add(IntentKey(low, high))
            case AnnounceIntent(low_id=low, high_id=high, atypes=atypes):
                keys.intents.add(IntentKey(low, high))
                _add_ends(keys, [EdgeKey(low, atype, high) for atype in atypes if schema.knows_atype(atype)], schema)
            case TouchKeys(touches=touches):
                for key in map(touched_key, touches):
                    if isinstance(key, int):
                        keys.objects.add(key)
                    elif schema.knows_atype(key.atype):
                        keys.lists.add(key)
                        keys.recounts.add(key)
            case NodeSetState(id=home, atypes=atypes):
                keys.nodes.update(ListKey(home, atype) for atype in atypes if schema.knows_atype(atype))
                keys.jobs.update(_node_jobs(write))
            case PlaceEdges(id1=home, atype=atype):
                if schema.knows_atype(atype):
                    keys.nodes.add(ListKey(home, atype))
                    keys.lists.update(ListKey(home, number) for number in schema.atype(atype).state_numbers)
            case AddJob(job=job):
                keys.jobs.add(job.id)
            case ReadJob() | CancelJob() | ResumeJob() | ForgetJob():
                keys.jobs.add(write.id)
            case LeaseJob(id=job_id, kind=kind) | ReportJob(id=job_id, kind=kind):
                keys.jobs.add(job_id)
                keys.paused_jobs.add(PausedKind(job_id >> SHARD_SHIFT, kind))
            case PauseJobs(shard=shard, kind=kind):
                keys.paused_jobs.add(PausedKind(shard, kind))
            case _:
                _add_keys_of_edges(keys, planned, schema)
    return keys


def _add_keys_of_edges(keys: WriteKeys, planned: PlannedWrite, schema: Schema) -> None:
    write = planned.write
    try:
        pair, ends = _pair_and_ends(planned, schema)
        if isinstance(write, (AssocAdd, AssocDelete)) and not schema.atype(write.atype).states:
            keys.lists.update([ListKey(end.id1, end.atype) for end in ends])
            keys.edges.update(ends)
        else:
            keys.nodes.update(_nodes_of(planned, pair, schema))
            _add_ends(keys, ends, schema, _states_of(write))
    except UnknownType:
        return
    if pair is not None and not planned.both_sides:
        keys.intents.add(IntentKey(*pair))
    elif isinstance(write, PurgeEdge):
        keys.intents.update(intent_here(write))


def _add_ends(keys: WriteKeys, ends: Iterable[EdgeKey], schema: Schema, states: Iterable[int] = State) -> None:
    """Add edges, and the lists of types with states that have edges in these states, or in the normal one. Raises
    `UnknownType`."""
    for end in ends:
        atype = schema.atype(end.atype)
        keys.lists.add(ListKey(end.id1, end.atype))
        if not atype.states and atype.counter is None:
            keys.edges.add(end)
            continue
        keys.state_edges[end] = atype.state_numbers
        for state in states if atype.states else ():
            if number := atype.states[state]:
                keys.lists.add(ListKey(end.id1, number))


def _states_of(write: Write) -> Iterable[int]:
    """Return the states of which the write is expected to change the lists, beside the normal one. What it changes is
    known only by the rows of the edge: `DraftedWrites.unread_lists` has what is missing."""
    match write:
        case AssocAdd():
            return ()
        case AssocDelete():
            return (State.REMOVED,)
        case AssocMerge(state=state, has_payload=has_payload):
            return (state,) if has_payload else (state, State.REMOVED)  # a new edge without payload is a removed one
        case _:
            return State  # a copy may come from any list


def _nodes_of(planned: PlannedWrite, pair: tuple[int, int] | None, schema: Schema) -> Iterable[ListKey]:
    """Return the nodes whose state decides in which list this leader puts an edge of a type with states."""
    write = planned.write
    match write:
        case JoinEdges(edges=edges):
            return [ListKey(edge.id1, edge.atype) for edge in edges]
        case AssocAdd() | AssocDelete() | AssocMerge() | SettleEdge() | ReadState() | PurgeEdge():
            atype = schema.atype(write.atype)
        case _:
            return ()
    if not atype.states:
        return ()
    near = ListKey(write.id1, atype.number)
    if atype.inverse is None or isinstance(write, SettleEdge | ReadState | PurgeEdge):
        return (near,)
    far = ListKey(write.id2, atype.inverse)
    if pair is None or planned.both_sides:
        return (near, far)
    return (near if near.id1 == pair[0] else far,)


def claim_of(write: Write, edge: Edge | None, schema: Schema) -> SettleEdge | None:
    """Return the edge at the far side of a write's pair that must be written first, because the length of its list is
    bounded and only the leader of that side can count it under lock; else None.

    ``edge`` is the edge that a change of type moves, None when there is none."""
    pair = coordinator_side(write, schema)
    match write:
        case AssocAdd(id1=id1, atype=atype, time=time, data=data):
            pass
        case AssocChangeType(id1=id1, new_atype=atype) if edge is not None:
            time, data = edge.time, edge.data
        case _:
            return None
    named = schema.atype(atype)
    if pair is None or named.inverse is None:
        return None
    far = named if id1 == pair[1] else schema.atype(named.inverse)
    if far.max_edges is None:
        return None
    return SettleEdge(pair[1], far.number, pair[0], True, time, data, if_room=True)


def _node_jobs(write: NodeSetState) -> list[int]:
    """Return the ids of which the write adds a job under one."""
    own = node_job_id(write.id, write.atypes, write.state, write.state_us)
    return [write.job_id, own] if own else [write.job_id]
