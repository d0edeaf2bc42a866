"""Looking at the servers of a set."""

from __future__ import annotations

import asyncio

import pytest

from tao.model.errors import DeadlineExceeded
from tao.model.topology import Database, DatabaseServer
from tao.storage.accounts import Account
from tao.watcher import replication_set
from tao.watcher.replication_set import ReplicationSet, SetAccounts

SERVERS = {region: DatabaseServer(name=f"{region}-db") for region in ("east", "west")}
DATABASE = Database(name="db", master_region="east", servers=SERVERS, shards=((0, 3),))


async def test_a_server_that_let_all_its_time_pass_is_not_waited_for_as_long_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A master that stands still is asked at several steps of its replacement."""
    given: list[float] = []

    async def hangs(*_: object, deadline: float) -> None:
        given.append(round(deadline - asyncio.get_running_loop().time(), 1))
        raise DeadlineExceeded("no greeting")

    monkeypatch.setattr(replication_set, "open_session", hangs)
    accounts, silent = SetAccounts(Account("tao_admin", "a"), Account("tao_replicator", "b")), set[str]()
    for _ in range(2):  # each step of a promotion has a set of its own, by the topology of the time
        members = ReplicationSet(DATABASE, accounts, seen_from="", statement_seconds=4.0, silent=silent)
        assert [member.state for member in await members.members()] == [None, None]
    assert given == [4.0, 4.0, 0.8, 0.8]
    assert silent == {"east-db", "west-db"}
