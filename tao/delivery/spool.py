"""The spool: a leader's guaranteed messages in SQLite, written by a thread of its own.

Everything that was queued while the thread was busy becomes one commit, which is synced to disk before any message of
it is reported as stored (`tao.delivery.synced_file`). A file that cannot be read is set aside and a new one is begun:
subscribers then start cold, which costs hits and nothing else.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from tao.delivery.settings import SpoolSettings
from tao.delivery.synced_file import GatheringThread, Unreadable, open_synced, set_file_aside
from tao.model.changes import ShardMessages
from tao.model.delivery import SpoolMark, SpoolRow
from tao.observability.logs import Logger

_FORMAT_1: Final = """
CREATE TABLE IF NOT EXISTS messages (
  place INTEGER PRIMARY KEY, shard INTEGER NOT NULL, source TEXT NOT NULL, number INTEGER NOT NULL,
  stored_unix_s INTEGER NOT NULL, checksum INTEGER NOT NULL, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS by_position ON messages (shard, source, number, place);
CREATE TABLE IF NOT EXISTS marks (
  shard INTEGER PRIMARY KEY, source TEXT NOT NULL, after INTEGER NOT NULL, head INTEGER NOT NULL,
  linked INTEGER NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS proofs (source TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
"""
_FORMATS: Final = (_FORMAT_1,)
"""The formats of the file, as `open_synced` takes them. One of a later version is set aside as an unreadable one is."""
_FILE: Final = "spool.sqlite"
_DROP_ROWS: Final = 1_000
"""The largest number of rows that one statement drops."""
_PROOF_SECONDS: Final = 1.0
"""Time from a proof to the job that stores it, with the others that came meanwhile: each idle database proves something
once a second, and a commit is a sync of the disk. A proof that is lost costs a subscriber at most a replay by the
tailer."""


@dataclass(slots=True)
class _Append:
    """Store messages and marks. ``era`` is the number of losses that the loop knew of when it queued the job."""

    rows: Sequence[SpoolRow]
    marks: Sequence[SpoolMark]
    stored: Callable[[], None]
    era: int


@dataclass(slots=True)
class _Prove:
    """Store proven positions, by source; ``era`` as in `_Append`."""

    numbers: dict[str, int]
    era: int


@dataclass(slots=True)
class _Read:
    """Read messages. The thread fills ``rows``; None: they cannot be read."""

    shard: int
    source: str
    after: tuple[int, int]
    max_bytes: int
    answer: Callable[[Sequence[SpoolRow] | None], None]
    rows: list[SpoolRow] | None = None


_Job = _Append | _Prove | _Read


class SqliteSpool:
    """A `tao.model.ports.Spool` in a folder. The event loop may read its counters at any time."""

    def __init__(self, folder: Path, settings: SpoolSettings, log: Logger) -> None:
        self._path: Final = folder / _FILE
        self._settings: Final = settings
        self._log: Final = log
        self._loop: Final = asyncio.get_running_loop()
        self._thread: Final[GatheringThread[_Job]] = GatheringThread("spool", self._run_jobs, self._close_file)
        self._marks: list[SpoolMark] = []
        self._proved: dict[str, int] = {}  # by source, what is not queued yet
        self._proving: asyncio.TimerHandle | None = None  # will queue it
        self._dropped: Callable[[int, str, int], None] = lambda shard, source, number: None
        self._lost: Callable[[], None] = lambda: None
        # Both count losses. A job that was queued before the loop knew of a loss builds on lost rows and is skipped.
        self._era = 0  # losses that the loop knows of
        self._thread_era = 0  # losses that the thread has had
        # By shard, the source of the row that was dropped last, and the highest position that was dropped of it: the
        # loop may not know it when it queues a mark.
        self._gone: dict[int, tuple[str, int]] = {}
        # By source, the highest position that was dropped of shards that have gone on to another source. Each promotion
        # begins one: a position for each shard and source would be kept for ever.
        self._gone_before: dict[str, int] = {}
        self._connection: sqlite3.Connection | None = None
        self._retry_at = 0.0
        self.trouble = ""
        """The reason why nothing can be stored now; empty when all is well."""
        self.rows = 0
        """Rows stored since the start."""
        self.commits = 0
        self.failures = 0
        """Times that the disk was full or failed."""
        self.set_aside = 0
        """Files that could not be read."""
        self.bytes = 0
        """Encoded size of the messages held."""
        self.dropped_rows = 0
        """Rows dropped to make room, or for their age."""

    async def open(self) -> None:
        """Read the file, then start the thread."""
        await asyncio.to_thread(self._open)
        self._thread.start()

    async def close(self) -> None:
        """Finish the queued jobs and close the file."""
        self._queue_proofs()
        await self._thread.stop()

    def marks(self) -> Sequence[SpoolMark]:
        """See `tao.model.ports.Spool`."""
        return self._marks

    def on_change(self, dropped: Callable[[int, str, int], None], lost: Callable[[], None]) -> None:
        """See `tao.model.ports.Spool`."""
        self._dropped, self._lost = dropped, lost

    def append(self, rows: Sequence[SpoolRow], marks: Sequence[SpoolMark], stored: Callable[[], None]) -> None:
        """See `tao.model.ports.Spool`."""
        self._queue_proofs()
        self._thread.put(_Append(rows, marks, stored, self._era))

    def prove(self, source: str, number: int) -> None:
        """See `tao.model.ports.Spool`."""
        self._proved[source] = number
        if self._proving is None:
            self._proving = self._loop.call_later(_PROOF_SECONDS, self._queue_proofs)

    def read(
        self,
        shard: int,
        source: str,
        after: tuple[int, int],
        max_bytes: int,
        answer: Callable[[Sequence[SpoolRow] | None], None],
    ) -> None:
        """See `tao.model.ports.Spool`."""
        self._thread.put(_Read(shard, source, after, max_bytes, answer))

    def _queue_proofs(self) -> None:
        """Queue what was proved, before what follows it."""
        if self._proving is not None:
            self._proving.cancel()
            self._proving = None
        if self._proved:
            self._thread.put(_Prove(self._proved, self._era))
            self._proved = {}

    # ---- in the thread, or before it is started ---------------------------------------------------------------------

    def _open(self) -> None:
        """Set `_connection` and `_marks`, or set `trouble` to the reason why the file cannot be used."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._connect()
            except (sqlite3.DatabaseError, Unreadable) as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                self._set_aside(error)
                self._connect()
            self.trouble = ""
        except (sqlite3.Error, OSError) as error:
            self._failed(error)

    def _connect(self) -> None:
        connection = open_synced(self._path, _FORMATS, self._settings.max_bytes)
        try:
            marks = _read_marks(connection)
            connection.execute("BEGIN IMMEDIATE")
            # Stored as unlinked: a position proved from here on does not hold for a shard until it is marked again.
            _put_marks(connection, marks)
            connection.execute("COMMIT")
            self.bytes = connection.execute("SELECT coalesce(sum(length(body)), 0) FROM messages").fetchone()[0]
        except BaseException:
            connection.close()
            raise
        self._connection, self._marks = connection, marks

    def _set_aside(self, error: Exception) -> None:
        """Rename the file. Raises `OSError`."""
        aside = set_file_aside(self._path)
        self._log.error("spool_unreadable", reason=str(error), set_aside=str(aside))
        self.set_aside += 1

    def _failed(self, error: Exception) -> None:
        """Store nothing until the next attempt. The rows on disk stay: they are valid as far as they go."""
        self.failures += 1
        self.trouble = str(error)
        self._log.error("spool_failed", reason=self.trouble, path=str(self._path))
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._retry_at = time.monotonic() + self._settings.retry_seconds

    def _close_file(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _run_jobs(self, jobs: list[_Job]) -> None:
        """Do the jobs in one commit, then report to the loop."""
        dropped: dict[tuple[int, str], int] = {}
        if self._connection is None and time.monotonic() >= self._retry_at:
            self._open()
        connection = self._connection
        if connection is not None:
            try:
                connection.execute("BEGIN IMMEDIATE")
                for job in jobs:
                    self._run_job(connection, job)
                self._make_room(connection, dropped)
                connection.execute("COMMIT")
                self.commits += 1
            except (sqlite3.Error, msgspec.MsgspecError, Unreadable) as error:
                dropped.clear()
                self._failed(error)
                if not isinstance(error, sqlite3.OperationalError):
                    try:
                        self._set_aside(error)
                    except OSError as second:
                        self._failed(second)
                self._thread_era += 1
                for job in jobs:
                    if isinstance(job, _Read):
                        job.rows = None
        else:
            self._thread_era += any(isinstance(job, _Append) and job.era == self._thread_era for job in jobs)
        try:
            self._loop.call_soon_threadsafe(lambda: self._report(jobs, dropped))
        except RuntimeError:
            self._log.info("spool_after_loop")  # the server has closed, and no caller waits for the answers

    def _run_job(self, connection: sqlite3.Connection, job: _Job) -> None:
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
                _put_marks(connection, map(self._without_what_is_gone, marks))
            case _Prove(numbers=numbers, era=era) if era == self._thread_era:
                connection.executemany("REPLACE INTO proofs (source, number) VALUES (?, ?)", numbers.items())
            case _Read():
                job.rows = _read(connection, job)
            case _:
                pass  # queued before the loop knew of a loss; the job builds on lost rows

    def _without_what_is_gone(self, mark: SpoolMark) -> SpoolMark:
        """Return a mark that claims no row which was dropped."""
        source, number = self._gone.get(mark.shard, ("", 0))
        gone = max(number if source == mark.source else 0, self._gone_before.get(mark.source, 0))
        return mark if mark.after >= gone else msgspec.structs.replace(mark, after=gone)

    def _note_gone(self, shard: int, source: str, number: int) -> None:
        former, highest = self._gone.get(shard, (source, 0))
        if former != source:
            self._gone_before[former] = max(highest, self._gone_before.get(former, 0))
            highest = 0
        self._gone[shard] = source, max(number, highest)

    def _make_room(self, connection: sqlite3.Connection, dropped: dict[tuple[int, str], int]) -> None:
        """Drop the oldest rows that exceed the size or the age, and note in ``dropped`` the last position of each shard
        and source."""
        too_old = int(time.time() - self._settings.max_age_seconds)
        while True:
            last = 0
            oldest = connection.execute(
                "SELECT place, shard, source, number, stored_unix_s, length(body) FROM messages ORDER BY place LIMIT ?",
                (_DROP_ROWS,),
            )
            gone = 0
            # Fetch row by row: usually even the first row may stay. Fetching all of them at each commit took a tenth of
            # a leader's CPU.
            for place, shard, source, number, stored_unix_s, size in oldest:
                if self.bytes <= self._settings.max_bytes and stored_unix_s >= too_old:
                    break
                self.bytes -= size
                dropped[shard, source] = max(number, dropped.get((shard, source), 0))
                self._note_gone(shard, source, number)
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
                    # The dropped row may be of a transaction of which more was to come: nothing says that it has.
                    mark = SpoolMark(shard, source, number, found[1], bool(found[2]))
                    _put_marks(connection, (mark,))

    def _report(self, jobs: list[_Job], dropped: dict[tuple[int, str], int]) -> None:
        """Report the results in the loop. A loss is reported first, before a caller relies on what followed it."""
        if self._era != self._thread_era:
            self._era = self._thread_era
            self._proved = {}  # of messages that are lost
            self._lost()
        for (shard, source), number in dropped.items():
            self._dropped(shard, source, number)
        for job in jobs:
            if isinstance(job, _Append):
                job.stored()
            elif isinstance(job, _Read):
                job.answer(job.rows)


def _read_marks(connection: sqlite3.Connection) -> list[SpoolMark]:
    """Read the marks as of the newest proofs. Raises `Unreadable`."""
    proofs = dict(connection.execute("SELECT source, number FROM proofs"))
    marks = []
    for *mark, checksum in connection.execute(
        "SELECT shard, source, after, head, linked, checksum FROM marks ORDER BY shard"
    ):
        shard, source, after, head, linked = mark
        if checksum != _checksum_of(mark):
            raise Unreadable(f"the mark of shard {shard} is not what was written")
        reached = max(head, proofs.get(source, 0)) if linked else head
        marks.append(SpoolMark(shard, source, after, reached, linked=False))
    return marks


def _read(connection: sqlite3.Connection, job: _Read) -> list[SpoolRow]:
    rows: list[SpoolRow] = []
    room = job.max_bytes
    for place, number, checksum, body in connection.execute(
        "SELECT place, number, checksum, body FROM messages WHERE shard = ? AND source = ? "
        "AND (number, place) > (?, ?) ORDER BY number, place",
        (job.shard, job.source, *job.after),
    ):
        if zlib.crc32(body) != checksum:
            raise Unreadable(f"row {place} is not what was written")
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
