"""What a cache server counts while it serves: the same figures for followers and leaders (DESIGN.md §13).

Counters are plain attributes of the parts that do the work; here they get names, units and a place in ``/metrics`` and
``/stats``. Nothing on the hit path knows of metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tao.cache import GraphCache
from tao.cache.packed import CORE
from tao.model.ports import Clock
from tao.observability.metrics import Metrics
from tao.routing.failure_detector import Health, Standing
from tao.routing.retry_budget import RetryBudget
from tao.serving.fills import Fills
from tao.serving.read_batch import OPERATIONS
from tao.serving.read_service import ReadService


class ServingFigures:
    """Registers the read side's metrics, and sums them up for people."""

    def __init__(self, metrics: Metrics, cache: GraphCache, reads: ReadService, fills: Fills, clock: Clock) -> None:
        self._cache: Final = cache
        self._reads: Final = reads
        self._fills: Final = fills
        self._clock: Final = clock
        counters = reads.counters
        metrics.gauge_family(
            "read_hits_total",
            "Queries answered from this server's memory.",
            "operation",
            lambda: dict(zip(OPERATIONS, counters.hits, strict=True)),
        )
        metrics.gauge_family(
            "read_misses_total",
            "Queries that had to be fetched from the tier below.",
            "operation",
            lambda: dict(zip(OPERATIONS, counters.misses, strict=True)),
        )
        metrics.gauge_family(
            "read_failures_total",
            "Queries that were answered with an error.",
            "operation",
            lambda: dict(zip(OPERATIONS, counters.failures, strict=True)),
        )
        metrics.gauge(
            "stale_read_queries",
            "Queries whose max_staleness_ms this server could not meet: read from the master database.",
            lambda: reads.misses.too_stale,
        )
        metrics.gauge_family(
            "fills_total",
            "Fetches from the tier below: started, joined by a second miss, done again because below a floor; queries "
            "for more of a list than was cached of it, and answered by the master because nobody else had what was "
            "known.",
            "event",
            lambda: {
                "started": fills.flights.started,
                "joined": fills.flights.joined,
                "incomplete": fills.incomplete,
                "refetched": fills.flights.refetched,
                "past_floor": fills.read_past_floors,
            },
        )
        metrics.gauge_family(
            "prefix_refills_total",
            "Cached prefixes that deletions made short, read anew in the background: kept, overtaken by a change, not "
            "kept because of what happened to their shard or the room there is, failed.",
            "outcome",
            fills.refills.copy,
        )
        metrics.gauge("fill_queries", "Fetches now under way.", lambda: fills.flights.under_way)
        metrics.gauge("hot_entries", "Objects and lists read so often that clients are told.", reads.traffic.hot_keys)
        metrics.gauge_family(
            "cache_bytes",
            "Memory that an arena accounts for.",
            "arena",
            lambda: {arena.name: arena.bytes for arena in cache.arenas()},
        )
        metrics.gauge_family(
            "cache_budget_bytes",
            "Memory that an arena may take.",
            "arena",
            lambda: {arena.name: arena.budget for arena in cache.arenas()},
        )
        metrics.gauge_family(
            "cache_entries",
            "Entries held, by kind.",
            "kind",
            lambda: {kind: float(number) for kind, number in self.entries().items()},
        )
        metrics.gauge_family(
            "cache_evictions_total",
            "Entries evicted to stay within the budget.",
            "arena",
            lambda: {arena.name: arena.evictions for arena in cache.arenas()},
        )
        metrics.gauge_family(
            "cache_eviction_age_seconds",
            "How long the entry that an arena evicted last out of its main queue had not been used.",
            "arena",
            lambda: {arena.name: arena.eviction_age_seconds or 0.0 for arena in cache.arenas() if arena.evictions},
        )
        metrics.gauge_family(
            "cache_returns_total",
            "Keys that came back before as much as the arena's budget had left since they did.",
            "arena",
            lambda: {arena.name: sum(arena.returns) for arena in cache.arenas()},
        )
        metrics.gauge("cache_open_shards", "Shards cached here.", lambda: len(cache.open_shards()))

    def entries(self) -> dict[str, int]:
        """Entries held, by kind."""
        arenas = self._cache.arenas()
        return {
            "objects": sum(arena.objects for arena in arenas),
            "lists": sum(arena.lists for arena in arenas),
            "counts": sum(arena.counts for arena in arenas),
        }

    def summary(self) -> dict[str, object]:
        """For ``/stats``: JSON-able, with the hit rate worked out."""
        counters = self._reads.counters
        hits, misses = sum(counters.hits), sum(counters.misses)
        arenas = self._cache.arenas()
        floors = self._cache.floor_figures(self._clock.monotonic())
        return {
            "reads": {
                operation: {
                    "hits": counters.hits[index],
                    "misses": counters.misses[index],
                    "failures": counters.failures[index],
                }
                for index, operation in enumerate(OPERATIONS)
            },
            "hits": hits,
            "misses": misses,
            "failures": sum(counters.failures),
            "stale_reads": self._reads.misses.too_stale,
            "hit_rate": hits / (hits + misses) if hits + misses else None,
            "entries": self.entries(),
            "bytes": sum(arena.bytes for arena in arenas),
            "budget_bytes": sum(arena.budget for arena in arenas),
            "evictions": sum(arena.evictions for arena in arenas),
            "cache_core": CORE,
            "arenas": [
                {
                    "name": arena.name,
                    "bytes": arena.bytes,
                    "budget_bytes": arena.budget,
                    "objects": arena.objects,
                    "lists": arena.lists,
                    "counts": arena.counts,
                    "evictions": arena.evictions,
                    "eviction_age_seconds": arena.eviction_age_seconds,
                    "kept": arena.kept,
                    "returns": list(arena.returns),
                    "packed_bytes": arena.packed_bytes,
                }
                for arena in arenas
            ],
            "fills": {
                "started": self._fills.flights.started,
                "joined": self._fills.flights.joined,
                "incomplete": self._fills.incomplete,
                "refetched": self._fills.flights.refetched,
                "past_floor": self._fills.read_past_floors,
                "not_kept": self._cache.not_kept,
                "too_large": self._cache.too_large,
                "dropped": self._cache.dropped,
                "refills": self._fills.refills,
                "under_way": self._fills.flights.under_way,
            },
            "traffic": self._reads.traffic.summary(),
            "floors": floors.floors,
            "open_shards": len(self._cache.open_shards()),
        }


_HEALTH_CODES: Final = {Health.UP: 0, Health.SUSPECT: 1, Health.DOWN: 2, Health.PROBING: 3}


def register_links(metrics: Metrics, read: Callable[[], Mapping[str, Standing]]) -> None:
    """What is held of each cache server, by its name."""
    metrics.gauge_family(
        "link_health_info",
        "What is held of a server: 0 up, 1 suspect, 2 down, 3 down and being probed.",
        "peer",
        lambda: _codes(read()),
    )
    metrics.gauge_family(
        "link_health_changes_total",
        "How often a server became impaired or came back from it.",
        "peer",
        lambda: _changes(read()),
    )


def register_databases(metrics: Metrics, read: Callable[[], Mapping[str, Standing]], *, pool: str) -> None:
    """What is held of each database server, by its name."""
    metrics.gauge_family(
        "database_health_info",
        "What is held of a database server: 0 up, 1 suspect, 2 down, 3 down and being probed.",
        "database_server",
        lambda: _codes(read()),
        pool=pool,
    )
    metrics.gauge_family(
        "database_health_changes_total",
        "How often a database server became impaired or came back from it.",
        "database_server",
        lambda: _changes(read()),
        pool=pool,
    )


def _codes(standings: Mapping[str, Standing]) -> dict[str, float]:
    return {name: _HEALTH_CODES[standing.health] for name, standing in standings.items()}


def _changes(standings: Mapping[str, Standing]) -> dict[str, float]:
    return {name: standing.transitions for name, standing in standings.items()}


def register_retries(metrics: Metrics, budget: RetryBudget) -> None:
    """What was asked again, and what was not because the budget was used up."""
    metrics.gauge_family(
        "retries_total",
        "Requests asked again, and those that were not because too many were.",
        "outcome",
        lambda: {"sent": budget.spent, "refused": budget.exhausted},
    )
