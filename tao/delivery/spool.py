"""The spool: a leader's guaranteed messages in SQLite, written by a thread of its own (DESIGN.md §7).

Everything that has gathered while the thread was busy is one commit, synced to disk before anyone is told that it is
stored (``synchronous=FULL``): the more there is, the less each message costs, and a loss of power costs none that was
acknowledged. Content is checksummed by row, since SQLite notices torn files but not flipped bits. A file that cannot be
read is set aside and a new one begun: its subscribers then start cold, which costs hits and nothing else.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from tao.delivery.settings import SpoolSettings
from tao.model.changes import ShardMessages
from tao.model.delivery import SpoolMark, SpoolRow
from tao.observability.logs import Logger

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS messages (
  place INTEGER PRIMARY KEY, shard INTEGER NOT NULL, source TEXT NOT NULL, number INTEGER NOT NULL,
  stored_unix_s INTEGER NOT NULL, checksum INTEGER NOT NULL, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS by_position ON messages (shard, source, number, place);
CREATE TABLE IF NOT EXISTS marks (
  shard INTEGER PRIMARY KEY, source TEXT NOT NULL, after INTEGER NOT NULL, head INTEGER NOT NULL,
  linked INTEGER NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS proofs (source TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
"""
_FILE: Final = "spool.sqlite"
_FORM: Final = 1
"""``user_version`` of the file; another one is set aside."""
_PAGE_BYTES: Final = 4_096
_MAX_JOBS: Final = 10_000
"""In one commit."""
_DROPPED_AT_ONCE: Final = 1_000


class _Unreadable(Exception):
    """What the file holds is not what was written."""


@dataclass(slots=True)
class _Append:
    rows: Sequence[SpoolRow]
    marks: Sequence[SpoolMark]
    stored: Callable[[], None]
    era: int


@dataclass(slots=True)
class _Prove:
    source: str
    number: int
    era: int


@dataclass(slots=True)
class _Read:
    shard: int
    source: str
    after: tuple[int, int]
    max_bytes: int
    answer: Callable[[Sequence[SpoolRow] | None], None]
    rows: list[SpoolRow] | None = None


_Job = _Append | _Prove | _Read


class SqliteSpool:
    """`tao.model.ports.Spool` in a folder. Counters may be read from the loop at any time."""

    def __init__(self, folder: Path, settings: SpoolSettings, log: Logger) -> None:
        self._path: Final = folder / _FILE
        self._settings: Final = settings
        self._log: Final = log
        self._loop: Final = asyncio.get_running_loop()
        self._jobs: Final[queue.SimpleQueue[_Job | None]] = queue.SimpleQueue()
        self._marks: list[SpoolMark] = []
        self._dropped: Callable[[int, str, int], None] = lambda shard, source, number: None
        self._lost: Callable[[], None] = lambda: None
        self._era = 0  # the loop's; what was given before a loss was known relies on what is lost
        self._thread_era = 0
        self._connection: sqlite3.Connection | None = None
        self._retry_at = 0.0
        self._thread: threading.Thread | None = None
        self.trouble = ""
        """Why nothing is stored now, or empty."""
        self.rows = 0
        """Stored since the start."""
        self.commits = 0
        self.failures = 0
        """Times that the disk was full or failed."""
        self.set_aside = 0
        """Files that could not be read."""
        self.bytes = 0
        """Of the messages held, encoded."""
        self.dropped_rows = 0
        """Rows that have made room."""

    async def open(self) -> None:
        """Read what there is, then take jobs."""
        await asyncio.to_thread(self._open)
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Store what was given, and close the file."""
        if self._thread is not None:
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join)

    def marks(self) -> Sequence[SpoolMark]:
        """See `tao.model.ports.Spool`."""
        return self._marks

    def on_change(self, dropped: Callable[[int, str, int], None], lost: Callable[[], None]) -> None:
        """See `tao.model.ports.Spool`."""
        self._dropped, self._lost = dropped, lost

    def append(self, rows: Sequence[SpoolRow], marks: Sequence[SpoolMark], stored: Callable[[], None]) -> None:
        """See `tao.model.ports.Spool`."""
        self._jobs.put(_Append(rows, marks, stored, self._era))

    def prove(self, source: str, number: int) -> None:
        """See `tao.model.ports.Spool`."""
        self._jobs.put(_Prove(source, number, self._era))

    def read(
        self,
        shard: int,
        source: str,
        after: tuple[int, int],
        max_bytes: int,
        answer: Callable[[Sequence[SpoolRow] | None], None],
    ) -> None:
        """See `tao.model.ports.Spool`."""
        self._jobs.put(_Read(shard, source, after, max_bytes, answer))

    # ---- in the thread, and before it there is one ------------------------------------------------------------------

    def _open(self) -> None:
        """Fill `_connection` and `_marks`, or say in `trouble` why there is none."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._connect()
            except (sqlite3.DatabaseError, _Unreadable) as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                self._put_aside(error)
                self._connect()
            self.trouble = ""
        except (sqlite3.Error, OSError) as error:
            self._failed(error)

    def _connect(self) -> None:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        try:
            form = connection.execute("PRAGMA user_version").fetchone()[0]
            if form not in (0, _FORM):
                raise _Unreadable(f"its form is {form}, not {_FORM}")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            pages = 256 + 3 * self._settings.max_bytes // 2 // _PAGE_BYTES
            connection.execute(f"PRAGMA max_page_count={pages}")
            connection.executescript(_SCHEMA)
            connection.execute(f"PRAGMA user_version={_FORM}")
            proofs = dict(connection.execute("SELECT source, number FROM proofs"))
            marks = []
            for *mark, checksum in connection.execute(
                "SELECT shard, source, after, head, linked, checksum FROM marks ORDER BY shard"
            ):
                shard, source, after, head, linked = mark
                if checksum != _checksum_of(mark):
                    raise _Unreadable("a mark is not what was written")
                reached = max(head, proofs.get(source, 0)) if linked else head
                marks.append(SpoolMark(shard, source, after, reached, linked=False))
            connection.execute("BEGIN IMMEDIATE")
            # What is proved from here on says nothing of a shard until it is marked again.
            _put_marks(connection, marks)
            connection.execute("COMMIT")
            self.bytes = connection.execute("SELECT coalesce(sum(length(body)), 0) FROM messages").fetchone()[0]
        except BaseException:
            connection.close()
            raise
        self._connection, self._marks = connection, marks

    def _put_aside(self, error: Exception) -> None:
        """Raises `OSError`."""
        aside = self._path.with_name(f"{_FILE}.unreadable")
        self._log.error("spool_unreadable", reason=str(error), set_aside=str(aside))
        # The file goes last: without its journal it is only older, while a new file would take over an old journal.
        for suffix in ("-wal", "-shm", ""):
            part = Path(f"{self._path}{suffix}")
            if part.exists():
                part.replace(f"{aside}{suffix}")
        self.set_aside += 1

    def _failed(self, error: Exception) -> None:
        """Nothing is stored until it is tried again. What is on disk stays: it is true as far as it goes."""
        self.failures += 1
        self.trouble = str(error)
        self._log.error("spool_failed", reason=self.trouble, path=str(self._path))
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._retry_at = time.monotonic() + self._settings.retry_seconds

    def _run(self) -> None:
        while True:
            jobs: list[_Job] = []
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
                self._do(jobs)
            if job is None:
                if self._connection is not None:
                    self._connection.close()
                return

    def _do(self, jobs: list[_Job]) -> None:
        dropped: dict[tuple[int, str], int] = {}
        if self._connection is None and time.monotonic() >= self._retry_at:
            self._open()
        connection = self._connection
        if connection is not None:
            try:
                connection.execute("BEGIN IMMEDIATE")
                for job in jobs:
                    self._do_one(connection, job)
                self._make_room(connection, dropped)
                connection.execute("COMMIT")
                self.commits += 1
            except (sqlite3.Error, msgspec.MsgspecError, _Unreadable) as error:
                dropped.clear()
                self._failed(error)
                if not isinstance(error, sqlite3.OperationalError):
                    try:
                        self._put_aside(error)
                    except OSError as refusal:
                        self._failed(refusal)
                self._thread_era += 1
                for job in jobs:
                    if isinstance(job, _Read):
                        job.rows = None
        else:
            self._thread_era += any(isinstance(job, _Append) and job.era == self._thread_era for job in jobs)
        self._tell(lambda: self._finished(jobs, dropped))

    def _do_one(self, connection: sqlite3.Connection, job: _Job) -> None:
        match job:
            case _Append(rows=rows, marks=marks, era=era) if era == self._thread_era:
                now = int(time.time())
                bodies = [
                    (row.messages.shard, row.source, row.number, now, zlib.crc32(body), body)
                    for row, body in ((row, _ENCODER.encode(row.messages)) for row in rows)
                ]
                connection.executemany(
                    "INSERT INTO messages (shard, source, number, stored_unix_s, checksum, body) "
                    "VALUES (?, ?, ?, ?, ?, ?)",
                    bodies,
                )
                self.rows += len(bodies)
                self.bytes += sum([len(body) for *_, body in bodies])
                _put_marks(connection, marks)
            case _Prove(source=source, number=number, era=era) if era == self._thread_era:
                connection.execute("REPLACE INTO proofs (source, number) VALUES (?, ?)", (source, number))
            case _Read():
                job.rows = _read(connection, job)
            case _:
                pass  # given before it was known that what it builds on is lost

    def _make_room(self, connection: sqlite3.Connection, dropped: dict[tuple[int, str], int]) -> None:
        """The oldest go, by size and by age."""
        too_old = int(time.time() - self._settings.max_age_seconds)
        while True:
            last = 0
            oldest = connection.execute(
                "SELECT place, shard, source, number, stored_unix_s, length(body) FROM messages ORDER BY place LIMIT ?",
                (_DROPPED_AT_ONCE,),
            )
            gone = 0
            # Row by row: mostly the first may stay, and to fetch them all at every commit is a tenth of a leader's CPU.
            for place, shard, source, number, stored_unix_s, size in oldest:
                if self.bytes <= self._settings.max_bytes and stored_unix_s >= too_old:
                    break
                self.bytes -= size
                dropped[shard, source] = max(number, dropped.get((shard, source), 0))
                last, gone = place, gone + 1
            oldest.close()
            if not gone:
                return
            connection.execute("DELETE FROM messages WHERE place <= ?", (last,))
            self.dropped_rows += gone
            for (shard, source), number in dropped.items():
                found = connection.execute(
                    "SELECT after, head, linked FROM marks WHERE shard = ? AND source = ?", (shard, source)
                ).fetchone()
                if found is not None and found[0] < number:
                    mark = SpoolMark(shard, source, number, max(found[1], number), bool(found[2]))
                    _put_marks(connection, (mark,))

    def _finished(self, jobs: list[_Job], dropped: dict[tuple[int, str], int]) -> None:
        """In the loop. A loss is said before anyone relies on what followed it."""
        if self._era != self._thread_era:
            self._era = self._thread_era
            self._lost()
        for (shard, source), number in dropped.items():
            self._dropped(shard, source, number)
        for job in jobs:
            if isinstance(job, _Append):
                job.stored()
            elif isinstance(job, _Read):
                job.answer(job.rows)

    def _tell(self, word: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(word)
        except RuntimeError:
            self._log.info("spool_after_loop")  # the server has closed and nobody waits for an answer


def _read(connection: sqlite3.Connection, job: _Read) -> list[SpoolRow]:
    rows: list[SpoolRow] = []
    room = job.max_bytes
    for place, number, checksum, body in connection.execute(
        "SELECT place, number, checksum, body FROM messages WHERE shard = ? AND source = ? "
        "AND (number, place) > (?, ?) ORDER BY number, place",
        (job.shard, job.source, *job.after),
    ):
        if zlib.crc32(body) != checksum:
            raise _Unreadable(f"row {place} is not what was written")
        room -= len(body)
        if rows and room < 0:
            break
        rows.append(SpoolRow(job.source, number, _DECODER.decode(body), place))
    return rows


def _put_marks(connection: sqlite3.Connection, marks: Iterable[SpoolMark]) -> None:
    values = [[mark.shard, mark.source, mark.after, mark.head, int(mark.linked)] for mark in marks]
    connection.executemany(
        "REPLACE INTO marks (shard, source, after, head, linked, checksum) VALUES (?, ?, ?, ?, ?, ?)",
        [(*value, _checksum_of(value)) for value in values],
    )


def _checksum_of(values: Sequence[object]) -> int:
    return zlib.crc32(repr(list(values)).encode())


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(ShardMessages)
