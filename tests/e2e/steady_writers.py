"""Writers that go on while masters change, and the check that none of their acknowledged writes is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from tao.client import Graph, OutcomeUnknown, RetryableError, TaoError, connect
from tao.devcluster.cluster import DevCluster
from tao.model.topology import Topology
from tao.routing.routes import Routes
from tao.topology.document import parse_topology
from tests.e2e.cluster_access import PACE_SECONDS, PATIENT
from tests.e2e.region_access import Regions, until
from tests.rigs.forked_programs import run_tao

WRITERS = 4


def topology_of(cluster: DevCluster) -> Topology:
    return parse_topology(cluster.topology_path.read_bytes(), "topology")


def regions_of(cluster: DevCluster) -> Regions:
    topology = topology_of(cluster)
    return Regions(cluster, topology, Routes(topology))


async def command(cluster: DevCluster, *words: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit status, JSON and errors of a command, run as an operator does."""
    ended = await run_tao(*words, "--yes", "--json", folder=cluster.topology_path.parent.parent)
    return ended.status, msgspec.json.decode(ended.output) if ended.output else {}, ended.errors


class Writers:
    """Writers that each count upwards in an object of its own, with the last acknowledged numbers."""

    def __init__(self, graph: Graph, objects: list[int]) -> None:
        self.graph = graph
        self.acknowledged = dict.fromkeys(objects, 0)
        self.attempted = dict.fromkeys(objects, 0)
        self.errors: list[TaoError] = []

    async def run(self, object_id: int) -> None:
        while True:
            self.attempted[object_id] += 1
            number = self.attempted[object_id]
            try:
                await self.graph.obj_update(object_id, {"home": str(number)})
                self.acknowledged[object_id] = number
            except TaoError as error:
                self.errors.append(error)
            await asyncio.sleep(2 * PACE_SECONDS)

    async def go_on(self) -> None:
        """Wait until each writer has some more acknowledged writes."""
        before = dict(self.acknowledged)

        async def all_have() -> bool:
            return all(now >= before[each] + 5 for each, now in self.acknowledged.items())

        await until(all_have, "writes do not continue")


async def new_object(graph: Graph) -> int:
    """Return the id of a new object, once a master takes it: the last change of one may not be over yet."""
    found: list[int] = []

    async def is_made() -> bool:
        with suppress(RetryableError, OutcomeUnknown):
            found.append(await graph.obj_add("user", {"name": "writer"}))
        return bool(found)

    await until(is_made, "no object is made")
    return found[0]


@asynccontextmanager
async def writing(cluster: DevCluster, region: str) -> AsyncIterator[Writers]:
    async with connect(str(cluster.topology_path), region=region, settings=PATIENT) as graph:
        writers = Writers(graph, [await new_object(graph) for _ in range(WRITERS)])
        tasks = [asyncio.create_task(writers.run(each)) for each in writers.acknowledged]
        try:
            await writers.go_on()
            yield writers
            await writers.go_on()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def assert_nothing_lost(cluster: DevCluster, writers: Writers) -> None:
    for region in topology_of(cluster).regions:
        async with connect(str(cluster.topology_path), region=region.name, settings=PATIENT) as graph:
            for each, number in writers.acknowledged.items():
                home = await home_at_master(graph, each)
                assert number <= int(home) <= writers.attempted[each]
            # Whoever compares the caches afterwards needs entries: a subscription that could not go on drops all.
            await graph.obj_get_many(list(writers.acknowledged))


async def home_at_master(graph: Graph, object_id: int) -> str:
    """Return the field that writers count in, read critically; the master must answer in time."""
    found: list[str] = []

    async def is_read() -> bool:
        # A region that has yet to learn of a new master refuses critical reads, as the lost one is down.
        with suppress(RetryableError):
            value = await graph.obj_get(object_id, critical=True)
            assert value is not None
            found.append(str(value.fields["home"]))
        return bool(found)

    await until(is_read, "no critical read is answered")
    return found[0]
