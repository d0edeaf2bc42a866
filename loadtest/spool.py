"""Scenario `spool`: what it costs to have a leader's messages on disk, in SQLite and in the plainest file possible.

Both store in a thread of their own and commit what has gathered meanwhile: the spool by a transaction of SQLite, the
file by one write and `fdatasync` of length, checksum and message. The file can neither be read by shard and position,
nor lose its oldest messages, nor be repaired: what it is ahead by is what a format of our own could win at most.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from zlib import crc32

import msgspec

from loadtest.drivers import closed
from loadtest.results import Goal, Measure, ScenarioResult, aims_of
from loadtest.rounds import Comparison, Drive, Pace, Source, Trial, compare_all
from loadtest.scenario import BenchSettings, Progress, Scenario
from tao.delivery.settings import SpoolSettings
from tao.delivery.spool import SqliteSpool
from tao.model.changes import ListChange, ShardMessages
from tao.model.delivery import SpoolRow
from tao.model.graph import Edge
from tao.model.ids import make_id
from tao.observability.logs import logger

_AWAITERS: Final = (1, 64, 1_024)
_SHARDS: Final = 16
_DATA: Final = b"x" * 96
_NOW_MS: Final = 1_700_000_000_000
_TOY_SECONDS: Final = 0.1

_GOAL: Final = Goal(measure=Measure.RATE, bound=0.25, against="file")
"""The spool can be read by shard and position, which may cost it three quarters of a plain file's rate."""

Store = Callable[[SpoolRow, Callable[[], None]], None]
"""``store(row, stored)``: keep the row, and call ``stored`` from the loop once a loss of power does it no harm."""


@dataclass(frozen=True, slots=True)
class _Job:
    row: SpoolRow
    stored: Callable[[], None]


class _AppendedFile:
    """Messages one after the other in a file, synced before ``stored`` is called."""

    def __init__(self, path: Path) -> None:
        self._loop: Final = asyncio.get_running_loop()
        self._jobs: Final[queue.SimpleQueue[_Job | None]] = queue.SimpleQueue()
        self._file: Final = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._encoder: Final = msgspec.msgpack.Encoder()
        self._thread: Final = threading.Thread(target=self._run, name="appended file", daemon=True)
        self._thread.start()

    def store(self, row: SpoolRow, stored: Callable[[], None]) -> None:
        self._jobs.put(_Job(row, stored))

    async def close(self) -> None:
        """Store what is queued, and close the file."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)
        os.close(self._file)

    def _run(self) -> None:
        more = True
        while more:
            jobs: list[_Job] = []
            job = self._jobs.get()
            while job is not None:
                jobs.append(job)
                if self._jobs.empty():
                    break
                job = self._jobs.get()
            more = job is not None
            os.write(self._file, b"".join(map(self._record, jobs)))
            os.fdatasync(self._file)
            self._loop.call_soon_threadsafe(_call_stored, jobs)

    def _record(self, job: _Job) -> bytes:
        body = self._encoder.encode(job.row)
        return len(body).to_bytes(4, "little") + crc32(body).to_bytes(4, "little") + body


def _call_stored(jobs: list[_Job]) -> None:
    for job in jobs:
        job.stored()


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Let the spool and the file take turns."""
    async with AsyncExitStack() as stack:
        spool = SqliteSpool(settings.work_dir, SpoolSettings(max_bytes=64 << 20), logger("bench"))
        await spool.open()
        stack.push_async_callback(spool.close)
        appended = _AppendedFile(settings.work_dir / "appended")
        stack.push_async_callback(appended.close)

        def store_in_spool(row: SpoolRow, stored: Callable[[], None]) -> None:
            spool.append([row], (), stored)

        comparisons = [
            Comparison(
                f"{awaiters:,} waiting",
                (
                    Trial("file", _drive(appended.store, awaiters), {}),
                    Trial("sqlite", _drive(store_in_spool, awaiters), {}),
                ),
                yardstick="file",
                aims={"sqlite": (_GOAL,)},
            )
            for awaiters in _AWAITERS
        ]
        seconds = _TOY_SECONDS if settings.toy else settings.round_seconds
        figures = await compare_all(comparisons, Pace(settings.rounds, seconds), progress.step)
    return ScenarioResult(
        conditions={"bytes of an edge's data": len(_DATA), "shards": _SHARDS},
        figures=figures,
        aims=aims_of(figures),
    )


SCENARIO: Final = Scenario(
    name="spool",
    summary="messages on disk before they are acknowledged: SQLite beside appending to a file",
    run=run,
)


def _drive(store: Store, awaiters: int) -> Drive:
    async def ask(row: SpoolRow) -> Source:
        stored = asyncio.get_running_loop().create_future()
        store(row, lambda: stored.set_result(None))
        await stored
        return Source.UNKNOWN

    return closed(ask, [_rows(number) for number in range(awaiters)])


def _rows(number: int) -> Iterator[SpoolRow]:
    shard = number % _SHARDS
    for version in itertools.count(1):
        id1, id2 = make_id(shard, _NOW_MS + number, 0), make_id(shard, _NOW_MS + version, 0)
        change = ListChange(id1, 1, version, version + 1, 1, (), (Edge(id2, version, _DATA),))
        yield SpoolRow("leader", version, ShardMessages(shard, 1, (change,)))
