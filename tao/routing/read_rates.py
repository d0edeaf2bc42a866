"""Sampled read rates: the keys and shards that are read most, with counts that decay.

Lossy counting (Manku and Motwani): when there are twice as many counters as wanted, the smaller half is dropped. A key
that is read often enough to be of interest is never in that half for long, and no count is ever too high. A stream
summary would be exact, but costs twenty times as much for keys that are read once. Counts halve in every half-life, so
that a rate is that of the last few seconds, whatever the process has seen before. Shards are few, and each has a
counter. Pure: the time and the number of reads that a sample stands for are passed in.
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

_LEAST_COUNT: Final = 0.1
"""A decayed count below it is forgotten: a single read is for sixteen seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSettings:
    """Settings for sampling reads, and the rates at which items count as hot."""

    keys: int = 512
    """Number of key counters: keys with more than a few thousandths of all reads are found, whatever else is read."""

    half_life_seconds: float = 5.0
    """Time after which a read counts half: a burst shows within a second, and a short lull does not look like an
    end."""

    queries_per_sample: int = 256
    """On a busy server one query in this many is sampled, on average. At 100,000 reads per second a key with one in a
    hundred of them has about 30 samples in a half-life, and a sample costs about 2 µs. Below that rate a larger part is
    sampled, and every query below some 400 per second."""

    hot_reads_per_second: float = 1_000.0
    """Rate of one item at one server from which answers mark the item as hot, so that clients cache it. Below, an item
    is not worth a client's memory."""

    slow_down_reads_per_second: float = 20_000.0
    """Rate from which answers ask clients to pause: about a fifth of what a server can answer at all."""

    slow_down_ms: int = 2
    """Pause of a client at that rate before it asks for the item again; longer in proportion to the rate."""

    max_slow_down_ms: int = 50
    """The longest pause: short enough that people do not notice it."""

    def __post_init__(self) -> None:
        if min(self.keys, self.queries_per_sample, self.half_life_seconds, self.hot_reads_per_second) <= 0:
            raise SettingsError(
                f"keys, queries_per_sample, half_life_seconds and hot_reads_per_second must be above 0: {self}"
            )


class Rate(NamedTuple):
    """Reads per second of a key."""

    key: Key
    per_second: float


class ReadRates:
    """Decaying counts of one server's reads.

    ``hot`` maps the keys above the threshold to their reads per second, as of the last `fade`. It is nearly always
    empty, so that checking it costs next to nothing."""

    __slots__ = ("_began", "_counts", "_faded_at", "_settings", "_shards", "_total", "hot")

    def __init__(self, settings: RateSettings, now: float) -> None:
        self._settings: Final = settings
        self._counts: dict[Key, float] = {}
        self._shards: dict[int, float] = {}
        self._total = 0.0
        self._began = self._faded_at = now
        self.hot: dict[Key, float] = {}

    def count(self, key: Key, shard: int, reads: float) -> None:
        """Add a sample of ``key`` that stands for so many ``reads``."""
        counts = self._counts
        counts[key] = counts.get(key, 0.0) + reads
        if len(counts) >= 2 * self._settings.keys:
            self._counts = dict(nlargest(self._settings.keys, counts.items(), key=itemgetter(1)))
        self._shards[shard] = self._shards.get(shard, 0.0) + reads
        self._total += reads

    def fade(self, now: float) -> None:
        """Decay the counts up to ``now`` and update `hot`. Call it about once a second."""
        if now <= self._faded_at:
            return
        factor = exp2((self._faded_at - now) / self._settings.half_life_seconds)
        self._faded_at = now
        self._total *= factor
        self._counts = {key: count * factor for key, count in self._counts.items() if count * factor >= _LEAST_COUNT}
        self._shards = {
            shard: count * factor for shard, count in self._shards.items() if count * factor >= _LEAST_COUNT
        }
        scale = self._per_second(now)
        least = self._settings.hot_reads_per_second
        self.hot = {key: count * scale for key, count in self._counts.items() if count * scale >= least}

    def keys(self, limit: int, now: float) -> list[Rate]:
        """Return the keys that are read most, in descending order."""
        self.fade(now)
        scale = self._per_second(now)
        most = nlargest(limit, self._counts.items(), key=itemgetter(1))
        return [Rate(key, count * scale) for key, count in most]

    def shards(self, limit: int, now: float) -> list[tuple[int, float]]:
        """Return the shards that are read most and their reads per second, in descending order."""
        self.fade(now)
        scale = self._per_second(now)
        most = nlargest(limit, self._shards.items(), key=itemgetter(1))
        return [(shard, count * scale) for shard, count in most]

    def total(self, now: float) -> float:
        """Return the reads per second of all keys together."""
        self.fade(now)
        return self._total * self._per_second(now)

    def slow_down_ms(self, per_second: float) -> int:
        """Return how long a client should pause before it asks again for an item with this rate; 0: no pause."""
        settings = self._settings
        if per_second < settings.slow_down_reads_per_second:
            return 0
        pause = settings.slow_down_ms * per_second / settings.slow_down_reads_per_second
        return min(round(pause), settings.max_slow_down_ms)

    def _per_second(self, now: float) -> float:
        """Return the factor from a decayed count to reads per second.

        Steady reads of r per second add up to r × half-life ÷ ln 2 in the long run, and to a part of that before."""
        half_life = self._settings.half_life_seconds
        seen = 1 - exp2(-max(now - self._began, half_life / 8) / half_life)
        return log(2) / (half_life * seen)
