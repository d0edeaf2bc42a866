"""What a server samples, what its answers say of hot items, and what it leaves out because the caller has it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tao.model.writes import AssocAdd, ObjAdd
from tao.routing.read_rates import RateSettings
from tao.serving.traffic import MAX_REPORTED, Traffic, key_at
from tao.wire.read_batch import operation_sizes
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, USER, make_id
from tests.rigs.pacing import ManualClock
from tests.rigs.region_rig import RegionRig

A, B = make_id(64), make_id(128)


@pytest.fixture
async def region() -> AsyncIterator[RegionRig]:
    rig = RegionRig()
    await rig.start()
    yield rig
    assert await rig.close() == []


def mixed() -> pb.ReadBatch:
    return pb.ReadBatch(
        obj_ids=[A],
        count_id1s=[A, B],
        count_atypes=[5, 6],
        range_id1s=[A],
        range_atypes=[7],
        range_positions=[0],
        range_limits=[1],
        time_range_id1s=[B],
        time_range_atypes=[8],
        time_range_highs=[1],
        time_range_lows=[0],
        time_range_limits=[1],
        get_id1s=[A],
        get_atypes=[9],
        get_id2_counts=[0],
        get_highs=[1],
        get_lows=[0],
    )


def test_each_slot_is_about_its_object_or_list() -> None:
    batch = mixed()
    sizes = operation_sizes(batch)
    assert [key_at(batch, sizes, slot) for slot in range(6)] == [(A, 0), (A, 5), (B, 6), (A, 7), (B, 8), (A, 9)]
    with pytest.raises(IndexError):
        key_at(batch, sizes, 6)


@pytest.mark.parametrize("size", [1, 7, 100, 3_000])
def test_every_slot_is_sampled_as_often_as_it_is_read_at_any_batch_size(size: int) -> None:
    clock = ManualClock()
    traffic = Traffic(clock, RateSettings(queries_per_sample=16))
    batch = pb.ReadBatch(obj_ids=range(1, size + 1))
    sizes = operation_sizes(batch)
    for _ in range(200_000 // size):
        traffic.left -= size
        if traffic.left <= 0:
            traffic.sample(batch, sizes)
    report = traffic.most_read(10)
    reads = 200_000 // size * size
    assert report.read_rate == pytest.approx(reads * traffic.rates._per_second(clock.monotonic()), rel=0.05)
    if size <= 100:
        assert min(traffic.rates._counts.values()) > 0.6 * max(traffic.rates._counts.values())


def read(traffic: Traffic, object_id: int, times: int = 1) -> None:
    batch = pb.ReadBatch(obj_ids=[object_id])
    for _ in range(times):
        traffic.left -= 1
        if traffic.left <= 0:
            traffic.sample(batch, operation_sizes(batch))


def test_a_few_reads_a_second_are_all_counted() -> None:
    clock = ManualClock()
    traffic = Traffic(clock)
    for _ in range(120):
        read(traffic, A, 2)
        read(traffic, B)
        clock.now += 0.5
    report = traffic.most_read(10)
    assert list(report.key_ids) == [A, B]
    assert list(report.key_rates) == pytest.approx([4.0, 2.0], rel=0.1)
    assert report.read_rate == pytest.approx(6.0, rel=0.1)


def test_after_a_busy_time_the_first_reads_of_a_quiet_one_are_counted() -> None:
    clock = ManualClock()
    traffic = Traffic(clock)
    for _ in range(20):
        read(traffic, A, 20_000)
        clock.now += 0.5
    assert traffic.most_read(1).key_rates[0] == pytest.approx(40_000, rel=0.1)
    clock.now += 120.0
    assert not traffic.most_read(1).key_ids
    read(traffic, B, 3)
    assert list(traffic.most_read(1).key_ids) == [B]


def test_a_sudden_burst_is_sampled_as_rarely_as_a_busy_time() -> None:
    traffic = Traffic(ManualClock())
    samples = 0
    batch = pb.ReadBatch(obj_ids=[A])
    for _ in range(100_000):
        traffic.left -= 1
        if traffic.left <= 0:
            samples += 1
            traffic.sample(batch, operation_sizes(batch))
    assert samples < 1_000


def test_the_report_to_an_operator_is_bounded() -> None:
    traffic = Traffic(ManualClock())
    for number in range(5_000):
        traffic.rates.count((number + 1, 0), number, 1_000)
    report = traffic.most_read(100_000)
    assert len(report.key_ids) <= MAX_REPORTED
    assert len(report.shards) <= MAX_REPORTED
    assert traffic.summary()["keys"]


async def test_answers_name_the_queries_for_hot_items_and_for_no_others(region: RegionRig) -> None:
    near = region.near
    (user,) = await near.write(ObjAdd(A, USER, b"", allocated=False))
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    batch = pb.ReadBatch(obj_ids=[A, B], count_id1s=[A], count_atypes=[COMMENT])
    cold = (await near.ask(pb.Request(read=batch))).read
    assert not cold.hot_slots
    near.reads.traffic.rates.hot.update({(A, COMMENT): 60_000.4, (user.id, 0): 1_500.0})
    hot = (await near.ask(pb.Request(read=batch))).read
    assert list(zip(hot.hot_slots, hot.hot_rates, hot.slow_down_ms, strict=True)) == [(0, 1_500, 0), (2, 60_000, 6)]
    for_fill = pb.ReadBatch(obj_ids=[A], for_fill=True)
    assert not (await near.ask(pb.Request(read=for_fill))).read.hot_slots


async def test_a_value_that_the_caller_has_at_its_current_version_is_left_out(region: RegionRig) -> None:
    near = region.near
    await near.write(ObjAdd(A, USER, b"", allocated=False))
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    version = int.from_bytes((await near.read(obj_ids=[A]))[:8], "little")
    known = pb.ReadBatch(obj_ids=[A], minimum_slots=[0], minimum_versions=[version], known_slots=[0])
    assert list((await near.ask(pb.Request(read=known))).read.values) == [b""]
    merely_a_minimum = pb.ReadBatch(obj_ids=[A], minimum_slots=[0], minimum_versions=[version])
    assert (await near.ask(pb.Request(read=merely_a_minimum))).read.values[0]
    known.count_id1s.append(A)
    known.count_atypes.append(COMMENT)
    both = (await near.ask(pb.Request(read=known))).read
    assert [bool(value) for value in both.values] == [False, True]


async def test_an_older_version_is_answered_whole_and_a_later_one_is_fetched(region: RegionRig) -> None:
    near = region.near
    await near.write(ObjAdd(A, USER, b"", allocated=False))
    first = int.from_bytes((await near.read(obj_ids=[A]))[:8], "little")
    older = pb.ReadBatch(obj_ids=[A], minimum_slots=[0], minimum_versions=[first - 1], known_slots=[0])
    assert (await near.ask(pb.Request(read=older))).read.values[0]
    near.cache.bump_shard(0)
    missed = pb.ReadBatch(obj_ids=[A], minimum_slots=[0], minimum_versions=[first], known_slots=[0])
    answer = (await near.ask(pb.Request(read=missed))).read
    assert answer.values[0][:8] == first.to_bytes(8, "little"), "what is fetched is sent whole"


async def test_slots_that_do_not_exist_are_passed_over(region: RegionRig) -> None:
    await region.near.write(ObjAdd(A, USER, b"", allocated=False))
    wild = pb.ReadBatch(obj_ids=[A], minimum_slots=[7], minimum_versions=[1], known_slots=[7, 0, 1 << 31])
    assert (await region.near.ask(pb.Request(read=wild))).read.values[0]
