"""From measured costs to a deployment: what so many reads a second take, and under which assumptions. Pure.

A query's CPU time at each process is taken to be linear in how far down it goes: a hit costs the follower one amount,
a miss another (as the paper's figure 7 has throughput), a leader works for misses of followers alone, a database for
misses of leaders alone. Costs are least-squares fits over measurements at several hit rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

import msgspec

_MICRO: Final = 1e-6
_BITS: Final = 8


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement; CPU in microseconds per query of the clients. ``leader_misses``: of one query, the share that
    the leader had to fetch."""

    hit_rate: float
    follower_us: float
    leader_us: float
    database_us: float
    leader_misses: float
    bytes_per_query: float


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """CPU in microseconds, of one core of the machine measured."""

    hit_us: float
    miss_us: float
    """At the follower, the hit's part included."""
    leader_us: float
    """Of one miss of a follower."""
    database_us: float
    """Of one miss of a leader."""
    hit_bytes: float
    """Through a follower's network interface, both ways."""
    miss_bytes: float


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is not measured here."""

    reads_per_second: float = 1e9
    hit_rate: float = 0.964
    """Of followers; the paper's (section 8)."""
    leader_hit_rate: float = 0.5
    """Share of the followers' misses that a leader answers. Not published."""
    write_share: float = 0.002
    """Of all requests (section 7). A write counts as a miss all the way down, as in figure 7."""
    cores: int = 16
    """Of a server: two Xeon E5-2660 of 8 cores (section 8), each taken to be as fast as one measured here."""
    utilisation: float = 0.5
    """Of a server's cores at the peak: room for the loss of a tier, and for other peaks."""
    network_gbit: float = 10.0
    """Of a server's interface (section 8)."""


@dataclass(frozen=True, slots=True)
class _Line:
    """``at_one`` and ``at_zero``: the fitted values at hit rates 1 and 0."""

    at_one: float
    at_zero: float


def fitted_line(points: Sequence[tuple[float, float]]) -> _Line:
    """Least squares over ``(hit rate, value)``. Raises `ValueError` when all have one hit rate."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / max(1, count)
    mean_y = sum(y for _, y in points) / max(1, count)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        raise ValueError("costs need measurements at two hit rates at least")
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return _Line(mean_y + slope * (1 - mean_x), mean_y - slope * mean_x)


def fit(points: Sequence[Point]) -> Costs:
    """Raises `ValueError` when all points have one hit rate."""
    follower = fitted_line([(each.hit_rate, each.follower_us) for each in points])
    traffic = fitted_line([(each.hit_rate, each.bytes_per_query) for each in points])
    misses = sum(1 - each.hit_rate for each in points)
    leader_misses = sum(each.leader_misses for each in points)
    return Costs(
        hit_us=follower.at_one,
        miss_us=follower.at_zero,
        # Through the origin: without misses there is no work, and what heartbeats cost should not be taken for it.
        leader_us=sum(each.leader_us for each in points) / misses,
        database_us=sum(each.database_us for each in points) / leader_misses if leader_misses else 0.0,
        hit_bytes=traffic.at_one,
        miss_bytes=traffic.at_zero,
    )


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes, of servers as assumed; databases of all regions together."""

    follower_cores: float
    follower_servers: int
    """The most of what CPU and network ask for."""
    leader_cores: float
    leader_servers: int
    database_cores: float
    database_servers: int
    follower_network_gbit: float
    """Of all followers together."""
    reads_per_follower_server: float
    follower_servers_for_network: int


def deployment(costs: Costs, assumed: Assumptions) -> Deployment:
    """Followers for every request, leaders for misses and writes, databases for what leaders miss and for writes."""
    requests = assumed.reads_per_second / (1 - assumed.write_share)
    writes = requests * assumed.write_share
    misses = assumed.reads_per_second * (1 - assumed.hit_rate)
    hits = assumed.reads_per_second - misses
    below = misses * (1 - assumed.leader_hit_rate) + writes
    follower_cores = (hits * costs.hit_us + (misses + writes) * costs.miss_us) * _MICRO
    leader_cores = (misses + writes) * costs.leader_us * _MICRO
    database_cores = below * costs.database_us * _MICRO
    gbit = (hits * costs.hit_bytes + (misses + writes) * costs.miss_bytes) * _BITS / 1e9
    usable = assumed.cores * assumed.utilisation
    for_network = ceil(gbit / (assumed.network_gbit * assumed.utilisation))
    followers = max(ceil(follower_cores / usable), for_network)
    return Deployment(
        follower_cores=follower_cores,
        follower_servers=followers,
        leader_cores=leader_cores,
        leader_servers=ceil(leader_cores / usable),
        database_cores=database_cores,
        database_servers=ceil(database_cores / usable),
        follower_network_gbit=gbit,
        reads_per_follower_server=assumed.reads_per_second / max(1, followers),
        follower_servers_for_network=for_network,
    )
