"""Runs the database's own programs: dump, client and binlog reader.

The programs already handle what our own code would have to reimplement: snapshots with their position, every type of
value, quoting, and the order of statements. None is started through a shell. Passwords are not visible to other users
of the machine: accounts are passed in an unnamed file in memory, which the program inherits.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tao.model.errors import OperatorError, RetryableError
from tao.storage.dialect import Dialect, SessionSetup
from tao.storage.session import ServerAccount, open_session

SERVER_VARIABLE: Final = "TAO_MYSQLD"
"""The environment variable that names a database server which is not installed."""

_DUMP: Final = {Dialect.MARIADB: ("mariadb-dump", "mysqldump"), Dialect.MYSQL: ("mysqldump",)}
_CLIENT: Final = {Dialect.MARIADB: ("mariadb", "mysql"), Dialect.MYSQL: ("mysql",)}
_BINLOG_READER: Final = {Dialect.MARIADB: ("mariadb-binlog", "mysqlbinlog"), Dialect.MYSQL: ("mysqlbinlog",)}
_PACKAGES: Final = {Dialect.MARIADB: "mariadb-client", Dialect.MYSQL: "mysql-client"}
CHUNK_BYTES: Final = 256 << 10
_KEPT_LINES: Final = 5
_PROBE_SECONDS: Final = 10.0

Read = Callable[[], Awaitable[bytes]]
"""Returns the next bytes, and nothing at the end."""
Write = Callable[[bytes], Awaitable[None]]
"""Takes the next bytes, and nothing at the end."""


class CopyFailed(RetryableError):
    """A program failed or stalled. The message has its last lines. The copy has to start again."""

    reason = "COPY_FAILED"


@dataclass(frozen=True, slots=True)
class DatabaseTools:
    """The dump and client programs that belong to one kind of server."""

    dialect: Dialect
    dump: Path
    client: Path


async def find_tools(dialect: Dialect, env: Mapping[str, str]) -> DatabaseTools:
    """Find the programs that belong to this kind of server, beside the one that ``TAO_MYSQLD`` names or on ``PATH``;
    MySQL and MariaDB use the same names. Raises `OperatorError` with the command that installs them."""
    dump, client = await _find_all(dialect, env, _DUMP, _CLIENT)
    return DatabaseTools(dialect, dump, client)


async def find_binlog_reader(dialect: Dialect, env: Mapping[str, str]) -> Path:
    """Find the program that reads binlogs, as `find_tools` does."""
    (reader,) = await _find_all(dialect, env, _BINLOG_READER)
    return reader


async def _find_all(
    dialect: Dialect, env: Mapping[str, str], *kinds: Mapping[Dialect, Sequence[str]]
) -> tuple[Path, ...]:
    found = [await _find(names[dialect], dialect, env) for names in kinds]
    if None in found:
        wanted = " and ".join(names[dialect][0] for names in kinds)
        needed = f"{wanted} of {dialect.value} {'are' if len(kinds) > 1 else 'is'} needed here and not on PATH"
        raise OperatorError(f"{needed}: apt-get install {_PACKAGES[dialect]}")
    return tuple(Path(str(path)) for path in found)


async def _find(names: Sequence[str], dialect: Dialect, env: Mapping[str, str]) -> str | None:
    for path in (shutil.which(name, path=place) for place in _places(env) for name in names):
        if path is None:
            continue
        process = await asyncio.create_subprocess_exec(path, "--version", stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL)
        said, _ = await process.communicate()
        if (b"mariadb" in said.lower()) == (dialect is Dialect.MARIADB):
            return path
    return None


def _places(env: Mapping[str, str]) -> Iterator[str]:
    """Yield the search paths in their order: programs beside the named server have its version."""
    path, server = env.get("PATH", ""), env.get(SERVER_VARIABLE)
    found = shutil.which(server, path=path) if server else None
    if found is not None:
        yield str(Path(found).parent)
    yield path


class Program:
    """A running program of the database."""

    def __init__(self, name: str, process: Process) -> None:
        self.name: Final = name
        self._process: Final = process
        self._last_lines: Final = asyncio.ensure_future(_last_lines(process))

    async def read(self) -> bytes:
        """Return the next part of its output, and nothing at the end."""
        assert self._process.stdout is not None, "it is a pipe"
        return await self._process.stdout.read(CHUNK_BYTES)

    async def write(self, chunk: bytes) -> None:
        """Write to its input; nothing closes it. Raises `ConnectionError` when the program does not read any more."""
        writer = self._process.stdin
        assert writer is not None, "it is a pipe"
        if chunk:
            writer.write(chunk)
            await writer.drain()
        else:
            writer.close()
            await writer.wait_closed()

    async def failure(self) -> str:
        """Wait until the program has ended. Return its last lines if it failed, or ""; `stop` is no failure.

        What is left of its output is read and dropped: the end of a process is noticed once its pipes are at theirs."""
        while self._process.stdout is not None and await self._process.stdout.read(CHUNK_BYTES):
            pass
        status = await self._process.wait()
        if not status or status == -signal.SIGTERM:
            return ""
        return f"{self.name}: {await self._last_lines or f'exit status {status}'}"

    def stop(self) -> None:
        """Ask the program to end: nobody needs the rest of its output."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    async def kill(self) -> None:
        """End the program, and wait until it has ended."""
        self._last_lines.cancel()
        with suppress(ProcessLookupError):
            self._process.kill()
        # Pipes are closed once they have been read to their end.
        await self._process.communicate()


@asynccontextmanager
async def running(
    path: Path,
    *arguments: str | Path,
    dialect: Dialect,
    account: ServerAccount | None = None,
    takes_input: bool = False,
    folder: Path | None = None,
) -> AsyncIterator[Program]:
    """Start a program, and kill it at the end if it still runs.

    ``account``: the server that it connects to. ``takes_input``: it reads statements; otherwise its output is read.
    ``folder``: where it works. Raises `TaoError` when an account without a host to check finds no TLS."""
    if account is not None and dialect is Dialect.MARIADB:
        await _insist_on_tls(account)
    with _option_file(account, dialect) as options:
        process = await asyncio.create_subprocess_exec(
            path,
            f"--defaults-file=/dev/fd/{options}",
            *arguments,
            stdin=PIPE if takes_input else DEVNULL,
            stdout=DEVNULL if takes_input else PIPE,
            stderr=PIPE,
            pass_fds=(options,),
            env=_environment(),
            cwd=folder,
        )
        program = Program(path.name, process)
        try:
            yield program
        finally:
            await program.kill()


async def carry(
    read: Read,
    write: Write,
    *programs: Program,
    stall_seconds: float,
) -> None:
    """Pass everything from ``read`` to ``write``, and wait until the programs at both ends have ended well.

    The first program is the one that is stopped when ``write`` finds nobody who reads. ``stall_seconds``: fail when no
    byte moves for this long. Raises `CopyFailed`."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as patience:
            try:
                chunk = b"first"
                while chunk:
                    patience.reschedule(loop.time() + stall_seconds)
                    chunk = await read()
                    await write(chunk)
            except (BrokenPipeError, ConnectionResetError):
                # The client has failed and reports why. The program before it need not go on.
                programs[0].stop()
            failures = [await each.failure() for each in programs]
    except TimeoutError:
        raise CopyFailed(f"nothing moved for {stall_seconds:g} s: is a lock held?") from None
    if any(failures):
        raise CopyFailed("; ".join(filter(None, failures)))


async def _last_lines(process: Process) -> str:
    assert process.stderr is not None, "it is a pipe"
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    while line := await process.stderr.readline():
        lines.append(line.decode(errors="replace").strip())
    return "; ".join(lines)


@contextmanager
def _option_file(account: ServerAccount | None, dialect: Dialect) -> Iterator[int]:
    """Yield the descriptor of an option file in memory with the server's address and the account. The file disappears
    with its last user."""
    options = {}
    if account is not None:
        options = {"user": account.user, "password": account.password}
        options |= {"socket": account.socket} if account.socket else {"host": account.host, "port": str(account.port)}
        options["protocol"] = "socket" if account.socket else "tcp"
        options |= _encryption(account, dialect)
        if dialect is Dialect.MYSQL:
            # The key lets the password pass without TLS, as in replication.
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


async def _insist_on_tls(account: ServerAccount) -> None:
    """Log in over TLS by a connection of our own, where MariaDB's programs would go on in plain text without it: those
    that do not verify the server do."""
    if account.tls is None or account.socket or account.tls.files.verify_host:
        return
    deadline = asyncio.get_running_loop().time() + _PROBE_SECONDS
    session = await open_session(account, account.address, SessionSetup(writes=False), deadline=deadline)
    session.quit()


def _encryption(account: ServerAccount, dialect: Dialect) -> dict[str, str]:
    """Return the options of TLS. Without any, the programs of either kind may encrypt, and verify nothing."""
    if account.tls is None or account.socket:
        return {}
    files = account.tls.files
    named = {"ssl-ca": files.authorities, "ssl-cert": files.certificate, "ssl-key": files.private_key}
    options = {option: str(file.absolute()) for option, file in named.items() if file is not None}
    if dialect is Dialect.MYSQL:
        return {**options, "ssl-mode": "VERIFY_IDENTITY" if files.verify_host else "VERIFY_CA"}
    return {**options, "ssl": "1", "ssl-verify-server-cert": f"{files.verify_host:d}"}


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _environment() -> dict[str, str]:
    """Return the environment without variables that override the option file: passwords, hosts, and MySQL's login
    file. Times are UTC: binlog readers take those of their options for local time."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MYSQL_", "MARIADB_"))}
    return {**kept, "MYSQL_TEST_LOGIN_FILE": os.devnull, "TZ": "UTC"}
