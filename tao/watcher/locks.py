"""Who may do what alone: one active watcher, and one hand at a database's mastership (DESIGN.md §9).

On one machine these are file locks beside the topology document: held by a process, gone with it, whatever ends it.
Where the topology lives in etcd they are its leases: a key per lock, put with a lease that its holder keeps alive and
compared in the same transaction as every change of the document. `Locks` is the port; nothing else knows of files.

A database's lock is taken by whoever renews its master's lease (shared, for the moment of a renewal) and by whoever
changes its master (alone). So a promotion that holds it knows that no lease is renewed behind its back, and need only
wait until the last one has run out.

A process that hangs keeps its file locks, so a lock has *terms*: whoever holds it alone touches its file now and then,
and one that is not touched for long is taken over, by making the file of the next number. Whoever hung finds that out
before its next deed, by its own clock or by the file. That no deed slips between such a look and its effect rests on
what the deeds are made with: the topology changes by compare-and-set, a renewal is worth no more than the moment before
the look, and a database server ends a session that was idle for `SESSION_SECONDS` before anybody takes the lock over.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from tao.model.errors import OperatorError, RetryableError

_PAUSE_SECONDS: Final = 0.02
_READ_ONLY: Final = (errno.EROFS, errno.EACCES)


class LockTaken(RetryableError):
    """Somebody else is at it."""

    reason = "LOCK_TAKEN"


class LockLost(RetryableError):
    """This process stood still for so long that another may have its place."""

    reason = "LOCK_LOST"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How long the holder of a lock may stand still."""

    beat_seconds: float
    """Between two signs of life."""
    own_seconds: float
    """After which, without one, the holder counts itself out: a loop is not held up for so long."""
    hung_seconds: float
    """After which others take the lock over."""


ACTIVITY: Final = Terms(beat_seconds=0.5, own_seconds=2.0, hung_seconds=3.0)
"""Of the watcher that acts: another one renews the leases before they are over, or soon after."""

MASTERSHIP: Final = Terms(beat_seconds=1.0, own_seconds=3.0, hung_seconds=8.0)
"""Of whoever changes a master: others begin when its sessions have ended, after `own_seconds` and `SESSION_SECONDS`."""

SESSION_SECONDS: Final = 4
"""For which a session of such a change may be idle at the database server. None is for longer than it takes to ask all
servers of the set, one of which is away."""


class Hold(Protocol):
    """A lock that is held."""

    def is_mine(self) -> bool:
        """Whether it still is. Once it is not, it is not again."""

    def check(self) -> None:
        """Raise `LockLost` when it is not: before each deed."""

    def beat(self) -> None:
        """Say that the holder lives. Raises `LockLost`."""


class Locks(Protocol):
    """Locks by name; every one is lost with the process that holds it."""

    def held(self, name: str, *, alone: bool, terms: Terms | None = None) -> AbstractContextManager[Hold]:
        """Hold the lock, alone or with others that do not want it alone. ``terms``: take it over from a holder that has
        hung for so long, as this process has seen by trying all the time, and give such signs of life from now on.
        Raises `LockTaken` at once."""


def mastership_lock(database: str) -> str:
    """The lock of a database's mastership."""
    return f"master-of-{database}"


def in_change(locks: Locks, databases: Iterable[str]) -> frozenset[str]:
    """Those of the databases whose mastership somebody is changing, this process included."""
    changing: set[str] = set()
    for database in databases:
        try:
            with locks.held(mastership_lock(database), alone=False):
                continue
        except LockTaken:
            changing.add(database)
    return frozenset(changing)


@asynccontextmanager
async def held_alone(locks: Locks, name: str, patience_seconds: float) -> AsyncIterator[Hold]:
    """Hold a lock of a mastership alone, waiting for those who have it for a moment, or until one that hangs can be
    passed over. Raises `LockTaken` when that takes too long."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_seconds
    hold: Hold | None = None
    with ExitStack() as stack:
        while hold is None:
            try:
                hold = stack.enter_context(locks.held(name, alone=True, terms=MASTERSHIP))
            except LockTaken:
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)
        async with beating(hold, MASTERSHIP):
            yield hold


@asynccontextmanager
async def beating(hold: Hold, terms: Terms) -> AsyncIterator[None]:
    """Give the signs of life, as long as the loop turns."""

    async def beat() -> None:
        with suppress(LockLost):  # whoever holds it finds out before the next deed
            while True:
                await asyncio.sleep(terms.beat_seconds)
                hold.beat()

    task = asyncio.create_task(beat(), name="signs of life")
    try:
        yield
    finally:
        task.cancel()


class FileLocks:
    """`Locks` in the folder of the topology document."""

    def __init__(self, topology_file: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds, which go on while the process stands still."""
        self._topology_file: Final = topology_file
        self._clock: Final = clock
        self._silent: Final[dict[str, _Silence]] = {}

    @contextmanager
    def held(self, name: str, *, alone: bool, terms: Terms | None = None) -> Iterator[Hold]:
        """See the port. Raises `OperatorError` when the folder cannot be used."""
        number = self._newest(name)
        descriptor = self._open(self._path(name, number), alone=alone)
        if not _lock(descriptor, alone=alone):
            touched_ns = os.fstat(descriptor).st_mtime_ns
            os.close(descriptor)
            if terms is None or not self._is_silent(name, number, touched_ns, terms):
                raise LockTaken(f"{name} is held by another process: a watcher or an operator is at it")
            descriptor, number = self._take_over(name, number), number + 1
        try:
            self._silent.pop(name, None)
            if self._newest(name) != number:
                raise LockTaken(f"{name} was taken over by another process")
            hold = _FileHold(self._clock, lambda: self._newest(name) == number, descriptor, terms)
            if terms is not None:
                hold.beat()
            yield hold
        finally:
            os.close(descriptor)

    def _is_silent(self, name: str, number: int, touched_ns: int, terms: Terms) -> bool:
        """Whether its holder has been found not to touch it for so long, by looks close together."""
        now = self._clock()
        seen = self._silent.get(name)
        if (
            seen is None
            or (seen.number, seen.touched_ns) != (number, touched_ns)
            or now - seen.looked > terms.own_seconds
        ):
            seen = _Silence(number, touched_ns, now, now)
        self._silent[name] = _Silence(number, touched_ns, seen.since, now)
        return now - seen.since >= terms.hung_seconds

    def _take_over(self, name: str, number: int) -> int:
        """One of those who try has it."""
        path = self._path(name, number + 1)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise LockTaken(f"{name} was taken over by another process") from None
        except OSError as error:
            raise OperatorError(f"cannot lock {path}: {error.strerror}") from error
        if not _lock(descriptor, alone=True):
            os.close(descriptor)
            raise LockTaken(f"{name} was taken over by another process")
        self._path(name, number).unlink(missing_ok=True)
        return descriptor

    def _newest(self, name: str) -> int:
        """The number of the file that counts: it rises with each takeover."""
        first = self._path(name, 0).name
        try:
            found = [each.name for each in self._topology_file.parent.iterdir()]
        except OSError as error:
            raise OperatorError(f"cannot lock {name} in {self._topology_file.parent}: {error.strerror}") from error
        numbers = [each.removeprefix(f"{first}.") for each in found if each.startswith(f"{first}.")]
        return max((int(each) for each in numbers if each.isdecimal()), default=0)

    def _path(self, name: str, number: int) -> Path:
        suffix = f".{number}" if number else ""
        return self._topology_file.with_name(f".{self._topology_file.name}.{name}.lock{suffix}")

    @staticmethod
    def _open(path: Path, *, alone: bool) -> int:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if not alone and error.errno in _READ_ONLY:
                # Nothing can be changed then, and leases go on.
                with suppress(OSError):
                    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            raise OperatorError(f"cannot lock {path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class _Silence:
    """A file that was found locked and untouched, since when, and at the last look."""

    number: int
    touched_ns: int
    since: float
    looked: float


class _FileHold:
    """See `Hold`."""

    def __init__(
        self, clock: Callable[[], float], is_newest: Callable[[], bool], descriptor: int, terms: Terms | None
    ) -> None:
        self._clock: Final = clock
        self._is_newest: Final = is_newest
        self._descriptor: Final = descriptor
        self._terms: Final = terms
        self._beaten = clock()
        self._is_lost = False

    def is_mine(self) -> bool:
        if not self._is_lost:
            stood = self._clock() - self._beaten
            try:
                self._is_lost = (self._terms is not None and stood > self._terms.own_seconds) or not self._is_newest()
            except OperatorError:
                self._is_lost = True  # nobody can tell
        return not self._is_lost

    def check(self) -> None:
        if not self.is_mine():
            raise LockLost("this process stood still, and another one may have its place: look again")

    def beat(self) -> None:
        self.check()
        try:
            os.utime(self._descriptor)
        except OSError as error:
            self._is_lost = True
            raise LockLost(f"no sign of life can be given: {error.strerror}") from error
        self._beaten = self._clock()


def _lock(descriptor: int, *, alone: bool) -> bool:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
