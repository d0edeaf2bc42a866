"""Scenario `locality`: the hit rate that a cache policy can have, by skew and repetition.

No server: the product's eviction policy, played in one process. What is asked for is as skewed as what TAO's followers
saw, or Zipf by an exponent, and a share of it repeats one of the last 512 keys, of which nothing is published; the
cache is a share of the bytes of all payloads, as everywhere in these load tests; what it adds to each entry takes part
of it. The surface says how much of a hit rate that a run reports belongs to its assumptions.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from loadtest.eviction.policies import Priced
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.shapes import Popularity, Zipf
from loadtest.published.workload import READS, Kind, tao_atc13
from loadtest.results import Listing, ScenarioResult
from loadtest.scenario import BenchSettings, Progress

SUMMARY: Final = "the hit rate that an eviction policy can have, by skew, repetition and cache size"
SKEWS: Final = (None, 0.8, 1.0, 1.1, 1.2)
"""Zipf exponents; None: as measured."""
AGAIN: Final = (0.0, 0.3, 0.6, 0.8)
CACHE_SHARES: Final = (0.05, 0.1, 0.2)
_OBJECT_OVERHEAD: Final = 136
"""Of key, slot, queue and headers, beside the payload."""
_EDGE_BYTES: Final = 16
_PACKED_BYTES: Final = 14
"""Of an empty list, which the cache keeps as a packed count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalitySettings:
    """What a run consists of."""

    nodes: int = 20_000
    requests: int = 400_000
    """Of which the first half warms up. Ten for every object and list: the share that is asked for the first time,
    which no cache can answer, is told beside each hit rate."""
    seed: int = 7


class HitRate(msgspec.Struct, frozen=True, kw_only=True):
    """One point of the surface."""

    skew: float | None
    """Zipf exponent; None: as measured at TAO's followers."""
    again: float
    cache_share: float
    hit_rate: float
    first_time_share: float
    """Of the counted requests, those for what nobody had asked for before: no cache can answer them."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The surface, as the JSON has it, and the repetition that the workload assumes."""

    nodes: int
    requests: int
    assumed_again: float
    surface: list[HitRate]


async def run(
    settings: BenchSettings, progress: Progress, wanted: LocalitySettings | None = None, plot_file: Path | None = None
) -> ScenarioResult:
    """See `SUMMARY`; ``plot_file``: a PNG to draw."""
    locality = wanted or LocalitySettings()
    skews: tuple[float | None, ...] = SKEWS
    again: tuple[float, ...] = AGAIN
    if settings.toy:
        locality, skews, again = LocalitySettings(nodes=300, requests=2_000), SKEWS[:2], AGAIN[1:3]
    plan = GraphPlan(tao_atc13(), locality.nodes, locality.seed)
    sizes, data_bytes = entry_sizes(plan), plan.payload_bytes
    surface: list[HitRate] = []
    for skew in skews:
        for repeated in again:
            done = len(surface) / (len(skews) * len(again) * len(CACHE_SHARES))
            progress.step(f"skew {skew_name(skew)}, {repeated:.0%} repeated", done)
            keys = await asyncio.to_thread(trace, locality, skew, repeated)
            surface += await asyncio.to_thread(hit_rates, keys, sizes, data_bytes, skew, repeated)
    measured = Measured(
        nodes=locality.nodes,
        requests=locality.requests,
        assumed_again=tao_atc13().assumed.again,
        surface=surface,
    )
    if plot_file is not None:
        # Loaded here: it takes a second, which a run without a plot need not wait for.
        from loadtest.report.plots import draw_locality

        draw_locality(msgspec.to_builtins(measured), plot_file)
    return ScenarioResult(
        summary=SUMMARY,
        conditions={"nodes": locality.nodes, "requests": locality.requests},
        listings=[_listing(measured)],
        notes=["Users alone, one cache, no writes; a first request for a key is a miss for every policy."],
        measured=msgspec.to_builtins(measured),
    )


def entry_sizes(plan: GraphPlan) -> list[int]:
    """Bytes in the cache of each key, what the cache adds to a payload included: objects are even, lists odd."""

    def size(key: int) -> int:
        node = key // 2
        if key % 2 == 0:
            return _OBJECT_OVERHEAD + plan.object_size(node)
        degree = plan.degree(node)
        edges = sum(plan.edge_size(node, index) for index in range(degree))
        return _OBJECT_OVERHEAD + _EDGE_BYTES * degree + edges if degree else _PACKED_BYTES

    return [size(key) for key in range(2 * plan.nodes)]


def skew_name(skew: float | None) -> str:
    """For tables."""
    return "measured" if skew is None else f"{skew:g}"


def trace(locality: LocalitySettings, skew: float | None, again: float) -> list[int]:
    """Keys in the order in which they are asked for."""
    workload, chance = tao_atc13(), Random(locality.seed)
    objects = workload.mix[Kind.OBJ_GET] / sum(share for kind, share in workload.mix.items() if kind in READS)
    order = list(range(locality.nodes))
    chance.shuffle(order)
    of_objects = Popularity(order, workload.object_skew if skew is None else Zipf(skew), chance, again=again)
    of_lists = Popularity(order[::-1], workload.list_skew if skew is None else Zipf(skew), chance, again=again)
    return [
        2 * of_objects.draw() if chance.random() < objects else 2 * of_lists.draw() + 1
        for _ in range(locality.requests)
    ]


def hit_rates(keys: list[int], sizes: list[int], data_bytes: int, skew: float | None, again: float) -> list[HitRate]:
    """By cache size."""
    return [
        HitRate(skew=skew, again=again, cache_share=share, hit_rate=hit, first_time_share=first)
        for share in CACHE_SHARES
        for hit, first in [hit_rate(keys, sizes, int(data_bytes * share))]
    ]


def hit_rate(keys: list[int], sizes: list[int], cache_bytes: int) -> tuple[float, float]:
    """Of the second half of ``keys``: the share of hits, and of what is asked for the first time."""
    policy = Priced(cache_bytes)
    held, hits, first = policy.held, 0, 0
    seen = set[int]()
    warm = len(keys) // 2
    for turn, key in enumerate(keys):
        counted = turn >= warm
        if key in held:
            policy.hit(key)
            hits += counted
            continue
        if key not in seen:
            seen.add(key)
            first += counted
        policy.add(key, sizes[key])
    asked = len(keys) - warm
    return hits / asked, first / asked


def _listing(measured: Measured) -> Listing:
    again = sorted({each.again for each in measured.surface})
    found = {(each.skew, each.again, each.cache_share): each.hit_rate for each in measured.surface}
    rows: list[tuple[str, ...]] = [
        (f"skew {skew_name(skew)}, cache {share:.0%}", *(f"{found[skew, each, share]:.1%}" for each in again))
        for share in CACHE_SHARES
        for skew in dict.fromkeys(each.skew for each in measured.surface)
    ]
    return Listing(title="hit rate", columns=("", *(f"{each:.0%} repeated" for each in again)), rows=rows)
