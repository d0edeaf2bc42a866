"""The time that each hop has for a request, and the retry budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.model.errors import DeadlineExceeded, SettingsError
from tao.routing.budgets import MIN_MARGIN_SECONDS, MIN_WORK_SECONDS, RetryBudget, RetrySettings, work_seconds


@given(st.integers(10, (1 << 32) - 1))
def test_each_hop_keeps_a_margin_of_the_time_left(deadline_ms: int) -> None:
    left = work_seconds(deadline_ms)
    assert MIN_WORK_SECONDS <= left <= deadline_ms / 1000 - MIN_MARGIN_SECONDS


@pytest.mark.parametrize("deadline_ms", [0, 1, 9])
def test_a_deadline_that_is_too_short_is_rejected_with_a_retryable_error(deadline_ms: int) -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        work_seconds(deadline_ms)
    assert caught.value.retryable


def test_every_hop_from_client_to_database_has_time_to_answer() -> None:
    hops = [2.0]
    for _ in range(3):  # follower, slave leader, master leader
        hops.append(work_seconds(int(hops[-1] * 1000)))
    assert hops == pytest.approx([2.0, 1.9, 1.805, 1.715], abs=0.002)


def test_a_burst_of_retries_is_allowed_and_then_answers_pay_for_more() -> None:
    budget = RetryBudget(RetrySettings(share=0.5, burst=3, per_second=0), 0.0)
    assert [budget.spend(0.0) for _ in range(4)] == [True, True, True, False]
    budget.earn()
    assert not budget.spend(0.0)
    budget.earn()
    assert budget.spend(0.0)
    assert budget.figures() == {"spent": 4, "exhausted": 2, "left": 0.0}


def test_time_alone_pays_for_few_retries() -> None:
    budget = RetryBudget(RetrySettings(burst=1, per_second=2), 10.0)
    assert budget.spend(10.0)
    assert not budget.spend(10.4)
    assert budget.spend(10.5)


@pytest.mark.parametrize("wrong", [{"share": 2.0}, {"burst": 0.0}, {"per_second": -1.0}])
def test_invalid_retry_settings_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        RetrySettings(**wrong)
