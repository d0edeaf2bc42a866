"""How often a watcher looks at a database."""

from __future__ import annotations

import pytest

from tao.model.topology import Database, DatabaseServer, Topology
from tao.observability.logs import logger
from tao.replication.accounts import Account
from tao.replication.replication_set import SetAccounts
from tao.runtime.clock import LoopClock
from tao.runtime.tasks import BackgroundTasks
from tao.watcher import probes
from tao.watcher.probes import DatabaseProbes, WatcherContext
from tao.watcher.settings import ProbeSettings


class Probes(DatabaseProbes):
    """Probes that find this state of the commits, and count their looks."""

    are_waiting = False
    looks = 0

    async def _ask(self, database: Database) -> bool:
        self.looks += 1
        return self.are_waiting


@pytest.mark.parametrize("are_waiting", [False, True])
async def test_commits_that_wait_for_lost_acknowledgements_are_looked_at_once_more_at_once(
    are_waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All writes of the database wait until a second look has found the same."""
    monkeypatch.setattr(probes, "_SECOND_LOOK_SECONDS", 0.0)
    log, account = logger("watcher"), Account("tao_admin", "secret")
    looking = Probes(
        lambda: Topology(version=1, shards=1, regions=(), databases=()),
        SetAccounts(account, account),
        "east",
        ProbeSettings(),
        WatcherContext(BackgroundTasks("watcher", log), LoopClock(), log),
        lambda *_: None,
    )
    looking.are_waiting = are_waiting
    server = DatabaseServer(name="east-db", host="127.0.0.1", port=1)
    await looking._look(Database(name="db", master_region="east", servers={"east": server}, shards=((0, 0),)))
    assert looking.looks == (2 if are_waiting else 1)
