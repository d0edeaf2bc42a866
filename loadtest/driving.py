"""Putting load on a server: awaiters that call an asynchronous client, and sessions that each keep one message going.

Both do as little as possible beside the client they measure, and the same for every contestant: a call from a prepared
list, a clock, a look at the answer's size. That answers are right in full is checked for every key before the rounds.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

from loadtest.rounds import Drive
from tao.model.errors import InternalError
from tao.wire.session import Session
from tao.wire.v1 import session_pb2 as pb

_TIMEOUT_SECONDS = 10.0


class WrongAnswer(InternalError):
    """A contestant answered something else than what was stored, or not at all: its figures would mean nothing."""

    reason = "WRONG_ANSWER"


class Call(NamedTuple):
    """One operation of a client: ``size(await function(*arguments))`` must be ``expected``.

    `Any`: the clients compared have nothing in common but that they are awaited."""

    function: Callable[..., Awaitable[Any]]
    arguments: tuple[Any, ...]
    size: Callable[[Any], int]
    expected: int


def awaiters(count: int, calls: Sequence[Call]) -> Drive:
    """``count`` awaiters go through the calls together, each awaiting one at a time."""
    shared = itertools.cycle(calls)

    async def drive(until: float, latencies: list[float]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(_await_in_turn(shared, until, latencies))

    return drive


def separate(lists: Sequence[Sequence[Call]]) -> Drive:
    """One awaiter per list of calls, each with a connection of its own behind its calls."""
    cycles = [itertools.cycle(calls) for calls in lists]

    async def drive(until: float, latencies: list[float]) -> None:
        async with asyncio.TaskGroup() as group:
            for calls in cycles:
                group.create_task(_await_in_turn(calls, until, latencies))

    return drive


async def _await_in_turn(calls: Iterator[Call], until: float, latencies: list[float]) -> None:
    record = latencies.append
    started = perf_counter()
    while started < until:
        function, arguments, size, expected = next(calls)
        got = size(await function(*arguments))
        if got != expected:
            raise WrongAnswer(f"{function.__qualname__}{arguments!r:.200} answered {got}, not {expected}")
        ended = perf_counter()
        record(ended - started)
        started = ended


def sessions(opened: Sequence[Session], batches: Sequence[pb.ReadBatch], expected: int, topology_version: int) -> Drive:
    """Each session keeps one message going, the next being sent from the answer's callback; an answer must hold
    ``expected`` bytes of values in all."""
    shared = itertools.cycle(batches)

    async def drive(until: float, latencies: list[float]) -> None:
        chains = [_Chain(session, shared, expected, topology_version, until, latencies) for session in opened]
        try:
            await asyncio.gather(*(chain.done for chain in chains))
        finally:
            for chain in chains:
                chain.done.cancel()

    return drive


class _Chain:
    """One session's messages, one after the other."""

    __slots__ = ("_batches", "_expected", "_got", "_latencies", "_send", "_started", "_until", "_version", "done")

    def __init__(
        self,
        session: Session,
        batches: Iterator[pb.ReadBatch],
        expected: int,
        topology_version: int,
        until: float,
        latencies: list[float],
    ) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._send = session.send
        self._batches = batches
        self._expected = expected
        self._version = topology_version
        self._until = until
        self._latencies = latencies
        self._got = 0
        self._started = perf_counter()
        self._send_next()

    def _send_next(self) -> None:
        request = pb.Request(topology_version=self._version, read=next(self._batches))
        self._send(request, _TIMEOUT_SECONDS, self._take)

    def _take(self, answer: pb.Answer) -> None:
        if self.done.done():
            return
        for value in answer.read.values:
            self._got += len(value)
        if answer.more:
            return
        if self._got != self._expected:
            what = answer.error.message or f"answered {self._got} bytes, not {self._expected}"
            self.done.set_exception(WrongAnswer(f"a batch {what}"))
            return
        ended = perf_counter()
        self._latencies.append(ended - self._started)
        if ended >= self._until:
            self.done.set_result(None)
            return
        self._started = ended
        self._got = 0
        self._send_next()
