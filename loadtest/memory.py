"""Scenario `memory`: what a cached entry takes of the process's memory, and what a hit costs in it.

Memory is the growth of a process that fills one cache, divided by the entries it then holds: headers, slots, queues and
whatever the allocator wastes are in it. Counts are measured in a full table, as in a server that has run for a while;
while a table grows they take up to three times that. Beside the packed counts, in the same run: dictionaries, as the
lists have them, and the twin in Python.
"""

from __future__ import annotations

from typing import Final

import msgspec

from loadtest.client_process import run_job
from loadtest.memory_process import MemoryJob
from loadtest.results import Aim, Quantity, ScenarioResult, at_most
from loadtest.scenario import BenchSettings, Progress, Scenario, Silent
from loadtest.table import listing, met
from tao.cache.packed import CORE

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
_MIX_NAME: Final = "the paper's sizes"
_MIX: Final = MemoryJob("mix", 100_000)
_HITS: Final = MemoryJob("hits", 20_000)
_HIT_AIM_US: Final = 1.5
_ENTRIES_COLUMNS: Final = {"of one": "{name}", "bytes": "{each:,.1f}", "believed / real": "{share:.3f}", "aim": "{aim}"}
_HITS_COLUMNS: Final = {
    "operation": "{name}",
    **{title: f"{{{core}:.2f}}" for core, title in _CORES.items()},
    "ratio to dictionaries": "{ratio:.2f}",
    "aim": "{aim}",
}


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Measure each kind of entry and each operation in a process of its own. Raises `OperatorError`."""
    measures = _MEASURES[:_TOY_MEASURES] if settings.toy else _MEASURES
    steps = len(measures) + 1 + len(_CORES)
    rows, aims, measured = list[dict[str, object]](), list[Aim](), dict[str, _FIGURES]()
    for number, each in enumerate(measures):
        progress.step(each.name, number / steps)
        figures = await _measured(each.job, settings)
        size = figures["bytes_per_entry"] / (each.job.edges or 1)
        measured[each.name] = {**figures, "bytes_each": size} | ({"aim": each.aim} if each.aim else {})
        aim = None if each.aim is None else at_most(f"at most {each.aim:,.0f} bytes", size, each.aim, each.name)
        aims += [aim] if aim else []
        rows.append({"name": each.name, "each": size, "share": _share(figures), "aim": _verdict(aim)})
    progress.step(_MIX_NAME, len(measures) / steps)
    measured[_MIX_NAME] = await _measured(_MIX, settings)
    share = _share(measured[_MIX_NAME])
    aims.append(at_most("account of memory within 0.1 of the real growth", abs(share - 1), 0.1, _MIX_NAME))
    rows.append({"name": f"{_MIX_NAME}, all kinds", "each": None, "share": share, "aim": _verdict(aims[-1])})
    hits: dict[str, _FIGURES] = {core: {} for core in _CORES}
    for turn in range(1 if settings.toy else _TURNS):  # the least of turns: other work on the machine only adds
        for number, core in enumerate(_CORES):
            progress.step(f"hits, {core}", (len(measures) + 1 + number + turn / _TURNS) / steps)
            found = await _measured(msgspec.structs.replace(_HITS, core=core), settings)
            hits[core] = {name: min(cost, hits[core].get(name, cost)) for name, cost in found.items()}
    measured |= {f"hits, {core}": figures for core, figures in hits.items()}
    hit_aims = [at_most(f"at most {_HIT_AIM_US:g} µs of CPU", us, _HIT_AIM_US, n) for n, us in hits["packed"].items()]
    hit_rows = [
        {
            "name": aim.shape,
            **{core: hits[core][aim.shape] for core in _CORES},
            "ratio": aim.value / hits["dictionary"][aim.shape],
            "aim": _verdict(aim),
        }
        for aim in hit_aims
    ]
    return ScenarioResult(
        conditions={"core": CORE, "entries": _MEASURES[0].job.entries},
        quantities=[
            Quantity(name=each.name, value=measured[each.name]["bytes_each"], unit="bytes") for each in measures
        ],
        listings=[
            listing(_ENTRIES_COLUMNS, rows, "memory"),
            listing(_HITS_COLUMNS, hit_rows, "CPU of a hit in the process, µs"),
        ],
        notes=[
            "Every count has its version, also the 10 bytes of a list without edges; the aims are for those without."
        ],
        aims=[*aims, *hit_aims],
        measured=measured,
    )


SCENARIO: Final = Scenario(
    name="memory",
    summary="bytes of resident memory for a cached entry, and CPU of a hit, in one process",
    run=run,
)


def _share(figures: _FIGURES) -> float:
    return figures["believed_bytes"] / figures["grown_bytes"]


def _verdict(aim: Aim | None) -> str | None:
    return None if aim is None else f"≤ {aim.bound:,g}: {met(aim.met)}"


async def _measured(job: MemoryJob, settings: BenchSettings) -> _FIGURES:
    """Run one job in a process of its own; returns its figures."""
    if settings.toy:
        job = msgspec.structs.replace(job, entries=max(job.entries // _TOY_PART, 10))
    return await run_job(job, Silent(), settings.work_dir / "memory.log", _FIGURES)
