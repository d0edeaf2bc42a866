"""Write edges whose other side belongs to another leader or another database.

The coordinator, which is the leader of the smaller id's shard, commits its side together with an *intent*. It then
has the other leader copy its rows, and removes the intent. Only one write of a pair runs at a time, until the copy
is acknowledged or can no longer happen; so an older copy never overtakes a newer one. A failure leaves the intent,
and this leader remembers the pair. It settles the pair as soon as the other leader answers again, or when a read asks
for it. The next write of the pair at one side settles it, too. The intents of a dead leader are found by a scan.

A write of both sides in one transaction neither leaves an intent nor reads one. An older intent of its pair stays, and
is settled by the rows as they are then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import msgspec

from tao.leader.ownership import Ownership
from tao.leader.pair_holds import PairCopy, PairHold, Settlement, after_first_commit, after_raise, before_first_commit
from tao.leader.pair_locks import PairLocks
from tao.leader.pending_pairs import PendingPairs, RetryTimes
from tao.leader.remote_inverses import Copied, Deposed, OtherLeaders, may_still_be_written, unknown_outcome_of
from tao.leader.write_path import WritePath, Written, forget_intent_of
from tao.model.changes import ShardMessages
from tao.model.edge_block import decode_block
from tao.model.edge_states import NO_OPERATION, EdgeRegisters
from tao.model.errors import (
    DatabaseDown,
    DatabaseFull,
    DeadlineExceeded,
    Fenced,
    MasterReadOnly,
    NotMine,
    OutcomeUnknown,
    Overloaded,
    RequestError,
    RetryableError,
    TaoError,
    Unavailable,
)
from tao.model.graph import MAX_TIME, Edge, EdgeKey
from tao.model.ids import SHARD_SHIFT
from tao.model.ports import IntentReads, WriteStore
from tao.model.queries import EdgesQuery
from tao.model.rows import IntentKey, IntentRow, ShardRow
from tao.model.writes import (
    AnnounceIntent,
    AssocAdd,
    AssocChangeType,
    AssocDelete,
    AssocMerge,
    Coordinator,
    SettleEdge,
    Write,
    WriteOutcome,
)
from tao.observability.metrics import Metrics
from tao.planning.coordination import bounds_length, claim_of, coordinator_side, edges_of, names_far_side, scope_of
from tao.planning.draft import SchemaBehind, coordinator_edges_of, settle_writes
from tao.serving.configuration import ServerContext

_PAUSE_SECONDS: Final = 0.05
"""Pause before the first retry at the other side, even after an immediate refusal. It doubles, up to ten times this."""

_INTENTS_READ: Final = 2_000
"""Intents read at once, beyond those of the pairs that are known."""


@dataclass(frozen=True, slots=True)
class InverseSettings:
    """Bounds of writes of pairs."""

    settle_timeout_seconds: float = 2.0
    """Maximum for one attempt at the other leader. It is less when the writer's deadline is nearer, so that the
    writer learns the outcome. A writer that named the coordinator's side waits for one attempt, one that named the
    far side for as many as it takes."""

    settle_linger_seconds: float = 5.0
    """How long an unacknowledged copy may still be executing after its deadline: the bound on the other leader's
    transaction, and a margin. The pair is not written meanwhile."""

    max_waiting_per_pair: int = 256
    """Writes of one pair that may wait for each other."""

    contact_seconds: float = 0.25
    """Interval between two tries to reach a leader at which inverses are pending. A cut that ends is noticed within
    this time of the link's recovery."""

    repair_seconds: float = 2.0
    """Interval between two looks for intents that no leader remembers, as those whose removal failed. When a leader
    takes a shard, it looks for the shard's intents at once."""

    repair_age_seconds: float = 10.0
    """Age above which an intent counts as left over. It exceeds the deadlines of all steps of a write, so a younger
    intent may still be in progress. It is also the longest pause between two tries of one pair."""

    repair_batch: int = 100
    """Pairs settled concurrently at one leader."""

    shards_per_search: int = 128
    """Most shards whose intents are looked for with one statement. The statements of one database are spread over
    ``repair_seconds``."""


class InversePath:
    """Executes writes of any kind, including the mirrors of edges."""

    def __init__(
        self,
        context: ServerContext,
        settings: InverseSettings,
        writes: WritePath,
        ownership: Ownership,
        others: OtherLeaders,
        read_store: IntentReads,
        write_store: WriteStore,
    ) -> None:
        self._writes: Final = writes
        self._ownership: Final = ownership
        self._others: Final = others
        self._read_store: Final = read_store
        self._write_store: Final = write_store
        self._configuration: Final = context.configuration
        self._clock: Final = context.clock
        self._spawn: Final = context.spawn_as("inverse")
        self._settings: Final = settings
        self._log: Final = context.log
        self._pairs: Final = PairLocks(settings.max_waiting_per_pair)
        self._intents_found: Final = asyncio.Event()
        times = RetryTimes(settings.contact_seconds, settings.repair_age_seconds)
        self._pending: Final = PendingPairs(times, on_first=self._intents_found.set)
        self._lingering: Final[dict[IntentKey, PairHold]] = {}
        self._contacts: Final[set[str]] = set()
        self._settlements: Final[dict[IntentKey, Settlement]] = {}
        self._searched: Final[dict[int, int]] = {}
        """Shard whose intents were all looked for → the generation under which that was done."""
        self._shards_taken: Final = asyncio.Event()
        self.settled_later = 0
        self.left_pending = 0

    @property
    def pairs_held(self) -> int:
        """Return the number of pairs being written now."""
        return len(self._pairs)

    @property
    def pairs_pending(self) -> int:
        """Return the number of pairs whose inverse is known to be pending."""
        return len(self._pending)

    async def write(self, write: Write, deadline: float, *, sub_write: bool = False) -> tuple[Written, bool]:
        """Execute a checked write.

        Returns the result, and whether the inverse is still pending. Raises as `WritePath.commit`."""
        ids, _, shards = scope_of(write, self._configuration.schema)
        if ids is None:
            return await self._writes.commit(write, deadline, both_sides=True, sub_write=sub_write), False
        pair = IntentKey(*ids)
        if self._writes.owns_together(shards) and not self._pairs.holds(pair):
            with self._pairs.shared(pair):
                return await self._writes.commit(write, deadline, both_sides=True), False
        needs_far_side = names_far_side(write, self._configuration.schema)
        async with self._held(pair, deadline - self._clock.monotonic(), needs_far_side=needs_far_side) as hold:
            if isinstance(write, AssocChangeType) and self._changes_far_side(write, pair):
                return await self._change_far_side(write, deadline, hold)
            return await self._commit_and_settle(write, deadline, hold)

    def begin(
        self, write: Write, deadline: float, on_done: Callable[[Written | TaoError], None], *, sub_write: bool = False
    ) -> bool:
        """Execute a checked write that needs nothing but a transaction here. Returns False, with nothing begun, for
        any other write. ``on_done`` takes what `WritePath.begin` passes. Raises as `WritePath.begin`."""
        scope = scope_of(write, self._configuration.schema)
        if not self._writes.owns_together(scope.shards):
            return False
        if scope.pair is None:
            self._writes.begin(write, scope, deadline, on_done, both_sides=True, sub_write=sub_write)
            return True
        pair, pairs = IntentKey(*scope.pair), self._pairs
        if pairs.holds(pair):
            return False

        def end(result: Written | TaoError) -> None:
            pairs.unshare(pair)
            on_done(result)

        self._writes.begin(write, scope, deadline, end, both_sides=True)
        pairs.share(pair)
        return True

    def _changes_far_side(self, write: AssocChangeType, pair: IntentKey) -> bool:
        """Return whether the edge changes between a type with an inverse and one without, and is stored at the other
        leader.

        The row to change there is then not a mirror of the coordinator's rows, so no intent can express it."""
        schema = self._configuration.schema
        paired = (schema.atype(write.atype).inverse is not None, schema.atype(write.new_atype).inverse is not None)
        return paired[0] != paired[1] and write.id1 == pair.high_id

    async def _change_far_side(self, write: AssocChangeType, deadline: float, hold: PairHold) -> tuple[Written, bool]:
        """Add the edge under the new type, then delete it under the old one.

        A failure in between leaves both edges, and repeating the write completes it. The edge is never lost."""
        schema = self._configuration.schema
        old, new = schema.atype(write.atype), schema.atype(write.new_atype)
        coordinator = self._coordinator(IntentKey(write.id2, write.id1))
        key = EdgeKey(write.id1, old.number, write.id2)
        # The coordinator's row of a pair is authoritative; an edge without inverse has only its own row.
        at = key if old.inverse is None else EdgeKey(write.id2, old.inverse, write.id1)
        edge = (await self._read_edges([at])).get(at)
        if edge is None:
            return Written(WriteOutcome()), False
        added = AssocAdd(write.id1, new.number, write.id2, edge.time, edge.data)
        self._writes.check(added)
        if old.inverse is None:
            written, pending = await self._commit_and_settle(added, deadline, hold)
            removal = SettleEdge(key.id1, key.atype, key.id2, present=False)
            with after_first_commit():
                messages = (await self._settle_there(key.id1 >> SHARD_SHIFT, (removal,), coordinator, hold)).messages
        else:
            far = SettleEdge(
                write.id1, new.number, write.id2, present=True, time=edge.time, data=edge.data, if_room=True
            )
            with before_first_commit(hold):
                messages = (await self._settle_there(key.id1 >> SHARD_SHIFT, (far,), coordinator, hold)).messages
            deletion = AssocDelete(write.id1, old.number, write.id2)
            with after_first_commit():
                written, pending = await self._commit_and_settle(deletion, deadline, hold)
        written.messages.extend(messages)
        # The outcome of the whole change replaces that of one of its two commits.
        written.outcome = WriteOutcome(found=True)
        return written, pending

    def _coordinator(self, pair: IntentKey) -> Coordinator:
        """Return the ownership under which this leader coordinates the pair. Raises `NotMine`."""
        row = self._ownership.row(pair.low_id >> SHARD_SHIFT)
        return Coordinator(row.shard, row.generation)

    def _far_side_seconds(self, hold: PairHold) -> float:
        """Return the timeout of one attempt: a write committed here must be acknowledged in time, with its mirror or
        without."""
        return min(self._patience_seconds(hold), self._settings.settle_timeout_seconds)

    def _patience_seconds(self, hold: PairHold) -> float:
        """Return how long to wait for a shard that changes hands, when no copy is in progress anywhere.

        That is as long as the writer waits. Once the writer no longer waits, it is the timeout of one attempt."""
        left = hold.deadline - self._clock.monotonic()
        return left if left > 0 else self._settings.settle_timeout_seconds

    async def _commit_and_settle(self, write: Write, deadline: float, hold: PairHold) -> tuple[Written, bool]:
        """Commit the coordinator's side, then write its mirror. Returns the result, and whether the inverse is
        pending."""
        ids = coordinator_side(write, self._configuration.schema)
        assert ids is not None, "only writes of pairs have a mirror"
        pair = IntentKey(*ids)
        coordinator = self._coordinator(pair)
        claim = claim_of(write, await self._edge_to_move(write, pair), self._configuration.schema)
        if claim is not None:
            return await self._claim_and_commit(write, claim, deadline, hold)
        written = await self._writes.commit(write, deadline, both_sides=False)
        if written.intent is None:
            return written, False
        is_settled = await self._settle(written, hold, coordinator)
        if written.outcome.registers is not None and isinstance(write, AssocAdd | AssocDelete | AssocMerge):
            raised = hold.raised.get(EdgeKey(write.id1, write.atype, write.id2))
            if raised is not None:
                written.outcome = after_raise(written.outcome, raised)
        return written, not is_settled

    async def _edge_to_move(self, write: Write, pair: IntentKey) -> Edge | None:
        """Return the coordinator's edge that a change to a type of bounded lists moves."""
        schema = self._configuration.schema
        if not isinstance(write, AssocChangeType) or not bounds_length(write, schema):
            return None
        old = schema.atype(write.atype)
        key = EdgeKey(write.id1, old.number, write.id2)
        if old.inverse is not None and write.id1 == pair.high_id:
            key = EdgeKey(write.id2, old.inverse, write.id1)
        return (await self._read_edges([key])).get(key)

    async def _claim_and_commit(
        self, write: Write, claim: SettleEdge, deadline: float, hold: PairHold
    ) -> tuple[Written, bool]:
        """Write the far side first, where its list may be full, and then the coordinator's side.

        Both lists are counted under the locks of the transactions that write them. An intent is recorded before, so
        whatever fails afterwards, the far side is made equal to the coordinator's side again. Raises `ListFull`, and
        `Unavailable` when the far side cannot be asked: nothing of the write is kept then."""
        schema = self._configuration.schema
        pair = IntentKey(claim.id2, claim.id1)
        coordinator = self._coordinator(pair)
        atypes = tuple(sorted({edge.atype for edge in edges_of(write, schema) if edge.id1 == pair.low_id}))
        adds = schema.atype(claim.atype).inverse
        assert adds is not None, "only an edge with an inverse is claimed"
        announcement = AnnounceIntent(pair.low_id, pair.high_id, atypes, adds)
        announced = await self._writes.commit(announcement, deadline, both_sides=False)
        intent = announced.intent
        assert intent is not None, "an announced intent is recorded"
        try:
            messages = (await self._settle_there(claim.id1 >> SHARD_SHIFT, (claim,), coordinator, hold)).messages
        except RequestError:
            # An earlier attempt may still come to find room; and the intent may stand for older writes of the pair.
            if hold.release_at is not None:
                self._pending.add(intent, self._clock.monotonic())
            else:
                await self._settle(Written(WriteOutcome(), intent=intent), hold, coordinator)
            raise
        except TaoError as error:
            if may_still_be_written(error):
                self._linger(hold)
            self._pending.add(intent, self._clock.monotonic())
            if isinstance(error, RetryableError):
                raise
            raise Unavailable(f"the other end of the edge could not be written: {error.message}") from error
        try:
            written = await self._writes.commit(write, deadline, both_sides=False)
        except TaoError:
            await self._settle(Written(WriteOutcome(), intent=intent), hold, coordinator)
            raise
        written.messages[:0] = messages
        if written.intent is None:
            written.intent = intent
        return written, not await self._settle(written, hold, coordinator)

    @asynccontextmanager
    async def _held(
        self, pair: IntentKey, timeout_seconds: float, *, needs_far_side: bool = False
    ) -> AsyncIterator[PairHold]:
        hold = PairHold(self._clock.monotonic() + timeout_seconds, needs_far_side=needs_far_side)
        await self._pairs.acquire(pair, timeout_seconds)
        try:
            yield hold
        finally:
            self._release(pair, hold)

    def _release(self, pair: IntentKey, hold: PairHold) -> None:
        """Free the pair, or keep it for as long as a copy may be in progress."""
        if hold.is_released or hold.attempts:
            return  # the end of the last attempt calls this again
        if hold.timer is not None:
            hold.timer.cancel()
        left = 0.0 if hold.release_at is None else hold.release_at - self._clock.monotonic()
        if left > 0:
            if hold.copy is not None:
                self._lingering[pair] = hold
            # A timer cannot be refused. A task could be, by the bound on tasks, and the pair would be held for ever.
            hold.timer = asyncio.get_running_loop().call_later(left, self._end_lingering, pair, hold)
            return
        hold.is_released = True
        if self._lingering.get(pair) is hold:
            del self._lingering[pair]
        self._pairs.release(pair)

    def _end_lingering(self, pair: IntentKey, hold: PairHold) -> None:
        hold.release_at = hold.timer = None
        self._release(pair, hold)

    def _spawn_optional(self, job: Coroutine[Any, Any, None]) -> None:
        """Start work that the repair loop can do as well: a failure to start it must not fail a committed write."""
        try:
            self._spawn(job)
        except TaoError as error:
            self._log.warning("work_left_to_repair", reason=error.message)

    async def _settle(self, written: Written, hold: PairHold, coordinator: Coordinator | None = None) -> bool:
        """Write the mirror; return whether it is written.

        On failure the intent stays, the pair is remembered, and it is held until no copy can still be in progress.
        ``coordinator``: the ownership under which the rows to copy were committed; None: read them under the present
        ownership. If the shard has changed hands since, its new owner is asked to settle the pair, so that a planned
        change of owners leaves no inverse pending."""
        intent = written.intent
        assert intent is not None, "only called for a write with an intent"
        try:
            await self._settle_or_raise(written, hold, coordinator, hands_over=True)
        except TaoError as error:
            self.leave_pending(intent, error)
            return False
        return True

    def leave_pending(self, intent: IntentRow, reason: TaoError) -> None:
        """Remember the pair of a committed write whose inverse is answered as pending."""
        record = self._log.error if isinstance(reason, RequestError) else self._log.warning
        record("inverse_pending", low_id=intent.low_id, high_id=intent.high_id, reason=reason.message)
        self.left_pending += 1
        self._pending.add(intent, self._clock.monotonic())

    async def _settle_or_raise(
        self, written: Written, hold: PairHold, coordinator: Coordinator | None, *, hands_over: bool
    ) -> None:
        intent = written.intent
        assert intent is not None, "only called for a write with an intent"
        try:
            messages, is_owner = await self._write_mirror(
                intent, written.settles, hold, coordinator, hands_over=hands_over
            )
        except RequestError:
            raise
        except TaoError as error:
            if may_still_be_written(error):
                self._linger(hold)
            raise
        written.messages.extend(messages)
        if self._pending.settled(intent):
            self.settled_later += 1
        if is_owner and intent.token:
            self._forget(intent)

    async def _write_mirror(
        self,
        intent: IntentRow,
        settles: tuple[SettleEdge, ...] | None,
        hold: PairHold,
        coordinator: Coordinator | None,
        *,
        hands_over: bool,
    ) -> tuple[list[ShardMessages], bool]:
        """Write the mirror here, or have the new owner write it.

        Returns the messages for caches, and whether this leader has to remove the intent."""
        while True:
            try:
                return await self._copy(intent, settles, hold, coordinator), True
            except (Deposed, NotMine):
                if not hands_over or self._coordinates(intent, coordinator):
                    raise
            try:
                return await self._others.hand_over(intent, self._patience_seconds(hold)), False
            except Deposed:
                # This leader is taking the shard again, as after a commit of unknown outcome. Then settle by the rows
                # as they are then.
                if not self._is_waited_for(hold):
                    raise
            settles = coordinator = None
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _copy(
        self, intent: IntentRow, settles: tuple[SettleEdge, ...] | None, hold: PairHold, coordinator: Coordinator | None
    ) -> list[ShardMessages]:
        present = self._coordinator(IntentKey(intent.low_id, intent.high_id))
        if coordinator not in (None, present):
            raise Deposed(f"another leader owns shard {present.shard} now and settles the intent")
        if settles is None:
            settles = await self._settles(intent)
        hold.copy = PairCopy(intent, settles, present)
        copied = await self._settle_there(intent.high_id >> SHARD_SHIFT, settles, present, hold)
        for raised in copied.raised:
            copied.messages.extend(await self._raise(raised, hold))
        return copied.messages

    async def _raise(self, far: SettleEdge, hold: PairHold) -> list[ShardMessages]:
        """Join what the far side knows and the coordinator does not: the state of its node, and after a promotion that
        has lost commits here, operations. The pair is held, so that both sides agree then; until then the intent stays.
        """
        near = self._configuration.schema.inverse_of(self._configuration.schema.atype(far.atype))
        assert near is not None, "only edges with an inverse are copied"
        joined = msgspec.structs.replace(far, id1=far.id2, atype=near.number, id2=far.id1)
        deadline = self._clock.monotonic() + self._settings.settle_timeout_seconds
        written = await self._writes.commit(joined, deadline, both_sides=False, sub_write=True)
        assert written.outcome.registers is not None, "a join has a result"
        for end in (far, joined):
            hold.raised[EdgeKey(end.id1, end.atype, end.id2)] = written.outcome
        return written.messages

    async def _settle_there(
        self, shard: int, settles: tuple[SettleEdge, ...], coordinator: Coordinator, hold: PairHold
    ) -> Copied:
        """Have the other leader write the far side.

        When that shard or its database is changing hands, no copy is in progress and the next owner will answer
        soon, so the request is retried. Any other failure is left to repair, unless the writer needs the far side."""
        pause = _PAUSE_SECONDS
        while True:
            try:
                return await self._others.settle(shard, settles, coordinator, self._far_side_seconds(hold))
            except (Deposed, DatabaseDown, DatabaseFull):
                raise
            except (RetryableError, OutcomeUnknown) as error:
                hold.unknown_outcome = unknown_outcome_of(error) or hold.unknown_outcome
                if may_still_be_written(error):
                    # Repeating the same copy while the pair is held does no harm. The next write's copy would be
                    # another one, which this one must not overtake.
                    self._linger(hold)
                is_moving = isinstance(error, (NotMine, Fenced, MasterReadOnly))
                if not (is_moving or hold.needs_far_side) or not self._is_waited_for(hold, pause):
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 10 * _PAUSE_SECONDS)

    def _is_waited_for(self, hold: PairHold, pause_seconds: float = _PAUSE_SECONDS) -> bool:
        """Return whether the writer waits long enough for another attempt."""
        return hold.deadline - self._clock.monotonic() > pause_seconds

    def _linger(self, hold: PairHold) -> None:
        """Keep the pair held after a copy whose outcome is unknown: the other leader may have begun it at the last
        moment of its deadline."""
        settings = self._settings
        hold.release_at = self._clock.monotonic() + settings.settle_timeout_seconds + settings.settle_linger_seconds

    def _coordinates(self, intent: IntentRow, coordinator: Coordinator | None) -> bool:
        """Return whether this leader still owns the pair; then it was the other side that did not answer."""
        row = self._ownership.owned.get(intent.low_id >> SHARD_SHIFT)
        return row is not None and (coordinator is None or row.generation == coordinator.generation)

    def _forget(self, intent: IntentRow) -> None:
        """Begin to remove an intent. A failure is harmless: repair settles the intent once more."""

        def end(result: Written | TaoError) -> None:
            if isinstance(result, TaoError):
                self._log.info(
                    "intent_not_forgotten", low_id=intent.low_id, high_id=intent.high_id, reason=result.message
                )

        deadline = self._clock.monotonic() + self._settings.settle_timeout_seconds
        write = forget_intent_of(intent)
        scope = scope_of(write, self._configuration.schema)
        try:
            self._writes.begin(write, scope, deadline, end, both_sides=False, sub_write=True)
        except TaoError as error:
            end(error)

    async def _settles(self, intent: IntentRow) -> tuple[SettleEdge, ...]:
        """Return the writes that make the far side equal to the rows as they are now."""
        schema = self._configuration.schema
        keys = coordinator_edges_of(intent)
        with_states = [key for key in keys if schema.knows_atype(key.atype) and schema.atype(key.atype).states]
        edges = await self._read_edges([key for key in keys if key not in with_states])
        registers = await self._read_registers(with_states)
        return tuple(settle_writes(intent, edges, schema, registers))

    async def _read_registers(self, keys: Sequence[EdgeKey]) -> dict[EdgeKey, EdgeRegisters]:
        """Read the registers of these edges with states, as the far side is to join them, by a join with nothing, which
        moves a row that is in the list of another state."""
        deadline = self._clock.monotonic() + self._settings.settle_timeout_seconds
        found: dict[EdgeKey, EdgeRegisters] = {}
        for key in keys:
            read = SettleEdge(key.id1, key.atype, key.id2, False, registers=NO_OPERATION)
            written = await self._writes.commit(read, deadline, both_sides=False, sub_write=True)
            if written.outcome.registers is not None:
                found[key] = written.outcome.registers.with_id2(written.outcome.node)
        return found

    async def _read_edges(self, keys: Sequence[EdgeKey]) -> dict[EdgeKey, Edge]:
        """Read the current rows of these edges from the master database."""
        read = await self._read_store.read(
            [EdgesQuery(key.id1, key.atype, (key.id2,)) for key in keys],
            critical=True,
            timeout_seconds=self._settings.settle_timeout_seconds,
        )
        return {key: edge for key, block in zip(keys, read.values, strict=True) for edge in decode_block(block)}

    async def settle_pair(self, intent: IntentRow, timeout_seconds: float) -> list[ShardMessages]:
        """Copy the coordinator's rows of a pair to its other side, and forget the intent. Returns the messages for
        caches.

        Callers that ask for one pair at the same time share a settlement, which continues when they stop waiting. It
        reads the rows while the pair is held, so it covers every write that was acknowledged before. Raises `TaoError`
        when the pair is not settled in time, among others `Overloaded` when writes wait for it."""
        pair = IntentKey(intent.low_id, intent.high_id)
        try:
            async with asyncio.timeout(timeout_seconds):
                while True:
                    settlement = self._settlements.get(pair) or self._start_settlement(pair, intent)
                    await asyncio.wait([settlement.messages])
                    if settlement.atypes.issuperset(intent.atypes):
                        return settlement.messages.result()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the edges between {pair.low_id} and {pair.high_id} were not settled before the deadline"
            ) from None

    async def settle_between(self, shard: int, far_shard: int, timeout_seconds: float) -> list[ShardMessages]:
        """Settle all pairs between a shard of this leader, which coordinates them, and another one, whose inverse is
        pending now. Returns the messages for caches.

        The intents are read from the master: every write that was acknowledged before has one there until its inverse
        is written. A server that was replaced is not believed; the one that the topology names now is asked. Raises
        `TaoError` when one of the pairs is not settled in time, or when they are too many."""
        deadline = self._clock.monotonic() + timeout_seconds
        limit, pause, intents = self._settings.repair_batch, _PAUSE_SECONDS, None
        while intents is None:
            left = deadline - self._clock.monotonic()
            try:
                intents = await self._read_store.read_intents(shard, far_shard, limit=limit + 1, timeout_seconds=left)
            except MasterReadOnly:
                if left <= pause:
                    raise
                await asyncio.sleep(pause)
                # No longer than the pause: while etcd is silent, a read takes all the time that is left. It goes on.
                await self._configuration.refresh(min(pause, deadline - self._clock.monotonic()))
                pause *= 2
        left = deadline - self._clock.monotonic()
        messages = await asyncio.gather(*(self.settle_pair(each, left) for each in intents[:limit]))
        if len(intents) > limit:
            raise Unavailable(f"more than {limit} pairs are pending; the first of them are settled now, so try again")
        return list(chain.from_iterable(messages))

    def _start_settlement(self, pair: IntentKey, intent: IntentRow) -> Settlement:
        known = self._pending.intent(pair)
        if known is not None and known.token > intent.token:
            atypes = tuple(dict.fromkeys((*known.atypes, *intent.atypes)))
            intent = msgspec.structs.replace(known, atypes=atypes)
        messages: asyncio.Future[list[ShardMessages]] = asyncio.get_running_loop().create_future()
        messages.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait any more
        settlement = Settlement(frozenset(intent.atypes), messages)
        self._spawn(self._run_settlement(pair, intent, settlement))
        self._settlements[pair] = settlement
        return settlement

    async def _run_settlement(self, pair: IntentKey, intent: IntentRow, settlement: Settlement) -> None:
        error: TaoError = Unavailable("the settlement was broken off")
        try:
            messages = await self._settle_now(pair, intent)
        except TaoError as failed:
            error = failed
        else:
            settlement.messages.set_result(messages)
        finally:
            del self._settlements[pair]
            if not settlement.messages.done():
                settlement.messages.set_exception(error)

    async def _settle_now(self, pair: IntentKey, intent: IntentRow) -> list[ShardMessages]:
        lingering = self._lingering.get(pair)
        if lingering is not None and lingering.copy is not None and lingering.copy.covers(intent):
            if self._pairs.is_awaited(pair):
                # Each copy without an answer keeps the pair held for longer.
                raise Overloaded(f"writes wait for the edges between {pair.low_id} and {pair.high_id}; try again")
            return await self._copy_again(pair, lingering, lingering.copy)
        pending = Written(WriteOutcome(), intent=intent)
        async with self._held(pair, self._settings.repair_age_seconds) as hold:
            await self._settle_or_raise(pending, hold, None, hands_over=False)
        return pending.messages

    async def _copy_again(self, pair: IntentKey, hold: PairHold, copy: PairCopy) -> list[ShardMessages]:
        """Send the copy of a pair that is still held for it once more: the same copy twice does no harm. That holds,
        too, when this leader has given the shard up and taken it again, as after a commit of unknown outcome, and the
        rows are what they were."""
        written = Written(WriteOutcome(), intent=copy.intent, settles=copy.settles)
        hold.attempts += 1
        try:
            coordinator = self._coordinator(pair)
            if coordinator != copy.coordinator and await self._settles(copy.intent) != copy.settles:
                raise Unavailable(
                    f"an earlier copy of the edges between {pair.low_id} and {pair.high_id} may still be written; "
                    "try again"
                )
            await self._settle_or_raise(written, hold, coordinator, hands_over=False)
        finally:
            hold.attempts -= 1
            self._release(pair, hold)
        return written.messages

    async def settle_pending(self) -> None:
        """Settle the pairs that this leader remembers as soon as their other leaders answer, until cancelled. The pairs
        of a shard that it has just taken are tried at once. While it remembers none, it waits."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.contact_seconds if self._pending else None):
                    await self._intents_found.wait()
            self._intents_found.clear()
            self._pending.keep_only(self._ownership.owned.__contains__)
            due = self._pending.due(self._others.leader_name, self._is_being_settled, self._clock.monotonic())
            for leader, pairs in due.items():
                if leader not in self._contacts:
                    for pair in pairs:
                        self._spawn_optional(self._settle_at(leader, pair))

    def _is_busy(self, pair: IntentKey) -> bool:
        """Return whether a write of the pair is in progress, which settles it."""
        return self._pairs.holds(pair) and pair not in self._lingering

    def _is_being_settled(self, pair: IntentKey) -> bool:
        return pair in self._settlements or self._is_busy(pair)

    async def _settle_at(self, leader: str, first: IntentKey) -> None:
        """Settle a pair, and then the other pending pairs at its leader, unless they are being settled. Stop when none
        of a batch succeeds."""
        if not await self._settle_pending_pair(first) or leader in self._contacts:
            return
        self._contacts.add(leader)
        try:
            pairs = self._pending.others(leader, self._others.leader_name, self._is_busy)
            size = self._settings.repair_batch
            for start in range(0, len(pairs), size):
                settled = await asyncio.gather(*map(self._settle_pending_pair, pairs[start : start + size]))
                if not any(settled):
                    return
        finally:
            self._contacts.discard(leader)

    async def _settle_pending_pair(self, pair: IntentKey) -> bool:
        intent = self._pending.intent(pair)
        if intent is None or self._is_busy(pair):
            return False
        try:
            await self.settle_pair(intent, self._settings.settle_timeout_seconds)
        except TaoError as error:
            now, is_request_error = self._clock.monotonic(), isinstance(error, RequestError)
            is_to_wait = may_still_be_written(error) or isinstance(error, SchemaBehind)
            if is_to_wait and not is_request_error:
                self._pending.unanswered(pair, now)
            else:
                self._pending.refused(pair, now, for_good=is_request_error)
            self._log.debug("pair_still_pending", low_id=pair.low_id, high_id=pair.high_id, reason=error.message)
            return False
        return True

    def shard_taken(self) -> None:
        """Look for the intents of a shard that this leader owns from now on: nobody else settles them."""
        self._shards_taken.set()

    async def search_taken(self) -> None:
        """Look for the intents of shards as soon as they are taken, until cancelled."""
        while True:
            await self._shards_taken.wait()
            self._shards_taken.clear()
            await asyncio.gather(*self._searches(are_searched=False))

    async def repair(self) -> None:
        """Look for intents that no leader remembers, until cancelled; also for those of shards that could not be
        searched when they were taken."""
        while True:
            for shard in self._searched.keys() - self._ownership.owned.keys():
                del self._searched[shard]
            searches = (*self._searches(are_searched=False), *self._searches(are_searched=True))
            await asyncio.gather(asyncio.sleep(self._settings.repair_seconds), *searches)

    def _searches(self, *, are_searched: bool) -> list[Coroutine[Any, Any, None]]:
        """Return a search for each database, of those owned shards that were searched before, or were not. Databases
        are asked concurrently: one that is unavailable must not delay the intents of the others."""
        by_server: dict[str, list[ShardRow]] = {}
        for row in self._ownership.owned.values():
            if (self._searched.get(row.shard) == row.generation) is are_searched:
                by_server.setdefault(row.master_server, []).append(row)
        return [self._search(rows, are_searched) for rows in by_server.values()]

    async def _search(self, rows: list[ShardRow], are_searched: bool) -> None:
        """Find the intents of these shards of one database, a bounded number of shards at a time. Shards that were
        searched before are spread over the interval."""
        size = self._settings.shards_per_search
        chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
        for number, chunk in enumerate(chunks):
            if are_searched and number:
                await asyncio.sleep(self._settings.repair_seconds / len(chunks))
            await self._find_intents(chunk, are_searched)

    async def _find_intents(self, rows: list[ShardRow], are_searched: bool) -> None:
        """Remember the intents of these shards: the old ones, or all of shards that this leader has just taken."""
        # The leader that owned a shard before may have had a clock that is ahead.
        before = self._clock.unix_ms() - int(self._settings.repair_age_seconds * 1000) if are_searched else MAX_TIME
        shards = [row.shard for row in rows]
        is_full = True
        while is_full:
            # The intents of the pairs that are known must not hide all newer ones.
            limit = _INTENTS_READ + len(self._pending)
            try:
                intents = await self._write_store.old_intents(shards, before_unix_ms=before, limit=limit)
            except TaoError as error:
                self._log.warning("intents_not_read", reason=error.message)
                return
            known = len(self._pending)
            for intent in intents:
                if not self._is_busy(IntentKey(intent.low_id, intent.high_id)):
                    self._pending.add(intent, self._clock.monotonic(), at_once=not are_searched)
            is_full = len(intents) == limit and len(self._pending) > known
        self._searched.update((row.shard, row.generation) for row in rows)
        if not are_searched and self._pending:
            self._intents_found.set()

    def register(self, metrics: Metrics) -> None:
        """Register the metrics."""
        metrics.gauge_family(
            "inverses_total",
            "Inverse edges that could not be written at once, and inverse edges settled later.",
            "event",
            lambda: {"left_pending": self.left_pending, "settled_later": self.settled_later},
        )
        metrics.gauge(
            "inverses_pending_pairs",
            "Pairs whose inverse edge is known to be pending: it is written once the other leader answers.",
            lambda: self.pairs_pending,
        )
        metrics.gauge("inverse_pairs", "Pairs whose edges are being written at both ends.", lambda: self.pairs_held)

    def summary(self) -> dict[str, float]:
        """Return the numbers for `/stats`."""
        return {"inverses_left_pending": self.left_pending, "inverses_settled_later": self.settled_later}
