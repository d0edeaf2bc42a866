"""Another server of the tier serves the other end of an edge, and must know the change before the writer is answered.

writer                near-1 (has A)              near-2 (has B)             reader of the same tier
adds A friend B  →    leader commits both sides
                      hands B's change on   →     (slow)
                      must not answer yet
                                                  applies it
← acknowledged
                                                                             reads B's list: sees A
"""

from __future__ import annotations

import asyncio

from tao.model.writes import AssocAdd
from tao.serving.forward_path import ForwardSettings
from tests.rigs.leader_rig import FRIEND, make_id
from tests.rigs.pacing import quiet, until
from tests.rigs.region_rig import RegionRig

A, B = make_id(64, 0), make_id(64, 1)


async def test_the_writer_is_answered_when_the_other_end_s_server_knows(region: RegionRig) -> None:
    near, far = region.near, region.far
    far.links["leader-1"].hold_answers.add("subscribe")  # messages come later
    assert await far.times(B, FRIEND) == []
    link = near.links["near-2"]
    link.hold_requests.add("apply")
    writing = asyncio.ensure_future(near.write(AssocAdd(A, FRIEND, B, 1, b"")))
    await until(lambda: link.held)
    await quiet()
    assert not writing.done()
    assert await far.times(B, FRIEND) == [], "not acknowledged, not seen: nobody can complain"
    link.let_go()
    await writing
    assert await far.times(B, FRIEND) == [1]
    assert near.writes.siblings_missed == 0


async def test_the_wait_for_a_sibling_that_does_not_answer_is_bounded(region: RegionRig) -> None:
    near = region.near
    near.links["near-2"].down = True
    await near.write(AssocAdd(A, FRIEND, B, 1, b""))
    assert near.writes.siblings_missed == 1
    await until(lambda: region.far.cache.floor_of_list(B, FRIEND))
    assert await region.far.times(B, FRIEND) == [1], "the leader's message brought the edge"


async def test_a_request_to_a_sibling_has_its_own_bound(region: RegionRig) -> None:
    near = region.near
    await near.write(AssocAdd(A, FRIEND, B, 1, b""))
    applied = [sent for sent in near.links["near-2"].sent if sent.HasField("apply")]
    assert [sent.deadline_ms for sent in applied] == [int(ForwardSettings().sibling_timeout_seconds * 1000)]


async def test_when_no_task_can_wait_for_the_sibling_it_is_notified_and_the_writer_answered(region: RegionRig) -> None:
    near = region.near
    link = near.links["leader-1"]
    link.hold_answers.add("write")
    writing = asyncio.ensure_future(near.write(AssocAdd(A, FRIEND, B, 1, b"")))
    await until(lambda: link.held)
    near.tasks.refuses = True
    link.let_go()
    await writing
    near.tasks.refuses = False
    await quiet()
    assert await region.far.times(B, FRIEND) == [1]


async def test_a_mirror_that_arrives_after_a_later_write_of_its_list_is_passed_over(split_region: RegionRig) -> None:
    """Another change of B's list overtakes the change on its way through near-1."""
    near, far = split_region.near, split_region.far
    link = near.links["near-2"]
    link.hold_requests.add("apply")
    writing = asyncio.ensure_future(near.write(AssocAdd(A, FRIEND, B, 1, b"")))
    await until(lambda: link.held)
    await far.write(AssocAdd(B, FRIEND, make_id(65, 1), 2, b""))
    assert await far.times(B, FRIEND) == [2, 1]
    link.let_go()
    await writing
    assert await far.times(B, FRIEND) == [2, 1]
