"""Make a failing plan small: as few faults and operations as still break the same invariant (delta debugging)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from tests.sim.plans import Plan
from tests.sim.runs import Outcome

Item = TypeVar("Item")
MOST_RUNS: Final = 400
"""Most runs of one shrinking; a run takes a quarter of a second."""


def shrink(failed: Outcome, run: Callable[[Plan], Outcome], most_runs: int = MOST_RUNS) -> Outcome:
    """Return the smallest outcome found that breaks the same invariant as ``failed``."""
    if failed.violation is None:
        raise ValueError("only a plan that fails can be shrunk")
    invariant = failed.violation.invariant
    best, runs = failed, 0

    def still_fails(plan: Plan) -> bool:
        nonlocal best, runs
        if runs >= most_runs:
            return False
        runs += 1
        outcome = run(plan)
        if outcome.violation is None or outcome.violation.invariant != invariant:
            return False
        best = outcome
        return True

    # Acts after the one that failed have not been played.
    acts = min(failed.plan.acts, int(failed.simulated_seconds // failed.plan.tempo.act_seconds) + 1)
    still_fails(_with(failed.plan, failed.plan.ops, failed.plan.faults, acts))
    _fewer(best.plan.faults, lambda faults: still_fails(_with(best.plan, best.plan.ops, faults)))
    _fewer(best.plan.ops, lambda ops: still_fails(_with(best.plan, ops, best.plan.faults)))
    _fewer(best.plan.faults, lambda faults: still_fails(_with(best.plan, best.plan.ops, faults)))
    return best


def _with(plan: Plan, ops: Sequence[object], faults: Sequence[object], acts: int = 0) -> Plan:
    return msgspec.structs.replace(plan, ops=tuple(ops), faults=tuple(faults), acts=acts or plan.acts)


def _fewer(items: Sequence[Item], fails: Callable[[list[Item]], bool]) -> None:
    """Leave out ever smaller sequences of the items as long as the rest fails."""
    left = list(items)
    size = max(1, len(left) // 2)
    while left:
        at = 0
        while at < len(left):
            rest = left[:at] + left[at + size :]
            if fails(rest):
                left = rest
            else:
                at += size
        if size == 1:
            return
        size //= 2
