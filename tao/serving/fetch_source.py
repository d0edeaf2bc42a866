"""The interface between a cache's misses and the place that answers them.

A source answers by callback. A miss passes several objects on its way to the source and back, and a task, a future or a
coroutine at each of them would cost more than the work that is done there. What happens only after a failure (another
way is tried, or the same after a pause) may be a task: `fetch_and_wait` and `deliver_from_task` translate between the
two.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Final, Generic, Protocol, TypeVar

from tao.model.errors import InternalError, TaoError
from tao.model.queries import Fetched, Query

_logger = logging.getLogger(__name__)

Take = Callable[[Fetched | TaoError], None]
"""A callback that is called once, with what was fetched or with why it was not."""


class FetchSource(Protocol):
    """A place to fetch queries from: the leaders for a follower, the region's database for a leader."""

    def fetch(self, query: Query, minimum: int, take: Take, *, critical: bool, timeout_seconds: float) -> None:
        """Fetch one query at version ``minimum`` or later; queries of one tick of the loop travel together.

        ``critical``: read the master database, by a read that begins after this call. ``take`` is called within about
        ``timeout_seconds``, and perhaps before this method returns. Nothing is raised.
        """


def deliver(take: Take, answer: Fetched | TaoError) -> None:
    """Call ``take`` with the answer. An exception there is logged and does not keep other waiters from their answer;
    ``take`` is called again with an error, so that what waits behind it does not wait for ever."""
    try:
        take(answer)
    except Exception as error:
        _logger.exception("a fetched answer could not be delivered")
        if not isinstance(answer, InternalError):
            deliver(take, InternalError(f"{type(error).__name__} in a fetch; see the server's log"))


async def fetch_and_wait(
    source: FetchSource, query: Query, minimum: int, *, critical: bool, timeout_seconds: float
) -> Fetched:
    """Call `FetchSource.fetch` and return the answer. Raises the `TaoError`."""
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


def deliver_from_task(
    spawn: Callable[[Coroutine[Any, Any, None]], object], fetching: Coroutine[Any, Any, Fetched], take: Take
) -> None:
    """Run ``fetching`` as a task of the server, and call ``take`` with its result or its error."""
    try:
        spawn(_deliver_result(fetching, take))
    except TaoError as refused:  # the server has as many tasks as it may have
        fetching.close()
        deliver(take, refused)


async def _deliver_result(fetching: Coroutine[Any, Any, Fetched], take: Take) -> None:
    try:
        answer: Fetched | TaoError = await fetching
    except TaoError as error:
        answer = error
    except Exception as error:
        deliver(take, InternalError(f"{type(error).__name__} in a fetch; see the server's log"))
        raise
    deliver(take, answer)


Destination = TypeVar("Destination", bound=Hashable)
Item = TypeVar("Item")


class TickBatcher(Generic[Destination, Item]):
    """Collects the items that come within one tick of the event loop into one batch for each destination."""

    def __init__(self, send: Callable[[Destination, list[Item]], None], max_items: int) -> None:
        """``send`` is called with at most ``max_items`` items of one destination at a time."""
        self._send: Final = send
        self._max_items: Final = max_items
        self._call_soon: Final = asyncio.get_running_loop().call_soon
        self._waiting: dict[Destination, list[Item]] = {}

    def add(self, destination: Destination, item: Item) -> None:
        """Send the item at the end of this tick, or now when it completes a batch."""
        if not self._waiting:
            self._call_soon(self._flush)
        items = self._waiting.setdefault(destination, [])
        items.append(item)
        if len(items) >= self._max_items:
            self._waiting[destination] = []
            self._send(destination, items)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for destination, items in waiting.items():
            if items:
                self._send(destination, items)
