"""Routes computed from a topology document: the servers of a shard in each tier, and the database that holds it.

Routes are computed once per document, so that a request pays an index. A tier is computed on first use, and its map is
taken over from the former document's routes when the tier's mapping has not changed: marking one server down must not
make every client hash every shard of every tier again. Servers that are down keep their shards; callers check ``down``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tao.model.errors import TopologyError, UnknownShard
from tao.model.topology import CacheServer, Database, DatabaseServer, PlacedTier, Region, Role, Tier, Topology, lists
from tao.routing.shard_map import Ring, ShardMap


@dataclass(frozen=True, slots=True)
class ServerLocation:
    """The region, tier and role of a cache server."""

    region: str
    tier: str
    role: Role


class TierRoutes:
    """The servers of one tier, by shard. Immutable.

    A shard has one leader: the first server that is up among the servers of its explicit mapping, then along the ring
    from its point; its home, when no server is up."""

    __slots__ = (
        "_distinct",
        "_extra_receivers",
        "_hosts",
        "_placement",
        "_successors",
        "map",
        "region",
        "role",
        "servers",
        "tier",
    )

    def __init__(self, region: str, tier: Tier, role: Role, shards: int, former: TierRoutes | None = None) -> None:
        """``former`` are the routes of the same tier under an earlier document.

        Raises `TopologyError` when no server of the tier has a weight above 0, or a mapping names an unknown shard or
        server."""
        self.region: Final = region
        self.tier: Final = tier.name
        self.role: Final[Role] = role
        self.servers: Final = tier.servers
        weights = {server.name: server.weight for server in tier.servers}
        self._placement: Final = (shards, weights, tier.moved)
        if former is not None and former._placement == self._placement:
            self.map: ShardMap = former.map
        else:
            self.map = ShardMap(shards, Ring(weights), tier.moved)
        by_name = {server.name: server for server in tier.servers}
        # There are few distinct sets of hosts, whatever the number of shards, so each is one shared tuple.
        shared: dict[tuple[str, ...], tuple[CacheServer, ...]] = {}
        hosts: list[tuple[CacheServer, ...]] = []
        down = frozenset(server.name for server in tier.servers if server.down) if role == "leader" else frozenset()
        for shard in range(shards):
            names = self.map.servers(shard)
            if role == "leader":
                names = (self.map.first_up(shard, down),)
            known = shared.get(names)
            if known is None:
                known = shared[names] = tuple(by_name[name] for name in names)
            hosts.append(known)
        self._hosts: Final = hosts
        # Servers beside the hosts that receive a shard's changes: future hosts, and former hosts for a moment.
        self._extra_receivers: Final = {
            shard: tuple(by_name[name] for name in names) for shard, names in tier.told.items()
        }
        self._distinct: Final = tuple(shared.values())
        self._successors: Final[dict[str, tuple[CacheServer, ...]]] = {}

    @property
    def up(self) -> tuple[CacheServer, ...]:
        """The servers that are not marked down."""
        return tuple(server for server in self.servers if not server.down)

    def hosts(self, shard: int) -> tuple[CacheServer, ...]:
        """Return the servers of the shard: its home, then its clones. Raises `UnknownShard`."""
        if 0 <= shard < len(self._hosts):
            return self._hosts[shard]
        raise UnknownShard(f"there is no shard {shard}; they are 0 to {len(self._hosts) - 1}")

    def receivers(self, shard: int) -> tuple[CacheServer, ...]:
        """Return the servers that receive the shard's changes: its hosts, and the servers that are about to become
        hosts or were hosts a moment ago. Raises as `hosts`."""
        return (*self.hosts(shard), *self._extra_receivers.get(shard, ()))

    def home(self, shard: int) -> CacheServer:
        """Return the server that receives the shard's writes and messages first; in a leader tier, the shard's present
        leader. Raises as `hosts`."""
        return self.hosts(shard)[0]

    def successors(self, name: str) -> tuple[CacheServer, ...]:
        """Return the other servers of the tier, in the order in which they keep copies for the server of that name."""
        found = self._successors.get(name)
        if found is None:
            by_name = {server.name: server for server in self.servers}
            found = self._successors[name] = tuple(by_name[each] for each in self.map.successors(name))
        return found

    def moved_since(self, former: TierRoutes) -> list[int]:
        """Return the shards whose home is another server than by the ``former`` routes of the tier, and those that were
        added since, in ascending order."""
        hosts = zip(former._hosts, self._hosts, strict=False)
        moved = [shard for shard, (was, now) in enumerate(hosts) if was[0].name != now[0].name]
        return [*moved, *range(len(former._hosts), len(self._hosts))]

    def shards_of(self, server: str) -> tuple[int, ...]:
        """Return the shards that the server serves as home or clone, or as their present leader, in ascending order;
        none for a server of another tier."""
        serving = {id(hosts) for hosts in self._distinct if any(host.name == server for host in hosts)}
        return tuple(shard for shard, hosts in enumerate(self._hosts) if id(hosts) in serving)


class Routes:
    """All look-ups of a client or a server in one topology document, which has been checked."""

    __slots__ = (
        *(
            "_database_servers",
            "_databases",
            "_former",
            "_leaders",
            "_locations",
            "_places",
            "_regions",
            "_servers",
            "_tiers",
            "shards",
            "topology",
        ),
        "version",
    )

    def __init__(self, topology: Topology, former: Routes | None = None) -> None:
        """``former`` are the routes in use until now; tiers that did not change are taken over from them."""
        self.topology: Final = topology
        self.version: Final = topology.version
        self.shards: Final = topology.shards
        self._regions: Final[dict[str, Region]] = {region.name: region for region in topology.regions}
        self._servers: Final[dict[str, CacheServer]] = {}
        self._locations: Final[dict[str, ServerLocation]] = {}
        for place, server in topology.cache_servers:
            self._servers[server.name] = server
            self._locations[server.name] = ServerLocation(place.region.name, place.tier.name, place.role)
        self._places: Final = topology.server_places
        self._tiers: Final[dict[tuple[str, str], TierRoutes]] = {}
        self._leaders: Final[dict[str, TierRoutes]] = {}
        self._former: Final = dict(former._tiers) if former is not None else {}
        databases: list[Database | None] = [None] * topology.shards
        for database in topology.databases:
            for first, last in database.shards:
                databases[first : last + 1] = [database] * (last + 1 - first)
        self._databases: Final = databases
        self._database_servers: Final = {
            server.name: database for database in topology.databases for server in database.places.values()
        }

    def tier(self, region: str, tier_name: str) -> TierRoutes:
        """Return a follower tier, or the leader tier, by its name. Raises `TopologyError` for an unknown tier."""
        key = (region, tier_name)
        found = self._tiers.get(key)
        if found is None:
            found_region = self.region(region)
            for tier in found_region.tiers:
                if tier.name == tier_name:
                    role = PlacedTier(found_region, tier).role
                    found = TierRoutes(region, tier, role, self.shards, self._former.pop(key, None))
                    self._tiers[key] = found
                    return found
            raise TopologyError(f"region {region!r} has no tier {tier_name!r} in topology version {self.version}")
        return found

    def leaders(self, region: str) -> TierRoutes:
        """Return the leader tier of a region. Raises `TopologyError` for an unknown region."""
        found = self._leaders.get(region)
        if found is None:
            found = self._leaders[region] = self.tier(region, self.region(region).leaders.name)
        return found

    def follower_tiers(self, region: str) -> tuple[TierRoutes, ...]:
        """Return the follower tiers of a region, nearest first. Raises as `leaders`."""
        return tuple(self.tier(region, tier.name) for tier in self.region(region).followers)

    def region(self, name: str) -> Region:
        """Return a region by name. Raises `TopologyError` for an unknown name."""
        return self._regions.get(name) or self.topology.region(name)

    def server(self, name: str) -> CacheServer:
        """Return a cache server by name. Raises `TopologyError` for an unknown name."""
        found = self._servers.get(name)
        if found is None:
            raise TopologyError(f"there is no cache server {name!r} in topology version {self.version}")
        return found

    def locate(self, server_name: str) -> ServerLocation:
        """Return the region, tier and role of a cache server. Raises as `server`."""
        self.server(server_name)
        return self._locations[server_name]

    def lists(self, role: str, server_name: str, region: str = "") -> bool:
        """Return whether the document has a server, tailer or watcher of that role, of that name and in that region if
        they are named."""
        return lists(self._places, role, server_name, region)

    def shards_of(self, server_name: str) -> Sequence[int]:
        """Return the shards that a cache server serves in its tier now, in ascending order. Raises as `server`."""
        location = self.locate(server_name)
        return self.tier(location.region, location.tier).shards_of(server_name)

    def shards_without(self, follower: str) -> Sequence[int]:
        """Return the shards of a follower that no other follower of its region serves: neither a clone nor a server of
        another tier that is not marked down. Raises as `server`."""
        tiers = self.follower_tiers(self.locate(follower).region)
        return [
            shard
            for shard in self.shards_of(follower)
            if all(host.down or host.name == follower for tier in tiers for host in tier.hosts(shard))
        ]

    def unknown_shard(self, shard: int) -> UnknownShard | None:
        """Return the error of a shard that the topology does not have, or None."""
        if shard < self.shards:
            return None
        return UnknownShard(f"there is no shard {shard}: ids of this graph lie on shards 0 to {self.shards - 1}")

    def database_of(self, shard: int) -> Database:
        """Return the database that holds the shard. Raises `UnknownShard`."""
        found = self._databases[shard] if 0 <= shard < self.shards else None
        if found is None:
            raise UnknownShard(f"no database holds shard {shard}; shards are 0 to {self.shards - 1}")
        return found

    def database_with(self, server: str) -> Database | None:
        """Return the database of a database server; None when the topology does not name the server."""
        return self._database_servers.get(server)

    def database_server(self, shard: int, region: str) -> DatabaseServer:
        """Return the server of the shard's database in a region. Raises `UnknownShard` and
        `TopologyError` when the database has no server there."""
        database = self.database_of(shard)
        found = database.servers.get(region)
        if found is None:
            raise TopologyError(f"database {database.name!r} has no server in region {region!r}")
        return found

    def binlog_server(self, database: str, region: str) -> DatabaseServer:
        """Return the server whose binlog a region's tailer reads: the region's own, or the master while the own server
        is marked down and the master is not. Raises `TopologyError`."""
        found = next((each for each in self.topology.databases if each.name == database), None)
        own = found.servers.get(region) if found is not None else None
        if found is None or own is None:
            raise TopologyError(f"database {database!r} has no server in region {region!r}")
        master = found.servers[found.master_region]
        return master if own.down and not master.down else own

    def master_region(self, shard: int) -> str:
        """Return the region with the master of the shard's database. Raises `UnknownShard`."""
        return self.database_of(shard).master_region
