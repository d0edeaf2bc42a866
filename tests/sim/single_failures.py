"""Invariant 7: no failure of one server makes a read fail that another could answer.

The check covers every read that any copy may answer, which asks for nothing newer than all databases have, while
nothing fails, while one fault is under way, and after it. Such a read may fail where no server could have answered it,
as the world was at some moment of the read (`tests.sim.reachability`), and for the time that it takes to find out that
a server is back, where there is no other (`WINDOWS`). In a *storm*, when a fault meets another or its aftermath, the
invariant says nothing until all of it and its aftermath are over.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final

from tao.routing.failure_detector import DetectorSettings
from tests.sim.loop import Process
from tests.sim.plans import COMPOUND, RESTORE, RESTORE_AGAIN, RESTORE_UNPROMOTED, UNNOTICED, UNSEEN_SECONDS, Fault
from tests.sim.reachability import Reachability

_DETECTOR: Final = DetectorSettings()
_FOUND_WELL_SECONDS: Final = (
    _DETECTOR.probe_timeout_seconds
    + _DETECTOR.max_probe_seconds
    + _DETECTOR.answers_until_up * _DETECTOR.first_probe_seconds
)
AFTERMATH_SECONDS: Final = _DETECTOR.max_stay_seconds + _DETECTOR.max_probe_seconds
"""Seconds after a fault until nothing can be the effect of both it and the next: a server that has failed several times
may be avoided for that long, and the next probe finds it well."""
_HELD_DOWN: Final = "who has found a leader down, and has nobody else to ask, has to find out that it is back"

WINDOWS: Final = dict.fromkeys(
    ("kill", "pause", "drain", "cut server", "cut pair", "cut one way", "slow", "asleep", "replaced unseen"),
    (_FOUND_WELL_SECONDS, _HELD_DOWN),
)
"""Fault → seconds after its end for which a servable read may still fail, and why.

The time is until a probe that was under way is given up, the next one comes at the longest interval, and as many are
answered as are needed. It holds for a region whose followers have no account at the databases: they have no other way
meanwhile.

No other fault has such a time, and none has one at its beginning: a server that breaks its connection off is avoided at
once; one that does not answer is given up within a part of the read's own time, which leaves enough for the next
(`ClientSettings`, `DirectReadSettings`, `ReplicaSettings`); no retry budget is small enough to matter.
"""

LASTS_SECONDS: Final = {
    "replication stops": 20.0,
    "binlog lost": 3.0,
    "planned restart": 60.0,
    "restart between writes": 4.0,
    "move between followers": 2.0,
    "topology late": 6.0,
    "move to database": 20.0,
    "move dies": 30.0,
    "split database": 40.0,
    "balance databases": 40.0,
    RESTORE: 60.0,
    RESTORE_UNPROMOTED: 70.0,
    RESTORE_AGAIN: 120.0,
    "replaced unseen": UNSEEN_SECONDS,
}
"""Longest duration in seconds of the faults that no end is scheduled for; all others are over when they end."""


class Watched:
    """A read under check. ``excuse`` says why it may fail."""

    __slots__ = ("asked", "excuse", "storms")

    def __init__(self, asked: tuple[Process, int, int], storms: int) -> None:
        self.asked = asked
        self.excuse = ""
        self.storms = storms


class SingleFailures:
    """Keeps the faults under way and the reads that they excuse."""

    def __init__(self, reach: Reachability, now: Callable[[], float], looked_at: dict[str, int]) -> None:
        """``looked_at`` counts the reads."""
        self._reach: Final = reach
        self._now: Final = now
        self._looked_at: Final = looked_at
        looked_at.update(dict.fromkeys(("single_failure_reads", "excused_reads"), 0))
        self._under_way: Final[dict[Fault, None]] = {}
        self._reads: Final[dict[Watched, None]] = {}
        self._kind, self._struck = "", -inf
        self._mended = -inf
        self._storms = 0
        self._is_storm = False

    # faults

    def begins(self, fault: Fault) -> None:
        """Record that a fault has begun."""
        if fault.kind in UNNOTICED:
            return
        now = self._now()
        met = bool(self._under_way) or now < self._mended + AFTERMATH_SECONDS
        if met or fault.kind in COMPOUND:
            self._storms += 1
            self._is_storm = True
        else:
            self._is_storm = False
        self._under_way[fault] = None
        self._kind, self._struck = fault.kind, now
        self.look()

    def ends(self, fault: Fault) -> None:
        """Record that a fault has ended."""
        if fault in self._under_way:
            del self._under_way[fault]
            self._mended = max(self._mended, self._now())

    def calmed(self) -> None:
        """Record that all faults have ended."""
        for fault in list(self._under_way):
            self.ends(fault)

    def only_fault(self) -> tuple[str, float] | None:
        """Return the kind of the one fault under way, and when it began; None while there is none, or a storm."""
        if self._is_storm or len(self._under_way) != 1:
            return None
        return self._kind, self._struck

    def look(self) -> None:
        """Excuse the reads under way that no server could answer now; call it when something got worse."""
        for read in self._reads:
            self._look(read)

    # reads

    def asked(self, client: Process, key: int, atype: int, minimum: int) -> Watched | None:
        """Register a read that asks for neither the master nor a bound on its age.

        Returns None if it asks for more than every copy has. ``atype`` is 0 for an object.
        """
        if minimum and self._reach.everywhere(key, atype) < minimum:
            return None
        read = Watched((client, key, atype), self._storms)
        self._reads[read] = None
        self._look(read)
        return read

    def answered(self, read: Watched) -> None:
        """Record that a read has succeeded."""
        del self._reads[read]
        if self._is_looked_at(read) and self._is_single:
            self._looked_at["single_failure_reads"] += 1

    def failed(self, read: Watched, reason: str) -> str:
        """Record that a read has failed for a reason. Returns why it must not fail, or nothing."""
        self._look(read)
        del self._reads[read]
        if not self._is_looked_at(read):
            return ""
        if read.excuse:
            self._looked_at["excused_reads"] += 1
            return ""
        self._looked_at["single_failure_reads"] += self._is_single
        if self._under_way:
            state = f"while one fault is under way, {self._kind}, {self._now() - self._struck:.2f} s old"
        elif self._is_single:
            state = f"{self._now() - self._mended:.2f} s after the one fault, {self._kind}"
        else:
            state = "while nothing fails"
        return f"fails {state}, and could have been served: {reason}"

    @property
    def _is_single(self) -> bool:
        return bool(self._under_way) or self._now() < self._mended + AFTERMATH_SECONDS

    def _is_looked_at(self, read: Watched) -> bool:
        is_swept = read.asked[0].state == "swept"
        return not is_swept and read.storms == self._storms and not (self._is_storm and self._is_single)

    def _look(self, read: Watched) -> None:
        if not read.excuse and self._is_single and not self._is_storm:
            read.excuse = self._too_early() or self._reach.nobody_serves(*read.asked)

    def _too_early(self) -> str:
        seconds, why = WINDOWS.get(self._kind, (0.0, ""))
        is_within = not self._under_way and self._now() < self._mended + seconds
        return why if is_within and not self._reach.goes_past_leaders else ""
