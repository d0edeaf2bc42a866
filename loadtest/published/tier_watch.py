"""The counters and CPU time of servers, and those of a run's followers, read every second while the run measures.

A *hit* is a query that a server answered from its memory. A query that waits for a fetch is a miss; when another query
had begun the fetch, it has *joined*.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Final

from loadtest.published.jobs import MEASURING
from loadtest.rounds import cpu_seconds
from loadtest.scenario import Progress, ProgressListener
from loadtest.target import Target
from tao.admin.server_stats import server_stats
from tao.devcluster.layout import Role
from tao.model.errors import OperatorError

_SAMPLE_SECONDS: Final = 1.0
_FILLS: Final = ("joined", "incomplete", "too_large", "not_kept", "dropped")
"""Misses that waited for a fetch that another had begun; queries for more of a list than the part of it that was
cached; entries that were not kept because they would take too large a part of the cache; entries that were fetched and
not kept, including those; and entries that were dropped because a write could not be applied to them."""

Counts = Mapping[str, float]
"""Counts of all servers of a role together, named ``follower_hits``: ``hits``, ``misses``, `_FILLS`, and ``came_back``,
the keys that were fetched again not long after they had been evicted. Where the processes are known, ``cpu`` in seconds
and ``io_bytes`` that they read and wrote. ``at`` is the time (`perf_counter`)."""


async def server_counts(admins: Mapping[Role, Iterable[str]], pids: Mapping[Role, Iterable[int]]) -> Counts:
    """Return the counts since the servers' start; ``admins`` and ``pids`` are addresses and process ids by role.

    Raises what reading them raises."""
    counts = {}
    for role, addresses in admins.items():
        stats = [await server_stats(address) for address in addresses]
        for name in ("hits", "misses"):
            counts[f"{role}_{name}"] = sum(each[name] for each in stats)
        for name in _FILLS:
            counts[f"{role}_{name}"] = sum(each["fills"][name] for each in stats)
        counts[f"{role}_came_back"] = sum(sum(arena["returns"]) for each in stats for arena in each["arenas"])
    for role, processes in pids.items():
        counts[f"{role}_cpu"] = sum(map(cpu_seconds, processes))
        if role in admins:
            counts[f"{role}_io_bytes"] = sum(map(_io_bytes, processes))
    return {**counts, "at": perf_counter()}


def _io_bytes(pid: int) -> int:
    """Return the bytes of all reads and writes of a process. A follower only uses sockets, and a leader little else."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["rchar"]) + int(fields["wchar"])


class TierWatch:
    """Reads the followers' counters from the moment when the first load process begins to measure."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._samples: list[Counts] = []
        self._sampling: asyncio.Task[None] | None = None

    def hear(self, progress: Progress) -> Progress:
        """Return a progress that is watched for the end of warming."""
        return ProgressListener(progress, lambda step: self._begin() if step == MEASURING else None)

    async def used(self) -> list[Counts]:
        """End the sampling, and return the samples, from the end of warming to now.

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
        return [*self._samples, last]

    def close(self) -> None:
        """End the sampling."""
        if self._sampling is not None:
            self._sampling.cancel()

    def _begin(self) -> None:
        if self._sampling is None:
            self._sampling = asyncio.ensure_future(self._sample())

    async def _sample(self) -> None:
        while True:
            self._samples.append(await self._now())
            await asyncio.sleep(_SAMPLE_SECONDS)

    async def _now(self) -> Counts:
        return await server_counts({Role.FOLLOWER: self._target.followers.values()}, self._target.pids)
