"""How many reads a contestant's caches answered: counted by its clients, or, of tao, by its two caches."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tao.devcluster.readiness import server_stats


class CacheCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Reads between two moments."""

    hits: int = 0
    """Answered without the database, and without waiting for another's fetch."""
    joined: int = 0
    """Waited for another's fetch; of tao's, in the follower."""
    misses: int = 0
    """For which the database was asked."""
    in_follower: int = 0
    """Of tao's hits, those out of the follower's own memory."""

    @property
    def reads(self) -> int:
        """All of them."""
        return self.hits + self.joined + self.misses


def added(all_counts: Iterable[CacheCounts]) -> CacheCounts:
    """All of them together."""
    found = list(all_counts)
    return CacheCounts(**{name: sum(getattr(each, name) for each in found) for name in CacheCounts.__struct_fields__})


class TaoCounters:
    """The counters of a follower and a leader that have nobody else to serve."""

    def __init__(self, follower_admin: str, leader_admin: str) -> None:
        self._follower = follower_admin
        self._leader = leader_admin
        self._hits = self._misses = self._joined = self._leader_misses = 0

    async def since_last(self) -> CacheCounts:
        """What was counted since the last call; since the servers' start at the first. Raises what reading raises."""
        follower, leader = await server_stats(self._follower), await server_stats(self._leader)
        hits, misses = follower["hits"] - self._hits, follower["misses"] - self._misses
        joined = follower["fills"]["joined"] - self._joined
        leader_misses = leader["misses"] - self._leader_misses
        self._hits, self._misses = follower["hits"], follower["misses"]
        self._joined, self._leader_misses = follower["fills"]["joined"], leader["misses"]
        # Of the follower's misses that never became one of the leader's, some had it there, others only joined a fetch.
        spared = max(0, misses - leader_misses)
        joined = min(joined, spared)
        return CacheCounts(hits=hits + spared - joined, joined=joined, misses=leader_misses, in_follower=hits)
