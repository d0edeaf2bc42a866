"""Sampled rates: the keys read most are found whatever else is read, and rates are those of the last seconds."""

from __future__ import annotations

import random

import pytest

from tao.model.errors import SettingsError
from tao.routing.read_rates import RateSettings, ReadRates

SETTINGS = RateSettings(keys=64, hot_reads_per_second=500.0)


def read_for(rates: ReadRates, seconds: int, began: float, per_second: int, share: float) -> float:
    """Count reads of which one key gets ``share`` and all others are read once. Returns the time afterwards."""
    dice = random.Random(7)
    for second in range(seconds):
        for _ in range(per_second // 100):
            key = (1, 0) if dice.random() < share else (dice.randrange(1 << 40), 5)
            rates.count(key, key[0] & 7, 100)
        rates.fade(began + second + 1)
    return began + seconds


def test_a_hot_key_is_found_among_many_single_reads_with_the_right_rate() -> None:
    rates = ReadRates(SETTINGS, 0.0)
    now = read_for(rates, 30, 0.0, 100_000, 0.02)
    first = rates.keys(5, now)[0]
    assert first.key == (1, 0)
    assert first.per_second == pytest.approx(2_000, rel=0.2)
    assert rates.total(now) == pytest.approx(100_000, rel=0.1)
    assert rates.hot.keys() == {(1, 0)}
    assert sum(rate for _, rate in rates.shards(8, now)) == pytest.approx(100_000, rel=0.1)


def test_a_new_process_reports_the_same_rate() -> None:
    rates = ReadRates(SETTINGS, 0.0)
    now = read_for(rates, 2, 0.0, 100_000, 1.0)
    assert rates.keys(1, now)[0].per_second == pytest.approx(100_000, rel=0.1)


def test_a_key_that_is_no_longer_read_decays_and_is_dropped() -> None:
    rates = ReadRates(SETTINGS, 0.0)
    now = read_for(rates, 10, 0.0, 100_000, 1.0)
    assert rates.hot
    rates.fade(now + 2 * SETTINGS.half_life_seconds)
    assert rates.keys(1, now + 2 * SETTINGS.half_life_seconds)[0].per_second < 40_000
    rates.fade(now + 60 * SETTINGS.half_life_seconds)
    assert (rates.hot, rates.keys(9, now + 400), rates.shards(9, now + 400)) == ({}, [], [])


def test_the_number_of_counters_is_bounded() -> None:
    rates = ReadRates(SETTINGS, 0.0)
    for number in range(10_000):
        rates.count((number, 0), 0, 1)
    assert len(rates.keys(10_000, 1.0)) < 2 * SETTINGS.keys


def test_the_pause_grows_with_the_rate_up_to_its_maximum() -> None:
    rates = ReadRates(RateSettings(), 0.0)
    assert [rates.slow_down_ms(rate) for rate in (1_000, 19_999, 20_000, 40_000, 1e9)] == [0, 0, 2, 4, 50]


def test_invalid_rate_settings_are_rejected() -> None:
    with pytest.raises(SettingsError):
        RateSettings(keys=0)
