"""From measured costs to a deployment: the servers that so many reads per second need, under stated assumptions. Pure.

A query's CPU time at each process is assumed to be linear in how far down it goes. A hit costs the follower one amount
and a miss another (as the paper's figure 7 has throughput). A leader works for misses of followers alone, of which its
own hits cost one amount and its misses another; a database works for misses of leaders alone. Bytes follow the same
paths. All costs are least-squares fits over measurements at several hit rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from statistics import linear_regression
from typing import Final

import msgspec

_MICRO: Final = 1e-6
_BITS: Final = 8
_TOGETHER: Final = 1e-3
"""Closeness at which two measures count as growing together: their separate parts in a sum are then chance."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement: a period of load; CPU in microseconds per query of the clients."""

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
    """Share of a query that the leader answered from its memory."""
    leader_misses_per_query: float
    """Share of a query that the leader had to fetch."""
    bytes_per_query: float
    """Bytes that the followers read and wrote."""
    leader_bytes_per_query: float
    follower_limit_qps: float
    """A million divided by the follower's CPU: the rate of one follower that has a core to itself."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """CPU in microseconds, of one core of the machine measured."""

    hit_us: float
    miss_us: float
    """CPU of the follower, including the part of a hit."""
    leader_hit_us: float
    """CPU of a follower's miss that the leader answers."""
    leader_miss_us: float
    """CPU of a follower's miss that the leader has to fetch."""
    database_us: float
    """CPU of a leader's miss."""
    hit_bytes: float
    """Bytes through a follower's network interface, in both directions."""
    miss_bytes: float
    """Bytes of a miss; the part above those of a hit goes between follower and leader."""
    database_bytes: float
    """Bytes between leader and database for one miss of a leader, including the spool of its writes, which no counter
    separates."""


class DeploymentAssumptions(msgspec.Struct, frozen=True, kw_only=True):
    """The figures that this benchmark does not measure."""

    reads_per_second: float = 1e9
    hit_rate: float = 0.964
    """Hit rate of followers: the paper's (section 8)."""
    leader_hit_rate: float = 0.5
    """Share of the followers' misses that a leader answers. Not published."""
    write_share: float = 0.002
    """Share of writes in all requests (section 7). A write counts as a miss all the way down, as in figure 7."""
    cores: int = 16
    """Cores of a server: two Xeon E5-2660 of 8 cores (section 8), each taken to be as fast as one measured here."""
    utilisation: float = 0.5
    """Share of a server's cores used at the peak: room for the loss of a tier, and for other peaks."""
    network_gbit: float = 10.0
    """Rate of a server's interface (section 8) in each direction. The traffic of both directions is counted against it,
    to the same ``utilisation``."""


def fit(points: Sequence[Cost]) -> Costs:
    """Raises `ValueError` when all points have one hit rate."""
    if len({each.hit_rate for each in points}) < 2:
        raise ValueError("costs need measurements at two hit rates at least")
    hit_rates = [each.hit_rate for each in points]
    slope_us, miss_us = linear_regression(hit_rates, [each.follower_us for each in points])
    slope_bytes, miss_bytes = linear_regression(hit_rates, [each.bytes_per_query for each in points])
    # A miss is the work of a hit and more, never less. Where few of the leader's reads are hits, chance could say
    # otherwise.
    asked = [each.leader_hits_per_query + each.leader_misses_per_query for each in points]
    fetched = [each.leader_misses_per_query for each in points]
    leader_us, fetching_us = fitted_parts(
        [(reads, misses, each.leader_us) for reads, misses, each in zip(asked, fetched, points, strict=True)]
    )
    below = sum(each.leader_bytes_per_query for each in points) - max(0.0, -slope_bytes) * sum(asked)
    leader_misses = sum(fetched) or inf
    return Costs(
        hit_us=miss_us + slope_us,
        miss_us=miss_us,
        leader_hit_us=leader_us,
        leader_miss_us=leader_us + fetching_us,
        database_us=sum(each.database_us for each in points) / leader_misses,
        hit_bytes=miss_bytes + slope_bytes,
        miss_bytes=miss_bytes,
        database_bytes=max(0.0, below) / leader_misses,
    )


def fitted_parts(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit ``value = x * a + y * b`` by least squares over ``(a, b, value)``, with neither ``x`` nor ``y`` below 0.

    The fit goes through the origin: without misses there is no work, and the cost of heartbeats must not be taken for
    it. Where ``a`` and ``b`` always grow together, their parts cannot be separated, and both cost the same.
    """
    aa, ab, bb = (sum(a * a for a, _, _ in points), sum(a * b for a, b, _ in points), sum(b * b for _, b, _ in points))
    av, bv = sum(a * value for a, _, value in points), sum(b * value for _, b, value in points)
    determinant = aa * bb - ab * ab
    if determinant <= _TOGETHER * aa * bb:
        both = sum((a + b) ** 2 for a, b, _ in points)
        same = (av + bv) / both if both else 0.0
        return same, same
    x, y = (av * bb - bv * ab) / determinant, (bv * aa - av * ab) / determinant
    if x < 0:
        return 0.0, bv / bb
    if y < 0:
        return av / aa, 0.0
    return x, y


class Servers(msgspec.Struct, frozen=True, kw_only=True):
    """The servers of one role; ``servers`` is the larger of the numbers needed for the CPU and for the network."""

    cores: float
    for_cpu: int
    network_gbit: float
    """Traffic of all of them together, in both directions."""
    for_network: int
    servers: int


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """The servers of a deployment; ``databases`` are those of all regions together."""

    follower: Servers
    leader: Servers
    database: Servers
    reads_per_follower_server: float


def deployment(costs: Costs, assumed: DeploymentAssumptions) -> Deployment:
    """Return the deployment: followers for every request, leaders for misses and writes, databases for the leaders'
    misses and for writes."""
    requests = assumed.reads_per_second / (1 - assumed.write_share)
    writes = requests * assumed.write_share
    misses = assumed.reads_per_second * (1 - assumed.hit_rate)
    hits = assumed.reads_per_second - misses
    leader_hits = misses * assumed.leader_hit_rate
    below = misses - leader_hits + writes
    between = max(0.0, costs.miss_bytes - costs.hit_bytes) * (misses + writes)
    follower = _servers(
        hits * costs.hit_us + (misses + writes) * costs.miss_us,
        hits * costs.hit_bytes + (misses + writes) * costs.miss_bytes,
        assumed,
    )
    return Deployment(
        follower=follower,
        leader=_servers(
            leader_hits * costs.leader_hit_us + below * costs.leader_miss_us,
            between + below * costs.database_bytes,
            assumed,
        ),
        database=_servers(below * costs.database_us, below * costs.database_bytes, assumed),
        reads_per_follower_server=assumed.reads_per_second / max(1, follower.servers),
    )


def _servers(busy_us: float, traffic_bytes: float, assumed: DeploymentAssumptions) -> Servers:
    """Size one role; ``busy_us`` is microseconds of CPU per second, ``traffic_bytes`` bytes per second."""
    cores, gbit = busy_us * _MICRO, traffic_bytes * _BITS / 1e9
    for_cpu = ceil(cores / (assumed.cores * assumed.utilisation))
    for_network = ceil(gbit / (assumed.network_gbit * assumed.utilisation))
    return Servers(
        cores=cores, for_cpu=for_cpu, network_gbit=gbit, for_network=for_network, servers=max(for_cpu, for_network)
    )
