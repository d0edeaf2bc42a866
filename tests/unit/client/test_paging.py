"""Pages of a list: cursors, limits and wrong arguments."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tao.client import Graph, InvalidArgument
from tao.model.graph import Edge
from tests.unit.client.fakes import SCHEMA, FakeCluster, make_id
from tests.unit.client.test_sync_graph import sync_graph

ID1, OTHER = make_id(1), make_id(2)
COMMENT, NOTE = SCHEMA.atype("comment").number, SCHEMA.atype("note").number


@pytest.fixture
def cluster() -> FakeCluster:
    cluster = FakeCluster()
    cluster.lists[ID1, COMMENT] = [Edge(id2, 5) for id2 in range(9, 0, -1)]
    return cluster


@pytest_asyncio.fixture
async def graph(cluster: FakeCluster) -> AsyncIterator[Graph]:
    async with await cluster.connect() as graph:
        yield graph


async def test_more_edges_of_one_time_than_a_page_holds_come_in_several_pages(graph: Graph) -> None:
    first = await graph.assoc_page(ID1, "comment", 4)
    second = await graph.assoc_page(ID1, "comment", 4, first.cursor)
    third = await graph.assoc_page(ID1, "comment", 4, second.cursor)
    assert [page.edges.id2s for page in (first, second, third)] == [[9, 8, 7, 6], [5, 4, 3, 2], [1]]
    assert third.cursor is None


async def test_a_full_last_page_is_followed_by_an_empty_one(graph: Graph) -> None:
    page = await graph.assoc_page(ID1, "comment", 9)
    assert len(page.edges) == 9
    assert (await graph.assoc_page(ID1, "comment", 9, page.cursor)).edges.id2s == []


async def test_the_first_page_sends_no_more_than_a_time_range_does(graph: Graph, cluster: FakeCluster) -> None:
    page = await graph.assoc_page(ID1, "comment", 4)
    await graph.assoc_page(ID1, "comment", 4, page.cursor)
    first, second = (request.read for request in cluster.batches())
    assert list(first.time_range_starts) == []
    assert (list(second.time_range_highs), list(second.time_range_starts)) == ([5], [6])


async def test_a_page_is_at_most_the_type_s_limit_and_the_walk_goes_on(graph: Graph, cluster: FakeCluster) -> None:
    limit = SCHEMA.atype("note").limit
    cluster.lists[ID1, NOTE] = [Edge(id2, 1) for id2 in range(limit + 50, 0, -1)]
    page = await graph.assoc_page(ID1, "note", limit + 20)
    assert len(page.edges) == limit
    walked = [edge.id2 async for edge in graph.assoc_iter(ID1, "note", page=10 * limit)]
    assert walked == list(range(limit + 50, 0, -1))


async def test_a_cursor_above_the_high_bound_begins_at_the_bound(graph: Graph, cluster: FakeCluster) -> None:
    cluster.lists[ID1, COMMENT] = [Edge(time, time) for time in range(9, 0, -1)]
    page = await graph.assoc_page(ID1, "comment", 2)
    assert (await graph.assoc_page(ID1, "comment", 9, page.cursor, 4, 3)).edges.id2s == [4, 3]


async def test_an_empty_list_has_one_empty_page(graph: Graph) -> None:
    page = await graph.assoc_page(OTHER, "comment", 5)
    assert (page.edges.id2s, page.cursor) == ([], None)
    assert [edge async for edge in graph.assoc_iter(OTHER, "comment")] == []


async def test_a_text_that_is_no_cursor_and_the_cursor_of_another_list_are_refused(
    graph: Graph, cluster: FakeCluster
) -> None:
    cursor = (await graph.assoc_page(ID1, "comment", 4)).cursor
    assert cursor is not None
    sent = len(cluster.batches())
    for wrong in ("", "x", "é", cursor[:-4], "A" * 28, cursor + "AAAA"):
        with pytest.raises(InvalidArgument, match="cursor"):
            await graph.assoc_page(ID1, "comment", 4, wrong)
    with pytest.raises(InvalidArgument, match="another list"):
        await graph.assoc_page(OTHER, "comment", 4, cursor)
    with pytest.raises(InvalidArgument, match="another list"):
        await graph.assoc_page(ID1, "note", 4, cursor)
    with pytest.raises(InvalidArgument, match="limit is 0"):
        await graph.assoc_page(ID1, "comment", 0)
    assert len(cluster.batches()) == sent


def test_the_synchronous_walk_is_a_plain_generator(cluster: FakeCluster) -> None:
    with sync_graph(cluster) as graph:
        assert [edge.id2 for edge in graph.assoc_iter(ID1, "comment", page=2)] == list(range(9, 0, -1))
        cursor = graph.assoc_page(ID1, "comment", 7).cursor
        assert graph.assoc_page(ID1, "comment", 7, cursor).edges.id2s == [2, 1]
