"""The record of a run: faults, failed reads, violations, and which failures the faults explain.

A read that demands more than an answer may have to fail: while its key's master database is lost, or the line between
it and the reader is cut, nobody can prove an answer to be critical, as fresh as a token, or fresh at all. A plain read
has no such explanation, nor has a key whose master is not concerned.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import msgspec

from loadtest.faults.history import ReadVerdict
from loadtest.faults.injection import MASTER_LOST
from tao.model.errors import TaoError

LINE_CUT: Final = frozenset({"link_cut", "link_silent"})
_NEED_THE_MASTER: Final = frozenset({"critical", "token", "max_staleness"})
"""Demands that cannot be met without the key's master database."""
AFTERMATH_SECONDS: Final = 5.0
"""After a master or the line is back, until all servers have found it: a probe's interval, and a busy machine."""


class Fault(msgspec.Struct, kw_only=True):
    """One fault. Its times are in seconds of the run, 0 while they are yet to come."""

    kind: str
    victim: str
    struck: float
    database: str = ""
    """The database whose master it took."""
    healing: float = 0.0
    """When its healing began."""
    mended: float = 0.0
    """When the process, the master or the line was back."""
    healthy: float = 0.0
    """When the whole cluster was healthy again."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a read goes: the reader's region, the database of its key, and the region of that database's master."""

    region: str
    database: str
    master_region: str


def excuses(fault: Fault, where: Whereabouts, began: float, demand: str, *, own_write: bool) -> bool:
    """Tell whether a read with this demand has to fail while this fault lasts.

    ``own_write`` says that the read was refused because of its client's own writes, which it attaches like a token."""
    if fault.mended and began > fault.mended + AFTERMATH_SECONDS:
        return False
    if demand not in _NEED_THE_MASTER and not own_write:
        return False
    if fault.kind in MASTER_LOST:
        return where.database == fault.database
    return fault.kind in LINE_CUT and where.region != where.master_region


_KEPT_EVENTS: Final = 2_000
_KEPT_EXAMPLES: Final = 20
MESSAGE_CHARACTERS: Final = 200


class FailedRead(msgspec.Struct, kw_only=True):
    """A read that was answered with an error. ``attached`` says that it carried its client's own writes."""

    seconds: float
    what: str
    demand: str
    client: str
    where: Whereabouts
    attached: bool
    reason: str
    message: str
    fault: str = ""
    """The kinds of the faults during the read."""
    since_fault: float = 0.0
    explained: bool = False


class RunRecord:
    """The counts and logs of one run."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.done = 0.0
        """The finished part of the plan, 0 to 1."""
        self.calm_since: float | None = 0.0
        """Since when the cluster is healthy; None while something fails or heals."""
        self.faults: Final[list[Fault]] = []
        self.active: Final[list[Fault]] = []
        self.reads = 0
        self.failed_reads = 0
        self.failed_in_single = 0
        self.unexplained = 0
        self.failures: Final = Counter[tuple[str, str, str]]()
        """Failed reads by fault, demand and reason."""
        self.failed: Final[list[FailedRead]] = []
        self.violations: Final = Counter[tuple[str, str]]()
        """Wrong or stale answers by verdict and demand."""
        self.examples: Final[list[str]] = []
        self.acknowledged = 0
        self.lost = 0
        self.refused: Final = Counter[str]()
        self.unknown: Final = Counter[str]()
        self.failed_writes: Final[list[str]] = []

    def begin(self) -> None:
        """Begin the time of the run."""
        self._began = time.monotonic()

    def now(self) -> float:
        """Return the seconds of the run."""
        return time.monotonic() - self._began

    def strike(self, kind: str, victim: str, database: str = "") -> Fault:
        """Record that a fault begins; ``database`` is the one whose master it takes away."""
        fault = Fault(kind=kind, victim=victim, database=database, struck=self.now())
        self.faults.append(fault)
        self.active.append(fault)
        self.calm_since = None
        return fault

    def healed(self, fault: Fault) -> None:
        """Record that the cluster is healthy after a fault."""
        fault.healthy = self.now()
        self.active.remove(fault)
        if not self.active:
            self.calm_since = fault.healthy

    def failed_read(self, failed: FailedRead) -> None:
        """Record a read that was answered with an error."""
        self.failed_reads += 1
        # By when it began: one that was sent a moment before a fault, or answered after it, met it all the same.
        met = [fault for fault in self.faults[-8:] if fault in self.active or fault.healthy >= failed.seconds]
        if met:
            failed.fault = "+".join(sorted({fault.kind for fault in met}))
            failed.since_fault = round(failed.seconds - met[-1].struck, 3)
            self.failed_in_single += not _overlap(met)
        own = failed.attached and failed.reason == "STALE_READ"
        failed.explained = any(
            excuses(fault, failed.where, failed.seconds, failed.demand, own_write=own) for fault in met
        )
        self.unexplained += not failed.explained
        self.failures[failed.fault, failed.demand, failed.reason] += 1
        if len(self.failed) < _KEPT_EVENTS:
            self.failed.append(failed)

    def failed_write(self, error: TaoError, began: float, what: str, *, unknown: bool) -> None:
        """Record a write that was answered with an error."""
        (self.unknown if unknown else self.refused)[error.reason] += 1
        if len(self.failed_writes) < _KEPT_EVENTS:
            fault = "+".join(fault.kind for fault in self.active)
            text = f"{began:.3f}-{self.now():.3f} s, {fault}: {what}: {error.reason}: {error.message}"
            self.failed_writes.append(text[: 2 * MESSAGE_CHARACTERS])

    def violation(self, verdict: ReadVerdict, demanded: str, what: str) -> None:
        """Record an answer that violates what was demanded."""
        self.violations[verdict, demanded] += 1
        fault = self.active[-1].kind if self.active else "no fault"
        self.example(f"{self.now():.3f} s, {fault}: {verdict}: {what}")

    def violations_of(self, demanded: str) -> int:
        """Count the violations of a demand."""
        return sum(count for (_, demand), count in self.violations.items() if demand == demanded)

    def lose(self, what: str) -> None:
        """Record an acknowledged write that is lost."""
        self.lost += 1
        self.example(f"{self.now():.3f} s: lost: {what}")

    def example(self, what: str) -> None:
        """Keep the text as an example, if there are few."""
        if len(self.examples) < _KEPT_EXAMPLES:
            self.examples.append(what)


def _overlap(met: list[Fault]) -> bool:
    """Whether two of these, in the order they struck, were there at once; a slow read can meet one after the other."""
    return any(not before.healthy or after.struck < before.healthy for before, after in pairwise(met))
