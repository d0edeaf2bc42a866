"""The framework of all comparisons: contestants take turns in rounds, and the medians of the rounds are compared.

Turns, because a shared machine is faster in one minute than in the next; the median, because one disturbed round should
not decide. Each round begins with another contestant. Before each round the garbage collector of the load process is
configured as that of the product's servers (`settle_collector`), for every contestant alike.

A contestant is a `Trial`: a name, a `Drive` that puts load on it, and the processes whose CPU time it takes. A shape of
load is a `Comparison` of trials.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain, count
from pathlib import Path
from time import clock_gettime, perf_counter, process_time
from typing import Final

from msgspec.structs import replace

from loadtest.results import Figure, Goal, judge
from tao.runtime.process import ProcessSettings

MICRO: Final = 1e6
_CPU_OF_PROCESS: Final = 2
"""With the process id, the number of the clock that clock_getcpuclockid(3) returns: nanoseconds, where /proc has ticks
of ten milliseconds."""
_AGAIN_SECONDS: Final = 0.25
_MOST_AGAIN: Final = 20
"""Five seconds in all, after a round in which nothing was answered."""
_SERVERS: Final = ProcessSettings()


class Source(IntEnum):
    """The source of an answer; for several keys, the most expensive one."""

    HIT = 0
    """A cache had it; for tao, the follower's memory."""
    JOINED = 1
    """It waited for a fetch that had already begun."""
    MISS = 2
    """The database answered; for tao, the follower's leader."""
    UNKNOWN = 3
    """It is a write, or the source is unknown."""


class TurnSamples:
    """Latencies in seconds of the operations of one turn by the source of their answers, and the failures by kind."""

    def __init__(self) -> None:
        self.by_source: Final[list[list[float]]] = [[] for _ in Source]
        self.failed: Final[Counter[str]] = Counter()

    @property
    def answered(self) -> int:
        """The number of operations answered."""
        return sum(map(len, self.by_source))

    def ordered(self) -> list[float]:
        """Return all latencies, the shortest first."""
        return sorted(chain.from_iterable(self.by_source))


Drive = Callable[[float, TurnSamples], Awaitable[None]]
"""``drive(until, samples)``: put load on a server until the clock (`perf_counter`) says ``until``, record each
operation, and return when the last is answered. Raises `loadtest.drivers.WrongAnswer`."""

Counts = Mapping[str, float]
"""Counters by name."""
Counters = Callable[[], Awaitable[Counts]]


async def _no_counters() -> Counts:
    return {}


async def _nothing_to_prepare(_seconds: float) -> None:
    return


@dataclass(frozen=True, slots=True)
class Pace:
    """The rounds of a comparison: their number, and the seconds of each (see `loadtest.scenario.BenchSettings`)."""

    rounds: int
    round_seconds: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One contestant of a comparison."""

    contestant: str
    drive: Drive
    server_pids: Mapping[str, int]
    """The processes, by name, whose CPU time counts as the server's."""
    queries_per_operation: int = 1
    counters: Counters = _no_counters
    """Read before and after each turn, outside of what is measured; a round has the differences."""
    prepare: Callable[[float], Awaitable[None]] = _nothing_to_prepare
    """Called before each turn with the seconds that it will last."""
    client_pids: tuple[int, ...] = ()
    """Load processes beside this one."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One shape of load and its contestants. ``yardstick`` names the one that the others are compared with."""

    shape: str
    trials: tuple[Trial, ...]
    yardstick: str | None = None
    aims: Mapping[str, tuple[Goal, ...]] = field(default_factory=dict)
    """The goals of each contestant."""
    stretch: float = 1.0
    """Factor by which its rounds are longer than others."""


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one turn: seconds elapsed and of CPU, by server, and the counters' differences."""

    elapsed: float
    samples: TurnSamples
    server_cpu: Counts
    client_cpu: float
    counts: Counts


Turns = dict[str, list[Round]]
"""The rounds of each contestant."""


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process so far. Raises `ProcessLookupError` when there is none."""
    try:
        return clock_gettime(~pid << 3 | _CPU_OF_PROCESS)
    except OSError as error:
        raise ProcessLookupError(f"there is no process {pid}") from error


def children_of(pid: int) -> list[int]:
    """Return the process ids of the children that the first thread of a process has; none when it has ended."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def cpu_with_children(pid: int) -> float:
    """Return the CPU seconds of a process and of its children, such as PostgreSQL's, which serve one connection each.

    Raises `ProcessLookupError` when there is no such process."""
    seconds = cpu_seconds(pid)
    for child in children_of(pid):
        with suppress(ProcessLookupError):
            seconds += cpu_seconds(child)
    return seconds


def since(before: Counts, after: Counts) -> Counts:
    """Return what each counter grew by."""
    return {name: value - before[name] for name, value in after.items()}


async def run_round(trial: Trial, seconds: float) -> Round:
    """Run one turn. Raises what the drive raises.

    A turn that the machine has slept through goes on, within bounds, until something is answered."""

    def server_cpu() -> Counts:
        return {name: cpu_with_children(pid) for name, pid in trial.server_pids.items()}

    def client_cpu() -> float:
        return process_time() + sum(map(cpu_seconds, trial.client_pids))

    await trial.prepare(seconds)
    settle_collector()
    samples = TurnSamples()
    counts, server_before, client_before, started = await trial.counters(), server_cpu(), client_cpu(), perf_counter()
    await trial.drive(started + seconds, samples)
    for _ in range(_MOST_AGAIN):
        if samples.answered:
            break
        await trial.drive(perf_counter() + _AGAIN_SECONDS, samples)
    elapsed, client, server = (
        perf_counter() - started,
        client_cpu() - client_before,
        since(server_before, server_cpu()),
    )
    return Round(elapsed, samples, server, client, since(counts, await trial.counters()))


async def take_turns(comparison: Comparison, pace: Pace, on_round: Callable[[str], None]) -> Turns:
    """Let the contestants take turns. ``on_round`` receives the shape and contestant of each turn before it begins. A
    first, short turn of each warms it and is not counted. Raises what the drives raise."""
    taken: Turns = {trial.contestant: [] for trial in comparison.trials}
    for number in range(pace.rounds + 1):
        first = number % len(comparison.trials)
        for trial in (*comparison.trials[first:], *comparison.trials[:first]):
            what = f"round {number} of {pace.rounds}" if number else "warming"
            on_round(f"{comparison.shape}: {trial.contestant}, {what}")
            seconds = comparison.stretch * pace.round_seconds
            turn = await run_round(trial, seconds if number else seconds / 4)
            if number:
                taken[trial.contestant].append(turn)
    return taken


async def take_all_turns(
    comparisons: Sequence[Comparison], pace: Pace, on_round: Callable[[str, float], None]
) -> list[Turns]:
    """Run several comparisons in turn. ``on_round`` receives the text and the finished part before each turn."""
    total = sum(len(comparison.trials) for comparison in comparisons) * (pace.rounds + 1)
    taken = count()
    return [await take_turns(each, pace, lambda text: on_round(text, next(taken) / total)) for each in comparisons]


async def compare_all(
    comparisons: Sequence[Comparison], pace: Pace, on_round: Callable[[str, float], None]
) -> list[Figure]:
    """Run several comparisons in turn; return their figures."""
    turns = await take_all_turns(comparisons, pace, on_round)
    return [figure for each, taken in zip(comparisons, turns, strict=True) for figure in figures_of(each, taken)]


def figures_of(comparison: Comparison, turns: Turns) -> list[Figure]:
    """Return the figure of each contestant, with its ratios and verdicts. Raises `ValueError` when a round has no
    answer."""
    figures = {each.contestant: _figure(comparison.shape, each, turns[each.contestant]) for each in comparison.trials}
    yardstick = figures[comparison.yardstick] if comparison.yardstick else None
    found: list[Figure] = []
    for name, figure in figures.items():
        judged = replace(figure, verdicts=[judge(aim, figures, name) for aim in comparison.aims.get(name, ())])
        if yardstick is not None and yardstick is not figure:
            judged = replace(
                judged,
                yardstick=yardstick.contestant,
                rate_ratio=figure.per_second / yardstick.per_second,
                p50_ratio=figure.p50_us / yardstick.p50_us,
            )
        found.append(judged)
    return found


def _figure(shape: str, trial: Trial, rounds: Sequence[Round]) -> Figure:
    latencies = [each.samples.ordered() for each in rounds]
    operations, queries_each = sum(map(len, latencies)), trial.queries_per_operation
    p50s, p99s = ([percentile(each, part) for each in latencies] for part in (0.50, 0.99))
    rates = [len(of) * queries_each / each.elapsed for of, each in zip(latencies, rounds, strict=True)]
    return Figure(
        shape=shape,
        contestant=trial.contestant,
        queries_per_operation=queries_each,
        operations=operations,
        per_second=statistics.median(rates),
        rounds_per_second=rates,
        p50_us=statistics.median(p50s) * MICRO,
        p99_us=statistics.median(p99s) * MICRO,
        server_cpu_us=sum(sum(each.server_cpu.values()) for each in rounds) / (operations * queries_each) * MICRO,
        client_cpu_us=sum(each.client_cpu for each in rounds) / (operations * queries_each) * MICRO,
    )


def percentile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least ``part`` (0 … 1) of the values do not exceed. Raises `ValueError` for
    none."""
    if not values:
        raise ValueError("no operation was answered in a round: give it more --seconds")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def settle_collector() -> None:
    """Freeze what exists, and collect new garbage as often as a server does (`ProcessSettings.gc_allocations`).

    Call it before a measurement, so that the garbage that the measurement finds is its own."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_SERVERS.gc_allocations, _SERVERS.gc_generation_ratio, _SERVERS.gc_generation_ratio)
