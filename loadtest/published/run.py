"""Scenario `run`: a published workload on a cluster of one region, its result, and how close the load was to its
source.

A run reports what was asked for and what was generated, throughput, hit rate, failures, and latencies in the form of
the paper's figure 8, which separates hits and misses. The cache is a fifth of the data unless an option says otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

from loadtest import options
from loadtest.client_process import run_job
from loadtest.conditions import together
from loadtest.latencies import Latencies, LatencySummary
from loadtest.published.conformity import Line, RequestTally, compare
from loadtest.published.driver import LoadResult, RequestLoad
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.jobs import AskJob, FillJob, Subject
from loadtest.published.tier_watch import Counts, TierWatch
from loadtest.published.workload import READS, Kind, published_results, workload_named, workload_names
from loadtest.results import Aim, Listing, Quantity, ScenarioResult, at_least, at_most
from loadtest.rounds import since
from loadtest.scenario import BenchSettings, Progress, Scenario
from loadtest.table import listing
from loadtest.target import target_for
from tao.admin.server_stats import server_stats
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape

SCHEMA: Final = Path(__file__).with_name("schema.yaml")
AIMED_HIT_RATE: Final = 0.964
"""The paper's hit rate of followers (section 8)."""
AIMED_SHARE: Final = 0.2


@dataclass(frozen=True, kw_only=True)
class RunOptions(options.Options):
    """The options of `run`."""

    workload: str = options.WORKLOAD.default("tao_atc13", choices=workload_names())
    nodes: int = options.NODES.default(40_000, toy=600)
    """Nodes of the graph. With the published degrees it has five times as many edges, each with its inverse."""
    cache_share: float = options.CACHE_SHARE.default(0.2)
    """The size of each cache, which includes the overhead of each cached entry."""
    followers: int = options.FOLLOWERS.default(1, toy=1)
    processes: int = options.PROCESSES.default(1, toy=2)
    awaiters: int = options.AWAITERS.default(64, toy=8)
    rate: float = options.RATE.default(
        0.0, toy=500.0, help="Requests per second of an open loop; 0 for a closed loop of awaiters."
    )
    warm_seconds: float = options.WARM_SECONDS.default(20.0, toy=1.0)
    seconds: float = options.SECONDS.default(30.0, toy=1.0)
    shards: int = options.SHARDS.default(16, toy=4)
    topology: Path | None = options.PUBLISHED_TOPOLOGY.default(None)
    seed: int = options.SEED.default(1)


async def run(settings: BenchSettings, progress: Progress, wanted: RunOptions) -> ScenarioResult:
    """Send the workload to a cluster. Raises `OperatorError`."""
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
    aim = f"hit rate at least {AIMED_HIT_RATE:.1%} with a cache of {AIMED_SHARE:.0%} of the data at most"
    hit_rate = at_least(aim, measured.hit_rate, AIMED_HIT_RATE, f"{measured.workload}, cache of {share:.0%}")
    return [
        msgspec.structs.replace(hit_rate, met=hit_rate.met and share <= AIMED_SHARE),
        at_most("no failed request", sum(measured.failed.values()), 0, measured.workload),
    ]


def own_cluster(settings: BenchSettings, name: str, shape: Shape, cache_mb: float) -> ClusterSettings:
    """Return the settings of a cluster for a published workload; ``cache_mb`` is the size of each cache."""
    return ClusterSettings(
        state_dir=settings.work_dir / name,
        shape=shape,
        schema_file=SCHEMA,
        buffer_pool_mb=64 if settings.toy else 512,
        durability=Durability.RELAXED,
        cache_mb=cache_mb,
        log_level="warning",
    )


async def measure(settings: BenchSettings, progress: Progress, wanted: RunOptions) -> RunFigures:
    """Load the graph, warm the caches, measure. Raises `OperatorError`."""
    progress.step("planning the graph")
    plan = GraphPlan(workload_named(wanted.workload), wanted.nodes, wanted.seed)
    shape = Shape(tiers=1, followers=wanted.followers, leaders=1, databases=1, shards=wanted.shards)
    own = own_cluster(settings, "run", shape, plan.payload_bytes * wanted.cache_share / (1 << 20))
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


class MissCauses(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of all reads that missed, by cause. Each miss has one cause: the first of these that applies, as far as
    counters can show, since they count causes and not which of two came together."""

    joined: float
    """Reads that waited for a fetch that another miss had begun."""
    first_time: float
    """Reads of a key that no load process had asked for before."""
    incomplete: float
    """Reads of more of a list than the part of it that was cached."""
    came_back: float
    """Reads of an evicted key, when no more than the cache's size was evicted since."""
    too_large: float
    """Reads of an entry that would take too large a part of the cache to be kept."""
    not_kept: float
    """Reads of an entry that was fetched and not kept, because a write or the start of the shard came in between."""
    dropped: float
    """Reads of an entry that was dropped because a write could not be applied to it."""
    left_long_ago: float
    """All other misses: reads of keys evicted longer ago."""


class Second(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of the tier between two samples, about a second apart."""

    at: float
    """The end of the interval, in seconds since measuring began."""
    hits: int
    misses: int
    joined: int
    """Misses that waited for a fetch that another had begun."""


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run; latencies in milliseconds. CPU times are None where the processes are unknown."""

    workload: str
    source: str
    settings: dict[str, Any]
    """`RunOptions`; `Any`: text and numbers."""
    data_bytes: int
    cache_bytes: int
    """The cache of each follower; leaders of the scenario's own cluster have as much."""
    throughput_qps: float
    reads: int
    writes: int
    hit_rate: float
    """Share of the tier's queries that a follower answered from its memory."""
    hit_rate_with_joined: float
    """The hit rate if queries that wait for another's fetch counted as hits."""
    misses: MissCauses
    failed_fraction: float
    failed: dict[str, int]
    warm_requests_per_node: float
    """Requests answered before measuring began, as a multiple of the objects of the graph."""
    failed_warming: dict[str, int]
    """Failures before measuring began; not counted in ``failed``."""
    wrong_answers: int
    operations: dict[str, dict[str, LatencySummary | None]]
    """Latencies by operation: ``all_ms``, and for reads ``hit_ms`` and ``miss_ms`` from the traced probers beside the
    load."""
    generated: list[Line]
    """Every property of the workload, as asked for and as generated."""
    throughput_by_second: list[int]
    by_second: list[Second]
    server_cpu_us_per_query: float | None
    client_cpu_us_per_query: float
    database_cpu_us_per_query: float | None


def measured_of(
    settings: dict[str, Any],
    plan: GraphPlan,
    cache_bytes: int,
    results: Sequence[LoadResult],
    samples: Sequence[Counts],
) -> RunFigures:
    """Add up the results of all load processes; ``samples`` are the followers' counts, about a second apart."""
    workload = workload_named(settings["workload"])
    merged = Latencies(*(result.recording for result in results))
    tally, failed_warming = RequestTally(), Counter[str]()
    for result in results:
        tally.add(result.tally)
        failed_warming.update(result.failed_warming)
    answered, failed = tally.answered, merged.failed.total()
    elapsed = max(result.elapsed for result in results)
    used = since(samples[0], samples[-1])
    hits, misses = used["follower_hits"], used["follower_misses"]
    asked = max(1, hits + misses)

    def a_query(seconds: float | None) -> float | None:
        return None if seconds is None else round(1e6 * seconds / max(1, answered), 2)

    return RunFigures(
        workload=workload.name,
        source=workload.source,
        settings=settings,
        data_bytes=plan.payload_bytes,
        cache_bytes=cache_bytes,
        throughput_qps=round(answered / elapsed, 1),
        reads=tally.reads,
        writes=answered - tally.reads,
        hit_rate=hits / asked,
        hit_rate_with_joined=(hits + min(used["follower_joined"], misses)) / asked,
        misses=misses_by_cause(used, sum(result.first_time for result in results)),
        failed_fraction=failed / max(1, answered + failed),
        failed=dict(merged.failed),
        warm_requests_per_node=round(sum(result.warmed for result in results) / plan.nodes, 2),
        failed_warming=dict(failed_warming),
        wrong_answers=sum(result.wrong for result in results),
        operations={
            kind: {"all_ms": merged.summary(kind)}
            | ({f"{how}_ms": merged.summary(f"{how} {kind}") for how in ("hit", "miss")} if kind in READS else {})
            for kind in workload.mix
        },
        generated=list(compare(workload, plan, tally)),
        throughput_by_second=[merged.per_second[second] for second in range(int(elapsed))],
        by_second=seconds_of(samples),
        server_cpu_us_per_query=a_query(used.get("follower_cpu")),
        client_cpu_us_per_query=a_query(sum(result.client_cpu_seconds for result in results)) or 0.0,
        database_cpu_us_per_query=a_query(used.get("database_cpu")),
    )


def seconds_of(samples: Sequence[Counts]) -> list[Second]:
    """Return the differences between neighbours."""
    return [
        Second(
            at=round(now["at"] - samples[0]["at"], 2),
            **{
                name: int(now[f"follower_{name}"] - before[f"follower_{name}"]) for name in ("hits", "misses", "joined")
            },
        )
        for before, now in pairwise(samples)
    ]


def misses_by_cause(counts: Counts, first_time: int) -> MissCauses:
    """Divide the misses among their causes. ``first_time`` is the number of first reads of a key. Each cause takes from
    the misses that the causes before it left."""
    left = counts["follower_misses"]
    asked = max(1, counts["follower_hits"] + left)
    shares = {}
    for cause in ("joined", "first_time", "incomplete", "came_back", "too_large", "not_kept", "dropped"):
        caused = first_time if cause == "first_time" else counts[f"follower_{cause}"]
        if cause == "not_kept":
            caused = max(0, caused - counts["follower_too_large"])
        some = min(left, caused)
        shares[cause] = some / asked
        left -= some
    return MissCauses(**shares, left_long_ago=left / asked)


def quantities(measured: RunFigures) -> list[Quantity]:
    """Return the head of the table that a run prints."""
    causes = msgspec.to_builtins(measured.misses).items()
    found = [
        ("throughput", measured.throughput_qps, "queries_per_second"),
        ("warmed by", measured.warm_requests_per_node, "requests_a_node"),
        ("hit rate", 100 * measured.hit_rate, "percent"),
        *((f"missed: {name.replace('_', ' ')}", 100 * share, "percent") for name, share in causes),
        ("failed", 1e6 * measured.failed_fraction, "per_million"),
        ("client CPU", measured.client_cpu_us_per_query, "µs_per_query"),
        ("follower CPU", measured.server_cpu_us_per_query, "µs_per_query"),
    ]
    return [Quantity(name=name, value=value, unit=unit) for name, value, unit in found if value is not None]


def latency_listing(measured: RunFigures) -> Listing:
    """Return figure 8 of the paper: hits and misses by operation, for TAO's workload beside the paper's."""
    published = published_results() if measured.workload == "tao_atc13" else {}
    rows: list[tuple[str, ...]] = []
    for kind, found in measured.operations.items():
        for how in ("hit_ms", "miss_ms") if Kind(kind) in READS else ("all_ms",):
            if (summary := found.get(how)) is None:
                continue
            paper = published.get(how, {}).get(kind, {})
            ours = (f"{value:.2f}" for value in (summary.p50, summary.avg, summary.p99, summary.p999))
            theirs = (f"{paper[key]:.1f}" if key in paper else "" for key in ("p50", "avg", "p99"))
            rows.append((f"{kind} {how.removesuffix('_ms')}", f"{summary.count:,}", *ours, *theirs))
    columns = ("latency, ms", "samples", "p50", "avg", "p99", "p99.9", "TAO p50", "TAO avg", "TAO p99")
    return Listing(title="", columns=columns, rows=rows)


def generated_listing(lines: list[Line]) -> Listing:
    """Return the table of the properties asked for and generated."""
    columns = {"property": "{of.name}", "asked": "{of.asked:.4f}", "generated": "{of.generated:.4f}"}
    return listing(columns, ({"of": line} for line in lines))
