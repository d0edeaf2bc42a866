"""A child process that is started, watched and ended without leaving orphans or hitting strangers.

Two lifetimes. *With the parent*: the kernel kills the child when the thread that started it ends, so even a parent that
was killed with SIGKILL leaves nothing behind. *Detached*: the child is meant to survive, and whoever comes later stops
it by its record. Neither asyncio's nor the standard library's process objects are used: both insist on killing, or on
warning about, a child that outlives them. A pidfd tells the event loop about the end of a process of any parent.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from tao.devcluster import launch
from tao.devcluster.identity import ProcessIdentity, stop_process, write_record
from tao.model.errors import InternalError, OperatorError

_LOG_TAIL_BYTES = 16 * 1024
Result = TypeVar("Result")


class Lifetime(StrEnum):
    """How long a child may live."""

    WITH_PARENT = launch.WITH_PARENT
    DETACHED = launch.DETACHED


async def to_the_end(work: Coroutine[Any, Any, Result]) -> Result:
    """What ``work`` returns. A cancellation meanwhile does not cut it short: it is raised once the work is over, which
    has to be bounded by itself. For ending what was started."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        # Retrieved, because what goes wrong while something ends matters less than why it has to.
        task.cancelled() or task.exception()
        raise cancelled
    return task.result()


class ManagedProcess:
    """One run of one program; make a new one for the next run. Use it on the event loop that started it.

    ``log_path`` receives standard output and error, appended; a log that has grown beyond ``log_max_bytes`` is kept
    aside as ``….1`` when the process starts, so a folder holds at most two. ``record_path``, when given, holds the
    process's identity as JSON while it is believed to run.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        *,
        folder: Path | None = None,
        record_path: Path | None = None,
        lifetime: Lifetime = Lifetime.WITH_PARENT,
        stop_seconds: float = 30.0,
        log_max_bytes: int = 16 * 1024 * 1024,
    ) -> None:
        self.name = name
        self.argv = tuple(argv)
        self.log_path = log_path
        self._env = dict(env)
        self._folder = folder if folder is not None else log_path.parent
        self._record_path = record_path
        self._lifetime = lifetime
        self._stop_seconds = stop_seconds
        self._log_max_bytes = log_max_bytes
        self._identity: ProcessIdentity | None = None
        self._pidfd = -1
        self._log_start = 0
        self._exit: asyncio.Future[int] | None = None

    @property
    def identity(self) -> ProcessIdentity:
        """Who the process is (or was). Raises `InternalError` before `start`."""
        if self._identity is None:
            raise InternalError(f"{self.name} was not started")
        return self._identity

    @property
    def pid(self) -> int:
        """Its process id. Raises `InternalError` before `start`."""
        return self.identity.pid

    @property
    def is_running(self) -> bool:
        """True from `start` until the process has ended (or was released)."""
        return self._exit is not None and not self._exit.done() and self.identity.is_running()

    def start(self) -> None:
        """Start the program in a session of its own. Must be called on the event loop; takes about a millisecond.

        Raises `OperatorError` when the log cannot be written, `InternalError` when it was started before. A program
        that cannot be executed ends with status 127, and the log says why.
        """
        if self._identity is not None:
            raise InternalError(f"{self.name} was started already: make a new ManagedProcess for another run")
        loop = asyncio.get_running_loop()
        try:
            self._log_start = self._prepare_log()
            log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OperatorError(f"cannot write the log {self.log_path} of {self.name}: {error.strerror}") from error
        launcher = [sys.executable, "-I", "-S", launch.__file__, self._lifetime, str(os.getpid()), str(self._folder)]
        try:
            pid = os.posix_spawn(
                sys.executable,
                [*launcher, *self.argv],
                self._env,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, log, 1),
                    (os.POSIX_SPAWN_DUP2, log, 2),
                ],
                setsid=True,
                setsigmask=(),
            )
        finally:
            os.close(log)
        # Nobody has reaped it yet, so the pid is still this child's even if it has ended by now.
        self._identity = ProcessIdentity.of(pid)
        self._pidfd = os.pidfd_open(pid)
        self._exit = loop.create_future()
        loop.add_reader(self._pidfd, self._reap)
        if self._record_path is not None:
            try:
                write_record(self._record_path, self._identity)
            except OSError as error:
                # Unrecorded, nobody would find it after us.
                self._identity.signal(signal.SIGKILL)
                raise OperatorError(f"cannot write {self._record_path}: {error.strerror}") from error

    async def wait(self) -> int:
        """Wait for the end; the exit status, negative for the signal that ended it."""
        if self._exit is None:
            raise InternalError(f"{self.name} was not started")
        return await asyncio.shield(self._exit)

    async def stop(self) -> bool:
        """SIGTERM, and SIGKILL after ``stop_seconds``. True when it ended by itself or on SIGTERM. Idempotent."""
        if self._exit is None or self._exit.done():
            return True
        went_quietly = await stop_process(self.identity, self._stop_seconds)
        await self.wait()
        return went_quietly

    async def kill(self) -> None:
        """SIGKILL, and wait for the end: what a crash of the machine's memory looks like to everybody else."""
        if self._exit is not None and not self._exit.done():
            self.identity.signal(signal.SIGKILL)
            await self.wait()

    def release(self) -> None:
        """Stop watching without ending the process: the last act of the parent of a detached child."""
        if self._exit is not None and not self._exit.done():
            self._close_pidfd()
            self._exit.cancel()

    def log_tail(self, lines: int = 12) -> str:
        """The last lines that this run wrote to its log, at most 16 KiB of them."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _LOG_TAIL_BYTES))
                text = log.read(_LOG_TAIL_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def _prepare_log(self) -> int:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        if not self.log_path.exists():
            return 0
        size = self.log_path.stat().st_size
        if size <= self._log_max_bytes:
            return size
        self.log_path.replace(self.log_path.with_name(f"{self.log_path.name}.1"))
        return 0

    def _reap(self) -> None:
        """The pidfd became readable: the process has ended."""
        assert self._exit is not None
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG)
        if ended is None:
            return
        self._close_pidfd()
        if self._record_path is not None:
            self._record_path.unlink(missing_ok=True)
        self._exit.set_result(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)

    def _close_pidfd(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
