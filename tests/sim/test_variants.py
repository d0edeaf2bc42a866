"""The simulator notices when the product's rules are broken (`tests.sim.variants`)."""

from __future__ import annotations

import pytest

from tests.sim.broken import Variant
from tests.sim.plans import first_acts
from tests.sim.runs import run
from tests.sim.variants import VARIANTS, find


@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name.replace(" ", "_"))
def test_a_broken_rule_is_noticed(variant: Variant) -> None:
    outcome, seeds = find(variant)
    assert outcome is not None, f"nothing was noticed in {seeds} seeds"
    assert outcome.violation is not None
    # This rule is missing, and not another, nor did the rig break with it.
    assert outcome.violation.invariant in variant.violates, outcome.violation
    assert run(first_acts(outcome.plan, outcome.acts)).violation is None, "the plan fails without the variant, too"
