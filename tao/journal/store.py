"""The entries of a journal in SQLite, written by a thread of its own.

An entry is stored when the commit that has it is synced (`tao.delivery.synced_file`), and removed once its outcome is
known. Removals wait for the next commit, or for a moment: an entry whose removal is lost is made once more, which is
harmless. Every row has a checksum. A row that is not what was written is moved to the table ``torn_rows`` and counted,
and a file that cannot be read is set aside and a new one is begun: an operator can look at both. A file of a later
version's format is whole: it is left as it is, and nothing is accepted.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import sqlite3
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from tao.delivery.synced_file import (
    GatheringThread,
    OtherFormat,
    lock_folder,
    make_synced_folder,
    open_synced,
    set_file_aside,
)
from tao.journal.entries import Entry, LostEntry, ParkedEntry, Priority
from tao.journal.schedule import LaneKey
from tao.journal.settings import JournalSettings
from tao.model.errors import OutcomeUnknown, Overloaded, TaoError
from tao.model.receipts import Receipt
from tao.observability.logs import Logger

_FORMAT_1: Final = """
CREATE TABLE IF NOT EXISTS entries (
  number INTEGER PRIMARY KEY, priority INTEGER NOT NULL, shard INTEGER NOT NULL, accepted_ms INTEGER NOT NULL,
  attempts INTEGER NOT NULL, checksum INTEGER NOT NULL, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS by_lane ON entries (priority, shard, number);
CREATE TABLE IF NOT EXISTS parked (
  number INTEGER PRIMARY KEY, priority INTEGER NOT NULL, shard INTEGER NOT NULL, accepted_ms INTEGER NOT NULL,
  attempts INTEGER NOT NULL, reason TEXT NOT NULL, message TEXT NOT NULL, checksum INTEGER NOT NULL,
  body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS torn_rows (
  number INTEGER PRIMARY KEY, priority INTEGER, shard INTEGER, accepted_ms INTEGER, checksum INTEGER, body BLOB,
  noticed_ms INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS new_receipts (
  number INTEGER PRIMARY KEY, receipt BLOB NOT NULL, moved_ms INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS state (id TEXT NOT NULL, secret BLOB NOT NULL, next INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS copies (
  acceptor TEXT NOT NULL, journal TEXT NOT NULL, number INTEGER NOT NULL, priority INTEGER NOT NULL,
  shard INTEGER NOT NULL, accepted_ms INTEGER NOT NULL, proof BLOB NOT NULL, checksum INTEGER NOT NULL,
  body BLOB NOT NULL, PRIMARY KEY (acceptor, journal, number));
CREATE TABLE IF NOT EXISTS adopted (
  acceptor TEXT NOT NULL, journal TEXT NOT NULL, number INTEGER NOT NULL, proof BLOB NOT NULL,
  own_number INTEGER NOT NULL, adopted_ms INTEGER NOT NULL, PRIMARY KEY (acceptor, journal, number)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_own_number ON adopted (own_number);
"""
_FORMATS: Final = (_FORMAT_1,)
"""The formats of the file, as `open_synced` takes them: what an earlier version has accepted is made by this one. To
change the format, add the statements that make the new one of the last one, and leave the others as they are."""
_FILE: Final = "journal.sqlite"
_PAGE_ENTRIES: Final = 256
"""Most entries that are read from disk at a time, of one lane."""
_REMOVE_SECONDS: Final = 0.05
"""Time from an outcome to the commit that removes its entry, with the others that came meanwhile."""
MAX_UNSETTLED: Final = 100_000
"""Most writes whose copies are on their way to another follower, and which are not stored here yet."""
_MAX_MESSAGE: Final = 1_000
"""Longest error text that is kept, in characters."""


@dataclass(slots=True)
class _Append:
    entries: Sequence[Entry]
    stored: Callable[[TaoError | None], None]


@dataclass(slots=True)
class _Change:
    """Take note of outcomes. A change that cannot be written is kept, and written when the disk works again."""

    removed: list[int] = field(default_factory=list)
    attempts: list[tuple[int, int]] = field(default_factory=list)
    parked: list[ParkedEntry] = field(default_factory=list)
    unparked: list[int] = field(default_factory=list)
    """Numbers of parked entries that are discarded."""
    moved: list[tuple[int, bytes]] = field(default_factory=list)
    """Numbers of entries that have another number now, or another journal, with their new receipts; with an empty one,
    those that were discarded."""
    undone: list[Callable[[sqlite3.Connection], None]] = field(default_factory=list)
    """Undo work (`_Work`)."""


@dataclass(slots=True)
class _Work:
    """Read or change something. ``answer`` gets what ``do`` returns, None when the disk failed."""

    do: Callable[[sqlite3.Connection], object]
    answer: Callable[[object], None]
    undo: Callable[[sqlite3.Connection], None] | None = None
    """Undoes what ``do`` has done, if it has, after a commit whose outcome is not known."""
    result: object = None


Result = TypeVar("Result")
_Job = _Append | _Change | _Work


@dataclass(frozen=True, slots=True)
class Page:
    """Entries of a lane, and how many rows were torn and set aside."""

    entries: Sequence[Entry]
    torn: int


class JournalStore:
    """The rows of one journal. The event loop may read its counters at any time."""

    def __init__(self, folder: Path, settings: JournalSettings, log: Logger) -> None:
        self._path: Final = folder / _FILE
        self._settings: Final = settings
        self._log: Final = log
        self._loop: Final = asyncio.get_running_loop()
        self._thread: Final[GatheringThread[_Job]] = GatheringThread("journal", self._run_jobs, self._end)
        self._change = _Change()
        self._changing: asyncio.TimerHandle | None = None  # will queue the change
        self._unwritten: list[_Change] = []  # of the thread: changes that failed
        self._connection: sqlite3.Connection | None = None
        self._lock: BinaryIO | None = None  # of the thread: keeps other processes from the folder
        self._retry_at = 0.0
        self.on_gone: Callable[[Sequence[int]], None] = lambda numbers: None
        """Called with the numbers of entries that are neither waiting nor parked here any more."""
        self.id = ""
        """A name of this file, which receipts carry; empty until the file could be opened for the first time."""
        self._secret = b""  # of this file, for the proofs of receipts
        self.next_number = 1
        """The number of the next entry. Numbers are not used again."""
        self.waiting_at_start: dict[LaneKey, tuple[int, int]] = {}
        """By lane, the number of waiting entries and when the oldest was accepted, in Unix milliseconds."""
        self.bytes = 0
        """Size of the entries held, waiting and parked, and of those on their way to the disk."""
        self.parked: Final[dict[Priority, int]] = dict.fromkeys(Priority, 0)
        """Entries parked, by priority."""
        self.trouble = ""
        """The reason why nothing can be stored now; empty when all is well."""
        self.stored = 0
        """Entries stored since the start."""
        self.commits = 0
        self.failures = 0
        """Times that the disk was full or failed."""
        self.torn_rows = 0
        """Rows that were not what was written, and are set aside."""
        self.set_aside = 0
        """Files that could not be read, and are set aside."""

    async def open(self) -> None:
        """Read the file, then start the thread."""
        await asyncio.to_thread(self._open)
        self._thread.start()

    async def close(self) -> None:
        """Finish the queued jobs and close the file."""
        self._queue_change()
        await self._thread.stop()

    # ---- changes ---------------------------------------------------------------------------------------------------

    def take_number(self) -> int:
        """Return the number of a new entry. Raises `Overloaded` before the file was read: only it knows which numbers
        are free."""
        if not self.id:
            raise Overloaded(
                f"the journal of this follower cannot be read yet ({self.trouble}). Nothing was accepted; try again "
                "later"
            )
        number, self.next_number = self.next_number, self.next_number + 1
        return number

    def receipt(self, server: str, number: int) -> Receipt:
        """Return the receipt of an entry of this follower's."""
        proof = hashlib.blake2b(b"%d" % number, key=self._secret, digest_size=8).digest()
        return Receipt(server, self.id, number, proof)

    def append(self, entries: Sequence[Entry], stored: Callable[[TaoError | None], None]) -> None:
        """Store entries, and call ``stored`` once they are synced, or with the reason why they are not.

        Raises `Overloaded` when the journal is full; then nothing is stored."""
        size = sum([size_of(entry) for entry in entries])
        self.check_room(size)
        self.bytes += size
        self._queue_change()
        self._thread.put(_Append(entries, stored))

    def check_room(self, size: int) -> None:
        """Raise `Overloaded` when so many bytes more do not fit into the journal."""
        if self.bytes + size > self._settings.max_bytes:
            raise Overloaded(
                f"the journal of this follower is full: it holds {self.bytes} bytes of at most "
                f"{self._settings.max_bytes} (journal.max_bytes). Nothing was accepted; try again later"
            )

    def remove(self, entries: Sequence[Entry]) -> None:
        """Remove entries whose outcome is known."""
        numbers = [entry.number for entry in entries]
        self._change.removed += numbers
        self._give_back(entries)
        self._change_soon()
        self.on_gone(numbers)

    def note_attempts(self, entries: Sequence[Entry]) -> None:
        """Store how often these entries were attempted."""
        self._change.attempts += [(entry.attempts, entry.number) for entry in entries]
        self._change_soon()

    def park(self, entries: Sequence[ParkedEntry]) -> None:
        """Park waiting entries."""
        self._change.parked += entries
        for each in entries:
            self.parked[each.entry.priority] += 1
        self._change_soon()

    def note_moved(self, entries: Sequence[tuple[Entry, bytes]]) -> None:
        """Remove waiting entries that another journal has accepted, and keep its receipts for who asks for them."""
        self._change.moved += [(entry.number, receipt) for entry, receipt in entries]
        self.remove([entry for entry, _ in entries])

    def unpark(self, entry: Entry, new_receipt: bytes = b"") -> None:
        """Discard a parked entry, which now waits under the ``new_receipt`` if there is one. Without one, its receipt
        is answered with `LostEntry` from now on."""
        self._change.unparked.append(entry.number)
        self._change.moved.append((entry.number, new_receipt))
        self.parked[entry.priority] -= 1
        self._give_back([entry])
        self._queue_change()
        self.on_gone([entry.number])

    def purge(self, before_ms: int) -> None:
        """Forget new receipts, adopted copies and torn rows that are from before this time."""

        def purged(torn_rows: int | None) -> None:
            if torn_rows is not None:
                self.torn_rows = torn_rows

        self.run(lambda connection: _purge(connection, before_ms), purged)

    def note_adopted(self, entries: Sequence[Entry], torn: int) -> None:
        """Count entries that `run` has stored, and rows that it has moved to the table ``torn_rows``."""
        self.torn_rows += torn
        self.bytes += sum([size_of(entry) for entry in entries])
        self.stored += len(entries)

    def _give_back(self, entries: Sequence[Entry]) -> None:
        # A file that was set aside has taken its sizes along, and those in memory are given back later.
        self.bytes = max(0, self.bytes - sum([size_of(entry) for entry in entries]))

    def _change_soon(self) -> None:
        if self._changing is None:
            self._changing = self._loop.call_later(_REMOVE_SECONDS, self._queue_change)

    def _queue_change(self) -> None:
        if self._changing is not None:
            self._changing.cancel()
            self._changing = None
        if self._change != _Change():
            self._thread.put(self._change)
            self._change = _Change()

    # ---- reads -----------------------------------------------------------------------------------------------------

    def read_page(self, lane: LaneKey, after: int, answer: Callable[[Page | None], None]) -> None:
        """Read the next waiting entries of a lane, those with numbers above ``after``. None: the disk failed."""
        self.run(lambda connection: self._page(connection, lane, after), answer)

    def read_parked(self, after: int, limit: int, answer: Callable[[list[ParkedEntry] | None], None]) -> None:
        """Read parked entries with numbers above ``after``, in order. None: the disk failed."""
        self.run(lambda connection: _parked(connection, after, limit), answer)

    def read_waiting(self, after: int, limit: int, answer: Callable[[list[Entry] | None], None]) -> None:
        """Read waiting entries of all lanes with numbers above ``after``, in order. None: the disk failed."""
        self.run(lambda connection: _waiting(connection, after, limit), answer)

    def count_waiting(self, answer: Callable[[dict[LaneKey, tuple[int, int]] | None], None]) -> None:
        """Count what waits as at the start (`waiting_at_start`). None: the disk failed."""
        self.run(_count_waiting, answer)

    def find(self, number: int, answer: Callable[[Found | None], None]) -> None:
        """Look for an entry that waits, is parked or lost, or for the receipt of one that was moved; None when there is
        none, or the disk failed (`trouble`)."""
        self.run(lambda connection: _find(connection, number), answer)

    def run(
        self,
        do: Callable[[sqlite3.Connection], object],
        answer: Callable[..., None],
        undo: Callable[[sqlite3.Connection], None] | None = None,
    ) -> None:
        """Do something in the thread, within a commit, and call ``answer`` with what it returns once that is synced.
        None: the disk failed, and it may be on disk all the same, unless ``undo`` undoes it before anything else."""
        self._queue_change()
        self._thread.put(_Work(do, answer, undo))

    async def result_of(self, do: Callable[[sqlite3.Connection], Result]) -> Result | None:
        """Return what ``do`` returns, as in `run`."""
        found: asyncio.Future[Result | None] = self._loop.create_future()

        def answer(result: Result | None) -> None:
            if not found.done():  # cancelled
                found.set_result(result)

        self.run(do, answer)
        return await found

    # ---- in the thread, or before it is started --------------------------------------------------------------------

    def _open(self) -> None:
        """Set `_connection`, or set `trouble` to the reason why the file cannot be used."""
        try:
            make_synced_folder(self._path.parent)
            if self._lock is None:
                self._lock = lock_folder(self._path.parent)
            try:
                self._connect()
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._set_aside(error)
                self._connect()
            self.trouble = ""
        except OtherFormat as error:
            self._failed(f"{error}. The file is left as it is: start {error.writer}")
        except (sqlite3.Error, OSError) as error:
            self._failed(str(error))

    def _connect(self) -> None:
        settings = self._settings
        connection = open_synced(self._path, _FORMATS, settings.max_bytes + settings.max_copy_bytes)
        try:
            found = connection.execute("SELECT id, secret, next FROM state").fetchone()
            if found is None:
                found = secrets.token_hex(8), secrets.token_bytes(16), 1
                connection.execute("INSERT INTO state VALUES (?, ?, ?)", found)
            if not self.id:
                self._count(connection)
                # Later, the loop alone counts on: also a file that is begun anew gets no number twice. Numbers of
                # writes that were copied and not stored when the process ended are not used again either.
                self.next_number = found[2] + (MAX_UNSETTLED if settings.copies > 1 else 0)
                connection.execute("UPDATE state SET next = ?", (self.next_number,))
            self.id, self._secret = found[:2]
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _set_aside(self, reason: Exception) -> None:
        """Rename the file, and keep it for an operator: what it holds is in no other."""
        try:
            aside = set_file_aside(self._path, f"unreadable-{time.time_ns()}")
        except OSError as error:
            self._failed(str(error))
            return
        self.set_aside += 1
        self.bytes = 0
        self.parked.update(dict.fromkeys(Priority, 0))
        self._log.error("journal_unreadable", reason=str(reason), set_aside=str(aside))

    def _count(self, connection: sqlite3.Connection) -> None:
        """Count what the file holds at the start. A row without a lane would never be read: it is set aside."""
        for table, select in _SELECT_WITHOUT_LANE.items():
            torn = [number for (number,) in connection.execute(select)]
            self._set_rows_aside(connection, table, torn)
        self.waiting_at_start = _count_waiting(connection)
        count, size = connection.execute("SELECT count(*), coalesce(sum(length(body)), 0) FROM entries").fetchone()
        held = size + count * _ROW_BYTES
        for priority, count, size in connection.execute(
            "SELECT priority, count(*), sum(length(body)) FROM parked GROUP BY priority"
        ):
            self.parked[Priority(priority)] = count
            held += size + count * _ROW_BYTES
        self.bytes = held
        self.torn_rows = connection.execute("SELECT count(*) FROM torn_rows").fetchone()[0]

    def _failed(self, reason: str) -> None:
        self.failures += 1
        self.trouble = reason
        self._log.error("journal_failed", reason=self.trouble, path=str(self._path))
        self._close_file()
        self._retry_at = time.monotonic() + self._settings.retry_seconds

    def _end(self) -> None:
        self._close_file()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _close_file(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _run_jobs(self, jobs: list[_Job]) -> None:
        """Do the jobs in one commit, then report to the loop."""
        error: TaoError | None = None
        self._unwritten += [job for job in jobs if isinstance(job, _Change)]
        if self._connection is None and time.monotonic() >= self._retry_at:
            self._open()
        connection = self._connection
        if connection is None:
            error = Overloaded(f"the journal of this follower cannot be written ({self.trouble}). Nothing was accepted")
        else:
            error = self._commit(connection, jobs)
        try:
            self._loop.call_soon_threadsafe(self._report, jobs, error)
        except RuntimeError:
            self._log.info("journal_after_loop")  # the server has closed, and no caller waits for the answers

    def _commit(self, connection: sqlite3.Connection, jobs: list[_Job]) -> TaoError | None:
        committing = False
        try:
            connection.execute("BEGIN IMMEDIATE")
            # First the changes: a page that is read next must not have what they remove.
            for change in self._unwritten:
                _write_change(connection, change)
            for job in jobs:
                if isinstance(job, _Append):
                    insert_entries(connection, job.entries)
                elif isinstance(job, _Work):
                    self._run_work(connection, job)
            connection.execute("UPDATE state SET next = max(next, ?)", (self._last_number(jobs) + 1,))
            committing = True
            connection.execute("COMMIT")
        except Exception as failure:  # noqa: BLE001 - also a bug must not end the thread, for whose answers callers wait
            for job in jobs:
                if isinstance(job, _Work):
                    job.result = None
            self._failed(str(failure))
            if _is_damage(failure):
                self._set_aside(failure)
            if committing:
                # They may be in the file all the same. Nobody was given a receipt, and nobody counts them as waiting.
                appended = [entry.number for job in jobs if isinstance(job, _Append) for entry in job.entries]
                undone = [job.undo for job in jobs if isinstance(job, _Work) and job.undo is not None]
                self._unwritten.append(_Change(removed=appended, undone=undone))
                return OutcomeUnknown(f"the journal failed while it was synced: {failure}")
            return Overloaded(f"the journal of this follower cannot be written ({failure}). Nothing was accepted")
        self._unwritten.clear()
        self.commits += 1
        return None

    def _run_work(self, connection: sqlite3.Connection, job: _Work) -> None:
        try:
            job.result = job.do(connection)
        except (ValueError, TypeError, OverflowError) as error:  # rows or arguments that are none
            self._log.error("journal_work_failed", exc_info=error)

    @staticmethod
    def _last_number(jobs: list[_Job]) -> int:
        return max((job.entries[-1].number for job in jobs if isinstance(job, _Append)), default=0)

    def _page(self, connection: sqlite3.Connection, lane: LaneKey, after: int) -> Page:
        rows = connection.execute(
            "SELECT number, priority, shard, accepted_ms, attempts, checksum, CAST(body AS BLOB) FROM entries "
            "WHERE priority = ? AND shard = ? AND number > ? ORDER BY number LIMIT ?",
            (*lane, after, _PAGE_ENTRIES),
        ).fetchall()
        entries, torn = [], []
        for *columns, attempts, checksum, body in rows:
            if checksum == checksum_of(columns, body):
                entries.append(entry_of(columns, attempts, body))
            else:
                torn.append(columns[0])
        self._set_rows_aside(connection, "entries", torn)
        return Page(entries, len(torn))

    def _set_rows_aside(self, connection: sqlite3.Connection, table: str, numbers: Sequence[int]) -> None:
        """Move rows that are not what was written to the table ``torn_rows``."""
        move, delete = _SET_ASIDE[table]
        for number in numbers:
            connection.execute(move, (now_unix_ms(), number))
            connection.execute(delete, (number,))
            self._log.error("journal_row_torn", number=number, path=str(self._path))
        self.torn_rows += len(numbers)

    def _report(self, jobs: list[_Job], error: TaoError | None) -> None:
        """Report the results in the loop, in the order of the jobs."""
        for job in jobs:
            try:
                if isinstance(job, _Append):
                    if error is None:
                        self.stored += len(job.entries)
                    else:
                        self._give_back(job.entries)
                    job.stored(error)
                elif isinstance(job, _Work):
                    job.answer(job.result)
            except Exception as failure:  # noqa: BLE001 - the others of the commit are accepted, and must be made
                self._log.error("journal_report_failed", exc_info=failure)


Found = Entry | ParkedEntry | LostEntry | bytes
"""An entry that waits, is parked or lost, or the receipt under which it waits in another journal."""

_NO_LANE: Final = (
    "typeof(priority) != 'integer' OR priority NOT IN (1, 2, 3) OR typeof(shard) != 'integer' "
    "OR typeof(accepted_ms) != 'integer'"
)
_TORN_COLUMNS: Final = "number, priority, shard, accepted_ms, checksum, body"
_TABLES: Final = ("entries", "parked")
_SELECT_WITHOUT_LANE: Final = {table: f"SELECT number FROM {table} WHERE {_NO_LANE}" for table in _TABLES}  # noqa: S608 - of constants
_SET_ASIDE: Final = {
    table: (
        f"REPLACE INTO torn_rows SELECT {_TORN_COLUMNS}, ? FROM {table} WHERE number = ?",  # noqa: S608 - of constants
        f"DELETE FROM {table} WHERE number = ?",  # noqa: S608 - of constants
    )
    for table in _TABLES
}
"""By table, the statements that move a row to ``torn_rows``."""
_ROW_BYTES: Final = 48
"""Size of a row without its body, about."""


def now_unix_ms() -> int:
    """Return the time of day, by which rows are kept that callers and operators may still ask for."""
    return time.time_ns() // 1_000_000


def size_of(entry: Entry) -> int:
    """Return how many bytes of the journal an entry takes, about."""
    return len(entry.body) + _ROW_BYTES


def _is_damage(error: Exception) -> bool:
    """Return whether the file is not what was written. A full or locked disk leaves it whole, and so does a statement
    that does not fit its rows."""
    return type(error) is sqlite3.DatabaseError


def checksum_of(columns: Sequence[int], body: bytes) -> int:
    """Return the checksum of a row: its number, priority, shard, time of acceptance and body."""
    return zlib.crc32(body, zlib.crc32(b"%d %d %d %d" % tuple(columns)))


def entry_of(columns: Sequence[int], attempts: int, body: bytes) -> Entry:
    """Return the entry of a row."""
    number, priority, shard, accepted_ms = columns
    return Entry(number, Priority(priority), shard, accepted_ms, body, attempts)


def _columns(entry: Entry) -> tuple[int, int, int, int]:
    return entry.number, int(entry.priority), entry.shard, entry.accepted_ms


def insert_entries(connection: sqlite3.Connection, entries: Sequence[Entry]) -> None:
    """Insert rows of waiting entries."""
    rows = [
        (*columns, entry.attempts, checksum_of(columns, entry.body), entry.body)
        for entry, columns in ((entry, _columns(entry)) for entry in entries)
    ]
    connection.executemany(
        "INSERT INTO entries (number, priority, shard, accepted_ms, attempts, checksum, body) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        rows,
    )


def _write_change(connection: sqlite3.Connection, change: _Change) -> None:
    for undo in change.undone:
        undo(connection)
    connection.executemany("DELETE FROM entries WHERE number = ?", [(number,) for number in change.removed])
    now_ms = now_unix_ms()
    connection.executemany(
        "REPLACE INTO new_receipts (number, receipt, moved_ms) VALUES (?, ?, ?)",
        [(number, receipt, now_ms) for number, receipt in change.moved],
    )
    connection.executemany("UPDATE entries SET attempts = ? WHERE number = ?", change.attempts)
    connection.executemany(
        "REPLACE INTO parked SELECT number, priority, shard, accepted_ms, ?, ?, ?, checksum, body FROM entries "
        "WHERE number = ?",
        [(each.entry.attempts, each.reason, each.message[:_MAX_MESSAGE], each.entry.number) for each in change.parked],
    )
    connection.executemany("DELETE FROM entries WHERE number = ?", [(each.entry.number,) for each in change.parked])
    connection.executemany("DELETE FROM parked WHERE number = ?", [(number,) for number in change.unparked])


def _purge(connection: sqlite3.Connection, before_ms: int) -> int:
    """Delete what is older, and return the number of torn rows that are left."""
    connection.execute("DELETE FROM new_receipts WHERE moved_ms < ?", (before_ms,))
    connection.execute("DELETE FROM adopted WHERE adopted_ms < ?", (before_ms,))
    connection.execute("DELETE FROM torn_rows WHERE noticed_ms < ?", (before_ms,))
    return int(connection.execute("SELECT count(*) FROM torn_rows").fetchone()[0])


def _parked(connection: sqlite3.Connection, after: int, limit: int) -> list[ParkedEntry]:
    rows = connection.execute(
        "SELECT number, priority, shard, accepted_ms, attempts, body, reason, message FROM parked "
        "WHERE number > ? ORDER BY number LIMIT ?",
        (after, limit),
    )
    return [
        ParkedEntry(entry_of(columns, attempts, body), reason, message)
        for *columns, attempts, body, reason, message in rows
    ]


def _waiting(connection: sqlite3.Connection, after: int, limit: int) -> list[Entry]:
    rows = connection.execute(
        "SELECT number, priority, shard, accepted_ms, attempts, checksum, CAST(body AS BLOB) FROM entries "
        "WHERE number > ? ORDER BY number LIMIT ?",
        (after, limit),
    )
    return [
        entry_of(columns, attempts, body)
        for *columns, attempts, checksum, body in rows
        if checksum == checksum_of(columns, body)
    ]


def _count_waiting(connection: sqlite3.Connection) -> dict[LaneKey, tuple[int, int]]:
    lanes = connection.execute(
        "SELECT priority, shard, count(*), min(accepted_ms) FROM entries GROUP BY priority, shard"
    )
    return {(Priority(priority), shard): (count, oldest_ms) for priority, shard, count, oldest_ms in lanes}


def _find(connection: sqlite3.Connection, number: int) -> Found | None:
    moved = connection.execute("SELECT receipt FROM new_receipts WHERE number = ?", (number,)).fetchone()
    if moved is not None:
        return bytes(moved[0]) or LostEntry("an operator has discarded the write after it was parked")
    if connection.execute("SELECT 1 FROM torn_rows WHERE number = ?", (number,)).fetchone() is not None:
        return LostEntry("the disk has damaged the write before it was made; the follower's log names it")
    parked = _parked(connection, number - 1, 1)
    if parked and parked[0].entry.number == number:
        return parked[0]
    row = connection.execute(
        "SELECT number, priority, shard, accepted_ms, attempts, body FROM entries WHERE number = ?", (number,)
    ).fetchone()
    if row is None:
        return None
    *columns, attempts, body = row
    return entry_of(columns, attempts, body)
