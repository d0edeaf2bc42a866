"""The servers that tao is compared with: private processes on loopback, whose programs are taken from the PATH.

Each has a free port, is asked until it answers, and ends with the run. The servers of `peers` have as much memory as
the caches of tao. A new server is one more `ServerProgram`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import aiomcache
import redis.asyncio
import redis.exceptions

from loadtest.conditions import until
from tao.devcluster.ports import LOOPBACK, reserve_port
from tao.devcluster.processes import ManagedProcess, ProcessOptions, to_the_end
from tao.model.errors import OperatorError

_GROWTH_FACTOR: Final = 1.5
"""Growth factor of memcached's size classes. Each class gets a page of a megabyte, also beyond the memory bound. With
the default of 1.25 there are twice as many classes, and under a small bound they take most of the memory."""
_START_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 5.0
_PROBE_PAUSE_SECONDS: Final = 0.02


class PeerServer(NamedTuple):
    """A running server."""

    port: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProgram:
    """A server's program, and how it is used."""

    name: str
    """The program's name on the PATH."""
    where_from: str
    """How to get the program, for a person who has none."""
    arguments: Callable[[int, int], list[str]]
    """The arguments for a port and megabytes of cache; 0 for a server that is no cache."""
    answers: Callable[[int], Awaitable[bool]]
    """Returns whether a server answers at a port."""
    substitute: str = ""
    """The name of a program with the same arguments and protocol, which is used where this one is missing."""

    def found(self) -> str | None:
        """Return the path of the program, or of its substitute; None when there is neither."""
        return shutil.which(self.name) or (shutil.which(self.substitute) if self.substitute else None)

    def path(self) -> str:
        """Return the program's path. Raises `OperatorError` when there is none."""
        path = self.found()
        if path is None:
            raise OperatorError(f"no {self.name} on the PATH: {self.where_from}")
        return path

    def used_name(self) -> str:
        """Return the name of the program that is used. Raises `OperatorError` when there is none."""
        return Path(self.path()).name

    def version(self) -> str:
        """Return the program's version. Raises `OperatorError` when there is no such program."""
        text = subprocess.run([self.path(), "--version"], capture_output=True, text=True, check=True).stdout
        # "Redis server v=7.0.15 sha=…", "Valkey server v=8.1.1 sha=…", "memcached 1.6.18"
        words = text.split()
        return next((word.removeprefix("v=") for word in words if word.startswith("v=")), words[-1])


@asynccontextmanager
async def private_server(program: ServerProgram, folder: Path, megabytes: int = 0) -> AsyncIterator[PeerServer]:
    """Run a server; with ``megabytes`` it is a cache of that size, which evicts.

    Raises `OperatorError` when it does not come up."""
    with reserve_port() as reservation:
        port = reservation.port
        argv = [program.path(), *program.arguments(port, megabytes)]
        options = ProcessOptions(stop_seconds=_STOP_SECONDS)
        process = ManagedProcess(program.name, argv, os.environ, folder / f"{program.name}.log", options)
        try:
            await _wait(process, lambda: program.answers(port))
        except BaseException:
            await to_the_end(process.stop())
            raise
    try:
        yield PeerServer(port, process.pid)
    finally:
        await to_the_end(process.stop())


async def _wait(process: ManagedProcess, answers: Callable[[], Awaitable[bool]]) -> None:
    async def is_up() -> bool:
        if not process.is_running:
            raise OperatorError(f"{process.name} ended at once:\n{process.log_tail()}")
        return await answers()

    try:
        async with asyncio.timeout(_START_SECONDS):
            await until(is_up, _PROBE_PAUSE_SECONDS)
    except TimeoutError:
        raise OperatorError(f"{process.name} did not answer in {_START_SECONDS:g} s:\n{process.log_tail()}") from None


async def _redis_answers(port: int) -> bool:
    client = redis.asyncio.Redis(host=LOOPBACK, port=port)
    try:
        await client.ping()
    except redis.exceptions.ConnectionError:
        return False
    finally:
        await client.aclose()
    return True


def _redis_arguments(port: int, megabytes: int) -> list[str]:
    cache = ["--maxmemory", f"{megabytes}mb", "--maxmemory-policy", "allkeys-lru"] if megabytes else []
    return ["--port", str(port), "--bind", LOOPBACK, "--save", "", "--appendonly", "no", *cache]


async def _memcached_answers(port: int) -> bool:
    client = aiomcache.Client(LOOPBACK, port)
    try:
        await client.version()
    except OSError:
        return False
    finally:
        await client.close()
    return True


def _memcached_arguments(port: int, megabytes: int) -> list[str]:
    # As root it insists on another account; it opens no files.
    account = ["-u", "nobody"] if os.geteuid() == 0 else []
    return ["-p", str(port), "-l", LOOPBACK, "-m", str(megabytes), "-I", "2m", "-f", str(_GROWTH_FACTOR), *account]


REDIS_SERVER: Final = ServerProgram(
    name="redis-server",
    where_from=(
        "`make bench` gets one, or install your system's package; `--only writes --only load` measures without it"
    ),
    arguments=_redis_arguments,
    answers=_redis_answers,
)
VALKEY_SERVER: Final = ServerProgram(
    name="valkey-server",
    where_from="`make bench` gets one, or install your system's package",
    arguments=_redis_arguments,
    answers=_redis_answers,
    substitute=REDIS_SERVER.name,
)
MEMCACHED_SERVER: Final = ServerProgram(
    name="memcached",
    where_from="install your system's package (Debian and Ubuntu: memcached)",
    arguments=_memcached_arguments,
    answers=_memcached_answers,
)
