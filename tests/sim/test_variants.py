"""The simulator notices when the product's rules are broken (`tests.sim.variants`)."""

from __future__ import annotations

import msgspec
import pytest

from tests.sim.broken import Variant
from tests.sim.plans import Fault, Op, Shape, first_acts, make_plan
from tests.sim.runs import run
from tests.sim.variants import VARIANTS, find, pending_inverse_ignored


@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name.replace(" ", "_"))
def test_a_broken_rule_is_noticed(variant: Variant) -> None:
    outcome, seeds = find(variant)
    assert outcome is not None, f"nothing was noticed in {seeds} seeds"
    assert outcome.violation is not None
    # This rule is missing, and not another, nor did the rig break with it.
    assert outcome.violation.invariant in variant.violates, outcome.violation
    assert run(first_acts(outcome.plan, outcome.acts)).violation is None, "the plan fails without the variant, too"


def test_reads_without_what_their_tokens_name_as_pending_are_noticed() -> None:
    """Plans that are drawn seldom cut the two leaders of an edge from each other while its client reads the far end."""
    plan = make_plan(1, 1, Shape(regions=1, leaders=2, tiers=1), kinds={}, with_counters=False)
    ops = [
        op
        for number in range(24)
        for op in (
            Op(21.0 + number, 0, "assoc_add", number % 6, number * 5 % 6 + 6, "friend", number + 1),
            Op(21.6 + number, 0, "assoc_range", number * 5 % 6 + 6, 0, "friend", 20, "tokens"),
        )
    ]
    leaders_cut = Fault(20.0, "cut pair", 0, 1, 30.0)
    plan = msgspec.structs.replace(plan, ops=tuple(ops), faults=(leaders_cut,))
    assert run(plan).violation is None
    violation = run(plan, pending_inverse_ignored).violation
    assert violation is not None
    assert violation.invariant == "3"
