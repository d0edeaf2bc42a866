"""The state folder keeps records and locks, and survives a crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tao.admin.documents import example_schema_file
from tao.devcluster.layout import Role, Shape, StartOptions
from tao.devcluster.processes import ProcessIdentity, write_record
from tao.devcluster.state_folder import ClusterRecord, StateFolder, choose_schema, new_passwords, service_accounts
from tao.model.errors import OperatorError, SchemaError


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StateFolder]:
    found = StateFolder(tmp_path / "state")
    found.create()
    yield found
    found.unlock()


def test_a_record_comes_back_as_it_was_written(folder: StateFolder) -> None:
    record = ClusterRecord(
        shape=Shape(shards=8), ports={"leader-1": {"grpc": 1, "frames": 2}}, passwords=new_passwords()
    )
    folder.write(record)
    assert folder.read() == record


def test_passwords_lie_in_files_for_this_user_alone(folder: StateFolder) -> None:
    folder.write(ClusterRecord(shape=Shape(), passwords=new_passwords()))
    assert (folder.path / "cluster.json").stat().st_mode & 0o077 == 0
    assert folder.path.stat().st_mode & 0o077 == 0


def test_every_account_has_a_password_of_its_own() -> None:
    accounts = service_accounts(new_passwords())
    found = {accounts.administrator, accounts.leader, accounts.reader, accounts.replicator, accounts.watcher}
    assert len({account.password for account in found if account is not None}) == 5
    former = {role: password for role, password in new_passwords().items() if role != "watcher"}
    assert service_accounts(former).watcher is None, "a folder of an earlier version starts all the same"


def test_a_folder_without_a_cluster_says_how_to_make_one(folder: StateFolder) -> None:
    with pytest.raises(OperatorError, match="tao dev up"):
        folder.require()


def test_a_damaged_record_says_what_to_remove(folder: StateFolder) -> None:
    (folder.path / "cluster.json").write_text('{"format": 1')
    with pytest.raises(OperatorError, match="damaged"):
        folder.read()


def test_a_second_start_in_one_folder_is_refused_in_one_line(folder: StateFolder) -> None:
    folder.lock()
    with pytest.raises(OperatorError, match="tao dev down") as refused:
        StateFolder(folder.path).lock()
    assert "\n" not in refused.value.message
    folder.unlock()
    StateFolder(folder.path).lock()


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OperatorError, match="choose another with --state-dir"):
        StateFolder(tmp_path / "file" / "state").create()


def test_a_process_counts_as_running_only_when_it_is_the_one_recorded(folder: StateFolder) -> None:
    record = ClusterRecord(shape=Shape(tiers=1, followers=1, leaders=1))
    mine = ProcessIdentity.of(os.getpid())
    write_record(folder.process_record("leader-1", Role.LEADER), mine)
    stranger = ProcessIdentity(mine.pid, mine.start_ticks + 1, mine.boot_id)
    write_record(folder.process_record("follower-1a", Role.FOLLOWER), stranger)
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    gone = ProcessIdentity.of(ended.pid)
    ended.communicate()
    folder.database("db-1").mkdir()
    write_record(folder.process_record("db-1", Role.DATABASE), gone)
    assert folder.running(record) == {"leader-1": mine}


def test_a_new_folder_gets_the_example_schema_and_keeps_its_own_afterwards(folder: StateFolder) -> None:
    assert choose_schema(folder, None)[1] == example_schema_file().read_text()
    folder.schema.write_text("format: 1\nobjects: {thing: {number: 9}}\n")
    assert [otype.name for otype in choose_schema(folder, None)[0].objects] == ["thing"]


def test_a_schema_that_contradicts_the_stored_data_is_refused(folder: StateFolder, tmp_path: Path) -> None:
    folder.schema.write_text(example_schema_file().read_text())
    other = tmp_path / "other.yaml"
    other.write_text("format: 1\nobjects: {thing: {number: 1, fields: {name: {number: 1, type: int}}}}\n")
    with pytest.raises(SchemaError, match="tao schema check"):
        choose_schema(folder, other)


def test_a_schema_file_that_is_not_there_is_named(folder: StateFolder, tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"missing\.yaml"):
        choose_schema(folder, tmp_path / "missing.yaml")


def test_mastership_comes_from_the_topology_file_if_it_can_be_read_else_from_the_shape(tmp_path: Path) -> None:
    folder, shape = StateFolder(tmp_path), Shape(regions=2, databases=2)
    assert folder.former_topology().master_regions(shape) == {"db-1": "east", "db-2": "east"}
    databases = [{"name": "db-1", "master_region": "west"}, {"name": "db-2", "master_region": "nowhere"}]
    folder.topology.write_text(json.dumps({"version": 9, "databases": databases}))
    assert folder.former_topology().master_regions(shape) == {"db-1": "west", "db-2": "east"}
    assert folder.former_topology().version == 9
    folder.topology.write_text("{")
    assert folder.former_topology().master_regions(shape) == {"db-1": "east", "db-2": "east"}
    assert folder.former_topology().version == 0


def test_a_folder_without_its_data_keeps_ports_passwords_schema_and_logs(folder: StateFolder) -> None:
    record = ClusterRecord(shape=Shape(tiers=1, followers=1, leaders=1), passwords=new_passwords())
    folder.write(record)
    folder.schema.write_text("schema")
    folder.log("leader-1", Role.LEADER).write_text("log")
    for data in (folder.database("db-1") / "data", folder.path / "servers" / "leader-1"):
        data.mkdir(parents=True)
    folder.remove_data(record)
    assert not folder.database("db-1").exists()
    assert sorted(path.name for path in (folder.path / "servers").iterdir()) == ["leader-1.log"]
    assert (folder.read(), folder.schema.read_text()) == (record, "schema")
    folder.remove_data(record)


def test_a_record_of_an_older_build_has_the_default_options(folder: StateFolder) -> None:
    folder.write(ClusterRecord(shape=Shape()))
    path = folder.path / "cluster.json"
    content = json.loads(path.read_text())
    del content["options"]
    path.write_text(json.dumps(content))
    assert folder.require().options == StartOptions()


def test_a_folder_is_orphaned_once_the_process_of_its_foreground_is_gone(folder: StateFolder) -> None:
    assert not folder.is_orphaned
    folder.write_owner()
    assert not folder.is_orphaned
    mine = ProcessIdentity.of(os.getpid())
    write_record(folder.owner, ProcessIdentity(mine.pid, mine.start_ticks + 1, mine.boot_id))
    assert folder.is_orphaned
