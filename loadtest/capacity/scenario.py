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

from loadtest import options
from loadtest.capacity.costs import PUBLISHED_MIX, CapacityFigures, OfFollowers, OfGrowth, cost_of, listings
from loadtest.capacity.jobs import SKEW, CapacityJob, CapacityTurn, CapacityTurnResult, GrowJob, LoadedServers, MixJob
from loadtest.capacity.model import Cost, DeploymentAssumptions, deployment, fit
from loadtest.client_process import run_job
from loadtest.conditions import together
from loadtest.published.jobs import FillJob, Subject
from loadtest.published.run import own_cluster
from loadtest.published.workload import tao_atc13
from loadtest.results import ScenarioResult, at_most
from loadtest.scenario import BenchSettings, Progress, Scenario
from loadtest.target import Target, target_for
from tao.devcluster.layout import Role, Shape
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
class CapacityOptions(options.Options):
    """The options of `capacity`, and the sizes that only the toy run changes."""

    objects: int = options.OBJECTS.default(3_000)
    """Objects of the paper's mean size: 2 MB, of which the smallest cache holds two fifths."""
    growths: tuple[int, ...] = options.GROWTHS.default((1, 10, 100))
    followers: tuple[int, ...] = options.FOLLOWER_COUNTS.default((1, 2, 4))
    awaiters: int = options.AWAITERS.default(64)
    seconds: float = options.SECONDS.default(3.0, help="Measured seconds of each turn.")
    hit_rates: tuple[float, ...] = _HIT_RATES
    residents: int = 1_000
    mix_nodes: int = 6_000
    """Nodes of the graph of which the published mix is asked."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
        conditions={"object_bytes": measured.object_bytes, "awaiters": capacity.awaiters, "skew": SKEW},
        listings=listings(measured, _EVEN_SHARES),
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
                grows = cache_mb > _SMALLEST_MB or growth == 1
                async with self._cluster(cache_mb) as target:
                    by_growth.append(await self._by_popularity(target, cache_mb, growth, grows))
                    if growth == middle and grows:
                        by_hit_rate = await self._by_hit_rate(target, cache_mb)
                        if 1 in capacity.followers:
                            by_followers.append(await self._all_hits(target))
            if growth == middle:
                for followers in sorted({*capacity.followers} - {1}):
                    async with self._cluster(_SMALLEST_MB * growth, followers) as target:
                        by_followers.append(await self._all_hits(target))
        by_mix = await self._by_mix()
        costs = {PUBLISHED_MIX: fit(by_mix)}
        for batch in _BATCHES:
            costs[f"objects alone, batches of {batch}"] = fit([each for each in by_hit_rate if each.batch == batch])
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
    async def _cluster(self, cache_mb: float, followers: int = 1, folder: str = "capacity") -> AsyncIterator[Target]:
        shape = msgspec.structs.replace(_SHAPE, followers=followers)
        async with target_for(None, own_cluster(self._settings, folder, shape, cache_mb), self._progress) as target:
            self._settings.versions.update(target.versions)
            yield target

    async def _by_popularity(self, target: Target, cache_mb: int, growth: int, grows: bool) -> OfGrowth:
        """Let the data grow, and measure reads of it."""
        objects = self._capacity.objects * growth
        job = GrowJob(
            topology_file=target.topology_file,
            ids_file=self._ids_file,
            objects=objects,
            object_bytes=self._object_bytes,
            shards=_SHAPE.shards,
        )
        await run_job(job, self._progress, self._settings.work_dir / "grow.log", int)
        turn = CapacityTurn(resident=None, batch=1)
        (cost,) = await self._asked(target, [turn], warm_keys=min(self._held(cache_mb), objects))
        return OfGrowth(growth=growth, objects=objects, cache_mb=cache_mb, cache_grows=grows, cost=cost)

    def _held(self, cache_mb: int) -> int:
        return (cache_mb << 20) // (self._object_bytes + _ENTRY_BYTES)

    async def _by_hit_rate(self, target: Target, cache_mb: int) -> list[Cost]:
        shares = self._capacity.hit_rates
        turns = [CapacityTurn(resident=share, batch=batch) for batch in _BATCHES for share in shares]
        return await self._asked(target, turns, warm_keys=self._held(cache_mb))

    async def _all_hits(self, target: Target) -> OfFollowers:
        turn = CapacityTurn(resident=1.0, batch=_BATCHES[-1])
        (cost,) = await self._asked(target, [turn], processes=_LOAD_PROCESSES)
        return OfFollowers(followers=len(target.followers), cost=cost)

    async def _asked(
        self, target: Target, turns: Sequence[CapacityTurn], *, warm_keys: int = 0, processes: int = 1
    ) -> list[Cost]:
        """Return the cost of each turn, taken by all load processes side by side."""
        capacity, log = self._capacity, self._settings.work_dir
        jobs = [
            CapacityJob(
                servers=_servers_of(target),
                ids_file=self._ids_file,
                number=number,
                residents=capacity.residents,
                warm_keys=warm_keys,
                awaiters=capacity.awaiters,
                turns=tuple(turns),
                seconds=capacity.seconds,
            )
            for number in range(processes)
        ]
        results = await together(
            run_job(each, self._progress, log / f"capacity-{each.number}.log", list[CapacityTurnResult])
            for each in jobs
        )
        return [
            cost_of(turn.batch, turn.resident, of_turn)
            for turn, of_turn in zip(turns, zip(*results, strict=True), strict=True)
        ]

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
        async with self._cluster(cache_mb, folder="mix") as target:
            fill = FillJob(topology_file=target.topology_file, subject=subject)
            await run_job(fill, self._progress, work_dir / "fill-mix.log", int)
            job = MixJob(
                servers=_servers_of(target),
                subject=subject,
                awaiters=capacity.awaiters,
                even_shares=_EVEN_SHARES,
                warm_seconds=2 * capacity.seconds,
                seconds=capacity.seconds,
            )
            results = await run_job(job, self._progress, work_dir / "mix.log", list[CapacityTurnResult])
        return [cost_of(1, None, [result]) for result in results]


def _servers_of(target: Target) -> LoadedServers:
    return LoadedServers(
        topology_file=target.topology_file,
        tier=target.tier,
        admins={Role.FOLLOWER: [*target.followers.values()], Role.LEADER: [*target.leaders.values()]},
        pids={role: target.pids[role] for role in (Role.FOLLOWER, Role.LEADER, Role.DATABASE)},
    )
