"""Forward writes to the server that does them, and apply their changes to this tier before the writer is answered.

A follower forwards to its region's leader; a leader forwards what is mastered in another region to the leader there.
The answer carries what the write changed. This server applies the changes of the shards that it hosts
(`WriteThrough`), and sends the others (the other end of an edge with an inverse) to the servers of its tier that host
them. So every reader of this tier sees the write as soon as it is acknowledged, without waiting for a delivery. A
server of the tier that does not confirm a change in time is made to drop the shard.

What is sent again after a pause is set aside: it keeps no place in its caller's share meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from tao.cache import GraphCache
from tao.model.changes import ListChange, Message, ObjectChange, ShardInvalidation, ShardMessages
from tao.model.errors import (
    DatabaseDown,
    DatabaseFull,
    DeadlineExceeded,
    Fenced,
    InternalError,
    InvalidArgument,
    NotMine,
    ShardBlocked,
    TaoError,
    TooLarge,
    Unavailable,
)
from tao.model.ids import SHARD_SHIFT, check_id
from tao.model.ports import Clock
from tao.model.tokens import MAX_COORDINATORS_ASKED, MAX_PENDING, MAX_PENDING_SHARDS
from tao.model.topology import CacheServer
from tao.planning.coordination import coordinating_shard
from tao.routing.budgets import MIN_MARGIN_SECONDS, MIN_WORK_SECONDS, work_seconds
from tao.schema.registry import Schema
from tao.serving.access import SERVERS, AccessControl, OnBehalfOf
from tao.serving.configuration import ServerContext
from tao.serving.shares import set_aside
from tao.serving.sources import TickBatcher
from tao.wire.convert import (
    coordinating_shards,
    error_from_pb,
    error_to_pb,
    shard_messages_from_pb,
    shard_messages_to_pb,
    write_from_pb,
    write_shard_messages,
)
from tao.wire.identity import PASSING_ON, PeerIdentity
from tao.wire.links import LinksPort
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb

MAX_SETTLED: Final = MAX_PENDING + MAX_PENDING_SHARDS + MAX_COORDINATORS_ASKED
"""Most pairs, and pairs of shards, that an application may have settled at once: more than any token names."""

LEAST_ATTEMPT_SECONDS: Final = MIN_MARGIN_SECONDS + 2 * MIN_WORK_SECONDS
"""A leader rejects a write that arrives with less time than it needs; the reason of the attempt before says more."""


@dataclass(frozen=True, slots=True)
class ForwardSettings:
    """Attempts, time limits and batches of forwarded writes."""

    first_pause_seconds: float = 0.05
    """Pause before a write is sent again whose leader reports, before writing anything, that it does not own the shard
    or that the shard is locked, or whose leader cannot be reached. It doubles."""

    max_pause_seconds: float = 0.4
    """Longest pause between two attempts. A write is sent again until its deadline, or the retry budget, is used up: a
    dead leader's shards are led by others within seconds."""

    max_wait_seconds: float = 60.0
    """Time after which a write is not sent again, whatever its deadline."""

    sibling_timeout_seconds: float = 0.5
    """Longest wait for another server of this tier to confirm a change. The leader's delivery corrects a server that is
    later a moment afterwards, and the writer should not wait longer for it."""

    max_batch_changes: int = 256
    """Most changes in one message to another server of the tier."""


@dataclass(slots=True)
class _Forwarded:
    """One client's write batch while it is forwarded."""

    writes: pb.WriteBatch
    results: WriteResults
    deadline: float
    behalf: OnBehalfOf
    sent_at: float
    """The time at which it was sent first."""
    for_any_shard: bool
    """Whether it is forwarded for shards that this server does not serve, too."""
    under_way: int = 0
    """Number of leaders that have not answered what they were sent."""
    pauses: int = 0
    """Number of groups of its writes that are sent again after a pause."""


@dataclass(frozen=True, slots=True)
class _PassedOn:
    """A request of another kind while it is passed on. ``sent_at``: the time at which it was sent first."""

    shard: int
    request: pb.Request
    reply: Reply
    send: Callable[[pb.Answer], None]
    deadline: float
    sent_at: float


class _SiblingChange(NamedTuple):
    """Changes on their way to another server of the tier. ``confirmed`` gets whether it confirmed them in time."""

    messages: ShardMessages
    confirmed: asyncio.Future[bool]


class AppliesWrites(NamedTuple):
    """How this server's cache takes the changes of a write.

    ``decode``: returns the messages, perhaps without those that the cache has applied already. ``apply``: applies
    them, given the monotonic time at which this server sent their write; minus infinity when it did not."""

    decode: Callable[[pb.ShardMessages], ShardMessages]
    apply: Callable[[ShardMessages, float], None]


class ForwardPath:
    """Forwards the writes that another server does, and counts their outcomes."""

    def __init__(
        self,
        context: ServerContext,
        settings: ForwardSettings,
        *,
        next_hop: Callable[[int], CacheServer],
        hosts: Callable[[int], Sequence[CacheServer]],
        changes: AppliesWrites,
        admit: Callable[[int], TaoError | None],
        sibling_invalidation: SiblingInvalidation | None = None,
    ) -> None:
        """``next_hop`` maps the shard that coordinates a write to the server that the write is sent to. ``hosts`` maps
        a shard to the servers of this tier that host it. ``changes`` enter this server's cache. ``admit`` returns why
        this server does not serve a shard, or None. ``sibling_invalidation`` makes a server of this tier drop what it
        could not be sent in time; without it, only the leader's later message corrects that server."""
        self._name: Final = context.name
        self._configuration: Final = context.configuration
        self._next_hop: Final = next_hop
        self._hosts: Final = hosts
        self._changes: Final = changes
        self._links: Final[LinksPort] = context.links
        self._clock: Final = context.clock
        self._admit: Final = admit
        self._spawn: Final = context.spawn_as("forwarded write")
        self._settings: Final = settings
        self._budget: Final = context.budget
        self._sibling_invalidation: Final = sibling_invalidation
        self._siblings: TickBatcher[CacheServer, _SiblingChange] = TickBatcher(
            self._send_batch, self._miss_batch, settings.max_batch_changes
        )
        self.acknowledged: Counter[str] = Counter()
        """Number of acknowledged writes, by operation."""
        self.failed: Counter[str] = Counter()
        self.siblings_missed = 0

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Forward each write of the batch; each result is sent as it arrives."""
        writes = request.write
        if not writes.writes:
            reply.send(pb.Answer(write=pb.WriteAnswer()))
            return
        # Changes are for caches: they name every write of their transaction, whatever the caller may read.
        want_changes = writes.want_changes and reply.peer.role in PASSING_ON
        results = WriteResults(reply, len(writes.writes), want_changes=want_changes)
        deadline = self._clock.monotonic() + work_seconds(request.deadline_ms)
        slots = admitted_writes(self._configuration.access, request, reply.peer, results)
        self.forward(request, slots, results, deadline, reply.peer)

    def forward(
        self,
        request: pb.Request,
        slots: Iterable[int],
        results: WriteResults,
        deadline: float,
        peer: PeerIdentity,
        *,
        for_any_shard: bool = False,
    ) -> None:
        """Forward these slots of a peer's batch; their results go to ``results``. ``for_any_shard``: also of shards
        that this server does not serve."""
        behalf, now = OnBehalfOf.sender(request, peer), self._clock.monotonic()
        self._send(_Forwarded(request.write, results, deadline, behalf, now, for_any_shard), slots, 1)

    def reserve_ids(self, request: pb.Request, reply: Reply) -> None:
        """Forward a reservation of ids. Raises `InvalidArgument` and `DeadlineExceeded`."""
        self._pass_on(request.reserve_ids.shard, request, reply, reply.send)

    def settle_pairs(self, request: pb.Request, reply: Reply) -> None:
        """Forward a request to settle pairs of one coordinating shard. Raises `InvalidArgument`, `DeadlineExceeded`,
        and `TooLarge` for more pairs of an application than any token names."""
        shards = coordinating_shards(request.settle_pairs)
        if len(shards) != 1:
            raise InvalidArgument(f"a request settles pairs of one coordinating shard, not of {len(shards)}")
        peer, send = reply.peer, reply.send
        if peer.role not in SERVERS:
            pairs = len(request.settle_pairs.pairs) + len(request.settle_pairs.shards)
            if pairs > MAX_SETTLED:
                raise TooLarge(f"{pairs} pairs cannot be settled at once; send at most {MAX_SETTLED}")
            readable = self._configuration.access.readable_lists(peer.caller)

            def send_versions(answer: pb.Answer) -> None:
                reply.send(_without_edges(answer, readable))

            send = send_versions
        self._pass_on(shards.pop(), request, reply, send)

    def _pass_on(self, shard: int, request: pb.Request, reply: Reply, send: Callable[[pb.Answer], None]) -> None:
        passed, now = pb.Request(), self._clock.monotonic()
        passed.CopyFrom(request)
        OnBehalfOf.sender(request, reply.peer).name_in(passed)
        self._ask(_PassedOn(shard, passed, reply, send, now + work_seconds(request.deadline_ms), now), 1)

    def _ask(self, passed: _PassedOn, attempt: int) -> None:
        """Send a request that is harmless to repeat to the leader of its shard; while another one takes the shard over,
        again."""

        def take(answer: pb.Answer) -> None:
            error = error_from_pb(answer.error) if answer.HasField("error") else None
            if error is None:
                self._budget.earn()
            elif _is_worth_repeating(error) and set_aside(passed.reply) and self._budget.spend(self._clock.monotonic()):
                with suppress(TaoError):  # too busy for another task
                    self._spawn(self._ask_later(passed, error, answer, attempt))
                    return
            passed.send(answer)

        passed.request.topology_version = self._configuration.routes.version
        left = passed.deadline - self._clock.monotonic()
        self._links.to(self._next_hop(passed.shard)).send(passed.request, left, take)

    async def _ask_later(self, passed: _PassedOn, error: TaoError, answer: pb.Answer, attempt: int) -> None:
        next_attempt = await self._next_attempt([error], attempt, passed.deadline, passed.sent_at)
        if next_attempt is None:
            passed.send(answer)
            return
        try:
            self._ask(passed, next_attempt)
        except TaoError as no_leader:
            passed.send(pb.Answer(error=error_to_pb(no_leader)))

    def _send(self, forwarded: _Forwarded, slots: Iterable[int], attempt: int) -> None:
        routes = self._configuration.routes
        by_leader: dict[CacheServer, list[int]] = {}
        for slot in slots:
            try:
                write = forwarded.writes.writes[slot]
                leader = self._next_hop(self._coordinator(write, forwarded.behalf, forwarded.for_any_shard))
            except TaoError as error:
                self._fail(forwarded, slot, error)
            else:
                by_leader.setdefault(leader, []).append(slot)
        left = forwarded.deadline - self._clock.monotonic()
        forwarded.under_way += len(by_leader)
        for leader, group in by_leader.items():
            batch = pb.WriteBatch(want_changes=True, writes=[forwarded.writes.writes[slot] for slot in group])
            request = pb.Request(topology_version=routes.version, write=batch)
            forwarded.behalf.name_in(request)
            unanswered = dict(enumerate(group))

            def take(answer: pb.Answer, unanswered: dict[int, int] = unanswered, leader: CacheServer = leader) -> None:
                self._take(forwarded, unanswered, answer, attempt, leader)

            self._links.to(leader).send(request, left, take)

    def _coordinator(self, message: pb.Write, behalf: OnBehalfOf, for_any_shard: bool) -> int:
        """Return the shard whose leader does the write. Raises when this server may not forward it."""
        operation = message.WhichOneof("operation")
        if operation == "flush_counter" and behalf.caller is not None:
            raise InvalidArgument("only followers send flush_counter; add to the counter with counter_add")
        if operation == "settle_edge":
            # It writes one side of a pair: from another sender than the pair's coordinator it would leave the sides
            # different.
            raise InvalidArgument("only leaders send settle_edge; write the edge with assoc_add or assoc_delete")
        home, coordinator = shards_of_write(message, self._configuration.schema)
        refusal = None if for_any_shard else self._admit(home)
        if refusal is not None:
            raise refusal
        return coordinator

    def _take(
        self,
        forwarded: _Forwarded,
        unanswered: dict[int, int],
        answer: pb.Answer,
        attempt: int,
        leader: CacheServer,
    ) -> None:
        """Take a leader's answer. ``unanswered`` maps its slots to those of the client's batch."""
        retries: dict[int, TaoError] = {}
        forwarded.under_way -= not answer.more
        if answer.HasField("error"):
            error = error_from_pb(answer.error)
            if type(error) is Unavailable:
                error = _unreachable(leader, error)
            for slot in unanswered.values():
                self._retry_or_fail(forwarded, slot, error, retries)
            unanswered.clear()
            self._try_again(forwarded, retries, attempt)
            return
        self._budget.earn()
        decode = shard_messages_from_pb if forwarded.results.want_changes else self._decode
        changes = [decode(messages) for messages in answer.write.changes]
        for_siblings = self._apply_hosted(changes, forwarded.sent_at)
        done: list[tuple[int, pb.WriteResult]] = []
        for leader_slot, result in zip(answer.write.slots, answer.write.results, strict=False):
            if leader_slot not in unanswered:
                continue  # It failed with a part of the answer that could not be sent.
            slot = unanswered.pop(leader_slot)
            if result.HasField("error"):
                self._retry_or_fail(forwarded, slot, error_from_pb(result.error), retries)
            else:
                done.append((slot, result))
        if for_siblings and done:
            confirmations = [self._send_to_sibling(sibling, messages) for sibling, messages in for_siblings]
            try:
                self._spawn(self._answer_when_confirmed(forwarded, done, changes, confirmations))
            except TaoError:
                # The server is too busy for a task that waits for the siblings. The write is committed, and its writer
                # must get that result.
                self.siblings_missed += len(confirmations)
                self._answer(forwarded, done, changes)
        else:
            self._answer(forwarded, done, changes)
        self._try_again(forwarded, retries, attempt)
        if not answer.more and unanswered:
            for slot in unanswered.values():
                self._fail(forwarded, slot, InternalError("the leader's answer lacks a result for the write"))
            unanswered.clear()

    def _retry_or_fail(self, forwarded: _Forwarded, slot: int, error: TaoError, retries: dict[int, TaoError]) -> None:
        if _is_worth_repeating(error):
            retries[slot] = error
        else:
            self._fail(forwarded, slot, error)

    def _try_again(self, forwarded: _Forwarded, retries: dict[int, TaoError], attempt: int) -> None:
        # A batch keeps its place while a leader works on a part of it.
        only_pauses = not forwarded.under_way and bool(retries or forwarded.pauses)
        may_pause = not only_pauses or set_aside(forwarded.results.reply)
        if not retries:
            return
        if not may_pause:
            too_many = "no leader took the write, and as many of this caller's as may be are sent again already"
            self._give_up(forwarded, retries, Unavailable(too_many))
            return
        if not self._budget.spend(self._clock.monotonic()):
            self._give_up(forwarded, retries, Unavailable("no leader took the write, and the retry budget is used up"))
            return
        try:
            self._spawn(self._send_later(forwarded, retries, attempt))
        except TaoError as error:
            for slot in retries:
                self._fail(forwarded, slot, error)
        else:
            forwarded.pauses += 1

    async def _send_later(self, forwarded: _Forwarded, retries: dict[int, TaoError], attempt: int) -> None:
        next_attempt = await self._next_attempt(retries.values(), attempt, forwarded.deadline, forwarded.sent_at)
        forwarded.pauses -= 1
        if next_attempt is None:
            self._give_up(forwarded, retries, DeadlineExceeded("no leader took the write before its deadline"))
        else:
            self._send(forwarded, retries, next_attempt)

    async def _next_attempt(
        self, errors: Iterable[TaoError], attempt: int, deadline: float, sent_at: float
    ) -> int | None:
        """Wait for a pause, and for the topology that the last answers have named: by an older one requests would go
        where they were refused. A look for that topology counts as an attempt. Returns the number of the next attempt,
        or None when there is no time for one."""
        named = max((error.topology_version for error in errors if isinstance(error, NotMine)), default=0)
        settings = self._settings
        end = min(deadline, sent_at + settings.max_wait_seconds)
        while True:
            pause_seconds = min(settings.first_pause_seconds * 2 ** min(attempt - 1, 10), settings.max_pause_seconds)
            if self._clock.monotonic() + pause_seconds + LEAST_ATTEMPT_SECONDS >= end:
                return None
            await asyncio.sleep(pause_seconds)
            # No longer than the pause: while etcd is silent, a read takes all the time of the write. It goes on.
            await self._configuration.refresh(min(pause_seconds, end - self._clock.monotonic()))
            attempt += 1
            if self._configuration.routes.version >= named:
                return attempt

    def _give_up(self, forwarded: _Forwarded, retries: dict[int, TaoError], error: TaoError) -> None:
        for slot, last in retries.items():
            # Report the lock or the leader that cannot be reached, and not a missing leader: an operator would look for
            # one. Any other error of a leader is not this server's: for `NotMine`, clients ask another one at no cost.
            says_why = isinstance(last, ShardBlocked | Unavailable)
            self._fail(forwarded, slot, last if says_why else type(error)(f"{error.message}. {last.message}"))

    def _decode(self, messages: pb.ShardMessages) -> ShardMessages:
        """Return the messages that a server of the tier needs: all of them, unless this server alone hosts the
        shard."""
        is_own = all(host.name == self._name for host in self._hosts(messages.shard))
        return self._changes.decode(messages) if is_own else shard_messages_from_pb(messages)

    def _apply_hosted(self, changes: list[ShardMessages], sent_at: float) -> list[tuple[CacheServer, ShardMessages]]:
        """Apply the changes that concern this server. Returns the changes that other servers of the tier need, with the
        server."""
        for_siblings: list[tuple[CacheServer, ShardMessages]] = []
        for messages in changes:
            for host in self._hosts(messages.shard):
                if host.name == self._name:
                    self._changes.apply(messages, sent_at)
                # No client reads from a server that is down, and its leader sends it the change when it is back.
                elif not host.down:
                    for_siblings.append((host, messages))
        return for_siblings

    async def _answer_when_confirmed(
        self,
        forwarded: _Forwarded,
        done: list[tuple[int, pb.WriteResult]],
        changes: list[ShardMessages],
        confirmations: list[asyncio.Future[bool]],
    ) -> None:
        outcomes = await asyncio.gather(*confirmations)
        self.siblings_missed += outcomes.count(False)
        self._answer(forwarded, done, changes)

    async def apply_changes(self, changes: list[ShardMessages]) -> None:
        """Apply changes of a write that was not forwarded here, and return when the other servers of this tier that
        they concern have confirmed them or do not answer."""
        for_siblings = self._apply_hosted(changes, -inf)
        if not for_siblings:  # mostly: a leader awaits this for each copy to another leader
            return
        confirmations = [self._send_to_sibling(sibling, messages) for sibling, messages in for_siblings]
        outcomes = await asyncio.gather(*confirmations)
        self.siblings_missed += outcomes.count(False)

    def _send_to_sibling(self, sibling: CacheServer, messages: ShardMessages) -> asyncio.Future[bool]:
        """Send the sibling a change. The future's result is whether it confirmed the change in time."""
        confirmed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._siblings.add(sibling, _SiblingChange(messages, confirmed))
        return confirmed

    def _send_batch(self, sibling: CacheServer, batch: list[_SiblingChange]) -> None:
        changes = pb.ApplyChanges(changes=[shard_messages_to_pb(messages) for messages, _ in batch])
        request = pb.Request(topology_version=self._configuration.routes.version, apply=changes)

        def take(answer: pb.Answer) -> None:
            if answer.HasField("error"):
                self._miss_batch(sibling, batch, error_from_pb(answer.error))
            else:
                _end_waits(batch, is_confirmed=True)

        self._links.to(sibling).send(request, self._settings.sibling_timeout_seconds, take)

    def _miss_batch(self, sibling: CacheServer, batch: list[_SiblingChange], _: Exception) -> None:
        """Go on without a sibling that has not confirmed its changes, or that they could not be sent to."""
        if self._sibling_invalidation is not None:
            self._sibling_invalidation.drop(sibling, {messages.shard for messages, _ in batch})
        _end_waits(batch, is_confirmed=False)

    def _answer(
        self, forwarded: _Forwarded, done: list[tuple[int, pb.WriteResult]], changes: list[ShardMessages]
    ) -> None:
        for slot, result in done:
            forwarded.results.add(slot, result, changes)
            changes = []  # sent once, with the first result of this answer
            self.acknowledged[_operation(forwarded, slot)] += 1

    def _fail(self, forwarded: _Forwarded, slot: int, error: TaoError) -> None:
        self.failed[_operation(forwarded, slot)] += 1
        forwarded.results.fail(slot, error)


def _end_waits(batch: Iterable[_SiblingChange], *, is_confirmed: bool) -> None:
    for each in batch:
        if not each.confirmed.done():
            each.confirmed.set_result(is_confirmed)


def admitted_writes(
    access: AccessControl, request: pb.Request, peer: PeerIdentity, results: WriteResults
) -> Sequence[int]:
    """Return the slots of the writes that their caller may make, and fail the others."""
    slots = range(len(request.write.writes))
    refused = access.refused_writes(request, peer)
    for slot, error in refused.items():
        results.fail(slot, error)
    return [slot for slot in slots if slot not in refused] if refused else slots


def _without_edges(answer: pb.Answer, readable: int) -> pb.Answer:
    """Return an answer to an application that had pairs settled: the versions of its lists are all that it needs."""
    for each in answer.settled_pairs.changes:
        versions = [
            pb.Message(list_invalidation=pb.ListInvalidation(id1=change.id1, atype=change.atype, version=change.after))
            for change in (message.list_change for message in each.messages if message.HasField("list_change"))
            if readable >> change.atype & 1
        ]
        del each.messages[:]
        each.messages.extend(versions)
    return answer


def shards_of_write(message: pb.Write, schema: Schema) -> tuple[int, int]:
    """Return the shard of the id that the write names first, and the shard that coordinates the write. Raises
    `RequestError`."""
    operation = message.WhichOneof("operation")
    if operation in ("obj_add", "add_job"):
        added = getattr(message, operation)
        shard: int = check_id(added.id) >> SHARD_SHIFT if added.id else added.shard
        return shard, shard
    write = write_from_pb(message)
    named = "id1" if hasattr(write, "id1") else "id"
    return check_id(getattr(write, named, 0), named) >> SHARD_SHIFT, coordinating_shard(write, schema)


def _unreachable(leader: CacheServer, error: TaoError) -> Unavailable:
    """Return the error of a write whose leader cannot be asked: it names the leader, and what to do."""
    return Unavailable(
        f"{leader.name} leads the shard and cannot be reached ({error.message}). Other leaders take its shards over "
        f"within seconds once a watcher has marked it down: try again. Where no watcher acts (tao status), start "
        f"{leader.name} again, or tao topology mark-down {leader.name}"
    )


def _is_worth_repeating(error: TaoError) -> bool:
    """Return whether a request that failed with this error is worth sending again while there is time.

    Nothing was written, and the right leader may be found or come up meanwhile. A leader waits for a lock only for a
    moment at a time, so as not to delay the other writes of the transaction: a commit that waits for a replica holds
    its locks longer, and a write that has time left may still get them.
    """
    can_retry = isinstance(error, NotMine | Fenced | Unavailable | ShardBlocked)
    return can_retry and not isinstance(error, DatabaseDown | DatabaseFull)


def _operation(forwarded: _Forwarded, slot: int) -> str:
    return forwarded.writes.writes[slot].WhichOneof("operation") or "unknown"


@dataclass(frozen=True, slots=True)
class SiblingInvalidationSettings:
    """Time limits and attempts of the requests to drop shards."""

    answer_seconds: float = 1.0
    """Longest wait for the sibling's answer: dropping a shard takes microseconds."""

    first_pause_seconds: float = 0.1
    """Pause before the second attempt; it doubles."""

    max_attempts: int = 8
    """Attempts, over about half a minute. By then the sibling is marked down, or its leader has invalidated the shards
    whose changes it missed."""


class SiblingInvalidation:
    """The shards that siblings, servers of the same tier, have yet to drop because a change could not be sent in time.
    Each sibling has at most one task.

    The write is committed, and its writer has waited long enough. But the sibling may go on answering from its cache,
    and a reader that holds the write's token would read there as if it had not happened. So this server repeats the
    request to drop the shard until the sibling has confirmed it: a dropped shard costs misses, and is never wrong. The
    leader sends the sibling the change as well; the request here covers the case that the leader's message is lost or
    late.
    """

    def __init__(self, context: ServerContext, settings: SiblingInvalidationSettings | None = None) -> None:
        self._links: Final[LinksPort] = context.links
        self._spawn: Final = context.spawn_as("sibling invalidation")
        self._settings: Final = settings or SiblingInvalidationSettings()
        self._pending: Final[dict[str, set[int]]] = {}
        self.dropped = 0
        """Number of shards that siblings have dropped at this server's request."""

    @property
    def is_pending(self) -> bool:
        """True while a sibling has yet to drop a shard."""
        return bool(self._pending)

    def drop(self, sibling: CacheServer, shards: Iterable[int]) -> None:
        """Make the sibling drop these shards, because it missed changes of them."""
        pending = self._pending.get(sibling.name)
        if pending is not None:
            pending.update(shards)
            return
        self._pending[sibling.name] = set(shards)
        try:
            self._spawn(self._run(sibling))
        except TaoError:
            # This server is too busy for another task: the leader's message has to do.
            del self._pending[sibling.name]

    async def _run(self, sibling: CacheServer) -> None:
        pending = self._pending[sibling.name]
        try:
            for attempt in range(self._settings.max_attempts):
                if attempt:
                    await asyncio.sleep(self._settings.first_pause_seconds * 2 ** (attempt - 1))
                while pending:
                    asked = sorted(pending)
                    pending.clear()  # changes missed from here on need another request
                    if not await self._ask(sibling, asked):
                        pending.update(asked)
                        break
                    self.dropped += len(asked)
                if not pending:
                    return
        finally:
            del self._pending[sibling.name]

    async def _ask(self, sibling: CacheServer, shards: Sequence[int]) -> bool:
        """Return whether the sibling has confirmed that it dropped the shards."""
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def take(answer: pb.Answer) -> None:
            if not answered.done():
                answered.set_result(not answer.HasField("error"))

        request = pb.Request(invalidate=pb.Invalidate(shards=shards))
        self._links.to(sibling).send(request, self._settings.answer_seconds, take)
        return await answered


MAX_WRITES_PER_BATCH: Final = 6000
"""As many writes as an id2 set may have ids, so that a set that was read can be written. A write may take a task, and
this is a sixteenth of a server's tasks: a message of the largest size holds hundreds of thousands of writes, and one
client must not take all tasks."""


def bounded_writes(path: Callable[[pb.Request, Reply], None]) -> Callable[[pb.Request, Reply], None]:
    """Return a path that handles batches of writes as ``path`` does, and raises `TooLarge` for more writes than a batch
    may have, before anything is done for them."""

    def handle(request: pb.Request, reply: Reply) -> None:
        writes = len(request.write.writes)
        if writes > MAX_WRITES_PER_BATCH:
            raise TooLarge(f"{writes} writes in one batch; send at most {MAX_WRITES_PER_BATCH} at a time")
        path(request, reply)

    return handle


FLUSH_BYTES: Final = 4 << 20
"""Approximate bytes of changes in one answer; well below the largest message."""

EDGE_BYTES: Final = 32
"""Bytes of an edge in a change, without its data."""


class WriteResults:
    """Collects the results of a batch of writes, and sends those of one tick of the event loop together. The answer
    that carries the last result is marked as the last."""

    def __init__(self, reply: Reply, expected: int, *, want_changes: bool) -> None:
        """``expected`` is the number of writes."""
        self.want_changes: Final = want_changes
        self.reply: Final = reply
        self._open = expected
        self._answer = pb.Answer()
        self._changes: dict[int, ShardMessages] = {}
        self._change_bytes = 0
        self._scheduled = False

    def add(self, slot: int, result: pb.WriteResult, messages: Iterable[ShardMessages] = ()) -> None:
        """Add the result of one write. ``messages`` are the changes that its writer's caches must apply."""
        answer = self._answer.write
        answer.slots.append(slot)
        answer.results.append(result)
        if self.want_changes:
            # Keyed by identity: writes that were committed together share the changes that they made together.
            for each in messages:
                if id(each) not in self._changes:
                    self._changes[id(each)] = each
                    self._change_bytes += _size(each)
        self._open -= 1
        if self._change_bytes >= FLUSH_BYTES or not self._open:
            # The changes of one tick may not fit one message, and what is committed must never be too large to report.
            # After the last result there is nothing to wait for.
            self._send()
            return
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def fail(self, slot: int, error: TaoError, messages: Iterable[ShardMessages] = ()) -> None:
        """Add the error of one write. It wrote nothing unless the error says that the outcome is unknown; ``messages``
        are the changes that it made all the same."""
        self.add(slot, pb.WriteResult(error=error_to_pb(error)), messages)

    def _flush(self) -> None:
        self._scheduled = False
        if self._answer.write.slots:
            self._send()

    def _send(self) -> None:
        answer, self._answer = self._answer, pb.Answer()
        answer.more = self._open > 0
        if self._changes:
            changes, self._changes, self._change_bytes = self._changes, {}, 0
            # The changes of a shard together: the receiver then looks once for who hosts it.
            by_shard: dict[tuple[int, int], list[Message]] = {}
            for each in changes.values():
                by_shard.setdefault((each.shard, each.version_epoch), []).extend(each.messages)
            for (shard, epoch), messages in by_shard.items():
                write_shard_messages(ShardMessages(shard, epoch, tuple(messages)), answer.write.changes.add())
        self.reply.send(answer)


def _size(messages: ShardMessages) -> int:
    """Return roughly how many bytes the messages take on the wire."""
    size = 0
    for message in messages.messages:
        if isinstance(message, ObjectChange):
            size += EDGE_BYTES + len(message.data or b"")
        elif isinstance(message, ListChange):
            size += EDGE_BYTES * (1 + len(message.gone) + len(message.put))
            for edge in message.put:
                size += len(edge.data)
    return size


_OWN_WRITE: Final = "a write on its way back"


def apply_messages(cache: GraphCache, clock: Clock, messages: ShardMessages, *, insert: bool) -> None:
    """Apply messages to the cache. ``insert``: also cache an entry that was not cached, because its writer will read it
    here. See `GraphCache.apply`."""
    cache.apply_all(messages, clock.monotonic(), insert)


class WriteThrough:
    """Applies changes to the cache of a server that does not own the shards: messages, and writes of this tier.

    A message changes only what is cached. A write also inserts what was not cached, because its writer will read it
    here; but its answer may be late. The changes that followed the write may then have been sent before this cache
    began to receive the shard's messages, or to another server, and nothing would correct the inserted entry. So a
    write inserts only if it was sent after the shard began or began anew here, also at the start of the server; where
    that is not known, only a time after the beginning. Any other write changes what is cached and raises version
    floors, and the entry is fetched when it is read.
    """

    def __init__(self, cache: GraphCache, clock: Clock, write_answer_seconds: float) -> None:
        """``write_answer_seconds`` must exceed the time that the answer to a write can take."""
        self._cache: Final = cache
        self._clock: Final = clock
        self._write_answer_seconds: Final = write_answer_seconds
        self._begun_at: Final[dict[int, float]] = {}

    def note_begun(self, *shards: int) -> None:
        """Note that this cache knows nothing of what has been sent about the shards before now."""
        self._begun_at.update(dict.fromkeys(shards, self._clock.monotonic()))

    def apply(self, messages: ShardMessages) -> None:
        """Apply messages. A message that invalidates the shard may stand for others that are kept nowhere any more."""
        apply_messages(self._cache, self._clock, messages, insert=False)
        if any(isinstance(message, ShardInvalidation) for message in messages.messages):
            self.note_begun(messages.shard)

    def decode_write(self, messages: pb.ShardMessages) -> ShardMessages:
        """Return the changes of a write that the cache has not applied yet. The leader delivers a change as soon as it
        is committed, mostly before the answer to its writer."""
        decoded = shard_messages_from_pb(messages)
        with self._cache.recorder.caused_by(_OWN_WRITE):
            fresh = tuple([each for each in decoded.messages if not self._has_applied(each, decoded.version_epoch)])
        return ShardMessages(decoded.shard, decoded.version_epoch, fresh)

    def _has_applied(self, message: Message, version_epoch: int) -> bool:
        if isinstance(message, ListChange):
            return self._cache.has_applied(message.id1, message.atype, message.after, version_epoch)
        if isinstance(message, ObjectChange):
            return self._cache.has_applied(message.id, 0, message.after, version_epoch)
        return False

    def apply_write(self, messages: ShardMessages, sent_at: float = -inf) -> None:
        """Apply the changes of a write that is answered through this server, or through a server of its tier.

        ``sent_at``: the monotonic time at which this server sent the write, if it did."""
        begun_at = self._begun_at.get(messages.shard, inf)
        insert = sent_at > begun_at or self._clock.monotonic() - begun_at > self._write_answer_seconds
        with self._cache.recorder.caused_by(_OWN_WRITE):
            apply_messages(self._cache, self._clock, messages, insert=insert)
