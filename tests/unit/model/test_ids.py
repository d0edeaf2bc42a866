"""The ids that an owner gives out, and the ones that it admits."""

from __future__ import annotations

import pytest

from tao.model.errors import IdNotReserved, InvalidArgument, Overloaded
from tao.model.ids import (
    CLOCKS_DIFFER_MS,
    FARTHEST_AHEAD_MS,
    MAX_AHEAD_MS,
    MAX_RESERVED_IDS,
    RESERVED_AHEAD_MS,
    SEQUENCE_PER_MS,
    STEP_MS,
    WINDOW_MS,
    IdSequence,
    LostTimes,
    make_id,
    next_reserved,
    unix_ms_of,
)

NOW = 1_750_000_000_000
assert NOW % WINDOW_MS == 0
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
    ids.reserved_unix_ms = late + RESERVED_AHEAD_MS
    assert ids.take(1, late) == make_id(SHARD, late, 0)


def test_an_owner_whose_clock_is_behind_begins_above_the_owner_before() -> None:
    ids = IdSequence(SHARD, NOW + 5_000)
    ids.reserved_unix_ms = NOW + 60_000
    assert ids.take(1, NOW) == make_id(SHARD, NOW + 5_001, 0)


@pytest.mark.parametrize(
    ("stored", "reserved"),
    [
        (NOW - 3_600_000, NOW + RESERVED_AHEAD_MS),
        (NOW + RESERVED_AHEAD_MS, NOW + RESERVED_AHEAD_MS + STEP_MS),
        (NOW + MAX_AHEAD_MS + WINDOW_MS - STEP_MS - 1, NOW + MAX_AHEAD_MS + WINDOW_MS - 1),
        # Where a window ends that begins two minutes ahead, and where a later one does.
        (NOW + MAX_AHEAD_MS + WINDOW_MS - STEP_MS, None),
        (NOW + MAX_AHEAD_MS + WINDOW_MS, NOW + MAX_AHEAD_MS + WINDOW_MS + STEP_MS),
        (NOW + MAX_AHEAD_MS + 2 * WINDOW_MS - STEP_MS, None),
        # What is further ahead than any owner reserves, and further than clocks allow.
        (NOW + FARTHEST_AHEAD_MS + WINDOW_MS - STEP_MS - 1, NOW + FARTHEST_AHEAD_MS + WINDOW_MS - 1),
        (NOW + FARTHEST_AHEAD_MS + WINDOW_MS, None),
        (NOW + 3_600_000, NOW + 3_600_000 + STEP_MS),
    ],
)
def test_an_owner_stays_in_windows_that_the_clock_allows(stored: int, reserved: int | None) -> None:
    assert next_reserved(stored, NOW) == reserved


def test_ids_that_may_not_run_further_ahead_are_refused_until_the_clock_has_gone_on() -> None:
    ids = IdSequence(SHARD, NOW + MAX_AHEAD_MS + WINDOW_MS - 1)
    assert not ids.is_running_out(NOW), "a commit would be in vain"
    bound = f"when that is {MAX_AHEAD_MS - 1} ms at most"
    for late_ms, wait_seconds in ((0, 20), (1, 20), (WINDOW_MS - 1, 1)):
        ahead = f"to {MAX_AHEAD_MS + WINDOW_MS - 1 - late_ms} ms ahead of the clock"
        with pytest.raises(Overloaded, match=f"{ahead}.* {bound}.* try again in {wait_seconds} s$"):
            ids.take(1, NOW + late_ms)
    assert ids.take(1, NOW + WINDOW_MS) is None, "more can be reserved"
    assert ids.admit(make_id(SHARD, NOW + MAX_AHEAD_MS, 0), NOW), "a former owner may have given it out"


def test_ids_begin_above_all_that_lost_commits_may_have_reserved() -> None:
    lost = LostTimes.at(NOW)
    normal = NOW + CLOCKS_DIFFER_MS + MAX_AHEAD_MS + WINDOW_MS // 2
    assert lost.begin(0, lacks_epoch=False) == lost.begin(normal - 1, lacks_epoch=False) == normal
    assert lost.begin(normal, lacks_epoch=False) == normal + WINDOW_MS
    farthest = NOW + CLOCKS_DIFFER_MS + FARTHEST_AHEAD_MS + WINDOW_MS // 2
    assert lost.begin(0, lacks_epoch=True) == lost.begin(farthest - 1, lacks_epoch=False) == farthest
    for lacks_epoch in (False, True):
        for stored in (farthest + 1, farthest + WINDOW_MS):
            assert lost.begin(stored, lacks_epoch=lacks_epoch) == stored, "the time never goes back"


@pytest.mark.parametrize("lacks_epoch", [False, True])
def test_ids_begin_a_minute_above_the_time_that_a_wrong_clock_has_stored(lacks_epoch: bool) -> None:
    lost = LostTimes.at(NOW)
    for ahead_ms in (FARTHEST_AHEAD_MS + 4 * WINDOW_MS, 3_600_000, 2_250_000_000_000):
        stored = NOW + ahead_ms
        steps = next_reserved(stored, NOW)
        assert steps == stored + STEP_MS, "ids go on"
        begin = lost.begin(stored, lacks_epoch=lacks_epoch)
        assert stored + RESERVED_AHEAD_MS < begin <= stored + RESERVED_AHEAD_MS + WINDOW_MS


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
    ahead.reserved_unix_ms = NOW + 61_000
    assert not ahead.is_running_out(NOW)
    ahead.take(600 * SEQUENCE_PER_MS, NOW)
    assert ahead.is_running_out(NOW)


def test_the_time_is_a_part_of_the_id() -> None:
    assert unix_ms_of(make_id(SHARD, NOW, 63)) == NOW
    with pytest.raises(InvalidArgument, match="outside the 41 bits"):
        IdSequence(SHARD, 0)
