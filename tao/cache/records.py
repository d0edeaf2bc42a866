"""What an arena remembers beside its entries: the order in which they came, and which keys left recently.

Plain integers in arrays: nothing here is ever copied or visited as a whole, and the garbage collector has nothing to
visit.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Final

_CHUNK_ITEMS: Final = 1_024  # pairs of 512 records: their times differ by little, and 8 KB are soon free
_UNIT_BYTES: Final = 256
_CLOCK_MASK: Final = (1 << 32) - 1
_WORD_MASK: Final = (1 << 64) - 1
_LEAST_SLOTS: Final = 251
_MOST_SLOTS: Final = 1_048_573
_BYTES_PER_SLOT: Final = 1024
RETURN_PARTS: Final = (8, 4, 2, 1)


class RecordQueue:
    """A first-in, first-out queue of (table number, key) pairs, with the time at which each chunk of them was begun."""

    __slots__ = ("_at", "_chunks", "_head", "_tail", "_times", "began", "length")

    def __init__(self) -> None:
        self._chunks: deque[array[int]] = deque()
        self._times: deque[float] = deque()
        self.length = 0
        self._begin(0.0)

    def _begin(self, now: float) -> None:
        self._head = self._tail = array("Q")
        self._at = 0
        self.began = now
        """Return the time at which the oldest records were appended, the first of some hundreds."""

    def append(self, number: int, key: int, now: float) -> None:
        if not self.length:
            self._begin(now)
        tail = self._tail
        if len(tail) >= _CHUNK_ITEMS:
            tail = self._tail = array("Q")
            self._chunks.append(tail)
            self._times.append(now)
        tail.append(number)
        tail.append(key)
        self.length += 1

    def pop(self) -> tuple[int, int]:
        """Remove and return the oldest record. Raises `IndexError` when there is none."""
        if not self.length:
            raise IndexError("no record in the queue")
        at = self._at
        if at == len(self._head):
            self._head, self.began = self._chunks.popleft(), self._times.popleft()
            at = 0
        self._at = at + 2
        self.length -= 1
        return self._head[at], self._head[at + 1]


class Ghosts:
    """Keys whose entries left an arena, and how many bytes had been evicted when they came back. Direct-mapped, so a
    new key replaces the previous one in its slot, and of fixed size: 8 bytes for every kilobyte of the budget."""

    __slots__ = ("_budget_bytes", "_slots", "gone_bytes", "returns")

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        slots = min(_MOST_SLOTS, max(_LEAST_SLOTS, budget_bytes // _BYTES_PER_SLOT | 1))
        self._slots = array("Q", bytes(8 * slots))
        self.gone_bytes = 0
        self.returns = [0] * len(RETURN_PARTS)
        """Return the number of keys that came back before an eighth, a quarter, a half and all of the budget had been
        evicted since they left: what an arena larger by that much would have held."""

    def leaves(self, key: int, atype: int, size_bytes: int) -> None:
        """Note that the entry is evicted."""
        self.gone_bytes += size_bytes
        hashed = _hashed(key, atype)
        clock = self.gone_bytes // _UNIT_BYTES & _CLOCK_MASK
        self._slots[(hashed >> 32) % len(self._slots)] = (hashed & _CLOCK_MASK) << 32 | clock

    def returned(self, key: int, atype: int) -> bool:
        """Note that the key enters. Returns whether it had left so recently that twice the budget would have held
        it."""
        hashed = _hashed(key, atype)
        slot = (hashed >> 32) % len(self._slots)
        held = self._slots[slot]
        if held >> 32 != hashed & _CLOCK_MASK or not held:
            return False
        self._slots[slot] = 0
        gone = ((self.gone_bytes // _UNIT_BYTES - held) & _CLOCK_MASK) * _UNIT_BYTES
        for place, part in enumerate(RETURN_PARTS):
            if gone * part <= self._budget_bytes:
                self.returns[place] += 1
                return True
        return False


def _hashed(key: int, atype: int) -> int:
    mixed = (key ^ atype << 44 ^ key >> 32) * 0x9E3779B97F4A7C15 & _WORD_MASK
    return mixed ^ mixed >> 29
