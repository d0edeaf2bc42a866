"""Properties of the failure detector and the retry budget under any sequence of events."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from tao.routing.budgets import RetryBudget, RetrySettings
from tao.routing.failure_detector import WINDOW, DetectorSettings, FailureDetector

SETTINGS = DetectorSettings()

waits = st.floats(0, 5)
events = st.lists(
    st.tuples(st.sampled_from(["fast", "slow", "fail", "probe fast", "probe slow", "probe fail", "probe mute"]), waits),
    max_size=300,
)
jitters = st.floats(0, 0.999)


def play(detector: FailureDetector, now: float, event: str) -> None:
    match event.split():
        case ["fast"]:
            detector.answered(0.001, now)
        case ["slow"]:
            detector.answered(SETTINGS.slow_seconds + 1, now)
        case ["fail"]:
            detector.failed(now, "no answer")
        case ["probe", how]:
            if detector.begin_probe(now):
                if how == "fail":
                    detector.probe_failed(now, "refused")
                elif how != "mute":
                    detector.probe_answered(0.001 if how == "fast" else SETTINGS.slow_seconds + 1, now)


@given(st.lists(st.tuples(st.floats(0, SETTINGS.slow_seconds), waits), max_size=200))
def test_a_healthy_destination_is_never_suspect(answers: list[tuple[float, float]]) -> None:
    detector, now = FailureDetector(SETTINGS, 0.0, lambda: 0.5), 0.0
    for seconds, wait in answers:
        now += wait
        detector.answered(seconds, now)
        assert not detector.is_suspect


@given(st.lists(waits, max_size=200), st.integers(6, 30))
def test_rare_single_failures_do_not_take_a_destination_down(gaps: list[float], every: int) -> None:
    detector, now = FailureDetector(SETTINGS, 0.0, lambda: 0.5), 0.0
    for number, gap in enumerate(gaps):
        now += gap
        if number % every == 0:
            detector.failed(now, "no answer")
        else:
            detector.answered(0.001, now)
        assert not detector.is_impaired


@given(events, jitters)
def test_failures_in_a_row_are_always_detected(history: list[tuple[str, float]], jitter: float) -> None:
    detector, now = FailureDetector(SETTINGS, 0.0, lambda: jitter), 0.0
    for event, wait in history:
        now += wait
        play(detector, now, event)
    for _ in range(SETTINGS.failures_until_down):
        detector.failed(now, "no answer")
    assert detector.is_down


@given(events, jitters)
def test_a_destination_recovers_from_any_history(history: list[tuple[str, float]], jitter: float) -> None:
    detector, now = FailureDetector(SETTINGS, 0.0, lambda: jitter), 0.0
    for event, wait in history:
        now += wait
        play(detector, now, event)
    began = now
    while detector.is_suspect:
        now = max(now, detector.probe_at)
        if detector.begin_probe(now):
            detector.probe_answered(0.001, now)
    assert now - began <= SETTINGS.max_stay_seconds + SETTINGS.probe_timeout_seconds + 3 * SETTINGS.max_probe_seconds


@given(events, jitters)
def test_state_times_are_ordered_and_down_implies_impaired(history: list[tuple[str, float]], jitter: float) -> None:
    detector, now = FailureDetector(SETTINGS, 0.0, lambda: jitter), 0.0
    since = transitions = 0.0
    for event, wait in history:
        now += wait
        play(detector, now, event)
        standing = detector.state()
        assert since <= standing.since <= now
        assert transitions <= standing.transitions <= transitions + 2
        since, transitions = standing.since, standing.transitions
        assert detector.is_impaired or not detector.is_down
        assert detector.is_suspect or not detector.is_impaired
        assert bool(standing.reason) == detector.is_suspect
        assert (detector.probe_at == inf) == (not detector.is_suspect)


@given(st.floats(10, 300), jitters)
def test_the_number_of_flaps_is_bounded(seconds: float, jitter: float) -> None:
    """The worst case: every probe is answered and no request is."""
    detector, now = FailureDetector(SETTINGS, 0.0, lambda: jitter), 0.0
    while now < seconds:
        if not detector.is_down:
            detector.failed(now, "no answer")
        elif detector.begin_probe(now):
            detector.probe_answered(0.001, now)
        now += 0.02
    # Doubling from the first probe's interval to the longest stay takes nine flaps; from then on each costs that stay.
    assert detector.transitions <= 2 * (10 + seconds / SETTINGS.max_stay_seconds)


@given(st.integers(2, 4), jitters)
def test_regular_losses_are_noticed_without_failures_in_a_row(every: int, jitter: float) -> None:
    detector = FailureDetector(SETTINGS, 0.0, lambda: jitter)
    for number in range(WINDOW):
        if number % every == 0:
            detector.failed(number * 0.1, "no answer")
        else:
            detector.answered(0.001, number * 0.1)
    assert detector.is_impaired
    assert not detector.is_down


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.floats(0, 10)), max_size=50))
def test_retries_never_exceed_their_share(steps: list[tuple[int, int, float]]) -> None:
    settings = RetrySettings(share=0.1, burst=20, per_second=1)
    budget, now, answered, repeated = RetryBudget(settings, 0.0), 0.0, 0, 0
    for answers, wanted, wait in steps:
        now += wait
        budget.earn(answers)
        answered += answers
        repeated += sum(budget.spend(now) for _ in range(wanted))
        assert repeated <= settings.share * answered + settings.per_second * now + settings.burst + 1e-6
