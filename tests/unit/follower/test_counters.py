"""Counters at a follower: what it acknowledges, writes and answers, and what it refuses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from tao.access.document import load_access
from tao.follower import counters as of_follower
from tao.model.counters import FOLDED_SLOT, MAX_BY, MAX_COUNTED, SlotTotals, decode_totals, slot_of_life
from tao.model.errors import (
    AnswerFull,
    InvalidArgument,
    NotMine,
    OperationTooOld,
    OutcomeUnknown,
    Overloaded,
    PermissionDenied,
    TaoError,
    TooLarge,
    Unavailable,
    UnknownType,
)
from tao.model.writes import AssocAdd, FlushCounter, FoldCounter
from tao.wire.convert import error_from_pb, write_to_pb
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, make_id, make_topology
from tests.rigs.pacing import until
from tests.rigs.region_rig import FollowerRig, RegionRig

A, B, FAR, THIRD = make_id(64), make_id(128), make_id(64, 1), make_id(64, 2)
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


def set_settings(follower: FollowerRig, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    monkeypatch.setattr(follower.counters, "_settings", replace(follower.counters._settings, **changes))


class LogLines(list[tuple[str, dict[str, Any]]]):
    """What is logged, whatever its level."""

    def error(self, event: str, **values: Any) -> None:
        self.append((event, values))

    warning = error


def slots(region: RegionRig, counted_id: int = A, counter: int = VIEWS) -> list[SlotTotals]:
    return [decode_totals(edge.data) for edge in region.store.edges(counted_id, counter)]


async def test_additions_are_counted_in_memory_and_flushed_as_totals(region: RegionRig) -> None:
    assert await write(region.near, adding(A, 3), adding(A, -1), adding(A, 0)) == [None, None, None]
    assert slots(region) == []
    assert await value(region.near) == 2
    await flushed(region.near)
    assert slots(region) == [SlotTotals(2)]
    assert await value(region.near) == await value(region.near, critical=True) == 2
    assert region.near.counters.summary() == {
        "held": 1,
        "queued": 0,
        "batches_under_way": 0,
        "added": 3,
        "flushed": 1,
        "failed": 0,
        "lost": 0,
    }


async def test_what_is_being_written_is_told_apart_from_what_waits(region: RegionRig) -> None:
    await write(region.near, adding(A, 3))
    waiting = region.near.counters.summary()
    region.near.counters.tick()
    writing = region.near.counters.summary()
    await until(lambda: region.near.counters.flushed == 1)
    written = region.near.counters.summary()
    shown = [(each["queued"], each["batches_under_way"], each["flushed"]) for each in (waiting, writing, written)]
    assert shown == [(1, 0, 0), (0, 1, 0), (0, 0, 1)]


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
    region.near.links["leader-1"].down = True
    for number in range(8):  # the bound of the rig
        assert await write(region.near, adding(make_id(64 + number), 1)) == [None]
    await flushed(region.near)
    for _ in range(3):
        region.near.counters.tick()
        errors = await write(region.near, adding(make_id(99), 1), *(adding(make_id(64 + each), 1) for each in range(8)))
        assert [type(each) for each in errors] == [Overloaded] + [type(None)] * 8
    region.near.links["leader-1"].down = False

    def is_written() -> bool:
        region.near.counters.tick()
        return region.near.counters.summary()["held"] < 8

    await until(is_written)
    assert await write(region.near, adding(make_id(99), 1)) == [None]


async def test_batches_that_fail_together_make_one_pause(region: RegionRig, monkeypatch: pytest.MonkeyPatch) -> None:
    set_settings(region.near, monkeypatch, retry_seconds=50.0)
    log = LogLines()
    monkeypatch.setattr(region.near.counters, "_log", log)
    region.near.links["leader-1"].down = True
    await write(region.near, *(adding(make_id(64 + number), 1) for number in range(4)))
    region.near.counters.tick()
    await until(lambda: region.near.counters.failed == 4)  # two batches
    assert [(event, values["seconds"]) for event, values in log] == [("counters_wait", 50.0)]


async def test_a_stop_writes_what_a_pause_holds_back_and_counts_no_more(
    region: RegionRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_settings(region.near, monkeypatch, retry_seconds=50.0)
    region.near.links["leader-1"].down = True
    await write(region.near, adding(A, 5), adding(A, 1, IMPRESSIONS))
    await flushed(region.near)
    await write(region.near, adding(A, 2))
    region.near.links["leader-1"].down = False
    await region.near.counters.drain()
    assert (slots(region), slots(region, A, IMPRESSIONS)) == ([SlotTotals(7)], [SlotTotals(1)])
    errors = await write(region.near, adding(A, 1), write_to_pb(AssocAdd(A, COMMENT, B, 1, b"")))
    assert [type(each) for each in errors] == [Unavailable, type(None)]
    assert await value(region.near) == 7


async def test_pauses_stay_short_during_a_stop(region: RegionRig) -> None:
    region.near.links["leader-1"].down = True
    await write(region.near, adding(A, 5))
    drained = asyncio.ensure_future(region.near.counters.drain())
    await until(lambda: region.near.counters.failed >= 13 or drained.done())  # doubled, it would be 4 s
    region.near.links["leader-1"].down = False
    await drained
    assert slots(region) == [SlotTotals(5)]


async def test_a_leader_that_does_not_answer_delays_no_flush_to_another(region: RegionRig) -> None:
    topology = make_topology(2, near={1: ("near-2",)}, leaders={2: ("leader-2",)})
    region.near.configuration.use_topology(topology)
    region.near.links["leader-2"].hold_requests.add("write")
    await write(region.near, adding(A, 1), adding(THIRD, 1))
    region.near.counters.tick()
    await until(lambda: region.near.counters.flushed or region.near.counters.failed)
    assert (region.near.counters.flushed, region.near.counters.failed) == (1, 0)


async def test_a_leader_that_fails_gets_one_batch_at_a_time(region: RegionRig, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = make_topology(2, near={1: ("near-2",)}, leaders={2: ("leader-2",)})
    region.near.configuration.use_topology(topology)
    counters, link = region.near.counters, region.near.links["leader-2"]
    monkeypatch.setattr(counters, "_settings", replace(counters._settings, max_batch_flushes=1))
    link.faults["write"] = [Unavailable("away")]
    await write(region.near, adding(THIRD, 1))
    counters.tick()
    await until(lambda: counters.failed)
    link.hold_requests.add("write")
    monkeypatch.setattr(counters, "_paused", {})  # the pause is over
    assert await write(region.near, *(adding(make_id(number, 2), 1) for number in (65, 66, 67))) == [None] * 3
    counters._totals._queues[VIEWS].begun_at = -inf
    counters.tick()
    assert counters._under_way["leader-2"] == 1
    counters._failing.clear()
    counters._totals._queues[VIEWS].begun_at = -inf
    counters.tick()
    assert counters._under_way["leader-2"] == 2, "one that answers gets all"


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


async def test_what_is_given_up_is_logged_in_one_line(region: RegionRig, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogLines()
    monkeypatch.setattr(region.near.counters, "_log", log)
    await write(region.near, adding(A, 5), adding(B, 4))
    region.near.links["leader-1"].faults["write"] = [OperationTooOld("the life began too long ago")]
    region.near.counters.tick()
    await until(lambda: region.near.counters.summary()["lost"] == 9)
    await write(region.near, adding(A, 2))
    monkeypatch.setattr(region.near.counters, "_options", lambda _: None)  # the counter has left the schema
    region.near.counters.tick()
    region.near.counters.tick()
    reason = {"reason": "the life began too long ago"}
    assert log == [("counter_lost", {"counters": 3, "lost_in_all": 11} | reason)]


async def test_a_read_does_not_miss_what_leaves_the_memory_meanwhile(
    region: RegionRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write(region.near, adding(A, 5))
    region.near.links["leader-1"].hold_answers.add("read")
    reading = asyncio.ensure_future(value(region.near, critical=True))
    await until(lambda: region.near.links["leader-1"].held)
    monkeypatch.setattr(region.near.counters._totals, "_life_seconds", 0.0)  # the life is over
    await flushed(region.near)
    assert region.near.counters.summary()["held"] == 0
    region.near.links["leader-1"].let_go()
    assert await reading == 5
    assert await value(region.near, critical=True) == 5


async def test_one_request_decodes_a_bounded_number_of_slots(
    region: RegionRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = [make_id(64 + number) for number in range(4)]
    for each in counted:
        await region.leader.write(FlushCounter(each, VIEWS, OTHERS[0], 1, 10, 0))
        await region.leader.write(FlushCounter(each, VIEWS, OTHERS[1], 1, 1, 0))
    monkeypatch.setattr(of_follower, "_MAX_DECODED", 5)
    asked = pb.GetCounters(ids=counted, atypes=[VIEWS] * 4, critical=True)
    found = (await region.near.ask(pb.Request(get_counters=asked))).counter_values
    assert (list(found.values), list(found.failed_slots)) == ([11, 11, 0, 0], [2, 3])
    assert all(isinstance(error_from_pb(each), AnswerFull) for each in found.errors)
    monkeypatch.setattr(of_follower, "_MAX_DECODED", 1)
    assert await value(region.near) == 11, "one counter is always answered"


async def test_max_behind_counts_the_round_and_the_attempt(region: RegionRig) -> None:
    asked = pb.GetCounters(ids=[A, A], atypes=[VIEWS, IMPRESSIONS], critical=True)
    found = (await region.near.ask(pb.Request(get_counters=asked))).counter_values
    assert list(found.max_behind_ms) == [1_301, 61_301]


async def test_a_change_is_published_when_it_is_a_share_of_the_value(region: RegionRig) -> None:
    await region.leader.write(FlushCounter(A, IMPRESSIONS, OTHERS[0], 1, 100_000, 0))
    assert await value(region.near, counter=IMPRESSIONS) == 100_000
    await write(region.near, adding(A, 99, IMPRESSIONS), adding(B, 1, IMPRESSIONS))
    await flushed(region.near)  # nobody has read B here, so its value is not known
    assert (len(slots(region, A, IMPRESSIONS)), slots(region, B, IMPRESSIONS)) == (1, [SlotTotals(1)])
    assert await value(region.near, counter=IMPRESSIONS) == 100_099
    await region.near.counters.drain()
    assert SlotTotals(99) in slots(region, A, IMPRESSIONS)


async def test_a_share_is_that_of_what_was_flushed_where_nobody_reads(
    region: RegionRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region.near.counters, "_cache", type("", (), {"peek_list": lambda *_: None}))
    set_settings(region.near, monkeypatch, max_batches=1)
    monkeypatch.setattr(of_follower, "MAX_FLUSH_SECONDS", 1e9)
    totals = region.near.counters._totals
    await write(region.near, adding(A, 10_000, IMPRESSIONS))
    await flushed(region.near)
    totals._queues[IMPRESSIONS].begun_at = float("-inf")  # the next round is due
    await write(region.near, adding(A, 9, IMPRESSIONS))
    region.near.counters.tick()
    assert totals.queued == 1, "9 are less than a thousandth"
    totals._queues[IMPRESSIONS].begun_at = float("-inf")
    await write(region.near, adding(A, 1, IMPRESSIONS))
    await flushed(region.near)
    assert slots(region, A, IMPRESSIONS) == [SlotTotals(10_010)]


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
