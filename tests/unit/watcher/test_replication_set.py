"""Looking at the servers of a set."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from tao.model.errors import DeadlineExceeded
from tao.model.ports import TopologyStore
from tao.model.topology import Database, DatabaseServer, Topology
from tao.storage.accounts import Account
from tao.watcher import replication_set
from tao.watcher.locks import FileLocks
from tao.watcher.promotion import Promoter
from tao.watcher.promotion_plan import PromotionRefused, Wish
from tao.watcher.replication_set import ReplicationSet, SetAccounts
from tao.watcher.settings import PromotionSettings

SERVERS = {region: DatabaseServer(name=f"{region}-db") for region in ("east", "west")}
DATABASE = Database(name="db", master_region="east", servers=SERVERS, shards=((0, 3),))
ACCOUNTS = SetAccounts(Account("tao_admin", "a"), Account("tao_replicator", "b"))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Which server was asked, and how many seconds it had: none answers."""
    asked: list[tuple[str, float]] = []

    async def hangs(_: object, name: str, __: object, *, deadline: float) -> None:
        asked.append((name, round(deadline - asyncio.get_running_loop().time(), 1)))
        raise DeadlineExceeded("no greeting")

    monkeypatch.setattr(replication_set, "open_session", hangs)
    return asked


async def test_a_server_that_let_all_its_time_pass_is_not_waited_for_as_long_again(
    given: list[tuple[str, float]],
) -> None:
    """A master that stands still is asked at several steps of its replacement."""
    silent = set[str]()
    for _ in range(2):  # each step of a promotion has a set of its own, by the topology of the time
        members = ReplicationSet(DATABASE, ACCOUNTS, seen_from="", statement_seconds=4.0, silent=silent)
        assert [member.state for member in await members.members()] == [None, None]
    assert given == [("east-db", 4.0), ("west-db", 4.0), ("east-db", 1.0), ("west-db", 1.0)]
    assert silent == {"east-db", "west-db"}


@pytest.mark.parametrize("lost", [False, True])
async def test_a_master_that_is_said_to_be_lost_has_been_waited_for(
    given: list[tuple[str, float]], tmp_path: Path, lost: bool
) -> None:
    class Store:
        async def load(self) -> Topology:
            return Topology(version=1, shards=4, regions=(), databases=(DATABASE,))

    settings = PromotionSettings(statement_seconds=4.0)
    promoter = Promoter(cast(TopologyStore, Store()), FileLocks(tmp_path / "topology.json"), ACCOUNTS, settings)
    with pytest.raises(PromotionRefused):
        await promoter.promote("db", Wish("west", master_lost=lost))
    assert given == [("east-db", 1.0 if lost else 4.0), ("west-db", 4.0)]
