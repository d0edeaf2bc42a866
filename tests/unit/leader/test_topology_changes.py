"""What a leader keeps when the topology changes: two changes within one poll, and changes while it was paused."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tao.cache import CacheSettings, GraphCache
from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings
from tao.leader.replica_shards import ReplicaShards, ReplicaShardSettings
from tao.leader.server import LeaderServer
from tao.leader.settings import LeaderSettings
from tao.model.errors import TopologyError
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.observability.logs import logger
from tao.routing.topology_changes import record_change
from tao.serving.configuration import Configuration
from tao.serving.forward_path import WriteThrough
from tao.serving.server import SchemaArenas, TopologyEpochs
from tests.rigs.leader_rig import ARENAS, SCHEMA
from tests.rigs.links_rig import MemoryLinks
from tests.rigs.pacing import ManualClock, Tasks, until
from tests.rigs.server_context import make_context

REGIONS = ("east", "west", "north")
HERE = "north"
SHARDS = 4


def region(name: str) -> Region:
    def tier(kind: str) -> Tier:
        servers = tuple(
            CacheServer(name=f"{name}-{kind}-{number}", grpc=f"{name}{kind}{number}:1") for number in (1, 2)
        )
        return Tier(name=kind, servers=servers, moved=dict.fromkeys(range(SHARDS), (servers[0].name,)))

    return Region(name=name, leaders=tier("leader"), followers=(tier("follower"),))


def first_version() -> Topology:
    """Return a document in which east masters every shard, in two databases."""

    def database(name: str, first: int) -> Database:
        servers = {each: DatabaseServer(name=f"{name}-{each}") for each in REGIONS}
        return Database(name=name, master_region="east", servers=servers, shards=((first, first + 1),))

    databases = (database("db1", 0), database("db2", 2))
    return Topology(version=1, shards=SHARDS, regions=tuple(map(region, REGIONS)), databases=databases, changes=())


def next_version(topology: Topology, **fields: Any) -> Topology:
    return record_change(topology, msgspec.structs.replace(topology, version=topology.version + 1, **fields))


def promoted(topology: Topology, place: int, master_region: str) -> Topology:
    databases = list(topology.databases)
    epoch = databases[place].version_epoch + 1
    databases[place] = msgspec.structs.replace(databases[place], master_region=master_region, version_epoch=epoch)
    return next_version(topology, databases=tuple(databases))


def moved(topology: Topology, shard: int, leader: str) -> Topology:
    """Return the next version, in which another leader of this region leads the shard."""
    *others, here = topology.regions
    leaders = msgspec.structs.replace(here.leaders, moved={**here.leaders.moved, shard: (leader,)})
    return next_version(topology, regions=(*others, msgspec.structs.replace(here, leaders=leaders)))


class Ownership:
    """Replaces `tao.leader.ownership.Ownership`: here nothing is mastered, at first."""

    wanted: frozenset[int] = frozenset()

    def want(self, shards: Iterable[int]) -> None:
        self.wanted = frozenset(shards)

    async def confirm(self, timeout_seconds: float) -> None:
        """Confirm nothing."""


class Rig(LeaderServer):
    """The leader ``north-leader-1`` with its real reaction to topologies, and nothing that needs a database."""

    def __init__(self) -> None:
        nowhere = Path("nowhere")
        settings = LeaderSettings(
            name=f"{HERE}-leader-1",
            topology_file=nowhere,
            schema_file=nowhere,
            leader_user="",
            leader_password="",
            reader_user="",
            reader_password="",
        )
        super().__init__(settings, logger("test"))
        self.stored: Topology | TopologyError = first_version()
        self.configuration = Configuration(first_version(), SCHEMA, logger("test"), self.load)
        self._context = make_context(
            self.configuration, MemoryLinks("x").as_links(), Tasks(), name=settings.name, region=HERE, tier="leader"
        )
        self._cache = GraphCache(CacheSettings(arena_bytes=ARENAS), SchemaArenas(SCHEMA, ARENAS))
        self._publisher = Publisher(DeliverySettings(), "leader/1", lambda shard: f"db{1 + shard // 2}")
        changes = WriteThrough(self._cache, ManualClock(), 60.0)
        soon = ReplicaShardSettings(settle_seconds=0.0)
        self._replica_shards = ReplicaShards(self._cache, changes, self._publisher, soon, logger("test"))
        self._ownership = Ownership()  # type: ignore[assignment]
        self.configuration.on_routes(self._follow_routes)
        self.configuration.on_routes(TopologyEpochs(self._cache).follow_routes)

    async def load(self) -> Topology:
        if isinstance(self.stored, TopologyError):
            raise self.stored
        return self.stored

    @property
    def kept(self) -> list[int]:
        """The shards that are cached without having been dropped."""
        return self._cache.open_shards()

    async def look_after_pause(self) -> None:
        await self._look_after_pause(2.0)


@pytest.fixture
async def leader() -> Rig:
    rig = Rig()
    rig._follow_routes(rig.configuration.routes)
    await until(lambda: rig._replica_shards.open_count == SHARDS)
    rig._replica_shards._settings = ReplicaShardSettings(settle_seconds=math.inf)  # type: ignore[misc]
    return rig


async def test_two_promotions_within_one_poll_leave_the_caches_of_other_regions_open(leader: Rig) -> None:
    """The loss of a region: what the lost masters had is dropped by its epoch, and misses share fetches throughout."""
    first = first_version()
    leader.configuration.use_topology(promoted(promoted(first, 0, "west"), 1, "west"))
    assert leader.kept == [0, 1, 2, 3]
    assert [leader._cache.version_epoch(shard) for shard in range(SHARDS)] == [2] * SHARDS
    assert leader._publisher.figures()["unlinked_shards"] == SHARDS


async def test_a_shard_that_another_leader_had_within_one_poll_is_dropped_and_no_other(leader: Rig) -> None:
    first = first_version()
    leader.configuration.use_topology(moved(moved(first, 1, "north-leader-2"), 1, "north-leader-1"))
    assert leader.kept == [0, 2, 3]


async def test_a_version_of_which_nothing_is_known_drops_every_shard(leader: Rig) -> None:
    leader.configuration.use_topology(msgspec.structs.replace(first_version(), version=3))
    assert leader.kept == []


async def test_a_change_elsewhere_leaves_everything_cached_and_linked(leader: Rig) -> None:
    leader._publisher.prove("db1", 5_000)
    east, *others = first_version().regions
    marked = tuple(msgspec.structs.replace(each, down=True) for each in east.leaders.servers)
    east = msgspec.structs.replace(east, leaders=msgspec.structs.replace(east.leaders, servers=marked))
    leader.configuration.use_topology(next_version(first_version(), regions=(east, *others)))
    assert leader.kept == [0, 1, 2, 3]
    assert leader._publisher._proven == {"db1": 5_000}


async def test_a_pause_drops_only_what_a_change_has_affected(leader: Rig) -> None:
    await leader.look_after_pause()
    assert leader.kept == [0, 1, 2, 3], "the tailer has kept their changes"
    leader.stored = moved(moved(first_version(), 1, "north-leader-2"), 1, "north-leader-1")
    await leader.look_after_pause()
    assert leader.kept == [0, 2, 3]


async def test_a_pause_after_which_the_topology_cannot_be_read_drops_every_replica_shard(leader: Rig) -> None:
    leader.stored = TopologyError("half written")
    await leader.look_after_pause()
    assert leader.kept == []
