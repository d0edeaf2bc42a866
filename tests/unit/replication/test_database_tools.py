"""The database's own programs are not started where they would speak plain text although TLS is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tao.replication import database_tools
from tao.replication.database_tools import running
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
