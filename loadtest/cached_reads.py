"""Scenario `cached_reads`: what a warm follower answers, beside Redis on the same values in the same shapes.

One follower process, one load process: on two cores each has its own, and leader and database have nothing to do. The
goals are the product's: a graph cache in Python has to be worth asking in place of a cache without a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from random import Random
from typing import Final

import msgspec

from loadtest.client_process import StepReport, run_job
from loadtest.dataset import TOY, Dataset, DatasetSize, Operation, Query, StoredList, write_dataset
from loadtest.drivers import awaiters, separate
from loadtest.peer_servers import REDIS_SERVER, private_server
from loadtest.redis_reads import RedisReads
from loadtest.results import Figure, Goal, Measure, ScenarioResult, aims_of
from loadtest.rounds import Comparison, Pace, Trial, compare_all
from loadtest.scenario import BenchSettings, Progress, Scenario
from loadtest.tao_reads import TRANSPORTS, GraphReads, open_graph, open_sessions, open_unary, session_gets
from loadtest.target import OneFollower, one_follower

FRAMES: Final = "frames"
GRPC: Final = "gRPC stream"
UNARY: Final = "gRPC unary"
REDIS: Final = "redis"
REDIS_PIPELINE: Final = "redis pipeline"
PAGE_EDGES: Final = 20
BATCHES: Final = (1, 5, 20)
MANY: Final = 100
_BATCH_OF_THE_GOAL: Final = 5
_AWAITERS: Final = 64
_TOY_AWAITERS: Final = 8
_PREPARED_CALLS: Final = 5000
_PREPARED_BATCHES: Final = 200
_SEED: Final = 2
_AT_64_AWAITERS: Final = (
    Goal(measure=Measure.RATE, bound=80_000),
    Goal(measure=Measure.RATE, bound=3, against=REDIS),
)
_MANY_FORM: Final = (Goal(measure=Measure.RATE, bound=1, against=REDIS),)
_MANY_FORM_ALONE: Final = (Goal(measure=Measure.RATE, bound=0.8, against=REDIS),)
_AT_BATCHES_OF_5: Final = (Goal(measure=Measure.RATE, bound=4, against=GRPC),)
_ALONE: Final = (Goal(measure=Measure.P50, bound=1, against=REDIS),)
_NOTES: Final = [
    "Separate connections: a session sends the next message from its answer's callback; redis-py has to be awaited.",
    "A page of a list is ZREVRANGE WITHSCORES of a sorted set; redis-py opens a connection per concurrent command.",
]


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Measure every transport and Redis in every shape of load. Raises `OperatorError`."""
    settings.versions[REDIS_SERVER.name] = REDIS_SERVER.version()
    size = TOY if settings.toy else DatasetSize()
    async with AsyncExitStack() as stack:
        redis_port, redis_pid = await stack.enter_async_context(
            private_server(REDIS_SERVER, settings.work_dir / "redis")
        )
        job = ReadsJob(
            cluster=await stack.enter_async_context(one_follower(settings, "cached_reads", progress)),
            redis_port=redis_port,
            redis_pid=redis_pid,
            size=size,
            awaiters=_TOY_AWAITERS if settings.toy else _AWAITERS,
            pace=Pace(settings.rounds, settings.round_seconds),
        )
        figures = await run_job(job, progress, settings.work_dir / "cached_reads.log", list[Figure])
    return ScenarioResult(
        conditions={
            "objects": size.objects,
            "value_bytes": 100,
            "awaiters": job.awaiters,
            "rounds": settings.rounds,
            "round_seconds": settings.round_seconds,
        },
        figures=figures,
        notes=_NOTES,
        aims=aims_of(figures),
    )


SCENARIO: Final = Scenario(
    name="cached_reads",
    summary="cached reads of one follower, over every transport, beside redis-py and redis-server",
    run=run,
)


class ReadsJob(msgspec.Struct, frozen=True, kw_only=True):
    """Fill the follower and Redis, check both, and let them take turns in every shape of load."""

    cluster: OneFollower
    redis_port: int
    redis_pid: int
    size: DatasetSize
    awaiters: int
    """Concurrent awaiters of one client; as many separate connections."""
    pace: Pace

    async def work(self, report: StepReport) -> list[Figure]:
        """Return the figures in the order of the table. Raises `TaoError`, or what redis-py raises."""
        async with AsyncExitStack() as stack:
            graphs = {
                name: await open_graph(self.cluster.topology_file, transport, stack)
                for name, transport in TRANSPORTS.items()
            }
            redis = RedisReads(self.redis_port)
            stack.push_async_callback(redis.close)
            report("writing the graph", 0.0)
            async with AsyncExitStack() as writing:
                # A graph of its own: one that has written asks for no answer older than its writes.
                writer = await open_graph(self.cluster.topology_file, TRANSPORTS[FRAMES], writing)
                data = await write_dataset(writer, self.size)
            await redis.fill(data)
            report("checking every answer, which warms the caches", 0.0)
            readers: dict[str, GraphReads | RedisReads] = {name: GraphReads(graph) for name, graph in graphs.items()}
            readers[REDIS] = redis
            for reader in readers.values():
                await reader.verify(data)
            comparisons = [
                *_through_the_sdk(self, data, readers),
                *await _through_sessions(self, data, redis, stack),
                *await _through_unary(self, data, stack),
            ]
            return await compare_all(comparisons, self.pace, report)

    def pids(self, contestant: str) -> dict[str, int]:
        """Return the server that a contestant keeps busy."""
        if contestant in (REDIS, REDIS_PIPELINE):
            return {"redis": self.redis_pid}
        return {"follower": self.cluster.follower_pid}


def _through_the_sdk(job: ReadsJob, data: Dataset, readers: dict[str, GraphReads | RedisReads]) -> list[Comparison]:
    gets, hundreds, many = _gets(data), _batches(data, MANY), job.awaiters
    pages = [page_of(stored, PAGE_EDGES) for stored in data.pages]
    shapes: tuple[tuple[str, int, Sequence[Query] | Sequence[list[int]], tuple[Goal, ...]], ...] = (
        ("obj_get", many, gets, _AT_64_AWAITERS),
        (f"assoc_range of {PAGE_EDGES}", many, pages, ()),
        ("the paper's reads", many, data.mix, ()),
        (f"obj_get_many of {MANY}", 1, hundreds, _MANY_FORM_ALONE),
        (f"obj_get_many of {MANY}", many, hundreds, _MANY_FORM),
        ("obj_get", 1, gets, _ALONE),
    )
    comparisons = []
    for what, count, asked, aims in shapes:
        queries_each = MANY if asked is hundreds else 1
        trials = tuple(
            Trial(name, awaiters(count, [reader.call(each) for each in asked]), job.pids(name), queries_each)
            for name, reader in readers.items()
        )
        comparisons.append(Comparison(f"{what}, {_awaiters(count)}", trials, REDIS, {FRAMES: aims}))
    return comparisons


async def _through_sessions(job: ReadsJob, data: Dataset, redis: RedisReads, stack: AsyncExitStack) -> list[Comparison]:
    connections, version = job.awaiters, job.cluster.topology_version
    over_frames = await open_sessions(job.cluster.frames, "frames", connections, stack)
    over_grpc = await open_sessions(job.cluster.grpc, "grpc", connections, stack)
    clients = await redis.open_single(connections)
    comparisons = []
    for size in BATCHES:
        batches = _batches(data, size)
        drives = {
            FRAMES: session_gets(over_frames, batches, version),
            GRPC: session_gets(over_grpc, batches, version),
            REDIS: separate([[redis.mget(batch, client) for batch in batches] for client in clients]),
            REDIS_PIPELINE: separate([[redis.pipeline(batch, client) for batch in batches] for client in clients]),
        }
        trials = tuple(Trial(name, drive, job.pids(name), size) for name, drive in drives.items())
        aims = {FRAMES: _AT_BATCHES_OF_5} if size == _BATCH_OF_THE_GOAL else {}
        comparisons.append(Comparison(f"{connections} connections, batches of {size}", trials, REDIS, aims))
    return comparisons


async def _through_unary(job: ReadsJob, data: Dataset, stack: AsyncExitStack) -> list[Comparison]:
    call = await open_unary(job.cluster.grpc, stack)
    calls = [call(query) for query in _gets(data)]
    return [
        Comparison(f"ObjGet, {_awaiters(count)}", (Trial(UNARY, awaiters(count, calls), job.pids(UNARY)),))
        for count in (job.awaiters, 1)
    ]


def page_of(stored: StoredList, edges: int) -> Query:
    """Return the query of the newest edges of a list."""
    return Query(Operation.ASSOC_RANGE, stored.id1, limit=edges, expected=min(edges, len(stored.edges)))


def _awaiters(count: int) -> str:
    return f"{count} awaiter" if count == 1 else f"{count} awaiters"


def _gets(data: Dataset) -> list[Query]:
    chosen = Random(_SEED).choices(list(data.objects), k=_PREPARED_CALLS)
    return [Query(Operation.OBJ_GET, object_id) for object_id in chosen]


def _batches(data: Dataset, size: int) -> list[list[int]]:
    """Draw batches of distinct objects."""
    chance, ids = Random(_SEED), list(data.objects)
    return [chance.sample(ids, size) for _ in range(_PREPARED_BATCHES)]
