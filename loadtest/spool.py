"""Scenario `spool`: what it costs to have a leader's messages on disk, in SQLite and in the plainest file possible.

Both store in a thread of their own and commit what has gathered meanwhile: the spool by a transaction of SQLite, the
file by one write and `fdatasync` of length, checksum and message. The file can neither be read by shard and position,
nor lose its oldest messages, nor be repaired: what it is ahead by is what a format of our own could win at most.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final
from zlib import crc32

import msgspec

from loadtest.results import Figure, Goal, Measure, ScenarioResult, aims_of
from loadtest.rounds import Comparison, Pace, Trial, compare_all
from loadtest.scenario import BenchSettings, PartOfProgress, Progress, Scenario
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
    figures: list[Figure] = []
    async with AsyncExitStack() as stack:
        spool = SqliteSpool(settings.work_dir, SpoolSettings(max_bytes=64 << 20), logger("bench"))
        await spool.open()
        stack.push_async_callback(spool.close)
        appended = _AppendedFile(settings.work_dir / "appended")
        stack.push_async_callback(appended.close)

        def store_in_spool(row: SpoolRow, stored: Callable[[], None]) -> None:
            spool.append([row], (), stored)

        round_seconds = _TOY_SECONDS if settings.toy else settings.seconds / settings.rounds
        for place, awaiters in enumerate(_AWAITERS):
            comparison = Comparison(
                f"{awaiters:,} waiting",
                (
                    Trial("file", _drive(appended.store, awaiters), ()),
                    Trial("sqlite", _drive(store_in_spool, awaiters), ()),
                ),
                yardstick="file",
                aims={"sqlite": (_GOAL,)},
            )
            part = PartOfProgress(progress, place / len(_AWAITERS), 1 / len(_AWAITERS))
            figures += await compare_all([comparison], Pace(settings.rounds, round_seconds), part.step)
    return ScenarioResult(
        summary=SCENARIO.summary,
        conditions={"bytes of an edge's data": len(_DATA), "shards": _SHARDS},
        figures=figures,
        aims=aims_of(figures),
    )


SCENARIO: Final = Scenario(
    name="spool",
    summary="messages on disk before they are acknowledged: SQLite beside appending to a file",
    run=run,
)


def _drive(store: Store, awaiters: int) -> Callable[[float, list[float]], Awaitable[None]]:
    async def drive(until: float, latencies: list[float]) -> None:
        loop = asyncio.get_running_loop()

        async def one(number: int) -> None:
            shard = number % _SHARDS
            version = 1
            while (began := perf_counter()) < until:
                stored = loop.create_future()
                id1, id2 = (make_id(shard, _NOW_MS + number, 0), make_id(shard, _NOW_MS + version, 0))
                change = ListChange(id1, 1, version, version + 1, 1, (), (Edge(id2, version, _DATA),))
                row = SpoolRow("leader", version, ShardMessages(shard, 1, (change,)))
                store(row, lambda stored=stored: stored.set_result(None))  # type: ignore[misc]
                await stored
                latencies.append(perf_counter() - began)
                version += 1

        await asyncio.gather(*(one(number) for number in range(awaiters)))

    return drive
