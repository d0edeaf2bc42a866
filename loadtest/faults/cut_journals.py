"""Scenario `cut_journals`: two regions are cut off from each other while journals of both accept operations on the same
edges; afterwards both regions have the join of all.

Half of the edges get operations whose time the caller gives, up to a minute in the past, so that they overtake each
other. The time of the others is the stamp of the journal that accepts them. A stamp is not reported, but the row names
the operation that has won: no other one may have been begun after the winner's stamp.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Any, Final

from loadtest import options
from loadtest.conditions import within
from loadtest.faults.harness import ClientLoad, FaultRun, Outcome, carry_out_run
from loadtest.faults.injection import Injector, line_cut
from loadtest.faults.plan import Plan, PlanStep, after
from loadtest.faults.record import RunRecord
from loadtest.region_cluster import RegionCluster
from loadtest.results import Conditions, ScenarioResult, at_least, at_most, result_of
from loadtest.scenario import BenchSettings, Progress, Scenario
from tao.admin.server_stats import server_stats
from tao.client import Consistency, Graph, TaoError
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import DEFAULT_RTT_MS, ClusterSettings, Role, Shape
from tao.model.edge_states import State

_SHAPE: Final = Shape(
    regions=2, tiers=1, followers=2, leaders=2, databases=2, mixed_mastership=True, shards=16, workers=1
)
_TOY_SHAPE: Final = Shape(
    regions=2, tiers=1, followers=1, leaders=1, databases=2, mixed_mastership=True, shards=4, workers=1
)
_NEAR_TYPE: Final = "subscribes"
_FAR_TYPE: Final = "subscribers"
_PAGES_PER_USER: Final = 4
_LATE_US: Final = 60_000_000
_CLOCK_US: Final = 2_000_000
"""The most by which a stamp may be away from the moment of the acceptance: a leader takes up to a second to say what
time it is (`tao.journal.leader_clocks`), and this process may get to run as much later on a busy machine."""
_TIMEOUT_SECONDS: Final = 10.0
_PEACE_SECONDS: Final = 1.0
_AROUND_SECONDS: Final = 900.0
"""Time limit for the steps before and after the cut."""
_WELL_SECONDS: Final = 240.0
_APPLIED_SECONDS: Final = 300.0
_LOOK_SECONDS: Final = 0.5
_ZEROS: Final = ("not_accepted", "not_applied", "not_the_join", "differences")


@dataclass(frozen=True, kw_only=True)
class CutJournalsOptions(options.Options):
    """The options of `cut_journals`."""

    seconds: float = options.CUT_SECONDS.default(600.0, toy=4.0)
    operations: float = options.OPERATIONS.default(100.0, toy=40.0)
    seed: int = options.SEED.default(1)


async def run(settings: BenchSettings, progress: Progress, wanted: CutJournalsOptions) -> ScenarioResult:
    """Cut the line, write, heal, and compare. Raises `OperatorError`."""
    shape = _TOY_SHAPE if settings.toy else _SHAPE
    found: list[_AcceptedLoad] = []
    fault_run = FaultRun(
        cluster=ClusterSettings(
            state_dir=settings.work_dir / "two",  # short: database servers keep a Unix socket in there
            shape=shape,
            rtt_ms=DEFAULT_RTT_MS,
            durability=Durability.RELAXED,
            log_level="warning",
        ),
        load=partial(_begun, wanted, found),
        plans=lambda injector, record, _: [_plan(wanted.seconds, injector, record)],
        seed=wanted.seed,
        well_seconds=_WELL_SECONDS,
    )
    outcome = await carry_out_run(fault_run, settings.versions, progress)
    measured = _measured(outcome, found[0])
    conditions: Conditions = {
        "cut_seconds": wanted.seconds,
        "operations_per_second": wanted.operations,
        "shards": shape.shards,
        "rtt_ms": DEFAULT_RTT_MS,
        "seed": wanted.seed,
    }
    demands = [
        *outcome.demands(measured, _ZEROS),
        *(at_least(f"operations accepted in {region}", number, 1) for region, number in measured["accepted"].items()),
    ]
    return result_of(
        conditions,
        measured,
        demands,
        examples=outcome.record.examples,
        aims=[at_most("cut's end → all applied, in seconds", measured["applied_seconds"], _APPLIED_SECONDS)],
    )


SCENARIO: Final = Scenario(
    name="cut_journals",
    summary="journaled operations on the same edges on both sides of a cut line: afterwards both have the join of all",
    run=run,
    options=CutJournalsOptions,
    help="""Cut two regions off from each other while journals of both accept operations on the same edges.

    The exit status is 1 when an operation is not accepted or not applied, when a region has anything but the join of
    all operations, or when anything differs afterwards.""",
    in_bench=False,
    seconds_bound=lambda wanted: wanted.seconds + _AROUND_SECONDS,
)


def _plan(seconds: float, _injector: Injector, _record: RunRecord) -> Plan:
    yield [PlanStep("link_cut", partial(line_cut, silent=False), after(_PEACE_SECONDS), seconds)]


def _measured(outcome: Outcome, load: _AcceptedLoad) -> dict[str, Any]:
    # Any: the JSON's values differ in kind.
    return {
        "accepted": load.accepted,
        "edges": len(load.edges),
        "most_waiting": load.most_waiting,
        "not_accepted": outcome.record.refused.total() + outcome.record.unknown.total(),
        "not_applied": load.not_applied,
        "applied_seconds": round(load.applied_seconds, 1),
        "not_the_join": load.not_the_join,
        "differences": outcome.differences,
        "compared": outcome.compared,
        "not_well": outcome.not_well,
        "failed_write_log": outcome.record.failed_writes,
    }


@dataclass(frozen=True, slots=True)
class _Operation:
    """One accepted operation. ``time``: of the edge, another one each time. It has a time from ``first_us`` to
    ``last_us``, which are the same where the caller has given the time."""

    state: State
    time: int
    first_us: int
    last_us: int


@dataclass(slots=True)
class _Edge:
    user: int
    page: int
    is_stamped: bool
    """Whether the journal gives operations their times; otherwise the caller does."""
    operations: list[_Operation] = field(default_factory=list)

    def judge(self, own: State, state_us: int, payload_us: int, edge_time: int) -> bool:
        """Return whether these registers are the join of all operations."""
        won = next((each for each in self.operations if each.time == edge_time), None)
        # Each operation sets both registers, so that one and the same wins in both.
        if won is None or (won.state, state_us) != (own, payload_us):
            return False
        if not self.is_stamped:
            newest = max(self.operations, key=lambda each: (each.first_us, each.state))
            newest_payload = max(self.operations, key=lambda each: (each.first_us, each.time))
            return (newest.first_us, newest.state, newest_payload.time) == (state_us, own, edge_time)
        fits = won.first_us - _CLOCK_US <= state_us <= won.last_us + _CLOCK_US
        return fits and all(each.first_us <= state_us + _CLOCK_US for each in self.operations)


class _AcceptedLoad(ClientLoad):
    """Writers of both regions whose operations are accepted by journals."""

    def __init__(
        self, regions: RegionCluster, record: RunRecord, chance: Random, graphs: dict[str, Graph], edges: list[_Edge]
    ) -> None:
        super().__init__()
        self.edges: Final = edges
        self.accepted: Final = dict.fromkeys(graphs, 0)
        self.most_waiting = 0
        self.not_applied = 0
        """Operations that are parked, or were set aside."""
        self.not_the_join = 0
        self.applied_seconds = 0.0
        self._regions: Final = regions
        self._record: Final = record
        self._chance: Final = chance
        self._graphs: Final = graphs
        self._times: Final = count(1)
        self._stopping = False

    def begin_all(self, per_second: float) -> None:
        """Begin the writers."""
        for region in self._graphs:
            self.begin(self._write(region, per_second / len(self._graphs)))

    def describe(self) -> tuple[str, float]:
        """See `ClientLoad`."""
        cut = ", the line is cut" if self._record.active else ""
        return f"{sum(self.accepted.values()):,} operations accepted{cut}", 0.5

    async def stop(self) -> None:
        """Accept nothing more, and wait until all is applied. Raises `OperatorError`."""
        self._stopping = True
        await super().stop()
        since = self._record.cuts[-1].mended

        async def applied() -> bool:
            figures = await self._journals()
            self.not_applied = sum(sum(each["parked"].values()) + each["torn_rows"] for each in figures)
            return not any(sum(each["waiting"].values()) for each in figures)

        await within(_APPLIED_SECONDS, applied, _LOOK_SECONDS, "not everything accepted was applied")
        self.applied_seconds = self._record.now() - since

    async def after_fault(self, fault: object) -> None:
        """Count what waits when the line is healed."""
        self.most_waiting = sum(sum(each["waiting"].values()) for each in await self._journals())

    async def differences(self) -> int:
        """Compare the registers of every edge at both ends, as each region has them, with the join."""
        for edge in self.edges:
            if not edge.operations:
                continue
            for region, graph in self._graphs.items():
                for id1, atype, id2 in ((edge.user, _NEAR_TYPE, edge.page), (edge.page, _FAR_TYPE, edge.user)):
                    found = await self._registers(graph, id1, atype, id2)
                    if found is None or not edge.judge(*found):
                        self.not_the_join += 1
                        self._record.example(f"{region}: {id1} {atype} {id2} has {found}, not the join")
        return 0

    async def _registers(self, graph: Graph, id1: int, atype: str, id2: int) -> tuple[State, int, int, int] | None:
        """Return own state, the times of both registers, and the edge's time as the region's cache shows it."""
        found = await graph.assoc_state(id1, atype, id2)
        if found is None:
            return None
        shown = await graph.assoc_get(id1, atype, [id2], state=found.effective, consistency=Consistency.cached())
        return State[found.own.upper()], found.state_us, found.payload_us, next(iter(shown.times), 0)

    async def _journals(self) -> list[dict[str, Any]]:
        """Return the figures of the journals of all followers. (`Any`: the values of `/stats`.)"""
        names = self._regions.named(Role.FOLLOWER)
        return [(await server_stats(self._regions.cluster.admin(name)))["journal"] for name in names]

    async def _write(self, region: str, per_second: float) -> None:
        async with asyncio.TaskGroup() as group:
            while not self._stopping:
                await asyncio.sleep(self._chance.uniform(0.5, 1.5) / per_second)
                if self._record.active:  # the line is cut
                    group.create_task(self._accept(region))

    async def _accept(self, region: str) -> None:
        edge, state, number = self._chance.choice(self.edges), self._chance.choice([*State]), next(self._times)
        first_us, began = _now_us(), self._record.now()
        at = None if edge.is_stamped else first_us - self._chance.randrange(_LATE_US)
        try:
            await self._graphs[region].later.assoc_set_state(edge.user, _NEAR_TYPE, edge.page, state.label, at, number)
        except TaoError as error:
            self._record.failed_write(error, began, f"{region}: {edge.user} {edge.page}", unknown=False)
            return
        self.accepted[region] += 1
        edge.operations.append(_Operation(state, number, at or first_us, at or _now_us()))


def _now_us() -> int:
    return time.time_ns() // 1_000


@asynccontextmanager
async def _begun(
    wanted: CutJournalsOptions,
    found: list[_AcceptedLoad],
    regions: RegionCluster,
    record: RunRecord,
    chance: Random,
) -> AsyncIterator[_AcceptedLoad]:
    shape = regions.cluster.record.shape
    async with AsyncExitStack() as stack:
        graphs = {
            region: await regions.graph(region, shape.tier_names[0], stack, _TIMEOUT_SECONDS)
            for region in shape.region_names
        }
        edges = await _edges(next(iter(graphs.values())), range(shape.shards), chance)
        load = _AcceptedLoad(regions, record, chance, graphs, edges)
        found.append(load)
        record.begin()
        load.begin_all(wanted.operations)
        yield load


async def _edges(graph: Graph, shards: Sequence[int], chance: Random) -> list[_Edge]:
    """Return edges between all shards, whose ends have their masters in the same region or in two."""
    users = [each for shard in shards for each in await graph.reserve_ids(2, shard=shard)]
    pages = [each for shard in shards for each in await graph.reserve_ids(2, shard=shard)]
    return [
        _Edge(user, page, is_stamped=number % 2 == 0)
        for user in users
        for number, page in enumerate(chance.sample(pages, _PAGES_PER_USER))
    ]
