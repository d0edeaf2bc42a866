"""The writes that a journal accepts: those that may be made late, in any order and any number of times.

`_RULES` is the one table of what commutes. A kind of write that is not in it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tao.model.edge_states import State
from tao.model.errors import NotCommutative
from tao.planning.edge_states import check_times
from tao.schema.registry import Schema
from tao.wire.v1 import session_pb2 as pb

Stamp = Callable[[], int]
"""Returns the time of an operation that is accepted now, in microseconds since 1970."""
Rule = Callable[[pb.Write, Schema, Stamp], pb.Write]
"""Returns the write as it is entered. Raises `NotCommutative`, `OperationTooOld` or `OperationAhead`."""


def _object(write: pb.Write, schema: Schema, stamp: Stamp) -> pb.Write:
    """Accept a new object under a reserved id: adding it again changes nothing, and a deletion wins."""
    if not write.obj_add.id:
        raise NotCommutative("an object without an id would be made anew by every attempt: reserve an id first")
    return write


def _added_edge(write: pb.Write, schema: Schema, stamp: Stamp) -> pb.Write:
    edge = write.assoc_add
    _check_states(edge.atype, schema)
    _check_unbounded(edge.atype, schema)
    merge = pb.AssocMerge(
        id1=edge.id1,
        atype=edge.atype,
        id2=edge.id2,
        state=State.NORMAL,
        state_us=stamp(),
        has_payload=True,
        time=edge.time,
        data=edge.data,
    )
    return pb.Write(assoc_merge=merge)


def _deleted_edge(write: pb.Write, schema: Schema, stamp: Stamp) -> pb.Write:
    edge = write.assoc_delete
    _check_states(edge.atype, schema)
    merge = pb.AssocMerge(id1=edge.id1, atype=edge.atype, id2=edge.id2, state=State.REMOVED, state_us=stamp())
    return pb.Write(assoc_merge=merge)


def _merge(write: pb.Write, schema: Schema, stamp: Stamp) -> pb.Write:
    """Accept an operation on an edge, by its own time if it has one."""
    merge = write.assoc_merge
    if merge.has_payload:
        _check_unbounded(merge.atype, schema)
    if merge.state_us:
        times = (merge.state_us, merge.payload_us or merge.state_us)
        check_times(times, (schema.atype(merge.atype),), stamp())
        return write
    stamped = pb.Write()
    stamped.CopyFrom(write)
    stamped.assoc_merge.state_us = stamp()
    return stamped


def _node_state(write: pb.Write, schema: Schema, stamp: Stamp) -> pb.Write:
    """Accept the state of a node, by the operation's own time if it has one: the newest wins. The job that moves the
    node's edges has its id by the operation, so all attempts add one job."""
    node = write.node_set_state
    if node.state_us:
        check_times((node.state_us,), [schema.atype(number) for number in node.atypes], stamp())
        return write
    stamped = pb.Write()
    stamped.CopyFrom(write)
    stamped.node_set_state.state_us = stamp()
    return stamped


def _job(write: pb.Write, schema: Schema, stamp: Stamp) -> pb.Write:
    """Accept a job under a reserved id: adding it again, with the same kind and body, changes nothing."""
    if not write.add_job.id:
        raise NotCommutative("a job without an id would be added anew by every attempt: reserve an id first")
    return write


def _check_states(atype: int, schema: Schema) -> None:
    found = schema.atype(atype)
    if not found.states:
        raise NotCommutative(
            f"type {found.name!r} has no states: its edges keep no times of operations, so a late write could undo a "
            "newer one. Declare a type with states, or write without the journal"
        )


def _check_unbounded(atype: int, schema: Schema) -> None:
    """Check that the lists of a type take every edge: which of two adds a full list refuses depends on their order."""
    found = schema.atype(atype)
    if found.max_edges is not None:
        raise NotCommutative(
            f"type {found.name!r} has max_edges: a list that is full by then would refuse an edge that was accepted. "
            "Add it without the journal"
        )


_RULES: Final[Mapping[str, Rule]] = {
    "obj_add": _object,
    "assoc_add": _added_edge,
    "assoc_delete": _deleted_edge,
    "assoc_merge": _merge,
    "node_set_state": _node_state,
    "add_job": _job,
}


def commuting_write(write: pb.Write, schema: Schema, stamp: Stamp) -> pb.Write:
    """Return the write as a journal enters it: with a time of its own.

    Raises `NotCommutative`, `UnknownType`, `OperationTooOld`, `OperationAhead`, and what ``stamp`` raises."""
    kind = write.WhichOneof("operation") or "nothing"
    rule = _RULES.get(kind)
    if rule is None:
        raise NotCommutative(
            f"{kind} does not commute: made late, or twice, it would undo newer writes. A journal accepts obj_add and "
            "add_job with a reserved id, states of nodes, and writes of edges of types with states"
        )
    return rule(write, schema, stamp)
