"""The reading operations (DESIGN.md §2), and their many-forms."""

# ruff: noqa: A002 - `id` is what an object's id is called in the paper, the design and every other client
from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from tao.client.columns import COUNT, EDGES, OBJECT, RANGE, TIME_RANGE
from tao.client.operations import Operations, all_or_raise
from tao.client.own_writes import After
from tao.client.requests import ListQuery, each_item
from tao.client.validation import check_ids, check_otype, shard_in
from tao.client.values import AssocList, Object
from tao.model.errors import ProtocolError, TaoError, UnknownType, WrongType
from tao.model.graph import COUNT_VALUE_BYTES
from tao.model.ids import MAX_ID


class ReadOperations(Operations):
    """Reads go to the nearest follower that has the shard. ``after``, a write token or its text, asks for nothing older
    than the writes it names, wherever they were made; text that is none raises `InvalidArgument`. ``critical=True``
    reads the master database instead of any cache: slower, for the few reads that must see what was written elsewhere
    a moment ago without a token to tell of it. This graph's own recent writes need neither. ``max_staleness_ms`` asks
    for no answer that may be further behind its master than that: while the region may be, and nothing is known of it,
    the read is critical; when the master database cannot be read then, it raises `StaleRead`."""

    async def obj_get(
        self,
        id: int,
        otype: str | None = None,
        *,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> Object | None:
        """The object, or None when there is none. Raises `WrongType` when ``otype`` is given and it is of another."""
        if type(id) is not int or not 0 < id <= MAX_ID:
            self._requests.object_row(id)
        if otype is not None:
            check_otype(self._requests.schema, otype)
        value = await self._read(OBJECT, (id,), critical, after, max_staleness_ms)
        try:
            found = self._objects.read(id, value)
        except UnknownType:  # of a schema newer than ours
            await self._configuration.refresh_schema()
            found = self._objects.read(id, value)
        if otype is not None and found is not None and found.otype != otype:
            raise WrongType(f"object {id} is of type {found.otype!r}, not {otype!r}")
        return found

    async def obj_get_many(
        self, ids: Iterable[int], *, critical: bool = False, after: After = None, max_staleness_ms: int | None = None
    ) -> list[Object | None]:
        """The objects in the order of their ids, None in the place of each that is not there. Raises `SomeFailed`."""
        checked = check_ids(ids, "ids")
        if checked:
            shard_in(self._requests.shards, max(checked), "id")  # the highest id is of the highest shard
        values = await self._read_many(OBJECT, list(zip(checked, strict=True)), critical, after, max_staleness_ms)
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
        *,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> AssocList:
        """Those of the edges to ``id2s`` that exist and have ``high >= time >= low``, newest first. At most 6,000
        id2s; one named twice is answered once. Of a long list of a type that says ``turn_gets`` they are looked for in
        the inverse lists (`tao.client.turning`)."""
        row, found = self._requests.edges(id1, atype, id2s, high, low)
        if found.turn_gets and not critical and max_staleness_ms is None:
            if self._turning.turned(row, found, self._requests.shards, after) is not None:
                (turned,) = await self._edges_at_either_end([(row, found)], after)
                if isinstance(turned, TaoError):
                    raise turned
                return AssocList(id1, found, turned)
            value = await self._read(EDGES, row, critical, after, max_staleness_ms)
            self._turning.learn(row, found, value)
            return AssocList(id1, found, value)
        return AssocList(id1, found, await self._read(EDGES, row, critical, after, max_staleness_ms))

    async def assoc_get_many(
        self,
        queries: Iterable[Sequence[Any]],
        *,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> list[AssocList]:
        """`assoc_get` for each ``(id1, atype, id2s[, high[, low]])``. Raises `SomeFailed`."""
        asked = each_item(self._requests.edges, queries, 3, 5)
        if critical or max_staleness_ms is not None or not any(atype.turn_gets for _, atype in asked):
            return await self._lists(EDGES, asked, critical, after, max_staleness_ms)
        return _lists_or_raise(asked, await self._edges_at_either_end(asked, after))

    async def assoc_count(
        self, id1: int, atype: str, *, critical: bool = False, after: After = None, max_staleness_ms: int | None = None
    ) -> int:
        """How many edges the association list has."""
        row, _ = self._requests.count(id1, atype)
        return _count(await self._read(COUNT, row, critical, after, max_staleness_ms))

    async def assoc_count_many(
        self,
        lists: Iterable[tuple[int, str]],
        *,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> list[int]:
        """`assoc_count` for each ``(id1, atype)``. Raises `SomeFailed`."""
        rows = [row for row, _ in each_item(self._requests.count, lists, 2, 2)]
        values = await self._read_many(COUNT, rows, critical, after, max_staleness_ms)
        return all_or_raise(_each_or_error(_count, values))

    async def assoc_range(
        self,
        id1: int,
        atype: str,
        pos: int,
        limit: int,
        *,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> AssocList:
        """Edges ``pos … pos + limit - 1`` of the association list, newest first. A limit above the type's is cut to
        it, and the result's ``limit_cut`` says so."""
        row, found = self._requests.range(id1, atype, pos, limit)
        return AssocList(id1, found, await self._read(RANGE, row, critical, after, max_staleness_ms))

    async def assoc_range_many(
        self,
        queries: Iterable[tuple[int, str, int, int]],
        *,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> list[AssocList]:
        """`assoc_range` for each ``(id1, atype, pos, limit)``. Raises `SomeFailed`."""
        return await self._lists(
            RANGE, each_item(self._requests.range, queries, 4, 4), critical, after, max_staleness_ms
        )

    async def assoc_time_range(
        self,
        id1: int,
        atype: str,
        high: int | None,
        low: int | None,
        limit: int,
        *,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> AssocList:
        """At most ``limit`` edges with ``high >= time >= low``, newest first; a bound that is None does not bound."""
        row, found = self._requests.time_range(id1, atype, high, low, limit)
        return AssocList(id1, found, await self._read(TIME_RANGE, row, critical, after, max_staleness_ms))

    async def assoc_time_range_many(
        self,
        queries: Iterable[tuple[int, str, int | None, int | None, int]],
        *,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> list[AssocList]:
        """`assoc_time_range` for each ``(id1, atype, high, low, limit)``. Raises `SomeFailed`."""
        return await self._lists(
            TIME_RANGE, each_item(self._requests.time_range, queries, 5, 5), critical, after, max_staleness_ms
        )

    async def _lists(
        self, kind: int, queries: list[ListQuery], critical: bool, after: After, max_staleness_ms: int | None
    ) -> list[AssocList]:
        values = await self._read_many(kind, [row for row, _ in queries], critical, after, max_staleness_ms)
        return _lists_or_raise(queries, values)

    async def _edges_at_either_end(self, queries: list[ListQuery], after: After) -> list[bytes | TaoError]:
        """Each query at its list, or at the inverse lists where that is long. One that fails there is asked at its list
        in the time that is left: what one server can answer does not fail because of another."""
        until = self._loop.time() + self._timeout_seconds
        turning, schema, shards = self._turning, self.schema, self._requests.shards
        ways = [turning.turned(row, atype, shards, after) if atype.turn_gets else None for row, atype in queries]
        rows = [
            part for (row, _), way in zip(queries, ways, strict=True) for part in ([row] if way is None else way.parts)
        ]
        counts = [way.length for way in ways if way is not None]
        lengths: list[bytes | TaoError] = []
        if counts:
            self.stats.turned += len(counts)
            values, lengths = await asyncio.gather(
                self._read_many(EDGES, rows, False, after, None), self._read_many(COUNT, counts, False, after, None)
            )
        else:
            values = await self._read_many(EDGES, rows, False, after, None)
        found = turning.answers(queries, ways, values, lengths, schema)
        back = [
            place
            for place, (way, value) in enumerate(zip(ways, found, strict=True))
            if way is not None and isinstance(value, TaoError)
        ]
        if back:
            self.stats.turned_back += len(back)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    values = await self._read_many(EDGES, [queries[place][0] for place in back], False, after, None)
                    for place, value in zip(back, values, strict=True):
                        found[place] = value
        return found


def _count(value: bytes) -> int:
    if len(value) < COUNT_VALUE_BYTES:
        raise ProtocolError(f"a count value has {COUNT_VALUE_BYTES} bytes, this one {len(value)}")
    return int.from_bytes(value[8:16], "little")


def _lists_or_raise(queries: list[ListQuery], values: list[bytes | TaoError]) -> list[AssocList]:
    return all_or_raise(
        [
            value if isinstance(value, TaoError) else AssocList(row[0], atype, value)
            for (row, atype), value in zip(queries, values, strict=True)
        ]
    )


def _each_or_error(read: Callable[[bytes], int], values: list[bytes | TaoError]) -> list[int | TaoError]:
    return [value if isinstance(value, TaoError) else read(value) for value in values]
