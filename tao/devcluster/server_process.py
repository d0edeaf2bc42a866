"""A server of the development cluster other than a database, as a process that is ready once it is started.

It is run by its command, as an operator would run it (``tao leader --settings FILE``), on ports that stay reserved
until it listens. The delay line is no operator's affair, and is run as a module.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping

from tao.devcluster.layout import CachePorts, Role
from tao.devcluster.line_control import wait_until_line_answers
from tao.devcluster.ports import LOOPBACK, PortReservation, reserve_port
from tao.devcluster.processes import Lifetime, ManagedProcess
from tao.devcluster.readiness import wait_until_ready
from tao.devcluster.state_folder import StateFolder
from tao.model.errors import OperatorError

_OPERATOR_ERROR_STATUS = 2


def reserve_ports(wanted: CachePorts | None, grpc: int = 0) -> tuple[CachePorts, list[PortReservation]]:
    """Three ports: those of the last start where they are still free, so that clients find the cluster again.

    ``grpc``, when given, must be had: raises `OperatorError` when it is taken.
    """
    reservations: list[PortReservation] = []
    try:
        reservations.append(reserve_port(grpc) if grpc else reserve_again(wanted.grpc if wanted else 0))
        reservations.append(reserve_again(wanted.frames if wanted else 0))
        reservations.append(reserve_again(wanted.admin if wanted else 0))
    except OperatorError:
        release(reservations)
        raise
    return CachePorts(*(reservation.port for reservation in reservations)), reservations


def release(reservations: list[PortReservation]) -> None:
    """Let go of all."""
    for reservation in reservations:
        reservation.release()


def reserve_again(port: int) -> PortReservation:
    """The port of the last start where it is still free, else any (also for 0)."""
    try:
        return reserve_port(port)
    except OperatorError:
        return reserve_port()


class ServerProcess:
    """One leader, follower, tailer or delay line, over its restarts."""

    def __init__(
        self,
        name: str,
        role: Role,
        admin_port: int,
        folder: StateFolder,
        *,
        environment: Mapping[str, str],
        lifetime: Lifetime,
        start_seconds: float,
        stop_seconds: float,
    ) -> None:
        self.name = name
        self.role = role
        self._admin_port = admin_port
        self._folder = folder
        self._environment = {**os.environ, **environment}
        self._lifetime = lifetime
        self._start_seconds = start_seconds
        self._stop_seconds = stop_seconds
        self._process: ManagedProcess | None = None

    @property
    def admin(self) -> str:
        """``host:port`` of the admin port; the delay line, whose port is 0, has none."""
        return f"{LOOPBACK}:{self._admin_port}" if self._admin_port else ""

    @property
    def process(self) -> ManagedProcess:
        """The process of the latest start. Raises `OperatorError` before the first."""
        if self._process is None:
            raise OperatorError(f"{self.name} was not started")
        return self._process

    @property
    def is_running(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.is_running

    async def start(self, reservations: list[PortReservation] | None = None) -> None:
        """Start and wait until the server says that it is ready; releases the reservations.

        Raises `OperatorError`, with nothing left running, when it ends instead or takes too long.
        """
        held = reservations or []
        # -P: the folder it starts in must not shadow installed modules.
        line = self.role is Role.LINE
        command = ["tao.devcluster.delay_line"] if line else ["tao.cli", str(self.role), "--settings"]
        process = ManagedProcess(
            self.name,
            [sys.executable, "-P", "-m", *command, str(self._folder.settings_file(self.name))],
            self._environment,
            self._folder.log(self.name, self.role),
            folder=self._folder.path,
            record_path=self._folder.process_record(self.name, self.role),
            lifetime=self._lifetime,
            stop_seconds=self._stop_seconds,
        )
        try:
            process.start()
            self._process = process
            await self._wait(process)
        except BaseException:
            if self._process is process:
                await process.kill()
            raise
        finally:
            release(held)

    async def _wait(self, process: ManagedProcess) -> None:
        ended = asyncio.ensure_future(process.wait())
        seconds = self._start_seconds
        ready = asyncio.ensure_future(
            wait_until_ready(self.admin, seconds)
            if self.admin
            else wait_until_line_answers(self._folder.line_control, seconds)
        )
        try:
            await asyncio.wait((ended, ready), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                status = ended.result()
                # An operator's mistake is one line, and this is it; anything else needs more of the log.
                tail = process.log_tail(1 if status == _OPERATOR_ERROR_STATUS else 12)
                raise OperatorError(
                    f"{self.name} ended with status {status} instead of starting: {tail} (log: {process.log_path})"
                )
            try:
                ready.result()
            except OperatorError as error:
                raise OperatorError(f"{self.name} is {error.message}; log: {process.log_path}") from error
        finally:
            ended.cancel()
            ready.cancel()
            with contextlib.suppress(asyncio.CancelledError, OperatorError):
                await ready

    async def stop(self) -> bool:
        """SIGTERM, and SIGKILL when it does not drain in time. True when no force was needed. Idempotent."""
        return self._process is None or await self._process.stop()

    async def kill(self) -> None:
        """SIGKILL, as a crash would."""
        await self.process.kill()
