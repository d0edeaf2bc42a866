"""The load processes' part of `peers`: fill everybody with one graph, check everybody, let them take turns.

Every contestant draws from a stream of the same seed, so all are asked the same, and all are warmed with the same
number of requests of it. Its stream goes on from turn to turn and from shape to shape: begun anew, it would ask again
for what it has just brought into the caches. The three peers write to the same tables; only one of them knows of each
such write, so that what any of them has written is left out of the last check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Final

import msgspec

from loadtest.peers.asking import TaoPeer
from loadtest.peers.caches import MemcachedCache, RedisCache
from loadtest.peers.checking import check
from loadtest.peers.filling import fill_everybody
from loadtest.peers.lookaside import LookasideContestant, SqlContestant
from loadtest.peers.sql_graph import SqlAddress, SqlGraph
from loadtest.peers.turns import Contender, Drive, Taken, at_rate, closed, rotated, warmed
from loadtest.published.contestant import Payloads, read_ids, write_ids
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.load_process import Subject
from loadtest.published.requests import Request, RequestStream
from loadtest.published.shapes import Popularity
from loadtest.published.workload import READS, Kind, Workload, workload_named
from loadtest.waiting import until
from tao.client import ClientSettings, Graph, connect
from tao.devcluster.readiness import server_stats

TAO: Final = "tao"
REDIS: Final = "redis_lookaside"
MEMCACHED: Final = "memcached_lookaside"
MYSQL: Final = "mysql"
CONTESTANTS: Final = (TAO, REDIS, MEMCACHED, MYSQL)

MANY: Final = 20
"""Objects of a batch in the shape that is batched."""
CONNECTIONS: Final = 64
"""Of a peer's client to each cache server at most."""
_TIMEOUT_SECONDS: Final = 10.0
_FILL_TIMEOUT_SECONDS: Final = 60.0
_BLOCK_BYTES: Final = 1 << 20
_SQL_CONNECTIONS: Final = 32
_CHECKED: Final = 400
_TRACERS: Final = 16
_OPEN_LOOP_ROUNDS: Final = 3
"""So much longer are the rounds of the open loop: a tail at a constant rate needs time more than requests."""
_BETWEEN_TURNS_SECONDS: Final = 0.3
"""In which the answers under way at the end of a turn of two processes arrive."""
_LOOK_SECONDS: Final = 0.01
_START_IN_SECONDS: Final = 0.2


class Rivals(msgspec.Struct, frozen=True, kw_only=True):
    """Where the contestants are, and over which graph."""

    topology_file: str
    tier: str
    subject: Subject
    host: str
    redis_ports: tuple[int, ...]
    memcached_ports: tuple[int, ...]
    sql: SqlAddress


class PeersJob(msgspec.Struct, frozen=True, kw_only=True, tag="peers"):
    """All contestants in one process, in every shape that one process makes."""

    rivals: Rivals
    server_pids: dict[str, tuple[int, ...]]
    """By contestant, the database's among them."""
    follower_admin: str
    leader_admin: str
    awaiters: int
    warm_requests: int
    """Of every contestant."""
    rounds: int
    round_seconds: float
    rate: float
    """Requests a second of the open loop, the same for everybody."""


class PairJob(msgspec.Struct, frozen=True, kw_only=True, tag="peers_pair"):
    """One of several load processes that take their turns at the same time."""

    rivals: Rivals
    server_pids: dict[str, tuple[int, ...]]
    """Of those whose CPU time this process is to count."""
    process: int
    awaiters: int
    rounds: int
    round_seconds: float
    start_file: str
    """Says, once it is there, when to begin: seconds of the monotonic clock, which processes of a machine share."""


class CacheCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Of tao's two caches while many awaiters asked for single queries."""

    hits: int
    """Queries that the follower answered out of its memory."""
    misses: int
    joined: int
    """Of the follower's misses, those that waited for another's fetch."""
    leader_misses: int


class PeersResult(msgspec.Struct, frozen=True, kw_only=True):
    """By shape, in order, and by contestant."""

    shapes: dict[str, dict[str, Taken]]
    queries_per_operation: dict[str, int]
    tao_counts: CacheCounts
    checked: int
    """Answers compared, of each contestant."""


class PairResult(msgspec.Struct, frozen=True, kw_only=True):
    """By contestant."""

    taken: dict[str, Taken]


async def run_peers(job: PeersJob, tell: Callable[[str, float], None]) -> PeersResult:
    """Raises `TaoError`, or what a peer's client raises."""
    async with AsyncExitStack() as stack:
        arena = await Arena.filled(job.rivals, stack, tell)
        checked = 0
        for again in ("", " again, out of the caches"):
            tell(f"checking every contestant's answers{again}", 0.0)
            checked += await arena.check()
        for name, peer in arena.peers.items():
            tell(f"warming {name}", 0.0)
            await warmed(peer, arena.stream(name), job.awaiters, job.warm_requests)
        tracers = [await arena.tao() for _ in range(_TRACERS)]

        def shape(name: str, drive: Callable[[str], Drive]) -> tuple[str, list[Contender]]:
            text = f"{job.rivals.subject.workload}, {name}"
            return text, [
                Contender(each, peer, drive(each), job.server_pids[each]) for each, peer in arena.peers.items()
            ]

        def single(awaiters: int) -> Callable[[str], Drive]:
            return lambda name: closed(arena.peers[name], arena.stream(name), awaiters)

        open_loop = f"open loop of {job.rate:,.0f} a second"
        shapes = [
            shape(f"{job.awaiters} awaiters of single queries", single(job.awaiters)),
            shape(
                open_loop,
                lambda name: at_rate(arena.peers[name], arena.stream(name), job.rate, tracers if name == TAO else ()),
            ),
            shape("1 awaiter", single(1)),
            shape(
                f"objects, {MANY} in one call, {job.awaiters} awaiters",
                lambda name: closed(arena.peers[name], arena.batches(), job.awaiters),
            ),
        ]
        opened = shapes[1][0]
        turns, taken = sum(len(each) for _, each in shapes) * (job.rounds + 1), count()
        counts = [await _counts(job)]
        for text, contenders in shapes:
            for number in range(job.rounds + 1):
                for each in rotated(contenders, number):
                    tell(f"{text}: {each.name}, round {number} of {job.rounds}", next(taken) / turns)
                    seconds = job.round_seconds if number else job.round_seconds / 4
                    if text == opened:
                        seconds *= _OPEN_LOOP_ROUNDS
                    await each.take(perf_counter() + seconds, counts=number > 0)
            counts.append(await _counts(job))
        tell("checking every contestant's answers once more", 1.0)
        checked += await arena.check()
        return PeersResult(
            shapes={text: {each.name: each.taken() for each in contenders} for text, contenders in shapes},
            queries_per_operation={text: MANY if f"{MANY} in one" in text else 1 for text, _ in shapes},
            tao_counts=_between(*counts[:2]),
            checked=checked,
        )


async def run_pair(job: PairJob, tell: Callable[[str, float], None]) -> PairResult:
    """Raises `TaoError`, or what a peer's client raises."""
    start = Path(job.start_file)
    async with AsyncExitStack() as stack:
        arena = await Arena.open(job.rivals, stack, 100 + job.process)
        contenders = [
            Contender(name, peer, closed(peer, arena.stream(name), job.awaiters), job.server_pids.get(name, ()))
            for name, peer in arena.peers.items()
        ]
        for each in contenders:
            await each.take(perf_counter() + job.round_seconds / 4, counts=False)
        tell(READY, 0.0)

        async def is_started() -> bool:
            return _start_in(start) is not None

        await until(is_started, _LOOK_SECONDS)
        begins = (_start_in(start) or 0.0) + _START_IN_SECONDS
        for number in range(job.rounds):
            for each in rotated(contenders, number):
                tell(f"{each.name}, two load processes, round {number + 1} of {job.rounds}", 1.0)
                await asyncio.sleep(begins - perf_counter())
                await each.take(begins + job.round_seconds)
                begins += job.round_seconds + _BETWEEN_TURNS_SECONDS
        return PairResult(taken={each.name: each.taken() for each in contenders})


READY: Final = "ready"
"""The step that says that a load process waits for the start."""


def _start_in(file: Path) -> float | None:
    # Whoever writes it puts it there whole.
    return float(file.read_text()) if file.exists() else None


async def _counts(job: PeersJob) -> CacheCounts:
    follower, leader = await server_stats(job.follower_admin), await server_stats(job.leader_admin)
    return CacheCounts(
        hits=follower["hits"],
        misses=follower["misses"],
        joined=follower["fills"]["joined"],
        leader_misses=leader["misses"],
    )


def _between(before: CacheCounts, after: CacheCounts) -> CacheCounts:
    return CacheCounts(**{name: getattr(after, name) - getattr(before, name) for name in CacheCounts.__struct_fields__})


class Arena:
    """The contestants over one graph."""

    def __init__(self, rivals: Rivals, stack: AsyncExitStack, workload: Workload, plan: GraphPlan, number: int) -> None:
        """``number``: of the requests' stream."""
        self._rivals: Final = rivals
        self._stack: Final = stack
        self._workload: Final = workload
        self.plan: Final = plan
        self._number: Final = number
        self._streams: Final[dict[str, Iterator[Request]]] = {}
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
        self.peers[TAO] = await self.tao()
        for name in (REDIS, MEMCACHED, MYSQL):
            self.peers[name] = await self.peer(name)

    async def tao(self) -> TaoPeer:
        """A client of its own."""
        return TaoPeer(await self.graph(self._rivals.tier), self.ids, self._payloads(2))

    async def peer(self, name: str) -> SqlContestant:
        """A client of its own, as of another web server."""
        rivals, sql, payloads = self._rivals, await self._sql(), self._payloads(3)
        if name == MYSQL:
            return SqlContestant(sql, self.ids, payloads)
        cache = (
            RedisCache(rivals.host, rivals.redis_ports, CONNECTIONS)
            if name == REDIS
            else MemcachedCache(rivals.host, rivals.memcached_ports, CONNECTIONS)
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

    def stream(self, name: str) -> Iterator[Request]:
        """A contestant's endless requests; always the same iterator."""
        if name not in self._streams:
            self._streams[name] = self._noting_writes(self._requests(self._number))
        return self._streams[name]

    def _requests(self, number: int) -> RequestStream:
        subject = self._rivals.subject
        return RequestStream(self._workload, self.plan, subject.seed, number, subject.shards)

    def _noting_writes(self, requests: Iterator[Request]) -> Iterator[Request]:
        for request in requests:
            if request.kind not in READS:
                self._written.update((request.node, *(part.node for part in request.parts)))
            yield request

    def batches(self) -> Iterator[Request]:
        """Endless batches of different objects, by their popularity."""
        chance = Random(f"batches {self._rivals.subject.seed}")
        draw = Popularity(
            self.plan.shuffled, self._workload.object_skew, chance, again=self._workload.assumed.again
        ).draw
        while True:
            nodes: dict[int, None] = {}
            while len(nodes) < MANY:
                nodes[draw()] = None
            yield Request(Kind.READ_MANY, others=tuple(nodes))

    async def check(self) -> int:
        """How many answers of each were compared; of what nobody has written. Raises `WrongAnswer`."""
        requests = self._requests(99).take(_CHECKED)
        return await check(self.peers, self.plan, self.ids, requests, self._written)
