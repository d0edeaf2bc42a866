"""The peers' servers: private redis and memcached processes on loopback, with as much memory as the caches of tao."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Final

import aiomcache

from loadtest.private_servers import private_server
from loadtest.redis_server import private_redis
from tao.devcluster.ports import LOOPBACK
from tao.model.errors import OperatorError

SMALLEST_MB: Final = 4
"""Of one cache server, whoever's."""
REDIS_OWN_MB: Final = 5
"""Beyond its budget: Redis counts an empty server (a megabyte) and the buffers of its connections (some 27 kB
for each of 128) into its bound, and what a budget is for is data."""
_GROWTH_FACTOR: Final = 1.5
"""Of memcached's classes of sizes, each of which gets a page of a megabyte, beyond the bound as well: with the default
of 1.25 there are twice as many, which of small bounds is most of what memcached takes."""


def find_memcached() -> tuple[str, str]:
    """Path and version. Raises `OperatorError` when there is none."""
    path = shutil.which("memcached")
    if path is None:
        raise OperatorError("no memcached on the PATH: install your system's package (Debian and Ubuntu: memcached)")
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return path, text.removeprefix("memcached").strip()


def private_memcached(folder: Path, megabytes: int) -> AbstractAsyncContextManager[tuple[int, int]]:
    """Run one; gives ``(port, pid)``. Raises `OperatorError` when it does not come up."""
    path, _ = find_memcached()
    # As root it insists on another account; it opens no files.
    account = ["-u", "nobody"] if os.geteuid() == 0 else []

    def argv(port: int) -> list[str]:
        bounds = ["-m", str(megabytes), "-I", "2m", "-f", str(_GROWTH_FACTOR)]
        return [path, "-p", str(port), "-l", LOOPBACK, *bounds, *account]

    return private_server("memcached", argv, _answers, folder)


async def _answers(port: int) -> bool:
    client = aiomcache.Client(LOOPBACK, port)
    try:
        await client.version()
    except OSError:
        return False
    finally:
        await client.close()
    return True


async def several_redis(
    count: int, megabytes: int, folder: Path, stack: AsyncExitStack
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``(ports, pids)``; they end with the stack. Raises `OperatorError`."""
    found = [
        await stack.enter_async_context(private_redis(folder / f"redis-{number}", megabytes + REDIS_OWN_MB))
        for number in range(count)
    ]
    return tuple(port for port, _ in found), tuple(pid for _, pid in found)


async def several_memcached(
    count: int, megabytes: int, folder: Path, stack: AsyncExitStack
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As `several_redis`."""
    found = [
        await stack.enter_async_context(private_memcached(folder / f"memcached-{number}", megabytes))
        for number in range(count)
    ]
    return tuple(port for port, _ in found), tuple(pid for _, pid in found)
