"""Failure detection for destinations: cache servers, database servers, or anything else with a name.

A destination is *down* after several timeouts or refused connections in a row: requests fail fast or go to another.
It is *suspect* when it has begun to fail, or answers too slowly or too rarely (a brown-out): another destination is
better, but where there is none a slow answer beats no answer. A destination recovers from both states by probes only,
which are sent one at a time at growing, jittered intervals, and only after a number of good answers in a row. Each time
that it fails again soon after recovering it stays out for longer, so that the number of state changes is bounded; going
down is never delayed.

Pure: time and jitter are passed in. An observation is O(1), and for a healthy destination a good one is two comparisons
of numbers. Windows hold the last 64 observations as the bits of an integer: no share is judged on less evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

from tao.model.errors import SettingsError

WINDOW: Final = 64
"""The number of observations over which a share is computed."""

_MASK: Final = (1 << WINDOW) - 1

Name = TypeVar("Name", bound=Hashable)


class Health(StrEnum):
    """A detector's judgement of its destination."""

    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"
    PROBING = "probing"
    """Down, with a probe under way."""


@dataclass(frozen=True, slots=True)
class DetectorSettings:
    """Bounds at which a destination counts as down or degraded, and settings of its recovery."""

    failures_until_down: int = 3
    """Timeouts or refused connections in a row: one lost connection or one slow answer is no outage."""

    slow_seconds: float = 1.0
    """An answer that takes longer is slow: far more than a miss that goes to another region."""

    slow_share: float = 0.5
    """Share of the last 64 answers that may be slow: a few expensive requests are no brown-out."""

    lost_share: float = 0.2
    """Share of the last 64 requests that may go unanswered: one in five makes every page wait."""

    window_seconds: float = 60.0
    """Age after which slow answers and losses no longer count, however few requests followed."""

    answers_until_up: int = 2
    """Good answers to probes in a row before the destination is used again: a single one may be luck."""

    first_probe_seconds: float = 0.05
    """Time until the first probe: a restarted server is noticed quickly."""

    max_probe_seconds: float = 2.0
    """Longest interval between probes: thousands of clients may probe every two seconds without harm."""

    probe_timeout_seconds: float = 2.0
    """Time after which an unanswered probe has failed: a probe is so cheap that even a slow server answers sooner."""

    flap_seconds: float = 30.0
    """A destination that is impaired again within this time after recovering is flapping."""

    max_stay_seconds: float = 15.0
    """Upper limit of the least time that a flapping destination stays out. That time starts at the first probe's
    interval and doubles with each flap."""

    def __post_init__(self) -> None:
        if min(self.failures_until_down, self.answers_until_up) < 1:
            raise SettingsError(f"failures_until_down and answers_until_up must be at least 1: {self}")
        times = (self.slow_seconds, self.window_seconds, self.first_probe_seconds, self.probe_timeout_seconds)
        if min(times) <= 0 or self.max_probe_seconds < self.first_probe_seconds or self.flap_seconds < 0:
            raise SettingsError(
                "slow_seconds, window_seconds, first_probe_seconds and probe_timeout_seconds must be above 0, "
                f"max_probe_seconds at least first_probe_seconds, and flap_seconds at least 0: {self}"
            )
        if not (0 < self.slow_share <= 1 and 0 < self.lost_share <= 1):
            raise SettingsError(f"slow_share and lost_share must be above 0 and at most 1: {self}")


@dataclass(frozen=True, slots=True)
class DetectorState:
    """A snapshot of a detector, for people and metrics."""

    health: Health
    since: float
    """The time at which this state began, on the clock that was passed in."""
    reason: str
    """The reason why the destination is not up; empty when it is."""
    consecutive_failures: int
    transitions: int
    """The number of times that the destination has become impaired or recovered."""

    def figures(self, now: float) -> dict[str, object]:
        """Return the state for ``/stats``."""
        return {
            "health": self.health.value,
            "for_seconds": round(now - self.since, 1),
            "reason": self.reason,
            "consecutive_failures": self.consecutive_failures,
            "transitions": self.transitions,
        }


class FailureDetector:
    """The detector of one destination. Every ``now`` must come from the same monotonic clock."""

    __slots__ = ("_bad_at", "_consecutive", "_flaps", "_good", "_interval", "_jitter", "_lost", "_probe_at",
                 "_probe_until", "_reason", "_recovered_at", "_settings", "_since", "_slow", "_stay_until", "is_down",
                 "is_impaired", "is_suspect", "transitions")  # fmt: skip

    def __init__(self, settings: DetectorSettings, now: float, jitter: Callable[[], float]) -> None:
        """``jitter`` returns a random number from 0 up to 1; each interval is shortened by half of it."""
        self._settings = settings
        self._jitter = jitter
        # Attributes instead of properties, since every request reads them.
        self.is_suspect = False
        """Suspect or worse: the detector wants probes."""
        self.is_impaired = False
        """Down or in a brown-out: another destination is better."""
        self.is_down = False
        """Requests should fail fast, or go to another destination."""
        self.transitions = 0
        """The number of times that the destination has become impaired or recovered."""
        self._consecutive = 0
        self._slow = 0
        self._lost = 0
        self._bad_at = now
        self._good = 0
        self._interval = settings.first_probe_seconds
        self._probe_at = 0.0
        self._probe_until = 0.0  # when the probe under way times out; 0 when there is none
        self._stay_until = now
        self._flaps = 0
        self._recovered_at = float("-inf")
        self._since = now
        self._reason = ""

    @property
    def consecutive_failures(self) -> int:
        """Timeouts and refused connections since the last answer."""
        return self._consecutive

    @property
    def probe_at(self) -> float:
        """The time at which to call `begin_probe` next; infinite while no probes are wanted."""
        if not self.is_suspect:
            return float("inf")
        return self._probe_until or self._probe_at

    def answered(self, seconds: float, now: float) -> None:
        """Record an answer of any content, ``seconds`` after its request.

        Ignored while the destination is down: late answers to earlier requests say little about new requests."""
        is_slow = seconds > self._settings.slow_seconds
        if not (is_slow or self._slow or self._lost or self.is_suspect) or self.is_down:
            return
        self._consecutive = 0
        self._note(now, slow=is_slow, lost=False)
        self._judge(now)
        if self.is_suspect and not self.is_impaired:
            self._recover(now)  # it was suspect for single failures, and it answers

    def failed(self, now: float, reason: str) -> None:
        """Record a request that the network refused, or that was not answered within a sufficient time."""
        if self.is_down:
            return
        self._note(now, slow=False, lost=True)
        self._judge(now)
        self._failed_again(now, reason)

    def suspect(self, now: float, reason: str) -> None:
        """Have the destination probed although no request has failed."""
        self._mark_suspect(now, reason)

    def begin_probe(self, now: float) -> bool:
        """Return whether to send a probe now. The caller then calls `probe_answered` or `probe_failed`; without either
        the probe fails after its timeout."""
        if not self.is_suspect:
            return False
        if self._probe_until:
            if now < self._probe_until:
                return False
            self.probe_failed(now, "a probe was not answered")
        if now < self._probe_at:
            return False
        self._probe_until = now + self._settings.probe_timeout_seconds
        return True

    def probe_answered(self, seconds: float, now: float) -> None:
        """Record the answer to the probe, ``seconds`` after it was sent."""
        if not self._probe_until:
            return
        self._probe_until = 0.0
        self._consecutive = 0
        if seconds > self._settings.slow_seconds:
            self._good = 0
            self._lengthen_interval()
        else:
            self._good += 1
            self._interval = self._settings.first_probe_seconds
        self._schedule_probe(now)
        if self._good >= self._settings.answers_until_up:
            if now >= self._stay_until:
                self._recover(now)
            else:
                self._probe_at = max(self._probe_at, self._stay_until)

    def probe_failed(self, now: float, reason: str) -> None:
        """Record that the probe was refused or not answered."""
        if not self._probe_until:
            return
        self._probe_until = 0.0
        self._lengthen_interval()
        self._schedule_probe(now)
        self._failed_again(now, reason)

    def state(self) -> DetectorState:
        """Return a snapshot of the present state."""
        health = Health.UP
        if self.is_down:
            health = Health.PROBING if self._probe_until else Health.DOWN
        elif self.is_suspect:
            health = Health.SUSPECT
        return DetectorState(health, self._since, self._reason, self._consecutive, self.transitions)

    def _note(self, now: float, *, slow: bool, lost: bool) -> None:
        if now - self._bad_at > self._settings.window_seconds:
            self._slow = self._lost = 0
        self._slow = (self._slow << 1 | slow) & _MASK
        self._lost = (self._lost << 1 | lost) & _MASK
        if slow or lost:
            self._bad_at = now

    def _judge(self, now: float) -> None:
        """Mark the destination as impaired if too many answers were slow or lost."""
        settings = self._settings
        slow, lost = self._slow.bit_count(), self._lost.bit_count()
        if slow >= settings.slow_share * WINDOW:
            self._mark_impaired(
                now, f"slow: {slow} of the last {WINDOW} answers took more than {settings.slow_seconds:g} s"
            )
        elif lost >= settings.lost_share * WINDOW:
            self._mark_impaired(now, f"lossy: {lost} of the last {WINDOW} requests were not answered")

    def _failed_again(self, now: float, reason: str) -> None:
        self._consecutive += 1
        self._good = 0
        if self.is_down:
            self._reason = reason
        elif self._consecutive >= self._settings.failures_until_down:
            self._mark_impaired(now, reason)
            self.is_down = True
            self._since = now
            self._reason = reason
            self._probe_until = 0.0
        else:
            self._mark_suspect(now, reason)

    def _mark_impaired(self, now: float, reason: str) -> None:
        """Stop preferring the destination, for longer the more often it has flapped recently."""
        if self.is_impaired:
            return
        settings = self._settings
        self._mark_suspect(now, reason)
        self.is_impaired = True
        self.transitions += 1
        self._since = now
        self._reason = reason
        self._good = 0
        self._flaps = self._flaps + 1 if now - self._recovered_at <= settings.flap_seconds else 0
        stay = min(settings.first_probe_seconds * 2.0 ** min(self._flaps, 30), settings.max_stay_seconds)
        self._stay_until = now + stay

    def _mark_suspect(self, now: float, reason: str) -> None:
        if not self.is_suspect:
            self.is_suspect = True
            self._since = now
            self._reason = reason
            self._good = 0
            self._interval = self._settings.first_probe_seconds
            self._schedule_probe(now)

    def _recover(self, now: float) -> None:
        if self.is_impaired:
            self.transitions += 1
            self._recovered_at = now
            self._slow = self._lost = 0
        self.is_suspect = self.is_impaired = self.is_down = False
        self._consecutive = 0
        self._probe_until = 0.0
        self._since = now
        self._reason = ""

    def _lengthen_interval(self) -> None:
        self._interval = min(2 * self._interval, self._settings.max_probe_seconds)

    def _schedule_probe(self, now: float) -> None:
        self._probe_at = now + self._interval * (1 - self._jitter() / 2)


class FailureDetectors(Generic[Name]):
    """The detectors of several destinations, by name."""

    def __init__(self, settings: DetectorSettings, jitter: Callable[[], float]) -> None:
        self._settings = settings
        self._jitter = jitter
        self._detectors: dict[Name, FailureDetector] = {}

    def of(self, name: Name, now: float) -> FailureDetector:
        """Return the detector of a destination, which is created on first use."""
        detector = self._detectors.get(name)
        if detector is None:
            detector = self._detectors[name] = FailureDetector(self._settings, now, self._jitter)
        return detector

    def forget(self, name: Name) -> None:
        """Remove the detector of a destination that is gone, or is another one under the same name now."""
        self._detectors.pop(name, None)

    def states(self) -> dict[Name, DetectorState]:
        """Return the states of all detectors, for metrics and people."""
        return {name: each.state() for name, each in self._detectors.items()}
