"""What a leader knows of time: when the masters heard of it last, and up to when it has told its subscribers (§8)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Final

from tao.delivery.publisher import Publisher
from tao.leader.heartbeats import Heartbeats
from tao.model.ports import Clock
from tao.observability.metrics import Metrics


class FreshnessFigures:
    """Registers the metrics, and sums them up for people."""

    def __init__(
        self,
        metrics: Metrics,
        publisher: Publisher,
        heartbeats: Heartbeats,
        databases: Callable[[], Iterable[str]],
        clock: Clock,
    ) -> None:
        """``databases``: names of all, also of those of which nothing is known."""
        self._publisher: Final = publisher
        self._heartbeats: Final = heartbeats
        self._databases: Final = databases
        self._clock: Final = clock
        metrics.gauge_family(
            "staleness_seconds",
            "How far behind its master what is told of a database is at most; infinite while that is not known.",
            "database",
            lambda: {name: inf if age is None else age for name, age in self._staleness().items()},
        )
        metrics.gauge_family(
            "heartbeat_age_seconds",
            "Since the newest heartbeat row that this leader wrote, by database; infinite before the first.",
            "database",
            lambda: {name: inf if age is None else age for name, age in self._ages().items()},
        )

    def summary(self) -> dict[str, object]:
        """For ``/stats``. Ages are None while they are not known."""
        beats = self._heartbeats.beats
        return {
            "staleness_seconds": self._staleness(),
            "heartbeats": {
                name: {
                    "age_seconds": age,
                    "trouble": beats[name].trouble,
                    "waits_for_replica": beats[name].waits_for_replica,
                }
                for name, age in self._ages().items()
            },
        }

    def _staleness(self) -> dict[str, float | None]:
        proven = self._publisher.proven
        return {name: self._age(proven.get(name, 0)) for name in self._databases()}

    def _ages(self) -> dict[str, float | None]:
        return {name: self._age(beat.written_unix_ms) for name, beat in self._heartbeats.beats.items()}

    def _age(self, unix_ms: int) -> float | None:
        return max(0, self._clock.unix_ms() - unix_ms) / 1000 if unix_ms else None
