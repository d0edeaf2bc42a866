"""Turns of the contestants in one shape of load. Each round begins with another contestant."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import length_hint
from time import perf_counter, process_time
from typing import Final

import aiomcache
import msgspec
import pymysql.err
import redis.exceptions

from loadtest.open_loop import begin_at_rate
from loadtest.peers.contestants import Peer, Source
from loadtest.published.conformity import FirstReads
from loadtest.published.latencies import LatencyRecorder, LatencyRecording
from loadtest.published.requests import WorkloadRequest
from loadtest.rounds import cpu_seconds, drive_until_answered, settle_collector
from tao.admin.server_stats import server_stats
from tao.model.errors import TaoError


class CacheCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of reads between two moments."""

    hits: int = 0
    """Reads answered without the database, and without waiting for another's fetch."""
    joined: int = 0
    """Reads that waited for another's fetch; for tao, in the follower."""
    misses: int = 0
    """Reads that asked the database."""
    in_follower: int = 0
    """Hits of tao from the follower's own memory."""

    @property
    def reads(self) -> int:
        """All reads."""
        return self.hits + self.joined + self.misses


def added(all_counts: Iterable[CacheCounts]) -> CacheCounts:
    """Add up several counts."""
    found = list(all_counts)
    return CacheCounts(**{name: sum(getattr(each, name) for each in found) for name in CacheCounts.__struct_fields__})


class TaoCounters:
    """Reads the counters of a follower and a leader that serve no other client."""

    def __init__(self, follower_admin: str, leader_admin: str) -> None:
        self._follower = follower_admin
        self._leader = leader_admin
        self._hits = self._misses = self._joined = self._leader_misses = 0

    async def since_last(self) -> CacheCounts:
        """Return the counts since the last call, at first since the servers' start. Raises what reading raises."""
        follower, leader = await server_stats(self._follower), await server_stats(self._leader)
        hits, misses = follower["hits"] - self._hits, follower["misses"] - self._misses
        joined = follower["fills"]["joined"] - self._joined
        leader_misses = leader["misses"] - self._leader_misses
        self._hits, self._misses = follower["hits"], follower["misses"]
        self._joined, self._leader_misses = follower["fills"]["joined"], leader["misses"]
        # Follower misses that did not become leader misses were either hits of the leader or joined one of its fetches.
        spared = max(0, misses - leader_misses)
        joined = min(joined, spared)
        return CacheCounts(hits=hits + spared - joined, joined=joined, misses=leader_misses, in_follower=hits)


_AT_A_TIME: Final = 1_000
"""The number of requests drawn at once when a turn needs more than were prepared."""


class Prepared(Iterator[WorkloadRequest]):
    """An endless stream of requests, some of them drawn ahead."""

    def __init__(self, source: Iterator[WorkloadRequest], note: Callable[[WorkloadRequest], None]) -> None:
        """``note`` is called for every request that was sent, when the next ones are prepared: outside of turns, unless
        a turn needs more requests than were drawn for it."""
        self._source: Final = source
        self._note: Final = note
        self._drawn: list[WorkloadRequest] = []
        self._left: Iterator[WorkloadRequest] = iter(self._drawn)

    def __next__(self) -> WorkloadRequest:
        for request in self._left:
            return request
        self.prepare(_AT_A_TIME)
        return next(self._left)

    def prepare(self, count: int) -> None:
        """Draw until at least ``count`` requests are ready."""
        self.settle()
        self._drawn += islice(self._source, max(0, count - len(self._drawn)))
        self._left = iter(self._drawn)

    def settle(self) -> None:
        """Call ``note`` for the requests that were sent so far."""
        asked = len(self._drawn) - length_hint(self._left)
        for request in self._drawn[:asked]:
            self._note(request)
        self._drawn = self._drawn[asked:]
        self._left = iter(self._drawn)


FAILURES: Final = (
    TaoError, pymysql.err.MySQLError, redis.exceptions.RedisError, aiomcache.ClientException, OSError, TimeoutError,
)  # fmt: skip
"""Errors with which a request may fail; any other is an error of the measurement."""
_DRAWN_FOR_SURE: Final = 1.5


class TurnSamples:
    """Latencies in seconds of the requests of one turn by the source of their answers, and the failures by kind."""

    def __init__(self) -> None:
        self.by_how: Final[list[list[float]]] = [[] for _ in Source]
        self.failed: Final[Counter[str]] = Counter()

    @property
    def answered(self) -> int:
        """The number of requests answered."""
        return sum(map(len, self.by_how))

    def counts(self) -> CacheCounts:
        """Return the counts by source, where each answer has a known source."""
        return CacheCounts(
            hits=len(self.by_how[Source.HIT]),
            joined=len(self.by_how[Source.JOINED]),
            misses=len(self.by_how[Source.MISS]),
        )

    def recording(self) -> LatencyRecording:
        """Return everything in the form that is sent to the runner."""
        recorder = LatencyRecorder()
        for how, all_seconds in zip(Source, self.by_how, strict=True):
            for seconds in all_seconds:
                recorder.traced(how.name, seconds)
        for reason, times in self.failed.items():
            for _ in range(times):
                recorder.failed(reason)
        return recorder.recording()


Drive = Callable[[float, TurnSamples], Awaitable[None]]
"""``drive(until, samples)`` is called as a `loadtest.rounds.Drive`."""


class PeerTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn in one load process; times in seconds."""

    answered: int
    elapsed: float
    server_cpu: float
    client_cpu: float
    counts: CacheCounts
    """Counts of the requests that were answered; for tao those of all its clients, as its servers count them."""
    first_reads: int | None
    """Reads of keys for which this contestant had not been asked before; None when the process does not know."""
    recording: LatencyRecording


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """All turns of one contestant in one shape, from one load process."""

    turns: list[PeerTurn]
    touched: int


class Contender:
    """One contestant, its load and its turns so far."""

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
        """``drive`` sends ``requests``. ``counters`` is given for a contestant whose clients do not see the sources of
        their reads; the stream of requests updates ``first_reads``."""
        self.name: Final = name
        self._peer: Final = peer
        self._requests: Final = requests
        self._drive: Final = drive
        self._pids: Final = server_pids
        self._counters: Final = counters
        self._first_reads: Final = first_reads
        self._turns: Final[list[PeerTurn]] = []
        self._touched = 0
        self._most_per_second = 0.0

    def prepare(self, seconds: float) -> None:
        """Draw the requests of a turn of so many seconds: as many as the best turn so far used, and some more."""
        self._requests.prepare(int(self._most_per_second * seconds * _DRAWN_FOR_SURE))
        settle_collector()

    async def take(self, until: float, *, counts: bool = True) -> None:
        """Take one turn. Raises every error that is not in `FAILURES`."""
        if self._counters is not None:
            await self._counters.since_last()
        samples, touched, first_reads = TurnSamples(), self._peer.touched, self._asked_first()
        server_before, client_before, started = self._server_cpu(), process_time(), perf_counter()
        with self._peer.sampled():
            await drive_until_answered(self._drive, until, samples, lambda taken: taken.answered)
        elapsed = perf_counter() - started
        client_cpu, server_cpu = process_time() - client_before, self._server_cpu() - server_before
        self._most_per_second = max(self._most_per_second, samples.answered / elapsed)
        if not counts:
            return
        of_caches = samples.counts() if self._counters is None else await self._counters.since_last()
        turn = PeerTurn(
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
        """Return everything in the form that is sent to the runner."""
        return Taken(turns=self._turns, touched=self._touched)

    def _asked_first(self) -> int | None:
        self._requests.settle()
        return None if self._first_reads is None else self._first_reads.first_time

    def _server_cpu(self) -> float:
        return sum(map(cpu_seconds, self._pids))


def rotated(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """Return the contestants in the order of round ``number``."""
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def closed(peer: Peer, requests: Iterator[WorkloadRequest], awaiters: int) -> Drive:
    """Return the load of so many awaiters, each with one pending request."""

    async def one(until: float, samples: TurnSamples) -> None:
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

    async def drive(until: float, samples: TurnSamples) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(awaiters):
                group.create_task(one(until, samples))

    return drive


def at_rate(peer: Peer, requests: Iterator[WorkloadRequest], rate: float) -> Drive:
    """Return the load of requests that begin at a constant rate; seconds count from the intended start."""

    async def drive(until: float, samples: TurnSamples) -> None:
        async def one(since: float) -> None:
            try:
                how = await peer.ask(next(requests))
            except FAILURES as error:
                samples.failed[type(error).__name__] += 1
            else:
                samples.by_how[how].append(perf_counter() - since)

        def skip() -> None:
            samples.failed["not asked: too many unanswered"] += 1

        await begin_at_rate(rate, until - perf_counter(), one, skip)

    return drive
