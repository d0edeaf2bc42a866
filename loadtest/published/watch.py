"""What the followers of a run counted, second by second, and what it cost them: read while it measures.

A *hit* is a query that a follower answered out of its memory; whoever waits for a fetch, his own or one that another
has begun, is a miss, and of those the latter are told as *joined*.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, Final

import msgspec

from loadtest.published.load_process import MEASURING
from loadtest.rounds import cpu_seconds
from loadtest.scenario import Progress
from loadtest.target import Target
from tao.devcluster.layout import Role
from tao.devcluster.readiness import server_stats
from tao.model.errors import OperatorError

_SAMPLE_SECONDS: Final = 1.0


class Second(msgspec.Struct, frozen=True, kw_only=True):
    """What the tier counted between two samples, about a second apart."""

    at: float
    """The end of it, in seconds since measuring began."""
    hits: int
    misses: int
    joined: int
    """Of the misses, those that waited for a fetch that another had begun."""

    @property
    def hit_rate(self) -> float | None:
        """None: nobody asked."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of all followers of the tier together, since their start, or between two moments. CPU in seconds; None: of
    processes that are not known."""

    hits: int
    misses: int
    joined: int
    incomplete: int
    """Queries for more of a list than the part of it that was cached."""
    came_back: int
    """Keys that were fetched again not long after they had left for want of room."""
    too_large: int
    """Entries that were not kept because they would take too large a part of the cache."""
    not_kept: int
    """What was fetched and not kept, the former among it."""
    dropped: int
    """Entries that a write made useless: it could not be applied to them."""
    follower_cpu: float | None
    database_cpu: float | None
    at: float = 0.0

    def since(self, before: Counts) -> Counts:
        """What has been added."""

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
    """Between the end of warming and the end of the run."""

    whole: Counts
    by_second: list[Second] = field(default_factory=list)


class Watch:
    """Reads the followers' counters from when the first load process says that it measures."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._samples: list[Counts] = []
        self._sampling: asyncio.Task[None] | None = None
        self._began = 0.0

    def hear(self, progress: Progress) -> Progress:
        """A progress that is watched for the end of warming."""
        return _Listening(progress, self._begin)

    async def used(self) -> Used:
        """Since `MEASURING` was told; ends the sampling. Raises `OperatorError` when it never was, and what reading
        the counters raised."""
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
    """Differences between neighbours."""
    return [
        Second(
            at=round(now.at, 2),
            hits=now.hits - before.hits,
            misses=now.misses - before.misses,
            joined=now.joined - before.joined,
        )
        for before, now in pairwise(samples)
    ]


class _Listening:
    """`Progress` that also tells when measuring begins."""

    def __init__(self, progress: Progress, measuring: Any) -> None:
        self._progress = progress
        self._measuring = measuring

    def step(self, text: str, done: float = 0.0) -> None:
        """See `loadtest.scenario.Progress`."""
        if text == MEASURING:
            self._measuring()
        self._progress.step(text, done)
