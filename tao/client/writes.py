"""The writing operations and their many-forms.

A write is answered when it is committed and the caches on its way have applied it, so that the writer's next read in
this tier sees it. Every write but the allocation of an id is idempotent. The items of a many-form are independent
writes: their order is not defined, and some may fail while others are done (`SomeFailed` says which).
"""

# ruff: noqa: A002 - `id` is what an object's id is called in the paper, the design and every other client
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tao.client.consistency import CACHED, MASTER
from tao.client.operations import Result, all_or_raise
from tao.client.reads import ReadOperations
from tao.client.request_builder import build_each
from tao.client.server_queues import WriteRow
from tao.client.validation import check_id, check_items, check_number, check_otype, shard_in
from tao.client.values import AddedObject, EdgeState, EdgeWrite
from tao.model.edge_states import State
from tao.model.errors import InvalidArgument, RequestError, TaoError
from tao.model.ids import MAX_RESERVED_IDS
from tao.schema.types import ObjectType
from tao.wire.convert import registers_from_pb
from tao.wire.v1 import session_pb2 as pb

Fields = Mapping[str, object]


class WriteOperations(ReadOperations):
    """The writes of a graph. Each goes through the shard's home follower in the nearest tier."""

    async def obj_add(
        self,
        otype: str,
        fields: Fields | None = None,
        near: int | None = None,
        id: int | None = None,
    ) -> AddedObject:
        """Create an object and return its id. ``near`` is the id of an object whose shard the new one shares. ``id`` is
        an id reserved before (`reserve_ids`), which makes the operation idempotent.

        The result's ``is_new`` is False when an object with that id and the same content existed: an earlier attempt of
        this call has added it, or another caller has. Raises `IdNotReserved` for an id that may be given to another
        caller later, and `InvalidArgument` when the object exists with other content or was deleted."""
        row = self._builder.obj_add(otype, fields, near, id)
        return self._added(row, await self._write(row))

    async def obj_add_many(self, objects: Iterable[Sequence[Any]]) -> list[AddedObject]:
        """Do `obj_add` for each ``(otype[, fields[, near[, id]]])``. Return the ids in order. Raises `SomeFailed`."""
        rows = build_each(self._builder.obj_add, objects, 1, 4)
        return await self._results(rows, self._added)

    async def obj_update(self, id: int, fields: Fields, otype: str | None = None) -> bool:
        """Set these fields of an object, where None removes a field, and keep the others. Return False when there is no
        such object.

        Fields are encoded by the object's type: without ``otype`` the object is read first, from the cache. Raises
        `WrongType` when the object is of another type than ``otype``."""
        if otype is not None:
            found = check_otype(self._builder.schema, otype)
        else:
            # A cache may be a moment behind: before the write is left out, the database must confirm the absence.
            current = await self.obj_get(id, consistency=CACHED) or await self.obj_get(id, consistency=MASTER)
            if current is None:
                return False
            found = current.object_type
        return (await self._write(self._builder.obj_update(id, fields, found))).found

    async def obj_update_many(self, updates: Iterable[Sequence[Any]]) -> list[bool]:
        """Do `obj_update` for each ``(id, fields[, otype])``. Raises `SomeFailed`."""
        items = check_items(updates, 2, 3)
        untyped = [item[0] for item in items if len(item) == 2 or item[2] is None]
        types = await self._types_of(untyped)
        rows: dict[int, WriteRow] = {}
        for index, item in enumerate(items):
            named = item[2] if len(item) == 3 else None
            try:
                found = types.get(item[0]) if named is None else check_otype(self._builder.schema, named)
                if found is not None:
                    rows[index] = self._builder.obj_update(item[0], item[1], found)
            except RequestError as error:
                raise type(error)(f"item {index}: {error.message}") from None
        outcomes = dict(zip(rows, await self._write_many(list(rows.values())), strict=True))
        return all_or_raise([_found(outcomes[index]) if index in rows else False for index in range(len(items))])

    async def obj_delete(self, id: int, otype: str | None = None) -> bool:
        """Delete an object, and return False when there was none. Its edges stay, as in the paper. Raises `WrongType`
        when the object is of another type than ``otype``."""
        return (await self._write(self._builder.obj_delete(id, otype))).found

    async def obj_delete_many(self, ids: Iterable[int], otype: str | None = None) -> list[bool]:
        """Do `obj_delete` for each id, all of the type ``otype`` when it is given. Raises `SomeFailed`."""
        rows = build_each(self._builder.obj_delete, [(each, otype) for each in ids], 2, 2)
        return await self._results(rows, lambda _, result: result.found)

    async def assoc_add(
        self,
        id1: int,
        atype: str,
        id2: int,
        time: int | None = None,
        fields: Fields | None = None,
        at: int | None = None,
    ) -> EdgeWrite:
        """Add an edge, or overwrite it, and its inverse when the type has one. ``time`` orders the list, newest first;
        the default is now, in Unix seconds. The result's ``is_new`` says whether there was no such edge before.

        ``at`` is the time of the operation, of a type with states (`assoc_set_state`)."""
        return await self._edge_write(self._builder.assoc_add(id1, atype, id2, time, fields, at))

    async def assoc_add_many(self, edges: Iterable[Sequence[Any]]) -> list[EdgeWrite]:
        """Do `assoc_add` for each ``(id1, atype, id2[, time[, fields[, at]]])``. Raises `SomeFailed`."""
        return await self._edge_writes(build_each(self._builder.assoc_add, edges, 3, 6))

    async def assoc_delete(self, id1: int, atype: str, id2: int, at: int | None = None) -> EdgeWrite:
        """Delete an edge and its inverse. The result is false when there was none. ``at``: see `assoc_set_state`."""
        return await self._edge_write(self._builder.assoc_delete(id1, atype, id2, at))

    async def assoc_delete_many(self, edges: Iterable[Sequence[Any]]) -> list[EdgeWrite]:
        """Do `assoc_delete` for each ``(id1, atype, id2[, at])``. Raises `SomeFailed`."""
        return await self._edge_writes(build_each(self._builder.assoc_delete, edges, 3, 4))

    async def assoc_archive(self, id1: int, atype: str, id2: int, at: int | None = None) -> EdgeWrite:
        """Move an edge and its inverse to the list of archived edges; time and fields stay. See `assoc_set_state`."""
        return await self.assoc_set_state(id1, atype, id2, State.ARCHIVED.label, at)

    async def assoc_restore(self, id1: int, atype: str, id2: int, at: int | None = None) -> EdgeWrite:
        """Make an edge and its inverse normal again, at its old place. See `assoc_set_state`."""
        return await self.assoc_set_state(id1, atype, id2, State.NORMAL.label, at)

    async def assoc_set_state(
        self,
        id1: int,
        atype: str,
        id2: int,
        state: str,
        at: int | None = None,
        time: int | None = None,
        fields: Fields | None = None,
    ) -> EdgeWrite:
        """Set the state of an edge of a type with states, and of its inverse; with ``time`` or ``fields``, also these.
        An edge that was never given a time is in no list but that of removed edges.

        ``at`` is the time of the operation in microseconds since 1970; without it the operation is newer than all
        before it. The newest operation wins, whichever comes last, so operations with ``at`` may be repeated and come
        in any order; the result's ``superseded`` says that a newer one was there. Raises `OperationAhead` for a time
        more than 60 s ahead of the leader's clock, and `OperationTooOld` above the type's ``keep_removed_days``."""
        return await self._edge_write(self._builder.assoc_set_state(id1, atype, id2, state, at, time, fields))

    async def assoc_set_state_many(self, edges: Iterable[Sequence[Any]]) -> list[EdgeWrite]:
        """Do `assoc_set_state` for each ``(id1, atype, id2, state[, at[, time[, fields]]])``. Raises `SomeFailed`."""
        return await self._edge_writes(build_each(self._builder.assoc_set_state, edges, 4, 7))

    async def assoc_state(self, id1: int, atype: str, id2: int) -> EdgeState | None:
        """Return the state of an edge of a type with states, its own and the one in which it is shown, and when it was
        set, or None without any operation. It is read at ``id1`` from the master, under lock, and costs as much as a
        write."""
        result = await self._write(self._builder.assoc_state(id1, atype, id2), priority=0)
        registers = registers_from_pb(result.registers)
        if not registers.has_operation:
            return None
        own, effective = State(registers.own_state).label, State(result.effective_state).label
        return EdgeState(own, effective, registers.state_us, registers.payload_us)

    async def assoc_change_type(self, id1: int, atype: str, id2: int, new_atype: str) -> EdgeWrite:
        """Move an edge and its inverse to another type, with time and fields. The result is false when there was no
        edge."""
        return await self._edge_write(self._builder.assoc_change_type(id1, atype, id2, new_atype))

    async def assoc_change_type_many(self, edges: Iterable[tuple[int, str, int, str]]) -> list[EdgeWrite]:
        """Do `assoc_change_type` for each ``(id1, atype, id2, new_atype)``. Raises `SomeFailed`."""
        return await self._edge_writes(build_each(self._builder.assoc_change_type, edges, 4, 4))

    async def reserve_ids(self, count: int, near: int | None = None, shard: int | None = None) -> list[int]:
        """Return ids for objects to be added: on the shard of the object ``near``, on ``shard``, or on one chosen at
        random; at most 10,000 a call. They are consecutive numbers, and no other caller gets one of them. An id that is
        never used is lost; there are enough of them in 63 bits. Raises `Overloaded` when the ids of the shard would run
        more than two minutes ahead of the clock, at 64 a millisecond, and for some 40 s at most after a restore."""
        check_number(count, "count", 1, MAX_RESERVED_IDS)
        shards = self._builder.shards
        if near is not None and shard is not None:
            raise InvalidArgument("near and shard both choose the shard of the ids: leave one out")
        if near is not None:
            shard = shard_in(shards, check_id(near, "near"), "near")
        elif shard is not None:
            check_number(shard, "shard", 0, shards - 1)
        else:
            shard = self._builder.any_shard(shards)
        request = pb.Request(reserve_ids=pb.ReserveIds(shard=shard, count=count, as_interval=True))
        reserved = (await self._dispatcher.ask(shard, request)).reserved_ids
        # A leader of the former version answers with the ids themselves.
        return list(reserved.ids or range(reserved.first, reserved.first + reserved.count))

    async def _types_of(self, ids: Sequence[int]) -> dict[int, ObjectType]:
        found = await self.obj_get_many(ids, consistency=CACHED)
        absent = [object_id for object_id, each in zip(ids, found, strict=True) if each is None]
        if absent:
            found += await self.obj_get_many(absent, consistency=MASTER)
        return {each.id: each.object_type for each in found if each is not None}

    async def _edge_write(self, row: WriteRow) -> EdgeWrite:
        return self._edge_result(row, await self._write(row))

    async def _edge_writes(self, rows: list[WriteRow]) -> list[EdgeWrite]:
        return await self._results(rows, self._edge_result)

    def _edge_result(self, row: WriteRow, result: pb.WriteResult) -> EdgeWrite:
        if result.accepted:
            return EdgeWrite(existed=False, receipt=self._receipt_of(row, result))
        if not result.HasField("registers"):
            return EdgeWrite(result.found, result.inverse_pending)
        return EdgeWrite(result.found, result.inverse_pending, State(result.effective_state).label, result.superseded)

    def _added(self, row: WriteRow, result: pb.WriteResult) -> AddedObject:
        receipt = self._receipt_of(row, result) if result.accepted else None
        return AddedObject(result.id, existed=result.found, receipt=receipt)

    async def _results(
        self,
        rows: Sequence[WriteRow],
        result_of: Callable[[WriteRow, pb.WriteResult], Result],
        priority: int | None = None,
    ) -> list[Result]:
        """Make writes as `_write` does, and return what ``result_of`` makes of the result of each. Raises `SomeFailed`,
        which has the same of those that are done."""
        results = await self._write_many(rows, priority)
        return all_or_raise(
            [
                each if isinstance(each, TaoError) else result_of(row, each)
                for row, each in zip(rows, results, strict=True)
            ]
        )


def _found(outcome: pb.WriteResult | TaoError) -> bool | TaoError:
    return outcome if isinstance(outcome, TaoError) else outcome.found
