"""A synced SQLite file, and the thread that writes it: what the leaders' spool and the followers' journal are made of.

Everything that was queued while the thread was busy is one batch, which its owner makes one commit. A commit is synced
to disk before it is reported (``synchronous=FULL``), so the cost per item falls under load, and a power failure takes
nothing that was reported. SQLite detects torn files, but not flipped bits: owners store a checksum with every row.

What the owners do about a failed commit is not shared, because it is opposite. The spool may lose rows, but must not
keep some that build on lost ones: it skips what was queued before the loop knew of the loss, and its subscribers start
cold. The journal may lose nothing: changes that failed are written again with the next commit, appended rows whose
commit may have succeeded are removed, and those who wait for an answer get the reason. So the spool sets a file with
one wrong row aside as a whole, and the journal the row alone.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Final, Generic, TypeVar

from tao import __version__

Job = TypeVar("Job")

_PAGE_BYTES: Final = 4_096
_MAX_JOBS: Final = 10_000
"""The largest number of jobs in one batch."""


_WRITTEN_BY: Final = (
    "CREATE TABLE IF NOT EXISTS written_by (version TEXT NOT NULL); DELETE FROM written_by; "  # noqa: S608 - of a constant
    f"INSERT INTO written_by VALUES ('{__version__}');"
)
"""Notes this version in a table that files of all formats have, so that an earlier one can say what reads the file."""


class Unreadable(Exception):
    """The content of the file is not what was written."""


class OtherFormat(Unreadable):
    """The file is whole, and of a format that this version does not know: that of a later version."""

    def __init__(self, path: Path, found: int, known: int, writer: str) -> None:
        super().__init__(
            f"{path} has format {found}, which {writer} wrote; this version ({__version__}) reads formats up to {known}"
        )
        self.writer: Final = writer
        """The version that wrote the file, as text for people."""


class GatheringThread(Generic[Job]):
    """A thread that runs queued jobs, in order and in batches of all that have gathered."""

    def __init__(self, name: str, run: Callable[[list[Job]], None], end: Callable[[], None]) -> None:
        """``run`` does the jobs of a batch. ``end`` is called last. Both are called in the thread, and never raise."""
        self._name: Final = name
        self._run_jobs: Final = run
        self._end: Final = end
        self._jobs: Final[queue.SimpleQueue[Job | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Jobs may be queued before."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job."""
        self._jobs.put(job)

    async def stop(self) -> None:
        """Finish the queued jobs and end the thread. Does nothing if it was not started."""
        if self._thread is not None:
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while True:
            jobs: list[Job] = []
            job = self._jobs.get()
            while job is not None:
                jobs.append(job)
                if len(jobs) >= _MAX_JOBS:
                    break
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
            if jobs:
                self._run_jobs(jobs)
            if job is None:
                self._end()
                return


def make_synced_folder(folder: Path) -> None:
    """Make a folder and the missing ones above it, and sync each into its parent: after a power failure a file is
    there only if all folders on the way to it are. Raises `OSError`."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_folder(folder: Path) -> BinaryIO:
    """Keep other processes from the files in a folder until the returned file is closed, at the latest when this
    process ends. Raises `OSError`, also when another one has the folder."""
    held = (folder / "lock").open("ab")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        raise OSError(f"another process uses {folder}: give each server a folder of its own") from None
    except BaseException:
        held.close()
        raise
    return held


def open_synced(path: Path, formats: Sequence[str], max_bytes: int) -> sqlite3.Connection:
    """Open or make the file, for half as many bytes again as ``max_bytes``.

    The n-th of ``formats`` are the statements that make a file of format n of one of the format before; those of the
    first begin with an empty file. A file of an earlier format is brought to the last one, whole or not at all. Its
    ``user_version`` is its format, and the table ``written_by`` names the version that opened it last.

    Raises `OtherFormat`, which leaves the content as it is, and `sqlite3.Error`."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if not 0 <= found <= len(formats):
            raise OtherFormat(path, found, len(formats), _writer(connection))
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        pages = 256 + 3 * max_bytes // 2 // _PAGE_BYTES
        connection.execute(f"PRAGMA max_page_count={pages}")
        steps = "".join(formats[found:])
        connection.executescript(f"BEGIN IMMEDIATE; {steps} PRAGMA user_version={len(formats)}; {_WRITTEN_BY} COMMIT")
        sync_folder(path.parent)
    except BaseException:
        connection.close()
        raise
    return connection


def _writer(connection: sqlite3.Connection) -> str:
    """Return the version of this product that opened the file last, as text for people."""
    try:
        found = connection.execute("SELECT version FROM written_by").fetchone()
    except sqlite3.OperationalError:  # there is no such table
        found = None
    return f"version {found[0]}" if found else "another version"


def set_file_aside(path: Path, suffix: str = "unreadable") -> Path:
    """Rename the file and its write-ahead log, over a file of that name. Returns the new name. Raises `OSError`."""
    aside = path.with_name(f"{path.name}.{suffix}")
    # Rename the database last. Without its log an old file is only older, but a new file would take over an old log.
    for part_suffix in ("-wal", "-shm", ""):
        part = Path(f"{path}{part_suffix}")
        if part.exists():
            part.replace(f"{aside}{part_suffix}")
    sync_folder(path.parent)
    return aside
