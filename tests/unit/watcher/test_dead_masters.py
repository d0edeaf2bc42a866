"""Who may say that nothing listens at the address of a master."""

from __future__ import annotations

from pathlib import Path

import pytest

from tao.observability.logs import logger
from tao.runtime.clock import LoopClock
from tao.runtime.tasks import BackgroundTasks
from tao.watcher.marks import ServerVerdict, WatcherReport
from tests.unit.replication.members import master
from tests.unit.watcher.test_mastership import Broken, mastership_of


async def test_only_a_watcher_of_its_region_knows_that_nothing_listens_at_a_master_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something on the way to another region may refuse, while the master only stands still."""
    tasks = BackgroundTasks("watcher", logger("watcher"))
    mastership = mastership_of(tmp_path, Broken(), tasks, LoopClock())
    monkeypatch.setattr(mastership, "_is_dead", lambda _: True)
    far = master(None, region="west")
    reports = mastership._peers.reports
    assert mastership._is_known_dead(far), "nobody is nearer"
    reports["west"] = None
    assert not mastership._is_known_dead(far), "the one that is nearer cannot be asked"
    reports["west"] = WatcherReport("west", {far.name: ServerVerdict.DOWN})
    assert not mastership._is_known_dead(far)
    reports["west"] = WatcherReport("west", {far.name: ServerVerdict.DEAD})
    assert mastership._is_known_dead(far)
    assert mastership._is_known_dead(master(None)), "which is near"
    await tasks.close()
