"""The ids that an owner gives out, and the ones that it admits."""

from __future__ import annotations

import pytest

from tao.model.errors import IdNotReserved, InvalidArgument, Overloaded
from tao.model.ids import (
    MAX_AHEAD_MS,
    MAX_RESERVED_IDS,
    RESERVED_AHEAD_MS,
    SEQUENCE_PER_MS,
    IdSequence,
    make_id,
    next_reserved,
    unix_ms_of,
)

NOW = 1_750_000_000_000
SHARD = 3


@pytest.fixture
def ids() -> IdSequence:
    """Ids of an owner that began a minute ago."""
    made = IdSequence(SHARD, NOW - 60_000)
    made.reserved_unix_ms = NOW + RESERVED_AHEAD_MS
    return made


def test_a_reservation_is_one_interval_that_begins_at_the_clock(ids: IdSequence) -> None:
    first = ids.take(MAX_RESERVED_IDS, NOW)
    assert first == make_id(SHARD, NOW, 0)
    assert ids.take(1, NOW) == first + MAX_RESERVED_IDS


def test_an_id_above_the_reserved_time_is_not_given_out_before_more_is_reserved(ids: IdSequence) -> None:
    late = ids.reserved_unix_ms + 1
    assert ids.take(1, late) is None
    ids.reserved_unix_ms = next_reserved(ids.reserved_unix_ms, late)
    assert ids.take(1, late) == make_id(SHARD, late, 0)


def test_an_owner_whose_clock_is_behind_begins_above_the_owner_before() -> None:
    ids = IdSequence(SHARD, NOW + 5_000)
    ids.reserved_unix_ms = NOW + 60_000
    assert ids.take(1, NOW) == make_id(SHARD, NOW + 5_001, 0)


def test_ids_run_ahead_of_the_clock_by_a_bounded_time(ids: IdSequence) -> None:
    ids.reserved_unix_ms = NOW + 2 * MAX_AHEAD_MS
    allowed = MAX_AHEAD_MS * SEQUENCE_PER_MS
    assert ids.take(allowed, NOW) is not None
    with pytest.raises(Overloaded, match="ahead of the clock"):
        ids.take(SEQUENCE_PER_MS + 1, NOW)
    assert ids.take(SEQUENCE_PER_MS + 1, NOW + 2) is not None, "a refusal takes no ids"


def test_ids_go_on_where_the_clock_was_set_back_an_hour(ids: IdSequence) -> None:
    first = ids.take(1, NOW)
    assert first is not None
    assert ids.take(1_000, NOW - 3_600_000) == first + 1


def test_an_id_of_the_future_is_not_admitted_because_another_caller_may_get_it(ids: IdSequence) -> None:
    squatted = make_id(SHARD, NOW + 1, 0)
    with pytest.raises(IdNotReserved, match="reserve_ids"):
        ids.admit(squatted, NOW)
    assert ids.admit(squatted, NOW + 1)


def test_an_id_below_is_admitted_for_ever_and_never_given_out(ids: IdSequence) -> None:
    chosen = make_id(SHARD, NOW, 5)
    assert ids.admit(chosen, NOW)
    assert ids.take(1, NOW - 10) == chosen + 1
    assert ids.admit(chosen, NOW - 10)
    assert ids.admit(1 | SHARD << 47, NOW)


def test_an_id_below_the_clock_and_above_the_reserved_time_waits_for_a_commit(ids: IdSequence) -> None:
    late = ids.reserved_unix_ms + 1
    assert not ids.admit(make_id(SHARD, late, 0), late)


def test_more_time_is_reserved_before_the_last_is_used(ids: IdSequence) -> None:
    assert not ids.is_running_out(NOW)
    assert ids.is_running_out(NOW + RESERVED_AHEAD_MS // 2 + 1)
    ahead = IdSequence(SHARD, NOW + 60_000)
    ahead.reserved_unix_ms = next_reserved(NOW + 60_000, NOW)
    assert ahead.reserved_unix_ms == NOW + 61_000, "owners in turn do not run ever further ahead"
    assert not ahead.is_running_out(NOW)
    ahead.take(600 * SEQUENCE_PER_MS, NOW)
    assert ahead.is_running_out(NOW)


def test_the_time_is_a_part_of_the_id() -> None:
    assert unix_ms_of(make_id(SHARD, NOW, 63)) == NOW
    with pytest.raises(InvalidArgument, match="outside the 41 bits"):
        IdSequence(SHARD, 0)
