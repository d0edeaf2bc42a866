"""Fills to wait for, and sources of fills that wait: tests are read from the top, callbacks are not."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from tao.model.errors import TaoError
from tao.model.queries import Fetched, Query
from tao.serving.fill_source import Take, wait_for
from tao.serving.fills import Fills


class Awaited:
    """An `Asker` that somebody waits for; cancelled, it is gone."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[Fetched | TaoError] = asyncio.get_running_loop().create_future()

    @property
    def gone(self) -> bool:
        return self._answer.done()

    def take(self, answer: Fetched | TaoError) -> None:
        if not self.gone:
            self._answer.set_result(answer)

    async def answer(self) -> Fetched:
        """Raises the `TaoError`."""
        answer = await self._answer
        if isinstance(answer, TaoError):
            raise answer
        return answer


async def answer(fills: Fills, query: Query, minimum: int, *, critical: bool) -> Fetched:
    """`Fills.answer`. Raises the `TaoError`."""
    awaited = Awaited()
    fills.answer(query, minimum, awaited, critical=critical)
    return await awaited.answer()


class WaitingSource(ABC):
    """A `FillSource` that reads by `read`."""

    def fetch(self, query: Query, minimum: int, take: Take, *, critical: bool, timeout_seconds: float) -> None:
        """See `FillSource.fetch`."""
        reading = self.read(query, minimum, critical=critical, timeout_seconds=timeout_seconds)
        wait_for(asyncio.ensure_future, reading, take)

    @abstractmethod
    async def read(self, query: Query, minimum: int, *, critical: bool, timeout_seconds: float) -> Fetched:
        """Raises the `TaoError`."""
