"""Edges whose other side lies with another leader or on another database (DESIGN.md §6).

The coordinator - the leader of the smaller id's shard - commits its side together with an *intent*, has the other
leader copy its rows, and removes the intent. The writes of a pair are one at a time until the copy is acknowledged or
can no longer happen; so an older copy never overtakes a newer one. What is left open by a failure stays as an intent,
which the next write of the pair or the repair loop settles from the coordinator's rows as they are then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from tao.leader.other_leaders import Deposed, OtherLeaders, may_be_under_way, unknown_of
from tao.leader.ownership import Ownership
from tao.leader.pair_queue import Hold, PairQueue
from tao.leader.transaction_ends import first_half, second_half
from tao.leader.write_path import WritePath, Written, forget_intent_of
from tao.model.changes import ShardMessages
from tao.model.edge_block import decode_block
from tao.model.errors import (
    DatabaseDown,
    Fenced,
    MasterReadOnly,
    NotMine,
    OutcomeUnknown,
    RequestError,
    RetryableError,
    TaoError,
)
from tao.model.graph import Edge, EdgeKey
from tao.model.ids import SHARD_SHIFT
from tao.model.ports import Clock, ReadStore, WriteStore
from tao.model.queries import EdgesQuery
from tao.model.rows import IntentKey, IntentRow
from tao.model.writes import AssocAdd, AssocChangeType, AssocDelete, Coordinator, SettleEdge, Write, WriteOutcome
from tao.observability.logs import Logger
from tao.planning.coordination import names_far_side
from tao.planning.write_plan import coordinator_edges_of, coordinator_side, settle_writes
from tao.schema.registry import Schema

MAX_STUCK: Final = 1_000
"""Intents remembered as not to be settled just now; more than that are tried again and again instead."""

_PAUSE_SECONDS: Final = 0.05
"""Before the other side is asked for again, however quickly it was refused; it doubles, up to ten of these."""


@dataclass(frozen=True, slots=True)
class InverseSettings:
    """Bounds of pair writes."""

    settle_timeout_seconds: float = 2.0
    """For one try of the other leader's side at most: less when the writer waits for less, so that it hears what
    happened. A writer who named the coordinator's side waits for one; who named the other for as many as it takes."""

    settle_linger_seconds: float = 5.0
    """How long a copy that was not acknowledged may still be under way after its deadline: the bound on the other
    leader's transaction, and some. The pair is not written meanwhile."""

    max_waiting_per_pair: int = 256
    """Writes of one pair that wait for each other."""

    repair_seconds: float = 2.0
    """Between two looks for intents left over."""

    repair_age_seconds: float = 10.0
    """An intent younger than this is taken to be under way: above the deadlines of all that writing one involves."""

    repair_batch: int = 100
    """Intents settled in one look; the rest waits for the next."""


class InversePath:
    """Writes of any kind, with the mirrors that they owe."""

    def __init__(
        self,
        writes: WritePath,
        ownership: Ownership,
        others: OtherLeaders,
        read_store: ReadStore,
        write_store: WriteStore,
        schema: Callable[[], Schema],
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        settings: InverseSettings,
        log: Logger,
    ) -> None:
        self._writes: Final = writes
        self._ownership: Final = ownership
        self._others: Final = others
        self._read_store: Final = read_store
        self._write_store: Final = write_store
        self._schema: Final = schema
        self._clock: Final = clock
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._log: Final = log
        self._pairs: Final = PairQueue(settings.max_waiting_per_pair)
        self._stuck: dict[IntentKey, float] = {}
        self.settled_later = 0
        self.left_pending = 0

    @property
    def pairs_held(self) -> int:
        """Pairs being written now."""
        return len(self._pairs)

    async def write(self, write: Write, deadline: float, *, sub_write: bool = False) -> tuple[Written, bool]:
        """Do a checked write. The second value says that the inverse is still pending. Raises as `WritePath.commit`."""
        ids = coordinator_side(write, self._schema())
        if ids is None:
            return await self._writes.commit(write, deadline, both_sides=True, sub_write=sub_write), False
        pair = IntentKey(*ids)
        if self._writes.hosts_both_sides(write) and not self._pairs.holds(pair):
            with self._pairs.shared(pair):
                written = await self._writes.commit(write, deadline, both_sides=True)
            if written.intent is None:
                return written, False
            # An intent from before covers more than was read here, so this write is done at one side only, too.
            insists = names_far_side(write, self._schema())
            return written, not await self._settle_found(written, deadline, insists=insists)
        insists = names_far_side(write, self._schema())
        async with self._held(pair, deadline - self._clock.monotonic(), insists=insists) as hold:
            if isinstance(write, AssocChangeType) and self._changes_far_side(write, pair):
                return await self._change_far_side(write, deadline, hold)
            return await self._commit_and_settle(write, deadline, hold)

    async def _settle_found(self, written: Written, deadline: float, *, insists: bool) -> bool:
        intent = written.intent
        assert intent is not None, "asked only for what is owed"
        rest = Written(written.outcome, intent=intent)
        pair = IntentKey(intent.low_id, intent.high_id)
        try:
            async with self._held(pair, deadline - self._clock.monotonic(), insists=insists) as hold:
                settled = await self._settle(rest, hold)
        except RetryableError as error:
            # Others write the pair until the deadline; they meet the intent as well.
            self._log.info("intent_not_settled", low_id=intent.low_id, high_id=intent.high_id, reason=error.message)
            return False
        written.messages.extend(rest.messages)
        return settled

    def _changes_far_side(self, write: AssocChangeType, pair: IntentKey) -> bool:
        """Whether the edge changes between a type with an inverse and one without, and lies at the other leader: what
        is then owed there is not a mirror of the coordinator's rows, so no intent can say it."""
        schema = self._schema()
        paired = (schema.atype(write.atype).inverse is not None, schema.atype(write.new_atype).inverse is not None)
        return paired[0] != paired[1] and write.id1 == pair.high_id

    async def _change_far_side(self, write: AssocChangeType, deadline: float, hold: Hold) -> tuple[Written, bool]:
        """Add under the new type first, then delete under the old one: a failure in between leaves both, and the same
        write done again ends it. The edge is never lost."""
        schema = self._schema()
        old, new = schema.atype(write.atype), schema.atype(write.new_atype)
        coordinator = self._coordinator(IntentKey(write.id2, write.id1))
        key = EdgeKey(write.id1, old.number, write.id2)
        # Of a pair the coordinator's row is the truth; an edge without inverse has only its own.
        at = key if old.inverse is None else EdgeKey(write.id2, old.inverse, write.id1)
        edge = (await self._read_edges([at])).get(at)
        if edge is None:
            return Written(WriteOutcome()), False
        added = AssocAdd(write.id1, new.number, write.id2, edge.time, edge.data)
        self._writes.check(added)
        if old.inverse is None:
            written, pending = await self._commit_and_settle(added, deadline, hold)
            rest = SettleEdge(key.id1, key.atype, key.id2, present=False)
            with second_half():
                told = await self._settle_there(key.id1 >> SHARD_SHIFT, (rest,), coordinator, hold)
        else:
            far = SettleEdge(write.id1, new.number, write.id2, present=True, time=edge.time, data=edge.data)
            with first_half(hold):
                told = await self._settle_there(key.id1 >> SHARD_SHIFT, (far,), coordinator, hold)
            deletion = AssocDelete(write.id1, old.number, write.id2)
            with second_half():
                written, pending = await self._commit_and_settle(deletion, deadline, hold)
        written.messages.extend(told)
        written.outcome = WriteOutcome(found=True)
        return written, pending

    def _coordinator(self, pair: IntentKey) -> Coordinator:
        """Under which ownership this leader coordinates the pair. Raises `NotMine`."""
        row = self._ownership.row(pair.low_id >> SHARD_SHIFT)
        return Coordinator(row.shard, row.generation)

    def _far_side_seconds(self, hold: Hold) -> float:
        """What is committed here is to be acknowledged in time, with its mirror or without."""
        return min(self._patience_seconds(hold), self._settings.settle_timeout_seconds)

    def _patience_seconds(self, hold: Hold) -> float:
        """For shards that change hands, when nothing is under way at anybody: as long as the writer waits. When it
        waits no longer there is no hurry."""
        left = hold.deadline - self._clock.monotonic()
        return left if left > 0 else self._settings.settle_timeout_seconds

    async def _commit_and_settle(self, write: Write, deadline: float, hold: Hold) -> tuple[Written, bool]:
        """The coordinator's side, then its mirror. The second value says that the inverse is still pending."""
        ids = coordinator_side(write, self._schema())
        assert ids is not None, "only writes of pairs have a mirror"
        coordinator = self._coordinator(IntentKey(*ids))
        written = await self._writes.commit(write, deadline, both_sides=False)
        if written.intent is None:
            return written, False
        return written, not await self._settle(written, hold, coordinator)

    @asynccontextmanager
    async def _held(self, pair: IntentKey, timeout_seconds: float, *, insists: bool = False) -> AsyncIterator[Hold]:
        hold = Hold(self._clock.monotonic() + timeout_seconds, insists=insists)
        await self._pairs.acquire(pair, timeout_seconds)
        try:
            yield hold
        finally:
            if hold.until is None:
                self._pairs.release(pair)
            else:
                # By a timer, which nothing can refuse: a task may be one too many, and the pair held for ever.
                left = max(0.0, hold.until - self._clock.monotonic())
                asyncio.get_running_loop().call_later(left, self._pairs.release, pair)

    def _start(self, job: Coroutine[Any, Any, None]) -> None:
        """Do what can also be left to the repair loop: it must not fail a write that is committed."""
        try:
            self._spawn(job)
        except TaoError as error:
            self._log.warning("left_to_repair", reason=error.message)

    async def _settle(
        self, written: Written, hold: Hold, coordinator: Coordinator | None = None, *, hands_over: bool = True
    ) -> bool:
        """Write the mirror. On failure the intent stays, and the pair is held until no copy can still be under way.
        ``coordinator``: the ownership under which what is copied was written; None: it is read under the present one.
        ``hands_over``: when the shard has changed hands since, its owner is asked to do it, so that a planned change
        leaves nobody in the dark."""
        intent = written.intent
        assert intent is not None, "asked only for what is owed"
        try:
            told, is_owner = await self._pay(intent, written.settles, hold, coordinator, hands_over=hands_over)
        except RequestError as error:
            self._log.error("settle_refused", low_id=intent.low_id, high_id=intent.high_id, reason=error.message)
            self.left_pending += 1
            return False
        except TaoError as error:
            self._log.warning("inverse_pending", low_id=intent.low_id, high_id=intent.high_id, reason=error.message)
            self.left_pending += 1
            if may_be_under_way(error):
                self._linger(hold)
            return False
        written.messages.extend(told)
        if is_owner:
            self._start(self._forget(intent))
        return True

    async def _pay(
        self,
        intent: IntentRow,
        settles: tuple[SettleEdge, ...] | None,
        hold: Hold,
        coordinator: Coordinator | None,
        *,
        hands_over: bool,
    ) -> tuple[list[ShardMessages], bool]:
        """Write the mirror, or have it written. The second value says that the intent is this leader's to remove."""
        while True:
            try:
                return await self._copy(intent, settles, hold, coordinator), True
            except (Deposed, NotMine):
                if not hands_over or self._coordinates(intent, coordinator):
                    raise
            try:
                return await self._others.hand_over(intent, self._patience_seconds(hold)), False
            except Deposed:
                # This leader takes it anew, as after a commit of unknown outcome: then by the rows as they are then.
                if not self._is_waited_for(hold):
                    raise
            settles = coordinator = None
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _copy(
        self, intent: IntentRow, settles: tuple[SettleEdge, ...] | None, hold: Hold, coordinator: Coordinator | None
    ) -> list[ShardMessages]:
        present = self._coordinator(IntentKey(intent.low_id, intent.high_id))
        if coordinator not in (None, present):
            raise Deposed(f"shard {present.shard} has changed hands since; its owner settles the intent")
        if settles is None:
            settles = tuple(settle_writes(intent, await self._read_edges(coordinator_edges_of(intent)), self._schema()))
        return await self._settle_there(intent.high_id >> SHARD_SHIFT, settles, present, hold)

    async def _settle_there(
        self, shard: int, settles: tuple[SettleEdge, ...], coordinator: Coordinator, hold: Hold
    ) -> list[ShardMessages]:
        """The other leader's side. That shard, or its database, may be changing hands, and nothing is under way: who
        has it next will be there in a moment. Any other failure is for repair to mend, unless the writer insists."""
        pause = _PAUSE_SECONDS
        while True:
            try:
                return await self._others.settle(shard, settles, coordinator, self._far_side_seconds(hold))
            except (Deposed, DatabaseDown):
                raise
            except (RetryableError, OutcomeUnknown) as error:
                hold.unknown = unknown_of(error) or hold.unknown
                if may_be_under_way(error):
                    # Once more does no harm while the pair is held: it is the same copy. The next write's would be
                    # another, which this one must not overtake.
                    self._linger(hold)
                is_moving = isinstance(error, (NotMine, Fenced, MasterReadOnly))
                if not (is_moving or hold.insists) or not self._is_waited_for(hold, pause):
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 10 * _PAUSE_SECONDS)

    def _is_waited_for(self, hold: Hold, pause_seconds: float = _PAUSE_SECONDS) -> bool:
        """Whether the writer waits for another try."""
        return hold.deadline - self._clock.monotonic() > pause_seconds

    def _linger(self, hold: Hold) -> None:
        """A copy is not known not to have been written: the other leader may have begun with it at the last moment of
        its deadline."""
        settings = self._settings
        hold.until = self._clock.monotonic() + settings.settle_timeout_seconds + settings.settle_linger_seconds

    def _coordinates(self, intent: IntentRow, coordinator: Coordinator | None) -> bool:
        """Whether the pair is still this leader's; then it was the other side that did not answer."""
        row = self._ownership.owned.get(intent.low_id >> SHARD_SHIFT)
        return row is not None and (coordinator is None or row.generation == coordinator.generation)

    async def _forget(self, intent: IntentRow) -> None:
        deadline = self._clock.monotonic() + self._settings.settle_timeout_seconds
        try:
            await self._writes.commit(forget_intent_of(intent), deadline, both_sides=False, sub_write=True)
        except TaoError as error:
            # Harmless: the intent is settled once more by repair.
            self._log.info("intent_not_forgotten", low_id=intent.low_id, high_id=intent.high_id, reason=error.message)

    async def _read_edges(self, keys: Sequence[EdgeKey]) -> dict[EdgeKey, Edge]:
        """These rows as they are now, read from the master database."""
        read = await self._read_store.read(
            [EdgesQuery(key.id1, key.atype, (key.id2,)) for key in keys],
            critical=True,
            timeout_seconds=self._settings.settle_timeout_seconds,
        )
        return {key: edge for key, block in zip(keys, read.values, strict=True) for edge in decode_block(block)}

    async def settle_pair(self, intent: IntentRow) -> list[ShardMessages] | None:
        """Copy the coordinator's rows of a pair to its other side, and forget the intent. Returns what caches were
        told; None: it was not done. Raises `Overloaded` or `DeadlineExceeded` when the pair's turn does not come."""
        pair = IntentKey(intent.low_id, intent.high_id)
        owed = Written(WriteOutcome(), intent=intent)
        async with self._held(pair, self._settings.repair_age_seconds) as hold:
            return owed.messages if await self._settle(owed, hold, hands_over=False) else None

    async def _settle_left_over(self, intent: IntentRow) -> None:
        try:
            if await self.settle_pair(intent) is not None:
                self.settled_later += 1
                return
        except TaoError as error:
            # The intent stands, and is met again.
            self._log.info("intent_not_settled", low_id=intent.low_id, high_id=intent.high_id, reason=error.message)
        if len(self._stuck) < MAX_STUCK:
            until = self._clock.monotonic() + self._settings.repair_age_seconds
            self._stuck[IntentKey(intent.low_id, intent.high_id)] = until

    async def repair(self) -> None:
        """Settle intents that were left over, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.repair_seconds)
            # A full look is followed by the next at once, as long as that gets anywhere.
            while await self._settle_old() == self._settings.repair_batch:
                pass

    async def _settle_old(self) -> int:
        """Settle the oldest intents, side by side; returns how many were."""
        by_server: dict[str, list[int]] = {}
        for shard, row in self._ownership.owned.items():
            by_server.setdefault(row.master_server, []).append(shard)
        settled = self.settled_later
        # Each database by itself: one that is away must not keep the others' intents waiting.
        await asyncio.gather(*(self._settle_of_server(shards) for shards in by_server.values()))
        return self.settled_later - settled

    async def _settle_of_server(self, shards: list[int]) -> None:
        before = self._clock.unix_ms() - int(self._settings.repair_age_seconds * 1000)
        now = self._clock.monotonic()
        self._stuck = {pair: until for pair, until in self._stuck.items() if until > now}
        try:
            # Those that could not be settled lately are passed over for a while, or they would hide all newer ones.
            intents = await self._write_store.old_intents(
                shards, before_unix_ms=before, limit=self._settings.repair_batch + len(self._stuck)
            )
        except TaoError as error:
            self._log.warning("intents_unread", reason=error.message)
            return
        pairs = [(IntentKey(intent.low_id, intent.high_id), intent) for intent in intents]
        free = [intent for pair, intent in pairs if pair not in self._stuck and not self._pairs.holds(pair)]
        await asyncio.gather(*(self._settle_left_over(intent) for intent in free[: self._settings.repair_batch]))
