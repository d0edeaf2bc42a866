"""The yardstick's server: a private redis-server on loopback, in memory only, taken from the PATH."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import redis.asyncio
import redis.exceptions

from tao.devcluster.ports import LOOPBACK, reserve_port
from tao.devcluster.processes import ManagedProcess
from tao.model.errors import OperatorError

_START_SECONDS = 10.0
_PROBE_PAUSE_SECONDS = 0.02


def find_redis_server() -> tuple[str, str]:
    """Path and version. Raises `OperatorError` when there is none."""
    path = shutil.which("redis-server")
    if path is None:
        raise OperatorError(
            "no redis-server on the PATH: `make bench` gets one, or install your system's package; "
            "`--only writes --only load` measures without it"
        )
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return path, next((word.removeprefix("v=") for word in text.split() if word.startswith("v=")), text.strip())


@asynccontextmanager
async def private_redis(folder: Path, max_mb: int = 0) -> AsyncIterator[tuple[int, int]]:
    """Run one; gives ``(port, pid)``. ``max_mb``: as a cache of that size, which evicts; 0: everything stays. Raises
    `OperatorError` when it does not come up."""
    path, _ = find_redis_server()
    with reserve_port() as reservation:
        port = reservation.port
        argv = [path, "--port", str(port), "--bind", LOOPBACK, "--save", "", "--appendonly", "no"]
        if max_mb:
            argv += ["--maxmemory", f"{max_mb}mb", "--maxmemory-policy", "allkeys-lru"]
        process = ManagedProcess("redis-server", argv, os.environ, folder / "redis.log", stop_seconds=5.0)
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
    client = redis.asyncio.Redis(host=LOOPBACK, port=port)
    try:
        async with asyncio.timeout(_START_SECONDS):
            while True:
                try:
                    await client.ping()
                except redis.exceptions.ConnectionError:
                    if not process.is_running:
                        raise OperatorError(f"redis-server ended at once:\n{process.log_tail()}") from None
                    await asyncio.sleep(_PROBE_PAUSE_SECONDS)
                else:
                    return
    except TimeoutError:
        raise OperatorError(f"redis-server did not answer in {_START_SECONDS:g} s:\n{process.log_tail()}") from None
    finally:
        await client.aclose()
