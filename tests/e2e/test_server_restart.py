"""Leaders and followers are killed and restarted under traffic, with real processes and a real database.

Afterwards every acknowledged write is present, an unacknowledged one may be, and every cache equals the database.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from tao.client import Graph, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape
from tao.model.errors import TaoError
from tests.e2e.cluster_access import PACE_SECONDS, PATIENT, assert_converges

pytestmark = [pytest.mark.e2e, pytest.mark.database]

SHAPE = Shape(tiers=2, followers=1, leaders=2, databases=1, shards=8)

WRITERS = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    settings = ClusterSettings(
        state_dir=tmp_path_factory.mktemp("cluster"), shape=SHAPE, durability=Durability.RELAXED, log_level="error"
    )
    async with DevCluster(settings) as running:
        yield running


class Writer:
    """A client that adds edges of one object with rising times; it records the last acknowledged one, and later
    failures."""

    def __init__(self, graph: Graph, id1: int, id2: int) -> None:
        self.graph, self.id1, self.id2 = graph, id1, id2
        self.tried = self.acknowledged = self.failures = 0

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self.tried += 1
            try:
                await self.graph.assoc_add(self.id1, "friend", self.id2, self.tried, {})
            except TaoError:
                self.failures += 1
            else:
                self.acknowledged = self.tried
            await asyncio.sleep(PACE_SECONDS)


async def under_traffic(cluster: DevCluster, disturb: Callable[[list[Writer]], Awaitable[None]]) -> None:
    """Disturb the cluster while all clients write; then compare the data with the acknowledged writes."""
    async with AsyncExitStack() as stack:
        target = str(cluster.topology_path)
        graphs = [
            await stack.enter_async_context(connect(target, tier=tier, settings=PATIENT))
            for tier in ("tier-1", "tier-2")
        ]
        ids = [await graphs[0].obj_add("user", {"name": f"u{number}"}) for number in range(2 * WRITERS)]
        writers = [Writer(graphs[number % 2], *ids[2 * number : 2 * number + 2]) for number in range(WRITERS)]
        stop = asyncio.Event()
        running = [asyncio.ensure_future(writer.run(stop)) for writer in writers]
        await progress(writers)
        await disturb(writers)
        await progress(writers)
        stop.set()
        await asyncio.gather(*running)
        await write_once_more(writers)
        # Repair writes the inverses that the last write could not: a copy under way may still hold their pair.
        await assert_converges(cluster)
        for writer in writers:
            for graph in graphs:
                (edge,) = await graph.assoc_range(writer.id1, "friend", 0, 10)
                (back,) = await graph.assoc_range(writer.id2, "friend", 0, 10)
                # After an unknown outcome a later attempt was acknowledged, and it is the one that counts.
                assert writer.acknowledged <= edge.time == back.time <= writer.tried


async def progress(writers: list[Writer]) -> None:
    """Wait until each writer's last acknowledged number has risen by three."""
    before = [writer.acknowledged for writer in writers]
    while any(  # noqa: ASYNC110 - writers have no event to wait for
        writer.acknowledged < seen + 3 for writer, seen in zip(writers, before, strict=True)
    ):
        await asyncio.sleep(0.01)


async def write_once_more(writers: list[Writer]) -> None:
    """Write each pair once more, because the next write of a pair also writes its pending inverse."""
    for writer in writers:
        writer.tried += 1
        await writer.graph.assoc_add(writer.id1, "friend", writer.id2, writer.tried, {})
        writer.acknowledged = writer.tried


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_leader_loses_no_acknowledged_write(cluster: DevCluster) -> None:
    async def kill(writers: list[Writer]) -> None:
        await cluster.kill("leader-1")
        await cluster.restart("leader-1")

    await under_traffic(cluster, kill)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_leader_that_is_stopped_loses_no_acknowledged_write(cluster: DevCluster) -> None:
    async def restart(writers: list[Writer]) -> None:
        await cluster.restart("leader-2")

    await under_traffic(cluster, restart)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_follower_has_a_stand_in_and_recovers_with_correct_entries(cluster: DevCluster) -> None:
    async def kill(writers: list[Writer]) -> None:
        await cluster.kill("follower-1a")
        await progress(writers)
        await cluster.restart("follower-1a")

    await under_traffic(cluster, kill)
