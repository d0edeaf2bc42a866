"""What a follower has counted and holds in memory, and which of it is due to be flushed.

A follower counts under a *life*, whose slot takes its totals (`tao.model.counters`). A counter stays with its life
until that is old, so that leaders never refuse a first flush of it. When memory is short, counters that are written
and have long had no addition are forgotten. A forgotten counter may not go on in its slot, since its totals would
begin at nothing there: so a new life begins whenever a counter of the current one is forgotten. That is once per turn
of the hand that looks for them, and no counter that has additions in every turn gets a new slot by it.

Each counter is in the queue of its type at most once: from the first addition until a flush with its newest totals is
acknowledged. A round flushes what was queued at its beginning, so a counter is flushed once in a round, however often
it is added to. This module has no clock and sends nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from tao.model.counters import MAX_COUNTED
from tao.model.errors import Overloaded, TooLarge
from tao.schema.types import CounterOptions

CounterKey = tuple[int, int]
"""The id of an object, and the number of one of its counters."""
_SWEPT_AT_ONCE: Final = 5_000
"""Counters that one step looks at for some to forget: a millisecond of the loop."""


class Life:
    """One life of the follower. ``flushes``: how many it has numbered."""

    __slots__ = ("begun_at", "flushes", "slot")

    def __init__(self, slot: int, begun_at: float) -> None:
        self.slot: Final = slot
        self.begun_at: Final = begun_at
        self.flushes = 0


class Held:
    """What one life has counted of one counter. ``flushed``: the net that is known to be written. ``waits_since``: when
    the oldest addition may have come that is not known to be written. ``is_queued``: it waits for a flush or its
    answer. ``is_in_use``: it was added to after the last look for counters to forget."""

    __slots__ = ("flushed", "is_in_use", "is_queued", "key", "life", "minus", "plus", "waits_since")

    def __init__(self, key: CounterKey, life: Life) -> None:
        self.key: Final = key
        self.life: Final = life
        self.plus = self.minus = self.flushed = 0
        self.is_queued = self.is_in_use = False
        self.waits_since = 0.0


class Flush(NamedTuple):
    """Totals on their way to the leader. ``taken_at``: when they were read."""

    held: Held
    number: int
    plus: int
    minus: int
    taken_at: float


class Looks:
    """How much one step may still look at: a counter is one look, and so is each slot of a list that is decoded."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class _Queue:
    """The counters of one type that wait to be flushed. ``left``: how many of them are of the round under way, which
    began at ``begun_at``."""

    __slots__ = ("begun_at", "held", "left")

    def __init__(self) -> None:
        self.held: Final[deque[Held]] = deque()
        self.left = 0
        self.begun_at = float("-inf")


class CounterTotals:
    """The totals of one follower's lives. ``held``: how many counters are in memory, those of older lives included."""

    def __init__(self, max_counters: int, life_seconds: float, new_slot: Callable[[], int], now: float) -> None:
        """``new_slot`` returns the slot of a life that begins."""
        self._max_counters: Final = max_counters
        self._life_seconds: Final = life_seconds
        self._new_slot: Final = new_slot
        self._life = Life(new_slot(), now)
        self._current: Final[dict[CounterKey, Held]] = {}
        """What additions to a counter go to."""
        self._former: Final[dict[CounterKey, list[Held]]] = {}
        """What lives that are over have counted and not written."""
        self._turn: Final[deque[Held]] = deque()
        """Each current counter once, in the order in which they are looked at for some to forget."""
        self._unswept = 0
        self._queues: Final[dict[int, _Queue]] = {}
        self.held = 0
        self.lost = self.lost_counters = 0
        """How much was given up, because a leader took no flush of its life or the counter left the schema; and in how
        many counters."""

    @property
    def queued(self) -> int:
        """Return how many of them wait to be flushed, without those that are under way."""
        return sum(len(queue.held) for queue in self._queues.values())

    def add(self, key: CounterKey, by: int, now: float) -> None:
        """Count. Raises `Overloaded` when as many counters are held as may be and this one is not among them, and
        `TooLarge` for a total above 63 bits."""
        held = self._current.get(key)
        if held is not None and self._is_over(held.life, now, 2 if self.held >= self._max_counters else 1):
            self._retire(held)
            held = None
        if held is None:
            if self.held >= self._max_counters:
                raise Overloaded(
                    f"this follower holds {self._max_counters} counters, which is the bound (counters.max_counters); "
                    "what it has counted waits for the leaders"
                )
            held = Held(key, self._life)
        else:
            held.is_in_use = True
        if by > 0:
            if held.plus + by > MAX_COUNTED:
                raise TooLarge(f"counter {key[1]} of {key[0]} has counted {held.plus} here; {by} more exceed 63 bits")
            held.plus += by
        else:
            if held.minus - by > MAX_COUNTED:
                raise TooLarge(f"counter {key[1]} of {key[0]} has counted -{held.minus} here; {by} more exceed 63 bits")
            held.minus -= by
        if held.is_queued:
            return
        if key not in self._current:
            self._current[key] = held
            self._turn.append(held)
            self.held += 1
        held.waits_since = now
        self._enqueue(held)

    def by_slot(self, key: CounterKey) -> dict[int, tuple[int, int]]:
        """Return what the lives of this follower have added and taken away, by their slots, as far as it is held."""
        found = {held.life.slot: (held.plus, held.minus) for held in self._former.get(key, ())}
        held = self._current.get(key)
        if held is not None:
            found[held.life.slot] = held.plus, held.minus
        return found

    # ---- flushes ---------------------------------------------------------------------------------------------------

    def take_due(
        self,
        options_of: Callable[[int], CounterOptions | None],
        is_wanted: Callable[[Held, CounterOptions], bool],
        now: float,
        room: int,
        looks: Looks,
    ) -> list[Flush]:
        """Return what is to be flushed now, at most ``room``; it is under way until `done`, `failed` or `refused`.

        ``options_of`` returns the options of a counter's type, None for one that is no counter any more: what was
        counted of it is given up. What is not ``is_wanted`` waits for the next round. ``looks``: what may be looked at;
        ``is_wanted`` takes from them, too. The next call goes on where this one ends, with another type first."""
        flushes: list[Flush] = []
        for number in list(self._queues):
            if looks.left <= 0 or len(flushes) >= room:
                break
            queue = self._queues[number]
            if not queue.held:
                continue
            options = options_of(number)
            if not queue.left:
                if options is not None and now < queue.begun_at + options.flush_seconds:
                    continue
                queue.left = len(queue.held)
                queue.begun_at = now
            self._queues[number] = self._queues.pop(number)
            while queue.left and len(flushes) < room and looks.left > 0:
                looks.left -= 1
                queue.left -= 1
                held = queue.held.popleft()
                if options is None:
                    self._give_up(held, now)
                elif is_wanted(held, options):
                    held.life.flushes += 1
                    flushes.append(Flush(held, held.life.flushes, held.plus, held.minus, now))
                else:
                    queue.held.append(held)
        return flushes

    def done(self, flush: Flush, now: float) -> None:
        """Note that a flush is acknowledged."""
        held = flush.held
        held.flushed = flush.plus - flush.minus
        if (held.plus, held.minus) != (flush.plus, flush.minus):
            held.waits_since = flush.taken_at
            self._enqueue(held)
            return
        held.is_queued = False
        if self._current.get(held.key) is not held or self._is_over(held.life, now):
            self._forget(held)

    def failed(self, flush: Flush) -> None:
        """Note that a flush failed, or that its outcome is unknown: the next one says the same and more."""
        self._enqueue(flush.held)

    def refused(self, flush: Flush, now: float) -> None:
        """Note that no flush of this slot will be taken any more."""
        self._give_up(flush.held, now)

    def _enqueue(self, held: Held) -> None:
        held.is_queued = True
        queue = self._queues.get(held.key[1])
        if queue is None:
            queue = self._queues[held.key[1]] = _Queue()
        queue.held.append(held)

    def _give_up(self, held: Held, now: float) -> None:
        self.lost += abs(held.plus - held.minus - held.flushed)
        self.lost_counters += 1
        self._forget(held)
        if held.life is self._life:
            self._begin_life(now)

    # ---- lives -----------------------------------------------------------------------------------------------------

    def renew(self, now: float) -> None:
        """Begin a new life when the current one is old, and forget some counters that are written: of lives that are
        over, and, when more than three quarters of what may be held is, those that nobody added to in a whole turn."""
        if now >= self._life.begun_at + self._life_seconds:
            self._begin_life(now)
            self._unswept = len(self._turn)
        for _ in range(min(_SWEPT_AT_ONCE, len(self._turn))):
            is_short = max(self.held, len(self._turn)) * 4 > self._max_counters * 3
            if not is_short and not self._unswept:
                return
            self._unswept = max(0, self._unswept - 1)
            self._look_at(self._turn.popleft(), now, is_short=is_short)

    def _look_at(self, held: Held, now: float, *, is_short: bool) -> None:
        if self._current.get(held.key) is not held:
            return  # it was given up, or another life goes on with the counter
        if not held.is_queued and (self._is_over(held.life, now) or (is_short and not held.is_in_use)):
            if held.life is self._life:
                self._begin_life(now)
            self._forget(held)
            return
        if is_short:
            held.is_in_use = False
        self._turn.append(held)

    def _begin_life(self, now: float) -> None:
        self._life = Life(self._new_slot(), now)

    def _is_over(self, life: Life, now: float, times: int = 1) -> bool:
        """Return whether a life counts no more. ``times``: how often its usual time it lasts; twice where there is no
        room for the next one, which leaders still take."""
        return life is not self._life and now >= life.begun_at + self._life_seconds * times

    def _retire(self, held: Held) -> None:
        """Have additions go to another life from now on."""
        if held.is_queued:
            del self._current[held.key]
            self._former.setdefault(held.key, []).append(held)
        else:
            self._forget(held)

    def _forget(self, held: Held) -> None:
        self.held -= 1
        if self._current.get(held.key) is held:
            del self._current[held.key]
            return
        former = self._former[held.key]
        former.remove(held)
        if not former:
            del self._former[held.key]
