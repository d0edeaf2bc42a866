"""The figures of `peers`: those of any comparison, and in addition where each answer came from.

Rates and percentiles are medians of the rounds, since a moment in which the machine does other work falls into one
round and not into all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from loadtest.latencies import LatencySummary, summary_of
from loadtest.peers.caches import LOOKASIDES, MEMCACHED, MEMCACHIO, REDIS
from loadtest.peers.contestants import ALONE, MYSQL, POSTGRES, TAO
from loadtest.peers.staleness import ONE_TIER, StaleReads
from loadtest.results import Aim, Figure, Goal, Listing, Measure, at_most
from loadtest.rounds import MICRO, Comparison, Counts, Round, Source, Turns, figures_of, percentile
from loadtest.table import listing
from tao.admin.server_stats import server_stats
from tao.devcluster.ports import LOOPBACK

MANY: Final = "many"
OPEN: Final = "open"
ONE: Final = "one"
BATCHES: Final = "batches"
PAIR: Final = "pair"
SHAPES: Final = (MANY, OPEN, ONE, BATCHES, PAIR)
"""Kinds of load, in the order in which they run."""
PEERS: Final = (*LOOKASIDES, *ALONE)
_PERCENTS: Final = (1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 99.5, 99.9, 100)
_THROUGHPUT: Final[Mapping[tuple[str, bool], Mapping[str, float]]] = {
    ("tao_atc13", False): {REDIS: 4.5, MEMCACHED: 1.6, MEMCACHIO: 1.6, MYSQL: 4.0},
    ("tao_atc13", True): {MYSQL: 5.0},
    ("linkbench", False): {MYSQL: 2.0, POSTGRES: 1.0},
}
"""The multiples of the peers' throughput that tao is to reach, by workload and whether the data exceeds the buffer
pools."""
_TOLERATED: Final = 1.1
_RATIOS: Final = {
    "throughput": "per_second",
    "p50": "p50_us",
    "p99": "p99_us",
    "server_cpu": "server_cpu_us",
    "client_cpu": "client_cpu_us",
    "total_cpu": "total_cpu_us",
}
"""What is compared, and the field of a figure that has it."""


class CacheCounts(NamedTuple):
    """Counts of reads between two moments."""

    hits: int
    """Reads answered without the database, and without waiting for another's fetch."""
    joined: int
    """Reads that waited for another's fetch; for tao, in the follower."""
    misses: int
    """Reads that asked the database."""
    in_follower: int = 0
    """Hits of tao from the follower's own memory."""

    @property
    def hit_rate(self) -> float:
        """The share of the hits."""
        return self.hits / max(1, self.hits + self.joined + self.misses)


def counts_of_tao(grown: Counts) -> CacheCounts:
    """Return the counts of a follower and a leader that serve no other client, by how much their counters grew."""
    hits, misses, leader_misses = (int(grown[name]) for name in ("hits", "misses", "leader_misses"))
    # Follower misses that did not become leader misses were either hits of the leader or joined one of its fetches.
    spared = max(0, misses - leader_misses)
    joined = min(int(grown["joined"]), spared)
    return CacheCounts(hits + spared - joined, joined, leader_misses, hits)


class PeerFigure(Figure, frozen=True, kw_only=True):
    """One contestant in one shape of load. Latencies are microseconds per operation, CPU times microseconds per query;
    an operation is one request, of ``queries_per_operation`` queries."""

    kind: str
    """The kind of load: one of `SHAPES`."""
    rounds_hit_rate: list[float]
    """Share of the reads answered without the database, by round; empty where there is no ``hit_rate``."""
    rounds_p99_us: list[float]
    quantiles_ms: dict[str, float]
    """Percentage of the operations of all rounds → milliseconds within which they were answered."""
    total_cpu_us: float
    cpu_us_by_server: dict[str, float]
    """``server_cpu_us`` by server process, which says where a contestant's time goes."""
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


def peer_figures(kind: str, comparison: Comparison, turns: Turns) -> list[PeerFigure]:
    """Return the figures of one shape of load. Raises `ValueError` when a round has no answer."""
    return [_peer_figure(kind, figure, turns[figure.contestant]) for figure in figures_of(comparison, turns)]


def _peer_figure(kind: str, figure: Figure, rounds: Sequence[Round]) -> PeerFigure:
    of_tao = figure.contestant == TAO
    counts = [counts_of_tao(each.counts) if of_tao else _counts(each) for each in rounds]
    whole = CacheCounts(*map(sum, zip(*counts, strict=True)))
    hits, joined, misses, in_follower = whole
    has_cache = of_tao or figure.contestant in LOOKASIDES
    queries = figure.operations * figure.queries_per_operation
    reads, has_hit_rate = max(1, hits + joined + misses), has_cache and figure.queries_per_operation == 1
    first_reads = [each.counts["first_reads"] for each in rounds if "first_reads" in each.counts]
    latencies = sorted(chain.from_iterable(each.samples.ordered() for each in rounds))
    failed: Counter[str] = Counter()
    for each in rounds:
        failed += each.samples.failed
    return PeerFigure(
        **msgspec.structs.asdict(figure),
        kind=kind,
        rounds_hit_rate=[each.hit_rate for each in counts] if has_hit_rate else [],
        rounds_p99_us=[percentile(each.samples.ordered(), 0.99) * MICRO for each in rounds],
        quantiles_ms={f"{each:g}": 1000 * percentile(latencies, each / 100) for each in _PERCENTS},
        total_cpu_us=figure.server_cpu_us + figure.client_cpu_us,
        cpu_us_by_server={
            name: sum(each.server_cpu[name] for each in rounds) / queries * MICRO for name in rounds[0].server_cpu
        },
        failed=dict(failed),
        touched_bytes=sum(each.counts["touched"] for each in rounds) / queries,
        hits=hits,
        joined=joined,
        misses=misses,
        hit_rate=whole.hit_rate if has_hit_rate else None,
        joined_share=joined / reads if has_hit_rate else None,
        follower_hit_rate=in_follower / reads if has_hit_rate and of_tao else None,
        # Not every first read asks the database: a tao server that has a list's count knows when the list is empty.
        first_read_share=min(1.0, sum(first_reads) / misses) if has_hit_rate and first_reads and misses else None,
        hit_ms=_summary(rounds, Source.HIT),
        miss_ms=_summary(rounds, Source.MISS, Source.JOINED),
    )


def _counts(turn: Round) -> CacheCounts:
    return CacheCounts(*(len(turn.samples.by_source[how]) for how in (Source.HIT, Source.JOINED, Source.MISS)))


def _summary(rounds: Sequence[Round], *sources: Source) -> LatencySummary | None:
    """Summarise the latencies of these sources together; None when there is none."""
    return summary_of(seconds for each in rounds for how in sources for seconds in each.samples.by_source[how])


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
    cached = {TAO: [int((await server_stats(admin))["bytes"]) for admin in admins]} if admins else {}
    for name, of in ports.items():
        cache = await LOOKASIDES[name].client.open(LOOPBACK, of, 1)
        cached[name] = await cache.used_bytes()
        await cache.close()
    return {
        name: [
            ServerMemory(budget=budget, cached=each, resident=_resident(pid))
            for each, pid in zip(of, pids[name], strict=True)
        ]
        for name, of in cached.items()
    }


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


Shapes = Mapping[str, Mapping[str, PeerFigure]]
"""Shape → contestant → figure, of those that were measured, in order."""


def shapes_of(figures: Sequence[PeerFigure]) -> Shapes:
    """Return the figures by shape and by contestant."""
    shapes: dict[str, dict[str, PeerFigure]] = {}
    for each in figures:
        shapes.setdefault(each.shape, {})[each.contestant] = each
    return shapes


def of_contestants(
    shapes: Shapes, stale: Mapping[str, list[StaleReads]], memory: Mapping[str, list[ServerMemory]]
) -> dict[str, dict[str, Any]]:
    """Return the figures of each contestant in the first shape of load, by default 64 awaiters of single queries, with
    tao's ratios to it (above 1: tao is better), its failures in all shapes, its stale reads and its memory. `Any`: the
    JSON has it so."""
    first = next(iter(shapes.values()))
    return {
        name: {
            "throughput_qps": round(figure.per_second, 1),
            "p50_ms": round(figure.p50_us / 1000, 4),
            "p99_ms": round(figure.p99_us / 1000, 4),
            **{f"{side}_cpu_us_per_query": round(getattr(figure, f"{side}_cpu_us"), 2) for side in _SIDES},
            **{share: getattr(figure, share) for share in _SHARES},
            "failed": sum(sum(of[name].failed.values()) for of in shapes.values()),
            "stale_reads": sum(each.stale for each in stale[name]) if name in stale else None,
            "stale": msgspec.to_builtins(stale.get(name, [])),
            "memory": msgspec.to_builtins(memory.get(name, [])),
            "ratio": ratios(first[TAO], figure) if TAO in first else {},
        }
        for name, figure in first.items()
    }


_SIDES: Final = ("server", "client", "total")
_SHARES: Final = ("hit_rate", "joined_share", "follower_hit_rate", "first_read_share")


def ratios(ours: PeerFigure, theirs: PeerFigure) -> dict[str, float]:
    """Return the ratios of two contestants by what is compared; above 1, the first one is better."""
    found = {}
    for name, field in _RATIOS.items():
        mine, other = getattr(ours, field), getattr(theirs, field)
        above, below = (mine, other) if name == "throughput" else (other, mine)
        # CPU time is counted in ticks of ten milliseconds, so a short turn may have none.
        found[name] = round(above / below, 3) if below else 0.0
    return found


def goals_of(
    kind: str, contestants: Collection[str], workload: str, *, data_exceeds_pool: bool
) -> dict[str, tuple[Goal, ...]]:
    """Return tao's goals in a kind of load beside the contestants that take part: multiples of their throughput where
    many awaiters ask, lower tails there and at a constant rate, and the latency of one awaiter beside Redis."""
    peers = [name for name in PEERS if name in contestants]
    goals: list[Goal] = []
    if kind == MANY:
        bounds = _THROUGHPUT.get((workload, data_exceeds_pool), {})
        goals += [Goal(measure=Measure.RATE, bound=bounds[name], against=name) for name in peers if name in bounds]
    if kind in (MANY, OPEN):
        goals += [Goal(measure=Measure.P99, bound=1, against=name) for name in peers]
    if kind == ONE and REDIS in peers:
        goals.append(Goal(measure=Measure.P50, bound=1, against=REDIS))
    return {TAO: tuple(goals)} if TAO in contestants else {}


def nothing_wrong(shapes: Shapes, stale: Sequence[StaleReads]) -> Iterator[Aim]:
    """Yield the aims that do not depend on speed. ``stale`` has tao's stale reads, and is empty when the run did not
    look for them."""
    if stale:
        yield at_most(
            "no stale read of tao within the tier", sum(each.stale for each in stale if each.within == ONE_TIER), 0
        )
    ours = [of[TAO] for of in shapes.values() if TAO in of]
    if ours:
        yield at_most("no failed request of tao", sum(sum(each.failed.values()) for each in ours), 0)


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


_IN_SHAPES: Final = {
    "shape of load": "{shape}: {contestant}",
    "queries/s": "{per_second:,.0f}",
    "tao ×": "{ratio[throughput]:.2f}",
    "p50 ms": "{p50_ms:.2f}",
    "p99 ms": "{p99_ms:.2f}",
    "tao × ": "{ratio[p99]:.2f}",
    "worst": "{worst_ms:.2f}",
    "hits' p99": "{hit_ms.p99:.2f}",
    "misses' p99": "{miss_ms.p99:.2f}",
    "server µs": "{server_cpu_us:.1f}",
    "client µs": "{client_cpu_us:.1f}",
    "total µs": "{total_cpu_us:.1f}",
    "hit rate": "{hit_rate:.1%}",
    "joined": "{joined_share:.1%}",
    "first reads": "{first_read_share:.1%}",
    "failed": "{failures}",
}
_TO_PEERS: Final = {
    "tao to": "{name}",
    **{name.replace("_", " "): f"{{{name}:.2f}} ×" for name in _RATIOS},
}
_STALE: Final = {
    "contestant": "{name}, {within}",
    "reads after writes": "{reads:,}",
    "stale": "{stale:,}",
    "of them": "{kinds}",
}
_MEMORY: Final = {
    "memory": "{name}, server {number}",
    "budget MB": "{budget_mb:.1f}",
    "cached MB": "{cached_mb:.1f}{over}",
    "whole process MB": "{resident_mb:.1f}",
}


def listings(
    shapes: Shapes, stale: Mapping[str, list[StaleReads]], memory: Mapping[str, list[ServerMemory]]
) -> list[Listing]:
    """Return the tables of tao's ratios in the first shape, of every contestant in every shape, of stale reads and of
    memory."""
    first = next(iter(shapes.values()))
    to_peers = [
        {"name": name, **ratios(first[TAO], each)} for name, each in first.items() if TAO in first and name != TAO
    ]
    in_shapes = [
        {
            **msgspec.structs.asdict(each),
            "ratio": ratios(of[TAO], each) if TAO in of and each is not of[TAO] else None,
            "p50_ms": each.p50_us / 1000,
            "p99_ms": each.p99_us / 1000,
            "worst_ms": max(each.rounds_p99_us) / 1000,
            "failures": sum(each.failed.values()),
        }
        for of in shapes.values()
        for each in of.values()
    ]
    stale_reads = [
        {
            **msgspec.structs.asdict(each),
            "name": name,
            "kinds": ", ".join(f"{kind} {number:,}" for kind, number in each.stale_by_kind.items()),
        }
        for name, found in stale.items()
        for each in found
    ]
    servers = [
        {
            "name": name,
            "number": number,
            "over": " (over its budget)" if each.is_over else "",
            **{f"{key}_mb": value / 1e6 for key, value in msgspec.structs.asdict(each).items()},
        }
        for name, of_name in memory.items()
        for number, each in enumerate(of_name, 1)
    ]
    tables = [
        listing(_TO_PEERS, to_peers),
        listing(_IN_SHAPES, in_shapes),
        listing(_STALE, stale_reads),
        listing(_MEMORY, servers),
    ]
    return [each for each in tables if each.rows]
