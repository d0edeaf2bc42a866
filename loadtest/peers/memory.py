"""How much memory every contestant's cache servers have taken for what they cache, beside what they were given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiomcache
import msgspec
import redis.asyncio

from loadtest.peers.names import MEMCACHED, REDIS, TAO
from loadtest.results import Listing
from tao.devcluster.ports import LOOPBACK
from tao.devcluster.readiness import server_stats

_TOLERATED: Final = 1.1
_MEGA: Final = 1e6


class ServerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Of one cache server, bytes."""

    budget: int
    cached: int
    """What the budget is for: tao's arenas by their own account, Redis' data with its tables, memcached's pages."""
    resident: int
    """Of the whole process."""

    @property
    def is_over(self) -> bool:
        """By more than a tenth."""
        return self.cached > _TOLERATED * self.budget


async def memory_of(
    budget: int, admins: Sequence[str], ports: Mapping[str, Sequence[int]], pids: Mapping[str, Sequence[int]]
) -> dict[str, list[ServerMemory]]:
    """By contestant, of those that take part. ``admins``: of tao's caches; ``ports``: of the peers'; ``pids``: of the
    cache servers, in the same order. Raises what the clients raise."""
    cached = {
        TAO: [int((await server_stats(admin))["bytes"]) for admin in admins],
        REDIS: [await _of_redis(port) for port in ports.get(REDIS, ())],
        MEMCACHED: [await _of_memcached(port) for port in ports.get(MEMCACHED, ())],
    }
    return {
        name: [
            ServerMemory(budget=budget, cached=each, resident=_resident(pid))
            for each, pid in zip(of, pids[name], strict=True)
        ]
        for name, of in cached.items()
        if of
    }


async def _of_redis(port: int) -> int:
    # Any: redis-py types its answers for both of its clients at once.
    client: Any = redis.asyncio.Redis(host=LOOPBACK, port=port)
    try:
        found = await client.info("memory")
    finally:
        await client.aclose()
    return int(found["used_memory"] - found["used_memory_startup"] - found["mem_clients_normal"])


async def _of_memcached(port: int) -> int:
    client = aiomcache.Client(LOOPBACK, port, pool_size=1)
    try:
        return int((await client.stats(b"slabs"))[b"total_malloced"] or 0)
    finally:
        await client.close()


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


def memory_listing(found: Mapping[str, Sequence[ServerMemory]]) -> Listing:
    """For the table."""
    rows: list[tuple[str, ...]] = [
        (
            f"{name}, server {number}",
            f"{each.budget / _MEGA:.1f}",
            f"{each.cached / _MEGA:.1f}" + (" (over its budget)" if each.is_over else ""),
            f"{each.resident / _MEGA:.1f}",
        )
        for name, servers in found.items()
        for number, each in enumerate(servers, 1)
    ]
    return Listing(title="", columns=("memory", "budget MB", "cached MB", "whole process MB"), rows=rows)
