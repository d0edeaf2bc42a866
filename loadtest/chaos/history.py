"""What clients wrote and what reads may therefore answer: the judge of a run, without I/O.

Each *register* is one thing that is written by one write at a time, whoever writes: an object's field, an edge, the
head of a list. So its history is a line: write 1, write 2 … each with what became of it. A read may answer with any
write that was not refused, from a *floor* on: the last write that this read has to see, by what it asked for. A write
whose outcome nobody knows rests its register until it is certain (`Register.settle`), so a line it stays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Fate(StrEnum):
    """What became of a write."""

    UNDER_WAY = "under way"
    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"
    """Its error says that nothing was written."""
    UNKNOWN = "unknown"


class Verdict(StrEnum):
    """What an answer is worth."""

    RIGHT = "right"
    STALE = "stale"
    """An earlier write than the read had to see."""
    WRONG = "wrong"
    """Nothing that was ever written, or a write that was refused."""


@dataclass(slots=True)
class Write:
    """One write: what it leaves behind (None: nothing), and when it began, in seconds of the run."""

    number: int
    value: int | None
    began: float
    fate: Fate = Fate.UNDER_WAY


class Register:
    """One thing and its writes. Values are never used twice, but for None."""

    def __init__(self, initial: int | None) -> None:
        """``initial``: what was there before the first write, certainly."""
        self.writes: Final = [Write(0, initial, 0.0, Fate.ACKNOWLEDGED)]
        self.busy = False
        """A write is under way, or one of unknown outcome is not settled."""
        self._ack_times: Final[list[float]] = [0.0]
        self._ack_numbers: Final[list[int]] = [0]
        self._refused = 0

    @property
    def last(self) -> Write:
        """The latest write."""
        return self.writes[-1]

    def begin(self, value: int | None, now: float) -> Write:
        """The next write. The caller sees to it that there is one at a time."""
        write = Write(len(self.writes), value, now)
        self.writes.append(write)
        self.busy = True
        return write

    def end(self, write: Write, fate: Fate, now: float) -> None:
        """Its answer has come."""
        write.fate = fate
        self.busy = fate is Fate.UNKNOWN
        self._refused += fate is Fate.REFUSED
        if fate is Fate.ACKNOWLEDGED:
            self._ack_times.append(now)
            self._ack_numbers.append(write.number)

    def settle(self, found: int | None, now: float) -> Verdict:
        """What a critical read found after the last moment at which a write of unknown outcome may still happen: it has
        happened, or never will."""
        write = self.last
        before = self.writes[self._ack_numbers[-1]]
        # Where both leave the same, nobody can tell, and it does not matter.
        happened = found == write.value and found != before.value
        self.end(write, Fate.ACKNOWLEDGED if happened else Fate.REFUSED, now)
        return self.judge(found, self._ack_numbers[-1], now)

    def acknowledged_before(self, moment: float) -> int:
        """Number of the last write that was acknowledged by then; 0 for none."""
        return self._ack_numbers[bisect_right(self._ack_times, max(0.0, moment)) - 1]

    def judge(self, found: int | None, floor: int, ended: float) -> Verdict:
        """Of an answer that came at ``ended`` to a read that has to see write ``floor``, or a later one."""
        possible = self._left(found, ended)
        if possible is None:
            return Verdict.WRONG
        return Verdict.RIGHT if possible >= floor else Verdict.STALE

    def judge_count(self, count: int, floor: int, ended: float) -> Verdict:
        """As `judge`, of the number of edges of a list to which was only added, and which began empty."""
        least = bisect_right(self._ack_numbers, floor) - 1
        most = len(self.writes) - 1 - self._refused - (self.last.began > ended and self.last.fate is not Fate.REFUSED)
        if count < least:
            return Verdict.STALE
        return Verdict.RIGHT if count <= most else Verdict.WRONG

    def judge_head(self, values: Sequence[int], floor: int, ended: float) -> Verdict:
        """As `judge`, of the newest edges of such a list, newest first: between the first and the last none may be
        missing."""
        verdict = self.judge(values[0] if values else None, floor, ended)
        if verdict is not Verdict.RIGHT or not values:
            return verdict
        have = set(values)
        for write in reversed(self.writes):
            if write.value is None or write.value < values[-1]:
                break
            if write.value < values[0] and write.fate is Fate.ACKNOWLEDGED and write.value not in have:
                return Verdict.WRONG
        return Verdict.RIGHT

    def astray(self, values: Collection[int]) -> tuple[list[Write], list[Write]]:
        """Of all edges of such a list: acknowledged writes that are missing, and refused ones that are there."""
        writes = self.writes[1:]
        missing = [write for write in writes if write.fate is Fate.ACKNOWLEDGED and write.value not in values]
        return missing, [write for write in writes if write.fate is Fate.REFUSED and write.value in values]

    def number_of(self, found: int | None) -> int:
        """The last write that left this; 0 when none did."""
        return self._left(found, float("inf")) or 0

    def _left(self, found: int | None, ended: float) -> int | None:
        for write in reversed(self.writes):
            if write.value == found and write.fate is not Fate.REFUSED and write.began <= ended:
                return write.number
        return None
