"""The load of a run: clients of every region and tier, paced reads and writes, and the comparison at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from loadtest.chaos.history import Verdict
from loadtest.chaos.readings import Key, Kind, Reader, Reading
from loadtest.chaos.record import Record
from loadtest.chaos.writing import REST_SECONDS, Writing, absent_ids, make_keys, newest
from loadtest.scenario import Progress
from loadtest.two_regions import TwoRegions
from loadtest.waiting import within
from tao.client import ClientSettings, connect
from tao.model.errors import OperatorError
from tao.routing.routes import Routes
from tao.topology.document import parse_topology

_KEYS_PER_SHARD: Final = 8
_ABSENT_IDS: Final = 200_000
_TIMEOUT_SECONDS: Final = 5.0
_QUIET_SECONDS: Final = 120.0
_SETTLE_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.5
_WHOLE: Final = 6_000
"""Edges: more than any list here has."""
_BATCH: Final = 12
"""Reads that one client sends at a time."""
_MAX_UNDER_WAY: Final = 40
"""Batches, and writes, of one client that wait at a time: one that waits for a fault to pass holds up no other."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Of all clients together, a second."""

    reads: float = 800.0
    writes: float = 60.0


class Load:
    """Running clients; `stop`, then `settle_all` and `stale`."""

    def __init__(
        self, regions: TwoRegions, record: Record, chance: Random, readers: list[Reader], keys: list[Key]
    ) -> None:
        self._regions: Final = regions
        self._record: Final = record
        self._chance: Final = chance
        self._readers: Final = readers
        self._keys: Final = keys
        self._graphs: Final = [reader.graph for reader in readers]
        absent = absent_ids(regions.routes.shards, _ABSENT_IDS, chance)
        self._reading: Final = Reading(keys, absent, record, chance, self._routes_now)
        self._writing: Final = Writing(keys, record, chance)
        self._routes: Routes = regions.routes
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, rates: Rates) -> None:
        """Read and write until `stop`."""
        reads, writes = rates.reads / len(self._readers) / _BATCH, rates.writes / len(self._readers)
        for reader in self._readers:

            def read(reader: Reader = reader) -> Awaitable[None]:
                return self._reading.batch(reader, _BATCH)

            def write(reader: Reader = reader) -> Awaitable[None]:
                return self._writing.one(reader)

            self._tasks += [
                asyncio.create_task(self._paced(reads, read)),
                asyncio.create_task(self._paced(writes, write)),
            ]
        self._tasks.append(asyncio.create_task(self._settle()))

    async def while_running(self, work: Awaitable[None]) -> None:
        """Do something while the load goes on; a fault of the load itself ends it, and is raised."""
        doing = asyncio.ensure_future(work)
        try:
            await asyncio.wait((*self._tasks, doing), return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                await next(task for task in self._tasks if task.done())
            await doing
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    async def stop(self) -> None:
        """Begin nothing more, and wait for what is under way."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    def cancel(self) -> None:
        """End at once."""
        for task in self._tasks:
            task.cancel()

    async def settle_all(self) -> None:
        """Learn what became of all writes of unknown outcome."""

        async def settled() -> bool:
            await self._writing.settle(self._graphs)
            return not any(key.rests_until for key in self._keys)

        await within(_SETTLE_SECONDS + REST_SECONDS, settled, _LOOK_SECONDS, "not every write's outcome could be read")

    async def stale(self, progress: Progress) -> tuple[int, dict[str, int], dict[str, int]]:
        """Wait until all is quiet, and compare: how much differs in all, what `tao verify` and `tao repair` find of it
        by kind, and how much they have looked at. What was acknowledged and is not there is recorded as lost."""
        path = self._regions.cluster.topology_path
        topology = parse_topology(path.read_bytes(), str(path))  # masters have changed meanwhile
        regions = replace(self._regions, topology=topology, routes=Routes(topology))
        await regions.quiet(_QUIET_SECONDS)
        record, stale = self._record, 0
        for key in self._keys:
            register, end = key.register, record.now()
            found = await newest(self._graphs[0], key)
            if register.judge(found, register.acknowledged_before(end), end) is not Verdict.RIGHT:
                record.lose(f"{key.kind} {key.id}: {found}, acknowledged {register.last}")
            if key.kind is Kind.LIST:
                times = set((await self._graphs[0].assoc_range(key.id, "follows", 0, _WHOLE, critical=True)).times)
                missing, uncalled = register.astray(times)
                for write in missing:
                    record.lose(f"{key.kind} {key.id}: {write}")
                for write in uncalled:
                    record.violation(Verdict.WRONG, "refused", f"{key.kind} {key.id} has {write}")
            for reader in self._readers:
                cached = await newest(reader.graph, key, critical=False)
                if cached != found:
                    stale += 1
                    record.example(f"{reader.name}: {key.kind} {key.id}: {cached}, not {found}")
        differences = await regions.differences(lambda server, count: progress.step(f"{server}: {count:,}", 0.95))
        if differences.kinds:
            for example in differences.examples:
                record.example(example)
        return stale + sum(differences.kinds.values()), differences.kinds, differences.compared

    def _routes_now(self) -> Routes:
        """As the document has them, or had them when it was there last."""
        path = self._regions.cluster.topology_path
        with suppress(OSError, OperatorError):
            self._routes = Routes(parse_topology(path.read_bytes(), str(path)))
        return self._routes

    async def _paced(self, per_second: float, begin: Callable[[], Awaitable[None]]) -> None:
        under_way = set[asyncio.Future[None]]()
        try:
            while not self._stopping:
                await asyncio.sleep(self._chance.uniform(0.5, 1.5) / per_second)
                for task in [each for each in under_way if each.done()]:
                    under_way.discard(task)
                    task.result()
                if len(under_way) < _MAX_UNDER_WAY:
                    under_way.add(asyncio.ensure_future(begin()))
            await asyncio.gather(*under_way)
        finally:
            for task in under_way:
                task.cancel()

    async def _settle(self) -> None:
        while not self._stopping:
            await asyncio.sleep(1.0)
            await self._writing.settle(self._graphs)


@asynccontextmanager
async def load_on(regions: TwoRegions, record: Record, chance: Random) -> AsyncIterator[Load]:
    """Clients of every tier, and in each region one that attaches nothing of its own writes; with something to read."""
    shape = regions.cluster.record.shape
    places = [(region, tier, True) for region in shape.region_names for tier in shape.tier_names]
    places += [(region, shape.tier_names[0], False) for region in shape.region_names]
    async with AsyncExitStack() as stack:
        readers: list[Reader] = []
        for region, tier, attaches in places:
            settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS, attach_own_writes=attaches)
            target = str(regions.cluster.topology_path)
            graph = await stack.enter_async_context(connect(target, region=region, tier=tier, settings=settings))
            readers.append(
                Reader(f"{region}/{tier}{'' if attaches else ', attaching nothing'}", region, graph, attaches)
            )
        keys = await make_keys(readers[0].graph, regions.routes.shards, _KEYS_PER_SHARD, chance, record)
        record.begin()
        load = Load(regions, record, chance, readers, keys)
        try:
            yield load
        finally:
            load.cancel()
