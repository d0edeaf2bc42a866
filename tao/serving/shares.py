"""Starts the costly work of requests in fair shares: the misses and critical reads of batches, and writes.

`tao.routing.fair_shares` decides; here the work is started, and what waits too long is answered. Followers queue the
work of their clients. A leader shares among the callers that followers name with critical reads and writes, and among
the followers themselves, which fill their caches; each of them has queued its clients' work already, so a leader's
bounds are wider. The requests of leaders and tailers are parts of work that has its share: they never wait, because
work under way at two leaders could then wait for each other.

Work that pauses before another attempt is set aside: a path says so by `set_aside`, a batch of misses for each of its
misses.

The access document may give a role a budget, which a follower holds its callers to.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from tao.model.errors import DeadlineExceeded, InternalError, Overloaded, TaoError
from tao.observability.metrics import Metrics
from tao.routing.budgets import work_seconds
from tao.routing.fair_shares import Claim, FairShares, ShareSettings, SpendingRates
from tao.serving.access import AccessControl, Asked, caller_of
from tao.wire.identity import PASSING_ON, PeerIdentity
from tao.wire.session import PassedReply, Reply, failure
from tao.wire.v1 import session_pb2 as pb

_logger = logging.getLogger(__name__)

STARTS_OF_A_TURN: Final = 32
"""Waiting items that are started in one turn of the loop. Each is some 40 µs of work, and cache hits of other clients
wait for all of them."""

Path = Callable[[pb.Request, Reply], None]

_NO_TURN: Final = "the request waited for its turn until its deadline: this caller has sent too many"

_WITH_A_SHARE: Final = frozenset({"leader", "tailer"})
"""Roles whose requests are parts of work that has its share already."""


def sharer_of(request: pb.Request, peer: PeerIdentity) -> str | None:
    """Return the name under which the work of a peer's request is counted, or None when it has its share already. Where
    no credentials are in use, that is what the peer says of itself."""
    if peer.role in _WITH_A_SHARE:
        return None
    caller = request.caller if peer.role in PASSING_ON else ""
    return caller or peer.caller or f"{peer.role}/{peer.name}"


def _writes_in(request: pb.Request) -> int:
    """Return how many writes a request is: those of a batch, and each pair that is to be settled may be one."""
    if request.HasField("settle_pairs"):
        return max(1, len(request.settle_pairs.pairs) + len(request.settle_pairs.shards))
    return max(1, len(request.write.writes)) if request.HasField("write") else 1


class Terms(NamedTuple):
    """Bounds on the work of one caller besides the settings."""

    max_under_way: int | None = None
    asked: Asked | None = None
    """The work, of the caller whose budget it spends."""
    units_per_second: int = 0
    """The budget of that caller; 0 for none."""


_NO_TERMS: Final = Terms()


class ShareOfWork(Claim):
    """The claim of one request, and what starts its items. ``start(items)`` must not raise."""

    __slots__ = ("has_share", "is_over_budget", "paid", "price", "start", "terms")

    def __init__(
        self,
        caller: str | None,
        cost: int,
        start: Callable[[int], None],
        price: int = 0,
        terms: Terms = _NO_TERMS,
        *,
        reads_master: bool = False,
    ) -> None:
        """``price``: what its caller's budget is charged for an item when it is asked for. ``cost`` is at most what the
        caller may have under way; the price has no bound. ``reads_master``: see `Claim`."""
        super().__init__(caller or "", cost, terms.max_under_way, reads_master=reads_master)
        self.has_share: Final = caller is None
        self.start = start
        self.price: Final = price
        self.terms: Final = terms
        self.paid = 0.0
        """What the budget was charged for items that have not ended."""
        self.is_over_budget = False
        """Whether it was counted that the budget is spent."""

    def release(self) -> None:
        """Forget what starts its items, when nothing more is asked for or waits. That refers to this claim, and such a
        cycle would be left to the garbage collector, which stops the loop."""
        self.start = _start_nothing


def _start_nothing(_items: int) -> None:
    pass


class WorkShares:
    """Starts the costly work of one server."""

    def __init__(
        self,
        settings: ShareSettings | None = None,
        budgets: AccessControl | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``budgets``: the rules whose budgets callers are held to; None: no budgets."""
        self.settings: Final = settings or ShareSettings()
        self._budgets: Final = budgets
        self._shares: Final = FairShares(self.settings, now)
        self._rates: Final = SpendingRates(now)
        # What a server asks for itself, it has shared among its callers.
        self._terms_of_servers: Final = Terms(self.settings.max_under_way_per_caller)
        self._always_fits: Final = self.settings.critical_cost
        self._is_starting = False
        self._left_of_turn = STARTS_OF_A_TURN
        self.outcomes: Final = {"started": 0, "waited": 0, "refused": 0}
        """Number of times that work was asked for, by outcome."""

    def register(self, metrics: Metrics) -> None:
        """Register the figures of fair shares."""
        metrics.gauge_family(
            "shared_work_total",
            "Requests for costly work (misses, critical reads, writes): started at once, after a wait, refused because "
            "the caller waits with too much.",
            "outcome",
            self.outcomes.copy,
        )
        metrics.gauge_family(
            "shared_work_info",
            "Costly work in units (a miss is one) that is under way, that waits, and that was set aside because it is "
            "tried again; and the callers that have some.",
            "kind",
            lambda: {
                "under_way": self._shares.under_way,
                "waiting": self._shares.waiting,
                "set_aside": self._shares.set_aside,
                "callers": self._shares.callers,
            },
        )

    def reads(
        self, request: pb.Request, peer: PeerIdentity, start: Callable[[int], None], *, reads_master: bool = False
    ) -> ShareOfWork:
        """Return the work of a request whose items are misses or critical reads. ``reads_master``: they are critical,
        and a master of this region answers some of them."""
        caller = sharer_of(request, peer)
        if caller is None:
            return ShareOfWork(None, 1, start)
        units = self._shares.read_units(caller) * (self.settings.critical_cost if request.read.critical else 1)
        return self._work(caller, units, start, units, self._terms(request, peer), reads_master=reads_master)

    def writes(self, request: pb.Request, peer: PeerIdentity, start: Callable[[int], None]) -> ShareOfWork:
        """Return the work of a request that writes, which is one item."""
        return self._writes(request, peer, start, _writes_in(request))

    def _writes(
        self, request: pb.Request, peer: PeerIdentity, start: Callable[[int], None], number: int
    ) -> ShareOfWork:
        caller, settings = sharer_of(request, peer), self.settings
        if caller is None:
            return ShareOfWork(None, 1, start)
        price = number * settings.write_cost
        return self._work(caller, min(price, settings.max_request_cost), start, price, self._terms(request, peer))

    def _work(
        self,
        caller: str,
        cost: int,
        start: Callable[[int], None],
        price: int,
        terms: Terms,
        *,
        reads_master: bool = False,
    ) -> ShareOfWork:
        if cost > self._always_fits:
            most = terms.max_under_way or self.settings.max_beside_others
            cost = min(cost, most, self.settings.max_under_way)
        return ShareOfWork(caller, cost, start, price, terms, reads_master=reads_master)

    def _terms(self, request: pb.Request, peer: PeerIdentity) -> Terms:
        # A server stands for all of its callers without a name, too.
        others = self._terms_of_servers if peer.role in PASSING_ON and not request.caller else _NO_TERMS
        budgets = self._budgets
        if budgets is None or budgets.policy is None or (caller := caller_of(request, peer)) is None:
            return others
        budget = budgets.budget_of(caller)
        if budget is None:
            return others
        return Terms(budget.units_under_way, Asked(caller, peer, request), budget.units_per_second or 0)

    def ask(self, work: ShareOfWork, items: int) -> None:
        """Start so many items, now or when it is their turn. Raises `Overloaded`, and then nothing starts: for items
        after the first ones of a request only when they exceed the budget of their caller, as `BudgetExceeded`."""
        if work.has_share:
            work.start(items)
            return
        try:
            if work.terms.units_per_second:
                self._check_budget(work)
            starts_now = self._shares.add(work, items)
        except Overloaded:
            self.outcomes["refused"] += 1
            raise
        if work.terms.units_per_second:
            # Before the cost is known, or what is asked for meanwhile would be free.
            work.paid += self._spend(work.terms, items * work.price)
        if starts_now:
            self.outcomes["started"] += 1
            work.start(items)
        else:
            self.outcomes["waited"] += 1
            self._start_waiting()

    def _check_budget(self, work: ShareOfWork) -> None:
        """Raise `BudgetExceeded` for a caller that has spent what it may."""
        terms = work.terms
        assert self._budgets is not None, "only the rules give budgets"
        assert terms.asked is not None, "only a caller has a budget"
        seconds = self._rates.seconds_to_wait(terms.asked.caller)
        if seconds and not work.is_over_budget:
            work.is_over_budget = True
            error = self._budgets.over_budget(terms.asked, terms.units_per_second, seconds)
            if error is not None:
                raise error

    def _spend(self, terms: Terms, cost: float) -> float:
        assert terms.asked is not None, "only a caller has a budget"
        return self._rates.spend(terms.asked.caller, cost, terms.units_per_second)

    def _correct(self, work: ShareOfWork, items: int, cost: int) -> None:
        """Charge the budget what items have cost, in place of what was charged when they were asked for."""
        if work.terms.units_per_second:
            charged = min(work.paid, items * work.price)
            work.paid -= charged
            self._spend(work.terms, cost - charged)

    def end_reads(
        self, work: ShareOfWork, reads: int, units: int, *, critical: bool = False, was_set_aside: bool = False
    ) -> None:
        """Note that reads of one kind have ended, and what they have cost together, by the sizes of their answers: one
        and as many as `ShareSettings.bytes_per_unit` says each. ``critical``: they were read critically, as a read is
        that asks for fresher data than there is here."""
        if not work.has_share:
            if work.terms.units_per_second:
                self._correct(work, reads, units * self.settings.critical_cost if critical else units)
            if self._shares.end(work, reads, units, was_set_aside=was_set_aside):
                self._start_waiting()

    def end_write(self, work: ShareOfWork, *, was_set_aside: bool = False) -> None:
        """Note that a request that writes has ended; whatever it has done, it has cost its price."""
        self._shares.end(work, was_set_aside=was_set_aside)
        self._start_waiting()

    def put_aside(self, work: ShareOfWork) -> bool:
        """Have an item give its place back, because it pauses before another attempt. Its `end` says so. Returns False
        when too much is set aside: then it should fail."""
        if not work.has_share:
            if not self._shares.put_aside(work):
                return False
            self._start_waiting()
        return True

    def end(self, work: ShareOfWork, items: int = 1) -> None:
        """Note that items have ended that cost nothing, and start what waited for them."""
        if not work.has_share and items:
            self._correct(work, items, 0)
            self._shares.end(work, items)
            self._start_waiting()

    def withdraw(self, work: ShareOfWork) -> None:
        """Forget the items that wait; those that have started go on to their `end`."""
        if not work.has_share:
            self._correct(work, work.waiting, 0)
            self._shares.withdraw(work)

    def _start_waiting(self) -> None:
        """Start what may start, some of it in the next turn of the loop. Work that ends at once ends within this loop,
        which then goes on: thousands of items do not recurse."""
        if self._is_starting or not self._left_of_turn:
            return
        self._is_starting = True
        try:
            while self._left_of_turn and (claim := self._shares.next()) is not None:
                assert isinstance(claim, ShareOfWork), "only such claims are added"
                self._left_of_turn -= 1
                try:
                    claim.start(1)
                except Exception:
                    # A bug in the work of one caller must not end the work of another; the request has its deadline.
                    _logger.exception("work that had waited for its share could not be started")
        finally:
            self._is_starting = False
        if not self._left_of_turn:
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._left_of_turn = STARTS_OF_A_TURN
        self._start_waiting()

    @asynccontextmanager
    async def turn(
        self, request: pb.Request, peer: PeerIdentity, writes: int, timeout_seconds: float
    ) -> AsyncIterator[None]:
        """Wait for the turn of work that is as costly as so many writes; it ends with the block. Raises `Overloaded`,
        and `DeadlineExceeded` when its turn does not come in time."""
        granted = asyncio.Event()
        work = self._writes(request, peer, lambda _: granted.set(), writes)
        self.ask(work, 1)
        try:
            try:
                async with asyncio.timeout(timeout_seconds):
                    await granted.wait()
            except TimeoutError:
                raise DeadlineExceeded(_NO_TURN) from None
            yield
        finally:
            if not granted.is_set():
                self.withdraw(work)
            elif not work.has_share:
                self.end_write(work)

    def sharing(self, path: Path) -> Path:
        """Return a path that handles requests as ``path`` does, each as one item of work in its caller's share."""

        def handle(request: pb.Request, reply: Reply) -> None:
            if reply.peer.role in _WITH_A_SHARE:
                path(request, reply)
            else:
                _SharedRequest(self, path, request, reply).begin()

        return handle


def set_aside(reply: Reply) -> bool:
    """Have a request give its place in its caller's share back, because all that is left of it pauses before another
    attempt. Returns False when too much of the caller's work does: then the request should fail. A request without a
    place may always pause; who sent it bounds that."""
    return reply.put_aside() if isinstance(reply, _SharedRequest) else True


class _SharedRequest(PassedReply):
    """One request that is an item of work, and the `Reply` that notices its last answer."""

    def __init__(self, shares: WorkShares, path: Path, request: pb.Request, reply: Reply) -> None:
        super().__init__(reply)
        self._shares: Final = shares
        self._path: Final = path
        self._request: Final = request
        self._loop: Final = asyncio.get_running_loop()
        self._is_granted = False
        self._is_set_aside = False
        self._has_ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._until = 0.0
        self._work: Final = shares.writes(request, reply.peer, self._start)

    def send(self, answer: pb.Answer) -> None:
        """See `Reply.send`."""
        is_last = not answer.more
        self._reply.send(answer)
        if is_last:
            self._end()

    def put_aside(self) -> bool:
        """See `set_aside`."""
        if not self._is_set_aside and not self._has_ended:
            self._is_set_aside = self._shares.put_aside(self._work)
        return self._is_set_aside or self._has_ended

    def begin(self) -> None:
        """Handle the request now, or when it is its turn. Raises what the path raises, `Overloaded`, and
        `DeadlineExceeded` for a request that has no time to wait."""
        try:
            self._shares.ask(self._work, 1)
        except TaoError:
            self._work.release()
            raise
        if self._is_granted:
            self._run()
            return
        try:
            seconds = work_seconds(self._request.deadline_ms)
        except DeadlineExceeded:
            self._withdraw()
            raise
        self._until = self._loop.time() + self._request.deadline_ms / 1000
        self._timer = self._loop.call_later(seconds, self._expire)

    def _start(self, _: int) -> None:
        self._is_granted = True
        self._work.release()
        if self._timer is None:  # `begin` goes on
            return
        self._timer.cancel()
        if self._reply.closed:
            self._shares.end(self._work)
            return
        self._request.deadline_ms = max(1, round((self._until - self._loop.time()) * 1000))
        try:
            self._run()
        except TaoError as error:
            self._reply.send(failure(error))
        except Exception as error:
            self._reply.send(failure(InternalError(f"{type(error).__name__} in the server; its log says more")))
            raise

    def _run(self) -> None:
        try:
            self._path(self._request, self)
        except BaseException:
            self._end()
            raise

    def _expire(self) -> None:
        self._withdraw()
        self._reply.send(failure(DeadlineExceeded(_NO_TURN)))

    def _withdraw(self) -> None:
        self._shares.withdraw(self._work)
        self._work.release()

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._shares.end_write(self._work, was_set_aside=self._is_set_aside)
