"""Backups without databases: which servers are chosen, which damage is noticed, and what a restore refuses."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path

import msgspec
import pytest

from tao.admin.backup import (
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
from tao.admin.restore import UNKNOWN_PROMOTIONS, RestoreRefused, TargetState, plan_restore
from tao.model.errors import OperatorError
from tao.model.topology import Topology
from tao.replication.accounts import Account
from tao.replication.binlog_copy import BinlogsMissing, next_file
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


async def test_a_backup_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with pytest.raises(OperatorError, match="is not empty"):
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
    assert (one.known_epoch, one.unknown_promotions) == (3, UNKNOWN_PROMOTIONS)
    former = edits.raise_epochs(topology(), {"db-1": 9})
    (one, two) = plan_restore(manifest(), BinlogIndex(), topology(), targets(), former=former)
    assert (one.known_epoch, one.unknown_promotions, two.known_epoch) == (9, 0, 3)


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


def test_a_cluster_of_another_shape_is_refused_with_what_it_needs() -> None:
    with pytest.raises(RestoreRefused, match="64 shards and the databases db-1 with the shards 0-31"):
        plan_restore(manifest(dump("db-1")), BinlogIndex(), topology(), targets())
