"""A full disk is found by what the server refuses and by its waiting threads, and so is the end of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from tao.model.errors import DatabaseFull, ShardBlocked
from tao.storage.disk_space import DiskSpace, DiskSpaceSettings, ServerThread, waits_for_space
from tao.storage.failures import ConnectionLost
from tao.storage.session import DatabaseSession
from tests.rigs.pacing import until
from tests.unit.storage.test_session_faults import FailingConnection


class Rig:
    """The disk of a server; ``waits`` says whether a thread waits for space."""

    def __init__(self) -> None:
        self.waits = False
        self.looks = 0
        settings = DiskSpaceSettings(patience_seconds=0.001, interval_seconds=0.001, quiet_seconds=0.001)
        self.space = DiskSpace("db-1", settings, self.look)

    async def look(self, deadline: float) -> bool:
        self.looks += 1
        return self.waits

    async def write_until_closed(self, session: DatabaseSession) -> None:
        with self.space.writing(session):
            await until(lambda: not session.is_open)
            raise ConnectionLost("closed by this side")

    def session(self) -> DatabaseSession:
        return DatabaseSession(FailingConnection(), "db-1", locking=True)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.space.close()


@pytest.mark.parametrize("state", ["Waiting for someone to free space", "Waiting for disk space"])
def test_the_states_of_threads_that_wait_for_space_are_known(state: str) -> None:
    for waits_for_replica in (False, True):
        threads = [ServerThread("Commit", 9), ServerThread(state, 0)]
        assert waits_for_space(threads, waits_for_replica=waits_for_replica)
        threads = [ServerThread("Commit", 9), ServerThread(None, None)]
        assert not waits_for_space(threads, waits_for_replica=waits_for_replica)


def test_a_commit_of_mysql_that_hangs_and_waits_for_no_replica_waits_for_the_disk() -> None:
    commits = [ServerThread("waiting for handler commit", seconds) for seconds in (0, 2, 3)]
    assert waits_for_space(commits, waits_for_replica=False)
    assert not waits_for_space(commits[:2], waits_for_replica=False), "of two whole seconds one may hardly have passed"
    assert not waits_for_space(commits, waits_for_replica=True), "others, perhaps unseen, hold the commits up"


async def test_a_slow_write_finds_the_full_disk_and_further_writes_fail_at_once_until_there_is_room(rig: Rig) -> None:
    rig.waits = True
    session = rig.session()
    with capture_logs() as logs:
        with pytest.raises(DatabaseFull, match="the disk of database server db-1 is full"):
            await rig.write_until_closed(session)
        with pytest.raises(DatabaseFull, match="nothing was written"):
            rig.space.check()
        rig.waits = False
        await until(lambda: not rig.space.reason)
    rig.space.check()
    events = [(line["event"], line["database_server"]) for line in logs]
    assert events == [("database_full", "db-1"), ("database_has_room", "db-1")]


async def test_a_lock_that_is_not_had_has_the_threads_looked_at(rig: Rig) -> None:
    rig.waits = True
    with pytest.raises(ShardBlocked), rig.space.locking():
        raise ShardBlocked("held by a commit that waits")
    await until(lambda: rig.space.reason)


async def test_a_refused_write_counts_until_one_is_committed_and_keeps_none_from_being_tried(rig: Rig) -> None:
    session = rig.session()
    with pytest.raises(DatabaseFull), rig.space.writing(session):
        raise DatabaseFull("the disk of database server db-1 is full, or fails")
    rig.space.check()
    assert "db-1 is full" in rig.space.reason
    with rig.space.writing(session):
        await asyncio.sleep(0)
    await until(lambda: not rig.space.reason)


async def test_quick_writes_cost_no_look(rig: Rig) -> None:
    for _ in range(3):
        with rig.space.writing(rig.session()):
            pass
    assert rig.looks == 0
