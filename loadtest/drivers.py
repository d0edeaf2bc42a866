"""Putting load on a server: awaiters that each wait for one answer, a constant rate, and sessions of messages.

All do as little as possible beside the client they measure, and the same for every contestant: a prepared operation, a
clock, a look at the answer's size. That answers are right in full is checked for every key before the rounds.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, Final, NamedTuple, TypeVar

from loadtest.open_loop import begin_at_rate
from loadtest.rounds import Drive, Source, TurnSamples
from tao.model.errors import InternalError
from tao.wire.session import Session
from tao.wire.v1 import session_pb2 as pb

_TIMEOUT_SECONDS: Final = 10.0
_MAX_UNDER_WAY: Final = 1_000
"""Messages unanswered at once at a constant rate; the rest begins late."""
_UNKNOWN: Final = Source.UNKNOWN
"""Looking up a member of an enumeration would cost every operation a tenth of a microsecond."""
Item = TypeVar("Item")
Ask = Callable[[Item], Awaitable[Source]]
"""Does one operation and looks at its answer. Returns the source of the answer."""


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


async def ask_call(call: Call) -> Source:
    """Make a call and look at its answer. Raises `WrongAnswer`."""
    function, arguments, size, expected = call
    got = size(await function(*arguments))
    if got != expected:
        raise WrongAnswer(f"{function.__qualname__}{arguments!r:.200} answered {got}, not {expected}")
    return _UNKNOWN


def closed(ask: Ask[Item], streams: Sequence[Iterator[Item]], failures: tuple[type[Exception], ...] = ()) -> Drive:
    """Return the load of one awaiter for each stream of operations, with one operation pending.

    A stream may be given several times; its awaiters then share it. ``failures`` are errors that are counted; any other
    ends the measurement."""

    async def one(stream: Iterator[Item], until: float, samples: TurnSamples) -> None:
        by_source = samples.by_source
        started = perf_counter()
        while started < until:
            try:
                source = await ask(next(stream))
            except StopIteration:
                return
            except failures as error:
                samples.failed[type(error).__name__] += 1
                started = perf_counter()
                continue
            ended = perf_counter()
            by_source[source].append(ended - started)
            started = ended

    async def drive(until: float, samples: TurnSamples) -> None:
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(one(stream, until, samples))

    return drive


def awaiters(count: int, calls: Sequence[Call]) -> Drive:
    """``count`` awaiters go through the calls together, each awaiting one at a time."""
    return closed(ask_call, [itertools.cycle(calls)] * count)


def separate(lists: Sequence[Sequence[Call]]) -> Drive:
    """One awaiter per list of calls, each with a connection of its own behind its calls."""
    return closed(ask_call, [itertools.cycle(calls) for calls in lists])


def at_rate(
    ask: Ask[Item], stream: Iterator[Item], per_second: float, failures: tuple[type[Exception], ...] = ()
) -> Drive:
    """Return the load of operations that begin at a constant rate; latency counts from the intended start."""

    async def drive(until: float, samples: TurnSamples) -> None:
        async def one(since: float) -> None:
            try:
                source = await ask(next(stream))
            except failures as error:
                samples.failed[type(error).__name__] += 1
            else:
                samples.by_source[source].append(perf_counter() - since)

        def skip() -> None:
            samples.failed["not asked: too many unanswered"] += 1

        await begin_at_rate(per_second, until - perf_counter(), one, skip)

    return drive


class Batch(NamedTuple):
    """One message of queries; its answer must hold ``expected`` bytes of values in all."""

    read: pb.ReadBatch
    expected: int


class _Messages:
    """Sends prepared batches over sessions, and records the latency of each answer."""

    def __init__(self, batches: Iterator[Batch], topology_version: int, samples: TurnSamples) -> None:
        self._batches: Final = batches
        self._version: Final = topology_version
        self._record: Final = samples.by_source[Source.UNKNOWN].append
        self.done: Final[asyncio.Future[None]] = asyncio.get_running_loop().create_future()

    def send(self, session: Session, started: float, on_answer: Callable[[Session, float], None]) -> None:
        """Send the next batch, whose latency counts from ``started``. ``on_answer`` receives the session and the time
        of a right answer; a wrong one ends the load."""
        batch, got = next(self._batches), 0

        def take(answer: pb.Answer) -> None:
            nonlocal got
            got += sum(map(len, answer.read.values))
            if answer.more or self.done.done():
                return
            if got != batch.expected:
                what = answer.error.message or f"answered {got} bytes, not {batch.expected}"
                self.done.set_exception(WrongAnswer(f"a batch {what}"))
                return
            ended = perf_counter()
            self._record(ended - started)
            on_answer(session, ended)

        session.send(pb.Request(topology_version=self._version, read=batch.read), _TIMEOUT_SECONDS, take)


def sessions(opened: Sequence[Session], batches: Sequence[Batch], topology_version: int) -> Drive:
    """Each session keeps one message going, the next being sent from the answer's callback."""
    shared = itertools.cycle(batches)

    async def drive(until: float, samples: TurnSamples) -> None:
        messages, left = _Messages(shared, topology_version, samples), len(opened)

        def go_on(session: Session, now: float) -> None:
            nonlocal left
            if now < until:
                messages.send(session, now, go_on)
                return
            left -= 1
            if not left:
                messages.done.set_result(None)

        for session in opened:
            messages.send(session, perf_counter(), go_on)
        await messages.done

    return drive


def sessions_at_rate(
    opened: Sequence[Session], batches: Sequence[Batch], topology_version: int, per_second: float
) -> Drive:
    """``per_second`` messages a second, over the sessions in turn, whether those before are answered or not; latency
    counts from when each should have been sent.

    The loop is kept turning meanwhile: its timers are of a millisecond, which is as long as the answers take."""
    shared, in_turn = itertools.cycle(batches), itertools.cycle(opened)

    async def drive(until: float, samples: TurnSamples) -> None:
        messages, under_way, due = _Messages(shared, topology_version, samples), 0, perf_counter()

        def answered(_session: Session, _now: float) -> None:
            nonlocal under_way
            under_way -= 1

        while (due < until or under_way) and not messages.done.done():
            now = perf_counter()
            # Messages that a stalled server holds up begin late, and their latency includes it.
            while due <= now and due < until and under_way < _MAX_UNDER_WAY:
                under_way += 1
                messages.send(next(in_turn), due, answered)
                due += 1 / per_second
            await asyncio.sleep(0)
        if messages.done.done():
            await messages.done

    return drive
