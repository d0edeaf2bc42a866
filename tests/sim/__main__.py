"""Run the simulation: ``python -m tests.sim --seeds N [--start S] [--minutes M] [--jobs J]``.

Each seed makes its own plan. A plan that breaks an invariant is printed, made small, printed again with its last
events, and kept as a file that ``--plan FILE`` plays again; the exit status is 1 then. ``--variants`` breaks the
product on purpose instead, and fails when the checks do not notice. ``--lost-masters HOURS`` plays `lost_masters`
instead: watchers, leases and links around one database.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tests.sim.lost_masters import Findings, play_hours
from tests.sim.plans import MEAN_ACT_SECONDS, Fault, Op, Plan, make_plan, tempo_of
from tests.sim.runs import Outcome, run
from tests.sim.shrinking import shrink
from tests.sim.variants import VARIANTS, find

_LAST_EVENTS = 60
_PROGRESS_SEEDS = 100
_HOURS_AT_ONCE = 20


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds (%(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--minutes", type=float, default=20.0, help="simulated, of each on average (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that play seeds side by side (%(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of real time, after which no seed is begun")
    parser.add_argument("--first", action="store_true", help="stop at the first seed that fails")
    parser.add_argument("--plan", type=Path, help="play this plan, which a failure has left, and show what happens")
    parser.add_argument("--keep", type=Path, default=Path(), help="folder for plans that fail (%(default)s)")
    parser.add_argument("--variants", action="store_true", help="break the product, and see that it is noticed")
    parser.add_argument("--lost-masters", type=int, metavar="HOURS", help="count false promotions in so many hours")
    chosen = parser.parse_args(arguments)
    if chosen.lost_masters is not None:
        return _play_lost_masters(chosen.start, chosen.lost_masters, chosen.jobs)
    if chosen.plan is not None:
        outcome = run(msgspec.json.decode(chosen.plan.read_bytes(), type=Plan))
        _show(outcome)
        return 0 if outcome.violation is None else 1
    if chosen.variants:
        return _play_variants()
    return _sweep(chosen)


def _sweep(chosen: argparse.Namespace) -> int:
    began = time.monotonic()
    played, failed, minutes, cpu_seconds = 0, 0, 0.0, 0.0
    results: Counter[str] = Counter()
    looked_at: Counter[str] = Counter()
    reached: Counter[str] = Counter()
    for seed, outcome in _outcomes(chosen, began + chosen.seconds):
        played += 1
        minutes += outcome.simulated_seconds / 60
        cpu_seconds += outcome.cpu_seconds
        results.update(outcome.results)
        looked_at.update(outcome.looked_at)
        reached.update(outcome.reached)
        if outcome.violation is not None:
            failed += 1
            _report(seed, outcome, chosen.keep)
            if chosen.first:
                break
        if not played % _PROGRESS_SEEDS:
            _say(f"{played} seeds, {failed} failed; {minutes:.0f} minutes, {time.monotonic() - began:.0f} s")
    rate = minutes / cpu_seconds if cpu_seconds else 0.0
    _say(f"{played} seeds, {failed} failed; {minutes:.0f} simulated minutes, {rate:.1f} for each second of CPU")
    _say(f"operations: {_counted(results)}")
    _say(f"looked at: {_counted(looked_at)}")
    _say(f"bounds reached: {_counted(reached)}")
    return 1 if failed else 0


def _outcomes(chosen: argparse.Namespace, until: float) -> Iterator[tuple[int, Outcome]]:
    """Yield the outcomes in the order of their seeds."""
    # All seeds get the same number of acts, although those with quiet stretches last longer.
    acts = max(1, round(chosen.minutes * 60 / MEAN_ACT_SECONDS))
    all_seeds = range(chosen.start, chosen.start + chosen.seeds)
    seeds = itertools.takewhile(lambda _: time.monotonic() <= until, all_seeds)
    if chosen.jobs == 1:
        for seed in seeds:
            yield seed, _play(seed, acts)
        return
    with ProcessPoolExecutor(chosen.jobs) as pool:
        under_way: deque[tuple[int, Future[Outcome]]] = deque()
        try:
            for seed in itertools.chain(seeds, [None] * 2 * chosen.jobs):
                if seed is not None:
                    under_way.append((seed, pool.submit(_play, seed, acts)))
                if under_way and (seed is None or len(under_way) > 2 * chosen.jobs):
                    played, outcome = under_way.popleft()
                    yield played, outcome.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _play(seed: int, acts: int) -> Outcome:
    return run(make_plan(seed, acts, tempo=tempo_of(seed)))


def _report(seed: int, outcome: Outcome, folder: Path) -> None:
    _say(f"seed {seed}: {outcome.violation}")
    small = shrink(outcome, run)
    _say(f"made small: {len(small.plan.faults)} faults, {len(small.plan.ops)} operations")
    _show(small)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"plan-{seed}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(small.plan)))
    _say(f"play it again: python -m tests.sim --plan {path}\n")


def _show(outcome: Outcome) -> None:
    plan = outcome.plan
    _say(f"{plan.shape}, {plan.tempo}")
    happenings: list[Fault | Op] = [*plan.faults, *plan.ops]
    for each in sorted(happenings, key=lambda what: what.at):
        _say(f"  {each}")
    _say("what happened last:")
    for now, *event in outcome.recent[-_LAST_EVENTS:]:
        _say(f"  {now:10.4f}  {_line(event)}")
    _say(f"{outcome.violation or 'everything held'} (trace {outcome.digest}, {outcome.events} events)")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _line(event: list[Any]) -> str:
    return " ".join(f"{part:.4f}" if isinstance(part, float) else str(part) for part in event)


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))


def _play_lost_masters(start: int, hours: int, jobs: int) -> int:
    found = Findings()
    parts = [range(at, min(at + _HOURS_AT_ONCE, start + hours)) for at in range(start, start + hours, _HOURS_AT_ONCE)]
    with ProcessPoolExecutor(jobs) as pool:
        for part in pool.map(play_hours, parts):
            found.add(part)
            for violation in part.violations:
                _say(violation)
            if not found.hours % _PROGRESS_SEEDS:
                _say(found.totals())
    _say(found.totals())
    for what, seconds in (("death", found.replaced_seconds), ("last sign of life", found.hung_seconds)):
        if again := sorted(seconds):
            middle, last = again[len(again) // 2], again[-1]
            _say(
                f"from the {what} of a master to a write: {middle:.2f} s (median of {len(again)}), {last:.2f} s at most"
            )
    _say(f"incidents: {_counted(found.incidents)}")
    return 1 if found.violations else 0


def _play_variants() -> int:
    missed = 0
    for variant in VARIANTS:
        outcome, seeds = find(variant)
        if outcome is None:
            missed += 1
            _say(f"{variant.name}: not noticed in {seeds} seeds")
        else:
            small = shrink(outcome, partial(run, broken=variant.broken), most_runs=60)
            kinds = ", ".join(fault.kind for fault in small.plan.faults) or "none"
            _say(f"{variant.name}: seed {outcome.plan.seed}, {outcome.violation}")
            _say(f"  small: {len(small.plan.ops)} operations, faults: {kinds}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
