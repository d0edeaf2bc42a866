"""Starts, watches and stops processes without leaving orphans, and without signalling the wrong process.

A child is killed by the kernel when the thread that started it ends (a forked one: when the process ends that started
it), so that even a parent killed with SIGKILL leaves nothing behind. A *detached* child survives its parent, and a
later command stops it by its record. The process objects of asyncio are not used: they kill a child that outlives them.
A pidfd reports the end of any process to the event loop.

A state folder outlives its processes, and the kernel gives the pid of a record to another process later. So a process
is identified by pid, start time and boot, and it is signalled through a pidfd that was opened before the identity was
compared: exactly the process that was compared is signalled. (psutil derives the start time from the wall clock, which
may be set between two commands, and signals by pid.) This works on Linux only (``/proc``, pidfd, setpriv).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from tao.devcluster.fork_server import ForkServer
from tao.model.errors import OperatorError, unwritable

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_KILL_SECONDS: Final = 10.0
_LOG_TAIL_BYTES: Final = 16 * 1024
_WITH_PARENT: Final = (
    # SIGKILL, not SIGTERM: a server that hangs in its shutdown would remain as an orphan. Every server here survives a
    # kill by design. A function between fork and exec may deadlock in a parent that has threads, and gRPC has.
    *("setpriv", "--pdeathsig", "KILL"),
    # The parent may have ended before the kernel was asked.
    *("sh", "-c", '[ "$PPID" = "$1" ] || exit; shift; exec "$@"', "start"),
)
Result = TypeVar("Result")


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

    async def ends(self, number: signal.Signals, seconds: float) -> bool:
        """Send a signal, and return True once the process no longer runs, False when it still runs after ``seconds``.

        The process may have any parent."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        with self._opened() as pidfd:
            if pidfd is None or not _sent(pidfd, number):
                return True
            loop.add_reader(pidfd, ended.set)
            try:
                await asyncio.wait_for(ended.wait(), seconds)
            except TimeoutError:
                return False
            finally:
                loop.remove_reader(pidfd)
        return True

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to this process. Returns False when it no longer runs; then no process was signalled."""
        with self._opened() as pidfd:
            return pidfd is not None and _sent(pidfd, number)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int | None]:
        """Give a pidfd of this process; None when it no longer runs."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            yield pidfd if self.is_running() else None
        finally:
            os.close(pidfd)


def _sent(pidfd: int, number: signal.Signals) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
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


async def stop_process(identity: ProcessIdentity, term_seconds: float) -> bool:
    """Stop a process, of any parent: send SIGTERM, and SIGKILL when it still runs after ``term_seconds``.

    Returns True when it ended on SIGTERM or did not run, False when it had to be killed. Raises `OperatorError` when it
    survives SIGKILL, which only a fault of the kernel or a disk can cause."""
    ended_on_sigterm = await identity.ends(signal.SIGTERM, term_seconds)
    if not ended_on_sigterm:
        await kill_process(identity)
    return ended_on_sigterm


async def kill_process(identity: ProcessIdentity) -> None:
    """Kill a process, of any parent, and wait for its end. Raises `OperatorError` when it survives SIGKILL."""
    if not await identity.ends(signal.SIGKILL, _KILL_SECONDS):
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
    detached: bool = False
    """True when it may outlive the process that starts it."""
    stop_seconds: float = 30.0
    """How long it may take to end after SIGTERM."""
    log_max_bytes: int = 16 * 1024 * 1024
    """A longer log is renamed to ``….1`` when the process starts, so that a folder has at most two."""
    fork_server: ForkServer | None = None
    """What forks the program, once it is ready; None: the program is executed."""
    starts_servers: bool = False
    """True for a program that is forked together with a fork server of its own (`ForkServer.fork`)."""


class ManagedProcess:
    """One run of one program, a child of this process. Use it on the event loop that started it."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        options: ProcessOptions = ProcessOptions(),
    ) -> None:
        """Start the program in a session of its own, with standard output and error appended to ``log_path``.

        Raises `OperatorError` when the log cannot be written or a detached program does not exist. Another program that
        cannot be executed ends with status 127, with the reason in the log."""
        self.name = name
        self.log_path = log_path
        self._options = options
        try:
            self._log_start = _prepare_log(log_path, options.log_max_bytes)
            with log_path.open("ab") as log:
                server, folder = options.fork_server, options.folder or log_path.parent
                start: Callable[..., int] = _execute
                if server is not None:
                    start = partial(server.fork, starts_servers=options.starts_servers)
                pid = start(argv, env, folder, log.fileno(), detached=options.detached)
        except OSError as error:
            raise OperatorError(f"cannot start {name} with the log {log_path}: {error}") from error
        loop = asyncio.get_running_loop()
        # It has not been reaped, so the pid is still this child's even if it has ended by now.
        self.identity = ProcessIdentity.of(pid)
        self._pidfd = os.pidfd_open(pid)
        self._exit: asyncio.Future[int] = loop.create_future()
        loop.add_reader(self._pidfd, self._reap)
        if options.record_path is not None:
            try:
                write_record(options.record_path, self.identity)
            except OSError as error:
                # Without a record no later command would find it.
                self.identity.signal(signal.SIGKILL)
                raise OperatorError(unwritable(options.record_path, error)) from error

    @property
    def pid(self) -> int:
        """The process id."""
        return self.identity.pid

    @property
    def is_running(self) -> bool:
        """True until the process has ended (or was released)."""
        return not self._exit.done() and self.identity.is_running()

    async def wait(self) -> int:
        """Wait for the end and return the exit status, negative for the signal that ended it."""
        await asyncio.wait([self._exit])
        return self._exit.result()

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
        if self._exit.done():
            return True
        ended_on_sigterm = await stop_process(self.identity, self._options.stop_seconds)
        await self.wait()
        return ended_on_sigterm

    async def kill(self) -> None:
        """Kill it with SIGKILL, and wait for its end. Idempotent."""
        if not self._exit.done():
            await kill_process(self.identity)
            await self.wait()

    def release(self) -> None:
        """Stop watching the process without ending it, before the parent of a detached child ends."""
        if not self._exit.done():
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

    def _reap(self) -> None:
        """Take the exit status, once the pidfd is readable because the process has ended."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return
        self._close_pidfd()
        path = self._options.record_path
        # Another command may have started the process again, and written the record of the new one.
        if path is not None and read_record(path) == self.identity:
            path.unlink(missing_ok=True)
        self._exit.set_result(os.waitstatus_to_exitcode(status))

    def _close_pidfd(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)


def _execute(argv: Sequence[str], env: Mapping[str, str], folder: Path, log: int, *, detached: bool) -> int:
    """Execute a program as `ForkServer.fork` forks one."""
    parent = () if detached else (*_WITH_PARENT, str(os.getpid()))
    child = subprocess.Popen(
        [*parent, *argv],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=env,
        cwd=folder,
        start_new_session=True,
    )
    child.returncode = 0  # nothing but this module waits for it, and nothing warns that it goes on running
    return child.pid


def _prepare_log(path: Path, max_bytes: int) -> int:
    """Make a log that only this user reads, put one aside that is too long, and return the size of the log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > max_bytes:
        path.replace(path.with_name(f"{path.name}.1"))
    path.touch(0o600)
    return path.stat().st_size
