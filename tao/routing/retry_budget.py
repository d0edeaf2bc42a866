"""How much may be asked again: a share of what is answered, and a small allowance (DESIGN.md §9).

When a destination fails, everything that it was asked is worth asking elsewhere; when a whole tier fails, asking again
doubles the load on what is left until that fails too. A bucket of tokens tells the two apart: what is answered pays for
what is repeated, and time alone pays for next to nothing. Pure: time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from tao.model.errors import SettingsError


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """One budget, over everything that a process asks again."""

    share: float = 0.1
    """Repeats paid for by each answer: in a lasting overload they add at most a tenth to it."""

    burst: float = 1000.0
    """Repeats saved up: all that a busy process has asked of a server until it finds out that it hangs."""

    per_second: float = 5.0
    """Repeats that time alone pays for, so that a process without any answer finds out when they come again."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or self.burst < 1 or self.per_second < 0:
            raise SettingsError(f"a retry budget is a share up to 1, a burst of at least 1, and a rate: {self}")


class RetryBudget:
    """Repeats within any time are at most ``share`` × answers + ``per_second`` × seconds + ``burst``."""

    __slots__ = ("_settings", "_tokens", "_updated_at", "exhausted", "spent")

    def __init__(self, settings: RetrySettings, now: float) -> None:
        self._settings = settings
        self._tokens = settings.burst
        self._updated_at = now
        self.spent = 0
        """Repeats allowed."""
        self.exhausted = 0
        """Repeats refused."""

    def earn(self, answers: int = 1) -> None:
        """So many requests were answered."""
        settings = self._settings
        if self._tokens < settings.burst:
            self._tokens = min(self._tokens + settings.share * answers, settings.burst)

    def spend(self, now: float) -> bool:
        """Whether one request may be repeated; if so, it is paid for."""
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
        """For metrics and ``/stats``."""
        return {"spent": self.spent, "exhausted": self.exhausted, "left": round(self._tokens, 1)}
