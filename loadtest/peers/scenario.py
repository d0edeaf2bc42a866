"""Scenario `peers`: one workload, one graph, one machine, one run, and what a user would pick instead.

tao has a follower and a leader; Redis and memcached have two servers each; every one of these has the same budget for
what it caches, and what it has really taken is measured and reported. All have the same MySQL or MariaDB server behind
them. Contestants take turns; stale answers are looked for afterwards, on a cluster of two tiers with a small graph.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Final

import msgspec

from loadtest.client_process import run_job
from loadtest.peers.aims import aims_listing, judged, peers_win
from loadtest.peers.arena import Rivals
from loadtest.peers.memory import ServerMemory, memory_listing, memory_of
from loadtest.peers.names import CONTESTANTS, MEMCACHED, MYSQL, PAIR, REDIS, SHAPES, TAO
from loadtest.peers.outcome import of_contestants, shapes_of
from loadtest.peers.peers_process import READY, PairJob, PairResult, PeersJob, PeersResult
from loadtest.peers.servers import SMALLEST_MB, find_memcached, several_memcached, several_redis
from loadtest.peers.sql_graph import SqlAddress
from loadtest.peers.staleness import ONE_TIER, StaleJob, StaleReads, StaleResult
from loadtest.peers.tables import ratio_listing, shape_listing, stale_listing, warming_listing
from loadtest.peers.warming import WarmBounds
from loadtest.published.load_process import Subject
from loadtest.published.run import SCHEMA
from loadtest.published.workload import workload_named
from loadtest.redis_server import find_redis_server
from loadtest.results import ScenarioResult
from loadtest.scenario import BenchSettings, Progress, check_bounds
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.ports import LOOPBACK
from tao.devcluster.server_options import Durability
from tao.devcluster.state_folder import service_accounts
from tao.model.errors import OperatorError

SUMMARY: Final = "a published workload beside Redis and memcached in front of MySQL, and MySQL alone"
MOST_SECONDS: Final = 1_800.0
"""Of all of it: some five minutes on a machine that has nothing else to do."""
_CACHE_SERVERS: Final = 2
_WARM_WINDOW: Final = 10
"""Requests a node. Of windows of one request a node, each brings less than half a point long before the last."""
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
    "p50, p99: the median of the rounds; worst: the p99 of the worst round.",
    "Hit rate: reads that a cache server answered; joined: waited for another's fetch, which is neither hit nor miss.",
    "First reads: of what asked the database, reads of what a contestant had never been asked for; no cache has those.",
    "Hits' and misses' p99 of tao: of a sample, a tenth of the time, in which the client's trace is open.",
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
    rate: float = 4_000.0
    """Requests a second of the open loop, the same for everybody: half of what the slower peers can do."""
    warm_requests: int = 2_000_000
    """Of every cache at most, before its first turn; warming is over when none gains from it any more."""
    warm_seconds: float = 240.0
    """Of all of warming at most."""
    only: tuple[str, ...] = ()
    """These contestants; all when none is named."""
    shapes: tuple[str, ...] = ()
    """These kinds of load; all when none is named."""
    stale: bool = True
    """Whether stale reads are looked for."""
    seed: int = 1

    def __post_init__(self) -> None:
        check_bounds(
            {
                "--nodes": (self.nodes, 100, 2_000_000),
                "--cache-share": (self.cache_share, 0.001, 10),
                "--awaiters": (self.awaiters, 1, 2_000),
                "--rate": (self.rate, 1, 1_000_000),
                "--warm-requests": (self.warm_requests, 0, 100_000_000),
                "--warm-seconds": (self.warm_seconds, 0, 3_600),
            }
        )
        workload_named(self.workload)
        for flag, chosen, known in (("--only", self.only, CONTESTANTS), ("--shape", self.shapes, SHAPES)):
            unknown = [each for each in chosen if each not in known]
            if unknown:
                raise OperatorError(f"{flag} {', '.join(unknown)}: there are {', '.join(known)}")

    def at_toy_size(self) -> PeersSettings:
        """The same in little."""
        return replace(self, nodes=400, awaiters=8, rate=200.0, warm_requests=800)

    @property
    def contestants(self) -> tuple[str, ...]:
        """Who takes part, in order."""
        return tuple(name for name in CONTESTANTS if name in (self.only or CONTESTANTS))

    @property
    def kinds(self) -> tuple[str, ...]:
        """What load is put on, in order."""
        return tuple(kind for kind in SHAPES if kind in (self.shapes or SHAPES))


async def run(
    settings: BenchSettings, progress: Progress, wanted: PeersSettings | None = None, plot_file: Path | None = None
) -> ScenarioResult:
    """See `SUMMARY`; ``plot_file``: a PNG to draw. Raises `OperatorError`."""
    peers = wanted or PeersSettings()
    if settings.toy:
        peers = peers.at_toy_size()
    if REDIS in peers.contestants:
        _, settings.versions["redis-server"] = find_redis_server()
    if MEMCACHED in peers.contestants:
        _, settings.versions["memcached"] = find_memcached()
    progress.step("planning the graph")
    data_bytes = _subject(settings, peers, peers.nodes).plan().payload_bytes
    cache_mb = max(SMALLEST_MB, round(data_bytes * peers.cache_share) >> 20)
    ports, pids = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]]()
    async with AsyncExitStack() as stack:
        for name, several in ((REDIS, several_redis), (MEMCACHED, several_memcached)):
            if name in peers.contestants:
                ports[name], pids[name] = await several(_CACHE_SERVERS, cache_mb, settings.work_dir, stack)
        turns = _Turns(settings, progress, peers, cache_mb, ports, pids)
        result, pair, memory = await turns.taken()
        stale = await turns.stale() if peers.stale else {}
    shapes = shapes_of(result, pair, peers.contestants)
    measured = of_contestants(shapes, stale, memory)
    aims = judged(shapes, stale.get(TAO, []))
    unsteady = not result.warming.steady and peers.contestants != (MYSQL,)
    over = [name for name, servers in memory.items() if any(each.is_over for each in servers)]
    drawn = {name: msgspec.to_builtins(found) for name, found in measured.items()} | {
        "aims": msgspec.to_builtins(aims),
        "peers_win": peers_win(shapes),
        "warming": {**msgspec.to_builtins(result.warming), "requests_per_node": result.warming.requests / peers.nodes},
        "figures": [msgspec.to_builtins(each) for of in shapes.values() for each in of.values()],
    }
    if plot_file is not None:
        # Loaded here: it takes a second, which a run without a plot need not wait for.
        from loadtest.report.peers_plot import draw_peers

        draw_peers(drawn, plot_file)
    return ScenarioResult(
        summary=f"{SUMMARY} ({peers.workload})",
        conditions={
            "nodes": peers.nodes,
            "payload_mb": round(data_bytes / 1e6, 1),
            "cache_mb_each": cache_mb,
            "cache_servers": _CACHE_SERVERS,
            "awaiters": peers.awaiters,
            "rate": peers.rate,
            "warm_requests_each": result.warming.requests,
            "rounds": settings.rounds,
            "round_seconds": settings.round_seconds,
            "answers_checked_of_each": result.checked,
        },
        listings=[
            each
            for each in (
                warming_listing(result.warming, peers.nodes), shape_listing(shapes), ratio_listing(measured),
                aims_listing(aims), stale_listing(measured), memory_listing(memory),
            )
            if each.rows
        ],
        notes=[
            *_NOTES,
            *(["Warming ended at one of its bounds, before every cache was steady."] if unsteady else []),
            *([f"More memory than its budget, by over a tenth: {', '.join(over)}."] if over else []),
            *peers_win(shapes),
        ],
        measured=drawn,
        faults=[
            f"{each.stale} of {each.reads} reads of tao within one tier were stale"
            for each in stale.get(TAO, [])
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

    async def taken(self) -> tuple[PeersResult, tuple[str, list[PairResult]] | None, dict[str, list[ServerMemory]]]:
        """All shapes of load, that of several load processes by itself, and the caches' memory afterwards."""
        settings, peers = self._settings, self._peers
        async with DevCluster(self._cluster("peers", tiers=1), self._progress.step) as cluster:
            settings.versions[cluster.database(_DATABASE).binary.flavour] = cluster.database(
                _DATABASE
            ).binary.version_text
            rivals = self._rivals(cluster, peers.nodes)
            processes = (await cluster.status()).processes
            pids = {process.name: process.pid for process in processes}
            cache_pids = {TAO: (pids[_FOLLOWER], pids[_LEADER]), **self._cache_pids}
            server_pids = {name: (*cache_pids.get(name, ()), pids[_DATABASE]) for name in peers.contestants}
            if TAO in server_pids:  # a tailer keeps nothing, and works for every write
                server_pids[TAO] += tuple(process.pid for process in processes if process.role is Role.TAILER)
            admins = (cluster.admin(_FOLLOWER), cluster.admin(_LEADER))
            job = PeersJob(
                rivals=rivals,
                server_pids=server_pids,
                admins=admins,
                shapes=peers.kinds,
                awaiters=peers.awaiters,
                warm=WarmBounds(
                    window_requests=_WARM_WINDOW * peers.nodes,
                    most_requests=peers.warm_requests,
                    most_seconds=peers.warm_seconds,
                ),
                rounds=settings.rounds,
                round_seconds=settings.round_seconds,
                rate=peers.rate,
            )
            result = await run_job(job, self._progress, settings.work_dir / "peers.log", PeersResult)
            pair = await self._pair(rivals, server_pids, admins) if PAIR in peers.kinds else None
            memory = await memory_of(
                self._cache_mb << 20, admins if TAO in peers.contestants else (), self._ports, cache_pids
            )
        return result, pair, memory

    async def _pair(
        self, rivals: Rivals, server_pids: dict[str, tuple[int, ...]], admins: tuple[str, str]
    ) -> tuple[str, list[PairResult]]:
        settings, awaiters = self._settings, max(1, self._peers.awaiters // _PROCESSES)
        start = settings.work_dir / "start"
        listening = _Starter(self._progress, start)
        jobs = [
            PairJob(
                rivals=rivals,
                server_pids={} if process else server_pids,
                admins=None if process else admins,
                process=process,
                awaiters=awaiters,
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
        shape = f"{self._peers.workload}, {_PROCESSES} client processes of {awaiters} awaiters each"
        return shape, [task.result() for task in tasks]

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
            contestants=self._peers.contestants,
            topology_file=str(cluster.topology_path),
            tier=_TIER,
            subject=_subject(self._settings, self._peers, nodes),
            host=LOOPBACK,
            redis_ports=self._ports.get(REDIS, ()),
            memcached_ports=self._ports.get(MEMCACHED, ()),
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
