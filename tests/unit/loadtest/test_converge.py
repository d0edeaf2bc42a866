"""The plan of a run that looks for differences: bounded, drawn from a seed, and a fault of any kind is reported."""

from random import Random

import pytest

from loadtest.faults.converge import CollidingLoad, ConvergeOptions
from loadtest.faults.harness import Outcome
from loadtest.faults.plan import random_moments
from loadtest.results import missed
from tao.model.errors import OperatorError


def test_a_seed_decides_when_whom_and_how_long_in_the_order_of_the_moments() -> None:
    plan = random_moments(10, Random(7))
    assert plan == random_moments(10, Random(7))
    assert plan != random_moments(10, Random(8))
    assert [fault.share for fault in plan] == sorted(fault.share for fault in plan)
    assert all(0 < fault.share < 1 for fault in plan)


def test_no_more_writes_are_issued_than_asked_for() -> None:
    load = CollidingLoad(2)
    assert [load.take() for _ in range(3)] == [True, True, False]
    assert (load.issued, load.describe()[1]) == (2, 1.0)


def test_a_difference_or_a_lost_object_is_a_fault_reported_with_an_example() -> None:
    outcome = Outcome()
    right = outcome.demands({"differences": {}, "missing_objects": 0}, ["differences", "missing_objects"])
    assert missed(right, ["east-follower-1a: object 1"]) == []
    wrong = outcome.demands(
        {"differences": {"replica: assocs": 2}, "missing_objects": None}, ["differences", "missing_objects"]
    )
    assert missed(wrong, ["east-follower-1a: object 1"]) == ["no differences: 2", "east-follower-1a: object 1"]


def test_a_run_that_ended_early_is_a_fault() -> None:
    outcome = Outcome(not_well="east-db-1 has no replica")
    assert "east-db-1 has no replica" in missed(outcome.demands({}, []))[0]


@pytest.mark.parametrize("wrong", [{"writes": -1}, {"tailer_kills": 10_000}, {"link_cuts": -1}])
def test_numbers_out_of_bounds_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(OperatorError, match="give a number"):
        ConvergeOptions(**wrong)
