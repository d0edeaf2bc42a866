"""A shard gets clones and gives them back while it is read and written.

No read fails, and none is older than a write that was acknowledged before the read was sent.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from tao.client import Graph, TaoError, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ONLY_REGION, Shape
from tao.model.ids import SHARD_SHIFT
from tao.routing.routes import Routes
from tests.e2e.cluster_access import PACE_SECONDS, PATIENT, assert_converges, running_cluster
from tests.rigs.forked_programs import run_tao
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="module"),
]

FOLLOWERS = {"follower-1a", "follower-1b", "follower-1c"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    shape = Shape(tiers=1, followers=3, leaders=1, databases=1, shards=4)
    async with running_cluster(tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


class Counted:
    """A number in an object that one client raises and others read: a read never answers less than was acknowledged
    when it was sent."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.acknowledged = 0
        self.reads: Counter[str] = Counter()
        self.faults: list[str] = []

    async def write(self, graph: Graph) -> None:
        number = self.acknowledged
        while True:
            number += 1
            try:
                await graph.obj_update(self.key, {"home": str(number)}, "user")
                self.acknowledged = number
            except TaoError as error:
                self.faults.append(f"write {number}: {error!r}")
            await asyncio.sleep(PACE_SECONDS)

    async def read(self, name: str, graph: Graph) -> None:
        while True:
            least = self.acknowledged
            try:
                found = await graph.obj_get(self.key)
                seen = int(found.fields["home"]) if found is not None else -1  # type: ignore[arg-type]  # it is text
                if seen < least:
                    self.faults.append(f"{name} read {seen} after {least} was acknowledged")
            except TaoError as error:
                self.faults.append(f"{name}: {error!r}")
            self.reads[name] += 1
            await asyncio.sleep(PACE_SECONDS / 2)

    async def more_reads(self, count: int) -> None:
        until = self.reads.total() + count
        async with asyncio.timeout(PATIENT_SECONDS):
            while self.reads.total() < until:  # noqa: ASYNC110 - counts what other tasks do
                await asyncio.sleep(0.01)


async def tao(cluster: DevCluster, *arguments: str) -> dict[str, Any]:
    """Run a command; return the JSON that it prints."""
    topology = cluster.topology_path
    ended = await run_tao(*arguments, "--json", folder=topology.parent, env={"TAO_TOPOLOGY": str(topology)})
    assert ended.status == 0, ended.errors
    found: dict[str, Any] = json.loads(ended.output)
    return found


async def asked_of(graph: Graph, key: int) -> set[str]:
    """Return the servers that answer reads of the key."""
    with graph.trace() as trace:
        for _ in range(12):
            await graph.obj_get(key)
    return {each.server for each in trace}


async def until_asked_of(graph: Graph, key: int, servers: set[str]) -> None:
    async with asyncio.timeout(PATIENT_SECONDS):
        while await asked_of(graph, key) != servers:  # noqa: ASYNC110 - the graph follows by itself
            await asyncio.sleep(0.05)


async def test_clones_begin_and_end_under_traffic_without_a_failed_or_stale_read(cluster: DevCluster) -> None:
    target = str(cluster.topology_path)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        graphs = [await stack.enter_async_context(connect(target, settings=PATIENT)) for _ in range(3)]
        writer, *readers = graphs
        key = await writer.obj_add("user", {"name": "popular", "home": "0"})
        shard, counted = key >> SHARD_SHIFT, Counted(key)
        home = Routes(await cluster.topology()).tier(ONLY_REGION, "tier-1").home(shard).name
        await until_asked_of(readers[0], key, {home})
        running = [tasks.create_task(counted.write(writer))]
        running += [
            tasks.create_task(counted.read(f"reader-{n}", each)) for n, each in enumerate(readers) for _ in "ab"
        ]
        await counted.more_reads(200)

        cloned = await tao(cluster, "shard", "clone", str(shard), "--tier", "tier-1", "--copies", "2", "--yes")
        assert (cloned["before"], set(cloned["after"])) == ([home], FOLLOWERS)
        await until_asked_of(readers[0], key, FOLLOWERS)
        await counted.more_reads(500)
        hot = await tao(cluster, "shard", "hot", "--connect", target)
        assert (hot["shards"][0]["shard"], hot["keys"][0]["id"]) == (shard, key)
        assert set(hot["shards"][0]["servers"]) <= FOLLOWERS

        fewer = await tao(cluster, "shard", "unclone", str(shard), "--tier", "tier-1", "--copies", "1", "--yes")
        assert len(fewer["after"]) == 2
        await counted.more_reads(200)
        await tao(cluster, "shard", "unclone", str(shard), "--tier", "tier-1", "--yes")
        await until_asked_of(readers[0], key, {home})
        await counted.more_reads(200)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert counted.faults == []
        assert counted.acknowledged > 20
        assert sum(each.stats.errors for each in graphs) == 0
    await assert_converges(cluster)
