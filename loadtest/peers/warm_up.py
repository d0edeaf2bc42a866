"""Warming of all caches with the same requests, until no cache gains from more of it.

Windows of requests, several for each node of the graph, are sent to every cache in turn. The share of a window that a
cache already had is its hit rate there. Once no cache's hit rate is more than `RISE` above its best before, warming
ends for all, after the same number of equal requests. Windows are sent as fast as possible: to tao by many awaiters,
whose queries share messages, and to the peers in multi-gets, which leave in a cache what single queries would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import islice
from time import perf_counter
from typing import Final

import msgspec

from loadtest.peers.contestants import Peer, SqlPeer
from loadtest.published.requests import WorkloadRequest
from loadtest.rounds import Source

RISE: Final = 0.005
"""Half a point of hit rate per window; the chance error of 100,000 reads is a tenth of a point."""
_AWAITERS: Final = 256
_BATCH: Final = 100
_BATCHES_AT_ONCE: Final = 8


class WarmBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of a warming whose hit rates do not become steady."""

    window_requests: int
    most_requests: int
    """The most requests of each contestant."""
    most_seconds: float
    """The bound in seconds for all contestants together; no window begins after it."""


class Warming(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the warming."""

    requests: int
    """Requests sent to every cache."""
    window_requests: int
    seconds: float
    """The time of all contestants together."""
    steady: bool
    """False when warming ended at one of its bounds, or when there was no cache to warm."""
    hit_rates: dict[str, list[float]]
    """The hit rate of each window, by cache."""


Window = Callable[[int], Awaitable[float | None]]
"""Send so many requests and wait for the answers. Returns the hit rate of the reads, None for a contestant without a
cache."""


async def warmed(windows: Mapping[str, Window], bounds: WarmBounds, report: Callable[[str, float], None]) -> Warming:
    """Warm all contestants. Raises what a window raises."""
    rates: dict[str, list[float]] = {}
    began, requests = perf_counter(), 0
    while requests < bounds.most_requests and perf_counter() - began < bounds.most_seconds:
        count = min(bounds.window_requests, bounds.most_requests - requests)
        for name, window in windows.items():
            report(f"warming {name}, {requests:,} requests so far", 0.0)
            rate = await window(count)
            if rate is not None:
                rates.setdefault(name, []).append(rate)
        requests += count
        if not rates or is_steady(rates):
            break
    return Warming(
        requests=requests,
        window_requests=bounds.window_requests,
        seconds=round(perf_counter() - began, 1),
        steady=is_steady(rates),
        hit_rates=rates,
    )


def is_steady(hit_rates: Mapping[str, Sequence[float]]) -> bool:
    """Return whether there are caches, and no cache's last window was more than `RISE` better than its best before."""
    return bool(hit_rates) and all(
        len(rates) > 1 and rates[-1] <= max(rates[:-1]) + RISE for rates in hit_rates.values()
    )


async def ask_all(peer: Peer, requests: Iterator[WorkloadRequest], count: int) -> list[Source]:
    """Send so many requests as fast as possible. Returns the source of each answer. Raises what the peer raises."""
    left, found = islice(requests, count), list[Source]()
    in_batches = isinstance(peer, SqlPeer) and peer.is_lookaside

    async def ask() -> None:
        if isinstance(peer, SqlPeer) and in_batches:
            while batch := list(islice(left, _BATCH)):
                found.extend(await peer.ask_many(batch))
        for request in left:
            found.append(await peer.ask(request))

    async with asyncio.TaskGroup() as group:
        for _ in range(_BATCHES_AT_ONCE if in_batches else _AWAITERS):
            group.create_task(ask())
    return found
