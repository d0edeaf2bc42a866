"""Version floors: the highest versions known of keys, whether or not the keys are cached.

A message may arrive before a SELECT can see its row (measured: one transaction in ten), and a replica lags. So a fill
that is older than a known version must be neither cached nor answered. There are two kinds of memory:

* `VersionFloors` holds versions from messages, changesets, tokens and peers. It is exact for at least
  ``floor_seconds``; when it overflows it says so, because a lost floor may let a stale fill in.
* `DepartedVersions` holds versions of entries that this cache has dropped. Entries leave at the rate of misses, too
  many to keep each; and the message of a recent write is on its way anyway. A lossy memory of fixed size is enough.

Keys and versions are plain integers, so the garbage collector has nothing to visit.
"""

from __future__ import annotations

from array import array
from math import inf
from typing import Final

_TYPE_MASK: Final = 0xFFFFFFFF
_NO_FLOORS: Final[dict[int, int]] = {}
"""The halves of a shard that has had no floors yet. Never changed: `VersionFloors.rotate` replaces them before that."""


class VersionFloors:
    """The version floors of one shard, in two halves. The older half is forgotten when the younger is
    ``floor_seconds`` old, so a floor lives for one to two times that long. The halves have one integer for a list (and
    its count), or with ``atype`` 0 for an object."""

    __slots__ = ("_floor_seconds", "_max_floors", "_old", "_rotated", "_young", "overflowed_until", "overflows")

    def __init__(self, floor_seconds: float, max_floors: int) -> None:
        self._floor_seconds = floor_seconds
        self._max_floors = max_floors
        self._young = self._old = _NO_FLOORS
        self._rotated = self.overflowed_until = -inf
        self.overflows = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key_id: int, atype: int) -> int:
        """Return the floor, 0 when there is none."""
        key = key_id << 32 | atype
        young = self._young.get(key, 0)
        return max(young, self._old.get(key, 0)) if self._old else young

    def of_lists(self, atype: int) -> dict[int, int]:
        """Return the floors of all lists of a type by id1."""
        floors: dict[int, int] = {}
        for half in (self._old, self._young):
            for key, version in half.items():
                if key & _TYPE_MASK == atype:
                    floors[key >> 32] = max(version, floors.get(key >> 32, 0))
        return floors

    def raise_to(self, key_id: int, atype: int, version: int, now: float) -> None:
        """Raise the floor to ``version``. A floor that is higher already stays, and its lifetime starts anew."""
        key = key_id << 32 | atype
        if now - self._rotated >= self._floor_seconds:
            self.rotate(now)
        young = self._young
        known = young.get(key)
        if known is not None:  # the older half has no higher one
            if version > known:
                young[key] = version
            return
        old = self._old
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
            self._old = self._young
            self._young = {}
            self._rotated = now

    def clear(self) -> None:
        """Forget all floors. A new version epoch invalidates the floors of the old one: a lost write cannot be a
        floor."""
        self._young = {}
        self._old = {}

    def _overflow(self, now: float) -> None:
        self.overflows += 1
        self.overflowed_until = now + self._floor_seconds


class DepartedVersions:
    """Versions of entries that left the cache, direct-mapped: a new entry replaces the previous one in its slot."""

    __slots__ = ("_atypes", "_ids", "_slots", "_versions")

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.clear()

    def clear(self) -> None:
        self._ids = array("Q", bytes(8 * self._slots))
        self._atypes = array("Q", bytes(8 * self._slots))
        self._versions = array("Q", bytes(8 * self._slots))

    def record(self, key_id: int, atype: int, version: int) -> None:
        slot = (key_id << 32 | atype) % self._slots
        if self._ids[slot] != key_id or self._atypes[slot] != atype:
            self._ids[slot] = key_id
            self._atypes[slot] = atype
            self._versions[slot] = version
        elif self._versions[slot] < version:
            self._versions[slot] = version

    def get(self, key_id: int, atype: int) -> int:
        """Return the version that the entry had, 0 when it is not remembered."""
        slot = (key_id << 32 | atype) % self._slots
        return self._versions[slot] if self._ids[slot] == key_id and self._atypes[slot] == atype else 0
