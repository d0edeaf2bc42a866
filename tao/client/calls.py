"""A batch on its way to one server: its queries, their waiters by slot, and the reading of its answers.

Answers come in parts, cache hits first. A slot whose value has come has its waiter resolved and removed; the waiters
that are left after the last part have failed. `tao.client.dispatcher` decides which of those are retried, and where.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from typing import Final, Generic, NamedTuple

from tao.client.batches import deliver
from tao.client.server_queues import (
    JoinedFuture,
    QueuedReads,
    Result,
    ServerQueue,
    Waiter,
    WriteRow,
    is_abandoned,
    resolve,
)
from tao.model.errors import ProtocolError, TaoError
from tao.model.ids import SHARD_SHIFT
from tao.wire.convert import error_from_pb
from tao.wire.read_batch import QueryRow, encode_rows, no_rows, row_at
from tao.wire.v1 import session_pb2 as pb

SkewedVersions = tuple[int, int]
"""Two versions of the topology because of which a batch was refused: the client's and the server's."""


class Attempt(NamedTuple):
    """The servers that a batch was sent to so far, the current one last, and the loop time by which the caller wants
    its answer. ``number`` counts the attempts, but for the ``refusals``: those that were refused for another version of
    the topology, at no cost."""

    tried: tuple[ServerQueue, ...]
    deadline: float
    number: int = 1
    refusals: tuple[SkewedVersions, ...] = ()


class Failure(NamedTuple):
    """A slot that the server did not answer, and why."""

    slot: int
    error: TaoError


class BatchCall(ABC, Generic[Result]):
    """A batch in flight. ``waiters[slot]`` is None once the slot is resolved or its waiter was taken.
    ``topology_version`` is the version by which it was sent."""

    __slots__ = ("attempt", "queue", "size", "topology_version", "waiters")

    def __init__(self, attempt: Attempt, waiters: list[Waiter[Result] | None]) -> None:
        self.attempt = attempt
        self.queue = attempt.tried[-1]
        self.size = len(waiters)
        self.topology_version = 0
        self.waiters = waiters

    @abstractmethod
    def request(self) -> pb.Request:
        """Return the message to send, without its number, deadline and topology version."""

    @abstractmethod
    def shard_of(self, slot: int) -> int:
        """Return the shard that decides which server the slot is sent to."""

    @abstractmethod
    def resolve(self, answer: pb.Answer) -> list[Failure]:
        """Resolve the slots that this part answers, and return the slots that it reports as failed. Raises
        `ProtocolError`."""

    def fail_unanswered(self, error: pb.Error) -> list[Failure]:
        """Return every slot without an answer as failed, each with an error instance of its own."""
        return [Failure(slot, error_from_pb(error)) for slot, each in enumerate(self.waiters) if each is not None]

    def take_waiter(self, slot: int) -> Waiter[Result] | None:
        """Remove and return the waiter of a slot, None when the slot was resolved before. Raises `ProtocolError` for a
        slot that the batch does not have."""
        try:
            waiter = self.waiters[slot]
        except IndexError:
            raise ProtocolError(f"the answer names slot {slot} of a batch of {self.size}") from None
        self.waiters[slot] = None
        return waiter

    def is_abandoned(self) -> bool:
        """Return whether no caller waits for this batch any more."""
        return all(map(is_abandoned, self.waiters))


class ReadCall(BatchCall[bytes]):
    """A batch of reads; results are encoded values."""

    __slots__ = ("reads",)

    def __init__(self, attempt: Attempt, reads: QueuedReads) -> None:
        super().__init__(attempt, reads.waiters)
        self.reads = reads

    def request(self) -> pb.Request:
        reads = self.reads
        request = pb.Request()
        # Write into the request's own batch: assigning a finished message would copy it by encoding and decoding.
        encode_rows(request.read, reads.rows, reads.critical, reads.minimums, reads.max_staleness_ms, reads.known)
        return request

    def query(self, slot: int) -> tuple[int, QueryRow]:
        """Return the operation and the row of a slot."""
        return row_at(self.reads.rows, slot)

    def shard_of(self, slot: int) -> int:
        object_id: int = self.query(slot)[1][0]
        return object_id >> SHARD_SHIFT

    def subset(self, attempt: Attempt, slots: Sequence[int], waiters: list[Waiter[bytes] | None]) -> ReadCall:
        """Return a call for some of the slots, which must be in ascending order."""
        rows: tuple[list[QueryRow], ...] = no_rows()
        for slot in slots:
            operation, row = self.query(slot)
            rows[operation].append(row)
        minimums, known = self.reads.minimums, self.reads.known
        return ReadCall(
            attempt,
            self.reads._replace(
                rows=rows,
                waiters=waiters,
                minimums={new: minimums[slot] for new, slot in enumerate(slots) if slot in minimums},
                known={new: known[slot] for new, slot in enumerate(slots) if slot in known},
            ),
        )

    def resolve(self, answer: pb.Answer) -> list[Failure]:
        part = answer.read
        values: Sequence[bytes] = part.values[:]
        slots: Sequence[int] | None = part.slots[:] or None
        if len(values) > self.size if slots is None else len(slots) != len(values) or max(slots) >= self.size:
            raise ProtocolError(f"the answer's slots do not fit a batch of {self.size} queries")
        known = self.reads.known
        if known:
            values = [value or known.get(slot, b"") for slot, value in zip(slots or count(), values, strict=False)]
        deliver(self.waiters, slots, values, JoinedFuture)
        if part.failed_slots:
            pairs = zip(part.failed_slots, part.errors, strict=False)
            return [Failure(slot, error_from_pb(error)) for slot, error in pairs]
        return []


_COUNTED: Final = pb.WriteResult(found=True)


class WriteCall(BatchCall[pb.WriteResult]):
    """A batch of writes; each result says what the write has found and changed. With a ``priority`` they are for the
    server's journal, and each result has a receipt."""

    __slots__ = ("priority", "rows")

    def __init__(
        self,
        attempt: Attempt,
        rows: Sequence[WriteRow],
        waiters: list[Waiter[pb.WriteResult] | None],
        priority: int = 0,
    ) -> None:
        super().__init__(attempt, waiters)
        self.rows = rows
        self.priority = priority

    def request(self) -> pb.Request:
        writes = [write for _, write in self.rows]
        if not self.priority:
            return pb.Request(write=pb.WriteBatch(writes=writes))
        return pb.Request(write=pb.WriteBatch(writes=writes, accept=True, priority=self.priority))

    def shard_of(self, slot: int) -> int:
        return self.rows[slot].shard

    def subset(self, attempt: Attempt, slots: Sequence[int], waiters: list[Waiter[pb.WriteResult] | None]) -> WriteCall:
        """Return a call for some of the slots."""
        return WriteCall(attempt, [self.rows[slot] for slot in slots], waiters, self.priority)

    def resolve(self, answer: pb.Answer) -> list[Failure]:
        part = answer.write
        failures: list[Failure] = []
        if part.all_counted:
            for slot in range(len(self.waiters)):
                waiter = self.take_waiter(slot)
                if waiter is not None:
                    resolve(waiter, _COUNTED)
            return failures
        for slot, result in zip(part.slots or range(len(part.results)), part.results, strict=False):
            if result.HasField("error"):
                failures.append(Failure(slot, error_from_pb(result.error)))
                continue
            waiter = self.take_waiter(slot)
            if waiter is not None:
                resolve(waiter, result)
        return failures
