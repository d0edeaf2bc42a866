"""Scenario `run`: a published workload on a cluster of one region, what came of it, and how close it was to its source.

A run states what was asked and what was generated, throughput, hit rate, failures, and latencies in the form of the
paper's figure 8: hits and misses apart. The follower's cache is a fifth of the data at most, or less when told.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from loadtest.client_process import run_job
from loadtest.published.driver import Load, LoadResult
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.load_process import AskJob, FillJob, Subject
from loadtest.published.outcome import Measured, generated_listing, latency_listing, measured_of, quantities
from loadtest.published.recording import Merged
from loadtest.published.watch import Watch
from loadtest.published.workload import workload_named
from loadtest.results import ScenarioResult
from loadtest.scenario import BenchSettings, Progress, check_bounds
from loadtest.target import target_for
from loadtest.waiting import together
from tao.devcluster.layout import ClusterSettings, Shape
from tao.devcluster.readiness import server_stats
from tao.devcluster.server_options import Durability

SUMMARY: Final = "a published workload: hit rate, throughput, failures, latencies of hits and misses"
SCHEMA: Final = Path(__file__).with_name("schema.yaml")
_TOY_NODES: Final = 600
_TOY_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What a run consists of. Raises `OperatorError` for numbers out of bounds."""

    workload: str = "tao_atc13"
    nodes: int = 40_000
    """Objects; with the published degrees there are five times as many edges, each with its inverse."""
    cache_share: float = 0.2
    """The cache of each follower and leader, as a share of the payload bytes of objects and edges; what the cache adds
    to each entry takes part of it."""
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
    """Of a cluster of its own."""
    topology: Path | None = None
    """Of a running cluster, which is asked instead of one of its own; its schema has the types of `SCHEMA`."""
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
            topology=self.topology,
            seed=self.seed,
        )


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
        quantities=quantities(measured),
        listings=[latency_listing(measured), generated_listing(measured.generated)],
        notes=[
            (
                f"The cache of {measured.cache_bytes / 1e6:.1f} MB is {measured.cache_bytes / measured.data_bytes:.0%} "
                f"of {measured.data_bytes / 1e6:.1f} MB of payloads."
            ),
            "A hit is what a follower answered out of its memory; who waited for another's fetch has missed (joined).",
            "Latencies of hits and misses: of traced probes beside the load, begun at a constant rate.",
            *(
                ["The graph has been written into the running cluster, and stays there."]
                if run_settings.topology
                else []
            ),
        ],
        measured=msgspec.to_builtins(measured),
        faults=[f"{measured.wrong_answers} objects that were written were not found"] if measured.wrong_answers else [],
    )


async def measure(settings: BenchSettings, progress: Progress, wanted: RunSettings) -> tuple[Measured, Merged]:
    """Load, warm, measure; the result, and the histograms behind it. Raises `OperatorError`."""
    progress.step("planning the graph")
    plan = GraphPlan(workload_named(wanted.workload), wanted.nodes, wanted.seed)
    own = ClusterSettings(
        state_dir=settings.work_dir / "run",
        shape=Shape(tiers=1, followers=wanted.followers, leaders=1, databases=1, shards=wanted.shards),
        schema_file=SCHEMA,
        buffer_pool_mb=64 if settings.toy else 512,
        durability=Durability.RELAXED,
        cache_mb=plan.payload_bytes * wanted.cache_share / (1 << 20),
        log_level="warning",
    )
    async with target_for(wanted.topology, own, progress) as target:
        subject = Subject(
            workload=wanted.workload,
            nodes=wanted.nodes,
            seed=wanted.seed,
            shards=target.shards,
            ids_file=str(settings.work_dir / "ids.bin"),
        )
        fill = FillJob(topology_file=target.topology_file, subject=subject, region=target.region)
        await run_job(fill, progress, settings.work_dir / "fill.log", int)
        watch = Watch(target)
        load = Load(
            awaiters=wanted.awaiters,
            rate=wanted.rate / wanted.processes,
            warm_seconds=wanted.warm_seconds,
            seconds=wanted.seconds,
        )
        jobs = [
            AskJob(
                topology_file=target.topology_file,
                region=target.region,
                tier=target.tier,
                subject=subject,
                stream=stream,
                load=load,
            )
            for stream in range(wanted.processes)
        ]
        try:
            results = await together(
                run_job(job, watch.hear(progress), settings.work_dir / f"ask-{job.stream}.log", LoadResult)
                for job in jobs
            )
            used = await watch.used()
        finally:
            watch.close()
        stats = [await server_stats(admin) for admin in target.followers.values()]
        cache_bytes = max(each["budget_bytes"] for each in stats)
    named = {name: getattr(wanted, name) for name in RunSettings.__dataclass_fields__ if name != "topology"}
    named["own_cluster"] = wanted.topology is None
    return measured_of(named, plan, cache_bytes, results, used)
