"""Scenario `storm`: all followers of a tier restart and lose their caches, under the published mix at a constant rate.

Requests begin at a constant rate whether earlier ones have finished or not, so that a tier that cannot survive its own
cold start shows it. While the tier is away its clients use the other one, whose caches are cold as well. No request may
fail; the figures are the load on the leaders and the database, and how long it lasts.

A run cannot restart servers that it did not start. Their operator does it, by a command that is given (`systemctl
restart …`, `kubectl rollout restart …`) or by hand when the run asks for it. The run sees that a follower does not
answer, and that its counters have begun anew. Their databases cannot be queried; the leaders' fetches stand for their
load.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Self

import msgspec

from loadtest import options
from loadtest.client_process import run_job
from loadtest.cold.counters import Counts, Statements, counts_of, increase
from loadtest.commands import run_command
from loadtest.conditions import together
from loadtest.latencies import Latencies
from loadtest.published.driver import LoadResult, RequestLoad
from loadtest.published.jobs import MEASURING, AskJob, FillJob, Subject
from loadtest.published.run import own_cluster
from loadtest.results import ScenarioResult, at_most, result_of
from loadtest.scenario import BenchSettings, Progress, ProgressListener, Scenario
from loadtest.target import Target, target_for
from tao.admin.server_stats import is_ready
from tao.devcluster.layout import Shape
from tao.model.errors import OperatorError

_SHAPE: Final = Shape(tiers=2, followers=2, leaders=1, databases=1, shards=16)
_AROUND_SECONDS: Final = 800.0
"""Allowance for the cluster's start and the writing of its graph, on a busy machine."""
_LOOK_SECONDS: Final = 0.1
_SAMPLE_SECONDS: Final = 1.0
_SMOOTHED: Final = 3
"""Number of moments over which a hit rate is averaged: one second of a small test has too few misses."""
_TOLERANCE: Final = 0.01
"""Tolerated difference from the old hit rate: a second of a test has so few misses that a smaller one would be
chance."""
_TAIL_CHARACTERS: Final = 500
_OF_A_RUNNING_ONE: Final = (
    "The graph has been written into the running cluster, and stays there; reads and fetches are those of everybody."
)


@dataclass(frozen=True, kw_only=True)
class StormOptions(options.Options):
    """The options of `storm`."""

    nodes: int = options.NODES.default(10_000, toy=400)
    cache_share: float = options.CACHE_SHARE.default(0.2)
    rate: float = options.RATE.default(1_000.0, toy=150.0)
    warm_seconds: float = options.WARM_SECONDS.default(30.0, toy=1.0)
    before_seconds: float = options.BEFORE_SECONDS.default(15.0, toy=2.0)
    after_seconds: float = options.AFTER_SECONDS.default(60.0)
    topology: Path | None = options.PUBLISHED_TOPOLOGY.default(None)
    restart_command: str = options.RESTART_COMMAND.default("")
    """When it is empty, the operator restarts the tier of a running cluster by hand, within ``after_seconds``."""
    seed: int = options.SEED.default(1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate < 1:
            raise OperatorError(f"--rate {self.rate:g}: give at least 1 request per second")
        if self.restart_command and self.topology is None:
            raise OperatorError("--restart-command is for a running cluster: give its --topology, too")

    def at_toy_size(self) -> Self:
        """See `Options`. An operator takes longer than a runner that restarts its own servers."""
        after_seconds = min(self.after_seconds, 5.0 if self.topology is None else 15.0)
        return replace(super().at_toy_size(), after_seconds=after_seconds)

    @property
    def most_seconds(self) -> float:
        """The bound on the whole run: the load, and the steps before and after it."""
        return self.warm_seconds + self.before_seconds + self.after_seconds + _AROUND_SECONDS


async def run(settings: BenchSettings, progress: Progress, storm: StormOptions) -> ScenarioResult:
    """Restart a tier under load, and watch it recover. Raises `OperatorError`."""
    data_bytes = _subject(settings, storm, 1).plan().payload_bytes
    shape = msgspec.structs.replace(_SHAPE, followers=1, shards=4) if settings.toy else _SHAPE
    own = own_cluster(settings, "storm", shape, data_bytes * storm.cache_share / (1 << 20))
    async with target_for(storm.topology, own, progress) as target:
        settings.versions.update(target.versions)
        subject = _subject(settings, storm, target.shards)
        fill = FillJob(topology_file=target.topology_file, subject=subject, region=target.region)
        await run_job(fill, progress, settings.work_dir / "fill.log", int)
        job = AskJob(
            topology_file=target.topology_file,
            region=target.region,
            tier=target.tier,
            subject=subject,
            stream=0,
            load=RequestLoad(
                awaiters=0,
                rate=storm.rate,
                warm_seconds=storm.warm_seconds,
                seconds=storm.before_seconds + storm.after_seconds,
            ),
        )
        watch = _Watch(target, storm, progress, settings.work_dir)
        await together([watch.restart(), watch.load(job)])
    measured = _measured(storm, watch)
    demands = [
        at_most("no request failed", sum(measured["failed"].values()), 0),
        at_most("no wrong answer", measured["wrong_answers"], 0),
    ]
    notes = ["The old hit rate was not reached within the run."] if measured["recovery_seconds"] is None else []
    notes += [_OF_A_RUNNING_ONE] if storm.topology else []
    return result_of({"requests_per_second": storm.rate}, measured, demands, notes=notes)


SCENARIO: Final = Scenario(
    name="storm",
    summary="a tier restarts cold under load: time to its old hit rate, and what the database sees meanwhile",
    run=run,
    options=StormOptions,
    help="""Restart a tier cold under a published workload at a constant rate.

    The first tier of a running cluster is restarted by --restart-command, or by its operator when the run says that it
    is time, within --after-seconds. The exit status is 1 when a request fails.""",
    has_plot=True,
    seconds_bound=lambda storm: storm.most_seconds,
)


def _subject(settings: BenchSettings, storm: StormOptions, shards: int) -> Subject:
    return Subject(
        workload="tao_atc13",
        nodes=storm.nodes,
        seed=storm.seed,
        shards=shards,
        ids_file=str(settings.work_dir / "ids.bin"),
    )


class _Watch:
    """Puts the load on, restarts the tier in the middle of it, and samples until the load is over."""

    def __init__(self, target: Target, storm: StormOptions, progress: Progress, folder: Path) -> None:
        """``folder`` has the logs."""
        self._target = target
        self._storm = storm
        self._progress = progress
        self._folder = folder
        self._measuring = asyncio.Event()
        self._over = False
        self._began = 0.0
        self.samples: list[CounterSample] = []
        self.restarted_at = 0.0
        self.away_seconds = 0.0
        self.result: LoadResult | None = None

    def _hear(self, text: str) -> None:
        if text == MEASURING:
            self._began = perf_counter()
            self._measuring.set()

    async def load(self, job: AskJob) -> None:
        """Run the load, from its warming to its end."""
        try:
            progress = ProgressListener(self._progress, self._hear)
            self.result = await run_job(job, progress, self._folder / "ask.log", LoadResult)
        finally:
            self._over = True
            self._measuring.set()

    async def restart(self) -> None:
        """Sample until the load is over; restart the tier when it is time."""
        await self._measuring.wait()
        restarting = asyncio.ensure_future(self._restart())
        try:
            async with Statements.of(self._target) as statements:
                while not self._over:
                    if restarting.done():
                        # An error of the restart ends the run at once.
                        await restarting
                    selects = None if statements is None else await statements.selects()
                    self.samples.append(await self._sample(selects))
                    await asyncio.sleep(_SAMPLE_SECONDS)
            await restarting
        finally:
            restarting.cancel()

    async def _sample(self, selects: int | None) -> CounterSample:
        return CounterSample(
            at=perf_counter() - self._began,
            followers=await counts_of(self._target.all_followers, may_restart=True),
            leaders=await counts_of(self._target.leaders, may_restart=True),
            selects=selects,
        )

    async def _restart(self) -> None:
        await asyncio.sleep(self._storm.before_seconds)
        target, command = self._target, self._storm.restart_command
        names = ", ".join(target.followers)
        if target.cluster is not None:
            self._progress.step(f"restarting {names}", 0.5)
            began = perf_counter()
            await together([target.cluster.restart(name) for name in target.followers])
            over = perf_counter()
        else:
            hand = f"restart {names} NOW, all of tier {target.tier}"
            self._progress.step(f"restarting {names}: {command}" if command else hand, 0.5)
            began, over = await self._restart_by_operator(command)
        self.restarted_at = began - self._began
        self.away_seconds = over - began

    async def _restart_by_operator(self, command: str) -> tuple[float, float]:
        """Wait until an operator has restarted the servers, by the command or by hand; returns when that began and when
        it was over, as seen from outside.

        Raises `OperatorError` for servers that were not restarted when the load ended, and for a command that failed.
        """
        seen = Restarts(await _answered(self._target))
        running = asyncio.ensure_future(_run(command) if command else asyncio.sleep(0))
        try:
            while seen.over is None:
                if self._over:
                    raise OperatorError(
                        f"{', '.join(seen.missing)} of tier {self._target.tier} had not been restarted when the load "
                        "ended: restart every follower of the tier when the run says so, or have --restart-command do "
                        "it, and give it time with --after-seconds"
                    )
                if running.done():
                    await running
                await asyncio.sleep(_LOOK_SECONDS)
                seen.see(perf_counter(), await _answered(self._target))
            await running
        finally:
            running.cancel()
        assert seen.began is not None
        return seen.began, seen.over


class Restarts:
    """Observes servers that restart: the time when the first was away or new, and the time when all had restarted."""

    def __init__(self, before: Mapping[str, int]) -> None:
        """``before`` is the number of requests that each server had answered so far; a new process has answered
        fewer."""
        self._answered = dict(before)
        self._away: dict[str, float] = {}
        self._anew: dict[str, float] = {}
        self.over: float | None = None

    def see(self, at: float, answered: Mapping[str, int]) -> None:
        """Record how many requests each server that is ready has answered at a moment."""
        for name in self._answered.keys() - self._anew.keys():
            if name not in answered:
                self._away.setdefault(name, at)
                continue
            count, old = answered[name], self._answered[name]
            # A server that is back with its old count was only out of reach. For a server that had answered nothing,
            # its absence is the only sign of a restart.
            away = self._away.pop(name, None)
            if count < old or (old == 0 and away is not None):
                self._anew[name] = at if away is None else away
            self._answered[name] = count
        if self.over is None and len(self._anew) == len(self._answered):
            self.over = at

    @property
    def began(self) -> float | None:
        """The time when the first server that has restarted, or is away, went away."""
        return min((*self._anew.values(), *self._away.values()), default=None)

    @property
    def missing(self) -> list[str]:
        """The servers that have not restarted."""
        return sorted(self._answered.keys() - self._anew.keys())


async def _answered(target: Target) -> dict[str, int]:
    ready = {name: admin for name, admin in target.followers.items() if await is_ready(admin)}
    return {name: counts.queries for name, counts in (await counts_of(ready, may_restart=True)).items()}


async def _run(command: str) -> None:
    ended = await run_command(*shlex.split(command))
    if ended.status:
        raise OperatorError(f"--restart-command ended with status {ended.status}: {ended.errors[-_TAIL_CHARACTERS:]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSample:
    """Counters at one moment. A server that did not answer is missing."""

    at: float
    """Seconds since measuring began."""
    followers: Mapping[str, Counts]
    leaders: Mapping[str, Counts]
    selects: int | None
    """SELECTs of the database since its start; None for a running cluster, whose databases cannot be queried."""


class StormSecond(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between two samples; rates are per second."""

    at: float
    """The end of the interval, in seconds since the restart; negative before it."""
    reads: float
    hit_rate: float | None
    """The hit rate; None when there was no read."""
    leader_reads: float
    leader_fetches: float
    """Fetches that leaders began at their databases."""
    database_selects: float | None


def moments(samples: Sequence[CounterSample], restarted_at: float) -> list[StormSecond]:
    """Return the differences between neighbours."""
    found: list[StormSecond] = []
    known: dict[str, Counts] = {}
    for before, now in pairwise(samples):
        known |= {**before.followers, **before.leaders}
        followers, leaders = increase(known, now.followers), increase(known, now.leaders)
        seconds = now.at - before.at
        selects = None if now.selects is None or before.selects is None else now.selects - before.selects
        found.append(
            StormSecond(
                at=round(now.at - restarted_at, 2),
                reads=round(followers.queries / seconds, 1),
                hit_rate=followers.hits / followers.queries if followers.queries else None,
                leader_reads=round(leaders.queries / seconds, 1),
                leader_fetches=round(leaders.fetches / seconds, 1),
                database_selects=None if selects is None else round(selects / seconds, 1),
            )
        )
    return found


def hit_rate_of(some: Sequence[StormSecond]) -> float:
    """Return the hit rate of all intervals together; 0 when there was no read."""
    reads = sum(each.reads for each in some)
    return sum(each.reads * (each.hit_rate or 0.0) for each in some) / reads if reads else 0.0


def recovered_after(all_moments: Sequence[StormSecond], old: float, tolerance: float) -> float | None:
    """Return the seconds from the restart until the hit rate is within ``tolerance`` of the old one, None for never.

    The hit rate is that of three moments together, all of them after the lowest.
    """
    after = [each for each in all_moments if each.at > 0 and each.hit_rate is not None]
    if not after:
        return None
    lowest = min(range(len(after)), key=lambda index: after[index].hit_rate or 0.0)
    for index in range(lowest, len(after) - _SMOOTHED + 1):
        some = after[index : index + _SMOOTHED]
        if hit_rate_of(some) >= old - tolerance:
            return some[-1].at
    return None


def _measured(storm: StormOptions, watch: _Watch) -> dict[str, Any]:
    """Return the figures as the JSON has them; `Any`: they differ in kind.

    ``tier_away_seconds`` is the time from when the first follower is stopped, or disappears from a running cluster,
    until the last one is ready; ``recovery_seconds`` is None when the run was too short. Figures of the database and
    the leaders are per second, before the restart and in the worst second after it; ``database_selects_extra`` are the
    SELECTs in excess of the former rate, None for the database of a running cluster, which cannot be queried.
    ``read_ms`` has the latencies of the whole run, which count from the intended start."""
    result = watch.result
    assert result is not None
    merged = Latencies(result.recording)
    timeline = moments(watch.samples, watch.restarted_at)
    before = [each for each in timeline if each.at <= 0]
    after = [each for each in timeline if each.at > 0]
    if not before or not after:
        raise OperatorError("the load was over before the tier had restarted: give it more --after-seconds")
    old = hit_rate_of(before)
    # SELECTs of a running cluster's database are not known.
    selects = [
        [each.database_selects for each in some if each.database_selects is not None] for some in (before, after)
    ]
    usual = sum(selects[0]) / len(selects[0]) if selects[0] else None
    return {
        "rate": storm.rate,
        "answered": result.tally.answered,
        "failed": dict(merged.failed),
        "wrong_answers": result.wrong,
        "own_cluster": storm.topology is None,
        "tier_away_seconds": round(watch.away_seconds, 2),
        "old_hit_rate": old,
        "lowest_hit_rate": min((each.hit_rate for each in after if each.hit_rate is not None), default=None),
        "recovery_seconds": recovered_after(timeline, old, _TOLERANCE),
        "database_selects_before": None if usual is None else round(usual, 1),
        "database_selects_most": max(selects[1], default=None),
        "database_selects_extra": None
        if usual is None
        else round(sum(max(0.0, each - usual) for each in selects[1]), 1),
        "leader_fetches_before": round(sum(each.leader_fetches for each in before) / len(before), 1),
        "leader_fetches_most": max(each.leader_fetches for each in after),
        "leader_reads_before": round(sum(each.leader_reads for each in before) / len(before), 1),
        "leader_reads_most": max(each.leader_reads for each in after),
        "read_ms": {name: msgspec.to_builtins(merged.summary(name)) for name in merged.names() if " " not in name},
        "timeline": msgspec.to_builtins(timeline),
        "answered_by_second": [merged.per_second[second] for second in range(int(result.elapsed))],
    }
