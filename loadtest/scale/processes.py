"""Real servers as processes of their own, and what they use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import yaml

from loadtest.commands import TAO
from loadtest.rounds import cpu_seconds
from loadtest.scale.installation import Addresses
from tao.admin.server_stats import wait_until_ready
from tao.devcluster.ports import LOOPBACK, reserve_port
from tao.devcluster.processes import ManagedProcess, ProcessOptions, to_the_end
from tao.model.errors import OperatorError

_START_SECONDS: Final = 120.0
_STOP_SECONDS: Final = 10.0


@asynccontextmanager
async def reserved_addresses() -> AsyncIterator[Addresses]:
    """Reserve the ports of a cache server while the context lasts."""
    with reserve_port() as frames, reserve_port() as grpc, reserve_port() as admin:
        yield Addresses(*(f"{LOOPBACK}:{each.port}" for each in (frames, grpc, admin)))


@asynccontextmanager
async def running(role: str, settings: Mapping[str, object], admin: str, folder: Path) -> AsyncIterator[int]:
    """Run a server until the context ends, and yield its process id once it is ready. Raises `OperatorError`."""
    name = str(settings["name"])
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"log_level": "warning", **settings}, sort_keys=False))
    options = ProcessOptions(stop_seconds=_STOP_SECONDS)
    argv = [*TAO, role, "--settings", str(file)]
    process = ManagedProcess(name, argv, os.environ, folder / f"{name}.log", options)
    try:
        status = await process.ended_before(wait_until_ready(admin, _START_SECONDS))
        if status is not None:
            raise OperatorError(f"{name} ended with status {status} instead of starting:\n{process.log_tail()}")
        yield process.pid
    finally:
        await to_the_end(process.stop())


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


async def core_share(pid: int, seconds: float) -> float:
    """Return the share of a core that the process uses for so long from now, 1 being a whole core."""
    loop = asyncio.get_running_loop()
    began, before = loop.time(), cpu_seconds(pid)
    await asyncio.sleep(seconds)
    return (cpu_seconds(pid) - before) / (loop.time() - began)
