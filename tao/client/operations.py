"""The foundation of a graph's operations: send one query or write, or many, and wait for the results.

A read goes through the hot items, if its row is one, else into the queue of the server that the router chooses.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import compress, repeat
from typing import Final, TypeVar, cast

from tao.client.batches import by_server
from tao.client.configuration import ClientConfiguration
from tao.client.consistency import CACHED, Consistency
from tao.client.diagnostics import ClientStats, Trace
from tao.client.dispatcher import Dispatcher
from tao.client.hot_items import HotItems
from tao.client.own_writes import CRITICAL, MinimumVersions, OwnWrites, Recording
from tao.client.pending_inverses import PendingInverses
from tao.client.request_builder import RequestBuilder
from tao.client.reverse_lookup import ReverseLookup
from tao.client.server_queues import JoinedFuture, Waiter, WriteRow
from tao.client.settings import ClientSettings
from tao.client.values import Accepted, ObjectReader
from tao.model.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NoJournal,
    PermissionDenied,
    StaleRead,
    TaoError,
    Unavailable,
    UnknownType,
    WriteLost,
)
from tao.model.ids import SHARD_SHIFT
from tao.model.receipts import Receipt
from tao.model.tokens import WriteToken
from tao.model.topology import Topology
from tao.routing.routes import Routes
from tao.schema.registry import Schema
from tao.wire.convert import token_of
from tao.wire.read_batch import QueryRow
from tao.wire.v1 import session_pb2 as pb

Result = TypeVar("Result")

PRIORITY: Final[ContextVar[int]] = ContextVar("tao_journaled_priority", default=0)
"""The priority with which the writes of this context are journaled; 0: they are made at once."""


def _stale_for_token(denied: PermissionDenied) -> StaleRead:
    """Return the error of a read whose token, and not its caller, asks for the master, which the caller may not read.
    It succeeds once the token has run out, or the write has come through."""
    return StaleRead(f"the token demands a read of the master; try again later, or without it: {denied.message}")


_COPY_SECONDS: Final = 0.2
"""Pause before a follower that has a copy of an accepted write is asked again whether it makes the write."""
_LOOK_SECONDS: Final = 1.0
"""Longest wait for a follower to say whether it has a copy of a write that another one has accepted."""
_NEW_SHARD_SECONDS: Final = 2.0
"""Time from learning of added shards until new objects are placed there: all servers have learned of them by then,
and so have the clients that are given the ids."""


class Operations:
    """The state of an open graph. It follows topology and schema by itself (`use_routes`, `use_schema`)."""

    def __init__(
        self,
        configuration: ClientConfiguration,
        dispatcher: Dispatcher,
        settings: ClientSettings,
        unix_seconds: Callable[[], float],
    ) -> None:
        self._configuration = configuration
        self._dispatcher = dispatcher
        self._router = dispatcher.router
        self._loop = asyncio.get_running_loop()
        self._create_future = self._loop.create_future
        self._own_writes = OwnWrites(self._loop, settings.own_writes_keys, settings.own_writes_seconds)
        self._attached = self._own_writes.versions if settings.attach_own_writes else {}
        self._own_pending = self._own_writes.pending if settings.attach_own_writes else {}
        self._pending_inverses = PendingInverses(dispatcher, self._own_writes, lambda: self.schema)
        self._reverse_lookup = ReverseLookup(self._own_writes, settings)
        self._consistency = settings.consistency
        self._timeout_seconds = settings.timeout_seconds
        self._hot = HotItems(self._router, self._own_writes.versions, self._attached, settings, dispatcher.stats)
        self._hot_rows = self._hot.by_row
        if settings.keep_hot_items:
            dispatcher.on_hot = self._hot.record
        self._placed_shards = configuration.topology.shards
        self._builder = RequestBuilder(
            configuration.schema, configuration.topology.shards, self._any_shard, unix_seconds
        )
        self._objects = ObjectReader(configuration.schema)
        self._make_receipt: Callable[[bytes, tuple[int, ...]], Accepted] = partial(Accepted, wait=self.applied)
        configuration.follow(self)

    @property
    def schema(self) -> Schema:
        """Return the schema in use now."""
        return self._builder.schema

    @property
    def topology(self) -> Topology:
        """Return the topology that requests are routed by now: this graph's region of it, and the databases."""
        return self._configuration.topology

    @property
    def region(self) -> str:
        """Return the name of the region whose followers this graph uses."""
        return self._configuration.region

    @property
    def stats(self) -> ClientStats:
        """Return the counters since the graph was opened."""
        return self._dispatcher.stats

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Collect which tier answered each read of this graph, in all tasks, while the block runs. A trace opened
        inside another one takes over from it until it ends."""
        trace = Trace(self._atype_name)
        outer, self._dispatcher.trace = self._dispatcher.trace, trace
        try:
            yield trace
        finally:
            self._dispatcher.trace = outer

    @property
    def token(self) -> WriteToken:
        """Return a token of the recent writes of this graph in all tasks (`ClientSettings.own_writes_seconds`). Use a
        `recording` for the writes of one request."""
        return self._own_writes.token()

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Collect a token of the writes that this task, and the tasks it starts, make through this graph while the
        block runs: ``with graph.recording() as recording: …``, then ``recording.token``. Recordings nest."""
        with self._own_writes.recording() as recording:
            yield recording

    def use_routes(self, routes: Routes) -> None:
        """Take over the routes of a newer topology. Raises `TopologyError` when they lack this graph's region or
        tier."""
        self._dispatcher.use_routes(routes)
        if routes.shards > self._builder.shards:
            self._loop.call_later(_NEW_SHARD_SECONDS, self._place_on_new_shards)
        self._builder = replace(self._builder, shards=routes.shards)

    def _place_on_new_shards(self) -> None:
        self._placed_shards = self._builder.shards

    def _any_shard(self, shards: int) -> int:
        """Choose a shard for an object without a place: one that servers and other clients know by now."""
        return random.randrange(min(shards, self._placed_shards))

    def use_schema(self, schema: Schema) -> None:
        """Take over a newer schema."""
        self._builder = replace(self._builder, schema=schema)
        self._objects = ObjectReader(schema)
        self._hot.clear()

    async def _read(self, operation: int, row: QueryRow, consistency: Consistency | None) -> bytes:
        if consistency is None:
            consistency = self._consistency
        if (self._own_pending and row[:2] in self._own_pending) or (
            consistency is not CACHED and self._demand_of(consistency).has_pending
        ):
            (value,) = await self._read_pending(operation, (row,), self._demand_of(consistency))
            if isinstance(value, TaoError):
                raise value
            return value
        by_token = False
        if consistency is CACHED:
            if self._hot_rows and row in self._hot_rows:
                return await self._read_hot(row)
            minimum = self._attached.get(row[:2], 0) if self._attached else 0
            queue = self._router.reader(row[0] >> SHARD_SHIFT).reads
        else:
            minimum = MinimumVersions(self._demand_of(consistency).token, self._attached).of(row)
            queue = self._router.reader(row[0] >> SHARD_SHIFT).reads_with(consistency, minimum == CRITICAL)
            by_token = minimum == CRITICAL and not consistency.critical
            # The master is new enough for any token, but a lost write is reported only to a read that names a version.
            minimum = max(minimum, 0)
        future: asyncio.Future[bytes] = self._create_future()
        queue.add(operation, row, future, minimum)
        try:
            return await future
        except asyncio.CancelledError:
            self._dispatcher.note_cancelled()
            raise
        except PermissionDenied as denied:
            if by_token:
                raise _stale_for_token(denied) from denied
            raise
        except WriteLost:
            self._own_writes.forget(row[:2], minimum)
            raise

    async def _read_hot(self, row: QueryRow) -> bytes:
        minimum = self._attached.get(row[:2], 0)
        future: asyncio.Future[bytes] = self._create_future()
        self._hot.read(row, future)
        try:
            return await future
        except WriteLost:
            self._own_writes.forget(row[:2], minimum)
            raise

    async def _read_many(
        self, operation: int, rows: Sequence[QueryRow], consistency: Consistency | None
    ) -> list[bytes | TaoError]:
        consistency = self._demand_of(consistency)
        if self._own_pending or consistency.has_pending:
            return await self._read_pending(operation, rows, consistency)
        return await self._read_settled(operation, rows, consistency)

    async def _read_pending(
        self, operation: int, rows: Sequence[QueryRow], consistency: Consistency
    ) -> list[bytes | TaoError]:
        """Read rows of which some may be of lists that lack inverse edges."""
        consistency, failed = await self._pending_inverses.settle(rows, consistency, self._own_pending)
        settled = [row for row in rows if row[:2] not in failed] if failed else rows
        written = self._pending_inverses.written(settled, self._own_pending)
        values = await self._read_settled(operation, settled, consistency)
        written.note_read(settled, values)
        remaining = iter(values)
        return [failed.get(row[:2]) or next(remaining) for row in rows] if failed else values

    async def _read_settled(
        self, operation: int, rows: Sequence[QueryRow], consistency: Consistency
    ) -> list[bytes | TaoError]:
        joined: JoinedFuture[bytes] = JoinedFuture(len(rows), self._loop)
        waiters = list(zip(repeat(joined), range(len(rows))))  # no strict: one of them has no end
        minimums = self._minimums(rows, consistency)
        all_rows, all_minimums = rows, minimums
        if self._hot_rows and consistency is CACHED:
            hot = [row in self._hot_rows for row in rows]
            for row, waiter in zip(compress(rows, hot), compress(waiters, hot), strict=True):
                self._hot.read(row, waiter)
            rest = [not each for each in hot]
            rows, waiters = list(compress(rows, rest)), list(compress(waiters, rest))
            minimums = list(compress(minimums, rest))
        if any(minimums):
            self._add_with_minimums(operation, rows, waiters, minimums, consistency)
            rest = [not minimum for minimum in minimums]
            rows, waiters = list(compress(rows, rest)), list(compress(waiters, rest))
        self._add_without_minimums(operation, rows, waiters, consistency)
        values = await self._all_results(joined)
        for place, (row, minimum, value) in enumerate(zip(all_rows, all_minimums, values, strict=False)):
            if isinstance(value, WriteLost):
                self._own_writes.forget(row[:2], minimum)
            elif isinstance(value, PermissionDenied) and minimum == CRITICAL and not consistency.critical:
                values[place] = _stale_for_token(value)
        return values

    def _demand_of(self, consistency: Consistency | None) -> Consistency:
        """Return the demand of a read, or the graph's default. Raises `InvalidArgument` for another type of value."""
        if consistency is None:
            return self._consistency
        if not isinstance(consistency, Consistency):
            raise InvalidArgument(f"consistency must be a Consistency, not {type(consistency).__name__}")
        return consistency

    def _minimums(self, rows: Sequence[QueryRow], consistency: Consistency) -> list[int]:
        """Return the lowest version that may answer each row, or an empty list when any version may answer all."""
        own = self._attached
        if consistency.token is None:
            return [own.get(row[:2], 0) for row in rows] if own else []
        minimum_of = MinimumVersions(consistency.token, own).of
        return [minimum_of(row) for row in rows]

    def _add_with_minimums(
        self,
        operation: int,
        rows: Sequence[QueryRow],
        waiters: Sequence[Waiter[bytes]],
        minimums: Sequence[int],
        consistency: Consistency,
    ) -> None:
        """Queue the rows that have a minimum version."""
        receivers = list(zip(waiters, minimums, strict=True))
        plain = [minimum > 0 for minimum in minimums]
        parts = by_server(list(compress(rows, plain)), list(compress(receivers, plain)), self._router.reader)
        for server, (own_rows, own_receivers) in parts.items():
            own_waiters, own_minimums = zip(*own_receivers, strict=True)
            server.reads_with(consistency).add_many(operation, own_rows, own_waiters, own_minimums)
        if CRITICAL in minimums:
            for row, (waiter, minimum) in zip(rows, receivers, strict=True):
                if minimum == CRITICAL:
                    queue = self._router.reader(row[0] >> SHARD_SHIFT).reads_with(consistency, critical=True)
                    queue.add(operation, row, waiter)

    def _add_without_minimums(
        self, operation: int, rows: Sequence[QueryRow], waiters: Sequence[Waiter[bytes]], consistency: Consistency
    ) -> None:
        for server, (own_rows, own_waiters) in by_server(rows, waiters, self._router.reader).items():
            server.reads_with(consistency).add_many(operation, own_rows, own_waiters)

    async def _write(self, row: WriteRow, priority: int | None = None) -> pb.WriteResult:
        """Make a write at once, or have it journaled with a ``priority``; None: as the block demands (`PRIORITY`)."""
        future: asyncio.Future[pb.WriteResult] = self._create_future()
        self._router.writer(row.shard).writes_with(PRIORITY.get() if priority is None else priority).add(row, future)
        try:
            result = await future
        except asyncio.CancelledError:
            self._dispatcher.note_cancelled()
            raise
        self._record_writes((result,))
        return result

    async def _write_many(
        self, rows: Sequence[WriteRow], priority: int | None = None
    ) -> list[pb.WriteResult | TaoError]:
        """Make writes as `_write` does."""
        joined: JoinedFuture[pb.WriteResult] = JoinedFuture(len(rows), self._loop)
        chosen = PRIORITY.get() if priority is None else priority
        for index, row in enumerate(rows):
            self._router.writer(row.shard).writes_with(chosen).add(row, (joined, index))
        results = await self._all_results(joined)
        self._record_writes([each for each in results if not isinstance(each, TaoError)])
        return results

    async def _all_results(self, joined: JoinedFuture[Result]) -> list[Result | TaoError]:
        try:
            return await joined.future
        except asyncio.CancelledError:
            self._dispatcher.note_cancelled()
            raise

    def _receipt_of(self, row: WriteRow, result: pb.WriteResult) -> Accepted:
        """Return the receipt of a journaled write."""
        return self._make_receipt(result.accepted, shards_named(row.write))

    async def applied(self, receipt: Accepted, timeout: float | None = None) -> WriteToken:  # noqa: ASYNC109 - as in `Accepted.applied`
        """Wait until a journaled write is made: see `Accepted.applied`, which is the same."""
        # Ask the follower that accepted the write; it names another receipt if it has handed the write over.
        deadline = self._loop.time() + (self._timeout_seconds if timeout is None else timeout)
        shown = receipt.receipt
        if not shown:  # a follower of an earlier version has made the write at once
            return token_without_result(receipt.shards)
        while True:
            result = await self._ask_applied(shown, deadline)
            if result.accepted == shown:  # a copy of it, which is made once its follower counts as lost
                if self._loop.time() + _COPY_SECONDS >= deadline:
                    raise DeadlineExceeded(
                        f"{Receipt.decoded(shown).server} has accepted the write, and does not answer or has lost it. "
                        "Another follower has a copy, and makes it after journal.takeover_seconds: ask again later"
                    )
                await asyncio.sleep(_COPY_SECONDS)
            elif result.accepted:
                shown = result.accepted
            elif result.forgotten:
                return token_without_result(receipt.shards)
            else:
                self._record_writes((result,))
                return token_of((result,))

    async def _ask_applied(self, receipt: bytes, deadline: float) -> pb.WriteResult:
        """Return the result of an accepted write: from the follower that its receipt names, or, while that cannot be
        reached, from one that has a copy."""
        request = pb.Request(await_applied=pb.AwaitApplied(accepted=receipt))
        acceptor, *others = self._router.links_of_receipt(Receipt.decoded(receipt).server)
        try:
            answer = await acceptor.ask(request, max(0.0, deadline - self._loop.time()))
        except Unavailable as error:
            unreached = error
        else:
            return answer.write.results[0]
        for link in others:
            try:
                answer = await link.ask(request, max(0.0, min(_LOOK_SECONDS, deadline - self._loop.time())))
            except (Unavailable, DeadlineExceeded, NoJournal):
                continue
            return answer.write.results[0]
        raise unreached

    def _record_writes(self, results: Sequence[pb.WriteResult]) -> None:
        self._dispatcher.stats.inverse_pending += sum(result.inverse_pending for result in results)
        self._own_writes.record(results)

    def _atype_name(self, number: int) -> str:
        try:
            return self.schema.atype(number).label
        except UnknownType:
            return f"atype {number}"


def token_without_result(shards: Sequence[int]) -> WriteToken:
    """Return the token of a journaled write that is made and whose result is not known. It has the master read, and an
    inverse edge that may still be owed settled. ``shards``: those of the ids that the write names."""
    # The smaller id of a pair is that of its coordinator. In one shard, one transaction writes both edges.
    near, far = min(shards), max(shards)
    return WriteToken(shards=shards, pending_shards=[(far, near)] if near != far else [])


def shards_named(write: pb.Write) -> tuple[int, ...]:
    """Return the shards of the ids that a journaled write names."""
    operation = write.WhichOneof("operation") or ""
    if operation in ("obj_add", "node_set_state", "add_job"):
        return (getattr(write, operation).id >> SHARD_SHIFT,)
    edge = getattr(write, operation)
    return tuple(dict.fromkeys((edge.id1 >> SHARD_SHIFT, edge.id2 >> SHARD_SHIFT)))


def all_or_raise(results: list[Result | TaoError]) -> list[Result]:
    """Return the results of a many-form. Raises `SomeFailed` when any of them is an error."""
    if any(issubclass(kind, TaoError) for kind in set(map(type, results))):
        raise SomeFailed(results)
    return cast("list[Result]", results)


class SomeFailed(TaoError):
    """Some items of a many-form failed; the others were done, and this error has their results.

    ``results`` are in the order of the items, with a `TaoError` in the place of each item that failed; ``errors`` maps
    the indexes of the failed items to their errors. It is raised after every item has its result, so that nothing is
    left in flight.
    """

    reason = "SOME_FAILED"

    def __init__(self, results: Sequence[object]) -> None:
        errors = {index: each for index, each in enumerate(results) if isinstance(each, TaoError)}
        first, error = next(iter(errors.items()))
        super().__init__(
            f"{len(errors)} of {len(results)} items failed; the first is item {first}: {error.reason}: {error.message}"
        )
        self.results = results
        self.errors = errors

    @property
    def all_retryable(self) -> bool:
        """Return whether repeating the failed items may help; none of them was written then."""
        return all(error.retryable for error in self.errors.values())
