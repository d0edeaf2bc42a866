"""Scenario `whale`: one list of two million edges, too long for any cache (paper §5.4).

Its edges are put straight into the shard's tables, as a bulk load would leave them. The figures are the times of its
count, its first page, pages deep in it, by cursor and by position, and an edge more; and how many of the questions
after edges that do not exist reach the database before the leader has a membership filter, and after.

A second list (`fans`) is asked at either end for edges that exist far behind its cached part, each several times: at
the list itself, where a membership filter is no help, and at the inverse lists of one edge, where the SDK looks for
types with ``reverse_lookup``. The figure is how many of the questions reached the database.

Into a running cluster the edges are written by its API, which takes minutes, and its leaders' counters include the work
of all other clients.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

from loadtest import options
from loadtest.bulk_edges import insert_lists
from loadtest.conditions import within
from loadtest.dataset import ITEM, LINK
from loadtest.published.contestant import written
from loadtest.results import ScenarioResult, at_least, at_most, listings_of, missed
from loadtest.scenario import SCHEMA, BenchSettings, Progress, Scenario
from loadtest.target import Target, target_for
from tao.admin.server_stats import server_stats
from tao.client import ClientSettings, Graph, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape
from tao.model.ids import SHARD_SHIFT

MOST_SECONDS: Final = 3_600.0
"""The bound on the whole run, where every edge is written by the API."""
_ANSWERED: Final = 0.99
_WITH_FILTER: Final = "after_without_database:ratio"
_SHAPE: Final = Shape(tiers=1, followers=1, leaders=1, databases=1, shards=4)
_TIMEOUT_SECONDS: Final = 30.0
_BUILD_SECONDS: Final = 300.0
_ASKED_BEFORE: Final = 100
_ASKED_AFTER: Final = 50_000
_TOY_ASKED: Final = 2_000
_AT_ONCE: Final = 100
_TIMES: Final = 30
_PAGE: Final = 100


@dataclass(frozen=True, kw_only=True)
class WhaleOptions(options.Options):
    """The options of `whale`."""

    edges: int = options.EDGES.default(2_000_000, toy=25_000)
    """A list below the leader's `membership.min_edges` gets no filter."""
    topology: Path | None = options.TOPOLOGY.default(None)


async def run(settings: BenchSettings, progress: Progress, whale: WhaleOptions) -> ScenarioResult:
    """Write the list and ask for it. A wrong answer is a fault. Raises `OperatorError`."""
    edges = whale.edges
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / "whale", shape=_SHAPE, schema_file=SCHEMA, durability=Durability.RELAXED
    )
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(target_for(whale.topology, cluster_settings, progress))
        patient = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        graph = await stack.enter_async_context(connect(target.topology_file, region=target.region, settings=patient))

        async def load(id1: int, atype: str, count: int) -> list[int]:
            if target.cluster is not None:
                return await load_list(target.cluster, graph, id1, atype, count)
            return await write_list(graph, id1, atype, count)

        whale_id = await graph.obj_add(ITEM, {"value": b"whale"})
        progress.step(f"loading {edges:,} edges", 0.2)
        started = time.perf_counter()
        ids = await load(whale_id, LINK, edges)
        loaded = time.perf_counter() - started
        measured = await _Whale(graph, target, whale_id, ids, settings.toy).measure(progress)
        progress.step("edges at either end", 0.95)
        unturned = replace(patient, reverse_lookup_id2s=None)
        fans, wrong = await _measure_fans(target, graph, load, whale_id, unturned, toy=settings.toy)
        measured |= fans
        measured["wrong_answers"] += wrong
    how = "bulk_load" if whale.topology is None else "written"
    demands = [at_most("no wrong answer", measured["wrong_answers"], 0)]
    without = at_least(
        f"at least {_ANSWERED:.0%} answered without the database", measured[_WITH_FILTER], _ANSWERED, "with the filter"
    )
    return ScenarioResult(
        conditions={"edges": edges, "edges_per_time": EDGES_PER_TIME, "page_edges": _PAGE},
        listings=listings_of({f"{how}:edges_per_second": edges / loaded, **measured}),
        notes=[] if whale.topology is None else ["What was written stays in the running cluster."],
        aims=[*demands, without],
        measured={**measured, "edges": edges},
        faults=missed(demands),
    )


SCENARIO: Final = Scenario(
    name="whale",
    summary="a list of millions of edges: pages, counts, what is not there, with and without a membership filter",
    run=run,
    options=WhaleOptions,
    help="""Measure one list that is too long for any cache, with and without a membership filter.

    The JSON has what `measured` of the scenario has in a report of `bench`, its aims, and the machine.""",
    has_plot=True,
    seconds_bound=lambda _: MOST_SECONDS,
)


class _Questions:
    """Asks for single edges of a list in batches, times them, checks the answers, and counts what reached the database.

    A figure's name ends with its unit behind a colon."""

    def __init__(self, target: Target, misses: Callable[[dict[str, Any]], int]) -> None:
        """``misses`` reads from a leader's figures how many questions it could not answer. `Any`: JSON."""
        self._leaders = list(target.leaders.values())
        self._misses_in = misses
        self.wrong = 0

    def check(self, is_right: bool) -> None:
        """Count a wrong answer."""
        self.wrong += not is_right

    async def ask(
        self, phase: str, took_name: str, graph: Graph, list_: tuple[int, str], id2s: Sequence[int], *, there: bool
    ) -> dict[str, float]:
        """Ask for all of them; returns the share that did not reach the database, and the milliseconds of a batch."""
        before, took = await self._misses(), list[float]()
        for start in range(0, len(id2s), _AT_ONCE):
            batch = id2s[start : start + _AT_ONCE]
            started = time.perf_counter()
            answers = await graph.assoc_get_many([(*list_, [id2]) for id2 in batch])
            took.append(1000 * (time.perf_counter() - started))
            for answer, id2 in zip(answers, batch, strict=True):
                self.check(answer.id2s == ([id2] if there else []))
        misses = await self._misses() - before
        return {f"{phase}_without_database:ratio": 1 - misses / len(id2s), f"{took_name}:ms": median(took)}

    async def _misses(self) -> int:
        return sum([self._misses_in(await server_stats(leader)) for leader in self._leaders])


class _Whale:
    """Asks for the long list, and checks the answers."""

    def __init__(self, graph: Graph, target: Target, whale_id: int, ids: Sequence[int], toy: bool) -> None:
        self._graph = graph
        self._list = (whale_id, LINK)
        self._ids = ids
        self._asked_after = _TOY_ASKED if toy else _ASKED_AFTER
        self._leaders = list(target.leaders.values())
        self._filters_before = 0
        self._chance = Random(1)
        self._questions = _Questions(target, lambda stats: int(stats["reads"]["assoc_get"]["misses"]))
        self._absent = iter(range(len(ids) + 1, 1 << 40))

    async def measure(self, progress: Progress) -> dict[str, float]:
        """Return the figures by name, and how many answers were wrong."""
        graph, list_, middle = self._graph, self._list, len(self._ids) // 2
        self._filters_before, bytes_before = await self._filters()
        progress.step("what is not there, without a filter", 0.4)
        began = time.perf_counter()
        found = await self._ask_absent("before", _ASKED_BEFORE)
        progress.step("building the filter", 0.5)
        await within(_BUILD_SECONDS, self._is_built, 0.1, "no filter was built")
        found["build:seconds"] = time.perf_counter() - began
        progress.step("what is not there, with a filter", 0.6)
        found |= await self._ask_absent("after", self._asked_after)
        found["false_positives:ratio"] = 1 - found[_WITH_FILTER]
        _, filter_bytes = await self._filters()
        found["filter:bytes_per_edge"] = (filter_bytes - bytes_before) / len(self._ids)
        progress.step("what is there", 0.8)
        for id2 in self._chance.sample(self._ids, 10 * _TIMES):
            self._questions.check((await graph.assoc_get(*list_, [id2])).id2s == [id2])
        progress.step("counts and pages", 0.9)
        found["count:ms"] = await _median_ms(lambda: graph.assoc_count(*list_))
        found["first_page:ms"] = await _median_ms(lambda: graph.assoc_range(*list_, 0, _PAGE))
        found["deep_page_by_position:ms"] = await _median_ms(
            lambda: graph.assoc_range(*list_, middle + self._chance.randrange(1000), _PAGE)
        )
        found["deep_page_by_cursor:ms"] = await self._pages_from_the_middle()
        found["add:ms"] = await _median_ms(self._add)
        found["walk:edges_per_second"] = await self._walk()
        self._questions.check(await self._is_built())
        return {**found, "wrong_answers": self._questions.wrong}

    async def _ask_absent(self, phase: str, count: int) -> dict[str, float]:
        id2s = list(islice(self._absent, count))
        return await self._questions.ask(phase, f"{phase}_not_there", self._graph, self._list, id2s, there=False)

    async def _is_built(self) -> bool:
        filters, _ = await self._filters()
        return filters > self._filters_before

    async def _filters(self) -> tuple[int, int]:
        """Return the number of filters of all leaders, and their bytes."""
        found = [(await server_stats(leader))["membership_filters"] for leader in self._leaders]
        return sum(each["filters"] for each in found), sum(each["bytes"] for each in found)

    async def _pages_from_the_middle(self) -> float:
        """Read pages by cursor and check them; returns the milliseconds of a page."""
        middle = len(self._ids) // 2
        page = await self._graph.assoc_page(*self._list, _PAGE, high=(len(self._ids) - middle) // EDGES_PER_TIME)
        seen = page.edges.id2s

        async def next_page() -> None:
            nonlocal page
            page = await self._graph.assoc_page(*self._list, _PAGE, page.cursor)
            seen.extend(page.edges.id2s)

        took = await _median_ms(next_page)
        first = self._ids.index(seen[0])
        self._questions.check(seen == list(self._ids[first : first + len(seen)]))
        return took

    async def _add(self) -> None:
        """Add an edge that is the newest of all, and check that it is there."""
        id2 = next(self._absent)
        await self._graph.assoc_add(*self._list, id2, time=len(self._ids))
        self._questions.check((await self._graph.assoc_get(*self._list, [id2])).id2s == [id2])

    async def _walk(self) -> float:
        """Iterate over the first edges; returns edges per second."""
        wanted = min(len(self._ids), 20_000)
        started = time.perf_counter()
        seen = 0
        async for _ in self._graph.assoc_iter(*self._list):
            seen += 1
            if seen == wanted:
                break
        return seen / (time.perf_counter() - started)


async def _median_ms(ask: Callable[[], Awaitable[Any]]) -> float:
    """Return the median time of some calls, one after the other. `Any`: the answer is not looked at."""
    took: list[float] = []
    for _ in range(_TIMES):
        started = time.perf_counter()
        await ask()
        took.append(1000 * (time.perf_counter() - started))
    return median(took)


LoadList = Callable[[int, str, int], Awaitable[list[int]]]
"""Make a list of an id1 and type with so many edges; returns its id2s, newest first."""

FANS: Final = "fans"
_FANS_EDGES: Final = 50_000
_TOY_FANS_EDGES: Final = 10_000
_FANS_ASKED: Final = 2_000
_TOY_FANS_ASKED: Final = 200
_FANS_ROUNDS: Final = 4


async def _measure_fans(
    target: Target, graph: Graph, load: LoadList, id1: int, settings: ClientSettings, *, toy: bool
) -> tuple[dict[str, float], int]:
    """Ask for edges of the second list; returns the figures by name, and how many answers were wrong.

    ``graph`` asks the inverse lists; ``settings`` are those of a client that does not; ``load`` makes the list."""
    ids = await load(id1, FANS, _TOY_FANS_EDGES if toy else _FANS_EDGES)
    limit = graph.schema.atype(FANS).limit
    some = Random(1).sample(ids[limit:], _TOY_FANS_ASKED if toy else _FANS_ASKED)
    questions = _Questions(target, lambda stats: int(stats["misses"]))

    async def rounds(phase: str, asking: Graph, count: int) -> dict[str, float]:
        id2s = [id2 for number in range(count) for id2 in Random(number).sample(some, len(some))]
        return await questions.ask(phase, phase, asking, (id1, FANS), id2s, there=True)

    async with connect(target.topology_file, region=target.region, settings=settings) as direct:
        await direct.assoc_range(id1, FANS, 0, limit)  # so that its first part is cached
        found = await rounds("there_direct", direct, _FANS_ROUNDS)
    await graph.assoc_get(id1, FANS, some[:1])  # the answer shows the client how long the list is
    found |= await rounds("there_turned_first", graph, 1)
    found |= await rounds("there_turned", graph, _FANS_ROUNDS)
    return found, questions.wrong


EDGES_PER_TIME: Final = 7  # edges that share a time
_EDGES_AT_ONCE: Final = 2_000


def _planned(shards: int, count: int) -> list[tuple[int, int]]:
    """Return the time and id2 of each edge, newest first."""
    edges = [(number // EDGES_PER_TIME, number % shards << SHARD_SHIFT | number) for number in range(1, count + 1)]
    return sorted(edges, reverse=True)


async def write_list(graph: Graph, id1: int, atype: str, count: int) -> list[int]:
    """Write a list by the API, the newest edge last. Returns the id2s, newest first. Raises a `TaoError`."""
    edges = _planned(graph.topology.shards, count)
    for end in range(len(edges), 0, -_EDGES_AT_ONCE):
        some = edges[max(0, end - _EDGES_AT_ONCE) : end]
        await written(graph.assoc_add_many, [(id1, atype, id2, at) for at, id2 in reversed(some)])
    return [id2 for _, id2 in edges]


async def load_list(cluster: DevCluster, graph: Graph, id1: int, atype: str, count: int) -> list[int]:
    """Insert a list of so many edges (`insert_lists`). Returns the id2s, newest first."""
    edges = _planned(graph.topology.shards, count)
    await insert_lists(cluster, graph, atype, {id1: edges})
    return [id2 for _, id2 in edges]
