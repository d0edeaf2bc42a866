"""The plan of a run that looks for differences: bounded, drawn from a seed, and a fault of any kind is told."""

from random import Random

import pytest

from loadtest.faults.converge import Converged, ConvergeOptions, WriteTally, faults_in
from loadtest.faults.plan import random_moments
from tao.model.errors import OperatorError


def converged(differences: dict[str, int], missing_objects: int = 0) -> Converged:
    return Converged(
        writes={"issued": 1, "acknowledged": 1},
        failed={},
        reads=0,
        failed_reads={},
        tailer_kills=0,
        link_cuts=0,
        seed=1,
        writing_seconds=1.0,
        quiet_seconds=1.0,
        compared={"cached entries": 1},
        differences=differences,
        missing_objects=missing_objects,
        examples=["east-follower-1a: object 1"],
    )


def test_a_seed_decides_when_whom_and_how_long_in_the_order_of_the_moments() -> None:
    plan = random_moments(10, Random(7))
    assert plan == random_moments(10, Random(7))
    assert plan != random_moments(10, Random(8))
    assert [fault.share for fault in plan] == sorted(fault.share for fault in plan)
    assert all(0 < fault.share < 1 for fault in plan)


def test_no_more_writes_are_issued_than_asked_for() -> None:
    tally = WriteTally(2)
    assert [tally.take() for _ in range(3)] == [True, True, False]
    assert tally.issued == 2


def test_a_tally_that_is_closed_issues_nothing_more() -> None:
    tally = WriteTally(10)
    assert tally.take()
    tally.close()
    assert not tally.take()


def test_nothing_that_differs_is_no_fault() -> None:
    assert faults_in(converged({})) == []


def test_a_difference_or_a_lost_object_is_a_fault_reported_with_an_example() -> None:
    assert faults_in(converged({"replica: assocs": 2})) == ["replica: assocs: 2", "east-follower-1a: object 1"]
    assert faults_in(converged({}, missing_objects=3))[0] == "acknowledged objects that are lost: 3"


@pytest.mark.parametrize("wrong", [{"writes": -1}, {"tailer_kills": 10_000}, {"link_cuts": -1}])
def test_numbers_out_of_bounds_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(OperatorError, match="give a number"):
        ConvergeOptions(**wrong)
