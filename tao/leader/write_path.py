"""Execute a write at its leader: validate, queue, commit in groups, update caches, answer.

Writes of all shards on one database server are committed in groups. A group gathers while the transaction before it
runs; beside a transaction that takes long a few others run, each key in at most one of them. The order of the last
steps keeps caches correct: a change is applied to this leader's cache before it is published, published before its
keys are free for the next write, and all that happens before the writer is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

import msgspec

from tao.cache import GraphCache
from tao.delivery.publisher import Publisher
from tao.leader.object_ids import ObjectIds
from tao.leader.ownership import Ownership
from tao.model.changes import Message, ObjectChange, ShardMessages
from tao.model.errors import (
    DeadlineExceeded,
    Fenced,
    InternalError,
    OutcomeUnknown,
    Overloaded,
    ShardBlocked,
    TaoError,
    Unavailable,
)
from tao.model.ids import SHARD_SHIFT
from tao.model.ports import Transaction, WriteStore
from tao.model.rows import IntentRow, ShardRow
from tao.model.topology import Database
from tao.model.writes import ForgetIntent, ObjAdd, SettleEdge, Write, WriteOutcome
from tao.observability.metrics import Metrics
from tao.planning.coordination import (
    PlannedWrite,
    Scope,
    data_bytes_of,
    keys_of,
    lane_keys,
    mixes_touches,
    scope_of,
)
from tao.planning.draft import IdTaken
from tao.planning.lanes import LaneScheduler
from tao.planning.node_states import pages_wanted
from tao.planning.retention import oldest_wanted
from tao.planning.write_plan import WritePlan, draft_writes, plan_of, validate
from tao.replication.gtid import source_position
from tao.serving.configuration import ServerContext

_SMALL_HEAP: Final = 1_024
"""Deadlines that are kept although their writes may have ended: below this, a sweep costs more than it frees."""

_TIMER_SECONDS: Final = 0.001
"""The resolution of the loop's timers: one may fire this much early."""


@dataclass(frozen=True, slots=True)
class WritePathSettings:
    """Bounds of the write path."""

    lanes_per_server: int = 4
    """Transactions side by side on one database server."""

    gather_seconds: float = 0.02
    """While a transaction of the server is younger than this, writes are gathered for the next one. Most transactions
    take less, and so go one after the other: with 64 awaiters, three tenths of them writers, one that has all the
    writes of 10 ms takes 0.8 times the servers' CPU of four side by side, and they answer 1.09 times as much. Older
    ones wait for a lock, or for a distant replica, and hold nobody up."""

    max_batch_writes: int = 192
    """Writes in one transaction. A load with 192 takes 0.8 times the CPU of one with 64; with 512 it takes no less, and
    keys are held for longer."""

    max_batch_bytes: int = 4 << 20
    """Data in one transaction, in bytes. This takes the database some tens of milliseconds, which small writes of
    the same lane wait for."""

    max_waiting_per_shard: int = 2_000
    """Writes that may wait for one shard, and callers that may wait for its ids. At a few thousand a second, this
    is what can be done within a request's deadline."""

    transaction_timeout_seconds: float = 4.0
    """Time limit for a transaction: below a request's deadline of 5 s and above the servers' bound on lock waits."""

    max_id_attempts: int = 8
    """Ids tried for one new object. A taken id means clock skew or another leader, which a few attempts get past."""

    inline_object_bytes: int = 64 << 10
    """Objects above this size are left out of the messages about them; caches read such an object on demand."""


@dataclass(slots=True)
class Written:
    """The result of one write.

    ``messages``: what the caches of its writer must apply. Writes committed together that report the same change
    share the value. ``intent`` and ``settles``: a mirror that is still to be written, and the writes that do so
    (None: the coordinator's edges must be read first)."""

    outcome: WriteOutcome
    messages: list[ShardMessages] = field(default_factory=list)
    intent: IntentRow | None = None
    settles: tuple[SettleEdge, ...] | None = None


class _QueuedWrite(msgspec.Struct):
    """A write that waits for its transaction, or is in it."""

    planned: PlannedWrite
    shards: frozenset[int]
    server: str
    deadline: float
    on_done: Callable[[Written | TaoError], None]
    is_abandoned: bool = False
    """Its caller has gone while it was in an open transaction."""


class _Committed(NamedTuple):
    """What a transaction committed: the plan, the locked rows of its shards, and the whole messages of each shard."""

    plan: WritePlan
    rows: dict[int, ShardRow]
    batches: Sequence[ShardMessages]


class ShardLost(Overloaded):
    """This leader does not own a shard of the batch any more. The other writes are planned again without it."""

    def __init__(self, shard: int, message: str) -> None:
        super().__init__(message)
        self.shard = shard


async def commit_or_unknown(transaction: Transaction) -> str:
    """Commit the transaction. Returns its GTID, if it is known.

    Raises what `Transaction.commit` raises. Any other failure becomes `OutcomeUnknown`, because the commit may have
    happened."""
    try:
        return await transaction.commit()
    except TaoError:
        raise
    except Exception as error:
        raise OutcomeUnknown(f"{type(error).__name__} in COMMIT: {error}") from error


def bug_after_commit(error: Exception) -> OutcomeUnknown:
    """Return the error of a write that is committed and met a bug afterwards."""
    return OutcomeUnknown(f"written, but {type(error).__name__} afterwards; see the leader's log")


class WritePath:
    """Queues and commits the writes of the shards that this leader owns.

    `tao.leader.inverse_path` writes inverse edges at other leaders."""

    def __init__(
        self,
        context: ServerContext,
        settings: WritePathSettings,
        ownership: Ownership,
        store: WriteStore,
        cache: GraphCache,
        publisher: Publisher,
    ) -> None:
        self._ownership: Final = ownership
        self._store: Final = store
        self._cache: Final = cache
        self._publisher: Final = publisher
        self._configuration: Final = context.configuration
        self._clock: Final = context.clock
        self._spawn: Final = context.spawn_as("transaction")
        self._settings: Final = settings
        self._log: Final = context.log
        self._lanes: Final = LaneScheduler(
            settings.lanes_per_server,
            settings.max_batch_writes,
            settings.max_waiting_per_shard,
            settings.max_batch_bytes,
        )
        self._waiting: dict[int, _QueuedWrite] = {}
        # The loop's time of each deadline, with the write; of writes that have ended, too, until it is reached.
        self._deadlines: list[tuple[float, int]] = []
        self._alarm: asyncio.TimerHandle | None = None
        self._starting: set[str] = set()
        # For each server, the loop's times at which its open transactions began, and the timer that begins another one.
        self._open: dict[str, list[float]] = {}
        self._gathering: dict[str, asyncio.TimerHandle] = {}
        self._last_number = 0
        self.ids: Final = ObjectIds(
            context,
            ownership,
            store,
            timeout_seconds=settings.transaction_timeout_seconds,
            max_waiting_per_shard=settings.max_waiting_per_shard,
        )
        self.committed_writes = 0
        self.committed_transactions = 0
        self.failed_writes = 0
        self.unknown_outcomes = 0
        self.transaction_seconds: Callable[[float], None] = lambda _: None

    @property
    def waiting(self) -> int:
        """Return the number of writes that are queued or in an open transaction."""
        return len(self._waiting)

    def check(self, write: Write) -> None:
        """Validate a write without its rows. Raises `RequestError`."""
        validate(write, self._configuration.schema)

    def owns_together(self, shards: Iterable[int]) -> bool:
        """Return whether this leader owns all of these shards, on one database server."""
        owned, server = self._ownership.owned, ""
        for shard in shards:
            row = owned.get(shard)
            if row is None or row.master_server != (server or row.master_server):
                return False
            server = row.master_server
        return True

    async def commit(self, write: Write, deadline: float, *, both_sides: bool, sub_write: bool = False) -> Written:
        """Execute a checked write; ``deadline`` is a time of the clock, in seconds.

        Raises `TaoError` when nothing of the write was committed, `OutcomeUnknown` when it may have been. Cancelling
        the caller withdraws a write that still waits."""
        for _ in range(self._settings.max_id_attempts):
            written = await self._commit_once(write, deadline, both_sides=both_sides, sub_write=sub_write)
            error = written.outcome.error
            if error is None:
                return written
            if not isinstance(error, IdTaken) or not isinstance(write, ObjAdd):
                raise error
            other = await self.ids.allocate(write.id >> SHARD_SHIFT, deadline=deadline)
            write = msgspec.structs.replace(write, id=other)
        raise Unavailable(f"{self._settings.max_id_attempts} ids in a row were taken; check the clocks of the leaders")

    async def _commit_once(self, write: Write, deadline: float, *, both_sides: bool, sub_write: bool) -> Written:
        done: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
        scope = scope_of(write, self._configuration.schema)
        number = self.begin(
            write, scope, deadline, partial(_set_done, done), both_sides=both_sides, sub_write=sub_write
        )
        try:
            return await done
        except asyncio.CancelledError:
            if self._lanes.withdraw(number):
                del self._waiting[number]
            elif number in self._waiting:
                self._waiting[number].is_abandoned = True
            raise

    def begin(
        self,
        write: Write,
        scope: Scope,
        deadline: float,
        on_done: Callable[[Written | TaoError], None],
        *,
        both_sides: bool,
        sub_write: bool = False,
    ) -> int:
        """Queue a checked write, and return its number.

        ``on_done`` is called once, with the result or the error of the write, in the turn of the loop in which that is
        known; it must not raise, and begin no other write. Raises what `commit` raises, except `OutcomeUnknown`, with
        nothing queued. A new object whose id was taken has an `IdTaken` in its outcome."""
        row = self._ownership.row(scope.home)
        planned = PlannedWrite(write, both_sides)
        shards = scope.shards if both_sides else frozenset((scope.home,))
        self._last_number += 1
        number = self._last_number
        keys = lane_keys(planned, self._configuration.schema)
        self._lanes.offer(number, row.master_server, keys, shards, sub_write, data_bytes_of(write))
        self._waiting[number] = _QueuedWrite(planned, shards, row.master_server, deadline, on_done)
        self._start_batches_soon(row.master_server)
        self._watch_deadline(number, deadline - self._clock.monotonic())
        return number

    def _watch_deadline(self, number: int, seconds: float) -> None:
        """Refuse the write if it is still queued after so many seconds. One timer serves all writes: nearly every
        write ends long before its deadline."""
        loop = asyncio.get_running_loop()
        at = loop.time() + seconds
        if len(self._deadlines) > _SMALL_HEAP + 2 * len(self._waiting):
            self._deadlines = [each for each in self._deadlines if each[1] in self._waiting]
            heapify(self._deadlines)
        heappush(self._deadlines, (at, number))
        if self._alarm is None or self._deadlines[0][1] == number:
            self._set_alarm(loop)

    def _set_alarm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = loop.call_at(self._deadlines[0][0], self._refuse_late)

    def _refuse_late(self) -> None:
        loop = asyncio.get_running_loop()
        due, deadlines, self._alarm = loop.time() + _TIMER_SECONDS, self._deadlines, None
        try:
            while deadlines and (deadlines[0][0] <= due or deadlines[0][1] not in self._waiting):
                number = heappop(deadlines)[1]
                if self._lanes.withdraw(number):
                    self._resolve(number, DeadlineExceeded("the write was still queued at its deadline"))
        finally:
            if self._deadlines:  # also after a writer's failure, which must not keep the others waiting
                self._set_alarm(loop)

    def _start_batches_soon(self, server: str) -> None:
        # Start at the end of the tick, so that writes that arrive together are committed together.
        if server not in self._starting:
            self._starting.add(server)
            asyncio.get_running_loop().call_soon(self._start_batches, server)

    def _start_batches(self, server: str) -> None:
        self._starting.discard(server)
        waiting = self._lanes.waiting_writes
        while waiting(server) and not self._gathers(server) and (numbers := self._lanes.next_batch(server)):
            began = asyncio.get_running_loop().time()
            try:
                self._spawn(self._run(server, numbers, began))
            except TaoError as error:
                # No task will run this batch, so fail it here; otherwise its keys would be held for ever.
                self._fail_batch(numbers, error)
            else:
                self._open.setdefault(server, []).append(began)

    def _gathers(self, server: str) -> bool:
        """Return whether the waiting writes of a server wait for an open transaction to end, and see to it that they do
        not wait for long."""
        timer = self._gathering.pop(server, None)
        if timer is not None:
            timer.cancel()
        if not self._open.get(server) or self._lanes.waiting_writes(server) >= self._settings.max_batch_writes:
            return False
        loop = asyncio.get_running_loop()
        until = self._open[server][-1] + self._settings.gather_seconds
        if loop.time() >= until - _TIMER_SECONDS:
            return False
        self._gathering[server] = loop.call_at(until, self._start_batches, server)
        return True

    async def _run(self, server: str, numbers: list[int], began: float) -> None:
        try:
            await self._run_batch(server, numbers)
        except Exception as error:  # noqa: BLE001 - any failure is logged and answered, and the batch ends
            # The batch must end in any case, or its keys would be held for ever.
            self._log.error("batch_failed", writes=len(numbers), exc_info=error)
            self._fail_batch(numbers, InternalError(f"{type(error).__name__} in the write path; see the leader's log"))
        finally:
            self._open[server].remove(began)
            self._start_batches(server)

    async def _run_batch(self, server: str, numbers: list[int]) -> None:
        self._refuse_expired(numbers)
        # A write that is refused or whose caller has gone keeps its place in the batch, even a requeued one, until the
        # batch ends.
        batch = {number: self._waiting[number] for number in numbers if number in self._waiting}
        if not batch:
            self._lanes.finish(numbers)
            return
        if len(batch) > 1 and mixes_touches([queued.planned for queued in batch.values()], self._configuration.schema):
            await self._run_one_by_one(server, numbers, batch)
            return
        began = self._clock.monotonic()
        try:
            committed = await self._transact(server, list(batch.values()))
            self.transaction_seconds(self._clock.monotonic() - began)
        except ShardLost as lost:
            self._requeue_without(numbers, lost.shard, Fenced(lost.message))
        except ShardBlocked as blocked:
            if blocked.shard >= 0:
                self._requeue_without(numbers, blocked.shard, blocked)
            else:
                self._fail_batch(numbers, blocked)
        except OutcomeUnknown as unknown:
            self._fail_batch_unknown(numbers, batch, unknown)
        except TaoError as error:
            if error.retryable or len(batch) == 1:
                self._fail_batch(numbers, error)
            else:
                # One write causes the error, such as a type whose table does not exist yet. The others must not fail
                # with it.
                await self._run_one_by_one(server, numbers, batch)
        except asyncio.CancelledError:
            # The cancellation may have come during COMMIT, which goes on at the server.
            self._fail_batch_unknown(
                numbers, batch, OutcomeUnknown("the leader stopped in the middle of the transaction")
            )
            raise
        else:
            try:
                # The caches are updated and the writers answered before the keys are free.
                self._answer_writers(batch, committed)
                self._lanes.finish(numbers)
            except Exception as error:  # noqa: BLE001 - the rows are committed, and caches may lack the change
                self._log.error("caches_not_updated", writes=len(numbers), exc_info=error)
                self._fail_batch_unknown(numbers, batch, bug_after_commit(error))

    async def _run_one_by_one(self, server: str, numbers: list[int], batch: dict[int, _QueuedWrite]) -> None:
        """Execute each write of the batch in a transaction of its own. The keys of the batch stay held until the
        last."""
        for number, queued in batch.items():
            alone = {number: queued}
            try:
                committed = await self._transact(server, [queued])
            except OutcomeUnknown as unknown:
                self._retake(alone, unknown)
                self._resolve(number, unknown)
            except TaoError as error:
                self._resolve(number, error)
            except asyncio.CancelledError:
                stopped = OutcomeUnknown("the leader stopped in the middle of the transaction")
                self._fail_batch_unknown(numbers, alone, stopped)
                raise
            else:
                self._answer_writers(alone, committed)
        self._lanes.finish(numbers)

    def _refuse_expired(self, numbers: Iterable[int]) -> None:
        now = self._clock.monotonic()
        for number in numbers:
            queued = self._waiting.get(number)
            if queued is None:
                continue
            if queued.is_abandoned:
                del self._waiting[number]  # its caller gave up while it was in a batch that was rolled back
            elif queued.deadline <= now:
                self._resolve(number, DeadlineExceeded("the write was still queued at its deadline"))

    def _answer_writers(self, batch: dict[int, _QueuedWrite], committed: _Committed) -> None:
        plan, rows, batches = committed
        self._publish_changes(batches, rows)
        # Converted once for all writes: hundreds of edges of one list are one change, which each of them reports.
        limit = self._settings.inline_object_bytes
        changes = [
            ShardMessages(shard := change.shard, rows[shard].version_epoch, (change,))
            for change in _without_large_objects(plan.changes, limit)
        ]
        for index, number in enumerate(batch):
            messages = [changes[at] for at in plan.changes_of[index]]
            messages.extend(
                ShardMessages(message.shard, rows[message.shard].version_epoch, (message,))
                for message in plan.unchanged_of[index]
            )
            written = Written(plan.outcomes[index], messages, plan.intents[index], plan.settles[index])
            self._resolve(number, written)
        self.committed_transactions += 1
        failed = len(plan.outcomes) - [outcome.error for outcome in plan.outcomes].count(None)
        self.failed_writes += failed
        self.committed_writes += len(batch) - failed

    def _fail_batch_unknown(self, numbers: list[int], batch: dict[int, _QueuedWrite], unknown: OutcomeUnknown) -> None:
        self._retake(batch, unknown)
        self._fail_batch(numbers, unknown)

    def _retake(self, batch: dict[int, _QueuedWrite], unknown: OutcomeUnknown) -> None:
        """Serve nothing of these shards until they have been taken again; then the database knows the outcome."""
        self.unknown_outcomes += 1
        shards = sorted({shard for queued in batch.values() for shard in queued.shards})
        server = next(iter(batch.values())).server
        database = self._database_of(server)
        self._log.warning(
            "outcome_unknown",
            database="" if database is None else database.name,
            database_server=server,
            shards=shards,
            writes=len(batch),
            reason=unknown.message,
        )
        for shard in shards:
            self._ownership.retake(shard)

    def _database_of(self, server: str) -> Database | None:
        """Return the database of a server: the topology may have changed since its shards were taken."""
        return self._configuration.routes.database_with(server)

    async def _transact(self, server: str, batch: Sequence[_QueuedWrite]) -> _Committed:
        """Lock and read the rows, plan the writes, and commit the plan. Raises `ShardLost` and `TaoError`."""
        schema = self._configuration.schema
        writes = [queued.planned for queued in batch]
        shards = sorted({shard for queued in batch for shard in queued.shards})
        # The timeout ends when the last writer stops queued, so that a database that hangs is reported.
        left = max([queued.deadline for queued in batch]) - self._clock.monotonic()
        timeout = min(self._settings.transaction_timeout_seconds, left)
        async with self._store.transaction(server, timeout_seconds=timeout) as transaction:
            keys = keys_of(writes, schema)
            rows, existing = await transaction.lock_and_read(shards, keys)
            for shard in shards:
                self._check_owned(shard, rows.get(shard), server)
            if wanted := oldest_wanted(existing, writes, schema):
                existing.oldest = await transaction.lock_oldest(wanted)
            for page in pages_wanted(writes, schema):
                existing.pages[page] = await transaction.lock_page(page)
            drafted = draft_writes(existing, writes, schema, self._clock.unix_ms())
            if unread := drafted.unread_lists(keys):
                existing.lists.update(await transaction.lock_lists(unread))
            plan = plan_of(drafted, rows)
            batches = group_by_shard(plan.changes, rows)
            if plan.rows:
                await transaction.apply(plan.rows)
                database = self._database_of(server)
                with self._publisher.committed.committing("" if database is None else database.name):
                    self._keep_messages(await commit_or_unknown(transaction), server, batches)
        return _Committed(plan, rows, batches)

    def _keep_messages(self, gtid: str, server: str, batches: Sequence[ShardMessages]) -> None:
        """Keep the messages of a commit for the tailer, which then need not decode it. They are whole, as the tailer
        reads them."""
        database = self._database_of(server)
        position = source_position(database.name, database.version_epoch, gtid) if gtid and database else None
        if position is not None and batches:
            self._publisher.committed.keep(*position, batches, self._clock.monotonic())

    def _check_owned(self, shard: int, row: ShardRow | None, server: str) -> None:
        """Check the fence: the locked row must name the ownership that this leader believes it has."""
        if not self._ownership.confirm_locked(shard, row, server):
            if row is None:
                raise ShardLost(shard, f"this leader no longer owns shard {shard}")
            raise ShardLost(shard, f"shard {shard} is owned by {row.owner} under generation {row.generation} now")

    def _publish_changes(self, batches: Iterable[ShardMessages], rows: dict[int, ShardRow]) -> None:
        # Skip shards given up during the commit. The next owner, which may be this leader again, begins with an empty
        # cache and a new stream after this commit, and may have gone on to later versions.
        owned = self._ownership.owned
        kept = [
            batch
            for batch in batches
            if batch.shard in owned and owned[batch.shard].generation == rows[batch.shard].generation
        ]
        now = self._clock.monotonic()
        with self._cache.recorder.caused_by("committed here"):
            for batch in kept:
                self._cache.apply_all(batch, now, insert=True)
        limit = self._settings.inline_object_bytes
        self._publisher.publish_all([_without_large_data(batch, limit) for batch in kept])

    def _requeue_without(self, numbers: list[int], shard: int, error: TaoError) -> None:
        for number in self._lanes.requeue(numbers, shard):
            self._resolve(number, error)

    def _fail_batch(self, numbers: list[int], error: TaoError) -> None:
        for number in numbers:
            self._resolve(number, error)
        self._lanes.finish(numbers)

    def _resolve(self, number: int, result: Written | TaoError) -> None:
        queued = self._waiting.pop(number, None)
        if queued is None:
            return
        if isinstance(result, TaoError):
            self.failed_writes += 1
        queued.on_done(result)

    def register(self, metrics: Metrics) -> None:
        """Register the metrics."""
        self.transaction_seconds = metrics.histogram(
            "database_transaction_seconds", "Write transactions, from the first lock to the commit."
        ).observe
        metrics.gauge_family(
            "writes_total",
            "Writes of this leader's shards, by outcome.",
            "outcome",
            lambda: {
                "committed": self.committed_writes,
                "failed": self.failed_writes,
                "unknown": self.unknown_outcomes,
            },
        )
        metrics.gauge_family(
            "transactions_total",
            "Write transactions committed.",
            "outcome",
            lambda: {"committed": self.committed_transactions},
        )
        metrics.gauge("waiting_writes", "Writes queued or in a transaction.", lambda: self.waiting)

    def summary(self) -> dict[str, float]:
        """Return the numbers for `/stats`."""
        return {
            "committed": self.committed_writes,
            "transactions": self.committed_transactions,
            "failed": self.failed_writes,
            "unknown": self.unknown_outcomes,
            "waiting": self.waiting,
        }


def _set_done(done: asyncio.Future[Written], result: Written | TaoError) -> None:
    if done.done():  # its caller has gone
        return
    if isinstance(result, TaoError):
        done.set_exception(result)
        done.exception()  # marks it as retrieved: the caller may be gone
    else:
        done.set_result(result)


def forget_intent_of(intent: IntentRow) -> ForgetIntent:
    """Return the write that removes an intent once its mirror is written."""
    return ForgetIntent(intent.low_id, intent.high_id, intent.token)


def _without_large_objects(messages: tuple[Message, ...], inline_object_bytes: int) -> tuple[Message, ...]:
    """Return the messages without the data of objects above ``inline_object_bytes``: mostly the same tuple."""
    others: list[Message] | None = None
    for place, message in enumerate(messages):
        if isinstance(message, ObjectChange) and message.data is not None and len(message.data) > inline_object_bytes:
            others = others or list(messages)
            others[place] = msgspec.structs.replace(message, data=None)
    return messages if others is None else tuple(others)


def _without_large_data(batch: ShardMessages, inline_object_bytes: int) -> ShardMessages:
    messages = _without_large_objects(batch.messages, inline_object_bytes)
    return batch if messages is batch.messages else ShardMessages(batch.shard, batch.version_epoch, messages)


def group_by_shard(messages: Iterable[Message], rows: dict[int, ShardRow]) -> Sequence[ShardMessages]:
    """Return one batch of messages per shard, in order, under the version epoch of its locked row."""
    grouped: dict[int, list[Message]] = {}
    for message in messages:
        grouped.setdefault(message.shard, []).append(message)
    return [ShardMessages(shard, rows[shard].version_epoch, tuple(batch)) for shard, batch in grouped.items()]
