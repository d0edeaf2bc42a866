"""Runs private database servers for the development cluster and for tests.

`LocalDatabase` is one server process on data that exist. `DatabaseInstance` adds what a cluster needs: data, a free
port and the service accounts. It listens on 127.0.0.1, and on a Unix socket in its folder, the only way in for root. A
folder that a crash left behind is started again: the server recovers its data, and files of the old process are removed
once it is certain that this process has ended.

Data are copied from a template, a data directory that is made once for each server version. To initialise one takes a
second or two and 114 MB; to copy one that was initialised, started once with a small redo log, and stopped takes a
tenth of a second and 33 MB. The template has no accounts but root's, no binlog and no server identity (``auto.cnf``),
so that copies may replicate from each other. Two processes may need it at the same time: a file lock lets one build it
in a folder of its own, and a rename makes the result appear whole or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiomysql
import pymysql.err

from tao.devcluster.database_program import (
    Durability,
    ServerBinary,
    ServerFolder,
    ServerOptions,
    initialize_argv,
    server_argv,
)
from tao.devcluster.ports import LOOPBACK, PortReservation, reserve_port
from tao.devcluster.processes import Lifetime, ManagedProcess, ProcessOptions, read_record
from tao.model.errors import OperatorError
from tao.replication.accounts import ServiceAccounts, confine_root, create_accounts

_PROBE_PAUSE_SECONDS = 0.02
_CONNECT_SECONDS = 5.0
_STOP_SECONDS = 30.0
_PORT_TAKEN = ("Bind on TCP/IP port", "Do you already have another")
_PORT_ATTEMPTS = 5
_BUILD_SECONDS = 120.0
_LOCK_PAUSE_SECONDS = 0.05
_TEMPLATE_MB = 300
_FORMAT = "3"  # raise it when the content of a template changes: older templates are then not used
_NOT_COPIED = ("binlog.*", "auto.cnf", "*.pid", "*.err", "ib_buffer_pool", "gtid_executed*", "*.sock*")


class DatabaseStartFailed(OperatorError):
    """The server ended, or did not answer in time; the message has the end of its log."""

    reason = "DATABASE_START_FAILED"


class PortLost(DatabaseStartFailed):
    """Another program took the server's port between its choice and its use."""

    reason = "PORT_LOST"


class LocalDatabase:
    """A server process on a folder that has data."""

    def __init__(self, binary: ServerBinary, folder: ServerFolder, options: ServerOptions, lifetime: Lifetime) -> None:
        self._binary = binary
        self._folder = folder
        self._options = options
        self._lifetime = lifetime
        self._process: ManagedProcess | None = None

    @property
    def process(self) -> ManagedProcess:
        """The server's process. Raises `OperatorError` when it was never started."""
        if self._process is None:
            raise OperatorError(f"the database server of {self._folder.path} was not started")
        return self._process

    @property
    def is_running(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.is_running

    async def serve(self, reservation: PortReservation, start_seconds: float) -> None:
        """Start on the reserved port and wait until root can connect, at most ``start_seconds`` with crash recovery.

        The reservation is released once the server listens or has failed. Raises `PortLost` or `DatabaseStartFailed`,
        with nothing left running, and `OperatorError` when a server runs on the folder already.
        """
        with reservation:
            self._clear_leftovers()
            self._folder.temporary.mkdir(exist_ok=True)
            as_root = os.geteuid() == 0
            process = ManagedProcess(
                f"database server on port {reservation.port}",
                server_argv(self._binary, self._folder, reservation.port, self._options, as_root=as_root),
                os.environ,
                self._folder.log,
                ProcessOptions(record_path=self._folder.record, lifetime=self._lifetime, stop_seconds=_STOP_SECONDS),
            )
            process.start()
            self._process = process
            try:
                async with asyncio.timeout(start_seconds):
                    status = await process.ended_before(self._wait_until_it_answers())
                if status is not None:
                    raise self._ended(process, status)
            except BaseException as error:
                await process.kill()
                if isinstance(error, TimeoutError):
                    raise DatabaseStartFailed(
                        f"the {process.name} did not answer within {start_seconds:g} s; "
                        f"its log {self._folder.log} ends with:\n{process.log_tail()}"
                    ) from None
                raise

    async def stop(self) -> bool:
        """Stop the server; kill it after half a minute. Returns True when it was not killed. Idempotent."""
        return True if self._process is None else await self._process.stop()

    async def kill(self) -> None:
        """Kill it with SIGKILL, for tests of recovery. Raises `OperatorError` when it was never started."""
        await self.process.kill()

    @asynccontextmanager
    async def connect_as_root(self) -> AsyncIterator[Any]:
        """An aiomysql connection of root by the Unix socket. Raises `pymysql.err.MySQLError`."""
        connection = await aiomysql.connect(
            unix_socket=str(self._folder.socket), user="root", connect_timeout=_CONNECT_SECONDS, autocommit=True
        )
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        await connection.ensure_closed()

    def _clear_leftovers(self) -> None:
        """Remove the files that a crash left, once it is certain that no server runs on the folder."""
        served_by = read_record(self._folder.record)
        if served_by is not None and served_by.is_running():
            raise OperatorError(f"the database in {self._folder.path} is running already, as process {served_by.pid}")
        # MySQL refuses a socket whose lock file names a pid that exists, even if another process has it now.
        lock = self._folder.socket.with_name(f"{self._folder.socket.name}.lock")
        for leftover in (self._folder.record, self._folder.pid_file, self._folder.socket, lock):
            leftover.unlink(missing_ok=True)

    async def _wait_until_it_answers(self) -> None:
        while True:
            try:
                async with self.connect_as_root() as connection:
                    await connection.ping(reconnect=False)
                return
            except pymysql.err.OperationalError:
                # The socket does not exist yet, or the server is still recovering.
                await asyncio.sleep(_PROBE_PAUSE_SECONDS)

    def _ended(self, process: ManagedProcess, status: int) -> DatabaseStartFailed:
        tail = process.log_tail()
        kind = PortLost if any(sign in tail for sign in _PORT_TAKEN) else DatabaseStartFailed
        return kind(
            f"the {process.name} ended with status {status} instead of starting; "
            f"its log {self._folder.log} ends with:\n{tail}"
        )


@dataclass(frozen=True, slots=True)
class InstanceSettings:
    """The settings of one private instance."""

    folder: Path
    """The folder of its data, socket, log and record. The first start creates it; nothing removes it."""
    accounts: ServiceAccounts
    """The accounts that every start creates, or whose passwords it sets again."""
    cache_folder: Path
    """The folder that keeps templates: see `default_cache_folder`."""
    port: int = 0
    """The port on 127.0.0.1; 0 picks a free one, which `DatabaseInstance.port` returns."""
    options: ServerOptions = field(default_factory=ServerOptions)
    """The options of the server program."""
    lifetime: Lifetime = Lifetime.WITH_PARENT
    """Whether it ends with the process that starts it."""
    start_seconds: float = 60.0
    """The time limit of a start: normally a fraction of a second, but a crash recovery reads the whole redo log."""
    min_free_disk_mb: int = 256
    """A fresh instance takes 40 MB and a binlog; a full disk stops a server in the middle of its writes."""


class DatabaseInstance(LocalDatabase):
    """A private database server that can be started, stopped, killed and started again on its data."""

    def __init__(self, binary: ServerBinary, settings: InstanceSettings) -> None:
        super().__init__(binary, ServerFolder(settings.folder.absolute()), settings.options, settings.lifetime)
        self._settings = settings
        self._port = settings.port

    @property
    def host(self) -> str:
        """Always 127.0.0.1."""
        return LOOPBACK

    @property
    def port(self) -> int:
        """The TCP port, the same at every start. Raises `OperatorError` before a port was picked."""
        if self._port == 0:
            raise OperatorError(f"the database in {self._folder.path} has no port before its first start")
        return self._port

    @property
    def socket_path(self) -> Path:
        """The path of the Unix socket, where root connects without a password."""
        return self._folder.socket

    @property
    def accounts(self) -> ServiceAccounts:
        """The names and passwords of its accounts."""
        return self._settings.accounts

    @property
    def binary(self) -> ServerBinary:
        """The server program."""
        return self._binary

    async def start(self) -> None:
        """Start the server and wait until its accounts can connect.

        Raises `OperatorError`, with nothing left running, when the port is taken, the disk is too full, another server
        runs on the folder, no template can be made, or the server does not start (with the end of its log).
        """
        if self.is_running:
            raise OperatorError(f"the database in {self._folder.path} is running already")
        require_free_disk(self._folder.path, self._settings.min_free_disk_mb)
        if self._port:
            reserve_port(self._port).release()  # a taken port is reported before anything is created
        await self._ensure_data()
        await self._start_server()
        try:
            async with self.connect_as_root() as connection:
                await create_accounts(connection, self._settings.accounts)
        except pymysql.err.MySQLError as error:
            await self.stop()
            raise OperatorError(f"cannot make the accounts of the database in {self._folder.path}: {error}") from error
        except BaseException:
            await self.stop()
            raise

    async def _ensure_data(self) -> None:
        path = self._folder.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Everybody who can open the socket can be root there.
            path.chmod(0o700)
        except OSError as error:
            raise OperatorError(f"cannot make the folder {path}: {error.strerror}") from error
        if self._folder.data.is_dir():
            return
        redo_log_mb = self._settings.options.redo_log_mb
        await copy_template(
            await prepare_template(self._binary, self._settings.cache_folder, redo_log_mb), self._folder.data
        )

    async def _start_server(self) -> None:
        """Start on the chosen port. Where none was chosen, try another one when the port is lost before the start."""
        for attempts_left in reversed(range(_PORT_ATTEMPTS)):
            reservation = reserve_port(self._port)
            try:
                await self.serve(reservation, self._settings.start_seconds)
            except PortLost:
                if self._port or not attempts_left:
                    raise
                continue
            self._port = reservation.port
            return


def default_cache_folder(env: Mapping[str, str]) -> Path:
    """Return the folder that keeps templates: ``$XDG_CACHE_HOME/tao``, else ``~/.cache/tao``."""
    configured = env.get("XDG_CACHE_HOME", "")
    # The XDG specification says that relative paths are ignored.
    root = Path(configured) if configured.startswith("/") else Path(env.get("HOME") or Path.home()) / ".cache"
    return root / "tao"


def template_name(binary: ServerBinary, redo_log_mb: int) -> str:
    """Return the name of a template, from the server's flavour, version and program, and the size of the redo log."""
    key = f"{_FORMAT}\n{binary.path}\n{redo_log_mb}"
    return f"{binary.flavour}-{binary.version_text}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def require_free_disk(folder: Path, min_free_mb: int) -> None:
    """Raise `OperatorError` when the file system of ``folder``, which may not exist yet, has less free space."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free_mb = shutil.disk_usage(existing).free // 2**20
    if free_mb < min_free_mb:
        raise OperatorError(
            f"{folder} has {free_mb} MB of free disk, {min_free_mb} MB are needed: make room or choose another folder"
        )


async def prepare_template(binary: ServerBinary, cache_folder: Path, redo_log_mb: int) -> Path:
    """Return the template's data directory, made now if it does not exist. Several processes may call it at once.

    Raises `OperatorError` with the end of the initialiser's or the server's log when it cannot be made.
    """
    templates = cache_folder / "databases"
    template = templates / template_name(binary, redo_log_mb)
    if template.is_dir():
        return template
    require_free_disk(templates, _TEMPLATE_MB)
    try:
        templates.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise OperatorError(f"cannot make the cache folder {templates}: {error.strerror}") from error
    async with _file_lock(templates / f"{template.name}.lock"):
        if not template.is_dir():
            await _build(binary, template, redo_log_mb)
    return template


async def copy_template(template: Path, data: Path) -> None:
    """Copy the template to ``data``, whole or not at all. Copies share blocks where the file system can do that.

    Raises `OperatorError` when it cannot be copied.
    """
    draft = data.with_name(f"{data.name}.copying")
    await asyncio.to_thread(shutil.rmtree, draft, ignore_errors=True)
    await _run(["cp", "--archive", "--reflink=auto", str(template), str(draft)], "copying the database template")
    draft.rename(data)


async def _build(binary: ServerBinary, template: Path, redo_log_mb: int) -> None:
    # The caller holds the template's lock, so files here are left by a process that died. The name is short because
    # the path of a socket must be.
    draft = ServerFolder(template.parent / f"build-{template.name.rpartition('-')[2]}")
    await asyncio.to_thread(shutil.rmtree, draft.path, ignore_errors=True)
    draft.path.mkdir(mode=0o700)
    as_root = os.geteuid() == 0
    await _run(initialize_argv(binary, draft.data, redo_log_mb, as_root=as_root), f"initialising {binary.flavour} data")
    # It is started once, so that it has its small redo log and no copy has to make one.
    options = ServerOptions(redo_log_mb=redo_log_mb, durability=Durability.RELAXED)
    server = LocalDatabase(binary, draft, options, Lifetime.WITH_PARENT)
    await server.serve(reserve_port(), _BUILD_SECONDS)
    try:
        async with server.connect_as_root() as connection:
            await confine_root(connection)
    except pymysql.err.MySQLError as error:
        raise OperatorError(f"cannot confine root in the database template: {error}") from error
    finally:
        stopped = await server.stop()
    if not stopped:
        raise OperatorError(f"the template's server did not shut down by itself: see {draft.log}")
    for pattern in _NOT_COPIED:
        for path in draft.data.glob(pattern):
            path.unlink()
    draft.data.rename(template)
    await asyncio.to_thread(shutil.rmtree, draft.path)


@contextlib.asynccontextmanager
async def _file_lock(path: Path) -> AsyncIterator[None]:
    """Hold the file lock at ``path``. The kernel releases it when the process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _BUILD_SECONDS
    try:
        # It is polled, because a thread that waits in flock() cannot be cancelled.
        while not _try_lock(descriptor):
            if loop.time() > deadline:
                raise OperatorError(f"another process has held {path} for {_BUILD_SECONDS:g} s: end it and try again")
            await asyncio.sleep(_LOCK_PAUSE_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _run(argv: Sequence[str], what: str) -> None:
    try:
        done = await asyncio.to_thread(
            subprocess.run, argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_BUILD_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OperatorError(f"{what} failed: {error}") from error
    if done.returncode != 0:
        output = (done.stdout + done.stderr).decode(errors="replace").splitlines()[-12:]
        raise OperatorError(f"{what} failed with status {done.returncode}:\n" + "\n".join(output))
