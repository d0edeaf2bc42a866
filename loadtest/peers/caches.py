"""The two caches of a look-aside, behind the four verbs that it needs; each used as its documentation says.

A *lease* lets one client fill a key that many miss, and makes a deletion win over a fill that began before it: what
memcached's users at Facebook were given ("Scaling Memcache at Facebook", NSDI 2013, section 3.2.1). Redis has scripts
for it; memcached has compare-and-swap on a placeholder.
"""

from __future__ import annotations

import secrets
from binascii import crc32
from collections.abc import Sequence
from typing import Any, Final, Protocol

import aiomcache
import redis.asyncio

_LEASE_MS: Final = 2_000
_LEASE_SECONDS: Final = 2
_PLACEHOLDER: Final = b"\x00lease"
"""Values begin with a byte that says what they are; this one says that somebody is fetching."""


class Cache(Protocol):
    """Several servers, keys spread over them by hash."""

    async def get(self, key: bytes) -> bytes | None:
        """The value, or None."""

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Of each key."""

    async def lease(self, key: bytes) -> object | None:
        """For a key that is missing: the right to fill it; None when somebody else has it."""

    async def fill(self, key: bytes, value: bytes, lease: object) -> None:
        """Set the value, unless the key was deleted since the lease was given."""

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
        self._clients: list[Any] = [
            redis.asyncio.Redis(host=host, port=port, max_connections=4 * connections) for port in ports
        ]
        self._fills: list[Any] = [client.register_script(self._FILL) for client in self._clients]

    async def get(self, key: bytes) -> bytes | None:
        """See `Cache`."""
        value: bytes | None = await self._clients[self._of(key)].get(key)
        return value

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `Cache`."""
        found: dict[bytes, bytes | None] = {}
        for number, client in enumerate(self._clients):
            mine = [key for key in keys if self._of(key) == number]
            if mine:
                found.update(zip(mine, await client.mget(mine), strict=True))
        return [found[key] for key in keys]

    async def lease(self, key: bytes) -> object | None:
        """See `Cache`."""
        token = secrets.token_bytes(8)
        given = await self._clients[self._of(key)].set(b"L" + key, token, nx=True, px=_LEASE_MS)
        return token if given else None

    async def fill(self, key: bytes, value: bytes, lease: object) -> None:
        """See `Cache`."""
        await self._fills[self._of(key)](keys=[key, b"L" + key], args=[lease, value])

    async def delete(self, keys: Sequence[bytes]) -> None:
        """See `Cache`."""
        for number, client in enumerate(self._clients):
            mine = [each for key in keys if self._of(key) == number for each in (key, b"L" + key)]
            if mine:
                await client.delete(*mine)

    async def close(self) -> None:
        """See `Cache`."""
        for client in self._clients:
            await client.aclose()

    def _of(self, key: bytes) -> int:
        return crc32(key) % len(self._clients)


class MemcachedCache:
    """aiomcache."""

    def __init__(self, host: str, ports: Sequence[int], connections: int) -> None:
        self._clients = [aiomcache.Client(host, port, pool_size=connections) for port in ports]

    async def get(self, key: bytes) -> bytes | None:
        """See `Cache`."""
        value = await self._clients[self._of(key)].get(key)
        return None if value is None or value.startswith(_PLACEHOLDER) else value

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `Cache`."""
        found: dict[bytes, bytes | None] = {}
        for number, client in enumerate(self._clients):
            mine = [key for key in keys if self._of(key) == number]
            if mine:
                for key, value in zip(mine, await client.multi_get(*mine), strict=True):
                    found[key] = None if value is None or value.startswith(_PLACEHOLDER) else value
        return [found[key] for key in keys]

    async def lease(self, key: bytes) -> object | None:
        """See `Cache`."""
        client = self._clients[self._of(key)]
        mine = _PLACEHOLDER + secrets.token_bytes(8)
        if not await client.add(key, mine, exptime=_LEASE_SECONDS):
            return None
        value, swap = await client.gets(key)
        return swap if value == mine else None

    async def fill(self, key: bytes, value: bytes, lease: object) -> None:
        """See `Cache`."""
        assert isinstance(lease, int)
        await self._clients[self._of(key)].cas(key, value, lease)

    async def delete(self, keys: Sequence[bytes]) -> None:
        """See `Cache`."""
        for key in keys:
            await self._clients[self._of(key)].delete(key)

    async def close(self) -> None:
        """See `Cache`."""
        for client in self._clients:
            await client.close()

    def _of(self, key: bytes) -> int:
        return crc32(key) % len(self._clients)
