"""Scenario `storm`: every follower of a tier is restarted, its cache gone, while the published mix goes on at its rate.

Requests begin at a constant rate whoever waits, so that a tier that cannot bear its own cold start shows it. While the
tier is away its clients ask the other one, whose caches have nothing either. None of it may fail a request; what it
costs the leaders and the database, and how long, is the figure.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

import msgspec

from loadtest.client_process import run_job
from loadtest.cold.statements import Statements
from loadtest.cold.timeline import Moment, Sample, hit_rate_of, moments, recovered_after
from loadtest.published.driver import Load, LoadResult
from loadtest.published.load_process import MEASURING, AskJob, FillJob, Subject
from loadtest.published.recording import Merged, Summary
from loadtest.published.run import SCHEMA
from loadtest.results import Quantity, ScenarioResult
from loadtest.scenario import BenchSettings, Progress, check_bounds
from loadtest.waiting import together
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ONLY_REGION, ClusterSettings, Role, Shape
from tao.devcluster.readiness import server_stats
from tao.devcluster.server_options import Durability
from tao.model.errors import OperatorError, Unavailable

SUMMARY: Final = "a tier restarts cold under load: time to its old hit rate, and what the database sees meanwhile"
_SHAPE: Final = Shape(tiers=2, followers=2, leaders=1, databases=1, shards=16)
_TIER: Final = "tier-1"
_DATABASE: Final = "db-1"
_SAMPLE_SECONDS: Final = 1.0
_TOLERANCE: Final = 0.01
"""Of the old hit rate: a second of a test has so few misses that less would be chance."""


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


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a run found, as the JSON has it."""

    rate: float
    answered: int
    failed: dict[str, int]
    wrong_answers: int
    tier_away_seconds: float
    """From the first follower's being told to stop until the last is ready again."""
    old_hit_rate: float
    lowest_hit_rate: float | None
    recovery_seconds: float | None
    """From the restart's beginning to within a point of the old hit rate; None: not within the run."""
    database_selects_before: float
    """A second."""
    database_selects_most: float
    """In the worst second after the restart began."""
    database_selects_extra: float
    """Above what there was before, summed up over the run."""
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
        storm = StormSettings(
            nodes=400, rate=min(storm.rate, 150.0), warm_seconds=1.0, before_seconds=2.0, after_seconds=5.0
        )
    subject = Subject(
        workload="tao_atc13",
        nodes=storm.nodes,
        seed=storm.seed,
        shards=4 if settings.toy else _SHAPE.shards,
        ids_file=str(settings.work_dir / "ids.bin"),
    )
    data_bytes = subject.plan().payload_bytes
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / "storm",
        shape=msgspec.structs.replace(_SHAPE, followers=1, shards=4) if settings.toy else _SHAPE,
        schema_file=SCHEMA,
        buffer_pool_mb=64 if settings.toy else 512,
        durability=Durability.RELAXED,
        cache_mb=data_bytes * storm.cache_share / (1 << 20),
        log_level="warning",
    )
    async with DevCluster(cluster_settings, progress.step) as cluster:
        database = cluster.database(_DATABASE)
        settings.versions[database.binary.flavour] = database.binary.version_text
        topology_file = str(cluster.topology_path)
        await run_job(
            FillJob(topology_file=topology_file, subject=subject), progress, settings.work_dir / "fill.log", int
        )
        async with Statements.of(database) as statements:
            watch = _Watch(cluster, statements, storm, progress)
            job = AskJob(
                topology_file=topology_file,
                tier=_TIER,
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


class _Watch:
    """Puts the load on, restarts the tier in the middle of it, and samples until the load is over."""

    def __init__(self, cluster: DevCluster, statements: Statements, storm: StormSettings, progress: Progress) -> None:
        self._cluster = cluster
        self._statements = statements
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
                self.samples.append(await self._sample())
                await asyncio.sleep(_SAMPLE_SECONDS)
            await restarting
        finally:
            restarting.cancel()

    async def _restart(self) -> None:
        await asyncio.sleep(self._storm.before_seconds)
        self.restarted_at = perf_counter() - self._began
        names = self._cluster.record.shape.followers_in(ONLY_REGION, _TIER)
        self._progress.step(f"restarting {', '.join(names)}", 0.5)
        await together([self._cluster.restart(name) for name in names])
        self.away_seconds = perf_counter() - self._began - self.restarted_at

    async def _sample(self) -> Sample:
        followers: dict[str, tuple[int, int]] = {}
        leaders: dict[str, int] = {}
        for name, role in self._cluster.processes.items():
            if role not in (Role.FOLLOWER, Role.LEADER):
                continue
            try:
                stats = await server_stats(self._cluster.admin(name))
            except Unavailable:
                # It is being restarted.
                continue
            if role is Role.FOLLOWER:
                followers[name] = (stats["hits"], stats["misses"])
            else:
                leaders[name] = stats["hits"] + stats["misses"]
        selects = await self._statements.selects()
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
    selects = sum(each.database_selects for each in before) / len(before)
    return Measured(
        rate=storm.rate,
        answered=result.tally.answered,
        failed=dict(merged.failed),
        wrong_answers=result.wrong,
        tier_away_seconds=round(watch.away_seconds, 2),
        old_hit_rate=old,
        lowest_hit_rate=min((each.hit_rate for each in after if each.hit_rate is not None), default=None),
        recovery_seconds=recovered_after(timeline, old, _TOLERANCE),
        database_selects_before=round(selects, 1),
        database_selects_most=max(each.database_selects for each in after),
        database_selects_extra=round(sum(max(0.0, each.database_selects - selects) for each in after), 1),
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
        Quantity(name="database before", value=measured.database_selects_before, unit="selects_per_second"),
        Quantity(name="database, the worst second", value=measured.database_selects_most, unit="selects_per_second"),
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
        notes=[] if recovery is not None else ["The old hit rate was not reached within the run."],
        measured=msgspec.to_builtins(measured),
        faults=faults,
    )
