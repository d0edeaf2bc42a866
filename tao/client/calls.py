"""One batch on its way to one server: what was asked, who waits for which slot, and what the answers mean.

Answers come in parts, hits first. A slot is settled when its value comes, and its waiter then leaves the list; what is
left when the last answer has come has failed. What may be asked again, and where, the dispatcher decides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple

from tao.client.columns import Groups, Row, kind_and_row, write_batch
from tao.client.lanes import Lane, WriteRow
from tao.client.waiting import Result, Waiter, is_cancelled, settle
from tao.model.errors import ProtocolError, TaoError
from tao.model.ids import SHARD_SHIFT
from tao.wire.convert import error_from_pb
from tao.wire.v1 import session_pb2 as pb


class Attempt(NamedTuple):
    """Which try a call is: the lanes asked so far, this call's last, and the loop time by which the caller wants its
    answer."""

    tried: tuple[Lane, ...]
    deadline: float


class Failure(NamedTuple):
    """A slot that the server did not answer, and why."""

    slot: int
    error: TaoError


class Call(ABC, Generic[Result]):
    """A batch under way. ``waiters[slot]`` is None once the slot is settled or handed back."""

    __slots__ = ("attempt", "lane", "size", "waiters")

    def __init__(self, attempt: Attempt, waiters: list[Waiter[Result] | None]) -> None:
        self.attempt = attempt
        self.lane = attempt.tried[-1]
        self.size = len(waiters)
        self.waiters = waiters

    @abstractmethod
    def request(self) -> pb.Request:
        """The message to send, without number, deadline and topology version."""

    @abstractmethod
    def shard_of(self, slot: int) -> int:
        """The shard that decides where the slot is asked."""

    @abstractmethod
    def take(self, answer: pb.Answer) -> list[Failure]:
        """Settle what this part answers and return what it says has failed. Raises `ProtocolError`."""

    def unsettled(self, error: pb.Error) -> list[Failure]:
        """All slots without an answer, each with an error instance of its own."""
        return [Failure(slot, error_from_pb(error)) for slot, each in enumerate(self.waiters) if each is not None]

    def hand_back(self, slot: int) -> Waiter[Result] | None:
        """Take the waiter of a failed slot out, or None when it was settled before. Raises `ProtocolError`."""
        try:
            waiter = self.waiters[slot]
        except IndexError:
            raise ProtocolError(f"the answer names slot {slot} of a batch of {self.size}") from None
        self.waiters[slot] = None
        return waiter

    def is_forsaken(self) -> bool:
        """Everybody who waited has been cancelled."""
        return all(map(is_cancelled, self.waiters))


class ReadCall(Call[bytes]):
    """Read queries; results are encoded values."""

    __slots__ = ("critical", "groups", "known", "max_staleness_ms", "minimums")

    def __init__(
        self,
        attempt: Attempt,
        groups: Groups,
        waiters: list[Waiter[bytes] | None],
        *,
        critical: bool,
        minimums: Mapping[int, int],
        max_staleness_ms: int,
        known: Mapping[int, bytes],
    ) -> None:
        """``known``: slot → the answer that is kept here, whose version is its minimum."""
        super().__init__(attempt, waiters)
        self.known = known
        self.groups = groups
        self.critical = critical
        self.minimums = minimums
        self.max_staleness_ms = max_staleness_ms

    def request(self) -> pb.Request:
        request = pb.Request()
        # Written where it lies: a message given to another is copied, by encoding and decoding it.
        write_batch(request.read, self.groups, self.critical, self.minimums, self.max_staleness_ms, self.known)
        return request

    def query(self, slot: int) -> tuple[int, Row]:
        """Kind and row of a slot."""
        return kind_and_row(self.groups, slot)

    def shard_of(self, slot: int) -> int:
        object_id: int = self.query(slot)[1][0]
        return object_id >> SHARD_SHIFT

    def part(self, attempt: Attempt, slots: Sequence[int], waiters: list[Waiter[bytes] | None]) -> ReadCall:
        """A call for some of the slots, given in ascending order."""
        groups: tuple[list[Row], ...] = ([], [], [], [], [])
        for slot in slots:
            kind, row = self.query(slot)
            groups[kind].append(row)
        known = self.minimums
        minimums = {place: known[slot] for place, slot in enumerate(slots) if slot in known} if known else known
        kept = {place: self.known[slot] for place, slot in enumerate(slots) if slot in self.known}
        return ReadCall(
            attempt,
            groups,
            waiters,
            critical=self.critical,
            minimums=minimums,
            max_staleness_ms=self.max_staleness_ms,
            known=kept,
        )

    def take(self, answer: pb.Answer) -> list[Failure]:
        part = answer.read
        values: Sequence[bytes] = part.values[:]
        slots: Sequence[int] = part.slots[:] or range(len(values))
        waiters = self.waiters
        if len(slots) != len(values) or (slots and max(slots) >= self.size):
            raise ProtocolError(f"the answer's slots do not fit a batch of {self.size} queries")
        if self.known:
            values = [value or self.known.get(slot, b"") for slot, value in zip(slots, values, strict=True)]
        for slot, value in zip(slots, values, strict=True):
            waiter = waiters[slot]
            if waiter is not None:
                waiters[slot] = None
                # `settle`, written out: this loop is what a client spends its time on.
                if isinstance(waiter, tuple):
                    waiter[0].put(waiter[1], value)
                elif not waiter.done():
                    waiter.set_result(value)
        if part.failed_slots:
            pairs = zip(part.failed_slots, part.errors, strict=False)
            return [Failure(slot, error_from_pb(error)) for slot, error in pairs]
        return []


class WriteCall(Call[pb.WriteResult]):
    """Writes; results say what was found."""

    __slots__ = ("rows",)

    def __init__(
        self, attempt: Attempt, rows: Sequence[WriteRow], waiters: list[Waiter[pb.WriteResult] | None]
    ) -> None:
        super().__init__(attempt, waiters)
        self.rows = rows

    def request(self) -> pb.Request:
        return pb.Request(write=pb.WriteBatch(writes=[write for _, write in self.rows]))

    def shard_of(self, slot: int) -> int:
        return self.rows[slot][0]

    def part(self, attempt: Attempt, slots: Sequence[int], waiters: list[Waiter[pb.WriteResult] | None]) -> WriteCall:
        """A call for some of the slots."""
        return WriteCall(attempt, [self.rows[slot] for slot in slots], waiters)

    def take(self, answer: pb.Answer) -> list[Failure]:
        part = answer.write
        failures: list[Failure] = []
        for slot, result in zip(part.slots or range(len(part.results)), part.results, strict=False):
            if result.HasField("error"):
                failures.append(Failure(slot, error_from_pb(result.error)))
                continue
            waiter = self.hand_back(slot)
            if waiter is not None:
                settle(waiter, result)
        return failures
