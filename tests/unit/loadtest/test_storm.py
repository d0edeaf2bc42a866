"""What a restart under load comes to, from counters that begin anew with their server."""

from typing import Any

import pytest

from loadtest.cold.counters import Counts
from loadtest.cold.herd import HerdOptions
from loadtest.cold.storm import (
    CounterSample,
    Restarts,
    StormOptions,
    StormSecond,
    hit_rate_of,
    moments,
    recovered_after,
)
from tao.model.errors import OperatorError


def sample(at: float, hits: int, misses: int, *, leader: int = 0, selects: int | None = 0) -> CounterSample:
    return CounterSample(
        at=at,
        followers={"a": Counts(hits, misses)},
        leaders={"leader": Counts(0, leader, leader // 2)},
        selects=selects,
    )


def moment(at: float, hit_rate: float | None) -> StormSecond:
    return StormSecond(
        at=at, reads=100.0, hit_rate=hit_rate, leader_reads=0.0, leader_fetches=0.0, database_selects=0.0
    )


def test_a_counter_that_began_anew_counts_from_zero() -> None:
    (before, after) = moments(
        [sample(0, 900, 100), sample(2, 1080, 120, leader=20, selects=10), sample(4, 30, 70, leader=90, selects=50)],
        2.0,
    )
    assert (before.at, before.reads, before.hit_rate) == (0.0, 100.0, 0.9)
    assert (after.at, after.reads, after.hit_rate) == (2.0, 50.0, 0.3)
    assert (after.leader_reads, after.leader_fetches, after.database_selects) == (35.0, 17.5, 20.0)


def test_of_a_database_that_is_not_ours_nothing_is_counted() -> None:
    (found,) = moments([sample(0, 900, 100), sample(2, 1080, 120, leader=20, selects=None)], 2.0)
    assert (found.leader_reads, found.database_selects) == (10.0, None)


def test_a_restart_lasts_from_the_first_server_that_is_gone_until_all_have_begun_anew() -> None:
    seen = Restarts({"a": 1_000, "b": 1_000})
    seen.see(1.0, {"a": 1_100, "b": 1_100})
    assert (seen.began, seen.missing) == (None, ["a", "b"])
    seen.see(2.0, {"b": 1_200})
    seen.see(3.0, {"a": 5, "b": 1_300})
    assert (seen.began, seen.over, seen.missing) == (2.0, None, ["b"])
    # One that restarts between two looks is not seen gone; its counters show the restart.
    seen.see(4.0, {"a": 90, "b": 2})
    seen.see(5.0, {"a": 190, "b": 80})
    assert (seen.began, seen.over, seen.missing) == (2.0, 4.0, [])


def test_one_look_that_was_not_answered_is_no_restart() -> None:
    seen = Restarts({"a": 1_000})
    seen.see(1.0, {})
    seen.see(2.0, {"a": 1_100})
    assert (seen.began, seen.missing) == (None, ["a"])
    seen.see(3.0, {})
    # More than at first, and less than at last.
    seen.see(4.0, {"a": 1_050})
    assert (seen.began, seen.over, seen.missing) == (3.0, 4.0, [])


def test_a_server_that_had_answered_nothing_has_restarted_when_it_is_back() -> None:
    seen = Restarts({"a": 0, "b": 0})
    seen.see(1.0, {"a": 0, "b": 70})
    seen.see(2.0, {"b": 80})
    seen.see(3.0, {"a": 0, "b": 5})
    assert (seen.began, seen.over, seen.missing) == (2.0, 3.0, [])


def test_a_server_that_does_not_answer_is_counted_once_it_is_back() -> None:
    gone = CounterSample(at=1, followers={}, leaders={}, selects=0)
    silent, back = moments([sample(0, 900, 100), gone, sample(2, 5, 5)], 0.0)
    assert (silent.reads, silent.hit_rate) == (0.0, None)
    assert (back.reads, back.hit_rate) == (10.0, 0.5)


def test_recovery_is_after_the_lowest_hit_rate_and_not_before_it() -> None:
    rates = [0.95, 0.95, 0.95, 0.4, 0.7, 0.95, 0.95, 0.95]
    timeline = [moment(-1, 0.95), *(moment(float(second), rate) for second, rate in enumerate(rates, 1))]
    assert recovered_after(timeline, 0.95, 0.01) == 8.0
    assert recovered_after(timeline[:6], 0.95, 0.01) is None
    assert hit_rate_of([moment(0, 0.5), moment(1, None), moment(2, 1.0)]) == 0.5


@pytest.mark.parametrize(("name", "value"), [("clients", 0), ("processes", 0), ("rounds", 1_000)])
def test_a_herd_out_of_bounds_is_reported(name: str, value: int) -> None:
    wanted: dict[str, Any] = {name: value}
    with pytest.raises(OperatorError, match=name):
        HerdOptions(**wanted)


def test_a_storm_out_of_bounds_is_reported() -> None:
    with pytest.raises(OperatorError, match="--rate"):
        StormOptions(rate=0)


def test_a_command_that_restarts_is_of_a_running_cluster() -> None:
    with pytest.raises(OperatorError, match="--topology"):
        StormOptions(restart_command="true")


def test_at_toy_size_options_are_small_and_smaller_ones_stay() -> None:
    small = StormOptions(rate=20.0).at_toy_size()
    assert (small.rate, small.nodes, small.after_seconds, small.cache_share) == (20.0, 400, 5.0, 0.2)
