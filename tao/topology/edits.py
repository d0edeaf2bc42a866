"""Changes to the topology as pure functions: document in, checked document of the next version out.

The caller stores the result by compare-and-set: ``await store.change(before.version, edits.mark_server(...))``. Every
function raises `TopologyError` when its arguments name something that does not exist, or when its result would break a
rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from tao.model.errors import TopologyError
from tao.model.topology import STANDBY, CacheServer, Database, DatabaseServer, Tier, Topology, region_of_place
from tao.routing.shard_map import Ring
from tao.topology.document import check_topology


def mark_server(topology: Topology, name: str, down: bool) -> Topology:
    """Mark a cache server down or up. While a follower is down its callers use the other tier; while a leader is down
    other leaders lead its shards (`tao.routing.routes.TierRoutes`)."""

    return _by_hand(change_server(topology, name, down=down), name)


def change_server(topology: Topology, name: str, **changes: Any) -> Topology:  # Any: fields differ in type
    """Change fields of a cache server."""

    def change(tier: Tier) -> Tier:
        return _with(tier, servers=tuple(_with(s, **changes) if s.name == name else s for s in tier.servers))

    region, tier = topology.place_of(name)
    return _edit_tier(topology, region.name, tier.name, change)


def mark_database_server(topology: Topology, name: str, down: bool) -> Topology:
    """Mark a database server down or up. While it is down, reads of its region use other servers."""

    def mark(server: DatabaseServer) -> DatabaseServer:
        return _with(server, down=down) if server.name == name else server

    if name not in {each.server.name for each in topology.database_servers}:
        raise TopologyError(f"there is no database server {name!r}")
    databases = tuple(
        _with(
            database,
            servers={region: mark(server) for region, server in database.servers.items()},
            standbys={region: mark(server) for region, server in database.standbys.items()},
        )
        for database in topology.databases
    )
    return _by_hand(_next(topology, databases=databases), name)


def mark_tailer(topology: Topology, name: str, down: bool) -> Topology:
    """Mark a tailer down or up. The mark informs operators; no server acts on it."""
    if not any(tailer.name == name for region in topology.regions for tailer in region.tailers):
        raise TopologyError(f"there is no tailer {name!r}")
    regions = tuple(
        _with(region, tailers=tuple(_with(t, down=down) if t.name == name else t for t in region.tailers))
        for region in topology.regions
    )
    return _by_hand(_next(topology, regions=regions), name)


def mark_any(topology: Topology, name: str, down: bool) -> Topology:
    """Mark a server as `mark_server`, `mark_database_server` or `mark_tailer` does."""
    databases = {each.server.name for each in topology.database_servers}
    tailers = {tailer.name for region in topology.regions for tailer in region.tailers}
    mark = mark_database_server if name in databases else mark_tailer if name in tailers else mark_server
    return mark(topology, name, down)


def mark_by_watcher(topology: Topology, name: str, down: bool) -> Topology:
    """Mark a server as `mark_any` does, and note that a watcher did it, which will undo it."""
    marked = mark_any(topology, name, down)
    return _with(marked, marked_by_watcher=(*marked.marked_by_watcher, name) if down else marked.marked_by_watcher)


def as_version(topology: Topology, version: int) -> Topology:
    """Return several edits as one change: the document under another version."""
    return _with(topology, version=version)


def promote(topology: Topology, database: str, place: str, version_epoch: int, lost: str = "") -> Topology:
    """Make the server at ``place`` the master of a database, under a higher version epoch. A standby changes places
    with its region's other server. ``lost`` names the former master's server when it is out of reach: it is marked down
    until it follows the new one."""
    found = next((each for each in topology.databases if each.name == database), None)
    if found is None:
        raise TopologyError(f"there is no database {database!r}")
    if version_epoch <= found.version_epoch:
        raise TopologyError(f"{database}: the version epoch {version_epoch} is not above {found.version_epoch}")
    region = region_of_place(place)
    places = {at: _with(each, down=True) if each.name == lost else each for at, each in found.places.items()}
    if place != region:
        places[region], places[place] = places[place], places[region]
    changed = _with(
        found,
        master_region=region,
        version_epoch=version_epoch,
        servers={at: places[at] for at in found.servers},
        standbys={at: places[f"{at}{STANDBY}"] for at in found.standbys},
    )
    databases = tuple(changed if each is found else each for each in topology.databases)
    marked = (*topology.marked_by_watcher, lost) if lost else topology.marked_by_watcher
    return _next(topology, databases=databases, marked_by_watcher=tuple(dict.fromkeys(marked)))


def raise_epochs(topology: Topology, version_epochs: Mapping[str, int]) -> Topology:
    """Raise the version epochs of these databases, as a restore does in their rows. None becomes lower."""
    databases = tuple(
        _with(each, version_epoch=max(each.version_epoch, version_epochs.get(each.name, 0)))
        for each in topology.databases
    )
    return _next(topology, databases=databases)


def move_to_database(topology: Topology, shard: int, name: str) -> Topology:
    """Have another database hold a shard. Raises `TopologyError` also when it holds the shard already."""
    source = next((each for each in topology.databases if _holds(each, shard)), None)
    if source is None:
        raise TopologyError(f"there is no shard {shard}; they are 0 to {topology.shards - 1}")
    if source.name == name:
        raise TopologyError(f"{name} holds shard {shard} already")
    if name not in {database.name for database in topology.databases}:
        raise TopologyError(f"there is no database {name!r}")

    def changed(database: Database) -> Database:
        held = shards_of(database)
        if database is source:
            return _with(database, shards=_ranges(held - {shard}))
        return _with(database, shards=_ranges(held | {shard})) if database.name == name else database

    return _next(topology, databases=tuple(map(changed, topology.databases)))


def add_shards(topology: Topology, count: int) -> Topology:
    """Add ``count`` shards behind the present ones, in one run for each database, of about equal length. Objects and
    edges that exist stay where they are: an id carries its shard."""
    first, databases = topology.shards, list(topology.databases)
    for index, database in enumerate(databases):
        last = topology.shards + count * (index + 1) // len(databases)
        databases[index] = _with(database, shards=_ranges(shards_of(database) | set(range(first, last))))
        first = last
    return _next(topology, shards=topology.shards + count, databases=tuple(databases))


def _holds(database: Database, shard: int) -> bool:
    return any(first <= shard <= last for first, last in database.shards)


def shards_of(database: Database) -> set[int]:
    """Return the shards that a database holds."""
    return {shard for first, last in database.shards for shard in range(first, last + 1)}


def _ranges(shards: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return shards as inclusive ranges, in ascending order."""
    runs: list[tuple[int, int]] = []
    for shard in sorted(shards):
        if runs and runs[-1][1] == shard - 1:
            runs[-1] = (runs[-1][0], shard)
        else:
            runs.append((shard, shard))
    return tuple(runs)


def move_shard(topology: Topology, region: str, tier: str, shard: int, *servers: str) -> Topology:
    """Map a shard of one tier by hand: the first server is its home. Further servers of a follower tier are clones that
    serve reads too; further servers of a leader tier lead the shard when those before them are down."""

    def move(found: Tier) -> Tier:
        return _with(found, moved=dict(sorted({**found.moved, shard: servers}.items())))

    return _edit_tier(topology, region, tier, move)


def unmove_shard(topology: Topology, region: str, tier: str, shard: int) -> Topology:
    """Remove a mapping by hand, so that the ring places the shard again."""

    def unmove(found: Tier) -> Tier:
        if shard not in found.moved:
            raise TopologyError(f"shard {shard} is not mapped by hand in {region}/{tier}")
        return _with(found, moved={other: servers for other, servers in found.moved.items() if other != shard})

    return _edit_tier(topology, region, tier, unmove)


def place_shard(
    topology: Topology,
    region: str,
    tier: str,
    shard: int,
    hosts: tuple[str, ...],
    extra_receivers: tuple[str, ...],
    *,
    by_watcher: bool,
) -> Topology:
    """Set the servers that serve a shard of one tier, its home first, and ``extra_receivers``, which only receive its
    changes. A shard whose home is the ring's choice and that has no clones is returned to the ring. ``by_watcher`` says
    that a watcher made the clones."""

    def place(found: Tier) -> Tier:
        owner = Ring({server.name: server.weight for server in found.servers}).owner(shard)
        moved = {each: servers for each, servers in found.moved.items() if each != shard}
        if hosts != (owner,):
            moved[shard] = hosts
        told = {each: servers for each, servers in found.told.items() if each != shard}
        if extra_receivers:
            told[shard] = extra_receivers
        watched = {each for each in found.cloned_by_watcher if each != shard} | ({shard} if by_watcher else set())
        return _with(
            found,
            moved=dict(sorted(moved.items())),
            told=dict(sorted(told.items())),
            cloned_by_watcher=tuple(sorted(watched)),
        )

    return _edit_tier(topology, region, tier, place)


def begin_record(topology: Topology) -> Topology:
    """Have the document record its changes from now on. Programs of earlier versions refuse such a document."""
    return _next(topology, changes=topology.changes or ())


def add_server(topology: Topology, region: str, tier: str, server: CacheServer) -> Topology:
    """Add a cache server to a tier; the ring gives it its part of the shards."""
    if server.name in _names(topology):
        raise TopologyError(f"there is a server {server.name!r} already: name this one otherwise, or remove that first")
    return _edit_tier(topology, region, tier, lambda found: _with(found, servers=(*found.servers, server)))


def remove_server(topology: Topology, name: str) -> Topology:
    """Remove a cache server from its tier for good. Shards mapped to it by hand go to the mapping's other servers, or
    back to the ring."""

    def remove(tier: Tier) -> Tier:
        servers = tuple(server for server in tier.servers if server.name != name)
        return _with(_unmapped(tier, name), servers=servers)

    region, tier = topology.place_of(name)
    return _by_hand(_edit_tier(topology, region.name, tier.name, remove), name)


def take_off_ring(topology: Topology, name: str) -> Topology:
    """Leave a cache server without shards: with weight 0, and without those mapped to it by hand, which go where
    `remove_server` would give them."""
    region, tier = topology.place_of(name)
    unmapped = _edit_tier(topology, region.name, tier.name, lambda found: _unmapped(found, name))
    return as_version(change_server(unmapped, name, weight=0.0), topology.version + 1)


def _unmapped(tier: Tier, name: str) -> Tier:
    def without(mapping: dict[int, tuple[str, ...]]) -> dict[int, tuple[str, ...]]:
        left = {shard: tuple(host for host in hosts if host != name) for shard, hosts in mapping.items()}
        return {shard: hosts for shard, hosts in left.items() if hosts}

    return _with(tier, moved=without(tier.moved), told=without(tier.told))


def _by_hand(topology: Topology, name: str) -> Topology:
    return _with(topology, marked_by_watcher=tuple(each for each in topology.marked_by_watcher if each != name))


def _names(topology: Topology) -> set[str]:
    """Return the names of cache servers, tailers and watchers, which share one namespace."""
    tailers = {tailer.name for region in topology.regions for tailer in region.tailers}
    watchers = {watcher.name for region in topology.regions for watcher in region.watchers}
    return tailers | watchers | {server.name for _, server in topology.cache_servers}


def _edit_tier(topology: Topology, region: str, tier: str, edit: Callable[[Tier], Tier]) -> Topology:
    found = topology.region(region)
    if found.leaders.name == tier:
        changed = _with(found, leaders=edit(found.leaders))
    elif any(follower.name == tier for follower in found.followers):
        changed = _with(found, followers=tuple(edit(t) if t.name == tier else t for t in found.followers))
    else:
        raise TopologyError(f"region {region!r} has no tier {tier!r}")
    return _next(topology, regions=tuple(changed if r.name == region else r for r in topology.regions))


def _next(topology: Topology, **changes: Any) -> Topology:  # Any: fields differ in type, and msgspec checks none
    changed = msgspec.structs.replace(topology, version=topology.version + 1, **changes)
    check_topology(changed)
    return changed


_with = msgspec.structs.replace
