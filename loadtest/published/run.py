"""Scenario `run`: a published workload on a cluster of one region, what came of it, and how close it was to its source.

A run states what was asked and what was generated, throughput, hit rate, failures, and latencies in the form of the
paper's figure 8: hits and misses apart. The follower's cache is a fifth of the data at most, or less when told.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from loadtest.client_process import run_job
from loadtest.published import figures
from loadtest.published.conformity import Line, Tally, compare, reads_of
from loadtest.published.driver import Load, LoadResult
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.load_process import MEASURING, AskJob, FillJob, Subject
from loadtest.published.recording import Merged, Summary
from loadtest.published.workload import READS, Kind, workload_named
from loadtest.results import Listing, Quantity, ScenarioResult
from loadtest.rounds import cpu_seconds
from loadtest.scenario import BenchSettings, Progress, check_bounds
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.readiness import server_stats
from tao.devcluster.server_options import Durability
from tao.model.errors import OperatorError

SUMMARY: Final = "a published workload: hit rate, throughput, failures, latencies of hits and misses"
SCHEMA: Final = Path(__file__).with_name("schema.yaml")
_TOY_NODES: Final = 600
_TOY_SECONDS: Final = 1.0
_TIER: Final = "tier-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What a run consists of. Raises `OperatorError` for numbers out of bounds."""

    workload: str = "tao_atc13"
    nodes: int = 40_000
    """Objects; with the published degrees there are five times as many edges, each with its inverse."""
    cache_share: float = 0.2
    """The cache of each follower and leader, as a share of the bytes of objects and edges."""
    followers: int = 1
    """Of the one tier that is asked."""
    processes: int = 1
    """Load processes."""
    awaiters: int = 64
    """Of each load process, in a closed loop."""
    rate: float = 0.0
    """Requests a second in all, in an open loop; 0: a closed loop."""
    warm_seconds: float = 20.0
    seconds: float = 30.0
    """Measured, after the warming."""
    shards: int = 16
    seed: int = 1

    def __post_init__(self) -> None:
        check_bounds(
            {
                "--nodes": (self.nodes, 100, 5_000_000),
                "--cache-share": (self.cache_share, 0.001, 10),
                "--followers": (self.followers, 1, 16),
                "--processes": (self.processes, 1, 64),
                "--awaiters": (self.awaiters, 1, 10_000),
                "--rate": (self.rate, 0, 10_000_000),
                "--warm-seconds": (self.warm_seconds, 0, 3600),
                "--seconds": (self.seconds, 0.1, 3600),
                "--shards": (self.shards, 1, 1024),
            }
        )
        workload_named(self.workload)

    def at_toy_size(self) -> RunSettings:
        """The same in little."""
        return RunSettings(
            workload=self.workload,
            nodes=_TOY_NODES,
            cache_share=self.cache_share,
            processes=min(2, self.processes),
            awaiters=8,
            rate=min(self.rate, 500.0),
            warm_seconds=_TOY_SECONDS,
            seconds=_TOY_SECONDS,
            shards=4,
            seed=self.seed,
        )


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a run found, as the JSON has it; latencies in milliseconds."""

    workload: str
    source: str
    settings: dict[str, Any]
    """`RunSettings`; `Any`: text and numbers."""
    data_bytes: int
    cache_bytes: int
    throughput_qps: float
    reads: int
    writes: int
    hit_rate: float
    failed_fraction: float
    failed: dict[str, int]
    wrong_answers: int
    operations: dict[str, dict[str, Summary | None]]
    """Operation → ``all_ms``, and for reads ``hit_ms`` and ``miss_ms``, which one traced prober beside the load saw."""
    generated: list[Line]
    """Every property of the workload: asked, and as generated."""
    throughput_by_second: list[int]
    server_cpu_us_per_query: float
    client_cpu_us_per_query: float
    database_cpu_us_per_query: float


async def run(
    settings: BenchSettings,
    progress: Progress,
    wanted: RunSettings | None = None,
    plot_file: Path | None = None,
) -> ScenarioResult:
    """See `SUMMARY`; ``plot_file``: a PNG to draw. Raises `OperatorError`."""
    run_settings = wanted or RunSettings()
    if settings.toy:
        run_settings = run_settings.at_toy_size()
    measured, merged = await measure(settings, progress, run_settings)
    if plot_file is not None:
        # Loaded here: it takes a second, which a run without a plot need not wait for.
        from loadtest.published.plots import draw_run

        draw_run(measured, merged, plot_file)
    return ScenarioResult(
        summary=f"{run_settings.workload}: {measured.source}",
        conditions={key: value for key, value in measured.settings.items() if isinstance(value, (str, int, float))},
        quantities=[
            Quantity(name="throughput", value=measured.throughput_qps, unit="queries_per_second"),
            Quantity(name="hit rate", value=100 * measured.hit_rate, unit="percent"),
            Quantity(name="failed", value=1e6 * measured.failed_fraction, unit="per_million"),
            Quantity(name="follower CPU", value=measured.server_cpu_us_per_query, unit="µs_per_query"),
            Quantity(name="client CPU", value=measured.client_cpu_us_per_query, unit="µs_per_query"),
        ],
        listings=[latency_listing(measured), generated_listing(measured.generated)],
        notes=[
            (
                f"The cache of {measured.cache_bytes / 1e6:.1f} MB is {measured.cache_bytes / measured.data_bytes:.0%} "
                f"of {measured.data_bytes / 1e6:.1f} MB of payloads."
            ),
            "Hits and misses: of one traced awaiter beside the load. Repetition and the longest list are assumed.",
        ],
        measured=msgspec.to_builtins(measured),
        faults=[f"{measured.wrong_answers} objects that were written were not found"] if measured.wrong_answers else [],
    )


async def measure(settings: BenchSettings, progress: Progress, wanted: RunSettings) -> tuple[Measured, Merged]:
    """Load, warm, measure; the result, and the histograms behind it. Raises `OperatorError`."""
    subject = Subject(
        workload=wanted.workload,
        nodes=wanted.nodes,
        seed=wanted.seed,
        shards=wanted.shards,
        ids_file=str(settings.work_dir / "ids.bin"),
    )
    progress.step("planning the graph")
    plan = subject.plan()
    data_bytes = plan.payload_bytes
    cache_mb = max(1, int(data_bytes * wanted.cache_share) >> 20)
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / "run",
        shape=Shape(tiers=1, followers=wanted.followers, leaders=1, databases=1, shards=wanted.shards),
        schema_file=SCHEMA,
        buffer_pool_mb=64 if settings.toy else 512,
        durability=Durability.RELAXED,
        cache_mb=cache_mb,
        log_level="warning",
    )
    async with DevCluster(cluster_settings, progress.step) as cluster:
        pids = {process.name: process.pid for process in (await cluster.status()).processes}
        by_role = {
            role: [pids[name] for name, of in cluster.processes.items() if of is role]
            for role in (Role.FOLLOWER, Role.DATABASE)
        }
        topology_file = str(cluster.topology_path)
        await run_job(
            FillJob(topology_file=topology_file, subject=subject), progress, settings.work_dir / "fill.log", int
        )
        watch = _Watch(cluster, by_role)
        load = Load(
            awaiters=wanted.awaiters,
            rate=wanted.rate / wanted.processes,
            warm_seconds=wanted.warm_seconds,
            seconds=wanted.seconds,
        )
        jobs = [
            AskJob(topology_file=topology_file, tier=_TIER, subject=subject, stream=stream, load=load)
            for stream in range(wanted.processes)
        ]
        results = await asyncio.gather(
            *(
                run_job(job, watch.hear(progress), settings.work_dir / f"ask-{job.stream}.log", LoadResult)
                for job in jobs
            )
        )
        used = await watch.used()
    return _measured(wanted, plan, data_bytes, cache_mb << 20, results, used)


@dataclass(frozen=True, slots=True)
class _Used:
    """Between the end of warming and the end of the run."""

    hits: int
    misses: int
    follower_cpu: float
    database_cpu: float


class _Watch:
    """Reads the followers' counters when the first load process says that it measures, and at the end."""

    def __init__(self, cluster: DevCluster, pids: dict[Role, list[int]]) -> None:
        self._cluster = cluster
        self._pids = pids
        self._before: asyncio.Task[_Used] | None = None

    def hear(self, progress: Progress) -> Progress:
        """A progress that is watched for the end of warming."""
        return _Listening(progress, self._begin)

    def _begin(self) -> None:
        if self._before is None:
            self._before = asyncio.ensure_future(self._now())

    async def used(self) -> _Used:
        """Since `MEASURING` was told."""
        now = await self._now()
        if self._before is None:
            raise OperatorError("no load process said that it was measuring")
        before = await self._before
        return _Used(
            now.hits - before.hits,
            now.misses - before.misses,
            now.follower_cpu - before.follower_cpu,
            now.database_cpu - before.database_cpu,
        )

    async def _now(self) -> _Used:
        names = [name for name, role in self._cluster.processes.items() if role is Role.FOLLOWER]
        stats = [await server_stats(self._cluster.admin(name)) for name in names]
        return _Used(
            hits=sum(each["hits"] for each in stats),
            misses=sum(each["misses"] for each in stats),
            follower_cpu=sum(map(cpu_seconds, self._pids[Role.FOLLOWER])),
            database_cpu=sum(map(cpu_seconds, self._pids[Role.DATABASE])),
        )


class _Listening:
    """`Progress` that also tells when measuring begins."""

    def __init__(self, progress: Progress, measuring: Any) -> None:
        self._progress = progress
        self._measuring = measuring

    def step(self, text: str, done: float = 0.0) -> None:
        """See `loadtest.scenario.Progress`."""
        if text == MEASURING:
            self._measuring()
        self._progress.step(text, done)


def _measured(
    wanted: RunSettings, plan: GraphPlan, data_bytes: int, cache_bytes: int, results: list[LoadResult], used: _Used
) -> tuple[Measured, Merged]:
    workload = workload_named(wanted.workload)
    merged, tally = Merged(), Tally()
    for result in results:
        merged.add(result.recording)
        tally.add(result.tally)
    answered, failed = tally.answered, merged.failed.total()
    reads = reads_of(tally)
    elapsed = max(result.elapsed for result in results)
    client_cpu = sum(result.client_cpu_seconds for result in results)
    operations: dict[str, dict[str, Summary | None]] = {}
    for kind in workload.mix:
        operations[kind] = {"all_ms": merged.summary(kind)}
        if kind in READS:
            operations[kind] |= {f"{how}_ms": merged.summary(f"{how} {kind}") for how in ("hit", "miss")}
    measured = Measured(
        workload=workload.name,
        source=workload.source,
        settings={name: getattr(wanted, name) for name in RunSettings.__dataclass_fields__},
        data_bytes=data_bytes,
        cache_bytes=cache_bytes,
        throughput_qps=round(answered / elapsed, 1),
        reads=reads,
        writes=answered - reads,
        hit_rate=used.hits / max(1, used.hits + used.misses),
        failed_fraction=failed / max(1, answered + failed),
        failed=dict(merged.failed),
        wrong_answers=sum(result.wrong for result in results),
        operations=operations,
        generated=list(compare(workload, plan, tally)),
        throughput_by_second=[merged.per_second[second] for second in range(int(elapsed))],
        server_cpu_us_per_query=round(1e6 * used.follower_cpu / max(1, answered), 2),
        client_cpu_us_per_query=round(1e6 * client_cpu / max(1, answered), 2),
        database_cpu_us_per_query=round(1e6 * used.database_cpu / max(1, answered), 2),
    )
    return measured, merged


def latency_listing(measured: Measured) -> Listing:
    """Figure 8 of the paper: hits and misses by operation; for TAO's workload with the paper's own beside them."""
    published: dict[str, Any] = figures.atc13().published_results if measured.workload == "tao_atc13" else {}
    rows: list[tuple[str, ...]] = []
    for kind, found in measured.operations.items():
        for how in ("hit_ms", "miss_ms") if Kind(kind) in READS else ("all_ms",):
            summary = found.get(how)
            if summary is None:
                continue
            paper = published.get(how, {}).get(kind, {})
            rows.append(
                (
                    f"{kind} {how.removesuffix('_ms')}",
                    f"{summary.count:,}",
                    *(f"{value:.2f}" for value in (summary.p50, summary.avg, summary.p99, summary.p999)),
                    *(f"{paper[key]:.1f}" if key in paper else "" for key in ("p50", "avg", "p99")),
                )
            )
    columns = ("latency, ms", "samples", "p50", "avg", "p99", "p99.9", "TAO p50", "TAO avg", "TAO p99")
    return Listing(title="", columns=columns, rows=rows)


def generated_listing(lines: list[Line]) -> Listing:
    """What was asked and what was generated."""
    rows: list[tuple[str, ...]] = [
        (line.name, f"{line.asked:.4f}", "" if line.generated is None else f"{line.generated:.4f}") for line in lines
    ]
    return Listing(title="", columns=("property", "asked", "generated"), rows=rows)
