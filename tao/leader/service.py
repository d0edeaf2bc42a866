"""Handle the requests of a leader, on both transports. The callers are cache servers and operators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from tao.cache import GraphCache
from tao.delivery.publisher import Publisher
from tao.leader.audited_writes import WriteAudit
from tao.leader.delivery_path import Subscribers
from tao.leader.inverse_path import InversePath
from tao.leader.jobs import fold_job_id, purge_job_id
from tao.leader.node_pages import NodePages
from tao.leader.ownership import Ownership
from tao.leader.relay_path import RelayPath
from tao.leader.remote_inverses import JOINED_EDGES, InverseFence
from tao.leader.replica_shards import ForwardedWrites
from tao.leader.write_path import WritePath, Written, bug_after_commit
from tao.model.changes import ShardMessages
from tao.model.errors import (
    InternalError,
    InvalidArgument,
    OutcomeUnknown,
    RequestError,
    TaoError,
    Unavailable,
    UnknownShard,
)
from tao.model.ids import MAX_RESERVED_IDS, SHARD_SHIFT
from tao.model.relay import Touch
from tao.model.rows import IntentRow
from tao.model.tokens import PendingInverse
from tao.model.topology import CacheServer
from tao.model.writes import (
    AddJob,
    JoinEdges,
    NodeSetState,
    ObjAdd,
    ObjDelete,
    ObjUpdate,
    PlaceEdges,
    SettleEdge,
    Write,
    WriteOutcome,
)
from tao.planning.coordination import names_far_side, shards_of
from tao.routing.budgets import work_seconds
from tao.serving.access import WriteCheck
from tao.serving.audit import recorded_caller
from tao.serving.configuration import ServerContext
from tao.serving.forward_path import WriteResults, admitted_writes, shards_of_write
from tao.serving.read_service import ReadService
from tao.serving.requests import LEADER_RULES, CacheService, check_role
from tao.serving.server import MAX_TASKS
from tao.wire.convert import (
    coordinating_shards,
    error_to_pb,
    outcome_to_pb,
    shard_messages_to_pb,
    touch_from_pb,
    write_from_pb,
)
from tao.wire.identity import PASSING_ON, PeerIdentity
from tao.wire.session import AnswerAtOnce, Reply, failure
from tao.wire.v1 import session_pb2 as pb

_PLAIN_OPERATIONS: Final = frozenset(
    {"assoc_add", "assoc_delete", "obj_add", "obj_update", "obj_delete", "settle_edge", "flush_counter"}
)
"""What mostly needs one transaction of its leader and nothing else: no look at other rows before. An added object does
if its id is reserved."""


class WriteRequests:
    """Handles requests that write: write batches, reservations of ids, and settlements of pairs."""

    def __init__(
        self,
        context: ServerContext,
        ownership: Ownership,
        writes: WritePath,
        inverses: InversePath,
        inverse_fence: InverseFence,
        forwarded: ForwardedWrites,
        pages: NodePages,
    ) -> None:
        self._pages: Final = pages
        self._configuration: Final = context.configuration
        self._clock: Final = context.clock
        self._spawn: Final = context.spawn_as("write")
        self._ownership: Final = ownership
        self._writes: Final = writes
        self._inverses: Final = inverses
        self._inverse_fence: Final = inverse_fence
        self._forwarded: Final = forwarded
        self._audit: Final = WriteAudit(context)
        self._log: Final = context.log
        self._ended: list[tuple[int, Write, WriteResults, Written | TaoError]] = []
        self._not_run = 0
        """Writes whose tasks have not run yet, so that they are not queued. What comes after them must not overtake."""
        self.apply_forwarded: Final = forwarded.apply

    def check_owned(self, shard: int) -> None:
        """Raise `NotMine` unless this leader owns the shard."""
        self._ownership.row(shard)

    def write(self, request: pb.Request, reply: Reply) -> None:
        """Execute or forward a batch of writes, each with its own result. Raises `Unauthorized` for a copy that no
        leader sent."""
        batch = request.write
        if not batch.writes:
            reply.send(pb.Answer(write=pb.WriteAnswer()))
            return
        has_copies = any(write.HasField("settle_edge") for write in batch.writes)
        if has_copies:
            check_role(LEADER_RULES, "settle_edge", reply.peer.role)
        results = WriteResults(reply, len(batch.writes), want_changes=batch.want_changes)
        deadline = self._clock.monotonic() + work_seconds(request.deadline_ms)
        here = admitted_writes(self._configuration.access, request, reply.peer, results)
        if self._forwarded.may_pass_on(reply.peer):
            here = self._forwarded.forward(request, here, results, deadline, reply.peer)
        check = self._configuration.access.writer(request, reply.peer)
        # Rights to the stored object, the audit log, and shards that are being taken need more than a transaction.
        is_plain = check is None and self._ownership.complete and not self._configuration.schema.has_audited
        joins, here = _joins_in(batch, here) if has_copies else ((), here)
        for slots in joins:
            try:
                self._spawn(self._join_copies(slots, request, deadline, results))
            except TaoError as error:
                _fail_all(slots, results, error)
        for slot in here:
            try:
                may_begin = is_plain and not self._not_run
                if not (may_begin and self._begin_plain(slot, batch, deadline, results)):
                    self._spawn(self._write_one(slot, request, deadline, results, reply.peer, check))
                    self._not_run += 1
            except TaoError as error:
                # The error is this write's, not the request's: the writes before it have begun.
                results.fail(slot, error)
            except Exception as error:  # noqa: BLE001 - logged, and the other writes are begun
                self._fail_by_bug(slot, results, error)

    def _fail_by_bug(self, slot: int, results: WriteResults, error: Exception) -> None:
        self._log.error("write_failed", exc_info=error)
        results.fail(slot, InternalError(f"{type(error).__name__} in the write path; see the leader's log"))

    def _begin_plain(self, slot: int, batch: pb.WriteBatch, deadline: float, results: WriteResults) -> bool:
        """Begin a write that needs nothing but a transaction here, without a task: a task and its coroutines are a
        tenth of what a write costs. Returns False, with nothing begun, for any other write. Raises `TaoError`."""
        message = batch.writes[slot]
        operation = message.WhichOneof("operation")
        if operation not in _PLAIN_OPERATIONS or self._writes.waiting >= MAX_TASKS:
            return False
        is_copy = operation == "settle_edge"
        if is_copy and not self._inverse_fence.admit_known(batch):
            return False
        write = write_from_pb(message)
        self._writes.check(write)
        if isinstance(write, ObjAdd) and (write.allocated or not self._writes.ids.admit_known(write.id)):
            return False

        def end(result: Written | TaoError) -> None:
            self._ended.append((slot, write, results, result))
            if len(self._ended) == 1:
                # In a later turn than the delivery of the change: a follower applies what comes first, and what comes
                # with the answer is repeated then. And results of one transaction go out together.
                asyncio.get_running_loop().call_soon(self._answer_ended)

        return self._inverses.begin(write, deadline, end, sub_write=is_copy and not batch.background)

    def _answer_ended(self) -> None:
        ended, self._ended = self._ended, []
        for slot, write, results, result in ended:
            try:
                if isinstance(result, TaoError):
                    results.fail(slot, result)
                elif result.outcome.error is not None:
                    results.fail(slot, result.outcome.error)
                else:
                    self._answer(slot, write, result, results, pending=False)
            except Exception as error:  # noqa: BLE001 - logged, and the other writes are answered
                # Its slot may be counted already. At its deadline, the caller takes the outcome as unknown.
                self._log.error("write_not_answered", exc_info=error)

    async def _write_one(
        self,
        slot: int,
        request: pb.Request,
        deadline: float,
        results: WriteResults,
        peer: PeerIdentity,
        check: WriteCheck | None,
    ) -> None:
        self._not_run -= 1
        at_a_bug: type[TaoError] = InternalError
        try:
            message = request.write.writes[slot]
            await self._wait_taken(message, deadline)
            write = write_from_pb(message)
            if check is not None and isinstance(write, ObjUpdate | ObjDelete):
                write = msgspec.structs.replace(write, writable=check.writable)
            if isinstance(write, SettleEdge):
                await self._inverse_fence.admit(request.write)
            self._writes.check(write)
            if isinstance(write, ObjAdd) and write.allocated:
                allocated = await self._writes.ids.allocate(write.id >> SHARD_SHIFT, deadline=deadline)
                write = msgspec.structs.replace(write, id=allocated)
            if isinstance(write, AddJob):
                write = await self._with_job_id(write, deadline)
            if isinstance(write, NodeSetState):
                job_id = await self._writes.ids.allocate(write.id >> SHARD_SHIFT, deadline=deadline)
                write = msgspec.structs.replace(write, job_id=job_id)
            self._check_far_end(write)
            if isinstance(write, ObjAdd) and not write.allocated:
                await self._writes.ids.admit(write.id, deadline)
            at_a_bug = OutcomeUnknown  # it may come after the commit from here on
            if isinstance(write, SettleEdge):
                # The copies of a page of a node are many, and no caller waits for them.
                is_sub_write = not request.write.background
                written, pending = await self._inverses.write(write, deadline, sub_write=is_sub_write)
            elif self._configuration.schema.has_audited:
                caller = recorded_caller(request, peer)
                written, pending = await self._execute_audited(write, deadline, check, caller)
            else:
                written, pending = await self._execute(write, deadline, check)
        except TaoError as error:
            results.fail(slot, error)
        except Exception as error:
            results.fail(slot, at_a_bug(f"{type(error).__name__} in the write path; see the leader's log"))
            raise
        else:
            self._answer(slot, write, written, results, pending=pending)

    async def _join_copies(
        self, slots: Sequence[int], request: pb.Request, deadline: float, results: WriteResults
    ) -> None:
        """Join the copies of these slots in one write."""
        at_a_bug: type[TaoError] = InternalError
        try:
            await self._wait_taken(request.write.writes[slots[0]], deadline)
            copies = [write_from_pb(request.write.writes[slot]) for slot in slots]
            await self._inverse_fence.admit(request.write)
            for copy in copies:
                self._writes.check(copy)
            write = JoinEdges(tuple(copy for copy in copies if isinstance(copy, SettleEdge)))
            at_a_bug = OutcomeUnknown  # it may come after the commit from here on
            is_sub_write = not request.write.background
            written, _ = await self._inverses.write(write, deadline, sub_write=is_sub_write)
        except TaoError as error:
            _fail_all(slots, results, error)
        except Exception as error:
            _fail_all(slots, results, at_a_bug(f"{type(error).__name__} in the write path; see the leader's log"))
            raise
        else:
            messages: Sequence[ShardMessages] = written.messages
            for slot, joined in zip(slots, written.outcome.joined, strict=True):
                result = outcome_to_pb(WriteOutcome(found=True, registers=joined.registers, node=joined.node))
                results.add(slot, result, messages)
                messages = ()  # those of all slots went with the first

    async def _wait_taken(self, message: pb.Write, deadline: float) -> None:
        """Wait for a shard that is being taken. Raises as `Ownership.wait_taken`."""
        if not self._ownership.complete:
            _, coordinator = shards_of_write(message, self._configuration.schema)
            await self._ownership.wait_taken(coordinator, deadline - self._clock.monotonic())

    def _answer(self, slot: int, write: Write, written: Written, results: WriteResults, *, pending: bool) -> None:
        try:
            result, messages = self._result_of(write, written, pending=pending)
        except Exception as error:  # noqa: BLE001 - logged and answered
            self._answer_unknown(slot, written, results, error)
        else:
            results.add(slot, result, messages)

    def _answer_unknown(self, slot: int, written: Written, results: WriteResults, error: Exception) -> None:
        """Answer a write that is committed and met a bug afterwards."""
        self._log.error("write_failed", exc_info=error)
        results.fail(slot, bug_after_commit(error), written.messages)

    def _result_of(
        self, write: Write, written: Written, *, pending: bool
    ) -> tuple[pb.WriteResult, Sequence[ShardMessages]]:
        """Return the result of a committed write, with the changes that the caches of its caller apply."""
        if pending and names_far_side(write, self._configuration.schema):
            # The caller may read that list next, which must contain what was acknowledged.
            unknown = OutcomeUnknown("the edge is written at its id2; repair will write it at its id1")
            return pb.WriteResult(error=error_to_pb(unknown)), written.messages
        lists = self._pending_lists(written.intent) if pending else ()
        # The caller does not learn the version of an object that was left alone either.
        is_left_alone = bool(written.outcome.otype) and not written.outcome.found
        messages = () if is_left_alone else written.messages
        return outcome_to_pb(written.outcome, messages, lists), messages

    async def _with_job_id(self, write: AddJob, deadline: float) -> AddJob:
        """Return the write with the id of its job. Raises `InvalidArgument`, and as `ObjectIds.allocate` and
        `ObjectIds.admit`."""
        if not write.allocated:
            shard = write.job.id >> SHARD_SHIFT
            if write.job.id in (purge_job_id(shard), fold_job_id(shard)):
                raise InvalidArgument(f"{write.job.id} is the id of the shard's own job; reserve another one")
            await self._writes.ids.admit(write.job.id, deadline)
            return write
        allocated = await self._writes.ids.allocate(write.job.id >> SHARD_SHIFT, deadline=deadline)
        return AddJob(msgspec.structs.replace(write.job, id=allocated), allocated=True)

    async def _execute(self, write: Write, deadline: float, check: WriteCheck | None) -> tuple[Written, bool]:
        if isinstance(write, PlaceEdges):
            return await self._pages.place(write, deadline), False
        written, pending = await self._inverses.write(write, deadline)
        if check is not None and isinstance(write, ObjUpdate | ObjDelete):
            refusal = check.judge(write.id, written.outcome.otype)
            if refusal is not None:
                raise refusal
        return written, pending

    async def _execute_audited(
        self, write: Write, deadline: float, check: WriteCheck | None, caller: str
    ) -> tuple[Written, bool]:
        """Execute a write, and record how it ends if its type asks for that."""
        record = self._audit.begin(write, caller)
        if record is None:
            return await self._execute(write, deadline, check)
        try:
            written, pending = await self._execute(write, deadline, check)
        except BaseException as error:
            record.failed(error)
            raise
        record.done(written, pending=pending)
        return written, pending

    def _pending_lists(self, intent: IntentRow | None) -> list[PendingInverse]:
        assert intent is not None, "a write whose inverse is pending has an intent"
        schema = self._configuration.schema
        known = [schema.atype(atype) for atype in intent.atypes if schema.knows_atype(atype)]
        # An edge of a type with states is missing in the list of one state, and may be left in that of another.
        inverses = [number for atype in known if (far := schema.inverse_of(atype)) for number in far.state_numbers]
        return [PendingInverse(intent.high_id, each, intent.low_id) for each in inverses]

    def _check_far_end(self, write: Write) -> None:
        """Check that the shard of the inverse exists; otherwise the edge would be half an edge for ever.

        Raises `UnknownShard`."""
        shards = self._configuration.routes.shards
        schema = self._configuration.schema
        far = max(shards_of(write, schema))
        if far >= shards:
            raise UnknownShard(f"there is no shard {far} for the inverse edge; ids lie on shards 0 to {shards - 1}")

    def reserve_ids(self, request: pb.Request, reply: Reply) -> None:
        """Reserve ids on a shard, which are an interval, here or in another region. Raises `InvalidArgument`,
        `NotMine` or `DeadlineExceeded`."""
        asked = request.reserve_ids
        if not 1 <= asked.count <= MAX_RESERVED_IDS:
            raise InvalidArgument(f"{asked.count} ids cannot be reserved at once; reserve 1 to {MAX_RESERVED_IDS}")
        if self._forwarded.may_pass_on(reply.peer) and self._forwarded.reserve_ids(request, reply):
            return
        self._ownership.row(asked.shard)
        deadline = self._clock.monotonic() + work_seconds(request.deadline_ms)
        self._spawn(self._reserve_ids(asked, deadline, reply))

    async def _reserve_ids(self, asked: pb.ReserveIds, deadline: float, reply: Reply) -> None:
        try:
            first = await self._writes.ids.allocate(asked.shard, asked.count, deadline=deadline)
        except TaoError as error:
            reply.send(pb.Answer(error=error_to_pb(error)))
            return
        reserved = pb.ReservedIds(first=first, count=asked.count)
        if not asked.as_interval:
            # A client of the former version reads this list.
            reserved.ids.extend(range(first, first + asked.count))
        reply.send(pb.Answer(reserved_ids=reserved))

    def settle_pairs(self, request: pb.Request, reply: Reply) -> None:
        """Copy the coordinator's rows of pairs to their other sides. Raises `NotMine`.

        The callers are followers whose reader's token names a pending inverse, `tao repair`, and leaders that had the
        coordinating shard before. What a follower asks of a shard that another region masters is passed on, once."""
        if reply.peer.role == "follower" and self._forwarded.settle_pairs(request, reply):
            return
        for shard in coordinating_shards(request.settle_pairs):
            self._ownership.row(shard)
        self._spawn(self._settle_pairs(request, reply, self._clock.monotonic() + work_seconds(request.deadline_ms)))

    async def _settle_pairs(self, request: pb.Request, reply: Reply, deadline: float) -> None:
        answer = pb.SettledPairs()
        is_operator = reply.peer.role == "operator"
        for pair in request.settle_pairs.pairs:
            atypes = self._configuration.schema.declared(pair.atypes)
            intent = IntentRow(pair.low_id, pair.high_id, atypes, pair.token, self._clock.unix_ms())
            try:
                messages = await self._inverses.settle_pair(intent, deadline - self._clock.monotonic())
            except TaoError as error:
                if is_operator:  # `tao repair` settles thousands of pairs, and sends the request again for the rest
                    continue
                if isinstance(error, RequestError):
                    reply.send(pb.Answer(error=error_to_pb(error)))
                    return
                pending = Unavailable(
                    f"the edge between {pair.low_id} and {pair.high_id} is not written at its second end yet: "
                    f"{error.message}"
                )
                reply.send(pb.Answer(error=error_to_pb(pending)))
                return
            answer.settled += 1
            if not is_operator:
                answer.changes.extend(map(shard_messages_to_pb, messages))
        for shards in request.settle_pairs.shards:
            left = deadline - self._clock.monotonic()
            try:
                messages = await self._inverses.settle_between(shards.low_shard, shards.high_shard, left)
            except TaoError as error:
                why = f"shard {shards.low_shard} owes inverse edges to shard {shards.high_shard}: {error.message}"
                reply.send(pb.Answer(error=error_to_pb(Unavailable(why))))
                return
            answer.settled += 1
            answer.changes.extend(map(shard_messages_to_pb, messages))
        reply.send(pb.Answer(settled_pairs=answer))


def _joins_in(batch: pb.WriteBatch, here: Sequence[int]) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
    """Return the slots of copies of edges with states, those that are joined in one write together, and the other
    slots."""
    copies: dict[tuple[int, int], list[int]] = {}
    for slot in here:
        copy = batch.writes[slot].settle_edge
        if copy.HasField("registers"):
            copies.setdefault((copy.id1 >> SHARD_SHIFT, copy.atype), []).append(slot)
    groups = [
        slots[start : start + JOINED_EDGES] for slots in copies.values() for start in range(0, len(slots), JOINED_EDGES)
    ]
    joins = [group for group in groups if len(group) > 1]
    joined = {slot for group in joins for slot in group}
    return joins, [slot for slot in here if slot not in joined]


def _fail_all(slots: Iterable[int], results: WriteResults, error: TaoError) -> None:
    for slot in slots:
        results.fail(slot, error)


_CLOCK_SECONDS: Final = 1.0
"""Longest wait for the clock of another region's leader."""


class LeaderService(CacheService):
    """The `RequestHandler` of a leader."""

    def __init__(
        self,
        context: ServerContext,
        cache: GraphCache,
        reads: ReadService,
        writes: WriteRequests,
        relays: RelayPath,
        publisher: Publisher,
        others: Mapping[str, Callable[[pb.Request, Reply], None]],
    ) -> None:
        """``others``: what handles the kinds of requests of which this service knows nothing."""
        self._clock: Final = context.clock
        self._spawn: Final = context.spawn_as("touch")
        self._name: Final = context.name
        self._links: Final = context.links
        self._reads: Final = reads
        self._writes: Final = writes
        self._relays: Final = relays
        subscribers = Subscribers(publisher)
        super().__init__(
            "leader",
            context,
            cache,
            reads,
            {
                "write": writes.write,
                "subscribe": subscribers.subscribe,
                "acknowledge": subscribers.acknowledge,
                "reserve_ids": writes.reserve_ids,
                "get_clock": self._get_clock,
                "invalidate": self._invalidate,
                "settle_pairs": writes.settle_pairs,
                "relay": relays.handle,
                "relay_by_reference": relays.handle,
                "touch_keys": self._start_touching,
                "apply": writes.apply_forwarded,
                **others,
            },
        )

    def answer_at_once(self, request: bytes, peer: PeerIdentity) -> AnswerAtOnce | None:
        """Answer the hits of a batch that another cache asks for itself: see `tao.wire.session.AtOnceHandler`."""
        if peer.role not in PASSING_ON:
            return None
        return self._reads.fill_at_once(request, self._configuration.routes.version)

    def _invalidate(self, request: pb.Request, reply: Reply) -> None:
        asked = request.invalidate
        cause = f"requested by {reply.peer.name}"
        shards = self._relays.invalidate(asked.shards, cause, otypes=tuple(asked.otypes), atypes=tuple(asked.atypes))
        reply.send(pb.Answer(invalidated=pb.Invalidated(shards=shards)))

    def _get_clock(self, request: pb.Request, reply: Reply) -> None:
        """Answer with the clock by which this leader stamps operations, or ask another one for its own. Raises
        `TopologyError` for an unknown leader."""
        asked = request.get_clock.leader
        if asked in ("", self._name):
            clock = pb.ServerClock(unix_us=self._clock.unix_ms() * 1000, leader=self._name if asked else "")
            reply.send(pb.Answer(clock=clock))
            return
        routes = self._configuration.routes
        if routes.locate(asked).role != "leader" or reply.peer.role == "leader":
            raise InvalidArgument(f"{asked} is not a leader that {self._name} asks for its clock")
        self._spawn(self._relay_clock(routes.server(asked), reply))

    async def _relay_clock(self, leader: CacheServer, reply: Reply) -> None:
        request = pb.Request(get_clock=pb.GetClock(leader=leader.name))
        try:
            answer = await self._links.to(leader).ask(request, _CLOCK_SECONDS)
        except TaoError as error:
            reply.send(failure(error))
        else:
            reply.send(pb.Answer(clock=answer.clock))

    def _start_touching(self, request: pb.Request, reply: Reply) -> None:
        """Touch lists whose count differs from their edges, for `tao repair`."""
        touches = [touch_from_pb(touch) for touch in request.touch_keys.touches]
        for touch in touches:
            self._writes.check_owned(touch.shard)
        self._spawn(self._touch_keys(touches, request, reply))

    async def _touch_keys(self, touches: list[Touch], request: pb.Request, reply: Reply) -> None:
        try:
            await self._relays.touches.touch(touches, self._clock.monotonic() + work_seconds(request.deadline_ms))
        except TaoError as error:
            reply.send(pb.Answer(error=error_to_pb(error)))
        else:
            reply.send(pb.Answer(touched_keys=pb.TouchedKeys(keys=len(touches))))
