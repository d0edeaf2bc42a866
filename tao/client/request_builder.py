"""The request builder checks an operation's arguments and makes a request of them: a read's row, or a write.

It is a pure function of the schema and the number of shards. A wrong argument raises a `RequestError` that names it.
Each operation and its many-form share one method, so that the two cannot differ.
"""

# ruff: noqa: A002 - `id` is what an object's id is called in the paper, the design and every other client
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tao.client.server_queues import WriteRow
from tao.client.validation import (
    check_atype,
    check_bounds,
    check_fields,
    check_id,
    check_id2s,
    check_items,
    check_limit,
    check_new_object_place,
    check_number,
    check_otype,
    check_page,
    check_position,
    check_state,
    check_time,
    shard_in,
)
from tao.model.edge_states import NODE_STATES, State
from tao.model.errors import InvalidArgument, RequestError
from tao.model.graph import MAX_TIME
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import NewJob, check_new_job
from tao.model.queries import start_at
from tao.schema.codec import encode_fields, encode_patch
from tao.schema.registry import Schema
from tao.schema.types import AssocType, ObjectType
from tao.wire.read_batch import CountRow, EdgesRow, ExistsRow, ObjectRow, RangeRow, TimeRangeRow
from tao.wire.v1 import session_pb2 as pb

Made = TypeVar("Made")
_new = tuple.__new__  # makes a named tuple in half the time of its constructor
ListRow = TypeVar("ListRow", CountRow, RangeRow, TimeRangeRow, EdgesRow, ExistsRow)
ListQuery = tuple[ListRow, AssocType]
"""A query on a list, and the type that decodes its answer."""


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """Makes requests under one schema, for a graph of ``shards`` shards. Each method takes the arguments of the
    operation of its name; the methods for lists return the row and the type that decodes the answer."""

    schema: Schema
    shards: int
    any_shard: Callable[[int], int]
    """Chooses one of so many shards, for an object without a place."""
    unix_seconds: Callable[[], float]
    """The clock for edges whose time the caller leaves out."""

    def object_row(self, id: int) -> ObjectRow:
        shard_in(self.shards, check_id(id), "id")
        return (id,)

    def count(self, id1: int, atype: str, state: str | None = None) -> ListQuery[CountRow]:
        assoc_type = self._list_type(id1, atype, state)
        return _new(CountRow, (id1, assoc_type.number)), assoc_type

    def range(self, id1: int, atype: str, pos: int, limit: int, state: str | None = None) -> ListQuery[RangeRow]:
        assoc_type = self._list_type(id1, atype, state)
        return _new(RangeRow, (id1, assoc_type.number, *check_page(pos, limit))), assoc_type

    def time_range(
        self,
        id1: int,
        atype: str,
        high: int | None,
        low: int | None,
        limit: int,
        pos: int = 0,
        state: str | None = None,
    ) -> ListQuery[TimeRangeRow]:
        assoc_type = self._list_type(id1, atype, state)
        start = 0 if type(pos) is int and not pos else start_at(check_position(pos))
        row = (id1, assoc_type.number, *check_bounds(high, low), check_limit(limit), start)
        return _new(TimeRangeRow, row), assoc_type

    def edges(
        self,
        id1: int,
        atype: str,
        id2s: Iterable[int],
        high: int | None = None,
        low: int | None = None,
        state: str | None = None,
    ) -> ListQuery[EdgesRow]:
        assoc_type = self._list_type(id1, atype, state)
        return _new(EdgesRow, (id1, assoc_type.number, check_id2s(id2s), *check_bounds(high, low))), assoc_type

    def exists(self, id1: int, atype: str, id2: int) -> ListQuery[ExistsRow]:
        assoc_type = self._list_type(id1, atype)
        return _new(ExistsRow, (id1, assoc_type.number, check_id(id2, "id2"))), assoc_type

    def obj_add(
        self,
        otype: str,
        fields: Mapping[str, object] | None = None,
        near: int | None = None,
        id: int | None = None,
    ) -> WriteRow:
        object_type = check_otype(self.schema, otype)
        data = encode_fields(object_type, check_fields(fields))
        shard = check_new_object_place(self.shards, near, id)
        if shard is None:
            shard = self.any_shard(self.shards)
        return WriteRow(
            shard, pb.Write(obj_add=pb.ObjAdd(id=id or 0, shard=shard, otype=object_type.number, data=data))
        )

    def obj_update(self, id: int, fields: Mapping[str, object], otype: ObjectType) -> WriteRow:
        shard = shard_in(self.shards, check_id(id), "id")
        patch = encode_patch(otype, check_fields(fields))
        return WriteRow(shard, pb.Write(obj_update=pb.ObjUpdate(id=id, otype=otype.number, patch=patch)))

    def obj_delete(self, id: int, otype: str | None = None) -> WriteRow:
        shard = shard_in(self.shards, check_id(id), "id")
        number = 0 if otype is None else check_otype(self.schema, otype).number
        return WriteRow(shard, pb.Write(obj_delete=pb.ObjDelete(id=id, otype=number)))

    def assoc_add(
        self,
        id1: int,
        atype: str,
        id2: int,
        time: int | None = None,
        fields: Mapping[str, object] | None = None,
        at: int | None = None,
    ) -> WriteRow:
        if at is not None:
            return self.assoc_set_state(id1, atype, id2, State.NORMAL.label, at, time, fields or {})
        assoc_type = self._edge_type(id1, atype, id2)
        edge_time = int(self.unix_seconds()) if time is None else check_time(time, "time")
        data = encode_fields(assoc_type, check_fields(fields))
        write = pb.AssocAdd(id1=id1, atype=assoc_type.number, id2=id2, time=edge_time, data=data)
        return _new(WriteRow, (shard_in(self.shards, id1, "id1"), pb.Write(assoc_add=write)))

    def assoc_set_state(
        self,
        id1: int,
        atype: str,
        id2: int,
        state: str,
        at: int | None = None,
        time: int | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> WriteRow:
        assoc_type = self._edge_type(id1, atype, id2)
        number = check_state(state)
        self.schema.state_type(assoc_type, number)
        write = pb.AssocMerge(id1=id1, atype=assoc_type.number, id2=id2, state=number)
        if at is not None:
            write.state_us = check_number(at, "at", 1, MAX_TIME)
        if time is not None or fields is not None:
            write.has_payload = True
            write.time = int(self.unix_seconds()) if time is None else check_time(time, "time")
            write.data = encode_fields(assoc_type, check_fields(fields))
        return WriteRow(shard_in(self.shards, id1, "id1"), pb.Write(assoc_merge=write))

    def assoc_state(self, id1: int, atype: str, id2: int) -> WriteRow:
        assoc_type = self._edge_type(id1, atype, id2)
        self.schema.state_type(assoc_type, State.NORMAL)
        read = pb.ReadState(id1=id1, atype=assoc_type.number, id2=id2)
        return WriteRow(shard_in(self.shards, id1, "id1"), pb.Write(read_state=read))

    def assoc_delete(self, id1: int, atype: str, id2: int, at: int | None = None) -> WriteRow:
        if at is not None:
            return self.assoc_set_state(id1, atype, id2, State.REMOVED.label, at)
        assoc_type = self._edge_type(id1, atype, id2)
        write = pb.AssocDelete(id1=id1, atype=assoc_type.number, id2=id2)
        return _new(WriteRow, (shard_in(self.shards, id1, "id1"), pb.Write(assoc_delete=write)))

    def assoc_change_type(self, id1: int, atype: str, id2: int, new_atype: str) -> WriteRow:
        assoc_type = self._edge_type(id1, atype, id2)
        new_type = check_atype(self.schema, new_atype, "new_atype")
        write = pb.AssocChangeType(id1=id1, atype=assoc_type.number, id2=id2, new_atype=new_type.number)
        return _new(WriteRow, (shard_in(self.shards, id1, "id1"), pb.Write(assoc_change_type=write)))

    def node_set_state(self, id: int, state: str, types: Iterable[str] | None, at: int | None) -> WriteRow:
        shard = shard_in(self.shards, check_id(id), "id")
        number = check_state(state)
        if number not in NODE_STATES:
            raise InvalidArgument(f"{state!r} is a state of edges only: a node is normal, archived or removed")
        if isinstance(types, str):
            raise InvalidArgument(f"types must be several names, such as [{types!r}]")
        if types is None:
            found = [each for each in self.schema.declared_assocs if each.states and each.states[number]]
        else:
            found = [check_atype(self.schema, each) for each in types]
            for each in found:
                self.schema.state_type(each, number)
        if not found:
            raise InvalidArgument("there is no type with states whose edges could follow the state of the node")
        write = pb.NodeSetState(id=id, atypes=sorted({each.number for each in found}), state=number)
        if at is not None:
            write.state_us = check_number(at, "at", 1, MAX_TIME)
        return WriteRow(shard, pb.Write(node_set_state=write))

    def add_job(self, kind: str, body: bytes, priority: int, near: int, id: int | None) -> WriteRow:
        shard = shard_in(self.shards, check_id(near, "near"), "near")
        if id is not None and shard_in(self.shards, check_id(id), "id") != shard:
            raise InvalidArgument(f"the id {id} is on another shard than near, which is on shard {shard}")
        check_new_job(NewJob(id or near, kind, priority, body))
        add = pb.AddJob(id=id or 0, shard=shard, kind=kind, priority=priority, body=body)
        return WriteRow(shard, pb.Write(add_job=add))

    def of_job(self, id: int, write: pb.Write) -> WriteRow:
        return WriteRow(shard_in(self.shards, id, "id"), write)

    def _list_type(self, id1: int, atype: str, state: str | None = None) -> AssocType:
        # One test for all that `check_id` and `shard_in` check; they only name what is wrong.
        if type(id1) is not int or not 0 < id1 < self.shards << SHARD_SHIFT:
            shard_in(self.shards, check_id(id1, "id1"), "id1")
        return self.list_type(atype, state)

    def list_type(self, atype: str, state: str | None = None) -> AssocType:
        """Return the type whose lists hold the edges of a type in a state. Raises `InvalidArgument` and
        `UnknownType`."""
        assoc_type = check_atype(self.schema, atype)
        return assoc_type if state is None else self.schema.state_type(assoc_type, check_state(state))

    def _edge_type(self, id1: int, atype: str, id2: int) -> AssocType:
        assoc_type = self._list_type(id1, atype)
        check_id(id2, "id2")
        if assoc_type.inverse is not None:
            shard_in(self.shards, id2, "id2")  # the shard of the inverse edge
        return assoc_type


def build_each(
    make: Callable[..., Made], items: Iterable[Sequence[Any]], low: int, high: int
) -> list[Made]:  # Any: `make` checks what the tuples hold
    """Return what ``make`` returns for each tuple of ``low`` to ``high`` arguments. Raises as ``make``, with the index
    of the item."""
    made: list[Made] = []
    for index, item in enumerate(check_items(items, low, high)):
        try:
            made.append(make(*item))
        except RequestError as error:
            raise type(error)(f"item {index}: {error.message}") from None
    return made
