"""The audit log of one process: a file of chained records, and the thread that writes it.

The event loop only queues events, within a bound; a thread encodes all that have come meanwhile, writes them and syncs
once. What the bound or a full disk keeps out is refused beforehand, or counted: the next record that is written says
how many are missing. The newest hash is published in the log of the server and as a metric, which a program that can
change the file does not reach.

A crash loses the records that were queued and not synced; a line that it cuts off is moved to a file beside the log at
the next start, and the chain goes on from the last whole record.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tao.model.errors import AuditFull, OperatorError, SettingsError
from tao.observability.audit_records import CHAIN_START, AuditEvent, ChainEnd, encode, record_end
from tao.observability.logs import Logger

MAX_FILE_BYTES: Final = 256 << 20

_TAIL_BYTES: Final = 1 << 20
"""Bytes in which the last whole record of a file is looked for; a record is far below a tenth of them."""
_MAX_BATCH: Final = 1_000
"""Records written with one sync. Larger batches save little more."""
_LOCK_CHECK_SECONDS: Final = 0.02
_CLOSE_SECONDS: Final = 3.0
"""Longest wait for the thread at the end: below the time that a server has to close."""


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """The audit log: who did or was denied what, in a file of chained records."""

    path: Path | None = None
    """The file, of this process alone; its folder is created when it is missing. None: no audit log."""

    on_full: Literal["refuse", "count"] = "refuse"
    """What happens while the file cannot be written, or too many records wait: ``refuse`` refuses audited writes and
    operators' actions with `AUDIT_FULL`, ``count`` carries them out and counts the records that are lost."""

    max_queued: int = 10_000
    """Most records that wait for the disk: some 10 MB, and a second or two of writing. Denials take up at most half of
    it."""

    max_file_bytes: int = MAX_FILE_BYTES
    """Size from which a new file is begun; the former one gets the number of its first record behind its name. It is
    never removed by a server."""

    max_denials_per_second: int = 10
    """Most records of denials in a second. Equal ones within a second are one record with a count, and what exceeds
    the bound is one more, so that strangers cannot fill the disk."""

    publish_seconds: float = 60.0
    """Interval at which the newest hash is logged, and shown as a metric. Records that are cut off the end of the file
    are noticed by it, so the time until then is how much may be cut off unnoticed."""

    retry_seconds: float = 1.0
    """Pause before a file that could not be written is tried again."""

    def __post_init__(self) -> None:
        if min(self.max_queued, self.max_file_bytes, self.max_denials_per_second) < 1:
            raise SettingsError(f"max_queued, max_file_bytes and max_denials_per_second must be at least 1: {self}")


class AuditFile:
    """The newest file of an audit log, which one process writes. Blocking; use it from one thread at a time."""

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._path: Final = path
        self._max_bytes: Final = max_bytes
        self._lock = -1
        self._file = -1
        self._size = 0
        self._first_seq = 1
        self._must_truncate = False
        self.end: ChainEnd = CHAIN_START
        """The newest record that a loss of power does no harm."""
        self.torn_bytes = 0
        """Bytes that `open` has moved to another file, because a crash had cut them off."""

    def open(self, lock_seconds: float = 0.0) -> None:
        """Lock the file, waiting at most ``lock_seconds``, and find the end of its chain.

        Raises `OperatorError` when another process writes it or it is no audit log, `OSError` when it cannot be
        used."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self._path, lock_seconds)
        self._open_file()
        tail = _tail(self._file)
        whole, end = _last_record(tail)
        if end is None and (self._size > len(tail) or b"\n" in tail):
            raise OperatorError(f"{self._path}: is not an audit log, or its end is damaged: move it away to begin one")
        if whole < len(tail):
            self._set_aside(tail[whole:])
        self.end = end or self._end_of_former()
        self._first_seq = self._read_first_seq()

    def append(self, events: Sequence[AuditEvent], lost: int = 0) -> None:
        """Write records and sync them. ``lost``: how many were lost before these. Raises `OSError`; then none of them
        is in the file."""
        if self._must_truncate:
            self._truncate()
        if self._file < 0:
            self._open_file()  # it was renamed, and then the disk was full
        end, lines = self.end, []
        for event in events:
            line, end = encode(event, end, lost)
            lines.append(line)
            lost = 0
        data = b"".join(lines)
        if self._size and self._size + len(data) > self._max_bytes:
            self._rotate()
        try:
            _write_all(self._file, data)
            os.fsync(self._file)
        except OSError:
            self._must_truncate = True
            raise
        self._size += len(data)
        self.end = end

    def close(self) -> None:
        """Close the file, and free it for another process."""
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1

    def _open_file(self) -> None:
        # Readable by the group, for those who ship logs, where the umask of the process allows it.
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        self._size = os.fstat(self._file).st_size
        _sync_folder(self._path)

    def _truncate(self) -> None:
        """Remove what a failed `append` has written."""
        if self._file >= 0:
            os.ftruncate(self._file, self._size)
        self._must_truncate = False

    def _set_aside(self, torn: bytes) -> None:
        """Move what a crash has cut off to a file of its own."""
        self.torn_bytes = len(torn)
        stem = f"{self._path.name}.torn"
        taken = {each.name for each in self._path.parent.glob(f"{stem}-*")}
        name = next(name for number in range(1, len(taken) + 2) if (name := f"{stem}-{number}") not in taken)
        aside = os.open(self._path.with_name(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
        try:
            _write_all(aside, torn)
            os.fsync(aside)
        finally:
            os.close(aside)
        self._size -= len(torn)
        os.ftruncate(self._file, self._size)
        os.fsync(self._file)

    def _rotate(self) -> None:
        """Begin a new file; the former one gets the number of its first record behind its name."""
        self._path.rename(self._path.with_name(f"{self._path.name}.{self._first_seq:012d}"))
        os.close(self._file)
        self._file = -1
        self._first_seq = self.end.seq + 1
        self._open_file()

    def _end_of_former(self) -> ChainEnd:
        """Return the end of the newest former file, which a file without records continues."""
        pattern = re.compile(re.escape(self._path.name) + r"\.\d{12}")
        newest = max((each for each in self._path.parent.iterdir() if pattern.fullmatch(each.name)), default=None)
        if newest is None:
            return CHAIN_START
        with newest.open("rb") as file:
            end = _last_record(_tail(file.fileno()))[1]
        if end is None:
            raise OperatorError(f"{newest}: its end is damaged; move it away to begin another chain")
        return end

    def _read_first_seq(self) -> int:
        head = os.pread(self._file, _TAIL_BYTES, 0)
        first = record_end(head[: head.find(b"\n") + 1])
        return self.end.seq + 1 if first is None else first.seq


def _locked(path: Path, lock_seconds: float) -> int:
    """Return the descriptor of a locked file beside the log; the log itself is renamed when it is full."""
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    deadline = time.monotonic() + lock_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise OperatorError(
                    f"{path}: another process writes this audit log; give every process a file of its own"
                ) from error
            time.sleep(_LOCK_CHECK_SECONDS)


def _tail(descriptor: int) -> bytes:
    return os.pread(descriptor, _TAIL_BYTES, max(0, os.fstat(descriptor).st_size - _TAIL_BYTES))


def _last_record(tail: bytes) -> tuple[int, ChainEnd | None]:
    """Return where the last whole record ends in the last bytes of a file, and its number and hash."""
    stop = tail.rfind(b"\n") + 1
    while stop:
        start = tail.rfind(b"\n", 0, stop - 1) + 1
        end = record_end(tail[start:stop])
        if end is not None:
            return stop, end
        stop = start
    return 0, None


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _sync_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class AuditLog:
    """The audit log of a server. All methods but `open` and `close` are for the event loop, and never block it."""

    def __init__(self, settings: AuditSettings, log: Logger) -> None:
        assert settings.path is not None, "there is no audit log without a file"
        self.settings: Final = settings
        self._log: Final = log
        self._path: Final = settings.path
        self._file: Final = AuditFile(settings.path, settings.max_file_bytes)
        self._jobs: Final[queue.SimpleQueue[AuditEvent | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="audit log", daemon=True)
        self._closing = threading.Event()
        self._queued = 0  # counted by the loop
        self._done = 0  # counted by the thread
        self._reserved = 0
        self._lost_recorded = 0  # counted by the thread: lost records that a written record counts
        self.trouble = ""
        """Why nothing can be written now; empty when all is well."""
        self.written = 0
        """Records that are in the file, since the start."""
        self.lost = 0
        """Records that were dropped, since the start."""
        self.published: ChainEnd = CHAIN_START
        """The newest record at the last publication."""

    @property
    def waiting(self) -> int:
        """Return the number of records that are queued and not written."""
        return self._queued - self._done

    @property
    def torn_bytes(self) -> int:
        """Return the bytes of a line that a crash had cut off, and `open` has moved aside."""
        return self._file.torn_bytes

    def open(self) -> None:
        """Open the file and start the thread. Raises as `AuditFile.open`."""
        self._file.open()
        self._thread.start()
        if self.torn_bytes:
            self._log.warning("audit_line_torn", path=str(self._path), moved_bytes=self.torn_bytes)
        self.publish()

    def close(self) -> None:
        """Write what is queued, and close the file. What cannot be written then is lost, which is logged."""
        self._closing.set()
        self._jobs.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self._log.error("audit_records_dropped", records=self.waiting, reason=f"{self._path}: the disk hangs")
        else:
            self._file.close()
        self.publish()

    def reserve(self) -> None:
        """Keep room for a record that `record` will be given. Raises `AuditFull` when it could not be written and the
        settings say so."""
        settings = self.settings
        if settings.on_full == "refuse":
            if self.trouble:
                raise AuditFull(f"nothing is done that the audit log cannot record: {self.trouble}; make room for it")
            if self.waiting + self._reserved >= settings.max_queued:
                raise AuditFull(f"{settings.max_queued} records wait for the audit log, which is the bound; try later")
        self._reserved += 1

    def release(self) -> None:
        """Give up the room that `reserve` has kept."""
        self._reserved -= 1

    def record(self, event: AuditEvent, *, reserved: bool = False, share: float = 1.0) -> None:
        """Queue a record, or count it as lost. ``reserved``: room was kept for it. ``share``: of the queue that records
        of this kind may fill."""
        if reserved:
            self._reserved -= 1
        if self.waiting + self._reserved >= self.settings.max_queued * share:
            self.lost += 1
            return
        self._queued += 1
        self._jobs.put(event)

    def publish(self) -> None:
        """Log the number and hash of the newest record, and show them as a metric."""
        self.published = end = self._file.end
        self._log.info("audit_hash_published", seq=end.seq, hash=end.hash)

    def summary(self) -> dict[str, object]:
        """Return the numbers for `/stats`."""
        seq, digest = self.published
        return {
            "written": self.written,
            "waiting": self.waiting,
            "lost": self.lost,
            "trouble": self.trouble,
            "published": {"seq": seq, "hash": digest},
        }

    async def keep_publishing(self) -> None:
        """Publish the newest hash at its interval, until cancelled."""
        while True:
            await asyncio.sleep(self.settings.publish_seconds)
            self.publish()

    # ---- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while batch := self._next_batch():
            lost = self.lost - self._lost_recorded
            while not self._append(batch, lost):
                if self._closing.is_set():
                    self._log.error("audit_records_dropped", records=self.waiting, reason=self.trouble)
                    return
                self._closing.wait(self.settings.retry_seconds)
            self._lost_recorded += lost
            self.written += len(batch)
            self._done += len(batch)

    def _next_batch(self) -> list[AuditEvent]:
        """Wait for records, and return those that are queued; none at the end."""
        batch: list[AuditEvent] = []
        event = self._jobs.get()
        while event is not None:
            batch.append(event)
            if len(batch) == _MAX_BATCH or self._jobs.empty():
                return batch
            event = self._jobs.get()
        if batch:
            self._jobs.put(None)  # the end, which comes after this batch
        return batch

    def _append(self, batch: Sequence[AuditEvent], lost: int) -> bool:
        try:
            self._file.append(batch, lost)
        except Exception as error:  # noqa: BLE001 - the thread must not end: nothing would be recorded any more
            if not self.trouble:
                self._log.error("audit_log_unwritable", path=str(self._path), exc_info=error)
            self.trouble = f"{self._path}: {error}"
            return False
        if self.trouble:
            self.trouble = ""
            self._log.info("audit_log_writable", path=str(self._path))
        return True
