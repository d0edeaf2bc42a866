"""The highest versions heard of, whether or not anything is cached (DESIGN.md §4 "floors").

A message may run ahead of the row it speaks of (measured: one transaction in ten), and a replica lags; so a fill that
is older than what was heard must be neither cached nor answered. Two kinds of memory:

* `ShardFloors`: what messages, changesets, tokens and peers told. Exact for at least ``floor_seconds``, and when it
  overflows it says so, because a lost floor may let a stale fill in.
* `DepartedVersions`: what this cache itself held and let go of. Entries leave at the rate of misses, too many to keep
  each, and the message of a recent write is on its way anyway: a lossy memory of fixed size closes what remains.

Keys and versions are plain integers, so that the garbage collector has nothing to visit.
"""

from __future__ import annotations

from array import array


def floor_key(key_id: int, atype: int) -> int:
    """One integer for a list (and its count), or with ``atype`` 0 for an object."""
    return key_id << 32 | atype


class ShardFloors:
    """Floors of one shard, in two generations: the older is forgotten when the younger is ``floor_seconds`` old, so a
    floor lives for one to two times that long."""

    __slots__ = ("_floor_seconds", "_max_floors", "_old", "_rotated", "_young", "overflowed_until", "overflows")

    def __init__(self, floor_seconds: float, max_floors: int) -> None:
        self._floor_seconds = floor_seconds
        self._max_floors = max_floors
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._rotated = 0.0
        self.overflowed_until = float("-inf")
        self.overflows = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: int) -> int:
        """The floor, 0 when there is none."""
        return max(self._young.get(key, 0), self._old.get(key, 0))

    def raise_to(self, key: int, version: int, now: float) -> None:
        """Remember ``version`` unless a higher one is known. A known one is renewed: it was heard of again."""
        self.rotate(now)
        floor = max(version, self.get(key))
        if key in self._young or len(self) < self._max_floors:
            self._young[key] = floor
        elif key in self._old:
            self._old[key] = floor
            self._overflow(now)  # it may be forgotten too early
        else:
            self._overflow(now)

    def is_overflowed(self, now: float) -> bool:
        """Whether a floor has been lost that could still matter."""
        return now < self.overflowed_until

    def rotate(self, now: float) -> None:
        """Forget what is old enough."""
        if now - self._rotated >= self._floor_seconds:
            self._old = self._young
            self._young = {}
            self._rotated = now

    def clear(self) -> None:
        """Forget all: a new version epoch makes what was promised before it void (a lost write cannot be a floor)."""
        self._young = {}
        self._old = {}

    def _overflow(self, now: float) -> None:
        self.overflows += 1
        self.overflowed_until = now + self._floor_seconds


class DepartedVersions:
    """Versions of entries that left the cache, direct-mapped: a newcomer takes the place of whoever was there."""

    __slots__ = ("_atypes", "_ids", "_slots", "_versions")

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.clear()

    def clear(self) -> None:
        self._ids = array("Q", bytes(8 * self._slots))
        self._atypes = array("Q", bytes(8 * self._slots))
        self._versions = array("Q", bytes(8 * self._slots))

    def record(self, key_id: int, atype: int, version: int) -> None:
        slot = floor_key(key_id, atype) % self._slots
        if self._ids[slot] != key_id or self._atypes[slot] != atype:
            self._ids[slot] = key_id
            self._atypes[slot] = atype
            self._versions[slot] = version
        elif self._versions[slot] < version:
            self._versions[slot] = version

    def get(self, key_id: int, atype: int) -> int:
        """The version it had, 0 when that is not remembered."""
        slot = floor_key(key_id, atype) % self._slots
        return self._versions[slot] if self._ids[slot] == key_id and self._atypes[slot] == atype else 0
