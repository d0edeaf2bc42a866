"""One cluster for all hostile requests; after each test every process is the same and ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tao.client import Graph, connect
from tao.devcluster.layout import Shape
from tao.routing.routes import Routes
from tao.topology.document import parse_topology
from tests.e2e.cluster_access import PATIENT, assert_converges, bystander_of, running_cluster
from tests.e2e.hostile_rig import SHARDS, Rig
from tests.rigs.pacing import PATIENT_SECONDS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of this folder that share a cluster one after the other, before those with servers of their own.

    The cluster's bystander stands still while another loop runs, and servers drop a client that is silent for 30 s."""
    here = Path(__file__).parent
    places = [place for place, item in enumerate(items) if here in item.path.parents]
    ordered = sorted((items[place] for place in places), key=lambda item: "whole" not in _fixtures_of(item))
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def _fixtures_of(item: pytest.Item) -> list[str]:
    return item.fixturenames if isinstance(item, pytest.Function) else []


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def whole(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    shape = Shape(tiers=2, followers=2, leaders=2, databases=2, shards=SHARDS)
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(running_cluster(tmp_path_factory.mktemp("cluster"), shape))
        bystander = await stack.enter_async_context(bystander_of(cluster))
        routes = Routes(parse_topology(cluster.topology_path.read_bytes(), "topology"))
        yield Rig(cluster, bystander, routes, (await cluster.status()).processes)
        assert bystander.rounds > 20
        await assert_converges(cluster)


@pytest_asyncio.fixture(loop_scope="package")
async def rig(whole: Rig) -> AsyncIterator[Rig]:
    """Yield the cluster; after each test, assert that every process is the same and ready, and that the bystander
    continued."""
    # Errors that an earlier test has caused have failed that test.
    whole.bystander.errors.clear()
    yield whole
    await whole.bystander.more_rounds(3)
    assert whole.bystander.errors == []
    await assert_the_same_processes_are_ready(whole)


async def assert_the_same_processes_are_ready(rig: Rig) -> None:
    """Wait until every process is as it was before the test; fail when one has ended or was started again.

    A follower that the machine has held up for over a second stops being ready until it has subscribed again, so a
    server that is starting is no fault yet."""
    pids = [(process.name, process.pid) for process in rig.before]
    async with asyncio.timeout(PATIENT_SECONDS):
        while (processes := (await rig.cluster.status()).processes) != rig.before:
            assert [(process.name, process.pid) for process in processes] == pids
            await asyncio.sleep(0.1)


@pytest_asyncio.fixture(loop_scope="package")
async def graph(rig: Rig) -> AsyncIterator[Graph]:
    """Yield a client whose timeout is that of the bystander: requests of a megabyte take a busy machine seconds."""
    async with connect(str(rig.cluster.topology_path), settings=PATIENT) as graph:
        yield graph
