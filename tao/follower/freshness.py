"""Bounds on how far a follower's shards may be behind their masters.

A leader reports in its stream the time up to which it has sent every change of a database. That holds only for the
shards that this leader sends to this follower: a shard that its leader has not confirmed, or that another leader owns
by now, keeps the time that it had. Without reports the bound simply grows, whichever part of the chain has broken. The
clocks of leaders and followers are compared, so their difference is part of the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Final


class Freshness:
    """The time up to which every change has been received, by shard. It takes two entries of memory for each shard."""

    def __init__(self, unix_ms: Callable[[], int], database_of: Callable[[int], str]) -> None:
        """``database_of`` maps a shard to the name of its database."""
        self._unix_ms: Final = unix_ms
        self._database_of: Final = database_of
        self._sender: Final[dict[int, str]] = {}
        self._proven_unix_ms: Final[dict[int, int]] = {}

    def note_confirmed(self, leader: str, shards: Iterable[int]) -> None:
        """Note that the leader sends the changes of these shards from here on."""
        self._sender.update(dict.fromkeys(shards, leader))

    def note_proven(self, leader: str, proven: Iterable[tuple[str, int]], is_subscribed: Callable[[int], bool]) -> None:
        """Note that the leader has sent every change of these databases up to the time given with each.
        ``is_subscribed`` returns whether the leader still sends the changes of a shard."""
        times = dict(proven)
        if not times:
            return
        for shard in self.shards_of(leader, is_subscribed):
            proven_unix_ms = times.get(self._database_of(shard), 0)
            if proven_unix_ms > self._proven_unix_ms.get(shard, 0):
                self._proven_unix_ms[shard] = proven_unix_ms

    def shards_of(self, leader: str, is_subscribed: Callable[[int], bool]) -> list[int]:
        """Return the shards whose changes the leader sends. ``is_subscribed`` returns whether it still does."""
        return [shard for shard, sender in self._sender.items() if sender == leader and is_subscribed(shard)]

    def follow(self, leader_of: Callable[[int], str], hosted: frozenset[int]) -> None:
        """Follow a changed topology: trust no former leader of a shard until its new leader has confirmed the shard,
        and forget the shards that are not hosted any more."""
        for shard in [
            shard for shard in self._sender if shard not in hosted or leader_of(shard) != self._sender[shard]
        ]:
            del self._sender[shard]
        for shard in self._proven_unix_ms.keys() - hosted:
            del self._proven_unix_ms[shard]

    def staleness_ms(self, shard: int) -> float:
        """Return how far the cached entries of the shard are behind at most; infinite when nothing is known."""
        proven_unix_ms = self._proven_unix_ms.get(shard)
        return inf if proven_unix_ms is None else max(0, self._unix_ms() - proven_unix_ms)

    def by_database(self, hosted: Iterable[int]) -> dict[str, float]:
        """Return the bound of each database in seconds, which is that of its shard that may be furthest behind."""
        worst: dict[str, float] = {}
        for shard in hosted:
            database = self._database_of(shard)
            worst[database] = max(worst.get(database, 0.0), self.staleness_ms(shard) / 1000)
        return worst
