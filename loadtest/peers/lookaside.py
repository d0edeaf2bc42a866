"""Contestants: MySQL alone, and MySQL behind a look-aside cache.

Look-aside: a read asks the cache, and on a miss the database, and leaves the answer in the cache if it has the lease; a
write commits and then deletes the keys it changed. Objects are values; a list is one value, its newest 1,001 edges with
their data in msgpack, from which every read on the list is answered when it can be; a count is a value of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import msgspec

from loadtest.peers.caches import Cache
from loadtest.peers.sql_graph import Edge, SqlGraph
from loadtest.published.contestant import Payloads
from loadtest.published.requests import Request
from loadtest.published.workload import Kind

_ADDED_BOUND: Final = 10_000
_PREFIX: Final = 1_001
"""One more than the largest limit asked for: a full answer that may not be the whole list is told apart."""
_WAIT_SECONDS: Final = 0.002
_WAITS: Final = 50
_NOTHING: Final = b"-"
_SOMETHING: Final = b"+"

Found = TypeVar("Found")
_edges = msgspec.msgpack.Decoder(list[tuple[int, int, bytes]])


class SqlContestant:
    """The database is asked every time."""

    def __init__(self, sql: SqlGraph, ids: Sequence[int], payloads: Payloads) -> None:
        self._sql: Final = sql
        self._ids: Final = ids
        self._payloads: Final = payloads
        self._added: Final[deque[int]] = deque(maxlen=_ADDED_BOUND)
        self.hits = 0
        self.misses = 0

    async def ask(self, request: Request) -> int:
        """See `loadtest.published.contestant.Contestant`. Raises what its client raises."""
        ids, kind = self._ids, request.kind
        if kind is Kind.OBJ_GET:
            return int(await self.node(ids[request.node]) is not None)
        if kind is Kind.ASSOC_RANGE:
            return len(await self.newest(ids[request.node], request.limit))
        if kind is Kind.ASSOC_COUNT:
            return await self.count(ids[request.node])
        if kind is Kind.ASSOC_GET:
            return len(await self.among(ids[request.node], [ids[other] for other in request.others]))
        if kind is Kind.ASSOC_TIME_RANGE:
            return len(await self.between(ids[request.node], request.high, request.low, request.limit))
        if kind is Kind.READ_MANY:
            return await self.nodes([ids[other] for other in request.others])
        await self._write(request)
        return 0

    async def close(self) -> None:
        """Close the pool."""
        await self._sql.close()

    async def node(self, object_id: int) -> bytes | None:
        """An object's payload."""
        return await self._sql.node(object_id)

    async def nodes(self, ids: Sequence[int]) -> int:
        """How many of these objects there are."""
        return len(await self._sql.nodes(ids))

    async def count(self, id1: int) -> int:
        """How many links."""
        return await self._sql.count(id1)

    async def newest(self, id1: int, limit: int) -> Sequence[Edge]:
        """The newest links."""
        return await self._sql.newest(id1, limit)

    async def between(self, id1: int, high: int, low: int, limit: int) -> Sequence[Edge]:
        """Those of a stretch of time."""
        return await self._sql.between(id1, high, low, limit)

    async def among(self, id1: int, id2s: Sequence[int]) -> Sequence[Edge]:
        """Those to these nodes."""
        return await self._sql.among(id1, id2s)

    async def forget(self, nodes: Sequence[int], lists: Sequence[int]) -> None:
        """These objects and lists have changed."""

    async def put_node(self, object_id: int, payload: bytes) -> None:
        """Write an object."""
        await self._sql.put_node(object_id, payload)
        await self.forget([object_id], [])

    async def _write(self, request: Request) -> None:
        sql, ids = self._sql, self._ids
        match request.kind:
            case Kind.ASSOC_ADD | Kind.ASSOC_OVERWRITE:
                await self._put_links([request])
            case Kind.WRITE_MANY:
                await self._put_links(request.parts)
            case Kind.ASSOC_DELETE:
                id1, id2 = ids[request.node], ids[request.others[0]]
                await sql.delete_link(id1, id2)
                await self.forget([], [id1])
            case Kind.ASSOC_CHANGE_TYPE:
                id1, id2 = ids[request.node], ids[request.others[0]]
                await sql.mark_link(id1, id2)
                await self.forget([], [id1])
            case Kind.OBJ_UPDATE:
                await self.put_node(ids[request.node], self._payloads.next(request.size))
            case Kind.OBJ_ADD:
                self._added.append(await sql.add_node(self._payloads.next(request.size)))
            case Kind.OBJ_DELETE:
                if self._added:
                    object_id = self._added.popleft()
                    await sql.delete_node(object_id)
                    await self.forget([object_id], [])
            case _:
                raise AssertionError(f"{request.kind} is no write")

    async def _put_links(self, requests: Sequence[Request]) -> None:
        ids, payloads = self._ids, self._payloads
        links = [(ids[each.node], ids[each.others[0]], each.time, payloads.next(each.size)) for each in requests]
        await self._sql.put_links(links)
        await self.forget([], [id1 for id1, *_ in links])


class LookasideContestant(SqlContestant):
    """The cache is asked first."""

    def __init__(self, cache: Cache, sql: SqlGraph, ids: Sequence[int], payloads: Payloads) -> None:
        super().__init__(sql, ids, payloads)
        self._cache: Final = cache

    async def close(self) -> None:
        """Close both."""
        await self._cache.close()
        await super().close()

    async def node(self, object_id: int) -> bytes | None:
        """An object's payload."""
        key = b"o%d" % object_id
        value = await self._cache.get(key)
        if value is not None:
            self.hits += 1
        else:
            value = await self._filled(key, lambda: self._fetch_node(object_id))
        return None if value == _NOTHING else value[1:]

    async def nodes(self, ids: Sequence[int]) -> int:
        """How many of these objects there are: one multi-get, then the database for what it has not."""
        keys = [b"o%d" % object_id for object_id in ids]
        values = await self._cache.get_many(keys)
        missing = [object_id for object_id, value in zip(ids, values, strict=True) if value is None]
        self.hits += len(ids) - len(missing)
        self.misses += len(missing)
        leases = {object_id: await self._cache.lease(b"o%d" % object_id) for object_id in missing}
        found = await self._sql.nodes(missing) if missing else {}
        for object_id, lease in leases.items():
            if lease is not None:
                value = _SOMETHING + found[object_id] if object_id in found else _NOTHING
                await self._cache.fill(b"o%d" % object_id, value, lease)
        return sum(value is not None and value != _NOTHING for value in values) + len(found)

    async def count(self, id1: int) -> int:
        """How many links."""
        key = b"c%d" % id1
        value = await self._cache.get(key)
        if value is not None:
            self.hits += 1
        else:
            value = await self._filled(key, lambda: self._fetch_count(id1))
        return int(value[1:])

    async def newest(self, id1: int, limit: int) -> Sequence[Edge]:
        """The newest links."""
        return (await self._prefix(id1))[:limit]

    async def between(self, id1: int, high: int, low: int, limit: int) -> Sequence[Edge]:
        """Those of a stretch of time."""
        prefix = await self._prefix(id1)
        if len(prefix) < _PREFIX or low > prefix[-1][1]:
            return [edge for edge in prefix if low <= edge[1] <= high][:limit]
        return await self._sql.between(id1, high, low, limit)

    async def among(self, id1: int, id2s: Sequence[int]) -> Sequence[Edge]:
        """Those to these nodes."""
        prefix = await self._prefix(id1)
        wanted = set(id2s)
        found = [edge for edge in prefix if edge[0] in wanted]
        if len(prefix) < _PREFIX or len(found) == len(wanted):
            return found
        return await self._sql.among(id1, id2s)

    async def forget(self, nodes: Sequence[int], lists: Sequence[int]) -> None:
        """Delete what the cache has of them."""
        keys = [b"o%d" % object_id for object_id in nodes]
        for id1 in dict.fromkeys(lists):
            keys += [b"l%d" % id1, b"c%d" % id1]
        await self._cache.delete(keys)

    async def _prefix(self, id1: int) -> list[Edge]:
        key = b"l%d" % id1
        value = await self._cache.get(key)
        if value is not None:
            self.hits += 1
        else:
            value = await self._filled(key, lambda: self._fetch_list(id1))
        return _edges.decode(memoryview(value)[1:])

    async def _filled(self, key: bytes, fetch: Callable[[], Awaitable[bytes]]) -> bytes:
        """The value after a miss: fetched by whoever has the lease, awaited by the others for a moment."""
        self.misses += 1
        for _ in range(_WAITS):
            lease = await self._cache.lease(key)
            if lease is not None:
                value = await fetch()
                await self._cache.fill(key, value, lease)
                return value
            await asyncio.sleep(_WAIT_SECONDS)
            found = await self._cache.get(key)
            if found is not None:
                return found
        return await fetch()

    async def _fetch_node(self, object_id: int) -> bytes:
        payload = await self._sql.node(object_id)
        return _NOTHING if payload is None else _SOMETHING + payload

    async def _fetch_count(self, id1: int) -> bytes:
        return _SOMETHING + b"%d" % await self._sql.count(id1)

    async def _fetch_list(self, id1: int) -> bytes:
        return _SOMETHING + msgspec.msgpack.encode(await self._sql.newest(id1, _PREFIX))
