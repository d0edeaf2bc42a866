"""What stretches of load have cost, as the JSON of `capacity` and its tables have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from loadtest.capacity.capacity_client import TurnResult
from loadtest.capacity.model import Assumptions, Costs, Deployment, Point
from loadtest.results import Listing

PUBLISHED_MIX: Final = "the published mix"


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of load; CPU in microseconds per query."""

    batch: int
    asked_hit_rate: float | None = None
    hit_rate: float
    leader_hit_rate: float | None
    throughput_qps: float
    p50_ms: float
    p99_ms: float
    follower_us: float
    leader_us: float
    database_us: float
    client_us: float
    leader_hits_per_query: float
    leader_misses_per_query: float
    bytes_per_query: float
    """Of the followers, both ways."""
    leader_bytes_per_query: float
    follower_limit_qps: float
    """A million divided by the follower's CPU: of one follower whose core nobody else wants."""


class OfFollowers(msgspec.Struct, frozen=True, kw_only=True):
    """So many followers, all reads hits."""

    followers: int
    cost: Cost


class OfGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """So much more data, read by popularity."""

    growth: int
    objects: int
    cache_mb: int
    cache_grows: bool
    cost: Cost


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a run found, as the JSON has it."""

    cpus: int
    object_bytes: int
    by_hit_rate: list[Cost]
    by_followers: list[OfFollowers]
    by_growth: list[OfGrowth]
    by_mix: list[Cost]
    """The published mix, single queries, of which more and more is spread evenly over all keys."""
    costs: dict[str, Costs]
    """By what was asked: the `PUBLISHED_MIX`, or objects in batches of so many."""
    assumptions: Assumptions
    billion_reads: dict[str, Deployment]
    """By the same."""


def cost_of(batch: int, asked_hit_rate: float | None, results: Sequence[TurnResult]) -> Cost:
    """Of load processes that ran side by side. Each saw the servers' whole work while it ran: that is averaged, and
    the rates of their own queries add up."""
    rate = sum(each.queries / each.elapsed for each in results)
    hits, misses, leader_hits, leader_misses = (
        sum(counted.get(role, 0) for counted in counts)
        for role in ("follower", "leader")
        for counts in ([each.hits for each in results], [each.misses for each in results])
    )

    def a_query(values: Sequence[float]) -> float:
        # Per second of the servers, by queries per second of all.
        return sum(value / each.elapsed for value, each in zip(values, results, strict=True)) / len(results) / rate

    follower_us = 1e6 * a_query([each.cpu["follower"] for each in results])
    return Cost(
        batch=batch,
        asked_hit_rate=asked_hit_rate,
        hit_rate=hits / max(1, hits + misses),
        leader_hit_rate=leader_hits / (leader_hits + leader_misses) if leader_hits + leader_misses else None,
        throughput_qps=round(rate, 1),
        p50_ms=max(each.p50_ms for each in results),
        p99_ms=max(each.p99_ms for each in results),
        follower_us=round(follower_us, 2),
        leader_us=round(1e6 * a_query([each.cpu["leader"] for each in results]), 2),
        database_us=round(1e6 * a_query([each.cpu["database"] for each in results]), 2),
        client_us=round(1e6 * sum(each.client_cpu / each.elapsed for each in results) / rate, 2),
        leader_hits_per_query=a_query([each.hits["leader"] for each in results]),
        leader_misses_per_query=a_query([each.misses["leader"] for each in results]),
        bytes_per_query=round(a_query([each.socket_bytes for each in results]), 1),
        leader_bytes_per_query=round(a_query([each.leader_bytes for each in results]), 1),
        follower_limit_qps=round(1e6 / follower_us, 1) if follower_us else 0.0,
    )


def point_of(cost: Cost) -> Point:
    """For the model."""
    return Point(
        hit_rate=cost.hit_rate,
        follower_us=cost.follower_us,
        leader_us=cost.leader_us,
        database_us=cost.database_us,
        leader_hits=cost.leader_hits_per_query,
        leader_misses=cost.leader_misses_per_query,
        bytes_per_query=cost.bytes_per_query,
        leader_bytes=cost.leader_bytes_per_query,
    )


_COLUMNS: Final = ("hit rate", "queries/s", "p50 ms", "p99 ms", "follower µs", "leader µs", "database µs", "client µs")


def _cells(cost: Cost) -> tuple[str, ...]:
    return (
        f"{cost.hit_rate:.1%}",
        f"{cost.throughput_qps:,.0f}",
        f"{cost.p50_ms:.1f}",
        f"{cost.p99_ms:.1f}",
        *(f"{value:.1f}" for value in (cost.follower_us, cost.leader_us, cost.database_us, cost.client_us)),
    )


def costs_listing(measured: Measured) -> Listing:
    """Objects."""
    rows: list[tuple[str, ...]] = [
        (f"batches of {each.batch}", *_cells(each), f"{each.follower_limit_qps:,.0f}") for each in measured.by_hit_rate
    ]
    return Listing(title="one follower by hit rate", columns=("", *_COLUMNS, "follower alone/s"), rows=rows)


def mix_listing(measured: Measured) -> Listing:
    """The published mix."""
    rows: list[tuple[str, ...]] = [(f"{each.follower_limit_qps:,.0f}", *_cells(each)) for each in measured.by_mix]
    return Listing(title="the published mix, by hit rate", columns=("follower alone/s", *_COLUMNS), rows=rows)


def followers_listing(measured: Measured) -> Listing:
    """More of them."""
    rows: list[tuple[str, ...]] = [(f"{each.followers}", *_cells(each.cost)) for each in measured.by_followers]
    return Listing(title="all hits, by followers", columns=("followers", *_COLUMNS), rows=rows)


def growth_listing(measured: Measured) -> Listing:
    """More data."""
    rows: list[tuple[str, ...]] = [
        (f"× {each.growth}, {each.objects:,} objects, cache of {each.cache_mb} MB", *_cells(each.cost))
        for each in measured.by_growth
    ]
    return Listing(title="data that grows", columns=("read by popularity", *_COLUMNS), rows=rows)
