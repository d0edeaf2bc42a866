"""Scenario `feed`: pages of feeds, merged when they are read, beside Redis and SQL on the same lists.

Redis answers by a pipeline of ZREVRANGE, and the client merges, as the SDK does, and gets the posts by MGET. SQL joins
the shards' tables. Then the same run measures what a list costs that is cached, what one costs that is not, and what it
costs to push a post into an inbox. From these follows at how many looks between two posts of an author pushing pays.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, NamedTuple

import msgspec

from loadtest.bulk_edges import TimedIds
from loadtest.client_process import StepReport, run_job
from loadtest.dataset import ITEM, LINK, VALUE_BYTES
from loadtest.drivers import WrongAnswer, closed
from loadtest.results import Figure, Goal, Measure, ScenarioResult, aims_of, at_least
from loadtest.rounds import MICRO, Comparison, Drive, Pace, Round, Source, Trial, figures_of, take_all_turns
from loadtest.scenario import BenchSettings, Progress, Scenario
from loadtest.sets import REDIS_PAGE, SQL, TAO, LoadedServers, checked_comparison, loaded_servers, open_clients
from loadtest.table import listing
from tao.client import Graph
from tao.feeds import FeedPage, Feeds
from tao.model.ids import SHARD_SHIFT

_SHARDS: Final = 8
_PAGE: Final = 50
_POSTS_EACH: Final = 10
_DELETED: Final = 10
"""In the feed with deleted posts, one in so many is."""
_AT_ONCE: Final = 1_000
_WRITTEN_AT_ONCE: Final = 200
"""Few enough that a busy machine writes them within the deadline of a request."""
_SIZES: Final = (400, 1_000)
_TOY_SIZES: Final = (40, 60)
_AIM_US: Final = {400: 10_000, 1_000: 20_000}
_COLD_PAGES: Final = 3
"""Pages of uncached lists in one round."""
_PUSHES: Final = 10
"""Posts pushed in one round, each into so many inboxes as a page has authors."""
_HIT_RATES: Final = (1.0, 0.977, 0.95, 0.9)
CACHED: Final = "pull, cached"
MISSED: Final = "pull, missed"
PUSH: Final = "push"


class FeedCase(NamedTuple):
    """A page of a reader's feed: the ``skip``-th post and those after it."""

    what: str
    reader: int
    authors: tuple[int, ...]
    skip: int = 0
    aims: tuple[Goal, ...] = ()


class FeedData(NamedTuple):
    """Cached feeds, readers whose feeds nobody has asked for, and the inboxes to push to."""

    cases: tuple[FeedCase, ...]
    cold: tuple[FeedCase, ...]
    inboxes: tuple[int, ...]

    def lists(self, posts: Sequence[int]) -> dict[int, TimedIds]:
        """Return the lists of readers and authors by id1. Authors of cold feeds have the posts of others."""
        found: dict[int, TimedIds] = {}
        chances = itertools.cycle(range(len(posts) // _POSTS_EACH))
        for case in (*self.cases, *self.cold):
            found[case.reader] = _newest_first((1, each) for each in case.authors)
            for author in case.authors:
                if author not in found:
                    first = next(chances) * _POSTS_EACH
                    some = posts[first : first + _POSTS_EACH]
                    found[author] = _newest_first(((each * 7_919) % 1_000_003, each) for each in some)
        return found


def make_data(sizes: Sequence[int], cold: int) -> FeedData:
    """Make readers and authors, always the same: cached feeds of these sizes, and ``cold`` ones of the first size."""
    numbers = itertools.count(1_000)

    def person() -> int:
        number = next(numbers)
        return number % _SHARDS << SHARD_SHIFT | number

    ahead = Goal(measure=Measure.P50, bound=1, against=SQL)
    few = sizes[0]
    cases: list[FeedCase] = []
    for size in sizes:
        aims = (Goal(measure=Measure.P50, bound=_AIM_US[size]), ahead) if size in _AIM_US else (ahead,)
        authors = tuple(person() for _ in range(size))
        cases.append(FeedCase(f"{size:,} authors cached, page of {_PAGE}", person(), authors, aims=aims))
    first = cases[0]
    cases.append(FeedCase(f"{few:,} authors cached, second page", first.reader, first.authors, _PAGE, (ahead,)))
    authors = tuple(person() for _ in range(few))
    cases.append(FeedCase(f"{few:,} authors cached, one post in {_DELETED} deleted", person(), authors, 0, (ahead,)))
    strangers = tuple(FeedCase("cold", person(), tuple(person() for _ in range(few))) for _ in range(cold))
    return FeedData(tuple(cases), strangers, tuple(person() for _ in range(few)))


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Load the feeds and measure every contestant. Raises `OperatorError`."""
    sizes = _TOY_SIZES if settings.toy else _SIZES
    data = make_data(sizes, _COLD_PAGES * (settings.rounds + 1))
    posts: list[int] = []
    deleted: list[int] = []

    async def add(graph: Graph) -> Mapping[int, TimedIds]:
        progress.step("adding the posts", 0.05)
        authors = len({author for case in data.cases for author in case.authors})
        rows = [(ITEM, {"value": bytes(VALUE_BYTES)}, number % _SHARDS << SHARD_SHIFT | 1) for number in range(authors)]
        for start in range(0, authors, _WRITTEN_AT_ONCE // _POSTS_EACH):
            some = [row for row in rows[start : start + _WRITTEN_AT_ONCE // _POSTS_EACH] for _ in range(_POSTS_EACH)]
            posts.extend(int(each) for each in await graph.obj_add_many(some))
        lists = data.lists(posts)
        edges = sorted((edge for author in data.cases[-1].authors for edge in lists[author]), reverse=True)
        deleted.extend(id2 for _, id2 in edges[::_DELETED])
        for start in range(0, len(deleted), _WRITTEN_AT_ONCE):
            await graph.obj_delete_many(deleted[start : start + _WRITTEN_AT_ONCE])
        return lists

    async with loaded_servers(settings, "feed", progress, add) as servers:
        job = FeedJob(
            servers=servers,
            sizes=sizes,
            posts=posts,
            deleted=deleted,
            pace=Pace(settings.rounds, settings.round_seconds),
        )
        measured = await run_job(job, progress, settings.work_dir / "feed.log", FeedMeasured)
    costs = measured.costs
    found = (
        f"A list costs {costs.hit_us:.1f} µs of CPU when it is cached and {costs.miss_us:.0f} µs more when it is not; "
        f"pushing a post to one inbox costs {costs.push_us:.0f} µs (client, follower, leader, database)."
    )
    return ScenarioResult(
        conditions={"sizes": " ".join(map(str, sizes)), "page": _PAGE, "rounds": settings.rounds},
        figures=measured.figures,
        listings=[
            listing(
                {"hit rate of lists": "{hit_rate:.1%}", "looks between two posts": "{looks:,.0f}"},
                ({"hit_rate": rate, "looks": costs.break_even(rate)} for rate in _HIT_RATES),
                title="Pushing a post pays when the reader looks more often between two posts of the author",
            )
        ],
        notes=[found],
        aims=[
            *aims_of(measured.figures),
            at_least(f"a page with one post in {_DELETED} deleted is full", measured.shown, _PAGE),
        ],
        measured={"costs": costs, "break_even": {f"{rate:.3f}": costs.break_even(rate) for rate in _HIT_RATES}},
    )


SCENARIO: Final = Scenario(
    name="feed", summary="pages of feeds merged on read, beside Redis and SQL; when pushing pays", run=run
)


class FeedCosts(msgspec.Struct, frozen=True, kw_only=True):
    """CPU of client and servers in microseconds: of a list of a feed that is cached, what a miss adds, and of a push of
    one post into one inbox."""

    hit_us: float
    miss_us: float
    push_us: float

    def break_even(self, hit_rate: float) -> float:
        """Return at how many looks between two posts of an author pulling costs as much as pushing."""
        return self.push_us / (self.hit_us + (1 - hit_rate) * self.miss_us)


class FeedMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """The figures, the costs, and how many posts a page with deleted posts shows."""

    figures: list[Figure]
    costs: FeedCosts
    shown: int


class FeedJob(msgspec.Struct, frozen=True, kw_only=True):
    """Fill Redis, check every contestant's page, and let them take turns; then measure pull and push."""

    servers: LoadedServers
    sizes: tuple[int, ...]
    posts: list[int]
    deleted: list[int]
    pace: Pace

    async def work(self, report: StepReport) -> FeedMeasured:
        """Return what was measured. Raises `TaoError`, `WrongAnswer`, and what the other clients raise."""
        data = make_data(self.sizes, _COLD_PAGES * (self.pace.rounds + 1))
        lists, deleted = data.lists(self.posts), frozenset(self.deleted)
        async with AsyncExitStack() as stack:
            graph, pool, client = await open_clients(self.servers, stack)
            report("filling Redis", 0.0)
            await fill_redis(client, lists, [each for each in self.posts if each not in deleted])
            for start in range(0, len(self.posts), _AT_ONCE):
                await graph.obj_get_many(self.posts[start : start + _AT_ONCE])
            feeds, sql = GraphFeeds(graph), SqlFeeds(pool, graph.schema.atype(LINK).number)
            comparisons = []
            for case in data.cases:
                await feeds.warm(case)
                expected = expected_page(case, lists, deleted)
                asks: dict[str, Callable[[FeedCase], Awaitable[list[int]]]] = {
                    TAO: feeds.page,
                    REDIS_PAGE: RedisFeeds(client).page,
                    SQL: sql.page,
                }
                comparisons.append(await checked_comparison(self.servers, case.what, case, asks, expected, case.aims))
            pull = self._pull_and_push(data, lists, feeds, graph)
            *taken, pulled = await take_all_turns([*comparisons, pull], self.pace, report)
            shown = len(await feeds.page(data.cases[-1]))
        figures = [figure for each, turns in zip(comparisons, taken, strict=True) for figure in figures_of(each, turns)]
        hit, missed, push = (_cpu_us(pulled[name]) / self.sizes[0] for name in (CACHED, MISSED, PUSH))
        costs = FeedCosts(hit_us=hit, miss_us=missed - hit, push_us=push)
        return FeedMeasured(figures=[*figures, *figures_of(pull, pulled)], costs=costs, shown=shown)

    def _pull_and_push(
        self, data: FeedData, lists: Mapping[int, TimedIds], feeds: GraphFeeds, graph: Graph
    ) -> Comparison:
        """Return what separates the costs: pages of cached and of uncached lists, and posts pushed to inboxes. The
        servers of all are observed."""
        pids = {name: pid for name, pid in self.servers.pids.items() if name != "redis"}
        cold = iter(data.cold)
        posts = itertools.cycle(enumerate(self.posts, 1_000_003))

        async def pull(case: FeedCase) -> Source:
            if len(await feeds.page(case)) != _PAGE:
                raise WrongAnswer(f"a page of the feed of {case.reader} is not full")
            return Source.UNKNOWN

        async def push(post: tuple[int, int]) -> Source:
            time, id2 = post
            await graph.assoc_add_many([(inbox, LINK, id2, time) for inbox in data.inboxes])
            return Source.UNKNOWN

        def some(ask: Callable[[Any], Awaitable[Source]], items: Any, count: int) -> Drive:
            async def drive(_until: float, samples: Any) -> None:
                await closed(ask, [itertools.islice(items, count)])(math.inf, samples)

            return drive

        trials = (
            Trial(CACHED, some(pull, itertools.repeat(data.cases[0]), _COLD_PAGES * 10), pids),
            Trial(MISSED, some(pull, cold, _COLD_PAGES), pids),
            Trial(PUSH, some(push, posts, _PUSHES), pids),
        )
        return Comparison(f"{self.sizes[0]:,} lists pulled, or inboxes pushed to", trials)


def expected_page(case: FeedCase, lists: Mapping[int, TimedIds], deleted: frozenset[int]) -> list[int]:
    """Return the ids of a case's page."""
    edges = sorted((edge for author in case.authors for edge in lists[author]), reverse=True)
    return [id2 for _, id2 in edges if id2 not in deleted][case.skip : case.skip + _PAGE]


def _newest_first(edges: Any) -> TimedIds:
    return sorted(edges, reverse=True)


def _cpu_us(rounds: Sequence[Round]) -> float:
    """Return the CPU of client and servers for one operation."""
    operations = sum(each.samples.answered for each in rounds)
    return MICRO * sum(each.client_cpu + sum(each.server_cpu.values()) for each in rounds) / operations


async def fill_redis(client: Any, lists: Mapping[int, TimedIds], posts: Sequence[int]) -> None:
    """Store the lists as sorted sets, and the posts that exist. `Any`: redis-py types its answers for both of its
    clients at once, here and below."""
    pipeline = client.pipeline(transaction=False)
    for id1, edges in lists.items():
        pipeline.zadd(f"z:{id1}", {str(id2): time for time, id2 in edges})
    await pipeline.execute()
    for start in range(0, len(posts), _AT_ONCE):
        await client.mset({f"o:{each}": bytes(VALUE_BYTES) for each in posts[start : start + _AT_ONCE]})


class GraphFeeds:
    """The feeds of a graph."""

    def __init__(self, graph: Graph) -> None:
        self._feeds = Feeds(graph, follows=LINK, posted=LINK, own_posts=False)
        self._cursors: dict[int, str | None] = {0: None}

    async def page(self, case: FeedCase) -> list[int]:
        """Return a page."""
        page: FeedPage = await self._feeds.page(case.reader, _PAGE, self._cursors[case.skip])
        return [each.id for each in page.posts]

    async def warm(self, case: FeedCase) -> None:
        """Have the follower cache what the case reads, and keep the cursor at which its page begins."""
        if case.skip:
            self._cursors[case.skip] = (await self._feeds.page(case.reader, case.skip)).cursor
        await self.page(case)


class RedisFeeds:
    """Feeds over sorted sets, merged in the client."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def page(self, case: FeedCase) -> list[int]:
        """Return a page; posts that do not exist are replaced by older ones."""
        authors = await self._client.zrevrange(f"z:{case.reader}", 0, -1)
        pipeline = self._client.pipeline(transaction=False)
        for each in authors:
            pipeline.zrevrange(f"z:{int(each)}", 0, _POSTS_EACH - 1, withscores=True)
        found = await pipeline.execute()
        edges = heapq.nlargest(2 * (case.skip + _PAGE), ((time, int(id2)) for each in found for id2, time in each))
        page: list[int] = []
        start = case.skip
        while len(page) < _PAGE and start < len(edges):
            ids = [id2 for _, id2 in edges[start : start + _PAGE - len(page)]]
            start += len(ids)
            values = await self._client.mget([f"o:{each}" for each in ids])
            page += [each for each, value in zip(ids, values, strict=True) if value is not None]
        return page


class SqlFeeds:
    """Feeds by a join of the shards' tables. `Any`: aiomysql has no types."""

    def __init__(self, pool: Any, atype: int) -> None:
        self._pool = pool
        self._atype = atype

    async def page(self, case: FeedCase) -> list[int]:
        """Return a page."""
        own = f"SELECT id2 FROM {_schema(case.reader)}.assocs WHERE id1 = {case.reader} AND atype = {self._atype}"  # noqa: S608
        edges = " UNION ALL ".join(
            f"SELECT e.time, e.id2 FROM ({own}) f JOIN {_schema(shard << SHARD_SHIFT)}.assocs e "  # noqa: S608
            f"ON e.id1 = f.id2 AND e.atype = {self._atype}"
            for shard in range(_SHARDS)
        )
        objects = " UNION ALL ".join(
            f"SELECT m.time, o.id, o.data FROM merged m JOIN {_schema(shard << SHARD_SHIFT)}.objects o "  # noqa: S608
            "ON o.id = m.id2 AND o.deleted = 0"
            for shard in range(_SHARDS)
        )
        statement = (
            f"WITH merged AS ({edges} ORDER BY time DESC, id2 DESC LIMIT {2 * (case.skip + _PAGE)}) "
            f"{objects} ORDER BY time DESC, id DESC LIMIT {_PAGE} OFFSET {case.skip}"
        )
        async with self._pool.acquire() as connection, connection.cursor() as cursor:
            await cursor.execute(statement)
            return [id2 for _, id2, _ in await cursor.fetchall()]


def _schema(id1: int) -> str:
    return f"tao_{id1 >> SHARD_SHIFT:05d}"
