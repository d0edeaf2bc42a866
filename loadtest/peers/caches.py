"""The two caches of a look-aside, behind the few verbs that it needs; each used as its documentation says.

A *lease* lets one client fill a key that many miss, and makes a deletion win over a fill that began before it: what
memcached's users at Facebook were given ("Scaling Memcache at Facebook", NSDI 2013, section 3.2.1). Redis has scripts
for it; memcached has compare-and-swap on a placeholder, in two round trips: its meta commands would do with one, but
aiomcache 0.8 has none of them.

All verbs take several keys: a server is sent what concerns it at once (MGET, a pipeline, a multi-get), and servers are
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
"""Values begin with a byte that says what they are; this one says that somebody is fetching."""

Lease = bytes | int
"""The right to fill a key, as the cache knows it."""


class Cache(Protocol):
    """Several servers, keys spread over them by hash."""

    async def get(self, key: bytes) -> bytes | None:
        """The value, or None."""

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Of each key."""

    async def lease(self, keys: Sequence[bytes]) -> list[Lease | None]:
        """For keys that are missing: the right to fill each; None when somebody else has it."""

    async def fill(self, values: Mapping[bytes, tuple[bytes, Lease]]) -> None:
        """Set values, except of keys deleted since their leases were given."""

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Delete values and leases."""

    async def close(self) -> None:
        """Close all connections."""


class RedisCache:
    """redis-py with hiredis. `Any`: it types its answers for both of its clients at once."""

    _FILL: Final = """
        if redis.call('get', KEYS[2]) == ARGV[1] then
            redis.call('set', KEYS[1], ARGV[2])
            redis.call('del', KEYS[2])
        end
    """

    def __init__(self, host: str, ports: Sequence[int], connections: int) -> None:
        # Who finds no connection free waits for one, as redis-py's documentation has it for bounded pools; the pool
        # that is made by default raises an error, which at a constant rate is what most get in a slow moment.
        pools = [
            redis.asyncio.BlockingConnectionPool(
                host=host, port=port, max_connections=connections, timeout=_CONNECTION_SECONDS
            )
            for port in ports
        ]
        self._clients: list[Any] = [redis.asyncio.Redis.from_pool(pool) for pool in pools]
        self._fills: list[Any] = [client.register_script(self._FILL) for client in self._clients]

    async def get(self, key: bytes) -> bytes | None:
        """See `Cache`."""
        value: bytes | None = await self._clients[_server_of(key, len(self._clients))].get(key)
        return value

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `Cache`."""
        spread = _spread(keys, len(self._clients))
        answers = await at_once([self._clients[number].mget(mine) for number, mine in spread.items()])
        values: list[bytes | None] = _in_order(keys, spread, answers)
        return values

    async def lease(self, keys: Sequence[bytes]) -> list[Lease | None]:
        """See `Cache`."""
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
        """See `Cache`."""
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
        """See `Cache`."""
        spread = _spread(keys, len(self._clients))
        await at_once(
            [
                self._clients[number].delete(*(each for key in mine for each in (key, b"L" + key)))
                for number, mine in spread.items()
            ]
        )

    async def close(self) -> None:
        """See `Cache`."""
        for client in self._clients:
            await client.aclose()


class MemcachedCache:
    """aiomcache. Leases, fills and deletions have no form for several keys: they go out at once over the pool."""

    def __init__(self, host: str, ports: Sequence[int], connections: int) -> None:
        self._clients = [aiomcache.Client(host, port, pool_size=connections) for port in ports]

    async def get(self, key: bytes) -> bytes | None:
        """See `Cache`."""
        return _value(await self._of(key).get(key))

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `Cache`."""
        spread = _spread(keys, len(self._clients))
        answers = await at_once([self._clients[number].multi_get(*mine) for number, mine in spread.items()])
        return [_value(each) for each in _in_order(keys, spread, answers)]

    async def lease(self, keys: Sequence[bytes]) -> list[Lease | None]:
        """See `Cache`."""
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
        """See `Cache`."""
        await at_once([self._fill(key, value, lease) for key, (value, lease) in values.items()])

    async def _fill(self, key: bytes, value: bytes, lease: Lease) -> None:
        assert isinstance(lease, int)
        await self._of(key).cas(key, value, lease)

    async def delete(self, keys: Sequence[bytes]) -> None:
        """See `Cache`."""
        await at_once([self._of(key).delete(key) for key in keys])

    async def close(self) -> None:
        """See `Cache`."""
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
    """The servers' answers, one for each key in the order asked. `Any`: values, or what a client says of a lease."""
    found = {
        key: value
        for mine, values in zip(spread.values(), answers, strict=True)
        for key, value in zip(mine, values, strict=True)
    }
    return [found[key] for key in keys]


async def at_once(calls: Sequence[Any]) -> Any:
    """The answers in order, a single call without a task of its own. `Any`: awaitables of the clients, which have no
    common type."""
    return [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
