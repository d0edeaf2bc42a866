"""Scenario `memory`: what a cached entry takes of the process's memory, and what a hit costs in it.

Memory is the growth of a process that fills one cache, divided by the entries it then holds: headers, slots, queues and
whatever the allocator wastes are in it. Counts are measured in a full table, as in a server that has run for a while;
while a table grows they take up to three times that. Beside the packed counts, in the same run: dictionaries, as the
lists have them, and the twin in Python.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Final

import msgspec

from loadtest.memory_process import MemoryJob
from loadtest.results import Aim, Listing, Quantity, ScenarioResult, at_most
from loadtest.scenario import BenchSettings, Progress, Scenario
from tao.cache.packed import CORE
from tao.model.errors import OperatorError

_ROOT: Final = Path(__file__).resolve().parent.parent
_OBJECT_BYTES: Final = 673
_EDGE_DATA_BYTES: Final = 98
_TOY_PART: Final = 250
_TOY_MEASURES: Final = 5
"""The first, one of each kind of entry: every measurement is a process of its own."""
_TURNS: Final = 3
_CORES: Final = {"packed": f"packed ({CORE})", "dictionary": "dictionaries", "python": "packed (python)"}
_FIGURES = dict[str, float]


class _Measure(msgspec.Struct, frozen=True):
    """One measurement, and the aim in bytes, if there is one."""

    name: str
    job: MemoryJob
    aim: float | None = None


_MEASURES: Final = (
    _Measure("count", MemoryJob("count", 1_000_000), 14),
    _Measure("count, dictionaries", MemoryJob("count", 1_000_000, core="dictionary")),
    _Measure("nothing there", MemoryJob("negative", 1_000_000), 10),
    _Measure("object of 673 bytes", MemoryJob("object", 1_000_000, 0, _OBJECT_BYTES), 1.25 * _OBJECT_BYTES),
    _Measure("edge in a list of 10", MemoryJob("list", 100_000, 10), 32),
    _Measure("edge in a list of 100", MemoryJob("list", 10_000, 100), 24),
    _Measure("edge in a list of 6,000", MemoryJob("list", 300, 6_000), 24),
    _Measure("edge with 98 bytes in a list of 10", MemoryJob("list", 100_000, 10, _EDGE_DATA_BYTES)),
    _Measure("edge with 98 bytes in a list of 100", MemoryJob("list", 10_000, 100, _EDGE_DATA_BYTES)),
    _Measure("edge with 98 bytes in a list of 6,000", MemoryJob("list", 300, 6_000, _EDGE_DATA_BYTES)),
)
_MIX: Final = MemoryJob("mix", 100_000)
_HITS: Final = MemoryJob("hits", 20_000)
_HIT_AIM_US: Final = 1.5
_BATCH_AIM_US: Final = 3.0
_BATCH: Final = "a batch of 100"


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Measure each kind of entry and each operation in a process of its own. Raises `OperatorError`."""
    rows: list[tuple[str, ...]] = []
    aims: list[Aim] = []
    quantities: list[Quantity] = []
    measured: dict[str, _FIGURES] = {}
    measures = _MEASURES[:_TOY_MEASURES] if settings.toy else _MEASURES
    steps = len(measures) + 1 + len(_CORES)
    for number, each in enumerate(measures):
        progress.step(each.name, number / steps)
        figures = await _measured(each.job, toy=settings.toy)
        per_entry = figures["bytes_per_entry"] / (each.job.edges or 1)
        measured[each.name] = {**figures, "bytes_each": per_entry} | ({"aim": each.aim} if each.aim else {})
        quantities.append(Quantity(name=each.name, value=per_entry, unit="bytes"))
        if each.aim is not None:
            aims.append(at_most(f"at most {each.aim:,.0f} bytes", per_entry, each.aim, each.name))
        aim = "" if each.aim is None else f"≤ {each.aim:,.0f}: {'met' if per_entry <= each.aim else 'not met'}"
        rows.append((each.name, f"{per_entry:,.1f}", f"{figures['believed_bytes'] / figures['grown_bytes']:.3f}", aim))
    progress.step("the paper's sizes", len(measures) / steps)
    mix = measured["the paper's sizes"] = await _measured(_MIX, toy=settings.toy)
    share = mix["believed_bytes"] / mix["grown_bytes"]
    aims.append(at_most("account of memory within 0.1 of the real growth", abs(share - 1), 0.1, "the paper's sizes"))
    rows.append(("the paper's sizes, all kinds", "", f"{share:.3f}", f"± 0.1: {'met' if aims[-1].met else 'not met'}"))
    hits: dict[str, _FIGURES] = {core: {} for core in _CORES}
    for turn in range(1 if settings.toy else _TURNS):  # the least of turns: other work on the machine only adds
        for number, core in enumerate(_CORES):
            progress.step(f"hits, {core}", (len(measures) + 1 + number + turn / _TURNS) / steps)
            found = await _measured(msgspec.structs.replace(_HITS, core=core), toy=settings.toy)
            hits[core] = {name: min(cost, hits[core].get(name, cost)) for name, cost in found.items()}
    measured |= {f"hits, {core}": figures for core, figures in hits.items()}
    listings = [
        Listing(title="memory", columns=("of one", "bytes", "believed / real", "aim"), rows=rows),
        Listing(
            title="CPU of a hit in the process, µs",
            columns=("operation", *_CORES.values(), "ratio to dictionaries", "aim"),
            rows=[_hit_row(name, hits) for name in hits["packed"]],
        ),
    ]
    notes = [
        "Every count has its version, also the 10 bytes of a list without edges; the aims are for entries without one.",
        f"'{_BATCH}': one query of the paper's mix, from the bytes of a request to those of its answer, without I/O.",
    ]
    conditions: dict[str, str | int | float] = {"core": CORE, "entries": _MEASURES[0].job.entries}
    hit_aims = {name: _BATCH_AIM_US if name == _BATCH else _HIT_AIM_US for name in hits["packed"]}
    aims += [at_most(f"at most {aim:g} µs of CPU", hits["packed"][name], aim, name) for name, aim in hit_aims.items()]
    return ScenarioResult(
        summary=SCENARIO.summary,
        conditions=conditions,
        quantities=quantities,
        listings=listings,
        notes=notes,
        aims=aims,
        measured=measured,
    )


SCENARIO: Final = Scenario(
    name="memory",
    summary="bytes of resident memory for a cached entry, and CPU of a hit, in one process",
    run=run,
)


def _hit_row(name: str, hits: dict[str, _FIGURES]) -> tuple[str, ...]:
    cost = hits["packed"][name]
    aim = _BATCH_AIM_US if name == _BATCH else _HIT_AIM_US
    ratio = f"{cost / hits['dictionary'][name]:.2f}"
    verdict = f"≤ {aim:g}: {'met' if cost <= aim else 'not met'}"
    return (name, *(f"{hits[core][name]:.2f}" for core in _CORES), ratio, verdict)


async def _measured(job: MemoryJob, *, toy: bool) -> _FIGURES:
    """Run one job in a process of its own, which ends when this is cancelled; returns its figures."""
    if toy:
        job = msgspec.structs.replace(job, entries=max(job.entries // _TOY_PART, 10))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest.memory_process", msgspec.json.encode(job).decode(),
        cwd=_ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise OperatorError(f"{job.what} was not measured: {errors.decode(errors='replace')[-2000:]}")
    return msgspec.json.decode(output, type=_FIGURES)
