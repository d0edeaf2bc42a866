"""How far behind the master a region is, by its tailer (DESIGN.md §8).

Leaders write heartbeat rows on the masters; one that comes out of the local binlog proves that everything committed
before it has come, too, so that an idle stream still proves itself. Without heartbeats the commit times of ordinary
transactions prove the same, in whole seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from tao.planning.row_events import Heartbeat

_NEVER: Final = 0

_AHEAD_MS: Final = 1_000
"""How far a clock may be ahead of ours. What is dated later proves nothing: a session sets its time as it likes, and a
machine that was an hour ahead would have everybody believe for an hour that nothing is late."""


class Lag:
    """Of one binlog. Times are Unix milliseconds; those of the masters are compared with this machine's clock."""

    def __init__(self, unix_ms: Callable[[], int]) -> None:
        self._unix_ms: Final = unix_ms
        self.heartbeat_unix_ms = _NEVER
        """When the newest heartbeat seen was written."""
        self.heartbeat_delay_seconds = 0.0
        """From its writing to its coming here."""
        self.committed_unix_ms = _NEVER
        """The newest commit seen."""
        self.from_the_future = 0
        """Heartbeats dated so far ahead of this machine's clock that they prove nothing."""

    def heard(self, heartbeats: Iterable[Heartbeat]) -> bool:
        """Take in heartbeat rows. Whether one was newer than all before."""
        latest = self._unix_ms() + _AHEAD_MS
        newest = _NEVER
        for each in heartbeats:
            if each.unix_ms > latest:
                self.from_the_future += 1
            else:
                newest = max(newest, each.unix_ms)
        if newest <= self.heartbeat_unix_ms:
            return False
        self.heartbeat_unix_ms = newest
        self.heartbeat_delay_seconds = max(0, self._unix_ms() - newest) / 1000
        return True

    def committed(self, unix_ms: int) -> None:
        """A transaction with this commit time came."""
        if unix_ms <= self._unix_ms() + _AHEAD_MS:
            self.committed_unix_ms = max(unix_ms, self.committed_unix_ms)

    def seconds(self) -> float:
        """Age of the newest proof: an upper bound of the lag, which on an idle stream includes the interval between
        heartbeats. Infinite before any proof."""
        proof = max(self.heartbeat_unix_ms, self.committed_unix_ms)
        return float("inf") if proof == _NEVER else max(0, self._unix_ms() - proof) / 1000
