"""Jobs that look into an event loop: parsing a topology, a client's documents, and the cold start of a follower.

A *block* is the CPU time that the loop's thread spends between two turns of a timer of a millisecond. CPU time, because
on a busy machine the time by the clock also measures the neighbours.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from loadtest.client_process import StepReport
from loadtest.rounds import settle_collector
from loadtest.scale.installation import FOLLOWER, InstallationShape, topology_of
from tao.client import connect
from tao.follower.server import FollowerServer
from tao.follower.settings import FollowerSettings
from tao.observability.logs import configure_logs, logger
from tao.topology.document import dump_topology, parse_topology

_TICK_SECONDS: Final = 0.001
_PAUSE_SECONDS: Final = 0.01
_WAIT_SECONDS: Final = 60.0


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What something took of the event loop's thread."""

    cpu_seconds: float
    block_seconds: float = 0.0
    """The longest block meanwhile."""
    seconds: float = 0.0
    """By the clock, which also measures other processes; 0 where it was not looked at."""


class Blocks:
    """The blocks of this thread's event loop."""

    def __init__(self) -> None:
        self._longest = 0.0
        self._cpu = time.thread_time()
        self._began = time.perf_counter()

    def measured(self) -> Measured:
        """Return the figures since the beginning."""
        return Measured(
            cpu_seconds=time.thread_time() - self._cpu,
            block_seconds=self._longest,
            seconds=time.perf_counter() - self._began,
        )

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Look for blocks while the context lasts."""

        async def watch() -> None:
            before = time.thread_time()
            while True:
                await asyncio.sleep(_TICK_SECONDS)
                now = time.thread_time()
                self._longest, before = max(self._longest, now - before), now

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        try:
            yield
            await asyncio.sleep(2 * _TICK_SECONDS)
        finally:
            watching.cancel()


class ParseJob(msgspec.Struct, frozen=True, kw_only=True):
    """Parse the documents of installations."""

    shapes: list[InstallationShape]
    repetitions: int

    async def work(self, report: StepReport) -> list[Measured]:
        """Return the least CPU time of the repetitions for each shape."""
        return [self._parsed(shape, report) for shape in self.shapes]

    def _parsed(self, shape: InstallationShape, report: StepReport) -> Measured:
        text = dump_topology(topology_of(shape, {}))
        report(f"parsing {shape.servers:,} servers", 0.0)
        taken = []
        for _ in range(self.repetitions):
            began = time.thread_time()
            parse_topology(text, "model")
            taken.append(time.thread_time() - began)
        return Measured(cpu_seconds=min(taken))


class ClientJob(msgspec.Struct, frozen=True, kw_only=True):
    """Connect a client of the SDK, and wait until it uses the document that the follower sends next."""

    address: str
    region: str
    next_version: int

    async def work(self, report: StepReport) -> list[Measured]:
        """Return the figures of connecting, and of the next document."""
        report("a client's documents", 0.0)
        found = []
        blocks = Blocks()
        async with blocks.watched():
            graph = await connect(f"frames:{self.address}", region=self.region)
        found.append(blocks.measured())
        blocks = Blocks()
        try:
            async with blocks.watched(), asyncio.timeout(_WAIT_SECONDS):
                while graph.stats.topology_version < self.next_version:  # noqa: ASYNC110 - the SDK calls nobody
                    await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            await graph.close()
        found.append(blocks.measured())
        return found


class ColdStartJob(msgspec.Struct, frozen=True, kw_only=True):
    """Start a follower without a cache at a leader that runs, in this process, and stop it again."""

    topology_file: str
    schema_file: str
    repetitions: int

    async def work(self, report: StepReport) -> list[Measured]:
        """Return the figures of each start, from when the follower serves until its shards are confirmed."""
        settings = FollowerSettings(
            name=FOLLOWER,
            topology_file=Path(self.topology_file),
            schema_file=Path(self.schema_file),
            log_level="error",
        )

        configure_logs("follower", FOLLOWER, "error", "json", sys.stderr)

        found = []
        for number in range(self.repetitions):
            report("cold starts of a follower", number / self.repetitions)
            server = FollowerServer(settings, logger("follower"))
            await server.start()
            settle_collector()  # as a server does that has started
            try:
                blocks = Blocks()
                # Asked in this process: requests for the admin page would be counted as work of the start.
                async with blocks.watched(), asyncio.timeout(_WAIT_SECONDS):
                    while server.why_not_ready():  # noqa: ASYNC110 - the server calls nobody
                        await asyncio.sleep(_PAUSE_SECONDS)
                found.append(blocks.measured())
            finally:
                await server.close()
        return found
