"""One run of a private database server on data that exist: started until it answers, stopped, killed.

`tao.devcluster.database` makes an instance out of it (data from a template, port, accounts), and the template itself is
made with it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiomysql
import pymysql.err

from tao.devcluster.identity import read_record
from tao.devcluster.ports import PortReservation
from tao.devcluster.processes import Lifetime, ManagedProcess
from tao.devcluster.server_binary import ServerBinary
from tao.devcluster.server_options import ServerFolder, ServerOptions, server_argv
from tao.model.errors import OperatorError

_PROBE_PAUSE_SECONDS = 0.02
_CONNECT_SECONDS = 5.0
_STOP_SECONDS = 30.0
_PORT_TAKEN = ("Bind on TCP/IP port", "Do you already have another")


class DatabaseStartFailed(OperatorError):
    """The server ended, or did not answer in time; the message carries the end of its log."""

    reason = "DATABASE_START_FAILED"


class PortLost(DatabaseStartFailed):
    """Another program took the server's port in the moment between choosing and using it."""

    reason = "PORT_LOST"


class DatabaseServer:
    """A server process on ``folder``, which has data."""

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

    async def start(self, reservation: PortReservation, start_seconds: float) -> None:
        """Start on the reserved port and wait until root can connect, at most ``start_seconds`` (crash recovery
        included). The reservation is released once the server listens, or has failed.

        Raises `PortLost` or `DatabaseStartFailed`; then nothing runs. `OperatorError` when the folder is being served.
        """
        with reservation:
            self._clear_leftovers()
            as_root = os.geteuid() == 0
            process = ManagedProcess(
                f"database server on port {reservation.port}",
                server_argv(self._binary, self._folder, reservation.port, self._options, as_root=as_root),
                os.environ,
                self._folder.log,
                record_path=self._folder.record,
                lifetime=self._lifetime,
                stop_seconds=_STOP_SECONDS,
            )
            process.start()
            self._process = process
            try:
                async with asyncio.timeout(start_seconds):
                    await self._wait_until_it_answers(process)
            except BaseException as error:
                await process.kill()
                if isinstance(error, TimeoutError):
                    raise DatabaseStartFailed(
                        f"the {process.name} did not answer within {start_seconds:g} s; "
                        f"its log {self._folder.log} ends with:\n{process.log_tail()}"
                    ) from None
                raise

    async def stop(self) -> bool:
        """Shut down cleanly, by force after half a minute. True when no force was needed. Idempotent."""
        return True if self._process is None else await self._process.stop()

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
        """Remove what a crash left, once it is certain that nobody serves the folder."""
        served_by = read_record(self._folder.record)
        if served_by is not None and served_by.is_running():
            raise OperatorError(f"the database in {self._folder.path} is running already, as process {served_by.pid}")
        # MySQL refuses a socket whose lock file names a pid that is alive, whoever has that pid today.
        lock = self._folder.socket.with_name(f"{self._folder.socket.name}.lock")
        for leftover in (self._folder.record, self._folder.pid_file, self._folder.socket, lock):
            leftover.unlink(missing_ok=True)

    async def _wait_until_it_answers(self, process: ManagedProcess) -> None:
        ended = asyncio.ensure_future(process.wait())
        try:
            while not ended.done():
                try:
                    async with self.connect_as_root() as connection:
                        await connection.ping(reconnect=False)
                    return
                except pymysql.err.OperationalError:
                    # Not yet: the socket is missing, or the server is still recovering.
                    await asyncio.wait((ended,), timeout=_PROBE_PAUSE_SECONDS)
        finally:
            ended.cancel()
        tail = process.log_tail()
        kind = PortLost if any(sign in tail for sign in _PORT_TAKEN) else DatabaseStartFailed
        raise kind(
            f"the {process.name} ended with status {ended.result()} instead of starting; "
            f"its log {self._folder.log} ends with:\n{tail}"
        )
