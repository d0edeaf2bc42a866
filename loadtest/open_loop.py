"""Load at a constant rate, whatever becomes of the operations before.

An operation begins when its time has come, and its latency counts from then, so that a server that stalls shows every
operation that it held up. The event loop's own lateness of up to a millisecond is part of the figure. A timer of whole
milliseconds may also wake the loop too early; then the operation's real beginning counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

import msgspec

from tao.model.errors import TaoError

_LEAD_SECONDS: Final = 0.05
_MOST_PENDING: Final = 20_000
"""Operations unanswered at once; a server that falls so far behind has failed the run."""


async def begin_at_rate(
    per_second: float, seconds: float, begin: Callable[[float], Awaitable[None]], skip: Callable[[], None]
) -> None:
    """Call ``begin(since)`` at a constant rate for so many seconds, and wait until all calls are over.

    ``since`` is the moment (`perf_counter`) from which the operation's latency counts. ``skip`` is called in place of
    ``begin`` while `_MOST_PENDING` operations are unanswered.
    """
    began = perf_counter() + _LEAD_SECONDS
    pending = set[asyncio.Future[None]]()
    try:
        for number in range(max(1, round(per_second * seconds))):
            intended = began + number / per_second
            if (early := intended - perf_counter()) > 0:
                await asyncio.sleep(early)
            if len(pending) >= _MOST_PENDING:
                skip()
                continue
            operation: asyncio.Future[None] = asyncio.ensure_future(begin(min(intended, perf_counter())))
            pending.add(operation)
            operation.add_done_callback(pending.discard)
        if pending:
            await asyncio.gather(*pending)
    finally:
        for left in pending:
            left.cancel()


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies in milliseconds of ``count`` operations, of which ``per_second`` were begun each second. ``late`` is
    the part of the average that passed before the load process had begun the operation."""

    avg: float
    p50: float
    p99: float
    max: float
    count: int
    per_second: float
    late: float = 0.0


@dataclass(slots=True)
class Samples:
    """Latencies in seconds, over one run or several in turn."""

    seconds: list[float] = field(default_factory=list)
    elapsed: float = 0.0
    failed: int = 0
    late_seconds: float = 0.0
    """The lateness of all operations together."""

    def add(self, more: Samples) -> None:
        """Add the samples of another run."""
        self.seconds += more.seconds
        self.elapsed += more.elapsed
        self.failed += more.failed
        self.late_seconds += more.late_seconds

    def latencies(self) -> Latencies:
        """Return the summary; all zeros when there is no sample."""
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


async def sample_at_rate(
    per_second: float, seconds: float, operations: Sequence[Callable[[], Awaitable[None]]], samples: Samples
) -> None:
    """Begin ``per_second`` operations a second, the given ones in turn, and record their latencies.

    An operation that fails is counted and has no latency. Raises `TaoError` when more are unanswered than a run can
    hold."""
    taken = 0

    async def one(since: float) -> None:
        nonlocal taken
        operation = operations[taken % len(operations)]
        taken += 1
        samples.late_seconds += perf_counter() - since
        try:
            await operation()
        except TaoError:
            samples.failed += 1
        else:
            samples.seconds.append(perf_counter() - since)

    def fail() -> None:
        raise TaoError(f"{_MOST_PENDING:,} operations are unanswered at {per_second:g} a second")

    await begin_at_rate(per_second, seconds, one, fail)
    samples.elapsed += max(1, round(per_second * seconds)) / per_second
