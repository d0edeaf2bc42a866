"""Copies shards to an empty server, or into a file and back, with the database's own dump and client programs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final

from tao.replication.database_tools import CopyFailed, DatabaseTools, Program, Read, Write, carry, running
from tao.storage.dialect import Dialect
from tao.storage.session import ServerAccount

_EDGE_BYTES: Final = 1 << 20
"""The position is within this many bytes from the start of a dump or from its end, even when a MySQL GTID set is long.
Newer versions of MariaDB write it behind the data."""
_POSITION: Final = {
    Dialect.MARIADB: re.compile(rb"SET GLOBAL gtid_slave_pos='([^']*)'"),
    Dialect.MYSQL: re.compile(rb"GTID_PURGED=\s*(?:/\*!80000 '\+'\*/)?\s*'\+?([^']*)'"),
}
_END: Final = b"-- Dump completed"
_NEXT_SCHEMA: Final = b"\nUSE `"
_UNLOGGED: Final = "--init-command=SET SESSION sql_log_bin = 0"
_SWITCHES_BINLOG: Final = b"SET @@SESSION.SQL_LOG_BIN"
_SETS_NOTHING: Final = b"SET @switches_no_binlog"
"""A variable of the session that nobody reads."""


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """The progress of a copy: bytes of statements, schemas started so far, and its GTID position once that is known."""

    statement_bytes: int
    schemas: int
    position: str = ""


OnProgress = Callable[[CopyProgress], None]


async def copy_schemas(
    tools: DatabaseTools,
    source: ServerAccount,
    target: ServerAccount,
    schemas: Sequence[str],
    *,
    stall_seconds: float,
    on_progress: OnProgress,
) -> CopyProgress:
    """Copy the schemas from one snapshot of ``source`` to a server that has none of them.

    The target writes nothing of the copy to its binlog. ``stall_seconds``: fail when no byte moves for this long.
    Raises `CopyFailed`; the target may then hold any part of the schemas.
    """
    async with _dumping(tools, source, schemas) as dump, loading(tools, target, _UNLOGGED) as load:
        reader = _DumpReader(dump.read, tools.dialect, on_progress)
        await carry(reader.read, load.write, dump, load, stall_seconds=stall_seconds)
        return reader.result(dump.name)


class _Logged:
    """Reads a dump so that the server that loads it writes its statements to the binlog. A dump of MySQL with its
    position switches the binlog off at its beginning, which an account that only writes rows may not do either. No
    value contains that statement, because values are digits."""

    def __init__(self, read: Read, dialect: Dialect) -> None:
        self._read: Final = read
        self._dialect: Final = dialect
        self._kept = b""

    async def read(self) -> bytes:
        """Return the next piece, and nothing at the end."""
        if self._dialect is Dialect.MARIADB:
            return await self._read()
        while chunk := await self._read():
            # What is kept is shorter than the statement, and may be its beginning.
            found = (self._kept + chunk).replace(_SWITCHES_BINLOG, _SETS_NOTHING)
            at = max(0, len(found) - len(_SWITCHES_BINLOG) + 1)
            self._kept = found[at:]
            if at:
                return found[:at]
        rest, self._kept = self._kept, b""
        return rest


async def dump_schemas(
    tools: DatabaseTools,
    source: ServerAccount,
    schemas: Sequence[str],
    write: Write,
    *,
    stall_seconds: float,
    on_progress: OnProgress,
) -> CopyProgress:
    """Write the statements that make the schemas, from one snapshot of ``source``. Raises `CopyFailed`, and what
    ``write`` raises."""
    async with _dumping(tools, source, schemas) as dump:
        reader = _DumpReader(dump.read, tools.dialect, on_progress)
        await carry(reader.read, write, dump, stall_seconds=stall_seconds)
        return reader.result(dump.name)


async def load_dump(
    tools: DatabaseTools, target: ServerAccount, read: Read, *, stall_seconds: float, on_progress: OnProgress
) -> CopyProgress:
    """Run the statements of a dump at a server, which writes them to its binlog, for its replicas. Raises
    `CopyFailed`; the target may then hold any part of the schemas."""
    async with loading(tools, target) as load:
        reader = _DumpReader(read, tools.dialect, on_progress)
        await carry(_Logged(reader.read, tools.dialect).read, load.write, load, stall_seconds=stall_seconds)
        return reader.result("the dump")


def _dumping(
    tools: DatabaseTools, source: ServerAccount, schemas: Sequence[str]
) -> AbstractAsyncContextManager[Program]:
    options = _dump_options(tools.dialect)
    return running(tools.dump, *options, "--databases", *schemas, dialect=tools.dialect, account=source)


def loading(tools: DatabaseTools, target: ServerAccount, *options: str) -> AbstractAsyncContextManager[Program]:
    """Start a client that runs the statements that it is given, and stops at the first that fails."""
    return running(tools.client, "--batch", *options, dialect=tools.dialect, account=target, takes_input=True)


def _dump_options(dialect: Dialect) -> list[str]:
    # A single snapshot locks tables only for the moment it is taken. Binary values are written as hexadecimal digits,
    # so that no character set can change them.
    common = ["--single-transaction", "--quick", "--hex-blob", "--default-character-set=utf8mb4"]
    if dialect is Dialect.MARIADB:
        return [*common, "--gtid", "--master-data=2"]
    # The position is written as a comment. Set at the start of the load, it would make the server claim to have
    # everything.
    return [*common, "--set-gtid-purged=COMMENTED", "--source-data=2", "--no-tablespaces"]


class _DumpReader:
    """Reads a dump, and notes its progress and its position."""

    def __init__(self, read: Read, dialect: Dialect, on_progress: OnProgress) -> None:
        self._read: Final = read
        self._dialect: Final = dialect
        self._on_progress: Final = on_progress
        self._bytes = 0
        self._schemas = 0
        self._head = bytearray()
        self._tail = bytearray()

    async def read(self) -> bytes:
        """Return the next bytes of the dump, and nothing at its end."""
        chunk = await self._read()
        self._bytes += len(chunk)
        if len(self._head) < _EDGE_BYTES:
            self._head += chunk
        # No value contains such a line, because line ends within values are escaped.
        self._schemas += (self._tail[1 - len(_NEXT_SCHEMA) :] + chunk).count(_NEXT_SCHEMA)
        self._tail += chunk
        if len(self._tail) > 2 * _EDGE_BYTES:
            del self._tail[:-_EDGE_BYTES]
        if chunk:
            self._on_progress(CopyProgress(self._bytes, self._schemas))
        return chunk

    def result(self, name: str) -> CopyProgress:
        """Return what was read. Raises `CopyFailed` for a dump that is cut off or names no position."""
        if _END not in self._tail:
            raise CopyFailed(f"{name} ended before its end")
        pattern = _POSITION[self._dialect]
        position = pattern.search(self._head) or pattern.search(self._tail)
        if position is None:
            raise CopyFailed(f"{name} names no position: is the binlog of the master on, with GTIDs?")
        return CopyProgress(self._bytes, self._schemas, position[1].decode().replace("\n", ""))
