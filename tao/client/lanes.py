"""A lane is one server as the client sees it: its link, what is gathered for it in this tick, and how it fares.

What is asked of a server within one tick of the event loop travels as one message: the first query of a tick schedules
the sending, the loop runs it when every task that was ready has had its turn. A full batch is sent at once. Nothing
waits for the answer to what is under way: messages would be larger, and nobody faster (loadtest/profiles/peers.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from tao.client.columns import EDGES, RANGE, Groups, Row
from tao.client.settings import ClientSettings
from tao.client.waiting import Waiter
from tao.model.topology import CacheServer
from tao.wire.session import AnswerHandler
from tao.wire.v1 import session_pb2 as pb

WriteRow = tuple[int, pb.Write]
"""The shard that decides who is asked, and the write."""


class ServerLink(Protocol):
    """What a lane needs of `tao.peers.links.Link`."""

    @property
    def is_down(self) -> bool:
        """As `tao.peers.links.Link.is_down`: what is sent fails at once."""

    @property
    def is_impaired(self) -> bool:
        """As `tao.peers.links.Link.is_impaired`: another server is better."""

    def send(self, request: pb.Request, timeout_seconds: float, on_answer: AnswerHandler) -> None:
        """As `tao.wire.session.Session.send`; connects when it must."""

    async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
        """As `tao.wire.session.Session.ask`."""


class Outlet(Protocol):
    """Where gathered batches go."""

    def send_reads(
        self,
        lane: Lane,
        groups: Groups,
        waiters: list[Waiter[bytes] | None],
        minimums: Mapping[int, int],
        *,
        critical: bool,
        max_staleness_ms: int,
        known: Mapping[int, bytes],
    ) -> None: ...

    def send_writes(self, lane: Lane, rows: list[WriteRow], waiters: list[Waiter[pb.WriteResult] | None]) -> None: ...


class ReadQueue:
    """Read queries of this tick for one server, all critical or none, all with one bound on staleness or none.
    ``generation`` rises with every message sent."""

    __slots__ = ("_bound_edges", "_bound_queries", "_call_soon", "_critical", "_edges", "_known", "_lane",
                 "_max_staleness_ms", "_minimums",
                 "_outlet", "_queries", "_rows", "_scheduled", "_waiters", "generation")  # fmt: skip

    def __init__(self, lane: Lane, outlet: Outlet, settings: ClientSettings, critical: bool) -> None:
        self._lane = lane
        self._outlet = outlet
        self._critical = critical
        self._max_staleness_ms = 0
        self._bound_queries = settings.max_batch_queries
        self._bound_edges = settings.max_batch_edges
        self._call_soon: Callable[..., object] = asyncio.get_running_loop().call_soon
        self._scheduled = False
        self.generation = 0
        self._clear()

    def _clear(self) -> None:
        self._rows: tuple[list[Row], ...] = ([], [], [], [], [])
        self._waiters: tuple[list[Waiter[bytes] | None], ...] = ([], [], [], [], [])
        self._minimums: list[tuple[int, int, int]] = []  # kind, place among its rows, version
        self._known: dict[tuple[int, int], bytes] = {}  # the same, of answers kept
        self._queries = 0
        self._edges = 0

    def of(self, max_staleness_ms: int) -> ReadQueue:
        """This queue, for queries with that bound; those of another one are sent first."""
        if self._max_staleness_ms != max_staleness_ms:
            if self._queries:
                self._flush()
            self._max_staleness_ms = max_staleness_ms
        return self

    def add(self, kind: int, row: Row, waiter: Waiter[bytes], minimum: int = 0, known: bytes = b"") -> None:
        """Send the query with the others of this tick. ``minimum``: the least version that may answer. ``known``: the
        answer of just that version, if it is kept here."""
        if kind >= RANGE:
            self._edges += _edges_asked(kind, row)
        if minimum:
            self._minimums.append((kind, len(self._rows[kind]), minimum))
            if known:
                self._known[kind, len(self._rows[kind])] = known
        self._rows[kind].append(row)
        self._waiters[kind].append(waiter)
        self._queries += 1
        if not self._scheduled:
            self._scheduled = True
            self._call_soon(self._end_of_tick)
        elif self._queries >= self._bound_queries or self._edges >= self._bound_edges:
            self._flush()

    def add_many(self, kind: int, rows: Sequence[Row], waiters: Sequence[Waiter[bytes]]) -> None:
        """Send these queries with the others of this tick: what `add` does for each, at a fraction of its price."""
        at = 0
        while at < len(rows):
            taken = rows[at : at + self._bound_queries - self._queries]
            if kind >= RANGE:
                taken = self._within_bound(kind, taken)
            self._rows[kind].extend(taken)
            self._waiters[kind].extend(waiters[at : at + len(taken)])
            self._queries += len(taken)
            at += len(taken)
            if not self._scheduled:
                self._scheduled = True
                self._call_soon(self._end_of_tick)
            if self._queries >= self._bound_queries or self._edges >= self._bound_edges:
                self._flush()

    def _within_bound(self, kind: int, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows up to the one with which the batch has its edges; their edges are counted."""
        for place, row in enumerate(rows, 1):
            self._edges += _edges_asked(kind, row)
            if self._edges >= self._bound_edges:
                return rows[:place]
        return rows

    def _end_of_tick(self) -> None:
        self._scheduled = False
        if self._queries:
            self._flush()

    def _flush(self) -> None:
        rows, by_kind, asked, kept = self._rows, self._waiters, self._minimums, self._known
        self._clear()
        self.generation += 1
        waiters = [waiter for each in by_kind for waiter in each]
        minimums: dict[int, int] = {}
        known: dict[int, bytes] = {}
        if asked:
            first_slots = (0, *accumulate(map(len, rows)))
            minimums = {first_slots[kind] + place: version for kind, place, version in asked}
            known = {first_slots[kind] + place: value for (kind, place), value in kept.items()}
        self._outlet.send_reads(
            self._lane,
            rows,
            waiters,
            minimums,
            critical=self._critical,
            max_staleness_ms=self._max_staleness_ms,
            known=known,
        )


def _edges_asked(kind: int, row: Row) -> int:
    """How many edges a query on a list may bring."""
    edges: int = row[3] if kind == RANGE else len(row[2]) if kind == EDGES else row[4]
    return edges


class WriteQueue:
    """Writes of this tick for one server."""

    __slots__ = ("_bound_bytes", "_bound_writes", "_bytes", "_call_soon", "_lane", "_outlet", "_rows", "_scheduled",
                 "_waiters")  # fmt: skip

    def __init__(self, lane: Lane, outlet: Outlet, settings: ClientSettings) -> None:
        self._lane = lane
        self._outlet = outlet
        self._bound_writes = settings.max_batch_queries
        self._bound_bytes = settings.max_batch_bytes
        self._call_soon: Callable[..., object] = asyncio.get_running_loop().call_soon
        self._scheduled = False
        self._clear()

    def _clear(self) -> None:
        self._rows: list[WriteRow] = []
        self._waiters: list[Waiter[pb.WriteResult] | None] = []
        self._bytes = 0

    def add(self, row: WriteRow, waiter: Waiter[pb.WriteResult]) -> None:
        """Send the write with the others of this tick."""
        size = row[1].ByteSize()
        if self._rows and self._bytes + size > self._bound_bytes:
            self._flush()
        self._bytes += size
        self._rows.append(row)
        self._waiters.append(waiter)
        if not self._scheduled:
            self._scheduled = True
            self._call_soon(self._end_of_tick)
        elif len(self._rows) >= self._bound_writes:
            self._flush()

    def _end_of_tick(self) -> None:
        self._scheduled = False
        if self._rows:
            self._flush()

    def _flush(self) -> None:
        rows, waiters = self._rows, self._waiters
        self._clear()
        self._outlet.send_writes(self._lane, rows, waiters)


class Lane:
    """One server of one tier. How it fares is its link's to say; one that the topology marks down is avoided too."""

    __slots__ = ("_marked_down", "bounded_reads", "critical_reads", "link", "reads", "server", "tier", "writes")

    def __init__(
        self, server: CacheServer, tier: str, link: ServerLink, outlet: Outlet, settings: ClientSettings
    ) -> None:
        self.server = server
        self.tier = tier
        self.link = link
        self._marked_down = server.down
        self.reads = ReadQueue(self, outlet, settings, critical=False)
        self.critical_reads = ReadQueue(self, outlet, settings, critical=True)
        self.bounded_reads = ReadQueue(self, outlet, settings, critical=False)
        self.writes = WriteQueue(self, outlet, settings)

    @property
    def is_avoided(self) -> bool:
        """Another lane is better, where there is one."""
        return self._marked_down or self.link.is_impaired


class Lanes:
    """All lanes of a graph, one per server."""

    def __init__(self, link_to: Callable[[CacheServer], ServerLink], outlet: Outlet, settings: ClientSettings) -> None:
        self._link_to = link_to
        self._outlet = outlet
        self._settings = settings
        self._lanes: dict[str, Lane] = {}

    def to(self, server: CacheServer, tier: str) -> Lane:
        """The lane to a server; a new one when the topology says something new of it."""
        lane = self._lanes.get(server.name)
        if lane is None or lane.server != server or lane.tier != tier:
            lane = Lane(server, tier, self._link_to(server), self._outlet, self._settings)
            self._lanes[server.name] = lane
        return lane

    def keep_only(self, names: set[str]) -> None:
        """Forget the lanes to servers that are no more."""
        self._lanes = {name: lane for name, lane in self._lanes.items() if name in names}
