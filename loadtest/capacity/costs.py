"""The costs of queries under a load, as the JSON of `capacity` and its tables have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from loadtest.capacity.jobs import CapacityTurnResult
from loadtest.capacity.model import Cost, Costs, Deployment, DeploymentAssumptions
from loadtest.results import Listing
from loadtest.table import listing

PUBLISHED_MIX: Final = "the published mix"


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

    def a_query(name: str) -> float:
        # The servers' work per second is divided by the queries per second of all processes.
        return sum(each.servers[name] / each.elapsed for each in results) / len(results) / rate

    def hit_rate(role: str) -> float | None:
        hits, misses = (sum(each.servers[f"{role}_{name}"] for each in results) for name in ("hits", "misses"))
        return hits / (hits + misses) if hits + misses else None

    follower_us = 1e6 * a_query("follower_cpu")
    return Cost(
        batch=batch,
        asked_hit_rate=asked_hit_rate,
        hit_rate=hit_rate("follower") or 0.0,
        leader_hit_rate=hit_rate("leader"),
        throughput_qps=round(rate, 1),
        p50_ms=max(each.p50_ms for each in results),
        p99_ms=max(each.p99_ms for each in results),
        follower_us=round(follower_us, 2),
        leader_us=round(1e6 * a_query("leader_cpu"), 2),
        database_us=round(1e6 * a_query("database_cpu"), 2),
        client_us=round(1e6 * sum(each.client_cpu / each.elapsed for each in results) / rate, 2),
        leader_hits_per_query=a_query("leader_hits"),
        leader_misses_per_query=a_query("leader_misses"),
        bytes_per_query=round(a_query("follower_io_bytes"), 1),
        leader_bytes_per_query=round(a_query("leader_io_bytes"), 1),
        follower_limit_qps=round(1e6 / follower_us, 1) if follower_us else 0.0,
    )


_COST_CELLS: Final = {
    "hit rate": "{of.hit_rate:.1%}",
    "queries/s": "{of.throughput_qps:,.0f}",
    "p50 ms": "{of.p50_ms:.1f}",
    "p99 ms": "{of.p99_ms:.1f}",
    "follower µs": "{of.follower_us:.1f}",
    "leader µs": "{of.leader_us:.1f}",
    "database µs": "{of.database_us:.1f}",
    "client µs": "{of.client_us:.1f}",
    "follower alone/s": "{of.follower_limit_qps:,.0f}",
}
_FITTED_CELLS: Final = {
    "follower: hit, µs": "{of.hit_us:.1f}",
    "miss, µs": "{of.miss_us:.1f}",
    "leader: hit, µs": "{of.leader_hit_us:.1f}",
    "leader: miss, µs": "{of.leader_miss_us:.1f}",
    "database, µs": "{of.database_us:.1f}",
    "follower: hit, bytes": "{of.hit_bytes:,.0f}",
    "miss, bytes": "{of.miss_bytes:,.0f}",
    "leader to database, bytes": "{of.database_bytes:,.0f}",
}
_SERVER_CELLS: Final = {
    f"{role}s": f"{{of.{role}.for_cpu:,}} / {{of.{role}.for_network:,}} ({{of.{role}.network_gbit:,.0f}})"
    for role in ("follower", "leader", "database")
} | {"reads/s of a follower server": "{of.reads_per_follower_server:,.0f}"}
"""Templates by column; ``of`` is what was measured."""


def listings(measured: CapacityFigures, even_shares: Sequence[float]) -> list[Listing]:
    """Return all tables; ``even_shares`` are the parts of the published mix that were spread evenly."""
    objects = ((f"batches of {cost.batch}", cost) for cost in measured.by_hit_rate)
    mix = zip((f"{share:.0%} spread evenly" for share in even_shares), measured.by_mix, strict=True)
    followers = ((f"{of.followers}", of.cost) for of in measured.by_followers)
    growth = (
        (f"× {of.growth}, {of.objects:,} objects, cache of {of.cache_mb} MB", of.cost) for of in measured.by_growth
    )
    billion = "a billion reads a second: servers for the CPU / for the network (Gbit/s of all)"
    return [
        _listing("one follower by hit rate", "", _COST_CELLS, objects),
        _listing("the published mix, by hit rate", "", _COST_CELLS, mix),
        _listing("all hits, by followers", "followers", _COST_CELLS, followers),
        _listing("data that grows", "read by popularity", _COST_CELLS, growth),
        _listing("fitted costs", "asked", _FITTED_CELLS, measured.costs.items()),
        _listing(billion, "asked", _SERVER_CELLS, measured.billion_reads.items()),
    ]


def _listing(title: str, first: str, cells: Mapping[str, str], rows: Iterable[tuple[str, object]]) -> Listing:
    """Return a table with a row for each value, whose columns are made of its fields."""
    return listing({first: "{name}", **cells}, ({"name": name, "of": of} for name, of in rows), title)
