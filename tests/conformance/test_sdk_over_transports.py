"""The SDK against servers on real sockets, over frames and over gRPC: connecting, watching, failing over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tao.client import ClientSettings, Counter, Credentials, Unauthorized, Unavailable, connect
from tao.model.graph import encode_object
from tao.model.topology import CacheServer, Tier
from tao.topology.document import dump_topology
from tao.wire.frames_server import FrameServer
from tao.wire.grpc_server import GrpcServer
from tao.wire.identity import AcceptedCredentials, AcceptedToken, PeerAuthenticator, digest_of
from tao.wire.links import LinkSettings
from tao.wire.session import Reply
from tao.wire.settings import ServingSettings
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import FakeCluster, make_topology, until

TOKEN = "open sesame"


class Follower:
    """Serves a fake cluster's contents on both transports."""

    def __init__(self, name: str, cluster: FakeCluster) -> None:
        self.name = name
        self.link = cluster.link(name)
        self.watching: list[Reply] = []
        accepted = AcceptedCredentials((AcceptedToken("web-1", "client", digest_of(TOKEN), "web"),))
        settings = ServingSettings(authenticator=PeerAuthenticator(accepted))
        self.frames = FrameServer(self, settings, name=name, topology_version=lambda: 1)
        self.grpc = GrpcServer(self, settings, name=name, topology_version=lambda: 1, choose_shard=lambda: 0)

    def handle(self, request: pb.Request, reply: Reply) -> None:
        self.link.sent.append(request)
        if request.HasField("watch"):
            self.watching.append(reply)
        else:
            reply.send(self.link.answer(request))

    async def start(self) -> CacheServer:
        frames, grpc = await self.frames.start("127.0.0.1:0"), await self.grpc.start("127.0.0.1:0")
        return CacheServer(name=self.name, frames=frames, grpc=grpc)

    async def close(self) -> None:
        await self.frames.close()
        await self.grpc.close()


class Region:
    """Two followers in two tiers, and how to reach them."""

    def __init__(self, transport: str) -> None:
        self.cluster = FakeCluster()
        self.followers = {name: Follower(name, self.cluster) for name in ("near-1", "far-1")}
        self.settings = ClientSettings(
            timeout_seconds=20, links=LinkSettings(transport="frames" if transport == "frames" else "auto")
        )
        self.credentials = Credentials("web-1", "client", TOKEN)
        self._transport = transport

    async def start(self) -> None:
        servers = {name: await each.start() for name, each in self.followers.items()}
        if self._transport == "grpc":
            servers = {name: replace(server, frames="") for name, server in servers.items()}
        topology = make_topology()
        tiers = tuple(Tier(name=name, servers=(servers[f"{name}-1"],)) for name in ("near", "far"))
        region = replace(topology.regions[0], followers=tiers)
        self.cluster.topology = replace(topology, regions=(region,))
        near = servers["near-1"]
        self.address = f"frames:{near.frames}" if self._transport == "frames" else near.grpc

    async def close(self) -> None:
        for each in self.followers.values():
            await each.close()


@pytest.fixture(params=["frames", "grpc"])
async def region(request: pytest.FixtureRequest) -> AsyncIterator[Region]:
    made = Region(request.param)
    await made.start()
    yield made
    await made.close()


async def test_one_address_is_enough(region: Region) -> None:
    async with connect(region.address, settings=region.settings, credentials=region.credentials) as graph:
        alice = await graph.obj_add("user", {"name": "Alice"})
        await graph.assoc_add(alice, "friend", 7, time=3)
        found = await graph.obj_get(alice)
        assert found is not None
        assert found.fields["name"] == "Alice"
        assert [(each.id2, each.time) for each in await graph.assoc_range(alice, "friend", 0, 10)] == [(7, 3)]
        assert (graph.region, graph.stats.errors) == ("east", 0)


async def test_a_check_is_answered_by_one_byte(region: Region) -> None:
    async with connect(region.address, settings=region.settings, credentials=region.credentials) as graph:
        await graph.assoc_add(5, "follows", 7)
        assert await graph.assoc_exists(5, "follows", 7)
        assert not await graph.assoc_exists(5, "follows", 8)
        checks = [(id1, "follows", id2) for id1 in (5, 6) for id2 in (7, 8)]
        assert await graph.assoc_exists_many(checks) == [True, False, False, False]


async def test_counters_are_added_to_and_read(region: Region) -> None:
    async with connect(region.address, settings=region.settings, credentials=region.credentials) as graph:
        await graph.counter_add(5, "views", by=4)
        await graph.counter_add(5, "views", by=-1)
        assert await graph.counter_get(5, "views") == Counter(3, 1100)
        found = await graph.counter_get_many([(5, "page.views"), (6, "views")])
        assert [each.value for each in found] == [3, 0]


async def test_a_topology_file_is_enough(region: Region, tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    path.write_text(dump_topology(region.cluster.topology))
    graph = await connect(str(path), settings=region.settings, credentials=region.credentials)
    assert await graph.obj_get(5) is None
    await graph.close()


async def test_a_read_moves_to_the_next_tier_when_its_server_goes(region: Region) -> None:
    async with connect(region.address, settings=region.settings, credentials=region.credentials) as graph:
        assert await graph.obj_get(5) is None
        await region.followers["near-1"].close()
        assert await graph.obj_get(5) is None
        assert len(region.cluster.batches("far-1")) == 1
        await graph.assoc_add(5, "friend", 6)
        assert len(region.cluster.batches("far-1")) == 2


async def test_a_change_of_topology_reaches_the_client(region: Region) -> None:
    async with connect(region.address, settings=region.settings, credentials=region.credentials) as graph:
        await until(lambda: any(each.watching for each in region.followers.values()))
        watch = next(each.watching[0] for each in region.followers.values() if each.watching)
        newer = replace(region.cluster.topology, version=2)
        document = pb.TopologyDocument(version=2, json=dump_topology(newer).encode())
        watch.send(pb.Answer(more=True, watch=pb.WatchEvent(topology=document)))
        await until(lambda: graph.topology.version == 2)


async def test_wrong_credentials_are_reported_as_such(region: Region) -> None:
    with pytest.raises(Unauthorized):
        await connect(region.address, settings=region.settings, credentials=Credentials("web-1", "client", "wrong"))


async def test_an_address_without_a_server_is_reported_as_such(region: Region) -> None:
    await region.close()
    with pytest.raises(Unavailable):
        await connect(region.address, settings=region.settings, credentials=region.credentials)


async def test_more_large_objects_than_one_answer_holds_are_all_read(region: Region) -> None:
    ids = range(1, 81)
    region.cluster.objects = {each: encode_object(1, 1, bytes(1_000_000)) for each in ids}
    async with connect(region.address, settings=region.settings, credentials=region.credentials) as graph:
        found = await graph.obj_get_many(list(ids))
        assert [each.id for each in found if each is not None] == list(ids)
        assert 1 <= graph.stats.retries <= 10
