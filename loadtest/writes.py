"""Scenario `writes`: durable edges with their inverse, beside the same transactions issued one by one.

Full durability (every commit synced, redo log and binlog), a buffer pool that holds everything, one leader, one
follower. The subject is group commit: the leader gathers the writes of 64 writers into few transactions. With few
shards there is one writer alone, too: each of its writes is a transaction, and what it costs the leader has an aim.

The yardstick is what an application would write by hand, in as few round trips as single statements allow: lock the
shards' rows in share mode, read the rows to be touched with locks, upsert edge, inverse and the two lists' counts and
versions, commit. The tables are the product's, on the same server; the ids are used by nobody else. Two writers that
both find no list yet would both count 1: an application has to prevent that, this yardstick need not.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import aiomysql
import msgspec

from loadtest.client_process import StepReport, run_job
from loadtest.drivers import WrongAnswer, closed
from loadtest.peers.graph_store import SqlAddress
from loadtest.peers.sql_graph import repeat_deadlocked, transaction
from loadtest.results import Figure, Goal, Listing, Measure, ScenarioResult, aims_of, at_most
from loadtest.rounds import MICRO, Comparison, Pace, Round, Source, Trial, figures_of, take_all_turns
from loadtest.scenario import SCHEMA, BenchSettings, PartOfProgress, Progress, Scenario
from loadtest.table import listing
from loadtest.tao_reads import open_graph
from loadtest.target import pids_of, versions_of
from tao.client import Graph
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.state_folder import service_accounts
from tao.model.ids import SEQUENCE_PER_MS, make_id, shard_of

TAO: Final = "tao"
ONE_BY_ONE: Final = "one by one"
PEER: Final = "peer"
_PEER_NUMBER: Final = 2
"""The number of that type in `schema.yaml`."""
_GRAPH_IDS_MS: Final = 1_600_000_000_000
_DIRECT_IDS_MS: Final = 1_650_000_000_000
"""The two sides' ids lie in different milliseconds, so that they share no row."""
_FIRST_TIME: Final = 1_700_000_000
_SHARDS_OF_THE_GOALS: Final = 8
_READ_BACK: Final = 2000
"""Acknowledged edges looked for at the end, the latest ones."""
_GOALS: Final = (
    Goal(measure=Measure.RATE, bound=3_000),
    Goal(measure=Measure.RATE, bound=1.5, against=ONE_BY_ONE),
)


@dataclass(frozen=True, slots=True)
class _Size:
    shards: tuple[int, ...] = (8, 32)
    writers: int = 64
    lone: int = 8
    """With so many shards, one writer is measured by itself, too."""
    ids: int = 32_000
    """Ends of edges, over all shards: lists stay short, and two writers seldom want the same."""
    buffer_pool_mb: int = 512


_TOY: Final = _Size((2,), 4, 2, 100, 64)
_LONE_LEADER_US: Final = 800.0
"""The most CPU of the leader for a write that comes alone."""
Pair = tuple[int, int]
EdgeToWrite = tuple[int, int, int]
"""``(id1, id2, time)``."""


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Measure the writers with few and with many shards. Raises `OperatorError`."""
    size = _TOY if settings.toy else _Size()
    figures = list[Figure]()
    server_cpu = dict[str, dict[str, float]]()
    for number, shards in enumerate(size.shards):
        part = PartOfProgress(progress, number / len(size.shards), 1 / len(size.shards))
        measured = await _with_shards(shards, size, settings, part)
        figures += measured.figures
        server_cpu |= measured.server_cpu
    return ScenarioResult(
        conditions={
            "writers": size.writers,
            "buffer_pool_mb": size.buffer_pool_mb,
            "durability": "full",
            "rounds": settings.rounds,
            "round_seconds": settings.round_seconds,
        },
        figures=figures,
        listings=[_servers_listing(server_cpu)],
        aims=[
            *aims_of(figures),
            at_most(
                f"a lone write takes at most {_LONE_LEADER_US:g} µs of the leader",
                server_cpu[_shape(1, size.lone)]["leader_us"],
                _LONE_LEADER_US,
                _shape(1, size.lone),
            ),
        ],
        measured=server_cpu,
    )


SCENARIO: Final = Scenario(
    name="writes",
    summary="acknowledged assoc_add with inverse, fully durable, beside single transactions over aiomysql",
    run=run,
)


def _servers_listing(server_cpu: Mapping[str, Mapping[str, float]]) -> Listing:
    names = next(iter(server_cpu.values()))
    columns = {name.removesuffix("_us"): f"{{{name}:,.0f}}" for name in names}
    rows = [{"shape": shape, **of} for shape, of in server_cpu.items()]
    return listing({"CPU µs a write": "{shape}", **columns}, rows)


def _shape(writers: int, shards: int) -> str:
    return f"assoc_add with inverse, {writers} writer{'' if writers == 1 else 's'}, {shards} shards"


async def _with_shards(shards: int, size: _Size, settings: BenchSettings, progress: Progress) -> WritesMeasured:
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / f"writes-{shards}",
        shape=Shape(tiers=1, followers=1, leaders=1, databases=1, shards=shards),
        schema_file=SCHEMA,
        buffer_pool_mb=size.buffer_pool_mb,
        durability=Durability.FULL,
    )
    async with DevCluster(cluster_settings, progress.step) as cluster:
        pids = {cluster.processes[name].value: pid for name, pid in (await pids_of(cluster)).items()}
        (database_name,) = cluster.record.shape.database_names
        database = cluster.database(database_name)
        settings.versions.update(versions_of(database))
        account = service_accounts(cluster.record.passwords).leader
        job = WritesJob(
            topology_file=str(cluster.topology_path),
            pids=pids,
            database=SqlAddress(host=database.host, port=database.port, user=account.user, password=account.password),
            shards=shards,
            writers=(size.writers, 1) if shards == size.lone else (size.writers,),
            ids_per_shard=size.ids // shards,
            pace=Pace(settings.rounds, settings.round_seconds),
        )
        return await run_job(job, progress, settings.work_dir / f"writes-{shards}.log", WritesMeasured)


class WritesMeasured(msgspec.Struct, frozen=True):
    """What the load process has measured."""

    figures: list[Figure]
    server_cpu: dict[str, dict[str, float]]
    """Microseconds of CPU for a write by shape and server: ``leader_us``."""


class WritesJob(msgspec.Struct, frozen=True, kw_only=True):
    """Write durably through a follower, in turns with the same transactions one by one."""

    topology_file: str
    pids: dict[str, int]
    """All servers, by role: there is one of each."""
    database: SqlAddress
    shards: int
    writers: tuple[int, ...]
    """How many write at once, one measurement after the other."""
    ids_per_shard: int
    pace: Pace

    async def work(self, report: StepReport) -> WritesMeasured:
        """Return the figures; the edges are read back at the end. Raises `TaoError` or `pymysql.err.MySQLError`."""
        async with AsyncExitStack() as stack:
            graph = await open_graph(self.topology_file, "frames", stack)
            direct = [await DirectWriter.open(self.database) for _ in range(max(self.writers))]
            for writer in direct:
                stack.push_async_callback(writer.close)
            written: deque[Pair] = deque(maxlen=_READ_BACK)

            async def through_graph(edge: EdgeToWrite) -> Source:
                id1, id2, time = edge
                await graph.assoc_add(id1, PEER, id2, time)
                written.append((id1, id2))
                return Source.UNKNOWN

            async def one_by_one(edge: tuple[DirectWriter, EdgeToWrite]) -> Source:
                writer, (id1, id2, time) = edge
                await writer.add_edge(id1, id2, time, _PEER_NUMBER, (shard_of(id1), shard_of(id2)))
                return Source.UNKNOWN

            edges = _edges(Random(1), self._ids(_GRAPH_IDS_MS))
            direct_edges = _edges(Random(1), self._ids(_DIRECT_IDS_MS))
            by_writer = [zip(itertools.repeat(writer), direct_edges, strict=False) for writer in direct]
            database = {Role.DATABASE.value: self.pids[Role.DATABASE]}
            comparisons = [
                Comparison(
                    _shape(writers, self.shards),
                    (
                        Trial(TAO, closed(through_graph, [edges] * writers), self.pids),
                        Trial(ONE_BY_ONE, closed(one_by_one, by_writer[:writers]), database),
                    ),
                    ONE_BY_ONE,
                    {TAO: _GOALS if writers > 1 and self.shards == _SHARDS_OF_THE_GOALS else ()},
                )
                for writers in self.writers
            ]
            turns = await take_all_turns(comparisons, self.pace, report)
            report("reading the edges back", 1.0)
            await _verify(graph, written)
        return WritesMeasured(
            [figure for each, taken in zip(comparisons, turns, strict=True) for figure in figures_of(each, taken)],
            {each.shape: _server_cpu(taken[TAO]) for each, taken in zip(comparisons, turns, strict=True)},
        )

    def _ids(self, unix_ms: int) -> list[int]:
        # Ids of no object: the ends of an edge are not looked up.
        return [
            make_id(shard, unix_ms + number // SEQUENCE_PER_MS, number % SEQUENCE_PER_MS)
            for shard in range(self.shards)
            for number in range(self.ids_per_shard)
        ]


def _server_cpu(rounds: Sequence[Round]) -> dict[str, float]:
    writes = sum(each.samples.answered for each in rounds)
    return {
        f"{role}_us": MICRO * sum(each.server_cpu[role] for each in rounds) / writes for role in rounds[0].server_cpu
    }


async def _verify(graph: Graph, written: Iterable[Pair]) -> None:
    """Raise `WrongAnswer` unless both edges of every pair exist."""
    for pair in written:
        for id1, id2 in (pair, pair[::-1]):
            if not await graph.assoc_get(id1, PEER, (id2,)):
                raise WrongAnswer(f"the edge {id1} → {id2} was acknowledged and is not there")


def _edges(chance: Random, ids: Sequence[int]) -> Iterator[EdgeToWrite]:
    """Draw edges of different ends, each newer than the one before."""
    for time in itertools.count(_FIRST_TIME):
        id1, id2 = chance.sample(ids, 2)
        yield id1, id2, time


class DirectWriter:
    """Writes edges over one connection. `Any`: aiomysql has no types."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, address: SqlAddress) -> DirectWriter:
        """Connect. Raises `pymysql.err.MySQLError`."""
        connection = await aiomysql.connect(
            host=address.host, port=address.port, user=address.user, password=address.password, autocommit=False
        )
        async with connection.cursor() as cursor:
            await cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        return cls(connection)

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.ensure_closed()

    async def add_edge(self, id1: int, id2: int, time: int, atype: int, shards: tuple[int, int]) -> int:
        """Add an edge and its inverse of the same type. Returns how many edges were added: 2. Raises
        `pymysql.err.MySQLError`; a deadlock is tried again a few times."""
        sides = sorted(((shards[0], id1, id2), (shards[1], id2, id1)))
        return await repeat_deadlocked(lambda: self._transaction(sides, time, atype))

    async def _transaction(self, sides: list[tuple[int, int, int]], time: int, atype: int) -> int:
        added = 0
        async with transaction(self._connection), self._connection.cursor() as cursor:
            for shard in sorted({shard for shard, _, _ in sides}):
                await cursor.execute(f"SELECT generation FROM tao_{shard:05d}.shard LOCK IN SHARE MODE")  # noqa: S608
            for shard, id1, id2 in sides:
                schema = f"tao_{shard:05d}"
                await cursor.execute(
                    f"SELECT l.version, l.count, a.time FROM {schema}.assoc_lists l "  # noqa: S608
                    f"LEFT JOIN {schema}.assocs a ON a.id1 = l.id1 AND a.atype = l.atype AND a.id2 = %s "
                    "WHERE l.id1 = %s AND l.atype = %s FOR UPDATE",
                    (id2, id1, atype),
                )
                found = await cursor.fetchone()
                version, count, present = found or (0, 0, None)
                added += present is None
                await cursor.execute(
                    f"INSERT INTO {schema}.assocs (id1, atype, id2, time, version, data) "  # noqa: S608
                    "VALUES (%s, %s, %s, %s, %s, '') "
                    "ON DUPLICATE KEY UPDATE time = VALUES(time), version = VALUES(version)",
                    (id1, atype, id2, time, version + 1),
                )
                await cursor.execute(
                    f"INSERT INTO {schema}.assoc_lists (id1, atype, count, version) VALUES (%s, %s, %s, %s) "  # noqa: S608
                    "ON DUPLICATE KEY UPDATE count = VALUES(count), version = VALUES(version)",
                    (id1, atype, count + (present is None), version + 1),
                )
        return added
