"""The cache follows the version epochs of the topology: a promotion drops the shards of its database alone."""

from __future__ import annotations

import msgspec

from tao.cache import CacheSettings, GraphCache
from tao.model.topology import Topology
from tao.routing.routes import Routes
from tao.serving.server import SchemaArenas, TopologyEpochs
from tests.rigs.leader_rig import SCHEMA, SHARDS, make_topology


def promoted(topology: Topology, epoch: int) -> Routes:
    database = msgspec.structs.replace(topology.databases[0], version_epoch=epoch)
    return Routes(msgspec.structs.replace(topology, version=topology.version + 1, databases=(database,)))


def test_open_shards_learn_the_epoch_of_the_topology_and_closed_ones_stay_closed() -> None:
    arenas = {"default": 1 << 20}
    cache = GraphCache(CacheSettings(arena_bytes=arenas), SchemaArenas(SCHEMA, arenas))
    for shard in range(SHARDS - 1):
        cache.open_shard(shard, 1)
    epochs = TopologyEpochs(cache)
    epochs.follow_routes(Routes(make_topology()))
    assert {cache.version_epoch(shard) for shard in range(SHARDS - 1)} == {1}
    epochs.follow_routes(promoted(make_topology(), 4))
    assert {cache.version_epoch(shard) for shard in range(SHARDS - 1)} == {4}
    assert not cache.is_open(SHARDS - 1)
