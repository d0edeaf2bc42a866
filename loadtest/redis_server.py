"""The yardstick's server: a private redis-server on loopback, in memory only, taken from the PATH."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import redis.asyncio
import redis.exceptions

from loadtest.private_servers import private_server
from tao.devcluster.ports import LOOPBACK
from tao.model.errors import OperatorError


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


def private_redis(folder: Path, max_mb: int = 0) -> AbstractAsyncContextManager[tuple[int, int]]:
    """Run one; gives ``(port, pid)``. ``max_mb``: as a cache of that size, which evicts; 0: everything stays. Raises
    `OperatorError` when it does not come up."""
    path, _ = find_redis_server()
    cache = ["--maxmemory", f"{max_mb}mb", "--maxmemory-policy", "allkeys-lru"] if max_mb else []

    def argv(port: int) -> list[str]:
        return [path, "--port", str(port), "--bind", LOOPBACK, "--save", "", "--appendonly", "no", *cache]

    return private_server("redis-server", argv, _answers, folder)


async def _answers(port: int) -> bool:
    client = redis.asyncio.Redis(host=LOOPBACK, port=port)
    try:
        await client.ping()
    except redis.exceptions.ConnectionError:
        return False
    finally:
        await client.aclose()
    return True
