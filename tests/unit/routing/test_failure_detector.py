"""When a destination is down or in a brown-out, and how it recovers."""

from __future__ import annotations

import pytest

from tao.model.errors import SettingsError
from tao.routing.failure_detector import (
    WINDOW,
    DetectorSettings,
    FailureDetector,
    FailureDetectors,
    Health,
)

SETTINGS = DetectorSettings()


def detector(settings: DetectorSettings = SETTINGS) -> FailureDetector:
    return FailureDetector(settings, 0.0, lambda: 0.0)


def bring_down(each: FailureDetector, now: float) -> None:
    for _ in range(SETTINGS.failures_until_down):
        each.failed(now, "no answer")


def recover(each: FailureDetector, now: float) -> float:
    """Answer probes until the destination is up. Returns the time."""
    while each.is_suspect:
        now = max(now, each.probe_at)
        if each.begin_probe(now):
            each.probe_answered(0.001, now)
    return now


def test_a_few_failures_make_a_destination_suspect_and_an_answer_clears_it() -> None:
    each = detector()
    each.failed(1.0, "refused")
    assert (each.state().health, each.state().reason, each.is_impaired) == (Health.SUSPECT, "refused", False)
    each.answered(0.01, 1.1)
    assert (each.state().health, each.consecutive_failures) == (Health.UP, 0)


def test_failures_in_a_row_take_a_destination_down_and_only_probes_bring_it_back() -> None:
    each = detector()
    bring_down(each, 1.0)
    assert each.state() == each.state()
    assert (each.state().health, each.state().since, each.is_down) == (Health.DOWN, 1.0, True)
    each.answered(0.01, 1.01)
    assert each.is_down
    assert not each.begin_probe(1.01)
    now = each.probe_at
    assert each.begin_probe(now)
    assert each.state().health is Health.PROBING
    assert not each.begin_probe(now), "one probe at a time"
    each.probe_answered(0.01, now)
    assert each.is_down, "a single good answer may be luck"
    now = recover(each, now)
    assert (each.state().health, each.state().since, each.state().reason) == (Health.UP, now, "")


def test_probe_intervals_grow_up_to_the_maximum() -> None:
    each = detector()
    bring_down(each, 0.0)
    intervals = []
    now = 0.0
    for _ in range(8):
        intervals.append(round(each.probe_at - now, 3))
        now = each.probe_at
        assert each.begin_probe(now)
        each.probe_failed(now, "refused")
    assert intervals == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_a_probe_without_a_result_fails_after_its_timeout() -> None:
    each = detector()
    bring_down(each, 0.0)
    assert each.begin_probe(each.probe_at)
    until = each.probe_at
    assert not each.begin_probe(until)
    assert each.state().reason == "a probe was not answered"
    assert each.begin_probe(each.probe_at)


def test_a_flapping_destination_stays_out_longer_each_time() -> None:
    each = detector()
    now, stays = 0.0, []
    for _ in range(12):
        bring_down(each, now)
        back = recover(each, now)
        stays.append(round(back - now, 3))
        now = back + 0.1
    assert stays == sorted(stays)
    assert stays[0] < 1
    assert stays[-1] >= SETTINGS.max_stay_seconds
    now += SETTINGS.flap_seconds + 1
    bring_down(each, now)
    assert recover(each, now) - now < 1, "after a long quiet time the destination recovers quickly again"


def test_slow_answers_make_a_destination_impaired_but_not_down() -> None:
    each = detector()
    for number in range(WINDOW):
        each.answered(1.5 if number % 2 else 0.01, float(number) / 10)
    assert each.state().reason.startswith("slow: 32 of the last 64")
    assert (each.is_impaired, each.is_down, each.state().health) == (True, False, Health.SUSPECT)
    each.answered(0.01, 10.0)
    assert each.is_impaired, "one good answer is not enough"
    recover(each, 10.0)
    assert not each.is_impaired


def test_a_slow_probe_does_not_count_as_a_good_answer() -> None:
    each = detector()
    bring_down(each, 0.0)
    for _ in range(10):
        now = each.probe_at
        assert each.begin_probe(now)
        each.probe_answered(1.5, now + 1.5)
    assert each.is_down


def test_timeouts_among_answers_make_a_destination_impaired() -> None:
    each = detector()
    for number in range(WINDOW):
        if number % 4:
            each.answered(0.01, float(number) / 10)
        else:
            each.failed(float(number) / 10, "no answer in time")
    assert each.state().reason.startswith("lossy: 13 of the last 64")
    assert (each.is_impaired, each.is_down) == (True, False)


def test_slow_answers_of_long_ago_no_longer_count() -> None:
    each = detector()
    for number in range(31):
        each.answered(1.5, float(number))
    each.answered(1.5, 200.0)
    assert not each.is_impaired


def test_detectors_are_kept_by_name() -> None:
    each = FailureDetectors[tuple[str, int]](SETTINGS, lambda: 0.0)
    bring_down(each.of(("a", 1), 0.0), 1.0)
    assert each.of(("a", 1), 2.0).is_down
    assert {name: standing.health for name, standing in each.states().items()} == {("a", 1): Health.DOWN}
    each.forget(("a", 1))
    assert not each.of(("a", 1), 3.0).is_down


@pytest.mark.parametrize(
    "wrong",
    [
        {"failures_until_down": 0},
        {"slow_seconds": 0.0},
        {"slow_share": 0.0},
        {"lost_share": 1.5},
        {"first_probe_seconds": 3.0},
    ],
)
def test_invalid_detector_settings_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        DetectorSettings(**wrong)  # type: ignore[arg-type]
