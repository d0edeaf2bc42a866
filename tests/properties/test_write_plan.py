"""The write planner against a naive model of the graph: random batches, both sides at once or one side with an intent.

The model is a dictionary of edges without rows, versions, sides or intents. Whatever the batches were, the
coordinators' rows equal the model's edges at once, and every mirror does when its intents have been settled.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tao.model.changes import ListChange, ListInvalidation, ObjectChange, sort_edges
from tao.model.errors import InvalidArgument, InvalidField, RequestError, WrongType
from tao.model.graph import Edge, EdgeKey, ListKey, deleted_data
from tao.model.rows import ExistingRows
from tao.model.versions import counter_of, next_version
from tao.model.writes import (
    AssocAdd,
    AssocChangeType,
    AssocDelete,
    ForgetIntent,
    ObjAdd,
    ObjDelete,
    ObjUpdate,
    Write,
    WriteOutcome,
)
from tao.planning.coordination import coordinator_side
from tao.planning.draft import IdTaken, coordinator_edges_of, settle_writes
from tao.planning.write_plan import WritePlan
from tao.schema.codec import decode_fields, encode_fields, encode_patch
from tests.rigs.effort import examples
from tests.unit.planning.stored_rows import (
    FOLLOWS,
    FRIEND,
    LIKED_BY,
    LIKES,
    NOTE,
    NOW,
    PAGE,
    SCHEMA,
    TAGGED_IN,
    TAGS,
    USER,
    StoredRows,
    on_shard,
)

IDS = [on_shard(0), on_shard(1, 0), on_shard(1, 1), on_shard(2)]
ATYPES = [FRIEND, LIKES, LIKED_BY, FOLLOWS, NOTE, TAGS, TAGGED_IN]
HEAVY = encode_fields(SCHEMA.atype(LIKES), {"weight": 9})
Triple = tuple[int, int, int]

ids = st.sampled_from(IDS)
atypes = st.sampled_from(ATYPES)
ages = st.one_of(st.none(), st.integers(0, 2))


def _add(id1: int, atype: int, id2: int, time: int, heavy: bool) -> AssocAdd:
    return AssocAdd(id1, atype, id2, time, HEAVY if heavy and atype != NOTE else b"")


def _user(object_id: int, age: int | None, allocated: bool) -> ObjAdd:
    return ObjAdd(object_id, USER, encode_fields(SCHEMA.otype(USER), {"age": age}), allocated)


def _patch(object_id: int, otype: int, age: int | None) -> ObjUpdate:
    return ObjUpdate(object_id, otype, encode_patch(SCHEMA.otype(USER), {"age": age}) if otype != PAGE else b"")


edge_writes: st.SearchStrategy[Write] = st.one_of(
    st.builds(_add, ids, atypes, ids, st.integers(0, 3), st.booleans()),
    st.builds(AssocDelete, ids, atypes, ids),
    st.builds(AssocChangeType, ids, atypes, ids, atypes),
)
object_writes: st.SearchStrategy[Write] = st.one_of(
    st.builds(_user, ids, ages, st.booleans()),
    st.builds(_patch, ids, st.sampled_from([0, USER, PAGE]), ages),
    st.builds(ObjDelete, ids),
)
batches = st.lists(
    st.lists(st.tuples(st.one_of(edge_writes, edge_writes, object_writes), st.booleans()), min_size=1, max_size=8),
    min_size=1,
    max_size=6,
)


class Graph:
    """The graph as a caller of the API expects it."""

    def __init__(self) -> None:
        self.edges: dict[Triple, tuple[int, bytes]] = {}
        self.objects: dict[int, dict[str, object]] = {}
        self.deleted: set[int] = set()

    def ends(self, id1: int, atype: int, id2: int) -> set[Triple]:
        inverse = SCHEMA.atype(atype).inverse
        return {(id1, atype, id2)} if inverse is None else {(id1, atype, id2), (id2, inverse, id1)}

    def apply(self, write: Write, outcome: WriteOutcome, both_sides: bool) -> None:
        match write:
            case AssocAdd(id1, atype, id2, time, data):
                assert outcome.found == ((id1, atype, id2) in self.edges)
                for end in self.ends(id1, atype, id2):
                    self.edges[end] = (time, data)
            case AssocDelete(id1, atype, id2):
                assert outcome.found == ((id1, atype, id2) in self.edges)
                for end in self.ends(id1, atype, id2):
                    self.edges.pop(end, None)
            case AssocChangeType():
                self.change_type(write, outcome, both_sides)
            case ObjAdd(object_id, _, data, allocated):
                fields: dict[str, object] = dict(decode_fields(SCHEMA.otype(USER), data))
                if object_id not in self.objects and object_id not in self.deleted:
                    assert (outcome.found, outcome.error) == (False, None)
                    self.objects[object_id] = fields
                elif allocated:
                    assert isinstance(outcome.error, IdTaken)
                elif self.objects.get(object_id) == fields:
                    assert (outcome.found, outcome.error) == (True, None)
                else:
                    assert isinstance(outcome.error, InvalidArgument)
            case ObjUpdate(object_id, otype, patch):
                if object_id not in self.objects:
                    assert (outcome.found, outcome.error) == (False, None)
                elif otype == PAGE:
                    assert isinstance(outcome.error, WrongType)
                else:
                    assert (outcome.found, outcome.error) == (True, None)
                    self.objects[object_id]["age"] = decode_fields(SCHEMA.otype(USER), patch)["age"]
            case ObjDelete(object_id):
                assert outcome.found == (object_id in self.objects)
                if self.objects.pop(object_id, None) is not None:
                    self.deleted.add(object_id)

    def change_type(self, write: AssocChangeType, outcome: WriteOutcome, both_sides: bool) -> None:
        id1, atype, id2, new = write.id1, write.atype, write.id2, write.new_atype
        if type(outcome.error) is InvalidArgument:
            # No intent can express a change from the larger id between a type with and one without an inverse.
            assert not both_sides
            assert id1 > id2
            assert (SCHEMA.atype(atype).inverse is None) != (SCHEMA.atype(new).inverse is None)
            return
        found = self.edges.get((id1, atype, id2))
        if found is not None and found[1] and new == NOTE:
            assert isinstance(outcome.error, InvalidField)
            return
        assert (outcome.found, outcome.error) == (found is not None, None)
        if found is None or new == atype:
            return
        for end in self.ends(id1, atype, id2):
            del self.edges[end]
        for end in self.ends(id1, new, id2):
            self.edges[end] = found


def coordinated(triple: Triple) -> bool:
    """Return whether the row is authoritative, not a mirror."""
    return triple[0] <= triple[2] or SCHEMA.atype(triple[1]).inverse is None


def stored_edges(rows: ExistingRows) -> dict[Triple, tuple[int, bytes]]:
    return {(key.id1, key.atype, key.id2): (edge.time, edge.data) for key, edge in rows.edges.items()}


def list_of(rows: ExistingRows, key: ListKey) -> list[Edge]:
    return sort_edges(edge for where, edge in rows.edges.items() if (where.id1, where.atype) == (key.id1, key.atype))


def copy_of(rows: ExistingRows) -> ExistingRows:
    return ExistingRows(dict(rows.objects), dict(rows.lists), dict(rows.edges), dict(rows.intents))


def check_versions_and_changes(before: ExistingRows, after: ExistingRows, plan: WritePlan) -> None:
    """Check that versions rise by one where content changed, and that the changes carry a cache from before to
    after."""
    changed: list[object] = []
    for object_id, row in after.objects.items():
        old = before.objects.get(object_id)
        if row == old:
            continue
        assert row.version == next_version(0 if old is None else old.version, 1)
        otype, data = (0, deleted_data(row.otype)) if row.deleted else (row.otype, row.data)
        changed.append(ObjectChange(object_id, 0 if old is None else old.version, row.version, otype, data))
    for key, list_row in after.lists.items():
        old_list = before.lists.get(key)
        content = list_of(after, key)
        assert list_row.count == len(content)
        if list_row == old_list:
            assert content == list_of(before, key)
            continue
        assert content != list_of(before, key)
        assert counter_of(list_row.version) == 1 + (0 if old_list is None else counter_of(old_list.version))
        changed.append((key.id1, key.atype))
    assert len(changed) == len(plan.changes)
    for change in plan.changes:
        if isinstance(change, ObjectChange):
            assert change in changed
            continue
        assert isinstance(change, ListChange)  # only touches are reported as invalidations
        assert (change.id1, change.atype) in changed
        check_list_change(before, after, change)


def check_list_change(before: ExistingRows, after: ExistingRows, change: ListChange) -> None:
    key = ListKey(change.id1, change.atype)
    held = list_of(before, key)
    assert change.before == (before.lists[key].version if key in before.lists else 0)
    assert (change.after, change.count) == (after.lists[key].version, after.lists[key].count)
    gone = {(edge.id2, edge.time) for edge in change.gone}
    assert gone <= {(edge.id2, edge.time) for edge in held}
    put = {edge.id2 for edge in change.put}
    kept = [edge for edge in held if (edge.id2, edge.time) not in gone and edge.id2 not in put]
    assert sort_edges([*kept, *change.put]) == list_of(after, key)
    assert list(change.put) == sort_edges(change.put)


def check_shares(writes: list[Write], plan: WritePlan, after: ExistingRows) -> None:
    """Check that a writer's messages bring the list it named to its present version, unless it was never written."""
    for index, write in enumerate(writes):
        if plan.outcomes[index].error is not None:
            assert (plan.changes_of[index], plan.unchanged_of[index]) == ((), ())
            continue
        versions: dict[tuple[int, int], int] = {}
        for change in (plan.changes[at] for at in plan.changes_of[index]):
            if isinstance(change, ListChange):
                versions[change.id1, change.atype] = change.after
        for each in plan.unchanged_of[index]:
            if isinstance(each, ListInvalidation):
                versions[each.id1, each.atype] = each.version
        if isinstance(write, AssocAdd | AssocDelete):
            row = after.lists.get(ListKey(write.id1, write.atype))
            assert versions.get((write.id1, write.atype)) == (None if row is None else row.version)


def sides_of(batch: list[tuple[Write, bool]]) -> list[bool]:
    """Return whether each write is executed at both sides: all of a pair in a batch are, or none."""
    of_pair: dict[object, bool] = {None: True}
    return [of_pair.setdefault(coordinator_side(write, SCHEMA), both) for write, both in batch]


def settle_all(stored: StoredRows) -> list[ForgetIntent]:
    forgotten: list[ForgetIntent] = []
    for pair, intent in list(stored.rows.intents.items()):
        current = {key: stored.rows.edges[key] for key in coordinator_edges_of(intent) if key in stored.rows.edges}
        stored.settle(settle_writes(intent, current, SCHEMA))
        forget = ForgetIntent(pair.low_id, pair.high_id, intent.token)
        assert stored.run(forget).outcomes[0].found
        forgotten.append(forget)
    return forgotten


def owed_mirrors(rows: ExistingRows) -> set[Triple]:
    mirrors: set[Triple] = set()
    for intent in rows.intents.values():
        mirrors.update((each.id1, each.atype, each.id2) for each in settle_writes(intent, {}, SCHEMA))
    return mirrors


@settings(max_examples=examples(250), deadline=None)
@given(batches)
def test_rows_written_at_both_sides_equal_the_graph(runs: list[list[tuple[Write, bool]]]) -> None:
    stored, graph = StoredRows(), Graph()
    for batch in runs:
        writes = [write for write, _ in batch]
        before = copy_of(stored.rows)
        plan = stored.run(*writes)
        for write, outcome in zip(writes, plan.outcomes, strict=True):
            graph.apply(write, outcome, True)
        assert stored_edges(stored.rows) == graph.edges
        assert stored.rows.intents == {}
        live = {each.id: each.data for each in stored.rows.objects.values() if not each.deleted}
        assert {key: decode_fields(SCHEMA.otype(USER), data) for key, data in live.items()} == graph.objects
        check_versions_and_changes(before, stored.rows, plan)
        check_shares(writes, plan, stored.rows)


@settings(max_examples=examples(250), deadline=None)
@given(batches, st.lists(st.booleans(), min_size=6, max_size=6))
def test_with_intents_the_coordinators_rows_equal_the_graph_and_an_intent_covers_every_difference(
    runs: list[list[tuple[Write, bool]]], settle_after: list[bool]
) -> None:
    stored, graph = StoredRows(), Graph()
    late: list[ForgetIntent] = []
    for number, batch in enumerate(runs):
        writes = [write for write, _ in batch]
        sides = sides_of(batch)
        before = copy_of(stored.rows)
        # Slow settlers repeat an old removal, which must not remove a newer intent.
        plan = stored.run(*late, *writes, both_sides=[True] * len(late) + sides, now=NOW + number)
        assert not any(outcome.found for outcome in plan.outcomes[: len(late)])
        for write, outcome, both in zip(writes, plan.outcomes[len(late) :], sides, strict=True):
            graph.apply(write, outcome, both)
        rows = stored_edges(stored.rows)
        different = {each for each in {*rows, *graph.edges} if rows.get(each) != graph.edges.get(each)}
        assert not any(coordinated(each) for each in different)
        assert different <= owed_mirrors(stored.rows)
        check_versions_and_changes(before, stored.rows, plan)
        one_sided = {coordinator_side(write, SCHEMA) for write, both in zip(writes, sides, strict=True) if not both}
        check_intents(before, stored.rows, one_sided)
        for intent, settles in zip(plan.intents, plan.settles, strict=True):
            if intent is not None and settles is not None:
                assert list(settles) == settle_writes(intent, stored.rows.edges, SCHEMA)
        if settle_after[number]:
            late.extend(settle_all(stored))
            assert stored_edges(stored.rows) == graph.edges
    settle_all(stored)
    assert stored_edges(stored.rows) == graph.edges


def check_intents(before: ExistingRows, after: ExistingRows, one_sided: set[tuple[int, int] | None]) -> None:
    """Check that a transaction that changes only the coordinator's edges of a pair with an intent raises the intent's
    token, and that one which changes both sides leaves the intent alone."""
    for pair, intent in after.intents.items():
        assert intent.atypes == tuple(sorted(set(intent.atypes)))
        old = before.intents.get(pair)
        if old is None:
            continue
        keys = [EdgeKey(pair.low_id, atype, pair.high_id) for atype in ATYPES if SCHEMA.atype(atype).inverse]
        moved = any(before.edges.get(key) != after.edges.get(key) for key in keys)
        if (pair.low_id, pair.high_id) in one_sided:
            assert intent.token > old.token or (intent == old and not moved)
        else:
            assert intent == old


@settings(max_examples=examples(50), deadline=None)
@given(batches)
def test_planning_again_from_the_same_rows_gives_the_same_plan(runs: list[list[tuple[Write, bool]]]) -> None:
    stored = StoredRows()
    for batch in runs:
        writes = [write for write, _ in batch]
        sides = sides_of(batch)
        first, second = (stored.plan(*writes, both_sides=sides) for _ in range(2))
        assert (first.rows, first.changes, first.changes_of, first.intents, first.settles) == (
            *(second.rows, second.changes, second.changes_of, second.intents, second.settles),
        )
        stored.apply(first)
        for outcome in first.outcomes:
            assert outcome.error is None or isinstance(outcome.error, RequestError | IdTaken)
