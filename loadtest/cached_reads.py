"""Scenario `cached_reads`: what a warm follower answers, beside Redis on the same values in the same shapes.

One follower process, one load process: on two cores each has its own, and leader and database have nothing to do. The
goals are the product's: a graph cache in Python has to be worth asking in place of a cache without a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random
from typing import Final

import msgspec

from loadtest.client_process import StepReport, run_job
from loadtest.dataset import TOY, Dataset, DatasetSize, write_dataset
from loadtest.drivers import Call, awaiters, separate
from loadtest.peer_servers import find_redis_server, private_redis
from loadtest.redis_reads import RedisReads
from loadtest.results import Figure, Goal, Measure, ScenarioResult, aims_of
from loadtest.rounds import Comparison, Pace, Trial, compare_all
from loadtest.scenario import BenchSettings, Progress, Scenario
from loadtest.tao_reads import GraphReads, Transport, open_graph, open_sessions, open_unary, session_gets
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
_TRANSPORTS: Final[tuple[tuple[str, Transport], ...]] = ((FRAMES, "frames"), (GRPC, "grpc"))
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
_AT_BATCHES_OF_5: Final = (Goal(measure=Measure.RATE, bound=4, against=GRPC),)
_ALONE: Final = (Goal(measure=Measure.P50, bound=1.2, against=REDIS),)
_NOTES: Final = [
    "Separate connections: a session sends the next message from its answer's callback; redis-py has to be awaited.",
    "A page of a list is ZREVRANGE WITHSCORES of a sorted set; redis-py opens a connection per concurrent command.",
]


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Measure every transport and Redis in every shape of load. Raises `OperatorError`."""
    _, settings.versions["redis-server"] = find_redis_server()
    size = TOY if settings.toy else DatasetSize()
    async with AsyncExitStack() as stack:
        redis_port, redis_pid = await stack.enter_async_context(private_redis(settings.work_dir / "redis"))
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
        summary=SCENARIO.summary,
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
                name: await open_graph(self.cluster.topology_file, transport, stack) for name, transport in _TRANSPORTS
            }
            redis = RedisReads(self.redis_port)
            stack.push_async_callback(redis.close)
            report("writing the graph", 0.0)
            data = await write_dataset(graphs[FRAMES], self.size)
            await redis.fill(data)
            report("checking every answer, which warms the caches", 0.0)
            await redis.verify(data)
            readers = {name: GraphReads(graph) for name, graph in graphs.items()}
            for reader in readers.values():
                await reader.verify(data)
            comparisons = [
                *_through_the_sdk(self, data, readers, redis),
                *await _through_sessions(self, data, redis, stack),
                *await _through_unary(self, data, stack),
            ]
            return await compare_all(comparisons, self.pace, report)


def _through_the_sdk(
    job: ReadsJob, data: Dataset, readers: dict[str, GraphReads], redis: RedisReads
) -> list[Comparison]:
    ids = _choose(data, _PREPARED_CALLS)
    hundreds = _batches(data, MANY)
    many = job.awaiters

    def side_by_side(
        shape: str, count: int, calls: Callable[[GraphReads | RedisReads], list[Call]], aims: tuple[Goal, ...], per: int
    ) -> Comparison:
        trials = [
            Trial(name, awaiters(count, calls(reader)), (job.cluster.follower_pid,), per)
            for name, reader in readers.items()
        ]
        trials.append(Trial(REDIS, awaiters(count, calls(redis)), (job.redis_pid,), per))
        return Comparison(shape, tuple(trials), REDIS, {FRAMES: aims})

    return [
        side_by_side(f"obj_get, {_awaiters(many)}", many, lambda of: of.gets(ids), _AT_64_AWAITERS, 1),
        side_by_side(
            f"assoc_range of {PAGE_EDGES}, {_awaiters(many)}", many, lambda of: of.pages(data.pages, PAGE_EDGES), (), 1
        ),
        side_by_side(f"the paper's reads, {_awaiters(many)}", many, lambda of: of.mix(data.mix), (), 1),
        side_by_side(f"obj_get_many of {MANY}, {_awaiters(1)}", 1, lambda of: of.many(hundreds), _MANY_FORM, MANY),
        side_by_side(
            f"obj_get_many of {MANY}, {_awaiters(many)}", many, lambda of: of.many(hundreds), _MANY_FORM, MANY
        ),
        side_by_side(f"obj_get, {_awaiters(1)}", 1, lambda of: of.gets(ids), _ALONE, 1),
    ]


async def _through_sessions(job: ReadsJob, data: Dataset, redis: RedisReads, stack: AsyncExitStack) -> list[Comparison]:
    connections = job.awaiters
    over_frames = await open_sessions(job.cluster.frames, "frames", connections, stack)
    over_grpc = await open_sessions(job.cluster.grpc, "grpc", connections, stack)
    await redis.open_single(connections)
    comparisons = []
    for size in BATCHES:
        batches = _batches(data, size)
        server, yardstick = (job.cluster.follower_pid,), (job.redis_pid,)
        trials = (
            Trial(FRAMES, session_gets(over_frames, batches, job.cluster.topology_version), server, size),
            Trial(GRPC, session_gets(over_grpc, batches, job.cluster.topology_version), server, size),
            Trial(REDIS, separate(redis.separate_mgets(batches)), yardstick, size),
            Trial(REDIS_PIPELINE, separate(redis.separate_pipelines(batches)), yardstick, size),
        )
        aims = {FRAMES: _AT_BATCHES_OF_5} if size == _BATCH_OF_THE_GOAL else {}
        comparisons.append(Comparison(f"{connections} connections, batches of {size}", trials, REDIS, aims))
    return comparisons


async def _through_unary(job: ReadsJob, data: Dataset, stack: AsyncExitStack) -> list[Comparison]:
    calls_of = await open_unary(job.cluster.grpc, stack)
    calls = calls_of(_choose(data, _PREPARED_CALLS))
    return [
        Comparison(f"ObjGet, {_awaiters(count)}", (Trial(UNARY, awaiters(count, calls), (job.cluster.follower_pid,)),))
        for count in (job.awaiters, 1)
    ]


def _awaiters(count: int) -> str:
    return f"{count} awaiter" if count == 1 else f"{count} awaiters"


def _choose(data: Dataset, count: int) -> list[int]:
    return Random(_SEED).choices(list(data.objects), k=count)


def _batches(data: Dataset, size: int) -> list[list[int]]:
    """Draw batches of distinct objects."""
    chance, ids = Random(_SEED), list(data.objects)
    return [chance.sample(ids, size) for _ in range(_PREPARED_BATCHES)]
