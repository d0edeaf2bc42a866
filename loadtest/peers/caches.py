"""The two caches of a look-aside behind the few operations that it needs, each used as its documentation recommends.

A *lease* lets one client fill a key that many miss, and makes a deletion win over a fill that began before it. Facebook
gave its memcached users leases ("Scaling Memcache at Facebook", NSDI 2013, section 3.2.1). Redis does it with scripts;
memcached with compare-and-swap on a placeholder, in two round trips: its meta commands would need one, but aiomcache
0.8 does not have them.

All operations take several keys: each server gets its keys at once (MGET, a pipeline, a multi-get), and all servers are
asked at the same time.
"""

from __future__ import annotations

import asyncio
import secrets
from binascii import crc32
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import aiomcache
import redis.asyncio

_CONNECTION_SECONDS: Final = 60
_LEASE_MS: Final = 2_000
_LEASE_SECONDS: Final = 2
_PLACEHOLDER: Final = b"\x00lease"
"""The first byte of a value says what kind of value it is; this one says that a client is fetching it."""

Lease = bytes | int
"""The right to fill a key, in the cache's own form."""


class Cache(Protocol):
    """Several cache servers, over which the keys are spread by hash."""

    async def get(self, key: bytes) -> bytes | None:
        """Return the value, or None."""

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, or None."""

    async def lease(self, keys: Sequence[bytes]) -> list[Lease | None]:
        """Take the right to fill each missing key; return None for a key whose lease another client holds."""

    async def fill(self, values: Mapping[bytes, tuple[bytes, Lease]]) -> None:
        """Set values, except those of keys that were deleted after their leases were given."""

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Delete values and leases."""

    async def close(self) -> None:
        """Close all connections."""


class RedisCache:
    """Redis through redis-py with hiredis. `Any`: redis-py types its answers for its two clients at once."""

    _FILL: Final = """
        if redis.call('get', KEYS[2]) == ARGV[1] then
            redis.call('set', KEYS[1], ARGV[2])
            redis.call('del', KEYS[2])
        end
    """

    def __init__(self, host: str, ports: Sequence[int], connections: int) -> None:
        # With this pool a client that finds no free connection waits, as redis-py's documentation recommends for
        # bounded pools. The default pool raises an error instead, which would fail most requests of a slow moment at a
        # constant rate.
        pools = [
            redis.asyncio.BlockingConnectionPool(
                host=host, port=port, max_connections=connections, timeout=_CONNECTION_SECONDS
            )
            for port in ports
        ]
        self._clients: list[Any] = [redis.asyncio.Redis.from_pool(pool) for pool in pools]
        self._fills: list[Any] = [client.register_script(self._FILL) for client in self._clients]

    async def get(self, key: bytes) -> bytes | None:
        value: bytes | None = await self._clients[_server_of(key, len(self._clients))].get(key)
        return value

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        spread = _spread(keys, len(self._clients))
        answers = await at_once([self._clients[number].mget(mine) for number, mine in spread.items()])
        values: list[bytes | None] = _in_order(keys, spread, answers)
        return values

    async def lease(self, keys: Sequence[bytes]) -> list[Lease | None]:
        token = secrets.token_bytes(8)
        spread = _spread(keys, len(self._clients))
        answers = await at_once([self._lease(number, mine, token) for number, mine in spread.items()])
        return [token if given else None for given in _in_order(keys, spread, answers)]

    async def _lease(self, number: int, keys: Sequence[bytes], token: bytes) -> Any:
        client = self._clients[number]
        if len(keys) == 1:
            return [await client.set(b"L" + keys[0], token, nx=True, px=_LEASE_MS)]
        async with client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.set(b"L" + key, token, nx=True, px=_LEASE_MS)
            return await pipeline.execute()

    async def fill(self, values: Mapping[bytes, tuple[bytes, Lease]]) -> None:
        spread = _spread(list(values), len(self._clients))
        await at_once([self._fill(number, {key: values[key] for key in mine}) for number, mine in spread.items()])

    async def _fill(self, number: int, values: Mapping[bytes, tuple[bytes, Lease]]) -> None:
        script = self._fills[number]
        if len(values) == 1:
            ((key, (value, lease)),) = values.items()
            await script(keys=[key, b"L" + key], args=[lease, value])
            return
        async with self._clients[number].pipeline(transaction=False) as pipeline:
            for key, (value, lease) in values.items():
                await script(keys=[key, b"L" + key], args=[lease, value], client=pipeline)
            await pipeline.execute()

    async def delete(self, keys: Sequence[bytes]) -> None:
        spread = _spread(keys, len(self._clients))
        await at_once(
            [
                self._clients[number].delete(*(each for key in mine for each in (key, b"L" + key)))
                for number, mine in spread.items()
            ]
        )

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


class MemcachedCache:
    """memcached through aiomcache. Leases, fills and deletions take one key each, so they are sent at once over the
    pool."""

    def __init__(self, host: str, ports: Sequence[int], connections: int) -> None:
        self._clients = [aiomcache.Client(host, port, pool_size=connections) for port in ports]

    async def get(self, key: bytes) -> bytes | None:
        return _value(await self._of(key).get(key))

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        spread = _spread(keys, len(self._clients))
        answers = await at_once([self._clients[number].multi_get(*mine) for number, mine in spread.items()])
        return [_value(each) for each in _in_order(keys, spread, answers)]

    async def lease(self, keys: Sequence[bytes]) -> list[Lease | None]:
        leases: list[Lease | None] = await at_once([self._lease(key) for key in keys])
        return leases

    async def _lease(self, key: bytes) -> Lease | None:
        client = self._of(key)
        mine = _PLACEHOLDER + secrets.token_bytes(8)
        if not await client.add(key, mine, exptime=_LEASE_SECONDS):
            return None
        value, swap = await client.gets(key)
        return swap if value == mine else None

    async def fill(self, values: Mapping[bytes, tuple[bytes, Lease]]) -> None:
        await at_once([self._fill(key, value, lease) for key, (value, lease) in values.items()])

    async def _fill(self, key: bytes, value: bytes, lease: Lease) -> None:
        assert isinstance(lease, int)
        await self._of(key).cas(key, value, lease)

    async def delete(self, keys: Sequence[bytes]) -> None:
        await at_once([self._of(key).delete(key) for key in keys])

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    def _of(self, key: bytes) -> aiomcache.Client:
        return self._clients[_server_of(key, len(self._clients))]


def _value(found: bytes | None) -> bytes | None:
    return None if found is None or found.startswith(_PLACEHOLDER) else found


def _server_of(key: bytes, servers: int) -> int:
    return crc32(key) % servers


def _spread(keys: Sequence[bytes], servers: int) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    for key in keys:
        found.setdefault(_server_of(key, servers), []).append(key)
    return found


def _in_order(keys: Sequence[bytes], spread: Mapping[int, Sequence[bytes]], answers: Sequence[Sequence[Any]]) -> Any:
    """Return the servers' answers, one for each key in the order asked. `Any`: values, or a client's form of a
    lease."""
    found = {
        key: value
        for mine, values in zip(spread.values(), answers, strict=True)
        for key, value in zip(mine, values, strict=True)
    }
    return [found[key] for key in keys]


async def at_once(calls: Sequence[Any]) -> Any:
    """Return the answers in order; a single call runs without a task of its own. `Any`: awaitables of the clients,
    which have no common type."""
    return [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
