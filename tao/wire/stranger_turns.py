"""The pace of work for peers that have shown no credential: so much in a second, in turns by address.

What a stranger sends costs the server something before it is refused. So that strangers get a bounded share of the
server however many they are, each piece of such work waits for its turn: turns come at a bounded rate, with a small
number of them saved up for quiet times. The addresses that wait take turns, so that one address with a thousand pieces
delays another one's by one turn. Within an address the newest is first: while more arrives than there are turns, the
oldest would be served as seldom and after the longest wait, and a newcomer behind a crowd that has ended would wait
for it.

A peer that turns out to have a credential was none of those, and its turn is given back.

`StrangerTurns` decides, and does nothing by itself; `Pace` does what is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final


class Turn:
    """One piece of work that waits for its turn."""

    __slots__ = ("address", "cost", "start")

    def __init__(self, address: str, start: Callable[[], None], cost: float = 1.0) -> None:
        """``start`` does the work. ``cost`` is in turns of ordinary work."""
        self.address: Final = address
        self.cost: Final = cost
        self.start: Final = start


class StrangerTurns:
    """Decides whose turn it is. ``now`` returns the time in seconds."""

    def __init__(self, per_second: float, saved: float, now: Callable[[], float]) -> None:
        """``saved`` is the number of turns that may be saved up; one of a larger cost starts when all are there."""
        self.per_second: Final = per_second
        self._most: Final = max(1.0, saved)
        self._now: Final = now
        self._saved = self._most
        self._counted_at = now()
        self._waiting: dict[str, dict[Turn, None]] = {}  # the address whose turn it is first

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, turn: Turn) -> None:
        """Have a piece of work wait for its turn."""
        self._waiting.setdefault(turn.address, {})[turn] = None

    def withdraw(self, turn: Turn) -> None:
        """Forget a piece of work; it may have had its turn."""
        same_address = self._waiting.get(turn.address)
        if same_address is not None and turn in same_address:
            del same_address[turn]
            if not same_address:
                del self._waiting[turn.address]

    def next(self) -> Turn | None:
        """Return the piece of work whose turn it is, or None when nothing may start now."""
        if not self._waiting:
            return None
        self._count()
        address, same_address = next(iter(self._waiting.items()))
        turn = next(reversed(same_address))
        if self._saved < min(turn.cost, self._most):
            return None
        self._saved -= turn.cost
        del self._waiting[address], same_address[turn]
        if same_address:
            self._waiting[address] = same_address  # behind the others
        return turn

    def give_back(self, turn: Turn) -> None:
        """Give back a turn: its peer was no stranger."""
        self._saved = min(self._most, self._saved + turn.cost)

    def seconds_until_next(self) -> float | None:
        """Return the time until something may start, or None when nothing waits."""
        if not self._waiting:
            return None
        self._count()
        first = next(reversed(next(iter(self._waiting.values()))))
        return max(0.0, (min(first.cost, self._most) - self._saved) / self.per_second)

    def _count(self) -> None:
        now = self._now()
        self._saved = min(self._most, self._saved + (now - self._counted_at) * self.per_second)
        self._counted_at = now


class Pace:
    """Gives turns when they are due."""

    def __init__(self, turns: StrangerTurns, *, one_in_a_turn: bool = False) -> None:
        """``one_in_a_turn``: start one piece of work in a turn of the loop, so that others have theirs in between."""
        self.turns: Final = turns
        self._one_in_a_turn: Final = one_in_a_turn
        self._is_giving = False
        self._next: asyncio.Handle | None = None
        self._is_next_soon = False
        """Whether `_next` is for the next turn of the loop, and not for when the first one is due."""

    def give_turns(self) -> None:
        """Start what has its turn now."""
        if self._is_giving or self._is_next_soon:
            return
        loop, started = asyncio.get_running_loop(), 0
        self._is_giving = True
        try:
            while not (started and self._one_in_a_turn) and (turn := self.turns.next()) is not None:
                started += 1
                turn.start()
        finally:
            self._is_giving = False
        if started and self._one_in_a_turn:
            if self._next is not None:
                self._next.cancel()
            self._is_next_soon = True
            self._next = loop.call_soon(self._go_on)
        elif self._next is None and (seconds := self.turns.seconds_until_next()) is not None:
            self._next = loop.call_later(seconds, self._go_on)

    def stop(self) -> None:
        """Give no more turns."""
        self._is_giving = True
        if self._next is not None:
            self._next.cancel()

    def _go_on(self) -> None:
        self._next, self._is_next_soon = None, False
        self.give_turns()
