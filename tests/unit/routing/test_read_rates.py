"""Rates by samples: what is read most is found whatever else is read, and rates are of the last seconds."""

from __future__ import annotations

import random

import pytest

from tao.model.errors import SettingsError
from tao.routing.read_rates import RateSettings, ReadRates

SETTINGS = RateSettings(keys=64, hot_reads_per_second=500.0)


def read_for(rates: ReadRates, seconds: int, began: float, per_second: int, share: float) -> float:
    """Reads with one key that gets ``share`` of them, the others never seen again; returns the time afterwards."""
    dice = random.Random(7)
    for second in range(seconds):
        for _ in range(per_second // 100):
            key = (1, 0) if dice.random() < share else (dice.randrange(1 << 40), 5)
            rates.count(key, key[0] & 7, 100)
        rates.fade(began + second + 1)
    return began + seconds


def test_a_key_is_found_among_many_that_come_once_and_its_rate_is_right() -> None:
    rates = ReadRates(SETTINGS, 0.0)
    now = read_for(rates, 30, 0.0, 100_000, 0.02)
    first = rates.keys(5, now)[0]
    assert first.key == (1, 0)
    assert first.per_second == pytest.approx(2_000, rel=0.2)
    assert rates.total(now) == pytest.approx(100_000, rel=0.1)
    assert rates.hot.keys() == {(1, 0)}
    assert sum(rate for _, rate in rates.shards(8, now)) == pytest.approx(100_000, rel=0.1)


def test_a_process_that_has_just_begun_tells_the_same_rate() -> None:
    rates = ReadRates(SETTINGS, 0.0)
    now = read_for(rates, 2, 0.0, 100_000, 1.0)
    assert rates.keys(1, now)[0].per_second == pytest.approx(100_000, rel=0.1)


def test_what_is_read_no_more_cools_off_and_is_forgotten() -> None:
    rates = ReadRates(SETTINGS, 0.0)
    now = read_for(rates, 10, 0.0, 100_000, 1.0)
    assert rates.hot
    rates.fade(now + 2 * SETTINGS.half_life_seconds)
    assert rates.keys(1, now + 2 * SETTINGS.half_life_seconds)[0].per_second < 40_000
    rates.fade(now + 60 * SETTINGS.half_life_seconds)
    assert (rates.hot, rates.keys(9, now + 400), rates.shards(9, now + 400)) == ({}, [], [])


def test_counters_are_bounded_whatever_is_read() -> None:
    rates = ReadRates(SETTINGS, 0.0)
    for number in range(10_000):
        rates.count((number, 0), 0, 1)
    assert len(rates.keys(10_000, 1.0)) < 2 * SETTINGS.keys


def test_a_pause_grows_with_the_rate_up_to_its_bound() -> None:
    rates = ReadRates(RateSettings(), 0.0)
    assert [rates.slow_down_ms(rate) for rate in (1_000, 19_999, 20_000, 40_000, 1e9)] == [0, 0, 2, 4, 50]


def test_settings_without_sense_are_refused() -> None:
    with pytest.raises(SettingsError):
        RateSettings(keys=0)
