"""What all operations of a graph stand on: sending one query or write, or many, and waiting for what becomes of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import TypeVar, cast

from tao.client.columns import Row
from tao.client.configuration import Configuration
from tao.client.dispatch import Dispatcher
from tao.client.failures import SomeFailed
from tao.client.hot_items import HotItems
from tao.client.lanes import Lane, ReadQueue, WriteRow
from tao.client.own_writes import CRITICAL, After, Minimums, OwnWrites, Recording
from tao.client.requests import Requests
from tao.client.settings import ClientSettings
from tao.client.stats import ClientStats
from tao.client.trace import Trace
from tao.client.turning import Turning
from tao.client.validation import check_staleness
from tao.client.values import ObjectReader
from tao.client.waiting import Gathering, Waiter
from tao.model.errors import TaoError, UnknownType, WriteLost
from tao.model.ids import SHARD_SHIFT
from tao.model.tokens import WriteToken
from tao.model.topology import Topology
from tao.schema.registry import Schema
from tao.wire.v1 import session_pb2 as pb

Result = TypeVar("Result")


class Operations:
    """The state of an open graph. Follows topology and schema by itself (`use_topology`, `use_schema`)."""

    def __init__(
        self,
        configuration: Configuration,
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
        self._turning = Turning(self._own_writes, settings)
        self._timeout_seconds = settings.timeout_seconds
        self._hot = HotItems(self._router, self._own_writes.versions, self._attached, settings, dispatcher.stats)
        self._hot_rows = self._hot.by_row
        if settings.keep_hot_items:
            dispatcher.on_hot = self._hot.note
        self._requests = Requests(configuration.schema, configuration.topology.shards, random.randrange, unix_seconds)
        self._objects = ObjectReader(configuration.schema)
        configuration.follow(self)

    @property
    def schema(self) -> Schema:
        """The types in use, as of now."""
        return self._requests.schema

    @property
    def topology(self) -> Topology:
        """The topology routed by, as of now."""
        return self._configuration.topology

    @property
    def region(self) -> str:
        """The region whose followers are asked."""
        return self._configuration.region

    @property
    def stats(self) -> ClientStats:
        """Counters since the graph was opened."""
        return self._dispatcher.stats

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Collect which tier answered each read of this graph, of whatever task, while the block runs. One at a time:
        an inner trace takes over from the outer one until it ends."""
        trace = Trace(self._atype_name)
        outer, self._dispatcher.trace = self._dispatcher.trace, trace
        try:
            yield trace
        finally:
            self._dispatcher.trace = outer

    @property
    def token(self) -> WriteToken:
        """Names the writes that this graph made of late, of whatever task (`ClientSettings.own_writes_seconds`). What
        one request wrote, a `recording` tells."""
        return self._own_writes.token()

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Collect the token of what this task, and the tasks it starts, write through this graph while the block runs:
        ``with graph.recording() as recording: …``, then ``recording.token``. Recordings nest."""
        with self._own_writes.recording() as recording:
            yield recording

    def use_topology(self, topology: Topology) -> None:
        """Called with each newer topology. Raises `TopologyError` when this graph's region or tier is not in it."""
        self._dispatcher.use_topology(topology)
        requests = self._requests
        self._requests = Requests(requests.schema, topology.shards, requests.any_shard, requests.unix_seconds)

    def use_schema(self, schema: Schema) -> None:
        """Called with each newer schema."""
        requests = self._requests
        self._requests = Requests(schema, requests.shards, requests.any_shard, requests.unix_seconds)
        self._objects = ObjectReader(schema)
        self._hot.clear()

    async def _read(self, kind: int, row: Row, critical: bool, after: After, max_staleness_ms: int | None) -> bytes:
        if self._hot_rows and row in self._hot_rows and not critical and after is None and max_staleness_ms is None:
            return await self._read_hot(row)
        minimum = 0
        if after is not None:
            minimum = Minimums(after, self._attached).of(row)
        elif self._attached:
            minimum = self._attached.get(row[:2], 0)
        lane = self._router.reader(row[0] >> SHARD_SHIFT)
        future: asyncio.Future[bytes] = self._create_future()
        if critical or minimum == CRITICAL:
            # New enough for any token; but only who says what was written hears that it was lost.
            lane.critical_reads.add(kind, row, future, max(minimum, 0))
        elif max_staleness_ms is None:
            lane.reads.add(kind, row, future, minimum)
        else:
            lane.bounded_reads.of(check_staleness(max_staleness_ms)).add(kind, row, future, minimum)
        try:
            return await future
        except asyncio.CancelledError:
            self._dispatcher.note_cancelled()
            raise
        except WriteLost:
            self._own_writes.forget(row[:2], minimum)
            raise

    async def _read_hot(self, row: Row) -> bytes:
        minimum = self._attached.get(row[:2], 0)
        future: asyncio.Future[bytes] = self._create_future()
        self._hot.read(row, future)
        try:
            return await future
        except WriteLost:
            self._own_writes.forget(row[:2], minimum)
            raise

    async def _read_many(
        self, kind: int, rows: Sequence[Row], critical: bool, after: After, max_staleness_ms: int | None
    ) -> list[bytes | TaoError]:
        if max_staleness_ms is not None:
            check_staleness(max_staleness_ms)
        gathering: Gathering[bytes] = Gathering(len(rows), self._loop)
        waiters = [(gathering, index) for index in range(len(rows))]
        asked = self._minimums(rows, after)
        every_row, every_minimum = rows, asked
        if self._hot_rows and not critical and after is None and max_staleness_ms is None:
            hot = [row in self._hot_rows for row in rows]
            for row, waiter in zip(compress(rows, hot), compress(waiters, hot), strict=True):
                self._hot.read(row, waiter)
            rest = [not each for each in hot]
            rows, waiters = list(compress(rows, rest)), list(compress(waiters, rest))
            asked = list(compress(asked, rest))
        if any(asked):
            for row, waiter, minimum in zip(rows, waiters, asked, strict=True):
                if minimum:
                    self._add_with_minimum(kind, row, waiter, minimum, critical, max_staleness_ms)
            rest = [not minimum for minimum in asked]
            rows, waiters = list(compress(rows, rest)), list(compress(waiters, rest))
        # Routed once per shard and handed over once per server: a third of what each row by itself would cost.
        shards = [row[0] >> SHARD_SHIFT for row in rows]
        lane_of = {shard: self._router.reader(shard) for shard in dict.fromkeys(shards)}
        lanes = dict.fromkeys(lane_of.values())
        for lane in lanes:
            queue = _queue(lane, critical, max_staleness_ms)
            if len(lanes) == 1:
                queue.add_many(kind, rows, waiters)
            else:
                chosen = [lane_of[shard] is lane for shard in shards]
                queue.add_many(kind, list(compress(rows, chosen)), list(compress(waiters, chosen)))
        values = await self._gathered(gathering)
        for row, minimum, value in zip(every_row, every_minimum, values, strict=False):
            if isinstance(value, WriteLost):
                self._own_writes.forget(row[:2], minimum)
        return values

    def _minimums(self, rows: Sequence[Row], after: After) -> list[int]:
        """What each row asks for; nothing at all when no row can."""
        own = self._attached
        if after is None:
            return [own.get(row[:2], 0) for row in rows] if own else []
        minimum_of = Minimums(after, own).of
        return [minimum_of(row) for row in rows]

    def _add_with_minimum(
        self, kind: int, row: Row, waiter: Waiter[bytes], minimum: int, critical: bool, max_staleness_ms: int | None
    ) -> None:
        lane = self._router.reader(row[0] >> SHARD_SHIFT)
        queue = _queue(lane, critical or minimum == CRITICAL, max_staleness_ms)
        queue.add(kind, row, waiter, max(minimum, 0))

    async def _write(self, row: WriteRow) -> pb.WriteResult:
        future: asyncio.Future[pb.WriteResult] = self._create_future()
        self._router.writer(row[0]).writes.add(row, future)
        try:
            result = await future
        except asyncio.CancelledError:
            self._dispatcher.note_cancelled()
            raise
        self._note((result,))
        return result

    async def _write_many(self, rows: Sequence[WriteRow]) -> list[pb.WriteResult | TaoError]:
        gathering: Gathering[pb.WriteResult] = Gathering(len(rows), self._loop)
        for index, row in enumerate(rows):
            self._router.writer(row[0]).writes.add(row, (gathering, index))
        results = await self._gathered(gathering)
        self._note([each for each in results if not isinstance(each, TaoError)])
        return results

    async def _gathered(self, gathering: Gathering[Result]) -> list[Result | TaoError]:
        try:
            return await gathering.future
        except asyncio.CancelledError:
            self._dispatcher.note_cancelled()
            raise

    def _note(self, results: Sequence[pb.WriteResult]) -> None:
        self._dispatcher.stats.inverse_pending += sum(result.inverse_pending for result in results)
        self._own_writes.note(results)

    def _atype_name(self, number: int) -> str:
        try:
            return self.schema.atype(number).name
        except UnknownType:
            return f"atype {number}"


def all_or_raise(results: list[Result | TaoError]) -> list[Result]:
    """The results of a many-form. Raises `SomeFailed` when any is an error."""
    if any(issubclass(kind, TaoError) for kind in set(map(type, results))):
        raise SomeFailed(results)
    return cast("list[Result]", results)


def _queue(lane: Lane, critical: bool, max_staleness_ms: int | None) -> ReadQueue:
    if critical:
        return lane.critical_reads
    return lane.reads if max_staleness_ms is None else lane.bounded_reads.of(max_staleness_ms)
