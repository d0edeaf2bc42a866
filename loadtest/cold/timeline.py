"""What a tier's restart did, second by second: counters that begin anew when a server does, and when all was as before.

Pure: samples in, figures out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import msgspec

_SMOOTHED: Final = 3
"""Moments that a hit rate is averaged over: one second of a small test has too few misses."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Counters at one moment. A server that did not answer is missing."""

    at: float
    """Seconds since measuring began."""
    followers: Mapping[str, tuple[int, int]]
    """By name: hits and misses since the server's start."""
    leaders: Mapping[str, tuple[int, int]]
    """Reads asked of each since its start, and what it began to fetch from its databases."""
    selects: int | None
    """Of the database since its start; None: of one that is not ours to ask."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """What happened between two samples; rates a second."""

    at: float
    """The end of it, in seconds since the restart; negative before."""
    reads: float
    hit_rate: float | None
    """None: nobody was asked."""
    leader_reads: float
    leader_fetches: float
    """What leaders began to fetch from their databases."""
    database_selects: float | None


def moments(samples: Sequence[Sample], restarted_at: float) -> list[Moment]:
    """Differences between neighbours. A counter below its last value is one that began anew."""
    found: list[Moment] = []
    hits_before: dict[str, tuple[int, int]] = {}
    leaders_before: dict[str, tuple[int, int]] = {}
    for before, now in pairwise(samples):
        hits_before |= before.followers
        leaders_before |= before.leaders
        hits = misses = asked = fetched = 0
        for name, (hit, missed) in now.followers.items():
            last_hit, last_missed = hits_before.get(name, (0, 0))
            anew = hit + missed < last_hit + last_missed
            hits += hit if anew else hit - last_hit
            misses += missed if anew else missed - last_missed
        for name, (reads, fetches) in now.leaders.items():
            last_reads, last_fetches = leaders_before.get(name, (0, 0))
            anew = reads < last_reads
            asked += reads if anew else reads - last_reads
            fetched += fetches if anew else fetches - last_fetches
        seconds = now.at - before.at
        found.append(
            Moment(
                at=round(now.at - restarted_at, 2),
                reads=round((hits + misses) / seconds, 1),
                hit_rate=hits / (hits + misses) if hits + misses else None,
                leader_reads=round(asked / seconds, 1),
                leader_fetches=round(fetched / seconds, 1),
                database_selects=None
                if now.selects is None or before.selects is None
                else round((now.selects - before.selects) / seconds, 1),
            )
        )
    return found


def hit_rate_of(some: Sequence[Moment]) -> float:
    """Over all of them together; 0 when nobody was asked."""
    reads = sum(each.reads for each in some)
    return sum(each.reads * (each.hit_rate or 0.0) for each in some) / reads if reads else 0.0


def recovered_after(all_moments: Sequence[Moment], old: float, tolerance: float) -> float | None:
    """Seconds from the restart until the hit rate, over three moments that all lie after its lowest, is within
    ``tolerance`` of the old one; None: not within the run."""
    after = [each for each in all_moments if each.at > 0 and each.hit_rate is not None]
    if not after:
        return None
    lowest = min(range(len(after)), key=lambda index: after[index].hit_rate or 0.0)
    for index in range(lowest, len(after) - _SMOOTHED + 1):
        some = after[index : index + _SMOOTHED]
        if hit_rate_of(some) >= old - tolerance:
            return some[-1].at
    return None
