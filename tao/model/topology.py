"""The topology document as values: which servers, tiers, regions, databases and mappings exist.

Clients and servers hold the same document, at some version, and derive the same routes from it (`tao.routing`). It
changes by compare-and-set on ``version``; `tao.topology` stores and watches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

import msgspec

from tao.model.errors import TopologyError

Role = Literal["leader", "follower"]


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of a cache server; written as in `CacheServer`."""

    grpc: str
    frames: str = ""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """That a cache server has added itself to its tier, so that it may be removed again without an operator.

    ``share``: the weight that it has on the ring once it has joined; its present weight comes nearer in steps.
    ``leaving``: it goes down to 0 instead, and out of the document. ``gone_unix_ms``: since when a watcher has found it
    gone, in milliseconds of Unix time; 0 while it is not."""

    share: float = 1.0
    leaving: bool = False
    gone_unix_ms: int = 0


class CacheServer(msgspec.Struct, frozen=True, kw_only=True):
    """A follower or leader. Addresses are ``host:port`` (or ``unix:/path`` for ``frames``); an empty ``frames`` means
    that peers use gRPC. ``reached_from`` maps a region to the addresses to use from there, where they differ (a
    gateway, a tunnel). ``registration`` is unset, and left out of the text, for a server that an operator has added."""

    name: str
    grpc: str
    frames: str = ""
    admin: str = ""
    weight: float = 1.0
    down: bool = False
    reached_from: dict[str, ServerAddress] = {}
    registration: Registration | msgspec.UnsetType = msgspec.UNSET

    def __hash__(self) -> int:
        return hash(self.name)  # the generated one would hash `reached_from`, which is a dictionary

    @property
    def takes_shards(self) -> bool:
        """Whether the ring gives it shards, so that it can stand in for another server of its tier."""
        return self.weight > 0 and not self.down

    def seen_from(self, region: str) -> CacheServer:
        """Return this server with the addresses to use from ``region``; itself where those are the usual ones."""
        there = self.reached_from.get(region)
        return self if there is None else msgspec.structs.replace(self, grpc=there.grpc, frames=there.frames)


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """Cache servers that together answer any request.

    ``moved`` holds explicit mappings ``shard → server names``, which win over the ring: the first is the home; further
    servers are clones in a follower tier, and stand-ins in a leader tier. ``told``: shard → servers that receive its
    changes and do not serve it: clones about to start, or just stopped. ``cloned_by_watcher``: shards whose clones a
    watcher has made and will remove; it leaves clones made by hand.
    """

    name: str
    servers: tuple[CacheServer, ...]
    moved: dict[int, tuple[str, ...]] = {}
    told: dict[int, tuple[str, ...]] = {}
    cloned_by_watcher: tuple[int, ...] = ()


class TailerProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The reader of the binlog of its region's server of ``database``. No request goes to it: it is listed so that
    operators find its ``admin`` port (``host:port``), and watchers its ``frames`` port: without one they do not probe
    it. ``down`` shows operators that a watcher has found it dead; no server acts on it."""

    name: str
    database: str
    admin: str = ""
    frames: str = ""
    down: bool = False


class WatcherProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A watcher of a region. It is listed so that an operator finds its ``admin`` port (``host:port``), and the
    watchers of other regions its ``frames`` port: without one they take it for silent."""

    name: str
    admin: str = ""
    frames: str = ""


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """One leader tier, the follower tiers that clients of the region may use, nearest first, the tailers and the
    watchers."""

    name: str
    leaders: Tier
    followers: tuple[Tier, ...]
    tailers: tuple[TailerProcess, ...] = ()
    watchers: tuple[WatcherProcess, ...] = ()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The leader tier, then the follower tiers."""
        return (self.leaders, *self.followers)


class DatabaseAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The TCP address of a database server."""

    host: str
    port: int


class DatabaseServer(msgspec.Struct, frozen=True, kw_only=True):
    """A MySQL or MariaDB server of one region. ``socket`` wins over ``host:port`` when both are given. ``reached_from``
    maps a region to the address to use from there, where it differs."""

    name: str
    host: str = "127.0.0.1"
    port: int = 3306
    socket: str = ""
    down: bool = False
    reached_from: dict[str, DatabaseAddress] = {}

    def __hash__(self) -> int:
        return hash(self.name)  # the generated one would hash `reached_from`, which is a dictionary

    def seen_from(self, region: str) -> DatabaseServer:
        """Return this server with the address to use from ``region``; itself where that is the usual one."""
        there = self.reached_from.get(region)
        return self if there is None else msgspec.structs.replace(self, host=there.host, port=there.port, socket="")


class Database(msgspec.Struct, frozen=True, kw_only=True):
    """A replication set: one server per region. ``shards`` are inclusive ranges ``(first, last)``. ``version_epoch`` is
    the epoch of its shards, one higher after each promotion; ``semi_sync``: a commit waits until a replica has received
    it. ``standbys``: region → a second server there, which nobody reads until a promotion exchanges the two."""

    name: str
    master_region: str
    servers: dict[str, DatabaseServer]
    shards: tuple[tuple[int, int], ...]
    version_epoch: int = 1
    semi_sync: bool = False
    standbys: dict[str, DatabaseServer] = {}

    @property
    def places(self) -> dict[str, DatabaseServer]:
        """All servers by their places: the region, or ``REGION/standby``."""
        return {**self.servers, **{f"{region}{STANDBY}": server for region, server in self.standbys.items()}}

    @property
    def keeps_lease(self) -> bool:
        """Whether the master takes writes only under a lease: there is another server to promote."""
        return len(self.servers) + len(self.standbys) > 1


STANDBY: Final = "/standby"
"""How the place of a standby ends. No region has a name like that."""


def region_of_place(place: str) -> str:
    """Return the region of a database server's place (`Database.places`)."""
    return place.removesuffix(STANDBY)


class RecordedChange(msgspec.Struct, frozen=True, kw_only=True):
    """What one change of the document affected; ``version`` is the version that it made.

    ``leaders``: region → the shards that other leaders of that region lead since, or that another database holds, as
    text such as ``3,17-20``. ``databases``: those with another master, version epoch, server or range of shards.
    """

    version: int
    leaders: dict[str, str] = {}
    databases: tuple[str, ...] = ()


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """The whole document. ``shards``: the number of logical shards (fixed for the life of the data).
    ``marked_by_watcher``: servers whose ``down`` mark a watcher has set and will remove; it leaves marks set by hand.
    ``changes``: the last changes of the document, oldest first (`tao.routing.topology_changes`); None when they are not
    recorded.
    """

    version: int
    shards: int
    regions: tuple[Region, ...]
    databases: tuple[Database, ...]
    marked_by_watcher: tuple[str, ...] = ()
    changes: tuple[RecordedChange, ...] | None = None

    @property
    def tiers(self) -> list[PlacedTier]:
        """The tiers of all regions, each region's leaders first."""
        return [PlacedTier(region, tier) for region in self.regions for tier in region.tiers]

    @property
    def cache_servers(self) -> list[PlacedServer]:
        """The cache servers of all tiers, each region's leaders first."""
        return [PlacedServer(placed, server) for placed in self.tiers for server in placed.tier.servers]

    def region(self, name: str) -> Region:
        """Return a region. Raises `TopologyError` that names those there are."""
        for region in self.regions:
            if region.name == name:
                return region
        known = ", ".join(region.name for region in self.regions)
        raise TopologyError(f"there is no region {name!r} in topology version {self.version}: its regions are {known}")

    def place_of(self, name: str) -> PlacedTier:
        """Return the tier of a cache server. Raises `TopologyError` when there is no such server."""
        for place, server in self.cache_servers:
            if server.name == name:
                return place
        raise TopologyError(f"there is no cache server {name!r} in the topology: `tao status` lists them")

    @property
    def server_places(self) -> dict[str, ServerPlace]:
        """The role and region of each cache server, tailer and watcher, by name."""
        found = {server.name: ServerPlace(place.role, place.region.name) for place, server in self.cache_servers}
        for region in self.regions:
            found |= {each.name: ServerPlace("tailer", region.name) for each in region.tailers}
            found |= {each.name: ServerPlace("watcher", region.name) for each in region.watchers}
        return found

    @property
    def database_servers(self) -> list[PlacedDatabaseServer]:
        """The servers of all databases."""
        return [
            PlacedDatabaseServer(database, region_of_place(place), server)
            for database in self.databases
            for place, server in database.places.items()
        ]


class PlacedTier(NamedTuple):
    """A tier and its region."""

    region: Region
    tier: Tier

    @property
    def path(self) -> str:
        """``region/tier``."""
        return f"{self.region.name}/{self.tier.name}"

    @property
    def role(self) -> Role:
        """What the servers of the tier are."""
        return "leader" if self.tier is self.region.leaders else "follower"


class ServerPlace(NamedTuple):
    """What the topology says of a process that others connect to. Its certificate must say the same."""

    role: str
    region: str


def lists(places: Mapping[str, ServerPlace], role: str, name: str, region: str) -> bool:
    """Return whether there is a process of that role, of that name and in that region if they are named."""
    found = places.values() if not name else (places[name],) if name in places else ()
    return any(place.role == role and region in ("", place.region) for place in found)


class PlacedServer(NamedTuple):
    """A cache server and its place."""

    place: PlacedTier
    server: CacheServer


class PlacedDatabaseServer(NamedTuple):
    """A database server, its database and its region."""

    database: Database
    region: str
    server: DatabaseServer

    @property
    def is_master(self) -> bool:
        """True for the master of the database."""
        return self.server.name == self.database.servers[self.database.master_region].name


def ranges_text(shards: Iterable[tuple[int, int]], separator: str = ", ") -> str:
    """Return inclusive ranges of shards as text: ``3, 17-19``."""
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in shards)
