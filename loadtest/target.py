"""The cluster that a scenario asks: one of its own, or one that somebody else runs.

A running cluster is known by its topology document alone. The counters of its servers are read at their admin ports;
the CPU time of its processes, which may be on other machines, is unknown, and so are its databases' passwords.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec

from loadtest.scenario import SCHEMA, BenchSettings, Progress
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database import DatabaseInstance
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.ports import LOOPBACK
from tao.model.errors import OperatorError, unreadable
from tao.model.topology import Topology
from tao.topology.document import parse_topology

OWN_TIER: Final = "tier-1"
FOLLOWER: Final = "follower-1a"
LEADER: Final = "leader-1"


class OneFollower(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster of one follower, leader and database, as a load process needs to know it."""

    topology_file: str
    topology_version: int
    grpc: str
    frames: str
    """The follower's addresses, ``host:port``."""
    follower_pid: int


@asynccontextmanager
async def follower_cluster(settings: BenchSettings, name: str, progress: Progress) -> AsyncIterator[DevCluster]:
    """Run a cluster of one follower with the types of `SCHEMA`. Raises `OperatorError`.

    Its commits are not synced: nothing is written while it is measured, and syncing would only draw out the filling."""
    shape = Shape(tiers=1, followers=1, leaders=1, databases=1, shards=8)
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / name, shape=shape, schema_file=SCHEMA, durability=Durability.RELAXED
    )
    async with DevCluster(cluster_settings, progress.step) as cluster:
        yield cluster


@asynccontextmanager
async def one_follower(settings: BenchSettings, name: str, progress: Progress) -> AsyncIterator[OneFollower]:
    """Run the same cluster, and describe it for a load process."""
    async with follower_cluster(settings, name, progress) as cluster:
        yield OneFollower(
            topology_file=str(cluster.topology_path),
            topology_version=cluster.record.topology_version,
            grpc=cluster.client_address,
            frames=f"{LOOPBACK}:{cluster.record.ports[FOLLOWER]['frames']}",
            follower_pid=(await pids_of(cluster))[FOLLOWER],
        )


async def pids_of(cluster: DevCluster) -> dict[str, int]:
    """Return the process ids of a cluster's servers by name."""
    return {process.name: process.pid for process in (await cluster.status()).processes}


def versions_of(database: DatabaseInstance) -> dict[str, str]:
    """Return the flavour and version of a database server, as a report names them."""
    return {database.binary.flavour: database.binary.version_text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The servers to ask. Admin addresses are by the name of the server."""

    topology_file: str
    region: str
    """The region of the clients: the topology's first."""
    tier: str
    """The tier whose followers are asked."""
    shards: int
    tiers: tuple[str, ...]
    """All tiers of the region, the asked one first."""
    followers: dict[str, str]
    """The followers of the asked tier."""
    all_followers: dict[str, str]
    """The followers of the region."""
    leaders: dict[str, str]
    pids: dict[Role, list[int]] = field(default_factory=dict)
    """Process ids by role, where they are known."""
    cluster: DevCluster | None = None
    """The scenario's own cluster; a running one can be neither restarted here, nor its databases asked."""

    @property
    def database(self) -> DatabaseInstance | None:
        """The first database of the scenario's own cluster."""
        if self.cluster is None:
            return None
        return self.cluster.database(
            next(name for name, role in self.cluster.processes.items() if role is Role.DATABASE)
        )

    @property
    def versions(self) -> dict[str, str]:
        """The version of the database, where it is known."""
        return {} if self.database is None else versions_of(self.database)


def running_topology(topology_file: Path) -> Topology:
    """Read the topology of a running cluster. Raises `OperatorError` when the file cannot be read, and `TopologyError`
    when it is no topology."""
    try:
        document = topology_file.read_bytes()
    except OSError as error:
        raise OperatorError(unreadable(topology_file, error)) from error
    return parse_topology(document, str(topology_file))


def running_target(topology_file: Path, tier: str = "") -> Target:
    """Return the running cluster of a topology file; ``tier`` is a tier of its first region, by default the first.

    Raises `OperatorError` when the file cannot be read or has no such tier, and `TopologyError` when it is no topology.
    """
    topology = running_topology(topology_file)
    region = topology.regions[0]
    asked = next((each for each in region.followers if each.name == (tier or region.followers[0].name)), None)
    if asked is None:
        names = ", ".join(each.name for each in region.followers)
        raise OperatorError(f"region {region.name} of {topology_file} has no tier {tier!r}; it has {names}")
    others = [each for each in region.followers if each is not asked]
    servers = [server for each in (asked, *others, region.leaders) for server in each.servers]
    without_admin = [server.name for server in servers if not server.admin]
    if without_admin:
        raise OperatorError(f"{topology_file} has no admin port of {', '.join(without_admin)}, where counters are read")
    return Target(
        topology_file=str(topology_file.resolve()),
        region=region.name,
        tier=asked.name,
        shards=topology.shards,
        tiers=(asked.name, *(each.name for each in others)),
        followers={server.name: server.admin for server in asked.servers},
        all_followers={server.name: server.admin for each in (asked, *others) for server in each.servers},
        leaders={server.name: server.admin for server in region.leaders.servers},
    )


async def target_of(cluster: DevCluster) -> Target:
    """Return a cluster of one region that this process has started."""
    target = running_target(cluster.topology_path, OWN_TIER)
    found = await pids_of(cluster)
    pids: dict[Role, list[int]] = {}
    for name, role in cluster.processes.items():
        if role is not Role.FOLLOWER or name in target.followers:
            pids.setdefault(role, []).append(found[name])
    return replace(target, pids=pids, cluster=cluster)


@asynccontextmanager
async def target_for(topology_file: Path | None, own: ClusterSettings, progress: Progress) -> AsyncIterator[Target]:
    """Yield the running cluster of ``topology_file``, or without one a cluster that lasts as long as this context.

    Raises `OperatorError`, and `TopologyError` when the document is no topology."""
    if topology_file is not None:
        yield running_target(topology_file)
        return
    async with DevCluster(own, progress.step) as cluster:
        yield await target_of(cluster)
