"""The pipeline of a load keeps progress in order, rejects wrong records, repeats failed writes and resumes."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tao.admin.load.csv_files import CsvSource, Record, RejectFile
from tao.admin.load.key_map import KeyMap, LoadProgress
from tao.admin.load.pipeline import LoadFiles, Pipeline, PipelineSettings, Rejected
from tao.model.errors import InvalidArgument, OutcomeUnknown, Overloaded, TaoError

FRESH = LoadProgress(fingerprint="f", started_unix=1)
SETTINGS = PipelineSettings(
    batch_records=10, batches_in_flight=3, attempts=3, prepare_attempts=4, first_pause_seconds=0.001
)
CONTENT = b"id,name\n" + b"".join(b"%d,n%d\n" % (number, number) for number in range(100))


class FakeLoad:
    """Writes into a dictionary; ``answer`` returns the outcome of an item."""

    used_columns = frozenset({0, 1})
    fields: tuple[str, ...] = ("name",)

    def __init__(self, answer: Callable[[str], TaoError | None] = lambda _: None) -> None:
        self.written: dict[str, int] = {}
        self.most_under_way = 0
        self.hangs_at = ""
        self.refusals: list[TaoError] = []
        self._under_way = 0
        self._answer = answer

    async def prepare(self, records: Sequence[Record]) -> list[str | Rejected]:
        if self.refusals:
            raise self.refusals.pop()
        return [Rejected("odd one out") if record.cells[0] == "13" else record.cells[0] for record in records]

    async def write(self, items: Sequence[str]) -> list[TaoError | None]:
        self._under_way += 1
        self.most_under_way = max(self.most_under_way, self._under_way)
        try:
            # The first batch is the slowest: others are answered before it.
            for _ in range(50 if "0" in items else 1):
                await asyncio.sleep(0)
            if self.hangs_at in items:
                await asyncio.Event().wait()
            answers = [self._answer(item) for item in items]
        finally:
            self._under_way -= 1
        for item, answer in zip(items, answers, strict=True):
            if answer is None:
                self.written[item] = self.written.get(item, 0) + 1
        return answers

    def witness(self, item: str) -> str:
        return item

    async def holds(self, witness: str) -> bool:
        return witness in self.written


class Run:
    """One pipeline over ``CONTENT`` with its files in a folder."""

    def __init__(self, folder: Path, load: FakeLoad, settings: PipelineSettings = SETTINGS) -> None:
        self.load = load
        self.keys = KeyMap(folder / "keys.sqlite")
        self.reached: list[LoadProgress] = []
        self.third_batch = asyncio.Event()
        self.rejects_path = folder / "rejected.csv"
        self._settings = settings

    async def run(self, progress: LoadProgress = FRESH) -> LoadProgress:
        source = CsvSource(io.BytesIO(CONTENT), "x.csv")
        rejects = RejectFile(self.rejects_path, source.columns, size=progress.rejects_bytes)
        pipeline = Pipeline(self.load, LoadFiles(source, self.keys, rejects, "x"), self._settings, self._on_progress)
        return await pipeline.run(progress)

    def _on_progress(self, progress: LoadProgress) -> None:
        self.reached.append(progress)
        if len(self.reached) == 3:
            self.third_batch.set()

    @property
    def noted(self) -> LoadProgress:
        found = self.keys.progress("x")
        assert found is not None
        return found


async def test_everything_is_written_once_and_progress_is_reported_in_order(tmp_path: Path) -> None:
    run = Run(tmp_path, FakeLoad())
    with run.keys:
        done = await run.run()
        assert done.finished
        assert (done.loaded, done.rejected, done.lines, done.offset) == (99, 1, 101, len(CONTENT))
        assert run.load.written == {str(number): 1 for number in range(100) if number != 13}
        assert [progress.offset for progress in run.reached] == sorted(progress.offset for progress in run.reached)
        assert run.noted == done
    assert run.rejects_path.read_text().splitlines()[1] == "15,odd one out,13,n13"


async def test_no_more_batches_are_under_way_than_allowed(tmp_path: Path) -> None:
    run = Run(tmp_path, FakeLoad())
    with run.keys:
        await run.run()
    assert 1 < run.load.most_under_way <= SETTINGS.batches_in_flight


async def test_a_write_that_is_wrong_is_rejected_with_its_reason(tmp_path: Path) -> None:
    run = Run(tmp_path, FakeLoad(lambda item: InvalidArgument("ids are not reused") if item == "50" else None))
    with run.keys:
        done = await run.run()
    assert (done.loaded, done.rejected) == (98, 2)
    assert "52,INVALID_ARGUMENT: ids are not reused,50,n50" in run.rejects_path.read_text()


@pytest.mark.parametrize("failure", [Overloaded("full"), OutcomeUnknown("connection lost")])
async def test_a_write_that_failed_for_a_passing_reason_is_repeated(tmp_path: Path, failure: TaoError) -> None:
    left = {"7": 2, "42": 1}

    def answer(item: str) -> TaoError | None:
        if left.get(item, 0):
            left[item] -= 1
            return failure
        return None

    run = Run(tmp_path, FakeLoad(answer))
    with run.keys:
        done = await run.run()
    assert done.loaded == 99
    assert set(run.load.written.values()) == {1}


async def test_ids_that_cannot_be_reserved_for_a_while_are_asked_for_again(tmp_path: Path) -> None:
    load = FakeLoad()
    run = Run(tmp_path, load)
    with run.keys:
        load.refusals = [Overloaded("restored a moment ago"), OutcomeUnknown("lost"), Overloaded("restored just now")]
        assert (await run.run()).loaded == 99
    assert not load.refusals


async def test_ids_that_cannot_be_reserved_for_long_end_the_load_and_the_next_run_resumes_there(tmp_path: Path) -> None:
    load = FakeLoad()
    run = Run(tmp_path, load)
    with run.keys:
        load.refusals = [Overloaded("full")] * SETTINGS.prepare_attempts
        with pytest.raises(Overloaded):
            await run.run()
        assert (await run.run(run.noted)).loaded == 99


async def test_a_write_that_keeps_failing_ends_the_load_and_the_next_run_resumes_there(tmp_path: Path) -> None:
    broken = True
    run = Run(tmp_path, FakeLoad(lambda item: Overloaded("full") if broken and item == "42" else None))
    with run.keys:
        with pytest.raises(Overloaded):
            await run.run()
        assert not run.noted.finished
        assert run.noted.lines == 41
        broken = False
        done = await run.run(run.noted)
        assert (done.loaded, done.rejected) == (99, 1)
    assert len(run.load.written) == 99
    assert run.load.written["0"] == 1
    assert run.rejects_path.read_text().count("odd one out") == 1


async def test_a_load_that_is_cancelled_notes_what_was_acknowledged(tmp_path: Path) -> None:
    run = Run(tmp_path, FakeLoad())
    with run.keys:
        task = asyncio.create_task(run.run())
        await run.third_batch.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert run.noted == run.reached[-1]
        assert not run.noted.finished
        assert len(run.load.written) == run.noted.loaded > 20, "what was begun is completed and noted, and nothing more"
        done = await run.run(run.noted)
        assert (done.loaded, done.rejected) == (99, 1)
    assert set(run.load.written.values()) == {1}


async def test_a_load_that_is_cancelled_does_not_wait_for_writes_that_do_not_end(tmp_path: Path) -> None:
    load = FakeLoad()
    load.hangs_at = "42"
    run = Run(tmp_path, load, replace(SETTINGS, stop_seconds=0.01))
    with run.keys:
        task = asyncio.create_task(run.run())
        await run.third_batch.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert run.noted.lines == 41
        load.hangs_at = ""
        assert (await run.run(run.noted)).loaded == 99
