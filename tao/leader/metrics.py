"""The metrics that only leaders have; `tao.serving.metrics` has those of followers and leaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Final

from tao.delivery.publisher import Publisher
from tao.leader.heartbeats import Heartbeats
from tao.leader.inverse_path import InversePath
from tao.leader.ownership import Ownership
from tao.leader.relay_path import RelayPath
from tao.leader.write_path import WritePath
from tao.model.ports import Clock
from tao.observability.metrics import Metrics


def register_write_metrics(metrics: Metrics, ownership: Ownership, writes: WritePath, inverses: InversePath) -> None:
    """Register the metrics of writes, which are collected with each scrape."""
    writes.transaction_seconds = metrics.histogram(
        "database_transaction_seconds", "Write transactions, from the first lock to the commit."
    ).observe
    metrics.gauge_family(
        "writes_total",
        "Writes of this leader's shards, by outcome.",
        "outcome",
        lambda: {
            "committed": writes.committed_writes,
            "failed": writes.failed_writes,
            "unknown": writes.unknown_outcomes,
        },
    )
    metrics.gauge_family(
        "inverses_total",
        "Inverse edges that could not be written at once, and inverse edges settled later.",
        "event",
        lambda: {"left_pending": inverses.left_pending, "settled_later": inverses.settled_later},
    )
    metrics.gauge_family(
        "transactions_total",
        "Write transactions committed.",
        "outcome",
        lambda: {"committed": writes.committed_transactions},
    )
    metrics.gauge("waiting_writes", "Writes queued or in a transaction.", lambda: writes.waiting)
    metrics.gauge("owned_shards", "Shards that this leader owns.", lambda: len(ownership.owned))
    metrics.gauge(
        "inverses_pending_pairs",
        "Pairs whose inverse edge is known to be pending: it is written once the other leader answers.",
        lambda: inverses.pairs_pending,
    )
    metrics.gauge("inverse_pairs", "Pairs whose edges are being written at both ends.", lambda: inverses.pairs_held)


def register_relay_metrics(metrics: Metrics, relays: RelayPath) -> None:
    """Register the metrics of foreign writes."""
    touches = relays.touches
    metrics.gauge_family(
        "foreign_keys_total",
        "Keys that foreign writers changed: dropped from caches, given a new version, or left for another attempt.",
        "event",
        lambda: {"dropped": relays.dropped, "touched": touches.keys, "failed": touches.failed},
    )


def write_summary(writes: WritePath, inverses: InversePath) -> dict[str, float]:
    """Return the numbers of writes for `/stats`."""
    return {
        "committed": writes.committed_writes,
        "transactions": writes.committed_transactions,
        "failed": writes.failed_writes,
        "unknown": writes.unknown_outcomes,
        "waiting": writes.waiting,
        "inverses_left_pending": inverses.left_pending,
        "inverses_settled_later": inverses.settled_later,
    }


class FreshnessMetrics:
    """Ages of heartbeats, and how far behind its masters this leader's messages are at most."""

    def __init__(
        self,
        metrics: Metrics,
        publisher: Publisher,
        heartbeats: Heartbeats,
        databases: Callable[[], Iterable[str]],
        clock: Clock,
    ) -> None:
        """``databases``: returns the names of all databases, even those of which nothing is known."""
        self._publisher: Final = publisher
        self._heartbeats: Final = heartbeats
        self._databases: Final = databases
        self._clock: Final = clock
        metrics.gauge_family(
            "staleness_seconds",
            "Upper bound on how far messages about a database lag behind its master; infinite while it is unknown.",
            "database",
            lambda: {name: inf if age is None else age for name, age in self._staleness().items()},
        )
        metrics.gauge_family(
            "heartbeat_age_seconds",
            "Age of the newest heartbeat row that this leader wrote, by database; infinite before the first.",
            "database",
            lambda: {name: inf if age is None else age for name, age in self._ages().items()},
        )

    def summary(self) -> dict[str, object]:
        """Return the numbers for ``/stats``. Ages are None while they are unknown."""
        statuses = self._heartbeats.statuses
        return {
            "staleness_seconds": self._staleness(),
            "heartbeats": {
                name: {
                    "age_seconds": age,
                    "trouble": statuses[name].trouble,
                    "waits_for_replica": statuses[name].waits_for_replica,
                }
                for name, age in self._ages().items()
            },
        }

    def _staleness(self) -> dict[str, float | None]:
        proven = self._publisher.proven
        return {name: self._age(proven.get(name, 0)) for name in self._databases()}

    def _ages(self) -> dict[str, float | None]:
        return {name: self._age(status.written_unix_ms) for name, status in self._heartbeats.statuses.items()}

    def _age(self, unix_ms: int) -> float | None:
        return max(0, self._clock.unix_ms() - unix_ms) / 1000 if unix_ms else None
