"""Locks that let one process act alone: one active watcher, and one process that changes a database's mastership.

`Locks` is the port. On one machine these are file locks beside the topology document: the operating system releases
them when their process ends, whatever ends it. Beside a topology in etcd they are keys with leases
(`tao.replication.etcd_locks`).

A database's mastership lock is shared by watchers while they renew the master's lease, and held exclusively by a
process that changes the master. So a promotion that holds it can rely on no lease being renewed meanwhile, and has to
wait only until the last renewal has run out.

A process that hangs keeps its file locks. Therefore a holder of an exclusive lock touches the file regularly, and a
lock whose file has not been touched for `LockTerms.takeover_seconds` is taken over by creating the file with the next
number. The former holder detects this before its next step, by its own clock or by the newer file. A step that begins
between such a check and its effect is harmless, because the effect is fenced as well: the topology changes by
compare-and-set, a lease renewal counts from a moment before the check, and a database server ends a session that was
idle for `SESSION_IDLE_SECONDS`, before the lock can be taken over.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from tao.model.errors import OperatorError, RetryableError

_PAUSE_SECONDS: Final = 0.02
_READ_ONLY: Final = (errno.EROFS, errno.EACCES)


class LockTaken(RetryableError):
    """Another process holds the lock."""

    reason = "LOCK_TAKEN"


class LocksAway(RetryableError):
    """The service that keeps the locks does not answer, so it cannot be seen who holds one."""

    reason = "LOCKS_AWAY"


class LockLost(RetryableError):
    """This process was paused so long that another one may have taken over its lock."""

    reason = "LOCK_LOST"


@dataclass(frozen=True, slots=True, kw_only=True)
class LockTerms:
    """Time limits for the holder of an exclusive lock."""

    touch_seconds: float
    """Interval at which the holder touches the lock file."""
    holder_timeout_seconds: float
    """The holder considers the lock lost after this time without a touch. A healthy event loop is never blocked this
    long."""
    takeover_seconds: float
    """Other processes take the lock over after this time without a touch."""


ACTIVITY: Final = LockTerms(touch_seconds=0.5, holder_timeout_seconds=2.0, takeover_seconds=3.0)
"""The terms of the active watcher. A successor renews the leases before they run out, or shortly after."""

MASTERSHIP: Final = LockTerms(touch_seconds=1.0, holder_timeout_seconds=3.0, takeover_seconds=8.0)
"""The terms of a process that changes a master. A successor begins only when the sessions of the former holder have
ended, which is at most `holder_timeout_seconds` plus `SESSION_IDLE_SECONDS` after its last touch."""

SESSION_IDLE_SECONDS: Final = 4
"""The database server ends a session of such a change that is idle for this long. Sessions that are kept for the next
step are used again at shorter intervals (`tao.replication.kept_sessions`)."""


class LockHold(Protocol):
    """A lock that this process holds or has held."""

    def is_held(self) -> bool:
        """Return whether the lock is still held. Once lost, it stays lost."""

    def check(self) -> None:
        """Raise `LockLost` when the lock is not held any more. Call this before each step."""

    async def touch(self) -> None:
        """Show that the holder is alive. Raises `LockLost`."""


class Locks(Protocol):
    """Locks by name. Each one is released when the process that holds it ends."""

    can_be_away: bool
    """Whether they are kept by a service, from which one process may be cut off while another one is not."""

    def held(
        self, name: str, *, exclusive: bool, terms: LockTerms | None = None
    ) -> AbstractAsyncContextManager[LockHold]:
        """Hold the lock, exclusively or shared. Raises `LockTaken` at once when it is not free, and another `TaoError`
        when it cannot be seen whether it is.

        ``terms``: take the lock over from a holder that has been silent for ``takeover_seconds``, as observed by
        repeated attempts of this process, and give signs of life at these intervals from now on.
        """


def mastership_lock(database: str) -> str:
    """Return the name of the lock on a database's mastership."""
    return f"master-of-{database}"


async def databases_being_changed(locks: Locks, databases: Iterable[str]) -> frozenset[str]:
    """Return the databases whose mastership is being changed by any process, including this one."""
    changing: set[str] = set()
    for database in databases:
        try:
            async with locks.held(mastership_lock(database), exclusive=False):
                continue
        except LockTaken:
            changing.add(database)
    return frozenset(changing)


@asynccontextmanager
async def hold_exclusively(locks: Locks, name: str, timeout_seconds: float) -> AsyncIterator[LockHold]:
    """Hold a mastership lock exclusively, waiting for short holders, or until a holder that hangs can be taken over.

    Raises `LockTaken` after ``timeout_seconds``.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_seconds
    hold: LockHold | None = None
    async with AsyncExitStack() as stack:
        while hold is None:
            try:
                hold = await stack.enter_async_context(locks.held(name, exclusive=True, terms=MASTERSHIP))
            except LockTaken:
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)
        async with keep_alive(hold, MASTERSHIP):
            yield hold


@asynccontextmanager
async def keep_alive(hold: LockHold, terms: LockTerms) -> AsyncIterator[None]:
    """Touch the lock regularly for as long as the event loop runs."""

    async def touch() -> None:
        with suppress(LockLost):  # the holder finds out before its next step
            while True:
                await asyncio.sleep(terms.touch_seconds)
                await hold.touch()

    task = asyncio.create_task(touch(), name="signs of life")
    try:
        yield
    finally:
        task.cancel()


class LockFiles:
    """The lock files of a topology document: everything that `FileLocks` asks of the operating system."""

    def __init__(self, topology_file: Path) -> None:
        self._topology_file: Final = topology_file

    def newest(self, name: str) -> int:
        """Return the number of the current file of a lock, which rises with each takeover. Raises `OperatorError`."""
        first = self._path(name, 0).name
        try:
            found = [each.name for each in self._topology_file.parent.iterdir()]
        except OSError as error:
            raise OperatorError(f"cannot lock {name} in {self._topology_file.parent}: {error.strerror}") from error
        numbers = [each.removeprefix(f"{first}.") for each in found if each.startswith(f"{first}.")]
        return max((int(each) for each in numbers if each.isdecimal()), default=0)

    def open(self, name: str, number: int, *, exclusive: bool) -> int:
        """Open a file, and make it when there is none. Raises `OperatorError`."""
        path = self._path(name, number)
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if not exclusive and error.errno in _READ_ONLY:
                # On a read-only folder nothing can be changed, and leases must go on being renewed.
                with suppress(OSError):
                    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            raise OperatorError(f"cannot lock {path}: {error.strerror}") from error

    def create(self, name: str, number: int) -> int | None:
        """Make a file and open it; None when there is one. Raises `OperatorError`."""
        path = self._path(name, number)
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return None
        except OSError as error:
            raise OperatorError(f"cannot lock {path}: {error.strerror}") from error

    def remove(self, name: str, number: int) -> None:
        """Remove a file that was taken over."""
        self._path(name, number).unlink(missing_ok=True)

    @staticmethod
    def lock(descriptor: int, *, exclusive: bool) -> bool:
        """Lock an open file until it is closed or its process ends. Returns False when another process holds it."""
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @staticmethod
    def touched_ns(descriptor: int) -> int:
        """Return when an open file was touched last."""
        return os.fstat(descriptor).st_mtime_ns

    @staticmethod
    def touch(descriptor: int) -> None:
        """Touch an open file. Raises `OSError`."""
        os.utime(descriptor)

    @staticmethod
    def close(descriptor: int) -> None:
        """Close a file, and release its lock."""
        os.close(descriptor)

    def _path(self, name: str, number: int) -> Path:
        suffix = f".{number}" if number else ""
        return self._topology_file.with_name(f".{self._topology_file.name}.{name}.lock{suffix}")


class FileLocks:
    """Implements `Locks` with files in the folder of the topology document."""

    can_be_away = False

    def __init__(self, topology_file: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: returns seconds, and keeps counting while the process is paused."""
        self._files: Final = LockFiles(topology_file)
        self._clock: Final = clock
        self._silent: Final[dict[str, _Silence]] = {}

    @asynccontextmanager
    async def held(self, name: str, *, exclusive: bool, terms: LockTerms | None = None) -> AsyncIterator[LockHold]:
        """See `Locks.held`. Raises `OperatorError` when the folder cannot be used."""
        files, number = self._files, self._files.newest(name)
        descriptor = files.open(name, number, exclusive=exclusive)
        if not files.lock(descriptor, exclusive=exclusive):
            touched_ns = files.touched_ns(descriptor)
            files.close(descriptor)
            if terms is None or not self._is_silent(name, number, touched_ns, terms):
                raise LockTaken(f"{name} is held by another process: a watcher or an operator is at it")
            descriptor, number = self._take_over(name, number), number + 1
        try:
            self._silent.pop(name, None)
            if files.newest(name) != number:
                raise LockTaken(f"{name} was taken over by another process")
            hold = _FileHold(self._clock, files, (name, number, descriptor), terms)
            if terms is not None:
                await hold.touch()
            yield hold
        finally:
            files.close(descriptor)

    def _is_silent(self, name: str, number: int, touched_ns: int, terms: LockTerms) -> bool:
        """Return whether repeated checks, close together, found the file untouched for ``takeover_seconds``."""
        now = self._clock()
        seen = self._silent.get(name)
        if (
            seen is None
            or (seen.number, seen.touched_ns) != (number, touched_ns)
            or now - seen.looked > terms.holder_timeout_seconds
        ):
            seen = _Silence(number, touched_ns, now, now)
        self._silent[name] = _Silence(number, touched_ns, seen.since, now)
        return now - seen.since >= terms.takeover_seconds

    def _take_over(self, name: str, number: int) -> int:
        """Create the file with the next number. Only one of the processes that try succeeds."""
        descriptor = self._files.create(name, number + 1)
        if descriptor is None:
            raise LockTaken(f"{name} was taken over by another process")
        if not self._files.lock(descriptor, exclusive=True):
            self._files.close(descriptor)
            raise LockTaken(f"{name} was taken over by another process")
        self._files.remove(name, number)
        return descriptor


@dataclass(frozen=True, slots=True)
class _Silence:
    """A file that was found locked and untouched: since when, and when it was checked last."""

    number: int
    touched_ns: int
    since: float
    looked: float


class _FileHold:
    """Implements `LockHold` for a lock file."""

    def __init__(
        self, clock: Callable[[], float], files: LockFiles, held: tuple[str, int, int], terms: LockTerms | None
    ) -> None:
        """``held``: the name of the lock, the number of its file, and its descriptor."""
        self._clock: Final = clock
        self._files: Final = files
        self._name, self._number, self._descriptor = held
        self._terms: Final = terms
        self._touched_at = clock()
        self._is_lost = False

    def is_held(self) -> bool:
        if not self._is_lost:
            stood = self._clock() - self._touched_at
            try:
                self._is_lost = (
                    self._terms is not None and stood > self._terms.holder_timeout_seconds
                ) or self._files.newest(self._name) != self._number
            except OperatorError:
                self._is_lost = True  # The folder is unreadable, so the lock cannot be confirmed.
        return not self._is_lost

    def check(self) -> None:
        if not self.is_held():
            raise LockLost("this process stood still, and another one may have its place: look again")

    async def touch(self) -> None:
        self.check()
        try:
            self._files.touch(self._descriptor)
        except OSError as error:
            self._is_lost = True
            raise LockLost(f"no sign of life can be given: {error.strerror}") from error
        self._touched_at = self._clock()
