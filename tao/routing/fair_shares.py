"""Fair shares of a server's costly work among its callers: deficit round robin in units of cost. Pure.

A cache hit costs nothing here. A miss, a critical read or a write occupies a database and places in bounded queues, and
one caller that sends thousands of them at once must not make the others wait for all of them. So the work under way is
bounded, in all and for each caller, and what does not fit waits with its caller. As work ends, the waiting callers take
turns: in its turn a caller starts work of a certain cost, what is left of that counts for its next turn, and within a
caller the requests take turns as well. A caller that waits with too much is refused.

While there is room, work starts at once. What no other caller wants, one caller may have, up to its own bound: the rest
stays free for the next caller, however long the first one's work takes.

Source: M. Shreedhar, G. Varghese, "Efficient Fair Queueing using Deficit Round Robin", SIGCOMM 1995.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from tao.model.errors import Overloaded, SettingsError


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """Bounds on costly work, in units of cost: a miss is one unit."""

    critical_cost: int = 2
    """Cost of a critical read: it shares its fetch with nobody, and may go to another region."""

    write_cost: int = 4
    """Cost of a write, and of a request that reserves ids or settles pairs: a transaction of several statements."""

    max_request_cost: int = 256
    """Most cost of one request that writes, however many writes it has: a caller with large batches has several under
    way, so that the next is there when one ends."""

    turn_cost: int = 16
    """What one caller may start before it is the next one's turn."""

    max_under_way: int = 4_096
    """Most cost under way at once. It covers 10 ms at some 400,000 misses a second, or the round trip to another region
    at 50,000."""

    max_under_way_per_caller: int = 1_024
    """Most cost under way of one caller: work that has started delays the others' in the queues of databases. The rest
    is free for others, also while this caller's work hangs."""

    max_waiting_per_caller: int = 20_000
    """Most cost that may wait of one caller: one message of 10,000 critical reads. Further requests are refused as
    overload: at some thousands of critical reads a second, what waits longer is answered too late."""

    def __post_init__(self) -> None:
        costs = self.critical_cost, self.write_cost, self.max_request_cost, self.turn_cost
        if min(*costs, self.max_waiting_per_caller) < 1:
            raise SettingsError(f"costs and bounds have to be at least 1: {self}")
        if not self.critical_cost <= self.max_under_way_per_caller <= self.max_under_way:
            raise SettingsError(f"max_under_way_per_caller has to be from critical_cost to max_under_way: {self}")


class Claim:
    """The costly work of one request: items of the same cost, at most what one caller may have under way."""

    __slots__ = ("caller", "cost", "under_way", "waiting")

    def __init__(self, caller: str, cost: int) -> None:
        self.caller: Final = caller
        self.cost: Final = cost
        self.waiting = 0
        """Items that may not start yet."""
        self.under_way = 0
        """Items that have started and not ended."""


class _Caller:
    """One caller with work. It is in the queue of turns while it waits with claims and may start more."""

    __slots__ = ("claims", "deficit", "in_turn", "name", "under_way", "waiting")

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.claims: Final[deque[Claim]] = deque()  # those that wait with items
        self.deficit = 0
        self.in_turn = False
        self.under_way = 0
        self.waiting = 0


class FairShares:
    """Decides which claims may start items now."""

    def __init__(self, settings: ShareSettings) -> None:
        self.settings: Final = settings
        self.under_way = 0
        """Cost under way."""
        self._callers: dict[str, _Caller] = {}
        self._turns: deque[_Caller] = deque()

    @property
    def callers(self) -> int:
        """Return the number of callers with work."""
        return len(self._callers)

    @property
    def waiting(self) -> int:
        """Return the cost that waits."""
        return sum(caller.waiting for caller in self._callers.values())

    def add(self, claim: Claim, items: int) -> bool:
        """Ask to start so many items of a claim. Returns whether they start now; if not, all of them wait.

        Raises `Overloaded` when the caller waits with too much already, unless the claim has items under way: what has
        begun goes on."""
        caller = self._callers.get(claim.caller)
        if caller is None:
            caller = self._callers[claim.caller] = _Caller(claim.caller)
        cost = items * claim.cost
        settings = self.settings
        if (
            not self._turns
            and not caller.claims
            and self.under_way + cost <= settings.max_under_way
            and caller.under_way + cost <= settings.max_under_way_per_caller
        ):
            self._start(caller, claim, items)
            return True
        if not claim.under_way and caller.waiting + cost > settings.max_waiting_per_caller:
            self._forget_idle(caller)
            raise Overloaded(
                f"this caller waits with work of cost {caller.waiting} already; the bound is "
                f"{settings.max_waiting_per_caller}: send less at a time"
            )
        caller.waiting += cost
        if not claim.waiting:
            caller.claims.append(claim)
        claim.waiting += items
        self._take_turns(caller)
        return False

    def next(self) -> Claim | None:
        """Return a waiting claim of which one item starts now, or None when nothing may start. Call it until then."""
        settings = self.settings
        while self._turns:
            caller = self._turns[0]
            claim = caller.claims[0]
            if caller.under_way + claim.cost > settings.max_under_way_per_caller:
                self._leave_turns(caller)
            elif caller.deficit < claim.cost:
                caller.deficit += settings.turn_cost
                self._turns.rotate(-1)
            elif self.under_way + claim.cost > settings.max_under_way:
                return None
            else:
                self._start_waiting(caller, claim)
                return claim
        return None

    def end(self, claim: Claim, items: int = 1) -> None:
        """Note that items of a claim have ended."""
        caller = self._callers[claim.caller]
        claim.under_way -= items
        caller.under_way -= items * claim.cost
        self.under_way -= items * claim.cost
        self._take_turns(caller)
        self._forget_idle(caller)

    def withdraw(self, claim: Claim) -> None:
        """Forget the items of a claim that wait."""
        if not claim.waiting:
            return
        caller = self._callers[claim.caller]
        caller.waiting -= claim.waiting * claim.cost
        claim.waiting = 0
        caller.claims.remove(claim)
        if not caller.claims:
            self._leave_turns(caller)
        self._forget_idle(caller)

    def _start(self, caller: _Caller, claim: Claim, items: int) -> None:
        claim.under_way += items
        caller.under_way += items * claim.cost
        self.under_way += items * claim.cost

    def _start_waiting(self, caller: _Caller, claim: Claim) -> None:
        caller.deficit -= claim.cost
        caller.waiting -= claim.cost
        claim.waiting -= 1
        self._start(caller, claim, 1)
        caller.claims.rotate(-1)
        if not claim.waiting:
            caller.claims.pop()
            if not caller.claims:
                self._leave_turns(caller)

    def _take_turns(self, caller: _Caller) -> None:
        if caller.claims and not caller.in_turn:
            caller.in_turn = True
            self._turns.append(caller)

    def _leave_turns(self, caller: _Caller) -> None:
        """Take a caller out of the turns: it waits with nothing, or may start no more. It saves nothing up."""
        if caller.in_turn:
            caller.in_turn = False
            self._turns.remove(caller)
        caller.deficit = 0

    def _forget_idle(self, caller: _Caller) -> None:
        if not caller.claims and not caller.under_way:
            del self._callers[caller.name]
