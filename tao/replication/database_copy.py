"""Copies shards between servers with the database's own dump and client programs.

The programs already handle what our own copy would have to reimplement: snapshots with their position, every type of
value, quoting, and the order of statements. Neither is started through a shell. Passwords are not visible to other
users of the machine: accounts are passed in an unnamed file in memory, which both programs inherit.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from tao.model.errors import OperatorError, RetryableError
from tao.storage.dialect import Dialect
from tao.storage.names import schema_name
from tao.storage.session import ServerAccount

_NAMES: Final = {
    Dialect.MARIADB: (("mariadb-dump", "mysqldump"), ("mariadb", "mysql")),
    Dialect.MYSQL: (("mysqldump",), ("mysql",)),
}
_PACKAGES: Final = {Dialect.MARIADB: "mariadb-client", Dialect.MYSQL: "mysql-client"}
_CHUNK_BYTES: Final = 256 << 10
_HEAD_BYTES: Final = 1 << 20
"""The position is within this many bytes from the start of a dump that has it there, even when a MySQL GTID set is
long."""
_POSITION: Final = {
    Dialect.MARIADB: re.compile(rb"SET GLOBAL gtid_slave_pos='([^']*)'"),
    Dialect.MYSQL: re.compile(rb"GTID_PURGED=\s*(?:/\*!80000 '\+'\*/)?\s*'\+?([^']*)'"),
}
_END: Final = b"-- Dump completed"
_NEXT_SCHEMA: Final = b"\nUSE `"
_TAIL_BYTES: Final = 16 << 10
"""The position is within this many bytes from the end of a dump that has it there; MariaDB's are short."""
_KEPT_LINES: Final = 5


class CopyFailed(RetryableError):
    """One of the two programs failed or stalled. The message has its last lines. The copy has to start again."""

    reason = "COPY_FAILED"


@dataclass(frozen=True, slots=True)
class DatabaseTools:
    """The dump and client programs that belong to one kind of server."""

    dialect: Dialect
    dump: Path
    client: Path


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """The progress of a copy: bytes of statements, schemas started so far, and its GTID position once that is known."""

    statement_bytes: int
    schemas: int
    position: str = ""


async def find_tools(dialect: Dialect, env: Mapping[str, str]) -> DatabaseTools:
    """Find the programs on ``PATH`` that belong to this kind of server; MySQL and MariaDB use the same names. Raises
    `OperatorError` with the command that installs them."""
    found = [await _find(names, dialect, env) for names in _NAMES[dialect]]
    if None in found:
        wanted = " and ".join(names[0] for names in _NAMES[dialect])
        raise OperatorError(
            f"{wanted} of {dialect.value} are needed here and not on PATH: apt-get install {_PACKAGES[dialect]}"
        )
    dump, client = (Path(str(path)) for path in found)
    return DatabaseTools(dialect, dump, client)


async def _find(names: Sequence[str], dialect: Dialect, env: Mapping[str, str]) -> str | None:
    for name in names:
        path = shutil.which(name, path=env.get("PATH", ""))
        if path is None:
            continue
        process = await asyncio.create_subprocess_exec(path, "--version", stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL)
        said, _ = await process.communicate()
        if (b"mariadb" in said.lower()) == (dialect is Dialect.MARIADB):
            return path
    return None


async def copy_schemas(
    tools: DatabaseTools,
    source: ServerAccount,
    target: ServerAccount,
    schemas: Sequence[str],
    *,
    stall_seconds: float,
    on_progress: Callable[[CopyProgress], None],
) -> CopyProgress:
    """Copy the schemas from one snapshot of ``source`` to a server that has none of them.

    The target writes nothing of the copy to its binlog. ``stall_seconds``: fail when no byte moves for this long.
    Raises `CopyFailed`; the target may then hold any part of the schemas.
    """
    arguments = _Arguments(("--databases", *schemas), ("--init-command=SET SESSION sql_log_bin = 0",))
    return await _copy(tools, source, target, arguments, CopyPace(stall_seconds), on_progress)


async def copy_shard_into(
    tools: DatabaseTools,
    source: ServerAccount,
    target: ServerAccount,
    shard: int,
    schema: str,
    *,
    pace: CopyPace,
    on_progress: Callable[[CopyProgress], None],
) -> CopyProgress:
    """Copy the rows of a shard from one snapshot of ``source`` into a schema that has its tables, through the target's
    binlog, so that its replicas get them too. ``target`` may be an account that only writes rows. Raises `CopyFailed`;
    the schema may then hold any part."""
    rows_alone = ("--no-create-info", "--skip-add-locks", "--skip-disable-keys", "--skip-triggers")
    arguments = _Arguments((*rows_alone, schema_name(shard)), (schema,))
    return await _copy(tools, source, target, arguments, pace, on_progress)


@dataclass(frozen=True, slots=True)
class CopyPace:
    """How fast a copy may be. ``stall_seconds``: it fails when no byte moves for this long. ``bytes_per_second``: the
    most statement bytes, 0 for no bound. ``may_go_on``: awaited before each piece of the copy, to hold it up."""

    stall_seconds: float
    bytes_per_second: float = 0.0
    may_go_on: Callable[[], Awaitable[None]] | None = None


class _Arguments(NamedTuple):
    """The arguments of the dump program and of the client that say what is copied, and where to."""

    dump: Sequence[str]
    client: Sequence[str]


async def _copy(
    tools: DatabaseTools,
    source: ServerAccount,
    target: ServerAccount,
    arguments: _Arguments,
    pace: CopyPace,
    on_progress: Callable[[CopyProgress], None],
) -> CopyProgress:
    with _option_file(source, tools.dialect) as source_options, _option_file(target, tools.dialect) as target_options:
        dump = await asyncio.create_subprocess_exec(
            tools.dump,
            f"--defaults-file=/dev/fd/{source_options}",
            *_dump_options(tools.dialect),
            *arguments.dump,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            pass_fds=(source_options,),
            env=_environment(),
        )
        load: Process | None = None
        try:
            load = await asyncio.create_subprocess_exec(
                tools.client,
                f"--defaults-file=/dev/fd/{target_options}",
                "--batch",
                *arguments.client,
                stdin=PIPE,
                stdout=DEVNULL,
                stderr=PIPE,
                pass_fds=(target_options,),
                env=_environment(),
            )
            return await _Pipe(tools, dump, load, pace, on_progress).run()
        finally:
            for process in (dump, load):
                if process is not None:
                    with suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()


def _dump_options(dialect: Dialect) -> list[str]:
    # A single snapshot locks tables only for the moment it is taken. Binary values are written as hexadecimal digits,
    # so that no character set can change them.
    common = ["--single-transaction", "--quick", "--hex-blob", "--default-character-set=utf8mb4"]
    if dialect is Dialect.MARIADB:
        return [*common, "--gtid", "--master-data=2"]
    # The position is written as a comment. Set at the start of the load, it would make the server claim to have
    # everything.
    return [*common, "--set-gtid-purged=COMMENTED", "--source-data=2", "--no-tablespaces"]


class _Pipe:
    """Pipes the output of the dump into the client, and watches both."""

    def __init__(
        self,
        tools: DatabaseTools,
        dump: Process,
        load: Process,
        pace: CopyPace,
        on_progress: Callable[[CopyProgress], None],
    ) -> None:
        self._tools: Final = tools
        self._dump: Final = dump
        self._load: Final = load
        self._pace: Final = pace
        self._on_progress: Final = on_progress
        self._bytes = 0
        self._schemas = 0
        self._head = bytearray()
        self._tail = b""

    async def run(self) -> CopyProgress:
        words = [asyncio.ensure_future(_last_lines(each)) for each in (self._dump, self._load)]
        try:
            try:
                async with asyncio.timeout(None) as patience:
                    await self._carry(patience)
                    statuses = [await self._dump.wait(), await self._load.wait()]
            except TimeoutError:
                raise CopyFailed(f"nothing moved for {self._pace.stall_seconds:g} s: is a lock held?") from None
            failed = [
                f"{tool.name}: {await said or f'exit status {status}'}"
                for tool, status, said in zip((self._tools.dump, self._tools.client), statuses, words, strict=True)
                if status and status != -signal.SIGTERM
            ]
            if failed:
                raise CopyFailed("; ".join(failed))
        finally:
            for each in words:
                each.cancel()
        if _END not in self._tail:
            raise CopyFailed(f"{self._tools.dump.name} ended before its end")
        # MySQL writes it in front. MariaDB did so, and since 10.11 writes it behind the rows.
        expression = _POSITION[self._tools.dialect]
        position = expression.search(self._head) or expression.search(self._tail)
        if position is None:
            raise CopyFailed(f"{self._tools.dump.name} names no position: is the binlog of the master on, with GTIDs?")
        text = position[1].decode().replace("\n", "")
        return CopyProgress(self._bytes, self._schemas, text)

    async def _carry(self, patience: asyncio.Timeout) -> None:
        reader, writer, loop = self._dump.stdout, self._load.stdin, asyncio.get_running_loop()
        assert reader is not None, "it is a pipe"
        assert writer is not None, "it is a pipe"
        due, pace = loop.time(), self._pace
        try:
            while True:
                patience.reschedule(None)
                if pace.may_go_on is not None:
                    await pace.may_go_on()
                if pace.bytes_per_second:
                    await asyncio.sleep(max(0.0, due - loop.time()))
                patience.reschedule(loop.time() + pace.stall_seconds)
                chunk = await reader.read(_CHUNK_BYTES)
                if not chunk:
                    break
                self._note(chunk)
                if pace.bytes_per_second:
                    due = max(due, loop.time()) + len(chunk) / pace.bytes_per_second
                writer.write(chunk)
                await writer.drain()
            patience.reschedule(loop.time() + pace.stall_seconds)
            writer.close()
            await writer.wait_closed()
        except (BrokenPipeError, ConnectionResetError):
            # The client has failed and reports why. The dump need not go on.
            with suppress(ProcessLookupError):
                self._dump.terminate()

    def _note(self, chunk: bytes) -> None:
        self._bytes += len(chunk)
        if len(self._head) < _HEAD_BYTES:
            self._head += chunk
        # No value contains such a line, because line ends within values are escaped.
        self._schemas += (self._tail[1 - len(_NEXT_SCHEMA) :] + chunk).count(_NEXT_SCHEMA)
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
        self._on_progress(CopyProgress(self._bytes, self._schemas))


async def _last_lines(process: Process) -> str:
    assert process.stderr is not None, "it is a pipe"
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    while line := await process.stderr.readline():
        lines.append(line.decode(errors="replace").strip())
    return "; ".join(lines)


@contextmanager
def _option_file(account: ServerAccount, dialect: Dialect) -> Iterator[int]:
    """Yield the descriptor of an option file in memory with the server's address and the account. The file disappears
    with its last user."""
    options = {"user": account.user, "password": account.password}
    options |= {"socket": account.socket} if account.socket else {"host": account.host, "port": str(account.port)}
    options["protocol"] = "socket" if account.socket else "tcp"
    if dialect is Dialect.MYSQL:
        # The key lets the password pass without TLS, as in replication. The network has to provide the encryption.
        options["get-server-public-key"] = "1"
    text = "[client]\n" + "".join(f"{name}={_quoted(value)}\n" for name, value in options.items())
    descriptor = os.memfd_create("tao-options")
    try:
        # The programs ignore an option file that is writable by everybody.
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, text.encode())
        yield descriptor
    finally:
        os.close(descriptor)


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _environment() -> dict[str, str]:
    """Return the environment without variables that override the option file: passwords, hosts, and MySQL's login
    file."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MYSQL_", "MARIADB_"))}
    return {**kept, "MYSQL_TEST_LOGIN_FILE": os.devnull}
