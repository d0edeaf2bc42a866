"""The router chooses the server for a shard: one of the nearest tier that has the shard, else of the tiers behind it.

Reads spread over the shard's home and its clones; writes go to the home. A server that is down or impaired is avoided
while another has the shard; its link probes it, and it is used again when it is well. The choice follows from the
topology and from the health that links report; this module opens no connections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tao.client.server_queues import ServerLink, ServerQueue
from tao.model.errors import TopologyError, Unavailable, UnknownShard
from tao.model.topology import CacheServer
from tao.routing.routes import Routes, TierRoutes

QueueOf = Callable[[CacheServer, str], ServerQueue]
"""Returns the queue of a server of a tier: the same object for the same server."""


class _Candidates(NamedTuple):
    """The servers that have a shard: ``nearest`` are its home and clones in the nearest tier, home first; ``all`` are
    those of every tier, in order of preference. Neither is empty."""

    nearest: tuple[ServerQueue, ...]
    all: tuple[ServerQueue, ...]


class Router:
    """The servers by shard, under one topology's routes at a time."""

    def __init__(self, region: str, tier: str | None, queue_of: QueueOf) -> None:
        """Route for one region. ``tier`` is the follower tier to prefer, None for the region's first."""
        self._region = region
        self._tier = tier
        self._queue_of = queue_of
        self._tiers: list[TierRoutes] = []
        self._candidates: list[_Candidates | None] = []
        self._reads_routed = 0
        self.version = 0
        self.shards = 0
        self.has_standby = False

    def use(self, routes: Routes) -> None:
        """Route by these from now on. Raises `TopologyError` when they lack the region or the tier."""
        tiers = list(routes.follower_tiers(self._region))
        if self._tier is not None:
            first = [each for each in tiers if each.tier == self._tier]
            if not first:
                known = ", ".join(each.tier for each in tiers)
                raise TopologyError(f"region {self._region!r} has no follower tier {self._tier!r}; it has {known}")
            tiers = first + [each for each in tiers if each.tier != self._tier]
        self._tiers = tiers
        self._candidates = [None] * routes.shards
        self.version = routes.version
        self.shards = routes.shards
        self.has_standby = sum(len(each.servers) for each in tiers) > 1

    def servers(self) -> list[tuple[CacheServer, str]]:
        """Return all followers of the region with their tiers, nearest first."""
        return [(server, each.tier) for each in self._tiers for server in each.servers]

    def reader(self, shard: int) -> ServerQueue:
        """Return the server to read a shard from. Raises `UnknownShard`."""
        candidates = self._candidates[shard] if 0 <= shard < self.shards else None
        if candidates is None:
            candidates = self._candidates_of(shard)
        nearest = candidates.nearest
        if len(nearest) == 1:
            queue = nearest[0]
        else:
            self._reads_routed += 1
            queue = nearest[self._reads_routed % len(nearest)]
        return queue if not queue.is_avoided else self._healthiest(queue, candidates.all)

    def writer(self, shard: int) -> ServerQueue:
        """Return the server to write to a shard through. Raises as `reader`."""
        candidates = self._candidates_of(shard)
        queue = candidates.nearest[0]
        return queue if not queue.is_avoided else self._healthiest(queue, candidates.all)

    def links_of_receipt(self, name: str) -> list[ServerLink]:
        """Return the link to a follower of this region, and those to the others of its tier, which may have copies of
        what it has accepted, in the order in which it asks them. Raises `Unavailable` when the topology does not name
        it."""
        for tier in self._tiers:
            found = [server for server in tier.servers if server.name == name]
            if found:
                servers = (*found, *tier.successors(name))
                return [self._queue_of(server, tier.tier).link for server in servers]
        raise Unavailable(f"follower {name} is not in the topology of this region, and what it accepted is with it")

    def next(self, shard: int, tried: tuple[ServerQueue, ...]) -> ServerQueue:
        """Return the server for a retry: one that was not tried yet, else the one that `writer` chooses. Raises as
        `reader`."""
        others = [queue for queue in self._candidates_of(shard).all if queue not in tried]
        if not others:
            return self.writer(shard)
        return self._healthiest(others[0], tuple(others))

    def _healthiest(self, preferred: ServerQueue, queues: tuple[ServerQueue, ...]) -> ServerQueue:
        """Return the first server that is well, else the first that is not down, else the preferred one."""
        for queue in (preferred, *queues):
            if not queue.is_avoided:
                return queue
        for queue in (preferred, *queues):
            if not queue.link.is_down:
                return queue
        return preferred

    def _candidates_of(self, shard: int) -> _Candidates:
        if not 0 <= shard < self.shards:
            raise UnknownShard(f"there is no shard {shard}; this graph has shards 0 to {self.shards - 1}")
        candidates = self._candidates[shard]
        if candidates is None:
            by_tier = [[self._queue_of(server, each.tier) for server in each.hosts(shard)] for each in self._tiers]
            candidates = _Candidates(tuple(by_tier[0]), tuple(queue for queues in by_tier for queue in queues))
            self._candidates[shard] = candidates
        return candidates
