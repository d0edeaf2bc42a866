"""The spool's bounds and faults: full disks, torn and foreign files, flipped bits, age."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tao import __version__
from tao.delivery import spool, synced_file
from tao.delivery.settings import SpoolSettings
from tao.delivery.spool import SqliteSpool
from tao.model.changes import ObjectChange, ShardMessages
from tao.model.delivery import SpoolMark, SpoolRow
from tao.observability.logs import logger
from tests.rigs.pacing import PATIENT_SECONDS, until


class Opened:
    """A spool, and the changes that it has reported."""

    def __init__(self, folder: Path, settings: SpoolSettings) -> None:
        self.spool = SqliteSpool(folder, settings, logger("test"))
        self.dropped: list[tuple[int, str, int]] = []
        self.losses = 0
        self.spool.on_change(lambda *each: self.dropped.append(each), self._lost)

    def _lost(self) -> None:
        self.losses += 1

    async def append(self, number: int, size: int = 10) -> None:
        stored = asyncio.Event()
        messages = ShardMessages(1, 1, (ObjectChange(1 << 47 | 1, 1, 2, 1, b"x" * size),))
        marks = [SpoolMark(1, "h", 0, number, linked=True)]
        self.spool.append([SpoolRow("h", number, messages)], marks, stored.set)
        await stored.wait()

    async def numbers(self) -> list[int] | None:
        answer: asyncio.Future[list[int] | None] = asyncio.get_running_loop().create_future()
        self.spool.read(
            1, "h", (0, 1 << 62), 1 << 20,
            lambda rows: answer.set_result(None if rows is None else [row.number for row in rows]),
        )  # fmt: skip
        return await answer


class Opener:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[Opened] = []

    async def __call__(self, **settings: float) -> Opened:
        opened = Opened(self.folder, SpoolSettings(**settings))  # type: ignore[arg-type]
        self.opened.append(opened)
        await opened.spool.open()
        return opened


@pytest.fixture
async def open_spool(tmp_path: Path) -> AsyncIterator[Opener]:
    opener = Opener(tmp_path / "spool")
    yield opener
    for opened in opener.opened:
        await opened.spool.close()


async def test_proofs_that_come_together_are_one_commit(open_spool: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tao.delivery.spool._PROOF_SECONDS", 3_600.0)
    opened = await open_spool()
    await opened.append(1)
    commits = opened.spool.commits
    for number in range(2, 40):
        opened.spool.prove("h", number)
        opened.spool.prove(f"history {number}", 1)
    await opened.spool.close()
    assert opened.spool.commits == commits + 1
    again = await open_spool()
    assert [mark.head for mark in again.spool.marks()] == [39]


async def test_proofs_are_stored_without_messages(open_spool: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tao.delivery.spool._PROOF_SECONDS", 0.001)
    opened = await open_spool()
    await opened.append(1)
    commits = opened.spool.commits
    opened.spool.prove("h", 2)
    await until(lambda: opened.spool.commits == commits + 1)


async def test_the_oldest_rows_are_dropped_and_their_last_position_is_reported(open_spool: Opener) -> None:
    opened = await open_spool(max_bytes=5_000)
    for number in range(1, 11):
        await opened.append(number, 1_000)
    assert opened.spool.bytes <= 5_000
    kept = await opened.numbers()
    assert kept == list(range(11 - len(kept or ()), 11))
    assert opened.dropped[-1] == (1, "h", 10 - len(kept or ()))
    await opened.spool.close()
    (mark,) = (await open_spool()).spool.marks()
    assert (mark.after, mark.head) == (10 - len(kept or ()), 10)


async def test_rows_beyond_the_maximum_age_are_dropped(open_spool: Opener) -> None:
    opened = await open_spool(max_age_seconds=-10.0)
    await opened.append(1)
    assert opened.dropped == [(1, "h", 1)]


async def test_a_full_disk_is_reported_and_storing_resumes_once_there_is_room(open_spool: Opener) -> None:
    opened = await open_spool(max_bytes=4_096, retry_seconds=0.0)
    await opened.append(1)
    await opened.append(2, 8 << 20)  # more than the file may have
    assert opened.losses == 1
    assert opened.spool.failures == 1
    assert opened.spool.trouble
    await opened.append(3)
    assert opened.spool.trouble == ""
    assert await opened.numbers() == [1, 3]


async def test_jobs_queued_before_a_loss_was_known_are_skipped(open_spool: Opener) -> None:
    opened = await open_spool(max_bytes=4_096, retry_seconds=0.0)
    later = asyncio.gather(opened.append(1, 8 << 20), opened.append(2), opened.append(3))
    await later
    assert opened.losses >= 1
    assert await opened.numbers() == []


@pytest.mark.parametrize("damage", ["no database", "torn", "another form", "flipped bit", "flipped mark"])
async def test_a_file_that_cannot_be_read_is_set_aside(open_spool: Opener, damage: str) -> None:
    opened = await open_spool()
    for number in range(1, 200):
        await opened.append(number, 1_000) if number < 3 else None
    await opened.spool.close()
    path = open_spool.folder / "spool.sqlite"
    if damage == "no database":
        path.write_bytes(b"something else" * 1_000)
    elif damage == "torn":
        path.write_bytes(path.read_bytes()[: 4_096 * 2 + 100])
    else:
        statement = {
            "another form": "PRAGMA user_version = 77",
            "flipped bit": "UPDATE messages SET body = zeroblob(length(body)) WHERE place = 1",
            "flipped mark": "UPDATE marks SET head = head + 1",
        }[damage]
        with sqlite3.connect(path) as connection:
            connection.execute(statement)
        connection.close()
    again = await open_spool()
    await again.append(3)
    if damage == "flipped bit":
        assert await again.numbers() is None
        assert again.losses == 1
    else:
        assert list(again.spool.marks()) == []
        assert await again.numbers() == [3]
    assert again.spool.set_aside == 1
    assert (open_spool.folder / "spool.sqlite.unreadable").exists()


async def test_a_file_of_a_later_format_is_set_aside_and_the_log_says_who_wrote_it(
    open_spool: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr("tao.delivery.spool._FORMATS", (*spool._FORMATS, "CREATE TABLE notes (note TEXT NOT NULL);"))
        later.setattr(synced_file, "_WRITTEN_BY", synced_file._WRITTEN_BY.replace(__version__, "7.1.0"))
        await (await open_spool()).spool.close()
    with capture_logs() as lines:
        opened = await open_spool()
    path = open_spool.folder / "spool.sqlite"
    assert [(each["event"], each["reason"], each["set_aside"]) for each in lines] == [
        (
            "spool_unreadable",
            f"{path} has format 2, which version 7.1.0 wrote; this version ({__version__}) reads formats up to 1",
            f"{path}.unreadable",
        )
    ]
    await opened.append(1)
    assert await opened.numbers() == [1]


async def test_a_damaged_file_that_cannot_be_set_aside_is_a_failed_disk_and_jobs_still_end(
    open_spool: Opener,
) -> None:
    """The file system may have become read-only because of the same damage."""
    opened = await open_spool(retry_seconds=0.0)
    await opened.append(1)
    with sqlite3.connect(open_spool.folder / "spool.sqlite") as connection:
        connection.execute("UPDATE messages SET body = zeroblob(length(body))")
    connection.close()
    in_the_way = open_spool.folder / "spool.sqlite.unreadable"
    in_the_way.mkdir()
    async with asyncio.timeout(PATIENT_SECONDS):
        assert await opened.numbers() is None
        assert opened.spool.trouble
        await opened.append(2)
    assert opened.losses >= 1
    in_the_way.rmdir()
    async with asyncio.timeout(PATIENT_SECONDS):
        assert await opened.numbers() is None
        await opened.append(3)
        assert await opened.numbers() == [3]
    assert opened.spool.trouble == ""


async def test_a_mark_that_is_queued_before_a_drop_is_known_claims_nothing_that_is_gone(
    open_spool: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = await open_spool(max_bytes=64 << 10)
    for number in range(1, 9):
        await opened.append(number, 6 << 10)
    held: list[tuple[Any, ...]] = []
    report = opened.spool._report
    monkeypatch.setattr(opened.spool, "_report", lambda *results: held.append(results))
    messages = ShardMessages(1, 1, (ObjectChange(1 << 47 | 1, 1, 2, 1, b"x" * (20 << 10)),))
    stale = [SpoolMark(1, "h", 0, 9, linked=True)]
    opened.spool.append([SpoolRow("h", 9, messages)], stale, lambda: None)
    await until(lambda: held)
    opened.spool.append([], stale, lambda: None)
    monkeypatch.setattr(opened.spool, "_report", report)
    (results,) = held
    assert results[1], "nothing was dropped"
    report(*results)
    await opened.append(10)
    await opened.spool.close()
    (mark,) = (await open_spool()).spool.marks()
    numbers = await open_spool.opened[-1].numbers()
    assert numbers
    assert numbers[0] > 1
    assert mark.after == numbers[0] - 1


async def test_marks_claim_nothing_that_is_gone_of_a_former_source_and_little_is_kept_for_that(
    open_spool: Opener,
) -> None:
    """Each promotion begins a source. One number is kept of each former source, and one of each shard."""
    opened = await open_spool(max_bytes=64 << 10)
    shards, sources = range(4), [f"db@{epoch}:0-1" for epoch in range(8)]
    for source in sources:
        for number in range(1, 9):
            rows = [SpoolRow(source, number, _large_change(shard)) for shard in shards]
            marks = [SpoolMark(shard, source, 0, number, linked=True) for shard in shards]
            stored = asyncio.Event()
            opened.spool.append(rows, marks, stored.set)
            await stored.wait()
    late = [SpoolMark(shard, sources[shard], 0, 9, linked=True) for shard in shards]
    opened.spool.append([], late, lambda: None)
    await opened.spool.close()
    assert len(opened.spool._gone) + len(opened.spool._gone_before) < len(shards) + len(sources)
    found = (await open_spool()).spool.marks()
    assert [(mark.source, mark.after) for mark in found] == [(mark.source, 8) for mark in late]


def _large_change(shard: int) -> ShardMessages:
    return ShardMessages(shard, 1, (ObjectChange(shard << 47 | 1, 1, 2, 1, b"x" * (4 << 10)),))
