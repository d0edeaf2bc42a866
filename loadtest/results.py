"""What a scenario reports: figures, their ratios to a yardstick, the aims they are held against; and the JSON of a run.

The JSON's form is stable, so that runs can be compared: fields are added, never renamed. A figure below its aim is
reported and is no failure: how fast a machine is, is not the program's fault.
"""

from __future__ import annotations

from enum import StrEnum
from importlib import metadata
from os import cpu_count, uname
from pathlib import Path
from platform import python_implementation, python_version
from typing import Any

import msgspec

FORMAT = 2
_PACKAGES = ("aiomysql", "grpcio", "hiredis", "msgspec", "protobuf", "redis", "uvloop")


class Measure(StrEnum):
    """The field of a figure that an aim looks at."""

    RATE = "per_second"
    P50 = "p50_us"
    P99 = "p99_us"
    SERVER_CPU = "server_cpu_us"


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """A bound on a figure, absolute, or as a multiple of another contestant's figure of the same shape."""

    measure: Measure
    bound: float
    against: str | None = None

    @property
    def is_upper_bound(self) -> bool:
        """Rates should be above theirs, all else below."""
        return self.measure is not Measure.RATE

    def describe(self) -> str:
        """For the table: ``≥ 3 × redis``."""
        sign = "≤" if self.is_upper_bound else "≥"
        unit = "/s" if self.measure is Measure.RATE else " µs"
        return f"{sign} {self.bound:g} × {self.against}" if self.against else f"{sign} {self.bound:,g}{unit}"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """An aim, what was measured, and whether that meets it."""

    aim: Aim
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
    """Of an operation; the median of the rounds' values, as is ``p99_us``."""
    p99_us: float
    server_cpu_us: float
    """Per query, of all server processes that the contestant keeps busy."""
    client_cpu_us: float
    yardstick: str | None = None
    rate_ratio: float | None = None
    p50_ratio: float | None = None
    verdicts: list[Verdict] = []


class Quantity(msgspec.Struct, frozen=True, kw_only=True):
    """A figure that has no yardstick: a duration, a size."""

    name: str
    value: float
    unit: str


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """A table of a scenario's own; every cell stands in ``measured``, too."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    """Text; the first column is left-aligned, the others are numbers."""


class ScenarioResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one scenario found."""

    summary: str
    conditions: dict[str, str | int | float]
    figures: list[Figure] = []
    quantities: list[Quantity] = []
    listings: list[Listing] = []
    notes: list[str] = []
    measured: dict[str, Any] = {}
    """The scenario's own figures, nested, for programs; `Any`: each scenario has its form. The quantities are drawn
    from it."""
    faults: list[str] = []
    """What is wrong, however fast it was: the run's exit status is 1."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What the figures were measured on."""

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


def judge(aim: Aim, figures: dict[str, Figure], contestant: str) -> Verdict:
    """Hold a contestant's figure against an aim; ``figures`` are those of one shape. `KeyError` when one is missing."""
    value: float = getattr(figures[contestant], aim.measure)
    if aim.against is not None:
        yardstick: float = getattr(figures[aim.against], aim.measure)
        value = value / yardstick if yardstick else float("inf")
    return Verdict(aim=aim, value=value, met=value <= aim.bound if aim.is_upper_bound else value >= aim.bound)


def this_machine(servers: dict[str, str]) -> Machine:
    """``servers``: versions of the servers measured, by name."""
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
