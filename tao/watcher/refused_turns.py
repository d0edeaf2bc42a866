"""Turns of a watcher that those of all other regions refuse, and of the others."""

from __future__ import annotations

from typing import Final

OTHERS_SECONDS: Final = 3.0
"""Time for which the others may take the lock of the active watcher: they try several times."""
OWN_SECONDS: Final = 60.0
"""Time for which a watcher acts that is refused, when no other one has taken the lock."""


class RefusedTurns:
    """Decides when a watcher leaves the work of the active one to others.

    One that is refused can replace no master of another region, which one that is not refused can. But where two
    regions refuse each other, neither knows which is at fault, and somebody has to act: so a refused watcher takes the
    lock when it is still free after the turn of the others, and leaves it to them again from time to time.
    """

    def __init__(self) -> None:
        self._refused_since: float | None = None

    def is_of_others(self, is_refused: bool, now: float) -> bool:
        """Return whether the others have their turn now. ``is_refused``: all other regions refuse this watcher."""
        if not is_refused:
            self._refused_since = None
            return False
        if self._refused_since is None:
            self._refused_since = now
        return (now - self._refused_since) % (OTHERS_SECONDS + OWN_SECONDS) < OTHERS_SECONDS
