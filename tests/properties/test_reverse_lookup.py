"""`assoc_get` by reverse look-up against a naive set of edges (`tao.client.reverse_lookup`)."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from tao.client import ClientSettings
from tao.model.changes import sort_edges
from tao.model.graph import MAX_TIME, Edge
from tests.rigs.effort import examples
from tests.unit.client.fakes import FakeCluster, make_id
from tests.unit.client.test_reverse_lookup import FAN_OF, FANS, SCHEMA

PAGES = [make_id(64 + number, number) for number in range(3)]
PEOPLE = [make_id(100 + number, number % 4) for number in range(7)]
EMPTY, NOTE = b"", b"\x81\x01\xa2hi"

pair = st.tuples(st.sampled_from(PAGES), st.sampled_from(PEOPLE))
content = st.none() | st.tuples(st.integers(0, 4), st.sampled_from([EMPTY, NOTE]))
write = st.tuples(pair, content)
bound = st.none() | st.integers(0, 5)
ids = st.lists(st.sampled_from(PEOPLE), max_size=5)
query = st.tuples(st.sampled_from(PAGES), ids, bound, bound)
steps = st.lists(st.tuples(st.lists(write, max_size=12), st.lists(query, min_size=1, max_size=4)), max_size=8)

Edges = dict[tuple[int, int], tuple[int, bytes]]


def store(cluster: FakeCluster, edges: Edges) -> None:
    """Yield both lists of every edge."""
    cluster.lists.clear()
    for page in PAGES:
        found = [Edge(id2, *edge) for (id1, id2), edge in edges.items() if id1 == page]
        cluster.lists[page, FANS] = sort_edges(found)
    for person in PEOPLE:
        found = [Edge(id1, *edge) for (id1, id2), edge in edges.items() if id2 == person]
        cluster.lists[person, FAN_OF] = sort_edges(found)


@settings(max_examples=examples(200), deadline=None)
@given(steps, st.integers(1, 6), st.booleans())
def test_the_answer_is_that_of_the_list_whichever_end_is_read(
    steps: list[
        tuple[
            list[tuple[tuple[int, int], tuple[int, bytes] | None]],
            list[tuple[int, list[int], int | None, int | None]],
        ]
    ],
    most: int,
    many: bool,
) -> None:
    async def ask() -> None:
        cluster = FakeCluster()
        cluster.schema = SCHEMA
        edges: Edges = {}
        async with await cluster.connect(ClientSettings(reverse_lookup_id2s=most)) as graph:
            for writes, queries in steps:
                for key, made in writes:
                    edges.pop(key, None)
                    if made is not None:
                        edges[key] = made
                store(cluster, edges)
                if many:
                    answers = await graph.assoc_get_many([(page, "fans", *rest) for page, *rest in queries])
                else:
                    answers = [
                        await graph.assoc_get(page, "fans", id2s, high, low) for page, id2s, high, low in queries
                    ]
                for answer, (page, id2s, high, low) in zip(answers, queries, strict=True):
                    wanted = sort_edges(
                        Edge(id2, *edges[page, id2])
                        for id2 in set(id2s)
                        if (page, id2) in edges
                        and (MAX_TIME if high is None else high) >= edges[page, id2][0] >= (low or 0)
                    )
                    found = [(edge.id2, edge.time, edge.fields["note"]) for edge in answer]
                    assert found == [(edge.id2, edge.time, "hi" if edge.data else None) for edge in wanted]
                    assert answer.list_count == sum(id1 == page for id1, _ in edges)

    asyncio.run(ask())
