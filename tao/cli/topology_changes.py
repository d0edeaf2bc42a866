"""What a change of the topology means, for whoever is about to make it: servers, marks, and which shards move."""

from __future__ import annotations

from typing import Final

from tao.model.topology import Topology
from tao.routing.routes import Routes

Change = tuple[str, str, str]
"""What, before, after."""

_SHOWN_SHARDS: Final = 20
"""Of one tier, one by one; of more the number is told."""


def differences(before: Topology, after: Topology) -> list[Change]:
    """What a person has to know: servers, marks, and which shards go where."""
    old, new = _servers(before), _servers(after)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    changes = [(name, old.get(name, "-"), new.get(name, "-")) for name in names]
    was_at, now_at = _hosts(before), _hosts(after)
    for place, now in now_at.items():
        was = was_at[place]
        moved = [shard for shard in range(after.shards) if was[shard] != now[shard]]
        shown = moved[:_SHOWN_SHARDS]
        changes += [(f"{place} shard {shard}", ", ".join(was[shard]), ", ".join(now[shard])) for shard in shown]
        if len(moved) > _SHOWN_SHARDS:
            changes.append((f"{place}: {len(moved) - _SHOWN_SHARDS:,} more shards", "…", "…"))
    if not changes and _mappings(before) != _mappings(after):
        changes.append(("mapped by hand", _mappings(before), _mappings(after)))
    return changes


def _servers(found: Topology) -> dict[str, str]:
    caches = {
        server.name: f"{region.name}/{tier.name} {server.grpc} {'down' if server.down else 'up'}"
        for region in found.regions
        for tier in (region.leaders, *region.followers)
        for server in tier.servers
    }
    databases = {
        server.name: f"{database.name} in {region} {'down' if server.down else 'up'}"
        for database in found.databases
        for region, server in database.servers.items()
    }
    return {**caches, **databases}


def _hosts(found: Topology) -> dict[str, list[tuple[str, ...]]]:
    routes = Routes(found)
    return {
        f"{region.name}/{tier.name}": [
            tuple(server.name for server in routes.tier(region.name, tier.name).hosts(shard))
            for shard in range(found.shards)
        ]
        for region in found.regions
        for tier in (region.leaders, *region.followers)
    }


def _mappings(found: Topology) -> str:
    """For a mapping by hand to where the ring has the shard anyway: it holds when the ring changes."""
    return ", ".join(
        f"{region.name}/{tier.name} {shard}: {' '.join(servers)}"
        for region in found.regions
        for tier in (region.leaders, *region.followers)
        for shard, servers in tier.moved.items()
    )
