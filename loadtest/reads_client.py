"""The load process' part of `cached_reads`: fill both sides, check both, and let them take turns in every shape."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random
from typing import Final

from loadtest.dataset import Dataset, write_dataset
from loadtest.driving import Call, awaiters, separate
from loadtest.jobs import ReadsJob
from loadtest.reading_redis import RedisReads
from loadtest.reading_tao import GraphReads, Transport, open_graph, open_sessions, open_unary, session_gets
from loadtest.results import Aim, Figure, Measure
from loadtest.rounds import Comparison, Trial, compare

FRAMES: Final = "frames"
GRPC: Final = "gRPC stream"
UNARY: Final = "gRPC unary"
REDIS: Final = "redis"
REDIS_PIPELINE: Final = "redis pipeline"

PAGE_EDGES: Final = 20
BATCHES: Final = (1, 5, 20)
_BATCH_OF_THE_AIM: Final = 5
MANY: Final = 100
_TRANSPORTS: Final[tuple[tuple[str, Transport], ...]] = ((FRAMES, "frames"), (GRPC, "grpc"))
_PREPARED_CALLS: Final = 5000
_PREPARED_BATCHES: Final = 200
_SEED: Final = 2

_AT_64_AWAITERS: Final = (
    Aim(measure=Measure.RATE, bound=80_000),
    Aim(measure=Measure.RATE, bound=3, against=REDIS),
)
_MANY_FORM: Final = (Aim(measure=Measure.RATE, bound=1, against=REDIS),)
_AT_BATCHES_OF_5: Final = (Aim(measure=Measure.RATE, bound=4, against=GRPC),)
_ALONE: Final = (Aim(measure=Measure.P50, bound=1.2, against=REDIS),)


async def run_reads(job: ReadsJob, tell: Callable[[str, float], None]) -> list[Figure]:
    """All comparisons, in the order of the table. Raises `TaoError`, or what redis-py raises."""
    async with AsyncExitStack() as stack:
        graphs = {name: await open_graph(job.topology_file, transport, stack) for name, transport in _TRANSPORTS}
        redis = RedisReads(job.redis_port)
        stack.push_async_callback(redis.close)
        tell("writing the graph", 0.0)
        data = await write_dataset(graphs[FRAMES], job.size)
        await redis.fill(data)
        tell("checking every answer, which warms the caches", 0.0)
        await redis.verify(data)
        readers = {name: GraphReads(graph) for name, graph in graphs.items()}
        for reader in readers.values():
            await reader.verify(data)
        comparisons = [
            *_through_the_sdk(job, data, readers, redis),
            *await _through_sessions(job, data, redis, stack),
            *await _through_unary(job, data, stack),
        ]
        figures: list[Figure] = []
        turns = sum(len(comparison.trials) for comparison in comparisons) * (job.pace.rounds + 1)
        taken = 0

        def on_round(text: str) -> None:
            nonlocal taken
            tell(text, taken / turns)
            taken += 1

        for comparison in comparisons:
            figures += await compare(comparison, job.pace.rounds, job.pace.round_seconds, on_round)
        return figures


def _through_the_sdk(
    job: ReadsJob, data: Dataset, readers: dict[str, GraphReads], redis: RedisReads
) -> list[Comparison]:
    ids = _choose(data, _PREPARED_CALLS)
    hundreds = _batches(data, MANY)
    many = job.awaiters

    def side_by_side(
        shape: str, count: int, calls: Callable[[GraphReads | RedisReads], list[Call]], aims: tuple[Aim, ...], per: int
    ) -> Comparison:
        trials = [
            Trial(name, awaiters(count, calls(reader)), (job.follower_pid,), per) for name, reader in readers.items()
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
    over_frames = await open_sessions(job.frames, "frames", connections, stack)
    over_grpc = await open_sessions(job.grpc, "grpc", connections, stack)
    await redis.open_single(connections)
    comparisons = []
    for size in BATCHES:
        batches = _batches(data, size)
        server, yardstick = (job.follower_pid,), (job.redis_pid,)
        trials = (
            Trial(FRAMES, session_gets(over_frames, batches, job.topology_version), server, size),
            Trial(GRPC, session_gets(over_grpc, batches, job.topology_version), server, size),
            Trial(REDIS, separate(redis.separate_mgets(batches)), yardstick, size),
            Trial(REDIS_PIPELINE, separate(redis.separate_pipelines(batches)), yardstick, size),
        )
        aims = {FRAMES: _AT_BATCHES_OF_5} if size == _BATCH_OF_THE_AIM else {}
        comparisons.append(Comparison(f"{connections} connections, batches of {size}", trials, REDIS, aims))
    return comparisons


async def _through_unary(job: ReadsJob, data: Dataset, stack: AsyncExitStack) -> list[Comparison]:
    calls_of = await open_unary(job.grpc, stack)
    calls = calls_of(_choose(data, _PREPARED_CALLS))
    return [
        Comparison(f"ObjGet, {_awaiters(count)}", (Trial(UNARY, awaiters(count, calls), (job.follower_pid,)),))
        for count in (job.awaiters, 1)
    ]


def _awaiters(count: int) -> str:
    return f"{count} awaiter" if count == 1 else f"{count} awaiters"


def _choose(data: Dataset, count: int) -> list[int]:
    return Random(_SEED).choices(list(data.objects), k=count)


def _batches(data: Dataset, size: int) -> list[list[int]]:
    """Batches of distinct objects."""
    chance, ids = Random(_SEED), list(data.objects)
    return [chance.sample(ids, size) for _ in range(_PREPARED_BATCHES)]
