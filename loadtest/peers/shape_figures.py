"""What comes of the turns: histograms of all load processes add up; rates and percentiles are the medians of the
rounds', since a moment in which the machine had other things to do is in one round and not in all."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from loadtest.peers.counters import added
from loadtest.peers.how import How
from loadtest.peers.names import MYSQL, TAO
from loadtest.peers.turns import Taken
from loadtest.published.recording import Merged, Summary

_MICRO: Final = 1e6


class ShapeFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One contestant in one shape of load. Microseconds of an operation, microseconds of CPU a query; an operation is
    one request, of ``queries_per_operation`` queries."""

    shape: str
    kind: str
    """Of load: one of `loadtest.peers.names.SHAPES`."""
    contestant: str
    queries_per_operation: int
    operations: int
    per_second: float
    rounds_per_second: list[float]
    rounds_hit_rate: list[float]
    """Of reads, those answered without the database; none where there is no ``hit_rate``."""
    p50_us: float
    p99_us: float
    rounds_p99_us: list[float]
    quantiles_ms: dict[str, float]
    """Percent of the operations of all rounds → milliseconds within which so many were answered."""
    server_cpu_us: float
    client_cpu_us: float
    total_cpu_us: float
    failed: dict[str, int]
    touched_bytes: float
    """Of payload that the application looked at, a query."""
    hits: int
    """Reads answered without the database, as far as it is known of each; so are the next two."""
    joined: int
    misses: int
    hit_rate: float | None
    """Of reads, those answered without the database; None where nothing is cached, and of batches, whose requests are
    not counted key by key."""
    joined_share: float | None
    """Of reads, those that waited for another's fetch; of tao's, in the follower."""
    follower_hit_rate: float | None
    """Of tao: of reads, those that the follower answered out of its own memory."""
    first_read_share: float | None
    """Of the reads that asked the database, those after what this contestant had never been asked for before, which no
    cache can have; None: not known of load processes that did not warm the caches."""
    hit_ms: Summary | None
    """Answered without the database; of tao, from the follower's memory, a sample (`loadtest.peers.sampling`)."""
    miss_ms: Summary | None


def figure_of(
    kind: str, shape: str, contestant: str, taken: Sequence[Taken], queries_per_operation: int = 1
) -> ShapeFigure:
    """Of all load processes together. Raises `ValueError` when nothing was answered."""
    everything = [how.name for how in How]
    rounds = list(zip(*(each.turns for each in taken), strict=True))
    merged, latencies = Merged(), list[Summary]()
    for turns in rounds:
        of_round = Merged()
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
        hit_ms=merged.summary(How.HIT.name),
        miss_ms=merged.summary(How.MISS.name, How.JOINED.name),
    )


def _share(first_reads: Sequence[int | None], misses: int) -> float | None:
    known = [each for each in first_reads if each is not None]
    if len(known) < len(first_reads) or not misses:
        return None
    # Not every first read asks the database: of tao, who knows a list's count knows whether there is anything in it.
    return min(1.0, sum(known) / misses)
