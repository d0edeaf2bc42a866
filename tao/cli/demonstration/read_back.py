"""Everything in the cluster read once and compared with the files, with who answered and how long it took.

Many readers ask single queries side by side, as the requests of a web server do; the SDK puts what is asked in one
moment into one message. Pages are read in a shuffled order, the same in each pass.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from tao.cli.demonstration.figures import DemonstrationFailed, Latency, PassFigures
from tao.cli.demonstration.page_graph import ATYPE, PageGraph
from tao.cli.demonstration.stage import SHAPE, Stage
from tao.cli.waiting import Counting
from tao.client import Graph

_READERS: Final = 32
_SEED: Final = 1

Check = Callable[[int], Awaitable[None]]


async def read_everything(stage: Stage, name: str, tier: str, expected: PageGraph) -> PassFigures:
    """Objects, then lists, then counts of all pages, through a tier.

    Raises `DemonstrationFailed` at the first answer that is not what the files say."""
    followers, leaders = stage.followers(tier), SHAPE.leader_names
    order = list(expected.pages)
    random.Random(_SEED).shuffle(order)
    async with stage.graph(tier) as graph:
        checks = _Checks(graph, expected)
        before = await stage.hits_and_misses(followers), await stage.hits_and_misses(leaders)
        began = time.perf_counter()
        with Counting(f"answers compared ({name})") as counting:
            objects = await _read(order, checks.object, lambda done: counting.show("objects", done))
            lists = await _read(order, checks.list, lambda done: counting.show("lists", len(order) + done))
            counts = await _read(order, checks.count, lambda done: counting.show("counts", 2 * len(order) + done))
        seconds = time.perf_counter() - began
        after = await stage.hits_and_misses(followers), await stage.hits_and_misses(leaders)
    by_follower, missed = (now - then for now, then in zip(after[0], before[0], strict=True))
    # A miss that joins another's fetch reaches no leader, so the leader's share is what its own misses leave.
    by_database = after[1][1] - before[1][1]
    return PassFigures(
        name=name,
        tier=tier,
        queries=by_follower + missed,
        by_follower=by_follower,
        by_leader=missed - by_database,
        by_database=by_database,
        seconds=seconds,
        objects=Latency.of(objects),
        lists=Latency.of(lists),
        counts=Latency.of(counts),
    )


async def _read(order: Iterable[int], check: Check, tell: Callable[[int], None]) -> list[float]:
    """Check every page with many readers; the latency of each, in seconds."""
    waiting = iter(order)
    latencies: list[float] = []
    clock = time.perf_counter

    async def reader() -> None:
        for page in waiting:
            began = clock()
            await check(page)
            latencies.append(clock() - began)
            if not len(latencies) % 1000:
                tell(len(latencies))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_READERS):
                group.create_task(reader())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return latencies


class _Checks:
    def __init__(self, graph: Graph, expected: PageGraph) -> None:
        self._graph = graph
        self._expected = expected
        self._limit = graph.schema.atype(ATYPE).limit

    async def object(self, page: int) -> None:
        found = await self._graph.obj_get(page)
        fields = self._expected.pages[page]
        if found is None or dict(found.fields) != fields:
            raise DemonstrationFailed(f"page {page} is {found}, the file says {fields}")

    async def list(self, page: int) -> None:
        neighbours = self._expected.neighbours[page]
        found: list[int] = []
        # One more than there should be, so that one too many would be seen; in parts where the type's limit demands.
        while len(found) <= len(neighbours):
            wanted = min(self._limit, len(neighbours) + 1 - len(found))
            part = await self._graph.assoc_range(page, ATYPE, len(found), wanted)
            found += part.id2s
            if len(part) < wanted:
                break
        if len(found) != len(neighbours) or set(found) != neighbours:
            raise DemonstrationFailed(
                f"the list of page {page} has {len(found):,} edges, the file {len(neighbours):,}; "
                f"{len(neighbours.symmetric_difference(found)):,} differ"
            )

    async def count(self, page: int) -> None:
        found = await self._graph.assoc_count(page, ATYPE)
        if found != len(self._expected.neighbours[page]):
            raise DemonstrationFailed(
                f"the count of page {page} is {found:,}, the file has {len(self._expected.neighbours[page]):,} edges"
            )
