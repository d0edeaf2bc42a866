"""The load process of a published workload: it draws requests, sends them, and measures their latencies.

*Closed loop*: a number of awaiters, each with one pending request, as in an application with that many busy workers.
*Open loop*: requests begin at a constant rate, and latency counts from the intended start, so that a stall shows in
every request that it delayed. Beside either loop a few probers send requests of a similar stream with tracing on, which
separates the latencies of hits from those of misses: always at a constant rate, and from the intended start.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count
from time import perf_counter, process_time
from typing import Final, Protocol

import msgspec

from loadtest.open_loop import begin_at_rate
from loadtest.published.conformity import FirstReads, RequestTally
from loadtest.published.contestant import Contestant
from loadtest.published.latencies import LatencyRecorder, LatencyRecording
from loadtest.published.requests import RequestStream, WorkloadRequest
from loadtest.published.workload import READS
from loadtest.rounds import settle_collector
from tao.model.errors import TaoError

PROBERS: Final = 8
"""Clients that trace, each with one pending request: so many that a miss does not delay the other probes."""
_PROBES_PER_SECOND: Final = 200.0
"""Probes per second of a process: hundreds of misses in half a minute, and a small part of any load."""


class RequestLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one process: an open loop of ``rate`` requests per second, or with rate 0 a closed loop of
    ``awaiters``."""

    awaiters: int
    rate: float
    warm_seconds: float
    seconds: float


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a load process, without the warming."""

    tally: RequestTally
    recording: LatencyRecording
    elapsed: float
    client_cpu_seconds: float
    wrong: int
    """Objects that were written and were not found."""
    failed_warming: dict[str, int]
    """Requests of the warming that failed, by the error's reason."""
    warmed: int
    """Requests answered before measuring began."""
    first_time: int
    """Reads of an object or list that this process had not asked for before, warming included; this process cannot have
    brought them into a cache."""


class TracedContestant(Protocol):
    """A contestant that can report whether an answer was a hit."""

    async def traced(self, request: WorkloadRequest) -> tuple[int, bool]:
        """Send a request. Returns how much was found, and whether it came from the first cache's memory."""


async def put_load(
    load: RequestLoad,
    stream: RequestStream,
    contestant: Contestant,
    probers: Sequence[TracedContestant],
    probed: RequestStream,
    measuring: Callable[[], None],
) -> LoadResult:
    """Warm the caches, call ``measuring``, and measure. ``probed`` is the stream of the probers.

    Raises every error of the clients that is not a `TaoError`.
    """
    asked = FirstReads()
    warming = _LoadPhase(contestant, stream, None, asked)
    await warming.drive(load, load.warm_seconds)
    settle_collector()
    measuring()
    recorder = LatencyRecorder()
    asked.first_time = 0
    run = _LoadPhase(contestant, stream, recorder, asked)
    cpu_before = process_time()
    began = perf_counter()
    jobs: list[Awaitable[None]] = [run.drive(load, load.seconds)]
    probing = probes(probed, asked, began, load.seconds)
    jobs += [_probe(prober, probing, recorder) for prober in probers]
    await asyncio.gather(*jobs)
    elapsed = perf_counter() - began
    return LoadResult(
        tally=run.tally,
        recording=recorder.recording(),
        elapsed=elapsed,
        client_cpu_seconds=process_time() - cpu_before,
        wrong=run.wrong,
        failed_warming=dict(warming.failed),
        warmed=warming.tally.answered,
        first_time=asked.first_time,
    )


class _LoadPhase:
    """The warming, or the measurement."""

    def __init__(
        self, contestant: Contestant, stream: RequestStream, recorder: LatencyRecorder | None, asked: FirstReads
    ) -> None:
        self._contestant = contestant
        self._stream = stream
        self._recorder = recorder
        self._asked = asked
        self.failed: Counter[str] = Counter()
        self._began = 0.0
        self.tally = RequestTally()
        self.wrong = 0

    async def drive(self, load: RequestLoad, seconds: float) -> None:
        """Send requests for so many seconds."""
        self._began = perf_counter()
        if load.rate:
            await begin_at_rate(
                load.rate,
                seconds,
                lambda since: self._ask(next(self._stream), since),
                lambda: self._failed("not asked: too many unanswered"),
            )
            return
        async with asyncio.TaskGroup() as group:
            for _ in range(load.awaiters):
                group.create_task(self._in_turn(self._began + seconds))

    async def _in_turn(self, until: float) -> None:
        while (now := perf_counter()) < until:
            await self._ask(next(self._stream), now)

    async def _ask(self, request: WorkloadRequest, since: float) -> None:
        self._asked.note(request)
        try:
            found = await self._contestant.ask(request)
        except TaoError as error:
            self._failed(error.reason)
            return
        now = perf_counter()
        if self._recorder is not None:
            self._recorder.answered(request.kind, now - since, now - self._began)
        self.tally.note(request, found)
        self.wrong += request.kind == "obj_get" and not found

    def _failed(self, reason: str) -> None:
        self.failed[reason] += 1
        if self._recorder is not None:
            self._recorder.failed(reason)


def probes(
    stream: RequestStream, asked: FirstReads, began: float, seconds: float
) -> Iterator[tuple[float, WorkloadRequest]]:
    """Yield the time at which each probe is to begin, and its request: only reads, at a constant rate."""
    reads = (request for request in stream if request.kind in READS)
    for number in count():
        after = number / _PROBES_PER_SECOND
        if after >= seconds:
            return
        request = next(reads)
        asked.note(request)
        yield began + after, request


async def _probe(
    prober: TracedContestant, probing: Iterator[tuple[float, WorkloadRequest]], recorder: LatencyRecorder
) -> None:
    """Run one of several probers, which share the probes; a probe begins late when all of them are busy."""
    for intended, request in probing:
        early = intended - perf_counter()
        if early > 0:
            await asyncio.sleep(early)
        since = min(intended, perf_counter())
        try:
            _, hit = await prober.traced(request)
        except TaoError as error:
            recorder.failed(error.reason)
            continue
        recorder.traced(f"{'hit' if hit else 'miss'} {request.kind}", perf_counter() - since)
