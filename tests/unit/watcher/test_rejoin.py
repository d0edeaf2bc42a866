"""A watcher that has former masters rejoin by itself names the ones that cannot."""

from __future__ import annotations

from pathlib import Path

from structlog.testing import capture_logs

from tao.observability.logs import logger
from tao.runtime.clock import LoopClock
from tao.runtime.tasks import BackgroundTasks
from tests.unit.replication.members import master, replica
from tests.unit.watcher.test_mastership import Broken, east_and_west, mastership_of, turns


async def test_a_server_that_cannot_rejoin_is_left_alone_and_reported_once_with_what_to_do(tmp_path: Path) -> None:
    tasks, diverged = BackgroundTasks("watcher", logger("watcher")), replica("west", "1-1-1,2-2-9", alone=True)
    mastership = mastership_of(tmp_path, Broken(), tasks, LoopClock(), lambda _: 0.0, auto_rejoin=True)
    with capture_logs() as logs:
        for now in (master("1-1-1"), master("1-1-1"), master(None), master("1-1-1")):
            mastership.observe(east_and_west(), [now, diverged], 0.0)
            await turns()
    (found,) = logs
    assert (found["event"], found["target"]) == ("rejoin_withheld", "west-db")
    assert "which the master east-db never had" in found["reason"]
    assert "tao reseed west-db" in found["reason"]
    await tasks.close()
