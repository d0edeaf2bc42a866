"""How much may be asked again (DESIGN.md §9)."""

from __future__ import annotations

import pytest

from tao.model.errors import SettingsError
from tao.routing.retry_budget import RetryBudget, RetrySettings


def test_a_burst_is_allowed_and_then_answers_pay() -> None:
    budget = RetryBudget(RetrySettings(share=0.5, burst=3, per_second=0), 0.0)
    assert [budget.spend(0.0) for _ in range(4)] == [True, True, True, False]
    budget.earn()
    assert not budget.spend(0.0)
    budget.earn()
    assert budget.spend(0.0)
    assert budget.figures() == {"spent": 4, "exhausted": 2, "left": 0.0}


def test_time_alone_pays_for_little() -> None:
    budget = RetryBudget(RetrySettings(burst=1, per_second=2), 10.0)
    assert budget.spend(10.0)
    assert not budget.spend(10.4)
    assert budget.spend(10.5)


@pytest.mark.parametrize("wrong", [{"share": 2.0}, {"burst": 0.0}, {"per_second": -1.0}])
def test_budgets_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        RetrySettings(**wrong)
