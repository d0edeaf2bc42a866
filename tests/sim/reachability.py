"""Decide which reads a server could answer now: the needs of a read against what is up, cut and slow.

A hit needs a follower. A miss needs a way from there to a database that has the known version: by the region's leader,
by another region's leader, or, for followers with a database account, directly to the region's own database. These are
the only ways that docs/explanation/failures.md gives the product: a read that none of them leads to no server could
have answered.

A server serves the shards that the topology in its use gives it, and asks the leaders that are named there. While etcd
is cut off from some servers, a change reaches only the others: a leader has given up a shard, and its successor has not
heard of it, or a follower asks the former leader.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from tao.model.ids import SHARD_SHIFT
from tao.model.topology import CacheServer, Topology
from tao.routing.routes import Routes
from tests.sim.database import SimDatabase
from tests.sim.loop import Process
from tests.sim.network import Network
from tests.sim.plans import Shape
from tests.sim.roles import DIRECT_READS, SDK

_IN_TIME_SECONDS: Final = DIRECT_READS.leader_seconds
"""Longest worst case of a way from a follower to a database and back: a follower waits this long for one way before it
tries the next."""
_CLIENT_HOP_SECONDS: Final = SDK.timeout_seconds * SDK.first_attempt_share / 2
"""The same between a client and a follower: half of what a client gives one, so that as much is left for the follower's
own ways."""


class Situation(Protocol):
    """The part of the world that decides what can be reached."""

    @property
    def shape(self) -> Shape: ...

    @property
    def topology(self) -> Topology: ...

    @property
    def network(self) -> Network: ...

    @property
    def databases(self) -> dict[str, SimDatabase]: ...

    def outdated_routes(self, process: Process) -> Routes | None:
        """Return the routes in use at a cache server that cannot read the newest topology; None for one that can."""


class Reachability:
    """The ways through one world, as it is at the moment of each call."""

    def __init__(self, situation: Situation) -> None:
        self._situation: Final = situation
        self._routes = Routes(situation.topology)

    @property
    def goes_past_leaders(self) -> bool:
        """Return whether followers have accounts at the databases."""
        return self._situation.shape.reads_databases

    def nobody_serves(self, client: Process, key: int, atype: int) -> str:
        """Return why no server could answer the client's miss of this key, or nothing when one could.

        ``atype`` is 0 for the object.
        """
        routes, shard = self._current(), key >> SHARD_SHIFT
        hosts = [host for tier in routes.follower_tiers(client.region) for host in tier.hosts(shard)]
        reached = [
            follower
            for host in hosts
            if (follower := self._server(client, host, _CLIENT_HOP_SECONDS)) and self._hosts(follower, shard)
        ]
        if not reached:
            return "no follower that has the shard is within the client's reach"
        ways = [database for follower in reached for database in self._ways(follower, routes, shard)]
        if not ways:
            return "no follower within reach has a way to a database of the shard"
        master = self._situation.databases[routes.database_server(shard, routes.master_region(shard)).name]
        newest = master.truth.version_of(key, atype)
        if master not in ways and all(database.rows.version_of(key, atype) < newest for database in ways):
            return "no database within reach has what its master had committed"
        return ""

    def everywhere(self, key: int, atype: int) -> int:
        """Return the version that every database server has at least."""
        routes = self._current()
        servers = routes.database_of(key >> SHARD_SHIFT).servers.values()
        return min(self._situation.databases[each.name].rows.version_of(key, atype) for each in servers)

    def _current(self) -> Routes:
        if self._routes.version != self._situation.topology.version:
            self._routes = Routes(self._situation.topology, self._routes)
        return self._routes

    def _ways(self, follower: Process, routes: Routes, shard: int) -> Iterator[SimDatabase]:
        """Yield the databases that a miss of the follower can reach."""
        region = follower.region
        own = self._situation.databases[routes.database_server(shard, region).name]
        master_region = routes.master_region(shard)
        regions = [each for each in routes.database_of(shard).servers if each != region]
        leader = self._leader(follower, region, shard, _IN_TIME_SECONDS)
        if leader is not None:
            left = _IN_TIME_SECONDS - self._seconds(follower, leader)
            if self._reads(leader, own, left):
                yield own
            if master_region != region:
                yield from self._by_leader_of(master_region, leader, routes, shard, left)
        if self.goes_past_leaders:
            if self._reads(follower, own, _IN_TIME_SECONDS):
                yield own
            for other in regions[:1]:
                yield from self._by_leader_of(other, follower, routes, shard, _IN_TIME_SECONDS)

    def _by_leader_of(
        self, region: str, asker: Process, routes: Routes, shard: int, seconds: float
    ) -> Iterator[SimDatabase]:
        leader = self._leader(asker, region, shard, seconds)
        database = self._situation.databases[routes.database_server(shard, region).name]
        if leader is not None and self._reads(leader, database, seconds - self._seconds(asker, leader)):
            yield database

    def _routes_of(self, process: Process) -> Routes:
        return self._situation.outdated_routes(process) or self._current()

    def _hosts(self, follower: Process, shard: int) -> bool:
        """Return whether the follower knows that it has the shard."""
        routes = self._routes_of(follower)
        if shard >= routes.shards:
            return False
        tiers = routes.follower_tiers(follower.region)
        return any(host.name == follower.name for tier in tiers for host in tier.hosts(shard))

    def _leader(self, asker: Process, region: str, shard: int, seconds: float) -> Process | None:
        """Return the leader that ``asker`` asks for the shard, if it answers within ``seconds`` and knows that it leads
        the shard."""
        leader = self._server(asker, self._routes_of(asker).leaders(region).home(shard), seconds)
        if leader is None:
            return None
        routes = self._routes_of(leader)
        leads = shard < routes.shards and routes.leaders(region).home(shard).name == leader.name
        return leader if leads else None

    def _server(self, here: Process, server: CacheServer, seconds: float) -> Process | None:
        """Return the server's process if it answers within ``seconds``."""
        there = self._situation.network.listener_at(server.frames)
        if there is None or there.state != "runs" or self._situation.network.is_cut(here, there):
            return None
        return there if self._seconds(here, there) <= seconds else None

    def _reads(self, here: Process, database: SimDatabase, seconds: float) -> bool:
        if database.down or self._situation.network.is_cut(here, database.process):
            return False
        return self._seconds(here, database.process) + database.answers_after[1] <= seconds

    def _seconds(self, here: Process, there: Process) -> float:
        """Return the most seconds that slow places add to a request and its answer."""
        return 2 * self._situation.network.slowness(here, there)
