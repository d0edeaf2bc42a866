"""What a follower has counted and holds in memory, and which of it is due to be flushed.

A follower counts under a *life*, whose slot takes its totals (`tao.model.counters`). It begins a new one now and then,
so that counters that nobody adds to any more leave its memory, and so that no life grows so old that leaders refuse
its first flushes. An older life is kept until all that it has counted is written.

Each counter is in the queue of its type at most once: from the first addition until a flush with its newest totals is
acknowledged. A round flushes what was queued at its beginning, so a counter is flushed once in a round, however often
it is added to. This module has no clock and sends nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from tao.model.counters import MAX_COUNTED
from tao.model.errors import Overloaded, TooLarge
from tao.schema.types import CounterOptions

CounterKey = tuple[int, int]
"""The id of an object, and the number of one of its counters."""
_SWEPT_AT_ONCE: Final = 5_000
"""Counters of an older life that one step looks at: a millisecond of the loop."""


class Life:
    """One life of the follower. ``held``: what it has counted, by counter. ``flushes``: how many it has numbered.
    ``unswept``: counters that may be forgotten if they are written, once it is an older life."""

    __slots__ = ("begun_at", "flushes", "held", "slot", "unswept")

    def __init__(self, slot: int, begun_at: float) -> None:
        self.slot: Final = slot
        self.begun_at: Final = begun_at
        self.held: Final[dict[CounterKey, Held]] = {}
        self.flushes = 0
        self.unswept: list[CounterKey] = []


class Held:
    """What one life has counted of one counter. ``flushed``: the net that is known to be written. ``waits_since``: when
    the oldest addition came that is not known to be written. ``is_queued``: it waits for a flush or its answer."""

    __slots__ = ("flushed", "is_queued", "key", "life", "minus", "plus", "waits_since")

    def __init__(self, key: CounterKey, life: Life) -> None:
        self.key: Final = key
        self.life: Final = life
        self.plus = self.minus = self.flushed = 0
        self.is_queued = False
        self.waits_since = 0.0


class Flush(NamedTuple):
    """Totals on their way to the leader."""

    held: Held
    number: int
    plus: int
    minus: int


class _Queue:
    """The counters of one type that wait to be flushed. ``left``: how many of them are of the round under way."""

    __slots__ = ("due_at", "held", "left")

    def __init__(self) -> None:
        self.held: Final[deque[Held]] = deque()
        self.left = 0
        self.due_at = float("-inf")


class CounterTotals:
    """The totals of one follower's lives."""

    def __init__(self, max_counters: int, life_seconds: float, new_slot: Callable[[], int], now: float) -> None:
        """``new_slot`` returns the slot of a life that begins."""
        self._max_counters: Final = max_counters
        self._life_seconds: Final = life_seconds
        self._new_slot: Final = new_slot
        self._life = Life(new_slot(), now)
        self._older: Final[list[Life]] = []
        self._queues: Final[dict[int, _Queue]] = {}
        self.lost = 0
        """How much was given up because a leader took no flush of its life."""

    @property
    def held(self) -> int:
        """Return how many counters are in memory, those of older lives included."""
        return len(self._life.held) + sum(len(life.held) for life in self._older)

    @property
    def queued(self) -> int:
        """Return how many of them wait to be flushed, without those that are under way."""
        return sum(len(queue.held) for queue in self._queues.values())

    def add(self, key: CounterKey, by: int, now: float) -> None:
        """Count. Raises `Overloaded` when as many counters are held as may be, and `TooLarge` for a total above 63
        bits."""
        held = self._life.held.get(key)
        if held is None:
            if self.held >= self._max_counters:
                raise Overloaded(
                    f"this follower holds {self._max_counters} counters, which is the bound (counters.max_counters); "
                    "what it has counted waits for the leaders"
                )
            held = Held(key, self._life)
        if by > 0:
            if held.plus + by > MAX_COUNTED:
                raise TooLarge(f"counter {key[1]} of {key[0]} has counted {held.plus} here; {by} more exceed 63 bits")
            held.plus += by
        else:
            if held.minus - by > MAX_COUNTED:
                raise TooLarge(f"counter {key[1]} of {key[0]} has counted -{held.minus} here; {by} more exceed 63 bits")
            held.minus -= by
        if not held.is_queued:
            self._life.held[key] = held
            held.waits_since = now
            self._enqueue(held)

    def net_by_slot(self, key: CounterKey) -> list[tuple[int, int]]:
        """Return what the lives of this follower have counted, by their slots, as far as it is held."""
        return [(life.slot, held.plus - held.minus) for life, held in self._held(key)]

    def _held(self, key: CounterKey) -> Iterator[tuple[Life, Held]]:
        for life in (self._life, *self._older):
            held = life.held.get(key)
            if held is not None:
                yield life, held

    # ---- flushes ---------------------------------------------------------------------------------------------------

    def take_due(
        self,
        options_of: Callable[[int], CounterOptions | None],
        is_wanted: Callable[[Held, CounterOptions], bool],
        now: float,
        room: int,
    ) -> list[Flush]:
        """Return what is to be flushed now, at most ``room``; it is under way until `done`, `failed` or `refused`.

        ``options_of`` returns the options of a counter's type, None for one that is no counter any more: what was
        counted of it is given up. What is not ``is_wanted`` waits for the next round."""
        flushes: list[Flush] = []
        for number, queue in self._queues.items():
            if not queue.held or len(flushes) >= room:
                continue
            options = options_of(number)
            if not queue.left:
                if options is not None and now < queue.due_at:
                    continue
                queue.left = len(queue.held)
                queue.due_at = now + (0.0 if options is None else options.flush_seconds)
            while queue.left and len(flushes) < room:
                queue.left -= 1
                held = queue.held.popleft()
                if options is None:
                    self._give_up(held)
                elif is_wanted(held, options):
                    held.life.flushes += 1
                    flushes.append(Flush(held, held.life.flushes, held.plus, held.minus))
                else:
                    queue.held.append(held)
        return flushes

    def done(self, flush: Flush, now: float) -> None:
        """Note that a flush is acknowledged."""
        held = flush.held
        held.flushed = flush.plus - flush.minus
        if (held.plus, held.minus) != (flush.plus, flush.minus):
            held.waits_since = now
            self._enqueue(held)
            return
        held.is_queued = False
        if held.life is not self._life:
            del held.life.held[held.key]

    def failed(self, flush: Flush) -> None:
        """Note that a flush failed, or that its outcome is unknown: the next one says the same and more."""
        self._enqueue(flush.held)

    def refused(self, flush: Flush) -> None:
        """Note that no flush of this slot will be taken any more."""
        self._give_up(flush.held)

    def _enqueue(self, held: Held) -> None:
        held.is_queued = True
        queue = self._queues.get(held.key[1])
        if queue is None:
            queue = self._queues[held.key[1]] = _Queue()
        queue.held.append(held)

    def _give_up(self, held: Held) -> None:
        self.lost += abs(held.plus - held.minus - held.flushed)
        del held.life.held[held.key]

    # ---- lives -----------------------------------------------------------------------------------------------------

    def renew(self, now: float) -> None:
        """Begin a new life when the current one is old, or has half of the counters that may be held; and forget some
        counters of older lives that are written."""
        life = self._life
        if now - life.begun_at >= self._life_seconds or len(life.held) * 2 >= self._max_counters:
            self._life = Life(self._new_slot(), now)
            life.unswept = list(life.held)
            self._older.append(life)
        left = _SWEPT_AT_ONCE
        for older in self._older:
            while older.unswept and left:
                left -= 1
                held = older.held.get(older.unswept.pop())
                if held is not None and not held.is_queued:
                    del older.held[held.key]
        self._older[:] = [older for older in self._older if older.held]
