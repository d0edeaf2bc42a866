"""Backups without databases: which servers are chosen, which damage is noticed, and what a restore refuses."""

from __future__ import annotations

import dataclasses
import gzip
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from tao.admin import backup, restore
from tao.admin.backup import (
    archive_binlogs,
    choose_sources,
    create_backup,
    names_after,
    restorable,
    shards_of,
    verify_backup,
)
from tao.admin.backup_files import (
    BINLOG_INDEX,
    MANIFEST,
    BackupUnusable,
    BinlogCopy,
    BinlogIndex,
    DatabaseDump,
    FileEntry,
    GzipWriter,
    Manifest,
    open_dump,
    read_index,
    read_manifest,
    write_document,
    write_file,
)
from tao.admin.restore import UNKNOWN_MOVES, UNKNOWN_PROMOTIONS, RestoreRefused, TargetState, plan_restore
from tao.cache.packed_python import AGES
from tao.model.errors import OperatorError, TopologyConflict
from tao.model.rows import ShardRow
from tao.model.topology import DatabaseServer, Topology
from tao.replication.accounts import Account
from tao.replication.binlog_copy import BinlogsMissing, next_file
from tao.replication.replica_seed import ServerContents
from tao.replication.shard_move_plan import arrived_row
from tao.storage.dialect import Dialect
from tao.topology import edits
from tao.topology.document import parse_topology

EXAMPLE = Path(__file__).resolve().parents[3] / "config" / "topology.example.json"
SECOND = 1_000
DAMAGES = {
    "a byte": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xff"),
    "the end": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "everything": lambda path: path.unlink(),
}


def topology() -> Topology:
    return parse_topology(EXAMPLE.read_bytes(), "topology")


def dump(name: str, folder: Path | None = None, **changes: object) -> DatabaseDump:
    entry = FileEntry(name=f"{name}.sql.gz", size_bytes=1, sha256="")
    if folder is not None:
        with GzipWriter(folder / entry.name) as file:
            file.write(b"statements" * 1_000)
            file.write(b"")
            entry = file.entry
    (database,) = (each for each in topology().databases if each.name == name)
    found = DatabaseDump(
        name=name,
        server=f"west-{name}",
        region="west",
        dialect=Dialect.MARIADB.value,
        position="1-1-7",
        version_epoch=3,
        shards=database.shards,
        snapshot_unix_ms=100 * SECOND,
        statement_bytes=10_000,
        file=entry,
    )
    return msgspec.structs.replace(found, **changes)


def manifest(*dumps: DatabaseDump, documents: tuple[FileEntry, ...] = ()) -> Manifest:
    return Manifest(
        tao_version="0",
        begun_unix_ms=99 * SECOND,
        ended_unix_ms=120 * SECOND,
        shards=64,
        documents=documents,
        databases=dumps or (dump("db-1"), dump("db-2")),
    )


def copy(database: str, until: int, *names: str, server: str = "west") -> BinlogCopy:
    files = tuple(FileEntry(name=f"binlogs/{database}/{server}/{name}", size_bytes=5, sha256="") for name in names)
    return BinlogCopy(database=database, server=server, covers_until_unix_ms=until * SECOND, files=files)


def targets(**changes: object) -> dict[str, list[TargetState]]:
    """Return empty servers of the example topology, of which the master of db-1 is changed."""
    found: dict[str, list[TargetState]] = {}
    for each in topology().database_servers:
        state = TargetState(each.server, each.is_master, dialect=Dialect.MARIADB.value)
        if each.is_master and each.database.name == "db-1":
            state = dataclasses.replace(state, **changes)  # type: ignore[arg-type]  # as the caller names them
        found.setdefault(each.database.name, []).append(state)
    return found


# ---- making ----------------------------------------------------------------------------------------------------------


def test_a_replica_in_use_is_backed_up_and_without_one_the_master() -> None:
    assert [each.server.name for each in choose_sources(topology())] == ["west-db-1", "east-db-2"]
    marked = edits.mark_database_server(topology(), "west-db-1", down=True)
    assert [each.server.name for each in choose_sources(marked)] == ["east-db-1", "east-db-2"]


def test_a_region_s_servers_are_backed_up_on_demand_unless_one_is_out_of_use() -> None:
    assert [each.server.name for each in choose_sources(topology(), "east")] == ["east-db-1", "east-db-2"]
    with pytest.raises(OperatorError, match="db-1 has no server in 'north'"):
        choose_sources(topology(), "north")
    marked = edits.mark_database_server(topology(), "west-db-1", down=True)
    with pytest.raises(OperatorError, match="west-db-1 is marked down"):
        choose_sources(marked, "west")


def test_a_standby_is_backed_up_rather_than_a_master() -> None:
    first, second = topology().databases
    standby = DatabaseServer(name="east-db-1-standby")
    both = msgspec.structs.replace(first, standbys={"east": standby})
    found = msgspec.structs.replace(topology(), databases=(both, second))
    names = [each.server.name for each in choose_sources(found)]
    assert names == ["west-db-1", "east-db-2"], "a standby that lags is promoted later"
    marked = edits.mark_database_server(found, "west-db-1", down=True)
    for region in (None, "east"):
        (source, _) = choose_sources(marked, region)
        assert (source.server, source.master.name) == (standby, "east-db-1")
    both_down = edits.mark_database_server(marked, standby.name, down=True)
    assert [each.server.name for each in choose_sources(both_down, "east")] == ["east-db-1", "east-db-2"]


async def test_a_backup_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    for file, more in (
        ("other", r" \(it has no manifest\.json: if a backup that failed has left it, remove it\)"),
        (MANIFEST, ""),
    ):
        (tmp_path / file).touch()
        with pytest.raises(OperatorError, match=rf"is not empty: a backup needs a folder of its own{more}$"):
            await create_backup(tmp_path, topology(), {}, Account("u", "p"), on_progress=lambda _name, _done: None)
    with pytest.raises(OperatorError, match="cannot write to"):
        await create_backup(
            tmp_path / "other", topology(), {}, Account("u", "p"), on_progress=lambda _name, _done: None
        )


def test_a_compressed_dump_is_read_back_and_belongs_to_its_owner(tmp_path: Path) -> None:
    entry = dump("db-1", tmp_path).file
    path = tmp_path / entry.name
    assert gzip.decompress(path.read_bytes()) == b"statements" * 1_000
    with open_dump(path) as file:
        assert file.read() == b"statements" * 1_000
    assert path.stat().st_mode & 0o077 == 0
    assert path.stat().st_size == entry.size_bytes


# ---- binlogs ---------------------------------------------------------------------------------------------------------


def test_binlog_files_are_copied_on_from_the_last_one() -> None:
    last = FileEntry(name="binlogs/db-1/west/binlog.000007", size_bytes=5, sha256="")
    assert names_after(last, {"binlog.000007": 5, "binlog.000008": 9}, "west") == ["binlog.000008"]
    assert names_after(last, {"binlog.000008": 9, "binlog.000009": 9}, "west") == ["binlog.000008", "binlog.000009"]
    assert names_after(last, {"binlog.000007": 5}, "west") == []
    assert next_file("binlog.000999") == "binlog.001000"


@pytest.mark.parametrize("closed", [{"binlog.000009": 9}, {"binlog.000007": 6}, {}])
def test_a_gap_behind_the_last_binlog_file_is_refused(closed: dict[str, int]) -> None:
    last = FileEntry(name="binlogs/db-1/west/binlog.000007", size_bytes=5, sha256="")
    with pytest.raises(BinlogsMissing, match="make a new backup"):
        names_after(last, closed, "west")


@pytest.mark.parametrize(
    "change",
    [
        lambda found: edits.move_to_database(found, 3, "db-2"),
        lambda found: edits.add_shards(found, 128),
    ],
)
async def test_binlogs_do_not_continue_a_backup_of_other_shards(
    change: Callable[[Topology], Topology], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = restorable(written(tmp_path), read_index(tmp_path))

    async def archived(*_: object) -> BinlogCopy:
        return BinlogCopy(database="db-1", server="east-db-1", covers_until_unix_ms=9_000, files=())

    monkeypatch.setattr(backup, "_archive", archived)
    changed = change(topology())
    for documents in (iter((changed,)), iter((topology(), changed))):  # at first, and while binlogs are copied

        async def load(documents: Iterator[Topology] = documents) -> Topology:
            return next(documents)

        with pytest.raises(BinlogsMissing, match=r"shards were moved or added at db-1, db-2.*make a new backup"):
            await archive_binlogs(tmp_path, load, Account("u", "p"), on_progress=lambda _name, _done: None)
    assert restorable(read_manifest(tmp_path), read_index(tmp_path)) == before


def test_a_backup_reaches_as_far_as_the_binlogs_of_every_database_together() -> None:
    assert restorable(manifest(), BinlogIndex()) == (100 * SECOND, 100 * SECOND)
    late = manifest(dump("db-1"), dump("db-2", snapshot_unix_ms=110 * SECOND))
    index = BinlogIndex(copies=(copy("db-1", 200), copy("db-2", 300), copy("db-2", 150, server="east")))
    assert restorable(late, index) == (110 * SECOND, 200 * SECOND)
    best = index.of("db-2")
    assert best is not None
    assert best.server == "west"


# ---- checking --------------------------------------------------------------------------------------------------------


def written(folder: Path) -> Manifest:
    documents = (write_file(folder / "topology.json", EXAMPLE.read_bytes()),)
    found = manifest(dump("db-1", folder), dump("db-2", folder), documents=documents)
    write_document(folder / MANIFEST, found)
    place = folder / "binlogs" / "db-1" / "west"
    place.mkdir(parents=True)
    entry = write_file(place / "binlog.000001", b"events")
    copied = msgspec.structs.replace(
        copy("db-1", 200), files=(msgspec.structs.replace(entry, name="binlogs/db-1/west/binlog.000001"),)
    )
    write_document(folder / BINLOG_INDEX, BinlogIndex(copies=(copied,)))
    return found


async def test_a_backup_that_is_whole_says_how_far_it_reaches(tmp_path: Path) -> None:
    found = written(tmp_path)
    assert read_manifest(tmp_path) == found
    report = await verify_backup(tmp_path)
    assert (report.files, report.faults, report.from_unix_ms) == (4, (), 100 * SECOND)


@pytest.mark.parametrize("file", ["topology.json", "db-2.sql.gz", "binlogs/db-1/west/binlog.000001"])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_damage_to_any_file_is_noticed(file: str, damage: str, tmp_path: Path) -> None:
    written(tmp_path)
    DAMAGES[damage](tmp_path / file)
    assert [each.file for each in (await verify_backup(tmp_path)).faults] == [file]


@pytest.mark.parametrize("text", [None, b"{", b'{"format": 2}', b"{}"])
def test_a_folder_without_a_readable_manifest_is_no_backup(text: bytes | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / MANIFEST).write_bytes(text)
    with pytest.raises(BackupUnusable, match=MANIFEST):
        read_manifest(tmp_path)
    assert read_index(tmp_path) == BinlogIndex()


# ---- restoring -------------------------------------------------------------------------------------------------------


def test_a_restore_fills_each_master_from_its_dump_and_its_binlogs() -> None:
    index = BinlogIndex(copies=(copy("db-1", 200, "binlog.000001", "binlog.000002"), copy("db-2", 200)))
    one, two = plan_restore(manifest(), index, topology(), targets(), until_unix_seconds=150)
    assert (one.master.name, two.master.name) == ("east-db-1", "west-db-2")
    assert one.binlogs == ("binlogs/db-1/west/binlog.000001", "binlogs/db-1/west/binlog.000002")
    assert (one.replaces, one.until_unix_seconds, two.binlogs) == (False, 150, ())
    assert shards_of(one.database) == list(range(32))


def test_epochs_rise_above_all_that_is_known_and_above_a_thousand_promotions_that_are_not() -> None:
    (one, _) = plan_restore(manifest(), BinlogIndex(), topology(), targets())
    assert (one.known_epoch, one.unknown_epochs) == (3, UNKNOWN_PROMOTIONS)
    former = edits.raise_epochs(topology(), {"db-1": 9})
    (one, _) = plan_restore(manifest(), BinlogIndex(), topology(), targets(), former=former)
    assert (one.known_epoch, one.unknown_epochs) == (9, UNKNOWN_MOVES)


def test_with_the_former_topology_epochs_rise_above_moves_that_it_does_not_show_and_counts_stay_small() -> None:
    former = edits.raise_epochs(topology(), {"db-1": 9})
    (_, two) = plan_restore(manifest(), BinlogIndex(), topology(), targets(), former=former)
    moved_row = 9
    for target_epoch in (3, 9, 3):
        row = ShardRow(shard=0, master_server="west-db-2", version_epoch=moved_row, owner="", generation=1)
        moved_row = arrived_row(row, target_epoch).version_epoch
    restored_epoch = two.known_epoch + two.unknown_epochs + 1
    assert moved_row < restored_epoch < 9 + AGES


@pytest.mark.parametrize("until", [99, 201])
def test_a_moment_that_the_binlogs_do_not_cover_is_refused(until: int) -> None:
    index = BinlogIndex(copies=(copy("db-1", 200), copy("db-2", 300)))
    with pytest.raises(RestoreRefused, match="1970-01-01T00:01:40Z to 1970-01-01T00:03:20Z"):
        plan_restore(manifest(), index, topology(), targets(), until_unix_seconds=until)


def test_a_moment_without_binlogs_is_refused() -> None:
    with pytest.raises(RestoreRefused, match="no binlog of db-2 was copied"):
        plan_restore(
            manifest(), BinlogIndex(copies=(copy("db-1", 200),)), topology(), targets(), until_unix_seconds=150
        )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"error": "refused"}, "east-db-1 does not answer"),
        ({"shards": 3}, "east-db-1 has 3 shards: a backup is restored to empty servers only"),
        ({"follows": "10.0.0.1:3306"}, "east-db-1 is the master by the topology, and follows 10.0.0.1:3306"),
        ({"dialect": "mysql"}, "east-db-1 is mysql, and the backup of db-1 is of mariadb"),
    ],
)
def test_a_server_that_is_not_an_empty_master_of_its_kind_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(RestoreRefused, match=reason):
        plan_restore(manifest(), BinlogIndex(), topology(), targets(**changes))


def test_a_restore_that_was_interrupted_begins_anew_with_the_replicas_that_follow() -> None:
    found = targets(shards=3, half_restored=True)
    found["db-1"] = [
        state if state.is_master else dataclasses.replace(state, shards=2, follows="east-db-1:3306")
        for state in found["db-1"]
    ]
    one, two = plan_restore(manifest(), BinlogIndex(), topology(), found)
    assert (one.replaces, two.replaces) == (True, False)
    found["db-1"] = [dataclasses.replace(state, follows="") for state in found["db-1"]]
    with pytest.raises(RestoreRefused, match="west-db-1 has 2 shards"):
        plan_restore(manifest(), BinlogIndex(), topology(), found)


async def test_what_an_interrupted_restore_left_of_a_move_is_dropped_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    statements: list[str] = []

    class Session:
        async def run(self, statement: str, *, deadline: float) -> None:
            statements.append(statement)

    @asynccontextmanager
    async def session(*_: object) -> AsyncIterator[Session]:
        yield Session()

    async def nothing(*_: object, **__: object) -> None:
        pass

    async def contents(*_: object, **__: object) -> ServerContents:
        return ServerContents([3], ["tao_00003", "tao_00004_incoming"], 0, 1, "")

    async def stop(*_: object) -> None:
        raise OperatorError("far enough")

    for name, substitute in (
        ("administrator_session", session),
        ("find_tools", nothing),
        ("close_for_seeding", nothing),
        ("read_contents", contents),
        ("_load", stop),
    ):
        monkeypatch.setattr(restore, name, substitute)
    (one, _) = plan_restore(manifest(), BinlogIndex(), topology(), targets(shards=1, half_restored=True))
    with pytest.raises(OperatorError, match="far enough"):
        await restore._fill(one, tmp_path, Account("u", "p"), lambda _name, _done: None)
    assert statements == ["DROP DATABASE tao_00003", "DROP DATABASE tao_00004_incoming"]


async def test_a_topology_that_others_change_all_the_time_ends_a_restore_with_the_conflict() -> None:
    class Store:
        attempts = 0

        async def load(self) -> Topology:
            return topology()

        async def change(self, expected_version: int, changed: Topology) -> Topology:
            self.attempts += 1
            raise TopologyConflict(f"{changed.version} is not above {expected_version}")

        def watch(self, on_change: Callable[[Topology], None]) -> Callable[[], None]:
            raise NotImplementedError

        async def replace(self, expected_version: int, document: Topology) -> Topology:
            raise NotImplementedError

    store = Store()
    with pytest.raises(TopologyConflict):
        await restore._store_epochs(store, {"db-1": 9})
    assert store.attempts == 20


def test_a_cluster_of_another_shape_is_refused_with_what_it_needs() -> None:
    with pytest.raises(RestoreRefused, match="64 shards and the databases db-1 with the shards 0-31"):
        plan_restore(manifest(dump("db-1")), BinlogIndex(), topology(), targets())
