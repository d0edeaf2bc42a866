"""Scenario `chaos`: load from every region, one fault after the other, and the judgement.

At single failures no acknowledged write may be lost, no read stale beyond what it allows, nothing differ afterwards,
and no read fail that another server could have answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from loadtest import options
from loadtest.faults.harness import Outcome
from loadtest.faults.injection import BETWEEN_REGIONS, DISK_FULL, FAULTS, LEADER_KILL, LINE_CUT, Injector
from loadtest.faults.load import RecordedOptions, run_recorded
from loadtest.faults.plan import PlanStep, after
from loadtest.faults.record import Fault, RunRecord
from loadtest.region_cluster import SEMI_SYNC_RTT_MS
from loadtest.results import Aim, Conditions, ScenarioResult, at_least, at_most, result_of
from loadtest.scenario import BenchSettings, Progress, Scenario
from tao.model.errors import OperatorError

_TOY_FAULTS: Final = ("follower_kill", "tailer_kill")
_AWAY_SECONDS: Final = 8.0
"""The longest that a fault lasts."""
_TOY_AWAY_SECONDS: Final = 1.0
_LEAST_AWAY: Final = 0.3
"""The shortest that a fault lasts, as a share of the longest."""
_LEAST_CUT: Final = 0.5
"""The same of a cut line: a write whose inverse cannot be written is acknowledged after two seconds, and the far end
has to be read after that."""
_PEACE_SECONDS: Final = 4.0
"""The longest time between two faults."""
_WELL_SECONDS: Final = 240.0
_AROUND_SECONDS: Final = 600.0
"""Time limit for the steps before and after the load: the cluster's start, the last fault's healing, the comparison."""
_ALLOWED_SHARE: Final = 5e-6
"""Share of all reads that may fail without an explanation: what the paper saw in ninety days."""
ZEROS: Final = (
    *("acked_writes_lost", "stale_after_quiescence", "ryw_violations", "token_violations"),
    *("critical_violations", "staleness_violations", "monotone_violations", "inverse_violations", "wrong_answers"),
    "state_violations",
)
"""What has to be 0 in a run with this load, whatever fails."""
_WRITES_AGAIN_SECONDS: Final = 3.0
"""Within this time after a leader's death its shards are written again, by another leader."""
_SETTLED_SECONDS: Final = 2.0
"""Within this time after the end of a cut the inverses that it has left pending are written."""
_ROOM_SECONDS: Final = 10.0
"""Within this time after room was made on the full disk of a server, all shards are written."""


@dataclass(frozen=True, kw_only=True)
class ChaosOptions(RecordedOptions):
    """The options of `chaos`."""

    seconds: float = options.SECONDS.default(600.0, toy=6.0, help="Seconds of load.")
    kinds: tuple[str, ...] = options.FAULT.default((), toy=_TOY_FAULTS, choices=sorted(FAULTS))
    overlapping: bool = options.OVERLAPPING.default(False)
    """Two faults at a time are more than the product promises to survive."""
    operations: float = options.OPERATIONS.default(30.0, toy=15.0)
    regions: int = options.REGIONS.default(2)

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [kind for kind in self.kinds if kind not in self.possible_kinds]
        if unknown:
            raise OperatorError(
                f"--fault {unknown[0]} --regions 1: one region has no other to be cut off from or replicated to; there "
                f"are {', '.join(sorted(self.possible_kinds))}"
            )

    @property
    def possible_kinds(self) -> list[str]:
        """The kinds of faults that the cluster can have."""
        return [kind for kind in FAULTS if self.regions > 1 or kind not in BETWEEN_REGIONS]


async def run(settings: BenchSettings, progress: Progress, wanted: ChaosOptions) -> ScenarioResult:
    """Inject faults until the time is over, and judge. Raises `OperatorError` when the cluster does not start."""
    away_seconds = _TOY_AWAY_SECONDS if settings.toy else _AWAY_SECONDS
    plan = partial(_plan, wanted, away_seconds)
    one_region = wanted.regions == 1
    outcome = await run_recorded(settings, progress, wanted, plan, _WELL_SECONDS, one_region=one_region)
    measured = measured_of(outcome, wanted.seed)
    unexplained, allowed = outcome.record.unexplained.total(), _ALLOWED_SHARE * outcome.record.reads
    few = at_most(f"reads that fail unexplained: {_ALLOWED_SHARE:g} of all at most", unexplained, allowed)
    examples = [f"{each.seconds} s: {each}" for each in outcome.record.failed if not each.explained and not few.met][:5]
    conditions: Conditions = {
        "seed": wanted.seed,
        "seconds": wanted.seconds,
        "regions": wanted.regions,
        **({} if one_region else {"rtt_ms": SEMI_SYNC_RTT_MS, "durability": "semi_sync"}),
        "failures at a time": 2 if wanted.overlapping else 1,
    }
    demands, examples = outcome.demands(measured, ZEROS), [*examples, *outcome.record.examples]
    demands, reported = (demands, [few]) if wanted.overlapping else ([*demands, few], [])
    reported += [*_leader_aims(outcome), *_cut_aims(outcome), *_disk_aims(outcome)]
    return result_of(conditions, measured, demands, examples=examples, aims=reported)


SCENARIO: Final = Scenario(
    name="chaos",
    summary="one or two regions under load while servers, databases, the line and disks fail, one at a time",
    run=run,
    options=ChaosOptions,
    help="""Run one or two regions under load while one thing after the other fails.

    Nothing acknowledged may be lost, no read be wrong, and nothing differ afterwards. The exit status is 1 when
    something is, or when reads fail that no fault explains.""",
    in_bench=False,
    seconds_bound=lambda wanted: wanted.seconds + _AROUND_SECONDS,
)


def _plan(
    wanted: ChaosOptions, away_seconds: float, injector: Injector, record: RunRecord
) -> Iterator[Sequence[PlanStep]]:
    """Deal every kind once in random order, then again, until the time is over; at least one."""
    chance, deck = injector.chance, list[str]()
    kinds = list(wanted.kinds or wanted.possible_kinds)
    while not record.faults or record.now() < wanted.seconds:
        record.done = record.now() / wanted.seconds
        deck = deck or chance.sample(kinds, len(kinds))
        together = [deck.pop()]
        # Without the topology document nobody can choose another victim, or have a former master rejoin.
        if wanted.overlapping and deck and "topology_gone" not in (together[0], deck[-1]):
            together.append(deck.pop())
        pause = chance.uniform(0.2, 1.0) * min(_PEACE_SECONDS, wanted.seconds / 4)
        yield [
            PlanStep(
                kind,
                FAULTS[kind],
                after(pause),
                chance.uniform(_LEAST_CUT if kind in LINE_CUT else _LEAST_AWAY, 1.0) * away_seconds,
            )
            for kind in together
        ]


def _leader_aims(outcome: Outcome) -> list[Aim]:
    """Return the aims that another leader takes writes soon after one is killed, and that readers do not notice."""
    kills = [fault for fault in outcome.record.faults if fault.kind == LEADER_KILL]
    if not kills:
        return []
    shape, unexplained = f"{len(kills)} kills", outcome.record.unexplained
    bound = _WRITES_AGAIN_SECONDS
    longest = max(_writes_again_seconds(fault, outcome) for fault in kills)
    failed = sum(count for fault, count in unexplained.items() if LEADER_KILL in fault.split("+"))
    return [
        at_most(f"all shards of a killed leader are written again within {bound:g} s", longest, bound, shape),
        at_most("no read fails while a leader is killed", failed, 0, shape),
    ]


def _cut_aims(outcome: Outcome) -> list[Aim]:
    """Return the aims that each cut between masters has met reads of pending inverses, and that these are written soon
    after it."""
    cuts, bound = [cut for cut in outcome.record.cuts if cut.splits_masters], _SETTLED_SECONDS
    if not cuts:
        return []
    shape = f"{len(cuts)} cuts"
    fewest = min(cut.far_end_reads_while_pending for cut in cuts)
    aims = [at_least("each cut has reads of far ends whose inverse is pending", fewest, 1, shape)]
    if settled := [seconds for cut in cuts for seconds in _settled_seconds(cut, outcome)]:
        shape = f"{len(settled)} inverses, {shape}"
        aims.append(
            at_most(f"a pending inverse is written within {bound:g} s of a cut's end", max(settled), bound, shape)
        )
    return aims


def _settled_seconds(cut: Fault, outcome: Outcome) -> list[float]:
    """Return, for each inverse that a cut left pending, the time from the cut's end until it was written; until the end
    of the run, if it was not. It counts from the write's acknowledgement, where that came later."""
    end = outcome.busy_seconds
    return [
        max(0.0, (pending.settled or end) - max(cut.mended or end, pending.acknowledged))
        for pending in outcome.record.pending
        if cut.struck <= pending.acknowledged <= (cut.healthy or end)
    ]


def _disk_aims(outcome: Outcome) -> list[Aim]:
    """Return the aim that all shards are written soon after there is room on a server's disk again."""
    full, bound = [fault for fault in outcome.record.faults if fault.kind in DISK_FULL], _ROOM_SECONDS
    if not full:
        return []
    longest = max(_writes_again_seconds(fault, outcome) for fault in full)
    aim = f"all shards are written within {bound:g} s of room made on a server's full disk"
    return [at_most(aim, longest, bound, f"{len(full)} disks")]


def _writes_again_seconds(fault: Fault, outcome: Outcome) -> float:
    """Return how long it took until the shards that were waited for were written again; until the end of the run, if
    one was not."""
    return (fault.written or outcome.busy_seconds) - (fault.unwritten_since or fault.struck)


def measured_of(outcome: Outcome, seed: int) -> dict[str, Any]:
    """Return what a run with this load has measured, for the JSON. (`Any`: its values differ in kind.)"""
    record = outcome.record
    kinds = sorted({fault.kind for fault in record.faults})
    return {
        "acked_writes": record.acknowledged,
        "acked_writes_lost": record.lost,
        "reads": record.reads,
        "failed_reads": record.failed_reads,
        "failed_reads_during_single_failures": record.failed_in_single,
        "stale_after_quiescence": outcome.stale,
        "ryw_violations": record.violations_of("own writes"),
        "token_violations": record.violations_of("token"),
        "critical_violations": record.violations_of("critical"),
        "faults": {kind: sum(fault.kind == kind for fault in record.faults) for kind in kinds},
        "failed_reads_unexplained": record.unexplained.total(),
        "staleness_violations": record.violations_of("max_staleness"),
        "monotone_violations": record.violations_of("monotone"),
        "inverse_violations": record.violations_of("inverse"),
        "state_violations": record.violations_of("state"),
        "operations": dict(record.operations),
        "existence_answers": record.answers["existence"],
        "set_answers": record.answers["set"],
        "pending_inverses": len(record.pending),
        "far_end_reads": record.far_end_reads,
        "far_end_reads_while_pending": record.far_end_reads_pending,
        "wrong_answers": sum(count for (verdict, _), count in record.violations.items() if verdict == "wrong"),
        "failed_writes": dict(record.refused),
        "writes_of_unknown_outcome": dict(record.unknown),
        "failed_reads_by_fault": [
            {"fault": fault, "demand": demand, "reason": reason, "count": count}
            for (fault, demand, reason), count in sorted(record.failures.items())
        ],
        "seed": seed,
        "not_well": outcome.not_well,
        "busy_seconds": round(outcome.busy_seconds, 1),
        "differences": outcome.differences,
        "compared": outcome.compared,
        "writes_again_seconds": [
            round(_writes_again_seconds(fault, outcome), 3) for fault in record.faults if fault.kind == LEADER_KILL
        ],
        "room_again_seconds": [
            round(_writes_again_seconds(fault, outcome), 3) for fault in record.faults if fault.kind in DISK_FULL
        ],
        "cuts": [
            {
                "far_end_reads_while_pending": cut.far_end_reads_while_pending,
                "settled_seconds": [round(seconds, 3) for seconds in _settled_seconds(cut, outcome)],
            }
            for cut in record.cuts
        ],
        "fault_log": [_rounded(fault) for fault in record.faults],
        **outcome.logs(),
    }


def _rounded(fault: Fault) -> dict[str, object]:
    times = {name: round(getattr(fault, name), 3) for name in ("struck", "healing", "mended", "healthy")}
    return {"kind": fault.kind, "victim": fault.victim, **times}
