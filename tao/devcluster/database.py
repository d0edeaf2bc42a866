"""A private database instance: data from a template, a free port, the service accounts, one start and one stop.

For the development cluster and the tests. It listens on 127.0.0.1 and on a Unix socket in its own folder, where alone
root comes in. A folder that a crash left behind is simply started again: the server recovers its data, and what lies
around from the old process is cleared once it is certain that this process is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pymysql.err

from tao.devcluster.database_server import DatabaseServer, PortLost
from tao.devcluster.ports import LOOPBACK, reserve_port
from tao.devcluster.processes import Lifetime, ManagedProcess
from tao.devcluster.server_binary import ServerBinary
from tao.devcluster.server_options import ServerFolder, ServerOptions
from tao.devcluster.template import copy_template, prepare_template, require_free_disk
from tao.model.errors import OperatorError
from tao.storage.accounts import ServiceAccounts, create_accounts

_PORT_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class InstanceSettings:
    """One private instance."""

    folder: Path
    """Where its data, socket, log and record lie; made on the first start, never removed."""
    accounts: ServiceAccounts
    """Made, or given these passwords again, at every start."""
    cache_folder: Path
    """Where templates are kept between clusters: see `tao.devcluster.template.default_cache_folder`."""
    port: int = 0
    """On 127.0.0.1; 0 picks a free one, which `DatabaseInstance.port` then says."""
    options: ServerOptions = field(default_factory=ServerOptions)
    """How the server runs."""
    lifetime: Lifetime = Lifetime.WITH_PARENT
    """Whether it may outlive the process that starts it."""
    start_seconds: float = 60.0
    """Bound on a start: normally a fraction of a second, but a crash recovery reads the whole redo log."""
    min_free_disk_mb: int = 256
    """A fresh instance takes 40 MB and a binlog; a full disk stops a server in the middle of its writes."""


class DatabaseInstance:
    """A private server that can be started, stopped, killed and started again, with its data."""

    def __init__(self, binary: ServerBinary, settings: InstanceSettings) -> None:
        self._binary = binary
        self._settings = settings
        self._folder = ServerFolder(settings.folder.absolute())
        self._server = DatabaseServer(binary, self._folder, settings.options, settings.lifetime)
        self._port = settings.port

    @property
    def host(self) -> str:
        """Always 127.0.0.1."""
        return LOOPBACK

    @property
    def port(self) -> int:
        """The TCP port; kept from start to start. Raises `OperatorError` while none was picked yet."""
        if self._port == 0:
            raise OperatorError(f"the database in {self._folder.path} has no port before its first start")
        return self._port

    @property
    def socket_path(self) -> Path:
        """The Unix socket; root has no password there."""
        return self._folder.socket

    @property
    def accounts(self) -> ServiceAccounts:
        """Names and passwords of its accounts."""
        return self._settings.accounts

    @property
    def binary(self) -> ServerBinary:
        """Which server it runs."""
        return self._binary

    @property
    def process(self) -> ManagedProcess:
        """The process of the latest start. Raises `OperatorError` before the first."""
        return self._server.process

    @property
    def is_running(self) -> bool:
        """True while the server's process runs."""
        return self._server.is_running

    async def start(self) -> None:
        """Start it and wait until its accounts can connect.

        Raises `OperatorError`, with nothing left running: the port is taken, the disk too full, the folder served by
        another process, no template can be made, or the server does not come up (with the end of its log).
        """
        if self.is_running:
            raise OperatorError(f"the database in {self._folder.path} is running already")
        require_free_disk(self._folder.path, self._settings.min_free_disk_mb)
        if self._port:
            reserve_port(self._port).release()  # a taken port is said before anything is made
        await self._ensure_data()
        await self._start_server()
        try:
            async with self._server.connect_as_root() as connection:
                await create_accounts(connection, self._settings.accounts)
        except pymysql.err.MySQLError as error:
            await self._server.stop()
            raise OperatorError(f"cannot make the accounts of the database in {self._folder.path}: {error}") from error
        except BaseException:
            await self._server.stop()
            raise

    async def stop(self) -> bool:
        """Shut down cleanly, by force after half a minute. True when no force was needed. Idempotent."""
        return await self._server.stop()

    async def kill(self) -> None:
        """SIGKILL: what tests of recovery want."""
        await self._server.process.kill()

    async def _ensure_data(self) -> None:
        path = self._folder.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Whoever reaches the socket can be root there.
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
        """Start on the chosen port; where none was chosen, a port lost at the last moment is replaced."""
        for attempts_left in reversed(range(_PORT_ATTEMPTS)):
            reservation = reserve_port(self._port)
            try:
                await self._server.start(reservation, self._settings.start_seconds)
            except PortLost:
                if self._port or not attempts_left:
                    raise
                continue
            self._port = reservation.port
            return
