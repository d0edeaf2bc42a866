"""The figures of the turns.

Histograms of all load processes add up. Rates and percentiles are medians of the rounds, since a moment in which the
machine does other work falls into one round and not into all.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiomcache
import msgspec
import redis.asyncio

from loadtest.peers.contestants import Source
from loadtest.peers.jobs import PairResult, PeersResult
from loadtest.peers.names import MANY, MEMCACHED, MYSQL, OPEN, PAIR, REDIS, TAO
from loadtest.peers.staleness import ONE_TIER, StaleReads
from loadtest.peers.turns import Taken, added
from loadtest.peers.warm_up import Warming
from loadtest.published.latencies import LatencySummary, MergedLatencies
from loadtest.results import Aim, Listing
from tao.admin.server_stats import server_stats
from tao.devcluster.ports import LOOPBACK

_MICRO: Final = 1e6


class ShapeFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One contestant in one shape of load. Latencies are microseconds per operation, CPU times microseconds per query;
    an operation is one request, of ``queries_per_operation`` queries."""

    shape: str
    kind: str
    """The kind of load: one of `loadtest.peers.names.SHAPES`."""
    contestant: str
    queries_per_operation: int
    operations: int
    per_second: float
    rounds_per_second: list[float]
    rounds_hit_rate: list[float]
    """Share of the reads answered without the database, by round; empty where there is no ``hit_rate``."""
    p50_us: float
    p99_us: float
    rounds_p99_us: list[float]
    quantiles_ms: dict[str, float]
    """Percentage of the operations of all rounds → milliseconds within which they were answered."""
    server_cpu_us: float
    client_cpu_us: float
    total_cpu_us: float
    failed: dict[str, int]
    touched_bytes: float
    """Payload bytes per query that the application looked at."""
    hits: int
    """Reads known to be answered without the database. This and the next two fields count only reads of known
    source."""
    joined: int
    misses: int
    hit_rate: float | None
    """Share of the reads answered without the database; None where nothing is cached, and for batches, whose requests
    are not counted key by key."""
    joined_share: float | None
    """Share of the reads that waited for another's fetch; for tao, in the follower."""
    follower_hit_rate: float | None
    """Share of tao's reads that the follower answered from its own memory."""
    first_read_share: float | None
    """Among the reads that asked the database, the share of keys for which this contestant had never been asked, which
    no cache can have. None when the load processes did not warm the caches and so do not know it."""
    hit_ms: LatencySummary | None
    """Latencies of reads answered without the database; for tao, from the follower's memory and of a sample
    (`loadtest.peers.contestants`)."""
    miss_ms: LatencySummary | None


def figure_of(
    kind: str, shape: str, contestant: str, taken: Sequence[Taken], queries_per_operation: int = 1
) -> ShapeFigure:
    """Add up all load processes. Raises `ValueError` when nothing was answered."""
    everything = [how.name for how in Source]
    rounds = list(zip(*(each.turns for each in taken), strict=True))
    merged, latencies = MergedLatencies(), list[LatencySummary]()
    for turns in rounds:
        of_round = MergedLatencies()
        for turn in turns:
            of_round.add(turn.recording)
            merged.add(turn.recording)
        if (latency := of_round.summary(*everything)) is None:
            raise ValueError(f"{contestant} answered nothing in a round of {shape}: give it more --seconds")
        latencies.append(latency)
    operations = sum(each.count for each in latencies)
    rates = [queries_per_operation * sum(turn.answered / turn.elapsed for turn in turns) for turns in rounds]
    queries = queries_per_operation * operations
    server = sum(turn.server_cpu for each in taken for turn in each.turns) / queries * _MICRO
    client = sum(turn.client_cpu for each in taken for turn in each.turns) / queries * _MICRO
    tells = contestant != MYSQL and queries_per_operation == 1
    counts = [added(turn.counts for turn in turns) for turns in rounds]
    all_counts, first_reads = added(counts), [turn.first_reads for each in taken for turn in each.turns]
    reads = max(1, all_counts.reads)
    return ShapeFigure(
        shape=shape,
        kind=kind,
        contestant=contestant,
        queries_per_operation=queries_per_operation,
        operations=operations,
        per_second=statistics.median(rates),
        rounds_per_second=rates,
        rounds_hit_rate=[each.hits / max(1, each.reads) for each in counts] if tells else [],
        p50_us=statistics.median(each.p50 for each in latencies) * 1000,
        p99_us=statistics.median(each.p99 for each in latencies) * 1000,
        rounds_p99_us=[each.p99 * 1000 for each in latencies],
        quantiles_ms=merged.quantiles(*everything),
        server_cpu_us=server,
        client_cpu_us=client,
        total_cpu_us=server + client,
        failed=dict(merged.failed),
        touched_bytes=sum(each.touched for each in taken) / queries,
        hits=all_counts.hits,
        joined=all_counts.joined,
        misses=all_counts.misses,
        hit_rate=all_counts.hits / reads if tells else None,
        joined_share=all_counts.joined / reads if tells else None,
        follower_hit_rate=all_counts.in_follower / reads if tells and contestant == TAO else None,
        first_read_share=_share(first_reads, all_counts.misses) if tells else None,
        hit_ms=merged.summary(Source.HIT.name),
        miss_ms=merged.summary(Source.MISS.name, Source.JOINED.name),
    )


def _share(first_reads: Sequence[int | None], misses: int) -> float | None:
    known = [each for each in first_reads if each is not None]
    if len(known) < len(first_reads) or not misses:
        return None
    # Not every first read asks the database: a tao server that has a list's count knows when the list is empty.
    return min(1.0, sum(known) / misses)


_TOLERATED: Final = 1.1
_MEGA: Final = 1e6


class ServerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one cache server, in bytes."""

    budget: int
    cached: int
    """The memory that counts against the budget: tao's arenas by their own account, Redis' data with its tables,
    memcached's pages."""
    resident: int
    """The memory of the whole process."""

    @property
    def is_over(self) -> bool:
        """Whether it exceeds its budget by more than a tenth."""
        return self.cached > _TOLERATED * self.budget


async def memory_of(
    budget: int, admins: Sequence[str], ports: Mapping[str, Sequence[int]], pids: Mapping[str, Sequence[int]]
) -> dict[str, list[ServerMemory]]:
    """Measure the cache servers of the contestants that take part, and return their memory by contestant.

    ``admins`` are the admin addresses of tao's caches, ``ports`` those of the peers' servers, and ``pids`` the process
    ids of the cache servers in the same order. Raises what the clients raise.
    """
    cached = {
        TAO: [int((await server_stats(admin))["bytes"]) for admin in admins],
        REDIS: [await _of_redis(port) for port in ports.get(REDIS, ())],
        MEMCACHED: [await _of_memcached(port) for port in ports.get(MEMCACHED, ())],
    }
    return {
        name: [
            ServerMemory(budget=budget, cached=each, resident=_resident(pid))
            for each, pid in zip(of, pids[name], strict=True)
        ]
        for name, of in cached.items()
        if of
    }


async def _of_redis(port: int) -> int:
    # Any: redis-py types its answers for its two clients at once.
    client: Any = redis.asyncio.Redis(host=LOOPBACK, port=port)
    try:
        found = await client.info("memory")
    finally:
        await client.aclose()
    return int(found["used_memory"] - found["used_memory_startup"] - found["mem_clients_normal"])


async def _of_memcached(port: int) -> int:
    client = aiomcache.Client(LOOPBACK, port, pool_size=1)
    try:
        return int((await client.stats(b"slabs"))[b"total_malloced"] or 0)
    finally:
        await client.close()


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


def memory_listing(found: Mapping[str, Sequence[ServerMemory]]) -> Listing:
    """Return the table of memory."""
    rows: list[tuple[str, ...]] = [
        (
            f"{name}, server {number}",
            f"{each.budget / _MEGA:.1f}",
            f"{each.cached / _MEGA:.1f}" + (" (over its budget)" if each.is_over else ""),
            f"{each.resident / _MEGA:.1f}",
        )
        for name, servers in found.items()
        for number, each in enumerate(servers, 1)
    ]
    return Listing(title="", columns=("memory", "budget MB", "cached MB", "whole process MB"), rows=rows)


class ContestantFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One contestant in the first shape of load, by default 64 awaiters of single queries. Latencies are in
    milliseconds."""

    throughput_qps: float
    p50_ms: float
    p99_ms: float
    server_cpu_us_per_query: float
    client_cpu_us_per_query: float
    total_cpu_us_per_query: float
    hit_rate: float | None
    """Share of the reads that were answered without the database; None where nothing is cached."""
    joined_share: float | None
    """Share of the reads that waited for another's fetch; for tao, in the follower."""
    follower_hit_rate: float | None
    """Share of tao's reads that the follower answered from its own memory."""
    first_read_share: float | None
    """Among the reads that asked the database, the share of keys for which this contestant had never been asked."""
    failed: int
    """Requests in all shapes."""
    stale_reads: int | None
    """Stale reads in all places, which `stale` lists; None when the run did not look for them."""
    stale: list[StaleReads]
    memory: list[ServerMemory]
    """The memory of every cache server after the rounds."""
    ratio: dict[str, float]
    """Ratios of tao to this contestant (above 1: tao is better); empty where tao took no part."""


def shapes_of(result: PeersResult, pair: tuple[str, list[PairResult]] | None, contestants: tuple[str, ...]) -> Shapes:
    """Figures by shape, in order, and by contestant. ``pair`` is the text of the shape with several load processes."""
    shapes = {
        each.shape: {
            name: figure_of(each.kind, each.shape, name, [taken], each.queries_per_operation)
            for name, taken in each.taken.items()
        }
        for each in result.shapes
    }
    if pair is not None:
        shape, results = pair
        shapes[shape] = {
            name: figure_of(PAIR, shape, name, [each.taken[name] for each in results]) for name in contestants
        }
    return shapes


def of_contestants(
    shapes: Shapes, stale: Mapping[str, list[StaleReads]], memory: Mapping[str, list[ServerMemory]]
) -> dict[str, ContestantFigures]:
    """Return the first shape's figures, with tao's ratios to each contestant."""
    first = next(iter(shapes.values()))
    return {
        name: ContestantFigures(
            throughput_qps=round(figure.per_second, 1),
            p50_ms=round(figure.p50_us / 1000, 4),
            p99_ms=round(figure.p99_us / 1000, 4),
            server_cpu_us_per_query=round(figure.server_cpu_us, 2),
            client_cpu_us_per_query=round(figure.client_cpu_us, 2),
            total_cpu_us_per_query=round(figure.total_cpu_us, 2),
            hit_rate=figure.hit_rate,
            joined_share=figure.joined_share,
            follower_hit_rate=figure.follower_hit_rate,
            first_read_share=figure.first_read_share,
            failed=sum(sum(of[name].failed.values()) for of in shapes.values()),
            stale_reads=sum(each.stale for each in stale[name]) if name in stale else None,
            stale=stale.get(name, []),
            memory=memory.get(name, []),
            ratio=ratios(first[TAO], figure) if TAO in first else {},
        )
        for name, figure in first.items()
    }


PEERS: Final = (REDIS, MEMCACHED, MYSQL)
_THROUGHPUT: Final = {REDIS: 3.0, MYSQL: 5.0}


Shapes = Mapping[str, Mapping[str, ShapeFigure]]
"""Shape → contestant → figure, of those that were measured, in order."""


def ratios(ours: ShapeFigure, theirs: ShapeFigure) -> dict[str, float]:
    """Return the ratios of two contestants by what is compared."""
    return {
        "throughput": _divided(ours.per_second, theirs.per_second),
        "p50": _divided(theirs.p50_us, ours.p50_us),
        "p99": _divided(theirs.p99_us, ours.p99_us),
        "server_cpu": _divided(theirs.server_cpu_us, ours.server_cpu_us),
        "client_cpu": _divided(theirs.client_cpu_us, ours.client_cpu_us),
        "total_cpu": _divided(theirs.total_cpu_us, ours.total_cpu_us),
    }


def _divided(above: float, below: float) -> float:
    # CPU time is counted in ticks of ten milliseconds, so a short turn may have none.
    return round(above / below, 3) if below else 0.0


def judged(shapes: Shapes, stale: Sequence[StaleReads]) -> list[Aim]:
    """Return every aim that was measured. ``stale`` has tao's stale reads, and is empty when the run did not look for
    them."""
    return [*_throughputs(shapes), *_tails(shapes), *_nothing_wrong(shapes, stale)]


def _of_kinds(shapes: Shapes, *kinds: str) -> Iterator[tuple[str, Mapping[str, ShapeFigure]]]:
    """Return the shapes of these kinds of load in which tao took part."""
    return ((shape, of) for shape, of in shapes.items() if TAO in of and of[TAO].kind in kinds)


def _throughputs(shapes: Shapes) -> Iterator[Aim]:
    for shape, of in _of_kinds(shapes, MANY):
        for name, bound in _THROUGHPUT.items():
            if name in of:
                value = ratios(of[TAO], of[name])["throughput"]
                aim = f"throughput at least {bound:g} × {name}"
                yield Aim(aim=aim, shape=shape, value=value, bound=bound, met=value >= bound)


def _tails(shapes: Shapes) -> Iterator[Aim]:
    for shape, of in _of_kinds(shapes, MANY, OPEN):
        for name in (each for each in PEERS if each in of):
            value = ratios(of[TAO], of[name])["p99"]
            yield Aim(aim=f"p99 lower than {name}", shape=shape, value=value, bound=1.0, met=value > 1)


def _nothing_wrong(shapes: Shapes, stale: Sequence[StaleReads]) -> Iterator[Aim]:
    if stale:
        within = sum(each.stale for each in stale if each.within == ONE_TIER)
        yield Aim(aim="no stale read of tao within the tier", shape="", value=within, bound=0, met=not within)
    ours = [of[TAO] for of in shapes.values() if TAO in of]
    if ours:
        failed = sum(sum(each.failed.values()) for each in ours)
        yield Aim(aim="no failed request of tao", shape="", value=failed, bound=0, met=not failed)


def peers_win(shapes: Shapes) -> list[str]:
    """List where a peer is better, over all shapes and everything compared, except throughput at a constant rate."""
    found = []
    for shape, of in ((shape, of) for shape, of in shapes.items() if TAO in of):
        for name in (each for each in PEERS if each in of):
            better = [
                f"{what.replace('_', ' ').replace('cpu', 'CPU')} ({value:.2f} ×)"
                for what, value in ratios(of[TAO], of[name]).items()
                if 0 < value < 1 and not (what == "throughput" and of[name].kind == OPEN)
            ]
            if better:
                found.append(f"{shape}: {name} is better in {', '.join(better)}")
    return found


def shape_listing(shapes: Shapes) -> Listing:
    """Return the table of every contestant in every shape."""
    rows: list[tuple[str, ...]] = []
    for shape, of in shapes.items():
        for name, each in of.items():
            ratio = ratios(of[TAO], each) if TAO in of and name != TAO else {}
            rows.append(
                (
                    f"{shape}: {name}",
                    f"{each.per_second:,.0f}",
                    _ratio(ratio, "throughput"),
                    f"{each.p50_us / 1000:.2f}",
                    f"{each.p99_us / 1000:.2f}",
                    _ratio(ratio, "p99"),
                    f"{max(each.rounds_p99_us) / 1000:.2f}",
                    _p99(each.hit_ms),
                    _p99(each.miss_ms),
                    *(f"{value:.1f}" for value in (each.server_cpu_us, each.client_cpu_us, each.total_cpu_us)),
                    str(sum(each.failed.values())),
                )
            )
    columns = (
        "shape of load", "queries/s", "tao ×", "p50 ms", "p99 ms", "tao ×", "worst", "hits' p99", "misses' p99",
        "server µs", "client µs", "total µs", "failed",
    )  # fmt: skip
    return Listing(title="", columns=columns, rows=rows)


def _ratio(found: Mapping[str, float], what: str) -> str:
    return f"{found[what]:.2f}" if what in found else ""


def _p99(found: LatencySummary | None) -> str:
    return "" if found is None else f"{found.p99:.2f}"


def ratio_listing(measured: Mapping[str, Any]) -> Listing:
    """Return the table of the first shape; `Any`: `ContestantFigures`."""
    names = ("throughput", "p50", "p99", "server_cpu", "client_cpu", "total_cpu")
    rows: list[tuple[str, ...]] = [
        (
            name,
            *(_ratio(found.ratio, each) for each in names),
            _percent(found.hit_rate),
            _percent(found.joined_share),
            _percent(found.follower_hit_rate),
            _percent(found.first_read_share),
        )
        for name, found in measured.items()
    ]
    columns = (
        "tao to", *(each.replace("_", " ") for each in names), "hit rate", "joined", "of them in the follower",
        "of misses first reads",
    )  # fmt: skip
    return Listing(title="", columns=columns, rows=rows)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def warming_listing(warming: Warming, nodes: int) -> Listing:
    """Return the table of each window's hit rate, by cache."""
    rows: list[tuple[str, ...]] = [(name, *map(_percent, rates)) for name, rates in warming.hit_rates.items()]
    windows = max(map(len, warming.hit_rates.values()), default=0)
    columns = [
        f"{min(warming.requests, (number + 1) * warming.window_requests) / nodes:.1f}" for number in range(windows)
    ]
    return Listing(title="", columns=("hit rate while warmed, by requests a node", *columns), rows=rows)


def stale_listing(measured: Mapping[str, Any]) -> Listing:
    """Return the table of stale reads."""
    rows: list[tuple[str, ...]] = [
        (
            f"{name}, {each.within}",
            f"{each.reads:,}",
            f"{each.stale:,}",
            ", ".join(f"{kind} {number:,}" for kind, number in each.stale_by_kind.items()),
        )
        for name, found in measured.items()
        for each in found.stale
    ]
    return Listing(title="", columns=("contestant", "reads after writes", "stale", "of them"), rows=rows)
