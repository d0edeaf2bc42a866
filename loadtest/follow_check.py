"""Scenario `follow_check`: does she follow him? asked of followers, beside Redis' SISMEMBER and SQL on the same edges.

Lists have the degrees of the TAO workload, and readers its skew; four of five checks are of edges that do not exist.
Most shapes ask lists that are cached, alone, by 16 and 64 awaiters, at a constant rate, and by hundreds of one reader.
Others mix in lists that nobody has asked for yet, for a given share of hits. In the last one the fans of one celebrity
ask about her: the checks go to the lists of the fans, so no follower should have more of them than another. How they
spread over servers has no counterpart in one Redis or database, so nothing stands beside it.

The shapes with misses say whether pair filters pay for a type that has none: a filter answers the negative checks of
lists that are not cached. It pays where those take more than a tenth of the CPU of all checks at 90 % hits. The shape
without any cached list asks for edges that do not exist of a type with filters.

All lists are put straight into the shards' tables: a million and a half of edges take minutes through the API.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import cycle
from random import Random
from typing import Any, Final

import msgspec
import redis.asyncio

from loadtest.bulk_edges import TimedIds, insert_lists
from loadtest.client_process import StepReport, run_job
from loadtest.dataset import LINK
from loadtest.drivers import Ask, Call, WrongAnswer, at_rate, awaiters, closed
from loadtest.peer_servers import REDIS_SERVER, private_server
from loadtest.peers.graph_store import SqlAddress
from loadtest.peers.sql_graph import open_pool
from loadtest.published.shapes import Popularity
from loadtest.published.workload import tao_atc13
from loadtest.results import Figure, Goal, Measure, ScenarioResult, aims_of, at_least, at_most, listings_of
from loadtest.rounds import Comparison, Drive, Pace, Source, Trial, TurnSamples, compare_all
from loadtest.scenario import SCHEMA, BenchSettings, Progress, Scenario
from loadtest.tao_reads import open_graph
from loadtest.target import LEADER, pids_of
from tao.admin.server_stats import server_stats
from tao.client import Graph, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape
from tao.devcluster.ports import LOOPBACK
from tao.devcluster.state_folder import service_accounts
from tao.model.ids import SHARD_SHIFT

FRAMES: Final = "frames"
REDIS: Final = "redis"
SQL: Final = "sql"
FILTERED: Final = "filtered"
FANS: Final = "fans"
FAN_OF: Final = "fan_of"
_SHAPE: Final = Shape(tiers=1, followers=3, leaders=1, databases=1, shards=24)
_EDGES: Final = 500_000
_TOY_EDGES: Final = 2_000
_FANS: Final = 1_000_000
_TOY_FANS: Final = 8_000
_FANS_WHO_ASK: Final = 20_000
_TOY_FANS_WHO_ASK: Final = 400
"""Fans of the celebrity who ask, drawn from all of them: each of their lists is fetched."""
_FANS_AT_ONCE: Final = 200
"""Fewer than a leader sends to the databases at once."""
_MOST_EDGES: Final = 6_000
"""Edges of the longest list: those that caches keep."""
_NEGATIVE: Final = 0.8
"""Share of the checks of edges that do not exist (the paper, §7: 80.4 %)."""
_MANY: Final = 100
_PER_SECOND: Final = 4_000
_TOY_PER_SECOND: Final = 200
_PREPARED: Final = 5_000
_TOY_PREPARED: Final = 200
_CHECKS_OF_A_ROUND: Final = 2_000
"""Checks of a round with misses, which is a number and not a time: lists that nobody has asked for are used up."""
_TOY_CHECKS_OF_A_ROUND: Final = 50
_COLD_EDGES: Final = 50
_UNCACHED: Final = "one check, 64 awaiters, nothing cached, with filters"
_FILTERS_SECONDS: Final = 120.0
_MIXES: Final = ((1, 0.995), (64, 0.995), (64, 0.9), (64, 0.7))
"""The awaiters and the share of hits of each shape with misses."""
_HITS_OF_THE_GATE: Final = 0.9
_GATE: Final = 0.1
_AT_ONCE: Final = 2_000
_MOST_CONNECTIONS: Final = 1_000
"""redis-py opens a connection for each command that waits, and refuses the hundred and first by default."""
_FIRST_TIME: Final = 1_700_000_000
_SEED: Final = 5
_READERS: Final = 1_000_000
_COLD_READERS: Final = 2_000_000
_CELEBRITY: Final = 3_000_000
"""Where the numbers of the owners of lists begin, and that of the celebrity; the numbers of her fans follow."""
_LATENCY: Final = (Goal(measure=Measure.P50, bound=300), Goal(measure=Measure.P99, bound=1_000))
_AHEAD_OF_SQL: Final = Goal(measure=Measure.P50, bound=1, against=SQL)

Check = tuple[int, int, bool]
"""Reader, other, and whether the one follows the other."""


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Write the graph into both, and measure every shape. Raises `OperatorError`."""
    settings.versions[REDIS_SERVER.name] = REDIS_SERVER.version()
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / "follow_check", shape=_SHAPE, schema_file=SCHEMA, durability=Durability.RELAXED
    )
    async with AsyncExitStack() as stack:
        port, pid = await stack.enter_async_context(private_server(REDIS_SERVER, settings.work_dir / "redis"))
        cluster = await stack.enter_async_context(DevCluster(cluster_settings, progress.step))
        lists = _lists(_TOY_EDGES if settings.toy else _EDGES, Random(_SEED))
        cold, fans = _cold_lists(settings), _TOY_FANS if settings.toy else _FANS
        progress.step("inserting the lists", 0.1)
        async with connect(str(cluster.topology_path)) as graph:
            for atype, some in ((LINK, lists), (LINK, cold), (FILTERED, cold)):
                await insert_lists(cluster, graph, atype, {id1: _timed(ids) for id1, ids in some})
            await insert_lists(cluster, graph, FANS, {_owner(_CELEBRITY): _timed(_fans(fans))})
            (database,) = graph.topology.databases
        followers = [name for name in await pids_of(cluster) if name.startswith("follower")]
        for name in (LEADER, *followers):  # their filters were built of empty tables
            await cluster.restart(name)
        pids = await pids_of(cluster)
        progress.step("building the filters", 0.2)
        await _await_filters([cluster.admin(name) for name in followers], _SHAPE.shards)
        server = database.servers[database.master_region]
        account = service_accounts(cluster.record.passwords).administrator
        job = FollowJob(
            topology_file=str(cluster.topology_path),
            admins={name: cluster.admin(name) for name in followers},
            follower_pids={name: pids[name] for name in followers},
            redis_port=port,
            redis_pid=pid,
            database=SqlAddress(host=server.host, port=server.port, user=account.user, password=account.password),
            database_pids={name: pids[name] for name in pids if name.startswith("db")},
            lists=lists,
            cold=cold,
            fans=fans,
            toy=settings.toy,
            pace=Pace(settings.rounds, settings.round_seconds),
        )
        found = await run_job(job, progress, settings.work_dir / "follow_check.log", FollowFigures)
    measured = {"gate": gate_of(found.figures), "celebrity": found.celebrity, "filtered": found.filtered}
    return ScenarioResult(
        conditions={"edges": found.edges, "negative": _NEGATIVE, "rounds": settings.rounds},
        figures=found.figures,
        listings=listings_of(measured),
        notes=[
            "CPU is that of the three followers together. A round with misses is a number of checks and not a time.",
            "Redis and SQL have all lists from the start: what followers miss are no misses for them.",
            "The gate: pair filters in followers pay from 0.1 on, for a type that has none.",
        ],
        aims=[
            *aims_of(found.figures),
            at_most("busiest follower ÷ mean", found.celebrity["busiest_by_mean"], 1.2, "checks of one celebrity"),
            at_least("negative checks answered by filters, nothing cached", found.filtered["share"], 0.99),
            at_least("fans of the celebrity", found.celebrity["fans"], 1_000_000),
            at_least("checks of one celebrity are seen by every follower", found.celebrity["least_share"], 0.01),
        ],
        measured=measured,
    )


SCENARIO: Final = Scenario(
    name="follow_check",
    summary="whether an edge exists: cached, with misses, and about a celebrity, beside SISMEMBER of Redis and SQL",
    run=run,
)


def gate_of(figures: Sequence[Figure]) -> dict[str, float]:
    """Return what filters of pairs would save of the followers' CPU at 90 % hits.

    A miss costs what a check costs more there than one that always hits, divided by the share of misses."""
    cpu = {figure.shape: figure.server_cpu_us for figure in figures if figure.contestant == FRAMES}
    hit, mixed = cpu["one check, 64 awaiters"], cpu[_mixed(64, _HITS_OF_THE_GATE)]
    misses = 1 - _HITS_OF_THE_GATE
    miss = (mixed - (1 - misses) * hit) / misses
    saved = _NEGATIVE * misses * (miss - hit)
    share = saved / mixed
    return {
        "hit_us": round(hit, 2),
        "miss_us": round(miss, 1),
        "check_at_90_percent_hits_us": round(mixed, 2),
        "negative_misses_us_of_a_check": round(saved, 2),
        "share_that_filters_would_save": round(share, 3),
        "filters_would_pay": float(share > _GATE),
    }


class FollowFigures(msgspec.Struct, frozen=True):
    """The result of the load process."""

    figures: list[Figure]
    celebrity: dict[str, float]
    filtered: dict[str, float]
    edges: int


class FollowJob(msgspec.Struct, frozen=True, kw_only=True):
    """Write the graph, warm the followers, and let them and Redis take turns."""

    topology_file: str
    admins: dict[str, str]
    follower_pids: dict[str, int]
    redis_port: int
    redis_pid: int
    database: SqlAddress
    database_pids: dict[str, int]
    lists: list[tuple[int, list[int]]]
    """The id2s of each list by its owner."""
    cold: list[tuple[int, list[int]]]
    """Lists of which each is asked for once, of both types."""
    fans: int
    """The number of the celebrity's fans."""
    toy: bool
    pace: Pace

    async def work(self, report: StepReport) -> FollowFigures:
        """Return the figures in the order of the table. Raises `TaoError`, or what redis-py raises."""
        chance = Random(_SEED)
        async with AsyncExitStack() as stack:
            graph = await open_graph(self.topology_file, "frames", stack)
            # Any: redis-py types its answers for both of its clients at once.
            peer: Any = redis.asyncio.Redis(host=LOOPBACK, port=self.redis_port, max_connections=_MOST_CONNECTIONS)
            stack.push_async_callback(peer.aclose)
            pool = await open_pool(self.database, 4)
            stack.callback(pool.close)
            sql = SqlChecks(pool, graph.schema.atype(LINK).number)
            asks = _asks(graph, LINK, peer, sql)
            report("filling redis", 0.0)
            lists = dict(self.lists)
            await _fill(peer, {**lists, **dict(self.cold)})
            report("asking every list once, which warms the caches", 0.0)
            owners = list(lists)
            for start in range(0, len(owners), _AT_ONCE):
                some = owners[start : start + _AT_ONCE]
                await graph.assoc_count_many([(id1, LINK) for id1 in some if not lists[id1]])
                await graph.assoc_range_many([(id1, LINK, 0, len(lists[id1])) for id1 in some if lists[id1]])
            checks = _checks(lists, chance, _TOY_PREPARED if self.toy else _PREPARED)
            await _verify(graph, peer, sql, checks)
            comparisons = [
                *self._cached(graph, peer, sql, checks, _batches(lists, chance)),
                self._at_rate(asks, checks),
                *self._with_misses(asks, checks),
            ]
            figures = await compare_all(comparisons, self.pace, report)
            before = await self._asked_and_denied()
            of_filtered = SqlChecks(pool, graph.schema.atype(FILTERED).number)
            uncached = self._uncached(_asks(graph, FILTERED, peer, of_filtered))
            figures += await compare_all([uncached], self.pace, report)
            after = await self._asked_and_denied()
            shares = await self._celebrity(graph)
        asked, denied = after[0] - before[0], after[1] - before[1]
        answered = {"checks": asked, "share": denied / asked}
        return FollowFigures(figures, shares, answered, sum(map(len, lists.values())))

    def _cached(
        self, graph: Graph, peer: Any, sql: SqlChecks, checks: Sequence[Check], batches: Sequence[list[Check]]
    ) -> list[Comparison]:
        ours = [Call(graph.assoc_exists, (id1, LINK, id2), int, there) for id1, id2, there in checks]
        theirs = [Call(peer.sismember, (_key(id1), id2), int, there) for id1, id2, there in checks]
        many = [
            Call(graph.assoc_exists_many, ([(id1, LINK, id2) for id1, id2, _ in batch],), sum, _there(batch))
            for batch in batches
        ]
        theirs_many = [
            Call(peer.smismember, (_key(batch[0][0]), [id2 for _, id2, _ in batch]), sum, _there(batch))
            for batch in batches
        ]
        by_sql = [Call(sql.exists, (id1, id2), int, there) for id1, id2, there in checks]
        by_sql_many = [
            Call(
                sql.count, (batch[0][0], [id2 for _, id2, _ in batch]), int, len({id2 for _, id2, is_ in batch if is_})
            )
            for batch in batches
        ]
        follower, redis_pids, database = self._server_pids.values()
        cpu = (Goal(measure=Measure.SERVER_CPU, bound=2.5),)
        # Sixty-four awaiters of three followers make messages of some twenty checks for each, and three times as many
        # make messages of 64.
        goals = {1: _LATENCY, 16: (), 64: cpu, 64 * len(follower): cpu}
        comparisons = [
            Comparison(
                f"one check, {_awaiters(count)}",
                (
                    Trial(FRAMES, awaiters(count, ours), follower),
                    Trial(REDIS, awaiters(count, theirs), redis_pids),
                    Trial(SQL, awaiters(count, by_sql), database),
                ),
                REDIS,
                {FRAMES: (*aims, _AHEAD_OF_SQL)},
            )
            for count, aims in goals.items()
        ]
        comparisons.extend(
            Comparison(
                f"{_MANY} checks of one reader, {_awaiters(count)}",
                (
                    Trial(FRAMES, awaiters(count, many), follower, _MANY),
                    Trial(REDIS, awaiters(count, theirs_many), redis_pids, _MANY),
                    Trial(SQL, awaiters(count, by_sql_many), database, _MANY),
                ),
                REDIS,
                {FRAMES: (Goal(measure=Measure.SERVER_CPU, bound=1.0), _AHEAD_OF_SQL)},
            )
            for count in (1, 16)
        )
        return comparisons

    @property
    def _server_pids(self) -> dict[str, dict[str, int]]:
        """The servers that each contestant keeps busy."""
        return {FRAMES: self.follower_pids, REDIS: {"redis": self.redis_pid}, SQL: self.database_pids}

    def _compared(self, shape: str, drives: Mapping[str, Drive], goals: tuple[Goal, ...] = ()) -> Comparison:
        """Return the comparison of all contestants under a load of single checks."""
        trials = tuple(Trial(name, drive, self._server_pids[name]) for name, drive in drives.items())
        return Comparison(shape, trials, REDIS, {FRAMES: (*goals, _AHEAD_OF_SQL)})

    def _at_rate(self, asks: Mapping[str, Ask[Check]], checks: Sequence[Check]) -> Comparison:
        per_second = _TOY_PER_SECOND if self.toy else _PER_SECOND
        drives = {name: at_rate(ask, cycle(checks), per_second) for name, ask in asks.items()}
        return self._compared(f"one check, {per_second:,}/s", drives, _LATENCY)

    def _with_misses(self, asks: Mapping[str, Ask[Check]], checks: Sequence[Check]) -> list[Comparison]:
        """Mix in lists that nobody has asked for. Each is asked of the followers once; the peers have no misses."""
        size = _checks_of_a_round(self.toy)
        cold = {name: iter(self.cold) if name == FRAMES else cycle(self.cold) for name in asks}

        def drive_at(count: int, hits: float, name: str) -> Drive:
            warm, chance = cycle(checks), Random(_SEED)
            every = round(1 / (1 - hits))

            async def drive(_until: float, samples: TurnSamples) -> None:
                asked = []
                for number in range(size):
                    if number % every:
                        asked.append(next(warm))
                    else:
                        id1, ids = next(cold[name])
                        is_there = chance.random() >= _NEGATIVE
                        asked.append((id1, chance.choice(ids) if is_there else id1, is_there))
                await closed(asks[name], [iter(asked)] * count)(math.inf, samples)

            return drive

        return [
            self._compared(
                _mixed(count, hits),
                {name: drive_at(count, hits, name) for name in asks},
                _LATENCY if count == 1 else (),
            )
            for count, hits in _MIXES
        ]

    def _uncached(self, asks: Mapping[str, Ask[Check]]) -> Comparison:
        """Ask for edges that do not exist, of lists that no cache has."""
        owners = [id1 for id1, _ in self.cold]
        has = dict(self.cold)
        pairs = [(owner, owners[place - 1]) for place, owner in enumerate(owners)]
        found = [(id1, id2, False) for id1, id2 in pairs if id2 not in has[id1]]

        def drive_of(ask: Ask[Check]) -> Drive:
            async def drive(until: float, samples: TurnSamples) -> None:
                await closed(ask, [cycle(found[start::64] or found) for start in range(64)])(until, samples)

            return drive

        return self._compared(_UNCACHED, {name: drive_of(ask) for name, ask in asks.items()})

    async def _asked_and_denied(self) -> tuple[float, float]:
        """Return the number of checks, and of those that pair filters have answered. Hits would not do: a list is
        cached after its first miss, and answers from then on."""
        every = [await server_stats(admin) for admin in self.admins.values()]
        reads = [each["reads"]["assoc_exists"] for each in every]
        asked = sum(float(each["hits"] + each["misses"]) for each in reads)
        return asked, sum(float(each["pair_filters"]["denials"]) for each in every)

    async def _celebrity(self, graph: Graph) -> dict[str, float]:
        """Have fans ask whether they follow the celebrity, and whether she has them as fans, which clients turn to the
        lists of the fans. Return how the checks spread over the followers."""

        async def reads() -> dict[str, float]:
            stats = {name: (await server_stats(admin))["reads"]["assoc_exists"] for name, admin in self.admins.items()}
            return {name: float(each["hits"] + each["misses"]) for name, each in stats.items()}

        celebrity = _owner(_CELEBRITY)
        readers = Random(_SEED).sample(_fans(self.fans), _TOY_FANS_WHO_ASK if self.toy else _FANS_WHO_ASK)
        await graph.assoc_exists(celebrity, FANS, readers[0])  # the client has seen then that her list is long
        before = await reads()
        for start in range(0, len(readers), _FANS_AT_ONCE):
            some = readers[start : start + _FANS_AT_ONCE]
            there = await graph.assoc_exists_many([(each, FAN_OF, celebrity) for each in some])
            there += await graph.assoc_exists_many([(celebrity, FANS, each) for each in some])
            if not all(there):
                raise WrongAnswer("a fan of the celebrity is denied")
        after = await reads()
        asked = [after[name] - before[name] for name in after]
        mean = sum(asked) / len(asked)
        return {
            "fans": float(self.fans),
            "checks": sum(asked),
            "busiest_by_mean": max(asked) / mean,
            "least_share": min(asked) / sum(asked),
        }


def _checks_of_a_round(toy: bool) -> int:
    return _TOY_CHECKS_OF_A_ROUND if toy else _CHECKS_OF_A_ROUND


def _owner(number: int) -> int:
    return number % _SHAPE.shards << SHARD_SHIFT | number


def _fans(count: int) -> list[int]:
    return [_owner(_CELEBRITY + number) for number in range(1, count + 1)]


def _timed(ids: Sequence[int]) -> TimedIds:
    return [(_FIRST_TIME + place, id2) for place, id2 in enumerate(ids)]


def _lists(edges: int, chance: Random) -> list[tuple[int, list[int]]]:
    """Draw lists of the published degrees, of so many edges. Return them with their owners, who are their members."""
    degrees: list[int] = []
    while sum(degrees) < edges:
        degrees.extend(min(_MOST_EDGES, each) for each in tao_atc13().degrees.drawn(1_000, chance))
    ids = [_owner(_READERS + number) for number in range(len(degrees))]
    lists: list[tuple[int, list[int]]] = []
    for place, (id1, degree) in enumerate(zip(ids, degrees, strict=True)):
        step = 1 + chance.randrange(len(ids) - 1)
        others = {ids[(place + 1 + step * number) % len(ids)] for number in range(min(degree, len(ids) - 1))}
        lists.append((id1, sorted(others)))
    return lists


def _cold_lists(settings: BenchSettings) -> list[tuple[int, list[int]]]:
    size = _checks_of_a_round(settings.toy)
    needed = sum(1 + size // round(1 / (1 - hits)) for _, hits in _MIXES) * (settings.rounds + 1)
    ids = [_owner(_COLD_READERS + number) for number in range(needed)]
    edges = min(_COLD_EDGES, needed // 2)
    return [(id1, [ids[(place + step) % needed] for step in range(1, edges + 1)]) for place, id1 in enumerate(ids)]


async def _fill(peer: Any, lists: dict[int, list[int]]) -> None:
    await peer.flushall()
    for id1, ids in lists.items():
        if ids:
            await peer.sadd(_key(id1), *ids)


def _checks(lists: dict[int, list[int]], chance: Random, count: int) -> list[Check]:
    """Draw readers by the published skew of lists: a fifth of the checks are of edges that exist."""
    popularity = Popularity(list(lists), tao_atc13().list_skew, chance)
    with_edges = Popularity([id1 for id1, ids in lists.items() if ids], tao_atc13().list_skew, chance)
    owners = list(lists)
    checks: list[Check] = []
    while len(checks) < count:
        if chance.random() < _NEGATIVE:
            id1, id2 = popularity.draw(), chance.choice(owners)
        else:
            id1 = with_edges.draw()
            id2 = chance.choice(lists[id1])
        checks.append((id1, id2, id2 in lists[id1]))
    return checks


def _batches(lists: dict[int, list[int]], chance: Random) -> list[list[Check]]:
    """Draw pages: a reader of some edges, and the authors of so many posts."""
    readers = sorted(lists, key=lambda id1: len(lists[id1]))[-200:]
    owners = list(lists)
    found = []
    for _ in range(200):
        id1 = chance.choice(readers)
        there = set(lists[id1])
        ids = [chance.choice(lists[id1]) for _ in range(round(_MANY * (1 - _NEGATIVE)))]
        ids += [chance.choice(owners) for _ in range(_MANY - len(ids))]
        chance.shuffle(ids)
        found.append([(id1, id2, id2 in there) for id2 in ids])
    return found


async def _await_filters(admins: Sequence[str], shards: int) -> None:
    """Wait until every shard has its filter. Raises `TimeoutError`."""
    async with asyncio.timeout(_FILTERS_SECONDS):
        missing = shards
        while missing:
            await asyncio.sleep(0.5)
            missing = shards - sum([(await server_stats(each))["pair_filters"]["filters"] for each in admins])


class SqlChecks:
    """The shards' tables, asked by SQL. `Any`: aiomysql has no types."""

    def __init__(self, pool: Any, atype: int) -> None:
        self._pool = pool
        self._atype = atype

    async def exists(self, id1: int, id2: int) -> int:
        """Return 1 if the edge exists, else 0."""
        return await self.count(id1, [id2])

    async def count(self, id1: int, id2s: Sequence[int]) -> int:
        """Return how many of these edges of one list exist."""
        among = ",".join(map(str, id2s))
        statement = (
            f"SELECT id2 FROM tao_{id1 >> SHARD_SHIFT:05d}.assocs "  # noqa: S608 - numbers of our own
            f"WHERE id1 = {id1} AND atype = {self._atype} AND id2 IN ({among})"
        )
        async with self._pool.acquire() as connection, connection.cursor() as cursor:
            await cursor.execute(statement)
            return len(await cursor.fetchall())


async def _verify(graph: Graph, peer: Any, sql: SqlChecks, checks: Sequence[Check]) -> None:
    for start in range(0, len(checks), _AT_ONCE):
        some = checks[start : start + _AT_ONCE]
        if await graph.assoc_exists_many([(id1, LINK, id2) for id1, id2, _ in some]) != [each for *_, each in some]:
            raise WrongAnswer("a check of the graph has another answer than what was written")
    for id1, id2, there in checks[:_AT_ONCE]:
        if bool(await peer.sismember(_key(id1), id2)) is not there:
            raise WrongAnswer("a check of redis has another answer than what was written")
        if bool(await sql.exists(id1, id2)) is not there:
            raise WrongAnswer("a check by SQL has another answer than what was written")


def _asks(graph: Graph, atype: str, peer: Any, sql: SqlChecks) -> dict[str, Ask[Check]]:
    """Return how each contestant is asked for one edge. `Any`: redis-py types its answers for both of its clients."""

    def asking(exists: Callable[[int, int], Awaitable[object]]) -> Ask[Check]:
        async def ask(check: Check) -> Source:
            id1, id2, there = check
            if bool(await exists(id1, id2)) is not there:
                raise WrongAnswer(f"the check of {id2} in the list of {id1} has another answer than what was written")
            return Source.UNKNOWN

        return ask

    return {
        FRAMES: asking(lambda id1, id2: graph.assoc_exists(id1, atype, id2)),
        REDIS: asking(lambda id1, id2: peer.sismember(_key(id1), id2)),
        SQL: asking(sql.exists),
    }


def _mixed(count: int, hits: float) -> str:
    return f"one check, {_awaiters(count)}, {hits:.1%} hits"


def _awaiters(count: int) -> str:
    return f"{count} awaiter" if count == 1 else f"{count} awaiters"


def _there(batch: Sequence[Check]) -> int:
    return sum(there for *_, there in batch)


def _key(id1: int) -> str:
    return f"f:{id1}"
