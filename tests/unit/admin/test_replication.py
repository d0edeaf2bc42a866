"""`tao replicate` plans what each database server needs, and refuses what would lose writes."""

from __future__ import annotations

import pytest

from tao.admin.replication import ATTACH, NOTHING_TO_DO, OPEN, plan_replication
from tao.model.errors import OperatorError
from tao.model.topology import CacheServer, Database, DatabaseAddress, DatabaseServer, Region, Tier, Topology
from tao.replication.gtid import GtidSet
from tao.replication.server_statements import MemberState, ReplicationStatus
from tao.storage.dialect import Dialect

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
