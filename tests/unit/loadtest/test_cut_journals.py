"""`cut_journals` finds registers that are not the join of the accepted operations."""

from __future__ import annotations

from loadtest.faults.cut_journals import _CLOCK_US, _Edge, _Operation
from tao.model.edge_states import State

ARCHIVED, NORMAL = State.ARCHIVED, State.NORMAL


def test_with_times_of_the_caller_only_the_newest_operation_is_right() -> None:
    edge = _Edge(1, 2, is_stamped=False, operations=[_Operation(NORMAL, 7, 50, 50), _Operation(ARCHIVED, 8, 40, 40)])
    assert edge.judge(NORMAL, 50, 50, 7)
    assert not edge.judge(ARCHIVED, 40, 40, 8)
    assert not edge.judge(NORMAL, 50, 50, 8)


def test_with_times_of_the_journal_the_winner_may_not_be_older_than_another() -> None:
    late = 10 * _CLOCK_US
    operations = [_Operation(NORMAL, 7, 0, 100), _Operation(ARCHIVED, 8, late, late + 100)]
    edge = _Edge(1, 2, is_stamped=True, operations=operations)
    assert edge.judge(ARCHIVED, late + 50, late + 50, 8)
    assert not edge.judge(NORMAL, 50, 50, 7)  # the other one was begun long after it
    assert not edge.judge(NORMAL, late + 50, late + 50, 7)  # it was accepted long before this time
    assert not edge.judge(ARCHIVED, late + 50, late, 8)
    assert not edge.judge(ARCHIVED, late + 50, late + 50, 9)
