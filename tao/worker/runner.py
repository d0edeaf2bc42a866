"""Lease jobs and do them, page by page: the loop of a worker.

A job's cursor is reported after every page, before the next one begins; a report that gets no answer is repeated, and
without one until the end of the lease the job is left to another worker. So two workers hold one job for at most one
lease: the time is that of the loop, and it begins before the lease is asked for. A page has half a lease, so that there
is time to report it.

Each priority has slots of its own, so that a job of low priority waits for none of a higher one. All jobs of one kind
share its pace."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from tao.client import Graph
from tao.model.errors import SettingsError, TaoError
from tao.model.jobs import MAX_JOB_CURSOR_BYTES, MAX_JOB_LEASE_MS, MAX_JOB_LEASES, JobPriority, JobRow
from tao.model.ports import Clock
from tao.model.writes import ReportJob
from tao.observability.logs import Logger
from tao.observability.metrics import Metrics
from tao.worker.kinds import JobKind, Page, PageWaits
from tao.worker.leaders import JobLeaders

_FIRST_RETRY_SECONDS: Final = 0.1
_LAST_RETRY_SECONDS: Final = 2.0
_PAGES_PER_SECOND: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """How many jobs a worker does, and how fast."""

    high_jobs: int = 8
    """Jobs of high priority side by side. Each has one page under way."""

    normal_jobs: int = 4
    """Jobs of normal priority side by side."""

    low_jobs: int = 2
    """Jobs of low priority side by side, which no others take the place of."""

    lease_seconds: float = 30.0
    """Time for which a job is leased, from its last page on: the job of a lost worker waits that long. A page has to be
    done in half of it."""

    poll_seconds: float = 1.0
    """Pause between two requests for jobs while there is room for more."""

    page_edges: int = 500
    """Edges or objects of one page, at most. What a lost worker did last is done again, so much at most."""

    edges_per_second: float = 2_000.0
    """The pace of each kind of jobs in this worker, also of what pages have only looked at. Low enough for those who
    are served beside it, who wait for the same databases."""

    pace_of_kinds: dict[str, float] = field(default_factory=dict)
    """The pace of kinds for which another one is wanted, in edges or objects a second."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.lease_seconds <= MAX_JOB_LEASE_MS / 1000:
            raise SettingsError(f"lease_seconds is {self.lease_seconds}; it must be 1 to {MAX_JOB_LEASE_MS // 1000}")
        for name, pace in {"edges_per_second": self.edges_per_second, **self.pace_of_kinds}.items():
            if pace <= 0:
                raise SettingsError(f"the pace of {name} is {pace}; it must be above 0")
        for name in ("high_jobs", "normal_jobs", "low_jobs"):
            if not 0 <= getattr(self, name) <= MAX_JOB_LEASES:
                raise SettingsError(f"{name} is {getattr(self, name)}; it must be 0 to {MAX_JOB_LEASES}")

    def slots(self, priority: JobPriority) -> int:
        """Return how many jobs of a priority may run."""
        return (self.high_jobs, self.normal_jobs, self.low_jobs)[priority]

    def pace(self, kind: str) -> float:
        """Return the edges a second of a kind."""
        return self.pace_of_kinds.get(kind, self.edges_per_second)

    def page_limit(self, kind: str) -> int:
        """Return the most edges of a page of a kind: a twentieth of a second's work, so that the jobs of the kind take
        turns, and those who are served beside them wait for short pages."""
        return max(1, int(min(self.page_edges, self.pace(kind) / _PAGES_PER_SECOND)))


class _LeaseLost(Exception):
    """The job is another worker's, or nobody's, or it was let go."""


@dataclass(slots=True)
class _HeldJob:
    """A job that this worker holds. ``until``: the end of its lease, in the clock's time."""

    row: JobRow
    until: float


class JobRunner:
    """Does the jobs of one worker."""

    def __init__(
        self,
        leaders: JobLeaders,
        kinds: Mapping[str, JobKind],
        settings: RunnerSettings,
        clock: Clock,
        log: Logger,
    ) -> None:
        self._leaders: Final = leaders
        self._kinds: Final = kinds
        self._settings: Final = settings
        self._clock: Final = clock
        self._log: Final = log
        self._running: Final[dict[asyncio.Task[None], JobRow]] = {}
        self._free_at: Final[dict[str, float]] = {}
        self._draining: Final = asyncio.Event()
        self._leasing: Final = asyncio.Lock()
        self.trouble = "no leader was asked for jobs yet"
        """Why no jobs can be had; empty while leaders answer."""
        self.pages: Final[Counter[str]] = Counter()
        self.edges: Final[Counter[str]] = Counter()
        self.failures: Final[Counter[str]] = Counter()
        self.lost_leases: Final[Counter[str]] = Counter()

    async def run(self, graph: Graph) -> None:
        """Lease and do jobs on a graph, until `drain` is called."""
        while not self._draining.is_set():
            await self.lease(graph)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.poll_seconds):
                    await self._draining.wait()

    async def lease(self, graph: Graph) -> None:
        """Lease as many jobs as there is room for, and begin them."""
        async with self._leasing:
            await self._lease(graph)

    async def _lease(self, graph: Graph) -> None:
        used = Counter(row.priority for row in self._running.values())
        limits = [max(0, self._settings.slots(priority) - used[priority]) for priority in JobPriority]
        if not any(limits):
            return
        asked_at = self._clock.monotonic()
        try:
            rows = await self._leaders.lease(sorted(self._kinds), limits, self._lease_ms)
        except TaoError as error:
            if not self.trouble:
                self._log.warning("jobs_not_leased", reason=error.message)
            self.trouble = error.message or error.reason
            return
        self.trouble = ""
        for row in rows:
            held = _HeldJob(row, asked_at + self._settings.lease_seconds)
            task = asyncio.get_running_loop().create_task(self._do(graph, held), name=f"job {row.id}")
            self._running[task] = row
            task.add_done_callback(self._ended)

    async def drain(self) -> None:
        """Lease no more, and return when the pages under way are reported and the jobs let go, also those of a request
        for jobs that is under way."""
        self._draining.set()
        async with self._leasing:
            pass
        await self._wait()

    async def _wait(self) -> None:
        if self._running:
            await asyncio.wait(list(self._running))

    async def close(self) -> None:
        """Stop what is left. Its jobs go to other workers at the end of their leases."""
        for task in self._running:
            task.cancel()
        self._draining.set()
        await self._wait()

    @property
    def _lease_ms(self) -> int:
        return int(self._settings.lease_seconds * 1000)

    def _ended(self, task: asyncio.Task[None]) -> None:
        row = self._running.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("job_abandoned", job=row.id, kind=row.kind, exc_info=error)

    async def _do(self, graph: Graph, held: _HeldJob) -> None:
        """Do the pages of a job until it ends, fails or is lost."""
        try:
            while held.row.worker:
                await self._do_page(graph, held)
        except _LeaseLost as lost:
            self.lost_leases[held.row.kind] += 1
            self._log.info("job_lease_lost", job=held.row.id, kind=held.row.kind, reason=str(lost))

    async def _do_page(self, graph: Graph, held: _HeldJob) -> None:
        """Do one page and report it; keep the pace after it."""
        row = held.row
        pace = self._settings.pace(row.kind)
        limit = self._settings.page_limit(row.kind)
        seconds = min(self._settings.lease_seconds / 2, held.until - self._clock.monotonic())
        if self._draining.is_set() or seconds < self._settings.lease_seconds / 4:
            # The worker stops, or leaders were slow to answer. The job has not failed: its next lease begins anew.
            why = "the worker stops" if self._draining.is_set() else "too little of its lease is left for a page"
            self._log.info("job_let_go", job=row.id, kind=row.kind, reason=why)
            await self._report(held, ReportJob(row.id, row.kind, row.leases, row.cursor, row.edges))
            return
        try:
            async with asyncio.timeout(seconds):
                page = await self._kinds[row.kind].page(graph, row.body, row.cursor, limit)
            _check(page)
        except PageWaits as waits:
            self._log.info("job_page_waits", job=row.id, kind=row.kind, reason=str(waits))
            report = ReportJob(row.id, row.kind, row.leases, waits.cursor, row.edges, error=str(waits))
            await self._report(held, msgspec.structs.replace(report, pause_ms=int(waits.seconds * 1000)))
            return
        except Exception as error:  # noqa: BLE001 - a function of an application may raise anything; it is reported
            await self._report_failure(held, error, seconds)
            return
        self.pages[row.kind] += 1
        self.edges[row.kind] += page.edges
        goes_on = not page.done and not self._draining.is_set()
        report = ReportJob(
            *(row.id, row.kind, row.leases, page.cursor, row.edges + page.edges),
            done=page.done,
            lease_ms=self._lease_ms if goes_on else 0,
        )
        await self._report(held, report)
        await self._keep_pace(held, (page.edges if page.done else limit) / pace)

    async def _report_failure(self, held: _HeldJob, error: Exception, seconds: float) -> None:
        row = held.row
        self.failures[row.kind] += 1
        if isinstance(error, TimeoutError):
            text = f"the page was not done in {seconds:.1f} s, half a lease (runner.lease_seconds)"
        else:
            text = error.message if isinstance(error, TaoError) else str(error)
        named = f"{error.reason if isinstance(error, TaoError) else type(error).__name__}: {text}"
        self._log.warning("job_page_failed", job=row.id, kind=row.kind, reason=named)
        await self._report(held, ReportJob(row.id, row.kind, row.leases, row.cursor, row.edges, error=named))

    async def _report(self, held: _HeldJob, report: ReportJob) -> None:
        """Report until there is an answer. Raises `_LeaseLost` when the lease is, or ends before that."""
        pause = _FIRST_RETRY_SECONDS
        while True:
            asked_at = self._clock.monotonic()
            try:
                row = await self._leaders.report(report)
            except TaoError as error:
                if self._clock.monotonic() + pause >= held.until:
                    raise _LeaseLost(f"it could not be reported until its lease ended: {error.message}") from error
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LAST_RETRY_SECONDS)
                continue
            if row is None:
                raise _LeaseLost("another worker has it, or it was cancelled")
            held.row, held.until = row, asked_at + self._settings.lease_seconds
            return

    async def _keep_pace(self, held: _HeldJob, seconds: float) -> None:
        """Wait until the next page of the kind may begin, and keep the lease meanwhile."""
        now = self._clock.monotonic()
        kind = held.row.kind
        until = self._free_at[kind] = max(now, self._free_at.get(kind, now)) + seconds
        while held.row.worker and (left := until - self._clock.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, self._settings.lease_seconds / 3)):
                    await self._draining.wait()
            if self._draining.is_set() or self._clock.monotonic() < until:
                row = held.row
                lease_ms = 0 if self._draining.is_set() else self._lease_ms
                await self._report(
                    held, ReportJob(row.id, row.kind, row.leases, row.cursor, row.edges, lease_ms=lease_ms)
                )

    def register(self, metrics: Metrics) -> None:
        """Register the metrics."""
        metrics.gauge_family(
            "worker_jobs",
            "Jobs that this worker holds, by kind.",
            "kind",
            lambda: dict(Counter(row.kind for row in self._running.values())),
        )
        for name, text, counts in (
            ("job_pages_total", "Pages of jobs that were done, by kind.", self.pages),
            ("job_edges_total", "Edges and objects that pages have handled, by kind.", self.edges),
            ("job_failures_total", "Pages of jobs that failed, by kind.", self.failures),
            (
                "job_lost_leases_total",
                "Jobs that were lost to another worker, or cancelled, by kind.",
                self.lost_leases,
            ),
        ):
            metrics.gauge_family(name, text, "kind", partial(dict, counts))

    def summary(self) -> dict[str, object]:
        """Return the numbers for `/stats`."""
        return {
            "jobs": [
                {"id": row.id, "kind": row.kind, "edges": row.edges}
                for row in sorted(self._running.values(), key=lambda row: row.id)
            ],
            "pages": dict(self.pages),
            "edges": dict(self.edges),
            "failures": dict(self.failures),
            "lost_leases": dict(self.lost_leases),
            "trouble": self.trouble,
        }


def _check(page: Page) -> None:
    """Raise `ValueError` for a cursor that no leader would keep."""
    if len(page.cursor) > MAX_JOB_CURSOR_BYTES:
        raise ValueError(f"the cursor of the page is {len(page.cursor)} bytes; at most {MAX_JOB_CURSOR_BYTES} are kept")
