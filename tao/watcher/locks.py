"""Who may do what alone: one active watcher, and one hand at a database's mastership (DESIGN.md §9).

On one machine these are file locks beside the topology document: held by a process, gone with it, whatever ends it.
Where the topology lives in etcd they are its leases: a key per lock, put with a lease that its holder keeps alive and
compared in the same transaction as every change of the document. `Locks` is the port; nothing else knows of files.

A database's lock is taken by whoever renews its master's lease (shared, for the moment of a renewal) and by whoever
changes its master (alone). So a promotion that holds it knows that no lease is renewed behind its back, and need only
wait until the last one has run out.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, Protocol

from tao.model.errors import OperatorError, RetryableError

_PAUSE_SECONDS: Final = 0.02


class LockTaken(RetryableError):
    """Somebody else is at it."""

    reason = "LOCK_TAKEN"


class Locks(Protocol):
    """Locks by name; every one is lost with the process that holds it."""

    def held(self, name: str, *, alone: bool) -> AbstractContextManager[None]:
        """Hold the lock, alone or with others that do not want it alone. Raises `LockTaken` at once."""


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
async def held_alone(locks: Locks, name: str, patience_seconds: float) -> AsyncIterator[None]:
    """Hold a lock alone, waiting for those who have it for a moment. Raises `LockTaken` when that takes too long."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_seconds
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locks.held(name, alone=True))
                break
            except LockTaken:
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)
        yield


class FileLocks:
    """`Locks` in the folder of the topology document."""

    def __init__(self, topology_file: Path) -> None:
        self._topology_file = topology_file

    @contextmanager
    def held(self, name: str, *, alone: bool) -> Iterator[None]:
        """See the port. Raises `OperatorError` when the folder cannot be written."""
        path = self._topology_file.with_name(f".{self._topology_file.name}.{name}.lock")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OperatorError(f"cannot lock {path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise LockTaken(f"{name} is held by another process: a watcher or an operator is at it") from None
        try:
            yield
        finally:
            os.close(descriptor)
