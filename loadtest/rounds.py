"""Comparisons: contestants take turns, and the medians of their rounds are set side by side.

Turns, because a shared machine is faster in one minute than in the next; the median, because one disturbed round should
not decide. Before each round the garbage collector of the load process is configured as that of the product's servers
(`settle_collector`), for every contestant alike.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import perf_counter, process_time
from typing import Final, TypeVar

from msgspec.structs import replace

from loadtest.results import Figure, Goal, judge
from tao.runtime.process import ProcessSettings

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_MICRO = 1e6
_AGAIN_SECONDS: Final = 0.25
_MOST_AGAIN: Final = 20
"""Five seconds in all, after a round in which nothing was answered."""
_Taken = TypeVar("_Taken")

Drive = Callable[[float, list[float]], Awaitable[None]]
"""``drive(until, latencies)``: put load on a server until the clock (`perf_counter`) says ``until``, append the seconds
that each operation took, and return when the last is answered. Raises `WrongAnswer`."""


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
    server_pids: tuple[int, ...]
    """The processes whose CPU time counts as the server's."""
    queries_per_operation: int = 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """One shape of load and its contestants. ``yardstick`` names the one that the others are compared with."""

    shape: str
    trials: tuple[Trial, ...]
    yardstick: str | None = None
    aims: Mapping[str, tuple[Goal, ...]] = field(default_factory=dict)
    """The goals of each contestant."""


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one turn: seconds elapsed, of CPU, and of each operation."""

    elapsed: float
    latencies: list[float]
    server_cpu: float
    client_cpu: float


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process so far, in ticks of ten milliseconds. Raises `FileNotFoundError`."""
    stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # The command name stands in parentheses and may hold anything: count after the last one.
    fields = stat[stat.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


async def drive_until_answered(
    drive: Callable[[float, _Taken], Awaitable[None]], until: float, taken: _Taken, answered: Callable[[_Taken], int]
) -> None:
    """Drive until the clock says ``until``, and then on, within bounds, for as long as nothing was ``answered``: there
    are no figures of a round that a machine has slept through. The caller measures how long it was. Raises what the
    drive raises."""
    await drive(until, taken)
    for _ in range(_MOST_AGAIN):
        if answered(taken):
            return
        await drive(perf_counter() + _AGAIN_SECONDS, taken)


async def run_round(trial: Trial, seconds: float) -> Round:
    """Run one turn. Raises what the drive raises."""
    settle_collector()
    latencies: list[float] = []
    server_before = sum(map(cpu_seconds, trial.server_pids))
    client_before = process_time()
    started = perf_counter()
    await drive_until_answered(trial.drive, started + seconds, latencies, len)
    elapsed = perf_counter() - started
    client_cpu = process_time() - client_before
    return Round(elapsed, latencies, sum(map(cpu_seconds, trial.server_pids)) - server_before, client_cpu)


async def compare(
    comparison: Comparison, rounds: int, round_seconds: float, on_round: Callable[[str], None]
) -> list[Figure]:
    """Let the contestants take turns; their figures, ratios and verdicts. ``on_round`` hears the shape and contestant
    of each turn before it begins. A first, short turn of each warms it and is not counted."""
    for trial in comparison.trials:
        on_round(f"{comparison.shape}: {trial.contestant}, warming")
        await run_round(trial, round_seconds / 4)
    taken: dict[str, list[Round]] = {trial.contestant: [] for trial in comparison.trials}
    for number in range(1, rounds + 1):
        for trial in comparison.trials:
            on_round(f"{comparison.shape}: {trial.contestant}, round {number} of {rounds}")
            taken[trial.contestant].append(await run_round(trial, round_seconds))
    plain = {trial.contestant: _figure(comparison.shape, trial, taken[trial.contestant]) for trial in comparison.trials}
    return [_with_ratios(comparison, plain, contestant) for contestant in plain]


async def compare_all(
    comparisons: Sequence[Comparison], pace: Pace, on_round: Callable[[str, float], None]
) -> list[Figure]:
    """Run several comparisons in turn. ``on_round`` receives the text and the finished part before each turn."""
    total = sum(len(comparison.trials) for comparison in comparisons) * (pace.rounds + 1)
    taken, figures = count(), list[Figure]()
    for comparison in comparisons:
        figures += await compare(
            comparison, pace.rounds, pace.round_seconds, lambda text: on_round(text, next(taken) / total)
        )
    return figures


def _figure(shape: str, trial: Trial, rounds: Sequence[Round]) -> Figure:
    operations = sum(len(each.latencies) for each in rounds)
    queries = operations * trial.queries_per_operation
    rates = [len(each.latencies) * trial.queries_per_operation / each.elapsed for each in rounds]
    return Figure(
        shape=shape,
        contestant=trial.contestant,
        queries_per_operation=trial.queries_per_operation,
        operations=operations,
        per_second=statistics.median(rates),
        rounds_per_second=rates,
        p50_us=statistics.median(percentile(each.latencies, 0.50) for each in rounds) * _MICRO,
        p99_us=statistics.median(percentile(each.latencies, 0.99) for each in rounds) * _MICRO,
        server_cpu_us=sum(each.server_cpu for each in rounds) / queries * _MICRO,
        client_cpu_us=sum(each.client_cpu for each in rounds) / queries * _MICRO,
    )


def _with_ratios(comparison: Comparison, figures: dict[str, Figure], contestant: str) -> Figure:
    figure = figures[contestant]
    verdicts = [judge(aim, figures, contestant) for aim in comparison.aims.get(contestant, ())]
    if comparison.yardstick is None or comparison.yardstick == contestant:
        return replace(figure, verdicts=verdicts)
    yardstick = figures[comparison.yardstick]
    return replace(
        figure,
        yardstick=comparison.yardstick,
        rate_ratio=figure.per_second / yardstick.per_second,
        p50_ratio=figure.p50_us / yardstick.p50_us,
        verdicts=verdicts,
    )


def percentile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least ``part`` (0 … 1) of the values do not exceed. Raises `ValueError` for
    none."""
    if not values:
        raise ValueError("no operation was answered in a round: give it more --seconds")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


_SERVERS: Final = ProcessSettings()


def settle_collector() -> None:
    """Freeze what exists, and collect new garbage as rarely as a server does (`ProcessSettings.gc_allocations`).

    Call it before a measurement, so that the garbage that the measurement finds is its own."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_SERVERS.gc_allocations, _SERVERS.gc_generation_ratio, _SERVERS.gc_generation_ratio)
