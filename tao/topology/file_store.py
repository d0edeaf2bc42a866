"""The topology document in a file of one machine, changed by compare-and-set and watched.

A change takes a lock on a file beside the document, compares versions, and renames a complete, synced file into place:
readers see the old document or the new one. A watcher compares the file's identity, size and times at an interval. It
polls, because that works on every file system and costs one ``stat``. A document that is missing, half written or wrong
(edited by hand) is reported, and the last good one stays in force.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tao.model.errors import TopologyConflict, TopologyError
from tao.model.topology import Topology
from tao.routing.topology_changes import record_change
from tao.topology.document import check_topology, dump_topology, parse_topology

_logger = logging.getLogger(__name__)

_Signature = tuple[int, int, int]


class TopologyFile:
    """The `TopologyStore` port over a file. Reads and writes run in a thread, because a slow disk must not hold up
    hits."""

    def __init__(
        self,
        path: Path,
        *,
        poll_seconds: float = 0.5,
        lock_seconds: float = 5.0,
        on_error: Callable[[TopologyError], None],
    ) -> None:
        """``poll_seconds`` bounds how stale a watcher may be; half a second is far below the time that people and
        probes take to decide a change. ``lock_seconds`` bounds the wait for another change, which takes milliseconds.
        ``on_error`` is called with each different problem of a watched document once."""
        self._path = path
        self._poll_seconds = poll_seconds
        self._lock_seconds = lock_seconds
        self._on_error = on_error
        self._loaded_version = 0
        self._watchers: dict[object, tuple[Callable[[Topology], None], int]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._signature: _Signature | None = None
        self._seen: Topology | None = None
        self._parsed: tuple[_Signature, Topology] | None = None
        self._last_problem = ""

    async def load(self) -> Topology:
        """Return the document. Raises `TopologyError` when there is none or it is wrong."""
        topology = await asyncio.to_thread(self._read_if_changed)
        self._loaded_version = max(self._loaded_version, topology.version)
        return topology

    async def change(self, expected_version: int, changed: Topology) -> Topology:
        """Store ``changed`` as version ``expected_version + 1`` (0: there is no document yet), with the change
        recorded in it (`tao.routing.topology_changes`), and return it.

        Raises `TopologyConflict` when the document has another version, and `TopologyError` when it breaks a rule, the
        file cannot be written, or another change does not end in time.
        """
        stored = msgspec.structs.replace(changed, version=expected_version + 1)
        check_topology(stored)
        return await asyncio.to_thread(self._compare_and_replace, expected_version, stored)

    def watch(self, on_change: Callable[[Topology], None]) -> Callable[[], None]:
        """Call back, in the loop, on every document newer than the one that `load` returned last (or on the first, when
        none was loaded) until the returned function is called."""
        token = object()
        self._watchers[token] = (on_change, self._loaded_version)
        self._signature = None  # read again: this watcher may know less than the others
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._poll(), name=f"watch {self._path}")

        def stop() -> None:
            self._watchers.pop(token, None)
            if not self._watchers and self._watching is not None:
                self._watching.cancel()
                self._watching = None

        return stop

    async def _poll(self) -> None:
        while True:
            try:
                signature = await asyncio.to_thread(self._look)
                if signature != self._signature:
                    topology = await asyncio.to_thread(self._read_if_changed)
                    # Only now: a document that could not be used is tried again each time, in case the writer is still
                    # at it and the file's times are too coarse to show it.
                    self._signature = signature
                    self._check_succession(topology)
                    self._last_problem = ""
                    self._tell(topology)
            except TopologyError as error:
                self._report(error)
            except Exception as error:  # noqa: BLE001 - a server must not stop following its topology for one bad look
                self._report(TopologyError(f"{self._path}: looking at it failed: {error!r}"))
            await asyncio.sleep(self._poll_seconds)

    def _report(self, error: TopologyError) -> None:
        """Report each different problem once. A listener that fails at it must not end the watch."""
        if error.message == self._last_problem:
            return
        self._last_problem = error.message
        try:
            self._on_error(error)
        except Exception:
            _logger.exception("whoever hears of an unusable topology failed; the watch goes on: %s", error.message)

    def _check_succession(self, topology: Topology) -> None:
        """Return whether a document is newer than the watcher's; a document of the same or a lower version is never
        used."""
        seen = self._seen
        if seen is not None and topology.version <= seen.version and topology != seen:
            raise TopologyError(
                f"{self._path}: changed, but its version {topology.version} is not above {seen.version}; "
                "servers keep the former document until the version is raised"
            )
        self._seen = topology

    def _tell(self, topology: Topology) -> None:
        for token, (on_change, known) in tuple(self._watchers.items()):
            if token in self._watchers and topology.version > known:
                self._watchers[token] = (on_change, topology.version)
                try:
                    on_change(topology)
                except Exception as error:
                    # A fault of one watcher must not keep the document from the others.
                    _logger.exception("a watcher failed on topology version %d", topology.version)
                    self._report(TopologyError(f"a watcher failed on topology version {topology.version}: {error!r}"))

    def _look(self) -> _Signature:
        try:
            found = self._path.stat()
        except OSError as error:
            raise TopologyError(f"{self._path}: cannot be read: {error.strerror}") from error
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _read_if_changed(self) -> Topology:
        """Return the document, parsed again only when the file has changed: a server whose leader is gone looks for a
        newer one several times a second, and a large document takes a tenth of a second."""
        signature = self._look()
        parsed = self._parsed
        if parsed is not None and parsed[0] == signature:
            return parsed[1]
        topology = self._read()
        self._parsed = signature, topology
        return topology

    def _read(self) -> Topology:
        try:
            text = self._path.read_bytes()
        except OSError as error:
            raise TopologyError(f"{self._path}: cannot be read: {error.strerror}") from error
        return parse_topology(text, str(self._path))

    def _compare_and_replace(self, expected_version: int, changed: Topology) -> Topology:
        try:
            with self._locked():
                before = self._read() if self._path.exists() else None
                found = 0 if before is None else before.version
                if found != expected_version:
                    raise TopologyConflict(
                        f"{self._path}: is at version {found}, not {expected_version}: it was changed meanwhile; "
                        "read it again and repeat the change"
                    )
                stored = changed if before is None else record_change(before, changed)
                _replace_file(self._path, dump_topology(stored).encode())
                return stored
        except OSError as error:
            raise TopologyError(f"{self._path}: cannot be changed: {error}") from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock lies on a file of its own, because a lock on the document would go with the file that is renamed
        away."""
        deadline = time.monotonic() + self._lock_seconds
        with self._path.with_name(f".{self._path.name}.lock").open("ab") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() >= deadline:
                        raise TopologyError(
                            f"{self._path}: another change has held the lock for {self._lock_seconds} s; try again"
                        ) from error
                    time.sleep(0.01)
            yield


def _replace_file(path: Path, text: bytes) -> None:
    """Replace the file by a complete one, which is on disk before anyone can see it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o644)  # other accounts on the machine run servers and clients
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
