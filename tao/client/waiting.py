"""Who waits for the answer to a query or a write.

One awaited operation waits by a future. The items of a many-form share one `Gathering`, so that a many-form of a
thousand makes one future and not a thousand; the waiter is then a pair of gathering and index.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeAlias, TypeVar

from tao.model.errors import TaoError

Result = TypeVar("Result")


class Gathering(Generic[Result]):
    """Results of ``size`` items, each a value or the error that became of it. ``future`` is done when all are here."""

    __slots__ = ("_missing", "future", "results")

    def __init__(self, size: int, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[list[Result | TaoError]] = loop.create_future()
        self.results: list[Result | TaoError | None] = [None] * size
        self._missing = size
        if not size:
            self.future.set_result([])

    def put(self, index: int, result: Result | TaoError) -> None:
        """Once per index."""
        self.results[index] = result
        self._missing -= 1
        if not self._missing and not self.future.done():
            self.future.set_result(self.results)  # type: ignore[arg-type]  # none is None any more


Waiter: TypeAlias = asyncio.Future[Result] | tuple[Gathering[Result], int]


def settle(waiter: Waiter[Result], result: Result) -> None:
    """Hand over a result. Nothing happens when the caller has been cancelled."""
    if isinstance(waiter, tuple):
        waiter[0].put(waiter[1], result)
    elif not waiter.done():
        waiter.set_result(result)


def fail(waiter: Waiter[Result], error: TaoError) -> None:
    """Hand over an error, one instance per waiter: each raise adds to its traceback."""
    if isinstance(waiter, tuple):
        waiter[0].put(waiter[1], error)
    elif not waiter.done():
        waiter.set_exception(error)


def is_cancelled(waiter: Waiter[Result] | None) -> bool:
    """Nobody waits here (any more)."""
    if waiter is None:
        return True
    return (waiter[0].future if isinstance(waiter, tuple) else waiter).done()
