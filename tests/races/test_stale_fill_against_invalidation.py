"""A stale fill arrives after the invalidation of what it read: the classic bug of caches.

reader                     leader / database                writer
misses, asks the leader →
                           reads version 1
                           the answer is on its way
                                                            commits version 2
← message "version 2"
← the answer, version 1: must neither be kept nor answered
"""

from __future__ import annotations

import asyncio

from tao.model.writes import AssocAdd
from tests.rigs.leader_rig import COMMENT, make_id
from tests.rigs.pacing import Gate, quiet, until
from tests.rigs.region_rig import RegionRig

A, B = make_id(64), make_id(128)


async def test_a_fill_overtaken_by_a_message_is_neither_kept_nor_answered(region: RegionRig) -> None:
    near, link = region.near, region.near.links["leader-1"]
    await region.leader.write(AssocAdd(A, COMMENT, B, 1, b""))
    link.hold_answers.add("read")
    reading = asyncio.ensure_future(near.times(A, COMMENT))
    await until(lambda: link.held)
    await region.leader.write(AssocAdd(A, COMMENT, B + 1, 2, b""))
    await until(lambda: near.cache.floor_of_list(A, COMMENT) & 0xFFFF == 2)
    link.let_go()
    assert await reading == [2, 1]
    assert near.single_flight.refetched == 1
    assert await near.times(A, COMMENT) == [2, 1]


async def test_a_reader_who_joins_a_fetch_after_the_message_is_not_answered_with_an_older_version(
    region: RegionRig,
) -> None:
    near, link = region.near, region.near.links["leader-1"]
    await region.leader.write(AssocAdd(A, COMMENT, B, 1, b""))
    link.hold_answers.add("read")
    first = asyncio.ensure_future(near.times(A, COMMENT))
    await until(lambda: link.held)
    await near.write(AssocAdd(A, COMMENT, B + 1, 2, b""))
    second = asyncio.ensure_future(near.times(A, COMMENT))
    await quiet()
    assert near.single_flight.joined == 1
    link.let_go()
    assert await first == await second == [2, 1]


async def test_the_same_between_leader_and_database(region: RegionRig) -> None:
    gate = Gate()
    region.store.after_read = gate.pass_through
    reading = asyncio.ensure_future(region.near.times(A, COMMENT))
    await gate.arrived.wait()
    await region.leader.write(AssocAdd(A, COMMENT, B, 1, b""))
    # The entry that the leader's cache got with the write is evicted: the fill meets only the version floor.
    region.leader.cache.raise_list_floor(A, COMMENT, (1 << 48) + 1, region.leader.clock.monotonic())
    region.store.after_read = quiet
    gate.open()
    assert await reading == [1]


async def test_before_the_shard_is_open_no_floor_is_kept_so_no_reader_joins_a_fetch() -> None:
    """A follower has just started: its cache receives no messages yet, and a write through it is acknowledged while an
    older read is on its way."""
    region = RegionRig()
    near, link = region.near, region.near.links["leader-1"]
    link.hold_requests.add("subscribe")
    for name, leader in region.leaders.items():
        await leader.take(*near.configuration.routes.shards_of(name))
    near.subscriptions.follow_routes(near.configuration.routes)
    link.hold_answers.add("read")
    first = asyncio.ensure_future(near.times(A, COMMENT))
    await until(lambda: len(link.held) == 2)  # the subscription and the answer
    assert not near.cache.is_open(0)
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    second = asyncio.ensure_future(near.times(A, COMMENT))
    await until(lambda: len(link.held) == 3)
    assert not near.cache.is_open(0)
    for answer in link.held[1:]:
        answer()
    assert await second == [1]
    assert await first == []
    assert await region.close() == []
