"""States of whole nodes: where new edges go, and what moving a page of edges does at both ends."""

from __future__ import annotations

import msgspec
import pytest

from tao.model.changes import ListChange
from tao.model.edge_states import NO_OPERATION, EdgeRegisters, NodeState, State
from tao.model.errors import InvalidArgument, OperationAhead, OperationTooOld
from tao.model.graph import EdgeKey, ListKey
from tao.model.jobs import JobState
from tao.model.relay import Touch
from tao.model.writes import (
    AssocAdd,
    AssocMerge,
    JoinedEdge,
    JoinEdges,
    NodeSetState,
    PlacedPage,
    PlaceEdges,
    PurgeEdge,
    ReadState,
    SettleEdge,
    TouchKeys,
    Write,
)
from tao.planning.coordination import PlannedWrite, lane_keys
from tao.planning.row_events import translate
from tao.planning.write_plan import WritePlan
from tests.unit.planning.row_events_of import row_events_of
from tests.unit.planning.stored_rows import HIGH, LOW, NOW, StoredRows, on_shard
from tests.unit.planning.test_edge_states import (
    ARCHIVED,
    BLOCKS,
    DAY_US,
    FOLLOWED_BY,
    FOLLOWS,
    NEGATIVE,
    NORMAL,
    NOW_US,
    REMOVED,
    SCHEMA,
    counts,
    merge,
    run,
    stored_rows,
)


def set_state(stored: StoredRows, node: int, state: State, at: int = 0, *atypes: int) -> WritePlan:
    job_id = on_shard(4, len(stored.rows.jobs))
    return run(stored, NodeSetState(node, atypes or (FOLLOWS, FOLLOWED_BY), state, at and NOW_US + at, job_id))


def walk(stored: StoredRows, node: int, limit: int = 500) -> int:
    """Do what the job of a node does. Returns the number of edges."""
    walked = 0
    for atype in (FOLLOWS, FOLLOWED_BY):
        after, is_first = 0, True
        while after or is_first:
            page = page_of(run(stored, PlaceEdges(node, atype, after, limit)))
            for copy in page.copies:
                run(stored, copy)
            after, is_first = page.next_after, False
            walked += page.edges
    return walked


def page_of(plan: WritePlan) -> PlacedPage:
    (outcome,) = plan.outcomes
    assert outcome.page is not None
    return outcome.page


def add(id2: int, time: int, id1: int = LOW) -> AssocAdd:
    return AssocAdd(id1, FOLLOWS, id2, time, b"")


def effective(stored: StoredRows, id1: int, atype: int, id2: int) -> State:
    outcome = run(stored, ReadState(id1, atype, id2)).outcomes[0]
    assert outcome.registers is not None
    return outcome.registers.effective_state(outcome.node.state)


DAY_MS = DAY_US // 1000
OTHERS = [on_shard(3, number) for number in range(7)]


def test_restoring_a_node_leaves_individually_archived_edges_archived() -> None:
    stored = stored_rows()
    run(stored, *(add(other, time) for time, other in enumerate(OTHERS, start=1)))
    run(stored, AssocMerge(LOW, FOLLOWS, OTHERS[2], ARCHIVED), AssocMerge(LOW, FOLLOWS, OTHERS[4], REMOVED))
    before = dict(stored.rows.edges), counts(stored)
    set_state(stored, LOW, ARCHIVED)
    assert walk(stored, LOW) == 7
    assert counts(stored)[LOW, 211] == 6
    assert (LOW, 11) not in counts(stored)
    assert counts(stored)[LOW, 212] == 1
    assert [counts(stored)[other, 221] for other in OTHERS if other != OTHERS[4]] == [1] * 6
    set_state(stored, LOW, NORMAL)
    walk(stored, LOW)
    assert (dict(stored.rows.edges), counts(stored)) == before


def test_negative_state_survives_archive_and_restore_of_the_node() -> None:
    stored = stored_rows()
    run(stored, merge(NEGATIVE, 1, 7))
    before = dict(stored.rows.edges)
    for state in (ARCHIVED, REMOVED):
        set_state(stored, HIGH, state)
        walk(stored, HIGH)
        assert counts(stored) == {(LOW, 209 + state): 1, (HIGH, 219 + state): 1}
    set_state(stored, HIGH, NORMAL)
    walk(stored, HIGH)
    assert stored.rows.edges == before


@pytest.mark.parametrize("node", [LOW, HIGH])
@pytest.mark.parametrize("id1", [LOW, HIGH])
def test_edge_to_an_archived_node_is_archived_at_both_ends(node: int, id1: int) -> None:
    stored = stored_rows()
    set_state(stored, node, ARCHIVED)
    outcome = run(stored, add(LOW + HIGH - id1, 7, id1)).outcomes[0]
    assert outcome.registers is not None
    assert outcome.registers.effective_state(outcome.node.state) is ARCHIVED
    assert not outcome.superseded
    assert counts(stored) == {(id1, 211): 1, (LOW + HIGH - id1, 221): 1}


@pytest.mark.parametrize("node", [LOW, HIGH])
def test_an_edge_that_is_written_side_by_side_is_archived_once_both_ends_agree(node: int) -> None:
    stored = stored_rows()
    set_state(stored, node, ARCHIVED)
    plan = run(stored, add(HIGH, 7), both_sides=False)
    assert plan.settles[0] is not None
    (settle,) = plan.settles[0]
    (far,) = stored.run(settle, schema=SCHEMA).outcomes
    assert far.registers is not None
    assert counts(stored)[HIGH, 221] == 1
    if node == HIGH:
        # The far side has answered that the edge is raised: the coordinator plans once more.
        assert far.node.state is ARCHIVED or far.node.state == ARCHIVED
        near = far.registers.with_id2(far.node)
        run(stored, type(settle)(LOW, FOLLOWS, HIGH, True, 7, registers=near))
    assert counts(stored) == {(LOW, 211): 1, (HIGH, 221): 1}


def test_edge_between_two_archived_nodes_stays_hidden_when_one_is_restored() -> None:
    stored = stored_rows()
    run(stored, add(HIGH, 7))
    for node in (LOW, HIGH):
        set_state(stored, node, ARCHIVED)
        walk(stored, node)
    set_state(stored, LOW, NORMAL)
    walk(stored, LOW)
    assert counts(stored) == {(LOW, 211): 1, (HIGH, 221): 1}
    assert effective(stored, LOW, FOLLOWS, HIGH) is effective(stored, HIGH, FOLLOWED_BY, LOW) is ARCHIVED
    set_state(stored, HIGH, NORMAL)
    walk(stored, HIGH)
    assert counts(stored) == {(LOW, 11): 1, (HIGH, 12): 1}


def test_a_page_that_is_done_again_raises_no_version_and_notifies_nobody() -> None:
    stored = stored_rows()
    run(stored, *(add(other, 7) for other in OTHERS))
    set_state(stored, LOW, ARCHIVED)
    walk(stored, LOW)
    plan = run(stored, PlaceEdges(LOW, FOLLOWS, 0, 500))
    assert (plan.changes, bool(plan.rows)) == ((), False)
    for copy in page_of(plan).copies:
        again = run(stored, copy)
        assert (again.changes, bool(again.rows)) == ((), False)


def test_pages_have_every_edge_once_while_the_edges_move_between_lists() -> None:
    stored = stored_rows()
    run(stored, *(add(other, 7) for other in OTHERS))
    run(stored, AssocMerge(LOW, FOLLOWS, OTHERS[0], ARCHIVED), AssocMerge(LOW, FOLLOWS, OTHERS[5], REMOVED))
    set_state(stored, LOW, ARCHIVED)
    for limit in (1, 2, 3, 7, 8):
        after, id2s = 0, []
        while True:
            page = page_of(run(stored, PlaceEdges(LOW, FOLLOWS, after, limit)))
            id2s += [copy.id1 for copy in page.copies]
            assert page.edges == len(page.copies) <= limit
            after = page.next_after
            if not after:
                break
        assert id2s == OTHERS


def test_an_operation_that_is_attempted_again_with_its_time_adds_one_job() -> None:
    stored = stored_rows()
    first = set_state(stored, LOW, ARCHIVED, 5).outcomes[0].job
    assert first is not None
    again = set_state(stored, LOW, ARCHIVED, 5).outcomes[0].job
    assert again is not None
    assert (again.id, list(stored.rows.jobs)) == (first.id, [first.id])
    stored.rows.jobs[first.id] = msgspec.structs.replace(first, state=JobState.CANCELLED)
    third = set_state(stored, LOW, ARCHIVED, 5).outcomes[0].job
    assert third is not None
    assert third.id != first.id, "the job was cancelled: the edges are to be moved all the same"
    other = set_state(stored, LOW, NORMAL, 6).outcomes[0].job
    assert other is not None
    stored.rows.jobs[other.id] = msgspec.structs.replace(other, body=b"of another operation")
    assert set_state(stored, LOW, NORMAL, 6).outcomes[0].job != other


def test_a_newer_operation_on_the_node_wins_in_any_order_and_a_job_of_the_older_one_follows_it() -> None:
    stored = stored_rows()
    run(stored, *(add(other, 7) for other in OTHERS))
    set_state(stored, LOW, ARCHIVED, 5)
    page = page_of(run(stored, PlaceEdges(LOW, FOLLOWS, 0, 3)))
    plan = set_state(stored, LOW, NORMAL, 9)
    assert not plan.outcomes[0].superseded
    assert set_state(stored, LOW, REMOVED, 7).outcomes[0].superseded
    walk(stored, LOW)
    # Copies of the older operation arrive late: what a far end knows of the node is a register, too.
    for copy in page.copies:
        run(stored, copy)
    assert counts(stored) == {(LOW, 11): 7, **{(other, 12): 1 for other in OTHERS}}
    assert stored.rows.nodes[ListKey(LOW, FOLLOWS)] == NodeState(NOW_US + 9, NORMAL)


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_row_of_a_restored_node_mends_an_end_that_missed_it_and_nothing_else_would(is_kept: bool) -> None:
    stored = stored_rows()
    run(stored, add(HIGH, 1))
    set_state(stored, LOW, ARCHIVED)
    walk(stored, LOW)
    set_state(stored, LOW, NORMAL)  # and its job is cancelled, or its last commits are lost with a master
    if not is_kept:
        del stored.rows.nodes[ListKey(LOW, FOLLOWS)]
    run(stored, add(HIGH, 2))
    walk(stored, LOW)
    assert effective(stored, LOW, FOLLOWS, HIGH) is NORMAL
    assert effective(stored, HIGH, FOLLOWED_BY, LOW) is (NORMAL if is_kept else ARCHIVED)


def test_only_the_edges_of_the_named_types_are_hidden() -> None:
    stored = stored_rows()
    run(stored, add(HIGH, 7), add(LOW, 8, HIGH))
    set_state(stored, LOW, ARCHIVED, 0, FOLLOWS)
    assert walk(stored, LOW) == 2
    assert counts(stored) == {(LOW, 211): 1, (HIGH, 221): 1, (HIGH, 11): 1, (LOW, 12): 1}


def test_a_type_without_an_inverse_is_hidden_at_its_one_end() -> None:
    stored = stored_rows()
    run(stored, AssocAdd(LOW, BLOCKS, HIGH, 7, b""))
    set_state(stored, LOW, REMOVED, 0, BLOCKS)
    page = page_of(run(stored, PlaceEdges(LOW, BLOCKS, 0, 10)))
    assert (page.copies, page.edges, page.next_after) == ((), 1, 0)
    assert counts(stored) == {(LOW, 312): 1}
    set_state(stored, LOW, NORMAL, 0, BLOCKS)
    run(stored, PlaceEdges(LOW, BLOCKS, 0, 10))
    assert counts(stored) == {(LOW, 31): 1}


def test_an_edge_from_a_node_to_itself_follows_its_node() -> None:
    stored = stored_rows()
    run(stored, add(LOW, 7))
    set_state(stored, LOW, ARCHIVED)
    walk(stored, LOW)
    assert counts(stored) == {(LOW, 211): 1, (LOW, 221): 1}
    set_state(stored, LOW, NORMAL)
    walk(stored, LOW)
    assert counts(stored) == {(LOW, 11): 1, (LOW, 12): 1}


def test_a_row_of_a_foreign_writer_is_hidden_and_restored_as_it_was() -> None:
    stored = stored_rows()
    stored.put_edge(LOW, 213, HIGH, 7)
    set_state(stored, LOW, ARCHIVED)
    walk(stored, LOW)
    assert counts(stored) == {(LOW, 211): 1, (HIGH, 221): 1}
    set_state(stored, LOW, NORMAL)
    walk(stored, LOW)
    assert counts(stored) == {(LOW, 213): 1, (HIGH, 223): 1}


def test_a_copy_of_a_page_makes_a_far_end_whose_own_copy_is_under_way() -> None:
    stored = stored_rows()
    late = run(stored, add(HIGH, 7), both_sides=False).settles[0]
    assert late is not None
    set_state(stored, LOW, ARCHIVED)
    walk(stored, LOW)
    assert counts(stored) == {(LOW, 211): 1, (HIGH, 221): 1}
    run(stored, *late)
    assert counts(stored) == {(LOW, 211): 1, (HIGH, 221): 1}


def test_edges_that_are_joined_together_end_as_those_that_are_joined_one_by_one() -> None:
    ends: list[tuple[object, ...]] = []
    for together in (False, True):
        stored = stored_rows()
        run(stored, *(add(other, time) for time, other in enumerate(OTHERS, start=1)))
        set_state(stored, OTHERS[1], REMOVED)
        run(stored, AssocMerge(OTHERS[2], FOLLOWED_BY, LOW, ARCHIVED, NOW_US + 5))
        set_state(stored, LOW, ARCHIVED)
        copies = page_of(run(stored, PlaceEdges(LOW, FOLLOWS, 0, 500))).copies
        if together:
            plan = stored.plan(JoinEdges(copies), schema=SCHEMA)
            (part,) = translate(row_events_of(stored.rows, plan.rows, SCHEMA), SCHEMA).messages
            assert part.messages == plan.changes, "leader and tailer say the same"
            joined = list(run(stored, JoinEdges(copies)).outcomes[0].joined)
        else:
            outcomes = [run(stored, copy).outcomes[0] for copy in copies]
            joined = [JoinedEdge(each.registers or NO_OPERATION, each.node) for each in outcomes]
        rows = stored.rows
        ends.append((joined, rows.edges, rows.registers, {key: each.count for key, each in rows.lists.items()}))
    assert ends[0] == ends[1]


def test_writes_of_an_edge_of_its_node_and_touches_of_any_of_its_lists_run_one_after_the_other() -> None:
    copy = SettleEdge(LOW, FOLLOWS, HIGH, True, registers=EdgeRegisters(state_us=1))
    writes: list[Write] = [
        add(HIGH, 1),
        ReadState(LOW, FOLLOWS, HIGH),
        copy,
        JoinEdges((copy,)),
        PlaceEdges(LOW, FOLLOWS, 0, 9),
        NodeSetState(LOW, (FOLLOWS,), ARCHIVED),
        *(TouchKeys(0, (Touch(LOW, number, 1),)) for number in SCHEMA.atype(FOLLOWS).state_numbers),
    ]
    for write in writes:
        assert ListKey(LOW, FOLLOWS) in lane_keys(PlannedWrite(write, True), SCHEMA)


def test_leader_and_tailer_report_the_same_changeset_for_a_page() -> None:
    stored = stored_rows()
    run(stored, *(add(other, 7) for other in OTHERS))
    set_state(stored, LOW, ARCHIVED)
    plan = stored.plan(PlaceEdges(LOW, FOLLOWS, 0, 500), schema=SCHEMA)
    translated = translate(row_events_of(stored.rows, plan.rows, SCHEMA), SCHEMA)
    (part,) = translated.messages
    assert part.messages == plan.changes
    assert (translated.touches, translated.passed_over, translated.unknown_columns) == ((), 0, 0)
    moved = [change for change in plan.changes if isinstance(change, ListChange)]
    assert [(change.atype, len(change.gone), len(change.put)) for change in moved] == [(11, 7, 0), (211, 0, 7)]
    states = stored.plan(NodeSetState(LOW, (FOLLOWS,), NORMAL, job_id=LOW + 1), schema=SCHEMA)
    assert states.changes == ()
    events = row_events_of(stored.rows, states.rows, SCHEMA)
    assert "node_states" in {event.table for event in events} <= {"node_states", "jobs"}
    assert translate(events, SCHEMA) == translate([], SCHEMA)


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (NodeSetState(LOW, (FOLLOWS,), NEGATIVE), "1 is no state of a node; its states are normal, archived, removed"),
        (NodeSetState(LOW, (FOLLOWS,), 4), "4 is no state of a node"),
        (NodeSetState(LOW, (), ARCHIVED), "atypes names no type"),
        (NodeSetState(LOW, (4,), ARCHIVED), "'likes' has no states"),
        (NodeSetState(LOW, (BLOCKS,), ARCHIVED), "no state 'archived'"),
        (NodeSetState(LOW, (211,), ARCHIVED), "holds the archived edges"),
        (NodeSetState(0, (FOLLOWS,), ARCHIVED), "id"),
        (NodeSetState(LOW, (FOLLOWS,), ARCHIVED, 2**63), "state_us"),
        (PlaceEdges(LOW, 4, 0, 500), "'likes' has no states"),
        (PlaceEdges(LOW, FOLLOWS, 0, 501), "1 to 500"),
        (PlaceEdges(LOW, FOLLOWS, 0, 0), "1 to 500"),
    ],
)
def test_what_no_node_can_have_is_refused(write: Write, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        run(stored_rows(), write)


def test_times_of_operations_on_nodes_are_bounded() -> None:
    with pytest.raises(OperationAhead):
        run(stored_rows(), NodeSetState(LOW, (FOLLOWS,), ARCHIVED, NOW_US + 61_000_000))
    with pytest.raises(OperationTooOld):
        run(stored_rows(), NodeSetState(LOW, (FOLLOWS,), ARCHIVED, NOW_US - 31 * DAY_US))


def test_an_operation_without_a_time_is_newer_than_all_before_it() -> None:
    stored = stored_rows()
    set_state(stored, LOW, ARCHIVED, 50_000_000)
    outcome = set_state(stored, LOW, NORMAL).outcomes[0]
    assert outcome.node == NodeState(NOW_US + 50_000_001, NORMAL)
    assert not outcome.superseded


def test_the_registers_of_both_ends_differ_by_what_they_know_of_each_other_alone() -> None:
    stored = stored_rows()
    set_state(stored, HIGH, ARCHIVED, 3)
    run(stored, add(HIGH, 7))
    near, far = stored.rows.registers[EdgeKey(LOW, 211, HIGH)], stored.rows.registers[EdgeKey(HIGH, 221, LOW)]
    assert near == EdgeRegisters(NORMAL, NOW_US, NOW_US, 7, b"", ARCHIVED, NOW_US + 3)
    assert far == EdgeRegisters(NORMAL, NOW_US, NOW_US, 7, b"")
    assert NOW * 1000 == NOW_US


def test_what_a_removed_node_hides_is_kept_from_its_last_removal_on() -> None:
    stored = stored_rows()
    run(stored, add(HIGH, 7))
    ends = {EdgeKey(LOW, 212, HIGH): FOLLOWS, EdgeKey(HIGH, 222, LOW): FOLLOWED_BY}

    def set_and_walk(day: int, state: State) -> None:
        write = NodeSetState(LOW, (FOLLOWS, FOLLOWED_BY), state, 0, on_shard(4, len(stored.rows.jobs)))
        run(stored, write, now=NOW + day * DAY_MS)
        walk(stored, LOW)

    def purged(day: int) -> list[bool]:
        """Purge both ends of the edge two hours after that day began."""
        now = NOW + day * DAY_MS + 2 * 3_600_000
        writes = [PurgeEdge(key.id1, atype, key.id2, stored.rows.registers[key]) for key, atype in ends.items()]
        return [run(stored, write, now=now).outcomes[0].found for write in writes]

    set_and_walk(0, REMOVED)
    set_and_walk(25, REMOVED)
    assert purged(30) == [False, False], "the second removal moves no row"
    set_and_walk(31, NORMAL)
    assert [effective(stored, LOW, FOLLOWS, HIGH), effective(stored, HIGH, FOLLOWED_BY, LOW)] == [NORMAL, NORMAL]
    set_and_walk(32, REMOVED)
    assert purged(61) == [False, False]
    assert purged(62) == [True, True]
