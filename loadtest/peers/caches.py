"""The caches of a look-aside behind the few operations that it needs, each used as its documentation recommends.

A *lease* lets one client fill a key that many miss, and makes a deletion win over a fill that began before it. Facebook
gave its memcached users leases ("Scaling Memcache at Facebook", NSDI 2013, section 3.2.1). Redis does it with scripts;
memcached with compare-and-swap on a placeholder, in two round trips: its meta commands would need one, but neither
aiomcache 0.8 nor memcachio 0.5 has them.

All operations take several keys: each server gets its keys at once (MGET, a pipeline, a multi-get), and all servers are
asked at the same time.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from binascii import crc32
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import aiomcache
import glide
import memcachio
import redis.asyncio

from loadtest.peer_servers import MEMCACHED_SERVER, REDIS_SERVER, VALKEY_SERVER, ServerProgram

REDIS: Final = "redis_lookaside"
VALKEY: Final = "valkey_lookaside"
MEMCACHED: Final = "memcached_lookaside"
MEMCACHIO: Final = "memcached_memcachio"
_CONNECTION_SECONDS: Final = 60
_LEASE_MS: Final = 2_000
_LEASE_SECONDS: Final = 2
_GLIDE_TIMEOUT_MS: Final = 10_000
"""The time limit of the other clients: the default of a quarter of a second would fail requests of a slow moment."""
_GLIDE_INFLIGHT: Final = 10_000
_PLACEHOLDER: Final = b"\x00lease"
"""The first byte of a value says what kind of value it is; this one says that a client is fetching it."""
_REDIS_OWN_MB: Final = 5
"""Memory of Redis beyond its budget: Redis counts an empty server (a megabyte) and the buffers of its connections (some
27 kB for each of 128) into its bound, and the budget is for data."""

Lease = bytes | int
"""The right to fill a key, in the cache's own form."""


class Cache(ABC):
    """Several cache servers, over which the keys are spread by hash. `Any`: the clients have no common type, and
    redis-py types its answers for two clients at once."""

    def __init__(self, clients: Sequence[Any]) -> None:
        self._clients: Final = clients

    @classmethod
    @abstractmethod
    async def open(cls, host: str, ports: Sequence[int], connections: int) -> Self:
        """Return the cache over servers at these ports, with so many connections to each at most."""

    @abstractmethod
    async def get(self, key: bytes) -> bytes | None:
        """Return the value, or None."""

    @abstractmethod
    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, or None."""

    @abstractmethod
    async def lease(self, keys: Sequence[bytes]) -> list[Lease | None]:
        """Take the right to fill each missing key; return None for a key whose lease another client holds."""

    @abstractmethod
    async def fill(self, values: Mapping[bytes, tuple[bytes, Lease]]) -> None:
        """Set values, except those of keys that were deleted after their leases were given."""

    @abstractmethod
    async def delete(self, keys: Sequence[bytes]) -> None:
        """Delete values and leases."""

    @abstractmethod
    async def used_bytes(self) -> list[int]:
        """Return the memory of each server that counts against its budget."""

    @abstractmethod
    async def close(self) -> None:
        """Close all connections."""

    def of(self, key: bytes) -> Any:
        """Return the client of the key's server."""
        return self._clients[crc32(key) % len(self._clients)]

    async def spread(
        self, keys: Sequence[bytes], call: Callable[[int, list[bytes]], Awaitable[Any]]
    ) -> list[tuple[list[bytes], Any]]:
        """Call ``call`` with each server's number and keys, for all servers at once; return keys and answers."""
        found: dict[int, list[bytes]] = {}
        for key in keys:
            found.setdefault(crc32(key) % len(self._clients), []).append(key)
        answers = await at_once([call(number, mine) for number, mine in found.items()])
        return list(zip(found.values(), answers, strict=True))

    async def in_order(self, keys: Sequence[bytes], call: Callable[[int, list[bytes]], Awaitable[Any]]) -> list[Any]:
        """Call as `spread` does, for answers with a value for each key; return the values in the order of the keys."""
        spread = await self.spread(keys, call)
        found = {key: value for mine, values in spread for key, value in zip(mine, values, strict=True)}
        return [found[key] for key in keys]


_FILL: Final = """
    if redis.call('get', KEYS[2]) == ARGV[1] then
        redis.call('set', KEYS[1], ARGV[2])
        redis.call('del', KEYS[2])
    end
"""


class RedisCache(Cache):
    """Redis through redis-py with hiredis."""

    def __init__(self, clients: Sequence[Any]) -> None:
        super().__init__(clients)
        self._fills: Final = [client.register_script(_FILL) for client in clients]

    @classmethod
    async def open(cls, host: str, ports: Sequence[int], connections: int) -> Self:
        # With this pool a client that finds no free connection waits, as redis-py's documentation recommends for
        # bounded pools. The default pool raises an error instead, which would fail most requests of a slow moment at a
        # constant rate.
        pools = [
            redis.asyncio.BlockingConnectionPool(
                host=host, port=port, max_connections=connections, timeout=_CONNECTION_SECONDS
            )
            for port in ports
        ]
        return cls([redis.asyncio.Redis.from_pool(pool) for pool in pools])

    async def get(self, key: bytes) -> bytes | None:
        value: bytes | None = await self.of(key).get(key)
        return value

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self.in_order(keys, lambda number, mine: self._clients[number].mget(mine))

    async def lease(self, keys: Sequence[bytes]) -> list[Lease | None]:
        token = secrets.token_bytes(8)

        async def of_server(number: int, mine: list[bytes]) -> Any:
            client = self._clients[number]
            if len(mine) == 1:
                return [await client.set(b"L" + mine[0], token, nx=True, px=_LEASE_MS)]
            async with client.pipeline(transaction=False) as pipeline:
                for key in mine:
                    pipeline.set(b"L" + key, token, nx=True, px=_LEASE_MS)
                return await pipeline.execute()

        return [token if given else None for given in await self.in_order(keys, of_server)]

    async def fill(self, values: Mapping[bytes, tuple[bytes, Lease]]) -> None:
        async def of_server(number: int, mine: list[bytes]) -> None:
            script = self._fills[number]
            if len(mine) == 1:
                value, lease = values[mine[0]]
                await script(keys=[mine[0], b"L" + mine[0]], args=[lease, value])
                return
            async with self._clients[number].pipeline(transaction=False) as pipeline:
                for key in mine:
                    value, lease = values[key]
                    await script(keys=[key, b"L" + key], args=[lease, value], client=pipeline)
                await pipeline.execute()

        await self.spread(list(values), of_server)

    async def delete(self, keys: Sequence[bytes]) -> None:
        await self.spread(keys, lambda number, mine: self._clients[number].delete(*mine, *(b"L" + key for key in mine)))

    async def used_bytes(self) -> list[int]:
        """Return the memory of the data with its tables."""
        found = [await client.info("memory") for client in self._clients]
        return [int(each["used_memory"] - each["used_memory_startup"] - each["mem_clients_normal"]) for each in found]

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


class ValkeyCache(Cache):
    """Valkey through valkey-glide, whose core in Rust sends all requests of a client over one connection, without
    waiting for each answer; it needs no pool."""

    def __init__(self, clients: Sequence[Any]) -> None:
        super().__init__(clients)
        self._fill: Final = glide.Script(_FILL)  # type: ignore[no-untyped-call] # its compiled part has no types

    @classmethod
    async def open(cls, host: str, ports: Sequence[int], connections: int) -> Self:
        return cls(
            [
                await glide.GlideClient.create(
                    glide.GlideClientConfiguration(
                        [glide.NodeAddress(host, port)],
                        request_timeout=_GLIDE_TIMEOUT_MS,
                        inflight_requests_limit=_GLIDE_INFLIGHT,
                    )
                )
                for port in ports
            ]
        )

    async def get(self, key: bytes) -> bytes | None:
        value: bytes | None = await self.of(key).get(key)
        return value

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self.in_order(keys, lambda number, mine: self._clients[number].mget(mine))

    async def lease(self, keys: Sequence[bytes]) -> list[Lease | None]:
        token, absent = secrets.token_bytes(8), glide.ConditionalChange.ONLY_IF_DOES_NOT_EXIST
        expiry = glide.ExpirySet(glide.ExpiryType.MILLSEC, _LEASE_MS)

        async def of_server(number: int, mine: list[bytes]) -> Any:
            if len(mine) == 1:
                return [await self._clients[number].set(b"L" + mine[0], token, absent, expiry)]
            pipeline = glide.Batch(is_atomic=False)
            for key in mine:
                pipeline.set(b"L" + key, token, absent, expiry)
            return await self._clients[number].exec(pipeline, raise_on_error=True)

        return [token if given else None for given in await self.in_order(keys, of_server)]

    async def fill(self, values: Mapping[bytes, tuple[bytes, Lease]]) -> None:
        # Batches of glide cannot hold scripts; scripts that are under way at once share the connection's writes.
        await at_once(
            [
                self.of(key).invoke_script(self._fill, keys=[key, b"L" + key], args=[lease, value])
                for key, (value, lease) in values.items()
            ]
        )

    async def delete(self, keys: Sequence[bytes]) -> None:
        await self.spread(
            keys, lambda number, mine: self._clients[number].delete([*mine, *(b"L" + key for key in mine)])
        )

    async def used_bytes(self) -> list[int]:
        """Return the memory of the data with its tables."""
        found = [await client.info([glide.InfoSection.MEMORY]) for client in self._clients]
        lines = [dict(line.split(b":") for line in each.split() if b":" in line) for each in found]
        return [
            int(each[b"used_memory"]) - int(each[b"used_memory_startup"]) - int(each[b"mem_clients_normal"])
            for each in lines
        ]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


class MemcachedCache(Cache):
    """memcached through aiomcache. Leases, fills and deletions take one key each, so they are sent at once over the
    pool."""

    @classmethod
    async def open(cls, host: str, ports: Sequence[int], connections: int) -> Self:
        return cls([aiomcache.Client(host, port, pool_size=connections) for port in ports])

    async def get(self, key: bytes) -> bytes | None:
        return _value(await self.of(key).get(key))

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return list(map(_value, await self.in_order(keys, lambda number, mine: self._clients[number].multi_get(*mine))))

    async def lease(self, keys: Sequence[bytes]) -> list[Lease | None]:
        leases: list[Lease | None] = await at_once([self._lease(key) for key in keys])
        return leases

    async def _lease(self, key: bytes) -> Lease | None:
        client = self.of(key)
        mine = _PLACEHOLDER + secrets.token_bytes(8)
        if not await client.add(key, mine, exptime=_LEASE_SECONDS):
            return None
        value, swap = await client.gets(key)
        return swap if value == mine else None

    async def fill(self, values: Mapping[bytes, tuple[bytes, Lease]]) -> None:
        await at_once([self.of(key).cas(key, value, lease) for key, (value, lease) in values.items()])

    async def delete(self, keys: Sequence[bytes]) -> None:
        await at_once([self.of(key).delete(key) for key in keys])

    async def used_bytes(self) -> list[int]:
        """Return the memory of the pages."""
        return [int((await client.stats(b"slabs"))[b"total_malloced"] or 0) for client in self._clients]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


class MemcachioCache(Cache):
    """memcached through memcachio, which sends many requests over one connection without waiting for each answer."""

    @classmethod
    async def open(cls, host: str, ports: Sequence[int], connections: int) -> Self:
        return cls(
            [
                memcachio.Client((host, port), max_connections=connections, blocking_timeout=_CONNECTION_SECONDS)
                for port in ports
            ]
        )

    async def get(self, key: bytes) -> bytes | None:
        return (await self._got(self.of(key), [key]))[0]

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self.in_order(keys, lambda number, mine: self._got(self._clients[number], mine))

    async def _got(self, client: Any, keys: Sequence[bytes]) -> list[bytes | None]:
        found = await client.get(*keys)
        return [_value(found[key].value if key in found else None) for key in keys]

    async def lease(self, keys: Sequence[bytes]) -> list[Lease | None]:
        leases: list[Lease | None] = await at_once([self._lease(key) for key in keys])
        return leases

    async def _lease(self, key: bytes) -> Lease | None:
        client = self.of(key)
        mine = _PLACEHOLDER + secrets.token_bytes(8)
        if not await client.add(key, mine, expiry=_LEASE_SECONDS):
            return None
        item = (await client.gets(key)).get(key)
        swap: int | None = item.cas if item is not None and item.value == mine else None
        return swap

    async def fill(self, values: Mapping[bytes, tuple[bytes, Lease]]) -> None:
        await at_once([self.of(key).cas(key, value, lease) for key, (value, lease) in values.items()])

    async def delete(self, keys: Sequence[bytes]) -> None:
        await at_once([self.of(key).delete(key) for key in keys])

    async def used_bytes(self) -> list[int]:
        """Return the memory of the pages."""
        stats = [of for client in self._clients for of in (await client.stats("slabs")).values()]
        return [int(of[b"total_malloced"]) for of in stats]

    async def close(self) -> None:
        for client in self._clients:
            client.connection_pool.close()


def _value(found: bytes | None) -> bytes | None:
    return None if found is None or found.startswith(_PLACEHOLDER) else found


async def at_once(calls: Sequence[Any]) -> Any:
    """Return the answers in order; a single call runs without a task of its own. `Any`: awaitables of the clients,
    which have no common type."""
    return [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)


@dataclass(frozen=True, slots=True)
class CacheKind:
    """The cache of a look-aside: its server, its client, and the megabytes that a server needs beyond its budget."""

    program: ServerProgram
    client: type[Cache]
    own_mb: int = 0


LOOKASIDES: Final = {
    REDIS: CacheKind(REDIS_SERVER, RedisCache, _REDIS_OWN_MB),
    VALKEY: CacheKind(VALKEY_SERVER, ValkeyCache, _REDIS_OWN_MB),
    MEMCACHED: CacheKind(MEMCACHED_SERVER, MemcachedCache),
    MEMCACHIO: CacheKind(MEMCACHED_SERVER, MemcachioCache),
}
"""The contestants with a look-aside cache; a line here adds one."""
