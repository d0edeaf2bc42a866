"""The load process' part of `stream`: batches of one operation, and of the paper's mix, over both transports."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Final

from loadtest.dataset import Dataset, write_dataset
from loadtest.driving import Batch, WrongAnswer, sessions, sessions_at_rate
from loadtest.jobs import StreamJob
from loadtest.reading_tao import GraphReads, Transport, open_graph, open_sessions
from loadtest.results import Aim, Figure, Measure
from loadtest.rounds import Comparison, Trial, compare
from loadtest.workloads import Operation, Query, StoredList
from tao.model.edge_block import header
from tao.model.graph import COUNT_VALUE_BYTES, MAX_TIME, decode_count
from tao.wire.session import Session
from tao.wire.v1 import session_pb2 as pb

FRAMES: Final = "frames"
GRPC: Final = "gRPC stream"
MIX: Final = "the paper's reads"
_TRANSPORTS: Final[tuple[tuple[str, Transport], ...]] = ((FRAMES, "frames"), (GRPC, "grpc"))
_PAGE_EDGES: Final = 20
_PREPARED_BATCHES: Final = 100
_TIMEOUT_SECONDS: Final = 30.0
_SLOTS: Final = list(Operation)
_CPU: Final = Aim(measure=Measure.SERVER_CPU, bound=3)
_P99: Final = Aim(measure=Measure.P99, bound=1_000)


async def run_stream(job: StreamJob, tell: Callable[[str, float], None]) -> list[Figure]:
    """All comparisons, in the order of the table. Raises `TaoError`."""
    async with AsyncExitStack() as stack:
        graph = await open_graph(job.topology_file, "frames", stack)
        tell("writing the graph", 0.0)
        data = await write_dataset(graph, job.size)
        tell("checking every answer, which warms the cache", 0.0)
        await GraphReads(graph).verify(data)
        opened: dict[str, list[Session]] = {}
        for name, transport in _TRANSPORTS:
            address = job.frames if transport == "frames" else job.grpc
            opened[name] = await open_sessions(address, transport, job.connections, stack)
        ask, version = opened[FRAMES][0].ask, job.topology_version
        batches = {
            shape: await checked(ask, _batches(queries, job.batch), job.atype, version)
            for shape, queries in _shapes(data).items()
        }
        comparisons = [_at_their_pace(job, opened, shape, of_shape) for shape, of_shape in batches.items()]
        comparisons.append(_at_rate(job, opened, batches[MIX]))
        figures: list[Figure] = []
        turns = itertools.count()
        total = sum(len(comparison.trials) for comparison in comparisons) * (job.pace.rounds + 1)
        for comparison in comparisons:
            figures += await compare(
                comparison, job.pace.rounds, job.pace.round_seconds, lambda text: tell(text, next(turns) / total)
            )
        return figures


def _at_their_pace(
    job: StreamJob, opened: dict[str, list[Session]], shape: str, batches: Sequence[Batch]
) -> Comparison:
    trials = tuple(
        Trial(name, sessions(each, batches, job.topology_version), (job.follower_pid,), job.batch)
        for name, each in opened.items()
        if name == FRAMES or shape == MIX  # what an operation costs is the same over both
    )
    return Comparison(f"{shape}, batches of {job.batch}", trials, aims={FRAMES: (_CPU,)} if shape == MIX else {})


def _at_rate(job: StreamJob, opened: dict[str, list[Session]], batches: Sequence[Batch]) -> Comparison:
    trials = tuple(
        Trial(
            name,
            sessions_at_rate(each, batches, job.topology_version, job.queries_per_second / job.batch),
            (job.follower_pid,),
            job.batch,
        )
        for name, each in opened.items()
    )
    return Comparison(f"{MIX}, {job.queries_per_second:,.0f} queries/s", trials, aims={FRAMES: (_P99,)})


def _shapes(data: Dataset) -> dict[str, list[Query]]:
    """Queries by shape: the mix, each operation of it, and what asks of lists that have edges."""
    shapes = {MIX: list(data.mix)}
    for operation in Operation:
        shapes[f"{operation} of the mix"] = [query for query in data.mix if query.operation is operation]
    full = data.pages
    shapes["assoc_range, a page"] = [_page(stored) for stored in full]
    shapes["assoc_time_range, a page"] = [_window(stored) for stored in full]
    shapes["assoc_get, an edge"] = [_edge(stored, place) for place, stored in enumerate(full)]
    return {shape: queries for shape, queries in shapes.items() if queries}


def _page(stored: StoredList) -> Query:
    found = min(_PAGE_EDGES, len(stored.edges))
    return Query(Operation.ASSOC_RANGE, stored.id1, limit=_PAGE_EDGES, expected=found)


def _window(stored: StoredList) -> Query:
    """From the sixth edge on."""
    edges = stored.edges[5 : 5 + _PAGE_EDGES]
    high, low = edges[0][1], edges[-1][1]
    return Query(Operation.ASSOC_TIME_RANGE, stored.id1, limit=_PAGE_EDGES, high=high, low=low, expected=len(edges))


def _edge(stored: StoredList, place: int) -> Query:
    return Query(Operation.ASSOC_GET, stored.id1, id2=stored.edges[place % len(stored.edges)][0])


def _batches(queries: Sequence[Query], size: int) -> Iterator[list[Query]]:
    endless = itertools.cycle(queries)
    for _ in range(_PREPARED_BATCHES):
        yield sorted(itertools.islice(endless, size), key=lambda query: _SLOTS.index(query.operation))


async def checked(
    ask: Callable[[pb.Request, float], Awaitable[pb.Answer]],
    batches: Iterable[list[Query]],
    atype: int,
    topology_version: int,
) -> list[Batch]:
    """The messages of queries ordered by slot, and how many bytes their answers have, which must be right. Raises
    `WrongAnswer`."""
    checked = []
    for queries in batches:
        message = read_batch(queries, atype)
        answer = await ask(pb.Request(topology_version=topology_version, read=message), _TIMEOUT_SECONDS)
        values = answer.read.values
        # By slot: what the follower had let go of meanwhile comes in a part of its own, after the others.
        by_slot = dict(zip(answer.read.slots or range(len(values)), values, strict=True))
        for slot, query in enumerate(queries):
            found = _found(query, by_slot[slot]) if slot in by_slot else answer.read.errors
            if found != query.expected:
                raise WrongAnswer(f"{query} is answered with {found}")
        checked.append(Batch(message, sum(map(len, values))))
    return checked


def _found(query: Query, value: bytes) -> int:
    if query.operation is Operation.OBJ_GET:
        return 1
    return decode_count(value)[1] if len(value) == COUNT_VALUE_BYTES else header(value)[2]


def read_batch(queries: Sequence[Query], atype: int) -> pb.ReadBatch:
    """Queries, ordered by slot, in columns."""
    batch = pb.ReadBatch()
    for query in queries:
        if query.operation is Operation.OBJ_GET:
            batch.obj_ids.append(query.id)
        elif query.operation is Operation.ASSOC_COUNT:
            batch.count_id1s.append(query.id)
            batch.count_atypes.append(atype)
        elif query.operation is Operation.ASSOC_RANGE:
            batch.range_id1s.append(query.id)
            batch.range_atypes.append(atype)
            batch.range_positions.append(0)
            batch.range_limits.append(query.limit)
        elif query.operation is Operation.ASSOC_TIME_RANGE:
            batch.time_range_id1s.append(query.id)
            batch.time_range_atypes.append(atype)
            batch.time_range_highs.append(query.high)
            batch.time_range_lows.append(query.low)
            batch.time_range_limits.append(query.limit)
        else:
            batch.get_id1s.append(query.id)
            batch.get_atypes.append(atype)
            batch.get_id2_counts.append(1)
            batch.get_id2s.append(query.id2)
            batch.get_highs.append(MAX_TIME)
            batch.get_lows.append(0)
    return batch
