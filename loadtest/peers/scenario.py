"""Scenario `peers`: one workload, one graph, one machine, one run, and what a user would pick instead.

tao has a follower and a leader; Redis and memcached have as many servers with as much memory as those two caches
together; all have the same MySQL or MariaDB server behind them. Contestants take turns, five rounds each.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import msgspec

from loadtest.client_process import run_job
from loadtest.peers.peers_process import CONTESTANTS, MEMCACHED, MYSQL, REDIS, TAO, PeersJob, PeersResult, StaleReads
from loadtest.peers.servers import SMALLEST_MB, find_memcached, several_memcached, several_redis
from loadtest.peers.sql_graph import SqlAddress
from loadtest.published.load_process import Subject
from loadtest.published.run import SCHEMA
from loadtest.published.workload import workload_named
from loadtest.redis_server import find_redis_server
from loadtest.results import Figure, Listing, ScenarioResult
from loadtest.scenario import BenchSettings, Progress, check_bounds
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ClusterSettings, Shape
from tao.devcluster.ports import LOOPBACK
from tao.devcluster.server_options import Durability
from tao.devcluster.state_folder import service_accounts

SUMMARY: Final = "a published workload beside Redis and memcached in front of MySQL, and MySQL alone"
_CACHE_SERVERS: Final = 2
_FOLLOWER: Final = "follower-1a"
_LEADER: Final = "leader-1"
_DATABASE: Final = "db-1"
_NOTES: Final = [
    "Ratios above 1 are tao's: its rate divided by the peer's, the peer's latency divided by its own.",
    "Server µs: of all server processes that a contestant keeps busy, the database's among them.",
    "A stale answer is a read that began after a write was acknowledged and did not see it.",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersSettings:
    """What a run consists of. Raises `OperatorError` for numbers out of bounds."""

    workload: str = "tao_atc13"
    nodes: int = 30_000
    cache_share: float = 0.2
    """Of each of the two cache servers of a contestant, as a share of the payloads; `SMALLEST_MB` at least."""
    awaiters: int = 64
    seed: int = 1

    def __post_init__(self) -> None:
        check_bounds(
            {
                "--nodes": (self.nodes, 100, 2_000_000),
                "--cache-share": (self.cache_share, 0.001, 10),
                "--awaiters": (self.awaiters, 1, 2_000),
            }
        )
        workload_named(self.workload)


class OfContestant(msgspec.Struct, frozen=True, kw_only=True):
    """One contestant under 64 awaiters of single queries; latencies in milliseconds."""

    throughput_qps: float
    p50_ms: float
    p99_ms: float
    server_cpu_us_per_query: float
    client_cpu_us_per_query: float
    hit_rate: float | None
    stale_reads: list[StaleReads]
    ratio: dict[str, float] | None = None
    """Of tao to this peer: ``throughput``, ``p50``, ``p99`` (above 1: tao is better)."""


async def run(settings: BenchSettings, progress: Progress, wanted: PeersSettings | None = None) -> ScenarioResult:
    """See `SUMMARY`. Raises `OperatorError`."""
    peers = wanted or PeersSettings()
    toy = settings.toy
    nodes, shards = (400, 4) if toy else (peers.nodes, 16)
    _, settings.versions["redis-server"] = find_redis_server()
    _, settings.versions["memcached"] = find_memcached()
    subject = Subject(workload=peers.workload, nodes=nodes, seed=peers.seed, shards=shards, ids_file="")
    progress.step("planning the graph")
    data_bytes = subject.plan().payload_bytes
    cache_mb = max(SMALLEST_MB, int(data_bytes * peers.cache_share) >> 20)
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / "peers",
        shape=Shape(tiers=2, followers=1, leaders=1, databases=1, shards=shards),
        schema_file=SCHEMA,
        buffer_pool_mb=64 if toy else 512,
        durability=Durability.RELAXED,
        cache_mb=cache_mb,
        log_level="warning",
    )
    async with AsyncExitStack() as stack:
        redis = await several_redis(_CACHE_SERVERS, cache_mb, settings.work_dir, stack)
        memcached = await several_memcached(_CACHE_SERVERS, cache_mb, settings.work_dir, stack)
        cluster = await stack.enter_async_context(DevCluster(cluster_settings, progress.step))
        database = cluster.database(_DATABASE)
        settings.versions[database.binary.flavour] = database.binary.version_text
        administrator = service_accounts(cluster.record.passwords).administrator
        pids = {process.name: process.pid for process in (await cluster.status()).processes}
        job = PeersJob(
            topology_file=str(cluster.topology_path),
            subject=subject,
            host=LOOPBACK,
            redis_ports=redis[0],
            memcached_ports=memcached[0],
            sql=SqlAddress(
                host=database.host,
                port=database.port,
                user=administrator.user,
                password=administrator.password,
            ),
            server_pids={
                TAO: (pids[_FOLLOWER], pids[_LEADER], pids[_DATABASE]),
                REDIS: (*redis[1], pids[_DATABASE]),
                MEMCACHED: (*memcached[1], pids[_DATABASE]),
                MYSQL: (pids[_DATABASE],),
            },
            follower_admin=cluster.admin(_FOLLOWER),
            awaiters=8 if toy else peers.awaiters,
            warm_seconds=0.5 if toy else 15.0,
            stale_seconds=0.5 if toy else 5.0,
            rounds=settings.rounds,
            round_seconds=settings.round_seconds,
        )
        result = await run_job(job, progress, settings.work_dir / "peers.log", PeersResult)
    measured = of_contestants(result)
    return ScenarioResult(
        summary=f"{SUMMARY} ({peers.workload})",
        conditions={
            "nodes": nodes,
            "payload_mb": round(data_bytes / 1e6, 1),
            "cache_mb_each": cache_mb,
            "cache_servers": _CACHE_SERVERS,
            "awaiters": job.awaiters,
            "rounds": settings.rounds,
            "round_seconds": settings.round_seconds,
        },
        figures=result.figures,
        listings=[_ratios(measured), _stale(measured)],
        notes=_NOTES,
        measured={name: msgspec.to_builtins(found) for name, found in measured.items()}
        | {"figures": msgspec.to_builtins(result.figures)},
        faults=[
            f"{each.stale} of {each.reads} reads of tao within one tier were stale"
            for each in measured[TAO].stale_reads
            if each.stale and each.within == "one tier"
        ],
    )


def of_contestants(result: PeersResult) -> dict[str, OfContestant]:
    """The first shape's figures, with tao's ratios to each peer."""
    shape = result.figures[0].shape
    figures = {each.contestant: each for each in result.figures if each.shape == shape}
    ours = figures[TAO]
    return {
        name: OfContestant(
            throughput_qps=round(figures[name].per_second, 1),
            p50_ms=round(figures[name].p50_us / 1000, 4),
            p99_ms=round(figures[name].p99_us / 1000, 4),
            server_cpu_us_per_query=round(figures[name].server_cpu_us, 2),
            client_cpu_us_per_query=round(figures[name].client_cpu_us, 2),
            hit_rate=result.hit_rates.get(name),
            stale_reads=result.stale[name],
            ratio=None if name == TAO else _ratio(ours, figures[name]),
        )
        for name in CONTESTANTS
    }


def _ratio(ours: Figure, theirs: Figure) -> dict[str, float]:
    return {
        "throughput": round(ours.per_second / theirs.per_second, 3),
        "p50": round(theirs.p50_us / ours.p50_us, 3),
        "p99": round(theirs.p99_us / ours.p99_us, 3),
    }


def _ratios(measured: dict[str, OfContestant]) -> Listing:
    rows: list[tuple[str, ...]] = [
        (
            name,
            f"{found.ratio['throughput']:.2f}",
            f"{found.ratio['p50']:.2f}",
            f"{found.ratio['p99']:.2f}",
        )
        for name, found in measured.items()
        if found.ratio is not None
    ]
    return Listing(title="", columns=("tao to", "throughput", "p50", "p99"), rows=rows)


def _stale(measured: dict[str, OfContestant]) -> Listing:
    rows: list[tuple[str, ...]] = [
        (
            f"{name}, {each.within}",
            "" if found.hit_rate is None else f"{found.hit_rate:.1%}",
            f"{each.reads:,}",
            f"{each.stale:,}",
        )
        for name, found in measured.items()
        for each in found.stale_reads
    ]
    return Listing(title="", columns=("contestant", "hit rate", "reads after writes", "stale"), rows=rows)
