"""A refill in the background is a fill like any other: a change that overtakes it wins.

follower                      leader                        writer
its prefix gets short
asks for a longer one →
                              reads version 1
                              the answer is on its way
                                                            commits version 2
← message "version 2"
← the answer, version 1: must not be kept
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tao.model.edge_block import decode_block, header
from tao.model.writes import AssocAdd, AssocDelete
from tao.serving.single_flight import FillSettings
from tests.rigs.leader_rig import COMMENT, make_id
from tests.rigs.pacing import quiet, until
from tests.rigs.region_rig import FollowerRig, RegionRig

A, B = make_id(64), make_id(128)
FULL = FillSettings().min_prefix_edges + 1
LENGTH = FULL + 20
LEFT = LENGTH - FULL // 2 - 1


@pytest.fixture
async def short(region: RegionRig) -> AsyncIterator[FollowerRig]:
    """Make a follower whose prefix of a long list has just become short; the answer to its request for more is held
    back."""
    near = region.near
    await asyncio.gather(*(region.leader.write(AssocAdd(A, COMMENT, B + n, n + 1, b"")) for n in range(LENGTH)))
    await near.read(range_id1s=[A], range_atypes=[COMMENT], range_positions=[0], range_limits=[1])
    assert held(near) == times(LENGTH, FULL)
    near.links["leader-1"].hold_answers.add("read")
    newest = range(LEFT, LENGTH)
    await near.write(*(AssocDelete(A, COMMENT, B + n) for n in newest))
    await until(lambda: near.links["leader-1"].held)
    yield near
    assert near.single_flight.started == 1, "nobody had to ask: there was one fill, and refills"


def times(newest: int, count: int) -> list[int]:
    return list(range(newest, newest - count, -1))


def held(near: FollowerRig) -> list[int]:
    return [edge.time for edge in decode_block(near.cache.peek_list(A, COMMENT) or b"\0" * 24)]


async def test_a_refill_that_a_change_has_overtaken_is_not_kept_and_tried_again(short: FollowerRig) -> None:
    await short.write(AssocDelete(A, COMMENT, B + LEFT - 1))
    short.links["leader-1"].let_go()
    await until(lambda: short.refills.outcomes["overtaken"])
    assert held(short)[0] == LEFT - 1, "the edge that is gone does not come back"
    await until(lambda: short.refills.outcomes["kept"])
    assert held(short) == times(LEFT - 1, LEFT - 1)


async def test_an_overtaken_refill_is_not_kept_when_what_it_would_replace_is_gone(short: FollowerRig) -> None:
    """Only the version floor remembers the change."""
    version, *_ = header(short.cache.peek_list(A, COMMENT) or b"")
    short.cache.raise_list_floor(A, COMMENT, version + 1, 0.0)
    assert short.cache.peek_list(A, COMMENT) is None
    short.links["leader-1"].let_go()
    await until(lambda: short.refills.outcomes["overtaken"])
    assert short.cache.peek_count(A, COMMENT) is None


async def test_a_refill_from_before_a_bulk_invalidation_is_not_kept(short: FollowerRig) -> None:
    short.cache.bump_shard(0)
    short.links["leader-1"].let_go()
    await until(lambda: short.refills.outcomes["not_kept"])
    await quiet()
    assert short.cache.peek_list(A, COMMENT) is None


async def test_no_reader_waits_for_a_refill(short: FollowerRig) -> None:
    page = await short.read(range_id1s=[A], range_atypes=[COMMENT], range_positions=[0], range_limits=[10])
    assert [edge.time for edge in decode_block(page)] == times(LEFT, 10)
    short.links["leader-1"].let_go()
    await until(lambda: short.refills.outcomes["kept"])
    assert held(short) == times(LEFT, LEFT)
