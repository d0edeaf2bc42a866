"""The metrics that followers and leaders have in common.

The parts that do the work count in plain attributes; here these get names, units and a place in ``/metrics`` and
``/stats``. The code of a cache hit calls no metric.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Final

import msgspec

from tao.cache import ArenaStatistics, GraphCache
from tao.cache.packed import CORE
from tao.model.ports import Clock
from tao.observability.audit_log import AuditLog
from tao.observability.metrics import Metrics
from tao.routing.budgets import RetryBudget
from tao.routing.failure_detector import DetectorState, Health
from tao.serving.prefix_refills import PrefixRefills
from tao.serving.read_service import ReadService
from tao.wire.doorstep import Doorstep
from tao.wire.read_batch import OPERATIONS


class ReadMetrics:
    """Registers the metrics of reads and of the cache, and summarizes them for ``/stats``."""

    def __init__(
        self, metrics: Metrics, cache: GraphCache, reads: ReadService, refills: PrefixRefills, clock: Clock
    ) -> None:
        self._cache: Final = cache
        self._reads: Final = reads
        self._refills: Final = refills
        self._clock: Final = clock
        self._register_reads(metrics)
        self._register_cache(metrics)

    def _register_reads(self, metrics: Metrics) -> None:
        reads, single_flight = self._reads, self._reads.misses.single_flight
        counters = reads.counters
        for name, help_text, counts in (
            ("read_hits_total", "Queries answered from this server's cache.", counters.hits),
            ("read_misses_total", "Queries that were fetched from the leader or the database.", counters.misses),
            ("read_failures_total", "Queries answered with an error.", counters.failures),
        ):
            metrics.gauge_family(name, help_text, "operation", partial(_by_operation, counts))
        metrics.gauge(
            "stale_read_queries",
            "Queries read from the master database because this server could not meet their max_staleness_ms.",
            lambda: reads.misses.too_stale,
        )
        metrics.gauge_family(
            "fills_total",
            "Fetches from the leader or the database: started, joined by another miss, repeated because the answer was "
            "older than a version floor; queries for more of a list than its cached part, and queries answered by the "
            "master because no copy had what was known.",
            "event",
            lambda: {
                "started": single_flight.started,
                "joined": single_flight.joined,
                "incomplete": reads.misses.incomplete,
                "refetched": single_flight.refetched,
                "past_floor": reads.misses.read_past_floors,
            },
        )
        metrics.gauge_family(
            "prefix_refills_total",
            "Cached prefixes that deletions made short and that were read again in the background: kept, overtaken by "
            "a change, not kept for lack of room or because their shard was dropped, failed.",
            "outcome",
            self._refills.outcomes.copy,
        )
        metrics.gauge("fill_queries", "Fetches under way.", lambda: single_flight.under_way)
        metrics.gauge(
            "hot_entries",
            "Objects and lists read so often that answers ask clients to cache them.",
            reads.traffic.hot_keys,
        )

    def _register_cache(self, metrics: Metrics) -> None:
        cache = self._cache
        for name, help_text, value in (
            ("cache_bytes", "Memory used by an arena, in bytes.", attrgetter("bytes")),
            ("cache_budget_bytes", "Memory that an arena may use, in bytes.", attrgetter("budget_bytes")),
            ("cache_evictions_total", "Entries evicted to stay within the budget.", attrgetter("evictions")),
            (
                "cache_returns_total",
                "Keys that returned after their eviction before the arena had evicted as much as its budget.",
                lambda arena: sum(arena.returns),
            ),
        ):
            metrics.gauge_family(name, help_text, "arena", partial(self._by_arena, value))
        metrics.gauge_family(
            "cache_eviction_age_seconds",
            "Time since the last use of the entry that an arena evicted last from its main queue.",
            "arena",
            lambda: {arena.name: arena.eviction_age_seconds or 0.0 for arena in cache.arenas() if arena.evictions},
        )
        metrics.gauge_family("cache_entries", "Cached entries, by kind.", "kind", lambda: _entries(cache.arenas()))
        metrics.gauge(
            "kept_answer_queries",
            "Queries for edges that were answered as they were before: see kept_answer_bytes.",
            lambda: cache.kept_answers.used,
        )
        metrics.gauge(
            "kept_answer_bytes",
            "Memory of answers to queries for edges that cached prefixes could not decide, in bytes, beside arenas.",
            lambda: cache.kept_answers.size_bytes,
        )
        metrics.gauge("cache_open_shards", "Shards open in the cache.", lambda: len(cache.open_shards()))

    def _by_arena(self, value: Callable[[ArenaStatistics], float]) -> dict[str, float]:
        return {arena.name: value(arena) for arena in self._cache.arenas()}

    def summary(self) -> dict[str, object]:
        """Return the JSON-able summary for ``/stats``, with the hit rate."""
        counters, single_flight = self._reads.counters, self._reads.misses.single_flight
        hits, misses = sum(counters.hits), sum(counters.misses)
        arenas = self._cache.arenas()
        floors = self._cache.floor_statistics(self._clock.monotonic())
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
            "entries": _entries(arenas),
            "bytes": sum(arena.bytes for arena in arenas),
            "budget_bytes": sum(arena.budget_bytes for arena in arenas),
            "evictions": sum(arena.evictions for arena in arenas),
            "cache_core": CORE,
            "arenas": list(map(msgspec.structs.asdict, arenas)),
            "fills": {
                "started": single_flight.started,
                "joined": single_flight.joined,
                "incomplete": self._reads.misses.incomplete,
                "refetched": single_flight.refetched,
                "past_floor": self._reads.misses.read_past_floors,
                "not_kept": self._cache.not_kept,
                "too_large": self._cache.too_large,
                "dropped": self._cache.dropped,
                "refills": self._refills.outcomes,
                "under_way": single_flight.under_way,
            },
            "kept_answers": {"used": self._cache.kept_answers.used, "bytes": self._cache.kept_answers.size_bytes},
            "traffic": self._reads.traffic.summary(),
            "floors": floors.floors,
            "open_shards": len(self._cache.open_shards()),
        }


def _entries(arenas: Sequence[ArenaStatistics]) -> dict[str, int]:
    """Return the number of cached entries, by kind."""
    return {
        "objects": sum(arena.objects for arena in arenas),
        "lists": sum(arena.lists for arena in arenas),
        "counts": sum(arena.counts for arena in arenas),
    }


def _by_operation(counts: Sequence[int]) -> dict[str, int]:
    return dict(zip(OPERATIONS, counts, strict=True))


_HEALTH_CODES: Final = {Health.UP: 0, Health.SUSPECT: 1, Health.DOWN: 2, Health.PROBING: 3}


def register_links(metrics: Metrics, read: Callable[[], Mapping[str, DetectorState]]) -> None:
    """Register the health of each cache server that this one talks to, by its name."""
    metrics.gauge_family(
        "link_health_info",
        "Health of a cache server: 0 up, 1 suspect, 2 down, 3 down and being probed.",
        "peer",
        lambda: _codes(read()),
    )
    metrics.gauge_family(
        "link_health_changes_total",
        "Changes of a cache server between healthy and impaired.",
        "peer",
        lambda: _changes(read()),
    )


def register_databases(metrics: Metrics, read: Callable[[], Mapping[str, DetectorState]], *, pool: str) -> None:
    """Register the health of each database server, by its name."""
    metrics.gauge_family(
        "database_health_info",
        "Health of a database server: 0 up, 1 suspect, 2 down, 3 down and being probed.",
        "database_server",
        lambda: _codes(read()),
        pool=pool,
    )
    metrics.gauge_family(
        "database_health_changes_total",
        "Changes of a database server between healthy and impaired.",
        "database_server",
        lambda: _changes(read()),
        pool=pool,
    )


def register_held_rows(metrics: Metrics, held_bytes: Callable[[], int]) -> None:
    """Register what the reads of databases hold."""
    metrics.gauge(
        "held_row_bytes",
        "Rows that reads of the databases hold until their statement has ended; `fills.max_held_bytes` is the bound.",
        held_bytes,
    )


def register_disk_space(metrics: Metrics, full: Callable[[], Mapping[str, str]]) -> None:
    """Register whether the disk of each database server is full, by its name; ``full`` returns why, or empty texts."""
    metrics.gauge_family(
        "database_full_info",
        "1 while writes of a database server fail because its disk is full, 0 while it has room.",
        "database_server",
        lambda: {name: float(bool(reason)) for name, reason in full().items()},
    )


def register_audit(metrics: Metrics, log: AuditLog) -> None:
    """Register what the audit log has written and lost, whether it can be written, and its newest published hash."""
    metrics.gauge_family(
        "audit_records_total",
        "Records of the audit log: written, and lost because it was full or could not be written.",
        "outcome",
        lambda: {"written": log.written, "lost": log.lost},
    )
    metrics.gauge("audit_queued_entries", "Records that wait to be written to the audit log.", lambda: log.waiting)
    metrics.gauge(
        "audit_failing_info", "1 while the audit log cannot be written, else 0.", lambda: float(bool(log.trouble))
    )
    metrics.gauge_family(
        "audit_hash_info",
        "The number of the newest record of the audit log at its last publication, by the record's hash.",
        "hash",
        lambda: {log.published.hash: log.published.seq},
    )


def _codes(standings: Mapping[str, DetectorState]) -> dict[str, float]:
    return {name: _HEALTH_CODES[standing.health] for name, standing in standings.items()}


def _changes(standings: Mapping[str, DetectorState]) -> dict[str, float]:
    return {name: standing.transitions for name, standing in standings.items()}


def register_doorstep(metrics: Metrics, doorstep: Doorstep) -> None:
    """Register the peers of one port that have not shown yet who they are."""
    metrics.gauge(
        "pending_connections",
        "Connections (of gRPC: calls) that have not shown yet who they are, by port.",
        lambda: len(doorstep.pending),
        port=doorstep.port,
    )
    metrics.gauge_family(
        "peers_turned_away_total",
        "Connections (of gRPC: calls) that were turned away before they had shown a credential, by port and reason.",
        "reason",
        doorstep.turned_away.copy,
        port=doorstep.port,
    )


def register_retries(metrics: Metrics, budget: RetryBudget) -> None:
    """Register the requests that were repeated, and those that were not because the retry budget was used up."""
    metrics.gauge_family(
        "retries_total",
        "Repeated requests, and those not repeated because the retry budget was used up.",
        "outcome",
        lambda: {"sent": budget.spent, "refused": budget.exhausted},
    )
