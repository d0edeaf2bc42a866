"""The contestants over one graph, in one load process.

Every contestant draws its requests from a stream of the same seed, so all get the same requests. The stream continues
from turn to turn and from shape to shape: a stream that began anew would repeat requests whose answers are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack
from itertools import islice
from operator import length_hint
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from loadtest.drivers import WrongAnswer
from loadtest.peers.caches import LOOKASIDES
from loadtest.peers.contestants import ALONE, MYSQL_ASYNCMY, POSTGRES, TAO, Answer, Peer, SqlPeer, TaoPeer
from loadtest.peers.graph_store import GraphStore, SqlAddress
from loadtest.peers.lookaside import Lookaside
from loadtest.peers.postgres_graph import PostgresGraph, open_postgres_pool
from loadtest.peers.sql_graph import SqlGraph, open_pool
from loadtest.published.conformity import FirstReads
from loadtest.published.contestant import Payloads, load_graph, read_ids, write_ids
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.jobs import Subject
from loadtest.published.requests import RequestStream, WorkloadRequest
from loadtest.published.shapes import Popularity
from loadtest.published.workload import READS, Kind, workload_named
from loadtest.target import OWN_TIER
from tao.client import ClientSettings, connect
from tao.devcluster.ports import LOOPBACK

CONTESTANTS: Final = (TAO, *LOOKASIDES, *ALONE)
CACHES: Final = (TAO, *LOOKASIDES)
"""The contestants with a cache."""
CHECKABLE: Final = (Kind.OBJ_GET, Kind.ASSOC_COUNT, Kind.ASSOC_RANGE, Kind.ASSOC_TIME_RANGE, Kind.ASSOC_GET)
"""The reads for which `planned` knows the answer."""

Planned = int | list[tuple[int, int, int]]
"""A count, an object's size, or edges: node, time, size."""


def planned(plan: GraphPlan, request: WorkloadRequest) -> Planned:
    """Return what a read finds in the graph as planned."""
    node = request.node
    edges = [(edge.other, edge.time, edge.size) for edge in plan.list_of(node)]
    match request.kind:
        case Kind.OBJ_GET:
            return plan.object_size(node)
        case Kind.ASSOC_COUNT:
            return plan.degree(node)
        case Kind.ASSOC_RANGE:
            return edges[: request.limit]
        case Kind.ASSOC_TIME_RANGE:
            return [edge for edge in edges if request.low <= edge[1] <= request.high][: request.limit]
        case _:
            return [edge for edge in edges if edge[0] in request.others]


def as_planned(answer: Answer, nodes: Mapping[int, int]) -> Planned:
    """Return an answer in the plan's terms; ``nodes`` has the node of each id."""
    if isinstance(answer, bytes):
        return len(answer)
    if isinstance(answer, list):
        return [(nodes[each[0]], each[1], len(each[2])) for each in answer if isinstance(each, tuple)]
    return -1 if answer is None else answer


async def check(
    peers: Mapping[str, Peer],
    plan: GraphPlan,
    ids: Sequence[int],
    requests: Sequence[WorkloadRequest],
    written: AbstractSet[int] = frozenset(),
) -> int:
    """Send every contestant the same reads and compare the answers with the plan and with each other, byte by byte.

    Reads of the nodes in ``written`` are skipped. Returns how many requests were compared. Raises `WrongAnswer`.
    """
    nodes = {each: node for node, each in enumerate(ids)}
    asked = [each for each in requests if each.kind in CHECKABLE and each.node not in written]
    for request in asked:
        expected, first = planned(plan, request), None
        for name, peer in peers.items():
            answer = await peer.answer(request)
            if as_planned(answer, nodes) != expected:
                raise WrongAnswer(
                    f"{name} found {as_planned(answer, nodes)!r:.300} for {request}, not {expected!r:.300}"
                )
            if first is not None and answer != first:
                raise WrongAnswer(f"{name} found other bytes than the others for {request}")
            first = answer
    return len(asked)


_AT_A_TIME: Final = 1_000
"""The number of requests drawn at once when a turn needs more than were prepared."""
_DRAWN_FOR_SURE: Final = 1.5


class Prepared(Iterator[WorkloadRequest]):
    """An endless stream of requests, some of them drawn ahead."""

    def __init__(self, source: Iterator[WorkloadRequest], note: Callable[[WorkloadRequest], None]) -> None:
        """``note`` is called for every request that was sent, when the next ones are prepared: outside of turns, unless
        a turn needs more requests than were drawn for it."""
        self._source: Final = source
        self._note: Final = note
        self._drawn: list[WorkloadRequest] = []
        self._left: Iterator[WorkloadRequest] = iter(self._drawn)
        self._seconds = self._most_per_second = 0.0
        self._asked = 0
        """Requests since the last preparation, which was for a turn of ``_seconds``."""

    def __next__(self) -> WorkloadRequest:
        for request in self._left:
            return request
        self._draw(_AT_A_TIME)
        return next(self._left)

    async def prepare(self, seconds: float) -> None:
        """Draw the requests of a turn of so many seconds: as many as the best turn so far used, and some more."""
        self.settle()
        if self._seconds:
            self._most_per_second = max(self._most_per_second, self._asked / self._seconds)
        self._seconds, self._asked = seconds, 0
        self._draw(int(self._most_per_second * seconds * _DRAWN_FOR_SURE))

    def settle(self) -> None:
        """Call ``note`` for the requests that were sent so far."""
        asked = len(self._drawn) - length_hint(self._left)
        for request in self._drawn[:asked]:
            self._note(request)
        self._asked += asked
        self._drawn = self._drawn[asked:]
        self._left = iter(self._drawn)

    def _draw(self, count: int) -> None:
        self.settle()
        self._drawn += islice(self._source, max(0, count - len(self._drawn)))
        self._left = iter(self._drawn)


OBJECTS_OF_A_BATCH: Final = 20
"""Objects of one call in the shape with batches."""
_CONNECTIONS: Final = 64
"""Most connections of a peer's client to each cache server."""
_TIMEOUT_SECONDS: Final = 10.0
_FILL_TIMEOUT_SECONDS: Final = 60.0
_SQL_CONNECTIONS: Final = 32
_FILL_CONNECTIONS: Final = 1
_CHECKED: Final = 400
_OF_CHECKS: Final = 99
"""The number of the stream of requests whose answers are compared."""


class Rivals(msgspec.Struct, frozen=True, kw_only=True):
    """The contestants that take part, their addresses, and the graph."""

    contestants: tuple[str, ...]
    topology_file: str
    subject: Subject
    cache_ports: dict[str, tuple[int, ...]]
    """Ports of the cache servers, by contestant."""
    mysql: SqlAddress | None
    """The peers' own MySQL; None when none of them takes part."""
    postgres: SqlAddress | None


class PeerGraph:
    """The contestants over one graph."""

    def __init__(self, rivals: Rivals, stack: AsyncExitStack, number: int) -> None:
        """``number`` is the number of the stream of requests; the stack closes the contestants' clients."""
        self._rivals: Final = rivals
        self._stack: Final = stack
        self._number: Final = number
        self._workload: Final = workload_named(rivals.subject.workload)
        self._streams: Final[dict[str, Prepared]] = {}
        self._first_reads: Final[dict[str, FirstReads]] = {}
        self.plan: Final = rivals.subject.plan()
        self.written: Final[set[int]] = set()
        """Nodes that were written."""
        self.ids: Sequence[int] = ()
        self.peers: dict[str, TaoPeer | SqlPeer] = {}

    async def fill(self, report: Callable[[str, float], None]) -> None:
        """Write the same graph through tao's API and into the peers' tables, and its ids into the subject's file."""
        rivals, settings = self._rivals, ClientSettings(timeout_seconds=_FILL_TIMEOUT_SECONDS)
        async with connect(rivals.topology_file, tier=OWN_TIER, settings=settings) as graph:
            ids = await load_graph(graph, self.plan, self._payloads(0), rivals.subject.shards, report)
        for store in await self._stores():
            report("writing the graph into the peers' tables", 0.0)
            await store.load(self.plan, ids, self._payloads(0))
            await store.close()
        write_ids(Path(rivals.subject.ids_file), ids)

    async def _stores(self) -> list[GraphStore]:
        """Return the peers' databases."""
        rivals, stores = self._rivals, list[GraphStore]()
        if rivals.mysql is not None:
            stores.append(SqlGraph(await open_pool(rivals.mysql, _FILL_CONNECTIONS)))
        if rivals.postgres is not None:
            stores.append(PostgresGraph(await open_postgres_pool(rivals.postgres, _FILL_CONNECTIONS)))
        return stores

    async def enter(self) -> None:
        """Open the contestants over the graph that was loaded."""
        self.ids = list(read_ids(Path(self._rivals.subject.ids_file)))
        for name in self._rivals.contestants:
            self.peers[name] = await self.peer(name)

    async def peer(self, name: str, tier: str = OWN_TIER) -> TaoPeer | SqlPeer:
        """Return a separate client of a contestant, like that of another web server; for tao, of this tier."""
        rivals = self._rivals
        if name == TAO:
            settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
            graph = connect(rivals.topology_file, tier=tier, settings=settings)
            return TaoPeer(await self._stack.enter_async_context(graph), self.ids, self._payloads(2))
        store = await self._store(name)
        self._stack.push_async_callback(store.close)
        return SqlPeer(store, self.ids, self._payloads(3))

    async def _store(self, name: str) -> GraphStore:
        """Return a peer's store with a client of its own."""
        rivals = self._rivals
        if name == POSTGRES:
            assert rivals.postgres is not None
            return PostgresGraph(await open_postgres_pool(rivals.postgres, _SQL_CONNECTIONS))
        assert rivals.mysql is not None
        pool = await open_pool(rivals.mysql, _SQL_CONNECTIONS, "asyncmy" if name == MYSQL_ASYNCMY else "aiomysql")
        if name in LOOKASIDES:
            cache = await LOOKASIDES[name].client.open(LOOPBACK, rivals.cache_ports[name], _CONNECTIONS)
            return Lookaside(pool, cache)
        return SqlGraph(pool)

    def _payloads(self, number: int) -> Payloads:
        return Payloads.drawn(f"payloads {self._rivals.subject.seed} {number}")

    def stream(self, name: str) -> Prepared:
        """Return a contestant's endless requests; always the same iterator."""
        if name not in self._streams:
            self._streams[name] = Prepared(self._requests(self._number), self._noting(name))
        return self._streams[name]

    def first_reads(self, name: str) -> FirstReads:
        """Return the first reads of a contestant; always the same value."""
        return self._first_reads.setdefault(name, FirstReads(counts_apart=name != TAO))

    def batches(self, name: str) -> Prepared:
        """Return a contestant's endless batches of different objects, by their popularity."""
        return Prepared(self._drawn_batches(), self._noting(name))

    def _requests(self, number: int) -> RequestStream:
        subject = self._rivals.subject
        return RequestStream(self._workload, self.plan, subject.seed, number, subject.shards)

    def _drawn_batches(self) -> Iterator[WorkloadRequest]:
        chance = Random(f"batches {self._rivals.subject.seed}")
        draw = Popularity(
            self.plan.shuffled, self._workload.object_skew, chance, again=self._workload.assumed.again
        ).draw
        while True:
            nodes: dict[int, None] = {}
            while len(nodes) < OBJECTS_OF_A_BATCH:
                nodes[draw()] = None
            yield WorkloadRequest(Kind.READ_MANY, others=tuple(nodes))

    def _noting(self, name: str) -> Callable[[WorkloadRequest], None]:
        first_reads = self.first_reads(name)

        def note(request: WorkloadRequest) -> None:
            if request.kind in READS:
                first_reads.note(request)
            else:
                self.written.update((request.node, *(part.node for part in request.parts)))

        return note

    async def check(self) -> int:
        """Compare answers about keys that nobody has written. Returns the number of answers compared of each
        contestant.

        Raises `WrongAnswer`.
        """
        for stream in self._streams.values():
            stream.settle()
        requests = self._requests(_OF_CHECKS).take(_CHECKED)
        return await check(self.peers, self.plan, self.ids, requests, self.written)
