"""A leader's face on both transports: which request goes down which path. Its callers are cache servers and operators,
never applications."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

from tao.cache import GraphCache
from tao.delivery.publisher import Publisher
from tao.leader.elsewhere import Elsewhere
from tao.leader.inverse_path import InversePath
from tao.leader.maintenance_path import Subscribers
from tao.leader.ownership import Ownership
from tao.leader.relay_path import RelayPath
from tao.leader.settling import CopyFence
from tao.leader.write_path import WritePath
from tao.model.errors import InternalError, InvalidArgument, OutcomeUnknown, TaoError
from tao.model.ids import SHARD_SHIFT
from tao.model.ports import Clock
from tao.model.relay import Touch
from tao.model.rows import IntentRow
from tao.model.writes import SettleEdge, Write
from tao.observability.logs import Logger
from tao.planning.coordination import names_far_side
from tao.planning.write_plan import shards_of
from tao.routing.deadlines import work_seconds
from tao.serving.authority import LEADER_RULES, check_role
from tao.serving.configuration import Configuration
from tao.serving.inspection import inspect
from tao.serving.read_service import ReadService
from tao.serving.write_results import WriteResults
from tao.wire.convert import error_to_pb, outcome_to_pb, shard_messages_to_pb, touch_from_pb, write_from_pb
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb

MAX_RESERVED_IDS: Final = 10_000
"""Ids in one reservation: at 64 a millisecond they reach 156 ms ahead of the clock."""


class LeaderService:
    """The `RequestHandler` of a leader."""

    def __init__(
        self,
        cache: GraphCache,
        reads: ReadService,
        writes: WritePath,
        inverses: InversePath,
        copy_fence: CopyFence,
        ownership: Ownership,
        elsewhere: Elsewhere,
        relays: RelayPath,
        publisher: Publisher,
        configuration: Configuration,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        log: Logger,
    ) -> None:
        self._writes: Final = writes
        self._inverses: Final = inverses
        self._copy_fence: Final = copy_fence
        self._ownership: Final = ownership
        self._elsewhere: Final = elsewhere
        self._relays: Final = relays
        self._configuration: Final = configuration
        self._clock: Final = clock
        self._spawn: Final = spawn
        self._log: Final = log
        subscribers = Subscribers(publisher)
        self._paths: Final[dict[str, Callable[[pb.Request, Reply], None]]] = {
            "read": reads.handle,
            "write": self._write,
            "subscribe": subscribers.subscribe,
            "acknowledge": subscribers.acknowledge,
            "reserve_ids": self._reserve_ids,
            "get_topology": lambda _, reply: reply.send(pb.Answer(topology=configuration.topology_document())),
            "get_schema": lambda _, reply: reply.send(pb.Answer(schema=configuration.schema_document())),
            "watch": configuration.watch,
            "inspect": lambda request, reply: reply.send(
                pb.Answer(inspection=inspect(cache, reads.traffic, request.inspect))
            ),
            "invalidate": self._invalidate,
            "settle_pairs": self._start_settling,
            "relay": relays.handle,
            "touch_keys": self._start_touching,
            "apply": elsewhere.apply,
        }

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Synchronous: what the cache can answer is answered before this returns."""
        kind = request.WhichOneof("body") or "nothing"
        path = self._paths.get(kind)
        if path is None:
            raise InvalidArgument(f"a leader does not serve {kind!r} requests; ask a follower")
        check_role(LEADER_RULES, kind, reply.peer.role)
        path(request, reply)

    def _write(self, request: pb.Request, reply: Reply) -> None:
        batch = request.write
        if not batch.writes:
            reply.send(pb.Answer(write=pb.WriteAnswer()))
            return
        if any(write.HasField("settle_edge") for write in batch.writes):
            check_role(LEADER_RULES, "settle_edge", reply.peer.role)
        results = WriteResults(reply, len(batch.writes), want_changes=batch.want_changes)
        deadline = self._clock.monotonic() + work_seconds(request.deadline_ms)
        for slot in self._elsewhere.take(batch, results, deadline):
            try:
                self._spawn(self._write_one(slot, batch, deadline, results))
            except TaoError as error:
                # Not for the whole request: the writes before this one have begun.
                results.fail(slot, error)

    async def _write_one(self, slot: int, batch: pb.WriteBatch, deadline: float, results: WriteResults) -> None:
        try:
            write = write_from_pb(batch.writes[slot], self._allocate)
            if isinstance(write, SettleEdge):
                await self._copy_fence.admit(batch)
            self._writes.check(write)
            self._check_far_end(write)
            written, pending = await self._inverses.write(write, deadline, sub_write=isinstance(write, SettleEdge))
        except TaoError as error:
            results.fail(slot, error)
        except Exception as error:
            results.fail(slot, InternalError(f"{type(error).__name__} in the write path; see the leader's log"))
            raise
        else:
            if pending and names_far_side(write, self._configuration.schema):
                # Its caller reads that list next, which has to have what was acknowledged.
                unknown = OutcomeUnknown("the edge is written at its id2, and follows at its id1 by repair")
                results.fail(slot, unknown, written.messages)
                return
            result = outcome_to_pb(written.outcome, written.messages, inverse_pending=pending)
            results.add(slot, result, written.messages)

    def _check_far_end(self, write: Write) -> None:
        """An inverse on a shard that does not exist could never be written: its edge would be half an edge for ever.
        Raises `InvalidArgument`."""
        shards = self._configuration.routes.shards
        schema = self._configuration.schema
        far = max(shards_of(write, schema))
        if far >= shards:
            raise InvalidArgument(f"there is no shard {far} for the inverse edge; ids lie on shards 0 to {shards - 1}")

    def _allocate(self, shard: int) -> int:
        self._ownership.row(shard)
        return self._writes.ids.allocate(shard, self._clock.unix_ms())

    def _reserve_ids(self, request: pb.Request, reply: Reply) -> None:
        count = request.reserve_ids.count
        if not 1 <= count <= MAX_RESERVED_IDS:
            raise InvalidArgument(f"{count} ids cannot be reserved at once; ask for 1 to {MAX_RESERVED_IDS}")
        if self._elsewhere.reserve_ids(request, reply):
            return
        ids = [self._allocate(request.reserve_ids.shard) for _ in range(count)]
        reply.send(pb.Answer(reserved_ids=pb.ReservedIds(ids=ids)))

    def _invalidate(self, request: pb.Request, reply: Reply) -> None:
        asked = request.invalidate
        cause = f"asked by {reply.peer.name}"
        done = self._relays.void(asked.shards, cause, otypes=tuple(asked.otypes), atypes=tuple(asked.atypes))
        reply.send(pb.Answer(invalidated=pb.Invalidated(shards=done)))

    def _start_touching(self, request: pb.Request, reply: Reply) -> None:
        """For `tao repair`: lists whose count is not that of their edges."""
        touches = [touch_from_pb(touch) for touch in request.touch_keys.touches]
        for touch in touches:
            self._ownership.row(touch.shard)
        self._spawn(self._touch_keys(touches, request, reply))

    async def _touch_keys(self, touches: list[Touch], request: pb.Request, reply: Reply) -> None:
        try:
            await self._relays.touches.touch(touches, self._clock.monotonic() + work_seconds(request.deadline_ms))
        except TaoError as error:
            reply.send(pb.Answer(error=error_to_pb(error)))
        else:
            reply.send(pb.Answer(touched_keys=pb.TouchedKeys(keys=len(touches))))

    def _start_settling(self, request: pb.Request, reply: Reply) -> None:
        for pair in request.settle_pairs.pairs:
            self._ownership.row(pair.low_id >> SHARD_SHIFT)
        self._spawn(self._settle_pairs(request, reply))

    async def _settle_pairs(self, request: pb.Request, reply: Reply) -> None:
        """For `tao repair`, and for a leader that had the shard before: copy the coordinator's rows of these pairs to
        their other sides."""
        answer = pb.SettledPairs()
        try:
            for pair in request.settle_pairs.pairs:
                intent = IntentRow(pair.low_id, pair.high_id, tuple(pair.atypes), pair.token, self._clock.unix_ms())
                told = await self._inverses.settle_pair(intent)
                if told is not None:
                    answer.settled += 1
                    if reply.peer.role == "leader":  # an operator has no caches, and asks for thousands
                        answer.changes.extend(map(shard_messages_to_pb, told))
        except TaoError as error:
            reply.send(pb.Answer(error=error_to_pb(error)))
        else:
            reply.send(pb.Answer(settled_pairs=answer))
