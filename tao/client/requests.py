"""An operation's arguments, checked, as what is sent: a read's row or a write with its shard.

Pure: given schema and number of shards. Everything wrong is raised here as a `RequestError` that names the argument.
Shared by each operation and its many-form, so that the two cannot differ.
"""

# ruff: noqa: A002 - `id` is what an object's id is called in the paper, the design and every other client
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tao.client.columns import Row
from tao.client.lanes import WriteRow
from tao.client.validation import (
    check_atype,
    check_bounds,
    check_fields,
    check_id,
    check_id2s,
    check_items,
    check_limit,
    check_new_object_place,
    check_otype,
    check_page,
    check_time,
    shard_in,
)
from tao.model.errors import RequestError
from tao.model.ids import SHARD_SHIFT
from tao.schema.codec import encode_fields, encode_patch
from tao.schema.registry import Schema
from tao.schema.types import AssocType, ObjectType
from tao.wire.v1 import session_pb2 as pb

Made = TypeVar("Made")
ListQuery = tuple[Row, AssocType]
"""What is asked of a list, and the type its answer is read by."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Makes requests under one schema, for a graph of that many shards."""

    schema: Schema
    shards: int
    any_shard: Callable[[int], int]
    """Chooses one of so many shards, for an object that may be anywhere."""
    unix_seconds: Callable[[], float]
    """For edges whose time the caller leaves out."""

    def object_row(self, id: int) -> Row:
        shard_in(self.shards, check_id(id), "id")
        return (id,)

    def count(self, id1: int, atype: str) -> ListQuery:
        found = self._list(id1, atype)
        return (id1, found.number), found

    def range(self, id1: int, atype: str, pos: int, limit: int) -> ListQuery:
        found = self._list(id1, atype)
        return (id1, found.number, *check_page(pos, limit)), found

    def time_range(self, id1: int, atype: str, high: int | None, low: int | None, limit: int) -> ListQuery:
        found = self._list(id1, atype)
        return (id1, found.number, *check_bounds(high, low), check_limit(limit), 0), found

    def edges(
        self, id1: int, atype: str, id2s: Iterable[int], high: int | None = None, low: int | None = None
    ) -> ListQuery:
        found = self._list(id1, atype)
        return (id1, found.number, check_id2s(id2s), *check_bounds(high, low)), found

    def obj_add(
        self,
        otype: str,
        fields: Mapping[str, object] | None = None,
        near: int | None = None,
        id: int | None = None,
    ) -> WriteRow:
        found = check_otype(self.schema, otype)
        data = encode_fields(found, check_fields(fields))
        shard = check_new_object_place(self.shards, near, id)
        if shard is None:
            shard = self.any_shard(self.shards)
        return shard, pb.Write(obj_add=pb.ObjAdd(id=id or 0, shard=shard, otype=found.number, data=data))

    def obj_update(self, id: int, fields: Mapping[str, object], otype: ObjectType) -> WriteRow:
        shard = shard_in(self.shards, check_id(id), "id")
        patch = encode_patch(otype, check_fields(fields))
        return shard, pb.Write(obj_update=pb.ObjUpdate(id=id, otype=otype.number, patch=patch))

    def obj_delete(self, id: int) -> WriteRow:
        return shard_in(self.shards, check_id(id), "id"), pb.Write(obj_delete=pb.ObjDelete(id=id))

    def assoc_add(
        self, id1: int, atype: str, id2: int, time: int | None = None, fields: Mapping[str, object] | None = None
    ) -> WriteRow:
        found = self._edge(id1, atype, id2)
        at = int(self.unix_seconds()) if time is None else check_time(time, "time")
        data = encode_fields(found, check_fields(fields))
        write = pb.AssocAdd(id1=id1, atype=found.number, id2=id2, time=at, data=data)
        return shard_in(self.shards, id1, "id1"), pb.Write(assoc_add=write)

    def assoc_delete(self, id1: int, atype: str, id2: int) -> WriteRow:
        found = self._edge(id1, atype, id2)
        write = pb.AssocDelete(id1=id1, atype=found.number, id2=id2)
        return shard_in(self.shards, id1, "id1"), pb.Write(assoc_delete=write)

    def assoc_change_type(self, id1: int, atype: str, id2: int, new_atype: str) -> WriteRow:
        found = self._edge(id1, atype, id2)
        new = check_atype(self.schema, new_atype, "new_atype")
        write = pb.AssocChangeType(id1=id1, atype=found.number, id2=id2, new_atype=new.number)
        return shard_in(self.shards, id1, "id1"), pb.Write(assoc_change_type=write)

    def _list(self, id1: int, atype: str) -> AssocType:
        # All that `check_id` and `shard_in` ask, at once; which of it is wrong, they say.
        if type(id1) is not int or not 0 < id1 < self.shards << SHARD_SHIFT:
            shard_in(self.shards, check_id(id1, "id1"), "id1")
        return check_atype(self.schema, atype)

    def _edge(self, id1: int, atype: str, id2: int) -> AssocType:
        found = self._list(id1, atype)
        check_id(id2, "id2")
        if found.inverse is not None:
            shard_in(self.shards, id2, "id2")  # the inverse edge will lie there
        return found


def each_item(
    make: Callable[..., Made], items: Iterable[Sequence[Any]], low: int, high: int
) -> list[Made]:  # Any: `make` checks what the tuples hold
    """One request per tuple of arguments. Raises as ``make`` does, with the item's index."""
    made: list[Made] = []
    for index, item in enumerate(check_items(items, low, high)):
        try:
            made.append(make(*item))
        except RequestError as error:
            raise type(error)(f"item {index}: {error.message}") from None
    return made
