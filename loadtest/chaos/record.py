"""What happens in a run, as it happens: faults, failed reads, violations; and which failures the faults explain."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from typing import Final, Self

import msgspec

from loadtest.chaos.excuses import Fault, Whereabouts, excuses
from loadtest.chaos.history import Verdict
from tao.model.errors import TaoError

_KEPT_EVENTS: Final = 2_000
_KEPT_EXAMPLES: Final = 20
_MESSAGE_CHARACTERS: Final = 200


class FailedRead(msgspec.Struct, kw_only=True):
    """A read that was answered with an error. ``attached``: it asked for its client's own writes."""

    seconds: float
    what: str
    demand: str
    client: str
    where: Whereabouts
    attached: bool
    reason: str
    message: str
    fault: str = ""
    """The kind that was struck and not yet healed."""
    since_fault: float = 0.0
    explained: bool = False

    @classmethod
    def of(
        cls,
        error: TaoError,
        seconds: float,
        what: str,
        demand: str,
        client: str,
        where: Whereabouts,
        *,
        attached: bool,
    ) -> Self:
        """Of a read that began at ``seconds``."""
        return cls(
            seconds=round(seconds, 3),
            what=what,
            demand=demand,
            client=client,
            where=where,
            attached=attached,
            reason=error.reason,
            message=error.message[:_MESSAGE_CHARACTERS],
        )


class Record:
    """One run. ``calm_since``: since when everything is well; None while something fails or heals."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.calm_since: float | None = 0.0
        self.faults: Final[list[Fault]] = []
        self.active: Final[list[Fault]] = []
        self.reads = 0
        self.failed_reads = 0
        self.failed_in_single = 0
        self.unexplained = 0
        self.failures: Final = Counter[tuple[str, str, str]]()
        """By fault, demand and reason."""
        self.failed: Final[list[FailedRead]] = []
        self.violations: Final = Counter[tuple[str, str]]()
        """By verdict and by what was demanded."""
        self.examples: Final[list[str]] = []
        self.acknowledged = 0
        self.lost = 0
        self.refused: Final = Counter[str]()
        self.unknown: Final = Counter[str]()
        self.failed_writes: Final[list[str]] = []

    def begin(self) -> None:
        """The run begins: all is well."""
        self._began = time.monotonic()

    def now(self) -> float:
        """Seconds of the run."""
        return time.monotonic() - self._began

    def strike(self, kind: str, victim: str, database: str = "") -> Fault:
        """A fault begins. ``database``: whose master it takes away."""
        fault = Fault(kind=kind, victim=victim, database=database, struck=self.now())
        self.faults.append(fault)
        self.active.append(fault)
        self.calm_since = None
        return fault

    def healed(self, fault: Fault) -> None:
        """All that it did is mended."""
        fault.healthy = self.now()
        self.active.remove(fault)
        if not self.active:
            self.calm_since = fault.healthy

    def failed_read(self, failed: FailedRead) -> None:
        """A read was answered with an error."""
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
        """A write was answered with an error."""
        (self.unknown if unknown else self.refused)[error.reason] += 1
        if len(self.failed_writes) < _KEPT_EVENTS:
            fault = "+".join(fault.kind for fault in self.active)
            text = f"{began:.3f}-{self.now():.3f} s, {fault}: {what}: {error.reason}: {error.message}"
            self.failed_writes.append(text[: 2 * _MESSAGE_CHARACTERS])

    def violation(self, verdict: Verdict, demanded: str, what: str) -> None:
        """An answer that was none."""
        self.violations[verdict, demanded] += 1
        fault = self.active[-1].kind if self.active else "no fault"
        self.example(f"{self.now():.3f} s, {fault}: {verdict}: {what}")

    def lose(self, what: str) -> None:
        """An acknowledged write is not where it was."""
        self.lost += 1
        self.example(f"{self.now():.3f} s: lost: {what}")

    def example(self, what: str) -> None:
        """One of the first things that were wrong."""
        if len(self.examples) < _KEPT_EXAMPLES:
            self.examples.append(what)


def _overlap(met: list[Fault]) -> bool:
    """Whether two of these, in the order they struck, were there at once; a slow read can meet one after the other."""
    return any(not before.healthy or after.struck < before.healthy for before, after in pairwise(met))
