"""Topologies of the simulation, and changes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from tao.model.topology import (
    CacheServer,
    Database,
    DatabaseServer,
    Region,
    Registration,
    TailerProcess,
    Tier,
    Topology,
    WatcherProcess,
)
from tao.routing.routes import Routes
from tests.sim.plans import Shape

REGIONS: Final = ("east", "west")
TIERS: Final = ("a", "b")
DATABASES: Final = ("db1", "db2")


def with_homes(topology: Topology, place: tuple[str, str], homes: dict[int, str]) -> Topology:
    """Place shards of a tier (region and name) on these servers."""
    moved = {shard: (home,) for shard, home in homes.items()}
    return _with_tier(topology, place, lambda tier: msgspec.structs.replace(tier, moved={**tier.moved, **moved}))


def with_mark(topology: Topology, name: str, *, down: bool) -> Topology:
    """Mark a cache server down, or up."""

    def mark(server: CacheServer) -> CacheServer:
        return msgspec.structs.replace(server, down=down) if server.name == name else server

    for place in tiers_of(topology):
        topology = _with_tier(
            topology, place, lambda tier: msgspec.structs.replace(tier, servers=tuple(map(mark, tier.servers)))
        )
    return topology


def servers_of(topology: Topology, place: tuple[str, str]) -> list[str]:
    """Return the names of a tier's servers."""
    return [server.name for server in Routes(topology).tier(*place).servers]


def tiers_of(topology: Topology) -> list[tuple[str, str]]:
    """Return the regions and names of the tiers, those of leaders among them."""
    return [(region.name, tier.name) for region in topology.regions for tier in (region.leaders, *region.followers)]


def _with_tier(topology: Topology, place: tuple[str, str], change: Callable[[Tier], Tier]) -> Topology:
    def changed(region: str, tier: Tier) -> Tier:
        return change(tier) if (region, tier.name) == place else tier

    regions = tuple(
        msgspec.structs.replace(
            region,
            leaders=changed(region.name, region.leaders),
            followers=tuple(changed(region.name, tier) for tier in region.followers),
        )
        for region in topology.regions
    )
    return msgspec.structs.replace(topology, regions=regions)


def registers(name: str) -> bool:
    """Return whether a server registers itself, as the second ones of each tier do."""
    return name.endswith("2")


def make_topology(shape: Shape) -> Topology:
    """Make version 1: shards are split evenly between the databases, and the ring places them on servers."""
    half = shape.shards // 2
    regions = REGIONS[: shape.regions]
    masters = (regions[0], regions[-1])

    def server(name: str) -> CacheServer:
        found = CacheServer(name=name, grpc=f"{name}:1", frames=f"{name}:2", admin=f"{name}:3")
        return msgspec.structs.replace(found, registration=Registration()) if registers(name) else found

    def region(name: str) -> Region:
        leaders = tuple(server(f"leader-{name}-{number}") for number in range(1, shape.leaders + 1))
        tiers = tuple(
            Tier(
                name=tier,
                servers=tuple(server(f"follower-{name}-{tier}{number}") for number in range(1, shape.followers + 1)),
            )
            for tier in TIERS[: shape.tiers]
        )
        tailers = tuple(
            TailerProcess(name=tailer, database=database, admin=f"{tailer}:3", frames=f"{tailer}:2")
            for database in DATABASES
            for tailer in (f"tailer-{name}-{database}",)
        )
        watchers = tuple(
            WatcherProcess(name=watcher, admin=f"{watcher}:3", frames=f"{watcher}:2")
            for number in range(shape.watchers)
            for watcher in (f"watcher-{name}-{number + 1}",)
        )
        leader_tier = Tier(name="leaders", servers=leaders)
        return Region(name=name, leaders=leader_tier, followers=tiers, tailers=tailers, watchers=watchers)

    databases = tuple(
        Database(
            name=name,
            master_region=master,
            servers={each: DatabaseServer(name=f"{name}-{each}", host=f"{name}-{each}") for each in regions},
            shards=(shards,),
        )
        for name, master, shards in zip(DATABASES, masters, ((0, half - 1), (half, shape.shards - 1)), strict=True)
    )
    regions_made = tuple(map(region, regions))
    return Topology(version=1, shards=shape.shards, regions=regions_made, databases=databases, changes=())
