"""A client and a follower route by different topologies, in a region with one tier: nobody else could answer.

operator              client                     near-1                        near-2, knows version 1
version 2: near-2
serves shard 0                                   learns it, drops the shard
                      asks near-1           →    NOT_MINE, version 2
                      fetches version 2     →
                      asks near-2                                         →    NOT_MINE, version 1
                      (must not report this:                                   reads the document, because it is asked
                       the reader could do                                     by version 2
                       nothing but ask again)
                      asks near-2 again                                   →    answers
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import cast

import pytest

from tao.client.configuration import ClientConfiguration, LinkPool
from tao.client.graph import Graph
from tao.client.settings import ClientSettings
from tao.model.topology import ServerPlace, Topology
from tests.rigs.leader_rig import make_id, make_topology
from tests.rigs.links_rig import MemoryLinks
from tests.rigs.pacing import until
from tests.rigs.region_rig import RegionRig

A = make_id(64)
PATIENT = ClientSettings(timeout_seconds=60.0)
MOVED = make_topology(2, near={0: ("near-2",), 1: ("near-2",)})


class ClientLinks(MemoryLinks):
    """The links of an SDK client, which receives no topology unless it asks for one."""

    def __init__(self, region: RegionRig) -> None:
        super().__init__("client")
        for name, follower in (("near-1", region.near), ("near-2", region.far)):
            self[name].handler = follower.service
            self[name].hold_requests = {"watch"}

    def keep_only(self, places: Mapping[str, ServerPlace]) -> None:
        pass

    def figures(self) -> dict[str, dict[str, object]]:
        return {}

    async def close(self) -> None:
        pass


@asynccontextmanager
async def client_of(region: RegionRig, topology: Topology) -> AsyncIterator[tuple[Graph, ClientLinks]]:
    """Open a client that learns the region's topology from the servers of ``topology``."""
    links = ClientLinks(region)
    pool = cast("LinkPool", links)  # its links return numbers, which nobody uses
    configuration = await ClientConfiguration.fetch(topology, None, pool, PATIENT)
    async with Graph(pool, configuration, PATIENT, None, unix_seconds=lambda: 1_700_000_000.0) as graph:
        yield graph, links


@pytest.fixture
async def stored(region: RegionRig) -> RegionRig:
    """A region whose first object is stored."""
    async with client_of(region, region.topology) as (graph, _):
        await graph.obj_add("user", {"name": "a"}, id=A)
    return region


async def test_a_follower_that_is_asked_by_a_newer_topology_reads_it_and_answers(stored: RegionRig) -> None:
    stored.document = MOVED
    stored.near.configuration.use_topology(MOVED)
    async with client_of(stored, make_topology(servers=("near-1",))) as (graph, links):
        assert graph.topology.version == 2, "it has asked near-1"
        found = await graph.obj_get(A)
        assert found is not None
        assert (await graph.obj_update(A, {"name": "b"}, "user")) is not None
        assert links["near-2"].sent, "nobody else has the shard"
    assert stored.far.configuration.routes.version == 2


async def test_a_write_by_a_newer_topology_is_done_once(stored: RegionRig) -> None:
    stored.document = MOVED
    stored.near.configuration.use_topology(MOVED)
    async with client_of(stored, make_topology(servers=("near-1",))) as (graph, _):
        await graph.assoc_add(A, "follows", A + 1, time=1)
        assert await graph.assoc_count(A, "follows") == 1


async def test_a_read_waits_while_the_newer_document_cannot_be_seen_by_the_follower(stored: RegionRig) -> None:
    stored.near.configuration.use_topology(MOVED)
    async with client_of(stored, make_topology(servers=("near-1",))) as (graph, links):
        reading = asyncio.ensure_future(graph.obj_get(A))
        await until(lambda: sum(sent.HasField("read") for sent in links["near-2"].sent) > 3)
        assert not reading.done()
        stored.document = MOVED
        assert await reading is not None


async def test_a_client_with_an_older_topology_follows_it_to_a_follower_that_is_older_too(stored: RegionRig) -> None:
    async with client_of(stored, make_topology(servers=("near-1",))) as (graph, links):
        assert graph.topology.version == 1
        stored.document = MOVED
        stored.near.configuration.use_topology(MOVED)
        assert await graph.obj_get(A) is not None
        assert graph.topology.version == 2
        reads = [name for name in ("near-1", "near-2") for sent in links[name].sent if sent.HasField("read")]
        assert reads[0] == "near-1"
        assert reads.count("near-2") >= 2, "refused, and answered"
