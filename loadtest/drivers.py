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
_MAX_UNDER_WAY = 1_000
"""Messages unanswered at once at a constant rate; the rest begins late."""


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


class Batch(NamedTuple):
    """One message of queries; its answer must hold ``expected`` bytes of values in all."""

    read: pb.ReadBatch
    expected: int


def sessions(opened: Sequence[Session], batches: Sequence[Batch], topology_version: int) -> Drive:
    """Each session keeps one message going, the next being sent from the answer's callback."""
    shared = itertools.cycle(batches)

    async def drive(until: float, latencies: list[float]) -> None:
        chains = [_Chain(session, shared, topology_version, until, latencies) for session in opened]
        try:
            await asyncio.gather(*(chain.done for chain in chains))
        finally:
            for chain in chains:
                chain.done.cancel()

    return drive


def sessions_at_rate(
    opened: Sequence[Session], batches: Sequence[Batch], topology_version: int, per_second: float
) -> Drive:
    """``per_second`` messages a second, over the sessions in turn, whether those before are answered or not; seconds
    count from when each should have been sent."""
    shared = itertools.cycle(batches)

    async def drive(until: float, latencies: list[float]) -> None:
        pace = _Pace(opened, shared, topology_version, 1 / per_second, until, latencies)
        try:
            await pace.done
        finally:
            pace.done.cancel()

    return drive


class _Ask:
    """One pending message."""

    __slots__ = ("_expected", "_got", "_on_answer", "_started")

    def __init__(
        self,
        session: Session,
        batch: Batch,
        topology_version: int,
        started: float,
        on_answer: Callable[[float, WrongAnswer | None], None],
    ) -> None:
        """``on_answer``: called with when it should have been sent, and what is wrong with the answer."""
        self._expected = batch.expected
        self._got = 0
        self._started = started
        self._on_answer = on_answer
        session.send(pb.Request(topology_version=topology_version, read=batch.read), _TIMEOUT_SECONDS, self._take)

    def _take(self, answer: pb.Answer) -> None:
        self._got += sum(map(len, answer.read.values))
        if answer.more:
            return
        wrong = None
        if self._got != self._expected:
            what = answer.error.message or f"answered {self._got} bytes, not {self._expected}"
            wrong = WrongAnswer(f"a batch {what}")
        self._on_answer(self._started, wrong)


class _Chain:
    """One session's messages, one after the other."""

    __slots__ = ("_batches", "_latencies", "_session", "_until", "_version", "done")

    def __init__(
        self, session: Session, batches: Iterator[Batch], topology_version: int, until: float, latencies: list[float]
    ) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._session = session
        self._batches = batches
        self._version = topology_version
        self._until = until
        self._latencies = latencies
        self._send_next(perf_counter())

    def _send_next(self, now: float) -> None:
        _Ask(self._session, next(self._batches), self._version, now, self._answered)

    def _answered(self, started: float, wrong: WrongAnswer | None) -> None:
        if self.done.done():
            return
        if wrong is not None:
            self.done.set_exception(wrong)
            return
        ended = perf_counter()
        self._latencies.append(ended - started)
        if ended >= self._until:
            self.done.set_result(None)
        else:
            self._send_next(ended)


class _Pace:
    """Messages of all sessions, each at its time. The loop is kept turning meanwhile: its timers are of a millisecond,
    which is as long as the answers take."""

    __slots__ = ("_batches", "_due", "_interval", "_latencies", "_loop", "_sessions", "_under_way", "_until",
                 "_version", "done")  # fmt: skip

    def __init__(
        self,
        opened: Sequence[Session],
        batches: Iterator[Batch],
        topology_version: int,
        interval: float,
        until: float,
        latencies: list[float],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._sessions = itertools.cycle(opened)
        self._batches = batches
        self._version = topology_version
        self._interval = interval
        self._until = until
        self._latencies = latencies
        self._under_way = 0
        self._due = perf_counter()
        self._turn()

    def _turn(self) -> None:
        now = perf_counter()
        # What a stalled server holds up begins late, and its latency says so.
        while self._due <= now and self._due < self._until and self._under_way < _MAX_UNDER_WAY:
            self._under_way += 1
            _Ask(next(self._sessions), next(self._batches), self._version, self._due, self._answered)
            self._due += self._interval
        if self._due < self._until or self._under_way:
            if not self.done.done():
                self._loop.call_soon(self._turn)
        elif not self.done.done():
            self.done.set_result(None)

    def _answered(self, started: float, wrong: WrongAnswer | None) -> None:
        self._under_way -= 1
        if wrong is None:
            self._latencies.append(perf_counter() - started)
        elif not self.done.done():
            self.done.set_exception(wrong)
