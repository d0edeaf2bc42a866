"""The program and the options of a private database server are chosen before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tao.devcluster.database import default_cache_folder, require_free_disk, template_name
from tao.devcluster.database_program import (
    Durability,
    Flavour,
    ServerBinary,
    ServerBinaryMissing,
    ServerFolder,
    ServerOptions,
    find_server_binary,
    initialize_argv,
    parse_version,
    server_argv,
)
from tao.model.errors import OperatorError, SettingsError
from tao.replication.accounts import Account

MARIADB = ServerBinary(Path("/sbin/mariadbd"), Flavour.MARIADB, (10, 11, 19), Path("/bin/mariadb-install-db"))
MYSQL = ServerBinary(Path("/sbin/mysqld"), Flavour.MYSQL, (9, 7, 4), Path("/sbin/mysqld"))
OLD_MYSQL = ServerBinary(Path("/sbin/mysqld"), Flavour.MYSQL, (8, 0, 20), Path("/sbin/mysqld"))
FOLDER = ServerFolder(Path("/state/db"))


@pytest.mark.parametrize(
    ("text", "flavour", "version"),
    [
        ("mariadbd  Ver 10.11.19-MariaDB-0+deb12u1 for debian-linux-gnu", Flavour.MARIADB, (10, 11, 19)),
        ("/usr/sbin/mysqld  Ver 11.4.2-MariaDB for Linux", Flavour.MARIADB, (11, 4, 2)),
        ("/opt/mysqld  Ver 9.7.4-2 for Linux on x86_64 ((Debian))", Flavour.MYSQL, (9, 7, 4)),
        ("mysqld  Ver 8.0.36 for Linux on x86_64 (MySQL Community Server - GPL)", Flavour.MYSQL, (8, 0, 36)),
    ],
)
def test_the_flavour_is_what_the_server_says_and_not_its_name(
    text: str, flavour: Flavour, version: tuple[int, int, int]
) -> None:
    assert parse_version(text, Path("/sbin/mysqld")) == (flavour, version)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("sleep (GNU coreutils) 9.1", "prints no version"), ("mysqld  Ver 5.7.44 for Linux", "8.0 or later")],
)
def test_a_program_that_is_no_server_or_too_old_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(OperatorError, match=complaint):
        parse_version(text, Path("/sbin/mysqld"))


def test_the_named_server_wins_and_must_exist(tmp_path: Path) -> None:
    server = tmp_path / "my-server"
    server.write_text("#!/bin/sh\necho 'mysqld  Ver 8.4.1 for Linux'\n")
    server.chmod(0o755)
    found = find_server_binary({"TAO_MYSQLD": str(server), "PATH": "/usr/sbin:/usr/bin:/bin"})
    assert (found.path, found.flavour, found.version_text) == (server, Flavour.MYSQL, "8.4.1")
    with pytest.raises(ServerBinaryMissing, match="TAO_MYSQLD=/no/such is not a program"):
        find_server_binary({"TAO_MYSQLD": "/no/such", "PATH": "/usr/sbin"})


def test_full_durability_syncs_both_logs_and_relaxed_neither() -> None:
    full = server_argv(MARIADB, FOLDER, 3306, ServerOptions(), as_root=False)
    relaxed = server_argv(MARIADB, FOLDER, 3306, ServerOptions(durability=Durability.RELAXED), as_root=False)
    assert {"--innodb-flush-log-at-trx-commit=1", "--sync-binlog=1"} <= set(full)
    assert {"--innodb-flush-log-at-trx-commit=2", "--sync-binlog=0"} <= set(relaxed)


@pytest.mark.parametrize("binary", [MARIADB, MYSQL, OLD_MYSQL])
def test_the_machines_own_configuration_is_never_read(binary: ServerBinary) -> None:
    # The option has to come first, or the servers take it for a mistake.
    assert server_argv(binary, FOLDER, 3306, ServerOptions(), as_root=True)[1] == "--no-defaults"
    assert initialize_argv(binary, FOLDER.data, as_root=True)[1] == "--no-defaults"


def test_only_root_names_the_user_to_run_as() -> None:
    for as_root in (True, False):
        assert ("--user=root" in server_argv(MYSQL, FOLDER, 1, ServerOptions(), as_root=as_root)) is as_root
        assert ("--user=root" in initialize_argv(MARIADB, FOLDER.data, as_root=as_root)) is as_root


def test_each_flavour_gets_the_options_it_knows() -> None:
    options = ServerOptions(gtid_domain=4)
    mariadb = server_argv(MARIADB, FOLDER, 1, options, as_root=False)
    mysql = server_argv(MYSQL, FOLDER, 1, options, as_root=False)
    assert {"--gtid-domain-id=4", "--gtid-strict-mode=1", "--log-slave-updates=1"} <= set(mariadb)
    assert {"--gtid-mode=ON", "--enforce-gtid-consistency=ON", "--innodb-redo-log-capacity=16M"} <= set(mysql)
    assert "--innodb-log-file-size=16M" in server_argv(OLD_MYSQL, FOLDER, 1, options, as_root=False)


@pytest.mark.parametrize("wrong", [{"server_id": 0}, {"server_id": 2**32}, {"gtid_domain": -1}, {"buffer_pool_mb": 1}])
def test_options_that_no_server_accepts_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(SettingsError):
        ServerOptions(**wrong)  # type: ignore[arg-type]


def test_a_folder_too_deep_for_a_socket_is_refused() -> None:
    with pytest.raises(SettingsError, match="choose a shorter one"):
        ServerFolder(Path("/" + "x" * 120))


def test_a_template_is_of_one_program_and_version() -> None:
    other_path = ServerBinary(Path("/opt/mariadbd"), MARIADB.flavour, MARIADB.version, MARIADB.initializer)
    assert len({template_name(each) for each in (MARIADB, MYSQL, OLD_MYSQL, other_path)}) == 4
    assert template_name(MARIADB).startswith("mariadb-10.11.19-")


def test_the_cache_folder_follows_the_xdg_specification() -> None:
    assert default_cache_folder({"XDG_CACHE_HOME": "/caches", "HOME": "/home/ann"}) == Path("/caches/tao")
    assert default_cache_folder({"XDG_CACHE_HOME": "relative", "HOME": "/home/ann"}) == Path("/home/ann/.cache/tao")
    assert default_cache_folder({"HOME": "/home/ann"}) == Path("/home/ann/.cache/tao")


def test_free_disk_is_checked_for_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    require_free_disk(tmp_path / "a" / "b", 0)
    with pytest.raises(OperatorError, match="MB of free disk"):
        require_free_disk(tmp_path / "a" / "b", 2**40)


def test_a_password_does_not_show_in_logs_and_a_name_is_only_a_name() -> None:
    assert "hunter2" not in repr(Account("leader", "hunter2"))
    for user, password in (("", "x"), ("a'b", "x"), ("a" * 33, "x"), ("leader", "")):
        with pytest.raises(OperatorError):
            Account(user, password)


def test_a_server_of_a_replication_set_keeps_its_masters_order_and_a_replica_starts_closed() -> None:
    alone = server_argv(MARIADB, FOLDER, 1, ServerOptions(), as_root=False)
    assert not [option for option in alone if "slave-parallel" in option or "read-only" in option]
    replica = ServerOptions(replicated=True, read_only=True)
    mariadb = server_argv(MARIADB, FOLDER, 1, replica, as_root=False)
    assert {"--slave-parallel-mode=optimistic", "--slave-net-timeout=5", "--read-only=1"} <= set(mariadb)
    mysql = server_argv(MYSQL, FOLDER, 1, replica, as_root=False)
    assert {"--replica-preserve-commit-order=ON", "--replica-net-timeout=5", "--read-only=1"} <= set(mysql)


def test_each_server_has_temporary_tables_of_its_own_because_a_start_deletes_all_in_the_folder() -> None:
    for binary in (MARIADB, MYSQL):
        assert f"--tmpdir={FOLDER.path / 'tmp'}" in server_argv(binary, FOLDER, 1, ServerOptions(), as_root=False)
