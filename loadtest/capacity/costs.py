"""The costs of queries under a load, as the JSON of `capacity` and its tables have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from loadtest.capacity.jobs import CapacityTurnResult
from loadtest.capacity.model import Costs, Deployment, DeploymentAssumptions, Point, Servers
from loadtest.results import Listing

PUBLISHED_MIX: Final = "the published mix"


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """One period of load; CPU in microseconds per query."""

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
    """Bytes of the followers, in both directions."""
    leader_bytes_per_query: float
    follower_limit_qps: float
    """A million divided by the follower's CPU: the rate of one follower that has a core to itself."""


class OfFollowers(msgspec.Struct, frozen=True, kw_only=True):
    """The cost with so many followers when all reads are hits."""

    followers: int
    cost: Cost


class OfGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """The cost with so much more data, read by popularity."""

    growth: int
    objects: int
    cache_mb: int
    cache_grows: bool
    cost: Cost


class CapacityFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run, as its JSON has it."""

    cpus: int
    object_bytes: int
    by_hit_rate: list[Cost]
    by_followers: list[OfFollowers]
    by_growth: list[OfGrowth]
    by_mix: list[Cost]
    """The published mix in single queries, a growing part of which is spread evenly over all keys."""
    costs: dict[str, Costs]
    """Costs by kind of query: the `PUBLISHED_MIX`, or objects in batches of so many."""
    assumptions: DeploymentAssumptions
    billion_reads: dict[str, Deployment]
    """Deployments by kind of query, as for the costs."""


def cost_of(batch: int, asked_hit_rate: float | None, results: Sequence[CapacityTurnResult]) -> Cost:
    """Combine the results of load processes that ran side by side.

    Each process saw all the work of the servers while it ran, which is averaged; the rates of their own queries add up.
    """
    rate = sum(each.queries / each.elapsed for each in results)
    hits, misses, leader_hits, leader_misses = (
        sum(counted.get(role, 0) for counted in counts)
        for role in ("follower", "leader")
        for counts in ([each.hits for each in results], [each.misses for each in results])
    )

    def a_query(values: Sequence[float]) -> float:
        # The servers' work per second is divided by the queries per second of all processes.
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
    """Return the measurement for the model."""
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


def costs_listing(measured: CapacityFigures) -> Listing:
    """Return the table of reads of objects."""
    rows: list[tuple[str, ...]] = [
        (f"batches of {each.batch}", *_cells(each), f"{each.follower_limit_qps:,.0f}") for each in measured.by_hit_rate
    ]
    return Listing(title="one follower by hit rate", columns=("", *_COLUMNS, "follower alone/s"), rows=rows)


def mix_listing(measured: CapacityFigures) -> Listing:
    """Return the table of the published mix."""
    rows: list[tuple[str, ...]] = [(f"{each.follower_limit_qps:,.0f}", *_cells(each)) for each in measured.by_mix]
    return Listing(title="the published mix, by hit rate", columns=("follower alone/s", *_COLUMNS), rows=rows)


def followers_listing(measured: CapacityFigures) -> Listing:
    """Return the table by number of followers."""
    rows: list[tuple[str, ...]] = [(f"{each.followers}", *_cells(each.cost)) for each in measured.by_followers]
    return Listing(title="all hits, by followers", columns=("followers", *_COLUMNS), rows=rows)


def growth_listing(measured: CapacityFigures) -> Listing:
    """Return the table by size of the data."""
    rows: list[tuple[str, ...]] = [
        (f"× {each.growth}, {each.objects:,} objects, cache of {each.cache_mb} MB", *_cells(each.cost))
        for each in measured.by_growth
    ]
    return Listing(title="data that grows", columns=("read by popularity", *_COLUMNS), rows=rows)


def fitted_listing(measured: CapacityFigures) -> Listing:
    """Return the table of the fitted costs, by kind of query."""
    cpu = ("hit_us", "miss_us", "leader_hit_us", "leader_miss_us", "database_us")
    traffic = ("hit_bytes", "miss_bytes", "database_bytes")
    rows: list[tuple[str, ...]] = [
        (asked, *(f"{getattr(each, name):.1f}" for name in cpu), *(f"{getattr(each, name):,.0f}" for name in traffic))
        for asked, each in measured.costs.items()
    ]
    columns = (
        *("asked", "follower: hit, µs", "miss, µs", "leader: hit, µs", "miss, µs", "database, µs"),
        *("follower: hit, bytes", "miss, bytes", "leader to database, bytes"),
    )
    return Listing(title="fitted costs", columns=columns, rows=rows)


def billion_listing(measured: CapacityFigures) -> Listing:
    """Return the table of the servers that a billion reads per second need, by kind of query."""
    rows: list[tuple[str, ...]] = [
        (
            asked,
            *(_servers(each) for each in (found.follower, found.leader, found.database)),
            f"{found.reads_per_follower_server:,.0f}",
        )
        for asked, found in measured.billion_reads.items()
    ]
    rows.append(("TAO", *("not published",) * 4))
    columns = ("asked", "followers", "leaders", "databases", "reads/s of a follower server")
    title = "a billion reads a second: servers for the CPU / for the network (Gbit/s of all)"
    return Listing(title=title, columns=columns, rows=rows)


def _servers(found: Servers) -> str:
    return f"{found.for_cpu:,} / {found.for_network:,} ({found.network_gbit:,.0f})"
