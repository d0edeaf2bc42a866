"""Starts, watches and stops processes without leaving orphans, and without signalling the wrong process.

A child has one of two lifetimes. With `Lifetime.WITH_PARENT` the kernel kills it when the thread that started it ends,
so that even a parent killed with SIGKILL leaves nothing behind. With `Lifetime.DETACHED` it survives its parent, and a
later command stops it by its record. The process objects of asyncio and the standard library are not used: they kill a
child that outlives them, or warn about it. A pidfd reports the end of any process to the event loop.

A state folder outlives its processes, and the kernel gives the pid of a record to another process later. So a process
is identified by pid, start time and boot, and it is signalled through a pidfd that was opened before the identity was
compared: exactly the process that was compared is signalled. This works on Linux only (``/proc``, pidfd).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tao.devcluster import launch
from tao.model.errors import InternalError, OperatorError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, identified over reuse of its pid and over reboots."""

    pid: int
    start_ticks: int
    """The start time in clock ticks since boot (field 22 of ``/proc/PID/stat``)."""
    boot_id: str
    """The boot that the ticks count from."""

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Return the identity of a process that exists now. Raises `ProcessLookupError` when there is none."""
        stat = _read_stat(pid)
        if stat is None:
            raise ProcessLookupError(f"there is no process {pid}")
        return cls(pid, stat[1], _BOOT_ID.read_text().strip())

    def is_running(self) -> bool:
        """True while this process runs; False for a zombie, and for another process with its pid."""
        stat = _read_stat(self.pid)
        if stat is None or stat[0] in "ZX" or stat[1] != self.start_ticks:
            return False
        return _BOOT_ID.read_text().strip() == self.boot_id

    def open(self) -> int | None:
        """Return a pidfd of this process, which the caller closes; None when it no longer runs."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.is_running():
            return pidfd
        os.close(pidfd)
        return None

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to this process. Returns False when it no longer runs; then no process was signalled."""
        pidfd = self.open()
        if pidfd is None:
            return False
        try:
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        return True


def _read_stat(pid: int) -> tuple[str, int] | None:
    """Return the state letter and the start time of a process, or None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name is in parentheses, and may contain spaces and parentheses: fields count from the last one.
    fields = stat[stat.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])


@contextlib.asynccontextmanager
async def exit_event(pidfd: int) -> AsyncIterator[asyncio.Event]:
    """Give an event that is set when the process of a pidfd ends, also when it is not a child."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        yield ended
    finally:
        loop.remove_reader(pidfd)


async def stop_process(identity: ProcessIdentity, term_seconds: float, kill_seconds: float = 10.0) -> bool:
    """Stop a process, of any parent: send SIGTERM, and SIGKILL when it still runs after ``term_seconds``.

    Returns True when it ended on SIGTERM or did not run, False when it had to be killed. Raises `OperatorError` when it
    still runs ``kill_seconds`` after SIGKILL, which only a fault of the kernel or a disk can cause.
    """
    pidfd = identity.open()
    if pidfd is None:
        return True
    try:
        async with exit_event(pidfd) as ended:
            for number, bound_seconds in ((signal.SIGTERM, term_seconds), (signal.SIGKILL, kill_seconds)):
                try:
                    signal.pidfd_send_signal(pidfd, number)
                    await asyncio.wait_for(ended.wait(), bound_seconds)
                except ProcessLookupError:
                    return number is signal.SIGTERM
                except TimeoutError:
                    continue
                return number is signal.SIGTERM
    finally:
        os.close(pidfd)
    raise OperatorError(f"process {identity.pid} does not end on SIGKILL: it hangs in the kernel, look at its disk")


def write_record(path: Path, identity: ProcessIdentity) -> None:
    """Write the identity of a process to a file, atomically. Raises `OSError`."""
    draft = path.with_name(f"{path.name}.draft")
    draft.write_bytes(msgspec.json.encode(identity))
    draft.replace(path)


def read_record(path: Path) -> ProcessIdentity | None:
    """Return the identity in a file; None when there is no file, or it cannot be decoded."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ProcessIdentity)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        # Records are replaced whole, so the disk is damaged: no process can be identified, hence none signalled.
        return None


_LOG_TAIL_BYTES = 16 * 1024
Result = TypeVar("Result")


class Lifetime(StrEnum):
    """Whether a child ends with its parent, or may survive it."""

    WITH_PARENT = launch.WITH_PARENT
    DETACHED = launch.DETACHED


async def to_the_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Run ``work`` to its end and return its result, even when the caller is cancelled meanwhile.

    The cancellation is raised once the work has ended, so the work needs a time limit of its own. Use it to stop what
    was started."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        # Retrieve the error, if any: it matters less than the cancellation.
        task.cancelled() or task.exception()
        raise cancelled
    return task.result()


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """How a process runs and ends."""

    folder: Path | None = None
    """Its working folder; None: the folder of its log."""
    record_path: Path | None = None
    """The file that holds its identity as JSON while it runs; None: it is not recorded."""
    lifetime: Lifetime = Lifetime.WITH_PARENT
    stop_seconds: float = 30.0
    """How long it may take to end after SIGTERM."""
    log_max_bytes: int = 16 * 1024 * 1024
    """A longer log is renamed to ``….1`` when the process starts, so that a folder has at most two."""


class ManagedProcess:
    """One run of one program; make a new object for the next run. Use it on the event loop that started it.

    Standard output and error are appended to ``log_path``.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        options: ProcessOptions = ProcessOptions(),
    ) -> None:
        self.name = name
        self.argv = tuple(argv)
        self.log_path = log_path
        self._env = dict(env)
        self._folder = options.folder if options.folder is not None else log_path.parent
        self._record_path = options.record_path
        self._lifetime = options.lifetime
        self._stop_seconds = options.stop_seconds
        self._log_max_bytes = options.log_max_bytes
        self._identity: ProcessIdentity | None = None
        self._pidfd = -1
        self._log_start = 0
        self._exit: asyncio.Future[int] | None = None

    @property
    def identity(self) -> ProcessIdentity:
        """The identity of the process. Raises `InternalError` before `start`."""
        if self._identity is None:
            raise InternalError(f"{self.name} was not started")
        return self._identity

    @property
    def pid(self) -> int:
        """The process id. Raises `InternalError` before `start`."""
        return self.identity.pid

    @property
    def is_running(self) -> bool:
        """True from `start` until the process has ended (or was released)."""
        return self._exit is not None and not self._exit.done() and self.identity.is_running()

    def start(self) -> None:
        """Start the program in a session of its own. Must be called on the event loop; takes about a millisecond.

        Raises `OperatorError` when the log cannot be written, and `InternalError` when it was started before. A program
        that cannot be executed ends with status 127, with the reason in the log.
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
        # It has not been reaped, so the pid is still this child's even if it has ended by now.
        self._identity = ProcessIdentity.of(pid)
        self._pidfd = os.pidfd_open(pid)
        self._exit = loop.create_future()
        loop.add_reader(self._pidfd, self._reap)
        if self._record_path is not None:
            try:
                write_record(self._record_path, self._identity)
            except OSError as error:
                # Without a record no later command would find it.
                self._identity.signal(signal.SIGKILL)
                raise OperatorError(f"cannot write {self._record_path}: {error.strerror}") from error

    async def wait(self) -> int:
        """Wait for the end and return the exit status, negative for the signal that ended it."""
        if self._exit is None:
            raise InternalError(f"{self.name} was not started")
        return await asyncio.shield(self._exit)

    async def ended_before(self, ready: Coroutine[Any, Any, None]) -> int | None:
        """Wait until ``ready`` has run and return None, or return the exit status when the process ends before.

        Raises what ``ready`` raises."""
        ended = asyncio.ensure_future(self.wait())
        waiting = asyncio.ensure_future(ready)
        try:
            await asyncio.wait((ended, waiting), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ended.result()
            waiting.result()
            return None
        finally:
            ended.cancel()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def stop(self) -> bool:
        """Send SIGTERM, and SIGKILL after ``stop_seconds``. Returns True when no SIGKILL was needed. Idempotent."""
        if self._exit is None or self._exit.done():
            return True
        ended_on_sigterm = await stop_process(self.identity, self._stop_seconds)
        await self.wait()
        return ended_on_sigterm

    async def kill(self) -> None:
        """Kill it with SIGKILL, and wait for its end."""
        if self._exit is not None and not self._exit.done():
            self.identity.signal(signal.SIGKILL)
            await self.wait()

    def release(self) -> None:
        """Stop watching the process without ending it, before the parent of a detached child ends."""
        if self._exit is not None and not self._exit.done():
            self._close_pidfd()
            self._exit.cancel()

    def log_tail(self, lines: int = 12) -> str:
        """Return the last lines that this run wrote to its log, at most 16 KiB."""
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
        """Take the exit status, once the pidfd is readable because the process has ended."""
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
