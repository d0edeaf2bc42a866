"""What is read most, by samples: a bounded list of keys with rates that fade (DESIGN.md §10).

Lossy counting (Manku and Motwani): when there are twice as many counters as wanted, the smaller half goes. What is read
often enough to be of interest is never in that half for long, and what stands there is never too high; a stream summary
would be exact to the end and costs twenty times as much for keys that come once. Counts fade by half in every
half-life, so that a rate is that of the last few seconds, whatever the process has seen before. Shards are few and are
counted one by one. Pure: time is passed in, and so is how many reads a sample stands for.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nlargest
from math import exp2, log
from operator import itemgetter
from typing import Final, NamedTuple

from tao.model.errors import SettingsError

Key = tuple[int, int]
"""Object id and 0, or id1 and association type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSettings:
    """How reads are sampled and which items are hot."""

    keys: int = 512
    """Counters: keys above a few thousandths of all reads are found, whatever else is read."""

    half_life_seconds: float = 5.0
    """After which a read counts half: a burst is seen within a second, and a lull is told from an end."""

    queries_per_sample: int = 256
    """One query in so many is looked at, on average. At 100,000 reads a second a key with one in a hundred of them has
    some 30 samples in a half-life, and a sample costs some 2 µs."""

    hot_reads_per_second: float = 1_000.0
    """From this rate of one item at one server on, answers say that it is hot, and clients keep it. Below, an item is
    no load worth a client's memory."""

    slow_down_reads_per_second: float = 20_000.0
    """From this rate on clients are told to pace themselves: about a fifth of what a server can answer at all."""

    slow_down_ms: int = 2
    """For how long a client waits before it asks for such an item again, at that rate; more in proportion to it."""

    max_slow_down_ms: int = 50
    """The longest pause: what a person does not notice."""

    def __post_init__(self) -> None:
        if min(self.keys, self.queries_per_sample, self.half_life_seconds, self.hot_reads_per_second) <= 0:
            raise SettingsError(f"numbers of a rate have to be above 0: {self}")


class Rate(NamedTuple):
    """Reads a second of a key."""

    key: Key
    per_second: float


class ReadRates:
    """Fading counts of one server's reads. ``hot``: key → reads a second, of those above the threshold, as of the last
    `fade`; empty nearly always, so that looking whether it is costs next to nothing."""

    __slots__ = ("_began", "_counts", "_faded_at", "_settings", "_shards", "_total", "hot")

    def __init__(self, settings: RateSettings, now: float) -> None:
        self._settings: Final = settings
        self._counts: dict[Key, float] = {}
        self._shards: dict[int, float] = {}
        self._total = 0.0
        self._began = self._faded_at = now
        self.hot: dict[Key, float] = {}

    def count(self, key: Key, shard: int, reads: float) -> None:
        """A sample of ``key`` stands for so many reads."""
        counts = self._counts
        counts[key] = counts.get(key, 0.0) + reads
        if len(counts) >= 2 * self._settings.keys:
            self._counts = dict(nlargest(self._settings.keys, counts.items(), key=itemgetter(1)))
        self._shards[shard] = self._shards.get(shard, 0.0) + reads
        self._total += reads

    def fade(self, now: float) -> None:
        """Let time pass; to be called once a second or so. Finds out what is hot."""
        if now <= self._faded_at:
            return
        factor = exp2((self._faded_at - now) / self._settings.half_life_seconds)
        self._faded_at = now
        self._total *= factor
        self._counts = {key: count * factor for key, count in self._counts.items() if count * factor >= 1}
        self._shards = {shard: count * factor for shard, count in self._shards.items() if count * factor >= 1}
        scale = self._per_second(now)
        least = self._settings.hot_reads_per_second
        self.hot = {key: count * scale for key, count in self._counts.items() if count * scale >= least}

    def keys(self, limit: int, now: float) -> list[Rate]:
        """The keys read most, first."""
        self.fade(now)
        scale = self._per_second(now)
        most = nlargest(limit, self._counts.items(), key=itemgetter(1))
        return [Rate(key, count * scale) for key, count in most]

    def shards(self, limit: int, now: float) -> list[tuple[int, float]]:
        """The shards read most, first, with reads a second."""
        self.fade(now)
        scale = self._per_second(now)
        most = nlargest(limit, self._shards.items(), key=itemgetter(1))
        return [(shard, count * scale) for shard, count in most]

    def total(self, now: float) -> float:
        """Reads a second of everything."""
        self.fade(now)
        return self._total * self._per_second(now)

    def slow_down_ms(self, per_second: float) -> int:
        """How long a client should wait before it asks for an item with this rate again; 0: it need not."""
        settings = self._settings
        if per_second < settings.slow_down_reads_per_second:
            return 0
        pause = settings.slow_down_ms * per_second / settings.slow_down_reads_per_second
        return min(round(pause), settings.max_slow_down_ms)

    def _per_second(self, now: float) -> float:
        """What a faded count has to be multiplied by: steady reads of r a second add up to r × half-life ÷ ln 2, after
        a while, and to a part of that before."""
        half_life = self._settings.half_life_seconds
        seen = 1 - exp2(-max(now - self._began, half_life / 8) / half_life)
        return log(2) / (half_life * seen)
