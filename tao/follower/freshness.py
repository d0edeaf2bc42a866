"""How far behind the masters a follower's shards may be, at most (DESIGN.md §8).

A leader says in its series up to when it has told everything of a database. That is worth something for the shards
which it tells this follower of, and for no others: a shard that its leader has not confirmed, or that another leads by
now, keeps the time that it had. Without news the bound just grows, whichever link of the chain has broken. The clocks
of leaders and followers are compared, so what they differ by is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Final


class Freshness:
    """By shard: up to when everything has been told. Memory: two entries a shard."""

    def __init__(self, unix_ms: Callable[[], int], database_of: Callable[[int], str]) -> None:
        """``database_of``: shard → name of its database."""
        self._unix_ms: Final = unix_ms
        self._database_of: Final = database_of
        self._teller: Final[dict[int, str]] = {}
        self._proven_unix_ms: Final[dict[int, int]] = {}

    def confirmed(self, leader: str, shards: Iterable[int]) -> None:
        """The leader tells of these shards from here on."""
        self._teller.update(dict.fromkeys(shards, leader))

    def heard(self, leader: str, proven: Iterable[tuple[str, int]], is_told: Callable[[int], bool]) -> None:
        """The leader has told everything of these databases up to then. ``is_told``: whether it still tells of a
        shard."""
        times = dict(proven)
        if not times:
            return
        for shard in self.told_by(leader, is_told):
            proven_unix_ms = times.get(self._database_of(shard), 0)
            if proven_unix_ms > self._proven_unix_ms.get(shard, 0):
                self._proven_unix_ms[shard] = proven_unix_ms

    def told_by(self, leader: str, is_told: Callable[[int], bool]) -> list[int]:
        """The shards that the leader tells of. ``is_told``: whether it still does."""
        return [shard for shard, teller in self._teller.items() if teller == leader and is_told(shard)]

    def follow(self, leader_of: Callable[[int], str], hosted: frozenset[int]) -> None:
        """The topology has changed: believe no leader any more of a shard that is another's now, until that one has
        confirmed it; forget what is not hosted."""
        for shard in [
            shard for shard in self._teller if shard not in hosted or leader_of(shard) != self._teller[shard]
        ]:
            del self._teller[shard]
        for shard in self._proven_unix_ms.keys() - hosted:
            del self._proven_unix_ms[shard]

    def staleness_ms(self, shard: int) -> float:
        """At most so far behind is what is cached of the shard; infinite when nothing is known."""
        proven_unix_ms = self._proven_unix_ms.get(shard)
        return inf if proven_unix_ms is None else max(0, self._unix_ms() - proven_unix_ms)

    def by_database(self, hosted: Iterable[int]) -> dict[str, float]:
        """Database → seconds, of the shard that may be furthest behind."""
        worst: dict[str, float] = {}
        for shard in hosted:
            database = self._database_of(shard)
            worst[database] = max(worst.get(database, 0.0), self.staleness_ms(shard) / 1000)
        return worst
