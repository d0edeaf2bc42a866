"""What follows from a topology document: who serves a shard in each tier, and which database holds it (DESIGN.md §5).

Worked out once per document, so that a request pays an index. A tier is worked out when it is first asked for, and
taken over from the former document's routes when only something else changed: marking one server down must not make
every client hash every shard of every tier again. Servers that are down keep their shards; callers look at ``down``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tao.model.errors import InvalidArgument, TopologyError
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.routing.ring import Ring
from tao.routing.shard_map import ShardMap

Role = Literal["leader", "follower"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cache server stands."""

    region: str
    tier: str
    role: Role


class TierRoutes:
    """The servers of one tier, by shard. Immutable.

    A shard has one leader: the first server that is up among those that it is mapped to by hand, then around the ring
    from its place; its home, when no server is up."""

    __slots__ = ("_different", "_hosts", "_placement", "_told", "map", "region", "role", "servers", "tier")

    def __init__(self, region: str, tier: Tier, role: Role, shards: int, former: TierRoutes | None = None) -> None:
        """``former``: routes of the same tier under an earlier document. Raises `TopologyError` when the tier has no
        server that the ring could use, or a mapping names something that does not exist."""
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
        # Few different sets of hosts exist, whatever the number of shards: each is one shared tuple.
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
        self._told: Final = {shard: tuple(by_name[name] for name in names) for shard, names in tier.told.items()}
        self._different: Final = tuple(shared.values())

    @property
    def up(self) -> tuple[CacheServer, ...]:
        """The servers that are not marked down."""
        return tuple(server for server in self.servers if not server.down)

    def hosts(self, shard: int) -> tuple[CacheServer, ...]:
        """Who serves the shard: its home, then its clones. Raises `InvalidArgument` for a shard that does not exist."""
        if 0 <= shard < len(self._hosts):
            return self._hosts[shard]
        raise InvalidArgument(f"there is no shard {shard}; they are 0 to {len(self._hosts) - 1}")

    def told(self, shard: int) -> tuple[CacheServer, ...]:
        """To whom the shard's changes are handed: its hosts, and who is about to be one or was one a moment ago. Raises
        as `hosts`."""
        return (*self.hosts(shard), *self._told.get(shard, ()))

    def home(self, shard: int) -> CacheServer:
        """Where the shard's writes and messages go first: of a leader tier, who leads the shard now. Raises as
        `hosts`."""
        return self.hosts(shard)[0]

    def shards_of(self, server: str) -> tuple[int, ...]:
        """The shards that the server serves, ascending: as home or clone, or as their leader now. None for a server of
        another tier."""
        serving = {id(hosts) for hosts in self._different if any(host.name == server for host in hosts)}
        return tuple(shard for shard, hosts in enumerate(self._hosts) if id(hosts) in serving)


class Routes:
    """All look-ups that a client or a server makes in one topology document (which has been checked)."""

    __slots__ = ("_databases", "_former", "_places", "_regions", "_servers", "_tiers", "shards", "topology", "version")

    def __init__(self, topology: Topology, former: Routes | None = None) -> None:
        """``former``: the routes in use until now, of which tiers that did not change are kept."""
        self.topology: Final = topology
        self.version: Final = topology.version
        self.shards: Final = topology.shards
        self._regions: Final[dict[str, Region]] = {region.name: region for region in topology.regions}
        self._servers: Final[dict[str, CacheServer]] = {}
        self._places: Final[dict[str, Place]] = {}
        for region in topology.regions:
            for tier, role in _tiers(region):
                for server in tier.servers:
                    self._servers[server.name] = server
                    self._places[server.name] = Place(region.name, tier.name, role)
        self._tiers: Final[dict[tuple[str, str], TierRoutes]] = {}
        self._former: Final = dict(former._tiers) if former is not None else {}
        databases: list[Database | None] = [None] * topology.shards
        for database in topology.databases:
            for first, last in database.shards:
                databases[first : last + 1] = [database] * (last + 1 - first)
        self._databases: Final = databases

    def tier(self, region: str, tier_name: str) -> TierRoutes:
        """A follower tier, or the leader tier by its name. Raises `TopologyError` when there is none."""
        key = (region, tier_name)
        found = self._tiers.get(key)
        if found is None:
            for tier, role in _tiers(self.region(region)):
                if tier.name == tier_name:
                    found = TierRoutes(region, tier, role, self.shards, self._former.pop(key, None))
                    self._tiers[key] = found
                    return found
            raise TopologyError(f"region {region!r} has no tier {tier_name!r} in topology version {self.version}")
        return found

    def leaders(self, region: str) -> TierRoutes:
        """The leader tier of a region. Raises `TopologyError` when there is no such region."""
        return self.tier(region, self.region(region).leaders.name)

    def follower_tiers(self, region: str) -> tuple[TierRoutes, ...]:
        """The follower tiers of a region, nearest first. Raises as `leaders`."""
        return tuple(self.tier(region, tier.name) for tier in self.region(region).followers)

    def region(self, name: str) -> Region:
        """A region by name. Raises `TopologyError` when there is none."""
        found = self._regions.get(name)
        if found is None:
            raise TopologyError(f"there is no region {name!r} in topology version {self.version}")
        return found

    def server(self, name: str) -> CacheServer:
        """A cache server by name. Raises `TopologyError` when there is none."""
        found = self._servers.get(name)
        if found is None:
            raise TopologyError(f"there is no cache server {name!r} in topology version {self.version}")
        return found

    def server_names(self) -> set[str]:
        """The cache servers of all regions, for whoever keeps something for each."""
        return set(self._servers)

    def locate(self, server_name: str) -> Place:
        """Region, tier and role of a cache server. Raises as `server`."""
        self.server(server_name)
        return self._places[server_name]

    def shards_of(self, server_name: str) -> Sequence[int]:
        """The shards that a cache server serves in its tier now, ascending. Raises as `server`."""
        place = self.locate(server_name)
        return self.tier(place.region, place.tier).shards_of(server_name)

    def database_of(self, shard: int) -> Database:
        """The database that holds the shard. Raises `InvalidArgument` for a shard that does not exist."""
        found = self._databases[shard] if 0 <= shard < self.shards else None
        if found is None:
            raise InvalidArgument(f"no database holds shard {shard}; shards are 0 to {self.shards - 1}")
        return found

    def database_server(self, shard: int, region: str) -> DatabaseServer:
        """The server of the shard's database in a region. Raises `InvalidArgument`, or `TopologyError`."""
        database = self.database_of(shard)
        found = database.servers.get(region)
        if found is None:
            raise TopologyError(f"database {database.name!r} has no server in region {region!r}")
        return found

    def binlog_server(self, database: str, region: str) -> DatabaseServer:
        """Whose binlog tells a region of what was committed: its own server's, and while that is marked down the
        master's, unless that is down, too. Raises `TopologyError`."""
        found = next((each for each in self.topology.databases if each.name == database), None)
        own = found.servers.get(region) if found is not None else None
        if found is None or own is None:
            raise TopologyError(f"database {database!r} has no server in region {region!r}")
        master = found.servers[found.master_region]
        return master if own.down and not master.down else own

    def master_region(self, shard: int) -> str:
        """The region whose server of the shard's database is writable. Raises `InvalidArgument`."""
        return self.database_of(shard).master_region


def _tiers(region: Region) -> list[tuple[Tier, Role]]:
    return [(region.leaders, "leader"), *((tier, "follower") for tier in region.followers)]
