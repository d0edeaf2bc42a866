"""Scenario `peers`: one workload, one graph, one machine, one run, and what a user would pick instead.

tao has a follower and a leader; Redis and memcached have two servers each; every one of these has the same budget for
what it caches, and what it has really taken is measured and reported. All have the same MySQL or MariaDB server behind
them. Contestants take turns; stale answers are looked for afterwards, on a cluster of two tiers with a small graph.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import msgspec

from loadtest.client_process import run_job
from loadtest.peers.aims import Shapes, aims_listing, judged, peers_win, ratios
from loadtest.peers.memory import ServerMemory, memory_listing, memory_of
from loadtest.peers.peers_process import (
    CONTESTANTS,
    MEMCACHED,
    MYSQL,
    READY,
    REDIS,
    TAO,
    CacheCounts,
    PairJob,
    PairResult,
    PeersJob,
    PeersResult,
    Rivals,
)
from loadtest.peers.servers import SMALLEST_MB, find_memcached, several_memcached, several_redis
from loadtest.peers.sql_graph import SqlAddress
from loadtest.peers.staleness import ONE_TIER, StaleJob, StaleReads, StaleResult
from loadtest.peers.tables import ratio_listing, shape_listing, stale_listing
from loadtest.peers.turns import figure_of
from loadtest.published.load_process import Subject
from loadtest.published.run import SCHEMA
from loadtest.published.workload import workload_named
from loadtest.redis_server import find_redis_server
from loadtest.results import ScenarioResult
from loadtest.scenario import BenchSettings, Progress, check_bounds
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ClusterSettings, Shape
from tao.devcluster.ports import LOOPBACK
from tao.devcluster.server_options import Durability
from tao.devcluster.state_folder import service_accounts

SUMMARY: Final = "a published workload beside Redis and memcached in front of MySQL, and MySQL alone"
_CACHE_SERVERS: Final = 2
_PROCESSES: Final = 2
"""Of the shape with several load processes."""
_FOLLOWER: Final = "follower-1a"
_LEADER: Final = "leader-1"
_DATABASE: Final = "db-1"
_TIER: Final = "tier-1"
_STALE_NODES: Final = 2_000
_NOTES: Final = [
    "Ratios above 1 are tao's: its rate divided by the peer's, the peer's latency or CPU divided by its own.",
    "Server µs: of all servers that a contestant keeps busy, the database among them; total: with the client.",
    "Hit rate: reads answered without the database, from any cache server; joined: waited for another's fetch.",
    "A stale answer is a read that began after a write was acknowledged and did not see it.",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersSettings:
    """What a run consists of. Raises `OperatorError` for numbers out of bounds."""

    workload: str = "tao_atc13"
    nodes: int = 100_000
    cache_share: float = 0.2
    """Of each of the two cache servers of a contestant, as a share of the payloads; `SMALLEST_MB` at least."""
    awaiters: int = 64
    rate: float = 4_000.0
    """Requests a second of the open loop, the same for everybody: half of what the slower peers can do."""
    warm_requests: int = 150_000
    """Of every contestant, before its first turn."""
    seed: int = 1

    def __post_init__(self) -> None:
        check_bounds(
            {
                "--nodes": (self.nodes, 100, 2_000_000),
                "--cache-share": (self.cache_share, 0.001, 10),
                "--awaiters": (self.awaiters, 1, 2_000),
                "--rate": (self.rate, 1, 1_000_000),
                "--warm-requests": (self.warm_requests, 0, 100_000_000),
            }
        )
        workload_named(self.workload)

    def at_toy_size(self) -> PeersSettings:
        """The same in little."""
        return PeersSettings(workload=self.workload, nodes=400, awaiters=8, rate=200.0, warm_requests=300)


class OfContestant(msgspec.Struct, frozen=True, kw_only=True):
    """One contestant under 64 awaiters of single queries; latencies in milliseconds."""

    throughput_qps: float
    p50_ms: float
    p99_ms: float
    server_cpu_us_per_query: float
    client_cpu_us_per_query: float
    total_cpu_us_per_query: float
    hit_rate: float | None
    """Of reads, those that were answered without the database; None where nothing is cached."""
    joined_share: float | None
    """Of reads, those that waited for another's fetch; of tao's, in the follower."""
    follower_hit_rate: float | None
    """Of tao: of reads, those that the follower answered out of its own memory."""
    failed: int
    """Requests, in all shapes."""
    stale_reads: int
    """In all places; `stale` has each."""
    stale: list[StaleReads]
    memory: list[ServerMemory]
    """Of every cache server after the rounds."""
    ratio: dict[str, float]
    """Of tao to this contestant (above 1: tao is better); ones for itself."""


async def run(settings: BenchSettings, progress: Progress, wanted: PeersSettings | None = None) -> ScenarioResult:
    """See `SUMMARY`. Raises `OperatorError`."""
    peers = wanted or PeersSettings()
    if settings.toy:
        peers = peers.at_toy_size()
    _, settings.versions["redis-server"] = find_redis_server()
    _, settings.versions["memcached"] = find_memcached()
    progress.step("planning the graph")
    data_bytes = _subject(settings, peers, peers.nodes).plan().payload_bytes
    cache_mb = max(SMALLEST_MB, round(data_bytes * peers.cache_share) >> 20)
    async with AsyncExitStack() as stack:
        redis = await several_redis(_CACHE_SERVERS, cache_mb, settings.work_dir, stack)
        memcached = await several_memcached(_CACHE_SERVERS, cache_mb, settings.work_dir, stack)
        ports, pids = {REDIS: redis[0], MEMCACHED: memcached[0]}, {REDIS: redis[1], MEMCACHED: memcached[1]}
        turns = _Turns(settings, progress, peers, cache_mb, ports, pids)
        result, pair, memory = await turns.taken()
        stale = await turns.stale()
    shapes = shapes_of(result, pair, peers)
    measured = of_contestants(shapes, result.tao_counts, stale, memory)
    aims = judged(shapes, stale[TAO])
    over = [name for name, servers in memory.items() if any(each.is_over for each in servers)]
    return ScenarioResult(
        summary=f"{SUMMARY} ({peers.workload})",
        conditions={
            "nodes": peers.nodes,
            "payload_mb": round(data_bytes / 1e6, 1),
            "cache_mb_each": cache_mb,
            "cache_servers": _CACHE_SERVERS,
            "awaiters": peers.awaiters,
            "rate": peers.rate,
            "warm_requests": peers.warm_requests,
            "rounds": settings.rounds,
            "round_seconds": settings.round_seconds,
            "answers_checked_of_each": result.checked,
        },
        listings=[
            shape_listing(shapes), ratio_listing(measured), aims_listing(aims), stale_listing(measured),
            memory_listing(memory),
        ],
        notes=[
            *_NOTES,
            *([f"More memory than its budget, by over a tenth: {', '.join(over)}."] if over else []),
            *peers_win(shapes),
        ],
        measured={name: msgspec.to_builtins(found) for name, found in measured.items()}
        | {
            "aims": msgspec.to_builtins(aims),
            "peers_win": peers_win(shapes),
            "figures": [msgspec.to_builtins(each) for of in shapes.values() for each in of.values()],
        },
        faults=[
            f"{each.stale} of {each.reads} reads of tao within one tier were stale"
            for each in stale[TAO]
            if each.stale and each.within == ONE_TIER
        ],
    )  # fmt: skip


class _Turns:
    """The clusters, and the load processes over them."""

    def __init__(
        self,
        settings: BenchSettings,
        progress: Progress,
        peers: PeersSettings,
        cache_mb: int,
        ports: dict[str, tuple[int, ...]],
        cache_pids: dict[str, tuple[int, ...]],
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._peers = peers
        self._cache_mb = cache_mb
        self._ports = ports
        self._cache_pids = cache_pids

    async def taken(self) -> tuple[PeersResult, list[PairResult], dict[str, list[ServerMemory]]]:
        """All shapes of load, and the caches' memory afterwards."""
        settings, peers = self._settings, self._peers
        async with DevCluster(self._cluster("peers", tiers=1), self._progress.step) as cluster:
            settings.versions[cluster.database(_DATABASE).binary.flavour] = cluster.database(
                _DATABASE
            ).binary.version_text
            rivals = self._rivals(cluster, peers.nodes)
            pids = {process.name: process.pid for process in (await cluster.status()).processes}
            cache_pids = {TAO: (pids[_FOLLOWER], pids[_LEADER]), **self._cache_pids}
            server_pids = {name: (*cache_pids.get(name, ()), pids[_DATABASE]) for name in CONTESTANTS}
            job = PeersJob(
                rivals=rivals,
                server_pids=server_pids,
                follower_admin=cluster.admin(_FOLLOWER),
                leader_admin=cluster.admin(_LEADER),
                awaiters=peers.awaiters,
                warm_requests=peers.warm_requests,
                rounds=settings.rounds,
                round_seconds=settings.round_seconds,
                rate=peers.rate,
            )
            result = await run_job(job, self._progress, settings.work_dir / "peers.log", PeersResult)
            pair = await self._pair(rivals, server_pids)
            memory = await memory_of(
                self._cache_mb << 20, [cluster.admin(_FOLLOWER), cluster.admin(_LEADER)], self._ports, cache_pids
            )
        return result, pair, memory

    async def _pair(self, rivals: Rivals, server_pids: dict[str, tuple[int, ...]]) -> list[PairResult]:
        settings = self._settings
        start = settings.work_dir / "start"
        listening = _Starter(self._progress, start)
        jobs = [
            PairJob(
                rivals=rivals,
                server_pids={} if process else server_pids,
                process=process,
                awaiters=max(1, self._peers.awaiters // _PROCESSES),
                rounds=settings.rounds,
                round_seconds=settings.round_seconds,
                start_file=str(start),
            )
            for process in range(_PROCESSES)
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(run_job(job, listening, settings.work_dir / f"pair-{job.process}.log", PairResult))
                for job in jobs
            ]
        return [task.result() for task in tasks]

    async def stale(self) -> dict[str, list[StaleReads]]:
        """By contestant."""
        settings = self._settings
        async with DevCluster(self._cluster("stale", tiers=2), self._progress.step) as cluster:
            rivals = self._rivals(cluster, 400 if settings.toy else _STALE_NODES)
            job = StaleJob(rivals=rivals, seconds=0.5 if settings.toy else 5.0)
            return (await run_job(job, self._progress, settings.work_dir / "stale.log", StaleResult)).found

    def _cluster(self, name: str, tiers: int) -> ClusterSettings:
        return ClusterSettings(
            state_dir=self._settings.work_dir / name,
            shape=Shape(tiers=tiers, followers=1, leaders=1, databases=1, shards=self._shards),
            schema_file=SCHEMA,
            buffer_pool_mb=64 if self._settings.toy else 1024,
            durability=Durability.RELAXED,
            cache_mb=self._cache_mb,
            log_level="warning",
        )

    @property
    def _shards(self) -> int:
        return _subject(self._settings, self._peers, 0).shards

    def _rivals(self, cluster: DevCluster, nodes: int) -> Rivals:
        database = cluster.database(_DATABASE)
        administrator = service_accounts(cluster.record.passwords).administrator
        return Rivals(
            topology_file=str(cluster.topology_path),
            tier=_TIER,
            subject=_subject(self._settings, self._peers, nodes),
            host=LOOPBACK,
            redis_ports=self._ports[REDIS],
            memcached_ports=self._ports[MEMCACHED],
            sql=SqlAddress(
                host=database.host, port=database.port, user=administrator.user, password=administrator.password
            ),
        )


def _subject(settings: BenchSettings, peers: PeersSettings, nodes: int) -> Subject:
    return Subject(
        workload=peers.workload,
        nodes=nodes,
        seed=peers.seed,
        shards=4 if settings.toy else 16,
        ids_file=str(settings.work_dir / "ids.bin"),
    )


class _Starter:
    """`Progress` that has the load processes begin together when all are ready."""

    def __init__(self, progress: Progress, start: Path) -> None:
        self._progress = progress
        self._start = start
        self._ready = 0

    def step(self, text: str, done: float = 0.0) -> None:
        """See `loadtest.scenario.Progress`."""
        if text == READY:
            self._ready += 1
            if self._ready == _PROCESSES:
                whole = self._start.with_suffix(".whole")
                whole.write_text(str(perf_counter()))
                whole.rename(self._start)
        self._progress.step(text, done)


def shapes_of(result: PeersResult, pair: list[PairResult], peers: PeersSettings) -> Shapes:
    """Figures by shape, many awaiters of single queries first, and by contestant."""
    shapes = {
        shape: {
            name: figure_of(shape, name, [taken], result.queries_per_operation[shape]) for name, taken in of.items()
        }
        for shape, of in result.shapes.items()
    }
    shape = f"{peers.workload}, {_PROCESSES} client processes of {max(1, peers.awaiters // _PROCESSES)} awaiters each"
    shapes[shape] = {name: figure_of(shape, name, [each.taken[name] for each in pair]) for name in CONTESTANTS}
    return shapes


def of_contestants(
    shapes: Shapes, tao: CacheCounts, stale: dict[str, list[StaleReads]], memory: dict[str, list[ServerMemory]]
) -> dict[str, OfContestant]:
    """The first shape's figures, with tao's ratios to each contestant."""
    first = next(iter(shapes.values()))
    found = {}
    for name, figure in first.items():
        found[name] = OfContestant(
            throughput_qps=round(figure.per_second, 1),
            p50_ms=round(figure.p50_us / 1000, 4),
            p99_ms=round(figure.p99_us / 1000, 4),
            server_cpu_us_per_query=round(figure.server_cpu_us, 2),
            client_cpu_us_per_query=round(figure.client_cpu_us, 2),
            total_cpu_us_per_query=round(figure.total_cpu_us, 2),
            **(_of_tao(tao) if name == TAO else _of_a_peer(name, shapes)),
            failed=sum(sum(of[name].failed.values()) for of in shapes.values()),
            stale_reads=sum(each.stale for each in stale[name]),
            stale=stale[name],
            memory=memory.get(name, []),
            ratio=ratios(first[TAO], figure),
        )
    return found


def _of_tao(counts: CacheCounts) -> dict[str, Any]:
    reads = max(1, counts.hits + counts.misses)
    return {
        "hit_rate": 1 - counts.leader_misses / reads,
        "joined_share": counts.joined / reads,
        "follower_hit_rate": counts.hits / reads,
    }


def _of_a_peer(name: str, shapes: Shapes) -> dict[str, Any]:
    if name == MYSQL:
        return {"hit_rate": None, "joined_share": None, "follower_hit_rate": None}
    figure = next(iter(shapes.values()))[name]
    reads = max(1, figure.hits + figure.joined + figure.misses)
    return {"hit_rate": figure.hits / reads, "joined_share": figure.joined / reads, "follower_hit_rate": None}
