"""The record of a run: faults, failed reads, violations, and which failures the faults explain.

A read that demands more than an answer may have to fail: while its key's master database is lost, or the line between
it and the reader is cut, nobody can prove an answer to be critical, as fresh as a token, or fresh at all. A plain read
has no such explanation, nor has a key whose master is not concerned.

A write whose inverse could not be written during a fault is acknowledged all the same. A read of the list that lacks
the inverse may be refused for that, as long as the fault lasts, when it has to see the write.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import msgspec

from loadtest.faults.history import ReadVerdict
from loadtest.faults.injection import LINE_CUT, MASTER_LOST
from tao.model.errors import StaleRead, TaoError

_NEED_THE_MASTER: Final = frozenset({"critical", "token", "max_staleness"})
"""Demands that cannot be met without the key's master database."""
AFTERMATH_SECONDS: Final = 5.0
"""Time until all servers have found a master or line that is back: a probe's interval, and a busy machine."""


class Fault(msgspec.Struct, kw_only=True):
    """One fault. Its times are in seconds of the run, 0 while they are yet to come."""

    kind: str
    victim: str
    struck: float
    database: str = ""
    """The database whose master it took."""
    healing: float = 0.0
    """The time at which its healing began."""
    mended: float = 0.0
    """The time at which the process, the master or the line was back."""
    healthy: float = 0.0
    """The time at which the whole cluster was healthy again."""
    unwritten: set[int] = set()
    """The shards whose writes are waited for, and of which no write that began later has been acknowledged."""
    unwritten_since: float = 0.0
    """The time at which the waiting for ``unwritten`` began: at the death of the leader that led these shards, or, for
    all shards, when there was room on a full disk again."""
    written: float = 0.0
    """The time from which there were no ``unwritten`` shards any more."""
    splits_masters: bool = False
    """Whether a cut line has masters on both sides, so that inverses can be left pending."""
    far_end_reads_while_pending: int = 0
    """Reads of far ends, while a line was cut, that had to see a write whose inverse was pending."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a read goes: the reader's region, the database of its key, and the region of that database's master."""

    region: str
    database: str
    master_region: str


def excuses(fault: Fault, read: FailedRead) -> bool:
    """Return whether a read has to fail while this fault lasts."""
    where = read.where
    if fault.mended and read.seconds > fault.mended + AFTERMATH_SECONDS:
        return False
    refused = read.reason == StaleRead.reason
    if refused and read.inverse_pending:
        return True
    # A read that is refused because of its client's own writes attaches them like a token.
    if read.demand not in _NEED_THE_MASTER and not (refused and read.attached):
        return False
    if fault.kind in MASTER_LOST:
        return where.database == fault.database
    return fault.kind in LINE_CUT and where.region != where.master_region


class PendingInverse(msgspec.Struct, kw_only=True):
    """A write that was acknowledged with its inverse pending. Its times are in seconds of the run."""

    acknowledged: float
    settled: float = 0.0
    """The time at which the far end's own rows showed the write; 0 as long as they have not."""


_KEPT_EVENTS: Final = 2_000
_KEPT_EXAMPLES: Final = 20
MESSAGE_CHARACTERS: Final = 200


class FailedRead(msgspec.Struct, kw_only=True):
    """A read that was answered with an error. ``attached`` says that it carried its client's own writes,
    ``inverse_pending`` that it had to see a write whose inverse was pending, in the list that lacked the inverse."""

    seconds: float
    what: str
    demand: str
    client: str
    where: Whereabouts
    attached: bool
    inverse_pending: bool = False
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
        self.unexplained: Final = Counter[str]()
        """Failed reads that no fault explains, by the faults that they met."""
        self.failures: Final = Counter[tuple[str, str, str]]()
        """Failed reads by fault, demand and reason."""
        self.failed: Final[list[FailedRead]] = []
        self.violations: Final = Counter[tuple[str, str]]()
        """Wrong or stale answers by verdict and demand."""
        self.examples: Final[list[str]] = []
        self.acknowledged = 0
        self.answers: Final = Counter[str]()
        """Judged answers that say whether an edge exists ("existence"), and pages of sets ("set")."""
        self.operations: Final = Counter[str]()
        """Acknowledged operations on edges with states and on nodes, and jobs, by the way in which they were made."""
        self.pending: Final[list[PendingInverse]] = []
        self.far_end_reads = 0
        """Reads of an edge in the list of its other end."""
        self.far_end_reads_pending = 0
        """The ``far_end_reads`` that had to see a write whose inverse was pending."""
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

    @property
    def cuts(self) -> list[Fault]:
        """The faults that cut the line."""
        return [fault for fault in self.faults if fault.kind in LINE_CUT]

    def strike(self, kind: str, victim: str, database: str = "", failed_before: int | None = None) -> Fault:
        """Record that a fault begins. ``database`` is the one whose master it takes away. ``failed_before``: how many
        reads had failed when its injection began, which takes a moment; later ones have met it."""
        fault = Fault(kind=kind, victim=victim, database=database, struck=self.now())
        self.faults.append(fault)
        self.active.append(fault)
        self.calm_since = None
        for failed in self.failed[len(self.failed) if failed_before is None else failed_before :]:
            self._count(failed, -1)
            failed.fault = "+".join(sorted({*filter(None, failed.fault.split("+")), kind}))
            failed.explained = failed.explained or excuses(fault, failed)
            self._count(failed, 1)
        return fault

    def await_writes(self, fault: Fault, shards: Collection[int]) -> None:
        """Find out when a write of each of these shards that begins from now on has been acknowledged. A leader whose
        region has no master leads no shard: nothing is waited for then."""
        fault.unwritten, fault.unwritten_since = set(shards), self.now()
        if not fault.unwritten:
            fault.written = fault.unwritten_since

    def healed(self, fault: Fault) -> None:
        """Record that the cluster is healthy after a fault."""
        fault.healthy = self.now()
        self.active.remove(fault)
        if not self.active:
            self.calm_since = fault.healthy

    def failed_read(self, failed: FailedRead) -> None:
        """Record a read that was answered with an error."""
        self.failed_reads += 1
        # The times of the read decide: one that was sent a moment before a fault, or answered after it, met it too.
        met = [fault for fault in self.faults[-8:] if fault in self.active or fault.healthy >= failed.seconds]
        if met:
            failed.fault = "+".join(sorted({fault.kind for fault in met}))
            failed.since_fault = round(failed.seconds - met[-1].struck, 3)
            self.failed_in_single += not _overlap(met)
        failed.explained = any(excuses(fault, failed) for fault in met)
        self._count(failed, 1)
        if len(self.failed) < _KEPT_EVENTS:
            self.failed.append(failed)

    def _count(self, failed: FailedRead, reads: int) -> None:
        self.unexplained[failed.fault] += 0 if failed.explained else reads
        kind = (failed.fault, failed.demand, failed.reason)
        self.failures[kind] += reads
        if not self.failures[kind]:
            del self.failures[kind]

    def far_end_read(self, *, pending: bool) -> None:
        """Record a read of an edge in the list of its other end. ``pending``: it has to see a write whose inverse was
        pending."""
        self.far_end_reads += 1
        self.far_end_reads_pending += pending
        for fault in self.active:
            if fault.kind in LINE_CUT and not fault.healing:
                fault.far_end_reads_while_pending += pending

    def acknowledge(self, shard: int, began: float) -> None:
        """Record a write to an object or list of this shard that was acknowledged."""
        self.acknowledged += 1
        for fault in self.faults:
            if shard in fault.unwritten and began >= fault.unwritten_since:
                fault.unwritten.discard(shard)
                if not fault.unwritten:
                    fault.written = self.now()

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
