"""Sends batches, and decides what becomes of a query that a server could not answer (DESIGN.md §9).

Asked again is only what may be: a read that anything but itself made fail, a write of which nothing was written. Each
repeat goes to a server not yet asked, where there is one; attempts, the caller's time and a budget over all repeats
bound it, so that a cluster in trouble is not buried under repetitions of what it could not do the first time.

A server whose answer is full has done what it could: the rest is asked of it at once, in a smaller batch, and this is
no attempt - each time something comes, so that it ends.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple

from tao.client.calls import Attempt, Failure, ReadCall, WriteCall
from tao.client.columns import Groups
from tao.client.lanes import Lane, Lanes, ServerLink, WriteRow
from tao.client.routing import Router
from tao.client.settings import ClientSettings
from tao.client.stats import ClientStats
from tao.client.trace import Trace
from tao.client.waiting import Waiter, fail
from tao.model.errors import (
    AnswerFull,
    DatabaseDown,
    DeadlineExceeded,
    Fenced,
    NotMine,
    Overloaded,
    ProtocolError,
    StaleRead,
    TaoError,
    Unavailable,
)
from tao.model.topology import CacheServer, Topology
from tao.routing.retry_budget import RetryBudget
from tao.wire.v1 import session_pb2 as pb

_READ_AGAIN: Final = (Unavailable, DeadlineExceeded, NotMine, Fenced, StaleRead, AnswerFull)
# Never DatabaseDown, which every server of the region finds alike, until the database is back.
# Not DeadlineExceeded: a write has had all the time there was. No other Overloaded, for both: more of the same is no
# help.
_WRITE_AGAIN: Final = (Unavailable, NotMine, Fenced)

_MOST_DOUBLINGS: Final = 4
"""Of the pause of a read that waits for a server that is down: it looks every tenth of a second then."""

AnyCall = ReadCall | WriteCall


class _Again(NamedTuple):
    slot: int
    waiter: Waiter[Any]  # of either result
    error: TaoError


RefreshTopology = Callable[[int, Lane], Awaitable[None]]
"""Learn a topology of at least this version, if need be from the server of this lane."""


class Dispatcher:
    """The outlet of all lanes of a graph."""

    def __init__(
        self,
        settings: ClientSettings,
        *,
        region: str,
        tier: str | None,
        link_to: Callable[[CacheServer], ServerLink],
        refresh: RefreshTopology,
    ) -> None:
        self.stats = ClientStats()
        self.trace: Trace | None = None
        self.on_hot: Callable[[ReadCall, pb.ReadAnswer], None] | None = None
        """Told of answers that call some of their queries hot, before they are taken."""
        self._settings = settings
        self._refresh = refresh
        self._loop = asyncio.get_running_loop()
        self._lanes = Lanes(link_to, self, settings)
        self.router: Final = Router(region, tier, self._lanes.to)
        self._open: set[AnyCall] = set()
        self._waiting = 0
        self._budget = RetryBudget(settings.retries, self._loop.time())
        self._repeats: set[asyncio.Task[None]] = set()
        self._sweep_scheduled = False
        self._closed = False

    def use_topology(self, topology: Topology) -> None:
        """Send by this document from now on. Raises `TopologyError` when it has not the region or tier."""
        self.router.use(topology)
        self._lanes.keep_only({server.name for server, _ in self.router.servers()})
        self.stats.topology_version = topology.version

    def send_reads(
        self,
        lane: Lane,
        groups: Groups,
        waiters: list[Waiter[bytes] | None],
        minimums: Mapping[int, int],
        *,
        critical: bool,
        max_staleness_ms: int,
        known: Mapping[int, bytes],
    ) -> None:
        self.stats.queries += len(waiters)
        self._send(
            ReadCall(
                self._first(lane),
                groups,
                waiters,
                critical=critical,
                minimums=minimums,
                max_staleness_ms=max_staleness_ms,
                known=known,
            )
        )

    def send_writes(self, lane: Lane, rows: list[WriteRow], waiters: list[Waiter[pb.WriteResult] | None]) -> None:
        self.stats.writes += len(waiters)
        self._send(WriteCall(self._first(lane), rows, waiters))

    async def ask(self, shard: int, request: pb.Request) -> pb.Answer:
        """Ask whoever has the shard something that is harmless to repeat. Raises a `TaoError`."""
        deadline = self._loop.time() + self._settings.timeout_seconds
        tried: tuple[Lane, ...] = (self.router.writer(shard),)
        while True:
            lane = tried[-1]
            request.topology_version = self.router.version
            self.stats.batches += 1
            try:
                return await lane.link.ask(request, deadline - self._loop.time())
            except _READ_AGAIN as error:
                now = self._loop.time()
                if len(tried) >= self._settings.max_attempts or now >= deadline or not self._may_repeat(now):
                    raise
                if isinstance(error, NotMine):
                    await self._refresh(error.topology_version, lane)
                following = self.router.next(shard, tried)
                if following in tried:
                    await asyncio.sleep(self._backoff(len(tried)))
                self.stats.retries += 1
                self.stats.failovers += following is not lane
                tried = (*tried, following)

    def note_cancelled(self) -> None:
        """Someone has stopped waiting: before long, forget the calls for which nobody waits."""
        if not self._sweep_scheduled:
            self._sweep_scheduled = True
            self._loop.call_soon(self._sweep)

    async def close(self) -> None:
        """Fail what is still waited for."""
        self._closed = True
        for task in self._repeats:
            task.cancel()
        await asyncio.gather(*self._repeats, return_exceptions=True)
        for call in list(self._open):
            self._end(call)
            self._fail_all(call, Unavailable("the graph was closed"))

    def _first(self, lane: Lane) -> Attempt:
        return Attempt((lane,), self._loop.time() + self._settings.timeout_seconds)

    def _send(self, call: AnyCall) -> None:
        if self._closed:
            self._fail_all(call, Unavailable("the graph is closed"))
            return
        if self._waiting + call.size > self._settings.max_waiting_queries:
            most = self._settings.max_waiting_queries
            self._fail_all(call, Overloaded(f"{self._waiting} queries are waiting already, at most {most} may"))
            return
        self._waiting += call.size
        self._open.add(call)
        self.stats.batches += 1
        request = call.request()
        request.topology_version = self.router.version
        call.lane.link.send(request, self._time_for(call), partial(self._on_answer, call))

    def _time_for(self, call: AnyCall) -> float:
        left = call.attempt.deadline - self._loop.time()
        if isinstance(call, ReadCall) and self.router.has_standby and len(call.attempt.tried) == 1:
            return left * self._settings.first_attempt_share
        return left

    def _on_answer(self, call: AnyCall, answer: pb.Answer) -> None:
        if call not in self._open:
            return
        if not answer.more:
            self._end(call)
        try:
            self._after_failures(call, self._failures_in(call, answer))
        except ProtocolError as error:
            self._end(call)
            self._fail_all(call, error)

    def _failures_in(self, call: AnyCall, answer: pb.Answer) -> list[Failure]:
        """Settle what was answered; what was not, and never will be. Raises `ProtocolError`."""
        if answer.HasField("error"):
            return call.unsettled(answer.error)
        self._budget.earn()
        if self.on_hot is not None and isinstance(call, ReadCall) and answer.read.hot_slots and not call.critical:
            self.on_hot(call, answer.read)
        failures = call.take(answer)
        if self.trace is not None and isinstance(call, ReadCall):
            self.trace.note(call, answer.read)
        if not answer.more and any(call.waiters):
            named = {slot for slot, _ in failures}
            if any(each is not None and slot not in named for slot, each in enumerate(call.waiters)):
                raise ProtocolError(f"server {call.lane.server.name!r} left a part of a batch unanswered")
        return failures

    def _end(self, call: AnyCall) -> None:
        if call in self._open:
            self._open.discard(call)
            self._waiting -= call.size

    def _fail_all(self, call: AnyCall, error: TaoError) -> None:
        for slot, waiter in enumerate(call.waiters):
            if waiter is not None:
                call.waiters[slot] = None
                self._fail(waiter, type(error)(error.message))

    def _fail(self, waiter: Waiter[Any], error: TaoError) -> None:
        self.stats.errors += 1
        fail(waiter, error)

    def _may_repeat(self, now: float) -> bool:
        allowed = self._budget.spend(now)
        self.stats.retries_refused += not allowed
        return allowed

    def _after_failures(self, call: AnyCall, failures: list[Failure]) -> None:
        if not failures:
            return
        kinds = _READ_AGAIN if isinstance(call, ReadCall) else _WRITE_AGAIN
        again: list[_Again] = []
        rest: list[_Again] = []
        came_in_part = None in call.waiters
        for slot, error in sorted(failures, key=itemgetter(0)):  # in order, so that rows keep their kinds' order
            waiter = call.hand_back(slot)
            if waiter is None:
                continue
            if came_in_part and isinstance(error, AnswerFull) and self._loop.time() < call.attempt.deadline:
                rest.append(_Again(slot, waiter, error))
            elif isinstance(error, kinds) and not isinstance(error, DatabaseDown):
                again.append(_Again(slot, waiter, error))
            else:
                self._fail(waiter, error)
        if rest:
            self._send_rest(call, rest)
        if not again:
            return
        may_repeat = len(call.attempt.tried) < self._settings.max_attempts and not self._closed
        # A server without the shard sends on what it never began to do: no overload, however many are sent on at once.
        sent_on = all(isinstance(each.error, NotMine) for each in again)
        if may_repeat and (sent_on or self._may_repeat(self._loop.time())):
            self._waiting += len(again)  # as much as what is on its way
            task = self._loop.create_task(self._repeat(call, again))
            self._repeats.add(task)
            task.add_done_callback(self._repeats.discard)
        else:
            for each in again:
                self._fail(each.waiter, each.error)

    async def _repeat(self, call: AnyCall, again: list[_Again]) -> None:
        """Ask for these slots of a call once more, wherever each is best asked now."""
        waiting = dict(zip(range(len(again)), again, strict=True))
        try:
            refused = [each.error.topology_version for each in again if isinstance(each.error, NotMine)]
            if refused:
                await self._refresh(max(refused), call.lane)
            places: dict[Lane, list[int]] = {}
            for index, each in waiting.items():
                lane = self.router.next(call.shard_of(each.slot), call.attempt.tried)
                places.setdefault(lane, []).append(index)
            slept = False
            # Those that have been asked before come last, since they are given a moment first; after them those that
            # are down: a read may wait long for them.
            tried = call.attempt.tried
            for lane, indexes in sorted(places.items(), key=lambda item: (item[0] in tried, item[0].link.is_down)):
                if lane in tried and (not slept or lane.link.is_down):
                    slept = True
                    await self._give_time(call, lane)
                if self._loop.time() >= call.attempt.deadline:
                    break
                self.stats.retries += 1
                self.stats.failovers += lane is not call.lane
                self._send_part(call, lane, [waiting.pop(index) for index in indexes])
        except TaoError as error:
            waiting = {index: each._replace(error=error) for index, each in waiting.items()}
        finally:
            self._waiting -= len(waiting)
            for each in waiting.values():
                self._fail(each.waiter, each.error)

    async def _give_time(self, call: AnyCall, lane: Lane) -> None:
        """A moment for a server that has been asked before. When it is down, and with it whoever else has the shard, a
        read waits as long as it may: what is sent there fails at once, and the link finds out when it is back."""
        tries, deadline = len(call.attempt.tried), call.attempt.deadline
        while True:
            pause = self._backoff(min(tries, _MOST_DOUBLINGS))
            await asyncio.sleep(min(pause, max(0.0, deadline - self._loop.time())))
            if not (isinstance(call, ReadCall) and lane.link.is_down and self._loop.time() < deadline):
                return
            tries += 1

    def _send_rest(self, call: AnyCall, rest: list[_Again]) -> None:
        """Ask the same server for what its answer had no room for."""
        self.stats.retries += 1
        self._send(call.part(call.attempt, [each.slot for each in rest], [each.waiter for each in rest]))

    def _send_part(self, call: AnyCall, lane: Lane, again: list[_Again]) -> None:
        self._waiting -= len(again)  # their place is theirs still: nobody has been asked in between
        attempt = Attempt((*call.attempt.tried, lane), call.attempt.deadline)
        slots = [each.slot for each in again]
        self._send(call.part(attempt, slots, [each.waiter for each in again]))

    def _backoff(self, tries: int) -> float:
        pause: float = self._settings.retry_backoff_seconds * 2 ** (tries - 1)
        return pause * random.uniform(0.5, 1)

    def _sweep(self) -> None:
        self._sweep_scheduled = False
        for call in [each for each in self._open if each.is_forsaken()]:
            self._end(call)
