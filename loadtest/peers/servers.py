"""The peers' servers: private redis and memcached processes on loopback, with as much memory as the caches of tao."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import aiomcache

from loadtest.redis_server import private_redis
from tao.devcluster.ports import LOOPBACK, reserve_port
from tao.devcluster.processes import ManagedProcess
from tao.model.errors import OperatorError

_START_SECONDS: Final = 10.0
_PROBE_PAUSE_SECONDS: Final = 0.02
_SMALLEST_MB: Final = 4
"""Of one server: Redis needs a megabyte for itself, and memcached hands memory out in pages of a megabyte, one at least
for each class of sizes in use."""


def find_memcached() -> tuple[str, str]:
    """Path and version. Raises `OperatorError` when there is none."""
    path = shutil.which("memcached")
    if path is None:
        raise OperatorError("no memcached on the PATH: install your system's package (Debian and Ubuntu: memcached)")
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return path, text.removeprefix("memcached").strip()


@asynccontextmanager
async def private_memcached(folder: Path, megabytes: int) -> AsyncIterator[tuple[int, int]]:
    """Run one; gives ``(port, pid)``. Raises `OperatorError` when it does not come up."""
    path, _ = find_memcached()
    with reserve_port() as reservation:
        port = reservation.port
        argv = [path, "-p", str(port), "-l", LOOPBACK, "-m", str(max(_SMALLEST_MB, megabytes)), "-I", "2m"]
        # As root it insists on another account; it opens no files.
        argv += ["-u", "nobody"] if os.geteuid() == 0 else []
        process = ManagedProcess("memcached", argv, os.environ, folder / "memcached.log", stop_seconds=5.0)
        process.start()
        try:
            await _wait_until_it_answers(process, port)
        except BaseException:
            await process.stop()
            raise
    try:
        yield port, process.pid
    finally:
        await process.stop()


async def _wait_until_it_answers(process: ManagedProcess, port: int) -> None:
    client = aiomcache.Client(LOOPBACK, port)
    try:
        async with asyncio.timeout(_START_SECONDS):
            while True:
                try:
                    await client.version()
                except OSError:
                    if not process.is_running:
                        raise OperatorError(f"memcached ended at once:\n{process.log_tail()}") from None
                    await asyncio.sleep(_PROBE_PAUSE_SECONDS)
                else:
                    return
    except TimeoutError:
        raise OperatorError(f"memcached did not answer in {_START_SECONDS:g} s:\n{process.log_tail()}") from None
    finally:
        await client.close()


async def several_redis(
    count: int, megabytes: int, folder: Path, stack: AsyncExitStack
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``(ports, pids)``; they end with the stack. Raises `OperatorError`."""
    found = [
        await stack.enter_async_context(private_redis(folder / f"redis-{number}", max(_SMALLEST_MB, megabytes)))
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
