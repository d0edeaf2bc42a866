"""The distributions that published workloads are made of: degrees, sizes, popularity. Pure: chance is passed in.

A published distribution is a handful of points. Between two of them values are drawn log-uniformly, which is what a
straight line in the doubly logarithmic plots of the papers says.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Final, Protocol

_CHUNK: Final = 4096
"""Popularity is drawn so many at a time: drawing alone costs half as much then."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """How many edges a node has. ``points``: ``(edges, share of the nodes that have so many or fewer)``, ascending,
    from 0 edges to a share of 1."""

    points: tuple[tuple[int, float], ...]

    @staticmethod
    def of_percentages(cdf_percent: Mapping[str, float], longest: int) -> Degrees:
        """From published points; what lies beyond the last is drawn up to ``longest`` edges."""
        points = sorted((int(edges), percent / 100) for edges, percent in cdf_percent.items())
        return Degrees((*points, (longest, 1.0)))

    def with_single_share(self, share: float) -> Degrees:
        """The same longer lists beside another share of lists of one edge, among those that are not empty."""
        (_, none), (_, single), *rest = self.points
        new_single = none + share * (1 - none)
        scale = (1 - new_single) / (1 - single)
        return Degrees(((0, none), (1, new_single), *((edges, 1 - (1 - part) * scale) for edges, part in rest)))

    @property
    def single_share(self) -> float:
        """Of the lists that are not empty, those of one edge."""
        (_, none), (_, single), *_ = self.points
        return (single - none) / (1 - none)

    def quantile(self, at: float) -> int:
        """The degree that a share ``at`` (0 … 1, 1 excluded) of the nodes stays below or has."""
        index = bisect_left(self.points, at, key=lambda point: point[1])
        if index == 0:
            return self.points[0][0]
        (below, before), (edges, share) = self.points[index - 1], self.points[index]
        return _log_uniform_at((at - before) / (share - before), below + 1, edges)

    def drawn(self, count: int, chance: Random) -> list[int]:
        """Degrees of ``count`` nodes in random order: one out of each of ``count`` equal parts of the distribution,
        because the few longest lists hold most of the edges, and should be there in every graph."""
        degrees = [self.quantile((part + chance.random()) / count) for part in range(count)]
        chance.shuffle(degrees)
        return degrees

    def mean(self) -> float:
        """Expected edges of a node, to the rounding down of a draw."""
        total = 0.0
        for (below, before), (edges, share) in zip(self.points, self.points[1:], strict=False):
            total += (share - before) * _log_uniform_mean(below + 1, edges)
        return total


def log_uniform(chance: Random, low: int, high: int) -> int:
    """An integer from ``low`` (at least 1) to ``high``, whose logarithm is uniform."""
    return _log_uniform_at(chance.random(), low, high)


def _log_uniform_at(part: float, low: int, high: int) -> int:
    return min(high, int(low * math.pow((high + 1) / low, part)))


def _log_uniform_mean(low: int, high: int) -> float:
    # The mean of the continuous draw less the half that rounding down takes of it.
    return float(low) if low == high else (high + 1 - low) / math.log((high + 1) / low) - 0.5


@dataclass(frozen=True, slots=True)
class CutExponential:
    """Sizes of at least 1 and at most ``most``, exponential between, with this ``mean`` (below half of ``most``)."""

    mean: float
    most: int

    @property
    def rate(self) -> float:
        """Of the exponential distribution that has the mean once it is cut; found by bisection."""
        low, high = 1e-9, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            if _cut_mean(middle, self.most) > self.mean:
                low = middle
            else:
                high = middle
        return low

    def drawer(self, chance: Random) -> Iterator[int]:
        """Sizes, without end."""
        rate = self.rate
        part = 1 - math.exp(-rate * self.most)
        while True:
            yield min(self.most, 1 + int(-math.log(1 - chance.random() * part) / rate))


def _cut_mean(rate: float, most: int) -> float:
    return 1 / rate - most / math.expm1(rate * most) if rate * most < 500 else 1 / rate


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Sizes of at least 1 and at most ``most``, with this ``mean`` and spread of the logarithm."""

    mean: float
    sigma: float
    most: int

    def drawer(self, chance: Random) -> Iterator[int]:
        """Sizes, without end."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        while True:
            yield min(self.most, max(1, round(chance.lognormvariate(mu, self.sigma))))


class Skew(Protocol):
    """How unevenly keys are asked for."""

    def cumulated(self, keys: int) -> list[float]:
        """By rank, what is asked for the key of that rank and all before it; to any scale."""


@dataclass(frozen=True, slots=True)
class Zipf:
    """The key of rank r is asked for in proportion to r to the power of minus ``exponent``."""

    exponent: float

    def cumulated(self, keys: int) -> list[float]:
        """See `Skew`."""
        return list(accumulate((rank + 1) ** -self.exponent for rank in range(keys)))


@dataclass(frozen=True, slots=True)
class Concentration:
    """Measured: ``points`` are ``(share of the keys, share of the requests)``, the most asked-for keys first, ascending
    to ``(1, 1)``. Between two points both shares grow by a power law.

    Shares hold for any number of keys, so that a cache of a fifth of a small graph is as good as one of a fifth of all
    that TAO has. But among few keys the first would stand for many and take what they take together: none takes more
    than ``hottest``, the share of the requests that one key took, and what is above it falls to the next ones."""

    points: tuple[tuple[float, float], ...]
    hottest: float

    def cumulated(self, keys: int) -> list[float]:
        """See `Skew`."""
        found, before = [], 0.0
        for rank in range(1, keys + 1):
            before = min(self.share(rank / keys), before + self.hottest)
            found.append(before)
        return found

    def share(self, keys: float) -> float:
        """Of the requests, what this share of the keys takes (above 0, up to 1)."""
        above = max(1, bisect_left(self.points, keys, key=lambda point: point[0]))
        (few, little), (many, much) = self.points[above - 1], self.points[above]
        return little * math.pow(keys / few, math.log(much / little) / math.log(many / few))


class Popularity:
    """Which of ``keys`` is asked for next: by ``skew`` over their order, and again and again what was asked for lately.

    ``again``: the share of draws that repeat one of the last ``remembered`` keys: pages are assembled of the same few
    things for a while."""

    def __init__(
        self, keys: Sequence[int], skew: Skew, chance: Random, *, again: float = 0.0, remembered: int = 512
    ) -> None:
        """Raises `ValueError` when there are no keys."""
        if not keys:
            raise ValueError("nothing to choose from: give the graph more objects")
        self._keys: Final = keys
        self._weights: Final = skew.cumulated(len(keys))
        self._chance: Final = chance
        self._again: Final = again
        self._recent: Final[deque[int]] = deque(maxlen=remembered)
        self._drawn: Iterator[int] = iter(())

    def draw(self) -> int:
        """The next key."""
        chance, recent = self._chance, self._recent
        if recent and chance.random() < self._again:
            return recent[int(chance.random() * len(recent))]
        key = next(self._drawn, None)
        if key is None:
            self._drawn = iter(chance.choices(self._keys, cum_weights=self._weights, k=_CHUNK))
            key = next(self._drawn)
        recent.append(key)
        return key


def geometric(chance: Random, p: float, least: int, most: int) -> int:
    """At least ``least``, each further step with probability ``1 - p``, at most ``most``."""
    return min(most, least + int(math.log(1 - chance.random()) / math.log(1 - p)))
