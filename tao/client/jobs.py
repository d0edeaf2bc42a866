"""Background jobs: add one, follow it, cancel it. Workers do them (`tao.worker`)."""

# ruff: noqa: A002 - `id` is what an id is called in the paper, the design and every other client
from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

import msgspec

from tao.client.server_queues import WriteRow
from tao.client.two_hops import TwoHopOperations
from tao.client.validation import check_id
from tao.client.values import Accepted
from tao.model.errors import DeadlineExceeded, InvalidArgument, UnknownJob
from tao.model.jobs import JOB_PRIORITIES, JobRow, JobState
from tao.model.writes import PlaceEdges
from tao.wire.convert import job_from_pb, write_to_pb
from tao.wire.v1 import session_pb2 as pb

_FIRST_POLL_SECONDS: Final = 0.05
_LAST_POLL_SECONDS: Final = 2.0


class Job:
    """A background job, as it was when it was last read: by `refresh`, `wait` or `cancel`."""

    def __init__(
        self, graph: JobOperations, id: int, row: JobRow | None = None, receipt: Accepted | None = None
    ) -> None:
        self._graph = graph
        self.id: Final = id
        """0 for the job of a node's state that a journal has accepted: its id is chosen when the write is made, so such
        a job cannot be followed. Wait for the write with `receipt`."""
        self._row = row
        self.receipt: Final = receipt
        """The receipt of a job that a journal has accepted (`Graph.journaled`). The job exists once the journal has
        made the write."""

    @property
    def state(self) -> str:
        """Return ``waiting`` (also while a worker has it), ``done``, ``parked`` (it failed too often), ``cancelled``,
        or ``unknown`` before it was read, and when there is none with this id: one that ended is kept for a week."""
        return "unknown" if self._row is None else JobState(self._row.state).label

    @property
    def done(self) -> bool:
        """Return whether the job has done all there was to do."""
        return self.state == JobState.DONE.label

    @property
    def edges(self) -> int:
        """Return how many edges or objects it has handled."""
        return 0 if self._row is None else self._row.edges

    @property
    def error(self) -> str:
        """Return why it failed last; empty if it has got further since, or never failed."""
        return "" if self._row is None else self._row.error

    async def refresh(self) -> Job:
        """Read the job from its shard. Raises `InvalidArgument` for a job without an id."""
        self._row = await self._graph._read_job(self._known_id())
        return self

    async def wait(self, timeout: float | None = None) -> Job:  # noqa: ASYNC109 - applications expect this name
        """Wait until the job is done, parked or cancelled; `state` says which. ``timeout`` in seconds. Raises
        `DeadlineExceeded`; the job goes on. Raises `UnknownJob` when there is none with this id, and `InvalidArgument`
        for a job without an id.

        A job that a journal has accepted exists only after its write is made, so this waits for that first, and raises
        why the write was given up when it is parked."""
        self._known_id()
        pause = _FIRST_POLL_SECONDS
        try:
            async with asyncio.timeout(timeout):
                await self._added()
                while (await self.refresh()).state == JobState.WAITING.label:
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, _LAST_POLL_SECONDS)
        except TimeoutError:
            raise DeadlineExceeded(f"job {self.id} is not done after {timeout} s; it goes on") from None
        if self._row is None:
            raise UnknownJob(f"there is no job {self.id}; one that has ended is kept for a week")
        return self

    async def cancel(self) -> bool:
        """End the job after the page that is under way. Return whether it is cancelled: one that is done stays done.
        Raises `InvalidArgument` for a job without an id."""
        self._row = await self._graph._cancel_job(self._known_id())
        return self.state == JobState.CANCELLED.label

    def _known_id(self) -> int:
        if self.receipt is not None and not self.id:
            raise InvalidArgument(
                "a journal has accepted this state of a node, and the id of its job is chosen when the write is made: "
                "job.receipt.applied() waits for the write. Or set the state outside of journaled() to have a "
                "job to wait for"
            )
        return self.id

    async def _added(self) -> None:
        """Wait until a journal has added the job."""
        while self._row is None and self.receipt is not None:
            with suppress(DeadlineExceeded):
                await self._graph.applied(self.receipt)
                return
            await asyncio.sleep(_FIRST_POLL_SECONDS)

    def __repr__(self) -> str:
        return f"<Job {self.id}: {self.state}, {self.edges} edges>"


class JobOperations(TwoHopOperations):
    """The background jobs of a graph."""

    def job(self, id: int) -> Job:
        """Return a handle of the job with this id. It is read when you ask for that."""
        return Job(self, check_id(id))

    async def add_job(
        self,
        kind: str,
        body: Mapping[str, object],
        *,
        near: int,
        priority: str = "normal",
        id: int | None = None,
    ) -> Job:
        """Add a job of a kind that workers know. ``near`` is an id on the shard that the job concerns. ``body`` is for
        the kind to read. ``priority``: ``high``, ``normal`` or ``low``. ``id`` is an id reserved before (`reserve_ids`)
        on that shard, which makes the operation idempotent.

        A worker does it with its own rights, so this takes the right to write all types (`PermissionDenied`)."""
        row = self._builder.add_job(kind, encoded_body(body), job_priority(priority), near, id)
        return self._added_job(row, await self._write(row))

    async def node_set_state(
        self, id: int, state: str, types: Iterable[str] | None = None, at: int | None = None
    ) -> Job:
        """Set the state of a node, ``normal``, ``archived`` or ``removed``, for its edges of these types; None: of all
        types with states that have this one. Each edge is shown in the highest of its own state and those of its two
        nodes, so ``normal`` restores what was there before. The node needs no object.

        Edges that are written from now on are in the node's state at once. A job moves the others, page by page; this
        returns it without waiting. The state stays as the job goes on, also when the job is cancelled: set the state
        again to have the edges moved.

        ``at`` is the time of the operation, as in `assoc_set_state`: the newest one wins. Raises `OperationAhead` and
        `OperationTooOld`."""
        row = self._builder.node_set_state(id, state, types, at)
        return self._added_job(row, await self._write(row))

    def _added_job(self, row: WriteRow, result: pb.WriteResult) -> Job:
        if result.accepted:
            return Job(self, row.write.add_job.id, receipt=self._receipt_of(row, result))
        return Job(self, result.job.id, job_from_pb(result.job))

    async def _place_edges(self, page: PlaceEdges) -> tuple[pb.PlacedPage, int]:
        """Do a page of the job of a node. Return its result, and the time at which the node's state was set last."""
        result = await self._write(self._builder.of_job(page.id1, write_to_pb(page)))
        return result.page, result.node.state_us

    async def _read_job(self, job_id: int) -> JobRow | None:
        read = self._builder.of_job(job_id, pb.Write(read_job=pb.ReadJob(id=job_id)))
        return _row_in(await self._write(read, priority=0))  # at once, in a journaled block too

    async def _cancel_job(self, job_id: int) -> JobRow | None:
        cancel = self._builder.of_job(job_id, pb.Write(cancel_job=pb.CancelJob(id=job_id)))
        return _row_in(await self._write(cancel, priority=0))


def job_priority(name: str) -> int:
    """Return the number of a job's priority. Raises `InvalidArgument`."""
    if name not in JOB_PRIORITIES:
        raise InvalidArgument(f"{name!r} is no priority of a job; use one of {', '.join(JOB_PRIORITIES)}")
    return JOB_PRIORITIES[name]


def encoded_body(body: Mapping[str, object]) -> bytes:
    """Return the body as it is stored. Raises `InvalidArgument` for a value that cannot be."""

    def plain(value: object) -> int:
        if isinstance(value, int):  # the id of an added object says more than an id does
            return int(value)
        raise InvalidArgument(f"a value of the job's body is a {type(value).__name__}, which cannot be stored")

    try:
        return msgspec.msgpack.encode(dict(body), enc_hook=plain)
    except OverflowError:
        raise InvalidArgument("the job's body has a number outside of -2^63 … 2^64-1, which cannot be stored") from None


def _row_in(result: pb.WriteResult) -> JobRow | None:
    return job_from_pb(result.job) if result.HasField("job") else None
