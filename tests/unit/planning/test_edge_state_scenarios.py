"""Scenarios of archived and removed edges in long lists, as a store of follower lists has them."""

from __future__ import annotations

import itertools
import random

from tao.model.edge_states import State
from tao.model.graph import ListKey
from tao.model.ids import make_id
from tao.model.writes import AssocMerge
from tests.unit.planning.stored_rows import HIGH, LOW, NOW, StoredRows
from tests.unit.planning.test_edge_states import FOLLOWS, SCHEMA, counts, merge, run, stored_rows

NOW_US = NOW * 1000
NORMAL, NEGATIVE, ARCHIVED, REMOVED = State
OTHERS = [make_id(2, NOW, 0) + number for number in range(500)]


def operation(id2: int, state: State, at: int, time: int = 0) -> AssocMerge:
    payload_us = NOW_US + at if time else 0
    return AssocMerge(LOW, FOLLOWS, id2, state, NOW_US + at, bool(time), payload_us, time)


def in_order(stored: StoredRows, atype: int) -> list[int]:
    """Return the list's edges as readers see them: newest first."""
    edges = [edge for key, edge in stored.rows.edges.items() if (key.id1, key.atype) == (LOW, atype)]
    return [edge.id2 for edge in sorted(edges, key=lambda edge: (edge.time, edge.id2), reverse=True)]


def test_restored_edges_keep_their_position() -> None:
    stored, some = stored_rows(), OTHERS[:20]
    for time, id2 in enumerate(some, start=1):
        run(stored, operation(id2, NORMAL, time, time))
    before = in_order(stored, 11)
    assert before == some[::-1]
    for id2 in random.Random(3).sample(some, 20):
        run(stored, operation(id2, ARCHIVED, 100))
    assert (in_order(stored, 11), in_order(stored, 211)) == ([], before)
    for id2 in random.Random(4).sample(some, 20):
        run(stored, operation(id2, NORMAL, 200))
    assert in_order(stored, 11) == before


def test_negative_edges_are_apart_from_normal_ones() -> None:
    stored = stored_rows()
    run(stored, operation(OTHERS[0], NORMAL, 1, 1), operation(OTHERS[1], NEGATIVE, 2, 2))
    assert (in_order(stored, 11), in_order(stored, 213)) == ([OTHERS[0]], [OTHERS[1]])
    run(stored, operation(OTHERS[0], NEGATIVE, 3), operation(OTHERS[1], NORMAL, 4))
    assert (in_order(stored, 11), in_order(stored, 213)) == ([OTHERS[1]], [OTHERS[0]])


def test_follow_unfollow_follow_within_one_microsecond_has_the_same_result_everywhere() -> None:
    for order in itertools.permutations([merge(NORMAL, 5, 7), merge(REMOVED, 5), merge(NORMAL, 5, 8)]):
        stored = stored_rows()
        for write in order:
            run(stored, write)
        assert counts(stored) == {(LOW, 212): 1, (HIGH, 222): 1}
        edge = stored.edge(LOW, 212, HIGH)
        assert edge is not None
        assert edge.time == 8


def test_five_hundred_adds_and_fifty_removes_between_archivals_leave_four_hundred_fifty_archived() -> None:
    rng = random.Random(9)
    operations = [operation(id2, NORMAL, 1, number) for number, id2 in enumerate(OTHERS, start=1)]
    operations += [operation(id2, REMOVED, 100) for id2 in OTHERS[:50]]
    for round_ in range(5):
        operations += [operation(id2, ARCHIVED, 10 + 20 * round_) for id2 in OTHERS[50:]]
        operations += [operation(id2, NORMAL, 20 + 20 * round_) for id2 in OTHERS[50:]]
    operations += [operation(id2, ARCHIVED, 1000) for id2 in OTHERS[50:]]
    rng.shuffle(operations)
    stored = stored_rows()
    for start in range(0, len(operations), 64):
        run(stored, *operations[start : start + 64])
    listed = {state: stored.rows.lists.get(ListKey(LOW, SCHEMA.atype(FOLLOWS).states[state])) for state in State}
    assert {state: row.count for state, row in listed.items() if row is not None and row.count} == {
        ARCHIVED: 450,
        REMOVED: 50,
    }
