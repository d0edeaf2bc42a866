"""Work for strangers starts at a bounded rate, in turns by address."""

from __future__ import annotations

from collections import Counter

from tao.wire.stranger_turns import StrangerTurns, Turn


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def nothing() -> None:
    """Do nothing."""


def started(turns: StrangerTurns) -> list[Turn]:
    """Return what may start now."""
    found = list[Turn]()
    while (turn := turns.next()) is not None:
        found.append(turn)
    return found


def test_no_more_starts_than_were_saved_up_and_than_the_rate_allows() -> None:
    clock = Clock()
    turns = StrangerTurns(10.0, 4, clock)
    for _ in range(100):
        turns.add(Turn("192.0.2.1", nothing))
    assert len(started(turns)) == 4
    in_a_second = 0
    for _ in range(100):
        clock.seconds += 0.01
        in_a_second += len(started(turns))
    assert 9 <= in_a_second <= 10
    assert len(turns) == 100 - 4 - in_a_second


def test_turns_are_saved_up_to_their_bound_in_quiet_times() -> None:
    clock = Clock()
    turns = StrangerTurns(10.0, 4, clock)
    clock.seconds += 3_600
    for _ in range(100):
        turns.add(Turn("192.0.2.1", nothing))
    assert len(started(turns)) == 4


def test_addresses_take_turns_and_within_one_the_newest_is_first() -> None:
    clock = Clock()
    turns = StrangerTurns(10.0, 1, clock)
    crowd = [Turn("192.0.2.1", nothing) for _ in range(50)]
    for turn in crowd:
        turns.add(turn)
    assert started(turns) == crowd[-1:]
    late = Turn("192.0.2.2", nothing)
    turns.add(late)
    order = list[Turn]()
    for _ in range(4):
        clock.seconds += 0.1001
        order += started(turns)
    assert order == [crowd[-2], late, crowd[-3], crowd[-4]]
    assert Counter(turn.address for turn in order) == {"192.0.2.1": 3, "192.0.2.2": 1}


def test_a_costly_start_takes_the_time_of_several() -> None:
    clock = Clock()
    turns = StrangerTurns(10.0, 1, clock)
    costly, next_one = Turn("192.0.2.1", nothing, 4.0), Turn("192.0.2.1", nothing)
    turns.add(costly)
    assert started(turns) == [costly]
    turns.add(next_one)
    assert turns.seconds_until_next() == 0.4
    clock.seconds += 0.39
    assert started(turns) == []
    clock.seconds += 0.0101
    assert started(turns) == [next_one]
    assert turns.seconds_until_next() is None


def test_a_turn_that_is_given_back_is_there_at_once_and_one_withdrawn_never_starts() -> None:
    clock = Clock()
    turns = StrangerTurns(10.0, 1, clock)
    first, second, third = (Turn("192.0.2.1", nothing) for _ in range(3))
    for turn in (third, second, first):
        turns.add(turn)
    assert started(turns) == [first]
    turns.give_back(first)
    turns.withdraw(second)
    turns.withdraw(second)
    assert started(turns) == [third]
    assert len(turns) == 0
