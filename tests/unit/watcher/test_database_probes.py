"""How often a watcher looks at a database."""

from __future__ import annotations

import pytest

from tao.model.topology import Database, DatabaseServer, Topology
from tao.observability.logs import logger
from tao.replication.accounts import Account
from tao.replication.promotion_plan import SetMember
from tao.replication.replication_set import ReplicationSet, SetAccounts
from tao.runtime.clock import LoopClock
from tao.runtime.tasks import BackgroundTasks
from tao.watcher import probes
from tao.watcher.marks import ServerVerdict
from tao.watcher.probes import DatabaseProbes, WatcherContext
from tao.watcher.settings import ProbeSettings
from tests.rigs.pacing import ManualClock


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


async def test_a_database_server_that_refuses_the_watcher_is_neither_silent_nor_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, account, clock = logger("watcher"), Account("tao_admin", "secret"), ManualClock()
    member = SetMember("east-db", "east", None, "access denied", is_master=True, refuses=True)

    async def members(_: ReplicationSet) -> list[SetMember]:
        return [member]

    monkeypatch.setattr(ReplicationSet, "members", members)
    looking = DatabaseProbes(
        lambda: Topology(version=1, shards=1, regions=(), databases=()),
        SetAccounts(account, account),
        "east",
        ProbeSettings(),
        WatcherContext(BackgroundTasks("watcher", log), clock, log),
        lambda *_: None,
    )
    server = DatabaseServer(name="east-db", host="127.0.0.1", port=1)
    database = Database(name="db", master_region="east", servers={"east": server}, shards=((0, 0),))
    for _ in range(5):
        clock.now += 100.0
        await looking._ask(database)
        assert looking.silent_seconds("east-db") == 0
        assert looking.verdicts == {"east-db": ServerVerdict.REFUSED}
        assert looking.refusals == {"east-db": "access denied"}
    member = SetMember("east-db", "east", None, "no answer", is_master=True)
    clock.now += 100.0
    await looking._ask(database)
    assert looking.verdicts == {"east-db": ServerVerdict.DOWN}
    assert looking.refusals == {}
