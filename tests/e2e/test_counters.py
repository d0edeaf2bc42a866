"""Counters on real databases: a killed follower, one that is stopped, folds by a worker, and a line that is cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

from tao.client import Graph, SyncGraph, Unavailable, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.model.counters import FOLDED_SLOT
from tests.e2e.cluster_access import PATIENT, assert_converges, killed_at_the_end
from tests.e2e.region_access import Regions, running_regions, until

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

FOLLOWER = "follower-1a"
REGIONS = Shape(regions=2, tiers=1, followers=1, leaders=1, databases=2, mixed_mastership=True, shards=4)
SERVER_SETTINGS: Mapping[str, Mapping[str, object]] = {
    Role.LEADER: {"jobs": {"care_seconds": 0.5, "fold_every_seconds": 1, "fold_after_seconds": 0.0}},
    Role.WORKER: {"runner": {"poll_seconds": 0.1}},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    settings = ClusterSettings(
        state_dir=tmp_path_factory.mktemp("counters"),
        shape=Shape(tiers=1, followers=1, leaders=1, shards=2, workers=1),
        durability=Durability.RELAXED,
        server_settings=SERVER_SETTINGS,
    )
    async with DevCluster(settings) as running, killed_at_the_end(running):
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def graph(cluster: DevCluster) -> AsyncIterator[Graph]:
    async with connect(str(cluster.topology_path), settings=PATIENT) as opened:
        yield opened


async def value(graph: Graph, page: int, *, critical: bool = False) -> int:
    return (await graph.counter_get(page, "views", critical=critical)).value


async def slots(graph: Graph, page: int) -> list[int]:
    return (await graph.assoc_range(page, "page.views", 0, 100, critical=True)).id2s


async def test_a_counter_is_written_read_and_folded(cluster: DevCluster, graph: Graph) -> None:
    page = await graph.obj_add("page", {"name": "Tea"})
    for _ in range(10):
        await asyncio.gather(*(graph.counter_add(page, "views", by) for by in (3, -1)))
    assert await value(graph, page) == 20

    async def is_folded() -> bool:
        return FOLDED_SLOT in await slots(graph, page)

    await until(is_folded, "no worker has folded the counter")
    await graph.counter_add(page, "views", 5)
    assert await value(graph, page) == await value(graph, page, critical=True) == 25
    with SyncGraph(str(cluster.topology_path)) as blocking:
        await asyncio.to_thread(blocking.counter_add, page, "views")
        assert (await asyncio.to_thread(blocking.counter_get, page, "views")).value == 26
        (found,) = await asyncio.to_thread(blocking.counter_get_many, [(page, "page.views")])
        assert found.value == 26
    await assert_converges(cluster)
    assert await value(graph, page) == 26


async def test_crash_loses_at_most_one_flush_of_an_approximate_counter(cluster: DevCluster, graph: Graph) -> None:
    page = await graph.obj_add("page", {"name": "Tea"})
    await graph.counter_add(page, "views", 100)

    async def is_written() -> bool:
        return bool(await slots(graph, page))

    await until(is_written, "nothing is flushed")
    await graph.counter_add(page, "views", 1)
    await cluster.kill(FOLLOWER)
    await cluster.restart(FOLLOWER)
    assert 100 <= await value(graph, page, critical=True) <= 101
    before = await value(graph, page, critical=True)
    await graph.counter_add(page, "views", 7)
    assert await value(graph, page, critical=True) == before + 7


async def test_a_follower_that_is_stopped_writes_what_it_has_counted(cluster: DevCluster, graph: Graph) -> None:
    page = await graph.obj_add("page", {"name": "Tea"})

    async def is_counted() -> bool:
        try:
            await graph.counter_add(page, "views")
        except Unavailable:  # the link looks again whether the follower is back; nothing was counted
            return False
        return True

    for _ in range(3):
        await until(is_counted, "the follower does not count")
        await cluster.restart(FOLLOWER)
    assert await value(graph, page, critical=True) == 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def regions(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Regions]:
    folder: Path = tmp_path_factory.mktemp("regions")
    async with running_regions(folder, REGIONS) as found:
        yield found


async def test_two_regions_agree_on_the_count_after_a_partition(regions: Regions) -> None:
    async with (
        connect(regions.target, region="east", settings=PATIENT) as east,
        connect(regions.target, region="west", settings=PATIENT) as west,
    ):
        pages = [(await east.reserve_ids(1, shard=shard))[0] for shard in (0, 3)]  # mastered in east, and in west
        for page in pages:
            await asyncio.gather(east.counter_add(page, "views", 10), west.counter_add(page, "views", 20))
        await regions.cut(silent=False)
        try:
            for page in pages:
                await asyncio.gather(east.counter_add(page, "views", 3), west.counter_add(page, "views", 4))
        finally:
            await regions.heal()
        for graph in (east, west):

            async def agrees(graph: Graph = graph) -> bool:
                return [each.value for each in await graph.counter_get_many([(page, "views") for page in pages])] == [
                    37,
                    37,
                ]

            await until(agrees, "the regions do not agree on the count")
        await regions.assert_converges()
