"""An edge with an inverse is added from one end and deleted from the other at the same time.

    client at A                    client at B
    assoc_add(A, friend, B)        assoc_delete(B, friend, A)
      writes A's side                writes B's side
      writes B's side                writes A's side
    (without one coordinator: an edge at one side only, for ever)

A later write overtakes the copy from the coordinator's side to the other one:

    copier                         writer with both sides in one transaction
    reads A's side: time 1
                                   writes time 2 at both sides
    writes time 1 at B's side
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tao.model.errors import DatabaseDown, OutcomeUnknown
from tao.model.graph import Edge
from tao.model.rows import IntentRow
from tao.model.writes import AssocAdd, AssocDelete
from tests.rigs.leader_rig import FRIEND, LIKED_BY, LIKES, make_id
from tests.rigs.pacing import Gate, quiet, until
from tests.rigs.region_rig import RegionRig

A, B = make_id(64, 0), make_id(64, 1)


def sides(region: RegionRig, atype: int = FRIEND, inverse: int = FRIEND) -> tuple[list[int], list[int]]:
    def times(edges: list[Edge]) -> list[int]:
        return [edge.time for edge in edges]

    return times(region.store.edges(A, atype)), times(region.store.edges(B, inverse))


@pytest.mark.parametrize("seed", range(4))
async def test_after_any_order_both_ends_agree_in_database_and_caches(split_region: RegionRig, seed: int) -> None:
    region, rng = split_region, random.Random(seed)

    async def hammer(ends: tuple[int, int], atype: int) -> None:
        follower = region.near if ends[0] == A else region.far
        for step in range(30):
            if rng.random() < 0.5:
                await follower.write(AssocAdd(ends[0], atype, ends[1], step, b""))
            else:
                await follower.write(AssocDelete(ends[0], atype, ends[1]))

    await asyncio.gather(hammer((A, B), LIKES), hammer((B, A), LIKED_BY), hammer((A, B), LIKES))
    await until(lambda: not region.store.rows.intents)
    near, far = sides(region, LIKES, LIKED_BY)
    assert near == far
    await quiet()
    assert await region.near.times(A, LIKES) == near
    assert await region.far.times(B, LIKED_BY) == near


async def test_a_later_write_from_the_other_end_waits_for_the_mirror_of_the_earlier(split_region: RegionRig) -> None:
    region = split_region
    gate = region.others.gate = Gate()
    adding = asyncio.ensure_future(region.near.write(AssocAdd(A, FRIEND, B, 1, b"")))
    await gate.arrived.wait()
    deleting = asyncio.ensure_future(region.far.write(AssocDelete(B, FRIEND, A)))
    await quiet()
    assert sides(region) == ([1], [])
    gate.open()
    await asyncio.gather(adding, deleting)
    assert sides(region) == ([], [])


async def test_a_copy_that_may_still_arrive_keeps_the_pair_closed(split_region: RegionRig) -> None:
    """The answer of the copy is lost: the other leader may write it at any moment of the next seconds."""
    region = split_region
    region.others.faults.append(OutcomeUnknown("the connection broke"))
    (result,) = await region.near.write(AssocAdd(A, FRIEND, B, 1, b""))
    assert result.inverse_pending
    assert region.leader.inverses.pairs_held == 1


async def test_an_edge_that_is_not_yet_at_the_end_that_its_writer_named_is_not_acknowledged(
    split_region: RegionRig,
) -> None:
    """A writer with an acknowledgement reads that list next, critically or with the write's token."""
    region = split_region
    region.others.faults.append(DatabaseDown("which nobody waits for"))
    with pytest.raises(OutcomeUnknown, match="repair will write it at its id1"):
        await region.far.write(AssocAdd(B, FRIEND, A, 1, b""))
    assert sides(region) == ([1], [])
    assert await region.near.times(A, FRIEND) == [1]


async def test_a_copy_is_not_made_from_rows_that_a_write_of_both_sides_is_changing(region: RegionRig) -> None:
    intent = IntentRow(A, B, (FRIEND,), 1, 0)
    gate = Gate()
    region.store.before_commit = gate.pass_through
    writing = asyncio.ensure_future(region.leader.write(AssocAdd(A, FRIEND, B, 2, b"")))
    await gate.arrived.wait()
    copy_gate = region.others.gate = Gate()
    copying = asyncio.ensure_future(region.leader.inverses.settle_pair(intent, 5.0))
    await quiet()
    region.store.before_commit = quiet
    gate.open()
    await writing
    copy_gate.open()
    assert await copying
    assert sides(region) == ([2], [2])
