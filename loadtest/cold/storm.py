"""Scenario `storm`: every follower of a tier is restarted, its cache gone, while the published mix goes on at its rate.

Requests begin at a constant rate whoever waits, so that a tier that cannot bear its own cold start shows it. While the
tier is away its clients ask the other one, whose caches have nothing either. None of it may fail a request; what it
costs the leaders and the database, and how long, is the figure. Of a running cluster the tier is restarted by its
operator (`loadtest.cold.restarting`), and what reaches its databases is what its leaders fetch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Final

import msgspec

from loadtest.client_process import run_job
from loadtest.cold.restarting import restart_by_operator, restart_own
from loadtest.cold.statements import Statements
from loadtest.cold.timeline import Moment, Sample, hit_rate_of, moments, recovered_after
from loadtest.published.driver import Load, LoadResult
from loadtest.published.load_process import MEASURING, AskJob, FillJob, Subject
from loadtest.published.recording import Merged, Summary
from loadtest.published.run import SCHEMA
from loadtest.results import Quantity, ScenarioResult
from loadtest.scenario import BenchSettings, Progress, check_bounds
from loadtest.target import Target, target_for
from loadtest.waiting import together
from tao.devcluster.layout import ClusterSettings, Shape
from tao.devcluster.readiness import server_stats
from tao.devcluster.server_options import Durability
from tao.model.errors import OperatorError, Unavailable

SUMMARY: Final = "a tier restarts cold under load: time to its old hit rate, and what the database sees meanwhile"
_SHAPE: Final = Shape(tiers=2, followers=2, leaders=1, databases=1, shards=16)
_AROUND_SECONDS: Final = 800.0
"""For a cluster's start and the writing of its graph, on a machine that does other work."""
_SAMPLE_SECONDS: Final = 1.0
_TOLERANCE: Final = 0.01
"""Of the old hit rate: a second of a test has so few misses that less would be chance."""
_OF_A_RUNNING_ONE: Final = (
    "The graph has been written into the running cluster, and stays there; reads and fetches are those of everybody."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StormSettings:
    """What a run consists of. Raises `OperatorError` for numbers out of bounds."""

    nodes: int = 10_000
    cache_share: float = 0.2
    rate: float = 1_000.0
    """Requests a second, in an open loop."""
    warm_seconds: float = 30.0
    before_seconds: float = 15.0
    after_seconds: float = 60.0
    topology: Path | None = None
    """Of a running cluster, which is asked instead of one of its own; its schema has the types of `SCHEMA`."""
    restart_command: str = ""
    """Of a running cluster: what its operator restarts the tier with; empty: by hand, within ``after_seconds``."""
    seed: int = 1

    def __post_init__(self) -> None:
        check_bounds(
            {
                "--nodes": (self.nodes, 100, 5_000_000),
                "--cache-share": (self.cache_share, 0.001, 10),
                "--rate": (self.rate, 1, 1_000_000),
                "--warm-seconds": (self.warm_seconds, 0, 3600),
                "--before-seconds": (self.before_seconds, 1, 3600),
                "--after-seconds": (self.after_seconds, 1, 3600),
            }
        )
        if self.restart_command and self.topology is None:
            raise OperatorError("--restart-command is of a running cluster: give its --topology, too")

    @property
    def most_seconds(self) -> float:
        """Of all of it: the load, and what comes before and after."""
        return self.warm_seconds + self.before_seconds + self.after_seconds + _AROUND_SECONDS


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a run found, as the JSON has it."""

    rate: float
    answered: int
    failed: dict[str, int]
    wrong_answers: int
    own_cluster: bool
    tier_away_seconds: float
    """From the first follower's being told to stop, or, of a running cluster, being gone, until the last is ready
    again."""
    old_hit_rate: float
    lowest_hit_rate: float | None
    recovery_seconds: float | None
    """From the restart's beginning to within a point of the old hit rate; None: not within the run."""
    database_selects_before: float | None
    """A second; None, and the next two: of databases that are not this scenario's to ask."""
    database_selects_most: float | None
    """In the worst second after the restart began."""
    database_selects_extra: float | None
    """Above what there was before, summed up over the run."""
    leader_fetches_before: float
    """What leaders began to fetch from their databases, a second."""
    leader_fetches_most: float
    leader_reads_before: float
    leader_reads_most: float
    read_ms: dict[str, Summary | None]
    """By operation, over the whole run; latency counts from the intended start."""
    timeline: list[Moment]
    answered_by_second: list[int]


async def run(
    settings: BenchSettings,
    progress: Progress,
    wanted: StormSettings | None = None,
    plot_file: Path | None = None,
) -> ScenarioResult:
    """See `SUMMARY`; ``plot_file``: a PNG to draw. Raises `OperatorError`."""
    storm = wanted or StormSettings()
    if settings.toy:
        # An operator takes longer than who knows his servers.
        rate, after_seconds = min(storm.rate, 150.0), 5.0 if storm.topology is None else 15.0
        storm = replace(storm, nodes=400, rate=rate, warm_seconds=1.0, before_seconds=2.0, after_seconds=after_seconds)
    data_bytes = _subject(settings, storm, 1).plan().payload_bytes
    own = ClusterSettings(
        state_dir=settings.work_dir / "storm",
        shape=msgspec.structs.replace(_SHAPE, followers=1, shards=4) if settings.toy else _SHAPE,
        schema_file=SCHEMA,
        buffer_pool_mb=64 if settings.toy else 512,
        durability=Durability.RELAXED,
        cache_mb=data_bytes * storm.cache_share / (1 << 20),
        log_level="warning",
    )
    async with target_for(storm.topology, own, progress) as target:
        settings.versions.update(target.versions)
        subject = _subject(settings, storm, target.shards)
        fill = FillJob(topology_file=target.topology_file, subject=subject, region=target.region)
        await run_job(fill, progress, settings.work_dir / "fill.log", int)
        async with _selects_of(target) as selects:
            watch = _Watch(target, selects, storm, progress, settings.work_dir / "restart.log")
            job = AskJob(
                topology_file=target.topology_file,
                region=target.region,
                tier=target.tier,
                subject=subject,
                stream=0,
                load=Load(
                    awaiters=0,
                    rate=storm.rate,
                    warm_seconds=storm.warm_seconds,
                    seconds=storm.before_seconds + storm.after_seconds,
                ),
            )
            await together([watch.restart(), watch.asking(job, settings.work_dir / "ask.log")])
    measured = _measured(storm, watch)
    if plot_file is not None:
        # Loaded here: it takes a second, which a run without a plot need not wait for.
        from loadtest.report.plots import draw_storm

        draw_storm(msgspec.to_builtins(measured), plot_file)
    return _result(measured)


def _subject(settings: BenchSettings, storm: StormSettings, shards: int) -> Subject:
    return Subject(
        workload="tao_atc13",
        nodes=storm.nodes,
        seed=storm.seed,
        shards=shards,
        ids_file=str(settings.work_dir / "ids.bin"),
    )


Selects = Callable[[], Awaitable[int]]
"""SELECTs of the database so far."""


@asynccontextmanager
async def _selects_of(target: Target) -> AsyncIterator[Selects | None]:
    """None of databases that are not ours."""
    if target.database is None:
        yield None
        return
    async with Statements.of(target.database) as statements:
        yield statements.selects


class _Watch:
    """Puts the load on, restarts the tier in the middle of it, and samples until the load is over."""

    def __init__(
        self, target: Target, selects: Selects | None, storm: StormSettings, progress: Progress, log: Path
    ) -> None:
        """``log``: of an operator's command."""
        self._target = target
        self._selects = selects
        self._log = log
        self._storm = storm
        self._progress = progress
        self._measuring = asyncio.Event()
        self._over = False
        self._began = 0.0
        self.samples: list[Sample] = []
        self.restarted_at = 0.0
        self.away_seconds = 0.0
        self.result: LoadResult | None = None

    def step(self, text: str, done: float = 0.0) -> None:
        """See `loadtest.scenario.Progress`; hears when measuring begins."""
        if text == MEASURING:
            self._began = perf_counter()
            self._measuring.set()
        self._progress.step(text, done)

    async def asking(self, job: AskJob, log: Path) -> None:
        """The load, from its warming to its end."""
        try:
            self.result = await run_job(job, self, log, LoadResult)
        finally:
            self._over = True
            self._measuring.set()

    async def restart(self) -> None:
        """Sample until the load is over; restart the tier when it is time."""
        await self._measuring.wait()
        restarting = asyncio.ensure_future(self._restart())
        try:
            while not self._over:
                if restarting.done():
                    # What kept the tier from being restarted ends the run at once.
                    await restarting
                self.samples.append(await self._sample())
                await asyncio.sleep(_SAMPLE_SECONDS)
            await restarting
        finally:
            restarting.cancel()

    async def _restart(self) -> None:
        await asyncio.sleep(self._storm.before_seconds)
        cluster, names = self._target.cluster, list(self._target.followers)
        if cluster is not None:
            self._tell(f"restarting {', '.join(names)}")
            began, over = await restart_own(cluster, names)
        else:
            command = self._storm.restart_command
            began, over = await restart_by_operator(self._target, command, self._log, self._tell, lambda: self._over)
        self.restarted_at = began - self._began
        self.away_seconds = over - began

    def _tell(self, text: str) -> None:
        self._progress.step(text, 0.5)

    async def _sample(self) -> Sample:
        followers: dict[str, tuple[int, int]] = {}
        leaders: dict[str, tuple[int, int]] = {}
        for name, admin in (*self._target.all_followers.items(), *self._target.leaders.items()):
            try:
                stats = await server_stats(admin)
            except Unavailable:
                # It is being restarted.
                continue
            if name in self._target.leaders:
                leaders[name] = (stats["hits"] + stats["misses"], stats["fills"]["started"])
            else:
                followers[name] = (stats["hits"], stats["misses"])
        selects = None if self._selects is None else await self._selects()
        return Sample(at=perf_counter() - self._began, followers=followers, leaders=leaders, selects=selects)


def _measured(storm: StormSettings, watch: _Watch) -> Measured:
    result = watch.result
    assert result is not None
    merged = Merged().add(result.recording)
    timeline = moments(watch.samples, watch.restarted_at)
    before = [each for each in timeline if each.at <= 0]
    after = [each for each in timeline if each.at > 0]
    if not before or not after:
        raise OperatorError("the load was over before the tier had restarted: give it more --after-seconds")
    old = hit_rate_of(before)
    selects_before, selects_after = ([each.database_selects or 0.0 for each in some] for some in (before, after))
    selects, counted = sum(selects_before) / len(before), storm.topology is None
    return Measured(
        rate=storm.rate,
        answered=result.tally.answered,
        failed=dict(merged.failed),
        wrong_answers=result.wrong,
        tier_away_seconds=round(watch.away_seconds, 2),
        old_hit_rate=old,
        lowest_hit_rate=min((each.hit_rate for each in after if each.hit_rate is not None), default=None),
        recovery_seconds=recovered_after(timeline, old, _TOLERANCE),
        own_cluster=storm.topology is None,
        database_selects_before=round(selects, 1) if counted else None,
        database_selects_most=max(selects_after) if counted else None,
        database_selects_extra=round(sum(max(0.0, each - selects) for each in selects_after), 1) if counted else None,
        leader_fetches_before=round(sum(each.leader_fetches for each in before) / len(before), 1),
        leader_fetches_most=max(each.leader_fetches for each in after),
        leader_reads_before=round(sum(each.leader_reads for each in before) / len(before), 1),
        leader_reads_most=max(each.leader_reads for each in after),
        read_ms={name: merged.summary(name) for name in merged.names() if " " not in name},
        timeline=timeline,
        answered_by_second=[merged.per_second[second] for second in range(int(result.elapsed))],
    )


def _result(measured: Measured) -> ScenarioResult:
    recovery, lowest = measured.recovery_seconds, measured.lowest_hit_rate
    quantities = [
        Quantity(name="requests answered", value=measured.answered, unit="requests"),
        Quantity(name="requests failed", value=sum(measured.failed.values()), unit="requests"),
        Quantity(name="tier away", value=measured.tier_away_seconds, unit="seconds"),
        Quantity(name="hit rate before", value=100 * measured.old_hit_rate, unit="percent"),
        Quantity(name="lowest hit rate", value=100 * (lowest or 0.0), unit="percent"),
        *([] if recovery is None else [Quantity(name="to the old hit rate", value=recovery, unit="seconds")]),
        *(
            Quantity(name=f"database{when}", value=value, unit="selects_per_second")
            for when, value in (
                (" before", measured.database_selects_before),
                (", the worst second", measured.database_selects_most),
            )
            if value is not None
        ),
        Quantity(name="leaders' fetches before", value=measured.leader_fetches_before, unit="per_second"),
        Quantity(name="leaders' fetches, the worst second", value=measured.leader_fetches_most, unit="per_second"),
        Quantity(name="leader before", value=measured.leader_reads_before, unit="reads_per_second"),
        Quantity(name="leader, the worst second", value=measured.leader_reads_most, unit="reads_per_second"),
    ]
    faults = [f"{count} requests failed: {reason}" for reason, count in measured.failed.items()]
    if measured.wrong_answers:
        faults.append(f"{measured.wrong_answers} objects that were written were not found")
    return ScenarioResult(
        summary=SUMMARY,
        conditions={"requests_per_second": measured.rate},
        quantities=quantities,
        notes=[
            *([] if recovery is not None else ["The old hit rate was not reached within the run."]),
            *([] if measured.own_cluster else [_OF_A_RUNNING_ONE]),
        ],
        measured=msgspec.to_builtins(measured),
        faults=faults,
    )
