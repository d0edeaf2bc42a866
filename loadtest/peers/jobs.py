"""The load processes' part of `peers`: load one graph into every store, check all contestants, let them take turns.

All contestants get the same requests (`loadtest.peers.arena`), and all caches are warmed with the same number of
requests (`loadtest.peers.warm_up`). The three peers write to the same tables, and only the one that writes invalidates
its cache. The last check therefore skips what any of them has written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import count, islice
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple

import msgspec

from loadtest.client_process import StepReport
from loadtest.conditions import until
from loadtest.peers.arena import OBJECTS_OF_A_BATCH, PeerGraph, Rivals
from loadtest.peers.contestants import Peer, Source
from loadtest.peers.names import BATCHES, CACHES, MANY, ONE, OPEN, TAO
from loadtest.peers.turns import Contender, Drive, Prepared, Taken, TaoCounters, at_rate, closed, rotated
from loadtest.peers.warm_up import WarmBounds, Warming, Window, ask_all, warmed

_OPEN_LOOP_ROUNDS: Final = 3
"""Factor by which the rounds of the open loop are longer: a tail at a constant rate needs time more than requests."""
_BETWEEN_TURNS_SECONDS: Final = 0.3
"""The pause in which the answers that are pending at the end of a turn of two processes arrive."""
_DRAWING_SHARE: Final = 0.3
"""Share of a turn's time in which the requests of the next turn are drawn: four microseconds each, at 50,000 per
second."""
_LOOK_SECONDS: Final = 0.01
_START_IN_SECONDS: Final = 0.2


class PeersJob(msgspec.Struct, frozen=True, kw_only=True):
    """Runs all contestants in one process, in every shape that one process can make."""

    rivals: Rivals
    server_pids: dict[str, tuple[int, ...]]
    """Process ids of each contestant's servers, including the database's."""
    admins: tuple[str, str]
    """Admin addresses of tao's follower and leader."""
    shapes: tuple[str, ...]
    """Kinds of load; those that need several processes are skipped."""
    awaiters: int
    warm: WarmBounds
    rounds: int
    round_seconds: float
    rate: float
    """Requests per second of the open loop, the same for all contestants."""

    async def work(self, report: StepReport) -> PeersResult:
        """Return the turns of all contestants. Raises `TaoError`, or what a peer's client raises."""
        async with AsyncExitStack() as stack:
            arena = await PeerGraph.filled(self.rivals, stack, report)
            checked = 0
            for again in ("", " again, out of the caches"):
                report(f"checking every contestant's answers{again}", 0.0)
                checked += await arena.check()
            counters = TaoCounters(*self.admins)
            warming = await warmed(_windows(arena, counters), self.warm, report)
            shapes = [each for each in _shapes(self, arena) if each.kind in self.shapes]
            contenders = {
                each.kind: [each.contender(name, arena, self.server_pids[name], counters) for name in arena.peers]
                for each in shapes
            }
            turns, taken = sum(len(each) for each in contenders.values()) * (self.rounds + 1), count()
            for shape in shapes:
                for number in range(self.rounds + 1):
                    for each in rotated(contenders[shape.kind], number):
                        report(f"{shape.text}: {each.name}, round {number} of {self.rounds}", next(taken) / turns)
                        seconds = self.round_seconds if number else self.round_seconds / 4
                        if shape.kind == OPEN:
                            seconds *= _OPEN_LOOP_ROUNDS
                        each.prepare(seconds)
                        await each.take(perf_counter() + seconds, counts=number > 0)
            report("checking every contestant's answers once more", 1.0)
            checked += await arena.check()
            return PeersResult(
                shapes=[
                    OfShape(
                        kind=shape.kind,
                        shape=f"{self.rivals.subject.workload}, {shape.text}",
                        queries_per_operation=OBJECTS_OF_A_BATCH if shape.kind == BATCHES else 1,
                        taken={each.name: each.taken() for each in contenders[shape.kind]},
                    )
                    for shape in shapes
                ],
                warming=warming,
                checked=checked,
            )


class PairJob(msgspec.Struct, frozen=True, kw_only=True):
    """One of several load processes that take their turns at the same time."""

    rivals: Rivals
    server_pids: dict[str, tuple[int, ...]]
    """Process ids of the servers whose CPU time this process counts."""
    admins: tuple[str, str] | None
    """Admin addresses of tao's follower and leader; None when another process reads their counters."""
    process: int
    awaiters: int
    rounds: int
    round_seconds: float
    start_file: str
    """The file that says when to begin once it exists: seconds of the monotonic clock, which a machine's processes
    share."""

    async def work(self, report: StepReport) -> PairResult:
        """Return the turns of this process. Raises `TaoError`, or what a peer's client raises."""
        start = Path(self.start_file)
        async with AsyncExitStack() as stack:
            arena = await PeerGraph.open(self.rivals, stack, 100 + self.process)
            contenders = [
                Contender(
                    name,
                    peer,
                    arena.stream(name),
                    closed(peer, arena.stream(name), self.awaiters),
                    self.server_pids.get(name, ()),
                    TaoCounters(*self.admins) if name == TAO and self.admins else None,
                )
                for name, peer in arena.peers.items()
            ]
            for each in contenders:
                seconds = self.round_seconds / 4
                each.prepare(seconds)
                await each.take(perf_counter() + seconds, counts=False)
            report(READY, 0.0)

            async def is_started() -> bool:
                return _start_in(start) is not None

            await until(is_started, _LOOK_SECONDS)
            begins = (_start_in(start) or 0.0) + _START_IN_SECONDS
            for number in range(self.rounds):
                for each in rotated(contenders, number):
                    report(f"{each.name}, two load processes, round {number + 1} of {self.rounds}", 1.0)
                    each.prepare(self.round_seconds)
                    await asyncio.sleep(begins - perf_counter())
                    await each.take(begins + self.round_seconds)
                    begins += self.round_seconds * (1 + _DRAWING_SHARE) + _BETWEEN_TURNS_SECONDS
            return PairResult(taken={each.name: each.taken() for each in contenders})


class OfShape(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of one shape of load."""

    kind: str
    shape: str
    """The name of the shape in tables."""
    queries_per_operation: int
    taken: dict[str, Taken]
    """By contestant."""


class PeersResult(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of all shapes, in order."""

    shapes: list[OfShape]
    warming: Warming
    checked: int
    """The number of answers of each contestant that were compared."""


class PairResult(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of one of several load processes, by contestant."""

    taken: dict[str, Taken]


def _windows(arena: PeerGraph, counters: TaoCounters) -> dict[str, Window]:
    def window(name: str) -> Window:
        peer, stream, asked = arena.peers[name], arena.stream(name), count()

        async def ask(requests: int) -> float | None:
            if name not in CACHES and next(asked):
                # It keeps nothing: after a window its connections are there. Its stream goes on with the others'.
                for _ in islice(stream, requests):
                    pass
                return None
            if name == TAO:
                await counters.since_last()
            hows = await ask_all(peer, stream, requests)
            if name == TAO:
                counted = await counters.since_last()
                return counted.hits / max(1, counted.reads)
            reads = sum(how is not Source.UNKNOWN for how in hows)
            return hows.count(Source.HIT) / max(1, reads) if name in CACHES else None

        return ask

    return {name: window(name) for name in arena.peers}


class _Shape(NamedTuple):
    """A kind of load: which requests of a contestant it uses, and how it sends them."""

    kind: str
    text: str
    requests: Callable[[str], Prepared]
    drive: Callable[[Peer, Prepared], Drive]

    def contender(self, name: str, arena: PeerGraph, server_pids: tuple[int, ...], counters: TaoCounters) -> Contender:
        peer, requests = arena.peers[name], self.requests(name)
        return Contender(
            name,
            peer,
            requests,
            self.drive(peer, requests),
            server_pids,
            counters if name == TAO else None,
            arena.first_reads(name),
        )


def _shapes(job: PeersJob, arena: PeerGraph) -> list[_Shape]:
    def awaiters(number: int) -> Callable[[Peer, Prepared], Drive]:
        return lambda peer, requests: closed(peer, requests, number)

    return [
        _Shape(MANY, f"{job.awaiters} awaiters of single queries", arena.stream, awaiters(job.awaiters)),
        _Shape(
            OPEN,
            f"open loop of {job.rate:,.0f} a second",
            arena.stream,
            lambda peer, requests: at_rate(peer, requests, job.rate),
        ),
        _Shape(ONE, "1 awaiter", arena.stream, awaiters(1)),
        _Shape(
            BATCHES,
            f"objects, {OBJECTS_OF_A_BATCH} in one call, {job.awaiters} awaiters",
            arena.batches,
            awaiters(job.awaiters),
        ),
    ]


READY: Final = "ready"
"""The step that reports that a load process waits for the start."""


def _start_in(file: Path) -> float | None:
    # The runner renames the file into place, so it is complete.
    return float(file.read_text()) if file.exists() else None
