"""Turns of the contestants in one shape of load. Whoever begins a round is another one each time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from time import perf_counter, process_time
from typing import Final

import aiomcache
import msgspec
import pymysql.err
import redis.exceptions

from loadtest.collector import settle_collector
from loadtest.peers.asking import Peer
from loadtest.peers.counters import CacheCounts, TaoCounters
from loadtest.peers.how import How
from loadtest.peers.prepared import Prepared
from loadtest.published.first_reads import FirstReads
from loadtest.published.recording import Recorder, Recording
from loadtest.published.requests import Request
from loadtest.rounds import cpu_seconds, drive_until_answered
from tao.model.errors import TaoError

FAILURES: Final = (
    TaoError, pymysql.err.MySQLError, redis.exceptions.RedisError, aiomcache.ClientException, OSError, TimeoutError,
)  # fmt: skip
"""What a request may end with; anything else is a fault of the measurement."""
_MAX_UNDER_WAY: Final = 20_000
_LEAD_SECONDS: Final = 0.05
_DRAWN_FOR_SURE: Final = 1.5


class Samples:
    """Seconds of the requests of one turn, by what they needed; and what failed, by its kind."""

    def __init__(self) -> None:
        self.by_how: Final[list[list[float]]] = [[] for _ in How]
        self.failed: Final[Counter[str]] = Counter()

    @property
    def answered(self) -> int:
        """Requests."""
        return sum(map(len, self.by_how))

    def counts(self) -> CacheCounts:
        """By what they needed, where each tells."""
        return CacheCounts(
            hits=len(self.by_how[How.HIT]), joined=len(self.by_how[How.JOINED]), misses=len(self.by_how[How.MISS])
        )

    def recording(self) -> Recording:
        """All of it, to be sent."""
        recorder = Recorder()
        for how, all_seconds in zip(How, self.by_how, strict=True):
            for seconds in all_seconds:
                recorder.traced(how.name, seconds)
        for reason, times in self.failed.items():
            for _ in range(times):
                recorder.failed(reason)
        return recorder.recording()


Drive = Callable[[float, Samples], Awaitable[None]]
"""``drive(until, samples)``: as `loadtest.rounds.Drive`."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn in one load process; seconds."""

    answered: int
    elapsed: float
    server_cpu: float
    client_cpu: float
    counts: CacheCounts
    """Of the requests that were answered; of tao in all its clients, as its servers count."""
    first_reads: int | None
    """Of what this contestant had not been asked for before; None: by a process that does not know."""
    recording: Recording


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """All turns of one contestant in one shape, of one load process."""

    turns: list[Turn]
    touched: int


class Contender:
    """One contestant's turns so far."""

    def __init__(
        self,
        name: str,
        peer: Peer,
        requests: Prepared,
        drive: Drive,
        server_pids: Sequence[int],
        counters: TaoCounters | None = None,
        first_reads: FirstReads | None = None,
    ) -> None:
        """``drive``: asks ``requests``. ``counters``: of a contestant whose clients cannot tell; ``first_reads``: kept
        by who draws the requests."""
        self.name: Final = name
        self._peer: Final = peer
        self._requests: Final = requests
        self._drive: Final = drive
        self._pids: Final = server_pids
        self._counters: Final = counters
        self._first_reads: Final = first_reads
        self._turns: Final[list[Turn]] = []
        self._touched = 0
        self._most_per_second = 0.0

    def prepare(self, seconds: float) -> None:
        """For a turn of so many seconds: draw its requests, as many as its best turn would have asked and some more."""
        self._requests.prepare(int(self._most_per_second * seconds * _DRAWN_FOR_SURE))
        settle_collector()

    async def take(self, until: float, *, counts: bool = True) -> None:
        """One turn. Raises what is no failure of a request."""
        if self._counters is not None:
            await self._counters.since_last()
        samples, touched, first_reads = Samples(), self._peer.touched, self._asked_first()
        server_before, client_before, started = self._server_cpu(), process_time(), perf_counter()
        with self._peer.sampled():
            await drive_until_answered(self._drive, until, samples, lambda taken: taken.answered)
        elapsed = perf_counter() - started
        client_cpu, server_cpu = process_time() - client_before, self._server_cpu() - server_before
        self._most_per_second = max(self._most_per_second, samples.answered / elapsed)
        if not counts:
            return
        of_caches = samples.counts() if self._counters is None else await self._counters.since_last()
        turn = Turn(
            answered=samples.answered,
            elapsed=elapsed,
            server_cpu=server_cpu,
            client_cpu=client_cpu,
            counts=of_caches,
            first_reads=None if first_reads is None else (self._asked_first() or 0) - first_reads,
            recording=samples.recording(),
        )
        self._turns.append(turn)
        self._touched += self._peer.touched - touched

    def taken(self) -> Taken:
        """Everything, to be sent."""
        return Taken(turns=self._turns, touched=self._touched)

    def _asked_first(self) -> int | None:
        self._requests.settle()
        return None if self._first_reads is None else self._first_reads.first_time

    def _server_cpu(self) -> float:
        return sum(map(cpu_seconds, self._pids))


def rotated(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """The order of round ``number``."""
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def closed(peer: Peer, requests: Iterator[Request], awaiters: int) -> Drive:
    """So many awaiters, each with one request under way."""

    async def one(until: float, samples: Samples) -> None:
        by_how, ask = samples.by_how, peer.ask
        started = perf_counter()
        while started < until:
            try:
                how = await ask(next(requests))
            except FAILURES as error:
                samples.failed[type(error).__name__] += 1
                started = perf_counter()
                continue
            ended = perf_counter()
            by_how[how].append(ended - started)
            started = ended

    async def drive(until: float, samples: Samples) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(awaiters):
                group.create_task(one(until, samples))

    return drive


def at_rate(peer: Peer, requests: Iterator[Request], rate: float) -> Drive:
    """Requests begin at a constant rate whoever waits, and seconds count from the intended start."""

    async def one(request: Request, since: float, samples: Samples) -> None:
        try:
            how = await peer.ask(request)
        except FAILURES as error:
            samples.failed[type(error).__name__] += 1
        else:
            samples.by_how[how].append(perf_counter() - since)

    async def drive(until: float, samples: Samples) -> None:
        began = perf_counter() + _LEAD_SECONDS
        under_way: set[asyncio.Task[None]] = set()
        try:
            for number in range(max(1, round(rate * (until - began)))):
                intended = began + number / rate
                if (early := intended - perf_counter()) > 0:
                    await asyncio.sleep(early)
                if len(under_way) >= _MAX_UNDER_WAY:
                    samples.failed["not asked: too many unanswered"] += 1
                    continue
                # Timers of a millisecond may wake the loop early: what begins early counts from its beginning.
                task = asyncio.ensure_future(one(next(requests), min(intended, perf_counter()), samples))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            if under_way:
                await asyncio.gather(*under_way)
        finally:
            for task in under_way:
                task.cancel()

    return drive
