"""The comparison of two trees' figures: directions, pairs, intervals, and what one of the trees lacks."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from loadtest.compare.ratios import ALL, Key, Slowdown, compare, measured_in, sign_interval
from loadtest.results import Figure, Quantity, ScenarioResult


def figure(contestant: str, **values: Any) -> Figure:
    given = {
        "shape": "reads",
        "queries_per_operation": 1,
        "operations": 10,
        "per_second": 1000.0,
        "rounds_per_second": [1000.0],
        "p50_us": 100.0,
        "p99_us": 200.0,
        "server_cpu_us": 2.0,
        "client_cpu_us": 3.0,
    }
    return Figure(contestant=contestant, **{**given, **values})


def result(*figures: Figure, **more: Any) -> dict[str, Any]:
    """Return the JSON of a scenario's result."""
    made = ScenarioResult(conditions={"round_seconds": 1.0}, figures=list(figures), **more)
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(made))
    return decoded


def by_key(slowdowns: list[Slowdown]) -> dict[tuple[str, str], Slowdown]:
    return {(each.shape, each.measure): each for each in slowdowns}


def test_rates_and_times_of_every_form_of_result_are_compared_and_counts_are_not() -> None:
    nested = {"obj_get": {"queries": 5, "follower_us": 30.0, "latency": {"p50_ms": 1.5}}, "pairs": [[1, 2]]}
    quantities = [Quantity(name="writes", value=7.0, unit="per_second"), Quantity(name="a", value=9.0, unit="bytes")]
    found = measured_in(result(figure("tao"), quantities=quantities, measured=nested))
    assert found.values == {
        Key("reads: tao", "per_second"): 1000.0,
        Key("reads: tao", "p50_us"): 100.0,
        Key("reads: tao", "p99_us"): 200.0,
        Key("reads: tao", "server_cpu_us"): 2.0,
        Key("reads: tao", "client_cpu_us"): 3.0,
        Key("writes", "per_second"): 7.0,
        Key("obj_get", "follower_us"): 30.0,
        Key("obj_get, latency", "p50_ms"): 1.5,
    }


def test_a_lower_rate_and_a_longer_time_are_both_slower() -> None:
    before, after = (
        measured_in(result(figure("tao"))),
        measured_in(result(figure("tao", per_second=500.0, p50_us=150.0))),
    )
    found = by_key(compare([(before, after)] * 6).slowdowns)
    assert found["reads: tao", "per_second"].ratio == 2
    assert found["reads: tao", "p50_us"].ratio == 1.5
    assert found["reads: tao", "p99_us"].ratio == 1
    assert found["reads: tao", "p50_us"].verdict == "slower, not met"
    assert not found["reads: tao", "p50_us"].aim("stream").met
    assert found["reads: tao", "p99_us"].verdict == "may be equal, met"


def test_a_pair_cancels_what_the_machine_did_to_both_of_its_runs() -> None:
    chance = Random(3)
    pairs = []
    for _ in range(10):
        machine = chance.uniform(1.0, 4.0)
        times = [machine * factor * chance.gauss(1.0, 0.004) for factor in (1.0, 1.05)]
        before, after = (measured_in(result(figure("tao", p50_us=100 * each))) for each in times)
        pairs.append((before, after))
    slower = by_key(compare(pairs).slowdowns)["reads: tao", "p50_us"]
    assert 1.04 < slower.low <= slower.ratio <= slower.high < 1.06


def test_a_yardstick_is_listed_and_not_judged() -> None:
    run = measured_in(result(figure("tao", yardstick="redis"), figure("redis")))
    found = compare([(run, run)] * 2).slowdowns
    assert {each.shape for each in found if each.is_control} == {"reads: redis"}
    assert all(each.verdict == "control" for each in found if each.is_control)


def test_the_mean_of_all_shapes_leaves_yardsticks_out() -> None:
    def run(one: float, other: float, yardstick: float) -> dict[str, Any]:
        return result(
            figure("tao", yardstick="redis", p50_us=one),
            figure("other", p50_us=other),
            figure("redis", p50_us=yardstick),
        )

    pair = measured_in(run(100, 100, 100)), measured_in(run(110, 90, 900))
    mean = by_key(compare([pair] * 2).slowdowns)[ALL, "p50_us"]
    assert mean.ratio == pytest.approx((1.1 * 0.9) ** 0.5)


def test_figures_that_one_tree_lacks_and_zeros_are_named_and_skipped() -> None:
    before = measured_in(result(figure("tao", server_cpu_us=0.0)))
    after = measured_in(result(figure("tao"), measured={"newer": {"write_ms": 4.0}}))
    found = compare([(before, after)])
    assert found.missing == ["reads: tao: server_cpu_us", "newer: write_ms"]
    assert {each.measure for each in found.slowdowns} == {"per_second", "p50_us", "p99_us", "client_cpu_us"}


@pytest.mark.parametrize(
    ("count", "low", "high", "confidence"), [(1, 1, 1, 0), (2, 1, 2, 0.5), (6, 1, 6, 0.96875), (10, 2, 9, 0.978515625)]
)
def test_the_interval_is_that_of_the_sign_test(count: int, low: int, high: int, confidence: float) -> None:
    values = list(range(1, count + 1))
    Random(1).shuffle(values)
    assert sign_interval(values) == (low, high, confidence)


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    chance = Random(4)
    intervals = [sign_interval([chance.lognormvariate(0, 1) for _ in range(12)]) for _ in range(2000)]
    held = sum(low <= 1 <= high for low, high, _ in intervals) / len(intervals)
    assert held == pytest.approx(intervals[0][2], abs=0.015)
