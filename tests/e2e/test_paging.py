"""Paging through a list during concurrent writes, on real processes: by cached prefixes, and by the index behind
them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from tao.client import SyncGraph, connect
from tao.devcluster.layout import Shape
from tests.e2e.cluster_access import PACE_SECONDS, PATIENT, running_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.database]

SHAPE = Shape(tiers=2, followers=1, leaders=1, databases=1, shards=4)
STEADY = 900  # beyond the limit of `note`, which is 500


async def test_every_edge_present_throughout_comes_once_whichever_server_answers_each_page(tmp_path: Path) -> None:
    async with (
        running_cluster(tmp_path / "cluster", SHAPE) as cluster,
        connect(str(cluster.topology_path), settings=PATIENT) as near,
        connect(str(cluster.topology_path), tier="tier-2", settings=PATIENT) as far,
    ):
        id1 = await near.obj_add("user", {"name": "whale"})
        others = await near.reserve_ids(STEADY, near=id1)
        # Five hundred edges have one time, which is more than a page; the others share a time by threes.
        edges = [(id1, "note", id2, 50 if place < 500 else place // 3) for place, id2 in enumerate(others)]
        await near.assoc_add_many(edges)
        in_order = sorted(((time, id2) for _, _, id2, time in edges), reverse=True)
        passing = await near.reserve_ids(40, near=id1)

        async def write() -> None:
            """Add and delete edges at all positions of the list."""
            for step in count():
                id2 = passing[step % len(passing)]
                await far.assoc_add(id1, "note", id2, time=step * 7 % 320)
                await far.assoc_delete(id1, "note", passing[(step + 20) % len(passing)])
                await asyncio.sleep(PACE_SECONDS / 4)

        writer = asyncio.create_task(write())
        try:
            for graph, page in ((near, 37), (far, 500), (near, 1000)):
                walked = [(edge.time, edge.id2) async for edge in graph.assoc_iter(id1, "note", page=page)]
                assert walked == sorted(set(walked), reverse=True)
                assert [place for place in walked if place[1] in set(others)] == in_order
            cursor, walked = None, []
            for turn in count():
                found = await (near, far)[turn % 2].assoc_page(id1, "note", 64, cursor, 280, 40)
                walked += [(edge.time, edge.id2) for edge in found.edges if edge.id2 in set(others)]
                cursor = found.cursor
                if cursor is None:
                    break
            assert walked == [place for place in in_order if 280 >= place[0] >= 40]
        finally:
            writer.cancel()
            with suppress(asyncio.CancelledError):
                await writer
        await asyncio.to_thread(walk_without_a_loop, str(cluster.topology_path), id1, in_order, set(others))


def walk_without_a_loop(target: str, id1: int, in_order: list[tuple[int, int]], steady: set[int]) -> None:
    with SyncGraph(target, settings=PATIENT) as graph:
        walked = [(edge.time, edge.id2) for edge in graph.assoc_iter(id1, "note", page=100) if edge.id2 in steady]
    assert walked == in_order
