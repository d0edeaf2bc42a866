"""Scenario `run`: a published workload on a cluster of one region, its result, and how close the load was to its
source.

A run reports what was asked for and what was generated, throughput, hit rate, failures, and latencies in the form of
the paper's figure 8, which separates hits and misses. The cache is a fifth of the data unless an option says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from loadtest.client_process import run_job
from loadtest.conditions import together
from loadtest.options import (
    AWAITERS,
    CACHE_SHARE,
    FOLLOWERS,
    NODES,
    PROCESSES,
    PUBLISHED_TOPOLOGY,
    RATE,
    SECONDS,
    SEED,
    SHARDS,
    WARM_SECONDS,
    WORKLOAD,
    Options,
)
from loadtest.published.driver import LoadResult, RequestLoad
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.jobs import AskJob, FillJob, Subject
from loadtest.published.outcome import RunFigures, generated_listing, latency_listing, measured_of, quantities
from loadtest.published.tier_watch import TierWatch
from loadtest.published.workload import workload_named, workload_names
from loadtest.results import Aim, ScenarioResult, at_least, at_most
from loadtest.scenario import BenchSettings, Progress, Scenario
from loadtest.target import target_for
from tao.admin.server_stats import server_stats
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape

SCHEMA: Final = Path(__file__).with_name("schema.yaml")
AIMED_HIT_RATE: Final = 0.964
"""The paper's hit rate of followers (section 8)."""
AIMED_SHARE: Final = 0.2
_TOY_NODES: Final = 600
_TOY_SECONDS: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """The options of `run`."""

    workload: str = WORKLOAD.default("tao_atc13", choices=workload_names())
    nodes: int = NODES.default(40_000)
    """With the published degrees there are five times as many edges, each with its inverse."""
    cache_share: float = CACHE_SHARE.default(0.2)
    """The overhead of each cached entry is part of it."""
    followers: int = FOLLOWERS.default(1)
    processes: int = PROCESSES.default(1)
    awaiters: int = AWAITERS.default(64)
    rate: float = RATE.default(0.0, help="Requests per second of an open loop; 0 for a closed loop of awaiters.")
    warm_seconds: float = WARM_SECONDS.default(20.0)
    seconds: float = SECONDS.default(30.0)
    shards: int = SHARDS.default(16)
    topology: Path | None = PUBLISHED_TOPOLOGY.default(None)
    seed: int = SEED.default(1)

    def at_toy_size(self) -> RunOptions:
        """Return the same options for little data and a short run."""
        return replace(
            self,
            nodes=_TOY_NODES,
            followers=1,
            processes=min(2, self.processes),
            awaiters=8,
            rate=min(self.rate, 500.0),
            warm_seconds=_TOY_SECONDS,
            seconds=_TOY_SECONDS,
            shards=4,
        )


async def run(settings: BenchSettings, progress: Progress, wanted: RunOptions) -> ScenarioResult:
    """Send the workload to a cluster. Raises `OperatorError`."""
    if settings.toy:
        wanted = wanted.at_toy_size()
    measured = await measure(settings, progress, wanted)
    return ScenarioResult(
        summary=f"{wanted.workload}: {measured.source}",
        conditions={key: value for key, value in measured.settings.items() if isinstance(value, (str, int, float))},
        quantities=quantities(measured),
        listings=[latency_listing(measured), generated_listing(measured.generated)],
        notes=[
            (
                f"The cache of {measured.cache_bytes / 1e6:.1f} MB is {measured.cache_bytes / measured.data_bytes:.0%} "
                f"of {measured.data_bytes / 1e6:.1f} MB of payloads."
            ),
            "A hit is what a follower answered out of its memory; to wait for another's fetch is a miss (joined).",
            "Latencies of hits and misses: of traced probes beside the load, begun at a constant rate.",
            *(["The graph has been written into the running cluster, and stays there."] if wanted.topology else []),
        ],
        aims=_aims(measured),
        measured=msgspec.to_builtins(measured),
        faults=[f"{measured.wrong_answers} objects that were written were not found"] if measured.wrong_answers else [],
    )


SCENARIO: Final = Scenario(
    name="run",
    summary="a published workload: hit rate, throughput, failures, latencies of hits and misses",
    run=run,
    options=RunOptions,
    help="""Ask a published workload: throughput, hit rate, failures, and latencies of hits and misses.

    The JSON has what `measured` of the scenario has in a report of `bench`, its aims, and the machine.""",
    has_plot=True,
)


def _aims(measured: RunFigures) -> list[Aim]:
    share = measured.cache_bytes / measured.data_bytes
    where = f"{measured.workload}, cache of {share:.0%}"
    hit_rate = at_least(
        f"hit rate at least {AIMED_HIT_RATE:.1%} with a cache of {AIMED_SHARE:.0%} of the data at most",
        measured.hit_rate,
        AIMED_HIT_RATE,
        where,
    )
    return [
        msgspec.structs.replace(hit_rate, met=hit_rate.met and share <= AIMED_SHARE),
        at_most("no failed request", sum(measured.failed.values()), 0, measured.workload),
    ]


async def measure(settings: BenchSettings, progress: Progress, wanted: RunOptions) -> RunFigures:
    """Load the graph, warm the caches, measure. Raises `OperatorError`."""
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
        watch = TierWatch(target)
        load = RequestLoad(
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
            samples = await watch.used()
        finally:
            watch.close()
        stats = [await server_stats(admin) for admin in target.followers.values()]
        cache_bytes = max(each["budget_bytes"] for each in stats)
    named = {name: getattr(wanted, name) for name in RunOptions.__dataclass_fields__ if name != "topology"}
    named["own_cluster"] = wanted.topology is None
    return measured_of(named, plan, cache_bytes, results, samples)
