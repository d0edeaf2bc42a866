"""The load processes' part of `peers`: fill everybody with one graph, check everybody, let them take turns.

All are asked the same (`loadtest.peers.arena`), and all caches are warmed with the same number of requests
(`loadtest.peers.warming`). The three peers write to the same tables; only one of them knows of each such write, so that
what any of them has written is left out of the last check.
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

from loadtest.peers.arena import OBJECTS_OF_A_BATCH, Arena, Rivals
from loadtest.peers.asking import Peer
from loadtest.peers.counters import TaoCounters
from loadtest.peers.how import How
from loadtest.peers.names import BATCHES, CACHES, MANY, ONE, OPEN, TAO
from loadtest.peers.prepared import Prepared
from loadtest.peers.turns import Contender, Drive, Taken, at_rate, closed, rotated
from loadtest.peers.warming import WarmBounds, Warming, Window, ask_all, warmed
from loadtest.waiting import until

_OPEN_LOOP_ROUNDS: Final = 3
"""So much longer are the rounds of the open loop: a tail at a constant rate needs time more than requests."""
_BETWEEN_TURNS_SECONDS: Final = 0.3
"""In which the answers under way at the end of a turn of two processes arrive."""
_DRAWING_SHARE: Final = 0.3
"""Of a turn's time, in which the requests of the next are drawn: four microseconds each, of 50,000 a second."""
_LOOK_SECONDS: Final = 0.01
_START_IN_SECONDS: Final = 0.2


class PeersJob(msgspec.Struct, frozen=True, kw_only=True, tag="peers"):
    """All contestants in one process, in every shape that one process makes."""

    rivals: Rivals
    server_pids: dict[str, tuple[int, ...]]
    """By contestant, the database's among them."""
    admins: tuple[str, str]
    """Of tao's follower and leader."""
    shapes: tuple[str, ...]
    """Kinds of load; those that take several processes are left out."""
    awaiters: int
    warm: WarmBounds
    rounds: int
    round_seconds: float
    rate: float
    """Requests a second of the open loop, the same for everybody."""


class PairJob(msgspec.Struct, frozen=True, kw_only=True, tag="peers_pair"):
    """One of several load processes that take their turns at the same time."""

    rivals: Rivals
    server_pids: dict[str, tuple[int, ...]]
    """Of those whose CPU time this process is to count."""
    admins: tuple[str, str] | None
    """Of tao's follower and leader, whose counters this process is to read; None: another does."""
    process: int
    awaiters: int
    rounds: int
    round_seconds: float
    start_file: str
    """Says, once it is there, when to begin: seconds of the monotonic clock, which processes of a machine share."""


class OfShape(msgspec.Struct, frozen=True, kw_only=True):
    """All turns of one shape of load."""

    kind: str
    shape: str
    """As tables name it."""
    queries_per_operation: int
    taken: dict[str, Taken]
    """By contestant."""


class PeersResult(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes in order."""

    shapes: list[OfShape]
    warming: Warming
    checked: int
    """Answers compared, of each contestant."""


class PairResult(msgspec.Struct, frozen=True, kw_only=True):
    """By contestant."""

    taken: dict[str, Taken]


async def run_peers(job: PeersJob, tell: Callable[[str, float], None]) -> PeersResult:
    """Raises `TaoError`, or what a peer's client raises."""
    async with AsyncExitStack() as stack:
        arena = await Arena.filled(job.rivals, stack, tell)
        checked = 0
        for again in ("", " again, out of the caches"):
            tell(f"checking every contestant's answers{again}", 0.0)
            checked += await arena.check()
        counters = TaoCounters(*job.admins)
        warming = await warmed(_windows(arena, counters), job.warm, tell)
        shapes = [each for each in _shapes(job, arena) if each.kind in job.shapes]
        contenders = {
            each.kind: [each.contender(name, arena, job.server_pids[name], counters) for name in arena.peers]
            for each in shapes
        }
        turns, taken = sum(len(each) for each in contenders.values()) * (job.rounds + 1), count()
        for shape in shapes:
            for number in range(job.rounds + 1):
                for each in rotated(contenders[shape.kind], number):
                    tell(f"{shape.text}: {each.name}, round {number} of {job.rounds}", next(taken) / turns)
                    seconds = job.round_seconds if number else job.round_seconds / 4
                    if shape.kind == OPEN:
                        seconds *= _OPEN_LOOP_ROUNDS
                    each.prepare(seconds)
                    await each.take(perf_counter() + seconds, counts=number > 0)
        tell("checking every contestant's answers once more", 1.0)
        checked += await arena.check()
        return PeersResult(
            shapes=[
                OfShape(
                    kind=shape.kind,
                    shape=f"{job.rivals.subject.workload}, {shape.text}",
                    queries_per_operation=OBJECTS_OF_A_BATCH if shape.kind == BATCHES else 1,
                    taken={each.name: each.taken() for each in contenders[shape.kind]},
                )
                for shape in shapes
            ],
            warming=warming,
            checked=checked,
        )


def _windows(arena: Arena, counters: TaoCounters) -> dict[str, Window]:
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
            reads = sum(how is not How.UNKNOWN for how in hows)
            return hows.count(How.HIT) / max(1, reads) if name in CACHES else None

        return ask

    return {name: window(name) for name in arena.peers}


class _Shape(NamedTuple):
    """A kind of load, which a contestant's requests it takes, and how it puts them on."""

    kind: str
    text: str
    requests: Callable[[str], Prepared]
    drive: Callable[[Peer, Prepared], Drive]

    def contender(self, name: str, arena: Arena, server_pids: tuple[int, ...], counters: TaoCounters) -> Contender:
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


def _shapes(job: PeersJob, arena: Arena) -> list[_Shape]:
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


async def run_pair(job: PairJob, tell: Callable[[str, float], None]) -> PairResult:
    """Raises `TaoError`, or what a peer's client raises."""
    start = Path(job.start_file)
    async with AsyncExitStack() as stack:
        arena = await Arena.open(job.rivals, stack, 100 + job.process)
        contenders = [
            Contender(
                name,
                peer,
                arena.stream(name),
                closed(peer, arena.stream(name), job.awaiters),
                job.server_pids.get(name, ()),
                TaoCounters(*job.admins) if name == TAO and job.admins else None,
            )
            for name, peer in arena.peers.items()
        ]
        for each in contenders:
            seconds = job.round_seconds / 4
            each.prepare(seconds)
            await each.take(perf_counter() + seconds, counts=False)
        tell(READY, 0.0)

        async def is_started() -> bool:
            return _start_in(start) is not None

        await until(is_started, _LOOK_SECONDS)
        begins = (_start_in(start) or 0.0) + _START_IN_SECONDS
        for number in range(job.rounds):
            for each in rotated(contenders, number):
                tell(f"{each.name}, two load processes, round {number + 1} of {job.rounds}", 1.0)
                each.prepare(job.round_seconds)
                await asyncio.sleep(begins - perf_counter())
                await each.take(begins + job.round_seconds)
                begins += job.round_seconds * (1 + _DRAWING_SHARE) + _BETWEEN_TURNS_SECONDS
        return PairResult(taken={each.name: each.taken() for each in contenders})


READY: Final = "ready"
"""The step that says that a load process waits for the start."""


def _start_in(file: Path) -> float | None:
    # Whoever writes it puts it there whole.
    return float(file.read_text()) if file.exists() else None
