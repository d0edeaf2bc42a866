"""A load process' part of a published workload: draw requests, ask them, keep time.

*Closed loop*: so many awaiters, each with one request under way; what an application with that many busy workers sees.
*Open loop*: requests begin at a constant rate whoever waits, and latency counts from the intended start, so that a
stall shows in every request it held up. Beside either a few probers ask requests of a like stream with tracing on, and
so tell latencies of hits from those of misses: always at a constant rate, and from the intended start.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count
from time import perf_counter, process_time
from typing import Final, Protocol

import msgspec

from loadtest.collector import settle_collector
from loadtest.published.conformity import Tally
from loadtest.published.contestant import Contestant
from loadtest.published.first_reads import FirstReads
from loadtest.published.recording import Recorder, Recording
from loadtest.published.requests import Request, RequestStream
from loadtest.published.workload import READS
from tao.model.errors import TaoError

_MAX_UNDER_WAY: Final = 20_000
"""Of an open loop; a server that falls so far behind has failed, and the rest is counted as not asked."""
_LEAD_SECONDS: Final = 0.05
PROBERS: Final = 8
"""Sessions that trace, of which one has one request under way: enough that a miss keeps none of the others waiting."""
_PROBES_PER_SECOND: Final = 200.0
"""Of all probers of a process: hundreds of misses in half a minute, and a small part of any load."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What one load process does. ``rate``: requests a second of an open loop; 0: a closed loop of ``awaiters``."""

    awaiters: int
    rate: float
    warm_seconds: float
    seconds: float


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it, warming excluded."""

    tally: Tally
    recording: Recording
    elapsed: float
    client_cpu_seconds: float
    wrong: int
    """Objects that were written and were not found."""
    failed_warming: dict[str, int]
    """Requests of the warming that failed, by the error's reason."""
    warmed: int
    """Requests answered before measuring began."""
    first_time: int
    """Reads of an object or list that this process had not asked for before, warming included: no cache can have it
    because of this process."""


class TracedContestant(Protocol):
    """A contestant that can say whether an answer was a hit."""

    async def traced(self, request: Request) -> tuple[int, bool]:
        """What was found, and whether it came from the first cache's memory."""


async def put_load(
    load: Load,
    stream: RequestStream,
    contestant: Contestant,
    probers: Sequence[TracedContestant],
    probed: RequestStream,
    measuring: Callable[[], None],
) -> LoadResult:
    """Warm, say that it is ``measuring`` from now on, measure. ``probed``: the probers' stream. Raises what is no
    `TaoError`."""
    asked = FirstReads()
    warming = _Run(contestant, stream, None, asked)
    await warming.drive(load, load.warm_seconds)
    settle_collector()
    measuring()
    recorder = Recorder()
    asked.first_time = 0
    run = _Run(contestant, stream, recorder, asked)
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


class _Run:
    """One stretch of load."""

    def __init__(
        self, contestant: Contestant, stream: RequestStream, recorder: Recorder | None, asked: FirstReads
    ) -> None:
        self._contestant = contestant
        self._stream = stream
        self._recorder = recorder
        self._asked = asked
        self.failed: Counter[str] = Counter()
        self._began = 0.0
        self.tally = Tally()
        self.wrong = 0

    async def drive(self, load: Load, seconds: float) -> None:
        """For so long."""
        self._began = perf_counter()
        if load.rate:
            await self._at_rate(load.rate, seconds)
            return
        async with asyncio.TaskGroup() as group:
            for _ in range(load.awaiters):
                group.create_task(self._in_turn(self._began + seconds))

    async def _in_turn(self, until: float) -> None:
        while (now := perf_counter()) < until:
            await self._ask(next(self._stream), now)

    async def _at_rate(self, rate: float, seconds: float) -> None:
        began = self._began = perf_counter() + _LEAD_SECONDS
        under_way: set[asyncio.Task[None]] = set()
        try:
            for number in range(max(1, round(rate * seconds))):
                intended = began + number / rate
                early = intended - perf_counter()
                if early > 0:
                    await asyncio.sleep(early)
                if len(under_way) >= _MAX_UNDER_WAY:
                    self._failed("not asked: too many unanswered")
                    continue
                # Timers of a millisecond may wake the loop early: what begins early counts from its beginning.
                task = asyncio.ensure_future(self._ask(next(self._stream), min(intended, perf_counter())))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            if under_way:
                await asyncio.gather(*under_way)
        finally:
            for task in under_way:
                task.cancel()

    async def _ask(self, request: Request, since: float) -> None:
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


def probes(stream: RequestStream, asked: FirstReads, began: float, seconds: float) -> Iterator[tuple[float, Request]]:
    """When each probe is to begin, and what it asks: reads alone, at a constant rate."""
    reads = (request for request in stream if request.kind in READS)
    for number in count():
        after = number / _PROBES_PER_SECOND
        if after >= seconds:
            return
        request = next(reads)
        asked.note(request)
        yield began + after, request


async def _probe(prober: TracedContestant, probing: Iterator[tuple[float, Request]], recorder: Recorder) -> None:
    """One of several that take turns: whoever is free takes the next, and is late for it when all were busy."""
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
