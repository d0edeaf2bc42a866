"""The reader who started a fill is cancelled; the readers who joined it must still get their answer.

reader 1                 reader 2                the fill
misses, starts it →                              asks the leader …
                         misses, joins
is cancelled
                                                 ← answer
                         answered
"""

from __future__ import annotations

import asyncio

import pytest

from tao.model.errors import DeadlineExceeded
from tao.model.queries import ObjectQuery, RangeQuery
from tao.model.writes import AssocAdd
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.asking import answer
from tests.rigs.leader_rig import COMMENT, make_id
from tests.rigs.pacing import quiet, until
from tests.rigs.region_rig import RegionRig

A, B = make_id(64), make_id(128)


async def test_others_get_the_answer_and_the_cache_keeps_it(region: RegionRig) -> None:
    near, link = region.near, region.near.links["leader-1"]
    await region.leader.write(AssocAdd(A, COMMENT, B, 1, b""))
    link.hold_answers.add("read")
    query = RangeQuery(A, COMMENT, 0, 10)
    first, second = [asyncio.ensure_future(answer(near.reads.misses, query, 0, critical=False)) for _ in range(2)]
    await until(lambda: link.held)
    first.cancel()
    await quiet()
    assert not second.done()
    link.let_go()
    await second
    assert first.cancelled()
    assert near.single_flight.started == 1
    assert near.cache.peek_list(A, COMMENT) is not None


async def test_when_all_have_gone_the_fill_still_ends_and_is_kept(region: RegionRig) -> None:
    near, link = region.near, region.near.links["leader-1"]
    link.hold_answers.add("read")
    only = asyncio.ensure_future(answer(near.reads.misses, ObjectQuery(A), 0, critical=False))
    await until(lambda: link.held)
    only.cancel()
    await quiet()
    assert near.single_flight.under_way == 1
    link.let_go()
    await until(lambda: near.single_flight.under_way == 0)
    assert near.cache.peek_object(A) is not None


async def test_a_request_out_of_time_leaves_the_fill_to_the_others(region: RegionRig) -> None:
    near, link = region.near, region.near.links["leader-1"]
    link.hold_answers.add("read")
    patient = asyncio.ensure_future(near.times(A, COMMENT))
    await until(lambda: link.held)
    batch = pb.ReadBatch(range_id1s=[A], range_atypes=[COMMENT], range_positions=[0], range_limits=[9])
    late = (await near.ask(pb.Request(deadline_ms=1, read=batch))).read
    assert [error.reason for error in late.errors] == [DeadlineExceeded.reason]
    link.let_go()
    assert await patient == []


async def test_a_failed_fill_fails_all_its_waiters_and_no_later_reader(region: RegionRig) -> None:
    region.store.read_faults.append(ZeroDivisionError())
    near = region.near
    failed = await asyncio.gather(*(near.times(A, COMMENT) for _ in range(3)), return_exceptions=True)
    assert {type(error).__name__ for error in failed} == {"InternalError"}
    assert await near.times(A, COMMENT) == []
    with pytest.raises(ZeroDivisionError):
        raise region.leader.tasks.errors.pop()
