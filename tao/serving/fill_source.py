"""The seam that a role implements: where a cache's misses go, and how what comes of them is told (DESIGN.md §5).

By callback, and not by tasks that wait: a miss passes half a dozen places on its way up and down again, and a task, a
future or a coroutine at each of them costs more than what is done there. What only happens when something is wrong -
another way is tried, after a pause - may be a task that waits (`fetched`, `wait_for`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from tao.model.errors import InternalError, TaoError
from tao.model.queries import Fetched, Query

_logger = logging.getLogger(__name__)

Take = Callable[[Fetched | TaoError], None]
"""Called once: with what was fetched, or with why it was not."""


class FillSource(Protocol):
    """Where a cache's misses go: the leader tier for a follower, the region's database for a leader."""

    def fetch(self, query: Query, minimum: int, take: Take, *, critical: bool, timeout_seconds: float) -> None:
        """Have one query answered with at least version ``minimum``; queries of one tick travel together. ``critical``:
        from the master database, by a read that begins after this call. ``take`` hears within ``timeout_seconds`` or
        soon after, perhaps before this returns; nothing is raised."""


def give(take: Take, answer: Fetched | TaoError) -> None:
    """Call it. A bug there is logged and costs nobody else his answer, and those behind it hear of an error instead:
    nobody waits for ever, least of all a flight that others join."""
    try:
        take(answer)
    except Exception as error:
        _logger.exception("what came of a fill was not taken")
        if not isinstance(answer, InternalError):
            give(take, InternalError(f"{type(error).__name__} in a fill; see the server's log"))


async def fetched(source: FillSource, query: Query, minimum: int, *, critical: bool, timeout_seconds: float) -> Fetched:
    """`FillSource.fetch` to wait for. Raises the `TaoError`."""
    waiter: asyncio.Future[Fetched | TaoError] = asyncio.get_running_loop().create_future()
    source.fetch(
        query,
        minimum,
        lambda answer: None if waiter.done() else waiter.set_result(answer),
        critical=critical,
        timeout_seconds=timeout_seconds,
    )
    answer = await waiter
    if isinstance(answer, TaoError):
        raise answer
    return answer


def wait_for(
    spawn: Callable[[Coroutine[Any, Any, None]], object], reading: Coroutine[Any, Any, Fetched], take: Take
) -> None:
    """Have a task of the server wait for it, and give what comes of it to ``take``."""
    try:
        spawn(_give_end_of(reading, take))
    except TaoError as refused:  # no task is to be had
        reading.close()
        give(take, refused)


async def _give_end_of(reading: Coroutine[Any, Any, Fetched], take: Take) -> None:
    try:
        answer: Fetched | TaoError = await reading
    except TaoError as error:
        answer = error
    except Exception as error:
        give(take, InternalError(f"{type(error).__name__} in a fill; see the server's log"))
        raise
    give(take, answer)
