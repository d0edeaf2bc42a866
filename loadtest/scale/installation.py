"""The modelled installation: its shape, its topology documents, and the changes of them.

The first region is the one that is measured. The others are named in the documents, hold all masters, and are never
contacted. Beside the region's follower tiers there is a tier of one follower, which hosts all shards: the worst place
for a follower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.routing.routes import Routes
from tao.topology.document import dump_topology

REGION: Final = "east"
FOLLOWER: Final = "measured-follower"
LEADER: Final = f"{REGION}-leader-1"
SOLE_TIER: Final = "measured"
_REGIONS: Final = (REGION, "west", "north")
_NOWHERE: Final = "127.0.0.1:1"


class InstallationShape(msgspec.Struct, frozen=True, kw_only=True):
    """How large an installation is. Leaders, tiers and followers are those of each region."""

    shards: int = 10_000
    leaders: int = 30
    followers_per_leader: int = 100
    tiers: int = 3
    """The followers are spread over so many tiers, each of which hosts every shard once."""
    databases: int = 30

    @property
    def servers(self) -> int:
        """The cache servers of all regions."""
        return len(_REGIONS) * self.leaders * (1 + self.followers_per_leader)

    def halved(self, dimension: str) -> InstallationShape:
        """Return the shape with half of the ``shards``, ``databases`` or ``servers`` (leaders and their followers)."""
        name = "leaders" if dimension == "servers" else dimension
        return msgspec.structs.replace(self, **{name: max(1, getattr(self, name) // 2)})


class Addresses(NamedTuple):
    """Where a server of the documents listens."""

    frames: str = _NOWHERE
    grpc: str = _NOWHERE
    admin: str = ""


def topology_of(shape: InstallationShape, addresses: Mapping[str, Addresses], version: int = 1) -> Topology:
    """Return the document of an installation. Servers without an address are named only."""

    def server(name: str) -> CacheServer:
        return CacheServer(name=name, **addresses.get(name, Addresses())._asdict())

    def region_of(region: str) -> Region:
        leaders = [server(f"{region}-leader-{number}") for number in range(1, shape.leaders + 1)]
        names = [f"{region}-follower-{number}" for number in range(1, shape.leaders * shape.followers_per_leader + 1)]
        tiers = [
            Tier(name=f"tier-{number + 1}", servers=tuple(map(server, names[number :: shape.tiers])))
            for number in range(min(shape.tiers, len(names)))
        ]
        if region == REGION:
            tiers.append(Tier(name=SOLE_TIER, servers=(server(FOLLOWER),)))
        return Region(name=region, leaders=Tier(name="leaders", servers=tuple(leaders)), followers=tuple(tiers))

    bounds = [number * shape.shards // shape.databases for number in range(shape.databases + 1)]
    return Topology(
        version=version,
        shards=shape.shards,
        regions=tuple(map(region_of, _REGIONS)),
        databases=tuple(
            Database(
                name=f"db-{number + 1}",
                master_region=_REGIONS[1 + number % 2],
                servers={
                    region: DatabaseServer(name=f"{region}-db-{number + 1}", host="127.0.0.1", port=1)
                    for region in _REGIONS
                },
                shards=((first, after - 1),),
            )
            for number, (first, after) in enumerate(pairwise(bounds))
        ),
    )


def subscribers_of(topology: Topology, leader: str) -> dict[str, list[int]]:
    """Return the followers of the measured region that subscribe at the leader, each with its shards there."""
    routes = Routes(topology)
    led = routes.shards_of(leader)
    found: dict[str, list[int]] = {}
    for tier in routes.follower_tiers(REGION):
        for shard in led:
            found.setdefault(tier.home(shard).name, []).append(shard)
    return found


def store(topology: Topology, path: Path) -> None:
    """Write the document as its servers expect it: a reader sees the old one or the new one."""
    draft = path.with_suffix(".draft")
    draft.write_text(dump_topology(topology))
    draft.replace(path)


def moved_shards(before: Topology, after: Topology, shards: set[int]) -> int:
    """Return how many of these shards have another leader in the measured region, or another version epoch."""
    old, new = Routes(before), Routes(after)
    leaders = old.leaders(REGION), new.leaders(REGION)
    return sum(
        leaders[0].home(shard).name != leaders[1].home(shard).name
        or old.database_of(shard).version_epoch != new.database_of(shard).version_epoch
        for shard in shards
    )


class TopologyChange(NamedTuple):
    """A change of the installation. Made again, it concerns the next server or database."""

    name: str
    make: Callable[[Topology], Topology]


def _without_follower(topology: Topology) -> Topology:
    """Mark the first follower of another region that is up."""
    other = topology.regions[1]
    first, *tiers = other.followers
    return _with_region(topology, msgspec.structs.replace(other, followers=(_one_more_down(first), *tiers)))


def _without_leader(topology: Topology) -> Topology:
    """Mark the first leader of the measured region that is up, other than the measured one."""
    own = topology.regions[0]
    return _with_region(topology, msgspec.structs.replace(own, leaders=_one_more_down(own.leaders)))


def _one_more_down(tier: Tier) -> Tier:
    lost = next(server for server in tier.servers if not server.down and server.name != LEADER)
    servers = tuple(msgspec.structs.replace(each, down=each.down or each is lost) for each in tier.servers)
    return msgspec.structs.replace(tier, servers=servers)


def _with_region(topology: Topology, changed: Region) -> Topology:
    regions = tuple(changed if each.name == changed.name else each for each in topology.regions)
    return msgspec.structs.replace(topology, version=topology.version + 1, regions=regions)


def _promoted(topology: Topology) -> Topology:
    """Replace the master of the first database that was not promoted yet: it moves from the second region to the third,
    or back."""
    former = min(topology.databases, key=lambda each: each.version_epoch)
    second, third = _REGIONS[1:]
    region = second if former.master_region == third else third
    promoted = msgspec.structs.replace(former, master_region=region, version_epoch=former.version_epoch + 1)
    databases = tuple(promoted if each is former else each for each in topology.databases)
    return msgspec.structs.replace(topology, version=topology.version + 1, databases=databases)


UNRELATED: Final = TopologyChange("a follower of another region", _without_follower)
LOST_LEADER: Final = TopologyChange("a lost leader", _without_leader)
PROMOTION: Final = TopologyChange("a promotion", _promoted)
CHANGES: Final = (UNRELATED, LOST_LEADER, PROMOTION)
