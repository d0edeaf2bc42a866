"""Scenario `locality`: the hit rate that a cache policy can have, by skew and repetition.

No server: the product's eviction policy, played in one process. What is asked for is as skewed as what TAO's followers
saw, or Zipf by an exponent, and a share of it repeats one of the last 512 keys, of which nothing is published; the
cache is a share of the bytes of all payloads, as everywhere in these load tests; what it adds to each entry takes part
of it. The surface says how much of a hit rate that a run reports belongs to its assumptions.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from random import Random
from typing import Final

import msgspec

from loadtest import options
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.shapes import Popularity, Zipf
from loadtest.published.workload import READS, Kind, tao_atc13
from loadtest.research.policies import Priced, hit_rate
from loadtest.results import Listing, ScenarioResult, at_least
from loadtest.scenario import BenchSettings, Progress, Scenario

SKEWS: Final = (None, 0.8, 1.0, 1.1, 1.2)
"""Zipf exponents; None: as measured."""
AGAIN: Final = (0.0, 0.3, 0.6, 0.8)
CACHE_SHARES: Final = (0.05, 0.1, 0.2)
_OBJECT_OVERHEAD: Final = 136
"""Bytes of key, slot, queue and headers, beside the payload."""
_EDGE_BYTES: Final = 16
_PUBLISHED_HIT_RATE: Final = 0.964
_PACKED_BYTES: Final = 14
"""Bytes of an empty list, which the cache keeps as a packed count."""


@dataclass(frozen=True, kw_only=True)
class LocalityOptions(options.Options):
    """The options of `locality`."""

    nodes: int = options.NODES.default(20_000)
    requests: int = options.REQUESTS.default(400_000)
    """The first half warms up. There are ten for every object and list; the share of first requests for a key, which no
    cache can answer, is stated beside each hit rate."""
    seed: int = 7


class HitRate(msgspec.Struct, frozen=True, kw_only=True):
    """One point of the surface."""

    skew: float | None
    """Zipf exponent; None: as measured at TAO's followers."""
    again: float
    cache_share: float
    hit_rate: float
    first_time_share: float
    """Share of the counted requests that are the first for their key: no cache can answer them."""


class LocalityFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The surface, as the JSON has it, and the repetition that the workload assumes."""

    nodes: int
    requests: int
    assumed_again: float
    surface: list[HitRate]


async def run(settings: BenchSettings, progress: Progress, locality: LocalityOptions) -> ScenarioResult:
    """Play the policy over drawn traces, without a server."""
    skews: tuple[float | None, ...] = SKEWS
    again: tuple[float, ...] = AGAIN
    if settings.toy:
        locality, skews, again = replace(locality, nodes=300, requests=2_000), SKEWS[:2], AGAIN[1:3]
    plan = GraphPlan(tao_atc13(), locality.nodes, locality.seed)
    sizes, data_bytes = entry_sizes(plan), plan.payload_bytes
    surface: list[HitRate] = []
    for skew in skews:
        for repeated in again:
            done = len(surface) / (len(skews) * len(again) * len(CACHE_SHARES))
            progress.step(f"skew {skew_name(skew)}, {repeated:.0%} repeated", done)
            keys = await asyncio.to_thread(trace, locality, skew, repeated)
            surface += await asyncio.to_thread(hit_rates, keys, sizes, data_bytes, skew, repeated)
    measured = LocalityFigures(
        nodes=locality.nodes,
        requests=locality.requests,
        assumed_again=tao_atc13().assumed.again,
        surface=surface,
    )
    return ScenarioResult(
        conditions={"nodes": locality.nodes, "requests": locality.requests},
        listings=[_listing(measured)],
        notes=["Users alone, one cache, no writes; a first request for a key is a miss for every policy."],
        aims=[at_least("the published hit rate with a fifth of the data", _published(measured), _PUBLISHED_HIT_RATE)],
        measured=msgspec.to_builtins(measured),
    )


SCENARIO: Final = Scenario(
    name="locality",
    summary="the hit rate that an eviction policy can have, by skew, repetition and cache size",
    run=run,
    options=LocalityOptions,
    help="""Compute the hit rate that an eviction policy can have, by assumptions about what nobody has published.""",
    has_plot=True,
)


def _published(measured: LocalityFigures) -> float:
    """Return the hit rate with the measured skew and the largest cache, at the repetition nearest to the assumed."""
    points = [each for each in measured.surface if each.skew is None and each.cache_share == CACHE_SHARES[-1]]
    return min(points, key=lambda each: abs(each.again - measured.assumed_again)).hit_rate


def entry_sizes(plan: GraphPlan) -> list[int]:
    """Bytes in the cache of each key, what the cache adds to a payload included: objects are even, lists odd."""
    sizes = []
    for node in range(plan.nodes):
        degree = plan.degree(node)
        edges = sum(plan.edge_size(node, index) for index in range(degree))
        sizes.append(_OBJECT_OVERHEAD + plan.object_size(node))
        sizes.append(_OBJECT_OVERHEAD + _EDGE_BYTES * degree + edges if degree else _PACKED_BYTES)
    return sizes


def skew_name(skew: float | None) -> str:
    """Return the name of a skew for tables."""
    return "measured" if skew is None else f"{skew:g}"


def trace(locality: LocalityOptions, skew: float | None, again: float) -> list[int]:
    """Draw keys in the order in which they are asked for."""
    workload, chance = tao_atc13(), Random(locality.seed)
    objects = workload.mix[Kind.OBJ_GET] / sum(workload.mix.get(kind, 0.0) for kind in READS)
    order = list(range(locality.nodes))
    chance.shuffle(order)
    of_objects = Popularity(order, workload.object_skew if skew is None else Zipf(skew), chance, again=again)
    of_lists = Popularity(order[::-1], workload.list_skew if skew is None else Zipf(skew), chance, again=again)
    return [
        2 * of_objects.draw() if chance.random() < objects else 2 * of_lists.draw() + 1
        for _ in range(locality.requests)
    ]


def hit_rates(keys: list[int], sizes: list[int], data_bytes: int, skew: float | None, again: float) -> list[HitRate]:
    """Return the hit rates by cache size; the first half of the requests warms up."""
    return [
        HitRate(skew=skew, again=again, cache_share=share, hit_rate=hit, first_time_share=first)
        for share in CACHE_SHARES
        for hit, first in [hit_rate(Priced(int(data_bytes * share)), keys, sizes, len(keys) // 2)]
    ]


def _listing(measured: LocalityFigures) -> Listing:
    rows: dict[str, tuple[str, ...]] = {}
    for each in sorted(measured.surface, key=lambda each: (each.cache_share, each.again)):
        name = f"skew {skew_name(each.skew)}, cache {each.cache_share:.0%}"
        rows[name] = (*rows.get(name, (name,)), f"{each.hit_rate:.1%} ({each.first_time_share:.1%})")
    repeated = sorted({each.again for each in measured.surface})
    return Listing(
        title="hit rate (and share of first reads)",
        columns=("", *(f"{each:.0%} repeated" for each in repeated)),
        rows=list(rows.values()),
    )
