"""Contestants: MySQL alone, and MySQL behind a look-aside cache.

Look-aside: a read asks the cache, and on a miss the database, and stores the answer in the cache if it holds the lease;
a write commits and then deletes the keys that it changed. Objects are values, and so are counts. A list has two
serialized values, each made when it is first needed: a first page, which is enough for nearly every read, and the
newest 1,001 edges. The existence of a far edge of a long list is a value of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import msgspec

from loadtest.peers.caches import Cache, Lease, at_once
from loadtest.peers.contestants import LARGEST_LIMIT, Answer, AnswerSource, Edge, Source
from loadtest.peers.sql_graph import SqlGraph
from loadtest.published.contestant import Payloads
from loadtest.published.requests import SMALL_LIMIT, WorkloadRequest
from loadtest.published.workload import READS, Kind

_ADDED_BOUND: Final = 10_000
_PAGE: Final = SMALL_LIMIT + 1
"""One more than the limit of a page, to recognise a full page that may not be the whole list."""
_PREFIX: Final = LARGEST_LIMIT + 1
_WAIT_SECONDS: Final = 0.002
_WAITS: Final = 50
_NOTHING: Final = b"-"
_SOMETHING: Final = b"+"

_edges = msgspec.msgpack.Decoder(list[Edge])
_edge = msgspec.msgpack.Decoder(Edge)

Fetch = Callable[[Sequence[bytes]], Awaitable[Mapping[bytes, bytes]]]
"""Fetches the values of these keys from the database."""


class SqlContestant:
    """The contestant that asks the database every time."""

    def __init__(self, sql: SqlGraph, ids: Sequence[int], payloads: Payloads) -> None:
        self._sql: Final = sql
        self._ids: Final = ids
        self._payloads: Final = payloads
        self._added: Final[deque[int]] = deque(maxlen=_ADDED_BOUND)
        self.touched = 0

    async def ask(self, request: WorkloadRequest) -> Source:
        if request.kind not in READS:
            await self._write(request)
            return Source.UNKNOWN
        asked = AnswerSource()
        found = await self.read(request, asked)
        if isinstance(found, bytes):
            self.touched += len(found)
        elif isinstance(found, list):
            for each in found:
                payload = each[2] if isinstance(each, tuple) else each
                self.touched += 0 if payload is None else len(payload)
        return asked.how

    def sampled(self) -> AbstractContextManager[None]:
        """Do nothing: the source of every read is known (see `loadtest.peers.contestants.Peer`)."""
        return nullcontext()

    async def answer(self, request: WorkloadRequest) -> Answer:
        return await self.read(request, AnswerSource())

    async def close(self) -> None:
        """Close the pool."""
        await self._sql.close()

    async def read(self, request: WorkloadRequest, asked: AnswerSource) -> Answer:
        """Answer a read as this contestant does. Raises what its clients raise."""
        ids, kind = self._ids, request.kind
        id1 = ids[request.node]
        if kind is Kind.OBJ_GET:
            return await self.node(id1, asked)
        if kind is Kind.ASSOC_RANGE:
            return await self.newest(id1, request.limit, asked)
        if kind is Kind.ASSOC_COUNT:
            return await self.count(id1, asked)
        if kind is Kind.ASSOC_GET:
            return await self.among(id1, [ids[other] for other in request.others], asked)
        if kind is Kind.ASSOC_TIME_RANGE:
            return await self.between(id1, request.high, request.low, request.limit, asked)
        return await self.nodes([ids[other] for other in request.others], asked)

    async def node(self, object_id: int, asked: AnswerSource) -> bytes | None:
        """Return an object's payload."""
        asked.how = Source.MISS
        return await self._sql.node(object_id)

    async def nodes(self, ids: Sequence[int], asked: AnswerSource) -> list[bytes | None]:
        """Return each object's payload."""
        asked.how = Source.MISS
        found = await self._sql.nodes(ids)
        return [found.get(object_id) for object_id in ids]

    async def count(self, id1: int, asked: AnswerSource) -> int:
        """Return the number of links."""
        asked.how = Source.MISS
        return await self._sql.count(id1)

    async def newest(self, id1: int, limit: int, asked: AnswerSource) -> list[Edge]:
        """Return the newest links."""
        asked.how = Source.MISS
        return await self._sql.newest(id1, limit)

    async def between(self, id1: int, high: int, low: int, limit: int, asked: AnswerSource) -> list[Edge]:
        """Return the newest links of a time range."""
        asked.how = Source.MISS
        return await self._sql.between(id1, high, low, limit)

    async def among(self, id1: int, id2s: Sequence[int], asked: AnswerSource) -> list[Edge]:
        """Return the links to these nodes."""
        asked.how = Source.MISS
        return await self._sql.among(id1, id2s)

    async def forget(self, nodes: Sequence[int], links: Sequence[tuple[int, int]]) -> None:
        """Delete these changed objects and links from the cache."""

    async def put_node(self, object_id: int, payload: bytes) -> None:
        """Write an object."""
        await self._sql.put_node(object_id, payload)
        await self.forget([object_id], [])

    async def put_links(self, links: Sequence[tuple[int, int, int, bytes]]) -> None:
        """Write links, ``(id1, id2, time, payload)``."""
        await self._sql.put_links(links)
        await self.forget([], [(id1, id2) for id1, id2, *_ in links])

    async def _write(self, request: WorkloadRequest) -> None:
        sql, ids = self._sql, self._ids
        match request.kind:
            case Kind.ASSOC_ADD | Kind.ASSOC_OVERWRITE:
                await self._put_links([request])
            case Kind.WRITE_MANY:
                await self._put_links(request.parts)
            case Kind.ASSOC_DELETE:
                id1, id2 = ids[request.node], ids[request.others[0]]
                await sql.delete_link(id1, id2)
                await self.forget([], [(id1, id2)])
            case Kind.ASSOC_CHANGE_TYPE:
                id1, id2 = ids[request.node], ids[request.others[0]]
                await sql.mark_link(id1, id2)
                await self.forget([], [(id1, id2)])
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

    async def _put_links(self, requests: Sequence[WorkloadRequest]) -> None:
        ids, payloads = self._ids, self._payloads
        links = [(ids[each.node], ids[each.others[0]], each.time, payloads.next(each.size)) for each in requests]
        await self.put_links(links)


class LookasideContestant(SqlContestant):
    """The contestant that asks a cache first."""

    def __init__(self, cache: Cache, sql: SqlGraph, ids: Sequence[int], payloads: Payloads) -> None:
        super().__init__(sql, ids, payloads)
        self._cache: Final = cache

    async def close(self) -> None:
        """Close the cache's connections and the pool."""
        await self._cache.close()
        await super().close()

    async def ask_many(self, requests: Sequence[WorkloadRequest]) -> list[Source]:
        """Answer several requests, with the same effect on the cache as `ask` of each.

        The keys that the reads begin with are asked for at once, with one multi-get, and the missing ones with one
        fetch per kind. A read that needs further keys asks for them by itself.
        """
        reads = [request for request in requests if request.kind in READS]
        begun = [self._begins_with(request) for request in reads]
        fetches = {key: fetch for keys, fetch in begun for key in keys}
        values = dict(zip(fetches, await self._cache.get_many(list(fetches)), strict=True))
        missing = {key for key, value in values.items() if value is None}
        for fetch in dict.fromkeys(fetches.values()):
            wanted = [key for key in missing if fetches[key] == fetch]
            if wanted:
                values.update(await self._filled(wanted, fetch, AnswerSource()))
        hows = []
        for request, (keys, fetch) in zip(reads, begun, strict=True):
            # A second request for a key finds it in the cache.
            asked = AnswerSource()
            if not missing.isdisjoint(keys):
                missing.difference_update(keys)
                asked.how = Source.MISS
            if fetch == self._fetch_list and len(_edges.decode(memoryview(values[keys[0]] or b"")[1:])) >= _PAGE:
                await self.read(request, asked)
            hows.append(asked.how)
        return hows + [await self.ask(request) for request in requests if request.kind not in READS]

    def _begins_with(self, request: WorkloadRequest) -> tuple[list[bytes], Fetch]:
        """Return the keys that a read needs first, and the function that fetches them."""
        id1 = self._ids[request.node]
        match request.kind:
            case Kind.OBJ_GET:
                return [b"o%d" % id1], self._fetch_nodes
            case Kind.READ_MANY:
                return [b"o%d" % self._ids[other] for other in request.others], self._fetch_nodes
            case Kind.ASSOC_COUNT:
                return [b"c%d" % id1], self._fetch_count
            case _:
                return [b"p%d" % id1], self._fetch_list

    async def node(self, object_id: int, asked: AnswerSource) -> bytes | None:
        """Return an object's payload."""
        value = await self._one(b"o%d" % object_id, self._fetch_nodes, asked)
        return None if value == _NOTHING else value[1:]

    async def nodes(self, ids: Sequence[int], asked: AnswerSource) -> list[bytes | None]:
        """Return each object's payload: one multi-get, then one statement for the objects that the cache does not
        have."""
        values = await self._many([b"o%d" % object_id for object_id in ids], self._fetch_nodes, asked)
        return [None if value == _NOTHING else value[1:] for value in values]

    async def count(self, id1: int, asked: AnswerSource) -> int:
        """Return the number of links."""
        return int((await self._one(b"c%d" % id1, self._fetch_count, asked))[1:])

    async def newest(self, id1: int, limit: int, asked: AnswerSource) -> list[Edge]:
        """Return the newest links."""
        page = await self._page(id1, asked)
        if limit >= _PAGE <= len(page):
            page = await self._prefix(id1, asked)
        return page[:limit]

    async def between(self, id1: int, high: int, low: int, limit: int, asked: AnswerSource) -> list[Edge]:
        """Return the newest links of a time range."""
        for prefix, most in ((self._page, _PAGE), (self._prefix, _PREFIX)):
            edges = await prefix(id1, asked)
            found = [edge for edge in edges if low <= edge[1] <= high][:limit]
            if len(edges) < most or low > edges[-1][1] or len(found) == limit:
                return found
        asked.at_least(Source.MISS)
        return await self._sql.between(id1, high, low, limit)

    async def among(self, id1: int, id2s: Sequence[int], asked: AnswerSource) -> list[Edge]:
        """Return the links to these nodes; each link beyond the page is a value of its own."""
        page = await self._page(id1, asked)
        wanted = set(id2s)
        found = [edge for edge in page if edge[0] in wanted]
        if len(page) < _PAGE or len(found) == len(wanted):
            return found
        far = sorted(wanted - {edge[0] for edge in found})
        values = await self._many([b"e%d:%d" % (id1, id2) for id2 in far], self._fetch_links, asked)
        found += [_edge.decode(memoryview(value)[1:]) for value in values if value != _NOTHING]
        return sorted(found, key=lambda edge: (edge[1], edge[0]), reverse=True)

    async def forget(self, nodes: Sequence[int], links: Sequence[tuple[int, int]]) -> None:
        """Delete the cached values of these objects and links."""
        keys = [b"o%d" % object_id for object_id in nodes]
        for id1 in dict.fromkeys(id1 for id1, _ in links):
            keys += [b"p%d" % id1, b"l%d" % id1, b"c%d" % id1]
        keys += [b"e%d:%d" % pair for pair in dict.fromkeys(links)]
        await self._cache.delete(keys)

    async def _page(self, id1: int, asked: AnswerSource) -> list[Edge]:
        return _edges.decode(memoryview(await self._one(b"p%d" % id1, self._fetch_list, asked))[1:])

    async def _prefix(self, id1: int, asked: AnswerSource) -> list[Edge]:
        return _edges.decode(memoryview(await self._one(b"l%d" % id1, self._fetch_list, asked))[1:])

    async def _one(self, key: bytes, fetch: Fetch, asked: AnswerSource) -> bytes:
        value = await self._cache.get(key)
        return value if value is not None else (await self._filled([key], fetch, asked))[key]

    async def _many(self, keys: Sequence[bytes], fetch: Fetch, asked: AnswerSource) -> list[bytes]:
        values = dict(zip(keys, await self._cache.get_many(keys), strict=True))
        missing = [key for key, value in values.items() if value is None]
        filled = await self._filled(missing, fetch, asked) if missing else {}
        return [filled[key] if value is None else value for key, value in values.items()]

    async def _filled(self, keys: Sequence[bytes], fetch: Fetch, asked: AnswerSource) -> dict[bytes, bytes]:
        """Return the values after a miss: the client with the lease fetches them, the others wait for a moment."""
        found: dict[bytes, bytes] = {}
        left = list(keys)
        for _ in range(_WAITS):
            leases: dict[bytes, Lease] = {
                key: lease for key, lease in zip(left, await self._cache.lease(left), strict=True) if lease is not None
            }
            if leases:
                asked.at_least(Source.MISS)
                fetched = await fetch(list(leases))
                await self._cache.fill({key: (fetched[key], lease) for key, lease in leases.items()})
                found.update(fetched)
                left = [key for key in left if key not in found]
            if not left:
                return found
            asked.at_least(Source.JOINED)
            await asyncio.sleep(_WAIT_SECONDS)
            values = await self._cache.get_many(left)
            found.update((key, value) for key, value in zip(left, values, strict=True) if value is not None)
            left = [key for key in left if key not in found]
            if not left:
                return found
        asked.at_least(Source.MISS)
        return {**found, **await fetch(left)}

    async def _fetch_nodes(self, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        if len(keys) == 1:
            payload = await self._sql.node(int(keys[0][1:]))
            return {keys[0]: _NOTHING if payload is None else _SOMETHING + payload}
        found = await self._sql.nodes([int(key[1:]) for key in keys])
        return {key: _SOMETHING + found[int(key[1:])] if int(key[1:]) in found else _NOTHING for key in keys}

    async def _fetch_count(self, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        counts = await at_once([self._sql.count(int(key[1:])) for key in keys])
        return {key: _SOMETHING + b"%d" % count for key, count in zip(keys, counts, strict=True)}

    async def _fetch_list(self, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        most = [_PAGE if key.startswith(b"p") else _PREFIX for key in keys]
        lists = await at_once([self._sql.newest(int(key[1:]), limit) for key, limit in zip(keys, most, strict=True)])
        return {key: _SOMETHING + msgspec.msgpack.encode(edges) for key, edges in zip(keys, lists, strict=True)}

    async def _fetch_links(self, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        id1 = int(keys[0][1:].partition(b":")[0])
        id2s = [int(key.partition(b":")[2]) for key in keys]
        found = {edge[0]: edge for edge in await self._sql.among(id1, id2s)}
        return {
            key: _SOMETHING + msgspec.msgpack.encode(found[id2]) if id2 in found else _NOTHING
            for key, id2 in zip(keys, id2s, strict=True)
        }
