"""Which server is asked: the shard's servers in the nearest tier, then those of the tiers behind it (DESIGN.md §5, §9).

Reads spread over home and clones, writes go to the home. A server that is down or in a brown-out is passed over while
another has the shard; its link probes it, and it is used again when it is well. Where to go follows from the topology
document alone; this module opens nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tao.client.lanes import Lane
from tao.model.errors import InvalidArgument, TopologyError
from tao.model.topology import CacheServer, Topology
from tao.routing.routes import Routes, TierRoutes

LaneOf = Callable[[CacheServer, str], Lane]
"""The lane to a server of a tier, the same one for the same server."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """Who may be asked about a shard: ``nearest`` are its home and clones in the nearest tier, ``all`` every server
    that has it, in order of preference. Neither is empty."""

    nearest: tuple[Lane, ...]
    all: tuple[Lane, ...]


class Router:
    """Lanes by shard, under one topology at a time."""

    def __init__(self, region: str, tier: str | None, lane_of: LaneOf) -> None:
        """``tier``: the tier to ask first, None for the region's first."""
        self._region = region
        self._tier = tier
        self._lane_of = lane_of
        self._routes: Routes | None = None
        self._tiers: list[TierRoutes] = []
        self._choices: list[_Choice | None] = []
        self._turn = 0
        self.version = 0
        self.shards = 0
        self.has_standby = False

    def use(self, topology: Topology) -> None:
        """Route by this document from now on. Raises `TopologyError` when it has not the region or tier."""
        routes = Routes(topology, self._routes)
        tiers = list(routes.follower_tiers(self._region))
        if self._tier is not None:
            first = [each for each in tiers if each.tier == self._tier]
            if not first:
                known = ", ".join(each.tier for each in tiers)
                raise TopologyError(f"region {self._region!r} has no follower tier {self._tier!r}; it has {known}")
            tiers = first + [each for each in tiers if each.tier != self._tier]
        self._routes = routes
        self._tiers = tiers
        self._choices = [None] * topology.shards
        self.version = topology.version
        self.shards = topology.shards
        self.has_standby = sum(len(each.servers) for each in tiers) > 1

    def servers(self) -> list[tuple[CacheServer, str]]:
        """All followers of the region with their tiers, nearest first."""
        return [(server, each.tier) for each in self._tiers for server in each.servers]

    def reader(self, shard: int) -> Lane:
        """Who is asked to read. Raises `InvalidArgument` for a shard that does not exist."""
        choice = self._choices[shard] if 0 <= shard < self.shards else None
        if choice is None:
            choice = self._choice(shard)
        nearest = choice.nearest
        if len(nearest) == 1:
            lane = nearest[0]
        else:
            self._turn += 1
            lane = nearest[self._turn % len(nearest)]
        return lane if not lane.is_avoided else self._standing(lane, choice.all)

    def writer(self, shard: int) -> Lane:
        """Who is asked to write. Raises as `reader`."""
        choice = self._choice(shard)
        lane = choice.nearest[0]
        return lane if not lane.is_avoided else self._standing(lane, choice.all)

    def next(self, shard: int, tried: tuple[Lane, ...]) -> Lane:
        """Who is asked when those tried could not answer: another, else the last again. Raises as `reader`."""
        others = [lane for lane in self._choice(shard).all if lane not in tried]
        if not others:
            return self.writer(shard)
        return self._standing(others[0], tuple(others))

    def _standing(self, preferred: Lane, lanes: tuple[Lane, ...]) -> Lane:
        """The first lane that is well, or that at least is not down, or the preferred one all the same."""
        for lane in (preferred, *lanes):
            if not lane.is_avoided:
                return lane
        for lane in (preferred, *lanes):
            if not lane.link.is_down:
                return lane
        return preferred

    def _choice(self, shard: int) -> _Choice:
        if not 0 <= shard < self.shards:
            raise InvalidArgument(f"there is no shard {shard}; this graph has shards 0 to {self.shards - 1}")
        choice = self._choices[shard]
        if choice is None:
            hosts = [[self._lane_of(server, each.tier) for server in each.hosts(shard)] for each in self._tiers]
            choice = _Choice(tuple(hosts[0]), tuple(lane for lanes in hosts for lane in lanes))
            self._choices[shard] = choice
        return choice
