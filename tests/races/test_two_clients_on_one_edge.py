"""Two clients write the same edge at once; a third reads.

client 1                     client 2                database and every cache
add time 1                   add time 2              one of the two is the last, and the same one everywhere

Both write through near-1, the only home of the shard.
"""

from __future__ import annotations

import asyncio

from tao.model.writes import AssocAdd, AssocDelete
from tests.rigs.leader_rig import COMMENT, FRIEND, make_id
from tests.rigs.pacing import quiet, until
from tests.rigs.region_rig import RegionRig

A, B, FAR = make_id(64), make_id(128), make_id(64, 1)


async def test_the_answers_may_come_in_any_order_and_caches_still_end_with_the_last_commit(region: RegionRig) -> None:
    near, link = region.near, region.near.links["leader-1"]
    link.hold_answers.add("write")
    first = asyncio.ensure_future(near.write(AssocAdd(A, COMMENT, B, 1, b"")))
    await until(lambda: len(link.held) == 1)
    second = asyncio.ensure_future(near.write(AssocAdd(A, COMMENT, B, 2, b"")))
    await until(lambda: len(link.held) == 2)
    link.held.reverse()
    link.let_go()
    await asyncio.gather(first, second)
    assert [edge.time for edge in region.store.edges(A, COMMENT)] == [2]
    assert await near.times(A, COMMENT) == [2]


async def test_adds_in_one_transaction_are_one_version_and_the_last_wins(region: RegionRig) -> None:
    await region.near.write(*(AssocAdd(A, COMMENT, B, time, b"") for time in range(1, 6)))
    assert len(region.store.transactions) == 1
    assert await region.near.times(A, COMMENT) == [5]
    assert await region.near.count(A, COMMENT) == 1


async def test_each_client_reads_its_own_write_or_a_later_one(region: RegionRig) -> None:
    """Each client writes from one end of the edge, through two followers, while the other writes."""

    async def client(follower_of: int, ends: tuple[int, int], base: int) -> None:
        follower = region.near if follower_of == 1 else region.far
        for step in range(40):
            await follower.write(AssocAdd(ends[0], FRIEND, ends[1], base + step, b""))
            (found,) = await follower.times(ends[0], FRIEND)
            if found // 1000 == base // 1000:
                assert found >= base + step

    await asyncio.gather(client(1, (A, FAR), 1000), client(2, (FAR, A), 2000))
    await quiet()
    assert await region.near.times(A, FRIEND) == await region.far.times(FAR, FRIEND)


async def test_a_delete_of_a_deleted_edge_reports_that_and_its_writer_sees_it_gone(region: RegionRig) -> None:
    near = region.near
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    results = await asyncio.gather(*(near.write(AssocDelete(A, COMMENT, B)) for _ in range(3)))
    assert sorted(result.found for (result,) in results) == [False, False, True]
    assert await near.times(A, COMMENT) == []
