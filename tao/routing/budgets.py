"""The time that a server may spend on a request, and the number of requests that a process may retry. Pure.

A server keeps a margin of its caller's deadline back, for the answer to travel and for the coarse clocks of deadlines
on the way. So the server further down gives up first, and its caller gets a typed error with a reason instead of no
answer, which a failure detector would count as a failure.

When one destination fails, all its requests are worth retrying at another. When a whole tier fails, retries double the
load on what is left until that fails too. A token bucket separates the two cases: answers pay for retries, and time
alone pays for very few.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tao.model.errors import DeadlineExceeded, SettingsError

MARGIN_SHARE: Final = 0.05
"""The margin's share of the remaining time: callers choose deadlines in proportion to distances."""

MIN_MARGIN_SECONDS: Final = 0.005
"""A round trip within a region, and one turn of a busy event loop."""

MAX_MARGIN_SECONDS: Final = 0.2
"""A round trip across an ocean."""

MIN_WORK_SECONDS: Final = 0.005
"""Less than a miss or a write takes: a request with less time is rejected before any work begins."""


def work_seconds(deadline_ms: int) -> float:
    """Return how many seconds a server may work on a request with ``deadline_ms``, the time that its caller still had
    when it sent the request.

    Raises `DeadlineExceeded` when that is too short to begin; nothing was written."""
    left = deadline_ms / 1000
    margin = min(max(MARGIN_SHARE * left, MIN_MARGIN_SECONDS), MAX_MARGIN_SECONDS)
    if left - margin < MIN_WORK_SECONDS:
        raise DeadlineExceeded(
            f"a deadline of {deadline_ms} ms is too short for more than a cache hit; use a longer one"
        )
    return left - margin


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """A budget for all retries of a process."""

    share: float = 0.1
    """Retries paid for by each answer: in a lasting overload retries add at most a tenth to it."""

    burst: float = 1000.0
    """Retries saved up: all requests that a busy process sends to a server before it notices that the server hangs."""

    per_second: float = 5.0
    """Retries paid for by each second, so that a process without any answers notices when servers answer again."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or self.burst < 1 or self.per_second < 0:
            raise SettingsError(
                f"share must be 0 to 1, burst at least 1, and per_second at least 0 in a retry budget: {self}"
            )


class RetryBudget:
    """A token bucket. Retries in any period are at most ``share`` × answers + ``per_second`` × seconds + ``burst``."""

    __slots__ = ("_settings", "_tokens", "_updated_at", "exhausted", "spent")

    def __init__(self, settings: RetrySettings, now: float) -> None:
        self._settings = settings
        self._tokens = settings.burst
        self._updated_at = now
        self.spent = 0
        """Retries allowed."""
        self.exhausted = 0
        """Retries denied."""

    def earn(self, answers: int = 1) -> None:
        """Add the tokens for so many answered requests."""
        settings = self._settings
        if self._tokens < settings.burst:
            self._tokens = min(self._tokens + settings.share * answers, settings.burst)

    def spend(self, now: float) -> bool:
        """Return whether one request may be retried, and take a token for it if so."""
        settings = self._settings
        elapsed = max(now - self._updated_at, 0.0)
        self._updated_at = max(now, self._updated_at)
        self._tokens = min(self._tokens + settings.per_second * elapsed, settings.burst)
        if self._tokens < 1:
            self.exhausted += 1
            return False
        self._tokens -= 1
        self.spent += 1
        return True

    def figures(self) -> dict[str, float]:
        """Return the counts and the tokens left, for metrics and ``/stats``."""
        return {"spent": self.spent, "exhausted": self.exhausted, "left": round(self._tokens, 1)}
