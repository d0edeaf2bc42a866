"""Seven policies, each as small as it can be written, all counted in bytes and none with a clock or chance of its own;
and the trace of requests that is played against them.

A hit is a look-up and whatever the policy does then; that this is little is half of what makes one worth having, since
hits outnumber evictions by twenty to one. `Priced` is what `tao.cache.eviction` does with real entries.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from math import ceil
from typing import Final

from tao.cache.eviction import MOST_CREDIT, USE_CREDIT

_SCAN_ONE_IN: Final = 5


class Policy:
    """Entries of at most ``room`` bytes together."""

    def __init__(self, room: int) -> None:
        self.held: dict[int, int] = {}
        """The sizes of what is held, by key."""
        self.uses: Final = bytearray(1 << 21)
        """A byte for each key, where a policy needs it: a mark, a count or a credit."""
        self._left = room

    def hit(self, key: int) -> None:
        """Note the use of a key that is held."""
        self.uses[key] = 1

    def add(self, key: int, size: int) -> None:
        """Take in a key that is not held, and evict others until there is room."""
        self.held[key] = size
        self._left -= size
        self._enter(key)
        while self._left < 0:
            self._left += self.held.pop(self._leaver())

    def _enter(self, key: int) -> None:
        """Put a key, which is held from now on, where it belongs."""

    def _leaver(self) -> int:
        """Choose the key to evict, and forget it."""
        raise NotImplementedError


class Lru(Policy):
    """Exact: a doubly linked list, which the standard library has in C."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.held: OrderedDict[int, int] = OrderedDict()
        # Without a method around it: the cost of a hit is compared.
        self.hit = self.held.move_to_end  # type: ignore[method-assign]

    def _leaver(self) -> int:
        return next(iter(self.held))


class SegmentedLru(Policy):
    """New entries are on probation; a hit moves them among the protected, four fifths of the room."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
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

    def _enter(self, key: int) -> None:
        self._probation[key] = None

    def _leaver(self) -> int:
        return (self._probation or self._protected).popitem(last=False)[0]


class SecondChance(Policy):
    """First in, first out; an entry that was used since goes around once more."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._main: deque[int] = deque()

    def _enter(self, key: int) -> None:
        self.uses[key] = 0
        self._main.append(key)

    def _leaver(self) -> int:
        while self.uses[oldest := self._main.popleft()]:
            self.uses[oldest] -= 1
            self._main.append(oldest)
        return oldest


class Sieve(Policy):
    """First in, first out, with a hand that stays where it is: used entries keep their place, new ones come behind it.

    A linked list by key, because the hand takes from the middle."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._newer: dict[int, int] = {-1: -1}  # -1: the ends
        self._older: dict[int, int] = {-1: -1}
        self._hand = -1

    def _enter(self, key: int) -> None:
        self.uses[key] = 0
        newest = self._older[-1]
        self._older[-1], self._newer[newest] = key, key
        self._older[key], self._newer[key] = newest, -1

    def _leaver(self) -> int:
        hand = self._hand if self._hand != -1 else self._newer[-1]
        while self.uses[hand]:
            self.uses[hand] = 0
            hand = self._newer[hand]
            if hand == -1:
                hand = self._newer[-1]
        older, newer = self._older.pop(hand), self._newer.pop(hand)
        self._newer[older], self._older[newer] = newer, older
        self._hand = newer
        return hand


class SmallAndMain(SecondChance):
    """S3-FIFO with one mark: a tenth of the room for newcomers, who go on to the main queue when they were used; a
    ghost of those who were not, which leads straight to the main queue; second chances there."""

    uses_to_main = 1
    """Uses that lead out of the small queue."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._small: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._room = room
        self._small_bytes = 0

    def _enter(self, key: int) -> None:
        self.uses[key] = 0
        self._queue_up(key)

    def _queue_up(self, key: int) -> None:
        if key in self._ghosts:
            del self._ghosts[key]
            self._main.append(key)
        else:
            self._small.append(key)
            self._small_bytes += self.held[key]

    def _leaver(self) -> int:
        while self._small_bytes > self._room // 10 or not self._main:
            oldest = self._small.popleft()
            self._small_bytes -= self.held[oldest]
            if self.uses[oldest] < self.uses_to_main:
                return self._haunt(oldest)
            self.uses[oldest] = 0
            self._main.append(oldest)
        return super()._leaver()

    def _haunt(self, key: int) -> int:
        """Leave a ghost of the key, and return it."""
        self._ghosts[key] = None
        while len(self._ghosts) >= len(self.held):
            self._ghosts.popitem(last=False)
        return key


class CountedSmallAndMain(SmallAndMain):
    """S3-FIFO as published: counts up to three uses, and two of them lead out of the small queue."""

    uses_to_main = 2

    def hit(self, key: int) -> None:
        if self.uses[key] < 3:
            self.uses[key] += 1


class Priced(SmallAndMain):
    """S3-FIFO where staying has a price, by size: a use is a credit of two, an entry of mean size pays two each time
    that the hand comes by, one of half of it one. A tenth of the entries, not of the room, are newcomers."""

    def hit(self, key: int) -> None:
        if self.uses[key] < MOST_CREDIT:
            self.uses[key] += USE_CREDIT

    def _enter(self, key: int) -> None:
        # What is left of its credit stays with the key of an entry that has left.
        self._queue_up(key)

    def _leaver(self) -> int:
        while True:
            entries = len(self.held)
            oldest = (self._small if len(self._small) * 10 > entries or not self._main else self._main).popleft()
            relative = self.held[oldest] * entries / (self._room - self._left)
            price = max(1, min(MOST_CREDIT, ceil(USE_CREDIT * relative)))
            if self.uses[oldest] < price:
                return self._haunt(oldest)
            self.uses[oldest] -= price
            self._main.append(oldest)


POLICIES: Final[dict[str, Callable[[int], Policy]]] = {
    "LRU": Lru,
    "segmented LRU": SegmentedLru,
    "second chance": SecondChance,
    "SIEVE": Sieve,
    "S3-FIFO, one mark": SmallAndMain,
    "S3-FIFO, counts": CountedSmallAndMain,
    "S3-FIFO, uses priced by size": Priced,
}


def hit_rate(
    policy: Policy, keys: Sequence[int], sizes: Sequence[int], warm: int, *, scan: bool = False
) -> tuple[float, float]:
    """Play requests for ``keys`` and return the shares of hits and of first requests for a key, without the first
    ``warm`` requests.

    ``scan``: a client walks once through everything beside them, one request in five; its own are not counted.
    """
    held, hit, add, every = policy.held, policy.hit, policy.add, len(sizes)
    seen = set[int]()
    hits = first = 0
    for turn, key in enumerate(keys):
        counted = turn >= warm
        if key in held:
            hit(key)
            hits += counted
        else:
            add(key, sizes[key])
        if key not in seen:
            seen.add(key)
            first += counted
        if scan and turn % _SCAN_ONE_IN == 0:
            walked = turn // _SCAN_ONE_IN * 7_919 % every
            if walked in held:
                hit(walked)
            else:
                add(walked, sizes[walked])
    asked = len(keys) - warm
    return hits / asked, first / asked
