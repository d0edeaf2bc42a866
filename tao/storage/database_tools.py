"""The database's own programs that copy data: one writes all of it as statements, the other has them executed.

They know what a copy of ours would have to learn: snapshots with their position, every type of value, quoting, the
order of things. Neither is started through a shell, and no password stands where other users of the machine could see
it: accounts are in a file without a name, which both programs inherit.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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
"""The position stands within so much of the beginning, long sets of MySQL's included."""
_POSITION: Final = {
    Dialect.MARIADB: re.compile(rb"SET GLOBAL gtid_slave_pos='([^']*)'"),
    Dialect.MYSQL: re.compile(rb"GTID_PURGED=\s*(?:/\*!80000 '\+'\*/)?\s*'\+?([^']*)'"),
}
_END: Final = b"-- Dump completed"
_NEXT_SCHEMA: Final = b"\nUSE `"
_TAIL_BYTES: Final = 256
_KEPT_LINES: Final = 5


class CopyFailed(RetryableError):
    """One of the two programs failed, or stood still; the message has its last words. The copy is to be begun anew."""

    reason = "COPY_FAILED"


@dataclass(frozen=True, slots=True)
class DatabaseTools:
    """Programs that fit a kind of server."""

    dialect: Dialect
    dump: Path
    client: Path


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy has come to. ``schemas``: begun so far; ``position``: of the copy, once it is known."""

    statement_bytes: int
    schemas: int
    position: str = ""


async def find_tools(dialect: Dialect, env: Mapping[str, str]) -> DatabaseTools:
    """The programs on ``PATH`` that belong to this kind of server: both kinds share names. Raises `OperatorError` with
    the line that installs them."""
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


async def copy_shards(
    tools: DatabaseTools,
    source: ServerAccount,
    target: ServerAccount,
    shards: Sequence[int],
    *,
    stall_seconds: float,
    on_progress: Callable[[Copied], None],
) -> Copied:
    """Copy the schemas of the shards, as they are in one snapshot of ``source``, to a server that has none of them.
    Nothing of it is in the target's binlog. ``stall_seconds``: for which nothing may move.

    Raises `CopyFailed`: the target then has any part of them.
    """
    with _option_file(source, tools.dialect) as source_options, _option_file(target, tools.dialect) as target_options:
        dump = await asyncio.create_subprocess_exec(
            tools.dump,
            f"--defaults-file=/dev/fd/{source_options}",
            *_dump_options(tools.dialect),
            "--databases",
            *map(schema_name, shards),
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
                "--init-command=SET SESSION sql_log_bin = 0",
                stdin=PIPE,
                stdout=DEVNULL,
                stderr=PIPE,
                pass_fds=(target_options,),
                env=_environment(),
            )
            return await _Pipe(tools, dump, load, stall_seconds, on_progress).run()
        finally:
            for process in (dump, load):
                if process is not None:
                    with suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()


def _dump_options(dialect: Dialect) -> list[str]:
    # One snapshot, no locks but for its moment; values that are no text as digits, which no character set can spoil.
    common = ["--single-transaction", "--quick", "--hex-blob", "--default-character-set=utf8mb4"]
    if dialect is Dialect.MARIADB:
        return [*common, "--gtid", "--master-data=2"]
    # The position as a comment: set at the beginning, the server would pass for one that has everything.
    return [*common, "--set-gtid-purged=COMMENTED", "--source-data=2", "--no-tablespaces"]


class _Pipe:
    """From one program to the other."""

    def __init__(
        self,
        tools: DatabaseTools,
        dump: Process,
        load: Process,
        stall_seconds: float,
        on_progress: Callable[[Copied], None],
    ) -> None:
        self._tools: Final = tools
        self._dump: Final = dump
        self._load: Final = load
        self._stall_seconds: Final = stall_seconds
        self._on_progress: Final = on_progress
        self._bytes = 0
        self._schemas = 0
        self._head = bytearray()
        self._tail = b""

    async def run(self) -> Copied:
        words = [asyncio.ensure_future(_last_lines(each)) for each in (self._dump, self._load)]
        try:
            try:
                async with asyncio.timeout(None) as patience:
                    await self._carry(patience)
                    statuses = [await self._dump.wait(), await self._load.wait()]
            except TimeoutError:
                raise CopyFailed(f"nothing moved for {self._stall_seconds:g} s: is a lock held?") from None
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
        position = _POSITION[self._tools.dialect].search(self._head)
        if position is None:
            raise CopyFailed(f"{self._tools.dump.name} names no position: is the binlog of the master on, with GTIDs?")
        text = position[1].decode().replace("\n", "")
        return Copied(self._bytes, self._schemas, text)

    async def _carry(self, patience: asyncio.Timeout) -> None:
        reader, writer, loop = self._dump.stdout, self._load.stdin, asyncio.get_running_loop()
        assert reader is not None, "it is a pipe"
        assert writer is not None, "it is a pipe"
        try:
            while True:
                patience.reschedule(loop.time() + self._stall_seconds)
                chunk = await reader.read(_CHUNK_BYTES)
                if not chunk:
                    break
                self._note(chunk)
                writer.write(chunk)
                await writer.drain()
            patience.reschedule(loop.time() + self._stall_seconds)
            writer.close()
            await writer.wait_closed()
        except (BrokenPipeError, ConnectionResetError):
            # The loader has given up and says why; the other need not go on.
            with suppress(ProcessLookupError):
                self._dump.terminate()

    def _note(self, chunk: bytes) -> None:
        self._bytes += len(chunk)
        if len(self._head) < _HEAD_BYTES:
            self._head += chunk
        # No value has such a line: within one, a line's end is escaped.
        self._schemas += (self._tail[1 - len(_NEXT_SCHEMA) :] + chunk).count(_NEXT_SCHEMA)
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
        self._on_progress(Copied(self._bytes, self._schemas))


async def _last_lines(process: Process) -> str:
    assert process.stderr is not None, "it is a pipe"
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    while line := await process.stderr.readline():
        lines.append(line.decode(errors="replace").strip())
    return "; ".join(lines)


@contextmanager
def _option_file(account: ServerAccount, dialect: Dialect) -> Iterator[int]:
    """A file in memory, gone with its last user, that says where the server is and as whom to come in."""
    options = {"user": account.user, "password": account.password}
    options |= {"socket": account.socket} if account.socket else {"host": account.host, "port": str(account.port)}
    options["protocol"] = "socket" if account.socket else "tcp"
    if dialect is Dialect.MYSQL:
        # What lets the password pass without TLS, as with replication: the network has to bring it.
        options["get-server-public-key"] = "1"
    text = "[client]\n" + "".join(f"{name}={_quoted(value)}\n" for name, value in options.items())
    descriptor = os.memfd_create("tao-options")
    try:
        # A file that everybody may write is passed over.
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, text.encode())
        yield descriptor
    finally:
        os.close(descriptor)


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _environment() -> dict[str, str]:
    """Without what would be held above the option file: passwords, hosts, and MySQL's file of log-ins."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MYSQL_", "MARIADB_"))}
    return {**kept, "MYSQL_TEST_LOGIN_FILE": os.devnull}
