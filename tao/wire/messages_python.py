"""Convert the maintenance messages of a shard between the model and protobuf. `tao.wire.messages_core` is the compiled
twin, and `tao.wire.convert` chooses between them.

Most messages are changes of lists, of one edge. Here each takes 2 to 3 µs in either direction, since every look at a
field of protobuf is a call; compiled, which is done on the bytes, a fifth of that.
"""

from __future__ import annotations

from typing import Final

from tao.model.changes import (
    GoneEdge,
    ListChange,
    ListInvalidation,
    Message,
    ObjectChange,
    ObjectInvalidation,
    ShardInvalidation,
)
from tao.model.errors import ProtocolError
from tao.model.graph import Edge
from tao.wire.v1 import session_pb2 as pb

_NO_DATA: Final = b""


def write_messages(messages: tuple[Message, ...], to: pb.ShardMessages) -> None:
    """Append the messages to those of ``to``. A `ShardInvalidation` takes its shard from there."""
    add = to.messages.add
    for message in messages:
        _write_message(message, add())


def read_messages(found: pb.ShardMessages) -> tuple[Message, ...]:
    """Return the messages. Raises `ProtocolError` when one is malformed."""
    shard = found.shard
    return tuple([_read_message(each, shard) for each in found.messages])


def _write_message(message: Message, to: pb.Message) -> None:
    # Fields are set where they are to be: protobuf copies each message that is given to the constructor of another.
    match message:
        case ListChange():
            _write_list_change(message, to.list_change)
        case ObjectChange():
            change = to.object_change
            change.id, change.otype = message.id, message.otype
            change.before, change.after = message.before, message.after
            if message.data is None:
                change.data_left_out = True
            else:
                change.data = message.data
        case ObjectInvalidation():
            to.object_invalidation.id, to.object_invalidation.version = message.id, message.version
        case ListInvalidation():
            listed = to.list_invalidation
            listed.id1, listed.atype, listed.version = message.id1, message.atype, message.version
        case ShardInvalidation(otypes=otypes, atypes=atypes):
            to.shard_invalidation.SetInParent()  # both may be empty: everything
            to.shard_invalidation.otypes.extend(otypes)
            to.shard_invalidation.atypes.extend(atypes)


def _read_message(message: pb.Message, shard: int) -> Message:
    match message.WhichOneof("kind"):
        case "object_change":
            change = message.object_change
            data = None if change.data_left_out else change.data
            return ObjectChange(change.id, change.before, change.after, change.otype, data)
        case "list_change":
            return _read_list_change(message.list_change)
        case "object_invalidation":
            return ObjectInvalidation(message.object_invalidation.id, message.object_invalidation.version)
        case "list_invalidation":
            listed = message.list_invalidation
            return ListInvalidation(listed.id1, listed.atype, listed.version)
        case "shard_invalidation":
            invalidation = message.shard_invalidation
            return ShardInvalidation(shard, tuple(invalidation.otypes), tuple(invalidation.atypes))
        case _:
            raise ProtocolError("a maintenance message is of a kind that this version does not know")


def _write_list_change(change: ListChange, to: pb.ListChange) -> None:
    to.id1, to.atype, to.count = change.id1, change.atype, change.count
    to.before, to.after = change.before, change.after
    # Appended one by one: most changes are of one edge, and a list for each column would take twice as long.
    if change.gone:
        id2s, times = to.gone_id2s, to.gone_times
        for gone in change.gone:
            id2s.append(gone.id2)
            times.append(gone.time)
    if change.put:
        id2s, times = to.put_id2s, to.put_times
        has_data = False
        for edge in change.put:
            id2s.append(edge.id2)
            times.append(edge.time)
            has_data = has_data or edge.data != _NO_DATA
        if has_data:
            to.put_data.extend([edge.data for edge in change.put])


def _read_list_change(change: pb.ListChange) -> ListChange:
    # Copied once: each look at a column of protobuf costs as much as the copy of a short one.
    gone_id2s, gone_times = change.gone_id2s[:], change.gone_times[:]
    put_id2s, put_times = change.put_id2s[:], change.put_times[:]
    put_data = change.put_data[:] or [_NO_DATA] * len(put_id2s)
    if len(gone_id2s) != len(gone_times) or not (len(put_id2s) == len(put_times) == len(put_data)):
        raise ProtocolError(f"the columns of a change of list ({change.id1}, {change.atype}) differ in length")
    return ListChange(
        change.id1,
        change.atype,
        change.before,
        change.after,
        change.count,
        tuple(map(GoneEdge, gone_id2s, gone_times)) if gone_id2s else (),
        tuple(map(Edge, put_id2s, put_times, put_data)),
    )
