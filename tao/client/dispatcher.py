"""The dispatcher sends batches to servers, and retries the queries that another server may answer.

A read is retried after an error that another server may not have; a write is retried only when the error proves that
nothing was written. Each retry goes to a server that was not tried yet, where there is one. The number of
attempts, the caller's deadline and a budget over all retries bound them, so that a cluster in trouble does not receive
the same load many times over.

A query that a server refuses because it routes by another version of the topology is retried without counting an
attempt. The older side reads the newer document at once: the client from the server that refused, the server because
the request names the client's version. So the versions meet within milliseconds, and hardly any query fails because
they differed. Where they cannot meet, since one side cannot read the document or rejects it, the same two versions
refuse an operation again and again: after a few times such refusals count like other errors.

A server whose answer is full has answered as much as one message holds. The rest of the batch goes to the same server
at once, in a smaller batch, and does not count as an attempt: each round brings some answers, so it ends.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple

from tao.client.calls import Attempt, Failure, ReadCall, SkewedVersions, WriteCall
from tao.client.diagnostics import ClientStats, Trace
from tao.client.router import Router
from tao.client.server_queues import QueuedReads, ServerLink, ServerQueue, ServerQueues, Waiter, WriteRow, fail
from tao.client.settings import ClientSettings
from tao.model.errors import (
    AnswerFull,
    DatabaseDown,
    DatabaseFull,
    DeadlineExceeded,
    Fenced,
    NotMine,
    Overloaded,
    ProtocolError,
    StaleRead,
    TaoError,
    Unavailable,
)
from tao.model.topology import CacheServer
from tao.routing.budgets import RetryBudget
from tao.routing.routes import Routes
from tao.wire.v1 import session_pb2 as pb

_RETRIED_READ_ERRORS: Final = (Unavailable, DeadlineExceeded, NotMine, Fenced, StaleRead, AnswerFull)
# A write that exceeded its deadline has no time left. Overloaded (but for AnswerFull) is retried for neither, because
# more requests do not help an overloaded server. DatabaseDown and DatabaseFull, both Unavailable, are excluded in
# `_retry_or_fail`: every server of the region finds the database down or full until somebody repairs it.
_RETRIED_WRITE_ERRORS: Final = (Unavailable, NotMine, Fenced)

_MAX_BACKOFF_TRIES: Final = 4
"""The number of tries up to which the pause before a retry doubles. A read that waits for a server that is down then
looks about every tenth of a second."""

_FREE_REFUSALS: Final = 3
"""How often the same two versions of the topology may refuse an operation before that counts as an attempt. The older
side has the newer document by then, unless something keeps it from that."""

_REFUSED_PAUSE_SECONDS: Final = 0.5
"""Pause before a server is asked again after such a refusal that counts. The few attempts so reach over the second or
so in which etcd elects a leader, while a server cannot read the document."""

_REFUSED_PAUSE_SHARE: Final = 1 / 3
"""Longest such pause, as a share of the time left."""

AnyCall = ReadCall | WriteCall


class _Retry(NamedTuple):
    """A failed slot that is to be retried, with its waiter and the error to report when it cannot be."""

    slot: int
    waiter: Waiter[Any]  # Any: the waiter of a read or of a write
    error: TaoError


_Groups = deque[tuple[ServerQueue, list[int]]]
"""Servers to send to, next one first, and the indexes of the waiting slots that each gets."""

RefreshTopology = Callable[[int, ServerQueue], Awaitable[None]]
"""Fetches a topology of at least this version, from this server where necessary."""


class Dispatcher:
    """The sender of all batches of one graph. It keeps the batches in flight, the retry budget and the counters."""

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
        """Called with each answer that marks some of its queries as hot, before the answer is applied."""
        self._settings = settings
        self._refresh = refresh
        self._loop = asyncio.get_running_loop()
        self._queues = ServerQueues(link_to, self, settings)
        self.router: Final = Router(region, tier, self._queues.to)
        self._in_flight: set[AnyCall] = set()
        self.unanswered = 0
        """The number of queries that were sent and are not answered, those that wait for a retry included."""
        self.lone_messages = 0
        """See `tao.client.server_queues.BatchSender`."""
        self._budget = RetryBudget(settings.retries, self._loop.time())
        self._retries: set[asyncio.Task[None]] = set()
        self._sweep_scheduled = False
        self._closed = False

    def use_routes(self, routes: Routes) -> None:
        """Route by these from now on. Raises `TopologyError` when they lack the graph's region or tier."""
        self.router.use(routes)
        self._queues.keep_only({server.name for server, _ in self.router.servers()})
        self.stats.topology_version = routes.version

    def send_reads(self, queue: ServerQueue, reads: QueuedReads) -> None:
        """Send a batch of reads. Its waiters receive the results or errors."""
        self.stats.queries += len(reads.waiters)
        self._send(ReadCall(self._first_attempt(queue), reads))

    def send_writes(
        self, queue: ServerQueue, rows: list[WriteRow], waiters: list[Waiter[pb.WriteResult] | None], priority: int
    ) -> None:
        """Send a batch of writes, to be made at once or with a ``priority`` for the server's journal. Its waiters
        receive the results or errors."""
        self.stats.writes += len(waiters)
        self._send(WriteCall(self._first_attempt(queue), rows, waiters, priority))

    async def ask(self, shard: int, request: pb.Request, *, time_share: float = 1.0) -> pb.Answer:
        """Send a request that is harmless to repeat to a server of the shard, and return the answer within this share
        of an operation's time. Raises a `TaoError`."""
        deadline = self._loop.time() + time_share * self._settings.timeout_seconds
        tried: tuple[ServerQueue, ...] = (self.router.writer(shard),)
        number = 1
        refusals: list[SkewedVersions | None] = []
        while True:
            queue, version = tried[-1], self.router.version
            request.topology_version = version
            self.stats.batches += 1
            try:
                return await queue.link.ask(request, deadline - self._loop.time())
            except _RETRIED_READ_ERRORS as error:
                now, skew = self._loop.time(), _skew_of(error, version)
                is_free = skew is not None and refusals.count(skew) < _FREE_REFUSALS
                may_retry = is_free or (number < self._settings.max_attempts and self._spend_retry(now))
                if now >= deadline or not may_retry:
                    raise
                number += not is_free
                refusals.append(skew)
                if isinstance(error, NotMine):
                    await self._take_newer_topology(error.topology_version, queue, deadline)
                following = self.router.next(shard, tried)
                if following in tried:
                    pause_seconds = self._backoff_seconds(min(len(tried), _MAX_BACKOFF_TRIES))
                    if skew is not None and not is_free:
                        pause_seconds = max(pause_seconds, _refused_pause_seconds(deadline - now))
                    await asyncio.sleep(pause_seconds)
                self.stats.retries += 1
                self.stats.failovers += following is not queue
                tried = (*tried, following)

    def note_cancelled(self) -> None:
        """Schedule a sweep that forgets the batches for which no caller waits any more."""
        if not self._sweep_scheduled:
            self._sweep_scheduled = True
            self._loop.call_soon(self._sweep)

    async def close(self) -> None:
        """Cancel the retries, and fail every query that is still waited for."""
        self._closed = True
        for task in self._retries:
            task.cancel()
        await asyncio.gather(*self._retries, return_exceptions=True)
        for call in list(self._in_flight):
            self._end(call)
            self._fail_all(call, Unavailable("the graph was closed"))

    def _first_attempt(self, queue: ServerQueue) -> Attempt:
        # As `Attempt(…)` does, in half the time: with the defaults of its last fields.
        return tuple.__new__(Attempt, ((queue,), self._loop.time() + self._settings.timeout_seconds, 1, ()))

    def _send(self, call: AnyCall) -> None:
        if self._closed:
            self._fail_all(call, Unavailable("the graph is closed"))
            return
        if self.unanswered + call.size > self._settings.max_waiting_queries:
            most = self._settings.max_waiting_queries
            self._fail_all(
                call,
                Overloaded(f"{self.unanswered} queries are waiting already, at most {most} may (max_waiting_queries)"),
            )
            return
        self.lone_messages = 0 if self.unanswered or call.size > 1 else self.lone_messages + 1
        self.unanswered += call.size
        self._in_flight.add(call)
        self.stats.batches += 1
        request = call.request()
        request.topology_version = call.topology_version = self.router.version
        timeout_seconds = call.attempt.deadline - self._loop.time()
        if self.router.has_standby and call.attempt.number == 1 and isinstance(call, ReadCall):
            timeout_seconds *= self._settings.first_attempt_share
        call.queue.link.send(request, timeout_seconds, partial(self._on_answer, call))

    def _on_answer(self, call: AnyCall, answer: pb.Answer) -> None:
        if call not in self._in_flight:
            return
        if not answer.more:
            # As in `_end`, which is not called here because this runs for every message.
            self._in_flight.discard(call)
            self.unanswered -= call.size
        try:
            failures = self._apply(call, answer)
            if failures:
                self._retry_or_fail(call, failures)
        except ProtocolError as error:
            self._end(call)
            self._fail_all(call, error)

    def _apply(self, call: AnyCall, answer: pb.Answer) -> list[Failure]:
        """Resolve the slots that this part of an answer brings, and return the slots that failed. Raises
        `ProtocolError`, also when the last part leaves slots unanswered."""
        if answer.HasField("error"):
            return call.fail_unanswered(answer.error)
        self._budget.earn()
        if self.on_hot is not None and isinstance(call, ReadCall) and answer.read.hot_slots and not call.reads.critical:
            self.on_hot(call, answer.read)
        failures = call.resolve(answer)
        if self.trace is not None and isinstance(call, ReadCall):
            self.trace.record(call, answer.read)
        if not answer.more and any(call.waiters):
            failed = {slot for slot, _ in failures}
            if any(each is not None and slot not in failed for slot, each in enumerate(call.waiters)):
                raise ProtocolError(f"server {call.queue.server.name!r} left a part of a batch unanswered")
        return failures

    def _end(self, call: AnyCall) -> None:
        if call in self._in_flight:
            self._in_flight.discard(call)
            self.unanswered -= call.size

    def _fail_all(self, call: AnyCall, error: TaoError) -> None:
        for slot, waiter in enumerate(call.waiters):
            if waiter is not None:
                call.waiters[slot] = None
                self._fail(waiter, type(error)(error.message))

    def _fail(self, waiter: Waiter[Any], error: TaoError) -> None:
        self.stats.errors += 1
        fail(waiter, error)

    def _spend_retry(self, now: float) -> bool:
        """Take one retry out of the budget; False when there is none."""
        allowed = self._budget.spend(now)
        self.stats.retries_refused += not allowed
        return allowed

    def _retry_or_fail(self, call: AnyCall, failures: list[Failure]) -> None:
        """Retry the failed slots that may be retried, and report the error of the others."""
        retried_errors = _RETRIED_READ_ERRORS if isinstance(call, ReadCall) else _RETRIED_WRITE_ERRORS
        retries: list[_Retry] = []
        rest_of_answer: list[_Retry] = []
        came_in_part = None in call.waiters
        # In the order of the slots, because the rows of the next batch must keep the order of their operations.
        for slot, error in sorted(failures, key=itemgetter(0)):
            waiter = call.take_waiter(slot)
            if waiter is None:
                continue
            if came_in_part and isinstance(error, AnswerFull) and self._loop.time() < call.attempt.deadline:
                rest_of_answer.append(_Retry(slot, waiter, error))
            elif isinstance(error, retried_errors) and not isinstance(error, DatabaseDown | DatabaseFull):
                retries.append(_Retry(slot, waiter, error))
            else:
                self._fail(waiter, error)
        if rest_of_answer:
            self._send_rest(call, rest_of_answer)
        self._retry_by_cost(call, retries)

    def _retry_by_cost(self, call: AnyCall, retries: list[_Retry]) -> None:
        """Retry the slots that versions of the topology have refused a few times only; the others as another attempt,
        if there may be one."""
        free: list[_Retry] = []
        others: list[_Retry] = []
        refusals = set[SkewedVersions]()  # of this call
        is_forwarded = True
        for each in retries:
            skew = _skew_of(each.error, call.topology_version)
            if skew is not None and call.attempt.refusals.count(skew) < _FREE_REFUSALS:
                free.append(each)
                refusals.add(skew)
            else:
                others.append(each)
                is_forwarded = is_forwarded and skew is None and isinstance(each.error, NotMine)
        if free:
            attempt = call.attempt._replace(refusals=(*call.attempt.refusals, *refusals))
            self._retry_later(call, free, attempt, may_retry=True)
        if others:
            has_attempts = call.attempt.number < self._settings.max_attempts
            # A server that does not have the shard has not begun any work: forwarding the queries adds no load, however
            # many there are, so it costs nothing of the budget.
            may_retry = has_attempts and (is_forwarded or self._spend_retry(self._loop.time()))
            attempt = call.attempt._replace(number=call.attempt.number + 1)
            self._retry_later(call, others, attempt, may_retry=may_retry)

    def _retry_later(self, call: AnyCall, retries: list[_Retry], attempt: Attempt, *, may_retry: bool) -> None:
        """Retry these slots of a call in this attempt, which lacks the server yet, or report their errors."""
        if may_retry and not self._closed:
            self.unanswered += len(retries)  # they count like queries in flight
            task = self._loop.create_task(self._retry(call, retries, attempt))
            self._retries.add(task)
            task.add_done_callback(self._retries.discard)
        else:
            for each in retries:
                self._fail(each.waiter, each.error)

    async def _retry(self, call: AnyCall, retries: list[_Retry], attempt: Attempt) -> None:
        """Send these slots of a call again, each to the server that the router chooses now. Slots that cannot be sent
        receive their error."""
        waiting = dict(enumerate(retries))
        tried, deadline = attempt.tried, attempt.deadline
        try:
            refused_versions = [each.error.topology_version for each in retries if isinstance(each.error, NotMine)]
            if refused_versions:
                await self._take_newer_topology(max(refused_versions), call.queue, deadline)
            slept = False
            groups = _Groups()
            while waiting and self._loop.time() < deadline:
                groups = groups or self._groups(call, waiting)
                queue, indexes = groups.popleft()
                if queue in tried and (not slept or queue.link.is_down):
                    slept, version = True, self.router.version
                    await self._pause_before(queue, call, self._least_pause_seconds(call, retries, attempt))
                    groups.clear()  # after a pause, other servers may have the shards, or be well
                    if self.router.version != version:
                        continue
                    if self._loop.time() >= deadline:
                        break
                self.stats.retries += 1
                self.stats.failovers += queue is not call.queue
                self._send_subset(call, queue, [waiting.pop(index) for index in indexes], attempt)
        except TaoError as error:
            waiting = {index: each._replace(error=error) for index, each in waiting.items()}
        finally:
            self.unanswered -= len(waiting)
            for each in waiting.values():
                self._fail(each.waiter, each.error)

    def _groups(self, call: AnyCall, waiting: Mapping[int, _Retry]) -> _Groups:
        """Route the waiting slots. Servers that were tried before come last, since they are given a pause first, and
        those that are down after them, since a read may wait long for one."""
        tried = call.attempt.tried
        indexes_by_queue: dict[ServerQueue, list[int]] = {}
        for index, each in waiting.items():
            queue = self.router.next(call.shard_of(each.slot), tried)
            indexes_by_queue.setdefault(queue, []).append(index)
        return _Groups(sorted(indexes_by_queue.items(), key=lambda item: (item[0] in tried, item[0].link.is_down)))

    async def _take_newer_topology(self, version: int, queue: ServerQueue, deadline: float) -> None:
        """Fetch the topology by which a server has refused queries, if it is newer than the one in use. A server that
        does not send it costs a part of the time that is left, and the queries are retried all the same."""
        left = deadline - self._loop.time()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, left * self._settings.first_attempt_share)):
                await self._refresh(version, queue)

    def _least_pause_seconds(self, call: AnyCall, retries: list[_Retry], attempt: Attempt) -> float:
        is_counted = attempt.number > call.attempt.number
        if is_counted and all(_skew_of(each.error, call.topology_version) is not None for each in retries):
            return _refused_pause_seconds(attempt.deadline - self._loop.time())
        return 0.0

    async def _pause_before(self, queue: ServerQueue, call: AnyCall, least_seconds: float) -> None:
        """Give a server that was tried before a moment to recover. When it is down, and with it every other server of
        the shard, a read waits up to its deadline, or until a newer topology may name another server: a message sent
        before would fail at once, and the link probes the server meanwhile."""
        tries, deadline, version = len(call.attempt.tried), call.attempt.deadline, self.router.version
        while True:
            pause_seconds = max(self._backoff_seconds(min(tries, _MAX_BACKOFF_TRIES)), least_seconds)
            await asyncio.sleep(min(pause_seconds, max(0.0, deadline - self._loop.time())))
            is_down = queue.link.is_down and self.router.version == version
            if not (isinstance(call, ReadCall) and is_down and self._loop.time() < deadline):
                return
            tries += 1

    def _send_rest(self, call: AnyCall, rest: list[_Retry]) -> None:
        """Send the queries for which the answer had no room to the same server, without counting an attempt."""
        self.stats.retries += 1
        self._send(call.subset(call.attempt, [each.slot for each in rest], [each.waiter for each in rest]))

    def _send_subset(self, call: AnyCall, queue: ServerQueue, retries: list[_Retry], attempt: Attempt) -> None:
        # `_send` counts them again, and nothing runs in between that could take their room.
        self.unanswered -= len(retries)
        slots = [each.slot for each in retries]
        attempt = attempt._replace(tried=(*attempt.tried, queue))
        self._send(call.subset(attempt, slots, [each.waiter for each in retries]))

    def _backoff_seconds(self, tries: int) -> float:
        pause_seconds: float = self._settings.retry_backoff_seconds * 2 ** (tries - 1)
        return pause_seconds * random.uniform(0.5, 1)

    def _sweep(self) -> None:
        self._sweep_scheduled = False
        for call in [each for each in self._in_flight if each.is_abandoned()]:
            self._end(call)


def _skew_of(error: TaoError, version: int) -> SkewedVersions | None:
    """Return the two versions when a server refused queries because it routes by another one than ``version``, by which
    they were sent."""
    if isinstance(error, NotMine) and error.topology_version != version:
        return version, error.topology_version
    return None


def _refused_pause_seconds(seconds_left: float) -> float:
    return min(_REFUSED_PAUSE_SECONDS, seconds_left * _REFUSED_PAUSE_SHARE)
