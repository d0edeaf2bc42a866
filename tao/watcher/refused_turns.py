"""Turns of a watcher that those of all other regions refuse, and of the others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

OTHERS_SECONDS: Final = 3.0
"""Time for which the others may take the lock of the active watcher: they try several times."""
OWN_SECONDS: Final = 60.0
"""Least time for which a watcher acts that is refused, when no other one has taken the lock."""
SLOT_SECONDS: Final = 2 * OTHERS_SECONDS
"""Time from the turn that one region leaves to others to that of the next one. The clocks of watchers may differ by as
much as it is longer than the turn."""


class RefusedTurns:
    """Decides when a watcher leaves the work of the active one to others.

    One that is refused can replace no master of another region, which one that is not refused can. But where two
    regions refuse each other, neither knows which is at fault, and somebody has to act: so a refused watcher takes the
    lock when it is still free after the turn of the others, and leaves it to them again from time to time.

    A refusal that is over for a moment, as when one peer restarts, changes nothing of that: else the work would be left
    to others in every slot. Only after a while without one the turns begin anew.

    Somebody also has to act at any time: the masters of a third region may have no other watcher that renews their
    leases. So each region leaves the work in slots of its own, by the clock on the wall.
    """

    def __init__(self, region: str) -> None:
        """``region``: the region of this watcher."""
        self._region: Final = region
        self._first: int | None = None
        """The number of the first slot in which the others had their turn."""
        self._refused_at = -math.inf
        """When this watcher was refused last, in seconds of Unix time."""

    def is_of_others(self, is_refused: bool, regions: Iterable[str], unix_seconds: float) -> bool:
        """Return whether the others have their turn now. ``is_refused``: all other regions refuse this watcher;
        ``regions``: those that have watchers."""
        if not is_refused:
            return False
        if unix_seconds - self._refused_at >= OWN_SECONDS:
            self._first = None
        self._refused_at = unix_seconds
        places = sorted({self._region, *regions})
        period = SLOT_SECONDS * len(places)
        number, since = divmod(unix_seconds - SLOT_SECONDS * places.index(self._region), period)
        if since >= OTHERS_SECONDS:
            return False
        if self._first is None:
            self._first = int(number)
        return (int(number) - self._first) % math.ceil((OWN_SECONDS + OTHERS_SECONDS) / period) == 0
