"""Change how many servers of a tier serve a shard, in two steps. Pure functions: document in, document out.

A write reaches every server of its tier that serves the shard before it is answered: each follower that forwards a
write passes it to the servers that *its* document names. So a clone must not answer while some follower does not know
of it, and a former clone must have stopped before the first follower leaves it out. Hence there are two documents. In
the first, servers that start or stop serving receive the changes and do not serve. When every server of the tier has
the first, the second names the servers that serve. A server rejects a client with an older document, and the client
asks another server.
"""

from __future__ import annotations

from dataclasses import dataclass

from tao.model.errors import TopologyError
from tao.model.topology import Tier, Topology
from tao.routing.shard_map import Ring
from tao.topology.edits import place_shard


@dataclass(frozen=True, slots=True)
class Cloning:
    """The change of one shard of one tier, from the servers that serve it to those that will: the home is first in
    both. In the first document the servers ``between`` serve, and ``extra_receivers`` receive the changes only."""

    region: str
    tier: str
    shard: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    between: tuple[str, ...]
    extra_receivers: tuple[str, ...]
    by_watcher: bool

    @property
    def is_nothing(self) -> bool:
        """Return whether nothing has to change, and no earlier change was left half-done."""
        return self.before == self.after and not self.extra_receivers

    def first(self, topology: Topology) -> Topology:
        """Return the first document: servers that start or stop do not serve, and all receive the changes."""
        return self._placed(topology, self.between, self.extra_receivers)

    def second(self, topology: Topology) -> Topology:
        """Return the second document, in which the new servers serve. Raises `TopologyError` when the shard has been
        placed otherwise meanwhile."""
        tier = tier_of(topology, self.region, self.tier)
        found = hosts_of(tier, self.shard), tier.told.get(self.shard, ())
        if found != (self.between, self.extra_receivers):
            raise TopologyError(f"shard {self.shard} of {self.region}/{self.tier} was placed otherwise meanwhile")
        return self._placed(topology, self.after, ())

    def _placed(self, topology: Topology, hosts: tuple[str, ...], extra_receivers: tuple[str, ...]) -> Topology:
        return place_shard(
            topology,
            self.region,
            self.tier,
            self.shard,
            hosts,
            extra_receivers,
            by_watcher=self.by_watcher and len(self.after) > 1,
        )


def plan_copies(
    topology: Topology, region: str, tier: str, shard: int, copies: int, *, by_watcher: bool = False
) -> Cloning:
    """Plan for ``copies`` servers beside its home to serve a shard. Present clones stay; new ones are taken from the
    ring, except servers marked down; the last ones stop first. Raises `TopologyError` when the tier is not a follower
    tier or has too few servers, or when there is no such shard."""
    found = tier_of(topology, region, tier)
    if not 0 <= shard < topology.shards:
        raise TopologyError(f"there is no shard {shard}; they are 0 to {topology.shards - 1}")
    if copies < 0:
        raise TopologyError(f"{copies} copies cannot be; 0 leaves the home alone")
    before = hosts_of(found, shard)
    up = {server.name for server in found.servers if not server.down}
    ring = _ring(found).owners(shard, len(found.servers))
    new = [name for name in ring if name in up and name not in before]
    if len(before) + len(new) <= copies:
        most = len(before) + len(new) - 1
        raise TopologyError(f"{region}/{tier} has servers for {most} copies of shard {shard} beside its home at most")
    after = (*before, *new)[: copies + 1]
    between = tuple(name for name in before if name in after)
    receivers = dict.fromkeys((*found.told.get(shard, ()), *before, *after))
    return Cloning(
        region,
        tier,
        shard,
        before,
        after,
        between,
        tuple(name for name in receivers if name not in between),
        by_watcher,
    )


def tier_of(topology: Topology, region: str, tier: str) -> Tier:
    """Return a follower tier. Raises `TopologyError` when there is none of that name."""
    for each in topology.regions:
        for followers in each.followers:
            if (each.name, followers.name) == (region, tier):
                return followers
    raise TopologyError(f"there is no follower tier {region}/{tier}; only followers' shards have clones")


def hosts_of(tier: Tier, shard: int) -> tuple[str, ...]:
    """Return the servers of the shard: its home, then its clones."""
    return tier.moved.get(shard) or (_ring(tier).owner(shard),)


def _ring(tier: Tier) -> Ring:
    return Ring({server.name: server.weight for server in tier.servers})
