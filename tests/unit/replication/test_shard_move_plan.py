"""The decisions about a move, from every state that a process may leave behind."""

from __future__ import annotations

import msgspec
import pytest

from tao.model.rows import ShardRow
from tao.model.topology import Database, DatabaseServer, Topology
from tao.planning.row_events import RowEvent
from tao.replication.move_statements import CopiedTable, net_rows
from tao.replication.shard_move_plan import (
    LEFT_FREE_BYTES,
    CopySpoiled,
    CopyState,
    MoveRefused,
    MoveStep,
    MoveView,
    NoRoom,
    arrived_row,
    check_move,
    check_room,
    fenced_row,
    next_step,
    steps_to_undo,
    unfenced_row,
)


def database(name: str, shards: tuple[int, int], *, epoch: int = 1) -> Database:
    server = DatabaseServer(name=f"east-{name}")
    return Database(
        name=name,
        master_region="east",
        servers={"east": server},
        shards=(shards,),
        version_epoch=epoch,
    )


SOURCE, TARGET = database("db-1", (0, 7), epoch=3), database("db-2", (8, 15), epoch=5)
ROW = ShardRow(4, "east-db-1", 3, "leader-1", 10)
COPY = CopyState(source="db-1", source_epoch=3, target_epoch=5, position="0-1-7")
FENCED = fenced_row(ROW, "east-db-2")
ARRIVED = arrived_row(FENCED, 5)


def view(
    at_source: ShardRow | None = ROW,
    at_target: ShardRow | None = None,
    copy: CopyState | None = None,
    *,
    is_switched: bool = False,
    is_marked: bool = False,
    source: Database = SOURCE,
    target: Database = TARGET,
) -> MoveView:
    return MoveView(4, source, target, is_switched, at_source, at_target, copy, is_marked)


def test_a_move_begins_with_a_copy_and_goes_on_from_a_whole_one() -> None:
    assert next_step(view()) is MoveStep.COPY
    assert next_step(view(copy=COPY)) is MoveStep.FOLLOW
    for half in ("", "no row"):
        copy = msgspec.structs.replace(COPY, position="", source="" if half else "db-1")
        assert next_step(view(copy=copy)) is MoveStep.DROP_COPY


def test_a_copy_from_before_a_promotion_of_either_side_is_dropped() -> None:
    promoted = msgspec.structs.replace(SOURCE, version_epoch=4)
    assert next_step(view(copy=COPY, source=promoted)) is MoveStep.DROP_COPY
    promoted = msgspec.structs.replace(TARGET, version_epoch=6)
    assert next_step(view(copy=COPY, target=promoted)) is MoveStep.DROP_COPY


def test_a_fence_without_a_renamed_copy_is_taken_away() -> None:
    assert next_step(view(FENCED, copy=COPY)) is MoveStep.UNFENCE


def test_a_renamed_copy_is_switched_to_only_behind_its_own_fence() -> None:
    assert next_step(view(FENCED, ARRIVED, COPY)) is MoveStep.SWITCH
    assert next_step(view(ROW, ARRIVED, COPY)) is MoveStep.RENAME_BACK, "leaders may have written since"
    again = fenced_row(unfenced_row(FENCED, "east-db-1", 3), "east-db-2")
    assert next_step(view(again, ARRIVED, COPY)) is MoveStep.RENAME_BACK, "another fence, after other writes"
    promoted = msgspec.structs.replace(TARGET, version_epoch=6, servers={"east": DatabaseServer(name="east-db-2b")})
    assert next_step(view(FENCED, ARRIVED, COPY, target=promoted)) is MoveStep.RENAME_BACK


def test_after_the_switch_there_is_only_something_to_clear_away() -> None:
    assert next_step(view(FENCED, ARRIVED, COPY, is_switched=True)) is MoveStep.CLEAR
    assert next_step(view(FENCED, ARRIVED, is_switched=True)) is MoveStep.CLEAR, "the source has not noted it"
    assert next_step(view(FENCED, ARRIVED, is_switched=True, is_marked=True)) is MoveStep.NOTHING
    assert next_step(view(None, ARRIVED, is_switched=True)) is MoveStep.NOTHING, "dropped at the source"
    with pytest.raises(MoveRefused, match="to go back"):
        steps_to_undo(view(FENCED, ARRIVED, COPY, is_switched=True))


def test_after_a_switch_to_nothing_nothing_is_cleared_away() -> None:
    with pytest.raises(MoveRefused, match="nothing is dropped"):
        next_step(view(FENCED, None, COPY, is_switched=True))


def test_what_an_earlier_move_has_left_at_the_target_is_not_overwritten() -> None:
    left = fenced_row(ShardRow(4, "east-db-2", 2, "leader-1", 3), "east-db-1")
    with pytest.raises(MoveRefused, match="drop-moved 4"):
        next_step(view(at_target=left))


def test_undoing_lets_leaders_write_before_it_asks_anything_of_the_target() -> None:
    assert steps_to_undo(view(FENCED, ARRIVED, COPY)) == [
        MoveStep.UNFENCE,
        MoveStep.RENAME_BACK,
        MoveStep.DROP_COPY,
    ]
    assert steps_to_undo(view(FENCED, copy=COPY)) == [MoveStep.UNFENCE, MoveStep.DROP_COPY]
    assert steps_to_undo(view()) == []


def test_rows_of_a_move_rise_in_generation_and_the_last_one_in_its_version_epoch() -> None:
    assert (FENCED.owner, FENCED.generation, FENCED.version_epoch) == ("", 11, 3)
    assert (ARRIVED.owner, ARRIVED.generation, ARRIVED.master_server) == ("", 12, "east-db-2")
    assert ARRIVED.version_epoch == 6, "above both"
    assert arrived_row(FENCED, 1).version_epoch == 4
    assert unfenced_row(FENCED, "east-db-1", 4).version_epoch == 4, "a promotion has come in between"
    back = unfenced_row(FENCED, "east-db-1", 3)
    assert (back.owner, back.generation, back.master_server) == ("", 12, "east-db-1")


def test_unknown_shards_and_targets_and_weaker_targets_are_refused() -> None:
    topology = Topology(version=1, shards=16, regions=(), databases=(SOURCE, TARGET))
    assert check_move(topology, 4, "db-2") == (SOURCE, TARGET)
    for shard, target in ((16, "db-2"), (-1, "db-2"), (4, "db-3")):
        with pytest.raises(MoveRefused, match="there is no"):
            check_move(topology, shard, target)
    elsewhere = msgspec.structs.replace(TARGET, servers={"west": DatabaseServer(name="west-db-2")})
    with pytest.raises(MoveRefused, match="has no server in east"):
        check_move(msgspec.structs.replace(topology, databases=(SOURCE, elsewhere)), 4, "db-2")
    safe = msgspec.structs.replace(SOURCE, standbys={"east": DatabaseServer(name="east-db-1b")})
    with pytest.raises(MoveRefused, match="db-2 has one server, and db-1 has one to promote"):
        check_move(msgspec.structs.replace(topology, databases=(safe, TARGET)), 4, "db-2")
    strict = msgspec.structs.replace(SOURCE, semi_sync=True)
    with pytest.raises(MoveRefused, match="semi-synchronous"):
        check_move(msgspec.structs.replace(topology, databases=(strict, TARGET)), 4, "db-2")


def test_a_copy_has_to_fit_onto_the_fullest_disk_that_is_known() -> None:
    size = 3 << 30
    enough = 2 * size + LEFT_FREE_BYTES
    check_room(4, size, {})
    check_room(4, size, {"east-db-2": enough, "west-db-2": enough + 1})
    with pytest.raises(NoRoom, match="west-db-2 has 7,167 MiB of free disk, and needs 7,168 MiB: shard 4 has about"):
        check_room(4, size, {"east-db-2": enough, "west-db-2": enough - 1})


def test_changes_of_a_shard_become_the_last_image_of_each_row() -> None:
    tables = {"assocs": CopiedTable("assocs", ("id1", "id2", "time"), ("id1", "id2"))}

    def row(id2: int, time: int) -> dict[str, object]:
        return {"id1": 1, "id2": id2, "time": time}

    events = [
        RowEvent(4, "assocs", None, row(2, 10)),
        RowEvent(4, "assocs", row(2, 10), row(2, 11)),
        RowEvent(4, "assocs", row(3, 10), None),
        RowEvent(4, "assocs", row(5, 10), row(6, 10)),
        RowEvent(4, "shard", row(0, 0), row(0, 1)),
        RowEvent(5, "assocs", None, row(9, 10)),
    ]
    assert net_rows(events, 4, tables) == {
        "assocs": {(1, 2): row(2, 11), (1, 3): None, (1, 5): None, (1, 6): row(6, 10)}
    }
    with pytest.raises(CopySpoiled, match="has got a table other"):
        net_rows([RowEvent(4, "other", None, row(2, 10))], 4, tables)
    with pytest.raises(CopySpoiled, match="other columns"):
        net_rows([RowEvent(4, "assocs", None, {**row(2, 10), "new": 1})], 4, tables)
