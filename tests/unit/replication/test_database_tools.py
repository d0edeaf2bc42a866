"""The database's own programs are found, and not started where TLS is asked for and they would speak plain text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tao.model.errors import OperatorError
from tao.replication import database_tools
from tao.replication.database_tools import find_binlog_reader, find_tools, running
from tao.storage.dialect import Dialect
from tao.storage.failures import ConnectionLost
from tao.storage.session import ServerAccount
from tao.storage.tls import DatabaseTlsFiles
from tests.rigs.certificates import TestAuthority


@pytest.mark.parametrize(
    ("dialect", "verify_host", "socket", "probed"),
    [
        (Dialect.MARIADB, False, "", True),
        (Dialect.MARIADB, True, "", False),
        (Dialect.MARIADB, False, "/run/db.sock", False),
        (Dialect.MYSQL, False, "", False),
    ],
)
async def test_programs_that_verify_nothing_start_only_where_our_own_connection_finds_tls(
    dialect: Dialect,
    verify_host: bool,
    socket: str,
    probed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def open_session(*_: object, **__: object) -> None:
        raise ConnectionLost("the server offers no TLS")

    monkeypatch.setattr(database_tools, "open_session", open_session)
    tls = DatabaseTlsFiles(authorities=TestAuthority(tmp_path).file, verify_host=verify_host).if_set
    account = ServerAccount("127.0.0.1", 1, "tao_reader", "x", socket, tls)
    mark = tmp_path / "started"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n: >{mark}\n")
    program.chmod(0o755)
    if probed:
        with pytest.raises(ConnectionLost, match="offers no TLS"):
            async with running(program, dialect=dialect, account=account):
                pass
        assert not mark.exists()
    else:
        async with running(program, dialect=dialect, account=account) as started:
            assert await started.failure() == ""
        assert mark.exists()


def program_in(folder: Path, name: str, version: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{name}  Ver {version}'\n")
    path.chmod(0o755)
    return path


async def test_programs_beside_the_named_server_come_before_those_on_the_path(tmp_path: Path) -> None:
    beside, installed = tmp_path / "mysql", tmp_path / "bin"
    server = program_in(beside, "mysqld", "9.7.4 for Linux")
    for name in ("mysqldump", "mysql"):
        program_in(beside, name, "9.7.4 for Linux")
        program_in(installed, name, "8.4.1 for Linux")
    reader = program_in(installed, "mysqlbinlog", "8.4.1 for Linux")
    named, unnamed = {"TAO_MYSQLD": str(server), "PATH": str(installed)}, {"PATH": str(installed)}
    found = await find_tools(Dialect.MYSQL, named)
    assert (found.dump, found.client) == (beside / "mysqldump", beside / "mysql")
    assert (await find_tools(Dialect.MYSQL, unnamed)).dump == installed / "mysqldump"
    assert await find_binlog_reader(Dialect.MYSQL, named) == reader


async def test_programs_of_the_other_kind_of_server_are_not_used(tmp_path: Path) -> None:
    server = program_in(tmp_path, "mysqld", "9.7.4 for Linux")
    program_in(tmp_path, "mysqlbinlog", "10.11.19-MariaDB")
    with pytest.raises(OperatorError, match="mysqlbinlog of mysql is needed here and not on PATH"):
        await find_binlog_reader(Dialect.MYSQL, {"TAO_MYSQLD": str(server), "PATH": ""})
