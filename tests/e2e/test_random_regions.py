"""Hundreds of random writes in two regions at once, each master of half the shards, with crashes and cuts between
them; thousands at a higher effort."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial

import pytest
import pytest_asyncio

from tao.client import ClientSettings, Graph, TaoError, connect
from tao.devcluster.layout import Shape
from tao.model.errors import TopologyError
from tao.model.ids import SHARD_SHIFT
from tao.model.topology import Topology
from tao.topology import edits
from tao.topology.file_store import TopologyFile
from tests.e2e.cluster_access import PACE_SECONDS
from tests.e2e.graph_model import inverse_of
from tests.e2e.region_access import Regions, plain, running_regions, until
from tests.rigs.effort import examples
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

SHAPE = Shape(regions=2, tiers=1, followers=2, leaders=2, databases=2, mixed_mastership=True, shards=8)
ATYPES = ("friend", "likes", "liked_by", "follows", "followed_by")
HOT_OBJECTS = 12
WRITERS_PER_REGION = 8
WRITES_PER_MOVE = min(200, examples(300))
WRITES_PER_WRITER = min(240, examples(400))
SEED = 582013
SETTINGS = ClientSettings(timeout_seconds=30.0, connect_timeout_seconds=PATIENT_SECONDS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def regions(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Regions]:
    async with running_regions(tmp_path_factory.mktemp("random"), SHAPE) as found:
        yield found


async def exist(graph: Graph, ids: list[int]) -> bool:
    return None not in await graph.obj_get_many(ids)


class Writer:
    """One of many writers of the same few objects. Writes that fail while the line is cut are counted, and others take
    their place, so that the number of those that are made depends on no time."""

    def __init__(self, graph: Graph, hot: list[int], rng: random.Random) -> None:
        self.graph = graph
        self.hot = hot
        self.rng = rng
        self.done = 0
        self.failed = 0

    async def run(self, writes: int) -> None:
        until_done = self.done + writes
        while self.done < until_done:
            try:
                await self._write(self.done + self.failed)
            except TaoError:
                self.failed += 1
                await asyncio.sleep(PACE_SECONDS)
            else:
                self.done += 1

    async def _write(self, number: int) -> None:
        rng, graph = self.rng, self.graph
        id1, id2 = rng.choice(self.hot), rng.choice(self.hot)
        atype = rng.choice(ATYPES)
        kind = rng.random()
        if kind < 0.5:
            await graph.assoc_add(id1, atype, id2, number)
        elif kind < 0.7:
            await graph.assoc_delete(id1, atype, id2)
        elif kind < 0.8:
            await graph.assoc_change_type(id1, rng.choice(("likes", "friend")), id2, rng.choice(("likes", "friend")))
        elif kind < 0.95:
            await graph.obj_update(id1, {"home": f"h{number}"}, "user")
        else:
            await graph.obj_add("user", {"name": f"u{number}"})
        # Reads in between keep the caches filled from the replicas, so that stale entries can occur.
        await graph.assoc_range(id2, atype, 0, rng.choice((1, 50)))
        await graph.assoc_count(id1, rng.choice(ATYPES))
        await graph.obj_get(id1)


async def change(regions: Regions, edit: Callable[[Topology, int], Topology]) -> None:
    """Store the edited document for every shard, and wait until all servers have applied it."""

    def fail(error: TopologyError) -> None:
        raise error

    store = TopologyFile(regions.cluster.topology_path, on_error=fail)
    topology = await store.load()
    before = topology.version
    for shard in range(topology.shards):
        topology = edit(topology, shard)
    await store.change(before, topology)

    async def all_ready() -> bool:
        return all(process.state == "ready" for process in (await regions.cluster.status()).processes)

    await until(all_ready, "not every server is ready")


async def hot_objects(regions: Regions, graph: Graph) -> list[int]:
    """Create objects, the same number mastered in each region."""
    found: dict[str, list[int]] = {region.name: [] for region in regions.topology.regions}
    while any(len(ids) < HOT_OBJECTS // 2 for ids in found.values()):
        object_id = await graph.obj_add("user", {"name": "hot"})
        found[regions.routes.master_region(object_id >> SHARD_SHIFT)].append(object_id)
    return [object_id for ids in found.values() for object_id in ids[: HOT_OBJECTS // 2]]


async def test_random_writes_in_both_regions_leave_caches_databases_and_regions_equal(regions: Regions) -> None:
    async with AsyncExitStack() as stack:
        graphs = {
            region: await stack.enter_async_context(connect(regions.target, region=region, settings=SETTINGS))
            for region in ("east", "west")
        }
        hot = await hot_objects(regions, graphs["east"])

        await until(lambda: exist(graphs["west"], hot))
        writers = [
            Writer(graph, hot, random.Random(SEED + number))
            for number, graph in enumerate([*graphs.values()] * WRITERS_PER_REGION)
        ]
        work = asyncio.gather(*(writer.run(WRITES_PER_WRITER) for writer in writers))
        total = len(writers) * WRITES_PER_WRITER

        async def reached(share: float) -> None:
            async def so_far() -> bool:
                return work.done() or sum(writer.done for writer in writers) >= share * total

            await until(so_far, "writes do not continue")

        async def crash(tailer: str) -> None:
            await regions.cluster.kill(tailer)
            await regions.cluster.restart(tailer)

        async def bites(failed: int) -> None:
            async def more_failed() -> bool:
                return work.done() or sum(writer.failed for writer in writers) > failed

            await until(more_failed, "no write noticed that the regions are cut off from each other")

        await reached(0.1)
        await crash(regions.tailers("west")[0])
        await reached(0.3)
        await regions.cut()
        await bites(0)
        await regions.heal()
        await reached(0.5)
        await regions.cut(silent=True)
        await crash(regions.tailers("east")[1])
        await regions.heal()
        await work
        await regions.assert_converges()

        # No operation is in flight any more: both regions agree, and every edge has its inverse.
        for id1 in hot:
            for atype in ATYPES:
                answers = [plain(await graph.assoc_range(id1, atype, 0, 100)) for graph in graphs.values()]
                assert answers[0] == answers[1]
                for id2, time in answers[0]:
                    assert plain(await graphs["west"].assoc_get(id2, inverse_of(atype) or "", [id1])) == [(id1, time)]


async def test_shards_that_change_their_leader_in_both_regions_while_they_are_written_end_equal(
    regions: Regions,
) -> None:
    async with AsyncExitStack() as stack:
        graphs = [
            await stack.enter_async_context(connect(regions.target, region=region, settings=SETTINGS))
            for region in ("east", "west")
        ]
        hot = await hot_objects(regions, graphs[0])
        await until(lambda: exist(graphs[1], hot))
        writers = [Writer(graph, hot, random.Random(SEED - number)) for number, graph in enumerate(graphs * 4)]
        stop = asyncio.Event()

        async def write(writer: Writer) -> None:
            while not stop.is_set():
                await writer.run(5)
                await asyncio.sleep(PACE_SECONDS)

        work = asyncio.gather(*(write(writer) for writer in writers))

        async def more_writes(count: int) -> None:
            before = sum(writer.done for writer in writers)

            async def done() -> bool:
                return sum(writer.done for writer in writers) >= before + count

            await until(done, "writes do not continue")

        for number in (1, 2):
            for region in ("east", "west"):
                tier, name = regions.routes.leaders(region).tier, f"{region}-leader-{number}"
                await change(regions, partial(_moved, region, tier, name))
                await more_writes(WRITES_PER_MOVE)
        for region in ("east", "west"):
            await change(regions, partial(_unmoved, region, regions.routes.leaders(region).tier))
        await more_writes(WRITES_PER_MOVE)
        stop.set()
        await work
        await regions.assert_converges()


def _moved(region: str, tier: str, name: str, topology: Topology, shard: int) -> Topology:
    return edits.move_shard(topology, region, tier, shard, name)


def _unmoved(region: str, tier: str, topology: Topology, shard: int) -> Topology:
    return edits.unmove_shard(topology, region, tier, shard)
