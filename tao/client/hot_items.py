"""Items that everybody reads, kept by the client and asked for once (DESIGN.md §10).

A follower says of an item that it is hot, and how often it is read. From then on this process keeps the answer, sends
its version along, and hears "unchanged" instead of the same bytes again; and whoever asks for it in one tick of the
loop, or while the follower wants to be left alone (``slow_down_ms``), shares one query. That query is always sent after
everybody who shares it has asked, so an answer is as fresh as without all this: the version sent is a minimum, too, and
reads that are critical, carry a token or bound staleness never come here. Only ``hot_unchecked_ms`` gives freshness
away, by as much as it says. An item is dropped with the first answer that does not call it hot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from tao.client.calls import ReadCall
from tao.client.columns import Row
from tao.client.lanes import ReadQueue
from tao.client.routing import Router
from tao.client.settings import ClientSettings
from tao.client.stats import ClientStats
from tao.client.waiting import Gathering, Waiter, fail, is_cancelled, settle
from tao.model.errors import StaleRead, TaoError, Unavailable, WriteLost
from tao.model.graph import version_of
from tao.model.ids import SHARD_SHIFT
from tao.wire.v1 import session_pb2 as pb


class _Item:
    """One query that is asked very often. ``value``: its last answer, empty when there is none to go by;
    ``checked_at``: when that was asked for; ``shared``: the last query, which others may join while its message is not
    sent; ``waiting``: who shares the next one, after a pause."""

    __slots__ = ("checked_at", "is_hot", "kind", "not_before", "row", "shared", "value", "waiting")

    def __init__(self, kind: int, row: Row) -> None:
        self.kind = kind
        self.row = row
        self.value = b""
        self.checked_at = self.not_before = 0.0
        self.is_hot = True
        self.shared: _Shared | None = None
        self.waiting: list[Waiter[bytes]] = []


class _Shared(Gathering[bytes]):
    """One query, and all who wait for its answer."""

    __slots__ = ("_generation", "_item", "_items", "_queue", "known", "minimum", "waiters")

    def __init__(
        self, items: HotItems, item: _Item, queue: ReadQueue, waiters: list[Waiter[bytes]], minimum: int, known: bytes
    ) -> None:
        super().__init__(1, asyncio.get_running_loop())
        self._items = items
        self._item = item
        self._queue = queue
        self._generation = queue.generation
        self.waiters = waiters
        self.minimum = minimum
        self.known = known

    @property
    def is_sent(self) -> bool:
        """Who asks now has asked too late for its answer."""
        return self._queue.generation != self._generation

    def put(self, index: int, result: bytes | TaoError) -> None:
        """See `Gathering`."""
        super().put(index, result)
        self._items._answered(self._item, self, result)


class HotItems:
    """The hot items of one graph. ``by_row``: looked into before each read; empty nearly always."""

    def __init__(
        self,
        router: Router,
        own_versions: Mapping[Row, int],
        attached: Mapping[Row, int],
        settings: ClientSettings,
        stats: ClientStats,
    ) -> None:
        """``own_versions``: key → the version that this graph's writes have reached; ``attached``: those that its reads
        ask for."""
        self.by_row: Final[dict[Row, _Item]] = {}
        self._router: Final = router
        self._own_versions: Final = own_versions
        self._attached: Final = attached
        self._settings: Final = settings
        self._unchecked_seconds: Final = (settings.hot_unchecked_ms or 0.0) / 1000
        self._stats: Final = stats
        self._loop: Final = asyncio.get_running_loop()
        self._due: Final[dict[_Item, asyncio.Handle]] = {}
        self._bytes = 0

    def read(self, row: Row, waiter: Waiter[bytes]) -> None:
        """Answer a query for an item of `by_row`, now or with the others who ask for it."""
        item = self.by_row[row]
        if self._unchecked_seconds and self._is_current(item):
            self._stats.hot_unchecked += 1
            settle(waiter, item.value)
            return
        shared = item.shared
        if shared is not None and not shared.is_sent and self._attached.get(row[:2], 0) <= shared.minimum:
            self._stats.hot_joined += 1
            shared.waiters.append(waiter)
        elif item in self._due:
            self._stats.hot_joined += 1
            item.waiting.append(waiter)
        elif item.not_before > self._loop.time():
            item.waiting.append(waiter)
            self._due[item] = self._loop.call_at(item.not_before, self._ask_late, item)
        else:
            self._ask(item, [waiter])

    def note(self, call: ReadCall, part: pb.ReadAnswer) -> None:
        """Keep what this part of an answer calls hot. To be called before it is taken."""
        asked_at = call.attempt.deadline - self._settings.timeout_seconds
        slots, values = list(part.slots), part.values
        places = dict(zip(slots, range(len(slots)), strict=True)) if slots else range(len(values))
        now = self._loop.time()
        for slot, pause_ms in zip(part.hot_slots, part.slow_down_ms, strict=False):
            if slot not in places or places[slot] >= len(values):
                continue  # in another part
            value = values[places[slot]]
            kind, row = call.query(slot)
            item = self.by_row.pop(row, None) or _Item(kind, row)
            self.by_row[row] = item  # the last ones used stand last
            item.is_hot = True
            item.not_before = max(item.not_before, now + pause_ms / 1000)
            self._keep(item, value or call.known.get(slot, b""), asked_at)
        while self.by_row and (
            len(self.by_row) > self._settings.hot_items or self._bytes > self._settings.hot_items_bytes
        ):
            self._drop(next(iter(self.by_row.values())))

    def clear(self) -> None:
        """Forget what is kept: it was read by another schema."""
        for item in list(self.by_row.values()):
            self._drop(item)

    def close(self) -> None:
        """Forget everything, and fail who still waits to ask."""
        for item, handle in self._due.items():
            handle.cancel()
            for waiter in item.waiting:
                fail(waiter, Unavailable("the graph was closed"))
            item.waiting.clear()
        self._due.clear()
        self.clear()

    def _is_current(self, item: _Item) -> bool:
        if not item.value or item.checked_at + self._unchecked_seconds <= self._loop.time():
            return False
        return version_of(item.value) >= self._own_versions.get(item.row[:2], 0)

    def _ask_late(self, item: _Item) -> None:
        del self._due[item]
        waiters = [waiter for waiter in item.waiting if not is_cancelled(waiter)]
        item.waiting = []
        if waiters:
            self._ask(item, waiters)

    def _ask(self, item: _Item, waiters: list[Waiter[bytes]]) -> None:
        minimum = self._attached.get(item.row[:2], 0)
        known = item.value if item.value and version_of(item.value) >= minimum else b""
        minimum = version_of(known) if known else minimum
        item.is_hot = False  # until the answer says so
        try:
            queue = self._router.reader(item.row[0] >> SHARD_SHIFT).reads
        except TaoError as error:  # of a shard that a new topology does not have
            for waiter in waiters:
                fail(waiter, type(error)(error.message))
            return
        item.shared = shared = _Shared(self, item, queue, waiters, minimum, known)
        queue.add(item.kind, item.row, (shared, 0), minimum, known)

    def _answered(self, item: _Item, shared: _Shared, result: bytes | TaoError) -> None:
        waiters = shared.waiters
        if isinstance(result, StaleRead | WriteLost) and shared.known:
            # The version kept was lost with a master: nobody has it any more, and nobody asked for it.
            self._drop(item)
            item.waiting.extend(waiters)
            if item not in self._due:
                self._due[item] = self._loop.call_soon(self._ask_late, item)
            return
        if not item.is_hot:
            self._drop(item)
        if isinstance(result, TaoError):
            for waiter in waiters:
                fail(waiter, type(result)(result.message))
            return
        self._stats.hot_unchanged += result is shared.known
        for waiter in waiters:
            settle(waiter, result)

    def _keep(self, item: _Item, value: bytes, asked_at: float) -> None:
        held = item.value
        if held and version_of(held) > version_of(value):
            return  # the answers have overtaken each other
        self._bytes += len(value) - len(held)
        item.value = value
        item.checked_at = max(item.checked_at, asked_at)

    def _drop(self, item: _Item) -> None:
        if self.by_row.get(item.row) is item:
            del self.by_row[item.row]
        self._bytes -= len(item.value)
        item.value = b""
