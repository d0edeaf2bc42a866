"""What a follower holds of counters: rounds, lives, repetitions and bounds, in the time that the test gives."""

from __future__ import annotations

import itertools

import pytest

from tao.follower.counter_totals import CounterTotals, Flush, Held, Looks
from tao.model.counters import MAX_COUNTED
from tao.model.errors import Overloaded, TooLarge
from tao.schema.types import CounterOptions

VIEWS, PLAYS = 401, 402
A, B = (64, VIEWS), (65, VIEWS)
OPTIONS = {VIEWS: CounterOptions(1.0), PLAYS: CounterOptions(5.0)}


def totals(max_counters: int = 100, life_seconds: float = 60.0) -> CounterTotals:
    slots = itertools.count(1)
    return CounterTotals(max_counters, life_seconds, lambda: next(slots), 0.0)


def wanted(_: Held, __: CounterOptions) -> bool:
    return True


def take(counted: CounterTotals, now: float, room: int = 100) -> list[Flush]:
    return counted.take_due(OPTIONS.get, wanted, now, room, Looks(1_000))


def nets(counted: CounterTotals, key: tuple[int, int]) -> dict[int, int]:
    """Return what is held of a counter, by slot."""
    return {slot: plus - minus for slot, (plus, minus) in counted.by_slot(key).items()}


def write_all(counted: CounterTotals, now: float) -> None:
    for each in take(counted, now):
        counted.done(each, now)


def said(flushes: list[Flush]) -> list[tuple[int, int, int, int, int]]:
    """Return what flushes say: id, slot, number and totals."""
    return [(each.held.key[0], each.held.life.slot, each.number, each.plus, each.minus) for each in flushes]


def test_hot_counter_is_written_once_per_flush() -> None:
    counted = totals()
    flushes = []
    for tick in range(40):  # four seconds
        now = tick / 10
        for _ in range(1_000):
            counted.add(A, 1, now)
        due = take(counted, now)
        for each in due:
            counted.done(each, now)
        flushes += due
    assert said(flushes) == [(64, 1, number, (number - 1) * 10_000 + 1_000, 0) for number in (1, 2, 3, 4)]


def test_a_repeated_flush_says_the_same_and_more_with_a_higher_number() -> None:
    counted = totals()
    counted.add(A, 5, 0.0)
    (first,) = take(counted, 0.0)
    counted.add(A, -2, 0.1)
    assert take(counted, 1.0) == []  # one flush of a counter is under way at a time
    counted.failed(first)
    (second,) = take(counted, 1.0)
    assert said([first, second]) == [(64, 1, 1, 5, 0), (64, 1, 2, 5, 2)]
    counted.done(second, 1.1)
    assert (take(counted, 9.0), counted.queued, counted.held) == ([], 0, 1)


def test_each_counter_has_its_own_round_and_a_round_may_come_in_parts() -> None:
    counted = totals()
    for key in (A, B, (66, PLAYS)):
        counted.add(key, 1, 0.0)
    parts = [take(counted, 0.0, room=2), take(counted, 0.0, room=2)]
    assert [[each.held.key for each in part] for part in parts] == [[A, B], [(66, PLAYS)]]
    for part in parts:
        for each in part:
            counted.done(each, 0.0)
    for key in (A, (66, PLAYS)):
        counted.add(key, 1, 0.5)
    assert [[each.held.key for each in take(counted, now)] for now in (0.9, 1.0, 4.9, 5.0)] == [
        [],
        [A],
        [],
        [(66, PLAYS)],
    ]


def test_what_is_not_wanted_waits_for_the_next_round() -> None:
    counted = totals()
    counted.add(A, 1, 0.0)

    def taken(now: float) -> list[Flush]:
        return counted.take_due(OPTIONS.get, lambda held, _: held.plus > 1, now, 9, Looks(1_000))

    assert taken(0.0) == []
    counted.add(A, 1, 0.5)
    assert taken(0.5) == []
    assert said(taken(1.0)) == [(64, 1, 1, 2, 0)]


def test_a_new_life_counts_from_nothing_and_the_older_one_is_kept_until_it_is_written() -> None:
    counted = totals(life_seconds=60)
    for key in (A, B):
        counted.add(key, 5, 0.0)
    written, failing = take(counted, 0.0)
    counted.done(written, 0.0)
    counted.renew(60.0)
    assert counted.held == 1, "what is written is forgotten"
    counted.add(A, 2, 60.0)
    counted.add(B, 3, 60.0)
    assert nets(counted, A) == {2: 2}
    assert nets(counted, B) == {2: 3, 1: 5}
    counted.failed(failing)
    flushes = take(counted, 61.0)
    assert sorted(said(flushes)) == [(64, 2, 1, 2, 0), (65, 1, 3, 5, 0), (65, 2, 2, 3, 0)]
    for each in flushes:
        counted.done(each, 61.0)
    assert (nets(counted, B), counted.held) == ({2: 3}, 2)


def test_when_memory_is_short_counters_leave_it_and_come_back_with_another_slot() -> None:
    counted = totals(max_counters=4)
    for number in range(8):
        counted.add((number, VIEWS), 1, float(number))
        write_all(counted, float(number))
        counted.renew(float(number))
        assert counted.held <= 3
    assert nets(counted, (0, VIEWS)) == {}
    counted.add((0, VIEWS), 1, 9.0)
    ((slot, net),) = nets(counted, (0, VIEWS)).items()
    assert (net, slot > 1) == (1, True), "in its former slot the totals would begin at nothing"


def test_a_hot_counter_keeps_its_slot_however_many_others_are_new() -> None:
    counted = totals(max_counters=20, life_seconds=1_000)
    slots = set()
    for number in range(500):
        now = float(number)
        counted.add(A, 1, now)
        counted.add((1_000 + number, VIEWS), 1, now)
        for each in take(counted, now):
            slots.add(each.held.life.slot if each.held.key == A else 0)
            counted.done(each, now)
        counted.renew(now)
        assert counted.held <= 16
    assert slots == {0, 1}
    counted.renew(1_000.0)
    counted.add(A, 1, 1_000.0)
    assert 1 not in nets(counted, A), "its life is over"


def test_lives_begin_once_in_a_turn_of_what_is_held() -> None:
    begun = itertools.count(1)
    counted = CounterTotals(100, 1e6, lambda: next(begun), 0.0)
    for number in range(1_500):
        counted.add((number, VIEWS), 1, float(number))
        write_all(counted, float(number))
        counted.renew(float(number))
    assert next(begun) <= 2 + 1_500 // 75 + 1


def test_a_full_follower_counts_on_what_it_holds_while_leaders_are_away() -> None:
    counted = totals(max_counters=4, life_seconds=60)
    keys = [(number, VIEWS) for number in range(4)]
    for number in range(119):  # the lives are over at 60
        now = float(number)
        for key in keys:
            counted.add(key, 1, now)
        counted.renew(now)
        for each in take(counted, now):
            counted.failed(each)
    assert [nets(counted, key) for key in keys] == [{1: 119}] * 4
    with pytest.raises(Overloaded):
        counted.add(keys[0], 1, 121.0)  # its life is too old for a first flush soon


def test_max_counters_bounds_what_waits_and_more_is_overload() -> None:
    counted = totals(max_counters=3)
    for number in range(3):
        counted.add((number, VIEWS), 1, 0.0)
        counted.renew(0.0)
    with pytest.raises(Overloaded, match="holds 3 counters"):
        counted.add((3, VIEWS), 1, 0.0)
    counted.renew(0.0)
    assert counted.held == 3
    for each in take(counted, 0.0):
        counted.done(each, 0.0)
    counted.renew(0.0)
    counted.add((3, VIEWS), 1, 0.0)


def test_one_call_looks_at_a_bounded_number_and_the_next_goes_on() -> None:
    counted = totals()
    for number in range(30):
        counted.add((number, VIEWS), 1, 0.0)
    seen: list[int] = []

    def looked_at(held: Held, _: CounterOptions) -> bool:
        seen.append(held.key[0])
        return False

    for part in (10, 20, 30, 30):
        assert counted.take_due(OPTIONS.get, looked_at, 0.5, 100, Looks(10)) == []
        assert len(seen) == part
    assert seen == list(range(30))

    def decodes(held: Held, _: CounterOptions) -> bool:
        looks.left -= 7
        return looked_at(held, _)

    looks = Looks(10)
    counted.take_due(OPTIONS.get, decodes, 1.5, 100, looks)
    assert len(seen) == 32, "what it takes to look counts, too"


def test_no_type_takes_all_the_room_for_ever() -> None:
    counted = totals()
    for number in range(4):
        counted.add((number, VIEWS), 1, 0.0)
        counted.add((number, PLAYS), 1, 0.0)
    taken = []
    for tick in range(4):
        for each in take(counted, tick / 10, room=2):
            taken.append(each.held.key[1])
            counted.failed(each)
    assert taken == [VIEWS, VIEWS, PLAYS, PLAYS] * 2


def test_a_shorter_interval_takes_effect_at_once() -> None:
    counted = totals()
    counted.add((64, PLAYS), 1, 0.0)
    write_all(counted, 0.0)
    counted.add((64, PLAYS), 1, 0.1)
    assert take(counted, 0.1) == []
    flushes = counted.take_due(lambda _: CounterOptions(0.0), wanted, 0.1, 9, Looks(9))
    assert said(flushes) == [(64, 1, 2, 2, 0)]


def test_what_came_during_a_flush_waits_since_it_was_taken() -> None:
    counted = totals()
    counted.add(A, 1, 0.0)
    (flush,) = take(counted, 3.0)
    counted.add(A, 1, 3.1)
    counted.done(flush, 7.0)
    assert flush.held.waits_since == 3.0


def test_a_total_that_leaves_63_bits_is_an_error_and_changes_nothing() -> None:
    counted = totals()
    counted.add(A, MAX_COUNTED, 0.0)
    for by in (1, 2**62):
        with pytest.raises(TooLarge, match="exceed 63 bits"):
            counted.add(A, by, 0.0)
    counted.add(A, -MAX_COUNTED, 0.0)
    with pytest.raises(TooLarge):
        counted.add(A, -1, 0.0)
    assert nets(counted, A) == {1: 0}
    for number in (MAX_COUNTED + 1, -MAX_COUNTED - 1):
        with pytest.raises(TooLarge):
            counted.add(B, number, 0.0)
    assert counted.held == 1


def test_what_no_leader_takes_any_more_is_given_up_and_counted_as_lost() -> None:
    counted = totals()
    counted.add(A, 5, 0.0)
    (first,) = take(counted, 0.0)
    counted.done(first, 0.0)
    counted.add(A, -7, 0.0)
    (second,) = take(counted, 1.0)
    counted.refused(second, 1.0)
    counted.add(A, 1, 1.0)
    assert nets(counted, A) == {2: 1}, "its slot has totals that are forgotten"
    counted.add((64, 999), 4, 0.0)
    assert [each.held.key for each in take(counted, 2.0)] == [A]  # the type of the other has left the schema
    assert (counted.lost, counted.lost_counters, counted.held) == (11, 2, 1)
