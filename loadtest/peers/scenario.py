"""Scenario `peers`: one workload over one graph in one run, for tao and for what a user would choose instead.

tao has a follower and a leader; Redis, Valkey and memcached have two servers each. Each of these servers has the same
budget for its cache, and the memory that it really uses is measured and reported. tao, the peers over MySQL or MariaDB,
and PostgreSQL have a database server each, with the same buffer pool and durability. Contestants take turns; stale
answers are looked for afterwards, on a cluster of two tiers with a small graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from loadtest import options
from loadtest.peers.arena import CACHES, CONTESTANTS
from loadtest.peers.caches import LOOKASIDES
from loadtest.peers.contestants import POSTGRES, TAO
from loadtest.peers.figures import (
    SHAPES,
    listings,
    nothing_wrong,
    of_contestants,
    peers_win,
    shapes_of,
)
from loadtest.peers.postgres_server import WHERE_FROM, postgres_folder
from loadtest.peers.servers import CACHE_SERVERS, PeersRun, PeersSize, TurnsOutcome, open_peers
from loadtest.peers.staleness import ONE_TIER
from loadtest.peers.warm_up import WarmBounds
from loadtest.published.jobs import Subject
from loadtest.published.workload import workload_names
from loadtest.results import Conditions, ScenarioResult, aims_of
from loadtest.scenario import BenchSettings, Progress, Scenario

SUMMARY: Final = "a published workload beside caches in front of MySQL, MySQL alone and PostgreSQL alone"
MOST_SECONDS: Final = 1_800.0
"""The bound on the whole run, which takes some five minutes on an otherwise idle machine."""
_WARM_WINDOW: Final = 10
"""Requests per node in a window. With windows of one request per node, each would gain less than half a point of hit
rate long before the caches are warm."""
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
    """The size of each of a contestant's two cache servers, 4 MB at least."""
    awaiters: int = options.AWAITERS.default(64, toy=8)
    rate: float = options.RATE.default(4_000.0, toy=200.0)
    """The same rate for all contestants, half of what the slower peers can do."""
    warm_requests: int = options.WARM_REQUESTS.default(2_000_000, toy=800)
    """A bound only: warming ends when no cache gains from it any more."""
    warm_seconds: float = options.WARM_SECONDS.default(240.0, help="Most seconds of warming, all caches together.")
    data_per_pool: float = options.DATA_PER_POOL.default(0.0)
    disk_operations: int = options.DISK_OPERATIONS.default(3_000)
    """The operations of a networked disk of the cloud at its default size."""
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
    subject = Subject(
        workload=peers.workload,
        nodes=peers.nodes,
        seed=peers.seed,
        shards=4 if settings.toy else 16,
        ids_file=str(settings.work_dir / "ids.bin"),
    )
    size = PeersSize.of(subject, peers.cache_share, peers.data_per_pool, peers.disk_operations)
    async with AsyncExitStack() as stack:
        run_of = await open_peers(settings, progress, peers.contestants, size, stack)
        outcome = await run_of.turns(peers.kinds, peers.awaiters, _warming(peers), peers.rate)
        stale = await run_of.stale() if peers.stale else {}
    shapes = shapes_of(outcome.result.figures)
    aims = [*aims_of(outcome.result.figures), *nothing_wrong(shapes, stale.get(TAO, []))]
    return ScenarioResult(
        summary=f"{SUMMARY} ({peers.workload})",
        conditions=_conditions(settings, peers, size, outcome),
        listings=listings(shapes, stale, outcome.memory),
        notes=[*_NOTES, *absent, *_reservations(peers, outcome), *_servers(run_of, outcome), *peers_win(shapes)],
        aims=aims,
        measured={
            **of_contestants(shapes, stale, outcome.memory),
            "aims": msgspec.to_builtins(aims),
            "peers_win": peers_win(shapes),
            "cache_programs": run_of.cache_programs,
            "databases": msgspec.to_builtins(outcome.databases),
            "warming": {
                **msgspec.to_builtins(outcome.result.warming),
                "requests_per_node": outcome.result.warming.requests / peers.nodes,
            },
            "figures": msgspec.to_builtins(outcome.result.figures),
        },
        faults=[
            f"{each.stale} of {each.reads} reads of tao within one tier were stale"
            for each in stale.get(TAO, [])
            if each.stale and each.within == ONE_TIER
        ],
    )


def _conditions(settings: BenchSettings, peers: PeersOptions, size: PeersSize, outcome: TurnsOutcome) -> Conditions:
    return {
        "nodes": peers.nodes,
        "payload_mb": round(size.payload_bytes / 1e6, 1),
        "cache_mb_each": size.cache_mb,
        "cache_servers": CACHE_SERVERS,
        "durability": "full: every commit is synced",
        "buffer_pool_mb_each": outcome.buffer_pool_mb,
        "data_per_pool": peers.data_per_pool,
        "awaiters": peers.awaiters,
        "rate": peers.rate,
        "warm_requests_each": outcome.result.warming.requests,
        "rounds": settings.rounds,
        "round_seconds": settings.round_seconds,
        "answers_checked_of_each": outcome.result.checked,
    }


def _warming(peers: PeersOptions) -> WarmBounds:
    return WarmBounds(
        window_requests=_WARM_WINDOW * peers.nodes,
        most_requests=peers.warm_requests,
        most_seconds=peers.warm_seconds,
    )


SCENARIO: Final = Scenario(
    name="peers",
    summary=SUMMARY,
    run=run,
    options=PeersOptions,
    help="""Measure a published workload beside Redis, Valkey and memcached in front of MySQL, and beside MySQL and
    PostgreSQL alone. With --data-per-pool the data exceeds the databases' memory, and disk operations are limited.

    The JSON has what `measured` of the scenario has in a report of `bench`, its aims, and the machine.""",
    has_plot=True,
    seconds_bound=lambda _: MOST_SECONDS,
)


def without_absent(peers: PeersOptions) -> tuple[PeersOptions, list[str]]:
    """Return the options without the contestants whose server's program is not here, and the reason for each. One that
    `--only` names stays: that its program is missing is then an error."""
    if peers.only:
        return peers, []
    reasons = {
        name: f"no {kind.program.name} on the PATH: {kind.program.where_from}"
        for name, kind in LOOKASIDES.items()
        if kind.program.found() is None
    }
    if postgres_folder() is None:
        reasons[POSTGRES] = f"no postgres and initdb on this machine: {WHERE_FROM}"
    only = tuple(name for name in peers.contestants if name not in reasons)
    return replace(peers, only=only), [f"{name}: skipped, {reason}." for name, reason in reasons.items()]


def _reservations(peers: PeersOptions, outcome: TurnsOutcome) -> Iterator[str]:
    if not outcome.result.warming.steady and set(peers.contestants) & set(CACHES):
        yield "Warming ended at one of its bounds, before every cache was steady."
    over = [name for name, servers in outcome.memory.items() if any(each.is_over for each in servers)]
    if over:
        yield f"More memory than its budget, by over a tenth: {', '.join(over)}."


def _servers(run_of: PeersRun, outcome: TurnsOutcome) -> Iterator[str]:
    """Describe substitutes of servers, and what was limited of each database."""
    for name, program in run_of.cache_programs.items():
        wanted = LOOKASIDES[name].program
        if not program.startswith(wanted.name):
            yield f"{name}: {program} in place of {wanted.name}, which is not on the PATH."
    for name, each in outcome.databases.items():
        limits = each.limits
        if limits is None:
            continue
        memory = "" if limits.memory_mb is None else f"memory {limits.memory_mb} MB (processes {limits.held_mb} MB)"
        disk = "" if limits.operations_per_second is None else f"{limits.operations_per_second:,} reads and writes/s"
        limited = ", ".join(filter(None, (memory, disk))) or "nothing"
        missing = f"; not limited: {', '.join(limits.unlimited)}" if limits.unlimited else ""
        yield f"Database of {name}: {each.data_mb} MB of tables, {each.data_io}; limited: {limited}{missing}."
