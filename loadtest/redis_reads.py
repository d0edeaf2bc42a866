"""Redis as the yardstick of cached reads: redis-py (asyncio, hiredis) asking for the same values in the same shapes.

An object is a string; a list is a sorted set, scored by time, of which a page is ZREVRANGE with scores, because an edge
is an id and a time. Connections are pooled as redis-py does by itself: one client, a connection per pending command.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis.asyncio

from loadtest.dataset import VALUE_BYTES, Dataset, Operation, Query, StoredList
from loadtest.drivers import Call, WrongAnswer
from tao.devcluster.ports import LOOPBACK

_PIPELINE = 1000


class RedisReads:
    """Calls against one redis-server. `Any`: redis-py types its answers for both of its clients at once."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._shared = self._client()
        self._single: list[Any] = []

    def _client(self, **options: Any) -> Any:
        return redis.asyncio.Redis(host=LOOPBACK, port=self._port, **options)

    async def close(self) -> None:
        """Close all connections."""
        for client in (self._shared, *self._single):
            await client.aclose()

    async def fill(self, data: Dataset) -> None:
        """Store what the graph stores. Raises `redis.exceptions.RedisError`."""
        await self._shared.flushall()
        objects = list(data.objects.items())
        for start in range(0, len(objects), _PIPELINE):
            await self._shared.mset({_object_key(key): value for key, value in objects[start : start + _PIPELINE]})
        for stored in (*data.pages, *data.mixed):
            await self._shared.zadd(_list_key(stored.id1), {str(id2): time for id2, time in stored.edges})

    async def verify(self, data: Dataset) -> None:
        """Read every object and list once. Raises `WrongAnswer`."""
        for object_id, value in data.objects.items():
            if await self._shared.get(_object_key(object_id)) != value:
                raise WrongAnswer(f"redis has another value of {object_id}")
        for stored in (*data.pages, *data.mixed):
            got = await self._shared.zrevrange(_list_key(stored.id1), 0, -1, withscores=True)
            if tuple((int(id2), int(time)) for id2, time in got) != stored.edges:
                raise WrongAnswer(f"redis has another list of {stored.id1}")

    async def open_single(self, count: int) -> None:
        """Clients of one connection each, for the calls of `separate_batches`."""
        while len(self._single) < count:
            client = self._client(single_connection_client=True)
            self._single.append(client)
            await client.initialize()

    def gets(self, ids: Sequence[int]) -> list[Call]:
        """One object a call."""
        return [Call(self._shared.get, (_object_key(object_id),), len, VALUE_BYTES) for object_id in ids]

    def pages(self, lists: Sequence[StoredList], edges: int) -> list[Call]:
        """The newest ``edges`` of a list a call."""
        return [
            Call(
                self._shared.zrevrange, (_list_key(stored.id1), 0, edges - 1, True), len, min(edges, len(stored.edges))
            )
            for stored in lists
        ]

    def mix(self, queries: Sequence[Query]) -> list[Call]:
        """The paper's mix."""
        return [self._mixed(query) for query in queries]

    def many(self, batches: Sequence[Sequence[int]]) -> list[Call]:
        """An MGET a call."""
        return [_mget(self._shared, batch) for batch in batches]

    def separate_mgets(self, batches: Sequence[Sequence[int]]) -> list[list[Call]]:
        """Per connection: MGETs (of one key: GETs)."""
        return [[_mget(client, batch) for batch in batches] for client in self._single]

    def separate_pipelines(self, batches: Sequence[Sequence[int]]) -> list[list[Call]]:
        """Per connection: pipelines of GETs."""
        return [
            [Call(_pipeline, (client, batch), _total, _expected(batch)) for batch in batches] for client in self._single
        ]

    def _mixed(self, query: Query) -> Call:
        client = self._shared
        if query.operation is Operation.OBJ_GET:
            return Call(client.get, (_object_key(query.id),), len, VALUE_BYTES)
        key = _list_key(query.id)
        if query.operation is Operation.ASSOC_COUNT:
            return Call(client.zcard, (key,), int, query.expected)
        if query.operation is Operation.ASSOC_RANGE:
            return Call(client.zrevrange, (key, 0, query.limit - 1, True), len, query.expected)
        if query.operation is Operation.ASSOC_TIME_RANGE:
            arguments = (key, query.high, query.low, 0, query.limit, True)
            return Call(client.zrevrangebyscore, arguments, len, query.expected)
        return Call(client.zscore, (key, str(query.id2)), _found, query.expected)


def _object_key(object_id: int) -> str:
    return f"o:{object_id}"


def _list_key(id1: int) -> str:
    return f"l:{id1}"


def _expected(batch: Sequence[int]) -> int:
    return VALUE_BYTES * len(batch)


def _found(score: float | None) -> int:
    return score is not None


def _total(values: Sequence[bytes]) -> int:
    return sum(map(len, values))


def _mget(client: Any, batch: Sequence[int]) -> Call:
    keys = [_object_key(object_id) for object_id in batch]
    if len(keys) == 1:
        return Call(client.get, (keys[0],), len, VALUE_BYTES)
    return Call(client.mget, (keys,), _total, _expected(batch))


async def _pipeline(client: Any, batch: Sequence[int]) -> Any:
    pipeline = client.pipeline(transaction=False)
    for object_id in batch:
        pipeline.get(_object_key(object_id))
    return await pipeline.execute()
