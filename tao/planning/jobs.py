"""Plan what happens to rows of ``jobs``: they are inserted, leased, reported, cancelled, paused, and removed at last.

These are writes like those of the graph, so that a job comes into being in the transaction of what it follows from, and
only the shard's owner changes it. No version rises and caches learn nothing: they hold no jobs."""

from __future__ import annotations

import msgspec

from tao.model.errors import InvalidArgument, TooLarge
from tao.model.ids import SHARD_SHIFT, check_id
from tao.model.jobs import (
    LAST_RETRY_MS,
    MAX_JOB_ATTEMPTS,
    MAX_JOB_CURSOR_BYTES,
    MAX_JOB_ERROR_BYTES,
    MAX_JOB_LEASE_MS,
    MAX_WORKER_NAME_BYTES,
    JobRow,
    JobState,
    NewJob,
    PausedKind,
    check_kind,
    check_new_job,
    retry_delay_ms,
)
from tao.model.rows import RowChanges
from tao.model.writes import (
    AddJob,
    CancelJob,
    ForgetJob,
    JobWrite,
    LeaseJob,
    PauseJobs,
    ReadJob,
    ReportJob,
    ResumeJob,
    WriteOutcome,
)
from tao.planning.draft import Draft


def validate_job(write: JobWrite) -> None:
    """Check a write of a job without its row. Raises `InvalidArgument` or `TooLarge`."""
    match write:
        case AddJob(job=job, allocated=allocated):
            if not allocated:  # otherwise the leader chooses the id, after this check
                check_id(job.id)
            check_new_job(job)
        case LeaseJob(lease_ms=lease_ms, worker=worker):
            _check_lease(write.id, lease_ms)
            if not 0 < len(worker.encode()) <= MAX_WORKER_NAME_BYTES:
                raise InvalidArgument(f"a worker's name has 1 to {MAX_WORKER_NAME_BYTES} bytes, not {worker!r}")
        case ReportJob(lease_ms=lease_ms, cursor=cursor, pause_ms=pause_ms):
            _check_lease(write.id, lease_ms)
            if not 0 <= pause_ms <= LAST_RETRY_MS:
                raise InvalidArgument(f"a pause of {pause_ms} ms is outside 0 … {LAST_RETRY_MS} ms")
            if len(cursor) > MAX_JOB_CURSOR_BYTES:
                raise TooLarge(f"the cursor is {len(cursor)} bytes; at most {MAX_JOB_CURSOR_BYTES} are allowed")
        case PauseJobs(kind=kind):
            check_kind(kind)
        case _:
            check_id(write.id)


def put_job(draft: Draft, new: NewJob, now_unix_ms: int) -> WriteOutcome:
    """Insert a job, due at once; the row with its id is in ``draft.existing`` if it exists. The same job again changes
    nothing. Raises `InvalidArgument` for an id that another job has."""
    row = draft.job(new.id)
    if row is None:
        row = JobRow(
            *(new.id, new.kind, new.priority, JobState.WAITING, now_unix_ms, 0, 0, "", new.body, b"", 0, ""),
            created_unix_ms=now_unix_ms,
            repeat_seconds=new.repeat_seconds,
        )
        draft.jobs[new.id] = row
        return WriteOutcome(new.id, job=row)
    if (row.kind, row.body) != (new.kind, new.body):
        raise InvalidArgument(f"job {new.id} exists with another kind or body; reserve a new id")
    return WriteOutcome(new.id, True, job=row)


def apply_job_write(draft: Draft, write: JobWrite, now_unix_ms: int) -> WriteOutcome:
    """Apply a write to its job. ``found``: the job existed; of a lease or report, it stands."""
    match write:
        case AddJob(job=job):
            return put_job(draft, job, now_unix_ms)
        case PauseJobs():
            key = PausedKind(write.shard, write.kind)
            found = draft.is_paused(key)
            draft.paused_jobs[key] = write.paused
            return WriteOutcome(found=found)
        case ReadJob():
            row = draft.job(write.id)
            return WriteOutcome(write.id, row is not None, job=row)
    row = draft.job(write.id)
    if row is None:
        return WriteOutcome(write.id)
    match write:
        case LeaseJob():
            return _lease(draft, row, write, now_unix_ms)
        case ReportJob():
            return _report(draft, row, write, now_unix_ms)
        case ResumeJob():
            if row.state == JobState.PARKED or (row.state == JobState.WAITING and row.attempts and not row.worker):
                row = msgspec.structs.replace(row, state=JobState.WAITING, due_unix_ms=now_unix_ms, attempts=0)
        case CancelJob():
            if row.state in (JobState.WAITING, JobState.PARKED):
                row = msgspec.structs.replace(row, state=JobState.CANCELLED, worker="", due_unix_ms=now_unix_ms)
        case ForgetJob():
            if row.state in (JobState.DONE, JobState.CANCELLED):
                draft.jobs[row.id] = None
            return WriteOutcome(write.id, True)
    draft.jobs[row.id] = row
    return WriteOutcome(write.id, True, job=row)


def write_jobs(draft: Draft, rows: RowChanges) -> None:
    """Add the jobs that the writes changed to the rows."""
    for job_id, row in draft.jobs.items():
        stored = draft.existing.jobs.get(job_id)
        if row == stored:
            continue
        if row is None:
            rows.delete_jobs.append(job_id)
        else:
            rows.put_jobs[job_id] = row
    for key, paused in draft.paused_jobs.items():
        if paused is not (key in draft.existing.paused_jobs):
            rows.put_paused_jobs[key] = paused


def _lease(draft: Draft, row: JobRow, write: LeaseJob, now_unix_ms: int) -> WriteOutcome:
    """Lease a job that is due. Its former worker, whose lease is over, can report no more."""
    paused = draft.is_paused(PausedKind(row.id >> SHARD_SHIFT, row.kind))
    if row.state != JobState.WAITING or row.due_unix_ms > now_unix_ms or row.kind != write.kind or paused:
        return WriteOutcome(write.id)
    leased = msgspec.structs.replace(
        row, worker=write.worker, leases=row.leases + 1, due_unix_ms=now_unix_ms + write.lease_ms
    )
    draft.jobs[row.id] = leased
    return WriteOutcome(write.id, True, job=leased)


def _report(draft: Draft, row: JobRow, write: ReportJob, now_unix_ms: int) -> WriteOutcome:
    """Record what the holder of a lease has done. ``edges`` and ``cursor`` are totals, so that a report whose answer
    was lost may be repeated. The lease goes on unless the job ended, failed or is paused, or its worker lets it go."""
    if not row.is_held(write.lease):
        return WriteOutcome(write.id)
    reported = msgspec.structs.replace(row, cursor=write.cursor, edges=write.edges)
    let_go = msgspec.structs.replace(reported, worker="", due_unix_ms=now_unix_ms)
    if write.error and write.pause_ms:
        row = msgspec.structs.replace(let_go, error=_shortened(write.error), due_unix_ms=now_unix_ms + write.pause_ms)
    elif write.error:
        row = _failed(let_go, write.error, now_unix_ms)
    elif write.done:
        row = _ended(let_go, now_unix_ms)
    elif not write.lease_ms or draft.is_paused(PausedKind(row.id >> SHARD_SHIFT, row.kind)):
        row = let_go
    else:
        row = msgspec.structs.replace(reported, attempts=0, error="", due_unix_ms=now_unix_ms + write.lease_ms)
    draft.jobs[row.id] = row
    return WriteOutcome(write.id, True, job=row)


def _failed(row: JobRow, error: str, now_unix_ms: int) -> JobRow:
    attempts = row.attempts + 1
    return msgspec.structs.replace(
        row,
        attempts=attempts,
        error=_shortened(error),
        state=JobState.PARKED if attempts >= MAX_JOB_ATTEMPTS else JobState.WAITING,
        due_unix_ms=now_unix_ms + retry_delay_ms(attempts),
    )


def _shortened(error: str) -> str:
    return error.encode()[:MAX_JOB_ERROR_BYTES].decode(errors="ignore")


def _ended(row: JobRow, now_unix_ms: int) -> JobRow:
    ended = msgspec.structs.replace(row, attempts=0, error="", state=JobState.DONE)
    if not row.repeat_seconds:
        return ended
    due = now_unix_ms + row.repeat_seconds * 1000
    return msgspec.structs.replace(ended, state=JobState.WAITING, due_unix_ms=due, cursor=b"")


def _check_lease(job_id: int, lease_ms: int) -> None:
    check_id(job_id)
    if not 0 <= lease_ms <= MAX_JOB_LEASE_MS:
        raise InvalidArgument(f"a lease of {lease_ms} ms is outside 0 … {MAX_JOB_LEASE_MS} ms")
