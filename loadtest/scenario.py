"""What a scenario is, what it is given, and the registry that a run chooses from.

The registry is a value that is built and passed on (`loadtest.catalogue`): importing a module registers nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from loadtest.results import ScenarioResult
from tao.model.errors import OperatorError


class Progress(Protocol):
    """Tells a person what goes on."""

    def step(self, text: str, done: float = 0.0) -> None:
        """``done``: the finished part of the scenario, 0 … 1."""


def check_bounds(bounds: Mapping[str, tuple[float, float, float]]) -> None:
    """Option → what was given, and the least and the most that may be. Raises `OperatorError` that names the option."""
    for flag, (value, low, high) in bounds.items():
        if not low <= value <= high:
            raise OperatorError(f"{flag} {value:,}: give a number from {low:,} to {high:,}")


@dataclass(frozen=True, slots=True)
class PartOfProgress:
    """The progress of a part that begins at ``start`` of the whole (0 … 1) and is ``share`` of it."""

    whole: Progress
    start: float
    share: float

    def step(self, text: str, done: float = 0.0) -> None:
        """See `Progress`."""
        self.whole.step(text, self.start + self.share * done)


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What every scenario of a run is given."""

    work_dir: Path
    """For the servers' data and logs; the runner makes it and removes it."""
    seconds: float = 5.0
    """Measured time of one contestant in one shape, all rounds together. Rounds of a second outlast the scheduler's
    whims and the ten-millisecond ticks in which the kernel counts CPU time."""
    rounds: int = 5
    """Turns of each contestant; odd, so that the median is one of them."""
    toy: bool = False
    """Little data and short rounds: proves that a scenario works, measures nothing."""
    objects_file: Path | None = None
    """For `load`: objects to load instead of generated ones."""
    edges_file: Path | None = None
    """For `load`: edges between them."""
    scenario_seconds: float = 900.0
    """Bound on one scenario, set-up included: a hung server must not hang the run."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the servers measured, which scenarios add."""

    def __post_init__(self) -> None:
        check_bounds({"--seconds": (self.seconds, 0.001, 3_600)})
        if (self.objects_file is None) != (self.edges_file is None):
            raise OperatorError("--objects and --edges belong together: edges name objects by their keys")

    @property
    def round_seconds(self) -> float:
        """Length of one turn."""
        return round(self.seconds / self.rounds, 6)


Run = Callable[[BenchSettings, Progress], Awaitable[ScenarioResult]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A named benchmark. ``run`` sets up what it needs, measures, and leaves nothing behind, however it ends."""

    name: str
    summary: str
    run: Run
    most_seconds: float | None = None
    """Bound on it, set-up included, where that is another than `BenchSettings.scenario_seconds`."""


class Registry(Mapping[str, Scenario]):
    """Scenarios by name, in the order given. Raises `OperatorError` for a name given twice."""

    def __init__(self, scenarios: Sequence[Scenario]) -> None:
        self._by_name = {scenario.name: scenario for scenario in scenarios}
        if len(self._by_name) != len(scenarios):
            raise OperatorError("two scenarios have one name")

    def __getitem__(self, name: str) -> Scenario:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def choose(self, names: Sequence[str]) -> list[Scenario]:
        """Those named, in the registry's order; all when none is named. Raises `OperatorError` for an unknown name."""
        unknown = [name for name in names if name not in self._by_name]
        if unknown:
            raise OperatorError(f"there is no scenario {', '.join(unknown)}; there are {', '.join(self._by_name)}")
        return [scenario for name, scenario in self._by_name.items() if not names or name in names]
