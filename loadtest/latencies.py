"""Latencies of a run: HdrHistograms by operation, and how many requests were answered in each second.

A histogram keeps three significant digits from a microsecond to a minute, whatever the number of samples. Histograms of
several processes add up exactly, which medians do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, Self

import msgspec
from hdrh.histogram import HdrHistogram

_SHORTEST_US: Final = 1
_LONGEST_US: Final = 60_000_000
_DIGITS: Final = 3
_MICRO: Final = 1_000_000


class LatencySummary(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of ``count`` requests, in milliseconds."""

    count: int
    avg: float
    p50: float
    p90: float
    p99: float
    p999: float
    max: float


class LatencyRecording(msgspec.Struct, kw_only=True):
    """The measurements of one load process in the form that is sent to the runner, histograms in HdrHistogram's own
    encoding."""

    latencies: dict[str, str] = {}
    """Histograms by operation; ``hit obj_get`` and ``miss obj_get`` hold the traced requests."""
    per_second: dict[int, int] = {}
    """Requests answered in each second of the run."""
    failed: dict[str, int] = {}
    """Failed requests by the error's reason."""


class Latencies:
    """The latencies that one load process records, at a cost of about a microsecond each, and those of all processes
    together."""

    def __init__(self, *recordings: LatencyRecording) -> None:
        """Begin with the recordings of these processes."""
        # Any: the library has no types.
        self._histograms: dict[str, Any] = {}
        self.per_second: Counter[int] = Counter()
        self.failed: Counter[str] = Counter()
        for recording in recordings:
            self.add(recording)

    def answered(self, name: str, seconds: float, at: float) -> None:
        """Record a request that took ``seconds`` and was answered ``at`` seconds after the run's start."""
        self.traced(name, seconds)
        self.per_second[int(at)] += 1

    def traced(self, name: str, seconds: float) -> None:
        """Record a latency that does not count towards the run's throughput."""
        histogram = self._histograms.get(name)
        if histogram is None:  # a new one is half a megabyte
            histogram = self._histograms[name] = _histogram()
        histogram.record_value(min(_LONGEST_US, max(_SHORTEST_US, int(seconds * _MICRO))))

    def recording(self) -> LatencyRecording:
        """Return everything in the form that is sent to the runner."""
        return LatencyRecording(
            latencies={name: each.encode().decode("ascii") for name, each in self._histograms.items()},
            per_second=dict(self.per_second),
            failed=dict(self.failed),
        )

    def add(self, recording: LatencyRecording) -> Self:
        """Add the recording of one more process."""
        for name, encoded in recording.latencies.items():
            self._histograms.setdefault(name, _histogram()).decode_and_add(encoded.encode("ascii"))
        self.per_second.update(recording.per_second)
        self.failed.update(recording.failed)
        return self

    def names(self) -> list[str]:
        """Return the names of what was measured."""
        return sorted(self._histograms)

    def summary(self, *names: str) -> LatencySummary | None:
        """Summarise these operations together; None when none was measured."""
        whole = _histogram()
        for name in names:
            if name in self._histograms:
                whole.add(self._histograms[name])
        if not whole.get_total_count():
            return None
        p50, p90, p99, p999 = (int(whole.get_value_at_percentile(percent)) for percent in (50, 90, 99, 99.9))
        times_us = {"avg": whole.get_mean_value(), "p50": p50, "p90": p90, "p99": p99, "p999": p999}
        times_ms = {name: round(us / 1000, 3) for name, us in {**times_us, "max": whole.get_max_value()}.items()}
        return LatencySummary(count=whole.get_total_count(), **times_ms)


def summary_of(seconds: Iterable[float]) -> LatencySummary | None:
    """Summarise these latencies; None when there is none."""
    latencies = Latencies()
    for each in seconds:
        latencies.traced("", each)
    return latencies.summary("")


def _histogram() -> Any:
    return HdrHistogram(_SHORTEST_US, _LONGEST_US, _DIGITS)
