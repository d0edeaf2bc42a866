"""config/mariadb.cnf and mysql.cnf: a real server accepts them, and private servers run with the same."""

from __future__ import annotations

import configparser
import os
import subprocess
from pathlib import Path

import pytest

from tao.devcluster.database_program import (
    Flavour,
    ServerBinary,
    ServerFolder,
    ServerOptions,
    find_server_binary,
    server_argv,
)
from tests.rigs.pacing import PATIENT_SECONDS

CONFIG = Path(__file__).resolve().parents[2] / "config"
BINARIES = {
    "mariadb": ServerBinary(Path("/sbin/mariadbd"), Flavour.MARIADB, (10, 11, 19), Path("/bin/mariadb-install-db")),
    "mysql": ServerBinary(Path("/sbin/mysqld"), Flavour.MYSQL, (9, 7, 4), Path("/sbin/mysqld")),
}
OF_THE_MACHINE = {
    "binlog_expire_logs_seconds", "innodb_buffer_pool_size", "innodb_log_file_size", "innodb_redo_log_capacity",
    "log_bin", "max_binlog_size", "max_connections", "mysqlx",
}  # fmt: skip
"""Sizes and places, which a small private server has otherwise."""
OF_THE_SERVER = {"server_id", "gtid_domain_id", "read_only", "super_read_only"}
SECTIONS = {"mariadb": "mariadbd", "mysql": "mysqld"}


def options(flavour: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(CONFIG / f"{flavour}.cnf")
    assert parser.sections() == [SECTIONS[flavour]]
    return dict(parser[SECTIONS[flavour]])


@pytest.mark.parametrize("flavour", SECTIONS)
def test_what_replication_and_durability_need_is_as_in_every_server_that_the_tests_run(flavour: str) -> None:
    argv = server_argv(BINARIES[flavour], ServerFolder(Path("/d")), 3306, ServerOptions(replicated=True), as_root=False)
    tested = {name[2:].replace("-", "_"): value for name, _, value in (word.partition("=") for word in argv[2:])}
    shown = {name: value for name, value in options(flavour).items() if name not in OF_THE_MACHINE | OF_THE_SERVER}
    # An option without a value is switched on.
    assert {name: tested.get(name) or ("1" if name in tested else None) for name in shown} == shown


@pytest.mark.database
def test_the_server_accepts_its_option_file() -> None:
    binary = find_server_binary(os.environ)
    given = [f"--{name}={value}" for name, value in options(binary.flavour.value).items()]
    # Options are parsed and nothing is started: --help comes after them.
    answer = subprocess.run(
        [binary.path, "--no-defaults", *given, "--user=nobody", "--verbose", "--help"],
        capture_output=True, text=True, timeout=PATIENT_SECONDS, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert "unknown" not in answer.stderr
