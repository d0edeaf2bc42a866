"""Scenario `capacity`: one follower by hit rate (the paper's figure 7), more followers, and more data; and the servers
that a billion reads per second need at these costs.

On a machine of few cores the client, the leader and the database compete with the follower for CPU: rates show what the
machine does, CPU per query what a follower costs. Both are reported; the model uses the CPU per query.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from os import cpu_count
from typing import Final

import msgspec

from loadtest.capacity.costs import (
    PUBLISHED_MIX,
    CapacityFigures,
    Cost,
    OfFollowers,
    OfGrowth,
    billion_listing,
    cost_of,
    costs_listing,
    fitted_listing,
    followers_listing,
    growth_listing,
    mix_listing,
    point_of,
)
from loadtest.capacity.jobs import SKEW, CapacityJob, CapacityTurn, CapacityTurnResult, GrowJob, MixJob
from loadtest.capacity.model import DeploymentAssumptions, deployment, fit
from loadtest.client_process import run_job
from loadtest.conditions import together
from loadtest.options import AWAITERS, FOLLOWER_COUNTS, GROWTHS, OBJECTS, SECONDS, Options
from loadtest.published.jobs import FillJob, Subject
from loadtest.published.run import SCHEMA
from loadtest.published.workload import tao_atc13
from loadtest.results import ScenarioResult, at_most
from loadtest.scenario import BenchSettings, Progress, Scenario
from loadtest.target import OWN_TIER, pids_of, versions_of
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.model.errors import OperatorError

_SHAPE: Final = Shape(tiers=1, followers=1, leaders=1, databases=1, shards=16)
_HIT_RATES: Final = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
"""Shares of the reads that are for resident keys; other keys hit as well, so that the lowest hit rate is about a
half."""
_BATCHES: Final = (1, 20)
_HIT_US: Final = 25.0
"""The aim for a follower's CPU: one core then answers 40,000 hits per second, with room for its other work."""
_SMALLEST_MB: Final = 1
_ENTRY_BYTES: Final = 160
"""Rough size of an object's headers, from which the number of keys read before reads by popularity follows."""
_WORKLOAD: Final = "tao_atc13"
_MIX_CACHE_SHARE: Final = 0.2
_EVEN_SHARES: Final = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Shares of the published mix that are spread evenly: from none to a mix that a cache of a fifth cannot help."""
_LOAD_PROCESSES: Final = 2
"""Load processes that ask several followers at once; a single one would itself be the limit."""


@dataclass(frozen=True, kw_only=True)
class CapacityOptions(Options):
    """The options of `capacity`, and the sizes that only the toy run changes."""

    objects: int = OBJECTS.default(3_000)
    """Objects of the paper's mean size: 2 MB, of which the smallest cache holds two fifths."""
    growths: tuple[int, ...] = GROWTHS.default((1, 10, 100))
    followers: tuple[int, ...] = FOLLOWER_COUNTS.default((1, 2, 4))
    awaiters: int = AWAITERS.default(64)
    seconds: float = SECONDS.default(3.0, help="Measured seconds of each turn.")
    hit_rates: tuple[float, ...] = _HIT_RATES
    residents: int = 1_000
    mix_nodes: int = 6_000
    """Nodes of the graph of which the published mix is asked."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if [*self.growths] != sorted({*self.growths}) or not self.growths:
            raise OperatorError("--growths: give each once, in ascending order")


async def run(settings: BenchSettings, progress: Progress, capacity: CapacityOptions) -> ScenarioResult:
    """Measure one follower, more followers and more data, and fit the model. Raises `OperatorError`."""
    if settings.toy:
        capacity = replace(
            capacity,
            objects=3_000,
            growths=(1,),
            hit_rates=(0.5, 1.0),
            followers=(1,),
            residents=100,
            mix_nodes=400,
            awaiters=8,
            seconds=0.1,
        )
    measured = await _CapacityRun(settings, progress, capacity).measured()
    return ScenarioResult(
        summary=SCENARIO.summary,
        conditions={"object_bytes": measured.object_bytes, "awaiters": capacity.awaiters, "skew": SKEW},
        listings=[
            costs_listing(measured),
            mix_listing(measured),
            followers_listing(measured),
            growth_listing(measured),
            fitted_listing(measured),
            billion_listing(measured),
        ],
        notes=[
            f"All processes share {measured.cpus} cores; 'follower alone' is a million divided by its CPU per query.",
            f"A billion reads: {msgspec.json.encode(measured.assumptions).decode()}",
        ],
        aims=[
            at_most(f"a hit takes at most {_HIT_US:g} µs of a follower", each.hit_us, _HIT_US, asked)
            for asked, each in measured.costs.items()
        ],
        measured=msgspec.to_builtins(measured),
    )


SCENARIO: Final = Scenario(
    name="capacity",
    summary="one follower by hit rate, more followers, more data, and a model of a billion reads a second",
    run=run,
    options=CapacityOptions,
    help="""Measure one follower by hit rate, more followers and more data, and model a billion reads a second.""",
    has_plot=True,
)


class _CapacityRun:
    """Runs cluster after cluster over one folder of data."""

    def __init__(self, settings: BenchSettings, progress: Progress, capacity: CapacityOptions) -> None:
        self._settings = settings
        self._progress = progress
        self._capacity = capacity
        self._ids_file = str(settings.work_dir / "ids.bin")
        self._object_bytes = round(tao_atc13().object_bytes.mean)

    async def measured(self) -> CapacityFigures:
        """Measure in the order in which the data grows."""
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
        by_mix = await self._by_mix()
        costs = {PUBLISHED_MIX: fit([point_of(each) for each in by_mix])}
        for batch in _BATCHES:
            objects = [point_of(each) for each in by_hit_rate if each.batch == batch]
            costs[f"objects alone, batches of {batch}"] = fit(objects)
        return CapacityFigures(
            cpus=cpu_count() or 1,
            object_bytes=self._object_bytes,
            by_hit_rate=by_hit_rate,
            by_followers=by_followers,
            by_growth=by_growth,
            by_mix=by_mix,
            costs=costs,
            assumptions=DeploymentAssumptions(),
            billion_reads={asked: deployment(each, DeploymentAssumptions()) for asked, each in costs.items()},
        )

    @asynccontextmanager
    async def _cluster(
        self, cache_mb: float, followers: int = 1, folder: str = "capacity"
    ) -> AsyncIterator[DevCluster]:
        cluster_settings = ClusterSettings(
            state_dir=self._settings.work_dir / folder,
            shape=msgspec.structs.replace(_SHAPE, followers=followers),
            schema_file=SCHEMA,
            buffer_pool_mb=64 if self._settings.toy else 512,
            durability=Durability.RELAXED,
            cache_mb=cache_mb,
            log_level="warning",
        )
        async with DevCluster(cluster_settings, self._progress.step) as cluster:
            database = cluster.database("db-1")
            self._settings.versions.update(versions_of(database))
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
        turn = CapacityTurn(resident=None, batch=1, seconds=self._capacity.seconds)
        warm_keys = min(self._held(cache_mb), self._capacity.objects * growth)
        ((result,),) = await self._asked(cluster, [turn], warm_keys=warm_keys)
        return cost_of(turn.batch, None, [result])

    def _held(self, cache_mb: int) -> int:
        return (cache_mb << 20) // (self._object_bytes + _ENTRY_BYTES)

    async def _by_hit_rate(self, cluster: DevCluster, cache_mb: int) -> list[Cost]:
        capacity = self._capacity
        turns = [
            CapacityTurn(resident=share, batch=batch, seconds=capacity.seconds)
            for batch in _BATCHES
            for share in capacity.hit_rates
        ]
        (results,) = await self._asked(cluster, turns, warm_keys=self._held(cache_mb))
        return [cost_of(turn.batch, turn.resident, [result]) for turn, result in zip(turns, results, strict=True)]

    async def _all_hits(self, cluster: DevCluster) -> Cost:
        turn = CapacityTurn(resident=1.0, batch=_BATCHES[-1], seconds=self._capacity.seconds)
        results = await self._asked(cluster, [turn], processes=_LOAD_PROCESSES)
        return cost_of(turn.batch, turn.resident, [result for (result,) in results])

    async def _by_mix(self) -> list[Cost]:
        """Measure the published mix on a graph of its own, with the cache that it is to have."""
        capacity, work_dir = self._capacity, self._settings.work_dir
        subject = Subject(
            workload=_WORKLOAD,
            nodes=capacity.mix_nodes,
            seed=1,
            shards=_SHAPE.shards,
            ids_file=str(work_dir / "mix-ids.bin"),
        )
        cache_mb = subject.plan().payload_bytes * _MIX_CACHE_SHARE / (1 << 20)
        async with self._cluster(cache_mb, folder="mix") as cluster:
            fill = FillJob(topology_file=str(cluster.topology_path), subject=subject)
            await run_job(fill, self._progress, work_dir / "fill-mix.log", int)
            admins, pids = await self._servers_of(cluster)
            job = MixJob(
                topology_file=str(cluster.topology_path),
                tier=OWN_TIER,
                subject=subject,
                awaiters=capacity.awaiters,
                even_shares=_EVEN_SHARES,
                warm_seconds=2 * capacity.seconds,
                seconds=capacity.seconds,
                admins=admins,
                pids=pids,
            )
            results = await run_job(job, self._progress, work_dir / "mix.log", list[CapacityTurnResult])
        return [cost_of(1, None, [result]) for result in results]

    @staticmethod
    async def _servers_of(cluster: DevCluster) -> tuple[dict[str, list[str]], dict[str, list[int]]]:
        """Return the admin addresses and the process ids by role."""
        pids = await pids_of(cluster)
        names = {
            role: [name for name, of in cluster.processes.items() if of is role]
            for role in (Role.FOLLOWER, Role.LEADER, Role.DATABASE)
        }
        admins = {str(role): [cluster.admin(name) for name in names[role]] for role in (Role.FOLLOWER, Role.LEADER)}
        return admins, {str(role): [pids[name] for name in names[role]] for role in names}

    async def _asked(
        self, cluster: DevCluster, turns: Sequence[CapacityTurn], *, warm_keys: int = 0, processes: int = 1
    ) -> list[list[CapacityTurnResult]]:
        admins, pids = await self._servers_of(cluster)
        job = CapacityJob(
            topology_file=str(cluster.topology_path),
            tier=OWN_TIER,
            ids_file=self._ids_file,
            number=0,
            residents=self._capacity.residents,
            warm_keys=warm_keys,
            awaiters=self._capacity.awaiters,
            turns=tuple(turns),
            admins=admins,
            pids=pids,
        )
        jobs = [msgspec.structs.replace(job, number=number) for number in range(processes)]
        log = self._settings.work_dir
        return await together(
            run_job(each, self._progress, log / f"capacity-{each.number}.log", list[CapacityTurnResult])
            for each in jobs
        )
