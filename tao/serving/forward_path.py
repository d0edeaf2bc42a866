"""A write on its way to who does it, and its changes into this tier before it is answered (DESIGN.md §6).

A follower forwards to its region's leader, a leader forwards what is mastered elsewhere to the master region's. The
answer carries what the write changed. This server applies what concerns its own shards, and hands the rest - the other
end of an edge with an inverse - to the servers of its tier that have them. So whoever reads through this tier sees the
write as soon as it is acknowledged, without waiting for a message from anywhere.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tao.model.changes import ShardMessages
from tao.model.errors import (
    DatabaseDown,
    DeadlineExceeded,
    Fenced,
    InternalError,
    InvalidArgument,
    NotMine,
    ShardBlocked,
    TaoError,
    Unavailable,
)
from tao.model.ids import SHARD_SHIFT, check_id
from tao.model.ports import Clock
from tao.model.topology import CacheServer
from tao.planning.coordination import coordinating_shard
from tao.routing.deadlines import work_seconds
from tao.routing.retry_budget import RetryBudget
from tao.schema.registry import Schema
from tao.serving.amends import Amends
from tao.serving.configuration import Configuration
from tao.serving.gathering import Gathering
from tao.serving.links import LinksPort
from tao.serving.write_results import WriteResults
from tao.wire.convert import error_from_pb, shard_messages_from_pb, shard_messages_to_pb, write_from_pb
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb


@dataclass(frozen=True, slots=True)
class ForwardSettings:
    """How writes are forwarded."""

    max_attempts: int = 6
    """Tries of one write while its leader says, before writing anything, that the shard is not its own or is locked, or
    cannot be reached at all."""

    first_pause_seconds: float = 0.05
    """Pause before the second try; it doubles. A takeover takes a few hundred milliseconds."""

    sibling_timeout_seconds: float = 0.5
    """For handing a change to another server of this tier. One that does not take it in time is told by the leader's
    message a moment later; the writer should not wait longer for it."""

    max_batch_changes: int = 256
    """Changes in one message to another server of the tier."""


@dataclass(slots=True)
class _Forwarded:
    """One client's write batch on its way."""

    writes: pb.WriteBatch
    results: WriteResults
    deadline: float


class ForwardPath:
    """Forwards the writes that another server does."""

    def __init__(
        self,
        name: str,
        configuration: Configuration,
        next_hop: Callable[[int], CacheServer],
        hosts: Callable[[int], Sequence[CacheServer]],
        apply: Callable[[ShardMessages], None],
        links: LinksPort,
        clock: Clock,
        admit: Callable[[int], TaoError | None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        settings: ForwardSettings,
        budget: RetryBudget,
        amends: Amends | None = None,
    ) -> None:
        """``next_hop``: shard that coordinates a write → to whom it goes. ``hosts``: shard → the servers of this tier
        that have it. ``apply`` takes changes in here. ``admit``: shard → why it is not served here, or None.
        ``budget``: of all that this server asks again. ``amends``: what becomes of a server of this tier that does not
        hear in time; None: its leader tells it later."""
        self._name: Final = name
        self._configuration: Final = configuration
        self._next_hop: Final = next_hop
        self._hosts: Final = hosts
        self._apply: Final = apply
        self._links: Final = links
        self._clock: Final = clock
        self._admit: Final = admit
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._budget: Final = budget
        self._amends: Final = amends
        self._siblings: Gathering[CacheServer, tuple[ShardMessages, asyncio.Future[bool]]] = Gathering(
            self._tell_sibling, settings.max_batch_changes
        )
        self.acknowledged: Counter[str] = Counter()
        """Writes by operation, as in the paper."""
        self.failed: Counter[str] = Counter()
        self.siblings_missed = 0

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Forward each write of the batch; results come as they are done."""
        writes = request.write
        if not writes.writes:
            reply.send(pb.Answer(write=pb.WriteAnswer()))
            return
        results = WriteResults(reply, len(writes.writes), want_changes=writes.want_changes)
        deadline = self._clock.monotonic() + work_seconds(request.deadline_ms)
        self.forward(writes, range(len(writes.writes)), results, deadline)

    def forward(self, writes: pb.WriteBatch, slots: Iterable[int], results: WriteResults, deadline: float) -> None:
        """Forward some writes of a batch; ``results`` gets theirs."""
        self._send(_Forwarded(writes, results, deadline), slots, 1)

    def _send(self, forwarded: _Forwarded, slots: Iterable[int], attempt: int) -> None:
        routes = self._configuration.routes
        by_leader: dict[CacheServer, list[int]] = {}
        for slot in slots:
            try:
                leader = self._next_hop(self._coordinator(forwarded.writes.writes[slot]))
            except TaoError as error:
                self._fail(forwarded, slot, error)
            else:
                by_leader.setdefault(leader, []).append(slot)
        left = forwarded.deadline - self._clock.monotonic()
        for leader, group in by_leader.items():
            batch = pb.WriteBatch(want_changes=True, writes=[forwarded.writes.writes[slot] for slot in group])
            request = pb.Request(topology_version=routes.version, write=batch)
            unanswered = dict(enumerate(group))

            def take(answer: pb.Answer, unanswered: dict[int, int] = unanswered) -> None:
                self._take(forwarded, unanswered, answer, attempt)

            self._links.to(leader).send(request, left, take)

    def _coordinator(self, message: pb.Write) -> int:
        """The shard whose leader does the write. Raises when this server is not the one to send it."""
        if message.HasField("settle_edge"):
            # One side of a pair: from anyone but its coordinator it would leave the two sides different.
            raise InvalidArgument("settle_edge is between leaders; write the edge with assoc_add or assoc_delete")
        home, coordinator = shards_of_write(message, self._configuration.schema)
        refusal = self._admit(home)
        if refusal is not None:
            raise refusal
        return coordinator

    def _take(self, forwarded: _Forwarded, unanswered: dict[int, int], answer: pb.Answer, attempt: int) -> None:
        """An answer of a leader: ``unanswered`` maps its slots to the client's."""
        again: dict[int, TaoError] = {}
        if answer.HasField("error"):
            error = error_from_pb(answer.error)
            for slot in unanswered.values():
                self._failed(forwarded, slot, error, attempt, again)
            unanswered.clear()
            self._try_again(forwarded, again, attempt)
            return
        self._budget.earn()
        changes = [shard_messages_from_pb(messages) for messages in answer.write.changes]
        elsewhere = self._apply_own(changes)
        done: list[tuple[int, pb.WriteResult]] = []
        for leader_slot, result in zip(answer.write.slots, answer.write.results, strict=False):
            if leader_slot not in unanswered:
                continue  # failed with a part of the answer that could not be sent
            slot = unanswered.pop(leader_slot)
            if result.HasField("error"):
                self._failed(forwarded, slot, error_from_pb(result.error), attempt, again)
            else:
                done.append((slot, result))
        if elsewhere and done:
            told = [self._hand_on(sibling, messages) for sibling, messages in elsewhere]
            try:
                self._spawn(self._answer_when_told(forwarded, done, changes, told))
            except TaoError:
                # Too busy to wait for them; the write is committed, and that is what its writer has to hear.
                self.siblings_missed += len(told)
                self._answer(forwarded, done, changes)
        else:
            self._answer(forwarded, done, changes)
        self._try_again(forwarded, again, attempt)
        if not answer.more and unanswered:
            for slot in unanswered.values():
                self._fail(forwarded, slot, InternalError("the leader's answer is over and lacks a write"))
            unanswered.clear()

    def _failed(
        self, forwarded: _Forwarded, slot: int, error: TaoError, attempt: int, again: dict[int, TaoError]
    ) -> None:
        # Nothing was written, and the right leader may be found or come up meanwhile. Locks are waited for a moment at
        # a time, so as not to hold up whoever shares the transaction: a commit that waits for a replica keeps them
        # longer, and whoever has time left has not had his turn yet.
        again_helps = isinstance(error, NotMine | Fenced | Unavailable | ShardBlocked)
        again_helps = again_helps and not isinstance(error, DatabaseDown)
        if again_helps and attempt < self._settings.max_attempts:
            again[slot] = error
        else:
            self._fail(forwarded, slot, error)

    def _try_again(self, forwarded: _Forwarded, again: dict[int, TaoError], attempt: int) -> None:
        if not again:
            return
        if not self._budget.spend(self._clock.monotonic()):
            exhausted = Unavailable("no leader took the write, and too much is being asked again already")
            self._give_up(forwarded, again, exhausted)
            return
        try:
            self._spawn(self._send_later(forwarded, again, attempt))
        except TaoError as error:
            for slot in again:
                self._fail(forwarded, slot, error)

    async def _send_later(self, forwarded: _Forwarded, again: dict[int, TaoError], attempt: int) -> None:
        pause = self._settings.first_pause_seconds * 2 ** (attempt - 1)
        if self._clock.monotonic() + pause >= forwarded.deadline:
            self._give_up(forwarded, again, DeadlineExceeded("no leader took the write before its deadline"))
            return
        await asyncio.sleep(pause)
        await self._configuration.refresh()
        self._send(forwarded, again, attempt + 1)

    def _give_up(self, forwarded: _Forwarded, again: dict[int, TaoError], error: TaoError) -> None:
        for slot, last in again.items():
            # Its leader took a write that met a lock; who holds that is to be looked for at the database, and nobody
            # else would do it sooner.
            self._fail(forwarded, slot, last if isinstance(last, ShardBlocked) else error)

    def _apply_own(self, changes: list[ShardMessages]) -> list[tuple[CacheServer, ShardMessages]]:
        """Apply what concerns this server; returns who else of the tier has to be told what."""
        elsewhere: list[tuple[CacheServer, ShardMessages]] = []
        for messages in changes:
            for host in self._hosts(messages.shard):
                if host.name == self._name:
                    self._apply(messages)
                elif not host.down:  # else nobody reads there, and its leader tells it when it is back
                    elsewhere.append((host, messages))
        return elsewhere

    async def _answer_when_told(
        self,
        forwarded: _Forwarded,
        done: list[tuple[int, pb.WriteResult]],
        changes: list[ShardMessages],
        told: list[asyncio.Future[bool]],
    ) -> None:
        heard_all = await asyncio.gather(*told)
        self.siblings_missed += heard_all.count(False)
        self._answer(forwarded, done, changes)

    async def take_in(self, changes: list[ShardMessages]) -> None:
        """Changes of a write that did not come through here: apply them, and return when the servers of this tier that
        they concern have heard, or do not answer."""
        told = [self._hand_on(sibling, messages) for sibling, messages in self._apply_own(changes)]
        heard_all = await asyncio.gather(*told)
        self.siblings_missed += heard_all.count(False)

    def _hand_on(self, sibling: CacheServer, messages: ShardMessages) -> asyncio.Future[bool]:
        """Whether the sibling heard of it, in time."""
        heard: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._siblings.add(sibling, (messages, heard))
        return heard

    def _tell_sibling(self, sibling: CacheServer, told: list[tuple[ShardMessages, asyncio.Future[bool]]]) -> None:
        changes = pb.ApplyChanges(changes=[shard_messages_to_pb(messages) for messages, _ in told])
        request = pb.Request(topology_version=self._configuration.routes.version, apply=changes)

        def take(answer: pb.Answer) -> None:
            has_heard = not answer.HasField("error")
            if not has_heard and self._amends is not None:
                self._amends.owe(sibling, {messages.shard for messages, _ in told})
            for _, heard in told:
                if not heard.done():
                    heard.set_result(has_heard)

        self._links.to(sibling).send(request, self._settings.sibling_timeout_seconds, take)

    def _answer(
        self, forwarded: _Forwarded, done: list[tuple[int, pb.WriteResult]], changes: list[ShardMessages]
    ) -> None:
        for slot, result in done:
            forwarded.results.add(slot, result, changes)
            changes = []  # sent along once, with the first result of this answer
            self.acknowledged[_operation(forwarded, slot)] += 1

    def _fail(self, forwarded: _Forwarded, slot: int, error: TaoError) -> None:
        self.failed[_operation(forwarded, slot)] += 1
        forwarded.results.fail(slot, error)


def shards_of_write(message: pb.Write, schema: Schema) -> tuple[int, int]:
    """The shard of the id that the write names first, and the shard that coordinates it. Raises `RequestError`."""
    if message.WhichOneof("operation") == "obj_add" and not message.obj_add.id:
        return message.obj_add.shard, message.obj_add.shard
    write = write_from_pb(message, _no_allocation)
    named = "id1" if hasattr(write, "id1") else "id"
    return check_id(getattr(write, named, 0), named) >> SHARD_SHIFT, coordinating_shard(write, schema)


def _operation(forwarded: _Forwarded, slot: int) -> str:
    return forwarded.writes.writes[slot].WhichOneof("operation") or "unknown"


def _no_allocation(shard: int) -> int:
    raise AssertionError(f"an object without an id is routed by its shard {shard}, not converted")
