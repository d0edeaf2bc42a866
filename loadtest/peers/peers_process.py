"""The load processes' part of `peers`: fill everybody with one graph, check everybody, let them take turns.

Every contestant draws from a stream of the same seed, so all are asked the same, and all caches are warmed with the
same number of requests of it (`loadtest.peers.warming`). Its stream goes on from turn to turn and from shape to shape:
begun anew, it would ask again for what it has just brought into the caches. The three peers write to the same tables;
only one of them knows of each such write, so that what any of them has written is left out of the last check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from itertools import count, islice
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Final

import msgspec

from loadtest.peers.asking import TaoPeer
from loadtest.peers.caches import MemcachedCache, RedisCache
from loadtest.peers.checking import check
from loadtest.peers.counters import TaoCounters
from loadtest.peers.filling import fill_everybody
from loadtest.peers.how import How
from loadtest.peers.lookaside import LookasideContestant, SqlContestant
from loadtest.peers.names import BATCHES, CACHES, MANY, MYSQL, ONE, OPEN, REDIS, TAO
from loadtest.peers.sql_graph import SqlAddress, SqlGraph
from loadtest.peers.turns import Contender, Drive, Taken, at_rate, closed, rotated
from loadtest.peers.warming import WarmBounds, Warming, Window, ask_all, warmed
from loadtest.published.contestant import Payloads, read_ids, write_ids
from loadtest.published.first_reads import FirstReads
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.load_process import Subject
from loadtest.published.requests import Request, RequestStream
from loadtest.published.shapes import Popularity
from loadtest.published.workload import READS, Kind, Workload, workload_named
from loadtest.waiting import until
from tao.client import ClientSettings, Graph, connect

OBJECTS_OF_A_BATCH: Final = 20
"""In the shape that is batched."""
CONNECTIONS: Final = 64
"""Of a peer's client to each cache server at most."""
_TIMEOUT_SECONDS: Final = 10.0
_FILL_TIMEOUT_SECONDS: Final = 60.0
_BLOCK_BYTES: Final = 1 << 20
_SQL_CONNECTIONS: Final = 32
_CHECKED: Final = 400
_OPEN_LOOP_ROUNDS: Final = 3
"""So much longer are the rounds of the open loop: a tail at a constant rate needs time more than requests."""
_BETWEEN_TURNS_SECONDS: Final = 0.3
"""In which the answers under way at the end of a turn of two processes arrive."""
_LOOK_SECONDS: Final = 0.01
_START_IN_SECONDS: Final = 0.2


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


class PeersJob(msgspec.Struct, frozen=True, kw_only=True, tag="peers"):
    """All contestants in one process, in every shape that one process makes."""

    rivals: Rivals
    server_pids: dict[str, tuple[int, ...]]
    """By contestant, the database's among them."""
    admins: tuple[str, str]
    """Of tao's follower and leader."""
    shapes: tuple[str, ...]
    """Kinds of load; those that take several processes are left out."""
    awaiters: int
    warm: WarmBounds
    rounds: int
    round_seconds: float
    rate: float
    """Requests a second of the open loop, the same for everybody."""


class PairJob(msgspec.Struct, frozen=True, kw_only=True, tag="peers_pair"):
    """One of several load processes that take their turns at the same time."""

    rivals: Rivals
    server_pids: dict[str, tuple[int, ...]]
    """Of those whose CPU time this process is to count."""
    admins: tuple[str, str] | None
    """Of tao's follower and leader, whose counters this process is to read; None: another does."""
    process: int
    awaiters: int
    rounds: int
    round_seconds: float
    start_file: str
    """Says, once it is there, when to begin: seconds of the monotonic clock, which processes of a machine share."""


class OfShape(msgspec.Struct, frozen=True, kw_only=True):
    """All turns of one shape of load."""

    kind: str
    shape: str
    """As tables name it."""
    queries_per_operation: int
    taken: dict[str, Taken]
    """By contestant."""


class PeersResult(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes in order."""

    shapes: list[OfShape]
    warming: Warming
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
        counters = TaoCounters(*job.admins)
        warming = await warmed(_windows(arena, counters), job.warm, tell)
        shapes = [each for each in _shapes(job, arena) if each[0] in job.shapes]
        contenders = {
            kind: [
                Contender(
                    name,
                    peer,
                    drive(name),
                    job.server_pids[name],
                    counters if name == TAO else None,
                    arena.first_reads(name),
                )
                for name, peer in arena.peers.items()
            ]
            for kind, _, drive in shapes
        }
        turns, taken = sum(len(each) for each in contenders.values()) * (job.rounds + 1), count()
        for kind, text, _ in shapes:
            for number in range(job.rounds + 1):
                for each in rotated(contenders[kind], number):
                    tell(f"{text}: {each.name}, round {number} of {job.rounds}", next(taken) / turns)
                    seconds = job.round_seconds if number else job.round_seconds / 4
                    if kind == OPEN:
                        seconds *= _OPEN_LOOP_ROUNDS
                    await each.take(perf_counter() + seconds, counts=number > 0)
        tell("checking every contestant's answers once more", 1.0)
        checked += await arena.check()
        return PeersResult(
            shapes=[
                OfShape(
                    kind=kind,
                    shape=f"{job.rivals.subject.workload}, {text}",
                    queries_per_operation=OBJECTS_OF_A_BATCH if kind == BATCHES else 1,
                    taken={each.name: each.taken() for each in contenders[kind]},
                )
                for kind, text, _ in shapes
            ],
            warming=warming,
            checked=checked,
        )


def _windows(arena: Arena, counters: TaoCounters) -> dict[str, Window]:
    def window(name: str) -> Window:
        peer, stream, asked = arena.peers[name], arena.stream(name), count()

        async def ask(requests: int) -> float | None:
            if name not in CACHES and next(asked):
                # It keeps nothing: after a window its connections are there. Its stream goes on with the others'.
                for _ in islice(stream, requests):
                    pass
                return None
            if name == TAO:
                await counters.since_last()
            hows = await ask_all(peer, stream, requests)
            if name == TAO:
                counted = await counters.since_last()
                return counted.hits / max(1, counted.hits + counted.misses)
            reads = sum(how is not How.UNKNOWN for how in hows)
            return hows.count(How.HIT) / max(1, reads) if name in CACHES else None

        return ask

    return {name: window(name) for name in arena.peers}


def _shapes(job: PeersJob, arena: Arena) -> list[tuple[str, str, Callable[[str], Drive]]]:
    """Kind, text, and what drives a contestant."""

    def single(awaiters: int) -> Callable[[str], Drive]:
        return lambda name: closed(arena.peers[name], arena.stream(name), awaiters)

    return [
        (MANY, f"{job.awaiters} awaiters of single queries", single(job.awaiters)),
        (
            OPEN,
            f"open loop of {job.rate:,.0f} a second",
            lambda name: at_rate(arena.peers[name], arena.stream(name), job.rate),
        ),
        (ONE, "1 awaiter", single(1)),
        (
            BATCHES,
            f"objects, {OBJECTS_OF_A_BATCH} in one call, {job.awaiters} awaiters",
            lambda name: closed(arena.peers[name], arena.batches(name), job.awaiters),
        ),
    ]


async def run_pair(job: PairJob, tell: Callable[[str, float], None]) -> PairResult:
    """Raises `TaoError`, or what a peer's client raises."""
    start = Path(job.start_file)
    async with AsyncExitStack() as stack:
        arena = await Arena.open(job.rivals, stack, 100 + job.process)
        contenders = [
            Contender(
                name,
                peer,
                closed(peer, arena.stream(name), job.awaiters),
                job.server_pids.get(name, ()),
                TaoCounters(*job.admins) if name == TAO and job.admins else None,
            )
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
            self._streams[name] = self._noting(self._requests(self._number), self.first_reads(name))
        return self._streams[name]

    def first_reads(self, name: str) -> FirstReads:
        """Of what the contestant is asked; always the same."""
        return self._first_reads.setdefault(name, FirstReads(counts_apart=name != TAO))

    def _requests(self, number: int) -> RequestStream:
        subject = self._rivals.subject
        return RequestStream(self._workload, self.plan, subject.seed, number, subject.shards)

    def _noting(self, requests: Iterator[Request], first_reads: FirstReads) -> Iterator[Request]:
        note = first_reads.note
        for request in requests:
            if request.kind in READS:
                note(request)
            else:
                self._written.update((request.node, *(part.node for part in request.parts)))
            yield request

    def batches(self, name: str) -> Iterator[Request]:
        """A contestant's endless batches of different objects, by their popularity."""
        first_reads = self.first_reads(name)
        chance = Random(f"batches {self._rivals.subject.seed}")
        draw = Popularity(
            self.plan.shuffled, self._workload.object_skew, chance, again=self._workload.assumed.again
        ).draw
        while True:
            nodes: dict[int, None] = {}
            while len(nodes) < OBJECTS_OF_A_BATCH:
                nodes[draw()] = None
            request = Request(Kind.READ_MANY, others=tuple(nodes))
            first_reads.note(request)
            yield request

    async def check(self) -> int:
        """How many answers of each were compared; of what nobody has written. Raises `WrongAnswer`."""
        requests = self._requests(99).take(_CHECKED)
        return await check(self.peers, self.plan, self.ids, requests, self._written)
