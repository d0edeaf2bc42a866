"""One cluster for all hostile requests; after each test every process is still the same and ready."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from tao.client import Graph, connect
from tao.devcluster.layout import Shape
from tao.routing.routes import Routes
from tao.topology.document import parse_topology
from tests.e2e.cluster_access import (
    assert_caches_equal_the_database,
    bystander_of,
    running_cluster,
)
from tests.e2e.hostile_rig import SHARDS, Rig


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def whole(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    shape = Shape(tiers=2, followers=2, leaders=2, databases=2, shards=SHARDS)
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(running_cluster(tmp_path_factory.mktemp("cluster"), shape))
        bystander = await stack.enter_async_context(bystander_of(cluster))
        routes = Routes(parse_topology(cluster.topology_path.read_bytes(), "topology"))
        yield Rig(cluster, bystander, routes, (await cluster.status()).processes)
        assert bystander.rounds > 50
        await assert_caches_equal_the_database(cluster)


@pytest_asyncio.fixture(loop_scope="package")
async def rig(whole: Rig) -> AsyncIterator[Rig]:
    """The cluster; after each test every process is the one that it was and ready, and the bystander went on."""
    # Those that an earlier test has caused have failed that one.
    whole.bystander.errors.clear()
    yield whole
    await whole.bystander.more_rounds(3)
    assert whole.bystander.errors == []
    assert (await whole.cluster.status()).processes == whole.before


@pytest_asyncio.fixture(loop_scope="package")
async def graph(rig: Rig) -> AsyncIterator[Graph]:
    async with connect(str(rig.cluster.topology_path)) as graph:
        yield graph
