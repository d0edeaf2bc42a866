"""Scenario `compare`: the present tree beside an earlier commit, in one run, so that a slower commit is seen.

Both trees run the same scenarios of `bench` with the same options, each with its own load processes and its own
environment, in turns: base, present, present, base, and so on. Each pair of runs gives a ratio of every figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from loadtest import options
from loadtest.compare.base_tree import Tree, base_tree, commit_of, present_tree, run_program
from loadtest.compare.ratios import BOUND, Compared, Measured, compare, measured_in, sign_interval
from loadtest.results import ScenarioResult
from loadtest.scenario import BenchSettings, Progress, Scenario
from loadtest.table import listing
from tao.model.errors import OperatorError

_ROOT: Final = Path(__file__).resolve().parents[2]
_SCENARIOS: Final = ("writes", "misses", "cached_reads", "stream")
_BUILD_SECONDS: Final = 1_800.0
_RUN_SECONDS: Final = 900.0
_COLUMNS: Final = {
    "figure": "{shape}: {measure}",
    "base": "{base:,.1f}",
    "present": "{present:,.1f}",
    "× slower": "{ratio:.3f}",
    "from": "{low:.3f}",
    "to": "{high:.3f}",
    "verdict": "{verdict}",
}


@dataclass(frozen=True, kw_only=True)
class CompareOptions(options.Options):
    """The options of the scenario."""

    base: str = options.BASE.default("HEAD")
    only: tuple[str, ...] = options.SCENARIO.default(_SCENARIOS)
    pairs: int = options.PAIRS.default(
        6,
        toy=2,
        low=2,
        help="Pairs of runs of each scenario; an even number balances which tree runs first.",
    )
    seconds: float = options.SECONDS.default(
        1.0, toy=0.1, help="Measured seconds of one contestant in one shape in one run."
    )
    objects: Path | None = options.OBJECTS_FILE.default(None)
    edges: Path | None = options.EDGES_FILE.default(None)

    def words(self) -> list[str]:
        """Return the options of `bench` that both trees are given."""
        files = {"--objects": self.objects, "--edges": self.edges}
        given = [word for flag, file in files.items() if file is not None for word in (flag, str(file.absolute()))]
        return ["--seconds", str(self.seconds), *given]


async def run(settings: BenchSettings, progress: Progress, asked: CompareOptions) -> ScenarioResult:
    """Compare this tree with the base. Raises `OperatorError`."""
    return await compare_trees(_ROOT, settings, progress, asked)


async def compare_trees(
    root: Path, settings: BenchSettings, progress: Progress, asked: CompareOptions
) -> ScenarioResult:
    """Compare the tree of a repository with one of its commits. Raises `OperatorError`."""
    commit, present = await commit_of(root, asked.base), await present_tree(root)
    base = await base_tree(root, commit, progress, settings.work_dir / "build.log")
    known, known_to_base = await present.scenarios(), await base.scenarios()
    unknown = [name for name in asked.only if name not in known]
    if unknown:
        raise OperatorError(f"there is no scenario {', '.join(unknown)}; there are {', '.join(known)}")
    turns = _Turns(settings, progress, asked, [name for name in asked.only if name in known_to_base], (base, present))
    found = {name: compare(pairs) for name, pairs in (await turns.taken()).items()}
    rows = {
        name: [{**msgspec.to_builtins(each), "verdict": each.verdict} for each in of.slowdowns]
        for name, of in found.items()
    }
    _, _, confidence = sign_interval(range(asked.pairs))
    return ScenarioResult(
        summary=f"{present.name} beside {base.name}",
        conditions={"pairs": asked.pairs, "seconds": asked.seconds, "interval_holds": f"{confidence:.1%}"},
        listings=[listing(_COLUMNS, of, title=name) for name, of in rows.items()],
        notes=[*_NOTES, *_skipped(base, [name for name in asked.only if name not in known_to_base], found)],
        aims=[each.aim(name) for name, of in found.items() for each in of.slowdowns if not each.is_control],
        measured={"base": commit, "present": present.name, "confidence": confidence, "slowdowns": rows},
        faults=turns.faults,
    )


_NOTES: Final = [
    f"× slower: the median of the pairs; above 1 the present tree is slower, above {BOUND:g} it misses its aim.",
    "Slower, faster: the whole interval lies on one side of 1. A control is no part of the project.",
]


def _skipped(base: Tree, scenarios: Sequence[str], found: dict[str, Compared]) -> list[str]:
    lacking = {name: "; ".join(of.missing) for name, of in found.items() if of.missing}
    return [
        *(f"{name}: skipped, {base.name} has no such scenario." for name in scenarios),
        *(f"{name}: skipped, not in every run or 0: {keys}." for name, keys in lacking.items()),
    ]


class _Turns:
    """The runs of both trees, in turns."""

    def __init__(
        self,
        settings: BenchSettings,
        progress: Progress,
        asked: CompareOptions,
        names: list[str],
        trees: tuple[Tree, Tree],
    ) -> None:
        """``names`` are the scenarios, ``trees`` the base and the present one."""
        self._settings: Final = settings
        self._progress: Final = progress
        self._asked: Final = asked
        self._names: Final = names
        self._trees: Final = trees
        self.faults: Final[list[str]] = []
        """What the runs found wrong, whatever the speed."""

    async def taken(self) -> dict[str, list[tuple[Measured, Measured]]]:
        """Return the pairs of each scenario, the base first. Raises `OperatorError` when a run has no result."""
        pairs: dict[str, list[tuple[Measured, Measured]]] = {name: [] for name in self._names}
        number, total = 0, 2 * self._asked.pairs * len(self._names)
        for pair in range(self._asked.pairs):
            for name in self._names:
                of_tree: dict[Tree, Measured] = {}
                for tree in self._trees if pair % 2 == 0 else self._trees[::-1]:
                    what = "base" if tree is self._trees[0] else "present"
                    text = f"pair {pair + 1} of {self._asked.pairs}: {name}, {what} ({tree.name})"
                    self._progress.step(text, number / total)
                    of_tree[tree] = await self._run(tree, name, self._settings.work_dir / f"{pair}-{name}-{what}")
                    number += 1
                before, after = (of_tree[tree] for tree in self._trees)
                pairs[name].append((before, after))
        return pairs

    async def _run(self, tree: Tree, name: str, files: Path) -> Measured:
        json_file, log = files.with_suffix(".json"), files.with_suffix(".log")
        words = [tree.python, "-m", "loadtest", "bench", "--only", name, *self._asked.words()]
        words += ["--json", str(json_file), *(["--toy"] if self._settings.toy else [])]
        status, tail = await run_program(words, tree.folder, log)
        report: dict[str, Any] = msgspec.json.decode(json_file.read_bytes()) if json_file.exists() else {}
        if name not in report.get("scenarios", {}):
            raise OperatorError(f"{name} of {tree.name} ended with status {status} and no result:\n{tail}")
        result = report["scenarios"][name]
        self.faults.extend(f"{tree.name}: {name}: {fault}" for fault in result.get("faults", []))
        return measured_in(result)


SCENARIO: Final = Scenario(
    name="compare",
    summary="this tree beside an earlier commit, in pairs: nothing more than 3 % slower",
    run=run,
    options=CompareOptions,
    help="""Compare this tree with an earlier commit, in pairs of short runs of the scenarios of `bench`.

    The commit is checked out and built under build/compare, once. The exit status never depends on speed.""",
    in_bench=False,
    seconds_bound=lambda asked: _BUILD_SECONDS + 2 * asked.pairs * len(asked.only) * _RUN_SECONDS,
)
