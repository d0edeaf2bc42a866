"""The contestants over one graph, in one load process.

Every contestant draws from a stream of the same seed, so all are asked the same. Its stream goes on from turn to turn
and from shape to shape: begun anew, it would ask again for what it has just brought into the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from loadtest.peers.asking import TaoPeer
from loadtest.peers.caches import MemcachedCache, RedisCache
from loadtest.peers.checking import check
from loadtest.peers.filling import fill_everybody
from loadtest.peers.lookaside import LookasideContestant, SqlContestant
from loadtest.peers.names import MYSQL, REDIS, TAO
from loadtest.peers.prepared import Prepared
from loadtest.peers.sql_graph import SqlAddress, SqlGraph
from loadtest.published.contestant import Payloads, read_ids, write_ids
from loadtest.published.first_reads import FirstReads
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.load_process import Subject
from loadtest.published.requests import Request, RequestStream
from loadtest.published.shapes import Popularity
from loadtest.published.workload import READS, Kind, Workload, workload_named
from tao.client import ClientSettings, Graph, connect

OBJECTS_OF_A_BATCH: Final = 20
"""In the shape that is batched."""
_CONNECTIONS: Final = 64
"""Of a peer's client to each cache server at most."""
_TIMEOUT_SECONDS: Final = 10.0
_FILL_TIMEOUT_SECONDS: Final = 60.0
_BLOCK_BYTES: Final = 1 << 20
_SQL_CONNECTIONS: Final = 32
_CHECKED: Final = 400


class Rivals(msgspec.Struct, frozen=True, kw_only=True):
    """Where the contestants are, which of them take part, and over which graph."""

    contestants: tuple[str, ...]
    topology_file: str
    tier: str
    subject: Subject
    host: str
    redis_ports: tuple[int, ...]
    memcached_ports: tuple[int, ...]
    sql: SqlAddress


class Arena:
    """The contestants over one graph."""

    def __init__(self, rivals: Rivals, stack: AsyncExitStack, workload: Workload, plan: GraphPlan, number: int) -> None:
        """``number``: of the requests' stream."""
        self._rivals: Final = rivals
        self._stack: Final = stack
        self._workload: Final = workload
        self.plan: Final = plan
        self._number: Final = number
        self._streams: Final[dict[str, Prepared]] = {}
        self._first_reads: Final[dict[str, FirstReads]] = {}
        self._written: Final[set[int]] = set()
        self.ids: list[int] = []
        self.peers: dict[str, TaoPeer | SqlContestant] = {}

    @classmethod
    async def filled(cls, rivals: Rivals, stack: AsyncExitStack, tell: Callable[[str, float], None]) -> Arena:
        """Load the graph everywhere first, and leave its ids in the subject's file."""
        subject = rivals.subject
        self = cls(rivals, stack, workload_named(subject.workload), subject.plan(), 5)
        settings = ClientSettings(timeout_seconds=_FILL_TIMEOUT_SECONDS)
        async with connect(rivals.topology_file, tier=rivals.tier, settings=settings) as graph:
            self.ids = await fill_everybody(
                graph, await self._sql(), self.plan, self._payloads(0), subject.shards, tell
            )
        write_ids(Path(subject.ids_file), self.ids)
        await self._enter()
        return self

    @classmethod
    async def open(cls, rivals: Rivals, stack: AsyncExitStack, number: int) -> Arena:
        """Over the graph that is there."""
        subject = rivals.subject
        self = cls(rivals, stack, workload_named(subject.workload), subject.plan(), number)
        self.ids = list(read_ids(Path(subject.ids_file)))
        await self._enter()
        return self

    async def _enter(self) -> None:
        for name in self._rivals.contestants:
            self.peers[name] = await (self.tao() if name == TAO else self.peer(name))

    async def tao(self) -> TaoPeer:
        """A client of its own."""
        return TaoPeer(await self.graph(self._rivals.tier), self.ids, self._payloads(2))

    async def peer(self, name: str) -> SqlContestant:
        """A client of its own, as of another web server."""
        rivals, sql, payloads = self._rivals, await self._sql(), self._payloads(3)
        if name == MYSQL:
            return SqlContestant(sql, self.ids, payloads)
        cache = (
            RedisCache(rivals.host, rivals.redis_ports, _CONNECTIONS)
            if name == REDIS
            else MemcachedCache(rivals.host, rivals.memcached_ports, _CONNECTIONS)
        )
        self._stack.push_async_callback(cache.close)
        return LookasideContestant(cache, sql, self.ids, payloads)

    async def graph(self, tier: str) -> Graph:
        """A client of a tier."""
        settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        return await self._stack.enter_async_context(connect(self._rivals.topology_file, tier=tier, settings=settings))

    async def _sql(self) -> SqlGraph:
        sql = await SqlGraph.open(self._rivals.sql, _SQL_CONNECTIONS)
        self._stack.push_async_callback(sql.close)
        return sql

    def _payloads(self, number: int) -> Payloads:
        return Payloads(Random(f"payloads {self._rivals.subject.seed} {number}").randbytes(_BLOCK_BYTES))

    def stream(self, name: str) -> Prepared:
        """A contestant's endless requests; always the same iterator."""
        if name not in self._streams:
            self._streams[name] = Prepared(self._requests(self._number), self._noting(name))
        return self._streams[name]

    def first_reads(self, name: str) -> FirstReads:
        """Of what the contestant was asked; always the same."""
        return self._first_reads.setdefault(name, FirstReads(counts_apart=name != TAO))

    def batches(self, name: str) -> Prepared:
        """A contestant's endless batches of different objects, by their popularity."""
        return Prepared(self._drawn_batches(), self._noting(name))

    def _requests(self, number: int) -> RequestStream:
        subject = self._rivals.subject
        return RequestStream(self._workload, self.plan, subject.seed, number, subject.shards)

    def _drawn_batches(self) -> Iterator[Request]:
        chance = Random(f"batches {self._rivals.subject.seed}")
        draw = Popularity(
            self.plan.shuffled, self._workload.object_skew, chance, again=self._workload.assumed.again
        ).draw
        while True:
            nodes: dict[int, None] = {}
            while len(nodes) < OBJECTS_OF_A_BATCH:
                nodes[draw()] = None
            yield Request(Kind.READ_MANY, others=tuple(nodes))

    def _noting(self, name: str) -> Callable[[Request], None]:
        first_reads, written = self.first_reads(name), self._written

        def note(request: Request) -> None:
            if request.kind in READS:
                first_reads.note(request)
            else:
                written.update((request.node, *(part.node for part in request.parts)))

        return note

    async def check(self) -> int:
        """How many answers of each were compared; of what nobody has written. Raises `WrongAnswer`."""
        for stream in self._streams.values():
            stream.settle()
        requests = self._requests(99).take(_CHECKED)
        return await check(self.peers, self.plan, self.ids, requests, self._written)
