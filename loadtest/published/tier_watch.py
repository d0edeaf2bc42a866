"""The counters and CPU time of a run's followers, read every second while the run measures.

A *hit* is a query that a follower answered from its memory. A query that waits for a fetch is a miss; when another
query had begun the fetch, it has *joined*.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Final

import msgspec

from loadtest.published.jobs import MEASURING
from loadtest.rounds import cpu_seconds
from loadtest.scenario import Progress, ProgressListener
from loadtest.target import Target
from tao.admin.server_stats import server_stats
from tao.devcluster.layout import Role
from tao.model.errors import OperatorError

_SAMPLE_SECONDS: Final = 1.0


class Second(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of the tier between two samples, about a second apart."""

    at: float
    """The end of the interval, in seconds since measuring began."""
    hits: int
    misses: int
    joined: int
    """Misses that waited for a fetch that another had begun."""

    @property
    def hit_rate(self) -> float | None:
        """The hit rate; None when there was no query."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The counts of all followers of the tier together, since their start or between two moments.

    CPU times are in seconds, None where the processes are unknown."""

    hits: int
    misses: int
    joined: int
    incomplete: int
    """Queries for more of a list than the part of it that was cached."""
    came_back: int
    """Keys that were fetched again not long after they had been evicted."""
    too_large: int
    """Entries that were not kept because they would take too large a part of the cache."""
    not_kept: int
    """Entries that were fetched and not kept, including those that are too large."""
    dropped: int
    """Entries that were dropped because a write could not be applied to them."""
    follower_cpu: float | None
    database_cpu: float | None
    at: float = 0.0

    def since(self, before: Counts) -> Counts:
        """Return the difference."""

        def grown(now: float | None, then: float | None) -> float | None:
            return None if now is None or then is None else now - then

        return Counts(
            hits=self.hits - before.hits,
            misses=self.misses - before.misses,
            joined=self.joined - before.joined,
            incomplete=self.incomplete - before.incomplete,
            came_back=self.came_back - before.came_back,
            too_large=self.too_large - before.too_large,
            not_kept=self.not_kept - before.not_kept,
            dropped=self.dropped - before.dropped,
            follower_cpu=grown(self.follower_cpu, before.follower_cpu),
            database_cpu=grown(self.database_cpu, before.database_cpu),
            at=self.at,
        )


@dataclass(frozen=True, slots=True)
class Used:
    """The counts between the end of warming and the end of the run."""

    whole: Counts
    by_second: list[Second] = field(default_factory=list)


class TierWatch:
    """Reads the followers' counters from the moment when the first load process begins to measure."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._samples: list[Counts] = []
        self._sampling: asyncio.Task[None] | None = None
        self._began = 0.0

    def hear(self, progress: Progress) -> Progress:
        """Return a progress that is watched for the end of warming."""
        return ProgressListener(progress, lambda step: self._begin() if step == MEASURING else None)

    async def used(self) -> Used:
        """End the sampling, and return the counts since measuring began.

        Raises `OperatorError` when measuring never began, and every error of reading the counters.
        """
        sampling = self._sampling
        if sampling is None:
            raise OperatorError("no load process said that it was measuring")
        if sampling.done():
            await sampling
        self.close()
        last = await self._now()
        if not self._samples:
            raise OperatorError("the run was over before its first second was counted: give it more --seconds")
        samples = [*self._samples, last]
        return Used(last.since(samples[0]), seconds_of(samples))

    def close(self) -> None:
        """End the sampling."""
        if self._sampling is not None:
            self._sampling.cancel()

    def _begin(self) -> None:
        if self._sampling is None:
            self._began = perf_counter()
            self._sampling = asyncio.ensure_future(self._sample())

    async def _sample(self) -> None:
        while True:
            self._samples.append(await self._now())
            await asyncio.sleep(_SAMPLE_SECONDS)

    async def _now(self) -> Counts:
        stats = [await server_stats(admin) for admin in self._target.followers.values()]
        return Counts(
            hits=sum(each["hits"] for each in stats),
            misses=sum(each["misses"] for each in stats),
            joined=sum(each["fills"]["joined"] for each in stats),
            incomplete=sum(each["fills"]["incomplete"] for each in stats),
            came_back=sum(sum(arena["returns"]) for each in stats for arena in each["arenas"]),
            too_large=sum(each["fills"]["too_large"] for each in stats),
            not_kept=sum(each["fills"]["not_kept"] for each in stats),
            dropped=sum(each["fills"]["dropped"] for each in stats),
            follower_cpu=self._cpu(Role.FOLLOWER),
            database_cpu=self._cpu(Role.DATABASE),
            at=perf_counter() - self._began,
        )

    def _cpu(self, role: Role) -> float | None:
        pids = self._target.pids.get(role)
        return sum(map(cpu_seconds, pids)) if pids else None


def seconds_of(samples: Sequence[Counts]) -> list[Second]:
    """Return the differences between neighbours."""
    return [
        Second(
            at=round(now.at, 2),
            hits=now.hits - before.hits,
            misses=now.misses - before.misses,
            joined=now.joined - before.joined,
        )
        for before, now in pairwise(samples)
    ]
