"""Load at a constant rate that waits for nobody: an operation begins when its time has come, whatever became of those
before, and its latency counts from then. So a server that stalls shows every operation it held up, not only one. The
event loop's own lateness of up to a millisecond is part of the figure; where it was woken early, by a timer of whole
milliseconds, the operation's beginning counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

import msgspec

from tao.model.errors import TaoError

_LEAD_SECONDS: Final = 0.1
_MAX_UNDER_WAY: Final = 10_000
"""Operations unanswered at once; a server that falls so far behind has failed the run."""


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """In milliseconds, of ``count`` operations; ``per_second``: how many were begun a second. ``late``: the part of the
    average that passed before the load process had begun the operation."""

    avg: float
    p50: float
    p99: float
    max: float
    count: int
    per_second: float
    late: float = 0.0


@dataclass(slots=True)
class Samples:
    """Seconds each, over one run or several in turn."""

    seconds: list[float] = field(default_factory=list)
    elapsed: float = 0.0
    failed: int = 0
    late_seconds: float = 0.0
    """Of all operations together."""

    def latencies(self) -> Latencies:
        """Zeros when there is no sample."""
        ordered = sorted(self.seconds)
        if not ordered:
            return Latencies(avg=0, p50=0, p99=0, max=0, count=0, per_second=0)

        def at(share: float) -> float:
            return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)

        return Latencies(
            avg=round(1000 * sum(ordered) / len(ordered), 3),
            p50=at(0.5),
            p99=at(0.99),
            max=at(1.0),
            count=len(ordered),
            per_second=round(len(ordered) / self.elapsed, 1) if self.elapsed else 0.0,
            late=round(1000 * self.late_seconds / len(ordered), 3),
        )


async def at_rate(
    per_second: float, seconds: float, operations: Sequence[Callable[[], Awaitable[None]]], samples: Samples
) -> None:
    """Begin ``per_second`` operations a second, the given ones in turn, and wait for the last answer. One that fails
    is counted and has no latency. Raises `TaoError` when more are unanswered than a run can hold."""
    began = perf_counter() + _LEAD_SECONDS
    count = max(1, round(per_second * seconds))
    under_way = set[asyncio.Task[None]]()

    async def one(operation: Callable[[], Awaitable[None]], intended: float) -> None:
        since = min(intended, perf_counter())
        samples.late_seconds += perf_counter() - since
        try:
            await operation()
        except TaoError:
            samples.failed += 1
        else:
            samples.seconds.append(perf_counter() - since)

    try:
        for number in range(count):
            intended = began + number / per_second
            if (early := intended - perf_counter()) > 0:
                await asyncio.sleep(early)
            if len(under_way) >= _MAX_UNDER_WAY:
                raise TaoError(f"{_MAX_UNDER_WAY:,} operations are unanswered at {per_second:g} a second")
            task = asyncio.ensure_future(one(operations[number % len(operations)], intended))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        samples.elapsed += count / per_second
        if under_way:
            await asyncio.gather(*under_way)
    finally:
        for task in under_way:
            task.cancel()
