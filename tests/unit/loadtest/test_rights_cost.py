"""The cost of rights: between two followers, each its own control, and within one process."""

from __future__ import annotations

from random import Random

from loadtest.rights import PairedCosts
from loadtest.rights_path import PathCosts


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


def test_what_rights_add_within_one_process_is_related_to_the_path_and_to_a_whole_follower() -> None:
    chance = Random(7)
    quadruples = [(2.0 * speed, 2.0 * speed * 1.03) for speed in (chance.uniform(0.9, 1.1) for _ in range(100))]
    figures = PathCosts(quadruples=quadruples).figures(follower_us=4.0)
    assert abs(figures["path_percent"] - 3.0) < 1e-6
    assert figures["added_us_low"] <= figures["added_us"] <= figures["added_us_high"]
    assert abs(figures["follower_percent"] - 100 * figures["added_us"] / 4.0) < 0.02
