"""Scenario `sets`: pages of intersections and unions of lists, beside Redis and SQL on the same lists.

The lists are put straight into the shards' tables. The SDK evaluates a set by reads of one warm follower. Redis holds
each list as a sorted set and as a set: `redis page` reads pages of the sorted set and asks the other set for each
(ZREVRANGE, SMISMEMBER), which gives the same page; `redis SINTER` gives all ids in no order. SQL joins the shards'
tables.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import redis.asyncio

from loadtest import options
from loadtest.bulk_edges import TimedIds, insert_lists
from loadtest.client_process import StepReport, run_job
from loadtest.dataset import LINK
from loadtest.drivers import Call, WrongAnswer, awaiters
from loadtest.peer_servers import REDIS_SERVER, private_server
from loadtest.peers.graph_store import SqlAddress
from loadtest.peers.sql_graph import open_pool
from loadtest.results import Figure, Goal, Measure, ScenarioResult, aims_of, at_most
from loadtest.rounds import Comparison, Pace, Trial, Turns, figures_of, take_all_turns
from loadtest.scenario import BenchSettings, Progress, Scenario
from loadtest.tao_reads import open_graph
from loadtest.target import FOLLOWER, follower_cluster, pids_of
from tao.client import EdgeSet, Graph, SetPage, connect
from tao.devcluster.ports import LOOPBACK
from tao.devcluster.state_folder import service_accounts
from tao.model.ids import SHARD_SHIFT

TAO: Final = "tao"
REDIS_PAGE: Final = "redis page"
REDIS_SINTER: Final = "redis SINTER"
SQL: Final = "sql"
_SHARDS: Final = 8
_FEW: Final = 300
_CACHED: Final = 6_000
_COMMON: Final = 10
"""One edge in this many of the cached lists is in both."""
_COMMON_LONG: Final = 100
"""One edge in this many of the long lists is in both."""
_UNION: Final = 1_000
_TOY_UNION: Final = 50
_UNION_EDGES: Final = 20
_PAGE: Final = 50
_LONG_PAGE: Final = 20
_REDIS_PAGE: Final = 10
"""Redis reads so many times the page at a time, as the SDK first does."""
_PIPELINE: Final = 5_000
_IDLE_SECONDS: Final = 2.0
Asked = TypeVar("Asked")
_STATEMENTS: Final = "SHOW GLOBAL STATUS LIKE 'Com_select'"


@dataclass(frozen=True, kw_only=True)
class SetOptions(options.Options):
    """The options of `sets`."""

    edges: int = options.EDGES.default(1_000_000, toy=25_000)


class Case(NamedTuple):
    """A page of a set: of the intersection of two lists, or of the union of many."""

    what: str
    ids: tuple[int, ...]
    limit: int
    is_union: bool = False
    aims: tuple[Goal, ...] = ()


class Window(NamedTuple):
    """A page of the intersection of a list with the edges of another one of some time, which has ids of the former."""

    first: int
    second: int
    high: int
    low: int


class SetData(NamedTuple):
    """The lists by id1, newest first, the pages that are asked of them time and again, and those asked once."""

    lists: Mapping[int, TimedIds]
    cases: tuple[Case, ...]
    windows: Sequence[Window]


def make_data(edges: int, union: int) -> SetData:
    """Make the lists, always the same: long ones of so many ``edges``, and ``union`` short ones."""

    def owner(number: int) -> int:
        return number % _SHARDS << SHARD_SHIFT | 1_000 + number

    def member(number: int) -> int:
        return number % _SHARDS << SHARD_SHIFT | 1_000_000 + number

    one, other, few, long, long_too, some = map(owner, range(6))
    many = [owner(100 + number) for number in range(union)]
    lists: dict[int, TimedIds] = {
        one: [(_CACHED - n, member(n)) for n in range(_CACHED)],
        other: [(n, member(n if n % _COMMON == 0 else _CACHED + n)) for n in range(_CACHED, 0, -1)],
        few: [(_FEW - n, member(n * (edges // _FEW))) for n in range(_FEW)],
        some: [(_CACHED - n, member(n * (edges // _CACHED))) for n in range(_CACHED)],
        long: [(edges - n, member(n)) for n in range(edges)],
        # The common ones are the oldest here where they are the newest there.
        long_too: [(n, member(n if n % _COMMON_LONG == 0 else edges + n)) for n in range(edges, 0, -1)],
    }
    for number, id1 in enumerate(many):
        places = (number * _UNION_EDGES + n for n in range(_UNION_EDGES))
        lists[id1] = sorted(((place * 7_919 % 1_000_003, member(place)) for place in places), reverse=True)
    ahead = Goal(measure=Measure.P50, bound=1, against=SQL)
    cases = (
        Case(
            f"{_CACHED:,} ∩ {_CACHED:,} cached, page of {_PAGE}",
            (one, other),
            _PAGE,
            aims=(
                Goal(measure=Measure.P50, bound=2_000),
                Goal(measure=Measure.P50, bound=2, against=REDIS_SINTER),
                ahead,
            ),
        ),
        Case(
            f"{edges:,} ∩ {_FEW}, page of {_PAGE}",
            (long, few),
            _PAGE,
            aims=(Goal(measure=Measure.P50, bound=15_000), ahead),
        ),
        Case(
            f"{edges:,} ∩ {edges:,}, one in {_COMMON_LONG}, page of {_LONG_PAGE}",
            (long, long_too),
            _LONG_PAGE,
            aims=(Goal(measure=Measure.P99, bound=100_000), ahead),
        ),
        Case(
            f"union of {union:,} lists cached, page of {_PAGE}",
            tuple(many),
            _PAGE,
            is_union=True,
            aims=(
                Goal(measure=Measure.P50, bound=20_000),
                Goal(measure=Measure.SERVER_CPU, bound=3_000),
                ahead,
            ),
        ),
    )
    windows = [Window(long, some, high, high - _FEW + 1) for high in range(_CACHED, _FEW, -1)]
    return SetData(lists, cases, windows)


async def run(settings: BenchSettings, progress: Progress, chosen: SetOptions) -> ScenarioResult:
    """Load the lists and measure every contestant. Raises `OperatorError`."""
    union = _TOY_UNION if settings.toy else _UNION
    async with loaded_servers(settings, "sets", progress, make_data(chosen.edges, union).lists) as servers:
        job = SetsJob(
            servers=servers, edges=chosen.edges, union=union, pace=Pace(settings.rounds, settings.round_seconds)
        )
        measured = await run_job(job, progress, settings.work_dir / "sets.log", SetsMeasured)
    statements = [
        at_most("at most one statement of the database for a page", value, 1, shape)
        for shape, value in measured.statements.items()
        if str(_FEW) in shape.split("∩")[-1]
    ]
    return ScenarioResult(
        conditions={"edges": chosen.edges, "union": union, "rounds": settings.rounds},
        figures=measured.figures,
        notes=["Redis and tao answer from memory what is cached; SQL reads it from the database's buffer pool."],
        aims=[*aims_of(measured.figures), *statements],
        measured={"statements": measured.statements},
    )


SCENARIO: Final = Scenario(
    name="sets",
    summary="pages of intersections and unions of lists, beside Redis and SQL",
    run=run,
    options=SetOptions,
    help="""Measure pages of intersections and unions of lists, beside Redis and SQL on the same lists.

    The JSON has a figure for each contestant and case, the aims, and the machine.""",
)


class LoadedServers(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster of one follower whose database has lists of `LINK`, and a redis-server that has nothing yet."""

    topology_file: str
    database: SqlAddress
    redis_port: int
    pids: dict[str, int]

    def pids_of(self, contestant: str) -> dict[str, int]:
        """Return the server that a contestant keeps busy."""
        if contestant == TAO:
            return {FOLLOWER: self.pids[FOLLOWER]}
        name = "redis" if contestant != SQL else next(each for each in self.pids if each.startswith("db"))
        return {name: self.pids[name]}


@asynccontextmanager
async def loaded_servers(
    settings: BenchSettings,
    name: str,
    progress: Progress,
    lists: Mapping[int, TimedIds] | Callable[[Graph], Awaitable[Mapping[int, TimedIds]]],
) -> AsyncIterator[LoadedServers]:
    """Run the servers, and insert the lists into the shards' tables; a function adds their objects and returns them.
    Raises `OperatorError`."""
    settings.versions[REDIS_SERVER.name] = REDIS_SERVER.version()
    async with (
        private_server(REDIS_SERVER, settings.work_dir / "redis") as redis_server,
        follower_cluster(settings, name, progress) as cluster,
    ):
        progress.step("inserting the lists", 0.1)
        async with connect(str(cluster.topology_path)) as graph:
            await insert_lists(cluster, graph, LINK, lists if isinstance(lists, Mapping) else await lists(graph))
            (database,) = graph.topology.databases
        account = service_accounts(cluster.record.passwords).administrator
        server = database.servers[database.master_region]
        yield LoadedServers(
            topology_file=str(cluster.topology_path),
            database=SqlAddress(host=server.host, port=server.port, user=account.user, password=account.password),
            redis_port=redis_server.port,
            pids={"redis": redis_server.pid, **await pids_of(cluster)},
        )


class Clients(NamedTuple):
    """The clients of all contestants. `Any`: redis-py and aiomysql have no types that say what these are."""

    graph: Graph
    pool: Any
    redis: Any


async def open_clients(servers: LoadedServers, stack: AsyncExitStack) -> Clients:
    """Open a graph, a pool of connections to the database and a connection to Redis; closed with the stack."""
    graph = await open_graph(servers.topology_file, "frames", stack)
    pool = await open_pool(servers.database, 4)
    stack.callback(pool.close)
    client = redis.asyncio.Redis(host=LOOPBACK, port=servers.redis_port, single_connection_client=True)
    stack.push_async_callback(client.aclose)
    return Clients(graph, pool, client)


async def checked_comparison(
    servers: LoadedServers,
    shape: str,
    asked: Asked,
    asks: Mapping[str, Callable[[Asked], Awaitable[Sequence[Any]]]],
    expected: Sequence[Any],
    aims: tuple[Goal, ...],
) -> Comparison:
    """Return the comparison of contestants that are asked the same thing, each of which has given the expected answer
    once. Raises `WrongAnswer`. `Any`: what the answers hold."""
    for name, ask in asks.items():
        found = await ask(asked)
        if found != expected:
            raise WrongAnswer(f"{shape}: {name} has {found!r:.300}, not {expected!r:.300}")
    trials = tuple(
        Trial(name, awaiters(1, [Call(ask, (asked,), len, len(expected))]), servers.pids_of(name))
        for name, ask in asks.items()
    )
    return Comparison(shape, trials, REDIS_PAGE, {TAO: aims})


class SetsMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """The figures, and by case the statements of the database for one page of tao's."""

    figures: list[Figure]
    statements: dict[str, float]


class SetsJob(msgspec.Struct, frozen=True, kw_only=True):
    """Fill Redis, check every contestant's page, and let them take turns in every case."""

    servers: LoadedServers
    edges: int
    union: int
    pace: Pace

    async def work(self, report: StepReport) -> SetsMeasured:
        """Return what was measured. Raises `TaoError`, `WrongAnswer`, and what the other clients raise."""
        data = make_data(self.edges, self.union)
        async with AsyncExitStack() as stack:
            graph, pool, client = await open_clients(self.servers, stack)
            redis_sets = RedisSets(client)
            report("filling Redis", 0.0)
            await redis_sets.fill(data.lists)
            sql = SqlSets(pool, graph.schema.atype(LINK).number)
            comparisons = [
                await self._comparison(case, data.lists, GraphSets(graph), redis_sets, sql) for case in data.cases
            ]
            comparisons.append(await self._probe(data, graph, redis_sets, sql))
            comparisons.append(await self._windows(data, GraphSets(graph), redis_sets, sql))
            idle = await _idle_per_second(sql)
            taken = await take_all_turns(comparisons, self.pace, report)
        of_cases = list(zip(comparisons, taken, strict=True))
        return SetsMeasured(
            figures=[figure for each, turns in of_cases for figure in figures_of(each, turns)],
            statements={each.shape: _statements_each(turns, idle) for each, turns in of_cases[: len(data.cases)]},
        )

    async def _probe(self, data: SetData, graph: Graph, redis_sets: RedisSets, sql: SqlSets) -> Comparison:
        """Ask one cached list for all ids of another, as the evaluation of an intersection may do."""
        id1, other = data.cases[0].ids
        ids = [id2 for _, id2 in reversed(data.lists[other])]
        own = {id2 for _, id2 in data.lists[id1]}

        async def by_tao(asked: Sequence[int]) -> Sequence[int]:
            return [edge.id2 for edge in await graph.assoc_get(id1, LINK, asked)]

        async def by_redis(asked: Sequence[int]) -> Sequence[int]:
            return await redis_sets.among(id1, asked)

        async def by_sql(asked: Sequence[int]) -> Sequence[int]:
            return await sql.among(id1, asked)

        asks = {TAO: by_tao, REDIS_PAGE: by_redis, SQL: by_sql}
        aims = (Goal(measure=Measure.SERVER_CPU, bound=150), Goal(measure=Measure.P50, bound=1, against=SQL))
        what = f"a cached list of {_CACHED:,} asked for {_CACHED:,} ids"
        expected = [id2 for id2 in ids if id2 in own]  # its order is that of the first list, too
        return await checked_comparison(self.servers, what, ids, asks, expected, aims)

    async def _windows(self, data: SetData, tao: GraphSets, redis_sets: RedisSets, sql: SqlSets) -> Comparison:
        """Ask the long list for another few ids each time: what an answer costs that nobody remembers."""
        edges = data.lists[data.windows[0].second]

        def expected(window: Window) -> list[int]:
            return [id2 for time, id2 in edges if window.high >= time >= window.low][:_PAGE]

        asks: dict[str, Callable[[Window], Awaitable[Sequence[int]]]] = {
            TAO: tao.window,
            REDIS_PAGE: redis_sets.window,
            SQL: sql.window,
        }
        for name, ask in asks.items():
            window = data.windows[-1]
            if list(found := await ask(window)) != expected(window):
                raise WrongAnswer(f"{window}: {name} has {found!r:.300}, not {expected(window)!r:.300}")
        trials = tuple(
            Trial(
                name,
                awaiters(1, [Call(ask, (window,), len, _PAGE) for window in data.windows]),
                self.servers.pids_of(name),
            )
            for name, ask in asks.items()
        )
        aims = (Goal(measure=Measure.P50, bound=15_000), Goal(measure=Measure.P50, bound=1, against=SQL))
        shape = f"{self.edges:,} ∩ {_FEW} others each time, page of {_PAGE}"
        return Comparison(shape, trials, REDIS_PAGE, {TAO: aims})

    async def _comparison(
        self, case: Case, lists: Mapping[int, TimedIds], tao: GraphSets, redis_sets: RedisSets, sql: SqlSets
    ) -> Comparison:
        await tao.warm(case)
        expected = expected_page(case, lists)
        asks: dict[str, Callable[[Case], Awaitable[Sequence[int]]]] = {
            TAO: tao.page,
            REDIS_PAGE: redis_sets.page,
            SQL: sql.page,
        }
        for name, ask in asks.items():
            found = list(await ask(case))
            if found != expected:
                raise WrongAnswer(f"{case.what}: {name} has {found!r:.300}, not {expected!r:.300}")
        if not case.is_union:
            asks[REDIS_SINTER] = redis_sets.whole
        sizes = {REDIS_SINTER: len(await redis_sets.whole(case))} if not case.is_union else {}
        trials = tuple(
            Trial(
                name,
                awaiters(1, [Call(ask, (case,), len, sizes.get(name, len(expected)))]),
                self.servers.pids_of(name),
                counters=sql.statements,
            )
            for name, ask in asks.items()
        )
        return Comparison(case.what, trials, REDIS_PAGE, {TAO: case.aims})


def expected_page(case: Case, lists: Mapping[int, TimedIds]) -> list[int]:
    """Return the ids of a case's page."""
    if case.is_union:
        return [id2 for _, id2 in heapq.nlargest(case.limit, (edge for id1 in case.ids for edge in lists[id1]))]
    first, second = case.ids
    others = {id2 for _, id2 in lists[second]}
    return [id2 for _, id2 in lists[first] if id2 in others][: case.limit]


def _statements_each(turns: Turns, idle_per_second: float) -> float:
    """Return the statements of the database for one page of tao's, without those that servers send also when idle."""
    rounds = turns[TAO]
    found = sum(each.counts["statements"] - idle_per_second * each.elapsed for each in rounds)
    return round(max(0.0, found) / sum(each.samples.answered for each in rounds), 1)  # idle servers vary by more


async def _idle_per_second(sql: SqlSets) -> float:
    """Return the statements a second that the database executes for servers that nobody asks."""
    before = await sql.statements()
    await asyncio.sleep(_IDLE_SECONDS)
    after = await sql.statements()
    return (after["statements"] - before["statements"]) / _IDLE_SECONDS


class GraphSets:
    """The sets of a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    async def page(self, case: Case) -> list[int]:
        """Return a page; one that the budget ended is continued until it is full."""
        set_, found, cursor = self._set(case), list[int](), None
        while len(found) < case.limit:
            page: SetPage = await set_.page(case.limit - len(found), cursor)
            found += [edge.id2 for edge in page.edges]
            cursor = page.cursor
            if cursor is None:
                break
        return found

    async def window(self, window: Window) -> list[int]:
        """Return the page of a window."""
        some = self._graph.edge_set(window.second, LINK, high=window.high, low=window.low)
        page = await (self._graph.edge_set(window.first, LINK) & some).page(_PAGE)
        return [edge.id2 for edge in page.edges]

    async def warm(self, case: Case) -> None:
        """Have the follower cache the newest edges of the lists of a case: a question after some ids does not."""
        await self._graph.assoc_range_many([(id1, LINK, 0, _CACHED) for id1 in case.ids])

    def _set(self, case: Case) -> EdgeSet:
        if case.is_union:
            return self._graph.edge_union(case.ids, LINK)
        first, second = case.ids
        return self._graph.edge_set(first, LINK) & self._graph.edge_set(second, LINK)


class RedisSets:
    """Sorted sets and sets of one redis-server. `Any`: redis-py types its answers for both of its clients at once."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def fill(self, lists: Mapping[int, TimedIds]) -> None:
        """Store the lists."""
        for id1, edges in lists.items():
            for start in range(0, len(edges), _PIPELINE):
                some = edges[start : start + _PIPELINE]
                pipeline = self._client.pipeline(transaction=False)
                pipeline.zadd(f"z:{id1}", {str(id2): time for time, id2 in some})
                pipeline.sadd(f"s:{id1}", *(id2 for _, id2 in some))
                await pipeline.execute()

    async def page(self, case: Case) -> list[int]:
        """Return a page in order: of an intersection by pages of the first list, of a union by the newest of each."""
        if case.is_union:
            return await self._union(case)
        first, second = case.ids
        size, start, found = _REDIS_PAGE * case.limit, 0, list[int]()
        while len(found) < case.limit:
            ids = await self._client.zrevrange(f"z:{first}", start, start + size - 1)
            if not ids:
                break
            there = await self._client.smismember(f"s:{second}", ids)
            found += [int(each) for each, is_there in zip(ids, there, strict=True) if is_there]
            start += size
        return found[: case.limit]

    async def whole(self, case: Case) -> list[Any]:
        """Return all ids of an intersection, in no order."""
        first, second = case.ids
        found = await self._client.sinter(f"s:{first}", f"s:{second}")
        return list(found)

    async def window(self, window: Window) -> list[int]:
        """Return the page of a window: the edges of the time, and which of them the long list has."""
        ids = await self._client.zrevrangebyscore(f"z:{window.second}", window.high, window.low)
        return [int(id2) for id2 in await self.among(window.first, ids)][:_PAGE]

    async def among(self, id1: int, ids: Sequence[int]) -> list[int]:
        """Return those of some ids that a list has."""
        there = await self._client.smismember(f"s:{id1}", ids)
        return [id2 for id2, is_there in zip(ids, there, strict=True) if is_there]

    async def _union(self, case: Case) -> list[int]:
        pipeline = self._client.pipeline(transaction=False)
        for id1 in case.ids:
            pipeline.zrevrange(f"z:{id1}", 0, _REDIS_PAGE - 1, withscores=True)
        lists = await pipeline.execute()
        edges = ((time, int(id2)) for found in lists for id2, time in found)
        return [id2 for _, id2 in heapq.nlargest(case.limit, edges)]


class SqlSets:
    """The shards' tables, asked by SQL. `Any`: aiomysql has no types."""

    def __init__(self, pool: Any, atype: int) -> None:
        self._pool = pool
        self._atype = atype

    async def page(self, case: Case) -> list[int]:
        """Return a page in order."""
        found = await self._rows(self._union(case) if case.is_union else self._join(case))
        return [id2 for _, id2 in found]

    async def window(self, window: Window) -> list[int]:
        """Return the page of a window."""
        found = await self._rows(
            f"{self._join_of(window.first, window.second)} AND b.time BETWEEN {window.low} AND {window.high} "
            f"ORDER BY a.time DESC, a.id2 DESC LIMIT {_PAGE}"
        )
        return [id2 for _, id2 in found]

    async def among(self, id1: int, ids: Sequence[int]) -> list[int]:
        """Return those of some ids that a list has, newest first."""
        found = await self._rows(
            f"SELECT id2 FROM {_table(id1)} WHERE id1 = {id1} AND atype = {self._atype} "  # noqa: S608 - numbers
            f"AND id2 IN ({','.join(map(str, ids))}) ORDER BY time DESC, id2 DESC"
        )
        return [id2 for (id2,) in found]

    async def statements(self) -> dict[str, float]:
        """Return how many statements the database has executed."""
        ((_, count),) = await self._rows(_STATEMENTS)
        return {"statements": float(count)}

    def _join(self, case: Case) -> str:
        return f"{self._join_of(*case.ids)} ORDER BY a.time DESC, a.id2 DESC LIMIT {case.limit}"

    def _join_of(self, first: int, second: int) -> str:
        return (
            f"SELECT a.time, a.id2 FROM {_table(first)} a JOIN {_table(second)} b ON b.id2 = a.id2 "  # noqa: S608
            f"WHERE a.id1 = {first} AND a.atype = {self._atype} AND b.id1 = {second} AND b.atype = {self._atype}"
        )

    def _union(self, case: Case) -> str:
        parts = []
        for table in sorted({_table(id1) for id1 in case.ids}):
            ids = ",".join(str(id1) for id1 in case.ids if _table(id1) == table)
            parts.append(f"SELECT time, id2 FROM {table} WHERE atype = {self._atype} AND id1 IN ({ids})")  # noqa: S608
        return f"{' UNION ALL '.join(parts)} ORDER BY time DESC, id2 DESC LIMIT {case.limit}"

    async def _rows(self, statement: str) -> Any:
        async with self._pool.acquire() as connection, connection.cursor() as cursor:
            await cursor.execute(statement)
            return await cursor.fetchall()


def _table(id1: int) -> str:
    return f"tao_{id1 >> SHARD_SHIFT:05d}.assocs"
