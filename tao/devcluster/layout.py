"""What a development cluster consists of: names, shard ranges, topology, and the settings file of each server.

Pure: numbers and ports in, values out, so that what is started can be read and tested without starting it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

from tao.devcluster.ports import LOOPBACK
from tao.devcluster.server_options import Durability
from tao.model.errors import SettingsError
from tao.model.ids import MAX_SHARDS
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology

REGION = "local"
_MAX_PROCESSES = 64
_MAX_PER_TIER = 26


class Role(StrEnum):
    """What a process of the cluster is."""

    DATABASE = "database"
    LEADER = "leader"
    FOLLOWER = "follower"


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How many of everything. ``shards`` and ``databases`` are fixed once a folder has data."""

    tiers: int = 2
    """Follower tiers: two, so that a client has a backup tier."""
    followers: int = 2
    """Followers of each tier: two, so that the ring has something to decide."""
    leaders: int = 2
    """Leaders of the one leader tier: two, so that shards move when one is lost."""
    databases: int = 1
    """Database servers; each is some 90 MB resident."""
    shards: int = 16
    """Logical databases, spread evenly over the servers; more cost start time, 16 show every cross-shard path."""

    def check(self) -> Shape:
        """Return it, or raise `SettingsError` naming what is out of bounds."""
        for name in ("tiers", "followers", "leaders", "databases", "shards"):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name} {getattr(self, name)}: at least 1 is needed")
        if self.followers > _MAX_PER_TIER:
            raise SettingsError(f"--followers {self.followers}: a tier here has at most {_MAX_PER_TIER}")
        if self.shards > MAX_SHARDS:
            raise SettingsError(f"--shards {self.shards}: ids have room for {MAX_SHARDS}")
        if self.databases > self.shards:
            raise SettingsError(f"--databases {self.databases}: more than the {self.shards} shards to put on them")
        processes = self.tiers * self.followers + self.leaders + self.databases
        if processes > _MAX_PROCESSES:
            raise SettingsError(f"{processes} processes are too many for one machine: {_MAX_PROCESSES} is the bound")
        return self

    @property
    def database_names(self) -> list[str]:
        """``db-1`` …"""
        return [f"db-{number}" for number in range(1, self.databases + 1)]

    @property
    def leader_names(self) -> list[str]:
        """``leader-1`` …"""
        return [f"leader-{number}" for number in range(1, self.leaders + 1)]

    @property
    def tier_names(self) -> list[str]:
        """``tier-1`` …, nearest first."""
        return [f"tier-{number}" for number in range(1, self.tiers + 1)]

    def follower_names(self, tier: str) -> list[str]:
        """``follower-1a``, ``follower-1b`` … of ``tier-1``."""
        number = tier.removeprefix("tier-")
        return [f"follower-{number}{chr(ord('a') + index)}" for index in range(self.followers)]

    @property
    def server_names(self) -> dict[str, Role]:
        """Every process by name, in the order in which they start."""
        followers = [name for tier in self.tier_names for name in self.follower_names(tier)]
        return {
            **dict.fromkeys(self.database_names, Role.DATABASE),
            **dict.fromkeys(self.leader_names, Role.LEADER),
            **dict.fromkeys(followers, Role.FOLLOWER),
        }

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
    cache_mb: int = 256
    """Memory of each leader's and follower's cache; a bound, not a reservation."""
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


def build_topology(
    shape: Shape, version: int, ports: Mapping[str, CachePorts], database_ports: Mapping[str, int]
) -> Topology:
    """The topology document of a cluster in one region, on loopback."""

    def server(name: str) -> CacheServer:
        taken = ports[name]
        return CacheServer(
            name=name,
            grpc=f"{LOOPBACK}:{taken.grpc}",
            frames=f"{LOOPBACK}:{taken.frames}",
            admin=f"{LOOPBACK}:{taken.admin}",
        )

    return Topology(
        version=version,
        shards=shape.shards,
        regions=(
            Region(
                name=REGION,
                leaders=Tier(name="leaders", servers=tuple(map(server, shape.leader_names))),
                followers=tuple(
                    Tier(name=tier, servers=tuple(map(server, shape.follower_names(tier)))) for tier in shape.tier_names
                ),
            ),
        ),
        databases=tuple(
            Database(
                name=name,
                master_region=REGION,
                servers={REGION: DatabaseServer(name=name, host=LOOPBACK, port=database_ports[name])},
                shards=(shards,),
            )
            for name, shards in shape.shard_ranges.items()
        ),
    )
