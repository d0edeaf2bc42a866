"""Fair shares of a server's costly work among its callers: deficit round robin in units of cost. Pure.

A cache hit costs nothing here. A miss, a critical read or a write occupies a database and places in bounded queues, and
one caller that sends thousands of them at once must not make the others wait for all of them. So the work under way is
bounded, in all and for each caller, and what does not fit waits with its caller. As work ends, the waiting callers take
turns: in its turn a caller starts work of a certain cost, what is left of that counts for its next turn, and within a
caller the requests take turns as well. A caller that waits with too much is refused.

While there is room, work starts at once. A caller that is alone may have much under way, so that nothing lies idle. As
soon as others have work, too, it may have little: work that has started stands before theirs in every queue of the
loop, of the leader and of the database, where no turns are taken. The rest stays free, however long its work takes.

Critical reads that a master of this region answers have a smaller bound beside others. Each is a statement of its own,
so a few of them keep a database busy, and more only make its queue longer. Those that go to another region are most of
their time on the way, and a small bound would make their caller wait for round trips.

Work whose attempt has failed, and that is tried again after a pause, is set aside: it gives its place back for good,
so that one database or leader that is down does not keep its callers' work of all others waiting. As much may be set
aside as may be under way, of a caller and in all; beyond that, work fails with the error of its attempt. So what is
tried again stays as bounded as it was in its place, and the retry budget bounds its attempts.

What a read costs is known when it has been answered, by the size of its answer. The next reads of a caller are taken to
cost what its latest have cost.

Source: M. Shreedhar, G. Varghese, "Efficient Fair Queueing using Deficit Round Robin", SIGCOMM 1995.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tao.model.errors import Overloaded, SettingsError

READS_OF_MEAN: Final = 32
"""Reads of which a caller's mean cost is: one long list among many short ones makes no difference, many of them do at
once."""

MAX_DEBT_SECONDS: Final = 60.0
"""Time after which any debt is paid for: a caller that has sent one request of many times its budget, or whose budget
was made smaller, is not locked out for hours."""

MAX_SPENDERS: Final = 10_000
"""Callers whose spending is kept: they choose their names, which must not fill the memory."""


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """Bounds on costly work, in units of cost: a miss with a short answer is one unit."""

    critical_cost: int = 2
    """Cost of a critical read: it shares its fetch with nobody, and may go to another region."""

    write_cost: int = 4
    """Cost of a write, and of a request that reserves ids or settles pairs: a transaction of several statements."""

    bytes_per_unit: int = 4_096
    """Bytes of an answer for which a read costs another unit: an object or a first page is below, a page of 6,000 edges
    costs some forty."""

    max_request_cost: int = 256
    """Most cost of one request that writes, however many writes it has: a caller with large batches has several under
    way, so that the next is there when one ends."""

    turn_cost: int = 16
    """What one caller may start before it is the next one's turn."""

    max_under_way: int = 4_096
    """Most cost under way at once, and most that is set aside. It covers 10 ms at some 400,000 misses a second, or the
    round trip to another region at 50,000."""

    max_under_way_per_caller: int = 1_024
    """Most cost under way of one caller while no other has work, and most of one caller that is set aside. The rest is
    free for others, also while this caller's work hangs."""

    max_under_way_beside_others: int = 128
    """Most cost under way of one caller while others have work: theirs queues behind it. It covers 3 ms at some 40,000
    misses a second, or 60 critical reads on their way to another region. A role's budget may say another number."""

    max_master_reads_beside_others: int = 4
    """Most cost under way of one caller's critical reads from masters of this region, while others have work. With 4,
    the default of a follower, two such reads are under way: half of the statements that a shard may have in progress
    (`ReadSettings.max_pending_per_shard`). A role's budget that says how much may be under way replaces it."""

    others_seconds: float = 1.0
    """Time after its work during which a caller still counts as one of the others: the pause of a client that sends one
    request after the other must not let another caller's thousand start."""

    max_waiting_per_caller: int = 20_000
    """Most cost that may wait of one caller: one message of 10,000 critical reads. Further requests are refused as
    overload: at some thousands of critical reads a second, what waits longer is answered too late."""

    def __post_init__(self) -> None:
        costs = self.critical_cost, self.write_cost, self.bytes_per_unit, self.max_request_cost, self.turn_cost
        if min(*costs, self.max_waiting_per_caller) < 1:
            raise SettingsError(f"costs and bounds have to be at least 1: {self}")
        alone = self.max_under_way_per_caller
        if not self.critical_cost <= self.max_beside_others <= alone <= self.max_under_way:
            raise SettingsError(
                "max_under_way_per_caller has to be from critical_cost to max_under_way, and "
                f"max_under_way_beside_others at least critical_cost: {self}"
            )
        if self.max_master_reads_beside_others < self.critical_cost:
            raise SettingsError(f"max_master_reads_beside_others has to be at least critical_cost: {self}")

    @property
    def max_beside_others(self) -> int:
        """Return what one caller may have under way while others have work: never more than alone."""
        return min(self.max_under_way_beside_others, self.max_under_way_per_caller)


class Claim:
    """The costly work of one request: items of the same cost, at most what one caller may have under way."""

    __slots__ = ("caller", "cost", "is_parked", "max_under_way", "reads_master", "set_aside", "under_way", "waiting")

    def __init__(self, caller: str, cost: int, max_under_way: int | None = None, *, reads_master: bool = False) -> None:
        """``max_under_way``: the bound of its caller, alone or not; None: those of the settings. ``reads_master``: its
        items are critical reads that a master of this region answers."""
        self.caller: Final = caller
        self.cost: Final = cost
        self.max_under_way: Final = max_under_way
        self.reads_master: Final = reads_master
        self.is_parked = False
        """Whether it waits until an item that reads a master ends, and takes part in no turns."""
        self.waiting = 0
        """Items that may not start yet."""
        self.under_way = 0
        """Items that have started, and neither ended nor been set aside."""
        self.set_aside = 0
        """Items that have given their places back and not ended."""


class _Caller:
    """One caller with work, or that had some lately. It is in the queue of turns while it waits with claims and may
    start more."""

    __slots__ = (
        "blocked",
        "claims",
        "deficit",
        "idle_since",
        "in_turn",
        "master_reads",
        "max_under_way",
        "name",
        "read_units",
        "set_aside",
        "under_way",
        "waiting",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.claims: Final[deque[Claim]] = deque()  # those that wait with items and are not blocked
        self.blocked: Final[deque[Claim]] = deque()  # while there are some, a read of a master is under way or in turn
        self.master_reads = 0  # the part of `under_way` that reads from masters of this region
        self.deficit = 0
        self.idle_since = 0.0
        self.in_turn = False
        self.max_under_way: int | None = None
        self.read_units = 1.0  # the mean of its latest reads
        self.set_aside = 0
        self.under_way = 0
        self.waiting = 0


class FairShares:
    """Decides which claims may start items now. ``now`` returns the time in seconds."""

    def __init__(self, settings: ShareSettings, now: Callable[[], float]) -> None:
        self.settings: Final = settings
        self.under_way = 0
        """Cost under way."""
        self.set_aside = 0
        """Cost that was set aside."""
        self._now: Final = now
        self._others_seconds: Final = settings.others_seconds
        self._callers: dict[str, _Caller] = {}
        self._idle: dict[str, _Caller] = {}  # those without work, in the order in which they ended it
        self._turns: deque[_Caller] = deque()

    @property
    def callers(self) -> int:
        """Return the number of callers with work."""
        return len(self._callers) - len(self._idle)

    @property
    def waiting(self) -> int:
        """Return the cost that waits."""
        return sum(caller.waiting for caller in self._callers.values())

    def add(self, claim: Claim, items: int) -> bool:
        """Ask to start so many items of a claim. Returns whether they start now; if not, all of them wait.

        Raises `Overloaded` when the caller waits with too much already, unless items of the claim have started and not
        ended: what has begun goes on."""
        if self._idle:
            self._forget_idle()
            self._idle.pop(claim.caller, None)
        caller = self._callers.get(claim.caller)
        if caller is None:
            caller = self._callers[claim.caller] = _Caller(claim.caller)
        caller.max_under_way = claim.max_under_way
        cost = items * claim.cost
        settings = self.settings
        if (
            not self._turns
            and not caller.claims
            and self.under_way + cost <= settings.max_under_way
            and caller.under_way + cost <= self._bound(caller)
            and not (claim.reads_master and (caller.blocked or self._exceeds_master_reads(caller, cost)))
        ):
            self._start(caller, claim, items)
            return True
        has_begun = claim.under_way or claim.set_aside
        if not has_begun and caller.waiting + cost > settings.max_waiting_per_caller:
            self._note_idle(caller)
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
            # One item always: the bound may have become smaller than what it costs.
            if caller.under_way and caller.under_way + claim.cost > self._bound(caller):
                self._leave_turns(caller)
            elif claim.reads_master and caller.master_reads and self._exceeds_master_reads(caller, claim.cost):
                self._block(caller)
            elif caller.deficit < claim.cost:
                caller.deficit += settings.turn_cost
                self._turns.rotate(-1)
            elif self.under_way + claim.cost > settings.max_under_way:
                return None
            else:
                self._start_waiting(caller, claim)
                return claim
        return None

    def end(self, claim: Claim, items: int = 1, read_units: int = 0, *, was_set_aside: bool = False) -> bool:
        """Note that items of a claim have ended. ``read_units``: what reads turned out to cost together, before the
        factor for their kind; 0 when nothing was read. ``was_set_aside``: they had given their places back. Returns
        False when no caller is in turn, so that `next` need not be called."""
        if self._idle:
            self._forget_idle()
        caller = self._callers[claim.caller]
        if was_set_aside:
            claim.set_aside -= items
            caller.set_aside -= items * claim.cost
            self.set_aside -= items * claim.cost
        else:
            self._give_back(caller, claim, items)
        if read_units:
            caller.read_units += (read_units / items - caller.read_units) * min(1.0, items / READS_OF_MEAN)
        if caller.claims:
            self._take_turns(caller)
        else:
            self._note_idle(caller)
        return bool(self._turns)

    def put_aside(self, claim: Claim) -> bool:
        """Have an item that is under way give its place back for good. Returns False, and it keeps its place, when the
        caller or all of them have too much set aside."""
        caller, cost = self._callers[claim.caller], claim.cost
        most = self.settings.max_under_way_per_caller if caller.max_under_way is None else caller.max_under_way
        if caller.set_aside and caller.set_aside + cost > most:  # the bound may be smaller than what one item costs
            return False
        if self.set_aside + cost > self.settings.max_under_way:
            return False
        self._give_back(caller, claim, 1)
        claim.set_aside += 1
        caller.set_aside += cost
        self.set_aside += cost
        self._take_turns(caller)
        return True

    def read_units(self, caller: str) -> int:
        """Return what one more read of a caller is taken to cost, before the factor for its kind."""
        known = self._callers.get(caller)
        return 1 if known is None else round(known.read_units)

    def withdraw(self, claim: Claim) -> None:
        """Forget the items of a claim that wait."""
        if not claim.waiting:
            return
        caller = self._callers[claim.caller]
        caller.waiting -= claim.waiting * claim.cost
        claim.waiting = 0
        if claim.is_parked:
            claim.is_parked = False
            caller.blocked.remove(claim)
        else:
            caller.claims.remove(claim)
            if claim.reads_master:
                self._unpark(caller)
                self._take_turns(caller)
        if not caller.claims:
            self._leave_turns(caller)
        self._note_idle(caller)

    def _bound(self, caller: _Caller) -> int:
        """Return the most cost that the caller may have under way now."""
        if caller.max_under_way is not None:
            return caller.max_under_way
        settings = self.settings
        return settings.max_under_way_per_caller if len(self._callers) == 1 else settings.max_beside_others

    def _exceeds_master_reads(self, caller: _Caller, cost: int) -> bool:
        """Return whether so much more would be too much for the caller to read from masters beside others."""
        most = self.settings.max_master_reads_beside_others
        return caller.master_reads + cost > most and caller.max_under_way is None and len(self._callers) > 1

    def _block(self, caller: _Caller) -> None:
        """Have the caller's other claims go on, until a read of a master ends."""
        claim = caller.claims.popleft()
        claim.is_parked = True
        caller.blocked.append(claim)
        if not caller.claims:
            self._leave_turns(caller)

    def _unpark(self, caller: _Caller) -> None:
        """Have one parked claim wait for its turn: one of them at a time, because many would only be parked again."""
        if caller.blocked:
            claim = caller.blocked.popleft()
            claim.is_parked = False
            caller.claims.append(claim)

    def _give_back(self, caller: _Caller, claim: Claim, items: int) -> None:
        cost = items * claim.cost
        claim.under_way -= items
        caller.under_way -= cost
        self.under_way -= cost
        if claim.reads_master:
            caller.master_reads -= cost
            self._unpark(caller)

    def _start(self, caller: _Caller, claim: Claim, items: int) -> None:
        claim.under_way += items
        caller.under_way += items * claim.cost
        self.under_way += items * claim.cost
        if claim.reads_master:
            caller.master_reads += items * claim.cost

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

    def _note_idle(self, caller: _Caller) -> None:
        if not (caller.claims or caller.blocked or caller.under_way or caller.set_aside):
            caller.idle_since = self._now()
            self._idle[caller.name] = caller

    def _forget_idle(self) -> None:
        """Forget the callers whose work ended long enough ago."""
        since = self._now() - self._others_seconds
        while self._idle and (first := next(iter(self._idle.values()))).idle_since <= since:
            del self._idle[first.name], self._callers[first.name]


class SpendingRates:
    """What callers with a budget of cost per second have spent. A second's worth may be spent at once, and the last
    request of that second may exceed it: what it costs is known afterwards, and later requests wait for that."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now: Final = now
        self._paid_at: dict[str, float] = {}
        """The time at which what a caller has spent is paid for; absent: it is."""

    def __len__(self) -> int:
        return len(self._paid_at)

    def seconds_to_wait(self, caller: str) -> float:
        """Return the time until the caller may spend again; 0 for now."""
        return max(0.0, self._paid_at.get(caller, 0.0) - self._now() - 1.0)

    def spend(self, caller: str, cost: float, per_second: int) -> float:
        """Note that the caller has spent so much, or was given back so much. Returns how much of it was noted: a debt
        is at most `MAX_DEBT_SECONDS`."""
        now = self._now()
        if caller not in self._paid_at and len(self._paid_at) >= MAX_SPENDERS:
            self._paid_at = {name: paid_at for name, paid_at in self._paid_at.items() if paid_at > now}
            if len(self._paid_at) >= MAX_SPENDERS:  # forget the one that is the next to have paid
                del self._paid_at[min(self._paid_at, key=self._paid_at.__getitem__)]
        paid_at = max(self._paid_at.get(caller, now), now)
        self._paid_at[caller] = until = min(paid_at + cost / per_second, now + MAX_DEBT_SECONDS)
        return (until - paid_at) * per_second
