"""A scenario, and what it is given. `loadtest.catalogue` lists them all: importing a module registers nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from loadtest.options import SECONDS, Options
from loadtest.results import ScenarioResult
from tao.model.errors import OperatorError

SCHEMA: Final = Path(__file__).with_name("schema.yaml")
"""The types of the scenarios that do not ask a published workload."""


class Progress(Protocol):
    """Shows a person what is being done."""

    def step(self, text: str, done: float = 0.0) -> None:
        """Show a step; ``done`` is the finished part of the scenario, 0 to 1."""


class Silent:
    """No progress: something else shows the step that this one is a part of."""

    def step(self, text: str, done: float = 0.0) -> None:
        """Show nothing."""


@dataclass(frozen=True, slots=True)
class PartOfProgress:
    """The progress of a part that begins at ``start`` of the whole (0 to 1) and is ``share`` of it."""

    whole: Progress
    start: float
    share: float

    def step(self, text: str, done: float = 0.0) -> None:
        self.whole.step(text, self.start + self.share * done)


@dataclass(frozen=True, slots=True)
class ProgressListener:
    """A progress that also calls ``on_step`` with the text of each step."""

    whole: Progress
    on_step: Callable[[str], None]

    def step(self, text: str, done: float = 0.0) -> None:
        self.on_step(text)
        self.whole.step(text, done)


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The settings that every scenario of a run is given."""

    work_dir: Path
    """The folder of the servers' data and logs; the runner makes it and removes it."""
    seconds: float = 5.0
    """Measured time of one contestant in one shape, all rounds together. Rounds of a second outlast the scheduler's
    whims and the ten-millisecond ticks in which the kernel counts CPU time."""
    rounds: int = 5
    """Turns of each contestant; odd, so that the median is one of them."""
    toy: bool = False
    """Little data and short rounds: proves that a scenario works, measures nothing."""
    objects_file: Path | None = None
    """Objects that `load` loads instead of generated ones."""
    edges_file: Path | None = None
    """Edges between them."""
    scenario_seconds: float = 900.0
    """Bound on one scenario, set-up included: a hung server must not hang the run."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the servers measured, which scenarios add."""

    def __post_init__(self) -> None:
        SECONDS.check(self.seconds)
        if (self.objects_file is None) != (self.edges_file is None):
            raise OperatorError("--objects and --edges belong together: edges name objects by their keys")

    @property
    def round_seconds(self) -> float:
        """The length of one turn."""
        return round(self.seconds / self.rounds, 6)


Run = Callable[[BenchSettings, Progress, Any], Awaitable[ScenarioResult]]
"""Set up what is needed, measure, and leave nothing behind, however it ends. The third argument is an instance of the
scenario's `Scenario.options` (`Any`: each scenario has its own)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A named benchmark or fault run."""

    name: str
    summary: str
    run: Run
    options: type[Options] = Options
    """The options of its own command."""
    help: str = ""
    """The help of its own command; a scenario without it has none."""
    has_plot: bool = False
    """Whether `loadtest.report.plots` can draw its figures."""
    in_bench: bool = True
    """Whether `bench` runs it; false for scenarios that break or restart servers for many minutes."""
    seconds_bound: Callable[[Any], float] | None = None
    """The bound on it by its options, set-up included, where that is another than `BenchSettings.scenario_seconds`."""
