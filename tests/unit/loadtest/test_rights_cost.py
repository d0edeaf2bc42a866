"""The cost of rights is the ratio of two followers with rights at one of them, divided by that without."""

from __future__ import annotations

from random import Random

from loadtest.rights import PairedCosts


def pairs(chance: Random, factor: float) -> list[tuple[float, float]]:
    """Return pairs whose second follower costs so many times the first, on a machine whose speed changes."""
    found = []
    for _ in range(20):
        cost = chance.uniform(1.0, 3.0)
        found.append((cost, cost * factor * chance.gauss(1.0, 0.002)))
    return found


def test_what_the_processes_differ_by_in_any_case_is_no_cost_of_rights() -> None:
    chance = Random(5)
    figures = PairedCosts(before=pairs(chance, 1.05), after=pairs(chance, 1.05 * 1.01)).figures()
    assert figures["cost_percent_low"] <= figures["cost_percent"] <= figures["cost_percent_high"]
    assert 0.7 < figures["cost_percent"] < 1.3
    assert figures["cost_percent_low"] > 0
    assert abs(figures["ratio"] - 1.0605) < 0.005
    assert figures["ratio_low"] <= figures["ratio"] <= figures["ratio_high"]


def test_rights_that_cost_nothing_have_an_interval_around_nothing() -> None:
    chance = Random(6)
    figures = PairedCosts(before=pairs(chance, 0.97), after=pairs(chance, 0.97)).figures()
    assert figures["cost_percent_low"] < 0 < figures["cost_percent_high"]
