"""Runs private database servers for the development cluster and for tests.

A server listens on 127.0.0.1, and on a Unix socket in its folder, the only way in for root. A folder that a crash left
behind is started again: the server recovers its data, and files of the old process are removed once it is certain that
this process has ended.

Data are copied from a template, a data directory that is made once for each server version: to initialise one takes
some seconds, to copy one a tenth of a second. It has no binlog and no server identity (``auto.cnf``), so that copies
may replicate from each other. It is made in a folder of its own, and a rename makes it appear whole or not at all; of
two processes that make it at the same time, one keeps its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiomysql
import pymysql.err

from tao.devcluster.database_program import (
    REDO_LOG_MB,
    ServerBinary,
    ServerFolder,
    ServerOptions,
    initialize_argv,
    server_argv,
)
from tao.devcluster.ports import LOOPBACK, reserve_port
from tao.devcluster.processes import ManagedProcess, ProcessOptions, read_record
from tao.model.errors import OperatorError
from tao.replication.accounts import ServiceAccounts, TlsDemand, confine_root, create_accounts

_PROBE_PAUSE_SECONDS = 0.02
_CONNECT_SECONDS = 5.0
_BUILD_SECONDS = 120.0
_TEMPLATE_MB = 300
_FORMAT = "4"  # raise it when the content of a template changes: older templates are then not used
_NOT_COPIED = ("auto.cnf", "*.err", "ib_buffer_pool")


class DatabaseStartFailed(OperatorError):
    """The server ended, or did not answer in time; the message has the end of its log."""

    reason = "DATABASE_START_FAILED"


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
    demand: TlsDemand | None = None
    """What the server demands of connections with the accounts, if that is to change at the next start."""
    detached: bool = False
    """True when it may outlive the process that starts it."""
    start_seconds: float = 60.0
    """The time limit of a start: normally a fraction of a second, but a crash recovery reads the whole redo log."""
    min_free_disk_mb: int = 256
    """A fresh instance takes 40 MB and a binlog; a full disk stops a server in the middle of its writes."""


class DatabaseInstance:
    """A private database server that can be started, stopped, killed and started again on its data."""

    def __init__(self, binary: ServerBinary, settings: InstanceSettings) -> None:
        self._binary = binary
        self._settings = settings
        self._folder = ServerFolder(settings.folder.absolute())
        self._port = settings.port
        self._process: ManagedProcess | None = None

    @property
    def process(self) -> ManagedProcess:
        """The server's latest process. Raises `OperatorError` when it was never started."""
        if self._process is None:
            raise OperatorError(f"the database server of {self._folder.path} was not started")
        return self._process

    @property
    def is_running(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.is_running

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
        # A taken port is reported before anything is created.
        with reserve_port(self._port) as reservation:
            await self._ensure_data()
            self._clear_leftovers()
            process = self._process = ManagedProcess(
                f"database server on port {reservation.port}",
                server_argv(
                    self._binary, self._folder, reservation.port, self._settings.options, as_root=os.geteuid() == 0
                ),
                os.environ,
                self._folder.log,
                ProcessOptions(record_path=self._folder.record, detached=self._settings.detached),
            )
            try:
                await self._make_ready(process)
            except BaseException:
                await process.kill()
                raise
            self._port = reservation.port

    async def stop(self) -> bool:
        """Stop the server; kill it after half a minute. Returns True when it was not killed. Idempotent."""
        return self._process is None or await self._process.stop()

    def release(self) -> None:
        """Stop watching the process without ending it, before the parent of a detached server ends."""
        if self._process is not None:
            self._process.release()

    async def kill(self) -> None:
        """Kill it with SIGKILL, for tests of recovery. Raises `OperatorError` when it was never started."""
        await self.process.kill()

    async def _ensure_data(self) -> None:
        path = self._folder.path
        try:
            self._folder.temporary.mkdir(parents=True, exist_ok=True)
            # Everybody who can open the socket can be root there.
            path.chmod(0o700)
        except OSError as error:
            raise OperatorError(f"cannot make the folder {path}: {error.strerror}") from error
        if not self._folder.data.is_dir():
            await copy_template(await prepare_template(self._binary, self._settings.cache_folder), self._folder.data)

    def _clear_leftovers(self) -> None:
        """Remove the files that a crash left, once it is certain that no server runs on the folder."""
        served_by = read_record(self._folder.record)
        if served_by is not None and served_by.is_running():
            raise OperatorError(f"the database in {self._folder.path} is running already, as process {served_by.pid}")
        # MySQL refuses a socket whose lock file names a pid that exists, even if another process has it now.
        lock = self._folder.socket.with_name(f"{self._folder.socket.name}.lock")
        for leftover in (self._folder.record, self._folder.pid_file, self._folder.socket, lock):
            leftover.unlink(missing_ok=True)

    async def _make_ready(self, process: ManagedProcess) -> None:
        """Wait until the server answers, with its crash recovery, and create its accounts."""
        seconds = self._settings.start_seconds
        failure = f"did not answer within {seconds:g} s"
        try:
            async with asyncio.timeout(seconds):
                status = await process.ended_before(self._create_accounts())
            if status is None:
                return
            failure = f"ended with status {status} instead of starting"
        except TimeoutError:
            pass
        except pymysql.err.MySQLError as error:
            raise OperatorError(f"cannot make the accounts of the database in {self._folder.path}: {error}") from error
        raise DatabaseStartFailed(
            f"the {process.name} {failure}; its log {self._folder.log} ends with:\n{process.log_tail()}"
        )

    async def _create_accounts(self) -> None:
        connection = await self._connect_as_root()
        try:
            await confine_root(connection)
            await create_accounts(connection, self._settings.accounts, demand=self._settings.demand)
        finally:
            connection.close()

    async def _connect_as_root(self) -> Any:
        while True:
            try:
                return await aiomysql.connect(
                    unix_socket=str(self._folder.socket), user="root", connect_timeout=_CONNECT_SECONDS, autocommit=True
                )
            except pymysql.err.OperationalError:
                # The socket does not exist yet, or the server is still recovering.
                await asyncio.sleep(_PROBE_PAUSE_SECONDS)


def default_cache_folder(env: Mapping[str, str]) -> Path:
    """Return the folder that keeps templates: ``$XDG_CACHE_HOME/tao``, else ``~/.cache/tao``."""
    configured = env.get("XDG_CACHE_HOME", "")
    # The XDG specification says that relative paths are ignored.
    root = Path(configured) if configured.startswith("/") else Path(env.get("HOME") or Path.home()) / ".cache"
    return root / "tao"


def template_name(binary: ServerBinary) -> str:
    """Return the name of a template, from the server's flavour, version and program, and the size of the redo log."""
    key = f"{_FORMAT}\n{binary.path}\n{REDO_LOG_MB}"
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


async def prepare_template(binary: ServerBinary, cache_folder: Path) -> Path:
    """Return the template's data directory, made now if it does not exist. Several processes may call it at once.

    Raises `OperatorError` with the end of the initialiser's output when it cannot be made.
    """
    templates = cache_folder / "databases"
    template = templates / template_name(binary)
    if template.is_dir():
        return template
    require_free_disk(templates, _TEMPLATE_MB)
    try:
        templates.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise OperatorError(f"cannot make the cache folder {templates}: {error.strerror}") from error
    with tempfile.TemporaryDirectory(prefix="building-", dir=templates) as folder:
        draft = Path(folder) / "data"
        argv = initialize_argv(binary, draft, as_root=os.geteuid() == 0)
        # A server that starts removes all temporary tables in its folder, also those of others in a shared one.
        await _run(argv, f"initialising {binary.flavour} data", {**os.environ, "TMPDIR": folder})
        for path in (path for pattern in _NOT_COPIED for path in draft.glob(pattern)):
            path.unlink()
        with contextlib.suppress(OSError):  # another process was faster, and its template is as good
            draft.rename(template)
    return template


async def copy_template(template: Path, data: Path) -> None:
    """Copy the template to ``data``, whole or not at all. Copies share blocks where the file system can do that.

    Raises `OperatorError` when it cannot be copied.
    """
    draft = data.with_name(f"{data.name}.copying")
    await asyncio.to_thread(shutil.rmtree, draft, ignore_errors=True)
    await _run(["cp", "--archive", "--reflink=auto", str(template), str(draft)], "copying the database template")
    draft.rename(data)


async def _run(argv: Sequence[str], what: str, environment: Mapping[str, str] | None = None) -> None:
    try:
        done = await asyncio.to_thread(
            subprocess.run,
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_BUILD_SECONDS,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OperatorError(f"{what} failed: {error}") from error
    if done.returncode != 0:
        output = (done.stdout + done.stderr).decode(errors="replace").splitlines()[-12:]
        raise OperatorError(f"{what} failed with status {done.returncode}:\n" + "\n".join(output))
