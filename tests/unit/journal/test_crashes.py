"""A journal that crashes at each step of an entry's way, and two faults that these crashes notice.

The folder is copied at the step, and a new journal begins with the copy, as after a power failure: what was not synced
is not in it. Both make their writes by one write path, so the results show what took effect.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tao.journal.applier import Applier
from tao.journal.entries import Entry
from tao.journal.schedule import Batch
from tao.journal.store import JournalStore
from tao.model.errors import TaoError
from tests.rigs.journal_rig import JournalRig, ScriptedWrites, edge, ends
from tests.rigs.pacing import until

STEPS = ("accepted", "under way", "made", "removed")


async def made_after_a_crash(folder: Path, step: str) -> set[int]:
    """Accept edges, crash at the step, and return the ends of the edges that are there in the end."""
    writes = ScriptedWrites()
    tasks = 0 if step == "accepted" else 12
    async with JournalRig(folder / "before", writes, normal_tasks=tasks) as rig:
        writes.holds.clear()
        assert all(isinstance(each, bytes) for each in await rig.accept(*(edge(0, id2) for id2 in (2, 3, 4))))
        if step != "accepted":
            await until(lambda: writes.requests)
        if step in ("made", "removed"):
            writes.holds.set()
            await rig.idle()
        if step == "removed":
            await rig.accept(edge(1, 5))  # its commit has the removals, too
            await rig.idle()
        shutil.copytree(folder / "before", folder / "after")
        writes.lose()  # the process dies
        await rig.tasks.close()
    writes.holds.set()
    async with JournalRig(folder / "after", writes) as again:
        await again.idle()
    return ends(writes) - {5}


@pytest.mark.parametrize("step", STEPS)
async def test_crash_at_each_step_loses_nothing_accepted(tmp_path: Path, step: str) -> None:
    assert await made_after_a_crash(tmp_path, step) == {2, 3, 4}


async def test_crashes_notice_an_entry_that_is_removed_before_its_outcome_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Applier._make

    async def remove_first(self: Applier, batch: Batch) -> None:
        removed: list[bool] = []
        self._store.remove(batch.entries)
        self._store.read_waiting(0, 1, lambda _: removed.append(True))  # synced behind the removal
        await until(lambda: removed)
        await attempt(self, batch)

    monkeypatch.setattr(Applier, "_make", remove_first)
    assert await made_after_a_crash(tmp_path, "under way") != {2, 3, 4}


async def test_crashes_notice_a_write_that_is_accepted_before_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept_first(self: JournalStore, entries: Sequence[Entry], stored: Callable[[TaoError | None], None]) -> None:
        stored(None)

    monkeypatch.setattr(JournalStore, "append", accept_first)
    assert await made_after_a_crash(tmp_path, "accepted") != {2, 3, 4}
