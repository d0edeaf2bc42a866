"""A walk over a list while it is written to, against a naive list (`tao.client.reads`)."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from tao.client import Assoc, AssocPage
from tao.model.changes import sort_edges
from tao.model.graph import Edge
from tests.rigs.effort import examples
from tests.unit.client.fakes import SCHEMA, FakeCluster, make_id

ID1 = make_id(1)
COMMENT = SCHEMA.atype("comment").number
STEADY = range(1, 40)  # the other edges come and go

steady = st.dictionaries(st.sampled_from(STEADY), st.integers(0, 3), max_size=30)
edit = st.tuples(st.integers(40, 60), st.none() | st.integers(0, 4))
edits = st.lists(st.lists(edit, max_size=4), max_size=12)


class Writers:
    """A list, and the writes that are applied to it before each read."""

    def __init__(self, cluster: FakeCluster, steady: dict[int, int], edits: list[list[tuple[int, int | None]]]) -> None:
        self.lists = cluster.lists
        self.times = dict(steady)
        self.ever = set(steady.items())
        self.waiting = list(edits)
        self.store()

    def write(self) -> None:
        for id2, time in self.waiting.pop() if self.waiting else ():
            self.times.pop(id2, None)
            if time is not None:
                self.times[id2] = time
                self.ever.add((id2, time))
        self.store()

    def store(self) -> None:
        self.lists[ID1, COMMENT] = sort_edges(Edge(id2, time) for id2, time in self.times.items())


def check(seen: list[Assoc], writers: Writers, steady: dict[int, int], high: int, low: int) -> None:
    places = [(edge.time, edge.id2) for edge in seen]
    assert places == sorted(set(places), reverse=True), "in list order, none twice"
    assert {(edge.id2, edge.time) for edge in seen} <= writers.ever
    assert all(high >= time >= low for time, _ in places)
    there_throughout = {(id2, time) for id2, time in steady.items() if high >= time >= low}
    assert there_throughout <= {(edge.id2, edge.time) for edge in seen}


@settings(max_examples=examples(300), deadline=None)
@given(steady, edits, st.integers(1, 7), st.integers(0, 4), st.integers(0, 2))
def test_an_edge_that_is_there_throughout_comes_exactly_once(
    steady: dict[int, int], edits: list[list[tuple[int, int | None]]], page: int, high: int, low: int
) -> None:
    async def walk() -> None:
        cluster = FakeCluster()
        writers = Writers(cluster, steady, edits)
        async with await cluster.connect() as graph:
            walked: list[Assoc] = []
            async for edge in graph.assoc_iter(ID1, "comment", high=high, low=low, page=page):
                walked.append(edge)
                writers.write()
            check(walked, writers, steady, high, low)
            if not edits:
                assert [(edge.time, edge.id2) for edge in walked] == sorted(
                    ((time, id2) for id2, time in steady.items() if high >= time >= low), reverse=True
                )

    asyncio.run(walk())


@settings(max_examples=examples(100), deadline=None)
@given(steady, edits, st.lists(st.integers(1, 9), min_size=1))
def test_a_cursor_continues_in_another_process_with_pages_of_another_size(
    steady: dict[int, int], edits: list[list[tuple[int, int | None]]], sizes: list[int]
) -> None:
    async def walk() -> None:
        cluster = FakeCluster()
        writers = Writers(cluster, steady, edits)
        walked: list[Assoc] = []
        cursor: str | None = None
        for page in range(100):
            async with await cluster.connect() as graph:
                found: AssocPage = await graph.assoc_page(ID1, "comment", sizes[page % len(sizes)], cursor)
            walked.extend(found.edges)
            cursor = found.cursor
            if cursor is None:
                break
            writers.write()
        assert cursor is None
        check(walked, writers, steady, 9, 0)

    asyncio.run(walk())
