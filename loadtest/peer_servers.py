"""The servers that tao is compared with: private redis and memcached processes on loopback, taken from the PATH.

Each has a free port, is asked until it answers, and ends with the run. Those of `peers` have as much memory as the
caches of tao.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

import aiomcache
import redis.asyncio
import redis.exceptions

from tao.devcluster.ports import LOOPBACK, reserve_port
from tao.devcluster.processes import ManagedProcess, ProcessOptions, to_the_end
from tao.model.errors import OperatorError

SMALLEST_MB: Final = 4
"""The smallest cache server of any contestant."""
REDIS_OWN_MB: Final = 5
"""Memory of Redis beyond its budget: Redis counts an empty server (a megabyte) and the buffers of its connections (some
27 kB for each of 128) into its bound, and the budget is for data."""
_GROWTH_FACTOR: Final = 1.5
"""Of memcached's size classes, each of which gets a page of a megabyte, beyond the bound as well: with the default of
1.25 there are twice as many, which of small bounds is most of what memcached takes."""
_START_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 5.0
_PROBE_PAUSE_SECONDS: Final = 0.02


class PeerServer(NamedTuple):
    """A running server."""

    port: int
    pid: int


@asynccontextmanager
async def _private_server(
    name: str, argv: Callable[[int], Sequence[str]], answers: Callable[[int], Awaitable[bool]], folder: Path
) -> AsyncIterator[PeerServer]:
    """Run a server. ``argv`` gives its command line for a port; ``answers`` tells whether it answers there.

    Raises `OperatorError` when it does not come up."""
    with reserve_port() as reservation:
        port = reservation.port
        process = ManagedProcess(
            name, argv(port), os.environ, folder / f"{name}.log", ProcessOptions(stop_seconds=_STOP_SECONDS)
        )
        try:
            await _wait(process, lambda: answers(port))
        except BaseException:
            await to_the_end(process.stop())
            raise
    try:
        yield PeerServer(port, process.pid)
    finally:
        await to_the_end(process.stop())


async def _wait(process: ManagedProcess, answers: Callable[[], Awaitable[bool]]) -> None:
    try:
        async with asyncio.timeout(_START_SECONDS):
            while not await answers():
                if not process.is_running:
                    raise OperatorError(f"{process.name} ended at once:\n{process.log_tail()}")
                await asyncio.sleep(_PROBE_PAUSE_SECONDS)
    except TimeoutError:
        raise OperatorError(f"{process.name} did not answer in {_START_SECONDS:g} s:\n{process.log_tail()}") from None


def find_redis_server() -> tuple[str, str]:
    """Return the path and version of redis-server. Raises `OperatorError` when there is none."""
    path = shutil.which("redis-server")
    if path is None:
        raise OperatorError(
            "no redis-server on the PATH: `make bench` gets one, or install your system's package; "
            "`--only writes --only load` measures without it"
        )
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return path, next((word.removeprefix("v=") for word in text.split() if word.startswith("v=")), text.strip())


def private_redis(folder: Path, max_mb: int = 0) -> AbstractAsyncContextManager[PeerServer]:
    """Run a redis-server in memory only. With ``max_mb`` it is a cache of that size, which evicts.

    Raises `OperatorError` when it does not come up."""
    path, _ = find_redis_server()
    cache = ["--maxmemory", f"{max_mb}mb", "--maxmemory-policy", "allkeys-lru"] if max_mb else []

    def argv(port: int) -> list[str]:
        return [path, "--port", str(port), "--bind", LOOPBACK, "--save", "", "--appendonly", "no", *cache]

    async def answers(port: int) -> bool:
        client = redis.asyncio.Redis(host=LOOPBACK, port=port)
        try:
            await client.ping()
        except redis.exceptions.ConnectionError:
            return False
        finally:
            await client.aclose()
        return True

    return _private_server("redis-server", argv, answers, folder)


def find_memcached() -> tuple[str, str]:
    """Return the path and version of memcached. Raises `OperatorError` when there is none."""
    path = shutil.which("memcached")
    if path is None:
        raise OperatorError("no memcached on the PATH: install your system's package (Debian and Ubuntu: memcached)")
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return path, text.removeprefix("memcached").strip()


def private_memcached(folder: Path, megabytes: int) -> AbstractAsyncContextManager[PeerServer]:
    """Run a memcached of that size. Raises `OperatorError` when it does not come up."""
    path, _ = find_memcached()
    # As root it insists on another account; it opens no files.
    account = ["-u", "nobody"] if os.geteuid() == 0 else []

    def argv(port: int) -> list[str]:
        bounds = ["-m", str(megabytes), "-I", "2m", "-f", str(_GROWTH_FACTOR)]
        return [path, "-p", str(port), "-l", LOOPBACK, *bounds, *account]

    async def answers(port: int) -> bool:
        client = aiomcache.Client(LOOPBACK, port)
        try:
            await client.version()
        except OSError:
            return False
        finally:
            await client.close()
        return True

    return _private_server("memcached", argv, answers, folder)
