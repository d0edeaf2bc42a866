"""Records in order in, batches side by side out, progress in order again.

Keys are prepared one batch after the other (two batches may name one new key), the writes of several batches are under
way at once, and progress is noted for the oldest first, so it always says "everything up to here".
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from tao.cli.loading.csv_source import CsvSource, Place, Record
from tao.cli.loading.key_map import KeyMap, Progress
from tao.cli.loading.rejects import RejectFile
from tao.client import SomeFailed
from tao.model.errors import OutcomeUnknown, RequestError, RetryableError, TaoError

Item = TypeVar("Item")
_NOTE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """How hard a load presses."""

    batch_records: int = 512
    """Records prepared and written together: large enough that messages and transactions are full."""
    batches_in_flight: int = 4
    """Some two thousand writes: leaders stay busy, and none waits so long that the copy to its other end, which has
    two seconds, is left to repair. Eight load no faster (measured: 4.6 k edges/s with either)."""
    attempts: int = 8
    """Of a batch's writes that failed for no fault of theirs; with the pauses below some ten seconds, which outlast a
    server's restart."""
    first_pause_seconds: float = 0.1
    """Before the second attempt; doubled each time, with jitter."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """Why a record cannot be loaded."""

    reason: str


class Load(Protocol[Item]):
    """What a load of objects and one of edges differ in."""

    async def prepare(self, records: Sequence[Record]) -> list[Item | Rejected]:
        """What to write for each record; keys that it needs are noted. Called for one batch after the other."""

    async def write(self, items: Sequence[Item]) -> list[TaoError | None]:
        """Write; an error or None for each. Called for several batches side by side."""

    def witness(self, item: Item) -> str:
        """Names something written, so that `holds` finds it."""

    async def holds(self, witness: str) -> bool:
        """Whether the cluster still has it: not when it was made anew since."""


class Pipeline(Generic[Item]):
    """One run of one load."""

    def __init__(
        self,
        load: Load[Item],
        source: CsvSource,
        key_map: KeyMap,
        name: str,
        rejects: RejectFile,
        settings: PipelineSettings,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._load = load
        self._source = source
        self._key_map = key_map
        self._name = name
        self._rejects = rejects
        self._settings = settings
        self._tell = on_progress
        self._under_way: deque[tuple[list[Record], asyncio.Task[list[Item | Rejected]]]] = deque()
        self._noted_at = 0.0

    async def run(self, progress: Progress) -> Progress:
        """Load everything after ``progress``; returns the last one, finished.

        Raises a `TaoError` when writes keep failing for no fault of theirs, and `asyncio.CancelledError`; what was
        reached is noted all the same."""
        try:
            for records in self._batches(progress):
                prepared = await self._load.prepare([record for record in records if not record.fault])
                if len(self._under_way) >= self._settings.batches_in_flight:
                    progress = await self._settle_oldest(progress)
                self._under_way.append((records, asyncio.create_task(self._write(prepared))))
            while self._under_way:
                progress = await self._settle_oldest(progress)
            progress = msgspec.structs.replace(progress, finished=True)
            return progress
        finally:
            tasks = [task for _, task in self._under_way]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._key_map.note_progress(self._name, progress)

    def _batches(self, progress: Progress) -> Iterator[list[Record]]:
        place = Place(progress.offset, progress.lines) if progress.offset else self._source.start
        records = self._source.records(place)
        while batch := list(islice(records, self._settings.batch_records)):
            yield batch

    async def _settle_oldest(self, progress: Progress) -> Progress:
        # It stays in the queue until it has ended, so that a cancellation here finds it there.
        records, task = self._under_way[0]
        outcomes = iter(await task)
        self._under_way.popleft()
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
        now = asyncio.get_running_loop().time()
        if now - self._noted_at >= _NOTE_SECONDS:
            self._noted_at = now
            self._key_map.note_progress(self._name, progress)
        self._tell(progress)
        return progress

    async def _write(self, prepared: list[Item | Rejected]) -> list[Item | Rejected]:
        """Write until every item is written or rejected. Raises what keeps failing."""
        outcomes = list(prepared)
        todo = [(index, item) for index, item in enumerate(prepared) if not isinstance(item, Rejected)]
        pause = self._settings.first_pause_seconds
        for attempts_left in reversed(range(self._settings.attempts)):
            errors = await self._load.write([item for _, item in todo]) if todo else []
            again: list[tuple[int, Item]] = []
            for (index, item), error in zip(todo, errors, strict=True):
                if error is None:
                    continue
                if isinstance(error, RequestError):
                    outcomes[index] = Rejected(f"{error.reason}: {error.message}")
                # Repeating is safe whatever became of the write: ids are fixed and the load owns what it writes.
                elif attempts_left and isinstance(error, RetryableError | OutcomeUnknown):
                    again.append((index, item))
                else:
                    raise error
            if not again:
                break
            todo = again
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause *= 2
        return outcomes


async def errors_of(writes: Awaitable[object], count: int) -> list[TaoError | None]:
    """What became of each of the ``count`` writes of a many-form."""
    try:
        await writes
    except SomeFailed as failed:
        return [each if isinstance(each, TaoError) else None for each in failed.results]
    return [None] * count
