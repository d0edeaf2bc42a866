"""The peers' databases by hand, MySQL and PostgreSQL: the same writes end in the same graph, with right counters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio

from loadtest.peers.databases import REDO_MB, address_of, private_mysql
from loadtest.peers.graph_store import AnswerSource, GraphStore
from loadtest.peers.postgres_graph import PostgresGraph, open_postgres_pool
from loadtest.peers.postgres_server import WHERE_FROM, postgres_folder, private_postgres
from loadtest.peers.sql_graph import SqlGraph, open_pool
from loadtest.published.contestant import Payloads
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.workload import workload_named
from loadtest.rounds import Source

pytestmark = [pytest.mark.e2e, pytest.mark.database]
PLAN = GraphPlan(workload_named("linkbench"), 100, 1)
IDS = range(1_000, 1_100)
EMPTY = [node for node in range(100) if PLAN.degree(node) == 0]
_CONNECTIONS = 8
_POOL_MB = 16


@asynccontextmanager
async def loaded(graph: GraphStore) -> AsyncIterator[GraphStore]:
    """The graph of the plan in a store, loaded twice: the second time in place of the first."""
    try:
        for _ in range(2):
            await graph.load(PLAN, IDS, Payloads.drawn("payloads"))
        yield graph
    finally:
        await graph.close()


@pytest_asyncio.fixture(params=["aiomysql", "asyncmy", "asyncpg"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[GraphStore]:
    if request.param == "asyncpg" and postgres_folder() is None:
        pytest.skip(f"no PostgreSQL: {WHERE_FROM}")
    async with AsyncExitStack() as stack:
        if request.param == "asyncpg":
            server = private_postgres(tmp_path / "postgres.log", _POOL_MB, REDO_MB)
            address = (await stack.enter_async_context(server)).address
            opened: GraphStore = PostgresGraph(await open_postgres_pool(address, _CONNECTIONS))
        else:
            database = await stack.enter_async_context(private_mysql(tmp_path / "mysql", _POOL_MB))
            opened = SqlGraph(await open_pool(address_of(database), _CONNECTIONS, request.param))
        yield await stack.enter_async_context(loaded(opened))


async def count_of(graph: GraphStore, id1: int) -> int:
    """The counter of a list, which has to be the length of the list."""
    asked = AnswerSource()
    count = await graph.count(id1, asked)
    assert count == len(await graph.newest(id1, 10_000, asked))
    assert asked.how is Source.MISS
    return count


async def test_the_loaded_graph_is_that_of_the_plan(store: GraphStore) -> None:
    asked = AnswerSource()
    for node in range(PLAN.nodes):
        payload = await store.node(IDS[node], asked)
        assert payload is not None
        assert len(payload) == PLAN.object_size(node)
        edges = await store.newest(IDS[node], 1_000, asked)
        assert [(id2 - IDS[0], at, len(data)) for id2, at, data in edges] == [
            (edge.other, edge.time, edge.size) for edge in PLAN.list_of(node)
        ]
        assert await count_of(store, IDS[node]) == PLAN.degree(node)
    first, nobody, last = await store.nodes([IDS[0], 1, IDS[99]], asked)
    assert (len(first or b""), nobody, len(last or b"")) == (PLAN.object_size(0), None, PLAN.object_size(99))


async def test_ranges_and_pairs_are_found_newest_first(store: GraphStore) -> None:
    id1, asked = IDS[EMPTY[0]], AnswerSource()
    await store.put_links([(id1, 5, 10, b"a"), (id1, 6, 30, b"b"), (id1, 7, 20, b""), (id1, 8, 20, b"d")])
    assert await store.newest(id1, 2, asked) == [(6, 30, b"b"), (8, 20, b"d")]
    assert await store.between(id1, 20, 10, 10, asked) == [(8, 20, b"d"), (7, 20, b""), (5, 10, b"a")]
    assert await store.among(id1, [5, 6, 99], asked) == [(6, 30, b"b"), (5, 10, b"a")]


async def test_a_link_is_added_overwritten_turned_into_a_mark_and_deleted(store: GraphStore) -> None:
    id1, asked = IDS[EMPTY[0]], AnswerSource()
    await store.put_links([(id1, 5, 10, b"old"), (id1, 5, 11, b"new"), (id1, 6, 12, b"\x00'%\\")])
    assert await store.newest(id1, 9, asked) == [(6, 12, b"\x00'%\\"), (5, 11, b"new")]
    assert await count_of(store, id1) == 2
    await store.put_links([(id1, 5, 13, b"newest")])
    assert await count_of(store, id1) == 2
    await store.mark_link(id1, 6)
    await store.mark_link(id1, 6)
    assert await store.newest(id1, 9, asked) == [(5, 13, b"newest")]
    for _ in range(2):
        await store.delete_link(id1, 5)
        assert await count_of(store, id1) == 0


async def test_an_object_is_added_overwritten_and_deleted(store: GraphStore) -> None:
    asked = AnswerSource()
    object_id = await store.add_node(b"one")
    await store.put_node(object_id, b"\xff;two")
    assert await store.node(object_id, asked) == b"\xff;two"
    await store.delete_node(object_id)
    assert await store.node(object_id, asked) is None


async def test_counters_of_lists_that_many_write_at_once_stay_right(store: GraphStore) -> None:
    lists = [IDS[node] for node in EMPTY[:2]]

    async def write(seed: int) -> None:
        chance = Random(seed)
        for turn in range(20):
            id1, id2 = chance.choice(lists), chance.randrange(5)
            if chance.random() < 0.3:
                await store.delete_link(id1, id2)
            elif chance.random() < 0.2:
                await store.mark_link(id1, id2)
            else:
                # Pairs in any order: of two writers, each may hold what the other waits for.
                await store.put_links([(chance.choice(lists), chance.randrange(5), turn, b"x") for _ in range(3)])

    async with asyncio.TaskGroup() as group:
        for seed in range(16):
            group.create_task(write(seed))
    for id1 in lists:
        await count_of(store, id1)
