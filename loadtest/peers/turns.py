"""Turns of the contestants in one shape of load, and what comes of them.

Whoever begins a round is another one each time. Histograms of all rounds, and of all load processes, add up; a rate is
the median of the rounds'.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from time import perf_counter, process_time
from typing import Final

import aiomcache
import msgspec
import pymysql.err
import redis.exceptions

from loadtest.collector import settle_collector
from loadtest.peers.asking import How, Peer, TaoPeer
from loadtest.published.recording import Merged, Recorder, Recording, Summary
from loadtest.published.requests import Request
from loadtest.rounds import cpu_seconds
from tao.model.errors import TaoError

FAILURES: Final = (
    TaoError, pymysql.err.MySQLError, redis.exceptions.RedisError, aiomcache.ClientException, OSError, TimeoutError,
)  # fmt: skip
"""What a request may end with; anything else is a fault of the measurement."""
_MAX_UNDER_WAY: Final = 20_000
_LEAD_SECONDS: Final = 0.05
_TRACED_EVERY: Final = 20
"""Of an open loop's requests of tao: so many go through a client that tells hits from misses."""
_MICRO: Final = 1e6


class Samples:
    """Seconds of the requests of one turn, by what they needed; and what failed, by its kind."""

    def __init__(self) -> None:
        self.by_how: Final[list[list[float]]] = [[] for _ in How]
        self.failed: Final[Counter[str]] = Counter()

    @property
    def answered(self) -> int:
        """Requests."""
        return sum(map(len, self.by_how))


Drive = Callable[[float, Samples], Awaitable[None]]
"""``drive(until, samples)``: as `loadtest.rounds.Drive`."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn in one load process; seconds."""

    answered: int
    elapsed: float
    server_cpu: float
    client_cpu: float


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """All turns of one contestant in one shape, of one load process."""

    turns: list[Turn]
    recording: Recording
    touched: int


class ShapeFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One contestant in one shape of load. Microseconds of an operation from histograms over all rounds, microseconds
    of CPU a query; an operation is one request, of ``queries_per_operation`` queries."""

    shape: str
    contestant: str
    queries_per_operation: int
    operations: int
    per_second: float
    rounds_per_second: list[float]
    p50_us: float
    p99_us: float
    server_cpu_us: float
    client_cpu_us: float
    total_cpu_us: float
    failed: dict[str, int]
    touched_bytes: float
    """Of payload that the application looked at, a query."""
    hits: int
    """Reads answered without the database, where a contestant can tell of each."""
    joined: int
    misses: int
    hit_ms: Summary | None
    """Answered without the database; of tao in the open loop: from the follower's memory, a sample."""
    miss_ms: Summary | None


class Contender:
    """One contestant's turns so far."""

    def __init__(self, name: str, peer: Peer, drive: Drive, server_pids: Sequence[int]) -> None:
        self.name: Final = name
        self._peer: Final = peer
        self._drive: Final = drive
        self._pids: Final = server_pids
        self._turns: Final[list[Turn]] = []
        self._recorder: Final = Recorder()
        self._touched = 0

    async def take(self, until: float, *, counts: bool = True) -> None:
        """One turn. Raises what is no failure of a request."""
        settle_collector()
        samples, touched = Samples(), self._peer.touched
        server_before, client_before, started = self._server_cpu(), process_time(), perf_counter()
        await self._drive(until, samples)
        elapsed = perf_counter() - started
        client_cpu, server_cpu = process_time() - client_before, self._server_cpu() - server_before
        if not counts:
            return
        turn = Turn(answered=samples.answered, elapsed=elapsed, server_cpu=server_cpu, client_cpu=client_cpu)
        self._turns.append(turn)
        self._touched += self._peer.touched - touched
        for how, all_seconds in zip(How, samples.by_how, strict=True):
            for seconds in all_seconds:
                self._recorder.traced(how.name, seconds)
        for reason, times in samples.failed.items():
            for _ in range(times):
                self._recorder.failed(reason)

    def taken(self) -> Taken:
        """Everything, to be sent."""
        return Taken(turns=self._turns, recording=self._recorder.recording(), touched=self._touched)

    def _server_cpu(self) -> float:
        return sum(map(cpu_seconds, self._pids))


def rotated(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """The order of round ``number``."""
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def figure_of(shape: str, contestant: str, taken: Sequence[Taken], queries_per_operation: int = 1) -> ShapeFigure:
    """Of all load processes together. Raises `ValueError` when nothing was answered."""
    merged = Merged()
    for each in taken:
        merged.add(each.recording)
    whole = merged.summary(*(how.name for how in How))
    if whole is None:
        raise ValueError(f"{contestant} answered nothing in {shape}: give it more --seconds")
    rounds = list(zip(*(each.turns for each in taken), strict=True))
    rates = [queries_per_operation * sum(turn.answered / turn.elapsed for turn in turns) for turns in rounds]
    queries = queries_per_operation * whole.count
    server = sum(turn.server_cpu for each in taken for turn in each.turns) / queries * _MICRO
    client = sum(turn.client_cpu for each in taken for turn in each.turns) / queries * _MICRO
    return ShapeFigure(
        shape=shape,
        contestant=contestant,
        queries_per_operation=queries_per_operation,
        operations=whole.count,
        per_second=statistics.median(rates),
        rounds_per_second=rates,
        p50_us=whole.p50 * 1000,
        p99_us=whole.p99 * 1000,
        server_cpu_us=server,
        client_cpu_us=client,
        total_cpu_us=server + client,
        failed=dict(merged.failed),
        touched_bytes=sum(each.touched for each in taken) / queries,
        hits=_count(merged, How.HIT),
        joined=_count(merged, How.JOINED),
        misses=_count(merged, How.MISS),
        hit_ms=merged.summary(How.HIT.name),
        miss_ms=merged.summary(How.MISS.name, How.JOINED.name),
    )


def _count(merged: Merged, how: How) -> int:
    found = merged.summary(how.name)
    return 0 if found is None else found.count


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


async def warmed(peer: Peer, requests: Iterator[Request], awaiters: int, count: int) -> None:
    """So many requests, whose outcome counts nowhere. Raises what fails."""
    left = count

    async def one() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await peer.ask(next(requests))

    async with asyncio.TaskGroup() as group:
        for _ in range(awaiters):
            group.create_task(one())


def at_rate(peer: Peer, requests: Iterator[Request], rate: float, tracers: Sequence[TaoPeer] = ()) -> Drive:
    """Requests begin at a constant rate whoever waits, and seconds count from the intended start. ``tracers``: clients
    that tell hits from misses, each for one request at a time; of what they are asked, and of nothing else, the seconds
    stand under hits and misses."""
    free = list(tracers)

    async def one(request: Request, intended: float, tracer: TaoPeer | None, samples: Samples) -> None:
        try:
            how = await (peer.ask(request) if tracer is None else tracer.ask_traced(request))
        except FAILURES as error:
            samples.failed[type(error).__name__] += 1
        else:
            samples.by_how[how].append(perf_counter() - intended)
        finally:
            if tracer is not None:
                free.append(tracer)

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
                tracer = free.pop() if free and number % _TRACED_EVERY == 0 else None
                task = asyncio.ensure_future(one(next(requests), intended, tracer, samples))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            if under_way:
                await asyncio.gather(*under_way)
        finally:
            for task in under_way:
                task.cancel()

    return drive
