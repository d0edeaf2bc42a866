"""A private PostgreSQL server on loopback, for the load tests: full durability, and the program of this machine.

PostgreSQL refuses to run as root. Root gives its data to the account ``postgres`` of Debian's package, or to
``nobody``, and starts it as that account, in a folder of its own under the folder for temporary files: the account
cannot enter the folders of root.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import asyncpg

from loadtest.conditions import until
from loadtest.peers.graph_store import SqlAddress
from tao.devcluster.ports import LOOPBACK, reserve_port
from tao.devcluster.processes import ManagedProcess, ProcessOptions, to_the_end
from tao.model.errors import OperatorError

WHERE_FROM: Final = "`make bench` installs it, or install your system's package (Debian and Ubuntu: postgresql)"
_DEBIAN: Final = Path("/usr/lib/postgresql")
_USER: Final = "peer"
_ACCOUNTS: Final = ("postgres", "nobody")
_OPEN_PLACES: Final = ("/tmp", "/var/tmp")  # noqa: S108 - a new folder with an unguessable name is made there
_START_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 30.0
_PROBE_PAUSE_SECONDS: Final = 0.05
_OPTIONS: Final = {
    # As the other databases: every commit is synced, and there is a log that a replica could follow.
    "fsync": "on",
    "synchronous_commit": "on",
    "wal_level": "replica",
    "max_connections": "128",
    "listen_addresses": LOOPBACK,
    "unix_socket_directories": "",
    "timezone": "UTC",
    "checkpoint_timeout": "15min",
    # A random page of a disk without a moving head costs little more than the next one, and compiling a plan costs more
    # than to run a short one.
    "random_page_cost": "1.1",
    "jit": "off",
    "huge_pages": "off",
}


def postgres_folder() -> Path | None:
    """Return the folder of ``postgres`` and ``initdb``, of the PATH or else of Debian's newest; None without."""
    on_path = shutil.which("postgres")
    if on_path is not None and Path(on_path).with_name("initdb").exists():
        return Path(on_path).parent
    found = [each for each in _DEBIAN.glob("*/bin") if (each / "postgres").exists() and (each / "initdb").exists()]
    return max(found, key=lambda each: float(each.parent.name), default=None)


def data_place() -> Path:
    """Return the folder in which servers get theirs: that for temporary files, or one that every account can enter."""
    usual = Path(tempfile.gettempdir())
    if _owner() is None:
        return usual
    places = (usual, *map(Path, _OPEN_PLACES))
    return next((each for each in places if all(of.stat().st_mode & 1 for of in (each, *each.parents))), usual)


class PostgresServer:
    """One private server, which can be stopped and started again with another buffer pool."""

    def __init__(self, programs: Path, folder: Path, log: Path, redo_mb: int) -> None:
        """``programs`` is the result of `postgres_folder`; ``folder`` is a new, empty one that `account` owns."""
        self._programs: Final = programs
        self._folder: Final = folder
        self._log: Final = log
        self._redo_mb: Final = redo_mb
        self._password: Final = secrets.token_hex(16)
        self._port = 0
        self._process: ManagedProcess | None = None

    @property
    def address(self) -> SqlAddress:
        """The address with the account of the load test."""
        return SqlAddress(host=LOOPBACK, port=self._port, user=_USER, password=self._password)

    @property
    def pid(self) -> int:
        """The process id of the first process, whose children serve the connections. Raises `OperatorError` when it was
        not started."""
        if self._process is None:
            raise OperatorError("the PostgreSQL server was not started")
        return self._process.pid

    @property
    def tables(self) -> Path:
        """The folder of the tables' files."""
        return self._folder / "data" / "base"

    def version(self) -> str:
        """Return the program's version: ``15.14``."""
        text = subprocess.run(
            [self._programs / "postgres", "--version"], capture_output=True, text=True, check=True
        ).stdout
        return text.split()[2]

    async def initialize(self) -> None:
        """Make the data directory. Raises `OperatorError` with the output of ``initdb`` when that fails."""
        password = self._folder / "password"
        password.write_text(self._password)
        if owner := _owner():
            os.chown(password, *owner)
        process = await asyncio.create_subprocess_exec(
            *_as_account(),
            str(self._programs / "initdb"),
            *("--pgdata", str(self._folder / "data"), "--username", _USER, "--pwfile", str(password)),
            *("--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C", "--no-sync"),
            cwd=self._folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        password.unlink()
        if process.returncode:
            raise OperatorError(f"initdb failed:\n{output.decode(errors='replace')}")

    async def start(self, buffer_pool_mb: int) -> None:
        """Start the server and wait until it answers. Raises `OperatorError` with the end of its log."""
        with reserve_port(self._port) as reservation:
            self._port = reservation.port
            options = {
                **_OPTIONS,
                "port": str(self._port),
                "shared_buffers": f"{buffer_pool_mb}MB",
                # How much of the data it may expect in memory, which decides between plans.
                "effective_cache_size": f"{buffer_pool_mb}MB",
                "max_wal_size": f"{self._redo_mb}MB",
            }
            argv = [
                *_as_account(),
                str(self._programs / "postgres"),
                *("-D", str(self._folder / "data")),
                *(word for name, value in options.items() for word in ("-c", f"{name}={value}")),
            ]
            own = ProcessOptions(folder=self._folder, stop_seconds=_STOP_SECONDS)
            process = self._process = ManagedProcess("PostgreSQL", argv, os.environ, self._log, own)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await until(self._answers, _PROBE_PAUSE_SECONDS)
        except TimeoutError:
            raise OperatorError(f"PostgreSQL did not answer in {_START_SECONDS:g} s:\n{process.log_tail()}") from None

    async def stop(self) -> None:
        """Stop the server. Idempotent."""
        if self._process is not None:
            await self._process.stop()

    async def _answers(self) -> bool:
        if self._process is None or not self._process.is_running:
            raise OperatorError(f"PostgreSQL ended at once:\n{self._process.log_tail() if self._process else ''}")
        where = self.address
        try:
            connection = await asyncpg.connect(
                host=where.host, port=where.port, user=where.user, password=where.password, database="postgres"
            )
        except (OSError, asyncpg.CannotConnectNowError):
            return False
        await connection.close()
        return True


@asynccontextmanager
async def private_postgres(log: Path, buffer_pool_mb: int, redo_mb: int) -> AsyncIterator[PostgresServer]:
    """Run a server until the end of this context, and remove its data. Raises `OperatorError`."""
    programs = postgres_folder()
    if programs is None:
        raise OperatorError(f"no postgres and initdb on this machine: {WHERE_FROM}")
    folder = Path(tempfile.mkdtemp(prefix="tao-postgres-", dir=data_place()))
    try:
        if owner := _owner():
            os.chown(folder, *owner)
        server = PostgresServer(programs, folder, log, redo_mb)
        await server.initialize()
        try:
            await server.start(buffer_pool_mb)
            yield server
        finally:
            await to_the_end(server.stop())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _owner() -> tuple[int, int] | None:
    """Return user and group id of the account that runs it; None when that is this process's own."""
    if os.geteuid() != 0:
        return None
    for name in _ACCOUNTS:
        try:
            account = pwd.getpwnam(name)
        except KeyError:
            continue
        return account.pw_uid, account.pw_gid
    raise OperatorError(f"PostgreSQL refuses root, and there is no account {' or '.join(_ACCOUNTS)} to run it")


def _as_account() -> list[str]:
    owner = _owner()
    return [] if owner is None else ["setpriv", f"--reuid={owner[0]}", f"--regid={owner[1]}", "--clear-groups", "--"]
