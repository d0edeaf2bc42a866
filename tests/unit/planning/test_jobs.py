"""Jobs in plans: leases and their numbers, reports that are repeated or late, failures, pauses, repetition."""

from __future__ import annotations

import pytest

from tao.model.errors import InvalidArgument, TooLarge
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import MAX_JOB_ATTEMPTS, JobPriority, JobRow, JobState, NewJob
from tao.model.writes import (
    AddJob,
    AssocAdd,
    CancelJob,
    ForgetJob,
    LeaseJob,
    PauseJobs,
    ReadJob,
    ReportJob,
    ResumeJob,
    Write,
    WriteOutcome,
)
from tao.planning.row_events import RowEvent, translate
from tao.planning.write_plan import validate
from tests.unit.planning.stored_rows import FOLLOWS, HIGH, LOW, NOW, SCHEMA, StoredRows, on_shard

JOB = on_shard(3, 1)
LEASE_MS = 30_000


class Jobs(StoredRows):
    """One job on a shard, and the leader's clock."""

    def __init__(self, repeat_seconds: int = 0) -> None:
        super().__init__()
        self.now = NOW
        self.do(AddJob(NewJob(JOB, "walk", JobPriority.HIGH, b"body", repeat_seconds)))

    def do(self, write: Write) -> WriteOutcome:
        (outcome,) = self.run(write, now=self.now).outcomes
        assert outcome.error is None
        return outcome

    @property
    def row(self) -> JobRow:
        return self.rows.jobs[JOB]

    def lease(self, worker: str = "worker-1") -> JobRow | None:
        outcome = self.do(LeaseJob(JOB, "walk", worker, LEASE_MS))
        return outcome.job if outcome.found else None

    def report(self, lease: int, edges: int, *, done: bool = False, error: str = "", keep: bool = True) -> bool:
        cursor = str(edges).encode()
        return self.do(ReportJob(JOB, "walk", lease, cursor, edges, done, error, LEASE_MS if keep else 0)).found


def test_a_job_is_inserted_in_the_transaction_of_another_write() -> None:
    stored = StoredRows()
    plan = stored.run(AssocAdd(LOW, FOLLOWS, HIGH, 1, b""), AddJob(NewJob(on_shard(1, 9), "walk")))
    assert [outcome.error for outcome in plan.outcomes] == [None, None]
    assert len(plan.rows.put_jobs) == len(plan.rows.put_edges) == 1
    assert [change.shard for change in plan.changes] == [1]  # of the edge: caches learn nothing of jobs


def test_the_same_job_again_changes_nothing_and_another_one_is_refused() -> None:
    jobs = Jobs()
    jobs.lease()
    before = jobs.row
    assert jobs.do(AddJob(NewJob(JOB, "walk", JobPriority.HIGH, b"body"))).found
    assert jobs.row == before
    (outcome,) = jobs.run(AddJob(NewJob(JOB, "walk", JobPriority.HIGH, b"other"))).outcomes
    assert isinstance(outcome.error, InvalidArgument)


def test_a_job_is_leased_to_one_worker_until_its_lease_ends() -> None:
    jobs = Jobs()
    first = jobs.lease()
    assert first is not None
    assert (first.worker, first.leases, first.due_unix_ms) == ("worker-1", 1, NOW + LEASE_MS)
    jobs.now += LEASE_MS - 1
    assert jobs.lease("worker-2") is None
    jobs.now += 1
    second = jobs.lease("worker-2")
    assert second is not None
    assert (second.worker, second.leases) == ("worker-2", 2)


def test_two_leases_of_one_job_in_one_transaction_give_it_to_the_first() -> None:
    jobs = Jobs()
    plan = jobs.run(*(LeaseJob(JOB, "walk", f"worker-{number}", LEASE_MS) for number in (1, 2)))
    assert [outcome.found for outcome in plan.outcomes] == [True, False]


def test_the_worker_of_an_earlier_lease_cannot_report() -> None:
    jobs = Jobs()
    jobs.lease()
    assert jobs.report(1, 10)
    jobs.now += LEASE_MS
    assert jobs.report(1, 20)  # late, and nobody else has the job
    jobs.now += LEASE_MS
    jobs.lease("worker-2")
    before = jobs.row
    assert before.cursor == b"20"
    assert not jobs.report(1, 30)
    assert jobs.row == before


def test_a_report_that_is_repeated_counts_once() -> None:
    jobs = Jobs()
    jobs.lease()
    assert jobs.report(1, 10)
    assert jobs.report(1, 10)
    assert (jobs.row.edges, jobs.row.cursor) == (10, b"10")


def test_a_page_keeps_the_lease_and_the_last_one_ends_the_job() -> None:
    jobs = Jobs()
    jobs.lease()
    jobs.now += 10
    jobs.report(1, 10)
    assert (jobs.row.due_unix_ms, jobs.row.worker) == (jobs.now + LEASE_MS, "worker-1")
    jobs.report(1, 15, done=True)
    assert (jobs.row.state, jobs.row.edges, jobs.row.worker) == (JobState.DONE, 15, "")
    assert jobs.lease() is None


def test_a_job_that_is_let_go_is_due_at_once_from_its_cursor() -> None:
    jobs = Jobs()
    jobs.lease()
    jobs.report(1, 10, keep=False)
    leased = jobs.lease("worker-2")
    assert leased is not None
    assert (leased.cursor, leased.edges) == (b"10", 10)


def test_a_job_that_fails_waits_longer_each_time_and_is_parked_after_the_hundredth() -> None:
    jobs = Jobs()
    delays: list[int] = []
    for attempt in range(1, MAX_JOB_ATTEMPTS + 1):
        assert jobs.lease() is not None
        assert jobs.report(attempt, 0, error="it is broken")
        delays.append(jobs.row.due_unix_ms - jobs.now)
        assert jobs.lease() is None
        jobs.now = jobs.row.due_unix_ms
    assert delays[:4] == [1_000, 2_000, 4_000, 8_000]
    assert delays[-1] == 900_000
    assert (jobs.row.state, jobs.row.error, jobs.row.attempts) == (JobState.PARKED, "it is broken", MAX_JOB_ATTEMPTS)
    jobs.do(ResumeJob(JOB))
    assert jobs.lease() is not None


def test_a_job_that_waits_after_a_failure_is_due_at_once_when_its_kind_is_resumed() -> None:
    jobs = Jobs()
    for attempt in range(1, 4):
        jobs.lease()
        jobs.report(attempt, 0, error="it is broken")
        jobs.now = jobs.row.due_unix_ms
    jobs.lease()
    jobs.do(ResumeJob(JOB))
    assert jobs.row.attempts == 3, "a worker has it"
    jobs.report(4, 0, error="it is broken")
    assert jobs.row.due_unix_ms > jobs.now
    jobs.do(ResumeJob(JOB))
    assert (jobs.row.due_unix_ms, jobs.row.attempts, jobs.row.error) == (jobs.now, 0, "it is broken")


def test_hundredth_attempt_takes_the_path_of_the_first() -> None:
    jobs = Jobs()
    for attempt in range(1, MAX_JOB_ATTEMPTS):
        jobs.lease()
        jobs.report(attempt, 0, error="it is broken")
        jobs.now = jobs.row.due_unix_ms
    leased = jobs.lease()
    assert leased is not None
    jobs.report(leased.leases, 10)
    assert (jobs.row.attempts, jobs.row.error, jobs.row.cursor) == (0, "", b"10")


def test_a_paused_kind_is_not_leased_and_its_workers_let_go_after_their_page() -> None:
    jobs = Jobs()
    jobs.lease()
    jobs.do(PauseJobs(JOB >> SHARD_SHIFT, "walk", paused=True))
    assert jobs.report(1, 10)
    assert (jobs.row.worker, jobs.row.cursor) == ("", b"10")
    assert jobs.lease() is None
    assert jobs.do(PauseJobs(JOB >> SHARD_SHIFT, "walk", paused=False)).found
    assert jobs.lease() is not None


def test_a_cancelled_job_accepts_no_more_reports() -> None:
    jobs = Jobs()
    jobs.lease()
    jobs.do(CancelJob(JOB))
    assert not jobs.report(1, 10)
    assert jobs.row.state == JobState.CANCELLED
    assert jobs.lease() is None


def test_a_job_that_repeats_begins_anew_after_its_time() -> None:
    jobs = Jobs(repeat_seconds=60)
    jobs.lease()
    jobs.report(1, 10)
    jobs.report(1, 12, done=True)
    assert (jobs.row.state, jobs.row.cursor, jobs.row.edges) == (JobState.WAITING, b"", 12)
    assert jobs.lease() is None
    jobs.now += 60_000
    assert jobs.lease() is not None


def test_only_a_job_that_ended_is_forgotten() -> None:
    jobs = Jobs()
    jobs.do(ForgetJob(JOB))
    assert JOB in jobs.rows.jobs
    jobs.do(CancelJob(JOB))
    jobs.do(ForgetJob(JOB))
    assert not jobs.do(ReadJob(JOB)).found


@pytest.mark.parametrize(
    "write",
    [
        AddJob(NewJob(0, "walk")),
        AddJob(NewJob(JOB, "")),
        AddJob(NewJob(JOB, "Walk")),
        AddJob(NewJob(JOB, "w" * 64)),
        AddJob(NewJob(JOB, "walk", 3)),
        AddJob(NewJob(JOB, "walk", repeat_seconds=-1)),
        LeaseJob(JOB, "walk", "worker", 600_001),
        LeaseJob(JOB, "walk", "", 1),
        LeaseJob(JOB, "walk", "w" * 256, 1),
        ReportJob(JOB, "walk", 1, b"", 0, lease_ms=-1),
        PauseJobs(0, "a b", paused=True),
        ReadJob(0),
    ],
)
def test_bad_input_is_refused(write: Write) -> None:
    with pytest.raises(InvalidArgument):
        validate(write, SCHEMA)


def test_a_body_or_cursor_that_is_too_large_is_refused() -> None:
    with pytest.raises(TooLarge):
        validate(AddJob(NewJob(JOB, "walk", body=b"x" * 65_537)), SCHEMA)
    with pytest.raises(TooLarge):
        validate(ReportJob(JOB, "walk", 1, b"x" * 1_025, 0), SCHEMA)


def test_rows_of_jobs_are_nothing_to_a_tailer() -> None:
    found = translate([RowEvent(3, table, None, {"id": JOB}) for table in ("jobs", "paused_jobs")], SCHEMA)
    assert (found.messages, found.touches, found.passed_over) == ((), (), 0)
