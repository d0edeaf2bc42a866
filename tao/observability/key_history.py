"""The history of keys at one server, from a bounded event log.

It answers "why is this stale?": which fills began, what they brought and whether it was kept, which messages came and
what they did, when the shard was opened, invalidated or given up. There are two rings, because a busy server's fills
would push the few events of shards out within seconds. Recording an event costs a tuple in a ring; a query pays for the
search.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from tao.cache.key_recorder import KeyEvent, KeyHistory
from tao.model.errors import SettingsError
from tao.model.ids import SHARD_SHIFT
from tao.model.ports import Clock


@dataclass(frozen=True, slots=True)
class KeyHistorySettings:
    """Bounds of the event log."""

    key_events: int = 100_000
    """Fills, messages and evictions: about 25 MB. At a thousand misses and messages a second they reach back half a
    minute to a minute, which is when operators ask; a search through all of them takes ten milliseconds. 0: none."""

    shard_events: int = 10_000
    """Shards opened, invalidated or given up: about 2 MB. A server with a thousand shards makes that many events in ten
    restarts of leaders. 0: none."""

    def __post_init__(self) -> None:
        if self.key_events < 0 or self.shard_events < 0:
            raise SettingsError("key_events and shard_events must be at least 0")


_Event = tuple[int, float, int, int, str, int, str]
"""Number, seconds on the clock, key or shard, atype, event, version, cause."""


class KeyHistoryRecorder:
    """Implements `tao.cache.key_recorder.KeyRecorder`."""

    __slots__ = ("_began", "_keys", "_now", "_number", "_shards", "_unix_ms", "cause")

    def __init__(self, settings: KeyHistorySettings, clock: Clock) -> None:
        self._now = clock.monotonic  # events outnumber the questions for which it is turned into a time of the day
        self._unix_ms = clock.unix_ms
        self._began = clock.monotonic()
        self._keys: deque[_Event] = deque(maxlen=settings.key_events)
        self._shards: deque[_Event] = deque(maxlen=settings.shard_events)
        self._number = 0
        self.cause = ""

    def record_key(self, key: int, atype: int, event: str, version: int) -> None:
        """See `KeyRecorder.record_key`. Time: about a quarter of a microsecond."""
        self._number = number = self._number + 1
        self._keys.append((number, self._now(), key, atype, event, version, self.cause))

    def record_shard(self, shard: int, event: str, version: int) -> None:
        """See `KeyRecorder.record_shard`."""
        self._number = number = self._number + 1
        self._shards.append((number, self._now(), shard, 0, event, version, self.cause))

    def caused_by(self, cause: str) -> AbstractContextManager[object]:
        """See `KeyRecorder.caused_by`."""
        return _Because(self, cause)

    def history_of(self, key: int, atype: int) -> KeyHistory:
        """See `KeyRecorder.history_of`."""
        shard = key >> SHARD_SHIFT
        events = [(event, False) for event in self._keys if event[2] == key and event[3] == atype]
        events += [(event, True) for event in self._shards if event[2] == shard]
        events.sort(key=lambda each: each[0][0])
        zero_unix_ms = self._unix_ms() - 1000 * self._now()
        return KeyHistory(
            tuple(
                KeyEvent(round(zero_unix_ms + 1000 * event[1]), str(event[4]), event[5], event[6], of_shard)
                for event, of_shard in events
            ),
            round(zero_unix_ms + 1000 * self._since()),
        )

    def _since(self) -> float:
        """Return the time on the clock since which no event of a key has been pushed out of the ring."""
        if len(self._keys) < (self._keys.maxlen or 0):
            return self._began
        return self._keys[0][1] if self._keys else self._now()


class _Because:
    """Sets the cause of events for a block. It is a class, because a generator costs three times as much."""

    __slots__ = ("_before", "_cause", "_story")

    def __init__(self, story: KeyHistoryRecorder, cause: str) -> None:
        self._story: Final = story
        self._cause: Final = cause
        self._before = ""

    def __enter__(self) -> None:
        self._before = self._story.cause
        self._story.cause = self._cause

    def __exit__(self, *_: object) -> None:
        self._story.cause = self._before
