"""Scenario `two_hops`: people you may know, from the lists of one follower, beside Redis and SQL on the same lists.

Somebody has so many friends, and each of these as many. Redis answers the lists of one level by a pipeline of
ZREVRANGE, and the client counts, as the SDK does; SQL joins the shards' tables and groups.
"""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from random import Random
from typing import Any, Final, NamedTuple

import msgspec

from loadtest.bulk_edges import TimedIds
from loadtest.client_process import StepReport, run_job
from loadtest.dataset import LINK
from loadtest.results import Figure, Goal, Measure, ScenarioResult, aims_of, at_most
from loadtest.rounds import Pace, compare_all
from loadtest.scenario import BenchSettings, Progress, Scenario
from loadtest.sets import REDIS_PAGE, SQL, TAO, LoadedServers, checked_comparison, loaded_servers, open_clients
from tao.client import Graph
from tao.model.ids import SHARD_SHIFT

_SHARDS: Final = 8
_SIZES: Final = (100, 500)
_TOY_SIZES: Final = (10, 30)
_AIM_US: Final = {100: 8_000, 500: 50_000}
_LIMIT: Final = 50
_PEOPLE_PER_FRIEND: Final = 40
"""The people among whom friends of friends are drawn, as a multiple of the number of friends."""
_MEMORY_MB: Final = 40
_LEVELS: Final = 2
_SEED: Final = 3
Ranking = list[tuple[int, int]]
"""Ids with their number of mutual friends, best first."""


class Hops(NamedTuple):
    """The node ``me``, its fan-out, all lists by id1, and the expected ranking."""

    me: int
    fan_out: int
    lists: Mapping[int, TimedIds]
    expected: Ranking


def make_hops(fan_out: int) -> Hops:
    """Make the lists of somebody with so many friends, always the same."""

    def person(number: int) -> int:
        return number % _SHARDS << SHARD_SHIFT | fan_out * 10_000_000 + number

    chance = Random(_SEED)
    me, friends = person(0), [person(number) for number in range(1, fan_out + 1)]
    people = [person(number) for number in range(fan_out + 1, _PEOPLE_PER_FRIEND * fan_out)]
    chosen = {me: friends} | {each: chance.sample(people, fan_out) for each in friends}
    counts = Counter(id2 for each in friends for id2 in chosen[each])
    ranking = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_LIMIT]
    lists = {id1: [(len(id2s) - place, id2) for place, id2 in enumerate(id2s)] for id1, id2s in chosen.items()}
    return Hops(me, fan_out, lists, ranking)


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Load the lists and measure every contestant. Raises `OperatorError`."""
    sizes = _TOY_SIZES if settings.toy else _SIZES
    lists = {id1: edges for size in sizes for id1, edges in make_hops(size).lists.items()}
    async with loaded_servers(settings, "two_hops", progress, lists) as servers:
        job = TwoHopsJob(servers=servers, sizes=sizes, pace=Pace(settings.rounds, settings.round_seconds))
        measured = await run_job(job, progress, settings.work_dir / "two_hops.log", HopsMeasured)
    return ScenarioResult(
        conditions={"sizes": " ".join(map(str, sizes)), "limit": _LIMIT, "rounds": settings.rounds},
        figures=measured.figures,
        aims=[
            *aims_of(measured.figures),
            at_most(f"memory of one call at most {_MEMORY_MB} MB", measured.peak_mb, _MEMORY_MB),
            at_most("one message for each follower and level", measured.messages, _LEVELS),
        ],
        measured={"peak_mb": measured.peak_mb, "messages": measured.messages},
    )


SCENARIO: Final = Scenario(
    name="two_hops",
    summary="people you may know, from lists of one follower, beside Redis and SQL",
    run=run,
)


class HopsMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """The figures; of one call with the largest fan-out, the memory and the messages."""

    figures: list[Figure]
    peak_mb: float
    messages: int


class TwoHopsJob(msgspec.Struct, frozen=True, kw_only=True):
    """Fill Redis, check every contestant's ranking, and let them take turns."""

    servers: LoadedServers
    sizes: tuple[int, ...]
    pace: Pace

    async def work(self, report: StepReport) -> HopsMeasured:
        """Return what was measured. Raises `TaoError`, `WrongAnswer`, and what the other clients raise."""
        async with AsyncExitStack() as stack:
            graph, pool, client = await open_clients(self.servers, stack)
            atype = graph.schema.atype(LINK).number
            comparisons = []
            for size in self.sizes:
                hops = make_hops(size)
                await _fill(client, hops.lists)
                asks: dict[str, Callable[[Hops], Awaitable[Ranking]]] = {
                    TAO: GraphHops(graph).ranking,
                    REDIS_PAGE: RedisHops(client).ranking,
                    SQL: SqlHops(pool, atype).ranking,
                }
                aims: tuple[Goal, ...] = (Goal(measure=Measure.P50, bound=1, against=SQL),)
                if size in _AIM_US:
                    aims = (Goal(measure=Measure.P50, bound=_AIM_US[size]), *aims)
                comparisons.append(
                    await checked_comparison(self.servers, f"{size} × {size}", hops, asks, hops.expected, aims)
                )
            figures = await compare_all(comparisons, self.pace, report)
            hops, before = make_hops(self.sizes[-1]), graph.stats.batches
            tracemalloc.start()
            await GraphHops(graph).ranking(hops)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        return HopsMeasured(figures=figures, peak_mb=peak / 1e6, messages=graph.stats.batches - before)


async def _fill(client: Any, lists: Mapping[int, TimedIds]) -> None:
    pipeline = client.pipeline(transaction=False)
    for id1, edges in lists.items():
        pipeline.zadd(f"z:{id1}", {str(id2): time for time, id2 in edges})
    await pipeline.execute()


class GraphHops:
    """The two hops of a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    async def ranking(self, hops: Hops) -> Ranking:
        """Return the best candidates."""
        found = await self._graph.two_hop(hops.me, LINK, limit=_LIMIT, fan_out=hops.fan_out)
        return [(each.id, each.mutual) for each in found.candidates]


class RedisHops:
    """Two hops over sorted sets, counted in the client. `Any`: redis-py types its answers for both of its clients."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def ranking(self, hops: Hops) -> Ranking:
        """Return the best candidates."""
        friends = await self._client.zrevrange(f"z:{hops.me}", 0, hops.fan_out - 1)
        pipeline = self._client.pipeline(transaction=False)
        for each in friends:
            pipeline.zrevrange(f"z:{int(each)}", 0, hops.fan_out - 1)
        counts: Counter[bytes] = Counter()
        for ids in await pipeline.execute():
            counts.update(ids)
        for each in (str(hops.me).encode(), *friends):
            counts.pop(each, None)
        least = sorted(counts.values(), reverse=True)[_LIMIT - 1] if len(counts) >= _LIMIT else 0
        best = [(int(each), count) for each, count in counts.items() if count >= least]
        return sorted(best, key=lambda item: (-item[1], item[0]))[:_LIMIT]


class SqlHops:
    """Two hops by a join of the shards' tables. `Any`: aiomysql has no types."""

    def __init__(self, pool: Any, atype: int) -> None:
        self._pool = pool
        self._atype = atype

    async def ranking(self, hops: Hops) -> Ranking:
        """Return the best candidates."""
        own = f"SELECT id2 FROM tao_{hops.me >> SHARD_SHIFT:05d}.assocs WHERE id1 = {hops.me} AND atype = {self._atype}"  # noqa: S608
        parts = " UNION ALL ".join(
            f"SELECT e.id2 FROM ({own}) f JOIN tao_{shard:05d}.assocs e ON e.id1 = f.id2 AND e.atype = {self._atype}"  # noqa: S608
            for shard in range(_SHARDS)
        )
        statement = (
            f"SELECT id2, COUNT(*) AS mutual FROM ({parts}) hops WHERE id2 <> {hops.me} AND id2 NOT IN ({own}) "  # noqa: S608
            f"GROUP BY id2 ORDER BY mutual DESC, id2 LIMIT {_LIMIT}"
        )
        async with self._pool.acquire() as connection, connection.cursor() as cursor:
            await cursor.execute(statement)
            return [(id2, mutual) for id2, mutual in await cursor.fetchall()]
