"""What a development cluster consists of: how many of everything, in which region, and under which names.

Pure: numbers in, values out, so that what is started can be read and tested without starting it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

from tao.devcluster.server_options import Durability
from tao.model.errors import SettingsError
from tao.model.ids import MAX_SHARDS

ONLY_REGION = "local"
REGIONS = ("east", "west", "north", "south")
LINE = "line"
DEFAULT_RTT_MS = 58.1
"""What the paper measured between its two regions (TAO, USENIX ATC 2013, §6.4)."""
_MAX_PROCESSES = 64
_MAX_PER_TIER = 26


class Role(StrEnum):
    """What a process of the cluster is."""

    DATABASE = "database"
    LINE = "line"
    LEADER = "leader"
    TAILER = "tailer"
    FOLLOWER = "follower"
    WATCHER = "watcher"


STARTING_ORDER = tuple(Role)
STOPPING_ORDER = (Role.WATCHER, Role.FOLLOWER, Role.TAILER, Role.LEADER, Role.DATABASE, Role.LINE)
"""Watchers first, which would take the rest for an outage. The line last: a replica that loses its master while it
stops would complain about it."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One process. ``region`` is empty for the line, which is between them; ``database``: the replication set that a
    database server belongs to, or whose binlog a tailer reads."""

    name: str
    role: Role
    region: str
    database: str = ""
    tier: str = ""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How many of everything. All but the cache servers is fixed once a folder has data.

    A cluster of one region has plain names (``leader-1``); with several, each name begins with its region's
    (``east-leader-1``), and a delay line stands between the regions. Each region has a tailer of every database.
    """

    regions: int = 1
    """Each with a server of every database, leaders, tiers and tailers of its own."""
    mixed_mastership: bool = False
    """The regions take turns at being the master region of a database; otherwise the first is that of all."""
    tiers: int = 2
    """Follower tiers of each region: two, so that a client has a backup tier."""
    followers: int = 2
    """Followers of each tier: two, so that the ring has something to decide."""
    leaders: int = 2
    """Leaders of each region's leader tier: two, so that shards move when one is lost."""
    watchers: int = 0
    """Of each region: one active, the others ready. None: nobody marks servers down, renews leases or promotes."""
    databases: int = 1
    """Databases; each is a server in every region, some 90 MB resident."""
    shards: int = 16
    """Logical databases, spread evenly over the servers; more cost start time, 16 show every cross-shard path."""

    def check(self) -> Shape:
        """Return it, or raise `SettingsError` naming what is out of bounds."""
        for name in ("regions", "tiers", "followers", "leaders", "databases", "shards"):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name} {getattr(self, name)}: at least 1 is needed")
        if self.followers > _MAX_PER_TIER:
            raise SettingsError(f"--followers {self.followers}: a tier here has at most {_MAX_PER_TIER}")
        if self.shards > MAX_SHARDS:
            raise SettingsError(f"--shards {self.shards}: ids have room for {MAX_SHARDS}")
        if self.databases > self.shards:
            raise SettingsError(f"--databases {self.databases}: more than the {self.shards} shards to put on them")
        if self.regions > len(REGIONS):
            raise SettingsError(f"--regions {self.regions}: there are names for {len(REGIONS)}: {', '.join(REGIONS)}")
        if self.watchers and not self.is_distributed:
            raise SettingsError("--watcher: a cluster of one region has nobody to promote; use --regions 2")
        if self.mixed_mastership and not 2 <= self.regions <= self.databases:
            raise SettingsError(
                f"--mixed-mastership: {self.databases} databases cannot have masters in {self.regions} regions; use at "
                "least two regions, and as many --databases"
            )
        if len(self.members) > _MAX_PROCESSES:
            raise SettingsError(
                f"{len(self.members)} processes are too many for one machine: {_MAX_PROCESSES} is the bound"
            )
        return self

    @property
    def is_distributed(self) -> bool:
        """More than one region."""
        return self.regions > 1

    @property
    def region_names(self) -> list[str]:
        """``local``, or ``east``, ``west`` …"""
        return list(REGIONS[: self.regions]) if self.is_distributed else [ONLY_REGION]

    @property
    def database_names(self) -> list[str]:
        """The replication sets: ``db-1`` …"""
        return [f"db-{number}" for number in range(1, self.databases + 1)]

    def database_server(self, region: str, database: str) -> str:
        """The set's server in a region: ``db-1``, or ``east-db-1``."""
        return self._named(region, database)

    @property
    def master_regions(self) -> dict[str, str]:
        """Database → the region whose server is the master, as a new cluster begins."""
        regions = self.region_names if self.mixed_mastership else self.region_names[:1]
        return {name: regions[index % len(regions)] for index, name in enumerate(self.database_names)}

    @property
    def leader_names(self) -> list[str]:
        """``leader-1`` … of every region."""
        return [name for region in self.region_names for name in self.leaders_in(region)]

    def leaders_in(self, region: str) -> list[str]:
        """``leader-1`` …, or ``east-leader-1`` …"""
        return [self._named(region, f"leader-{number}") for number in range(1, self.leaders + 1)]

    @property
    def tier_names(self) -> list[str]:
        """``tier-1`` …, nearest first; the same in every region."""
        return [f"tier-{number}" for number in range(1, self.tiers + 1)]

    def follower_names(self, tier: str) -> list[str]:
        """The followers of that tier in every region."""
        return [name for region in self.region_names for name in self.followers_in(region, tier)]

    def followers_in(self, region: str, tier: str) -> list[str]:
        """``follower-1a``, ``follower-1b`` … of ``tier-1``, or ``east-follower-1a`` …"""
        number = tier.removeprefix("tier-")
        return [self._named(region, f"follower-{number}{chr(ord('a') + index)}") for index in range(self.followers)]

    def tailer(self, region: str, database: str) -> str:
        """``tailer-1`` or ``east-tailer-1``: the one of ``db-1``."""
        return self._named(region, f"tailer-{database.removeprefix('db-')}")

    @property
    def members(self) -> list[Member]:
        """Every process, in the order in which they start; within a role, region by region."""
        regions, found = self.region_names, list[Member]()
        sets = [(region, database) for region in regions for database in self.database_names]
        for region, database in sets:
            name = self.database_server(region, database)
            found.append(Member(name=name, role=Role.DATABASE, region=region, database=database))
        if self.is_distributed:
            found.append(Member(name=LINE, role=Role.LINE, region=""))
        for region in regions:
            found += [Member(name=name, role=Role.LEADER, region=region) for name in self.leaders_in(region)]
        for region, database in sets:
            name = self.tailer(region, database)
            found.append(Member(name=name, role=Role.TAILER, region=region, database=database))
        for region, tier in [(region, tier) for region in regions for tier in self.tier_names]:
            for name in self.followers_in(region, tier):
                found.append(Member(name=name, role=Role.FOLLOWER, region=region, tier=tier))
        for region in regions:
            for number in range(1, self.watchers + 1):
                name = self._named(region, f"watcher-{number}")
                found.append(Member(name=name, role=Role.WATCHER, region=region))
        return found

    @property
    def server_names(self) -> dict[str, Role]:
        """Every process by name, in the order in which they start."""
        return {member.name: member.role for member in self.members}

    def _named(self, region: str, name: str) -> str:
        return f"{region}-{name}" if self.is_distributed else name

    @property
    def shard_ranges(self) -> dict[str, tuple[int, int]]:
        """Database name → its shards, first and last, both included; sizes differ by one at most."""
        bounds = [index * self.shards // self.databases for index in range(self.databases + 1)]
        return {
            name: (first, after - 1)
            for name, first, after in zip(self.database_names, bounds, bounds[1:], strict=False)
        }


class CachePorts(msgspec.Struct, frozen=True):
    """The ports of a leader or follower on 127.0.0.1."""

    grpc: int
    frames: int
    admin: int


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """One development cluster."""

    state_dir: Path = Path(".tao-dev")
    """Where everything lies: data, logs, settings, records. Made on the first start; `down` leaves the data."""
    shape: Shape | None = None
    """None: as the folder has it, or the defaults for a new one."""
    schema_file: Path | None = None
    """None: the folder's own copy, or the example schema for a new one."""
    buffer_pool_mb: int = 64
    """Of each database server; benchmarks of writes want 512."""
    durability: Durability = Durability.FULL
    """Relaxed is for tests only: it does not sync at commit."""
    semi_sync: bool = False
    """Each commit waits for a replica that has received it; between two regions that is a round trip."""
    rtt_ms: float | None = None
    """Round trip between regions. None: as the folder has it, or the paper's for a new one."""
    roles: frozenset[Role] = frozenset(Role)
    """What is started: all, but tests of replication need databases and the line alone."""
    cache_mb: float = 256
    """Memory of each leader's and follower's cache, in MiB or parts of one; a bound, not a reservation."""
    arena_mb: int = 64
    """Of each further arena that the schema names."""
    client_port: int = 0
    """The first follower's gRPC port; 0 keeps the one it had, or picks a free one."""
    log_level: str = "info"
    """Of leaders and followers."""
    start_seconds: float = 60.0
    """Bound on the start of any one process: normally a second or two, but the machine may be busy."""
    stop_seconds: float = 20.0
    """A server drains for some seconds on SIGTERM; after this it is killed."""
    detached: bool = False
    """Whether the processes may outlive the one that starts them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment for leaders and followers."""
