"""Binlog files without a server: from which file on they are needed, how they are copied, and what is run of them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tao.replication.binlog_copy import BinlogsMissing, copy_files, files_since, replay
from tao.replication.database_tools import CopyFailed, DatabaseTools
from tao.storage.dialect import Dialect
from tao.storage.session import DatabaseSession, ServerAccount

SERVER = ServerAccount("127.0.0.1", 1, "user", "secret", socket="", tls=None)
UUID = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
EVENTS = """DELIMITER /*!*/;
/*M!100001 SET @@session.gtid_domain_id=1*//*!*/;
/*!100001 SET @@session.server_id=2*//*!*/;
/*M!100001 SET @@session.gtid_seq_no=4711*//*!*/;
BINLOG '
3ucGaxMBAAAA
'/*!*/;
COMMIT/*!*/;
"""


class Files:
    """A session at a server whose files begin at these positions."""

    def __init__(self, dialect: Dialect, *starts: str) -> None:
        self.dialect = dialect
        self._starts = {f"binlog.{number:06d}": start for number, start in enumerate(starts, start=1)}

    @property
    def names(self) -> list[str]:
        return list(self._starts)

    async def named(self, sql: str, *, deadline: float) -> list[dict[str, Any]]:
        (name,) = (name for name in self._starts if f"'{name}'" in sql)
        mariadb = self.dialect is Dialect.MARIADB
        start = f"[{self._starts[name]}]" if mariadb else self._starts[name]
        kind = "Gtid_list" if mariadb else "Previous_gtids"
        return [{"Event_type": "Format_desc", "Info": "Server ver"}, {"Event_type": kind, "Info": start}]

    async def since(self, position: str) -> Sequence[str]:
        return await files_since(cast("DatabaseSession", self), self.names, position, deadline=0.0)


async def test_the_files_since_a_position_begin_with_the_last_one_that_does_not_start_behind_it() -> None:
    mariadb = Files(Dialect.MARIADB, "", "1-1-10", "1-1-15,1-2-20,2-9-4", "1-2-30,2-9-4")
    assert await mariadb.since("1-2-25,2-9-4") == ["binlog.000003", "binlog.000004"]
    assert await mariadb.since("1-1-15") == ["binlog.000002", "binlog.000003", "binlog.000004"]
    assert await mariadb.since("") == mariadb.names
    mysql = Files(Dialect.MYSQL, "", f"{UUID}:1-10", f"{UUID}:1-20")
    assert await mysql.since(f"{UUID}:1-15") == ["binlog.000002", "binlog.000003"]


async def test_binlogs_that_begin_behind_the_position_are_refused() -> None:
    with pytest.raises(BinlogsMissing, match="reaches back to the position 1-1-5"):
        await Files(Dialect.MARIADB, "1-1-10").since("1-1-5")


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


async def test_a_file_of_which_bytes_are_missing_is_no_copy(tmp_path: Path) -> None:
    reader = program(tmp_path / "reader", 'for last; do :; done; printf four >"$last"')
    for size, copied in ((4, True), (5, False)):
        job = copy_files(reader, Dialect.MARIADB, SERVER, {"binlog.000001": size}, tmp_path, stall_seconds=30)
        if copied:
            await job
        else:
            with pytest.raises(CopyFailed, match=r"not copied all 5 bytes of binlog\.000001"):
                await job


async def replayed(folder: Path, dialect: Dialect, until: int | None) -> tuple[list[str], str]:
    """Return the arguments of the binlog reader, and what the client was given."""
    said = folder / "arguments"
    reader = program(folder / "reader", f'printf "%s\\n" "$@" >{said}; printf %s {shlex.quote(EVENTS)}')
    tools = DatabaseTools(dialect, folder / "dump", program(folder / "client", f"exec cat >{folder / 'client.out'}"))
    await replay(
        tools,
        reader,
        [folder / "binlog.000001"],
        SERVER,
        after="1-1-7",
        until_unix_seconds=until,
        stall_seconds=30,
        on_progress=lambda _: None,
    )
    return said.read_text().splitlines()[1:], (folder / "client.out").read_text()


async def test_transactions_are_run_again_under_numbers_of_the_new_server(tmp_path: Path) -> None:
    arguments, given = await replayed(tmp_path, Dialect.MARIADB, None)
    assert arguments == ["--start-position=1-1-7", str(tmp_path / "binlog.000001")]
    assert given == "".join(line for line in EVENTS.splitlines(keepends=True) if "@@session" not in line)


async def test_mysql_is_asked_to_leave_out_numbers_and_what_the_dump_has(tmp_path: Path) -> None:
    arguments, _ = await replayed(tmp_path, Dialect.MYSQL, None)
    assert arguments[:2] == ["--skip-gtids", "--exclude-gtids=1-1-7"]


async def test_a_moment_is_given_in_utc(tmp_path: Path) -> None:
    arguments, _ = await replayed(tmp_path, Dialect.MARIADB, 1_795_614_686)
    assert "--stop-datetime=2026-11-25 13:51:26" in arguments
