"""Scenario `peers`: one workload over one graph in one run, for tao and for what a user would choose instead.

tao has a follower and a leader; Redis and memcached have two servers each. Each of these servers has the same budget
for its cache, and the memory that it really uses is measured and reported. All have the same MySQL or MariaDB server
behind them. Contestants take turns; stale answers are looked for afterwards, on a cluster of two tiers with a small
graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from shutil import which
from typing import Final

import msgspec

from loadtest import options
from loadtest.client_process import run_job
from loadtest.peer_servers import PeerServer, private_server
from loadtest.peers.arena import CACHES, CONTESTANTS, Rivals
from loadtest.peers.caches import LOOKASIDES
from loadtest.peers.contestants import TAO
from loadtest.peers.figures import (
    SHAPES,
    ServerMemory,
    listings,
    memory_of,
    nothing_wrong,
    of_contestants,
    peers_win,
    shapes_of,
)
from loadtest.peers.jobs import PeersJob, PeersResult
from loadtest.peers.sql_graph import SqlAddress
from loadtest.peers.staleness import ONE_TIER, StaleJob, StaleReads
from loadtest.peers.warm_up import WarmBounds
from loadtest.published.jobs import Subject
from loadtest.published.run import SCHEMA
from loadtest.published.workload import workload_names
from loadtest.results import ScenarioResult, aims_of
from loadtest.rounds import Pace
from loadtest.scenario import BenchSettings, Progress, Scenario
from loadtest.target import FOLLOWER, LEADER, versions_of
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.state_folder import service_accounts

SUMMARY: Final = "a published workload beside Redis and memcached in front of MySQL, and MySQL alone"
MOST_SECONDS: Final = 1_800.0
"""The bound on the whole run, which takes some five minutes on an otherwise idle machine."""
_CACHE_SERVERS: Final = 2
_SMALLEST_MB: Final = 4
"""The smallest cache server of any contestant."""
_WARM_WINDOW: Final = 10
"""Requests per node in a window. With windows of one request per node, each would gain less than half a point of hit
rate long before the caches are warm."""
_DATABASE: Final = "db-1"
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


@dataclass(frozen=True, kw_only=True)
class PeersOptions(options.Options):
    """The options of `peers`."""

    workload: str = options.WORKLOAD.default("tao_atc13", choices=workload_names())
    nodes: int = options.NODES.default(30_000, toy=400)
    cache_share: float = options.CACHE_SHARE.default(0.2)
    """The size of each of a contestant's two cache servers, `_SMALLEST_MB` at least."""
    awaiters: int = options.AWAITERS.default(64, toy=8)
    rate: float = options.RATE.default(4_000.0, toy=200.0)
    """The same rate for all contestants, half of what the slower peers can do."""
    warm_requests: int = options.WARM_REQUESTS.default(2_000_000, toy=800)
    """A bound only: warming ends when no cache gains from it any more."""
    warm_seconds: float = options.WARM_SECONDS.default(240.0, help="Most seconds of warming, all caches together.")
    only: tuple[str, ...] = options.CONTESTANT.default((), choices=CONTESTANTS)
    shapes: tuple[str, ...] = options.SHAPE.default((), choices=SHAPES)
    stale: bool = options.STALE.default(True)
    seconds: float | None = options.SECONDS.default(
        None, help="Measured seconds of one contestant in one shape, all rounds together."
    )
    seed: int = options.SEED.default(1)

    @property
    def contestants(self) -> tuple[str, ...]:
        """The contestants that take part, in order."""
        return tuple(name for name in CONTESTANTS if name in (self.only or CONTESTANTS))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The shapes of load, in order."""
        return tuple(kind for kind in SHAPES if kind in (self.shapes or SHAPES))


async def run(settings: BenchSettings, progress: Progress, peers: PeersOptions) -> ScenarioResult:
    """Measure all contestants over one graph. Raises `OperatorError`."""
    if peers.seconds is not None:
        settings = replace(settings, seconds=peers.seconds)
    peers, absent = without_absent(peers)
    progress.step("planning the graph")
    data_bytes = _subject(settings, peers, peers.nodes).plan().payload_bytes
    cache_mb = max(_SMALLEST_MB, round(data_bytes * peers.cache_share) >> 20)
    async with AsyncExitStack() as stack:
        caches = await _start_caches(settings, peers, cache_mb, stack)
        run_of = _Clusters(settings, progress, peers, cache_mb, caches)
        result, memory = await run_of.turns()
        stale = await run_of.stale() if peers.stale else {}
    shapes = shapes_of(result.figures)
    aims = [*aims_of(result.figures), *nothing_wrong(shapes, stale.get(TAO, []))]
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
        listings=listings(shapes, stale, memory),
        notes=[*_NOTES, *absent, *_reservations(peers, result, memory), *peers_win(shapes)],
        aims=aims,
        measured={
            **of_contestants(shapes, stale, memory),
            "aims": msgspec.to_builtins(aims),
            "peers_win": peers_win(shapes),
            "warming": {
                **msgspec.to_builtins(result.warming),
                "requests_per_node": result.warming.requests / peers.nodes,
            },
            "figures": msgspec.to_builtins(result.figures),
        },
        faults=[
            f"{each.stale} of {each.reads} reads of tao within one tier were stale"
            for each in stale.get(TAO, [])
            if each.stale and each.within == ONE_TIER
        ],
    )


SCENARIO: Final = Scenario(
    name="peers",
    summary=SUMMARY,
    run=run,
    options=PeersOptions,
    help="""Measure a published workload beside Redis and memcached in front of MySQL, and beside MySQL alone.

    The JSON has what `measured` of the scenario has in a report of `bench`, its aims, and the machine.""",
    has_plot=True,
    seconds_bound=lambda _: MOST_SECONDS,
)


def without_absent(peers: PeersOptions) -> tuple[PeersOptions, list[str]]:
    """Return the options without the contestants whose server's program is not here, and the reason for each. One that
    `--only` names stays: that its program is missing is then an error."""
    absent = {
        name: kind.program for name, kind in LOOKASIDES.items() if not peers.only and which(kind.program.name) is None
    }
    only = tuple(name for name in peers.contestants if name not in absent)
    reasons = [f"{name}: skipped, no {each.name} on the PATH: {each.where_from}." for name, each in absent.items()]
    return replace(peers, only=only), reasons


def _reservations(
    peers: PeersOptions, result: PeersResult, memory: Mapping[str, Sequence[ServerMemory]]
) -> Iterator[str]:
    if not result.warming.steady and set(peers.contestants) & set(CACHES):
        yield "Warming ended at one of its bounds, before every cache was steady."
    over = [name for name, servers in memory.items() if any(each.is_over for each in servers)]
    if over:
        yield f"More memory than its budget, by over a tenth: {', '.join(over)}."


async def _start_caches(
    settings: BenchSettings, peers: PeersOptions, cache_mb: int, stack: AsyncExitStack
) -> dict[str, list[PeerServer]]:
    """Run the peers' cache servers until the stack ends. Raises `OperatorError`."""
    caches: dict[str, list[PeerServer]] = {}
    for name in (each for each in peers.contestants if each in LOOKASIDES):
        kind = LOOKASIDES[name]
        settings.versions[kind.program.name] = kind.program.version()
        for number in range(_CACHE_SERVERS):
            server = private_server(kind.program, settings.work_dir / f"{name}-{number}", cache_mb + kind.own_mb)
            caches.setdefault(name, []).append(await stack.enter_async_context(server))
    return caches


@dataclass(frozen=True, slots=True)
class _Clusters:
    """The clusters of a run, and the load processes over them."""

    settings: BenchSettings
    progress: Progress
    peers: PeersOptions
    cache_mb: int
    caches: dict[str, list[PeerServer]]

    async def turns(self) -> tuple[PeersResult, dict[str, list[ServerMemory]]]:
        """Return the figures of all shapes, and the memory of the caches afterwards."""
        settings, peers = self.settings, self.peers
        async with self._cluster("peers", tiers=1) as cluster:
            settings.versions.update(versions_of(cluster.database(_DATABASE)))
            processes = (await cluster.status()).processes
            pids = {process.name: process.pid for process in processes}
            # A tailer caches nothing, and works for every write.
            of_tao = (FOLLOWER, LEADER, *(each.name for each in processes if each.role is Role.TAILER))
            server_pids = {name: {_DATABASE: pids[_DATABASE]} for name in peers.contestants}
            for name, servers in self.caches.items():
                server_pids[name] |= {f"{name}-{number}": each.pid for number, each in enumerate(servers)}
            if TAO in server_pids:
                server_pids[TAO] |= {name: pids[name] for name in of_tao}
            admins = (cluster.admin(FOLLOWER), cluster.admin(LEADER))
            job = PeersJob(
                rivals=self._rivals(cluster, peers.nodes),
                server_pids=server_pids,
                admins=admins,
                shapes=peers.kinds,
                awaiters=peers.awaiters,
                warm=WarmBounds(
                    window_requests=_WARM_WINDOW * peers.nodes,
                    most_requests=peers.warm_requests,
                    most_seconds=peers.warm_seconds,
                ),
                pace=Pace(settings.rounds, settings.round_seconds),
                rate=peers.rate,
            )
            result = await run_job(job, self.progress, settings.work_dir / "peers.log", PeersResult)
            memory = await memory_of(
                self.cache_mb << 20,
                admins if TAO in peers.contestants else (),
                self._ports(),
                {TAO: [pids[FOLLOWER], pids[LEADER]], **{n: [e.pid for e in of] for n, of in self.caches.items()}},
            )
        return result, memory

    def _ports(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(each.port for each in servers) for name, servers in self.caches.items()}

    async def stale(self) -> dict[str, list[StaleReads]]:
        """Look for stale reads; returns them by contestant."""
        settings = self.settings
        async with self._cluster("stale", tiers=2) as cluster:
            rivals = self._rivals(cluster, 400 if settings.toy else _STALE_NODES)
            job = StaleJob(rivals=rivals, seconds=0.5 if settings.toy else 5.0)
            return await run_job(job, self.progress, settings.work_dir / "stale.log", dict[str, list[StaleReads]])

    def _cluster(self, name: str, tiers: int) -> DevCluster:
        shards = _subject(self.settings, self.peers, 0).shards
        own = ClusterSettings(
            state_dir=self.settings.work_dir / name,
            shape=Shape(tiers=tiers, followers=1, leaders=1, databases=1, shards=shards),
            schema_file=SCHEMA,
            buffer_pool_mb=64 if self.settings.toy else 1024,
            durability=Durability.RELAXED,
            cache_mb=self.cache_mb,
            log_level="warning",
        )
        return DevCluster(own, self.progress.step)

    def _rivals(self, cluster: DevCluster, nodes: int) -> Rivals:
        database = cluster.database(_DATABASE)
        administrator = service_accounts(cluster.record.passwords).administrator
        return Rivals(
            contestants=self.peers.contestants,
            topology_file=str(cluster.topology_path),
            subject=_subject(self.settings, self.peers, nodes),
            cache_ports=self._ports(),
            sql=SqlAddress(
                host=database.host, port=database.port, user=administrator.user, password=administrator.password
            ),
        )


def _subject(settings: BenchSettings, peers: PeersOptions, nodes: int) -> Subject:
    return Subject(
        workload=peers.workload,
        nodes=nodes,
        seed=peers.seed,
        shards=4 if settings.toy else 16,
        ids_file=str(settings.work_dir / "ids.bin"),
    )
