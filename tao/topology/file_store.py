"""The documents of a cluster in files of one machine: the topology, changed by compare-and-set, and the access document
beside it. Both are read and watched as `tao.topology.document_file` says.

A change takes a lock on a file beside the document, compares versions, and renames a complete, synced file into place:
readers see the old document or the new one.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from tao.access.document import AccessDocument, load_access
from tao.model.errors import AccessError, TopologyConflict, TopologyError, unreadable
from tao.model.topology import Topology
from tao.routing.topology_changes import record_change
from tao.topology.document import check_topology, dump_topology, parse_topology
from tao.topology.document_file import DocumentFile
from tao.topology.watched_document import NoDocument

ACCESS_FILE_NAME: Final = "access.yaml"
"""The access document's name, beside the topology document."""


class TopologyFile(DocumentFile[Topology, TopologyError]):
    """The `TopologyStore` port over a file. Reads and writes run in a thread, because a slow disk must not hold up
    hits."""

    failure = TopologyError
    what = "topology"

    def __init__(
        self,
        path: Path,
        *,
        poll_seconds: float = 0.5,
        lock_seconds: float = 5.0,
        on_error: Callable[[TopologyError], None],
    ) -> None:
        """``lock_seconds`` bounds the wait for another change, which takes milliseconds. For the others, see
        `DocumentFile`."""
        super().__init__(path, poll_seconds, on_error)
        self._lock_seconds: Final = lock_seconds

    def _parse(self, text: bytes) -> Topology:
        return parse_topology(text, str(self._path))

    async def change(self, expected_version: int, changed: Topology) -> Topology:
        """Store ``changed`` as version ``expected_version + 1`` (0: there is no document yet), with the change
        recorded in it (`tao.routing.topology_changes`), and return it.

        Raises `TopologyConflict` when the document has another version, and `TopologyError` when it breaks a rule, the
        file cannot be written, or another change does not end in time.
        """
        stored = msgspec.structs.replace(changed, version=expected_version + 1)
        check_topology(stored)
        return await asyncio.to_thread(self._compare_and_replace, expected_version, stored, records=True)

    async def replace(self, expected_version: int, document: Topology) -> Topology:
        """Store a whole document of a version above ``expected_version`` (0: there is none yet), and return it. Raises
        as `change`."""
        check_topology(document)
        if document.version <= expected_version:
            raise TopologyError(f"{self._path}: version {document.version} is not above {expected_version}")
        return await asyncio.to_thread(self._compare_and_replace, expected_version, document, records=False)

    def _compare_and_replace(self, expected_version: int, changed: Topology, *, records: bool) -> Topology:
        try:
            with self._locked():
                before = self._read() if self._path.exists() else None
                found = 0 if before is None else before.version
                if found != expected_version:
                    raise TopologyConflict(
                        f"{self._path}: is at version {found}, not {expected_version}: it was changed meanwhile; "
                        "read it again and repeat the change"
                    )
                stored = record_change(before, changed) if records and before is not None else changed
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


class AccessFile(DocumentFile[AccessDocument, AccessError]):
    """The `DocumentStore` of access documents over a file that people edit."""

    failure = AccessError
    what = "access document"

    def __init__(
        self, path: Path, *, required: bool, poll_seconds: float = 0.5, on_error: Callable[[AccessError], None]
    ) -> None:
        """``required``: False allows that there is no document, as long as none has been seen."""
        super().__init__(path, poll_seconds, on_error)
        self._required = required

    async def load_if_there(self) -> AccessDocument | None:
        """Return the document, or None when there is none and there need not be one. Raises `AccessError`."""
        try:
            return await self.load()
        except NoDocument:
            return None

    def _parse(self, text: bytes) -> AccessDocument:
        try:
            return load_access(text.decode(), str(self._path))
        except UnicodeDecodeError as error:
            raise AccessError(unreadable(self._path, error)) from error

    def _look(self) -> tuple[int, int, int]:
        if not self._required and self._parsed is None and not self._path.exists():
            raise NoDocument
        return super()._look()


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
