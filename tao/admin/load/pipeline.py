"""Runs a load: reads records in order, writes several batches at once, and notes progress in order again.

Keys are prepared one batch after the other, because two batches may name the same new key. The writes of several
batches run concurrently. Progress is noted for the oldest batch first, so it always covers everything before it. A
load that is cancelled finishes the batches that it has begun, so that nothing is written after the noted place.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from tao.admin.load.csv_files import CsvSource, Place, Record, RejectFile
from tao.admin.load.key_map import KeyMap, LoadProgress
from tao.client import SomeFailed
from tao.model.errors import OutcomeUnknown, RequestError, RetryableError, TaoError

Item = TypeVar("Item")
_NOTE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """How many writes a load sends at once, and how often it retries them."""

    batch_records: int = 512
    """The number of records that are prepared and written together: enough to fill messages and transactions."""
    batches_in_flight: int = 4
    """Some two thousand writes: leaders stay busy, and no write waits so long that its inverse, which has two seconds,
    is left to be settled later. Eight load no faster (measured: 4,600 edges a second with either)."""
    attempts: int = 8
    """Attempts of each write that fails for a reason that may pass. The pauses between them are some ten seconds,
    longer than the restart of a server. A server that does not answer may hold up each attempt until the write's
    deadline."""
    prepare_attempts: int = 11
    """Attempts to prepare a batch, which reserves ids. The pauses between them are 50 seconds at least: leaders refuse
    ids for 40 seconds at most after a restore."""
    first_pause_seconds: float = 0.1
    """The pause before the second attempt; it doubles each time, with jitter."""
    stop_seconds: float = 5.0
    """How long a cancelled load waits for the batches under way: many times what they take in a healthy cluster, and
    less than service managers wait before they kill."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The reason why a record cannot be loaded."""

    reason: str


class Load(Protocol[Item]):
    """The part that differs between a load of objects and one of edges.

    ``used_columns``: the indices of the columns that it reads. ``fields``: the fields that a column may be loaded into.
    """

    used_columns: frozenset[int]
    fields: tuple[str, ...]

    async def prepare(self, records: Sequence[Record]) -> list[Item | Rejected]:
        """Return the item to write for each record, and note its keys. Called for one batch after the other, and again
        for a batch when it has raised a `TaoError` that may pass."""

    async def write(self, items: Sequence[Item]) -> list[TaoError | None]:
        """Write the items and return an error or None for each. Called for several batches concurrently.

        Waits for what follows a write, such as inverse edges, as long as that makes sense."""

    def witness(self, item: Item) -> str:
        """Return a text that names a written item, for `holds`."""

    async def holds(self, witness: str) -> bool:
        """True when the cluster still has the item; False when the cluster was created anew since."""


@dataclass(frozen=True, slots=True)
class LoadFiles:
    """The files of a load: its input, the key map, and the file of rejected records."""

    source: CsvSource
    key_map: KeyMap
    rejects: RejectFile
    name: str
    """The name under which the key map keeps the progress."""


class Pipeline(Generic[Item]):
    """One run of one load. `run` may be called once."""

    def __init__(
        self,
        load: Load[Item],
        files: LoadFiles,
        settings: PipelineSettings,
        on_progress: Callable[[LoadProgress], None],
    ) -> None:
        self._load = load
        self._source = files.source
        self._key_map = files.key_map
        self._name = files.name
        self._rejects = files.rejects
        self._settings = settings
        self._on_progress = on_progress
        self._under_way: deque[tuple[list[Record], asyncio.Task[list[Item | Rejected]]]] = deque()
        self._progress = LoadProgress(fingerprint="", started_unix=0)
        self._noted_at = 0.0

    async def run(self, progress: LoadProgress) -> LoadProgress:
        """Load everything after ``progress`` and return the final progress.

        Raises a `TaoError` when writes keep failing; the progress made until then is noted all the same."""
        self._progress = progress
        try:
            for records in self._batches(progress):
                prepared = await self._prepare([record for record in records if not record.fault])
                if len(self._under_way) >= self._settings.batches_in_flight:
                    await self._settle_oldest()
                self._under_way.append((records, asyncio.create_task(self._write(prepared))))
            await self._settle_all()
            self._progress = msgspec.structs.replace(self._progress, finished=True)
            return self._progress
        except asyncio.CancelledError:
            await self._settle_begun()
            raise
        finally:
            tasks = [task for _, task in self._under_way]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._key_map.note_progress(self._name, self._progress)

    def _batches(self, progress: LoadProgress) -> Iterator[list[Record]]:
        place = Place(progress.offset, progress.lines) if progress.offset else self._source.start
        records = self._source.records(place)
        while batch := list(islice(records, self._settings.batch_records)):
            yield batch

    async def _prepare(self, records: Sequence[Record]) -> list[Item | Rejected]:
        """Prepare a batch. Raises the error of a reservation of ids that keeps failing; repeating one is safe, because
        ids that nobody uses are lost."""
        for attempt in range(1, self._settings.prepare_attempts):
            with suppress(RetryableError, OutcomeUnknown):
                return await self._load.prepare(records)
            await self._pause(attempt)
        return await self._load.prepare(records)

    async def _pause(self, attempt: int) -> None:
        """Wait after a failed attempt. ``attempt``: its number, from 1."""
        await asyncio.sleep(self._settings.first_pause_seconds * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))

    async def _settle_all(self) -> None:
        while self._under_way:
            await self._settle_oldest()

    async def _settle_begun(self) -> None:
        """Wait for the batches under way, for a while. A write that fails meanwhile is left to the next run."""
        with suppress(TaoError, TimeoutError):
            async with asyncio.timeout(self._settings.stop_seconds):
                await self._settle_all()

    async def _settle_oldest(self) -> None:
        # It stays in the queue, and is not cancelled, until it has ended: a cancelled `run` waits for it once more.
        records, task = self._under_way[0]
        await asyncio.wait([task])
        outcomes = iter(task.result())
        self._under_way.popleft()
        progress = self._progress
        rejected: list[tuple[Record, str]] = []
        written: list[Item] = []
        for record in records:
            outcome = Rejected(record.fault) if record.fault else next(outcomes)
            if isinstance(outcome, Rejected):
                rejected.append((record, outcome.reason))
            else:
                written.append(outcome)
        if rejected:
            self._rejects.add(rejected)
        progress = msgspec.structs.replace(
            progress,
            offset=records[-1].end.offset,
            lines=records[-1].end.lines,
            loaded=progress.loaded + len(written),
            rejected=progress.rejected + len(rejected),
            rejects_bytes=self._rejects.size,
            witness=self._load.witness(written[-1]) if written else progress.witness,
        )
        self._progress = progress
        now = asyncio.get_running_loop().time()
        if now - self._noted_at >= _NOTE_SECONDS:
            self._noted_at = now
            self._key_map.note_progress(self._name, progress)
        self._on_progress(progress)

    async def _write(self, prepared: list[Item | Rejected]) -> list[Item | Rejected]:
        """Write until every item is written or rejected. Raises the error of a write that keeps failing."""
        outcomes = list(prepared)
        todo = [(index, item) for index, item in enumerate(prepared) if not isinstance(item, Rejected)]
        attempts = self._settings.attempts
        for attempt in range(1, attempts + 1):
            errors = await self._load.write([item for _, item in todo]) if todo else []
            again: list[tuple[int, Item]] = []
            for (index, item), error in zip(todo, errors, strict=True):
                if error is None:
                    continue
                if isinstance(error, RequestError):
                    outcomes[index] = Rejected(f"{error.reason}: {error.message}")
                # Repeating is safe whether or not the write was done: ids are fixed and the load owns what it writes.
                elif attempt < attempts and isinstance(error, RetryableError | OutcomeUnknown):
                    again.append((index, item))
                else:
                    raise error
            if not again:
                break
            todo = again
            await self._pause(attempt)
        return outcomes


async def results_of(writes: Awaitable[Sequence[object]]) -> Sequence[object]:
    """Wait for a many-form of the SDK, and return the result of each write, or its `TaoError`."""
    try:
        return await writes
    except SomeFailed as failed:
        return failed.results


def errors_in(results: Sequence[object]) -> list[TaoError | None]:
    """Return the error among the results of each write, or None."""
    return [each if isinstance(each, TaoError) else None for each in results]
