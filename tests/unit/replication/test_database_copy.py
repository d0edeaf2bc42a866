"""A copy between programs that stand in for those of a database: where its position is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tao.replication.database_copy import CopyFailed, CopyProgress, DatabaseTools, copy_schemas
from tao.storage.dialect import Dialect
from tao.storage.session import ServerAccount

ACCOUNT = ServerAccount("127.0.0.1", 1, "somebody", "secret")
ROWS = "head -c 3000000 /dev/zero | tr '\\0' x; echo"
END = "echo '-- Dump completed'"
MARIADB = "echo \"-- SET GLOBAL gtid_slave_pos='1-1-42';\""
MYSQL = "echo \"SET @@GLOBAL.GTID_PURGED=/*!80000 '+'*/ '3e11fa47-71ca-11e1-9e33-c80aa9429562:1-42';\""


async def copied(folder: Path, dialect: Dialect, *dump: str) -> CopyProgress:
    """Copy what a dump program of these commands prints."""
    tools = {"dump": "\n".join(dump), "client": "cat > /dev/null"}
    for name, text in tools.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    found = DatabaseTools(dialect, folder / "dump", folder / "client")
    return await copy_schemas(found, ACCOUNT, ACCOUNT, ["tao_00000"], stall_seconds=20, on_progress=lambda _: None)


async def test_the_position_is_found_before_and_behind_millions_of_bytes_of_rows(tmp_path: Path) -> None:
    """MariaDB 10.11 writes it behind the rows, earlier versions and MySQL before them."""
    assert (await copied(tmp_path, Dialect.MARIADB, MARIADB, ROWS, END)).position == "1-1-42"
    assert (await copied(tmp_path, Dialect.MARIADB, ROWS, MARIADB, END)).position == "1-1-42"
    found = await copied(tmp_path, Dialect.MYSQL, MYSQL, ROWS, END)
    assert found.position == "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-42"


async def test_a_dump_without_its_position_or_its_end_is_no_copy(tmp_path: Path) -> None:
    with pytest.raises(CopyFailed, match="names no position"):
        await copied(tmp_path, Dialect.MARIADB, ROWS, END)
    with pytest.raises(CopyFailed, match="ended before its end"):
        await copied(tmp_path, Dialect.MARIADB, MARIADB, ROWS)
