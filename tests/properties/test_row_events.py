"""Leader and tailer produce the identical changeset: the planner's, and the one made of the rows that it writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from tao.model.changes import Change, Message
from tao.model.versions import epoch_of
from tao.model.writes import Write
from tao.planning.coordination import coordinator_side
from tao.planning.row_events import translate
from tao.planning.write_plan import WritePlan
from tests.properties.test_write_plan import batches, copy_of
from tests.rigs.effort import examples
from tests.unit.planning.row_events_of import row_events_of
from tests.unit.planning.stored_rows import NOW, SCHEMA, StoredRows


def by_shard(changes: Iterable[Message]) -> dict[int, list[Message]]:
    found: dict[int, list[Message]] = defaultdict(list)
    for change in changes:
        found[change.shard].append(change)
    return found


def check_same(stored: StoredRows, plan: WritePlan, order: st.DataObject) -> None:
    events = row_events_of(stored.rows, plan.rows, SCHEMA)
    translated = translate(order.draw(st.permutations(events)), SCHEMA)
    assert {each.shard: list(each.messages) for each in translated.messages} == by_shard(plan.changes)
    assert [each.shard for each in translated.messages] == sorted(by_shard(plan.changes))
    for each in translated.messages:
        assert each.version_epoch == stored.epoch
    assert (translated.touches, translated.bulk_shards, translated.passed_over) == ((), (), 0)
    assert all(epoch_of(change.after) == stored.epoch for change in plan.changes if isinstance(change, Change))


@settings(max_examples=examples(150), deadline=None)
@given(batches, st.lists(st.sampled_from([0, 0, 1]), min_size=6, max_size=6), st.data())
def test_the_rows_of_a_transaction_give_the_changeset_of_its_plan(
    runs: list[list[tuple[Write, bool]]], promotions: list[int], order: st.DataObject
) -> None:
    stored = StoredRows()
    for number, batch in enumerate(runs):
        stored.epoch += promotions[number]
        writes = [write for write, _ in batch]
        sides = [both or coordinator_side(write, SCHEMA) is None for write, both in batch]
        before = StoredRows(stored.epoch)
        before.rows = copy_of(stored.rows)
        plan = stored.run(*writes, both_sides=sides, now=NOW + number)
        check_same(before, plan, order)
