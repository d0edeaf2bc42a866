"""Counters at a follower: what it acknowledges, writes and answers, and what it refuses."""

from __future__ import annotations

import pytest

from tao.access.document import load_access
from tao.model.counters import FOLDED_SLOT, MAX_BY, MAX_COUNTED, SlotTotals, decode_totals, slot_of_life
from tao.model.errors import (
    InvalidArgument,
    NotMine,
    OperationTooOld,
    OutcomeUnknown,
    Overloaded,
    PermissionDenied,
    TaoError,
    TooLarge,
    UnknownType,
)
from tao.model.writes import AssocAdd, FlushCounter, FoldCounter
from tao.wire.convert import error_from_pb, write_to_pb
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, make_id
from tests.rigs.pacing import until
from tests.rigs.region_rig import FollowerRig, RegionRig

A, B, FAR = make_id(64), make_id(128), make_id(64, 1)
VIEWS, IMPRESSIONS = 401, 402
OTHERS = [slot_of_life(1_800_000_000, tag) for tag in (1, 2)]
"""Slots of other followers' lives."""


def adding(counted_id: int, by: int, counter: int = VIEWS) -> pb.Write:
    return pb.Write(counter_add=pb.CounterAdd(id=counted_id, atype=counter, by=by))


async def write(follower: FollowerRig, *writes: pb.Write) -> list[TaoError | None]:
    answer = (await follower.ask(pb.Request(write=pb.WriteBatch(writes=writes)))).write
    if answer.all_counted:
        return [None] * len(writes)
    found = dict(zip(answer.slots, answer.results, strict=True))
    results = [found[slot] for slot in range(len(writes))]
    return [error_from_pb(each.error) if each.HasField("error") else None for each in results]


async def value(follower: FollowerRig, counted_id: int = A, counter: int = VIEWS, *, critical: bool = False) -> int:
    asked = pb.GetCounters(ids=[counted_id], atypes=[counter], critical=critical)
    found = (await follower.ask(pb.Request(get_counters=asked))).counter_values
    for error in found.errors:
        raise error_from_pb(error)
    return found.values[0]


async def flushed(follower: FollowerRig) -> None:
    """Flush what is due, and wait for the outcome."""
    before = follower.counters.flushed + follower.counters.failed
    follower.counters.tick()
    await until(lambda: follower.counters.flushed + follower.counters.failed > before)


def slots(region: RegionRig, counted_id: int = A, counter: int = VIEWS) -> list[SlotTotals]:
    return [decode_totals(edge.data) for edge in region.store.edges(counted_id, counter)]


async def test_additions_are_counted_in_memory_and_flushed_as_totals(region: RegionRig) -> None:
    assert await write(region.near, adding(A, 3), adding(A, -1), adding(A, 0)) == [None, None, None]
    assert slots(region) == []
    assert await value(region.near) == 2
    await flushed(region.near)
    assert slots(region) == [SlotTotals(2)]
    assert await value(region.near) == await value(region.near, critical=True) == 2
    assert region.near.counters.summary() == {"held": 1, "queued": 0, "added": 3, "flushed": 1, "failed": 0, "lost": 0}


async def test_what_others_have_flushed_and_what_is_folded_counts_too(region: RegionRig) -> None:
    await write(region.near, adding(A, 5))
    await flushed(region.near)
    await region.leader.write(FlushCounter(A, VIEWS, OTHERS[0], 1, 10, 0))
    assert await value(region.near, critical=True) == 15
    (own,) = [edge.id2 for edge in region.store.edges(A, VIEWS) if edge.id2 not in OTHERS]
    await region.leader.write(FoldCounter(A, VIEWS, (own, OTHERS[0])))
    await write(region.near, adding(A, 1))
    assert await value(region.near, critical=True) == 16
    await region.near.counters.drain()
    assert sorted(slots(region), key=lambda each: each.value) == [
        SlotTotals(10, 0, 10),
        SlotTotals(6, 0, 5),
        SlotTotals(15),
    ]
    assert await value(region.near) == 16


async def test_a_batch_of_additions_and_other_writes_has_a_result_for_each(region: RegionRig) -> None:
    edge = write_to_pb(AssocAdd(A, COMMENT, B, 1, b""))
    errors = await write(region.near, adding(A, 1), edge, adding(A, MAX_BY + 1), adding(FAR, 1), adding(A, 1, COMMENT))
    assert [type(each) for each in errors] == [type(None), type(None), InvalidArgument, NotMine, UnknownType]
    assert await region.near.times(A, COMMENT) == [1]
    assert await value(region.near) == 1


async def test_flush_of_unknown_outcome_counts_once(region: RegionRig) -> None:
    await write(region.near, adding(A, 5))
    region.store.commit_fault = OutcomeUnknown("the answer was lost")
    await flushed(region.near)
    assert (region.near.counters.failed, slots(region)) == (1, [SlotTotals(5)])
    await region.leader.take(0)  # an unknown outcome has the shard taken again
    await write(region.near, adding(A, 2))
    await region.near.counters.drain()
    assert slots(region) == [SlotTotals(7)]


async def test_totals_wait_while_no_leader_can_be_reached(region: RegionRig) -> None:
    region.near.links["leader-1"].down = True
    await write(region.near, adding(A, 5))
    await flushed(region.near)
    await write(region.near, adding(A, 2))
    assert (region.near.counters.failed, slots(region)) == (1, [])
    region.near.links["leader-1"].down = False
    await region.near.counters.drain()
    assert slots(region) == [SlotTotals(7)]


async def test_a_follower_with_too_many_counters_is_overloaded_and_serves_those_that_it_holds(
    region: RegionRig,
) -> None:
    for number in range(8):  # the bound of the rig
        assert await write(region.near, adding(make_id(64 + number), 1)) == [None]
    errors = await write(region.near, adding(make_id(99), 1), adding(A, 1))
    assert [type(each) for each in errors] == [Overloaded, type(None)]
    await region.near.counters.drain()
    assert await write(region.near, adding(make_id(99), 1)) == [None]


async def test_a_value_saturates_and_an_addition_beyond_it_is_an_error(region: RegionRig) -> None:
    for slot in OTHERS:
        await region.leader.write(FlushCounter(A, VIEWS, slot, 1, MAX_COUNTED, 0))
    assert await value(region.near) == MAX_COUNTED
    assert await write(region.near, adding(A, MAX_BY), adding(A, MAX_BY - 1)) == [None, None]
    (error,) = await write(region.near, adding(A, 1))
    assert isinstance(error, TooLarge)


async def test_a_flush_that_no_leader_takes_is_given_up(region: RegionRig) -> None:
    await write(region.near, adding(A, 5))
    region.near.links["leader-1"].faults["write"] = [OperationTooOld("the life began too long ago")]
    region.near.counters.tick()
    await until(lambda: region.near.counters.summary()["lost"] == 5)
    await write(region.near, adding(A, 2))
    await region.near.counters.drain()
    assert slots(region) == [SlotTotals(2)]


async def test_a_change_is_published_when_it_is_a_share_of_the_value(region: RegionRig) -> None:
    await region.leader.write(FlushCounter(A, IMPRESSIONS, OTHERS[0], 1, 100_000, 0))
    assert await value(region.near, counter=IMPRESSIONS) == 100_000
    await write(region.near, adding(A, 99, IMPRESSIONS), adding(B, 1, IMPRESSIONS))
    await flushed(region.near)  # nobody has read B here, so its value is not known
    assert (len(slots(region, A, IMPRESSIONS)), slots(region, B, IMPRESSIONS)) == (1, [SlotTotals(1)])
    assert await value(region.near, counter=IMPRESSIONS) == 100_099
    await region.near.counters.drain()
    assert SlotTotals(99) in slots(region, A, IMPRESSIONS)


async def test_reads_name_what_cannot_be_read(region: RegionRig) -> None:
    asked = pb.GetCounters(ids=[A, FAR], atypes=[VIEWS, VIEWS])
    found = (await region.near.ask(pb.Request(get_counters=asked))).counter_values
    assert (list(found.failed_slots), list(found.values)) == ([1], [0, 0])
    assert isinstance(error_from_pb(found.errors[0]), NotMine)
    for wrong, error in (
        (pb.GetCounters(ids=[A], atypes=[COMMENT]), UnknownType),
        (pb.GetCounters(ids=[A]), InvalidArgument),
        (pb.GetCounters(ids=[A] * 6_001, atypes=[VIEWS] * 6_001), TooLarge),
    ):
        with pytest.raises(error):
            await region.near.ask(pb.Request(get_counters=wrong))
    assert (await region.near.ask(pb.Request(get_counters=pb.GetCounters()))).counter_values == pb.CounterValues()


async def test_rights_are_those_on_the_type_of_the_counter(region: RegionRig) -> None:
    rules = "format: 1\nversion: 1\nroles: {it: {write: {associations: [page.views]}}}\nanonymous: [it]\n"
    region.near.configuration.access.use_document(load_access(rules, "access.yaml"))
    errors = await write(region.near, adding(A, 1), adding(A, 1, IMPRESSIONS))
    assert [type(each) for each in errors] == [type(None), PermissionDenied]
    with pytest.raises(PermissionDenied):
        await value(region.near)
    rules = "format: 1\nversion: 2\nroles: {it: {read: {associations: [page.views]}}}\nanonymous: [it]\n"
    region.near.configuration.access.use_document(load_access(rules, "access.yaml"))
    assert await value(region.near) == 1
    with pytest.raises(PermissionDenied):
        await value(region.near, critical=True)
    assert [type(each) for each in await write(region.near, adding(A, 1))] == [PermissionDenied]


async def test_applications_cannot_send_flushes(region: RegionRig) -> None:
    (error,) = await write(region.near, write_to_pb(FlushCounter(A, VIEWS, OTHERS[0], 1, 5, 0)))
    assert isinstance(error, InvalidArgument)
    assert "counter_add" in error.message
    assert slots(region) == []
    assert FOLDED_SLOT == 0
