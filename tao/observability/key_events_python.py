"""The events of keys and shards that a server remembers, in two bounded logs.

The compiled `tao.observability.key_events_core` has the same class; `tao.observability.key_events` chooses. There the
events of keys take a struct each and no Python object: they outnumber everything else that a server remembers, and the
garbage collector has nothing to visit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tao.model.ids import SHARD_SHIFT

Event = tuple[float, str, int, str, bool]
"""Seconds on the clock, event, version, cause, and whether it is of the shard."""


_Recorded = tuple[int, float, int, int, str, int, str]
"""Number, seconds, key or shard, atype, event, version, cause."""


class KeyEvents:
    """The newest events of keys, and apart from them those of shards, of which there are few."""

    def __init__(self, most_of_keys: int, most_of_shards: int, now: Callable[[], float]) -> None:
        """``now`` returns the time in seconds. Raises `ValueError` for bounds below 0."""
        self.cause = ""
        """The cause that is recorded with the next events."""
        self._now = now
        self._number = 0
        self._keys: deque[_Recorded] = deque(maxlen=most_of_keys)
        self._shards: deque[_Recorded] = deque(maxlen=most_of_shards)

    @property
    def of_keys(self) -> int:
        """The number of events of keys that are remembered."""
        return len(self._keys)

    @property
    def of_shards(self) -> int:
        """The number of events of shards that are remembered."""
        return len(self._shards)

    def record_key(self, key: int, atype: int, event: str, version: int) -> None:
        """Remember an event of an object (``atype`` 0), or of a list and its count."""
        self._number = number = self._number + 1
        self._keys.append((number, self._now(), key, atype, event, version, self.cause))

    def record_shard(self, shard: int, event: str, version: int) -> None:
        """Remember an event of everything in the shard."""
        self._number = number = self._number + 1
        self._shards.append((number, self._now(), shard, 0, event, version, self.cause))

    def events_of(self, key: int, atype: int) -> list[Event]:
        """Return the events of the key and of its shard, in the order in which they were recorded."""
        shard = key >> SHARD_SHIFT
        # Copies: what is made here may begin a garbage collection, and that may record an event. A list is there
        # before it iterates.
        found = [(each, False) for each in list(self._keys) if each[2] == key and each[3] == atype]
        found += [(each, True) for each in list(self._shards) if each[2] == shard]
        found.sort(key=lambda each: each[0][0])
        return [
            (seconds, event, version, cause, of_shard) for (_, seconds, _, _, event, version, cause), of_shard in found
        ]

    def complete_since(self) -> float | None:
        """Return the time since which no event of a key has been pushed out; None: none ever was."""
        if len(self._keys) < (self._keys.maxlen or 0):
            return None
        return self._keys[0][1] if self._keys else self._now()
