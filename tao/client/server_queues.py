"""The queues of one server: the reads and writes of one tick of the event loop, which travel as one message.

The first query of a tick schedules the sending; the loop runs it after every task that was ready has had its turn. A
full batch is sent at once, and so is the read of a caller that has been alone for a few messages, which would wait for
a turn of the loop in which nothing comes. A batch never waits for the answer to the one before: messages would be
larger, and no caller would be faster (loadtest/profiles/peers.md). But while several answers are due, it waits for two
more turns of the loop: the callers of answers that have arrived have their turn then, and what they ask travels along.
Messages of sixty-four callers to three servers then have twenty queries where they had ten.

A query is queued together with its `Waiter`: the future of one awaited operation, or a place in a `JoinedFuture` that
all items of a many-form share, so that a many-form of a thousand items makes one future.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, repeat
from typing import Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from tao.client.consistency import Consistency
from tao.client.settings import ClientSettings
from tao.model.errors import TaoError
from tao.model.topology import CacheServer
from tao.wire.read_batch import RANGE, EdgesRow, QueryRow, RangeRow, RowGroups, TimeRangeRow
from tao.wire.session import AnswerHandler
from tao.wire.v1 import session_pb2 as pb

Result = TypeVar("Result")


class JoinedFuture(Generic[Result]):
    """One future for ``size`` items. It is done when every item has a result or an error."""

    __slots__ = ("_missing", "future", "results")

    def __init__(self, size: int, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[list[Result | TaoError]] = loop.create_future()
        self.results: list[Result | TaoError | None] = [None] * size
        self._missing = size
        if not size:
            self.future.set_result([])

    def put(self, index: int, result: Result | TaoError) -> None:
        """Set the result of one item. Must be called once for each index."""
        self.results[index] = result
        self.note_arrived(1)

    def note_arrived(self, results: int) -> None:
        """Note that so many more ``results`` have been set."""
        self._missing -= results
        if not self._missing and not self.future.done():
            self.future.set_result(self.results)  # type: ignore[arg-type]  # no result is None any more


Waiter: TypeAlias = asyncio.Future[Result] | tuple[JoinedFuture[Result], int]
"""The receiver of one result: a future, or an index of a joined future."""


def resolve(waiter: Waiter[Result], result: Result) -> None:
    """Hand a result to its waiter. Does nothing when the caller has been cancelled."""
    if isinstance(waiter, tuple):
        waiter[0].put(waiter[1], result)
    elif not waiter.done():
        waiter.set_result(result)


def fail(waiter: Waiter[Result], error: TaoError) -> None:
    """Hand an error to its waiter. Each waiter needs an instance of its own, because each raise adds a traceback."""
    if isinstance(waiter, tuple):
        waiter[0].put(waiter[1], error)
    elif not waiter.done():
        waiter.set_exception(error)


def is_abandoned(waiter: Waiter[Result] | None) -> bool:
    """Return whether no caller waits here: the slot is empty, or the caller was answered or cancelled."""
    if waiter is None:
        return True
    return (waiter[0].future if isinstance(waiter, tuple) else waiter).done()


_GATHERING_TURNS: Final = 2
"""Turns of the loop for which a batch gathers more. In the first one answers are read, with asyncio's own loop, and in
the second one their callers ask; uvloop does both in one."""

_GATHERING_FROM: Final = 8
"""Unanswered queries from which on a batch gathers more. Of fewer callers hardly one has its answer within two turns,
which take the tenth of the time of a hit."""

_ALONE_FROM: Final = 3
"""Messages of one query in a row, each sent when nothing was unanswered, from which on a read is sent at once. Should
others be asked in the same tick after all, they travel in a second message, and so does no more than each fourth."""

_LONG_TURN_SECONDS: Final = 0.0005
"""A turn that takes so long is the last one for which a batch gathers: the tasks of a busy process would delay it by
far more than a larger message saves."""

_new: Final = tuple.__new__  # makes a named tuple in half the time of its constructor

PRIORITIES: Final = {"high": 1, "normal": 2, "low": 3}
"""The priorities of journaled writes, as they are sent."""


class WriteRow(NamedTuple):
    """A write, and the shard that decides which server receives it."""

    shard: int
    write: pb.Write


class QueuedReads(NamedTuple):
    """The reads of one message. ``minimums`` maps slots to the lowest version that may answer them; ``known`` maps
    slots to an answer of just that version, which the client holds. ``max_staleness_ms`` is 0 for no bound."""

    rows: RowGroups
    waiters: list[Waiter[bytes] | None]
    minimums: Mapping[int, int]
    known: Mapping[int, bytes]
    critical: bool
    max_staleness_ms: int


class ServerLink(Protocol):
    """The methods of `tao.wire.links.Link` that a server's queues need."""

    @property
    def is_down(self) -> bool:
        """Return whether a message sent now fails at once."""

    @property
    def is_impaired(self) -> bool:
        """Return whether another server should be preferred."""

    def send(self, request: pb.Request, timeout_seconds: float, on_answer: AnswerHandler) -> None:
        """Send a message as `tao.wire.session.Session.send` does, after connecting where necessary."""

    def hold(self) -> None:
        """Hold what is sent until `flush` is called, as `tao.wire.session.Session.hold` does."""

    def flush(self) -> None:
        """Write at once what has been sent."""

    async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
        """Send a message and return its answer, as `tao.wire.session.Session.ask` does."""


class BatchSender(Protocol):
    """The receiver of full batches (`tao.client.dispatcher.Dispatcher`)."""

    unanswered: int
    """The number of queries that were sent and are not answered, to any server."""
    lone_messages: int
    """The number of the latest messages in a row that had one query, and were sent when nothing was unanswered."""

    def send_reads(self, queue: ServerQueue, reads: QueuedReads) -> None: ...

    def send_writes(
        self, queue: ServerQueue, rows: list[WriteRow], waiters: list[Waiter[pb.WriteResult] | None], priority: int
    ) -> None: ...


class ReadQueue:
    """The queued reads for one server that may share a message: all critical or none, and all with the same bound on
    staleness. ``batches_sent`` counts the messages made of them."""

    __slots__ = ("_critical", "_edges", "_known", "_max_edges", "_max_queries", "_max_staleness_ms",
                 "_minimums", "_queries", "_rows", "_scheduled", "_sender", "_server_queue", "_waiters",
                 "batches_sent")  # fmt: skip

    def __init__(
        self, server_queue: ServerQueue, sender: BatchSender, settings: ClientSettings, critical: bool
    ) -> None:
        self._server_queue = server_queue
        self._sender = sender
        self._critical = critical
        self._max_staleness_ms = 0
        self._max_queries = settings.max_batch_queries
        self._max_edges = settings.max_batch_edges
        self._scheduled = False
        self.batches_sent = 0
        self._clear()

    def _clear(self) -> None:
        self._rows: tuple[list[QueryRow], ...] = ([], [], [], [], [], [])  # by operation
        self._waiters: tuple[list[Waiter[bytes] | None], ...] = ([], [], [], [], [], [])
        self._minimums: list[tuple[int, int, int]] = []  # operation, index among its rows, version
        self._known: dict[tuple[int, int], bytes] = {}  # operation and index among its rows: the answer held
        self._queries = 0
        self._edges = 0

    def with_bound(self, max_staleness_ms: int) -> ReadQueue:
        """Return this queue, set to accept reads with this bound. Reads queued with another bound are sent first."""
        if self._max_staleness_ms != max_staleness_ms:
            if self._queries:
                self._flush()
            self._max_staleness_ms = max_staleness_ms
        return self

    def add(self, operation: int, row: QueryRow, waiter: Waiter[bytes], minimum: int = 0, known: bytes = b"") -> None:
        """Queue a read. ``minimum`` is the lowest version that may answer, 0 for any; ``known`` is the answer of just
        that version, when the client holds it."""
        if operation >= RANGE:
            self._edges += _edges_asked(row)
        if minimum:
            self._minimums.append((operation, len(self._rows[operation]), minimum))
            if known:
                self._known[operation, len(self._rows[operation])] = known
        self._rows[operation].append(row)
        self._waiters[operation].append(waiter)
        self._queries += 1
        if not self._scheduled:
            sender = self._sender
            if sender.lone_messages >= _ALONE_FROM and not sender.unanswered and not self._server_queue.due:
                self._send_at_once()
            else:
                self._scheduled = True
                self._server_queue.send_later(self)
        elif self._queries >= self._max_queries or self._edges >= self._max_edges:
            self._flush()

    def add_many(
        self,
        operation: int,
        rows: Sequence[QueryRow],
        waiters: Sequence[Waiter[bytes]],
        minimums: Sequence[int] = (),
    ) -> None:
        """Queue reads of one operation: as `add` for each, at a fraction of its cost. ``minimums`` has the lowest
        version for each row; without it, any version may answer."""
        at = 0
        while at < len(rows):
            taken = rows[at : at + self._max_queries - self._queries]
            if operation >= RANGE:
                taken = self._take_until_full(taken)
            if minimums:
                first = len(self._rows[operation])
                places = range(first, first + len(taken))
                self._minimums.extend(zip(repeat(operation), places, minimums[at : at + len(taken)], strict=False))
            self._rows[operation].extend(taken)
            self._waiters[operation].extend(waiters[at : at + len(taken)])
            self._queries += len(taken)
            at += len(taken)
            if not self._scheduled:
                self._scheduled = True
                self._server_queue.send_later(self)
            if self._queries >= self._max_queries or self._edges >= self._max_edges:
                self._flush()

    def _take_until_full(self, rows: Sequence[QueryRow]) -> Sequence[QueryRow]:
        """Count the edges of the rows, and return the rows up to the one that fills the batch."""
        for index, row in enumerate(rows, 1):
            self._edges += _edges_asked(row)
            if self._edges >= self._max_edges:
                return rows[:index]
        return rows

    def end_of_tick(self) -> None:
        """Send what is queued."""
        self._scheduled = False
        if self._queries:
            self._flush()

    def _send_at_once(self) -> None:
        link = self._server_queue.link
        link.hold()
        try:
            self._flush()
        finally:
            link.flush()

    def _flush(self) -> None:
        rows, waiters_by_operation, asked, held = self._rows, self._waiters, self._minimums, self._known
        self._clear()
        self.batches_sent += 1
        waiters = list(chain.from_iterable(waiters_by_operation))
        minimums: dict[int, int] = {}
        known: dict[int, bytes] = {}
        if asked:
            first_slots = (0, *accumulate(map(len, rows)))
            minimums = {first_slots[operation] + index: version for operation, index, version in asked}
            known = {first_slots[operation] + index: value for (operation, index), value in held.items()}
        fields = (rows, waiters, minimums, known, self._critical, self._max_staleness_ms)
        self._sender.send_reads(self._server_queue, _new(QueuedReads, fields))


def _edges_asked(row: QueryRow) -> int:
    """Return how many edges a query on a list may bring."""
    # `type(…) is`, because this runs for every query and `isinstance` costs more.
    if type(row) is RangeRow:
        return row.limit
    if type(row) is EdgesRow:
        return len(row.id2s)
    return row.limit if type(row) is TimeRangeRow else 0


class WriteQueue:
    """The queued writes for one server: those that are made at once, or with a ``priority`` those for its journal."""

    __slots__ = ("_bytes", "_max_bytes", "_max_writes", "_priority", "_rows", "_scheduled", "_sender",
                 "_server_queue", "_waiters")  # fmt: skip

    def __init__(
        self, server_queue: ServerQueue, sender: BatchSender, settings: ClientSettings, priority: int = 0
    ) -> None:
        self._priority = priority
        self._server_queue = server_queue
        self._sender = sender
        self._max_writes = settings.max_batch_queries
        self._max_bytes = settings.max_batch_bytes
        self._scheduled = False
        self._clear()

    def _clear(self) -> None:
        self._rows: list[WriteRow] = []
        self._waiters: list[Waiter[pb.WriteResult] | None] = []
        self._bytes = 0

    def add(self, row: WriteRow, waiter: Waiter[pb.WriteResult]) -> None:
        """Queue a write."""
        size = row.write.ByteSize()
        if self._rows and self._bytes + size > self._max_bytes:
            self._flush()
        self._bytes += size
        self._rows.append(row)
        self._waiters.append(waiter)
        if not self._scheduled:
            self._scheduled = True
            self._server_queue.send_later(self)
        elif len(self._rows) >= self._max_writes:
            self._flush()

    def end_of_tick(self) -> None:
        """Send what is queued."""
        self._scheduled = False
        if self._rows:
            self._flush()

    def _flush(self) -> None:
        rows, waiters = self._rows, self._waiters
        self._clear()
        self._sender.send_writes(self._server_queue, rows, waiters, self._priority)


class ServerQueue:
    """One server of one tier with its link and its queues: plain reads, critical reads, reads with a bound on
    staleness, writes, and writes for its journal by priority."""

    __slots__ = (
        "_began_gathering",
        "_loop",
        "_marked_down",
        "_sender",
        "_turns_left",
        "bounded_reads",
        "critical_reads",
        "due",
        "journaled_writes",
        "link",
        "reads",
        "server",
        "tier",
        "writes",
    )

    def __init__(
        self, server: CacheServer, tier: str, link: ServerLink, sender: BatchSender, settings: ClientSettings
    ) -> None:
        self.server = server
        self.tier = tier
        self.link = link
        self._marked_down = server.down
        self._sender = sender
        self._loop = asyncio.get_running_loop()
        self.due: list[ReadQueue | WriteQueue] = []
        """The queues that send what they have at the end of this tick."""
        self._began_gathering = 0.0
        self._turns_left = 0
        self.reads = ReadQueue(self, sender, settings, critical=False)
        self.critical_reads = ReadQueue(self, sender, settings, critical=True)
        self.bounded_reads = ReadQueue(self, sender, settings, critical=False)
        self.writes = WriteQueue(self, sender, settings)
        self.journaled_writes = {each: WriteQueue(self, sender, settings, each) for each in PRIORITIES.values()}

    @property
    def is_avoided(self) -> bool:
        """Return whether another server should be preferred: the link is impaired, or the topology marks the server
        down."""
        return self._marked_down or self.link.is_impaired

    def send_later(self, queue: ReadQueue | WriteQueue) -> None:
        """Have a queue send what it has at the end of this tick, together with the server's other queues; two turns
        later while several answers are due."""
        self.due.append(queue)
        if len(self.due) == 1:
            if self._sender.unanswered >= _GATHERING_FROM:
                self._turns_left = _GATHERING_TURNS
                self._began_gathering = self._loop.time()
            self._loop.call_soon(self._end_of_tick)

    def _end_of_tick(self) -> None:
        if self._turns_left and self._loop.time() - self._began_gathering < _LONG_TURN_SECONDS:
            self._turns_left -= 1
            self._loop.call_soon(self._end_of_tick)
            return
        self._turns_left = 0
        queues, self.due = self.due, []
        # Written here and not in the next turn of the loop, for which a single caller would have to wait.
        self.link.hold()
        try:
            for queue in queues:
                queue.end_of_tick()
        finally:
            self.link.flush()

    def writes_with(self, priority: int) -> WriteQueue:
        """Return the queue of the writes for the journal with this priority, or of those made at once for 0."""
        return self.journaled_writes[priority] if priority else self.writes

    def reads_with(self, consistency: Consistency, critical: bool = False) -> ReadQueue:
        """Return the queue of the reads with this demand. ``critical`` sends a read to the master database although
        its demand does not say so."""
        if critical or consistency.critical:
            return self.critical_reads
        bound = consistency.max_staleness_ms
        return self.reads if bound is None else self.bounded_reads.with_bound(bound)


class ServerQueues:
    """The queues of all servers that a graph has sent something to, by server name."""

    def __init__(
        self, link_to: Callable[[CacheServer], ServerLink], sender: BatchSender, settings: ClientSettings
    ) -> None:
        self._link_to = link_to
        self._sender = sender
        self._settings = settings
        self._queues: dict[str, ServerQueue] = {}

    def to(self, server: CacheServer, tier: str) -> ServerQueue:
        """Return the queue of a server. Makes a new one when the topology has changed the server's entry."""
        queue = self._queues.get(server.name)
        if queue is None or queue.server != server or queue.tier != tier:
            queue = ServerQueue(server, tier, self._link_to(server), self._sender, self._settings)
            self._queues[server.name] = queue
        return queue

    def keep_only(self, names: set[str]) -> None:
        """Forget the queues of all servers but these."""
        self._queues = {name: queue for name, queue in self._queues.items() if name in names}
