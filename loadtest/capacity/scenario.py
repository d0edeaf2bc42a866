"""Scenario `capacity`: one follower by hit rate (the paper's figure 7), more followers, more data; and from these costs
what a billion reads a second take.

On a machine of few cores the client, the leader and the database take theirs from the follower's: rates tell what the
machine does, CPU per query what a follower costs. Both are reported; the model is made of the second.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from os import cpu_count
from pathlib import Path
from typing import Final

import msgspec

from loadtest.capacity.capacity_client import SKEW, CapacityJob, GrowJob, Turn, TurnResult
from loadtest.capacity.model import Assumptions, Costs, Deployment, Point, deployment, fit
from loadtest.client_process import run_job
from loadtest.published import figures
from loadtest.published.run import SCHEMA
from loadtest.results import Listing, Quantity, ScenarioResult
from loadtest.scenario import BenchSettings, Progress, check_bounds
from loadtest.waiting import together
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.server_options import Durability
from tao.model.errors import OperatorError

SUMMARY: Final = "one follower by hit rate, more followers, more data, and a model of a billion reads a second"
_SHAPE: Final = Shape(tiers=1, followers=1, leaders=1, databases=1, shards=16)
_TIER: Final = "tier-1"
_HIT_RATES: Final = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
_BATCHES: Final = (1, 20)
_GROWTHS: Final = (1, 10, 100)
_SMALLEST_MB: Final = 1
_ENTRY_BYTES: Final = 160
"""Of an object's headers, roughly, for how many keys are read before by popularity."""
_LOAD_PROCESSES: Final = 2
"""That ask several followers at once; one would be the limit itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySettings:
    """What a run consists of. Raises `OperatorError` for numbers out of bounds."""

    objects: int = 3_000
    """At ×1, of the paper's mean size: 2 MB, of which the smallest cache there is holds two fifths."""
    growths: tuple[int, ...] = _GROWTHS
    hit_rates: tuple[float, ...] = _HIT_RATES
    followers: tuple[int, ...] = (1, 2, 4)
    residents: int = 1_000
    awaiters: int = 64
    seconds: float = 3.0
    """Of each turn."""

    def __post_init__(self) -> None:
        check_bounds(
            {
                "--objects": (self.objects, 100, 1_000_000),
                "--awaiters": (self.awaiters, 1, 10_000),
                "--seconds": (self.seconds, 0.1, 600),
            }
        )
        if [*self.growths] != sorted({each for each in self.growths if 1 <= each <= 1_000}) or not self.growths:
            raise OperatorError("--growths: each from 1 to 1000, in ascending order")
        if not all(1 <= each <= 16 for each in self.followers):
            raise OperatorError("--followers: each from 1 to 16")


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
    leader_misses_per_query: float
    bytes_per_query: float
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
    costs: dict[str, Costs]
    """By batch."""
    assumptions: Assumptions
    billion_reads: dict[str, Deployment]
    """By batch."""


async def run(
    settings: BenchSettings,
    progress: Progress,
    wanted: CapacitySettings | None = None,
    plot_file: Path | None = None,
) -> ScenarioResult:
    """See `SUMMARY`; ``plot_file``: a PNG to draw. Raises `OperatorError`."""
    capacity = wanted or CapacitySettings()
    if settings.toy:
        capacity = CapacitySettings(
            objects=3_000, growths=(1,), hit_rates=(0.5, 1.0), followers=(1,), residents=100, awaiters=8, seconds=0.3
        )
    measured = await _Run(settings, progress, capacity).measured()
    if plot_file is not None:
        # Loaded here: it takes a second, which a run without a plot need not wait for.
        from loadtest.report.plots import draw_capacity

        draw_capacity(msgspec.to_builtins(measured), plot_file)
    return ScenarioResult(
        summary=SUMMARY,
        conditions={"object_bytes": measured.object_bytes, "awaiters": capacity.awaiters, "skew": SKEW},
        quantities=[
            Quantity(
                name=f"a billion reads/s in batches of {batch}: {name}", value=getattr(found, name), unit="servers"
            )
            for batch, found in measured.billion_reads.items()
            for name in ("follower_servers", "leader_servers", "database_servers")
        ],
        listings=[_costs(measured), _followers(measured), _growth(measured)],
        notes=[
            f"All processes share {measured.cpus} cores; 'follower alone' is a million divided by its CPU per query.",
            f"A billion reads: {msgspec.json.encode(measured.assumptions).decode()}",
        ],
        measured=msgspec.to_builtins(measured),
    )


class _Run:
    """Cluster after cluster over one folder of data."""

    def __init__(self, settings: BenchSettings, progress: Progress, capacity: CapacitySettings) -> None:
        self._settings = settings
        self._progress = progress
        self._capacity = capacity
        self._ids_file = str(settings.work_dir / "ids.bin")
        self._object_bytes = round(figures.atc13().data_bytes["object_mean"])

    async def measured(self) -> Measured:
        """In the order in which data grows."""
        capacity = self._capacity
        by_hit_rate, by_followers, by_growth = list[Cost](), list[OfFollowers](), list[OfGrowth]()
        middle = capacity.growths[len(capacity.growths) // 2]
        for growth in capacity.growths:
            for cache_mb in sorted({_SMALLEST_MB, _SMALLEST_MB * growth}):
                async with self._cluster(cache_mb) as cluster:
                    await self._grow(cluster, growth)
                    cost = await self._by_popularity(cluster, cache_mb, growth)
                    grows = cache_mb > _SMALLEST_MB or growth == 1
                    by_growth.append(
                        OfGrowth(
                            growth=growth,
                            objects=capacity.objects * growth,
                            cache_mb=cache_mb,
                            cache_grows=grows,
                            cost=cost,
                        )
                    )
                    if growth == middle and grows:
                        by_hit_rate = await self._by_hit_rate(cluster, cache_mb)
                        if 1 in capacity.followers:
                            by_followers.append(OfFollowers(followers=1, cost=await self._all_hits(cluster)))
            if growth == middle:
                for followers in sorted({*capacity.followers} - {1}):
                    async with self._cluster(_SMALLEST_MB * growth, followers) as cluster:
                        by_followers.append(OfFollowers(followers=followers, cost=await self._all_hits(cluster)))
        costs = {str(batch): fit([_point(each) for each in by_hit_rate if each.batch == batch]) for batch in _BATCHES}
        return Measured(
            cpus=cpu_count() or 1,
            object_bytes=self._object_bytes,
            by_hit_rate=by_hit_rate,
            by_followers=by_followers,
            by_growth=by_growth,
            costs=costs,
            assumptions=Assumptions(),
            billion_reads={batch: deployment(each, Assumptions()) for batch, each in costs.items()},
        )

    @asynccontextmanager
    async def _cluster(self, cache_mb: int, followers: int = 1) -> AsyncIterator[DevCluster]:
        cluster_settings = ClusterSettings(
            state_dir=self._settings.work_dir / "capacity",
            shape=msgspec.structs.replace(_SHAPE, followers=followers),
            schema_file=SCHEMA,
            buffer_pool_mb=64 if self._settings.toy else 512,
            durability=Durability.RELAXED,
            cache_mb=cache_mb,
            log_level="warning",
        )
        async with DevCluster(cluster_settings, self._progress.step) as cluster:
            database = cluster.database("db-1")
            self._settings.versions[database.binary.flavour] = database.binary.version_text
            yield cluster

    async def _grow(self, cluster: DevCluster, growth: int) -> None:
        job = GrowJob(
            topology_file=str(cluster.topology_path),
            ids_file=self._ids_file,
            objects=self._capacity.objects * growth,
            object_bytes=self._object_bytes,
            shards=_SHAPE.shards,
        )
        await run_job(job, self._progress, self._settings.work_dir / "grow.log", int)

    async def _by_popularity(self, cluster: DevCluster, cache_mb: int, growth: int) -> Cost:
        turn = Turn(resident=None, batch=1, seconds=self._capacity.seconds)
        warm_keys = min(self._held(cache_mb), self._capacity.objects * growth)
        ((result,),) = await self._asked(cluster, [turn], warm_keys=warm_keys)
        return cost_of(turn, [result])

    def _held(self, cache_mb: int) -> int:
        return (cache_mb << 20) // (self._object_bytes + _ENTRY_BYTES)

    async def _by_hit_rate(self, cluster: DevCluster, cache_mb: int) -> list[Cost]:
        capacity = self._capacity
        turns = [
            Turn(resident=share, batch=batch, seconds=capacity.seconds)
            for batch in _BATCHES
            for share in capacity.hit_rates
        ]
        (results,) = await self._asked(cluster, turns, warm_keys=self._held(cache_mb))
        return [cost_of(turn, [result]) for turn, result in zip(turns, results, strict=True)]

    async def _all_hits(self, cluster: DevCluster) -> Cost:
        turn = Turn(resident=1.0, batch=_BATCHES[-1], seconds=self._capacity.seconds)
        results = await self._asked(cluster, [turn], processes=_LOAD_PROCESSES)
        return cost_of(turn, [result for (result,) in results])

    async def _asked(
        self, cluster: DevCluster, turns: Sequence[Turn], *, warm_keys: int = 0, processes: int = 1
    ) -> list[list[TurnResult]]:
        pids = {process.name: process.pid for process in (await cluster.status()).processes}
        names = {
            role: [name for name, of in cluster.processes.items() if of is role]
            for role in (Role.FOLLOWER, Role.LEADER, Role.DATABASE)
        }
        job = CapacityJob(
            topology_file=str(cluster.topology_path),
            tier=_TIER,
            ids_file=self._ids_file,
            number=0,
            residents=self._capacity.residents,
            warm_keys=warm_keys,
            awaiters=self._capacity.awaiters,
            turns=tuple(turns),
            admins={role: [cluster.admin(name) for name in names[role]] for role in (Role.FOLLOWER, Role.LEADER)},
            pids={role: [pids[name] for name in names[role]] for role in names},
        )
        jobs = [msgspec.structs.replace(job, number=number) for number in range(processes)]
        log = self._settings.work_dir
        return await together(
            run_job(each, self._progress, log / f"capacity-{each.number}.log", list[TurnResult]) for each in jobs
        )


def cost_of(turn: Turn, results: Sequence[TurnResult]) -> Cost:
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
        batch=turn.batch,
        asked_hit_rate=turn.resident,
        hit_rate=hits / max(1, hits + misses),
        leader_hit_rate=leader_hits / (leader_hits + leader_misses) if leader_hits + leader_misses else None,
        throughput_qps=round(rate, 1),
        p50_ms=max(each.p50_ms for each in results),
        p99_ms=max(each.p99_ms for each in results),
        follower_us=round(follower_us, 2),
        leader_us=round(1e6 * a_query([each.cpu["leader"] for each in results]), 2),
        database_us=round(1e6 * a_query([each.cpu["database"] for each in results]), 2),
        client_us=round(1e6 * sum(each.client_cpu / each.elapsed for each in results) / rate, 2),
        leader_misses_per_query=a_query([each.misses["leader"] for each in results]),
        bytes_per_query=round(a_query([each.socket_bytes for each in results]), 1),
        follower_limit_qps=round(1e6 / follower_us, 1) if follower_us else 0.0,
    )


def _point(cost: Cost) -> Point:
    return Point(
        hit_rate=cost.hit_rate,
        follower_us=cost.follower_us,
        leader_us=cost.leader_us,
        database_us=cost.database_us,
        leader_misses=cost.leader_misses_per_query,
        bytes_per_query=cost.bytes_per_query,
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


def _costs(measured: Measured) -> Listing:
    rows: list[tuple[str, ...]] = [
        (f"batches of {each.batch}", *_cells(each), f"{each.follower_limit_qps:,.0f}") for each in measured.by_hit_rate
    ]
    return Listing(title="one follower by hit rate", columns=("", *_COLUMNS, "follower alone/s"), rows=rows)


def _followers(measured: Measured) -> Listing:
    rows: list[tuple[str, ...]] = [(f"{each.followers}", *_cells(each.cost)) for each in measured.by_followers]
    return Listing(title="all hits, by followers", columns=("followers", *_COLUMNS), rows=rows)


def _growth(measured: Measured) -> Listing:
    rows: list[tuple[str, ...]] = [
        (f"× {each.growth}, {each.objects:,} objects, cache of {each.cache_mb} MB", *_cells(each.cost))
        for each in measured.by_growth
    ]
    return Listing(title="data that grows", columns=("read by popularity", *_COLUMNS), rows=rows)
