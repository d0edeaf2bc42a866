"""Redis as the yardstick of cached reads: redis-py (asyncio, hiredis) asking for the same values in the same shapes.

An object is a string; a list is a sorted set, scored by time, of which a page is ZREVRANGE with scores, because an edge
is an id and a time. Connections are pooled as redis-py does by itself: one client, a connection per pending command.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import redis.asyncio

from loadtest.dataset import VALUE_BYTES, Dataset, Operation, Query
from loadtest.drivers import Call, WrongAnswer
from tao.devcluster.ports import LOOPBACK

_PIPELINE: Final = 1000


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

    async def open_single(self, count: int) -> list[Any]:
        """Return clients of one connection each, for calls on separate connections."""
        for _ in range(count):
            client = self._client(single_connection_client=True)
            self._single.append(client)
            await client.initialize()
        return self._single

    def call(self, asked: Query | Sequence[int]) -> Call:
        """Return the call of one query, or an MGET of several objects."""
        client = self._shared
        if not isinstance(asked, Query):
            return self.mget(asked, client)
        key = _list_key(asked.id)
        match asked.operation:
            case Operation.OBJ_GET:
                return self.mget([asked.id], client)
            case Operation.ASSOC_COUNT:
                return Call(client.zcard, (key,), int, asked.expected)
            case Operation.ASSOC_RANGE:
                return Call(client.zrevrange, (key, 0, asked.limit - 1, True), len, asked.expected)
            case Operation.ASSOC_TIME_RANGE:
                window = (key, asked.high, asked.low, 0, asked.limit, True)
                return Call(client.zrevrangebyscore, window, len, asked.expected)
            case Operation.ASSOC_GET:
                return Call(client.zscore, (key, str(asked.id2)), _found, asked.expected)

    def mget(self, batch: Sequence[int], client: Any) -> Call:
        """Return an MGET; of one key, a GET."""
        if len(batch) == 1:
            return Call(client.get, (_object_key(batch[0]),), len, VALUE_BYTES)
        return Call(client.mget, (list(map(_object_key, batch)),), _total, VALUE_BYTES * len(batch))

    def pipeline(self, batch: Sequence[int], client: Any) -> Call:
        """Return a pipeline of GETs."""
        return Call(_pipeline, (client, batch), _total, VALUE_BYTES * len(batch))


def _object_key(object_id: int) -> str:
    return f"o:{object_id}"


def _list_key(id1: int) -> str:
    return f"l:{id1}"


def _found(score: float | None) -> int:
    return score is not None


def _total(values: Sequence[bytes]) -> int:
    return sum(map(len, values))


async def _pipeline(client: Any, batch: Sequence[int]) -> Any:
    pipeline = client.pipeline(transaction=False)
    for object_id in batch:
        pipeline.get(_object_key(object_id))
    return await pipeline.execute()
