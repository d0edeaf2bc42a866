"""Scenario `whale`: one list of two million edges, too long for any cache (DESIGN.md §10 "High degree"; paper §5.4).

Its edges are put straight into the shard's tables, as a bulk load would leave them. Told are the times of what is asked
of such a list - its count, its first page, pages deep in it, by cursor and by position, an edge more - and how many of
the questions after edges that are not there reach the database before the leader has a membership filter, and after.
Into a running cluster the edges are written by its API, which takes minutes, and its leaders' counters are everybody's.
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

from loadtest.dataset import ITEM, LINK
from loadtest.fans import measure_fans
from loadtest.long_list import EDGES_PER_TIME, load_list, write_list
from loadtest.results import Quantity, ScenarioResult
from loadtest.scenario import BenchSettings, Progress, check_bounds
from loadtest.target import Target, target_for
from loadtest.waiting import within
from tao.client import ClientSettings, Graph, connect
from tao.devcluster.layout import ClusterSettings, Shape
from tao.devcluster.readiness import server_stats
from tao.devcluster.server_options import Durability

SUMMARY: Final = "a list of millions of edges: pages, counts, what is not there, with and without a membership filter"
DEFAULT_EDGES: Final = 2_000_000
MOST_SECONDS: Final = 3_600.0
"""Of all of it, where every edge is written by the API."""
TOY_EDGES: Final = 25_000
_SCHEMA: Final = Path(__file__).with_name("schema.yaml")
_SHAPE: Final = Shape(tiers=1, followers=1, leaders=1, databases=1, shards=4)
_TIMEOUT_SECONDS: Final = 30.0
_BUILD_SECONDS: Final = 300.0
_ASKED_BEFORE: Final = 100
_ASKED_AFTER: Final = 50_000
_TOY_ASKED: Final = 2_000
_AT_ONCE: Final = 100
_TIMES: Final = 30
_PAGE: Final = 100


@dataclass(frozen=True, slots=True)
class WhaleSettings:
    """What may be chosen. Raises `OperatorError`."""

    edges: int = DEFAULT_EDGES
    """Of the list. Below the leader's `membership.least_edges` it gets no filter."""
    topology: Path | None = None
    """Of a running cluster, which is asked instead of one of its own; its schema has the types of
    ``loadtest/schema.yaml``."""

    def __post_init__(self) -> None:
        check_bounds({"--edges": (self.edges, TOY_EDGES, 20_000_000)})


DEFAULTS: Final = WhaleSettings()


async def run(settings: BenchSettings, progress: Progress, *, whale: WhaleSettings = DEFAULTS) -> ScenarioResult:
    """See `SUMMARY`. An answer that is wrong is a fault. Raises `OperatorError`."""
    edges = TOY_EDGES if settings.toy else whale.edges
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / "whale", shape=_SHAPE, schema_file=_SCHEMA, durability=Durability.RELAXED
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
        unturned = replace(patient, turned_id2s=None)
        fans, wrong = await measure_fans(target, graph, load, whale_id, unturned, toy=settings.toy)
        measured |= fans
        measured["wrong_answers"] += wrong
    how = "bulk load" if whale.topology is None else "written"
    quantities = [Quantity(name=how, value=edges / loaded, unit="edges_per_second")]
    for key, name in _NAMES.items():
        unit = key.split(":")[1]
        value, unit = (100 * measured[key], "percent") if unit == "ratio" else (measured[key], unit)
        quantities.append(Quantity(name=name, value=value, unit=unit))
    return ScenarioResult(
        summary=SUMMARY,
        conditions={"edges": edges, "edges_per_time": EDGES_PER_TIME, "page_edges": _PAGE},
        quantities=quantities,
        notes=[] if whale.topology is None else ["What was written stays in the running cluster."],
        measured={**measured, "edges": edges},
        faults=[f"{measured['wrong_answers']} answers were wrong"] if measured["wrong_answers"] else [],
    )


_NAMES: Final = {
    "count:ms": "count",
    "first_page:ms": "first page",
    "deep_page_by_cursor:ms": "page in the middle, by cursor",
    "deep_page_by_position:ms": "page in the middle, by position",
    "add:ms": "an edge more",
    "walk:edges_per_second": "walk",
    "before_without_database:ratio": "not there, without filter: answered without the database",
    "after_without_database:ratio": "not there, with filter: answered without the database",
    "before_not_there:ms": "not there, without filter, of a batch",
    "after_not_there:ms": "not there, with filter, of a batch",
    "false_positives:ratio": "false positives",
    "filter:bytes_per_edge": "memory of the filter",
    "build:seconds": "filter built within",
    "there_direct_without_database:ratio": "far down the list, asked there: answered without the database",
    "there_turned_first_without_database:ratio": "asked at the inverse lists for the first time: the same",
    "there_turned_without_database:ratio": "asked at the inverse lists again: the same",
    "there_direct:ms": "far down the list, of a batch",
    "there_turned_first:ms": "at the inverse lists for the first time, of a batch",
    "there_turned:ms": "at the inverse lists again, of a batch",
}
"""Figure, with its unit behind a colon → what it is called."""


class _Whale:
    """Asks, and checks what is answered."""

    def __init__(self, graph: Graph, target: Target, whale_id: int, ids: Sequence[int], toy: bool) -> None:
        self._graph = graph
        self._id = whale_id
        self._ids = ids
        self._toy = toy
        self._leaders = list(target.leaders.values())
        self._filters_before = self._filter_bytes_before = 0
        self._chance = Random(1)
        self._wrong = 0
        self._absent = iter(range(len(ids) + 1, 1 << 40))

    async def measure(self, progress: Progress) -> dict[str, float]:
        """The figures by name, and how many answers were wrong."""
        graph, whale, middle = self._graph, self._id, len(self._ids) // 2
        found: dict[str, float] = {}
        self._filters_before, self._filter_bytes_before = await self._filters()
        progress.step("what is not there, without a filter", 0.4)
        asked = _ASKED_BEFORE
        began = time.perf_counter()
        found |= self._named("before", asked, *await self._ask_absent(asked))
        progress.step("building the filter", 0.5)
        await within(_BUILD_SECONDS, self._is_built, 0.1, "no filter was built")
        found["build:seconds"] = time.perf_counter() - began
        progress.step("what is not there, with a filter", 0.6)
        asked = _TOY_ASKED if self._toy else _ASKED_AFTER
        found |= self._named("after", asked, *await self._ask_absent(asked))
        found["false_positives:ratio"] = 1 - found["after_without_database:ratio"]
        _, filter_bytes = await self._filters()
        found["filter:bytes_per_edge"] = (filter_bytes - self._filter_bytes_before) / len(self._ids)
        progress.step("what is there", 0.8)
        for id2 in self._chance.sample(self._ids, 10 * _TIMES):
            self._check((await graph.assoc_get(whale, LINK, [id2])).id2s == [id2])
        progress.step("counts and pages", 0.9)
        found["count:ms"] = await self._median_ms(lambda: graph.assoc_count(whale, LINK))
        found["first_page:ms"] = await self._median_ms(lambda: graph.assoc_range(whale, LINK, 0, _PAGE))
        found["deep_page_by_position:ms"] = await self._median_ms(
            lambda: graph.assoc_range(whale, LINK, middle + self._chance.randrange(1000), _PAGE)
        )
        found["deep_page_by_cursor:ms"] = await self._pages_from_the_middle()
        found["add:ms"] = await self._median_ms(self._add)
        found["walk:edges_per_second"] = await self._walk()
        self._check(await self._is_built())
        return {**found, "wrong_answers": self._wrong}

    def _check(self, is_right: bool) -> None:
        self._wrong += not is_right

    @staticmethod
    def _named(phase: str, asked: int, to_database: int, batch_ms: float) -> dict[str, float]:
        return {f"{phase}_without_database:ratio": 1 - to_database / asked, f"{phase}_not_there:ms": batch_ms}

    async def _is_built(self) -> bool:
        filters, _ = await self._filters()
        return filters > self._filters_before

    async def _filters(self) -> tuple[int, int]:
        """Of all leaders: how many, and their bytes."""
        found = [(await server_stats(leader))["membership_filters"] for leader in self._leaders]
        return sum(each["filters"] for each in found), sum(each["bytes"] for each in found)

    async def _ask_absent(self, count: int) -> tuple[int, float]:
        """How many of so many questions the leader had to hand on to the database, and milliseconds of a batch."""
        misses = await self._misses()
        took: list[float] = []
        for _ in range(count // _AT_ONCE):
            started = time.perf_counter()
            queries = [(self._id, LINK, [id2]) for id2 in islice(self._absent, _AT_ONCE)]
            for answer in await self._graph.assoc_get_many(queries):
                self._check(len(answer) == 0)
            took.append(1000 * (time.perf_counter() - started))
        return await self._misses() - misses, median(took)

    async def _misses(self) -> int:
        return sum([(await server_stats(leader))["reads"]["assoc_get"]["misses"] for leader in self._leaders])

    async def _median_ms(self, ask: Callable[[], Awaitable[Any]]) -> float:
        """Of some times, one after the other. `Any`: whatever it answers."""
        took: list[float] = []
        for _ in range(_TIMES):
            started = time.perf_counter()
            await ask()
            took.append(1000 * (time.perf_counter() - started))
        return median(took)

    async def _pages_from_the_middle(self) -> float:
        """Milliseconds of a page, each after the one before; and whether they are what the list has there."""
        middle = len(self._ids) // 2
        page = await self._graph.assoc_page(self._id, LINK, _PAGE, high=(len(self._ids) - middle) // EDGES_PER_TIME)
        seen, took = page.edges.id2s, []
        for _ in range(_TIMES):
            started = time.perf_counter()
            page = await self._graph.assoc_page(self._id, LINK, _PAGE, page.cursor)
            took.append(1000 * (time.perf_counter() - started))
            seen += page.edges.id2s
        first = self._ids.index(seen[0])
        self._check(seen == list(self._ids[first : first + len(seen)]))
        return median(took)

    async def _add(self) -> None:
        """The newest of all, which is there at once."""
        id2 = next(self._absent)
        await self._graph.assoc_add(self._id, LINK, id2, time=len(self._ids))
        self._check((await self._graph.assoc_get(self._id, LINK, [id2])).id2s == [id2])

    async def _walk(self) -> float:
        """Edges a second, down the first of them."""
        wanted = min(len(self._ids), 20_000)
        started = time.perf_counter()
        seen = 0
        async for _ in self._graph.assoc_iter(self._id, LINK):
            seen += 1
            if seen == wanted:
                break
        return seen / (time.perf_counter() - started)
