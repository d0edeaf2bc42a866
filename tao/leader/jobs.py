"""Hand out the background jobs of the owned shards to workers, under leases, and take their reports.

Which jobs are due is looked up without locks, at most so often, for all workers together. Whether one may be leased is
decided in the transaction that leases it: of two workers that ask at once, or of two leaders that each believe to own
the shard, one gets it. All times are those of the leader's clock. A successor whose clock is ahead hands a job out
early, which costs a page that is done twice.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from tao.leader.ownership import Ownership
from tao.leader.write_path import WritePath
from tao.model.errors import DeadlineExceeded, InvalidArgument, TaoError
from tao.model.ids import EPOCH_UNIX_MS, SHARD_SHIFT, make_id
from tao.model.jobs import (
    FOLD_KIND,
    MAX_JOB_LEASES,
    PURGE_KIND,
    JobPriority,
    JobQuery,
    JobRow,
    JobState,
    NewJob,
    PausedKind,
    check_kind,
)
from tao.model.ports import WriteStore
from tao.model.writes import AddJob, ForgetJob, LeaseJob, PauseJobs, ReportJob, ResumeJob, WriteOutcome
from tao.observability.metrics import Metrics
from tao.serving.configuration import ServerContext

MAX_KINDS: Final = 256
"""Kinds that a worker may know. Its own names are remembered until they are old."""
KIND_SECONDS: Final = 60.0
"""How long after a request for jobs of a kind such jobs are still looked for."""
_FORGET_ROUNDS: Final = 64
"""How often one round of the care removes `search_limit` jobs of a shard: some thirty a second, for as long as jobs end
no faster."""


@dataclass(frozen=True, slots=True)
class JobSettings:
    """How jobs are handed out."""

    search_seconds: float = 1.0
    """Least time between two look-ups of the jobs that are due, while workers ask for them. Each reads an index of
    every owned shard, once for each priority. A new job waits this long at most for a worker that has room."""

    search_limit: int = 32
    """Jobs of one priority that a look-up finds on one shard."""

    care_seconds: float = 60.0
    """Interval of the care for jobs: they are counted, those that ended long ago are removed, and shards that lack
    their `purge` or `fold` job get one."""

    keep_ended_seconds: float = 7 * 86_400.0
    """How long a job that is done or cancelled can still be seen."""

    purge_every_seconds: int = 86_400
    """How long after its end the purge of a shard begins anew. It reads all edges of the shard's types with states."""

    fold_every_seconds: int = 21_600
    """How long after its end the fold of a shard's counters begins anew. It reads the same rows as the purge."""

    fold_after_seconds: float = 600.0
    """A slot of a counter is folded when no flush has changed it for so long: its life is over, or has a pause. Folding
    one that is still used costs a write, and no count."""

    timeout_seconds: float = 4.0
    """Time limit for one look-up, and for one transaction of jobs."""


_Row = TypeVar("_Row")


class RowsOfServers(NamedTuple, Generic[_Row]):
    """Rows of several database servers. ``missing``: the shards whose server did not answer."""

    rows: list[_Row]
    missing: frozenset[int]


class JobPath:
    """The background jobs of the shards that this leader owns."""

    def __init__(
        self, context: ServerContext, settings: JobSettings, ownership: Ownership, store: WriteStore, writes: WritePath
    ) -> None:
        self._settings: Final = settings
        self._ownership: Final = ownership
        self._store: Final = store
        self._writes: Final = writes
        self._configuration: Final = context.configuration
        self._clock: Final = context.clock
        self._log: Final = context.log
        self._due: dict[JobPriority, list[JobRow]] = {priority: [] for priority in JobPriority}
        self._searched_at = float("-inf")
        self._search: Final = asyncio.Lock()
        self._asked_at: dict[str, float] = {}
        """Kind → the time at which a worker last asked for jobs of it."""
        self._workers: dict[str, float] = {}
        """Worker → the time at which it last asked for jobs, or reported."""
        self._not_searched: frozenset[int] = frozenset()
        """The shards whose server did not answer the last look-up."""
        self.counts: dict[str, int] = {}
        """Jobs by state, as last counted."""
        self.leased = 0
        self.reported = 0
        self.refused_reports = 0
        self.failures = 0

    # ---- workers ---------------------------------------------------------------------------------------------------

    async def lease(
        self,
        worker: str,
        kinds: Sequence[str],
        limits: Sequence[int],
        lease_ms: int,
        *,
        deadline: float | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> list[JobRow]:
        """Lease jobs that are due: of each priority at most so many. None is leased after the ``deadline``, in the
        clock's time, or when the answer is not wanted any more: nobody would do it before its lease ends. Shards whose
        database does not answer are left out. Raises `InvalidArgument`, `DeadlineExceeded`, and what the look-up
        raises when no database answers."""
        if len(limits) != len(JobPriority) or not all(0 <= limit <= MAX_JOB_LEASES for limit in limits):
            raise InvalidArgument(f"limits are {list(limits)}; give {len(JobPriority)} of 0 to {MAX_JOB_LEASES}")
        known = frozenset(kinds)
        if len(known) > MAX_KINDS:
            raise InvalidArgument(f"a worker knows {MAX_KINDS} kinds at most, not {len(known)}")
        now = self._clock.monotonic()
        self._asked_at.update(dict.fromkeys(known, now))
        self._note_worker(worker)
        if deadline is None:
            deadline = now + self._settings.timeout_seconds
        await self._find_due(deadline)
        if not is_wanted():
            return []
        if self._clock.monotonic() >= deadline:
            raise DeadlineExceeded("the look-up of jobs took as long as the worker waits; none is leased")
        chosen: list[JobRow] = []
        for priority, limit in zip(JobPriority, limits, strict=True):
            found = [row for row in self._due[priority] if row.kind in known][:limit]
            taken = {row.id for row in found}
            self._due[priority] = [row for row in self._due[priority] if row.id not in taken]
            chosen += found
        outcomes = await asyncio.gather(*(self._lease(row, worker, lease_ms, deadline) for row in chosen))
        leased = [row for row in outcomes if row is not None]
        self.leased += len(leased)
        return leased

    async def _lease(self, row: JobRow, worker: str, lease_ms: int, deadline: float) -> JobRow | None:
        """Lease one job. Return None when it is leased, paused or locked."""
        try:
            outcome = await self._commit(LeaseJob(row.id, row.kind, worker, lease_ms), deadline)
        except TaoError as error:
            # Its lease may stand, if the outcome is unknown: then it waits for the end of that.
            self._log.info("job_not_leased", job=row.id, reason=error.message)
            return None
        return outcome.job if outcome.found else None

    async def report(self, report: ReportJob, worker: str) -> WriteOutcome:
        """Record a worker's report. Raises what a write raises: the worker repeats its report."""
        self._note_worker(worker)
        outcome = await self._commit(report)
        if not outcome.found:
            self.refused_reports += 1
            return outcome
        self.reported += 1
        if report.error:
            self.failures += 1
        if outcome.job is not None and outcome.job.state == JobState.PARKED:
            self._log.error("job_parked", job=report.id, kind=report.kind, reason=outcome.job.error)
        return outcome

    def _note_worker(self, worker: str) -> None:
        """Note that a worker was heard now. One that has all the jobs that it can do asks for none, and reports."""
        now = self._clock.monotonic()
        self._workers = {name: at for name, at in self._workers.items() if at >= now - KIND_SECONDS} | {worker: now}

    async def _find_due(self, deadline: float) -> None:
        """Look for the jobs that are due, unless that was done a moment ago. Servers that do not answer within half of
        the time until the deadline are left out, so that the jobs of the others can be leased in the other half."""
        async with self._search:
            now = self._clock.monotonic()
            if now < self._searched_at + self._settings.search_seconds or now >= deadline:
                return
            due_by_unix_ms = self._clock.unix_ms()
            search_until = now + min((deadline - now) / 2, self._settings.timeout_seconds)
            shards = sorted(self._ownership.owned)
            if not shards:
                self._due = {priority: [] for priority in JobPriority}
                return
            query = JobQuery(
                self._settings.search_limit,
                states=(JobState.WAITING,),
                kinds=tuple(self.kinds),  # jobs of kinds that no worker knows must not hide the others
                due_by_unix_ms=due_by_unix_ms,
                is_running=True,
            )

            async def look(some: Sequence[int]) -> list[JobRow]:
                found: list[JobRow] = []
                for priority in JobPriority:
                    left = search_until - self._clock.monotonic()
                    of_priority = msgspec.structs.replace(query, priorities=(priority,))
                    found += await self._store.read_jobs(some, of_priority, timeout_seconds=left)
                return found

            try:
                rows, missing = await self._of_servers(shards, look)
            finally:
                self._searched_at = self._clock.monotonic()
            if missing != self._not_searched:
                self._not_searched = missing
                self._log.warning("shards_not_searched_for_jobs", shards=len(missing), of=len(shards))
            rows.sort(key=lambda row: row.due_unix_ms)
            self._due = {priority: [row for row in rows if row.priority == priority] for priority in JobPriority}

    async def _of_servers(
        self, shards: Sequence[int], read: Callable[[Sequence[int]], Awaitable[list[_Row]]]
    ) -> RowsOfServers[_Row]:
        """Read the rows of shards from each of their database servers, side by side, because one that is down must not
        hide the jobs of the others. Raises the error of one when none of them answers."""
        by_server: dict[str, list[int]] = defaultdict(list)
        for shard in shards:
            by_server[self._store.server_of(shard)].append(shard)

        async def at(some: Sequence[int]) -> list[_Row] | TaoError:
            try:
                return await read(some)
            except TaoError as error:
                return error

        rows: list[_Row] = []
        missing: set[int] = set()
        failure: TaoError | None = None
        for some, found in zip(by_server.values(), await asyncio.gather(*map(at, by_server.values())), strict=True):
            if isinstance(found, TaoError):
                failure = found
                missing.update(some)
            else:
                rows += found
        if failure is not None and len(missing) == len(shards):
            raise failure
        return RowsOfServers(rows, frozenset(missing))

    async def _read(self, shards: Sequence[int], query: JobQuery) -> RowsOfServers[JobRow]:
        seconds = self._settings.timeout_seconds
        return await self._of_servers(shards, lambda some: self._store.read_jobs(some, query, timeout_seconds=seconds))

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of jobs that workers have asked for lately."""
        oldest = self._clock.monotonic() - KIND_SECONDS
        self._asked_at = {kind: at for kind, at in self._asked_at.items() if at >= oldest}
        return sorted(self._asked_at)

    def summary(self) -> dict[str, object]:
        """Return the figures for `/stats`. ``workers``: how long ago each has asked for jobs or reported, in
        seconds."""
        now = self._clock.monotonic()
        ages = {name: round(now - at, 1) for name, at in sorted(self._workers.items())}
        return {"workers": {name: age for name, age in ages.items() if age <= KIND_SECONDS}}

    # ---- operators -------------------------------------------------------------------------------------------------

    async def list_jobs(self, query: JobQuery) -> RowsOfServers[JobRow]:
        """Return jobs of the owned shards: waiting ones first, by priority and time."""
        rows, missing = await self._read(sorted(self._ownership.owned), query)
        rows.sort(key=lambda row: (row.state, row.priority, row.due_unix_ms, row.id))
        return RowsOfServers(rows[: query.limit], missing)

    async def paused(self) -> RowsOfServers[PausedKind]:
        """Return the kinds that are paused, by shard."""
        seconds = self._settings.timeout_seconds
        return await self._of_servers(
            sorted(self._ownership.owned), lambda some: self._store.paused_jobs(some, timeout_seconds=seconds)
        )

    async def pause(self, kind: str, *, paused: bool) -> int:
        """Pause or resume a kind on every owned shard. Returns how many there are. Raises what a write raises; shards
        done stay done."""
        check_kind(kind)
        shards = sorted(self._ownership.owned)
        await asyncio.gather(*(self._commit(PauseJobs(shard, kind, paused)) for shard in shards))
        self._searched_at = float("-inf")
        return len(shards)

    async def resume_failed(self, kind: str) -> int:
        """Have the jobs of a kind that are parked, or wait after a failure, done at once. Returns how many there were.
        Jobs that fail again meanwhile wait as usual."""
        resumed = set[int]()
        limit = self._settings.search_limit
        parked = JobQuery(limit, states=(JobState.PARKED,), kinds=(kind,))
        failing = JobQuery(limit, states=(JobState.WAITING,), kinds=(kind,), is_failing=True)
        shards = sorted(self._ownership.owned)
        for query in (parked, failing):
            while rows := [row for row in (await self._read(shards, query)).rows if row.id not in resumed]:
                await asyncio.gather(*(self._commit(ResumeJob(row.id)) for row in rows))
                resumed.update(row.id for row in rows)
        return len(resumed)

    # ---- care ------------------------------------------------------------------------------------------------------

    async def care(self) -> None:
        """Count the jobs, remove old ones, and add those that every shard has, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.care_seconds)
            await self.care_once()

    async def care_once(self) -> None:
        """Do one round of the care. What fails is done in the next one."""
        for step in (self._count, self._forget_ended, self._add_routine_jobs):
            try:
                await step()
            except TaoError as error:
                self._log.warning("jobs_not_cared_for", reason=error.message)

    async def _count(self) -> None:
        shards = sorted(self._ownership.owned)
        counts = dict.fromkeys(("waiting", "leased", "failing", "parked"), 0)
        seconds = self._settings.timeout_seconds
        found = await self._of_servers(shards, lambda some: self._store.count_jobs(some, timeout_seconds=seconds))
        if found.missing:
            self._log.warning("jobs_not_counted", shards=len(found.missing), of=len(shards))
        for each in found.rows:
            if each.state == JobState.PARKED:
                counts["parked"] += each.jobs
                continue
            counts["leased" if each.is_leased else "waiting"] += each.jobs
            if each.is_failing:
                counts["failing"] += each.jobs
        self.counts = counts

    async def _forget_ended(self) -> None:
        """Remove the jobs that ended long ago, some of every shard at a time, until few are left."""
        query = JobQuery(
            self._settings.search_limit,
            states=(JobState.DONE, JobState.CANCELLED),
            due_by_unix_ms=self._clock.unix_ms() - int(self._settings.keep_ended_seconds * 1000),
        )
        shards = sorted(self._ownership.owned)
        for _ in range(_FORGET_ROUNDS):
            rows, _ = await self._read(shards, query)
            await asyncio.gather(*(self._commit(ForgetJob(row.id)) for row in rows))
            of_shards = Counter(row.id >> SHARD_SHIFT for row in rows)
            shards = [shard for shard in shards if of_shards[shard] == query.limit]
            if not shards:
                return

    async def _add_routine_jobs(self) -> None:
        """Give every owned shard the job that purges removed edges, if the schema has types that remove edges so, and
        the one that folds counters, if it has counters."""
        schema = self._configuration.schema
        if any(atype.states for atype in schema.assocs):
            await self._add_where_missing(PURGE_KIND, purge_job_id, self._settings.purge_every_seconds)
        if schema.counters:
            await self._add_where_missing(FOLD_KIND, fold_job_id, self._settings.fold_every_seconds)

    async def _add_where_missing(self, kind: str, id_of: Callable[[int], int], repeat_seconds: int) -> None:
        query = JobQuery(1, kinds=(kind,))
        shards = sorted(self._ownership.owned)
        rows, missing = await self._read(shards, query)
        lacking = set(shards) - missing - {row.id >> SHARD_SHIFT for row in rows}
        jobs = [
            NewJob(id_of(shard), kind, JobPriority.LOW, msgspec.msgpack.encode({"shard": shard}), repeat_seconds)
            for shard in sorted(lacking)
        ]
        await asyncio.gather(*(self._commit(AddJob(job)) for job in jobs))

    async def _commit(
        self, write: AddJob | LeaseJob | ReportJob | ResumeJob | ForgetJob | PauseJobs, until: float = math.inf
    ) -> WriteOutcome:
        self._writes.check(write)
        deadline = min(until, self._clock.monotonic() + self._settings.timeout_seconds)
        return (await self._writes.commit(write, deadline, both_sides=True)).outcome

    def register(self, metrics: Metrics) -> None:
        """Register the metrics."""
        metrics.gauge_family(
            "background_jobs",
            "Background jobs of this leader's shards, by state: waiting, leased to a worker, waiting after a failure, "
            "parked after too many.",
            "state",
            lambda: self.counts,
        )
        metrics.gauge_family(
            "job_events_total",
            "Leases of background jobs given to workers, their reports accepted, their reports refused because the "
            "lease had gone to another worker, and the pages that failed.",
            "event",
            lambda: {
                "leased": self.leased,
                "reported": self.reported,
                "report_refused": self.refused_reports,
                "failed": self.failures,
            },
        )


def purge_job_id(shard: int) -> int:
    """Return the id of a shard's purge job: below all that are given out, so that there is one at most."""
    return make_id(shard, EPOCH_UNIX_MS, 1)


def fold_job_id(shard: int) -> int:
    """Return the id of the job that folds a shard's counters, likewise."""
    return make_id(shard, EPOCH_UNIX_MS, 2)
