"""Changes of one list arrive in the wrong order, or twice.

leader                       follower, holds version 1
commits 2, then 3
  answer to the writer of 2 (slow) ─────────────┐
  message "3" ───────────→  holds 1, gets 3     │   a gap: the entry is dropped
                             re-reads: version 3│
                             ←──────────────────┘   "1 → 2": must change nothing

The follower leaves out of an answer what the message has brought, and nothing else.
"""

from __future__ import annotations

import asyncio

import pytest

from tao.model.changes import ShardMessages
from tao.model.graph import version_of
from tao.model.ids import shard_of
from tao.model.writes import AssocAdd, AssocDelete, ObjAdd
from tests.rigs.leader_rig import COMMENT, USER, make_id
from tests.rigs.pacing import until
from tests.rigs.region_rig import RegionRig

A, B = make_id(64), make_id(128)


async def test_an_earlier_change_that_arrives_last_changes_nothing(region: RegionRig) -> None:
    near, link = region.near, region.near.links["leader-1"]
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    assert await near.times(A, COMMENT) == [1]
    link.hold_answers |= {"write"}
    late = asyncio.ensure_future(near.write(AssocAdd(A, COMMENT, B + 1, 2, b"")))
    await until(lambda: link.held)
    await region.leader.write(AssocDelete(A, COMMENT, B + 1))
    await until(lambda: near.cache.floor_of_list(A, COMMENT) & 0xFFFF == 3)
    assert await near.times(A, COMMENT) == [1]
    link.let_go()
    await late
    assert version_of(near.cache.count(A, COMMENT) or b"") & 0xFFFF == 3
    assert await near.times(A, COMMENT) == [1], "what was deleted does not come back"
    assert version_of(near.cache.peek_list(A, COMMENT) or b"") & 0xFFFF == 3


async def test_every_change_arrives_twice_and_counts_once(region: RegionRig) -> None:
    """The change arrives with the writer's answer and with the leader's message."""
    near = region.near
    for time in range(1, 20):
        await near.write(AssocAdd(A, COMMENT, B + time, time, b""))
        assert await near.count(A, COMMENT) == time
    await until(lambda: near.subscriptions.messages >= 19)
    assert await near.times(A, COMMENT) == list(range(19, 0, -1))
    assert region.store.reads == [], "and nothing had to be read anew"


async def test_a_change_that_was_delivered_is_left_out_of_the_answer(
    region: RegionRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, applied = region.near, list[ShardMessages]()
    kept = near.writes._changes
    monkeypatch.setattr(near.writes, "_changes", kept._replace(apply=lambda messages, _: applied.append(messages)))
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    assert await near.times(A, COMMENT) == [1], "read from the leader, since the answer was not applied"
    await near.write(AssocAdd(A, COMMENT, B + 1, 2, b""))
    assert [len(messages.messages) for messages in applied] == [1, 0]
    assert await near.times(A, COMMENT) == [2, 1]


async def test_a_change_that_is_delivered_late_is_seen_when_its_write_is_answered(region: RegionRig) -> None:
    near, link = region.near, region.near.links["leader-1"]
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    link.hold_answers |= {"subscribe"}
    await near.write(AssocAdd(A, COMMENT, B + 1, 2, b""))
    assert await near.times(A, COMMENT) == [2, 1]
    link.let_go()
    await until(lambda: near.subscriptions.messages >= 2)
    assert await near.times(A, COMMENT) == [2, 1]
    assert region.store.reads == []


async def test_a_delivered_object_that_was_not_cached_is_inserted_by_the_answer(region: RegionRig) -> None:
    near, link = region.near, region.near.links["leader-1"]
    link.hold_answers |= {"write"}
    written = asyncio.ensure_future(near.write(ObjAdd(A, USER, b"", allocated=False)))
    await until(lambda: near.cache.floor_of_object(A))
    assert near.cache.object(A) is None, "a message changes only what is cached"
    link.let_go()
    await written
    assert near.cache.object(A) is not None


async def test_an_entry_that_was_dropped_after_the_delivery_does_not_come_back_with_the_answer(
    region: RegionRig,
) -> None:
    near, link = region.near, region.near.links["leader-1"]
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    link.hold_answers |= {"write"}
    late = asyncio.ensure_future(near.write(AssocAdd(A, COMMENT, B + 1, 2, b"")))
    await until(lambda: link.held)
    near.cache.bump_shard(shard_of(A))
    link.let_go()
    await late
    assert near.cache.peek_list(A, COMMENT) is None
    assert await near.times(A, COMMENT) == [2, 1]
