"""What a follower holds of counters: rounds, lives, repetitions and bounds, in the time that the test gives."""

from __future__ import annotations

import itertools

import pytest

from tao.follower.counter_totals import CounterTotals, Flush, Held
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
    return counted.take_due(OPTIONS.get, wanted, now, room)


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
    assert counted.take_due(OPTIONS.get, lambda held, _: held.plus > 1, 0.0, 9) == []
    counted.add(A, 1, 0.5)
    assert counted.take_due(OPTIONS.get, lambda held, _: held.plus > 1, 0.5, 9) == []
    assert said(counted.take_due(OPTIONS.get, lambda held, _: held.plus > 1, 1.0, 9)) == [(64, 1, 1, 2, 0)]


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
    assert counted.net_by_slot(A) == [(2, 2)]
    assert counted.net_by_slot(B) == [(2, 3), (1, 5)]
    counted.failed(failing)
    flushes = take(counted, 61.0)
    assert sorted(said(flushes)) == [(64, 2, 1, 2, 0), (65, 1, 3, 5, 0), (65, 2, 2, 3, 0)]
    for each in flushes:
        counted.done(each, 61.0)
    assert (counted.net_by_slot(B), counted.held) == ([(2, 3)], 2)


def test_a_life_ends_early_when_it_holds_half_of_what_may_be_held() -> None:
    counted = totals(max_counters=4)
    for number in range(4):
        counted.add((number, VIEWS), 1, 0.0)
        for each in take(counted, float(number)):
            counted.done(each, float(number))
        counted.renew(float(number))
    assert counted.held <= 2
    counted.add((9, VIEWS), 1, 5.0)
    assert counted.net_by_slot((9, VIEWS)) == [(3, 1)]


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


def test_a_total_that_leaves_63_bits_is_an_error_and_changes_nothing() -> None:
    counted = totals()
    counted.add(A, MAX_COUNTED, 0.0)
    for by in (1, 2**62):
        with pytest.raises(TooLarge, match="exceed 63 bits"):
            counted.add(A, by, 0.0)
    counted.add(A, -MAX_COUNTED, 0.0)
    with pytest.raises(TooLarge):
        counted.add(A, -1, 0.0)
    assert counted.net_by_slot(A) == [(1, 0)]
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
    counted.refused(second)
    counted.add((64, 999), 4, 0.0)
    assert take(counted, 2.0) == []  # its type has left the schema
    assert (counted.lost, counted.held) == (11, 0)
