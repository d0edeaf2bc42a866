"""What `peers` found of every contestant, as its JSON has it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from loadtest.peers.aims import Shapes, ratios
from loadtest.peers.memory import ServerMemory
from loadtest.peers.names import PAIR, TAO
from loadtest.peers.peers_process import PairResult, PeersResult
from loadtest.peers.shape_figures import figure_of
from loadtest.peers.staleness import StaleReads


class OfContestant(msgspec.Struct, frozen=True, kw_only=True):
    """One contestant in the first shape of load that was put on, by default 64 awaiters of single queries; latencies in
    milliseconds."""

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
    first_read_share: float | None
    """Of the reads that asked the database, those after what nobody had asked this contestant for before."""
    failed: int
    """Requests, in all shapes."""
    stale_reads: int | None
    """In all places; `stale` has each. None: nobody looked."""
    stale: list[StaleReads]
    memory: list[ServerMemory]
    """Of every cache server after the rounds."""
    ratio: dict[str, float]
    """Of tao to this contestant (above 1: tao is better); ones for itself; none where tao took no part."""


def shapes_of(result: PeersResult, pair: tuple[str, list[PairResult]] | None, contestants: tuple[str, ...]) -> Shapes:
    """Figures by shape, in order, and by contestant. ``pair``: the shape with several load processes, by its text."""
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
) -> dict[str, OfContestant]:
    """The first shape's figures, with tao's ratios to each contestant."""
    first = next(iter(shapes.values()))
    return {
        name: OfContestant(
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
