"""The caches of the look-asides over their own servers: leases, deletions, and as many awaiters as `peers` has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from loadtest.peer_servers import private_server
from loadtest.peers.caches import LOOKASIDES, Cache
from tao.devcluster.ports import LOOPBACK

pytestmark = pytest.mark.e2e
_AWAITERS = 64
_MEGABYTES = 16


@pytest_asyncio.fixture(params=LOOKASIDES)
async def cache(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cache]:
    kind = LOOKASIDES[request.param]
    if kind.program.found() is None:
        pytest.skip(f"no {kind.program.name}: {kind.program.where_from}")
    async with private_server(kind.program, tmp_path, _MEGABYTES + kind.own_mb) as server:
        cache = await kind.client.open(LOOPBACK, (server.port,), _AWAITERS)
        yield cache
        await cache.close()


async def put(cache: Cache, key: bytes, value: bytes) -> None:
    (lease,) = await cache.lease([key])
    assert lease is not None
    await cache.fill({key: (value, lease)})


async def test_one_client_gets_the_lease_of_a_missing_key_and_fills_it(cache: Cache) -> None:
    assert await cache.get(b"o1") is None
    (lease,) = await cache.lease([b"o1"])
    assert lease is not None
    assert await cache.lease([b"o1"]) == [None]
    assert await cache.get(b"o1") is None  # a lease is no value
    await cache.fill({b"o1": (b"+\x00\xff one", lease)})
    assert await cache.get(b"o1") == b"+\x00\xff one"
    assert (await cache.used_bytes())[0] > 0


async def test_a_deletion_wins_over_a_fill_that_began_before_it(cache: Cache) -> None:
    (lease,) = await cache.lease([b"o1"])
    assert lease is not None
    await cache.delete([b"o1", b"o2"])
    await cache.fill({b"o1": (b"+old", lease)})
    assert await cache.get(b"o1") is None


async def test_many_keys_are_answered_in_their_order(cache: Cache) -> None:
    for number in (1, 3):
        await put(cache, b"o%d" % number, b"+%d" % number)
    assert await cache.get_many([b"o3", b"o2", b"o1"]) == [b"+3", None, b"+1"]


async def test_64_awaiters_are_answered_at_once(cache: Cache) -> None:
    async def work(number: int) -> None:
        for turn in range(20):
            key = b"o%d:%d" % (number, turn)
            await put(cache, key, b"+" + key)
            assert await cache.get(key) == b"+" + key

    async with asyncio.TaskGroup() as group:
        for number in range(_AWAITERS):
            group.create_task(work(number))
