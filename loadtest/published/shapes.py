"""The distributions that published workloads are made of: degrees, sizes, popularity. Pure: randomness is passed in.

A published distribution is a handful of points. Between two points values are drawn log-uniformly, which corresponds to
a straight line in the papers' doubly logarithmic plots.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat
from random import Random
from typing import Final

import msgspec

_CHUNK: Final = 4096
"""Number of popularity draws made at a time; a single draw costs twice as much."""
_REMEMBERED: Final = 512
"""Number of recent draws of which one may be repeated."""


class Degrees(msgspec.Struct, frozen=True):
    """The distribution of edges over nodes. ``points`` are pairs ``(edges, share of the nodes with so many or fewer)``,
    ascending, from 0 edges to a share of 1."""

    points: tuple[tuple[int, float], ...]

    def with_single_share(self, share: float) -> Degrees:
        """Return a distribution with another share of lists of one edge among the non-empty lists, and the longer lists
        unchanged in proportion."""
        (_, none), (_, single), *rest = self.points
        new_single = none + share * (1 - none)
        scale = (1 - new_single) / (1 - single)
        return Degrees(((0, none), (1, new_single), *((edges, 1 - (1 - part) * scale) for edges, part in rest)))

    @property
    def single_share(self) -> float:
        """Share of lists of one edge among those that are not empty."""
        (_, none), (_, single), *_ = self.points
        return (single - none) / (1 - none)

    def quantile(self, at: float) -> int:
        """Return the degree that a share ``at`` (0 … 1, 1 excluded) of the nodes does not exceed."""
        index = bisect_left(self.points, at, key=lambda point: point[1])
        if index == 0:
            return self.points[0][0]
        (below, before), (edges, share) = self.points[index - 1], self.points[index]
        return _log_uniform_at((at - before) / (share - before), below + 1, edges)

    def drawn(self, count: int, chance: Random) -> list[int]:
        """Return the degrees of ``count`` nodes in random order, one from each of ``count`` equal parts of the
        distribution.

        The few longest lists hold most of the edges, so they should be in every graph.
        """
        degrees = [self.quantile((part + chance.random()) / count) for part in range(count)]
        chance.shuffle(degrees)
        return degrees

    def mean(self) -> float:
        """Return the expected number of edges of a node, except for the rounding down of a draw."""
        total = 0.0
        for (below, before), (edges, share) in zip(self.points, self.points[1:], strict=False):
            total += (share - before) * _log_uniform_mean(below + 1, edges)
        return total


def _log_uniform_at(part: float, low: int, high: int) -> int:
    return min(high, int(low * math.pow((high + 1) / low, part)))


def _log_uniform_mean(low: int, high: int) -> float:
    # This is the mean of the continuous draw, less the half that rounding down takes off.
    return float(low) if low == high else (high + 1 - low) / math.log((high + 1) / low) - 0.5


class CutExponential(msgspec.Struct, frozen=True, tag="cut_exponential"):
    """Sizes of at least 1 and at most ``most``, exponential between, with this ``mean`` (below half of ``most``)."""

    mean: float
    most: int

    @property
    def rate(self) -> float:
        """Return the rate of the exponential distribution that has the mean once it is cut, found by bisection."""
        low, high = 1e-9, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            if _cut_mean(middle, self.most) > self.mean:
                low = middle
            else:
                high = middle
        return low

    def drawer(self, chance: Random) -> Iterator[int]:
        """Yield sizes, without end."""
        rate = self.rate
        part = 1 - math.exp(-rate * self.most)
        while True:
            yield min(self.most, 1 + int(-math.log(1 - chance.random() * part) / rate))


def _cut_mean(rate: float, most: int) -> float:
    return 1 / rate - most / math.expm1(rate * most) if rate * most < 500 else 1 / rate


class LogNormal(msgspec.Struct, frozen=True, tag="log_normal"):
    """Sizes of at least 1 and at most ``most``, with this ``mean`` and spread of the logarithm."""

    mean: float
    sigma: float
    most: int

    def drawer(self, chance: Random) -> Iterator[int]:
        """Yield sizes, without end."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        while True:
            yield min(self.most, max(1, round(chance.lognormvariate(mu, self.sigma))))


class Zipf(msgspec.Struct, frozen=True, tag="zipf"):
    """Zipf's law: the key of rank r is requested in proportion to r to the power of minus ``exponent``."""

    exponent: float

    def cumulated(self, keys: int) -> list[float]:
        """Return, by rank, the number of requests for the keys up to and including that rank, in any scale."""
        return list(accumulate((rank + 1) ** -self.exponent for rank in range(keys)))


class Concentration(msgspec.Struct, frozen=True, tag="concentration"):
    """A measured skew: ``points`` are pairs ``(share of the keys, share of the requests)``, the most requested keys
    first, ascending to ``(1, 1)``. Between two points both shares grow by a power law.

    Shares hold for any number of keys, so that a cache of a fifth of a small graph does as well as one of a fifth of
    all that TAO has. But when the keys are few, the first one would stand for many and take all their requests. So no
    key takes more than ``hottest``, the share of the requests that one key took; the excess goes to the next keys.
    """

    points: tuple[tuple[float, float], ...]
    hottest: float

    def cumulated(self, keys: int) -> list[float]:
        """Return, by rank, the share of the requests for the keys up to and including that rank."""
        found, before = [], 0.0
        for rank in range(1, keys + 1):
            before = min(self.share(rank / keys), before + self.hottest)
            found.append(before)
        return found

    def share(self, keys: float) -> float:
        """Return the share of the requests that this share of the keys takes (above 0, up to 1)."""
        above = max(1, bisect_left(self.points, keys, key=lambda point: point[0]))
        (few, little), (many, much) = self.points[above - 1], self.points[above]
        return little * math.pow(keys / few, math.log(much / little) / math.log(many / few))


Skew = Zipf | Concentration
"""How unevenly keys are requested."""


class Popularity:
    """Draws the next of ``keys`` to request: by ``skew`` over their order, or a repetition of a recent draw.

    ``again`` is the share of draws that repeat one of the last few hundred keys: for a while, pages are assembled
    from the same few things.
    """

    def __init__(self, keys: Sequence[int], skew: Skew, chance: Random, *, again: float = 0.0) -> None:
        """Raises `ValueError` when there are no keys."""
        if not keys:
            raise ValueError("nothing to choose from: give the graph more objects")
        self.draw: Final = _draws(keys, skew.cumulated(len(keys)), chance, again).__next__
        """Draw the next key."""


def _draws(keys: Sequence[int], weights: list[float], chance: Random, again: float) -> Iterator[int]:
    recent = deque[int](maxlen=_REMEMBERED)
    fresh = (key for _ in repeat(None) for key in chance.choices(keys, cum_weights=weights, k=_CHUNK))
    while True:
        if recent and chance.random() < again:
            yield recent[int(chance.random() * len(recent))]
        else:
            recent.append(key := next(fresh))
            yield key


class Geometric(msgspec.Struct, frozen=True):
    """Numbers from 1 to ``most``; without the bound their mean is ``mean``. As it stands, always 1."""

    mean: float = 1.0
    most: int = 1

    def draw(self, chance: Random) -> int:
        """Draw a number."""
        if self.most == 1:
            return 1
        return min(self.most, 1 + int(math.log(1 - chance.random()) / math.log(1 - 1 / self.mean)))
