"""Lists that are full and lists that are trimmed, on real servers: two databases, two leaders, two tiers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from tao.client import ClientSettings, Graph, ListFull, SomeFailed, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape
from tao.schema.types import KEEP_SLACK
from tests.e2e.cluster_access import assert_converges
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="module"),
]

MOST, KEEP = 5, 10
SCHEMA = f"""
format: 1
objects:
  user: {{number: 1}}
associations:
  follows: {{number: 1, inverse: followed_by, max_edges: {MOST}}}
  followed_by: {{number: 2, inverse: follows}}
  inbox: {{number: 3, keep: {KEEP}}}
  pins: {{number: 4, max_edges: {MOST}, states: {{archived: 41, removed: 42}}}}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    schema = folder / "bounded.yaml"
    schema.write_text(SCHEMA)
    settings = ClusterSettings(
        state_dir=folder / "state",
        shape=Shape(tiers=2, followers=1, leaders=2, databases=2, shards=8),
        schema_file=schema,
        durability=Durability.RELAXED,
    )
    async with DevCluster(settings) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def graphs(cluster: DevCluster) -> AsyncIterator[list[Graph]]:
    settings = ClientSettings(timeout_seconds=PATIENT_SECONDS, connect_timeout_seconds=PATIENT_SECONDS)
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(connect(str(cluster.topology_path), tier=tier, settings=settings))
            for tier in ("tier-1", "tier-2")
        ]


async def test_concurrent_adds_from_both_ends_fill_a_list_and_no_more(cluster: DevCluster, graphs: list[Graph]) -> None:
    """Half of the users live in the other database, so half of the adds are written at one end before the other."""
    near, far = graphs
    users = [int(each) for each in await near.obj_add_many([("user", {})] * 24)]
    for reader in users[:4]:
        others = [each for each in users if each != reader]
        results = await asyncio.gather(
            *(near.assoc_add(reader, "follows", each) for each in others[::2]),
            *(far.assoc_add(each, "followed_by", reader) for each in others[1::2]),
            return_exceptions=True,
        )
        assert sum(not isinstance(each, BaseException) for each in results) == MOST
        assert {type(each) for each in results if isinstance(each, BaseException)} == {ListFull}
        found = await near.assoc_range(reader, "follows", 0, 100, critical=True)
        assert len(found) == found.list_count == MOST
        for each in others:
            follows = each in found.id2s
            assert await near.assoc_exists(reader, "follows", each, critical=True) is follows
            assert await far.assoc_exists(each, "followed_by", reader, critical=True) is follows
        await near.assoc_delete(reader, "follows", found.id2s[0])
        free = next(each for each in others if each not in found.id2s)
        await far.assoc_add(free, "followed_by", reader)
        with pytest.raises(SomeFailed):
            await near.assoc_add_many([(reader, "follows", each) for each in others])
    await assert_converges(cluster)


async def test_normal_edges_are_counted_and_restored_ones_may_exceed_the_bound(
    cluster: DevCluster, graphs: list[Graph]
) -> None:
    near, far = graphs
    owner, *pages = (int(each) for each in await near.obj_add_many([("user", {})] * 13))
    adds = (graph.assoc_add(owner, "pins", page) for graph, page in zip(graphs * 6, pages, strict=True))
    results = await asyncio.gather(*adds, return_exceptions=True)
    assert sum(not isinstance(each, BaseException) for each in results) == MOST
    assert {type(each) for each in results if isinstance(each, BaseException)} == {ListFull}
    pinned = (await near.assoc_range(owner, "pins", 0, 100, critical=True)).id2s
    assert len(pinned) == MOST
    await near.assoc_archive(owner, "pins", pinned[0])
    other = next(page for page in pages if page not in pinned)
    await far.assoc_add(owner, "pins", other)
    with pytest.raises(ListFull):
        await near.assoc_add(owner, "pins", pinned[0])
    await near.assoc_restore(owner, "pins", pinned[0])
    found = await near.assoc_range(owner, "pins", 0, 100, critical=True)
    assert set(found.id2s) == {*pinned, other}
    assert found.list_count == MOST + 1
    await assert_converges(cluster)


async def test_a_list_that_keeps_its_newest_edges_is_trimmed_in_every_cache(
    cluster: DevCluster, graphs: list[Graph]
) -> None:
    near, far = graphs
    owner = int(await near.obj_add("user", {}))
    await asyncio.gather(*(graph.assoc_range(owner, "inbox", 0, 1_000) for graph in graphs))
    for time in range(1, 2 * (KEEP + KEEP_SLACK)):
        await near.assoc_add(owner, "inbox", 1_000 + time, time)
        if time % 20 == 0:
            newest = await near.assoc_range(owner, "inbox", 0, 1_000)
            assert newest.times == list(range(time, time - len(newest), -1))
            assert min(time, KEEP) <= len(newest) == newest.list_count <= KEEP + KEEP_SLACK
    await near.assoc_add(owner, "inbox", 1_001, 1)
    assert not await near.assoc_exists(owner, "inbox", 1_001), "what was trimmed is not restored"
    held = await near.assoc_range(owner, "inbox", 0, 1_000)
    elsewhere = await far.assoc_range(owner, "inbox", 0, 1_000, after=near.token)
    assert elsewhere.id2s == held.id2s
    await assert_converges(cluster)
