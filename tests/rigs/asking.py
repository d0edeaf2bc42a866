"""Misses that a test awaits, and fetch sources that wait: a test reads from top to bottom, callbacks do not."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from tao.model.errors import TaoError
from tao.model.queries import Fetched, Query
from tao.serving.misses import LoneMiss, Miss, Misses, ReadPolicy
from tao.serving.shares import WorkShares
from tao.serving.single_flight import SingleFlight
from tao.serving.sources import FetchRequest, deliver_from_task
from tests.rigs.leader_rig import SCHEMA


class Awaited:
    """A `MissReceiver` that a test awaits; it no longer wants the answer once it is cancelled."""

    caller: str | None = None

    def __init__(self) -> None:
        self._answer: asyncio.Future[Fetched | TaoError] = asyncio.get_running_loop().create_future()

    @property
    def gone(self) -> bool:
        return self._answer.done()

    def take(self, miss: Miss | LoneMiss, answer: Fetched | TaoError) -> None:
        if not self.gone:
            self._answer.set_result(answer)

    def put_aside(self) -> bool:
        """See `MissReceiver.put_aside`: it has no place to give back."""
        return True

    def give_up(self) -> None:
        """Give up waiting for the answer."""
        self._answer.cancel()

    async def answer(self) -> Fetched:
        """Return the answer. Raises the `TaoError` of the miss."""
        answer = await self._answer
        if isinstance(answer, TaoError):
            raise answer
        return answer


def make_misses(single_flight: SingleFlight, *, past_floors: bool = False) -> Misses:
    """Make misses that admit every shard."""
    return Misses(single_flight, SCHEMA, ReadPolicy(lambda _: None, past_floors=past_floors), WorkShares())


def begin(misses: Misses, query: Query, minimum: int, awaited: Awaited, *, critical: bool) -> None:
    """Begin a miss whose answer goes to ``awaited``."""
    if critical or minimum or not LoneMiss.begins(misses, awaited, query, 0):
        Miss(misses, awaited, query, minimum, 0).begin(critical=critical)


async def answer(misses: Misses, query: Query, minimum: int, *, critical: bool) -> Fetched:
    """Return the answer of a miss. Raises its `TaoError`."""
    awaited = Awaited()
    begin(misses, query, minimum, awaited, critical=critical)
    return await awaited.answer()


class WaitingSource(ABC):
    """A `FetchSource` whose subclasses implement the coroutine `read`."""

    def fetch(self, asked: FetchRequest) -> None:
        """See `FetchSource.fetch`."""

        def take(answer: Fetched | TaoError) -> None:
            if isinstance(answer, TaoError):
                asked.fail(answer)
            else:
                asked.take(answer)

        reading = self.read(asked.query, asked.minimum, critical=asked.critical, timeout_seconds=asked.timeout_seconds)
        deliver_from_task(asyncio.ensure_future, reading, take)

    @abstractmethod
    async def read(self, query: Query, minimum: int, *, critical: bool, timeout_seconds: float) -> Fetched:
        """Read the answer. Raises the `TaoError`."""
