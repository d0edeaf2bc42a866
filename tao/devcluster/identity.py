"""Who a process is, beyond a number that the kernel gives to somebody else later.

A state folder outlives its processes, and a recorded pid may belong to an innocent process by the time somebody wants
to stop it. So a process is known by pid, start time and boot, and it is signalled through a pidfd that was opened
*before* the identity was compared: what was checked is what is signalled. Linux only (``/proc``, pidfd).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tao.model.errors import OperatorError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one boot of this machine."""

    pid: int
    start_ticks: int
    """When it started, in the kernel's clock ticks since boot (field 22 of ``/proc/PID/stat``)."""
    boot_id: str
    """Ticks begin anew with every boot; this says which."""

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The identity of a process that exists now. Raises `ProcessLookupError` when there is none."""
        stat = _read_stat(pid)
        if stat is None:
            raise ProcessLookupError(f"there is no process {pid}")
        return cls(pid, stat[1], _BOOT_ID.read_text().strip())

    def is_running(self) -> bool:
        """True while this very process runs; a zombie, a successor on the same pid or an earlier boot's is not it."""
        stat = _read_stat(self.pid)
        if stat is None or stat[0] in "ZX" or stat[1] != self.start_ticks:
            return False
        return _BOOT_ID.read_text().strip() == self.boot_id

    def open(self) -> int | None:
        """A pidfd of this very process, for the caller to close; None when it no longer runs."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.is_running():
            return pidfd
        os.close(pidfd)
        return None

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to this very process. False when it no longer runs, and then nobody was signalled."""
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
    """State letter and start time of a process, or None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name stands in parentheses and may contain spaces and parentheses itself: count after the last one.
    fields = stat[stat.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])


@contextlib.asynccontextmanager
async def exit_event(pidfd: int) -> AsyncIterator[asyncio.Event]:
    """An event that is set when the process behind ``pidfd`` ends, whoever its parent is."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        yield ended
    finally:
        loop.remove_reader(pidfd)


async def stop_process(identity: ProcessIdentity, term_seconds: float, kill_seconds: float = 10.0) -> bool:
    """End a process, of whatever parent: SIGTERM, and SIGKILL when it still runs after ``term_seconds``.

    Returns True when it went on SIGTERM (or did not run at all), False when it had to be killed. Raises
    `OperatorError` when it is there even ``kill_seconds`` after SIGKILL, which only the kernel can cause.
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
    """Record who serves a folder, atomically. Raises `OSError`."""
    draft = path.with_name(f"{path.name}.draft")
    draft.write_bytes(msgspec.json.encode(identity))
    draft.replace(path)


def read_record(path: Path) -> ProcessIdentity | None:
    """Who was recorded at ``path``; None when nobody was, or when a crash left something unreadable."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ProcessIdentity)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        # Records are replaced whole, so this is a damaged disk: nobody can be identified by it, hence nobody signalled.
        return None
