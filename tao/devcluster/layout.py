"""The members of a development cluster: how many of each role, in which region, with which names and ports.

Everything here is computed from numbers, so that it can be tested without starting a process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from shlex import quote
from string import ascii_lowercase
from typing import Final

import msgspec

from tao.devcluster.database_program import Durability
from tao.model.errors import SettingsError
from tao.model.ids import MAX_SHARDS

ONLY_REGION = "local"
REGIONS = ("east", "west", "north", "south")
LINE = "line"
DEFAULT_RTT_MS = 58.1
"""The round trip that the paper measured between its two regions (TAO, USENIX ATC 2013, §6.4)."""
_MAX_PROCESSES = 64
_MAX_PER_TIER = len(ascii_lowercase)


class Role(StrEnum):
    """The role of a process of the cluster, in starting order."""

    ETCD = "etcd"
    DATABASE = "database"
    LINE = "line"
    LEADER = "leader"
    TAILER = "tailer"
    FOLLOWER = "follower"
    WATCHER = "watcher"
    WORKER = "worker"


_STARTING_ORDER = tuple(Role)


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the cluster.

    ``region`` is empty for the delay line. ``database``: the database of a database server, or whose binlog a tailer
    reads. ``tier``: the tier of a follower. ``registers``: it adds itself to the topology."""

    name: str
    role: Role
    region: str
    database: str = ""
    tier: str = ""
    registers: bool = False


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The number of regions, servers and shards. All but the number of cache servers is fixed once there are data.

    In a cluster of one region servers have plain names (``leader-1``). With several regions each name begins with its
    region (``east-leader-1``), and a delay line runs between the regions. Each region has a tailer of every database.
    """

    regions: int = 1
    """Each region has a server of every database, and leaders, tiers and tailers of its own."""
    mixed_mastership: bool = False
    """The masters of the databases are spread over the regions; otherwise the first region has all masters."""
    tiers: int = 2
    """The follower tiers of each region. Two, so that a client has a backup tier."""
    followers: int = 2
    """The followers of each tier. Two, so that a tier's shards are divided."""
    added_followers: int = 0
    """Further followers of the first tier of the first region, which register themselves (`tao dev add-follower`)."""
    leaders: int = 2
    """The leaders of each region. Two, so that shards move when one is lost."""
    watchers: int = 0
    """The watchers of each region: of all watchers one is active, the others are ready to replace it. With 0 no server
    is marked down or promoted automatically."""
    workers: int = 0
    """The workers of each region, which do the background jobs of the shards that have their master there."""
    etcd: bool = False
    """Whether an etcd in the first region holds the topology, the schema, the access document and the locks; otherwise
    they are in files."""
    databases: int = 1
    """The number of databases. Each has a server in every region, of some 90 MB resident memory."""
    standby: bool = False
    """Whether each database has a second server in its master's region, which a watcher promotes first."""
    shards: int = 16
    """The number of shards, spread evenly over the databases. More take longer to start; 16 exercise every path between
    shards."""

    def check(self) -> Shape:
        """Return the shape. Raises `SettingsError` that names the option which is out of bounds."""
        for name in ("regions", "tiers", "followers", "leaders", "databases", "shards"):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name} {getattr(self, name)}: at least 1 is needed")
        if self.followers + self.added_followers > _MAX_PER_TIER:
            added = f" and {self.added_followers} added ones" if self.added_followers else ""
            raise SettingsError(f"--followers {self.followers}{added}: a tier here has at most {_MAX_PER_TIER}")
        if self.shards > MAX_SHARDS:
            raise SettingsError(f"--shards {self.shards}: ids have room for {MAX_SHARDS}")
        if self.databases > self.shards:
            raise SettingsError(f"--databases {self.databases}: more than the {self.shards} shards to put on them")
        if self.regions > len(REGIONS):
            raise SettingsError(f"--regions {self.regions}: there are names for {len(REGIONS)}: {', '.join(REGIONS)}")
        if self.mixed_mastership and not 2 <= self.regions <= self.databases:
            raise SettingsError(
                f"--mixed-mastership: {self.databases} databases cannot have masters in {self.regions} regions; use at "
                "least two regions, and at least as many --databases"
            )
        if len(self.members) > _MAX_PROCESSES:
            raise SettingsError(
                f"{len(self.members)} processes are too many for one machine: {_MAX_PROCESSES} is the bound"
            )
        return self

    @property
    def is_distributed(self) -> bool:
        """True when there is more than one region."""
        return self.regions > 1

    @property
    def replicates(self) -> bool:
        """True when a database has several servers."""
        return self.is_distributed or self.standby

    @property
    def region_names(self) -> list[str]:
        """``local``, or ``east``, ``west`` …"""
        return list(REGIONS[: self.regions]) if self.is_distributed else [ONLY_REGION]

    @property
    def database_names(self) -> list[str]:
        """The names of the databases: ``db-1`` …"""
        return [f"db-{number}" for number in range(1, self.databases + 1)]

    @property
    def tier_names(self) -> list[str]:
        """The names of the tiers, nearest first: ``tier-1`` …; the same in every region."""
        return [f"tier-{number}" for number in range(1, self.tiers + 1)]

    @property
    def master_regions(self) -> dict[str, str]:
        """The master region of each database in a new cluster."""
        regions = self.region_names if self.mixed_mastership else self.region_names[:1]
        return {name: regions[index % len(regions)] for index, name in enumerate(self.database_names)}

    @property
    def members(self) -> list[Member]:
        """Every process in starting order; within a role, region by region."""
        found = [member for region in self.region_names for member in self._members_of(region)]
        if self.etcd:
            found.append(Member(name="etcd", role=Role.ETCD, region=self.region_names[0]))
        if self.is_distributed:
            found.append(Member(name=LINE, role=Role.LINE, region=""))
        return sorted(found, key=lambda member: _STARTING_ORDER.index(member.role))

    def _members_of(self, region: str) -> Iterator[Member]:
        def member(role: Role, name: str, *, registers: bool = False, **of: str) -> Member:
            full_name = f"{region}-{name}" if self.is_distributed else name
            return Member(name=full_name, role=role, region=region, registers=registers, **of)

        for number, database in enumerate(self.database_names, 1):
            yield member(Role.DATABASE, database, database=database)
            if self.standby and region == self.master_regions[database]:
                yield member(Role.DATABASE, f"{database}b", database=database)
            yield member(Role.TAILER, f"tailer-{number}", database=database)
        for number in range(1, self.leaders + 1):
            yield member(Role.LEADER, f"leader-{number}")
        for number, tier in enumerate(self.tier_names, 1):
            added = self.added_followers if (number, region) == (1, self.region_names[0]) else 0
            for index, letter in enumerate(ascii_lowercase[: self.followers + added]):
                yield member(Role.FOLLOWER, f"follower-{number}{letter}", tier=tier, registers=index >= self.followers)
        for number in range(1, self.watchers + 1):
            yield member(Role.WATCHER, f"watcher-{number}")
        for number in range(1, self.workers + 1):
            yield member(Role.WORKER, f"worker-{number}")

    def select(self, role: Role, region: str = "", *, tier: str = "", database: str = "") -> list[Member]:
        """Return the processes of a role in starting order: those of a region, a tier or a database, or all."""
        return [
            member
            for member in self.members
            if member.role is role
            and region in ("", member.region)
            and tier in ("", member.tier)
            and database in ("", member.database)
        ]

    @property
    def server_names(self) -> dict[str, Role]:
        """The role of every process by name, in starting order."""
        return {member.name: member.role for member in self.members}

    def database_server(self, region: str, database: str) -> str:
        """Return the name of the database's first server in a region: ``db-1``, or ``east-db-1``."""
        return self.select(Role.DATABASE, region, database=database)[0].name

    def first_follower(self, region: str = "") -> str:
        """Return the name of the first follower of the first tier, in a region or in the first one."""
        return self.select(Role.FOLLOWER, region)[0].name

    @property
    def shard_ranges(self) -> dict[str, tuple[int, int]]:
        """The first and the last shard of each database; the numbers of shards differ by one at most."""
        bounds = [index * self.shards // self.databases for index in range(self.databases + 1)]
        return {
            name: (first, after - 1)
            for name, first, after in zip(self.database_names, bounds, bounds[1:], strict=False)
        }


Ports = Mapping[str, Mapping[str, int]]
"""The ports on 127.0.0.1 of each process, by its name: one for each of its `PORT_KINDS`; for the delay line one for
each `tao.devcluster.configuration.Crossing.key`."""

PORT_KINDS: Mapping[Role, tuple[str, ...]] = {
    Role.ETCD: ("client", "peer"),
    Role.DATABASE: ("mysql",),
    Role.LEADER: ("grpc", "frames", "admin"),
    Role.FOLLOWER: ("grpc", "frames", "admin"),
    Role.TAILER: ("frames", "admin"),
    Role.WATCHER: ("frames", "admin"),
    Role.WORKER: ("admin",),
}


class StartOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `ClusterSettings`, named as there, that a later command needs to start a process again."""

    buffer_pool_mb: int = 64
    durability: Durability = Durability.FULL
    semi_sync: bool = False
    cache_mb: float = 256
    log_level: str = "info"
    tls: bool = False


DEFAULT_STATE_DIR: Final = Path(".tao-dev")


def dev_command(name: str, state_dir: Path) -> str:
    """Return `tao dev NAME` as hints show it, with the folder unless it is the default one."""
    option = "" if state_dir.absolute() == DEFAULT_STATE_DIR.absolute() else f" --state-dir {quote(str(state_dir))}"
    return f"`tao dev {name}{option}`"


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The settings of one development cluster."""

    state_dir: Path = DEFAULT_STATE_DIR
    """The folder of data, logs, settings and records. The first start creates it; `tao dev down` keeps it."""
    shape: Shape | None = None
    """None: the shape that the folder has, or the defaults for a new folder."""
    schema_file: Path | None = None
    """None: the folder's own copy, or the example schema for a new folder."""
    buffer_pool_mb: int = 64
    """The buffer pool of each database server in MiB; benchmarks of writes use 512."""
    durability: Durability = Durability.FULL
    """`Durability.RELAXED` is for tests only: commits are not synced to disk."""
    semi_sync: bool = False
    """Each commit waits until a replica has received it; between two regions that is a round trip."""
    rtt_ms: float | None = None
    """The round trip between regions in milliseconds. None: that of the folder, or `DEFAULT_RTT_MS` for a new one."""
    roles: frozenset[Role] = frozenset(Role)
    """The roles that are started. Tests of replication start only databases and the delay line."""
    cache_mb: float = 256
    """The limit of each leader's and follower's cache in MiB; memory is not reserved."""
    client_port: int = 0
    """The gRPC port of the first follower; 0 keeps its former port, or picks a free one."""
    log_level: str = "info"
    """The log level of all servers but the databases."""
    tls: bool = False
    """Whether servers speak TLS and know every peer by a certificate, which the start makes."""
    start_seconds: float = 60.0
    """The time limit for the start of one process: normally a second or two, but the machine may be busy."""
    detached: bool = False
    """True when the processes may outlive the one that starts them."""
    step_seconds: float = 5.0
    """Time from one step to the next of a follower that registers itself; it takes eight."""
    server_settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Settings that the servers of a role, or one server by its name, get besides those that the cluster needs."""
