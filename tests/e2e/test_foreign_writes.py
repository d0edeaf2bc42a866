"""Rows changed by hand, by an administrator or an import.

The followers of every region show the changes, counts are right again, versions have risen, and no touch is itself
touched again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiomysql
import pytest
import pytest_asyncio

from tao.client import Graph, connect
from tao.devcluster.layout import Shape
from tao.model.ids import SHARD_SHIFT
from tests.e2e.cluster_access import PATIENT, patient_stats, running_cluster
from tests.e2e.region_access import Regions, plain, running_regions, until

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

SHAPE = Shape(regions=2, tiers=2, followers=1, leaders=2, databases=2, mixed_mastership=True, shards=4)
LISTS, EDGES_EACH = 200, 100
"""Number of rows of a bulk import."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def regions(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Regions]:
    async with running_regions(tmp_path_factory.mktemp("regions"), SHAPE) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def graphs(regions: Regions) -> AsyncIterator[tuple[Graph, Graph]]:
    """Yield a client in the master region and one in the other."""
    async with (
        connect(regions.target, region="east", settings=PATIENT) as east,
        connect(regions.target, region="west", settings=PATIENT) as west,
    ):
        yield east, west


async def by_hand(regions: Regions, shard: int, *statements: str) -> None:
    """Run statements on the shard's master as its administrator."""
    routes = regions.routes
    await regions.sql(routes.database_server(shard, routes.master_region(shard)).name, *statements, shard=shard)


async def touched(regions: Regions) -> int:
    keys = 0
    for region in regions.topology.regions:
        for leader in region.leaders.servers:
            keys += (await patient_stats(regions.cluster.admin(leader.name)))["foreign_keys"]["touched"]
    return keys


async def likes_of(graph: Graph, user: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the count, and the length of the list itself."""
    return await graph.assoc_count(user, "likes"), plain(await graph.assoc_range(user, "likes", 0, 10))


async def shown(graphs: tuple[Graph, Graph], user: int, edges: list[tuple[int, int]]) -> None:
    for graph in graphs:

        async def is_shown(graph: Graph = graph) -> bool:
            return await likes_of(graph, user) == (len(edges), edges)

        await until(is_shown, f"{edges} are not shown")


async def fields(graph: Graph, user: int) -> dict[str, Any] | None:
    found = await graph.obj_get(user)
    return None if found is None else dict(found.fields)


async def test_changes_of_rows_by_hand_appear_in_both_regions_with_right_counts(
    regions: Regions, graphs: tuple[Graph, Graph]
) -> None:
    east = graphs[0]
    user = await east.obj_add("user", {"name": "a"})
    pages = [await east.obj_add("user", {"name": "p"}, near=user) for _ in range(3)]
    await asyncio.gather(*(east.assoc_add(user, "follows", page, 1) for page in pages))
    await east.assoc_add(user, "likes", pages[0], 1)
    await shown(graphs, user, [(pages[0], 1)])
    likes, shard = east.schema.atype("likes").number, user >> SHARD_SHIFT
    row = f"({user}, {likes}, {pages[1]}, 9, 0, '')"

    await by_hand(regions, shard, f"INSERT INTO assocs VALUES {row}")
    await shown(graphs, user, [(pages[1], 9), (pages[0], 1)])
    await by_hand(regions, shard, f"UPDATE assocs SET time = 5 WHERE id2 = {pages[1]} AND atype = {likes}")
    await shown(graphs, user, [(pages[1], 5), (pages[0], 1)])
    await by_hand(regions, shard, f"UPDATE assoc_lists SET count = 77 WHERE id1 = {user}")
    await shown(graphs, user, [(pages[1], 5), (pages[0], 1)])
    await by_hand(
        regions,
        shard,
        f"DELETE FROM assocs WHERE id1 = {user} AND atype = {likes}",
        f"DELETE FROM assoc_lists WHERE id1 = {user} AND atype = {likes}",
    )
    await shown(graphs, user, [])

    for graph in graphs:
        await until(lambda graph=graph: fields(graph, pages[2]))  # type: ignore[misc]
    await by_hand(regions, shard, f"UPDATE objects SET data = x'8101a26879' WHERE id = {pages[2]}")
    for graph in graphs:

        async def renamed(graph: Graph = graph) -> bool:
            found = await fields(graph, pages[2])
            return found is not None and found["name"] == "hy"

        await until(renamed, "the new name is not shown")
    await by_hand(regions, shard, f"DELETE FROM objects WHERE id = {pages[2]}")
    for graph in graphs:

        async def gone(graph: Graph = graph) -> bool:
            return await fields(graph, pages[2]) is None

        await until(gone, "the object is still shown")


async def test_a_touch_is_not_touched_again(regions: Regions, graphs: tuple[Graph, Graph]) -> None:
    user = await graphs[0].obj_add("user", {"name": "a"})
    before = await touched(regions)
    for value in (1, 2, 3):
        await by_hand(
            regions,
            user >> SHARD_SHIFT,
            f"UPDATE objects SET data = x'8101a1{0x60 + value:02x}' WHERE id = {user}",
        )
    for graph in graphs:

        async def last(graph: Graph = graph) -> bool:
            found = await fields(graph, user)
            return found is not None and found["name"] == "c"

        await until(last)
    # Once a later commit of the same binlog is visible, everything before it has been delivered.
    after = await graphs[0].obj_add("user", {"name": "b"}, near=user)
    await until(lambda: fields(graphs[1], after))
    assert 1 <= await touched(regions) - before <= 3


async def test_an_import_of_20_000_rows_is_counted_in_few_transactions(
    regions: Regions, graphs: tuple[Graph, Graph]
) -> None:
    east = graphs[0]
    users = await asyncio.gather(*(east.obj_add("user", {"name": "a"}) for _ in range(LISTS)))
    follows = east.schema.atype("follows").number
    by_shard: dict[int, list[int]] = {}
    for user in users:
        by_shard.setdefault(user >> SHARD_SHIFT, []).append(user)
    for graph in graphs:
        assert await graph.assoc_count(users[0], "follows") == 0
    for shard, of_shard in by_shard.items():
        edges = [(user, users[0] + n, n) for user in of_shard for n in range(EDGES_EACH)]
        rows = ",".join(f"({user}, {follows}, {id2}, {time}, 0, '')" for user, id2, time in edges)
        await by_hand(regions, shard, f"INSERT INTO assocs VALUES {rows}")
    for graph in graphs:

        async def counted(graph: Graph = graph) -> bool:
            counts = await asyncio.gather(*(graph.assoc_count(user, "follows") for user in users))
            return set(counts) == {EDGES_EACH}

        await until(counted, "counts are wrong")
    # The import writes no inverses, so its rows are deleted in the same way.
    for shard in by_shard:
        await by_hand(regions, shard, f"DELETE FROM assocs WHERE atype = {follows}")
    for graph in graphs:

        async def empty(graph: Graph = graph) -> bool:
            counts = await asyncio.gather(*(graph.assoc_count(user, "follows") for user in users))
            return set(counts) == {0}

        await until(empty, "counts are wrong")


async def test_the_writer_s_region_receives_the_far_side_of_a_pair_without_replication(
    regions: Regions, graphs: tuple[Graph, Graph]
) -> None:
    """The write is coordinated in east and its inverse is mastered in west; the other tier of east receives it from its
    own leader."""
    east, routes = graphs[0], regions.routes
    a = await east.obj_add("user", {"name": "a"})
    while routes.master_region(a >> SHARD_SHIFT) != "east":
        a = await east.obj_add("user", {"name": "a"})
    b = a
    while routes.master_region(b >> SHARD_SHIFT) != "west":
        b = await east.obj_add("user", {"name": "b"})
    assert a < b, "the smaller id coordinates"
    async with connect(regions.target, region="east", tier="tier-2", settings=PATIENT) as other:

        async def is_empty() -> bool:
            return plain(await other.assoc_range(b, "liked_by", 0, 10)) == []

        await until(is_empty)
        async with regions.replication_held():
            await east.assoc_add(a, "likes", b, 4)

            async def is_there() -> bool:
                return plain(await other.assoc_range(b, "liked_by", 0, 10)) == [(a, 4)]

            await until(is_there, "east has not heard of the inverse in west")


async def test_in_the_end_caches_and_replicas_equal_their_masters(regions: Regions) -> None:

    async def nothing_differs() -> bool:
        return all("Pair" in type(each).__name__ for each in await regions.differences())

    await until(nothing_differs, "caches or replicas differ from their masters")


async def test_a_single_region_receives_rows_changed_by_hand_too(tmp_path: Path) -> None:
    async with (
        running_cluster(tmp_path / "one", Shape(tiers=1, followers=1, leaders=1, shards=1)) as cluster,
        connect(str(cluster.topology_path), settings=PATIENT) as graph,
    ):
        user = await graph.obj_add("user", {"name": "a"})
        assert await likes_of(graph, user) == (0, [])
        database, account = cluster.database("db-1"), cluster.database("db-1").accounts.administrator
        connection = await aiomysql.connect(
            host=database.host, port=database.port, user=account.user, password=account.password, autocommit=True
        )
        async with connection.cursor() as cursor:
            likes = graph.schema.atype("likes").number
            await cursor.execute(f"INSERT INTO tao_00000.assocs VALUES ({user}, {likes}, {user}, 3, 0, '')")
        connection.close()

        async def is_shown() -> bool:
            return await likes_of(graph, user) == (1, [(user, 3)])

        await until(is_shown)
