"""Version floors: the highest versions known of keys, whether or not the keys are cached.

A message may arrive before a SELECT can see its row (measured: one transaction in ten), and a replica lags. So a fill
that is older than a known version must be neither cached nor answered. There are two kinds of memory:

* `VersionFloors` holds versions from messages, changesets, tokens and peers. It is exact for at least
  ``floor_seconds``; when it overflows it says so, because a lost floor may let a stale fill in.
* `tao.cache.records.DepartedVersions` holds versions of entries that this cache has dropped. Entries leave at the rate
  of misses, too many to keep each; and the message of a recent write is on its way anyway. A lossy memory of fixed
  size is enough.

Keys and versions are plain integers, so the garbage collector has nothing to visit.
"""

from __future__ import annotations

from math import inf
from typing import Final

_TYPE_MASK: Final = 0xFFFFFFFF
_NO_FLOORS: Final[dict[int, int]] = {}
"""The halves of a shard that has had no floors yet. Never changed: `VersionFloors.rotate` replaces them before that."""


class VersionFloors:
    """The version floors of one shard, in two halves. The older half is forgotten when the younger is
    ``floor_seconds`` old, so a floor lives for one to two times that long. The halves have one integer for a list (and
    its count), or with ``atype`` 0 for an object. They may be read directly: most shards have no floors."""

    __slots__ = ("_floor_seconds", "_max_floors", "_rotated", "old", "overflowed_until", "overflows", "young")

    def __init__(self, floor_seconds: float, max_floors: int) -> None:
        self._floor_seconds = floor_seconds
        self._max_floors = max_floors
        self.young = self.old = _NO_FLOORS
        self._rotated = self.overflowed_until = -inf
        self.overflows = 0

    def __len__(self) -> int:
        return len(self.young) + len(self.old)

    def get(self, key_id: int, atype: int) -> int:
        """Return the floor, 0 when there is none."""
        key = key_id << 32 | atype
        young = self.young.get(key, 0)
        return max(young, self.old.get(key, 0)) if self.old else young

    def of_lists(self, atype: int) -> dict[int, int]:
        """Return the floors of all lists of a type by id1."""
        floors: dict[int, int] = {}
        for half in (self.old, self.young):
            for key, version in half.items():
                if key & _TYPE_MASK == atype:
                    floors[key >> 32] = max(version, floors.get(key >> 32, 0))
        return floors

    def raise_to(self, key_id: int, atype: int, version: int, now: float) -> None:
        """Raise the floor to ``version``. A floor that is higher already stays, and its lifetime starts anew."""
        key = key_id << 32 | atype
        if now - self._rotated >= self._floor_seconds:
            self.rotate(now)
        young = self.young
        known = young.get(key)
        if known is not None:  # the older half has no higher one
            if version > known:
                young[key] = version
            return
        old = self.old
        floor = max(version, old.get(key, 0)) if old else version
        if len(young) + len(old) < self._max_floors:
            young[key] = floor
        elif key in old:
            old[key] = floor
            self._overflow(now)  # it may be forgotten too early
        else:
            self._overflow(now)

    def is_overflowed(self, now: float) -> bool:
        """Return whether a floor that could still matter has been lost."""
        return now < self.overflowed_until

    def rotate(self, now: float) -> None:
        """Forget expired floors."""
        if now - self._rotated >= self._floor_seconds:
            self.old = self.young
            self.young = {}
            self._rotated = now

    def clear(self) -> None:
        """Forget all floors. A new version epoch invalidates the floors of the old one: a lost write cannot be a
        floor."""
        self.young = {}
        self.old = {}

    def _overflow(self, now: float) -> None:
        self.overflows += 1
        self.overflowed_until = now + self._floor_seconds
