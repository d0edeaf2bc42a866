"""The load process' part of `writes`: writers through the graph and writers at the database take turns."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from random import Random
from time import perf_counter
from typing import Final

from loadtest.direct_writes import DatabaseAddress, DirectWriter
from loadtest.driving import WrongAnswer
from loadtest.jobs import WritesJob
from loadtest.reading_tao import open_graph
from loadtest.results import Aim, Figure, Measure
from loadtest.rounds import Comparison, Drive, Trial, compare
from tao.client import Graph
from tao.model.ids import SEQUENCE_PER_MS, make_id, shard_of

TAO: Final = "tao"
ONE_BY_ONE: Final = "one by one"
PEER: Final = "peer"
_PEER_NUMBER: Final = 2
"""As `schema.yaml` has it."""
_GRAPH_IDS_MS: Final = 1_600_000_000_000
_DIRECT_IDS_MS: Final = 1_650_000_000_000
"""The two sides' ids lie in different milliseconds, so that they share no row."""
_FIRST_TIME: Final = 1_700_000_000
_AIMED_SHARDS: Final = 8
_READ_BACK: Final = 2000
"""Acknowledged edges looked for at the end, the latest ones."""
_AIMS: Final = (
    Aim(measure=Measure.RATE, bound=3_000),
    Aim(measure=Measure.RATE, bound=1.5, against=ONE_BY_ONE),
)

Pair = tuple[int, int]
Write = Callable[[int, int, int], Awaitable[None]]
"""``write(id1, id2, time)`` returns when the edge and its inverse are durable."""


async def run_writes(job: WritesJob, tell: Callable[[str, float], None]) -> list[Figure]:
    """The one comparison; its edges are read back afterwards. Raises `TaoError` or `pymysql.err.MySQLError`."""
    address = DatabaseAddress(job.database_host, job.database_port, job.user, job.password)
    async with AsyncExitStack() as stack:
        graph = await open_graph(job.topology_file, "frames", stack)
        direct = [await DirectWriter.open(address) for _ in range(job.writers)]
        for writer in direct:
            stack.push_async_callback(writer.close)
        pairs = _pairs(Random(1), _ids(job, _GRAPH_IDS_MS))
        direct_pairs = _pairs(Random(1), _ids(job, _DIRECT_IDS_MS))
        written: deque[Pair] = deque(maxlen=_READ_BACK)
        comparison = Comparison(
            f"assoc_add with inverse, {job.writers} writers, {job.shards} shards",
            (
                Trial(
                    TAO,
                    _writers([_through(graph, written)] * job.writers, pairs),
                    (*job.server_pids, job.database_pid),
                ),
                Trial(ONE_BY_ONE, _writers([_at(writer) for writer in direct], direct_pairs), (job.database_pid,)),
            ),
            ONE_BY_ONE,
            {TAO: _AIMS if job.shards == _AIMED_SHARDS else ()},
        )
        turns = len(comparison.trials) * (job.pace.rounds + 1)
        taken = itertools.count()
        figures = await compare(
            comparison, job.pace.rounds, job.pace.round_seconds, lambda text: tell(text, next(taken) / turns)
        )
        tell("reading the edges back", 1.0)
        await _verify(graph, written)
        return figures


async def _verify(graph: Graph, written: Iterable[Pair]) -> None:
    """Both edges of every pair are there. Raises `WrongAnswer`."""
    for pair in written:
        for id1, id2 in (pair, pair[::-1]):
            if not await graph.assoc_get(id1, PEER, (id2,)):
                raise WrongAnswer(f"the edge {id1} → {id2} was acknowledged and is not there")


def _ids(job: WritesJob, unix_ms: int) -> list[int]:
    """Ids that are nobody's objects: an edge's ends are not looked up."""
    return [
        make_id(shard, unix_ms + number // SEQUENCE_PER_MS, number % SEQUENCE_PER_MS)
        for shard in range(job.shards)
        for number in range(job.ids_per_shard)
    ]


def _pairs(chance: Random, ids: Sequence[int]) -> Iterator[Pair]:
    while True:
        id1, id2 = chance.choice(ids), chance.choice(ids)
        if id1 != id2:
            yield id1, id2


def _through(graph: Graph, written: deque[Pair]) -> Write:
    async def write(id1: int, id2: int, time: int) -> None:
        await graph.assoc_add(id1, PEER, id2, time)
        written.append((id1, id2))

    return write


def _at(writer: DirectWriter) -> Write:
    async def write(id1: int, id2: int, time: int) -> None:
        await writer.add_edge(id1, id2, time, _PEER_NUMBER, (shard_of(id1), shard_of(id2)))

    return write


def _writers(writes: Sequence[Write], pairs: Iterator[Pair]) -> Drive:
    """One writer per function; they draw from the same pairs, and times grow."""
    times = itertools.count(_FIRST_TIME)

    async def one(write: Write, until: float, latencies: list[float]) -> None:
        started = perf_counter()
        while started < until:
            id1, id2 = next(pairs)
            await write(id1, id2, next(times))
            ended = perf_counter()
            latencies.append(ended - started)
            started = ended

    async def drive(until: float, latencies: list[float]) -> None:
        async with asyncio.TaskGroup() as group:
            for write in writes:
                group.create_task(one(write, until, latencies))

    return drive
