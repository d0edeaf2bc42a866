"""A worker, and the leaders' planning of its jobs: pages in order, deaths at every page, lost answers, pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from tao.client import Graph
from tao.model.errors import SettingsError, Unavailable
from tao.model.graph import EdgeKey
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import MAX_JOB_ATTEMPTS, JobPriority, JobRow, JobState, NewJob
from tao.model.writes import AddJob, CancelJob, LeaseJob, PauseJobs, ReportJob
from tao.observability.logs import logger
from tao.runtime.clock import LoopClock
from tao.worker.kinds import Page, PageWaits
from tao.worker.leaders import RoutinePage, ShardPage
from tao.worker.runner import JobRunner, RunnerSettings
from tests.rigs.pacing import ManualClock, until
from tests.unit.planning.stored_rows import NOW, StoredRows, on_shard

ITEMS = 23
NO_GRAPH = cast("Graph", None)
FAST = RunnerSettings(poll_seconds=0.01, edges_per_second=1e6, page_edges=5)


class MemoryLeaders:
    """Leaders as a worker sees them, over the planner's own rules and a clock that only tests advance."""

    def __init__(self) -> None:
        self.stored = StoredRows()
        self.now = NOW
        self.lost_answers = 0
        """How many reports are committed and not answered."""
        self.away = False

    def add(self, number: int = 1, priority: int = JobPriority.NORMAL, kind: str = "walk") -> int:
        job_id = on_shard(1, number)
        self.stored.run(AddJob(NewJob(job_id, kind, priority)), now=self.now)
        return job_id

    def row(self, job_id: int) -> JobRow:
        return self.stored.rows.jobs[job_id]

    async def lease(self, kinds: Sequence[str], limits: Sequence[int], lease_ms: int) -> list[JobRow]:
        if self.away:
            raise Unavailable("the leader is away")
        leased: list[JobRow] = []
        for priority, limit in enumerate(limits):
            due = [row for row in self.stored.rows.jobs.values() if row.priority == priority and row.kind in kinds]
            for row in due:
                write = LeaseJob(row.id, row.kind, "worker", lease_ms)
                if limit and (outcome := self.stored.run(write, now=self.now).outcomes[0]).found:
                    assert outcome.job is not None
                    leased.append(outcome.job)
                    limit -= 1
        return leased

    async def report(self, report: ReportJob) -> JobRow | None:
        if self.away:
            raise Unavailable("the leader is away")
        (outcome,) = self.stored.run(report, now=self.now).outcomes
        if self.lost_answers:
            self.lost_answers -= 1
            raise Unavailable("the answer was lost")
        return outcome.job if outcome.found else None

    async def scan(self, shard: int, atype: int, otype: int, after: EdgeKey, limit: int) -> ShardPage:
        raise NotImplementedError

    async def purge(self, shard: int, after: EdgeKey, limit: int) -> RoutinePage:
        raise NotImplementedError

    async def fold(self, shard: int, after: EdgeKey, limit: int) -> RoutinePage:
        raise NotImplementedError


class Walk:
    """Handles numbers in order, and may fail, hang or be watched at each page."""

    name = "walk"

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.before: Callable[[int], None] = lambda _: None
        self.gate = asyncio.Event()
        self.gate.set()

    async def page(self, graph: Graph, body: bytes, cursor: bytes, limit: int) -> Page:
        start = int(cursor or b"0")
        self.before(start)
        await self.gate.wait()
        numbers = range(start, min(start + limit, ITEMS))
        self.seen += numbers
        return Page(str(numbers.stop).encode(), len(numbers), numbers.stop == ITEMS)


def worker(leaders: MemoryLeaders, *kinds: Walk, settings: RunnerSettings = FAST) -> JobRunner:
    known = {kind.name: kind for kind in kinds}
    return JobRunner(leaders, known, settings, LoopClock(), logger("test"))


async def idle(runner: JobRunner) -> None:
    await until(lambda: runner.summary()["jobs"] == [])


async def test_pages_are_done_in_order_until_the_job_is_done() -> None:
    leaders, walk = MemoryLeaders(), Walk()
    job = leaders.add()
    runner = worker(leaders, walk)
    await runner.lease(NO_GRAPH)
    await until(lambda: leaders.row(job).state == JobState.DONE)
    assert walk.seen == list(range(ITEMS))
    assert (leaders.row(job).edges, runner.pages["walk"], runner.edges["walk"]) == (ITEMS, 5, ITEMS)


@pytest.mark.parametrize("dies_at", range(0, ITEMS, 5))
async def test_job_continues_at_another_worker_from_its_last_page(dies_at: int) -> None:
    leaders, walk = MemoryLeaders(), Walk()
    job = leaders.add()

    def die(start: int) -> None:
        if start == dies_at:
            walk.gate.clear()

    walk.before = die
    first = worker(leaders, walk)
    await first.lease(NO_GRAPH)
    await until(lambda: not walk.gate.is_set())
    await first.close()  # without a report
    assert leaders.row(job).cursor == (str(dies_at).encode() if dies_at else b"")
    walk.before = lambda _: None
    walk.gate.set()
    second = worker(leaders, walk)
    await second.lease(NO_GRAPH)
    assert leaders.row(job).state == JobState.WAITING  # the lease of the lost worker stands
    leaders.now += int(FAST.lease_seconds * 1000)
    await second.lease(NO_GRAPH)
    await until(lambda: leaders.row(job).state == JobState.DONE)
    assert walk.seen == list(range(ITEMS))


async def test_two_workers_hold_one_job_for_at_most_one_lease_and_doing_it_twice_is_harmless() -> None:
    leaders, slow, fast = MemoryLeaders(), Walk(), Walk()
    job = leaders.add()
    slow.gate.clear()
    first, second = worker(leaders, slow), worker(leaders, fast)
    await first.lease(NO_GRAPH)
    leaders.now += int(FAST.lease_seconds * 1000)  # the page of the first takes longer than its lease
    await second.lease(NO_GRAPH)
    await until(lambda: leaders.row(job).state == JobState.DONE)
    slow.gate.set()
    await until(lambda: bool(first.lost_leases["walk"]))
    assert slow.seen == list(range(5))  # its page alone: it does not go on without its lease
    assert fast.seen == list(range(ITEMS))
    assert leaders.row(job).edges == ITEMS


async def test_a_report_whose_answer_is_lost_is_repeated_and_counts_once() -> None:
    leaders, walk = MemoryLeaders(), Walk()
    job = leaders.add()
    leaders.lost_answers = 3
    await worker(leaders, walk).lease(NO_GRAPH)
    await until(lambda: leaders.row(job).state == JobState.DONE)
    assert walk.seen == list(range(ITEMS))
    assert leaders.row(job).edges == ITEMS


async def test_a_page_that_fails_is_reported_and_done_again_later() -> None:
    leaders, walk = MemoryLeaders(), Walk()
    job = leaders.add()

    def fail(start: int) -> None:
        if start == 10 and leaders.row(job).attempts == 0:
            raise ValueError("a bad edge")

    walk.before = fail
    runner = worker(leaders, walk)
    await runner.lease(NO_GRAPH)
    await until(lambda: leaders.row(job).attempts == 1)
    row = leaders.row(job)
    assert (row.cursor, row.error, row.worker) == (b"10", "ValueError: a bad edge", "")
    leaders.now = row.due_unix_ms
    await runner.lease(NO_GRAPH)
    await until(lambda: leaders.row(job).state == JobState.DONE)
    assert walk.seen == list(range(ITEMS))


async def test_a_page_that_waits_is_no_failure_and_goes_on_from_its_cursor_when_its_time_has_come() -> None:
    leaders, walk = MemoryLeaders(), Walk()
    job = leaders.add()

    def wait(_: int) -> None:
        raise PageWaits("the region is cut off", 10.0, b"4")

    walk.before = wait
    runner = worker(leaders, walk)
    for _ in range(MAX_JOB_ATTEMPTS + 1):
        leaders.now += 10_000
        await runner.lease(NO_GRAPH)
        await idle(runner)
    row = leaders.row(job)
    assert (row.state, row.attempts, row.error) == (JobState.WAITING, 0, "the region is cut off")
    assert (row.cursor, row.due_unix_ms) == (b"4", leaders.now + 10_000)
    assert list(runner.failures) == []


async def test_low_priority_waits_for_high_and_is_not_starved() -> None:
    leaders, walk = MemoryLeaders(), Walk()
    walk.gate.clear()
    high = [leaders.add(number, JobPriority.HIGH) for number in range(1, 6)]
    low = [leaders.add(number, JobPriority.LOW) for number in range(6, 11)]
    runner = worker(leaders, walk, settings=RunnerSettings(high_jobs=3, low_jobs=1, edges_per_second=1e6))
    await runner.lease(NO_GRAPH)
    held = [job for job in (*high, *low) if leaders.row(job).worker]
    assert held == [*high[:3], low[0]]
    walk.gate.set()
    for _ in range(10):
        await idle(runner)
        await runner.lease(NO_GRAPH)
    assert {leaders.row(job).state for job in (*high, *low)} == {JobState.DONE}


async def test_a_pause_ends_the_work_after_the_page_and_a_cancelled_job_is_left() -> None:
    leaders, walk = MemoryLeaders(), Walk()
    paused, cancelled = leaders.add(1), leaders.add(2)
    walk.gate.clear()
    runner = worker(leaders, walk)
    await runner.lease(NO_GRAPH)
    leaders.stored.run(PauseJobs(paused >> SHARD_SHIFT, "walk", paused=True), CancelJob(cancelled))
    walk.gate.set()
    await idle(runner)
    assert (leaders.row(paused).cursor, leaders.row(paused).worker) == (b"5", "")
    assert (leaders.row(cancelled).cursor, runner.lost_leases["walk"]) == (b"", 1)


async def test_a_drained_worker_reports_its_page_and_lets_its_job_go() -> None:
    leaders, walk = MemoryLeaders(), Walk()
    job = leaders.add()
    walk.gate.clear()
    runner = worker(leaders, walk)
    running = asyncio.create_task(runner.run(NO_GRAPH))
    await until(lambda: bool(leaders.row(job).worker))
    draining = asyncio.create_task(runner.drain())
    await asyncio.sleep(0)
    walk.gate.set()
    await draining
    await running
    row = leaders.row(job)
    assert (row.cursor, row.worker, row.due_unix_ms) == (b"5", "", leaders.now)


async def test_jobs_that_arrive_while_a_worker_is_drained_are_let_go_and_no_page_of_them_is_begun() -> None:
    class HeldLeaders(MemoryLeaders):
        def __init__(self) -> None:
            super().__init__()
            self.gate = asyncio.Event()

        async def lease(self, kinds: Sequence[str], limits: Sequence[int], lease_ms: int) -> list[JobRow]:
            rows = await super().lease(kinds, limits, lease_ms)
            await self.gate.wait()
            return rows

    leaders, walk = HeldLeaders(), Walk()
    job = leaders.add()
    runner = worker(leaders, walk)
    running = asyncio.create_task(runner.run(NO_GRAPH))
    await until(lambda: bool(leaders.row(job).worker))
    draining = asyncio.create_task(runner.drain())
    await asyncio.sleep(0)
    assert not draining.done()
    leaders.gate.set()
    await draining
    row = leaders.row(job)
    assert (row.worker, row.attempts, row.due_unix_ms, walk.seen) == ("", 0, leaders.now, [])
    await running


async def test_a_worker_says_why_it_has_no_jobs() -> None:
    leaders, walk = MemoryLeaders(), Walk()
    runner = worker(leaders, walk)
    leaders.away = True
    await runner.lease(NO_GRAPH)
    assert runner.trouble == "the leader is away"
    leaders.away = False
    await runner.lease(NO_GRAPH)
    assert runner.trouble == ""


async def test_a_job_whose_lease_is_nearly_spent_when_it_arrives_is_let_go_and_has_not_failed() -> None:
    class SlowLeaders(MemoryLeaders):
        clock = ManualClock()

        async def lease(self, kinds: Sequence[str], limits: Sequence[int], lease_ms: int) -> list[JobRow]:
            rows = await super().lease(kinds, limits, lease_ms)
            self.clock.now += FAST.lease_seconds * 0.9
            return rows

    leaders, walk = SlowLeaders(), Walk()
    job = leaders.add()
    runner = JobRunner(leaders, {"walk": walk}, FAST, leaders.clock, logger("test"))
    await runner.lease(NO_GRAPH)
    await idle(runner)
    row = leaders.row(job)
    assert (row.attempts, row.error, row.worker, row.due_unix_ms) == (0, "", "", leaders.now)
    assert walk.seen == []


@pytest.mark.parametrize(("high", "normal", "low"), [(65, 1, 1), (1, -1, 1), (1, 1, 65)])
def test_slots_that_no_leader_would_fill_are_refused(high: int, normal: int, low: int) -> None:
    with pytest.raises(SettingsError, match="must be 0 to 64"):
        RunnerSettings(high_jobs=high, normal_jobs=normal, low_jobs=low)
    assert RunnerSettings(high_jobs=64, low_jobs=0).slots(JobPriority.LOW) == 0


@pytest.mark.parametrize(("pace", "limit"), [(1e6, 500), (2_000.0, 100), (1_000.0, 50), (2.0, 1)])
def test_page_is_a_twentieth_of_a_seconds_work_at_most(pace: float, limit: int) -> None:
    settings = RunnerSettings(edges_per_second=7.0, pace_of_kinds={"walk": pace})
    assert (settings.page_limit("walk"), settings.page_limit("other")) == (limit, 1)
