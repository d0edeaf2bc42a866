"""The result of a scenario: figures, their ratios to a yardstick, the aims; and the JSON of a run.

The JSON's form is stable, so that runs can be compared: fields are added, never renamed. A figure below its aim is
reported and is no failure: how fast a machine is, is not the program's fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from importlib import metadata
from os import cpu_count, uname
from pathlib import Path
from platform import python_implementation, python_version
from typing import Any

import msgspec

FORMAT = 2
_PACKAGES = (
    "aiomcache", "aiomysql", "asyncmy", "asyncpg", "grpcio", "hiredis", "memcachio", "msgspec", "protobuf", "redis",
    "uvloop", "valkey-glide",
)  # fmt: skip


class Measure(StrEnum):
    """The field of a figure that an aim looks at."""

    RATE = "per_second"
    P50 = "p50_us"
    P99 = "p99_us"
    SERVER_CPU = "server_cpu_us"


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """A bound on a figure, absolute, or as a multiple of another contestant's figure of the same shape."""

    measure: Measure
    bound: float
    against: str | None = None

    @property
    def is_upper_bound(self) -> bool:
        """Whether values above the bound miss the goal, which holds for all but rates."""
        return self.measure is not Measure.RATE

    def describe(self) -> str:
        """Return the text for the table: ``≥ 3 × redis``."""
        sign = "≤" if self.is_upper_bound else "≥"
        unit = "/s" if self.measure is Measure.RATE else " µs"
        return f"{sign} {self.bound:g} × {self.against}" if self.against else f"{sign} {self.bound:,g}{unit}"


class GoalVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """A figure's goal, the value that was measured, and whether it meets the goal."""

    aim: Goal
    value: float
    met: bool


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One contestant in one shape of load. A *query* is one object, list, count or write; an *operation* is what one
    awaiter waits for, of ``queries_per_operation`` queries. Ratios are to the yardstick's figure, None for itself."""

    shape: str
    contestant: str
    queries_per_operation: int
    operations: int
    per_second: float
    """Queries; the median of the rounds."""
    rounds_per_second: list[float]
    p50_us: float
    """Latency of an operation; the median of the rounds' values, as is ``p99_us``."""
    p99_us: float
    server_cpu_us: float
    """CPU time per query of all server processes that the contestant keeps busy."""
    client_cpu_us: float
    yardstick: str | None = None
    rate_ratio: float | None = None
    p50_ratio: float | None = None
    verdicts: list[GoalVerdict] = []


class Quantity(msgspec.Struct, frozen=True, kw_only=True):
    """A figure that has no yardstick: a duration, a size."""

    name: str
    value: float
    unit: str


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a scenario is to reach, and whether it did; every scenario's JSON has a list of them (`aims`)."""

    aim: str
    """The aim in words, with its bound."""
    shape: str = ""
    """The shape of load, or whatever else distinguishes aims of one name."""
    value: float
    bound: float
    met: bool


def at_most(aim: str, value: float, bound: float, shape: str = "") -> Aim:
    """Return an aim whose value may not exceed the bound."""
    return Aim(aim=aim, shape=shape, value=value, bound=bound, met=value <= bound)


def at_least(aim: str, value: float, bound: float, shape: str = "") -> Aim:
    """Return an aim whose value may not be below the bound."""
    return Aim(aim=aim, shape=shape, value=value, bound=bound, met=value >= bound)


def missed(demands: Sequence[Aim], examples: Sequence[str] = ()) -> list[str]:
    """Return the faults of a run: the aims that it had to reach and did not, then examples of what was wrong."""
    faults = [
        f"{each.aim}{f' ({each.shape})' if each.shape else ''}: {each.value:,g}" for each in demands if not each.met
    ]
    return [*faults, *examples] if faults else []


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """A table of one scenario; every cell is in ``measured``, too."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    """Text; the first column is left-aligned, the others are numbers."""


Scalar = str | int | float | None


def listings_of(measured: Mapping[str, Any], *, lists: bool = False) -> list[Listing]:
    """Return tables of a scenario's own figures: one of the single values, and one for each form of record.

    Lists, which are long logs and timelines, are left out unless ``lists`` is set. A name that ends with a unit behind
    a colon (``build:seconds``) has the unit in a column of its own. `Any`: nested values."""
    if not lists:
        measured = {name: value for name, value in measured.items() if not isinstance(value, list)}
    values: list[tuple[str, Scalar]] = []
    records: dict[tuple[str, ...], list[tuple[str, Mapping[str, Scalar]]]] = {}
    for name, leaf in _leaves(measured):
        if isinstance(leaf, Mapping):
            records.setdefault(tuple(leaf), []).append((name, leaf))
        else:
            values.append((name, leaf))
    tables: list[Listing] = []
    for columns, rows in records.items():
        if len(rows) == 1:
            values += [(f"{rows[0][0]}, {key}", value) for key, value in rows[0][1].items()]
            continue
        cells: list[tuple[str, ...]] = [(_words(name), *map(_cell, record.values())) for name, record in rows]
        tables.append(Listing(title="", columns=("", *map(_words, columns)), rows=cells))
    parts = [(*name.partition(":")[::2], _cell(value)) for name, value in values]
    single = [(_words(name), value, _words(unit)) for name, unit, value in parts]
    return [*([Listing(title="", columns=("figure", "value", "unit"), rows=list(single))] if single else []), *tables]


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Scalar | Mapping[str, Scalar]]]:
    """Yield the single values, and the records: named mappings of single values. `Any`: nested values."""
    if isinstance(value, Mapping):
        if name and len(value) > 1 and not any(isinstance(each, Mapping | list) for each in value.values()):
            yield name, value
            return
        for key, each in value.items():
            yield from _leaves(each, f"{name}, {key}" if name else key)
    elif isinstance(value, list):
        for number, each in enumerate(value, 1):
            yield from _leaves(each, f"{name} {number}")
    else:
        yield name, value


def _words(name: str) -> str:
    return name.replace("_", " ")


def _cell(value: Scalar) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1 else f"{value:,.2f}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else value


Conditions = dict[str, str | int | float]


class ScenarioResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one scenario."""

    conditions: Conditions
    summary: str = ""
    """The scenario's own summary where it is empty."""
    figures: list[Figure] = []
    quantities: list[Quantity] = []
    listings: list[Listing] = []
    notes: list[str] = []
    aims: list[Aim] = []
    measured: dict[str, Any] = {}
    """The scenario's own figures, nested, for programs; `Any`: each scenario has its form. The quantities are drawn
    from it."""
    faults: list[str] = []
    """Errors that were found, whatever the speed: the run's exit status is 1."""


def result_of(
    conditions: Conditions,
    measured: dict[str, Any],
    demands: Sequence[Aim] = (),
    *,
    aims: Sequence[Aim] = (),
    examples: Sequence[str] = (),
    notes: Sequence[str] = (),
    lists: bool = False,
) -> ScenarioResult:
    """Return the result of a scenario whose tables follow from its figures; ``lists`` as for `listings_of`.

    The run fails when it misses one of ``demands``; ``examples`` are of what was wrong then. ``aims`` are those that it
    may miss. `Any`: nested values."""
    return ScenarioResult(
        conditions=conditions,
        listings=listings_of(measured, lists=lists),
        notes=[*notes],
        aims=[*demands, *aims],
        measured=measured,
        faults=missed(demands, examples),
    )


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that the figures were measured on."""

    cpu: str
    cpus: int
    memory_mb: int
    kernel: str
    python: str
    versions: dict[str, str]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the benchmarks, as `--json` writes it."""

    format: int = FORMAT
    machine: Machine
    scenarios: dict[str, ScenarioResult] = {}
    failures: dict[str, str] = {}
    """Why a scenario has no result, by its name."""
    interrupted: bool = False


def judge(aim: Goal, figures: dict[str, Figure], contestant: str) -> GoalVerdict:
    """Compare a contestant's figure with its goal; ``figures`` are those of one shape. Raises `KeyError` when one is
    missing."""
    value: float = getattr(figures[contestant], aim.measure)
    if aim.against is not None:
        yardstick: float = getattr(figures[aim.against], aim.measure)
        value = value / yardstick if yardstick else float("inf")
    return GoalVerdict(aim=aim, value=value, met=value <= aim.bound if aim.is_upper_bound else value >= aim.bound)


def aims_of(figures: Sequence[Figure]) -> list[Aim]:
    """Return the verdicts on all figures as aims."""
    return [
        Aim(
            aim=f"{figure.contestant}: {verdict.aim.measure} {verdict.aim.describe()}",
            shape=figure.shape,
            value=verdict.value,
            bound=verdict.aim.bound,
            met=verdict.met,
        )
        for figure in figures
        for verdict in figure.verdicts
    ]


def this_machine(servers: dict[str, str]) -> Machine:
    """Describe this machine; ``servers`` are the versions of the servers measured, by name."""
    versions = {name: metadata.version(name) for name in _PACKAGES}
    system = uname()
    return Machine(
        cpu=_first_value(Path("/proc/cpuinfo"), "model name") or system.machine,
        cpus=cpu_count() or 1,
        memory_mb=int((_first_value(Path("/proc/meminfo"), "MemTotal") or "0").split()[0]) // 1024,
        kernel=f"{system.sysname} {system.release}",
        python=f"{python_implementation()} {python_version()}",
        versions={**versions, **servers},
    )


def _first_value(path: Path, key: str) -> str | None:
    """The first ``key : value`` of a file of /proc; None when this system has no such file or line."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
