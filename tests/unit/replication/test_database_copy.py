"""Copies with programs that stand for the database's own: what is noted of a dump, and how failures are reported."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tao.replication.database_copy import (
    CopyProgress,
    copy_schemas,
    dump_schemas,
    load_dump,
)
from tao.replication.database_tools import CopyFailed, DatabaseTools, carry, running
from tao.storage.dialect import Dialect
from tao.storage.session import ServerAccount
from tests.rigs.pacing import until

SERVER = ServerAccount("127.0.0.1", 1, "user", "secret", socket="", tls=None)
POSITION = "-- SET GLOBAL gtid_slave_pos='0-1-4711';"
END = "-- Dump completed on 2026-11-25 13:51:26"
BEYOND_THE_EDGES = 5 << 20


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def tools(folder: Path, dump: str, client: str = "exec cat >client.out") -> DatabaseTools:
    return DatabaseTools(
        Dialect.MARIADB, program(folder / "dump", dump), program(folder / "client", f"cd {folder}; {client}")
    )


def dump_of(*parts: str) -> str:
    return "; ".join(f"printf %s\\\\n {shlex.quote(part)}" for part in parts)


def rows(size: int) -> str:
    return f"head -c {size} /dev/zero | tr '\\0' x; echo"


async def copied(found: DatabaseTools) -> CopyProgress:
    return await copy_schemas(
        found, SERVER, SERVER, ["tao_00000", "tao_00001"], stall_seconds=30, on_progress=lambda _: None
    )


@pytest.mark.parametrize("place", ["before the data", "behind the data"])
async def test_the_position_of_a_large_dump_is_found_before_its_data_and_behind(place: str, tmp_path: Path) -> None:
    data = f"{dump_of('', 'USE `tao_00000`;')}; {rows(BEYOND_THE_EDGES)}; {dump_of('USE `tao_00001`;')}"
    position = dump_of(POSITION)
    body = f"{position}; {data}" if place == "before the data" else f"{data}; {position}"
    done = await copied(tools(tmp_path, f"{body}; {dump_of(END)}"))
    assert (done.position, done.schemas) == ("0-1-4711", 2)
    assert done.statement_bytes == (tmp_path / "client.out").stat().st_size > BEYOND_THE_EDGES


async def test_a_dump_that_is_cut_off_or_names_no_position_is_no_copy(tmp_path: Path) -> None:
    with pytest.raises(CopyFailed, match="ended before its end"):
        await copied(tools(tmp_path, dump_of(POSITION)))
    with pytest.raises(CopyFailed, match="names no position"):
        await copied(tools(tmp_path, dump_of(END)))


async def test_a_failure_is_reported_with_the_last_lines_of_the_program(tmp_path: Path) -> None:
    with pytest.raises(CopyFailed, match="dump: no such table"):
        await copied(tools(tmp_path, "echo no such table >&2; exit 2"))
    endless = tools(tmp_path, "exec yes", client="echo duplicate entry >&2; exit 1")
    with pytest.raises(CopyFailed, match=r"^client: duplicate entry$"):
        await copied(endless)


async def test_a_program_that_is_stopped_has_ended_although_nobody_read_the_rest(tmp_path: Path) -> None:
    async with running(tools(tmp_path, "exec yes").dump, dialect=Dialect.MARIADB) as dump:

        async def write(_: bytes) -> None:
            pipe = dump._process._transport.get_pipe_transport(1)  # type: ignore[attr-defined]
            await until(lambda: not pipe.is_reading())  # the buffer is full
            raise BrokenPipeError

        await carry(dump.read, write, dump, stall_seconds=30)


async def test_a_copy_of_which_no_byte_moves_fails(tmp_path: Path) -> None:
    with pytest.raises(CopyFailed, match=r"nothing moved for 0.1 s"):
        await copy_schemas(
            tools(tmp_path, "exec sleep 60"),
            SERVER,
            SERVER,
            ["tao_00000"],
            stall_seconds=0.1,
            on_progress=lambda _: None,
        )


@pytest.mark.parametrize("split_at", [0, 1, 12, 24, 25])
async def test_a_dump_of_mysql_is_loaded_with_the_binlog_on_wherever_it_is_cut(split_at: int, tmp_path: Path) -> None:
    off, on = "SET @@SESSION.SQL_LOG_BIN= 0;", "SET @@SESSION.SQL_LOG_BIN = @MYSQLDUMP_TEMP_LOG_BIN;"
    position = "/* SET @@GLOBAL.GTID_PURGED=/*!80000 '+'*/ '3e11fa47-71ca-11e1-9e33-c80aa9429562:1-23';*/"
    kept = "SET @MYSQLDUMP_TEMP_LOG_BIN = @@SESSION.SQL_LOG_BIN;"
    lines = [kept, off, position, "INSERT INTO `t` VALUES (0xFF);", on]
    text = "\n".join([*lines, END, ""]).encode()
    cut = text.index(off.encode()) + split_at
    chunks = [text[:cut], text[cut:]]

    async def read() -> bytes:
        return chunks.pop(0) if chunks else b""

    found = replace(tools(tmp_path, "exit 1"), dialect=Dialect.MYSQL)
    loaded = await load_dump(found, SERVER, read, stall_seconds=30, on_progress=lambda _: None)
    assert loaded.position == "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-23"
    seen = (tmp_path / "client.out").read_text().splitlines()
    assert [line for line in seen if line not in lines] == [
        "SET @switches_no_binlog= 0;",
        "SET @switches_no_binlog = @MYSQLDUMP_TEMP_LOG_BIN;",
        END,
    ]
    assert len(seen) == len(lines) + 1


async def test_a_dump_in_a_file_is_loaded_as_it_was(tmp_path: Path) -> None:
    found = tools(tmp_path, dump_of("", "USE `tao_00000`;", POSITION, END))
    chunks: list[bytes] = []

    async def write(chunk: bytes) -> None:
        chunks.append(chunk)

    async def read() -> bytes:
        return chunks.pop(0)

    shown: list[CopyProgress] = []
    dumped = await dump_schemas(found, SERVER, ["tao_00000"], write, stall_seconds=30, on_progress=shown.append)
    text = b"".join(chunks)
    assert chunks[-1] == b""
    assert shown[-1].statement_bytes == dumped.statement_bytes == len(text)
    assert dumped == await load_dump(found, SERVER, read, stall_seconds=30, on_progress=shown.append)
    assert (tmp_path / "client.out").read_bytes() == text
