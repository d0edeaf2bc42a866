"""Scenario `stream`: CPU of a follower for each cached query that comes in batches on the stream, by operation; and how
long a batch takes at a constant rate of queries from one process.

One follower process, one load process, as in `cached_reads`, and bare sessions, so that the server alone is measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Final

import msgspec

from loadtest.cached_reads import FRAMES, PAGE_EDGES, page_of
from loadtest.client_process import StepReport, run_job
from loadtest.dataset import LINK, TOY, Dataset, DatasetSize, Operation, Query, StoredList, write_dataset
from loadtest.drivers import Batch, WrongAnswer, sessions, sessions_at_rate
from loadtest.results import Figure, Goal, Measure, ScenarioResult, aims_of
from loadtest.rounds import Comparison, Drive, Pace, Trial, compare_all
from loadtest.scenario import BenchSettings, Progress, Scenario
from loadtest.tao_reads import TRANSPORTS, GraphReads, open_graph, open_sessions
from loadtest.target import OneFollower, one_follower
from tao.cache.packed import CORE
from tao.model.edge_block import header
from tao.model.graph import COUNT_VALUE_BYTES, decode_count
from tao.model.queries import CountQuery, EdgesQuery, ObjectQuery, RangeQuery, TimeRangeQuery
from tao.model.queries import Query as SentQuery
from tao.wire.read_batch import encode_queries
from tao.wire.session import Session
from tao.wire.v1 import session_pb2 as pb

MIX: Final = "the paper's reads"
_BATCH: Final = 100
_CONNECTIONS: Final = 4
_RATE: Final = 100_000
_TOY_RATE: Final = 2_000
_PREPARED_BATCHES: Final = 100
_TIMEOUT_SECONDS: Final = 30.0
_CPU: Final = Goal(measure=Measure.SERVER_CPU, bound=3)
_P99: Final = Goal(measure=Measure.P99, bound=1_000)
_NOTES: Final = [
    "Operations are drawn from the paper's mix, whose lists are mostly empty; pages are of lists of 40 edges.",
    "At a constant rate latency counts from when a batch should have begun; the load process keeps its loop turning.",
]


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Measure the mix and each operation over both transports. Raises `OperatorError`."""
    size, rate = (TOY, _TOY_RATE) if settings.toy else (DatasetSize(), _RATE)
    async with one_follower(settings, "stream", progress) as cluster:
        job = StreamJob(
            cluster=cluster,
            size=size,
            batch=_BATCH,
            connections=_CONNECTIONS,
            queries_per_second=rate,
            pace=Pace(settings.rounds, settings.round_seconds),
        )
        figures = await run_job(job, progress, settings.work_dir / "stream.log", list[Figure])
    return ScenarioResult(
        conditions={
            "core": CORE,
            "objects": size.objects,
            "batch": _BATCH,
            "connections": _CONNECTIONS,
            "rate": rate,
            "rounds": settings.rounds,
            "round_seconds": settings.round_seconds,
        },
        figures=figures,
        notes=_NOTES,
        aims=aims_of(figures),
    )


SCENARIO: Final = Scenario(
    name="stream",
    summary="CPU of a follower per cached query on the stream, by operation; latency at 100,000 queries a second",
    run=run,
)


class StreamJob(msgspec.Struct, frozen=True, kw_only=True):
    """Ask one follower for cached values in batches on the stream, by operation."""

    cluster: OneFollower
    size: DatasetSize
    batch: int
    """Queries in a message."""
    connections: int
    queries_per_second: float
    """The rate of the comparison at a constant rate."""
    pace: Pace

    async def work(self, report: StepReport) -> list[Figure]:
        """Return the figures in the order of the table. Raises `TaoError`."""
        async with AsyncExitStack() as stack:
            graph = await open_graph(self.cluster.topology_file, "frames", stack)
            report("writing the graph", 0.0)
            data = await write_dataset(graph, self.size)
            report("checking every answer, which warms the cache", 0.0)
            await GraphReads(graph).verify(data)
            opened: dict[str, list[Session]] = {}
            for name, transport in TRANSPORTS.items():
                address = self.cluster.frames if transport == "frames" else self.cluster.grpc
                opened[name] = await open_sessions(address, transport, self.connections, stack)
            ask, atype = opened[FRAMES][0].ask, graph.schema.atype(LINK).number
            version, batches_per_second = self.cluster.topology_version, self.queries_per_second / self.batch
            comparisons, prepared = list[Comparison](), dict[str, list[Batch]]()
            for shape, queries in _shapes(data).items():
                batches = prepared[shape] = await checked(ask, self._batches(queries), atype, version)
                # The cost of an operation is the same over both transports.
                names = opened if shape == MIX else [FRAMES]
                drives = {name: sessions(opened[name], batches, version) for name in names}
                goals = (_CPU,) if shape == MIX else ()
                comparisons.append(self._comparison(f"{shape}, batches of {self.batch}", drives, goals))
            mix = prepared[MIX]
            drives = {name: sessions_at_rate(each, mix, version, batches_per_second) for name, each in opened.items()}
            comparisons.append(self._comparison(f"{MIX}, {self.queries_per_second:,.0f} queries/s", drives, (_P99,)))
            return await compare_all(comparisons, self.pace, report)

    def _batches(self, queries: Sequence[Query]) -> Iterator[list[Query]]:
        endless = itertools.cycle(queries)
        return (list(itertools.islice(endless, self.batch)) for _ in range(_PREPARED_BATCHES))

    def _comparison(self, shape: str, drives: dict[str, Drive], goals: tuple[Goal, ...]) -> Comparison:
        server = {"follower": self.cluster.follower_pid}
        trials = tuple(Trial(name, drive, server, self.batch) for name, drive in drives.items())
        return Comparison(shape, trials, aims={FRAMES: goals})


def _shapes(data: Dataset) -> dict[str, list[Query]]:
    """Return the queries by shape: the mix, each operation of it, and queries of lists that have edges."""
    shapes = {MIX: list(data.mix)}
    for operation in Operation:
        shapes[f"{operation} of the mix"] = [query for query in data.mix if query.operation is operation]
    full = data.pages
    shapes["assoc_range, a page"] = [page_of(stored, PAGE_EDGES) for stored in full]
    shapes["assoc_time_range, a page"] = [_window(stored) for stored in full]
    shapes["assoc_get, an edge"] = [_edge(stored, place) for place, stored in enumerate(full)]
    return {shape: queries for shape, queries in shapes.items() if queries}


def _window(stored: StoredList) -> Query:
    """Query a window that begins at the sixth edge."""
    edges = stored.edges[5 : 5 + PAGE_EDGES]
    high, low = edges[0][1], edges[-1][1]
    return Query(Operation.ASSOC_TIME_RANGE, stored.id1, limit=PAGE_EDGES, high=high, low=low, expected=len(edges))


def _edge(stored: StoredList, place: int) -> Query:
    return Query(Operation.ASSOC_GET, stored.id1, id2=stored.edges[place % len(stored.edges)][0])


async def checked(
    ask: Callable[[pb.Request, float], Awaitable[pb.Answer]],
    batches: Iterable[list[Query]],
    atype: int,
    topology_version: int,
) -> list[Batch]:
    """Send each batch once and return it with the size of its answer.

    Raises `WrongAnswer` when an answer is wrong."""
    checked = []
    for queries in batches:
        message = pb.ReadBatch()
        order = encode_queries([(_as_sent(query, atype), 0) for query in queries], message)
        message.for_fill = False  # a client asks, and no cache
        answer = await ask(pb.Request(topology_version=topology_version, read=message), _TIMEOUT_SECONDS)
        values = answer.read.values
        # Values are found by slot, because those that the follower evicted meanwhile come in a later part.
        by_slot = dict(zip(answer.read.slots or range(len(values)), values, strict=True))
        for slot, query in enumerate(queries[index] for index in order):
            found = _found(query, by_slot[slot]) if slot in by_slot else answer.read.errors
            if found != query.expected:
                raise WrongAnswer(f"{query} is answered with {found}")
        checked.append(Batch(message, sum(map(len, values))))
    return checked


def _found(query: Query, value: bytes) -> int:
    if query.operation is Operation.OBJ_GET:
        return 1
    return decode_count(value)[1] if len(value) == COUNT_VALUE_BYTES else header(value)[2]


def _as_sent(query: Query, atype: int) -> SentQuery:
    match query.operation:
        case Operation.OBJ_GET:
            return ObjectQuery(query.id)
        case Operation.ASSOC_COUNT:
            return CountQuery(query.id, atype)
        case Operation.ASSOC_RANGE:
            return RangeQuery(query.id, atype, 0, query.limit)
        case Operation.ASSOC_TIME_RANGE:
            return TimeRangeQuery(query.id, atype, query.high, query.low, query.limit)
        case Operation.ASSOC_GET:
            return EdgesQuery(query.id, atype, (query.id2,))
