"""Seven policies, each as small as it can be written, all counted in bytes and none with a clock or chance of its own.

A hit is a look-up and whatever the policy does then; that this is little is half of what makes one worth having, since
hits outnumber evictions by twenty to one. `Priced` is what `tao.cache.eviction` does with real entries.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from math import ceil
from typing import Final, Protocol

from tao.cache.eviction import MOST_CREDIT, USE_CREDIT


class Policy(Protocol):
    """``sizes`` of what is held, by key. `hit` is called for a key that is held, `add` for one that is not."""

    @property
    def held(self) -> Mapping[int, int]: ...

    @property
    def hit(self) -> Callable[[int], None]: ...

    def add(self, key: int, size: int) -> None: ...


class Lru:
    """Exact: a doubly linked list, which the standard library has in C."""

    def __init__(self, room: int) -> None:
        self.held: OrderedDict[int, int] = OrderedDict()
        self.hit: Callable[[int], None] = self.held.move_to_end
        self._left = room

    def add(self, key: int, size: int) -> None:
        self.held[key] = size
        self._left -= size
        while self._left < 0:
            self._left += self.held.popitem(last=False)[1]


class SegmentedLru:
    """New entries are on probation; a hit moves them among the protected, four fifths of the room."""

    def __init__(self, room: int) -> None:
        self.held: dict[int, int] = {}
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._left = room
        self._protected_left = room * 4 // 5

    def hit(self, key: int) -> None:
        if key in self._protected:
            self._protected.move_to_end(key)
            return
        del self._probation[key]
        self._protected[key] = None
        self._protected_left -= self.held[key]
        while self._protected_left < 0:
            demoted, _ = self._protected.popitem(last=False)
            self._probation[demoted] = None
            self._protected_left += self.held[demoted]

    def add(self, key: int, size: int) -> None:
        self.held[key] = size
        self._probation[key] = None
        self._left -= size
        while self._left < 0:
            gone, _ = (self._probation or self._protected).popitem(last=False)
            self._left += self.held.pop(gone)


class Uses:
    """A policy that keeps a byte of use for each key: a mark, a count or a credit."""

    def __init__(self) -> None:
        self.uses: Final = bytearray(1 << 21)
        self.held: dict[int, int] = {}

    def hit(self, key: int) -> None:
        self.uses[key] = 1


class SecondChance(Uses):
    """First in, first out; an entry that was used since goes around once more."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._queue: deque[int] = deque()
        self._left = room

    def add(self, key: int, size: int) -> None:
        self.held[key] = size
        self.uses[key] = 0
        self._queue.append(key)
        self._left -= size
        while self._left < 0:
            oldest = self._queue.popleft()
            if self.uses[oldest]:
                self.uses[oldest] = 0
                self._queue.append(oldest)
            else:
                self._left += self.held.pop(oldest)


class Sieve(Uses):
    """First in, first out, with a hand that stays where it is: used entries keep their place, new ones come behind it.

    A linked list by key, because the hand takes from the middle."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._newer: dict[int, int] = {-1: -1}  # -1: the ends
        self._older: dict[int, int] = {-1: -1}
        self._hand = -1
        self._left = room

    def add(self, key: int, size: int) -> None:
        self.held[key] = size
        self.uses[key] = 0
        newest = self._older[-1]
        self._older[-1], self._newer[newest] = key, key
        self._older[key], self._newer[key] = newest, -1
        self._left -= size
        while self._left < 0:
            hand = self._hand if self._hand != -1 else self._newer[-1]
            while self.uses[hand]:
                self.uses[hand] = 0
                hand = self._newer[hand]
                if hand == -1:
                    hand = self._newer[-1]
            older, newer = self._older.pop(hand), self._newer.pop(hand)
            self._newer[older], self._older[newer] = newer, older
            self._hand = newer
            self._left += self.held.pop(hand)


class SmallAndMain(Uses):
    """S3-FIFO with one mark: a tenth of the room for newcomers, who go on to the main queue when they were used; a
    ghost of those who were not, which leads straight to the main queue; second chances there."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._left = room
        self._small_bytes = 0
        self._small_room = room // 10

    def add(self, key: int, size: int) -> None:
        self.held[key] = size
        self.uses[key] = 0
        self._left -= size
        if key in self._ghosts:
            del self._ghosts[key]
            self._main.append(key)
        else:
            self._small.append(key)
            self._small_bytes += size
        while self._left < 0:
            if self._small_bytes > self._small_room or not self._main:
                self._leave_small()
            else:
                self._leave_main()

    def _leave_small(self) -> None:
        oldest = self._small.popleft()
        self._small_bytes -= self.held[oldest]
        if self.uses[oldest]:
            self.uses[oldest] = 0
            self._main.append(oldest)
            return
        self._leave(oldest)

    def _leave(self, key: int) -> None:
        self._left += self.held.pop(key)
        self._ghosts[key] = None
        while len(self._ghosts) > len(self.held):
            self._ghosts.popitem(last=False)

    def _leave_main(self) -> None:
        oldest = self._main.popleft()
        if self.uses[oldest]:
            self.uses[oldest] = 0
            self._main.append(oldest)
        else:
            self._left += self.held.pop(oldest)


class CountedSmallAndMain(SmallAndMain):
    """S3-FIFO as published: counts up to three uses, and two of them lead out of the small queue."""

    def hit(self, key: int) -> None:
        if self.uses[key] < 3:
            self.uses[key] += 1

    def _leave_small(self) -> None:
        if self.uses[self._small[0]] == 1:
            self.uses[self._small[0]] = 0
        super()._leave_small()

    def _leave_main(self) -> None:
        oldest = self._main.popleft()
        if self.uses[oldest]:
            self.uses[oldest] -= 1
            self._main.append(oldest)
        else:
            self._left += self.held.pop(oldest)


class Priced(SmallAndMain):
    """S3-FIFO where staying has a price, by size: a use is a credit of two, an entry of mean size pays two each time
    that the hand comes by, one of half of it one. A tenth of the entries, not of the room, are newcomers."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._room = room

    def hit(self, key: int) -> None:
        if self.uses[key] < MOST_CREDIT:
            self.uses[key] += USE_CREDIT

    def add(self, key: int, size: int) -> None:
        self.held[key] = size
        self._left -= size
        if key in self._ghosts:
            del self._ghosts[key]
            self._main.append(key)
        else:
            self._small.append(key)
        while self._left < 0:
            entries = len(self.held)
            from_small = len(self._small) * 10 > entries or not self._main
            oldest = (self._small if from_small else self._main).popleft()
            size = self.held[oldest]
            price = max(1, min(MOST_CREDIT, ceil(USE_CREDIT * size * entries / (self._room - self._left))))
            if self.uses[oldest] >= price:
                self.uses[oldest] -= price
                self._main.append(oldest)
                continue
            self._leave(oldest)


POLICIES: Final[dict[str, Callable[[int], Policy]]] = {
    "LRU": Lru,
    "segmented LRU": SegmentedLru,
    "second chance": SecondChance,
    "SIEVE": Sieve,
    "S3-FIFO, one mark": SmallAndMain,
    "S3-FIFO, counts": CountedSmallAndMain,
    "S3-FIFO, uses priced by size": Priced,
}
