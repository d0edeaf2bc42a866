"""`tao replicate` plans what each database server needs, and refuses what would lose writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tao.admin import replication
from tao.admin.replication import (
    ATTACH,
    NOTHING_TO_DO,
    OPEN,
    Replica,
    ReplicationAccounts,
    apply_replication,
    plan_replication,
)
from tao.model.errors import OperatorError, TopologyError
from tao.model.topology import CacheServer, Database, DatabaseAddress, DatabaseServer, Region, Tier, Topology
from tao.replication.accounts import Account
from tao.replication.gtid import GtidSet
from tao.replication.locks import FileLocks, LockTaken, mastership_lock
from tao.replication.server_statements import MemberState, ReplicationStatus
from tao.storage.dialect import Dialect
from tao.topology import edits
from tao.topology.document import dump_topology
from tao.topology.file_store import TopologyFile

SOURCE = "gateway:4306"
"""The master, as the region west reaches it."""


def region(name: str) -> Region:
    tiers = [Tier(name=tier, servers=(CacheServer(name=f"{name}-{tier}", grpc="h:1"),)) for tier in ("leaders", "near")]
    return Region(name=name, leaders=tiers[0], followers=(tiers[1],))


EAST = DatabaseServer(
    name="east-db", host="east", port=3306, reached_from={"west": DatabaseAddress(host="gateway", port=4306)}
)
WEST = DatabaseServer(name="west-db", host="west", port=3306)
TOPOLOGY = Topology(
    version=1,
    shards=2,
    regions=(region("east"), region("west")),
    databases=(Database(name="db", master_region="east", servers={"east": EAST, "west": WEST}, shards=((0, 1),)),),
)


def member(executed: str = "", *, follows: str = "", read_only: bool = False, applying: bool = True) -> MemberState:
    has = GtidSet(Dialect.MARIADB, executed)
    status = ReplicationStatus(
        source=follows, receiving=True, applying=applying, stopped=not applying, lag_seconds=0, received=executed,
        executed=executed, error="",
    )  # fmt: skip
    return MemberState(read_only=read_only, following=status if follows else None, executed=has, received=has)


def actions(master: MemberState, replica: MemberState, *, anew: bool = False) -> list[str]:
    return [step.action for step in plan_replication(TOPOLOGY, {"east-db": master, "west-db": replica}, anew=anew)]


def test_a_fresh_replica_is_attached_and_a_closed_master_opened() -> None:
    assert actions(member("1-1-9"), member(read_only=True)) == [NOTHING_TO_DO, ATTACH]
    assert actions(member("1-1-9", read_only=True), member(read_only=True)) == [OPEN, ATTACH]


def test_replicas_that_follow_already_are_left_alone_unless_anew_is_given() -> None:
    replica = member("1-1-7", follows=SOURCE, read_only=True)
    assert actions(member("1-1-9"), replica) == [NOTHING_TO_DO, NOTHING_TO_DO]
    assert actions(member("1-1-9"), replica, anew=True) == [NOTHING_TO_DO, ATTACH]


@pytest.mark.parametrize(
    "replica",
    [
        member("1-1-7", follows="east:3306", read_only=True),
        member("1-1-7", follows=SOURCE, read_only=False),
        member("1-1-7", follows=SOURCE, read_only=True, applying=False),
    ],
    ids=["of another address", "open to writes", "stopped"],
)
def test_a_replica_that_does_not_follow_properly_is_attached(replica: MemberState) -> None:
    assert actions(member("1-1-9"), replica) == [NOTHING_TO_DO, ATTACH]


def test_a_master_that_follows_another_server_is_refused() -> None:
    with pytest.raises(OperatorError, match="east-db as master of db, but it follows west:3306"):
        actions(member("1-1-9", follows="west:3306", read_only=True), member("1-1-9"))


def test_a_replica_with_transactions_of_its_own_is_refused_before_anything_is_done() -> None:
    with pytest.raises(OperatorError, match=r"west-db has transactions that its master east-db lacks \(1-2-"):
        actions(member("1-1-4"), member("1-1-4,1-2-5", read_only=True))


class Servers:
    """The closed master and the fresh replica of a topology in a file. What is done to them is noted, and whether
    a watcher could hold their lock then."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(error: TopologyError) -> None:
            raise error

        path.write_text(dump_topology(TOPOLOGY))
        self.store = TopologyFile(path, on_error=fail)
        self.locks = FileLocks(path)
        self.states = {"east-db": member("1-1-9", read_only=True), "west-db": member(read_only=True)}
        self.done = list[str]()
        monkeypatch.setattr(replication, "member", self._member)
        monkeypatch.setattr(replication, "lead", self._lead)
        monkeypatch.setattr(replication, "follow", self._follow)

    async def apply(self) -> None:
        steps = plan_replication(TOPOLOGY, self.states)
        account = Account("nobody", "x")
        await apply_replication(self.store, self.locks, steps, ReplicationAccounts(account, account), anew=False)

    async def _member(self, server: DatabaseServer, _: Account) -> MemberState:
        return self.states[server.name]

    async def _lead(self, server: DatabaseServer, _: Account) -> None:
        await self._note(f"{server.name} leads")

    async def _follow(self, replica: Replica, _: Account, __: Account) -> None:
        await self._note(f"{replica.server.name} follows {replica.master.name}")

    async def _note(self, what: str) -> None:
        with pytest.raises(LockTaken):
            async with self.locks.held(mastership_lock("db"), exclusive=False):
                self.done.append(f"without the lock: {what}")
        self.done.append(what)


async def test_servers_are_changed_under_the_lock_of_their_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = Servers(tmp_path / "topology.json", monkeypatch)
    await servers.apply()
    assert servers.done == ["east-db leads", "west-db follows east-db"]


async def test_after_a_promotion_nothing_is_done_by_the_plan_from_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = Servers(tmp_path / "topology.json", monkeypatch)
    await servers.store.change(1, edits.promote(TOPOLOGY, "db", "west", 2))
    servers.states["east-db"] = member("1-1-9", read_only=True)
    servers.states["west-db"] = member("1-1-9")
    with pytest.raises(OperatorError, match="changed meanwhile"):
        await servers.apply()
    assert servers.done == []
