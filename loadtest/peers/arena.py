"""The contestants over one graph, in one load process.

Every contestant draws its requests from a stream of the same seed, so all get the same requests. The stream continues
from turn to turn and from shape to shape: a stream that began anew would repeat requests whose answers are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from loadtest.drivers import WrongAnswer
from loadtest.peers.caches import MemcachedCache, RedisCache
from loadtest.peers.contestants import Answer, Peer, TaoPeer
from loadtest.peers.lookaside import LookasideContestant, SqlContestant
from loadtest.peers.names import MYSQL, REDIS, TAO
from loadtest.peers.sql_graph import DATABASE, SqlAddress, SqlGraph
from loadtest.peers.turns import Prepared
from loadtest.published.conformity import FirstReads
from loadtest.published.contestant import LINK, NODE, Payloads, read_ids, reserve_nodes, write_ids
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.jobs import Subject
from loadtest.published.requests import RequestStream, WorkloadRequest
from loadtest.published.shapes import Popularity
from loadtest.published.workload import READS, Kind, Workload, workload_named
from tao.client import ClientSettings, Graph, connect
from tao.model.ids import SHARD_SHIFT
from tao.model.versions import next_version

_FIELDS: Final = (
    "CONCAT(X'8101', CASE WHEN LENGTH(payload) < 256 THEN CONCAT(X'C4', UNHEX(LPAD(HEX(LENGTH(payload)), 2, '0'))) "
    "WHEN LENGTH(payload) < 65536 THEN CONCAT(X'C5', UNHEX(LPAD(HEX(LENGTH(payload)), 4, '0'))) "
    "ELSE CONCAT(X'C6', UNHEX(LPAD(HEX(LENGTH(payload)), 8, '0'))) END, payload)"
)
"""Encode a payload as `tao.schema.codec.encode_fields` does, as field 1 of its type: a msgpack map with one entry."""


async def fill_everybody(
    graph: Graph, sql: SqlGraph, plan: GraphPlan, payloads: Payloads, shards: int, report: Callable[[str, float], None]
) -> list[int]:
    """The ids by node; node ``n`` is on shard ``n % shards``. Raises a `TaoError` or `pymysql.err.MySQLError`."""
    ids = await reserve_nodes(graph, plan.nodes, shards)
    await sql.load(plan, ids, payloads, report)
    for shard in range(shards):
        report(f"copying the graph into shard {shard} of tao", 0.0)
        schema = f"tao_{shard:05d}"
        version = next_version(0, await sql.version_epoch(schema))
        await sql.copied(_copies(graph, schema, shard, version))
    return ids


def _copies(graph: Graph, schema: str, shard: int, version: int) -> Iterator[str]:
    link, node = graph.schema.atype(LINK), graph.schema.otype(NODE)
    low, high = shard << SHARD_SHIFT, (shard + 1 << SHARD_SHIFT) - 1
    here = f"BETWEEN {low} AND {high}"
    # S608: the numbers and names come from this module, not from users.
    yield (
        f"INSERT INTO {schema}.objects (id, otype, version, deleted, data) "  # noqa: S608
        f"SELECT id, {node.number}, {version}, 0, {_FIELDS} FROM {DATABASE}.node WHERE id {here}"
    )
    yield (
        f"INSERT INTO {schema}.assocs (id1, atype, id2, time, version, data) "  # noqa: S608
        f"SELECT id1, {link.number}, id2, time, {version}, IF(payload = '', '', {_FIELDS}) "
        f"FROM {DATABASE}.link WHERE id1 {here}"
    )
    yield (
        f"INSERT INTO {schema}.assocs (id1, atype, id2, time, version, data) "  # noqa: S608
        f"SELECT id1, {link.inverse}, id2, time, {version}, '' FROM {DATABASE}.linked_by WHERE id1 {here}"
    )
    yield (
        f"INSERT INTO {schema}.assoc_lists (id1, atype, count, version) "  # noqa: S608
        f"SELECT id1, atype, COUNT(*), {version} FROM {schema}.assocs GROUP BY id1, atype"
    )


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


def expected_of(plan: GraphPlan, request: WorkloadRequest) -> int:
    """Return how much a read finds: edges, the count, or objects."""
    found = planned(plan, request)
    if request.kind is Kind.OBJ_GET:
        return 1
    return found if isinstance(found, int) else len(found)


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


OBJECTS_OF_A_BATCH: Final = 20
"""Objects of one call in the shape with batches."""
_CONNECTIONS: Final = 64
"""Most connections of a peer's client to each cache server."""
_TIMEOUT_SECONDS: Final = 10.0
_FILL_TIMEOUT_SECONDS: Final = 60.0
_BLOCK_BYTES: Final = 1 << 20
_SQL_CONNECTIONS: Final = 32
_CHECKED: Final = 400


class Rivals(msgspec.Struct, frozen=True, kw_only=True):
    """The contestants that take part, their addresses, and the graph."""

    contestants: tuple[str, ...]
    topology_file: str
    tier: str
    subject: Subject
    host: str
    redis_ports: tuple[int, ...]
    memcached_ports: tuple[int, ...]
    sql: SqlAddress


class PeerGraph:
    """The contestants over one graph."""

    def __init__(self, rivals: Rivals, stack: AsyncExitStack, workload: Workload, plan: GraphPlan, number: int) -> None:
        """``number`` is the number of the stream of requests."""
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
    async def filled(cls, rivals: Rivals, stack: AsyncExitStack, report: Callable[[str, float], None]) -> PeerGraph:
        """Load the graph into every contestant's store first, and write its ids into the subject's file."""
        subject = rivals.subject
        self = cls(rivals, stack, workload_named(subject.workload), subject.plan(), 5)
        settings = ClientSettings(timeout_seconds=_FILL_TIMEOUT_SECONDS)
        async with connect(rivals.topology_file, tier=rivals.tier, settings=settings) as graph:
            self.ids = await fill_everybody(
                graph, await self._sql(), self.plan, self._payloads(0), subject.shards, report
            )
        write_ids(Path(subject.ids_file), self.ids)
        await self._enter()
        return self

    @classmethod
    async def open(cls, rivals: Rivals, stack: AsyncExitStack, number: int) -> PeerGraph:
        """Open the contestants over the graph that was loaded."""
        subject = rivals.subject
        self = cls(rivals, stack, workload_named(subject.workload), subject.plan(), number)
        self.ids = list(read_ids(Path(subject.ids_file)))
        await self._enter()
        return self

    async def _enter(self) -> None:
        for name in self._rivals.contestants:
            self.peers[name] = await (self.tao() if name == TAO else self.peer(name))

    async def tao(self) -> TaoPeer:
        """Return a separate client of tao."""
        return TaoPeer(await self.graph(self._rivals.tier), self.ids, self._payloads(2))

    async def peer(self, name: str) -> SqlContestant:
        """Return a separate client of a peer, like that of another web server."""
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
        """Return a client of a tier."""
        settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        return await self._stack.enter_async_context(connect(self._rivals.topology_file, tier=tier, settings=settings))

    async def _sql(self) -> SqlGraph:
        sql = await SqlGraph.open(self._rivals.sql, _SQL_CONNECTIONS)
        self._stack.push_async_callback(sql.close)
        return sql

    def _payloads(self, number: int) -> Payloads:
        return Payloads(Random(f"payloads {self._rivals.subject.seed} {number}").randbytes(_BLOCK_BYTES))

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
        first_reads, written = self.first_reads(name), self._written

        def note(request: WorkloadRequest) -> None:
            if request.kind in READS:
                first_reads.note(request)
            else:
                written.update((request.node, *(part.node for part in request.parts)))

        return note

    async def check(self) -> int:
        """Compare answers about keys that nobody has written. Returns the number of answers compared of each
        contestant.

        Raises `WrongAnswer`.
        """
        for stream in self._streams.values():
            stream.settle()
        requests = self._requests(99).take(_CHECKED)
        return await check(self.peers, self.plan, self.ids, requests, self._written)
