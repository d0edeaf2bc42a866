"""Warming until no cache gains from more of it, with the same requests for everybody.

A window of requests after the other, several for each node of the graph, is asked of every cache in turn. What a cache
had of a window is its hit rate there; once none of them is more than `RISE` above the best it had before, all stop,
having been asked the same number of equal requests. Windows are asked as fast as they can be: of tao by many awaiters,
whose queries share messages, of the peers by multi-gets, which leave in a cache what single queries would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import islice
from time import perf_counter
from typing import Final

import msgspec

from loadtest.peers.asking import Peer
from loadtest.peers.how import How
from loadtest.peers.lookaside import LookasideContestant
from loadtest.published.requests import Request

RISE: Final = 0.005
"""Half a point of hit rate a window; of chance, one of 100,000 reads has a tenth of a point."""
_AWAITERS: Final = 256
_BATCH: Final = 100
_BATCHES_AT_ONCE: Final = 8


class WarmBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Where warming ends that is never over by itself."""

    window_requests: int
    most_requests: int
    """Of every contestant."""
    most_seconds: float
    """Of all contestants together; no window is begun after them."""


class Warming(msgspec.Struct, frozen=True, kw_only=True):
    """What it took."""

    requests: int
    """Of every cache."""
    window_requests: int
    seconds: float
    """Of all contestants together."""
    steady: bool
    """False: it ended at one of its bounds, or there was no cache to be warmed."""
    hit_rates: dict[str, list[float]]
    """Of each window, by cache."""


Window = Callable[[int], Awaitable[float | None]]
"""Have so many requests answered; the hit rate of their reads, None for who has no cache."""


async def warmed(windows: Mapping[str, Window], bounds: WarmBounds, tell: Callable[[str, float], None]) -> Warming:
    """By contestant. Raises what fails."""
    rates: dict[str, list[float]] = {}
    began, requests = perf_counter(), 0
    while requests < bounds.most_requests and perf_counter() - began < bounds.most_seconds:
        count = min(bounds.window_requests, bounds.most_requests - requests)
        for name, window in windows.items():
            tell(f"warming {name}, {requests:,} requests so far", 0.0)
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
    """Whether there are caches, and none's last window was more than `RISE` better than its best before."""
    return bool(hit_rates) and all(
        len(rates) > 1 and rates[-1] <= max(rates[:-1]) + RISE for rates in hit_rates.values()
    )


async def ask_all(peer: Peer, requests: Iterator[Request], count: int) -> list[How]:
    """How so many requests were answered, as fast as they can be. Raises what fails."""
    left, found = islice(requests, count), list[How]()

    async def one_by_one() -> None:
        for request in left:
            found.append(await peer.ask(request))

    async def in_batches(lookaside: LookasideContestant) -> None:
        while batch := list(islice(left, _BATCH)):
            found.extend(await lookaside.ask_many(batch))

    async with asyncio.TaskGroup() as group:
        if isinstance(peer, LookasideContestant):
            for _ in range(_BATCHES_AT_ONCE):
                group.create_task(in_batches(peer))
        else:
            for _ in range(_AWAITERS):
                group.create_task(one_by_one())
    return found
