"""The history of keys at one server, from a bounded event log.

It answers "why is this stale?": which fills began, what they brought and whether it was kept, which messages came and
what they did, when the shard was opened, invalidated or given up. There are two rings, because a busy server's fills
would push the few events of shards out within seconds. Recording an event costs a place in a ring; a query pays for the
search.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from tao.cache.key_recorder import KeyEvent, KeyHistory
from tao.model.errors import SettingsError
from tao.model.ports import Clock
from tao.observability.key_events import KeyEvents


@dataclass(frozen=True, slots=True)
class KeyHistorySettings:
    """Bounds of the event log."""

    key_events: int = 100_000
    """Fills, messages and evictions: about 6 MB, and 25 MB where nothing is compiled. At a thousand misses and messages
    a second they reach back half a minute to a minute, which is when operators ask; a search through all of them takes
    ten milliseconds at most. 0: none."""

    shard_events: int = 10_000
    """Shards opened, invalidated or given up: 2 MB at most. A server with a thousand shards makes that many events in
    ten restarts of leaders. 0: none."""

    def __post_init__(self) -> None:
        if self.key_events < 0 or self.shard_events < 0:
            raise SettingsError("key_events and shard_events must be at least 0")


class KeyHistoryRecorder(KeyEvents):
    """Implements `tao.cache.key_recorder.KeyRecorder`."""

    __slots__ = ("_began", "_clock")

    def __init__(self, settings: KeyHistorySettings, clock: Clock) -> None:
        # Events outnumber the questions for which their times are turned into times of the day.
        super().__init__(settings.key_events, settings.shard_events, clock.monotonic)
        self._clock = clock
        self._began = clock.monotonic()

    def caused_by(self, cause: str) -> AbstractContextManager[object]:
        """See `KeyRecorder.caused_by`."""
        return _Because(self, cause)

    def history_of(self, key: int, atype: int) -> KeyHistory:
        """See `KeyRecorder.history_of`."""
        zero_unix_ms = self._clock.unix_ms() - 1000 * self._clock.monotonic()
        since = self.complete_since()
        return KeyHistory(
            tuple(
                KeyEvent(round(zero_unix_ms + 1000 * seconds), str(event), version, cause, of_shard)
                for seconds, event, version, cause, of_shard in self.events_of(key, atype)
            ),
            round(zero_unix_ms + 1000 * (self._began if since is None else since)),
        )


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
