"""The cluster that a scenario asks: one of its own, or one that runs already and is somebody else's.

Of a running one there is its topology document alone. Its servers' counters are read at their admin ports; CPU time of
its processes, which may be on other machines, is not known, nor are its databases' passwords.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from loadtest.scenario import Progress
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database import DatabaseInstance
from tao.devcluster.layout import ClusterSettings, Role
from tao.model.errors import OperatorError
from tao.model.topology import Topology
from tao.topology.document import parse_topology

OWN_TIER = "tier-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to ask. Admin addresses by the name of a server."""

    topology_file: str
    region: str
    """Which clients say that they are in: the topology's first."""
    tier: str
    """Whose followers are asked."""
    shards: int
    tiers: tuple[str, ...]
    """All of the region, the asked one first."""
    followers: dict[str, str]
    """Of the asked tier."""
    all_followers: dict[str, str]
    """Of the region."""
    leaders: dict[str, str]
    pids: dict[Role, list[int]] = field(default_factory=dict)
    """By role; without those that nobody knows."""
    cluster: DevCluster | None = None
    """One's own; nobody here can restart the servers of another, or ask its databases."""

    @property
    def database(self) -> DatabaseInstance | None:
        """The first of a cluster of one's own."""
        if self.cluster is None:
            return None
        return self.cluster.database(
            next(name for name, role in self.cluster.processes.items() if role is Role.DATABASE)
        )

    @property
    def versions(self) -> dict[str, str]:
        """Of the database, where it is known."""
        return {} if self.database is None else {self.database.binary.flavour: self.database.binary.version_text}


def running_topology(topology_file: Path) -> Topology:
    """Of a cluster that runs. Raises `OperatorError` for a file that cannot be read, `TopologyError` for one that is no
    topology."""
    try:
        document = topology_file.read_bytes()
    except OSError as error:
        raise OperatorError(f"{topology_file}: cannot be read: {error.strerror}") from error
    return parse_topology(document, str(topology_file))


def running_target(topology_file: Path, tier: str = "") -> Target:
    """A cluster that runs. ``tier``: of its first region, or, when empty, that region's first. Raises `OperatorError`
    when the file is no topology or has no such tier, and `TopologyError` for one that cannot be."""
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
    """A cluster of one region that this process has started."""
    target = running_target(cluster.topology_path, OWN_TIER)
    found = {process.name: process.pid for process in (await cluster.status()).processes}
    pids: dict[Role, list[int]] = {}
    for name, role in cluster.processes.items():
        if role is not Role.FOLLOWER or name in target.followers:
            pids.setdefault(role, []).append(found[name])
    return replace(target, pids=pids, cluster=cluster)


@asynccontextmanager
async def target_for(topology_file: Path | None, own: ClusterSettings, progress: Progress) -> AsyncIterator[Target]:
    """The running cluster of ``topology_file``, or, without one, a cluster that lasts as long as this context. Raises
    `OperatorError`, and `TopologyError` for a document that cannot be."""
    if topology_file is not None:
        yield running_target(topology_file)
        return
    async with DevCluster(own, progress.step) as cluster:
        yield await target_of(cluster)
