"""The reading operations, their many-forms, and the walk over a list of any length, page by page.

A page begins after the last edge of the one before, by that edge's time and id2, and not after a number of edges:
positions move with every write, so a page asked for by position would repeat what newer edges have pushed down, or skip
what has moved up. An edge that is in the list, at its time, from the first page to the last comes exactly once,
whatever is written meanwhile and whichever server answers which page. An edge that comes or goes meanwhile may be seen
or not; one whose time changes counts as another edge.

The place between two pages is a *cursor*, a short text that a web page can hand out and take back. It holds no secret
and is not signed: a reader of the list may start anywhere in it.
"""

# ruff: noqa: A002 - `id` is what an object's id is called in the paper, the design and every other client
from __future__ import annotations

import asyncio
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as NotBase64
from binascii import crc32
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, Unpack

import msgspec

from tao.client.consistency import Consistency, Freshness, from_keywords
from tao.client.operations import Operations, Result, all_or_raise
from tao.client.request_builder import ListQuery, ListRow, build_each
from tao.client.validation import MAX_LIMIT, check_ids, check_number, check_otype, shard_in
from tao.client.values import Assoc, AssocList, Object
from tao.model.errors import InvalidArgument, ProtocolError, TaoError, TooLarge, UnknownType, WrongType
from tao.model.graph import COUNT_VALUE_BYTES, MAX_ID2_SET, MAX_TIME
from tao.model.ids import MAX_ID
from tao.schema.types import AssocType
from tao.wire.convert import exists_in
from tao.wire.read_batch import (
    COUNT,
    EDGES,
    EXISTS,
    OBJECT,
    RANGE,
    TIME_RANGE,
    CountRow,
    EdgesRow,
    ExistsRow,
    QueryRow,
    TimeRangeRow,
)

PAGE_EDGES: Final = 1_000
"""Edges that `assoc_iter` asks for at a time: 16 KB without data, so that the round trip costs little beside them."""

_FORMAT: Final = 1
_CURSOR: Final = struct.Struct("<BIQQ")  # format, checksum of the list's key, time and id2 of the last edge
_LIST_KEY: Final = struct.Struct("<QI")


class AssocPage(msgspec.Struct, frozen=True):
    """Some ``edges`` of a list, and the ``cursor`` of the next page, None after the last page. A page may be empty,
    when the edges that followed the page before have been deleted."""

    edges: AssocList
    cursor: str | None


class ReadOperations(Operations):
    """The reads of a graph. Each goes to the nearest follower that has the shard.

    ``consistency`` says how fresh the answer must be (`tao.client.consistency`); without it the graph's default holds
    (`ClientSettings.consistency`). This graph's own recent writes are seen by every read. ``critical=True`` is short
    for `Consistency.master`, ``after=token`` for `Consistency.at_least`, ``max_staleness_ms=bound`` for
    `Consistency.max_staleness`; a read that is given both forms raises `InvalidArgument`.

    Reads of lists show the normal edges of a type with states, or those in another ``state``: "negative", "archived" or
    "removed". They raise `InvalidArgument` for a state that the type does not have."""

    async def obj_get(
        self,
        id: int,
        otype: str | None = None,
        **freshness: Unpack[Freshness],
    ) -> Object | None:
        """Return an object, or None when there is none. Raises `WrongType` when ``otype`` is given and the object is of
        another type."""
        consistency = from_keywords(**freshness) if freshness else None
        if type(id) is not int or not 0 < id <= MAX_ID:
            self._builder.object_row(id)
        if otype is not None:
            check_otype(self._builder.schema, otype)
        value = await self._read(OBJECT, (id,), consistency)
        try:
            found = self._objects.read(id, value)
        except UnknownType:  # the object was written by a newer schema
            await self._configuration.refresh_schema()
            found = self._objects.read(id, value)
        if otype is not None and found is not None and found.otype != otype:
            raise WrongType(f"object {id} is of type {found.otype!r}, not {otype!r}")
        return found

    async def obj_get_many(
        self,
        ids: Iterable[int],
        **freshness: Unpack[Freshness],
    ) -> list[Object | None]:
        """Return objects in the order of their ids, None for each that does not exist. Raises `SomeFailed`."""
        consistency = from_keywords(**freshness) if freshness else None
        checked = check_ids(ids, "ids")
        if checked:
            shard_in(self._builder.shards, max(checked), "id")  # the highest id has the highest shard
        values = await self._read_many(OBJECT, list(zip(checked, strict=True)), consistency)
        try:
            return all_or_raise(self._objects.read_all(checked, values))
        except UnknownType:
            await self._configuration.refresh_schema()
            return all_or_raise(self._objects.read_all(checked, values))

    async def assoc_get(
        self,
        id1: int,
        atype: str,
        id2s: Iterable[int],
        high: int | None = None,
        low: int | None = None,
        state: str | None = None,
        **freshness: Unpack[Freshness],
    ) -> AssocList:
        """Return the edges to ``id2s`` that exist and have ``high >= time >= low``, newest first. One query takes at
        most 6,000 id2s; an id2 named twice is answered once. For a type with ``reverse_lookup``, a long list is
        answered by the inverse lists (`tao.client.reverse_lookup`)."""
        consistency = from_keywords(**freshness) if freshness else None
        row, assoc_type = self._builder.edges(id1, atype, id2s, high, low, state)
        if assoc_type.reverse_lookup:
            consistency = self._demand_of(consistency)
            if self._reverse_lookup.plan(row, assoc_type, self._builder.shards, consistency) is not None:
                (value,) = await self._edges_by_reverse_lookup([(row, assoc_type)], consistency)
                if isinstance(value, TaoError):
                    raise value
                return AssocList(id1, assoc_type, value)
            block = await self._read(EDGES, row, consistency)
            self._reverse_lookup.record_length(row, assoc_type, block)
            return AssocList(id1, assoc_type, block)
        return AssocList(id1, assoc_type, await self._read(EDGES, row, consistency))

    async def assoc_get_many(
        self,
        queries: Iterable[Sequence[Any]],
        **freshness: Unpack[Freshness],
    ) -> list[AssocList]:
        """Do `assoc_get` for each ``(id1, atype, id2s[, high[, low[, state]]])``. Raises `SomeFailed`."""
        consistency = from_keywords(**freshness) if freshness else None
        checked = build_each(self._builder.edges, queries, 3, 6)
        if not any(atype.reverse_lookup for _, atype in checked):
            return await self._lists(EDGES, checked, consistency)
        return _lists_or_raise(checked, await self._edges_by_reverse_lookup(checked, self._demand_of(consistency)))

    async def assoc_exists(
        self,
        id1: int,
        atype: str,
        id2: int,
        **freshness: Unpack[Freshness],
    ) -> bool:
        """Return whether there is an edge from ``id1`` to ``id2``: what `assoc_get` says of this id, in one byte. For a
        type with ``reverse_lookup``, a long list is answered by the inverse list of ``id2``."""
        consistency = from_keywords(**freshness) if freshness else None
        row, assoc_type = self._builder.exists(id1, atype, id2)
        if assoc_type.reverse_lookup:
            (value,) = await self._exist_by_reverse_lookup([(row, assoc_type)], self._demand_of(consistency))
            if isinstance(value, TaoError):
                raise value
            return exists_in(value)
        return exists_in(await self._read(EXISTS, row, consistency))

    async def assoc_exists_many(
        self,
        edges: Iterable[tuple[int, str, int]],
        **freshness: Unpack[Freshness],
    ) -> list[bool]:
        """Do `assoc_exists` for each ``(id1, atype, id2)``, of which there may be 6,000. The edges of one list cost
        least when they follow each other. Raises `SomeFailed`."""
        consistency = from_keywords(**freshness) if freshness else None
        checked = build_each(self._builder.exists, edges, 3, 3)
        if len(checked) > MAX_ID2_SET:
            raise TooLarge(f"{len(checked)} edges in one assoc_exists_many; ask for at most {MAX_ID2_SET} at a time")
        if any(atype.reverse_lookup for _, atype in checked):
            values = await self._exist_by_reverse_lookup(checked, self._demand_of(consistency))
        else:
            values = await self._read_many(EXISTS, [row for row, _ in checked], consistency)
        return all_or_raise(_each_or_error(exists_in, values))

    async def assoc_count(
        self,
        id1: int,
        atype: str,
        state: str | None = None,
        **freshness: Unpack[Freshness],
    ) -> int:
        """Return how many edges an association list has; of a type with states, how many are in one state."""
        consistency = from_keywords(**freshness) if freshness else None
        row, _ = self._builder.count(id1, atype, state)
        return _count(await self._read(COUNT, row, consistency))

    async def assoc_count_many(
        self,
        lists: Iterable[tuple[int, str] | tuple[int, str, str]],
        **freshness: Unpack[Freshness],
    ) -> list[int]:
        """Do `assoc_count` for each ``(id1, atype[, state])``. Raises `SomeFailed`."""
        consistency = from_keywords(**freshness) if freshness else None
        rows = [row for row, _ in build_each(self._builder.count, lists, 2, 3)]
        values = await self._read_many(COUNT, rows, consistency)
        return all_or_raise(_each_or_error(_count, values))

    async def assoc_range(
        self,
        id1: int,
        atype: str,
        pos: int,
        limit: int,
        state: str | None = None,
        **freshness: Unpack[Freshness],
    ) -> AssocList:
        """Return edges ``pos … pos + limit - 1`` of an association list, newest first. A limit above the type's limit
        is cut to it, and the result's ``limit_cut`` is True then."""
        consistency = from_keywords(**freshness) if freshness else None
        row, assoc_type = self._builder.range(id1, atype, pos, limit, state)
        return AssocList(id1, assoc_type, await self._read(RANGE, row, consistency))

    async def assoc_range_many(
        self,
        queries: Iterable[tuple[int, str, int, int] | tuple[int, str, int, int, str]],
        **freshness: Unpack[Freshness],
    ) -> list[AssocList]:
        """Do `assoc_range` for each ``(id1, atype, pos, limit[, state])``. Raises `SomeFailed`."""
        consistency = from_keywords(**freshness) if freshness else None
        return await self._lists(RANGE, build_each(self._builder.range, queries, 4, 5), consistency)

    async def assoc_time_range(
        self,
        id1: int,
        atype: str,
        high: int | None,
        low: int | None,
        limit: int,
        pos: int = 0,
        state: str | None = None,
        **freshness: Unpack[Freshness],
    ) -> AssocList:
        """Return at most ``limit`` edges with ``high >= time >= low``, newest first, without the first ``pos`` of them.
        None is no bound."""
        consistency = from_keywords(**freshness) if freshness else None
        row, assoc_type = self._builder.time_range(id1, atype, high, low, limit, pos, state)
        return AssocList(id1, assoc_type, await self._read(TIME_RANGE, row, consistency))

    async def assoc_time_range_many(
        self,
        queries: Iterable[Sequence[Any]],
        **freshness: Unpack[Freshness],
    ) -> list[AssocList]:
        """Do `assoc_time_range` for each ``(id1, atype, high, low, limit[, pos[, state]])``. Raises `SomeFailed`."""
        consistency = from_keywords(**freshness) if freshness else None
        return await self._lists(TIME_RANGE, build_each(self._builder.time_range, queries, 5, 7), consistency)

    async def assoc_page(
        self,
        id1: int,
        atype: str,
        limit: int,
        cursor: str | None = None,
        high: int | None = None,
        low: int | None = None,
        state: str | None = None,
        **freshness: Unpack[Freshness],
    ) -> AssocPage:
        """Return a page of at most ``limit`` edges (and at most the type's limit) with ``high >= time >= low``, newest
        first: the first page, or the one after the page that returned ``cursor`` for the same bounds. Raises
        `InvalidArgument` for a text that is no cursor, and for the cursor of another list."""
        consistency = from_keywords(**freshness) if freshness else None
        check_number(limit, "limit", 1, MAX_LIMIT)
        (_, number, upper, lower, _, _), assoc_type = self._builder.time_range(
            id1, atype, high, low, limit, state=state
        )
        page_limit = min(limit, assoc_type.limit)
        below_id2 = 0
        if cursor is not None:
            time, id2 = _read_cursor(cursor, id1, number)
            if time <= upper:
                upper, below_id2 = time, id2
        row = TimeRangeRow(id1, number, upper, lower, page_limit, below_id2)
        edges = AssocList(id1, assoc_type, await self._read(TIME_RANGE, row, consistency))
        # The server may cut to a lower limit by a newer schema, so a short page is the last only when it was not cut.
        is_last = not edges or (len(edges) < page_limit and not edges.limit_cut)
        return AssocPage(edges, None if is_last else _make_cursor(id1, number, edges.times[-1], edges.id2s[-1]))

    async def assoc_iter(
        self,
        id1: int,
        atype: str,
        *,
        high: int | None = None,
        low: int | None = None,
        page: int = PAGE_EDGES,
        state: str | None = None,
        **freshness: Unpack[Freshness],
    ) -> AsyncIterator[Assoc]:
        """Iterate over all edges with ``high >= time >= low``, newest first: ``async for edge in graph.assoc_iter(…)``.
        ``page`` is the number of edges per query. The head of `tao.client.reads` says which edges a walk sees while the
        list is written. Raises as `assoc_page`, for a wrong argument at the first step."""
        cursor: str | None = None
        while True:
            result = await self.assoc_page(id1, atype, page, cursor, high, low, state, **freshness)
            for edge in result.edges:
                yield edge
            cursor = result.cursor
            if cursor is None:
                return

    async def _lists(
        self, operation: int, queries: list[ListQuery[ListRow]], consistency: Consistency | None
    ) -> list[AssocList]:
        values = await self._read_many(operation, [row for row, _ in queries], consistency)
        return _lists_or_raise(queries, values)

    async def _edges_by_reverse_lookup(
        self, queries: list[ListQuery[EdgesRow]], consistency: Consistency
    ) -> list[bytes | TaoError]:
        """Answer each query by its list, or by the inverse lists where that list is long. A reverse look-up that fails
        is repeated at the list itself in the time that is left, so that a query which one server can answer does not
        fail because of another server."""
        deadline = self._loop.time() + self._timeout_seconds
        lookup, shards = self._reverse_lookup, self._builder.shards
        plans = [
            lookup.plan(row, atype, shards, consistency) if atype.reverse_lookup else None for row, atype in queries
        ]
        rows = [
            part
            for (row, _), plan in zip(queries, plans, strict=True)
            for part in ([row] if plan is None else plan.parts)
        ]
        count_rows = [plan.count_row for plan in plans if plan is not None]
        counts: list[bytes | TaoError] = []
        if count_rows:
            self.stats.reverse_lookups += len(count_rows)
            values, counts = await asyncio.gather(
                self._read_many(EDGES, rows, consistency), self._read_many(COUNT, count_rows, consistency)
            )
        else:
            values = await self._read_many(EDGES, rows, consistency)
        answers = lookup.combine(queries, plans, values, counts, self.schema)
        failed = [
            index
            for index, (plan, value) in enumerate(zip(plans, answers, strict=True))
            if plan is not None and isinstance(value, TaoError)
        ]
        await self._ask_lists_themselves(EDGES, [row for row, _ in queries], failed, answers, consistency, deadline)
        return answers

    async def _exist_by_reverse_lookup(
        self, queries: list[ListQuery[ExistsRow]], consistency: Consistency
    ) -> list[bytes | TaoError]:
        """Answer each query by its list, or by the inverse list where that list is long, as `_edges_by_reverse_lookup`
        does. An answer does not have the length of the list, so its count is asked beside it now and then."""
        deadline = self._loop.time() + self._timeout_seconds
        lookup, shards = self._reverse_lookup, self._builder.shards
        rows = [row for row, _ in queries]
        sent = list(rows)
        measured: dict[CountRow, AssocType] = {}
        for index, (row, atype) in enumerate(queries):
            if not atype.reverse_lookup:
                continue
            reverse = lookup.plan_exists(row, atype, shards, consistency)
            if reverse is not None:
                self.stats.reverse_lookups += 1
                sent[index] = reverse
            elif lookup.should_measure(row, consistency):
                measured[CountRow(row.id1, row.atype)] = atype
        if measured:
            answers, counts = await asyncio.gather(
                self._read_many(EXISTS, sent, consistency), self._read_many(COUNT, list(measured), consistency)
            )
            for (count_row, atype), value in zip(measured.items(), counts, strict=True):
                if not isinstance(value, TaoError):
                    lookup.record_count(count_row, atype, _count(value))
        else:
            answers = await self._read_many(EXISTS, sent, consistency)
        failed = [
            index for index, value in enumerate(answers) if sent[index] != rows[index] and isinstance(value, TaoError)
        ]
        await self._ask_lists_themselves(EXISTS, rows, failed, answers, consistency, deadline)
        return answers

    async def _ask_lists_themselves(
        self,
        operation: int,
        rows: Sequence[QueryRow],
        failed: Sequence[int],
        answers: list[bytes | TaoError],
        consistency: Consistency,
        deadline: float,
    ) -> None:
        """Repeat the reverse look-ups that failed at the lists themselves, in the time that is left."""
        if not failed:
            return
        self.stats.reverse_lookup_fallbacks += len(failed)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                values = await self._read_many(operation, [rows[index] for index in failed], consistency)
                for index, value in zip(failed, values, strict=True):
                    answers[index] = value


def _count(value: bytes) -> int:
    if len(value) < COUNT_VALUE_BYTES:
        raise ProtocolError(f"a count value has {COUNT_VALUE_BYTES} bytes, this one {len(value)}")
    return int.from_bytes(value[8:16], "little")


def _lists_or_raise(queries: list[ListQuery[ListRow]], values: list[bytes | TaoError]) -> list[AssocList]:
    return all_or_raise(
        [
            value if isinstance(value, TaoError) else AssocList(row[0], atype, value)
            for (row, atype), value in zip(queries, values, strict=True)
        ]
    )


def _each_or_error(read: Callable[[bytes], Result], values: list[bytes | TaoError]) -> list[Result | TaoError]:
    return [value if isinstance(value, TaoError) else read(value) for value in values]


def _make_cursor(id1: int, atype: int, time: int, id2: int) -> str:
    packed = _CURSOR.pack(_FORMAT, crc32(_LIST_KEY.pack(id1, atype)), time, id2)
    return urlsafe_b64encode(packed).decode()


def _read_cursor(cursor: str, id1: int, atype: int) -> tuple[int, int]:
    """Return time and id2 of the last edge of the page that returned the cursor. Raises `InvalidArgument`."""
    refusal = f"cursor {cursor!r} is not valid: pass the cursor of an AssocPage on unchanged"
    try:
        packed = urlsafe_b64decode(cursor.encode("ascii"))
        version, checksum, time, id2 = _CURSOR.unpack(packed)
    except (AttributeError, TypeError, UnicodeEncodeError, NotBase64, struct.error) as error:
        raise InvalidArgument(refusal) from error
    if version != _FORMAT or time > MAX_TIME or not 0 < id2 <= MAX_ID:
        raise InvalidArgument(refusal)
    if checksum != crc32(_LIST_KEY.pack(id1, atype)):
        raise InvalidArgument(f"cursor {cursor!r} is of another list than that of id1 {id1}")
    return time, id2
