"""Topologies of the simulation, and the same with something changed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tao.model.topology import CacheServer, Tier, Topology
from tao.routing.routes import Routes


def with_homes(topology: Topology, place: tuple[str, str], homes: dict[int, str]) -> Topology:
    """Shards of a tier (region and name) are at these servers."""
    moved = {shard: (home,) for shard, home in homes.items()}
    return _with_tier(topology, place, lambda tier: msgspec.structs.replace(tier, moved={**tier.moved, **moved}))


def with_mark(topology: Topology, name: str, *, down: bool) -> Topology:
    """A cache server is marked down, or is not."""

    def mark(server: CacheServer) -> CacheServer:
        return msgspec.structs.replace(server, down=down) if server.name == name else server

    for place in tiers_of(topology):
        topology = _with_tier(
            topology, place, lambda tier: msgspec.structs.replace(tier, servers=tuple(map(mark, tier.servers)))
        )
    return topology


def servers_of(topology: Topology, place: tuple[str, str]) -> list[str]:
    """Names, of a tier."""
    return [server.name for server in Routes(topology).tier(*place).servers]


def tiers_of(topology: Topology) -> list[tuple[str, str]]:
    """Regions and names, leaders among them."""
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
