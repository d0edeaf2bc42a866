"""The writes of a run and the answers that reads may therefore have, without I/O.

A *register* is an object's field, an edge or the head of a list, to which one write is made at a time. So its history
is a sequence: write 1, write 2, each with its outcome. A read may return any write that was not refused, from its
*floor* on: the last write that this read has to see, by its demand. After a write of unknown outcome nothing is written
until the outcome is found (`Register.settle`), so the history stays a sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class RecordedOutcome(StrEnum):
    """The outcome of a write."""

    PENDING = "pending"
    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"
    """Its error says that nothing was written."""
    UNKNOWN = "unknown"


class ReadVerdict(StrEnum):
    """The judgement of an answer."""

    RIGHT = "right"
    STALE = "stale"
    """It shows an earlier write than the read had to see."""
    WRONG = "wrong"
    """It shows something that was never written, or a write that was refused."""


@dataclass(slots=True)
class RecordedWrite:
    """One write: its value, None for a removal, and when it began, in seconds of the run."""

    number: int
    value: int | None
    began: float
    outcome: RecordedOutcome = RecordedOutcome.PENDING


class Register:
    """The history of one key. Values are never used twice, but for None."""

    def __init__(self, initial: int | None) -> None:
        """``initial`` is the value before the first write."""
        self.writes: Final = [RecordedWrite(0, initial, 0.0, RecordedOutcome.ACKNOWLEDGED)]
        self.busy = False
        """Whether a write is pending, or one of unknown outcome is not settled."""
        self._ack_times: Final[list[float]] = [0.0]
        self._ack_numbers: Final[list[int]] = [0]
        self._refused = 0

    @property
    def last(self) -> RecordedWrite:
        """The latest write."""
        return self.writes[-1]

    def begin(self, value: int | None, now: float) -> RecordedWrite:
        """Begin the next write. The caller makes sure that there is one at a time."""
        write = RecordedWrite(len(self.writes), value, now)
        self.writes.append(write)
        self.busy = True
        return write

    def end(self, write: RecordedWrite, outcome: RecordedOutcome, now: float) -> None:
        """Record the outcome of a write."""
        write.outcome = outcome
        self.busy = outcome is RecordedOutcome.UNKNOWN
        self._refused += outcome is RecordedOutcome.REFUSED
        if outcome is RecordedOutcome.ACKNOWLEDGED:
            self._ack_times.append(now)
            self._ack_numbers.append(write.number)

    def settle(self, found: int | None, now: float) -> ReadVerdict:
        """Decide the outcome of the last write by what a critical read found after the last moment at which the write
        may still happen, and judge that read."""
        write = self.last
        before = self.writes[self._ack_numbers[-1]]
        # When both have the same value, the outcome makes no difference.
        happened = found == write.value and found != before.value
        self.end(write, RecordedOutcome.ACKNOWLEDGED if happened else RecordedOutcome.REFUSED, now)
        return self.judge(found, self._ack_numbers[-1], now)

    def acknowledged_before(self, moment: float) -> int:
        """Return the number of the last write that was acknowledged by then, 0 for none."""
        return self._ack_numbers[bisect_right(self._ack_times, max(0.0, moment)) - 1]

    def judge(self, found: int | None, floor: int, ended: float) -> ReadVerdict:
        """Judge an answer that came at ``ended`` to a read that has to see write ``floor`` or a later one."""
        possible = self._write_of(found, ended)
        if possible is None:
            return ReadVerdict.WRONG
        return ReadVerdict.RIGHT if possible >= floor else ReadVerdict.STALE

    def judge_existence(self, found: bool, floor: int, ended: float) -> ReadVerdict:
        """Judge an answer that says only whether there is a value."""
        possible = next((each.number for each in self._possible(ended) if (each.value is not None) == found), None)
        if possible is None:
            return ReadVerdict.WRONG
        return ReadVerdict.RIGHT if possible >= floor else ReadVerdict.STALE

    def judge_member(self, number: int, found: bool, floor: int, ended: float) -> ReadVerdict:
        """Judge an answer that says whether a list has the edge of write ``number``. The list began empty, and edges
        are only added."""
        write = self.writes[number]
        if found:
            return ReadVerdict.RIGHT if write in self._possible(ended) else ReadVerdict.WRONG
        is_missed = number <= floor and write.outcome is RecordedOutcome.ACKNOWLEDGED
        return ReadVerdict.STALE if is_missed else ReadVerdict.RIGHT

    def judge_count(self, count: int, floor: int, ended: float) -> ReadVerdict:
        """Judge the number of edges of a list that began empty and to which edges were only added."""
        least = bisect_right(self._ack_numbers, floor) - 1
        most = (
            len(self.writes)
            - 1
            - self._refused
            - (self.last.began > ended and self.last.outcome is not RecordedOutcome.REFUSED)
        )
        if count < least:
            return ReadVerdict.STALE
        return ReadVerdict.RIGHT if count <= most else ReadVerdict.WRONG

    def judge_head(self, values: Sequence[int], floor: int, ended: float) -> ReadVerdict:
        """Judge the newest edges of such a list, newest first: between the first and the last none may be missing."""
        verdict = self.judge(values[0] if values else None, floor, ended)
        if verdict is not ReadVerdict.RIGHT or not values:
            return verdict
        have = set(values)
        for write in reversed(self.writes):
            if write.value is None or write.value < values[-1]:
                break
            if write.value < values[0] and write.outcome is RecordedOutcome.ACKNOWLEDGED and write.value not in have:
                return ReadVerdict.WRONG
        return ReadVerdict.RIGHT

    def misplaced(self, values: Collection[int]) -> tuple[list[RecordedWrite], list[RecordedWrite]]:
        """Return the acknowledged writes that are missing in such a list, and the refused ones that are there."""
        writes = self.writes[1:]
        missing = [
            write for write in writes if write.outcome is RecordedOutcome.ACKNOWLEDGED and write.value not in values
        ]
        return missing, [
            write for write in writes if write.outcome is RecordedOutcome.REFUSED and write.value in values
        ]

    def number_of(self, found: int | None) -> int:
        """Return the number of the last write of this value, 0 when there is none."""
        return self._write_of(found, float("inf")) or 0

    def _write_of(self, found: int | None, ended: float) -> int | None:
        return next((write.number for write in self._possible(ended) if write.value == found), None)

    def _possible(self, ended: float) -> Iterator[RecordedWrite]:
        """Yield the writes that an answer which came at ``ended`` may show, from the last one on."""
        for write in reversed(self.writes):
            if write.outcome is not RecordedOutcome.REFUSED and write.began <= ended:
                yield write
