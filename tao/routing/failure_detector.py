"""Whether a destination - a cache server, a database server, anything with a name - can be asked (DESIGN.md §9).

Two questions, two answers. *Down*: several time-outs or refusals in a row; requests fail fast or take the other way.
*Suspect*: it has begun to fail, or answers too slowly or too rarely (a brown-out): another way is better where there
is one, but where there is none a slow answer beats none. From both it comes back by probes alone, one at a time at
growing, jittered intervals, and only after a number of good answers in a row. What goes down again soon after it came
back stays down longer each time, so that the state changes a bounded number of times; going down is never delayed.

Pure: time and jitter are passed in. An observation is O(1), and while all is well a good one is two comparisons of
numbers. Windows hold the last 64 observations as the bits of an integer: no share is judged on less evidence than that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

from tao.model.errors import SettingsError

WINDOW: Final = 64
"""Observations that a share is taken of."""

_MASK: Final = (1 << WINDOW) - 1

Name = TypeVar("Name", bound=Hashable)


class Health(StrEnum):
    """What a detector holds of its destination."""

    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"
    PROBING = "probing"
    """Down, with a probe under way."""


@dataclass(frozen=True, slots=True)
class DetectorSettings:
    """When a destination is down, and how it comes back."""

    failures_until_down: int = 3
    """Time-outs or refusals in a row: one lost connection or one slow answer is no outage."""

    slow_seconds: float = 1.0
    """An answer that took longer is slow: far above a miss that goes to another region."""

    slow_share: float = 0.5
    """Part of the last 64 answers that may be slow: a few expensive requests are no brown-out."""

    lost_share: float = 0.2
    """Part of the last 64 requests that may go unanswered: one in five costs every page a wait."""

    window_seconds: float = 60.0
    """What was slow or lost so long ago says nothing of today, however few requests came since."""

    answers_until_up: int = 2
    """Good answers to probes in a row before it is used again: the first may have slipped through."""

    first_probe_seconds: float = 0.05
    """Until the first probe: a restarted server is found again quickly."""

    max_probe_seconds: float = 2.0
    """Longest interval between probes: thousands of clients that each try every two seconds harm nobody."""

    probe_timeout_seconds: float = 2.0
    """A probe without an answer for so long has failed: it asks for next to nothing, and a slow one
    answers sooner."""

    flap_seconds: float = 30.0
    """What is impaired again within so long after coming back flaps."""

    max_stay_seconds: float = 15.0
    """Least time out of favour after many flaps; it doubles with each, from the first probe's interval."""

    def __post_init__(self) -> None:
        if min(self.failures_until_down, self.answers_until_up) < 1:
            raise SettingsError(f"a failure detector counts to at least one: {self}")
        times = (self.slow_seconds, self.window_seconds, self.first_probe_seconds, self.probe_timeout_seconds)
        if min(times) <= 0 or self.max_probe_seconds < self.first_probe_seconds or self.flap_seconds < 0:
            raise SettingsError(f"a failure detector's times are above zero, and the longest is the longest: {self}")
        if not (0 < self.slow_share <= 1 and 0 < self.lost_share <= 1):
            raise SettingsError(f"a failure detector's shares are above 0 and at most 1: {self}")


@dataclass(frozen=True, slots=True)
class Standing:
    """A detector's state for people and metrics."""

    health: Health
    since: float
    """When it came into this state, on the clock that was passed in."""
    reason: str
    """In words; empty when all is well."""
    consecutive_failures: int
    transitions: int
    """How often it has become impaired or come back from it."""

    def figures(self, now: float) -> dict[str, object]:
        """For ``/stats``."""
        return {
            "health": self.health.value,
            "for_seconds": round(now - self.since, 1),
            "reason": self.reason,
            "consecutive_failures": self.consecutive_failures,
            "transitions": self.transitions,
        }


class FailureDetector:
    """One destination. Every ``now`` must be of one clock that never goes back."""

    __slots__ = ("_bad_at", "_came_back_at", "_consecutive", "_flaps", "_good", "_interval", "_jitter", "_lost",
                 "_probe_at", "_probe_until", "_reason", "_settings", "_since", "_slow", "_stay_until", "is_down",
                 "is_impaired", "is_troubled", "transitions")  # fmt: skip

    def __init__(self, settings: DetectorSettings, now: float, jitter: Callable[[], float]) -> None:
        """``jitter``: a number from 0 up to 1, another one each time; intervals are cut by up to half of it."""
        self._settings = settings
        self._jitter = jitter
        # Attributes and not properties: they are looked at for every request.
        self.is_troubled = False
        """Anything but up: probes are wanted."""
        self.is_impaired = False
        """Down or in a brown-out: another way is better."""
        self.is_down = False
        """Requests should fail fast, or take the other way."""
        self.transitions = 0
        """How often it has become impaired or come back from it."""
        self._consecutive = 0
        self._slow = 0
        self._lost = 0
        self._bad_at = now
        self._good = 0
        self._interval = settings.first_probe_seconds
        self._probe_at = 0.0
        self._probe_until = 0.0  # of the probe under way; 0 when there is none
        self._stay_until = now
        self._flaps = 0
        self._came_back_at = float("-inf")
        self._since = now
        self._reason = ""

    @property
    def consecutive_failures(self) -> int:
        """Time-outs and refusals since the last answer."""
        return self._consecutive

    @property
    def probe_at(self) -> float:
        """When `begin_probe` is next worth calling; infinite while all is well."""
        if not self.is_troubled:
            return float("inf")
        return self._probe_until or self._probe_at

    def answered(self, seconds: float, now: float) -> None:
        """A request was answered, whatever the answer says, ``seconds`` after it was sent. While the destination is
        down only probes count: late answers to what was sent before say little of what would be answered now."""
        is_slow = seconds > self._settings.slow_seconds
        if not (is_slow or self._slow or self._lost or self.is_troubled) or self.is_down:
            return
        self._consecutive = 0
        self._note(now, slow=is_slow, lost=False)
        self._judge(now)
        if self.is_troubled and not self.is_impaired:
            self._become_well(now)  # it was suspected for single failures, and it answers

    def failed(self, now: float, reason: str) -> None:
        """A request was refused by the network, or not answered although it had time enough."""
        if self.is_down:
            return
        self._note(now, slow=False, lost=True)
        self._judge(now)
        self._failed_again(now, reason)

    def suspect(self, now: float, reason: str) -> None:
        """Something looks wrong, though nothing has failed: have it probed."""
        self._trouble(now, reason)

    def begin_probe(self, now: float) -> bool:
        """Whether to send a probe now; then `probe_answered` or `probe_failed` is to be called. One that is never heard
        of again has failed when its time is up."""
        if not self.is_troubled:
            return False
        if self._probe_until:
            if now < self._probe_until:
                return False
            self.probe_failed(now, "a probe went unanswered")
        if now < self._probe_at:
            return False
        self._probe_until = now + self._settings.probe_timeout_seconds
        return True

    def probe_answered(self, seconds: float, now: float) -> None:
        """The probe was answered after ``seconds``."""
        if not self._probe_until:
            return
        self._probe_until = 0.0
        self._consecutive = 0
        if seconds > self._settings.slow_seconds:
            self._good = 0
            self._put_off_probe()
        else:
            self._good += 1
            self._interval = self._settings.first_probe_seconds
        self._schedule_probe(now)
        if self._good >= self._settings.answers_until_up:
            if now >= self._stay_until:
                self._become_well(now)
            else:
                self._probe_at = max(self._probe_at, self._stay_until)

    def probe_failed(self, now: float, reason: str) -> None:
        """The probe was refused, or went unanswered."""
        if not self._probe_until:
            return
        self._probe_until = 0.0
        self._put_off_probe()
        self._schedule_probe(now)
        self._failed_again(now, reason)

    def standing(self) -> Standing:
        """The state now."""
        health = Health.UP
        if self.is_down:
            health = Health.PROBING if self._probe_until else Health.DOWN
        elif self.is_troubled:
            health = Health.SUSPECT
        return Standing(health, self._since, self._reason, self._consecutive, self.transitions)

    def _note(self, now: float, *, slow: bool, lost: bool) -> None:
        if now - self._bad_at > self._settings.window_seconds:
            self._slow = self._lost = 0
        self._slow = (self._slow << 1 | slow) & _MASK
        self._lost = (self._lost << 1 | lost) & _MASK
        if slow or lost:
            self._bad_at = now

    def _judge(self, now: float) -> None:
        """Is it a brown-out?"""
        settings = self._settings
        slow, lost = self._slow.bit_count(), self._lost.bit_count()
        if slow >= settings.slow_share * WINDOW:
            self._impair(now, f"slow: {slow} of the last {WINDOW} answers took more than {settings.slow_seconds:g} s")
        elif lost >= settings.lost_share * WINDOW:
            self._impair(now, f"lossy: {lost} of the last {WINDOW} requests went unanswered")

    def _failed_again(self, now: float, reason: str) -> None:
        self._consecutive += 1
        self._good = 0
        if self.is_down:
            self._reason = reason
        elif self._consecutive >= self._settings.failures_until_down:
            self._impair(now, reason)
            self.is_down = True
            self._since = now
            self._reason = reason
            self._probe_until = 0.0
        else:
            self._trouble(now, reason)

    def _impair(self, now: float, reason: str) -> None:
        """Not to be preferred any more, for the longer the oftener this has happened of late."""
        if self.is_impaired:
            return
        settings = self._settings
        self._trouble(now, reason)
        self.is_impaired = True
        self.transitions += 1
        self._since = now
        self._reason = reason
        self._good = 0
        self._flaps = self._flaps + 1 if now - self._came_back_at <= settings.flap_seconds else 0
        stay = min(settings.first_probe_seconds * 2.0 ** min(self._flaps, 30), settings.max_stay_seconds)
        self._stay_until = now + stay

    def _trouble(self, now: float, reason: str) -> None:
        if not self.is_troubled:
            self.is_troubled = True
            self._since = now
            self._reason = reason
            self._good = 0
            self._interval = self._settings.first_probe_seconds
            self._schedule_probe(now)

    def _become_well(self, now: float) -> None:
        if self.is_impaired:
            self.transitions += 1
            self._came_back_at = now
            self._slow = self._lost = 0
        self.is_troubled = self.is_impaired = self.is_down = False
        self._consecutive = 0
        self._probe_until = 0.0
        self._since = now
        self._reason = ""

    def _put_off_probe(self) -> None:
        self._interval = min(2 * self._interval, self._settings.max_probe_seconds)

    def _schedule_probe(self, now: float) -> None:
        self._probe_at = now + self._interval * (1 - self._jitter() / 2)


class FailureDetectors(Generic[Name]):
    """Detectors by the names of their destinations."""

    def __init__(self, settings: DetectorSettings, jitter: Callable[[], float]) -> None:
        self._settings = settings
        self._jitter = jitter
        self._detectors: dict[Name, FailureDetector] = {}

    def of(self, name: Name, now: float) -> FailureDetector:
        """The detector of a destination, made when it is first asked for."""
        detector = self._detectors.get(name)
        if detector is None:
            detector = self._detectors[name] = FailureDetector(self._settings, now, self._jitter)
        return detector

    def forget(self, name: Name) -> None:
        """The destination is no more, or is another one now."""
        self._detectors.pop(name, None)

    def standings(self) -> dict[Name, Standing]:
        """All of them, for metrics and people."""
        return {name: each.standing() for name, each in self._detectors.items()}
