"""Shards move between servers, and a server joins and leaves, under running traffic: no client gets an error, and
nothing is stale afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tao.client import Graph, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ONLY_REGION, Shape
from tao.model.errors import TopologyError
from tao.model.ids import SHARD_SHIFT
from tao.model.topology import CacheServer, Registration, Topology
from tao.routing.routes import Routes
from tao.topology import edits
from tao.topology.file_store import TopologyFile
from tao.topology.registration import placed
from tests.e2e.cluster_access import (
    LOOK_SECONDS,
    PATIENT,
    Bystander,
    assert_converges,
    bystander_of,
    patient_stats,
    running_cluster,
)
from tests.e2e.region_access import until
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="module"),
]

SHARDS = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    shape = Shape(tiers=2, followers=2, leaders=2, databases=2, shards=SHARDS)
    async with running_cluster(tmp_path_factory.mktemp("cluster"), shape, step_seconds=0.1) as cluster:
        yield cluster


def fail(error: TopologyError) -> None:
    raise error


async def change(cluster: DevCluster, edit: Callable[[Topology], Topology]) -> int:
    """Store the edited document, and return its version."""
    store = TopologyFile(cluster.topology_path, on_error=fail)
    before = await store.load()
    return (await store.change(before.version, edit(before))).version


async def until_all_ready(cluster: DevCluster) -> None:
    async with asyncio.timeout(PATIENT_SECONDS):
        while any(each.state != "ready" for each in (await cluster.status()).processes):  # noqa: ASYNC110 - processes
            await asyncio.sleep(0.05)


async def until_routed_by(graph: Graph, version: int) -> None:
    async with asyncio.timeout(PATIENT_SECONDS):
        while graph.topology.version < version:  # noqa: ASYNC110 - the graph applies it without a notification
            await asyncio.sleep(0.02)


async def shards_moved_under_traffic(cluster: DevCluster, tier: str, servers: tuple[str, str]) -> None:
    def move_all(name: str, topology: Topology) -> Topology:
        for shard in range(SHARDS):
            topology = edits.move_shard(topology, ONLY_REGION, tier, shard, name)
        return topology

    async with AsyncExitStack() as stack:
        bystanders: list[Bystander] = [await stack.enter_async_context(bystander_of(cluster)) for _ in range(3)]
        other = await stack.enter_async_context(connect(str(cluster.topology_path), tier="tier-2", settings=PATIENT))
        for name in (*servers, servers[0]):
            version = await change(cluster, partial(move_all, name))
            await until_routed_by(other, version)
            for bystander in bystanders:
                await until_routed_by(bystander.graph, version)
                await bystander.more_rounds(10)
            await until_all_ready(cluster)
        for bystander in bystanders:
            assert bystander.errors == []
    await assert_converges(cluster)


async def test_shards_move_between_followers_under_traffic(cluster: DevCluster) -> None:
    await shards_moved_under_traffic(cluster, "tier-1", ("follower-1a", "follower-1b"))


async def test_shards_move_between_leaders_under_traffic(cluster: DevCluster) -> None:
    await shards_moved_under_traffic(cluster, "leaders", ("leader-1", "leader-2"))


async def test_a_follower_registers_itself_takes_its_part_of_the_ring_and_leaves_under_traffic(
    cluster: DevCluster,
) -> None:
    def unmove_all(topology: Topology) -> Topology:
        for shard in topology.regions[0].followers[0].moved:
            topology = edits.unmove_shard(topology, ONLY_REGION, "tier-1", shard)
        return topology

    await change(cluster, unmove_all)  # the ring decides about none of those that a test before has moved
    async with bystander_of(cluster) as bystander:
        name = await cluster.add_follower()
        joined = await until_entry(cluster, lambda topology: weight_of(topology, name) == 1.0)
        entry = placed(joined, name)
        assert entry is not None
        assert entry.server.registration == Registration(), "it has registered itself"
        shards = Routes(joined).shards_of(name)
        assert shards, "the ring gives it some"
        await until_routed_by(bystander.graph, joined.version)
        asked = await requests_at(cluster, name)
        for shard in shards:
            assert await bystander.graph.obj_get(shard << SHARD_SHIFT | 1) is None
        assert await requests_at(cluster, name) >= asked + len(shards)
        await bystander.more_rounds(10)

        await cluster.kill(name)
        await cluster.restart(name)
        assert weight_of(await cluster.topology(), name) == 1.0, "it keeps its place"

        assert await cluster.remove_follower(PATIENT_SECONDS) == name
        assert placed(await cluster.topology(), name) is None
        await bystander.more_rounds(10)
        assert bystander.errors == []
    await until_all_ready(cluster)
    await assert_converges(cluster)


async def until_entry(cluster: DevCluster, holds: Callable[[Topology], bool]) -> Topology:
    """Return the first topology that is found to be so."""
    async with asyncio.timeout(PATIENT_SECONDS):
        while not holds(found := await cluster.topology()):  # noqa: ASYNC110 - other processes change it
            await asyncio.sleep(LOOK_SECONDS)
        return found


def weight_of(topology: Topology, name: str) -> float:
    found = placed(topology, name)
    return found.server.weight if found is not None else 0.0


async def requests_at(cluster: DevCluster, name: str) -> int:
    """Return how many reads a server has answered."""
    stats = await patient_stats(cluster.admin(name))
    return int(stats["hits"] + stats["misses"])


async def test_an_unusable_document_is_ignored_and_the_next_valid_one_is_applied(
    cluster: DevCluster,
) -> None:
    good = cluster.topology_path.read_bytes()
    async with bystander_of(cluster) as bystander:
        for bad in (b"{", b'{"version": 99}', good.replace(b'"tier-2"', b'"tier-1"'), b"\xff\xfe", b""):
            cluster.topology_path.write_bytes(bad)
            await bystander.more_rounds(20)
        cluster.topology_path.write_bytes(good)
        version = await change(cluster, lambda topology: edits.mark_server(topology, "follower-1b", False))
        await until_routed_by(bystander.graph, version)
        assert bystander.errors == []

    async def all_complain() -> bool:
        processes = (await cluster.status()).processes
        found = {process.name for process in processes if "topology_unusable" in log_of(process.log)}
        return found >= {"leader-1", "leader-2", "follower-1a", "follower-2b"}

    await until(all_complain, "a server has not seen that the document is unusable")


async def test_an_unreachable_server_is_reported_and_one_that_left_is_released(cluster: DevCluster) -> None:
    ghost = CacheServer(name="leader-ghost", grpc="127.0.0.1:1", frames="127.0.0.1:1")
    topology = await TopologyFile(cluster.topology_path, on_error=fail).load()
    follower = topology.regions[0].followers[0].servers[0]
    shard = Routes(topology).shards_of(follower.name)[0]

    def led_by_ghost(topology: Topology) -> Topology:
        joined = edits.add_server(topology, ONLY_REGION, "leaders", ghost)
        return edits.move_shard(joined, ONLY_REGION, "leaders", shard, ghost.name)

    await change(cluster, led_by_ghost)
    async with asyncio.timeout(PATIENT_SECONDS):
        while (await links_of(follower)).get(ghost.name, {}).get("consecutive_failures", 0) < 2:  # noqa: ASYNC110 - a process
            await asyncio.sleep(0.02)
    await change(cluster, lambda topology: edits.remove_server(topology, ghost.name))
    async with asyncio.timeout(PATIENT_SECONDS):
        while ghost.name in await links_of(follower):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
    await until_all_ready(cluster)

    async def leaders_are_up() -> bool:
        return all(link["up"] for name, link in (await links_of(follower)).items() if name.startswith("leader"))

    await until(leaders_are_up, "a link to a leader is not up")


async def links_of(server: CacheServer) -> dict[str, dict[str, Any]]:
    links: dict[str, dict[str, Any]] = (await patient_stats(server.admin))["links"]
    return links


def log_of(path: str) -> str:
    return Path(path).read_text()
