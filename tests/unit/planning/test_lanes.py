"""The lanes in front of group commit, case by case."""

import sys

import pytest

from tao.model.errors import InternalError, Overloaded
from tao.planning.lanes import LaneScheduler

ONE = frozenset({1})


def offer(lanes: LaneScheduler, number: int, keys: str, shards: frozenset[int] = ONE, sub_write: bool = False) -> None:
    lanes.offer(number, "db1", frozenset(keys), shards, sub_write)


@pytest.fixture
def lanes() -> LaneScheduler:
    return LaneScheduler(2, 3, 8)


def test_waiting_writes_go_in_one_batch_up_to_its_bound(lanes: LaneScheduler) -> None:
    for number, key in enumerate("abcd"):
        offer(lanes, number, key)
    assert lanes.next_batch("db1") == [0, 1, 2]
    assert lanes.next_batch("db1") == [3]
    assert lanes.next_batch("db1") is None


def test_writes_of_one_key_share_a_batch_in_order_and_are_never_in_two_batches(lanes: LaneScheduler) -> None:
    for number in range(5):
        offer(lanes, number, "a")
    assert lanes.next_batch("db1") == [0, 1, 2]
    assert lanes.next_batch("db1") is None
    lanes.finish([0, 1, 2])
    assert lanes.next_batch("db1") == [3, 4]


def test_a_write_does_not_overtake_one_that_waits_for_another_key(lanes: LaneScheduler) -> None:
    offer(lanes, 1, "a")
    assert lanes.next_batch("db1") == [1]
    offer(lanes, 2, "ab")
    offer(lanes, 3, "b")
    offer(lanes, 4, "c")
    assert lanes.next_batch("db1") == [4]
    lanes.finish([1])
    assert lanes.next_batch("db1") == [2, 3]


def test_a_sub_write_goes_before_the_writes_that_wait_for_its_key_and_behind_earlier_sub_writes(
    lanes: LaneScheduler,
) -> None:
    for number in range(6):
        offer(lanes, number, "a")
    assert lanes.next_batch("db1") == [0, 1, 2]
    offer(lanes, 6, "a", sub_write=True)
    offer(lanes, 7, "ab", sub_write=True)
    offer(lanes, 8, "b")
    assert lanes.next_batch("db1") is None
    lanes.finish([0, 1, 2])
    assert lanes.next_batch("db1") == [6, 7, 3]
    lanes.finish([6, 7, 3])
    assert lanes.next_batch("db1") == [4, 5, 8]


def test_sub_writes_without_end_do_not_keep_another_write_waiting() -> None:
    lanes = LaneScheduler(1, 4, 100, max_overtaking=50)
    offer(lanes, 0, "ab")
    taken: list[int] = []
    for number in range(1, 200, 4):
        for each in range(number, number + 4):
            offer(lanes, each, "a", sub_write=True)
        batch = lanes.next_batch("db1")
        assert batch is not None
        taken += batch
        lanes.finish(batch)
    assert taken.index(0) == 50
    assert taken[48:52] == [49, 50, 0, 51]


def test_a_write_that_may_not_be_overtaken_any_more_goes_first_again_after_a_rollback() -> None:
    lanes = LaneScheduler(1, 2, 100, max_overtaking=1)
    offer(lanes, 1, "a")
    offer(lanes, 2, "a", sub_write=True)
    assert lanes.next_batch("db1") == [2, 1]
    offer(lanes, 3, "a", sub_write=True)
    assert lanes.requeue([2, 1], None) == []
    assert lanes.next_batch("db1") == [2, 1]


def test_a_requeued_write_stays_behind_a_sub_write_that_arrived_meanwhile(lanes: LaneScheduler) -> None:
    offer(lanes, 1, "ab")
    offer(lanes, 2, "a")
    assert lanes.next_batch("db1") == [1, 2]
    offer(lanes, 3, "b", sub_write=True)
    offer(lanes, 4, "a")
    assert lanes.requeue([1, 2], None) == []
    assert lanes.next_batch("db1") == [3, 1, 2]


def test_open_batches_never_exceed_the_number_of_lanes(lanes: LaneScheduler) -> None:
    for number, key in enumerate("abc"):
        offer(lanes, number, key)
        assert (lanes.next_batch("db1") is None) == (number == 2)
    lanes.finish([1])
    assert lanes.next_batch("db1") == [2]


def test_servers_have_lanes_of_their_own(lanes: LaneScheduler) -> None:
    lanes.offer(1, "db1", frozenset("a"), ONE, False)
    lanes.offer(2, "db2", frozenset("a"), ONE, False)
    assert lanes.next_batch("db1") == [1]
    assert lanes.next_batch("db2") == [2]
    assert lanes.next_batch("db3") is None


def test_the_bound_on_waiting_writes_of_a_shard_counts_sub_writes_separately(lanes: LaneScheduler) -> None:
    for number in range(8):
        offer(lanes, number, "a")
    with pytest.raises(Overloaded, match="shard 1"):
        offer(lanes, 8, "b", frozenset({1, 2}))
    for number in range(10, 18):
        offer(lanes, number, "a", sub_write=True)
    with pytest.raises(Overloaded):
        offer(lanes, 18, "a", sub_write=True)
    offer(lanes, 8, "b", frozenset({2}))
    assert lanes.withdraw(0)
    offer(lanes, 19, "a")


def test_a_requeued_batch_goes_before_writes_that_arrived_meanwhile(lanes: LaneScheduler) -> None:
    offer(lanes, 1, "ab", frozenset({1}))
    offer(lanes, 2, "b", frozenset({2}))
    offer(lanes, 3, "c", frozenset({1, 2}))
    assert lanes.next_batch("db1") == [1, 2, 3]
    offer(lanes, 4, "a")
    offer(lanes, 5, "b")
    assert lanes.requeue([1, 2, 3], 2) == [2, 3]
    assert lanes.next_batch("db1") == [1, 4, 5]
    assert not lanes.withdraw(2)


def test_a_withdrawn_write_unblocks_the_writes_behind_it(lanes: LaneScheduler) -> None:
    offer(lanes, 1, "a")
    assert lanes.next_batch("db1") == [1]
    offer(lanes, 2, "ab")
    offer(lanes, 3, "b")
    assert lanes.next_batch("db1") is None
    assert lanes.withdraw(2)
    assert not lanes.withdraw(2)
    assert lanes.next_batch("db1") == [3]
    assert not lanes.withdraw(3)


@pytest.mark.parametrize("batch", [[], [1], [2], [1, 2, 3], [9]])
def test_only_a_whole_open_batch_can_be_finished(lanes: LaneScheduler, batch: list[int]) -> None:
    offer(lanes, 1, "a")
    offer(lanes, 2, "a")
    assert lanes.next_batch("db1") == [1, 2]
    with pytest.raises(InternalError):
        lanes.finish(batch)
    lanes.finish([1, 2])


def test_a_sequence_number_is_used_once(lanes: LaneScheduler) -> None:
    offer(lanes, 1, "a")
    with pytest.raises(InternalError):
        offer(lanes, 1, "b")


def test_writes_withdrawn_while_every_lane_is_busy_do_not_accumulate() -> None:
    lanes = LaneScheduler(1, 1, 8)
    offer(lanes, 0, "a")
    assert lanes.next_batch("db1") == [0]
    offer(lanes, 1, "b")
    for number in range(2, 2000):
        offer(lanes, number, "c")
        assert lanes.withdraw(number)
    assert len(lanes._servers["db1"].ready) < 200
    assert len(lanes._servers["db1"].keys) == 2
    lanes.finish([0])
    assert lanes.next_batch("db1") == [1]


def test_the_cost_of_a_write_does_not_grow_with_the_queue_of_its_key() -> None:
    """The cost is counted in calls, which unlike time are the same on every machine."""

    def calls(waiting: int) -> int:
        lanes = LaneScheduler(2, 4, waiting)
        for number in range(waiting):
            offer(lanes, number, "a" + chr(200 + number % 50))
        count = 0

        def tally(_frame: object, event: str, _arg: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(tally)
        try:
            batch = lanes.next_batch("db1")
            assert batch is not None
            lanes.finish(batch)
        finally:
            sys.setprofile(None)
        return count

    assert calls(4000) <= calls(400) + 20
