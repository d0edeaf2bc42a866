"""A write through its leader: validate, queue, commit with others, tell the caches, answer (DESIGN.md §3, §6).

Writes of all shards on one database server are committed in groups, a few transactions side by side, a key in at most
one of them. The order of the last steps is what keeps caches right: a change is applied to this leader's cache before
it is published, published before its keys are free for the next write, and all that before the writer is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tao.cache import GraphCache
from tao.delivery.publisher import Publisher
from tao.leader.messages import by_shard
from tao.leader.ownership import Ownership
from tao.leader.transaction_ends import ShardLost, commit_or_unknown
from tao.model.changes import Message, ShardMessages
from tao.model.errors import (
    DeadlineExceeded,
    Fenced,
    InternalError,
    OutcomeUnknown,
    ShardBlocked,
    TaoError,
    Unavailable,
)
from tao.model.ids import SHARD_SHIFT, IdAllocator
from tao.model.ports import Clock, WriteStore
from tao.model.rows import IntentRow, ShardRow
from tao.model.writes import ForgetIntent, ObjAdd, SettleEdge, Write, WriteOutcome
from tao.observability.logs import Logger
from tao.planning.lanes import LaneScheduler
from tao.planning.write_plan import (
    IdTaken,
    Plan,
    PlannedWrite,
    coordinating_shard,
    data_bytes_of,
    keys_of,
    lane_keys,
    mixes_touches,
    plan,
    shards_of,
    validate,
)
from tao.schema.registry import Schema


@dataclass(frozen=True, slots=True)
class WriteSettings:
    """Bounds of the write path."""

    lanes_per_server: int = 4
    """Transactions side by side on one database server: measured, four lanes commit twice what one does."""

    max_batch_writes: int = 64
    """Writes in one transaction: beyond that, the time that its keys are held grows faster than what is saved."""

    max_batch_bytes: int = 4 << 20
    """Data in one transaction: some tens of milliseconds of the database's time, which small writes of the same lane
    wait for."""

    max_waiting_per_shard: int = 2_000
    """Writes that wait for one shard: at a few thousand a second, what can be done within a request's deadline."""

    transaction_timeout_seconds: float = 4.0
    """For a whole transaction, within a request's deadline of 5 s and above the servers' bound on lock waits."""

    max_id_attempts: int = 8
    """Ids tried for one new object: a taken id means clock skew or another leader, which a few steps get past."""

    inline_object_bytes: int = 64 << 10
    """Larger objects are not sent along with the message that they changed: caches read them when they are asked."""


@dataclass(slots=True)
class Written:
    """What became of one write. ``messages``: what the caches of its writer have to know; writes committed together
    that report the same change share the value. ``intent`` and ``settles``: a mirror that is owed, and how to write it
    (None: the coordinator's edges must be read first)."""

    outcome: WriteOutcome
    messages: list[ShardMessages] = field(default_factory=list)
    intent: IntentRow | None = None
    settles: tuple[SettleEdge, ...] | None = None


@dataclass(slots=True)
class _Waiting:
    planned: PlannedWrite
    shards: frozenset[int]
    server: str
    deadline: float
    done: asyncio.Future[Written]


class WritePath:
    """Queues and commits the writes of the shards that this leader owns. Inverses on other leaders are
    `tao.leader.inverse_path`'s affair."""

    def __init__(
        self,
        ownership: Ownership,
        store: WriteStore,
        cache: GraphCache,
        publisher: Publisher,
        schema: Callable[[], Schema],
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        settings: WriteSettings,
        log: Logger,
    ) -> None:
        self._ownership: Final = ownership
        self._store: Final = store
        self._cache: Final = cache
        self._publisher: Final = publisher
        self._schema: Final = schema
        self._clock: Final = clock
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._log: Final = log
        self._lanes: Final = LaneScheduler(
            settings.lanes_per_server,
            settings.max_batch_writes,
            settings.max_waiting_per_shard,
            settings.max_batch_bytes,
        )
        self._waiting: dict[int, _Waiting] = {}
        self._pumped: set[str] = set()
        self._last_ticket = 0
        self.ids: Final = IdAllocator()
        self.committed_writes = 0
        self.committed_transactions = 0
        self.failed_writes = 0
        self.unknown_outcomes = 0
        self.transaction_seconds: Callable[[float], None] = _nobody_observes

    @property
    def waiting(self) -> int:
        """Writes queued or in an open transaction."""
        return len(self._waiting)

    def check(self, write: Write) -> None:
        """Raises `RequestError` for a write that cannot be done as it is."""
        validate(write, self._schema())

    def hosts_both_sides(self, write: Write) -> bool:
        """Whether this leader owns every shard of the write, on one database server."""
        owned = self._ownership.owned
        rows = [owned.get(shard) for shard in shards_of(write, self._schema())]
        return None not in rows and len({row.master_server for row in rows if row is not None}) == 1

    async def commit(self, write: Write, deadline: float, *, both_sides: bool, sub_write: bool = False) -> Written:
        """Do a write that has been checked; ``deadline`` in the clock's seconds. Raises `TaoError` when nothing of it
        was written, `OutcomeUnknown` when that cannot be told. A cancelled caller withdraws what still waits."""
        for _ in range(self._settings.max_id_attempts):
            written = await self._commit_once(write, deadline, both_sides=both_sides, sub_write=sub_write)
            error = written.outcome.error
            if error is None:
                return written
            if not isinstance(error, IdTaken) or not isinstance(write, ObjAdd):
                raise error
            write = msgspec.structs.replace(write, id=self.ids.allocate(write.id >> SHARD_SHIFT, self._clock.unix_ms()))
        raise Unavailable(f"{self._settings.max_id_attempts} ids in a row were taken; are the leaders' clocks right?")

    async def _commit_once(self, write: Write, deadline: float, *, both_sides: bool, sub_write: bool) -> Written:
        schema = self._schema()
        home = coordinating_shard(write, schema)
        row = self._ownership.row(home)
        planned = PlannedWrite(write, both_sides)
        shards = shards_of(write, schema) if both_sides else frozenset((home,))
        self._last_ticket += 1
        ticket = self._last_ticket
        done: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
        self._lanes.offer(
            ticket, row.master_server, lane_keys(planned, schema), shards, sub_write, data_bytes_of(write)
        )
        self._waiting[ticket] = _Waiting(planned, shards, row.master_server, deadline, done)
        self._pump_soon(row.master_server)
        late = done.get_loop().call_later(deadline - self._clock.monotonic(), self._refuse_in_line, ticket)
        try:
            return await done
        except asyncio.CancelledError:
            if self._lanes.withdraw(ticket):
                del self._waiting[ticket]
            raise
        finally:
            late.cancel()

    def _refuse_in_line(self, ticket: int) -> None:
        if self._lanes.withdraw(ticket):
            self._resolve(ticket, DeadlineExceeded("the write waited for its turn until its deadline had passed"))

    def _pump_soon(self, server: str) -> None:
        # At the end of the tick: what arrives together is committed together.
        if server not in self._pumped:
            self._pumped.add(server)
            asyncio.get_running_loop().call_soon(self._pump, server)

    def _pump(self, server: str) -> None:
        self._pumped.discard(server)
        while (tickets := self._lanes.next_batch(server)) is not None:
            try:
                self._spawn(self._run(server, tickets))
            except TaoError as error:
                # Nobody will run this batch, so it ends here: else its keys would be held for ever.
                self._end(tickets, error)

    async def _run(self, server: str, tickets: list[int]) -> None:
        try:
            await self._run_batch(server, tickets)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is logged, answered, and the batch ends
            # The batch must end whatever happened, or its keys would be held for ever.
            self._log.error("batch_failed", writes=len(tickets), exc_info=error)
            self._end(tickets, InternalError(f"{type(error).__name__} in the write path; see the leader's log"))
        finally:
            self._pump(server)

    async def _run_batch(self, server: str, tickets: list[int]) -> None:
        self._refuse_late(tickets)
        # Who is refused or has gone keeps a place in the batch, also when it is put back, until the batch ends.
        batch = {ticket: self._waiting[ticket] for ticket in tickets if ticket in self._waiting}
        if not batch:
            self._lanes.finished(tickets)
            return
        if len(batch) > 1 and mixes_touches([waiting.planned for waiting in batch.values()], self._schema()):
            await self._run_one_by_one(server, tickets, batch)
            return
        began = self._clock.monotonic()
        try:
            planned, rows = await self._transact(server, list(batch.values()))
            self.transaction_seconds(self._clock.monotonic() - began)
        except ShardLost as lost:
            self._without(tickets, lost.shard, Fenced(lost.message))
        except ShardBlocked as blocked:
            if blocked.shard >= 0:
                self._without(tickets, blocked.shard, blocked)
            else:
                self._end(tickets, blocked)
        except OutcomeUnknown as unknown:
            self._end_unknown(tickets, batch, unknown)
        except TaoError as error:
            if error.retryable or len(batch) == 1:
                self._end(tickets, error)
            else:
                # Something about one of them, as a type whose table is not there yet: the others must not pay for it.
                await self._run_one_by_one(server, tickets, batch)
        except asyncio.CancelledError:
            # Perhaps in COMMIT, which goes on at the server.
            self._end_unknown(tickets, batch, OutcomeUnknown("the leader stopped in the middle of the transaction"))
            raise
        else:
            try:
                self._conclude(tickets, batch, planned, rows)
            except Exception as error:  # noqa: BLE001 - whatever it is, the rows are written and caches may not know
                self._log.error("caches_not_told", writes=len(tickets), exc_info=error)
                failure = OutcomeUnknown(f"written, but {type(error).__name__} afterwards; see the leader's log")
                self._end_unknown(tickets, batch, failure)

    async def _run_one_by_one(self, server: str, tickets: list[int], batch: dict[int, _Waiting]) -> None:
        """The batch, each write in a transaction of its own. Its keys are held all the while."""
        for ticket, waiting in batch.items():
            alone = {ticket: waiting}
            try:
                planned, rows = await self._transact(server, [waiting])
            except OutcomeUnknown as unknown:
                self._retake(alone)
                self._resolve(ticket, unknown)
            except TaoError as error:
                self._resolve(ticket, error)
            except asyncio.CancelledError:
                stopped = OutcomeUnknown("the leader stopped in the middle of the transaction")
                self._end_unknown(tickets, alone, stopped)
                raise
            else:
                self._tell_writers(alone, planned, rows)
        self._lanes.finished(tickets)

    def _refuse_late(self, tickets: Iterable[int]) -> None:
        now = self._clock.monotonic()
        for ticket in tickets:
            waiting = self._waiting.get(ticket)
            if waiting is None:
                continue
            if waiting.done.done():
                del self._waiting[ticket]  # its caller gave up while it was in a batch that did not come about
            elif waiting.deadline <= now:
                self._resolve(ticket, DeadlineExceeded("the write waited for its turn until its deadline had passed"))

    def _conclude(
        self, tickets: list[int], batch: dict[int, _Waiting], planned: Plan, rows: dict[int, ShardRow]
    ) -> None:
        """The transaction is committed: caches first, then the writers, then the keys."""
        self._tell_writers(batch, planned, rows)
        self._lanes.finished(tickets)

    def _tell_writers(self, batch: dict[int, _Waiting], planned: Plan, rows: dict[int, ShardRow]) -> None:
        self._tell_caches(planned.changes, rows)
        # Made once for all writes: hundreds of edges of one list are one change, which each of them reports.
        changes = [self._carried(change, rows) for change in planned.changes]
        for index, ticket in enumerate(batch):
            messages = [changes[at] for at in planned.changes_of[index]]
            messages.extend(self._carried(message, rows) for message in planned.unchanged_of[index])
            written = Written(planned.outcomes[index], messages, planned.intents[index], planned.settles[index])
            self._resolve(ticket, written)
        self.committed_transactions += 1
        failed = sum(outcome.error is not None for outcome in planned.outcomes)
        self.failed_writes += failed
        self.committed_writes += len(batch) - failed

    def _end_unknown(self, tickets: list[int], batch: dict[int, _Waiting], unknown: OutcomeUnknown) -> None:
        self._retake(batch)
        self._end(tickets, unknown)

    def _retake(self, batch: dict[int, _Waiting]) -> None:
        """Serve nothing of these shards until they have been taken anew, when what happened is in the database."""
        self.unknown_outcomes += 1
        for shard in {shard for waiting in batch.values() for shard in waiting.shards}:
            self._ownership.retake(shard)

    async def _transact(self, server: str, batch: Sequence[_Waiting]) -> tuple[Plan, dict[int, ShardRow]]:
        schema = self._schema()
        writes = [waiting.planned for waiting in batch]
        shards = sorted({shard for waiting in batch for shard in waiting.shards})
        # No longer than the last of the writers waits: that a database hangs is then said, not met with silence.
        left = max(waiting.deadline for waiting in batch) - self._clock.monotonic()
        timeout = min(self._settings.transaction_timeout_seconds, left)
        async with self._store.transaction(server, timeout_seconds=timeout) as transaction:
            rows, existing = await transaction.lock_and_read(shards, keys_of(writes, schema))
            for shard in shards:
                self._check_owned(shard, rows.get(shard), server)
            planned = plan(existing, rows, writes, schema, self._clock.unix_ms())
            if planned.rows:
                await transaction.apply(planned.rows)
                await commit_or_unknown(transaction)
        return planned, rows

    def _check_owned(self, shard: int, row: ShardRow | None, server: str) -> None:
        """The fence: what the locked row says must be what this leader believes (DESIGN.md §6)."""
        mine = self._ownership.owned.get(shard)
        if row is None or mine is None:
            raise ShardLost(shard, f"this leader no longer owns shard {shard}")
        if row.owner != mine.owner or row.generation != mine.generation or row.master_server != server:
            self._ownership.lost(shard)
            raise ShardLost(shard, f"shard {shard} is owned by {row.owner} under generation {row.generation} now")

    def _carried(self, message: Message, rows: dict[int, ShardRow]) -> ShardMessages:
        return next(iter(by_shard((message,), rows, self._settings.inline_object_bytes)))

    def _tell_caches(self, changes: Sequence[Message], rows: dict[int, ShardRow]) -> None:
        # Given up while this was committed: its next owner, which may be this leader again, begins with an empty cache
        # and a new stream after this commit, and may have gone on to later versions. There is nobody to tell.
        owned = self._ownership.owned
        told = [
            change
            for change in changes
            if change.shard in owned and owned[change.shard].generation == rows[change.shard].generation
        ]
        now = self._clock.monotonic()
        with self._cache.witness.because("committed here"):
            for change in told:
                self._cache.apply_message(change, rows[change.shard].version_epoch, now, insert=True)
        self._publisher.publish_all(by_shard(told, rows, self._settings.inline_object_bytes))

    def _without(self, tickets: list[int], shard: int, error: TaoError) -> None:
        for ticket in self._lanes.requeue(tickets, shard):
            self._resolve(ticket, error)

    def _end(self, tickets: list[int], error: TaoError) -> None:
        for ticket in tickets:
            self._resolve(ticket, error)
        self._lanes.finished(tickets)

    def _resolve(self, ticket: int, result: Written | TaoError) -> None:
        waiting = self._waiting.pop(ticket, None)
        if waiting is None:
            return
        if isinstance(result, TaoError):
            self.failed_writes += 1
        if waiting.done.done():
            return
        if isinstance(result, TaoError):
            waiting.done.set_exception(result)
            waiting.done.exception()  # the caller may be gone
        else:
            waiting.done.set_result(result)


def _nobody_observes(_: float) -> None:
    """Until the server wires a metric in."""


def forget_intent_of(intent: IntentRow) -> ForgetIntent:
    """The write that removes an intent once its mirror is written."""
    return ForgetIntent(intent.low_id, intent.high_id, intent.token)
