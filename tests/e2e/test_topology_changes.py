"""The topology changes under a running cluster, as an operator changes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tao.client import connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ClusterSettings, Shape
from tao.devcluster.readiness import server_stats
from tao.devcluster.server_options import Durability
from tao.topology.edits import remove_server
from tao.topology.file_store import TopologyFile

pytestmark = [pytest.mark.database, pytest.mark.e2e]

SHARDS = 8


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[DevCluster]:
    shape = Shape(tiers=1, followers=1, leaders=2, databases=1, shards=SHARDS)
    settings = ClusterSettings(state_dir=tmp_path / "s", shape=shape, durability=Durability.RELAXED)
    async with DevCluster(settings) as running:
        yield running


async def owned(cluster: DevCluster, leader: str) -> int:
    shards = (await server_stats(cluster.admin(leader)))["owned_shards"]
    assert isinstance(shards, int)
    return shards


async def remove(cluster: DevCluster, name: str) -> None:
    document = TopologyFile(cluster.topology_path, on_error=lambda error: pytest.fail(error.message))
    topology = await document.load()
    await document.change(topology.version, remove_server(topology, name))


async def owned_becomes(cluster: DevCluster, wanted: dict[str, int]) -> None:
    async with asyncio.timeout(30):
        while {leader: await owned(cluster, leader) for leader in wanted} != wanted:
            pass  # each look is a round trip over HTTP, and needs no pause


async def test_a_leader_taken_out_while_it_runs_lets_its_shards_go(cluster: DevCluster) -> None:
    assert await owned(cluster, "leader-1") + await owned(cluster, "leader-2") == SHARDS
    await remove(cluster, "leader-2")
    await owned_becomes(cluster, {"leader-1": SHARDS, "leader-2": 0})
    async with connect(str(cluster.topology_path)) as graph:
        for user in await graph.obj_get_many([await graph.obj_add("user", {"name": "Z"}) for _ in range(2 * SHARDS)]):
            assert user is not None


async def test_the_shards_of_a_leader_that_died_go_to_the_others_when_it_is_taken_out(cluster: DevCluster) -> None:
    await cluster.kill("leader-2")
    await remove(cluster, "leader-2")
    await owned_becomes(cluster, {"leader-1": SHARDS})
    async with connect(str(cluster.topology_path)) as graph:
        ids = [await graph.obj_add("user", {"name": "Z"}) for _ in range(2 * SHARDS)]
        assert all(await graph.obj_get_many(ids))
