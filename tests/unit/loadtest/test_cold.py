"""What a restart under load comes to, from counters that begin anew with their server."""

import pytest

from loadtest.cold.herd import HerdSettings
from loadtest.cold.storm import StormSettings
from loadtest.cold.timeline import Moment, Sample, hit_rate_of, moments, recovered_after
from tao.model.errors import OperatorError


def sample(at: float, hits: int, misses: int, *, leader: int = 0, selects: int = 0) -> Sample:
    return Sample(at=at, followers={"a": (hits, misses)}, leaders={"leader": leader}, selects=selects)


def moment(at: float, hit_rate: float | None) -> Moment:
    return Moment(at=at, reads=100.0, hit_rate=hit_rate, leader_reads=0.0, database_selects=0.0)


def test_a_counter_that_began_anew_counts_from_zero() -> None:
    (before, after) = moments(
        [sample(0, 900, 100), sample(2, 1080, 120, leader=20, selects=10), sample(4, 30, 70, leader=90, selects=50)],
        2.0,
    )
    assert (before.at, before.reads, before.hit_rate) == (0.0, 100.0, 0.9)
    assert (after.at, after.reads, after.hit_rate) == (2.0, 50.0, 0.3)
    assert (after.leader_reads, after.database_selects) == (35.0, 20.0)


def test_a_server_that_does_not_answer_is_counted_once_it_is_back() -> None:
    gone = Sample(at=1, followers={}, leaders={}, selects=0)
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
def test_a_herd_out_of_bounds_is_told(name: str, value: int) -> None:
    with pytest.raises(OperatorError, match=name):
        HerdSettings(**{name: value})


def test_a_storm_out_of_bounds_is_told() -> None:
    with pytest.raises(OperatorError, match="--rate"):
        StormSettings(rate=0)
