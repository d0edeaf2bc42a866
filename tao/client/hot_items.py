"""Hot items: queries that followers report as read very often, whose answers the client keeps.

A follower says in its answers which items are hot. From then on this process keeps the answer and sends its version
along, so that an unchanged item is answered without its bytes. Reads of one hot item in one tick of the loop, or while
the follower has asked for a pause (``slow_down_ms``), share one query.

The shared query is always sent after the last read that shares it was made, and the version that is kept is also the
lowest that may answer. So an answer is as fresh as without hot items. An answer to `assoc_exists` has no version: it is
never sent along, and read again. Reads with a demand of their own
(`tao.client.consistency`) are never answered here. Only ``hot_unchecked_ms`` trades freshness, by as much as it says.
An item is dropped with the first answer that does not report it as hot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from tao.client.calls import ReadCall
from tao.client.diagnostics import ClientStats
from tao.client.router import Router
from tao.client.server_queues import JoinedFuture, ReadQueue, Waiter, fail, is_abandoned, resolve
from tao.client.settings import ClientSettings
from tao.model.errors import StaleRead, TaoError, Unavailable, WriteLost
from tao.model.graph import version_of
from tao.model.ids import SHARD_SHIFT
from tao.wire.read_batch import EXISTS, QueryRow, RowKey
from tao.wire.v1 import session_pb2 as pb


class _HotItem:
    """A query that is asked very often.

    ``value`` is its last answer, empty when none can be used; ``checked_at`` is the loop time at which that answer was
    asked for. ``not_before`` is the end of the pause that the follower has asked for. ``shared`` is the last query,
    which reads may join until its message is sent. ``waiting`` are the reads that share the query after a pause."""

    __slots__ = ("checked_at", "is_hot", "not_before", "operation", "row", "shared", "value", "waiting")

    def __init__(self, operation: int, row: QueryRow) -> None:
        self.operation = operation
        self.row = row
        self.value = b""
        self.checked_at = self.not_before = 0.0
        self.is_hot = True
        self.shared: _SharedQuery | None = None
        self.waiting: list[Waiter[bytes]] = []


class _SharedQuery(JoinedFuture[bytes]):
    """One query for a hot item, and the waiters of all reads that share it."""

    __slots__ = ("_batches_before", "_item", "_items", "_queue", "known", "minimum", "waiters")

    def __init__(
        self,
        items: HotItems,
        item: _HotItem,
        queue: ReadQueue,
        waiters: list[Waiter[bytes]],
        minimum: int,
        known: bytes,
    ) -> None:
        super().__init__(1, asyncio.get_running_loop())
        self._items = items
        self._item = item
        self._queue = queue
        self._batches_before = queue.batches_sent
        self.waiters = waiters
        self.minimum = minimum
        self.known = known

    @property
    def is_sent(self) -> bool:
        """Return whether the message has left, so that no further read may share its answer."""
        return self._queue.batches_sent != self._batches_before

    def put(self, index: int, result: bytes | TaoError) -> None:
        """Hand the result to all reads that share the query."""
        super().put(index, result)
        self._items._on_result(self._item, self, result)


class HotItems:
    """The hot items of one graph. ``by_row`` is looked at before each plain read, and is nearly always empty."""

    def __init__(
        self,
        router: Router,
        own_versions: Mapping[RowKey, int],
        attached: Mapping[RowKey, int],
        settings: ClientSettings,
        stats: ClientStats,
    ) -> None:
        """Start without items. ``own_versions`` holds the version that this graph's writes have reached, by key;
        ``attached`` holds the versions that its reads ask for."""
        self.by_row: Final[dict[QueryRow, _HotItem]] = {}
        self._router: Final = router
        self._own_versions: Final = own_versions
        self._attached: Final = attached
        self._settings: Final = settings
        self._unchecked_seconds: Final = (settings.hot_unchecked_ms or 0.0) / 1000
        self._stats: Final = stats
        self._loop: Final = asyncio.get_running_loop()
        self._paused: Final[dict[_HotItem, asyncio.Handle]] = {}
        self._bytes = 0

    def read(self, row: QueryRow, waiter: Waiter[bytes]) -> None:
        """Answer a read of an item of `by_row`: from its value, with a query that other reads share, or after the
        pause."""
        item = self.by_row[row]
        if self._unchecked_seconds and self._is_current(item):
            self._stats.hot_unchecked += 1
            resolve(waiter, item.value)
            return
        shared = item.shared
        if shared is not None and not shared.is_sent and self._attached.get(row[:2], 0) <= shared.minimum:
            self._stats.hot_joined += 1
            shared.waiters.append(waiter)
        elif item in self._paused:
            self._stats.hot_joined += 1
            item.waiting.append(waiter)
        elif item.not_before > self._loop.time():
            item.waiting.append(waiter)
            self._paused[item] = self._loop.call_at(item.not_before, self._query_after_pause, item)
        else:
            self._query(item, [waiter])

    def record(self, call: ReadCall, part: pb.ReadAnswer) -> None:
        """Keep the values that this part of an answer reports as hot. Must be called before the part is applied to the
        call."""
        asked_at = call.attempt.deadline - self._settings.timeout_seconds
        slots, values = list(part.slots), part.values
        indexes = dict(zip(slots, range(len(slots)), strict=True)) if slots else range(len(values))
        now = self._loop.time()
        for slot, pause_ms in zip(part.hot_slots, part.slow_down_ms, strict=False):
            if slot not in indexes or indexes[slot] >= len(values):
                continue  # the value comes in another part
            value = values[indexes[slot]]
            operation, row = call.query(slot)
            item = self.by_row.pop(row, None) or _HotItem(operation, row)
            self.by_row[row] = item  # moves it to the end: the least recently used item is dropped first
            item.is_hot = True
            item.not_before = max(item.not_before, now + pause_ms / 1000)
            self._keep(item, value or call.reads.known.get(slot, b""), asked_at)
        while self.by_row and (
            len(self.by_row) > self._settings.hot_items or self._bytes > self._settings.hot_items_bytes
        ):
            self._drop(next(iter(self.by_row.values())))

    def clear(self) -> None:
        """Forget all values, because they were read by another schema."""
        for item in list(self.by_row.values()):
            self._drop(item)

    def close(self) -> None:
        """Forget everything, and fail the reads that wait for the end of a pause."""
        for item, handle in self._paused.items():
            handle.cancel()
            for waiter in item.waiting:
                fail(waiter, Unavailable("the graph was closed"))
            item.waiting.clear()
        self._paused.clear()
        self.clear()

    def _is_current(self, item: _HotItem) -> bool:
        if not item.value or item.checked_at + self._unchecked_seconds <= self._loop.time():
            return False
        return _version(item) >= self._own_versions.get(item.row[:2], 0)

    def _query_after_pause(self, item: _HotItem) -> None:
        del self._paused[item]
        waiters = [waiter for waiter in item.waiting if not is_abandoned(waiter)]
        item.waiting = []
        if waiters:
            self._query(item, waiters)

    def _query(self, item: _HotItem, waiters: list[Waiter[bytes]]) -> None:
        minimum = self._attached.get(item.row[:2], 0)
        version = _version(item)
        known = item.value if version and version >= minimum else b""
        minimum = version if known else minimum
        item.is_hot = False  # until the answer reports it as hot again
        try:
            queue = self._router.reader(item.row[0] >> SHARD_SHIFT).reads
        except TaoError as error:  # the shard is not in the topology any more
            for waiter in waiters:
                fail(waiter, type(error)(error.message))
            return
        item.shared = shared = _SharedQuery(self, item, queue, waiters, minimum, known)
        queue.add(item.operation, item.row, (shared, 0), minimum, known)

    def _on_result(self, item: _HotItem, shared: _SharedQuery, result: bytes | TaoError) -> None:
        waiters = shared.waiters
        if isinstance(result, StaleRead | WriteLost) and shared.known:
            # The version that is kept was lost with a master. No server has it any more, and no caller asked for it,
            # so the query is repeated without it.
            self._drop(item)
            item.waiting.extend(waiters)
            if item not in self._paused:
                self._paused[item] = self._loop.call_soon(self._query_after_pause, item)
            return
        if not item.is_hot:
            self._drop(item)
        if isinstance(result, TaoError):
            for waiter in waiters:
                fail(waiter, type(result)(result.message))
            return
        self._stats.hot_unchanged += result is shared.known
        for waiter in waiters:
            resolve(waiter, result)

    def _keep(self, item: _HotItem, value: bytes, asked_at: float) -> None:
        held = item.value
        if item.operation == EXISTS:
            if asked_at < item.checked_at:
                return
        elif held and version_of(held) > version_of(value):
            return  # an older answer has arrived after a newer one
        self._bytes += len(value) - len(held)
        item.value = value
        item.checked_at = max(item.checked_at, asked_at)

    def _drop(self, item: _HotItem) -> None:
        if self.by_row.get(item.row) is item:
            del self.by_row[item.row]
        self._bytes -= len(item.value)
        item.value = b""


def _version(item: _HotItem) -> int:
    """Return the version of the answer that is kept, 0 when there is none."""
    return version_of(item.value) if item.value and item.operation != EXISTS else 0
