"""MySQL behind a look-aside cache.

A read asks the cache, and on a miss the database, and stores the answer in the cache if it holds the lease; a write
commits and then deletes the keys that it changed. Objects are values, and so are counts. A list has two serialized
values, each made when it is first needed: a first page, which is enough for nearly every read, and the newest 1,001
edges. The existence of a far edge of a long list is a value of its own.

Keys: ``o`` and an object's id; with the id of a list's owner, ``c`` for its count, ``p`` for its first page, ``l`` for
its newest edges; ``e``, that id, and the other end's, for a far edge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from loadtest.peers.caches import Cache, Lease, at_once
from loadtest.peers.graph_store import AnswerSource, Edge
from loadtest.peers.sql_graph import SqlGraph
from loadtest.published.requests import SMALL_LIMIT
from loadtest.published.workload import Kind
from loadtest.rounds import Source

_LARGEST_LIMIT: Final = 1_000
"""The largest limit of the ranges that workloads ask for."""
_PAGE: Final = SMALL_LIMIT + 1
"""One more than the limit of a page, to recognise a full page that may not be the whole list."""
_PREFIX: Final = _LARGEST_LIMIT + 1
_WAIT_SECONDS: Final = 0.002
_WAITS: Final = 50
_NOTHING: Final = b"-"
_SOMETHING: Final = b"+"

_edges = msgspec.msgpack.Decoder(list[Edge])
_edge = msgspec.msgpack.Decoder(Edge)


class Lookaside(SqlGraph):
    """The graph in MySQL, of which a cache is asked first."""

    def __init__(self, pool: Any, cache: Cache) -> None:
        """``pool`` is a pool of aiomysql, which has no types."""
        super().__init__(pool)
        self._cache: Final = cache

    async def close(self) -> None:
        await self._cache.close()
        await super().close()

    @staticmethod
    def keys_of(kind: Kind, ids: Sequence[int]) -> list[bytes]:
        """Return the keys that a read of these objects, or of the list of this id, needs first."""
        prefix = {Kind.OBJ_GET: b"o", Kind.READ_MANY: b"o", Kind.ASSOC_COUNT: b"c"}.get(kind, b"p")
        return [prefix + b"%d" % each for each in ids]

    async def begin(self, keys: Iterable[bytes]) -> tuple[set[bytes], set[bytes]]:
        """Ask for all these keys with one multi-get, and fetch the missing ones.

        Returns the keys that were missing, and those of pages that are full, whose reads may need more."""
        wanted = list(keys)
        values = dict(zip(wanted, await self._cache.get_many(wanted), strict=True))
        missing = [key for key, value in values.items() if value is None]
        found = {**values, **(await self._filled(missing, AnswerSource()) if missing else {})}
        full = {
            key for key, value in found.items()
            if key.startswith(b"p") and len(_edges.decode(memoryview(value or b"")[1:])) >= _PAGE
        }  # fmt: skip
        return set(missing), full

    async def node(self, object_id: int, asked: AnswerSource) -> bytes | None:
        return _payload(await self._one(b"o%d" % object_id, asked))

    async def nodes(self, ids: Sequence[int], asked: AnswerSource) -> list[bytes | None]:
        """Return each object's payload: one multi-get, then one statement for the objects that the cache does not
        have."""
        return list(map(_payload, await self._many([b"o%d" % object_id for object_id in ids], asked)))

    async def count(self, id1: int, asked: AnswerSource) -> int:
        return int((await self._one(b"c%d" % id1, asked))[1:])

    async def newest(self, id1: int, limit: int, asked: AnswerSource) -> list[Edge]:
        page = await self._list(b"p%d" % id1, asked)
        if limit >= _PAGE <= len(page):
            page = await self._list(b"l%d" % id1, asked)
        return page[:limit]

    async def between(self, id1: int, high: int, low: int, limit: int, asked: AnswerSource) -> list[Edge]:
        for key, most in ((b"p%d" % id1, _PAGE), (b"l%d" % id1, _PREFIX)):
            edges = await self._list(key, asked)
            found = [edge for edge in edges if low <= edge[1] <= high][:limit]
            if len(edges) < most or low > edges[-1][1] or len(found) == limit:
                return found
        return await super().between(id1, high, low, limit, asked)

    async def among(self, id1: int, id2s: Sequence[int], asked: AnswerSource) -> list[Edge]:
        """Return the links to these nodes; each link beyond the page is a value of its own."""
        page = await self._list(b"p%d" % id1, asked)
        wanted = set(id2s)
        found = [edge for edge in page if edge[0] in wanted]
        if len(page) < _PAGE or len(found) == len(wanted):
            return found
        far = sorted(wanted - {edge[0] for edge in found})
        values = await self._many([b"e%d:%d" % (id1, id2) for id2 in far], asked)
        found += [_edge.decode(memoryview(value)[1:]) for value in values if value != _NOTHING]
        return sorted(found, key=lambda edge: (edge[1], edge[0]), reverse=True)

    async def forget(self, nodes: Sequence[int], links: Sequence[tuple[int, int]]) -> None:
        keys = [b"o%d" % object_id for object_id in nodes]
        for id1 in dict.fromkeys(id1 for id1, _ in links):
            keys += [b"p%d" % id1, b"l%d" % id1, b"c%d" % id1]
        keys += [b"e%d:%d" % pair for pair in dict.fromkeys(links)]
        await self._cache.delete(keys)

    async def _list(self, key: bytes, asked: AnswerSource) -> list[Edge]:
        return _edges.decode(memoryview(await self._one(key, asked))[1:])

    async def _one(self, key: bytes, asked: AnswerSource) -> bytes:
        value = await self._cache.get(key)
        return value if value is not None else (await self._filled([key], asked))[key]

    async def _many(self, keys: Sequence[bytes], asked: AnswerSource) -> list[bytes]:
        values = dict(zip(keys, await self._cache.get_many(keys), strict=True))
        missing = [key for key, value in values.items() if value is None]
        filled = await self._filled(missing, asked) if missing else {}
        return [filled[key] if value is None else value for key, value in values.items()]

    async def _filled(self, keys: Sequence[bytes], asked: AnswerSource) -> dict[bytes, bytes]:
        """Return the values after a miss: the client with the lease fetches them, the others wait for a moment."""
        found: dict[bytes, bytes] = {}
        left = list(keys)
        for _ in range(_WAITS):
            leases: dict[bytes, Lease] = {
                key: lease for key, lease in zip(left, await self._cache.lease(left), strict=True) if lease is not None
            }
            if leases:
                fetched = await self._fetched(list(leases), asked)
                await self._cache.fill({key: (fetched[key], lease) for key, lease in leases.items()})
                found |= fetched
            left = [key for key in left if key not in found]
            if not left:
                return found
            asked.at_least(Source.JOINED)
            await asyncio.sleep(_WAIT_SECONDS)
            values = await self._cache.get_many(left)
            found |= {key: value for key, value in zip(left, values, strict=True) if value is not None}
            left = [key for key in left if key not in found]
            if not left:
                return found
        return found | await self._fetched(left, asked)

    async def _fetched(self, keys: Sequence[bytes], asked: AnswerSource) -> dict[bytes, bytes]:
        """Return the values of these keys from the database: objects together, far edges by list, the others alone."""
        objects = [key for key in keys if key.startswith(b"o")]
        edges: dict[bytes, list[bytes]] = {}
        for key in keys:
            if key.startswith(b"e"):
                edges.setdefault(key.partition(b":")[0], []).append(key)
        alone = [key for key in keys if not key.startswith((b"o", b"e"))]
        calls = [
            *([self._fetched_objects(objects, asked)] if objects else []),
            *(self._fetched_edges(int(owner[1:]), of, asked) for owner, of in edges.items()),
            *(self._fetched_alone(key, asked) for key in alone),
        ]
        return {key: value for values in await at_once(calls) for key, value in values.items()}

    async def _fetched_objects(self, keys: Sequence[bytes], asked: AnswerSource) -> dict[bytes, bytes]:
        payloads = await super().nodes([int(key[1:]) for key in keys], asked)
        return {
            key: _NOTHING if payload is None else _SOMETHING + payload
            for key, payload in zip(keys, payloads, strict=True)
        }

    async def _fetched_edges(self, id1: int, keys: Sequence[bytes], asked: AnswerSource) -> dict[bytes, bytes]:
        id2s = [int(key.partition(b":")[2]) for key in keys]
        found = {edge[0]: _SOMETHING + msgspec.msgpack.encode(edge) for edge in await super().among(id1, id2s, asked)}
        return {key: found.get(id2, _NOTHING) for key, id2 in zip(keys, id2s, strict=True)}

    async def _fetched_alone(self, key: bytes, asked: AnswerSource) -> dict[bytes, bytes]:
        id1 = int(key[1:])
        if key.startswith(b"c"):
            return {key: _SOMETHING + b"%d" % await super().count(id1, asked)}
        limit = _PAGE if key.startswith(b"p") else _PREFIX
        return {key: _SOMETHING + msgspec.msgpack.encode(await super().newest(id1, limit, asked))}


def _payload(value: bytes) -> bytes | None:
    return None if value == _NOTHING else value[1:]
