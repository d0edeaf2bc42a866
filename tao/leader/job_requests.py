"""Handle the requests of workers and operators about background jobs, and read rows of shards for workers.

A page of rows is examined within bounds, whatever is found in it: a type that has few rows among many others is found
in many small reads and not in a long one, which readers and writers beside it would feel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from tao.leader.jobs import JobPath, JobSettings
from tao.leader.ownership import Ownership
from tao.leader.write_path import WritePath, Written
from tao.model.counters import FOLDED_SLOT, decode_totals, may_be_dropped
from tao.model.edge_states import State
from tao.model.errors import InternalError, InvalidArgument, TaoError
from tao.model.graph import ABSENT, EdgeKey, ListKey
from tao.model.jobs import JobQuery
from tao.model.ports import ShardScans, StoredState
from tao.model.writes import FoldCounter, PurgeEdge, ReportJob
from tao.planning.counters import MAX_FOLDED_SLOTS
from tao.planning.edge_states import purge_before_unix_s, removed_by_nodes_us
from tao.planning.row_events import EDGES_TABLE
from tao.routing.budgets import work_seconds
from tao.serving.configuration import ServerContext
from tao.wire.convert import error_to_pb, job_to_pb
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb

MAX_SCANNED_ROWS: Final = 2_000
"""Rows that one request examines: some ten milliseconds of the database."""
MAX_LISTED_JOBS: Final = 10_000
MAX_REPORTS: Final = 256
"""Reports in one request."""
_AT_ONCE: Final = 32
"""Removed edges that are purged, or counters that are folded, side by side. They share transactions with the writes of
callers."""


class JobRequests:
    """Handles the requests about jobs that `tao.serving.requests.LEADER_RULES` admits."""

    def __init__(
        self,
        context: ServerContext,
        settings: JobSettings,
        jobs: JobPath,
        ownership: Ownership,
        writes: WritePath,
        scans: ShardScans,
    ) -> None:
        self._fold_after_seconds: Final = settings.fold_after_seconds
        self._jobs: Final = jobs
        self._ownership: Final = ownership
        self._writes: Final = writes
        self._scans: Final = scans
        self._configuration: Final = context.configuration
        self._clock: Final = context.clock
        self._spawn: Final = context.spawn_as("jobs")

    @property
    def handlers(self) -> dict[str, Callable[[pb.Request, Reply], None]]:
        """Return what handles each kind of request."""
        return {
            "lease_jobs": self.lease_jobs,
            "report_jobs": self.report_jobs,
            "scan_shard": self.scan_shard,
            "purge_removed": self.purge_removed,
            "fold_counters": self.fold_counters,
            "list_jobs": self.list_jobs,
            "change_jobs": self.change_jobs,
        }

    def lease_jobs(self, request: pb.Request, reply: Reply) -> None:
        """Lease jobs that are due to the worker that asks."""

        deadline = self._clock.monotonic() + work_seconds(request.deadline_ms)

        async def lease() -> pb.Answer:
            asked = request.lease_jobs
            leased = await self._jobs.lease(
                *(reply.peer.name, asked.kinds, asked.limits, asked.lease_ms),
                deadline=deadline,
                is_wanted=lambda: not reply.closed,
            )
            return pb.Answer(jobs=pb.JobList(jobs=map(job_to_pb, leased)))

        self._answer(lease(), reply)

    def report_jobs(self, request: pb.Request, reply: Reply) -> None:
        """Record reports of workers, each with its own result. Raises `InvalidArgument` for too many."""
        if len(request.report_jobs.reports) > MAX_REPORTS:
            raise InvalidArgument(
                f"{len(request.report_jobs.reports)} reports at once; at most {MAX_REPORTS} are taken"
            )

        async def report() -> pb.Answer:
            worker = reply.peer.name
            results = await asyncio.gather(*(self._report(each, worker) for each in request.report_jobs.reports))
            return pb.Answer(reported_jobs=pb.JobResults(results=results))

        self._answer(report(), reply)

    async def _report(self, report: pb.JobReport, worker: str) -> pb.JobResult:
        write = ReportJob(*(getattr(report, name) for name in ReportJob.__struct_fields__))
        try:
            outcome = await self._jobs.report(write, worker)
        except TaoError as error:
            return pb.JobResult(error=error_to_pb(error))
        return pb.JobResult(accepted=outcome.found, job=None if outcome.job is None else job_to_pb(outcome.job))

    def list_jobs(self, request: pb.Request, reply: Reply) -> None:
        """List the jobs of the owned shards, and the kinds that are paused."""

        async def look() -> pb.Answer:
            asked = request.list_jobs
            query = JobQuery(
                min(asked.limit or MAX_LISTED_JOBS, MAX_LISTED_JOBS),
                states=tuple(asked.states),
                kinds=(asked.kind,) if asked.kind else (),
                routine_kinds=tuple(asked.routine_kinds),
            )
            found, paused = await self._jobs.list_jobs(query), await self._jobs.paused()
            return pb.Answer(
                jobs=pb.JobList(
                    jobs=map(job_to_pb, found.rows),
                    paused=[pb.PausedKind(shard=each.shard, kind=each.kind) for each in paused.rows],
                    missing_shards=sorted(found.missing | paused.missing),
                    kinds=self._jobs.kinds,
                )
            )

        self._answer(look(), reply)

    def change_jobs(self, request: pb.Request, reply: Reply) -> None:
        """Pause or resume a kind of jobs on the owned shards."""

        async def change() -> pb.Answer:
            asked = request.change_jobs
            if asked.WhichOneof("change") == "pause_kind":
                shards = await self._jobs.pause(asked.pause_kind, paused=True)
                return pb.Answer(changed_jobs=pb.ChangedJobs(shards=shards))
            shards = await self._jobs.pause(asked.resume_kind, paused=False)
            resumed = await self._jobs.resume_failed(asked.resume_kind)
            return pb.Answer(changed_jobs=pb.ChangedJobs(shards=shards, resumed=resumed))

        self._answer(change(), reply)

    def scan_shard(self, request: pb.Request, reply: Reply) -> None:
        """Return a page of the objects or edges of an owned shard. Raises `NotMine` or `InvalidArgument`."""
        asked = request.scan_shard
        self._ownership.row(asked.shard)
        limit = _checked_limit(asked.limit)
        self._answer(self._scan_edges(asked, limit) if asked.atype else self._scan_objects(asked, limit), reply)

    async def _scan_objects(self, asked: pb.ScanShard, limit: int) -> pb.Answer:
        rows = await self._scans.scan_object_types(asked.shard, asked.after.id1, limit)
        found = [
            object_id for object_id, otype in rows if otype != ABSENT and (not asked.otype or otype == asked.otype)
        ]
        last = pb.RowKey(id1=rows[-1][0]) if rows else asked.after
        return pb.Answer(shard_scan=pb.ShardScan(id1s=found, last=last, done=len(rows) < limit))

    async def _scan_edges(self, asked: pb.ScanShard, limit: int) -> pb.Answer:
        table = self._configuration.schema.atype(asked.atype).table or EDGES_TABLE
        rows = await self._scans.scan_edges(asked.shard, table, _edge_key(asked.after), limit)
        found = [(key, edge) for key, edge in rows if key.atype == asked.atype]
        return pb.Answer(
            shard_scan=pb.ShardScan(
                id1s=[key.id1 for key, _ in found],
                id2s=[key.id2 for key, _ in found],
                times=[edge.time for _, edge in found],
                last=_row_key(rows[-1][0]) if rows else asked.after,
                done=len(rows) < limit,
            )
        )

    def purge_removed(self, request: pb.Request, reply: Reply) -> None:
        """Purge a page of the removed edges of an owned shard. Raises `NotMine` or `InvalidArgument`."""
        asked = request.purge_removed
        self._ownership.row(asked.shard)
        deadline = self._clock.monotonic() + work_seconds(request.deadline_ms)
        self._answer(self._purge(asked, _checked_limit(asked.limit), deadline), reply)

    async def _purge(self, asked: pb.PurgeRemoved, limit: int, deadline: float) -> pb.Answer:
        rows = await self._scans.scan_states(asked.shard, _edge_key(asked.after), limit)
        writes = [write for row in rows if (write := self._purge_of(row)) is not None]
        purged = sum(each.outcome.found for each in await self._commit_all(writes, deadline))
        last = _row_key(rows[-1].key) if rows else asked.after
        return pb.Answer(purged_edges=pb.PurgedEdges(purged=purged, last=last, done=len(rows) < limit))

    async def _commit_all(self, writes: Sequence[PurgeEdge | FoldCounter], deadline: float) -> list[Written]:
        """Commit some writes at a time. Raises the first error."""
        written: list[Written] = []
        for start in range(0, len(writes), _AT_ONCE):
            some = writes[start : start + _AT_ONCE]
            written += await asyncio.gather(*(self._writes.commit(write, deadline, both_sides=True) for write in some))
        return written

    def _purge_of(self, row: StoredState) -> PurgeEdge | None:
        """Return the write that purges an edge, or None if it is not removed, or not for long enough."""
        schema, key, registers = self._configuration.schema, row.key, row.registers
        if not schema.knows_atype(key.atype) or schema.atype(key.atype).state is not State.REMOVED:
            return None
        group = schema.atype(schema.atype(key.atype).states[State.NORMAL])
        horizon = purge_before_unix_s(group, self._clock.unix_ms())
        # A row that no leader has written has no time of change; its operations have theirs.
        changed_unix_s = row.changed_unix_s or max(registers.state_us, registers.payload_us) // 1_000_000
        # The state of the node at this end is compared under lock.
        if max(changed_unix_s, removed_by_nodes_us(registers) // 1_000_000) > horizon:
            return None
        return PurgeEdge(key.id1, group.number, key.id2, registers)

    def fold_counters(self, request: pb.Request, reply: Reply) -> None:
        """Fold a page of the slots of counters of an owned shard. Raises `NotMine` or `InvalidArgument`."""
        asked = request.fold_counters
        self._ownership.row(asked.shard)
        deadline = self._clock.monotonic() + work_seconds(request.deadline_ms)
        self._answer(self._fold(asked, _checked_limit(asked.limit), deadline), reply)

    async def _fold(self, asked: pb.FoldCounters, limit: int, deadline: float) -> pb.Answer:
        rows = await self._scans.scan_states(asked.shard, _edge_key(asked.after), limit)
        by_counter: dict[ListKey, list[int]] = {}
        for row in rows:
            if self._is_to_be_folded(row):
                by_counter.setdefault(ListKey(row.key.id1, row.key.atype), []).append(row.key.id2)
        writes = [
            FoldCounter(key.id1, key.atype, tuple(slots[start : start + MAX_FOLDED_SLOTS]))
            for key, slots in by_counter.items()
            for start in range(0, len(slots), MAX_FOLDED_SLOTS)
        ]
        written = await self._commit_all(writes, deadline)
        folded = sum(len(write.slots) for write, each in zip(writes, written, strict=True) if each.outcome.found)
        last = _row_key(rows[-1].key) if rows else asked.after
        return pb.Answer(folded_counters=pb.FoldedCounters(folded=folded, last=last, done=len(rows) < limit))

    def _is_to_be_folded(self, row: StoredState) -> bool:
        """Return whether a row is a slot that counts something although it has not changed for long, or one that is
        folded and needed no more."""
        schema, key, now_unix_s = self._configuration.schema, row.key, self._clock.unix_ms() // 1000
        if not schema.knows_atype(key.atype) or schema.atype(key.atype).counter is None or key.id2 == FOLDED_SLOT:
            return False
        if may_be_dropped(key.id2, now_unix_s):
            return True
        is_idle = row.changed_unix_s + self._fold_after_seconds <= now_unix_s
        return is_idle and decode_totals(row.registers.data).value != 0

    def _answer(self, work: Coroutine[Any, Any, pb.Answer], reply: Reply) -> None:
        async def run() -> None:
            try:
                answer = await work
            except TaoError as error:
                answer = pb.Answer(error=error_to_pb(error))
            except Exception as error:
                why = InternalError(f"{type(error).__name__} in the handling of jobs; see the leader's log")
                reply.send(pb.Answer(error=error_to_pb(why)))
                raise
            reply.send(answer)

        self._spawn(run())


def _checked_limit(limit: int) -> int:
    if not 1 <= limit <= MAX_SCANNED_ROWS:
        raise InvalidArgument(f"{limit} rows cannot be examined at once; ask for 1 to {MAX_SCANNED_ROWS}")
    return limit


def _edge_key(key: pb.RowKey) -> EdgeKey:
    return EdgeKey(key.id1, key.atype, key.id2)


def _row_key(key: EdgeKey) -> pb.RowKey:
    return pb.RowKey(id1=key.id1, atype=key.atype, id2=key.id2)
