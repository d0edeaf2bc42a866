"""The load process' part of `peers`: fill everybody with one graph, check everybody, let them take turns, look for
stale answers.

Every contestant draws from a stream of the same seed, so all are asked the same. A stale answer is an object read that
began after a write was acknowledged and did not see it: one client writes, another reads, in two tiers where there are
two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import count
from random import Random
from time import perf_counter
from typing import Final, Protocol

import msgspec

from loadtest.driving import WrongAnswer
from loadtest.peers.caches import MemcachedCache, RedisCache
from loadtest.peers.lookaside import LookasideContestant, SqlContestant
from loadtest.peers.sql_graph import SqlAddress, SqlGraph
from loadtest.published.contestant import NODE, Contestant, Payloads, TaoContestant, load_graph
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.load_process import Subject
from loadtest.published.requests import Request, RequestStream
from loadtest.published.shapes import Popularity
from loadtest.published.workload import Kind, Workload, workload_named
from loadtest.results import Figure
from loadtest.rounds import Comparison, Drive, Trial, compare
from tao.client import ClientSettings, Graph, connect
from tao.devcluster.readiness import server_stats

TAO: Final = "tao"
REDIS: Final = "redis_lookaside"
MEMCACHED: Final = "memcached_lookaside"
MYSQL: Final = "mysql"
CONTESTANTS: Final = (TAO, REDIS, MEMCACHED, MYSQL)

MANY: Final = 20
"""Objects of a batch in the shape that is batched."""
_TIMEOUT_SECONDS: Final = 10.0
_BLOCK_BYTES: Final = 1 << 20
_CONNECTIONS: Final = 64
_SQL_CONNECTIONS: Final = 32
_CHECKED: Final = 400
_WATCHED: Final = 32
"""Objects written and read for stale answers."""
_READERS: Final = 4
_TIERS: Final = ("tier-1", "tier-2")


class PeersJob(msgspec.Struct, frozen=True, kw_only=True, tag="peers"):
    """All contestants in one process."""

    topology_file: str
    subject: Subject
    host: str
    redis_ports: tuple[int, ...]
    memcached_ports: tuple[int, ...]
    sql: SqlAddress
    server_pids: dict[str, tuple[int, ...]]
    """By contestant, the database's among them."""
    follower_admin: str
    """Of the follower that tao's clients ask."""
    awaiters: int
    warm_seconds: float
    stale_seconds: float
    rounds: int
    round_seconds: float


class StaleReads(msgspec.Struct, frozen=True, kw_only=True):
    """How often an answer was older than what had been acknowledged before it was asked for."""

    reads: int
    stale: int
    within: str
    """Between whom."""


class PeersResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it; ``hit_rates`` of those that have a cache, while the workload was asked by many awaiters."""

    figures: list[Figure]
    hit_rates: dict[str, float]
    stale: dict[str, list[StaleReads]]


async def run_peers(job: PeersJob, tell: Callable[[str, float], None]) -> PeersResult:
    """Raises `TaoError`, or what a peer's client raises."""
    async with AsyncExitStack() as stack:
        arena = await _Arena.open(job, stack, tell)
        tell("checking every contestant's answers", 0.0)
        await arena.check()
        comparisons = [
            arena.comparison(f"{job.subject.workload}, {job.awaiters} awaiters of single queries", job.awaiters),
            arena.comparison(f"{job.subject.workload}, 1 awaiter", 1),
            arena.comparison(f"obj_get of {MANY} in one call, {job.awaiters} awaiters", job.awaiters, many=True),
        ]
        turns = sum(len(each.trials) for each in comparisons) * (job.rounds + 1)
        taken = count()
        for name in arena.contestants:
            tell(f"warming {name}", 0.0)
            await arena.drive(name, job.awaiters)(perf_counter() + job.warm_seconds, [])
        figures: list[Figure] = []
        counted = [await arena.hits_and_misses()]
        for comparison in comparisons:
            figures += await compare(
                comparison, job.rounds, job.round_seconds, lambda text: tell(text, next(taken) / turns)
            )
            counted.append(await arena.hits_and_misses())
        hit_rates = _rates_between(*counted[:2])
        tell("looking for stale answers", 1.0)
        stale = {name: await arena.stale_reads(name) for name in arena.contestants}
    return PeersResult(figures=figures, hit_rates=hit_rates, stale=stale)


def _rates_between(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> dict[str, float]:
    grown = {name: (hits - before[name][0], misses - before[name][1]) for name, (hits, misses) in after.items()}
    return {name: hits / max(1, hits + misses) for name, (hits, misses) in grown.items()}


class Watched(Protocol):
    """An object's payload, written by one client and read by another."""

    async def put(self, index: int, payload: bytes) -> None:
        """Returns when the write is acknowledged."""

    async def get(self, index: int) -> bytes | None:
        """What a reader sees."""


class _Arena:
    """The contestants over one graph."""

    def __init__(self, job: PeersJob, stack: AsyncExitStack, workload: Workload, plan: GraphPlan) -> None:
        self._job: Final = job
        self._stack: Final = stack
        self._workload: Final = workload
        self._plan: Final = plan
        self._ids: list[int] = []
        self.contestants: dict[str, Contestant] = {}
        self._streams: Final = {name: self._stream(5) for name in CONTESTANTS}
        self._second: dict[str, SqlContestant] = {}
        """Another client of the same peer, as in another web server."""

    @classmethod
    async def open(cls, job: PeersJob, stack: AsyncExitStack, tell: Callable[[str, float], None]) -> _Arena:
        """Load the graph everywhere."""
        self = cls(job, stack, workload_named(job.subject.workload), job.subject.plan())
        graph = await self._graph(_TIERS[0], 60.0)
        self._ids = await load_graph(graph, self._plan, self._payloads(0), job.subject.shards, tell)
        tell("writing the graph into the peers' tables", 0.0)
        sql = await self._sql()
        await sql.load(self._plan, self._ids, self._payloads(1))
        self.contestants[TAO] = TaoContestant(
            await self._graph(_TIERS[0], _TIMEOUT_SECONDS), self._ids, self._payloads(2)
        )
        for name in (REDIS, MEMCACHED, MYSQL):
            self.contestants[name] = await self._peer(name)
            self._second[name] = await self._peer(name)
        return self

    async def _peer(self, name: str) -> SqlContestant:
        job, sql, payloads = self._job, await self._sql(), self._payloads(3)
        if name == MYSQL:
            return SqlContestant(sql, self._ids, payloads)
        cache = (
            RedisCache(job.host, job.redis_ports, _CONNECTIONS)
            if name == REDIS
            else MemcachedCache(job.host, job.memcached_ports, _CONNECTIONS)
        )
        self._stack.push_async_callback(cache.close)
        return LookasideContestant(cache, sql, self._ids, payloads)

    async def _graph(self, tier: str, timeout_seconds: float) -> Graph:
        settings = ClientSettings(timeout_seconds=timeout_seconds)
        return await self._stack.enter_async_context(connect(self._job.topology_file, tier=tier, settings=settings))

    async def _sql(self) -> SqlGraph:
        sql = await SqlGraph.open(self._job.sql, _SQL_CONNECTIONS)
        self._stack.push_async_callback(sql.close)
        return sql

    def _payloads(self, number: int) -> Payloads:
        return Payloads(Random(f"payloads {self._job.subject.seed} {number}").randbytes(_BLOCK_BYTES))

    def _stream(self, number: int) -> RequestStream:
        return RequestStream(self._workload, self._plan, self._job.subject.seed, number, self._job.subject.shards)

    async def check(self) -> None:
        """Every contestant finds what the plan says, before anything is written. Raises `WrongAnswer`."""
        plan = self._plan
        requests = [each for each in self._stream(99).take(4 * _CHECKED) if each.kind in CHECKABLE][:_CHECKED]
        for name, contestant in self.contestants.items():
            for request in requests:
                found, expected = await contestant.ask(request), expected_of(plan, request)
                if found != expected:
                    raise WrongAnswer(f"{name} found {found} for {request}, and the graph has {expected}")

    def comparison(self, shape: str, awaiters: int, *, many: bool = False) -> Comparison:
        """Everybody, in turns, beside tao."""
        per = MANY if many else 1
        trials = tuple(
            Trial(name, self.drive(name, awaiters, many=many), self._job.server_pids[name], per)
            for name in self.contestants
        )
        return Comparison(shape, trials, yardstick=TAO)

    def drive(self, name: str, awaiters: int, *, many: bool = False) -> Drive:
        """So many awaiters of one contestant. Its stream goes on from turn to turn and from shape to shape: begun anew,
        it would ask again for what it has just brought into the caches."""
        contestant = self.contestants[name]
        stream = self._streams[name]
        batches = self._batches()

        async def one(until: float, latencies: list[float]) -> None:
            record = latencies.append
            started = perf_counter()
            while started < until:
                await contestant.ask(next(batches) if many else next(stream))
                ended = perf_counter()
                record(ended - started)
                started = ended

        async def drive(until: float, latencies: list[float]) -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(awaiters):
                    group.create_task(one(until, latencies))

        return drive

    def _batches(self) -> _Batches:
        return _Batches(self._workload, self._plan, self._job.subject.seed)

    async def hits_and_misses(self) -> dict[str, tuple[int, int]]:
        """Of those that have a cache, so far."""
        follower = await server_stats(self._job.follower_admin)
        return {TAO: (follower["hits"], follower["misses"])} | {
            name: (each.hits, each.misses)
            for name, each in self.contestants.items()
            if isinstance(each, LookasideContestant)
        }

    async def stale_reads(self, name: str) -> list[StaleReads]:
        """One writer and several readers, for a while. Raises what the clients raise."""
        seconds = self._job.stale_seconds
        if name != TAO:
            writer, reader = self.contestants[name], self._second[name]
            assert isinstance(writer, SqlContestant)
            return [await _watch(_PeerObjects(writer, reader, self._ids), "two clients", seconds)]
        graph = await self._graph(_TIERS[0], _TIMEOUT_SECONDS)
        found = []
        for tier, within in zip(_TIERS, ("one tier", "two tiers"), strict=True):
            # Another process' client: it does not know what the writer's has written.
            found.append(
                await _watch(_TaoObjects(graph, await self._graph(tier, _TIMEOUT_SECONDS), self._ids), within, seconds)
            )
        return found


CHECKABLE: Final = (Kind.OBJ_GET, Kind.ASSOC_COUNT, Kind.ASSOC_RANGE, Kind.ASSOC_TIME_RANGE, Kind.ASSOC_GET)
"""The reads of which `expected_of` knows the answer."""


def expected_of(plan: GraphPlan, request: Request) -> int:
    """What a read finds in the graph as planned."""
    degree = plan.degree(request.node)
    match request.kind:
        case Kind.OBJ_GET:
            return 1
        case Kind.ASSOC_COUNT:
            return degree
        case Kind.ASSOC_RANGE:
            return min(degree, request.limit)
        case Kind.ASSOC_TIME_RANGE:
            newest = plan.newest_time(request.node)
            return min(request.limit, max(0, min(degree, newest - request.low + 1)))
        case _:
            return len({edge.other for edge in plan.list_of(request.node)} & set(request.others))


class _Batches:
    """Endless batches of different objects, by their popularity."""

    def __init__(self, workload: Workload, plan: GraphPlan, seed: int) -> None:
        chance = Random(f"batches {seed}")
        self._draw: Final = Popularity(plan.shuffled, workload.object_skew, chance, again=workload.assumed.again).draw

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Request:
        nodes: dict[int, None] = {}
        while len(nodes) < MANY:
            nodes[self._draw()] = None
        return Request(Kind.READ_MANY, others=tuple(nodes))


class _PeerObjects:
    """`Watched`, of a peer."""

    def __init__(self, writer: SqlContestant, reader: SqlContestant, ids: list[int]) -> None:
        self._writer = writer
        self._reader = reader
        self._ids = ids

    async def put(self, index: int, payload: bytes) -> None:
        """See `Watched`."""
        await self._writer.put_node(self._ids[index], payload)

    async def get(self, index: int) -> bytes | None:
        """See `Watched`."""
        return await self._reader.node(self._ids[index])


class _TaoObjects:
    """`Watched`, of tao."""

    def __init__(self, writer: Graph, reader: Graph, ids: list[int]) -> None:
        self._writer = writer
        self._reader = reader
        self._ids = ids

    async def put(self, index: int, payload: bytes) -> None:
        """See `Watched`."""
        await self._writer.obj_update(self._ids[index], {"payload": payload}, NODE)

    async def get(self, index: int) -> bytes | None:
        """See `Watched`."""
        found = await self._reader.obj_get(self._ids[index])
        if found is None:
            return None
        payload = found.fields["payload"]
        assert isinstance(payload, bytes)
        return payload


async def _watch(watched: Watched, within: str, seconds: float) -> StaleReads:
    acknowledged = [0] * _WATCHED
    for index in range(_WATCHED):
        await watched.put(index, _numbered(0))
    until = perf_counter() + seconds
    reads = stale = 0

    async def write() -> None:
        chance = Random(1)
        for number in count(1):
            if perf_counter() >= until:
                return
            index = chance.randrange(_WATCHED)
            await watched.put(index, _numbered(number))
            acknowledged[index] = number

    async def read(seed: int) -> None:
        nonlocal reads, stale
        chance = Random(seed)
        while perf_counter() < until:
            index = chance.randrange(_WATCHED)
            before = acknowledged[index]
            payload = await watched.get(index)
            reads += 1
            stale += payload is None or int.from_bytes(payload[:8], "big") < before

    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        for number in range(_READERS):
            group.create_task(read(number))
    return StaleReads(reads=reads, stale=stale, within=within)


def _numbered(number: int) -> bytes:
    return number.to_bytes(8, "big") + b"." * 92
