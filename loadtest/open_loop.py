"""Load at a constant rate, whatever the outcome of the operations before.

An operation begins when its time has come, and its latency counts from then, so that a server that stalls shows every
operation that it held up. The event loop's own lateness of up to a millisecond is part of the figure. A timer of whole
milliseconds may also wake the loop too early; then the operation's real beginning counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import Final

from loadtest.latencies import Latencies
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


LATE: Final = "late "
"""Prefix of the name under which the lateness of an operation's beginning is recorded."""


async def sample_at_rate(
    per_second: float,
    seconds: float,
    operations: Sequence[Callable[[], Awaitable[None]]],
    latencies: Latencies,
    name: str,
) -> None:
    """Begin ``per_second`` operations a second, the given ones in turn, and record their latencies under ``name``.

    An operation that fails is counted under that name and has no latency. Raises `TaoError` when more are unanswered
    than a run can hold."""
    taken, began = 0, perf_counter()

    async def one(since: float) -> None:
        nonlocal taken
        operation = operations[taken % len(operations)]
        taken += 1
        latencies.traced(LATE + name, perf_counter() - since)
        try:
            await operation()
        except TaoError:
            latencies.failed[name] += 1
        else:
            now = perf_counter()
            latencies.answered(name, now - since, now - began)

    def fail() -> None:
        raise TaoError(f"{_MOST_PENDING:,} operations are unanswered at {per_second:g} a second")

    await begin_at_rate(per_second, seconds, one, fail)
