"""The load process of a published workload: it draws requests, sends them, and measures their latencies.

*Closed loop*: a number of awaiters, each with one pending request, as in an application with that many busy workers.
*Open loop*: requests begin at a constant rate, and latency counts from the intended start, so that a stall shows in
every request that it delayed. Beside either loop a few probers send requests of a similar stream with tracing on, which
separates the latencies of hits from those of misses: always at a constant rate, and from the intended start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, process_time
from typing import Final, Protocol

import msgspec

from loadtest.latencies import Latencies, LatencyRecording
from loadtest.open_loop import begin_at_rate
from loadtest.published.conformity import FirstReads, RequestTally
from loadtest.published.requests import RequestStream, WorkloadRequest
from loadtest.published.workload import READS
from loadtest.rounds import settle_collector
from tao.model.errors import TaoError

PROBERS: Final = 8
"""Clients that trace, each with one pending request: so many that a miss does not delay the other probes."""
_PROBES_PER_SECOND: Final = 200.0
"""Probes per second of a process: hundreds of misses in half a minute, and a small part of any load."""
_NOT_ASKED: Final = "not asked: too many unanswered"


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


class Contestant(Protocol):
    """Answers the requests of a stream, over the graph that was loaded."""

    async def ask(self, request: WorkloadRequest) -> int:
        """Answer a request. Returns what a read found: the number of edges or objects, or the count; 0 for writes.
        Raises what the client raises."""

    async def traced(self, request: WorkloadRequest) -> tuple[int, bool]:
        """Answer a read. Returns what it found, and whether all of it came from the first cache's memory."""


async def put_load(
    load: RequestLoad,
    stream: RequestStream,
    contestant: Contestant,
    probers: Sequence[Contestant],
    probed: RequestStream,
    measuring: Callable[[], None],
) -> LoadResult:
    """Warm the caches, call ``measuring``, and measure. ``probed`` is the stream of the probers.

    Raises every error of the clients that is not a `TaoError`.
    """
    asked = FirstReads()
    warming = _LoadPhase(contestant, stream, asked)
    await warming.drive(load, load.warm_seconds)
    settle_collector()
    measuring()
    asked.first_time = 0
    run = _LoadPhase(contestant, stream, asked)
    cpu_before, began = process_time(), perf_counter()
    await asyncio.gather(run.drive(load, load.seconds), _probe(probers, probed, asked, run.latencies, load.seconds))
    return LoadResult(
        tally=run.tally,
        recording=run.latencies.recording(),
        elapsed=perf_counter() - began,
        client_cpu_seconds=process_time() - cpu_before,
        wrong=run.wrong,
        failed_warming=dict(warming.latencies.failed),
        warmed=warming.tally.answered,
        first_time=asked.first_time,
    )


class _LoadPhase:
    """The warming, or the measurement."""

    def __init__(self, contestant: Contestant, stream: RequestStream, asked: FirstReads) -> None:
        self._contestant = contestant
        self._stream = stream
        self._asked = asked
        self._began = perf_counter()
        self.latencies = Latencies()
        self.tally = RequestTally()
        self.wrong = 0

    async def drive(self, load: RequestLoad, seconds: float) -> None:
        """Send requests for so many seconds."""
        if load.rate:
            await begin_at_rate(load.rate, seconds, self._ask, partial(self.latencies.failed.update, [_NOT_ASKED]))
            return
        async with asyncio.TaskGroup() as group:
            for _ in range(load.awaiters):
                group.create_task(self._in_turn(self._began + seconds))

    async def _in_turn(self, until: float) -> None:
        while (now := perf_counter()) < until:
            await self._ask(now)

    async def _ask(self, since: float) -> None:
        request = next(self._stream)
        self._asked.note(request)
        try:
            found = await self._contestant.ask(request)
        except TaoError as error:
            self.latencies.failed[error.reason] += 1
            return
        now = perf_counter()
        self.latencies.answered(request.kind, now - since, now - self._began)
        self.tally.note(request, found)
        self.wrong += request.kind == "obj_get" and not found


async def _probe(
    probers: Sequence[Contestant], stream: RequestStream, asked: FirstReads, latencies: Latencies, seconds: float
) -> None:
    """Send the reads of the stream at a constant rate; a probe begins late when all probers are busy."""
    reads = (request for request in stream if request.kind in READS)
    free = asyncio.Queue[Contestant]()
    for prober in probers:
        free.put_nowait(prober)

    async def one(since: float) -> None:
        prober, request = await free.get(), next(reads)
        asked.note(request)
        try:
            _, hit = await prober.traced(request)
        except TaoError as error:
            latencies.failed[error.reason] += 1
        else:
            latencies.traced(f"{'hit' if hit else 'miss'} {request.kind}", perf_counter() - since)
        finally:
            free.put_nowait(prober)

    await begin_at_rate(_PROBES_PER_SECOND, seconds, one, partial(latencies.failed.update, [_NOT_ASKED]))
