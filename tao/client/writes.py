"""The writing operations (DESIGN.md §2, §6), and their many-forms.

A write is answered when it is committed and the caches on its way have taken it in, so that the writer's next read in
this tier sees it. All but the allocation of an id are idempotent. The items of a many-form are independent writes: the
order in which they happen is not defined, and some may fail while others are done (`SomeFailed` says which).
"""

# ruff: noqa: A002 - `id` is what an object's id is called in the paper, the design and every other client
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tao.client.lanes import WriteRow
from tao.client.operations import all_or_raise
from tao.client.paging import PagingOperations
from tao.client.requests import each_item
from tao.client.validation import (
    MAX_RESERVED_IDS,
    check_id,
    check_items,
    check_number,
    check_otype,
    shard_in,
)
from tao.model.errors import InvalidArgument, RequestError, TaoError
from tao.schema.types import ObjectType
from tao.wire.v1 import session_pb2 as pb

Fields = Mapping[str, object]


class WriteOperations(PagingOperations):
    """Writes go through the shard's home follower in the nearest tier."""

    async def obj_add(
        self,
        otype: str,
        fields: Fields | None = None,
        near: int | None = None,
        id: int | None = None,
    ) -> int:
        """Create an object and return its id. ``near``: on the same shard as that object; ``id``: one reserved before
        (`reserve_ids`), which makes the operation idempotent."""
        return (await self._write(self._requests.obj_add(otype, fields, near, id))).id

    async def obj_add_many(self, objects: Iterable[Sequence[Any]]) -> list[int]:
        """`obj_add` for each ``(otype[, fields[, near[, id]]])``; the ids in order. Raises `SomeFailed`."""
        return [result.id for result in await self._results(each_item(self._requests.obj_add, objects, 1, 4))]

    async def obj_update(self, id: int, fields: Fields, otype: str | None = None) -> bool:
        """Set these fields (None removes one) and keep the others; False when there is no such object.

        Fields are numbered by the object's type: without ``otype`` the object is read first, from the cache. Raises
        `WrongType` when ``otype`` is not the object's."""
        if otype is not None:
            found = check_otype(self._requests.schema, otype)
        else:
            # None in a cache may be a moment old; before a write is left out the database is asked.
            known = await self.obj_get(id) or await self.obj_get(id, critical=True)
            if known is None:
                return False
            found = known.object_type
        return (await self._write(self._requests.obj_update(id, fields, found))).found

    async def obj_update_many(self, updates: Iterable[Sequence[Any]]) -> list[bool]:
        """`obj_update` for each ``(id, fields[, otype])``. Raises `SomeFailed`."""
        items = check_items(updates, 2, 3)
        untyped = [item[0] for item in items if len(item) == 2 or item[2] is None]
        types = await self._types_of(untyped)
        rows: dict[int, WriteRow] = {}
        for index, item in enumerate(items):
            named = item[2] if len(item) == 3 else None
            try:
                found = types.get(item[0]) if named is None else check_otype(self._requests.schema, named)
                if found is not None:
                    rows[index] = self._requests.obj_update(item[0], item[1], found)
            except RequestError as error:
                raise type(error)(f"item {index}: {error.message}") from None
        outcomes = dict(zip(rows, await self._write_many(list(rows.values())), strict=True))
        return all_or_raise([_found(outcomes[index]) if index in rows else False for index in range(len(items))])

    async def obj_delete(self, id: int) -> bool:
        """Delete an object; False when there was none. Its edges stay, as in the paper."""
        return (await self._write(self._requests.obj_delete(id))).found

    async def obj_delete_many(self, ids: Iterable[int]) -> list[bool]:
        """`obj_delete` for each id. Raises `SomeFailed`."""
        rows = each_item(self._requests.obj_delete, [(each,) for each in ids], 1, 1)
        return [result.found for result in await self._results(rows)]

    async def assoc_add(
        self, id1: int, atype: str, id2: int, time: int | None = None, fields: Fields | None = None
    ) -> None:
        """Add the edge, or overwrite it, and its inverse when the type has one. ``time`` orders the list, newest
        first; without one it is now, in Unix seconds."""
        await self._write(self._requests.assoc_add(id1, atype, id2, time, fields))

    async def assoc_add_many(self, edges: Iterable[Sequence[Any]]) -> None:
        """`assoc_add` for each ``(id1, atype, id2[, time[, fields]])``. Raises `SomeFailed`."""
        await self._results(each_item(self._requests.assoc_add, edges, 3, 5))

    async def assoc_delete(self, id1: int, atype: str, id2: int) -> bool:
        """Delete the edge and its inverse; False when there was none."""
        return (await self._write(self._requests.assoc_delete(id1, atype, id2))).found

    async def assoc_delete_many(self, edges: Iterable[tuple[int, str, int]]) -> list[bool]:
        """`assoc_delete` for each ``(id1, atype, id2)``. Raises `SomeFailed`."""
        rows = each_item(self._requests.assoc_delete, edges, 3, 3)
        return [result.found for result in await self._results(rows)]

    async def assoc_change_type(self, id1: int, atype: str, id2: int, new_atype: str) -> bool:
        """Move the edge, and its inverse, to another type, with its time and fields; False when there was none."""
        return (await self._write(self._requests.assoc_change_type(id1, atype, id2, new_atype))).found

    async def assoc_change_type_many(self, edges: Iterable[tuple[int, str, int, str]]) -> list[bool]:
        """`assoc_change_type` for each ``(id1, atype, id2, new_atype)``. Raises `SomeFailed`."""
        rows = each_item(self._requests.assoc_change_type, edges, 4, 4)
        return [result.found for result in await self._results(rows)]

    async def reserve_ids(self, count: int, near: int | None = None, shard: int | None = None) -> list[int]:
        """Ids for objects to be added: of the shard of ``near``, of ``shard``, or of one chosen evenly. An id that is
        never used is lost, and there are 63 bits of them."""
        check_number(count, "count", 1, MAX_RESERVED_IDS)
        shards = self._requests.shards
        if near is not None and shard is not None:
            raise InvalidArgument("near and shard both say where the ids are to be: leave one out")
        if near is not None:
            shard = shard_in(shards, check_id(near, "near"), "near")
        elif shard is not None:
            check_number(shard, "shard", 0, shards - 1)
        else:
            shard = self._requests.any_shard(shards)
        request = pb.Request(reserve_ids=pb.ReserveIds(shard=shard, count=count))
        return list((await self._dispatcher.ask(shard, request)).reserved_ids.ids)

    async def _types_of(self, ids: Sequence[int]) -> dict[int, ObjectType]:
        found = await self.obj_get_many(ids)
        absent = [object_id for object_id, each in zip(ids, found, strict=True) if each is None]
        if absent:
            found += await self.obj_get_many(absent, critical=True)
        return {each.id: each.object_type for each in found if each is not None}

    async def _results(self, rows: list[WriteRow]) -> list[pb.WriteResult]:
        return all_or_raise(await self._write_many(rows))


def _found(outcome: pb.WriteResult | TaoError) -> bool | TaoError:
    return outcome if isinstance(outcome, TaoError) else outcome.found
