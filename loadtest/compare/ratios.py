"""The figures of two trees' runs, in pairs: how many times slower the second tree is, with an interval.

The two runs of a pair follow each other, so what else the machine did weighs on both. Each pair gives one ratio of each
figure, and the median of the pairs is judged. The bounds of its interval are ratios of pairs, chosen by the sign test:
it assumes nothing about their distribution.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final, NamedTuple

import msgspec

from loadtest.results import Aim, at_most

BOUND: Final = 1.03
"""The most that anything may be slower."""
ALL: Final = "all shapes"
_CONFIDENCE: Final = 0.95
_RATE: Final = "per_second"
_TIMES: Final = ("_us", "_ms", "seconds")


class Key(NamedTuple):
    """A figure of a scenario."""

    shape: str
    """The shape of load and the contestant, or the path in the scenario's own figures."""
    measure: str

    def __str__(self) -> str:
        return f"{self.shape}: {self.measure}"


class Measured(NamedTuple):
    """The figures of one run of one scenario."""

    values: dict[Key, float]
    controls: frozenset[str]
    """Shapes whose contestant is a yardstick, no part of the project: what they differ by is the machine's doing."""


def measured_in(result: Mapping[str, Any]) -> Measured:
    """Return the rates and times in the JSON of a scenario's result. `Any`: the earlier tree's form may be another."""
    figures = result.get("figures", [])
    yardsticks = {figure.get("yardstick") for figure in figures}
    values: dict[Key, float] = {}
    controls = set()
    for figure in figures:
        shape = f"{figure['shape']}: {figure['contestant']}"
        values |= {Key(shape, name): value for name, value in _numbers(figure)}
        if figure["contestant"] in yardsticks:
            controls.add(shape)
    for quantity in result.get("quantities", []):
        if _is_speed(quantity["unit"]):
            values[Key(quantity["name"], quantity["unit"])] = quantity["value"]
    values |= _nested(result.get("measured", {}))
    return Measured(values, frozenset(controls))


def _nested(value: Mapping[str, Any], path: str = "") -> dict[Key, float]:
    found = {Key(path, name): number for name, number in _numbers(value)}
    for name, each in value.items():
        if isinstance(each, Mapping):
            found |= _nested(each, f"{path}, {name}" if path else name)
    return found


def _numbers(value: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    return ((name, each) for name, each in value.items() if _is_speed(name) and isinstance(each, int | float))


def _is_speed(name: str) -> bool:
    return name.endswith((_RATE, *_TIMES))


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of both trees; ratios above 1 mean that the second tree is slower."""

    shape: str
    measure: str
    base: float | None = None
    """The median of the earlier tree's runs, and of the present tree's; None for a mean of several figures."""
    present: float | None = None
    ratio: float
    """The median of the pairs."""
    low: float
    high: float
    pairs: list[float]
    is_control: bool = False

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if self.is_control:
            return "control"
        certainly = "slower" if self.low > 1 else "faster" if self.high < 1 else "may be equal"
        if sign_interval(self.pairs)[2] < _CONFIDENCE:
            certainly = "too few pairs"
        return f"{certainly}, {'met' if self.ratio <= BOUND else 'not met'}"

    def aim(self, scenario: str) -> Aim:
        """Return the aim that it is not slower than allowed."""
        aim = f"{scenario}: {self.measure} at most {100 * (BOUND - 1):g} % slower"
        return at_most(aim, self.ratio, BOUND, f"{self.shape}, interval {self.low:.3f} to {self.high:.3f}")


class Compared(NamedTuple):
    """One scenario of both trees."""

    slowdowns: list[Slowdown]
    missing: list[str]
    """Figures that not all runs have, or that are 0 in some."""


def compare(pairs: Sequence[tuple[Measured, Measured]]) -> Compared:
    """Compare the figures of pairs of runs, the earlier tree's first. Of each measure there is also the geometric mean
    of all shapes, which varies less than each of them."""
    runs = [run for pair in pairs for run in pair]
    keys = list(dict.fromkeys(key for run in runs for key in run.values))
    shared = [key for key in keys if all(run.values.get(key, 0) > 0 for run in runs)]
    controls = frozenset().union(*(run.controls for run in runs))
    single = [_slowdown(key, pairs, key.shape in controls) for key in shared]
    means = []
    for measure in dict.fromkeys(each.measure for each in single):
        of = [each.pairs for each in single if each.measure == measure and not each.is_control]
        if len(of) > 1:
            means.append(_judged(ALL, measure, [statistics.geometric_mean(ratios) for ratios in zip(*of, strict=True)]))
    return Compared([*means, *single], [str(key) for key in keys if key not in shared])


def _slowdown(key: Key, pairs: Sequence[tuple[Measured, Measured]], is_control: bool) -> Slowdown:
    before, after = ([run.values[key] for run in side] for side in zip(*pairs, strict=True))
    more_is_slower = not key.measure.endswith(_RATE)
    ratios = [(b / a if more_is_slower else a / b) for a, b in zip(before, after, strict=True)]
    judged = _judged(key.shape, key.measure, ratios)
    medians = {"base": statistics.median(before), "present": statistics.median(after)}
    return msgspec.structs.replace(judged, **medians, is_control=is_control)


def _judged(shape: str, measure: str, ratios: list[float]) -> Slowdown:
    low, high, _ = sign_interval(ratios)
    ratio = statistics.median(ratios)
    return Slowdown(shape=shape, measure=measure, ratio=ratio, low=low, high=high, pairs=ratios)


def sign_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the bounds of the median's narrowest interval of 95 % at least, and the probability that it holds the
    median. Fewer than six values have no such interval: then the bounds are the extremes, with what they hold."""
    ordered, count = sorted(values), len(values)

    def outside(cut: int) -> float:
        """The probability that fewer than ``cut`` values lie on one side of the median."""
        return 2 * sum(math.comb(count, below) for below in range(cut)) / (1 << count)

    cut = max(1, sum(1 for _ in takewhile(lambda each: outside(each) <= 1 - _CONFIDENCE, range(1, count // 2 + 1))))
    return ordered[cut - 1], ordered[-cut], max(0.0, 1 - outside(cut))
