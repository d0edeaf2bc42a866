"""A series of deliveries: let go at both ends, and going on when a part of it is refused."""

from __future__ import annotations

import msgspec

from tao.cache import CacheSettings, GraphCache
from tao.follower.maintenance_path import Subscriptions, SubscriptionSettings
from tao.model.topology import CacheServer, Topology
from tao.observability.logs import logger
from tao.peers.links import Links, LinkSettings
from tao.serving.applying import WriteThrough
from tao.serving.cache_types import SchemaArenas
from tao.serving.configuration import Configuration
from tao.wire.frames_server import FrameServer
from tao.wire.identity import Credentials
from tao.wire.settings import ServingSettings
from tests.rigs.leader_rig import ARENAS, SCHEMA, LeaderRig, make_topology
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import ManualClock, Tasks, until


def one_leader(address: str) -> Topology:
    topology = make_topology()
    region = topology.regions[0]
    leader = CacheServer(name="leader-1", grpc="127.0.0.1:1", frames=address)
    leaders = msgspec.structs.replace(region.leaders, servers=(leader,), moved={})
    return msgspec.structs.replace(topology, regions=(msgspec.structs.replace(region, leaders=leaders),))


async def test_a_refused_shard_is_asked_for_again_within_the_one_series_and_the_others_stay_subscribed() -> None:
    store = MemoryStore(4)
    leader = LeaderRig(store, store)
    await leader.take(0, 1, 2)
    server = FrameServer(leader.service, ServingSettings(), name="leader-1", topology_version=lambda: 1)
    topology = one_leader(await server.start("127.0.0.1:0"))
    cache = GraphCache(CacheSettings(arena_bytes=ARENAS, mark_slots=1009), SchemaArenas(SCHEMA, ARENAS))
    configuration = Configuration(topology, SCHEMA, logger("test"))
    links, tasks = Links(LinkSettings(), Credentials("near-1", "follower", "")), Tasks()
    subscriptions = Subscriptions(
        "near-1",
        ("east", "near"),
        cache,
        WriteThrough(cache, ManualClock(), 60.0),
        configuration,
        links,
        ManualClock(),
        tasks,
        SubscriptionSettings(retry_seconds=0.001),
        logger("test"),
    )
    subscriptions.follow_routes(configuration.routes)
    hosted = subscriptions.hosted
    await until(lambda: set(cache.open_shards()) == hosted - {3})
    connection = next(iter(server.connections))
    assert subscriptions.unsubscribed == len(hosted & {3})
    await leader.take(0, 1, 2, 3)
    await until(lambda: not subscriptions.unsubscribed)
    assert set(cache.open_shards()) == hosted
    assert connection.series == 1
    await tasks.close()
    await until(lambda: connection.series == 0)
    await links.close()
    await server.close()
    await leader.close()
