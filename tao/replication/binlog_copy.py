"""Copies the binlog files of a server, and runs them again at another one, with the database's own binlog reader.

A file is copied once it is closed, so it never changes afterwards. Positions are GTIDs, so that the binlog of any
server of a replication set continues a dump of any other.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tao.model.errors import OperatorError
from tao.replication.database_copy import loading
from tao.replication.database_tools import CopyFailed, DatabaseTools, Program, Read, carry, running
from tao.replication.gtid import GtidSet
from tao.storage.dialect import Dialect
from tao.storage.session import DatabaseSession, ServerAccount

_STARTS: Final = ("Gtid_list", "Previous_gtids")
"""The events near the start of a file that say which transactions the files before it have."""
_FIRST_EVENTS: Final = 3
# The server that runs the statements numbers its transactions itself: the numbers of the original ones are taken, or
# below its own.
_NUMBERING: Final = re.compile(
    rb"/\*M?!100001 SET @@session\.(?:gtid_domain_id|server_id|gtid_seq_no)=\d+\*//\*!\*/;\n"
)


class BinlogsMissing(OperatorError):
    """The server does not have all binlog files since the backup any more, or they do not continue it, because shards
    were moved or added. A new backup is needed."""

    reason = "BINLOGS_MISSING"


async def close_binlog(session: DatabaseSession, *, deadline: float) -> dict[str, int]:
    """Begin a new binlog file, and return the sizes in bytes of the closed ones by name, oldest first."""
    # MySQL has no SHOW BINARY LOGS within a transaction that reads, and neither statement is replicated.
    await session.run("ROLLBACK; FLUSH NO_WRITE_TO_BINLOG BINARY LOGS", deadline=deadline)
    rows = await session.named("SHOW BINARY LOGS", deadline=deadline)
    sizes = {_text(row["Log_name"]): int(row["File_size"]) for row in rows}
    return dict(list(sizes.items())[:-1])


async def files_since(
    session: DatabaseSession, names: Sequence[str], position: str, *, deadline: float
) -> Sequence[str]:
    """Return the files, of those in ``names``, with the transactions that ``position`` lacks.

    Raises `BinlogsMissing` when the first of them begins behind the position."""
    for at in reversed(range(len(names))):
        if _has(session.dialect, position, await _start_of(session, names[at], deadline)):
            return names[at:]
    raise BinlogsMissing(f"no binlog of the server reaches back to the position {position or '(nothing)'}")


async def _start_of(session: DatabaseSession, name: str, deadline: float) -> str:
    """Return the GTIDs of the files before this one."""
    rows = await session.named(f"SHOW BINLOG EVENTS IN '{_checked(name)}' LIMIT {_FIRST_EVENTS:d}", deadline=deadline)
    for row in rows:
        if _text(row["Event_type"]) in _STARTS:
            return _text(row["Info"]).strip("[]").replace("\n", "")
    raise OperatorError(f"{name} does not say at which position it begins: are GTIDs on?")


def _has(dialect: Dialect, position: str, start: str) -> bool:
    if dialect is Dialect.MYSQL:
        return GtidSet(dialect, position) >= GtidSet(dialect, start)
    # A position names the last transaction of each domain, whichever server made it.
    return all(number <= _last(position).get(domain, 0) for domain, number in _last(start).items())


def _last(gtids: str) -> dict[str, int]:
    """Return the highest number of each MariaDB domain."""
    found: dict[str, int] = {}
    for word in filter(None, (part.strip() for part in gtids.split(","))):
        domain, _, number = word.split("-")
        found[domain] = max(int(number), found.get(domain, 0))
    return found


def _checked(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise OperatorError(f"{name!r} is no name of a binlog file that this command can use")
    return name


def next_file(name: str) -> str:
    """Return the name of the binlog file after this one: ``binlog.000007``."""
    stem, _, number = name.rpartition(".")
    return f"{stem}.{int(number) + 1:0{len(number)}d}"


async def copy_files(
    reader: Path,
    dialect: Dialect,
    source: ServerAccount,
    sizes: dict[str, int],
    folder: Path,
    *,
    stall_seconds: float,
) -> None:
    """Copy closed binlog files, with these names and sizes, into a folder.

    ``stall_seconds``: fail when a file takes longer. Raises `CopyFailed`."""
    for name, size in sizes.items():
        arguments = ("--read-from-remote-server", "--raw", _checked(name))
        async with running(reader, *arguments, dialect=dialect, account=source, folder=folder) as program:
            await carry(program.read, _nowhere, program, stall_seconds=stall_seconds)
        copied = folder / name
        if not copied.exists() or copied.stat().st_size != size:
            raise CopyFailed(f"{reader.name} has not copied all {size} bytes of {name}")


async def _nowhere(_: bytes) -> None:
    """Take output that there is none of."""


async def replay(
    tools: DatabaseTools,
    reader: Path,
    files: Sequence[Path],
    target: ServerAccount,
    *,
    after: str,
    until_unix_seconds: int | None,
    stall_seconds: float,
    on_progress: Callable[[int], None],
) -> None:
    """Run the transactions of binlog files again, which the target writes to its own binlog under numbers of its own.

    ``after``: the position up to which the target has them. ``until_unix_seconds``: leave out the first transaction
    that began then or later, and all behind it; None: run all. ``on_progress`` receives the bytes of statements so far.
    Raises `CopyFailed`; the target may then have any part of the transactions."""
    options = ["--skip-gtids", f"--exclude-gtids={after}"] if tools.dialect is Dialect.MYSQL else []
    if tools.dialect is Dialect.MARIADB and after:
        options.append(f"--start-position={after}")
    if until_unix_seconds is not None:
        options.append(f"--stop-datetime={datetime.fromtimestamp(until_unix_seconds, UTC):%Y-%m-%d %H:%M:%S}")
    async with AsyncExitStack() as stack:
        events: Program = await stack.enter_async_context(running(reader, *options, *files, dialect=tools.dialect))
        load: Program = await stack.enter_async_context(loading(tools, target, "--binary-mode"))
        lines = _unnumbered(events.read, on_progress)

        async def read() -> bytes:
            return await anext(lines, b"")

        await carry(read, load.write, events, load, stall_seconds=stall_seconds)


async def _unnumbered(read: Read, on_progress: Callable[[int], None]) -> AsyncIterator[bytes]:
    """Yield the statements of a binlog reader in whole lines, without those that number transactions."""
    rest, done = b"", 0
    while chunk := await read():
        done += len(chunk)
        on_progress(done)
        whole, end, rest = (rest + chunk).rpartition(b"\n")
        if whole := _NUMBERING.sub(b"", whole + end):
            yield whole
    if rest:
        yield rest


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
