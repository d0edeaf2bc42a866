"""The file of the audit log and its thread: bounds, a full disk, a crash, new files."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tao.model.errors import AuditFull, OperatorError, SettingsError
from tao.observability import audit_log
from tao.observability.audit_log import AuditFile, AuditLog, AuditSettings
from tao.observability.audit_records import AuditEvent, Fault, verify
from tao.observability.logs import logger
from tests.rigs.pacing import until


def event(action: str = "invalidate") -> AuditEvent:
    return AuditEvent(time_ms=1, server="leader-1", caller="operator/ann", action=action)


def lines_of(*paths: Path) -> list[bytes]:
    return [line for path in paths for line in path.read_bytes().splitlines(keepends=True)]


def actions(*paths: Path) -> list[str]:
    return [json.loads(line)["api"]["operation"] for line in lines_of(*paths)]


@contextmanager
def written_by(path: Path, max_bytes: int = 1 << 20) -> Iterator[AuditFile]:
    file = AuditFile(path, max_bytes)
    file.open()
    try:
        yield file
    finally:
        file.close()


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of this process grow, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit" / "leader-1.jsonl"


# ---- the file --------------------------------------------------------------------------------------------------------


def test_a_log_that_is_opened_again_continues_its_chain(path: Path) -> None:
    for number in range(3):
        with written_by(path) as file:
            assert file.end.seq == 2 * number
            file.append([event(), event()])
    found = verify(lines_of(path))
    assert (found.records, found.end.seq, found.fault) == (6, 6, None)


def test_a_line_that_a_crash_has_cut_off_is_moved_aside_and_the_chain_goes_on(path: Path) -> None:
    with written_by(path) as file:
        file.append([event("first"), event("torn")])
    whole, torn = lines_of(path)
    for number, kept in enumerate((b"", torn[:20], torn[:-1]), 1):
        path.write_bytes(whole + kept)
        with written_by(path) as file:
            assert (file.end.seq, file.torn_bytes) == (1, len(kept))
        asides = sorted(path.parent.glob("*.torn-*"))
        assert len(asides) == number - 1
        if kept:
            assert asides[-1].read_bytes() == kept
    with written_by(path) as file:
        file.append([event("second")])
    assert actions(path) == ["first", "second"]
    assert verify(lines_of(path), newest=file.end.hash).fault is None


def test_a_last_record_that_was_changed_is_moved_aside_and_missed_by_the_published_hash(path: Path) -> None:
    with written_by(path) as file:
        file.append([event("first"), event("denied")])
        published = file.end.hash
    path.write_bytes(path.read_bytes().replace(b"denied", b"allowd"))
    assert verify(lines_of(path)).fault is Fault.CHANGED
    with written_by(path) as file:
        assert file.torn_bytes
        file.append([event("third")])
    assert verify(lines_of(path), newest=published).fault is Fault.TRUNCATED


def test_a_file_that_is_no_audit_log_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("token: secret\n")
    with pytest.raises(OperatorError, match="is not an audit log"), written_by(path):
        pass
    assert path.read_text() == "token: secret\n"


def test_a_file_belongs_to_one_process_at_a_time(path: Path) -> None:
    with written_by(path), pytest.raises(OperatorError, match="another process writes"), written_by(path):
        pass
    with written_by(path):
        pass


def test_a_full_file_is_put_by_and_its_successor_continues_the_chain(path: Path) -> None:
    with written_by(path, max_bytes=2_000) as file:
        for _ in range(5):
            file.append([event(), event()])
    former = sorted(path.parent.glob("leader-1.jsonl.0*"))
    assert [int(each.suffix[1:]) for each in former] == [1, 3, 5, 7]
    assert verify(lines_of(*former, path), newest=file.end.hash).records == 10
    path.unlink()
    with written_by(path, max_bytes=2_000) as file:
        assert file.end.seq == 8, "a start between the two steps"
        file.append([event()])
    assert verify(lines_of(*former, path)).records == 9


def test_what_a_full_disk_lets_through_of_a_batch_is_taken_back(path: Path) -> None:
    with written_by(path) as file:
        file.append([event("first")])
        before = path.read_bytes()
        with full_disk(), pytest.raises(OSError, match="large"):
            file.append([event(), event()])
        file.append([event("second")])
        assert path.read_bytes().startswith(before)
    assert actions(path) == ["first", "second"]
    assert verify(lines_of(path), newest=file.end.hash).records == 2


def test_a_disk_that_is_full_when_a_new_file_is_begun_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with written_by(path, max_bytes=1_000) as file:
        file.append([event("first")])
        opened = os.open

        def no_room(name: Any, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_CREAT:
                raise OSError(28, "No space left on device")
            return opened(name, flags, mode)

        monkeypatch.setattr(os, "open", no_room)
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                file.append([event("second")])
        monkeypatch.undo()
        file.append([event("second")])
    assert actions(*sorted(path.parent.glob("leader-1.jsonl.0*")), path) == ["first", "second"]


# ---- the log ---------------------------------------------------------------------------------------------------------


class GatedFile(AuditFile):
    """A file whose writes wait for `gate`, and fail while `failure` is set."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        super().__init__(path, max_bytes)
        self.gate = threading.Event()
        self.gate.set()
        self.failure: OSError | None = None

    def append(self, events: Any, lost: int = 0) -> None:
        self.gate.wait()
        if self.failure is not None:
            raise self.failure
        super().append(events, lost)


@contextmanager
def open_log(path: Path, **settings: Any) -> Iterator[tuple[AuditLog, GatedFile]]:
    log = AuditLog(AuditSettings(path=path, retry_seconds=0.001, **settings), logger("test"))
    file = GatedFile(path, 1 << 20)
    vars(log)["_file"] = file
    log.open()
    try:
        yield log, file
    finally:
        file.gate.set()
        file.failure = None
        log.close()


async def test_records_are_written_in_order_and_many_with_one_sync(path: Path) -> None:
    with open_log(path) as (log, _):
        for number in range(500):
            log.record(event(f"number {number}"))
        await until(lambda: not log.waiting)
        assert (log.written, log.lost) == (500, 0)
    assert actions(path) == [f"number {number}" for number in range(500)]


async def test_a_queue_that_is_full_refuses_what_would_be_recorded_and_says_how_much_was_lost(path: Path) -> None:
    with open_log(path, max_queued=3) as (log, file):
        file.gate.clear()
        for _ in range(2):
            log.reserve()
        log.record(event("noticed"))
        log.record(event("too many"))
        assert log.lost == 1, "what was kept for others is not taken"
        with pytest.raises(AuditFull, match="3 records wait"):
            log.reserve()
        log.record(event("first"), reserved=True)
        log.release()
        log.record(event("second"))
        file.gate.set()
        await until(lambda: not log.waiting)
        log.record(event("third"))
        await until(lambda: not log.waiting)
        log.reserve()
        log.release()
    assert actions(path) == ["noticed", "first", "second", "third"]
    lost = [json.loads(line)["unmapped"].get("lost", 0) for line in lines_of(path)]
    assert sum(lost) == 1


async def test_with_count_nothing_is_refused_and_the_next_record_counts_what_was_lost(path: Path) -> None:
    with open_log(path, max_queued=2, on_full="count") as (log, file):
        file.failure = OSError(28, "No space left on device")
        for _ in range(5):
            log.reserve()
            log.record(event(), reserved=True)
        await until(lambda: log.trouble)
        assert (log.waiting, log.lost) == (2, 3)
        file.failure = None
        await until(lambda: not log.waiting)
        assert not log.trouble
        log.record(event())
        await until(lambda: not log.waiting)
    assert sum(json.loads(line)["unmapped"].get("lost", 0) for line in lines_of(path)) == 3
    assert verify(lines_of(path)).fault is None


async def test_a_log_that_cannot_be_written_refuses_until_it_can_and_loses_nothing(path: Path) -> None:
    with capture_logs() as logs, open_log(path) as (log, file):
        file.failure = OSError(28, "No space left on device")
        log.record(event("before"))
        await until(lambda: log.trouble)
        with pytest.raises(AuditFull, match="No space left"):
            log.reserve()
        file.failure = None
        await until(lambda: not log.trouble)
        log.reserve()
        log.record(event("after"), reserved=True)
    assert actions(path) == ["before", "after"]
    names = [each["event"] for each in logs]
    assert names.count("audit_log_unwritable") == names.count("audit_log_writable") == 1


async def test_denials_leave_half_of_the_queue_to_others(path: Path) -> None:
    with open_log(path, max_queued=10) as (log, file):
        file.gate.clear()
        for _ in range(20):
            log.record(event("connect"), share=0.5)
        assert (log.waiting, log.lost) == (5, 15)
        for _ in range(5):
            log.reserve()


async def test_the_newest_hash_is_published_in_the_log_and_kept_until_the_next_time(path: Path) -> None:
    with capture_logs() as logs, open_log(path) as (log, _):
        log.record(event())
        await until(lambda: not log.waiting)
        assert log.published.seq == 0
        log.publish()
        assert log.published.seq == 1
        assert log.summary() == {
            "written": 1,
            "waiting": 0,
            "lost": 0,
            "trouble": "",
            "published": {"seq": 1, "hash": log.published.hash},
        }
        log.record(event())
    published = [each for each in logs if each["event"] == "audit_hash_published"]
    assert [each["seq"] for each in published] == [0, 1, 2], "at the start, when asked, and at the end"
    assert verify(lines_of(path), newest=str(published[-1]["hash"])).fault is None


async def test_a_log_that_is_closed_while_the_disk_is_full_says_what_it_drops(path: Path) -> None:
    log = AuditLog(AuditSettings(path=path, retry_seconds=60), logger("test"))
    file = GatedFile(path, 1 << 20)
    vars(log)["_file"] = file
    log.open()
    file.failure = OSError(28, "No space left on device")
    log.record(event())
    await until(lambda: log.trouble)
    with capture_logs() as logs:
        log.close()
    assert [each["records"] for each in logs if each["event"] == "audit_records_dropped"] == [1]


async def test_a_disk_that_hangs_does_not_hold_up_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "_CLOSE_SECONDS", 0.01)
    with open_log(path) as (log, file):
        file.gate.clear()
        log.record(event())
        with capture_logs() as logs:
            log.close()
        assert [each["records"] for each in logs if each["event"] == "audit_records_dropped"] == [1]
        file.gate.set()
        monkeypatch.undo()


def test_bounds_below_one_are_refused() -> None:
    with pytest.raises(SettingsError, match="at least 1"):
        AuditSettings(max_queued=0)
