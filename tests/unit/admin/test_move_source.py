"""Which server a move copies from, and when the copy is held up for the replicas of the source."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import msgspec
import pytest

from tao.admin.shard_mover import MoverAccounts, ShardMover
from tao.model.topology import Database, DatabaseServer
from tao.observability.logs import logger
from tao.replication.accounts import Account
from tao.replication.gtid import GtidSet
from tao.replication.locks import LockHold, LockLost
from tao.replication.promotion_plan import SetMember
from tao.replication.replication_set import ReplicationSet, SetAccounts
from tao.replication.server_statements import MemberState, ReplicationStatus
from tao.replication.shard_move import MoveSettings, ShardMoves
from tao.storage.dialect import Dialect

NOTHING = GtidSet(Dialect.MARIADB, "")
KEEPS_UP = ReplicationStatus("east-db:3306", True, True, False, 0, "", "", "")
DATABASE = Database(
    name="db",
    master_region="east",
    servers={region: DatabaseServer(name=f"{region}-db") for region in ("east", "west", "north")},
    shards=((0, 7),),
)


class Hold:
    """The lock of the move."""

    is_lost = False

    def check(self) -> None:
        if self.is_lost:
            raise LockLost("this process stood still")


class Source(ReplicationSet):
    """The servers of the source as they are found, one state after the other; the last one lasts."""

    def __init__(self, *found: dict[str, ReplicationStatus | None], database: Database = DATABASE) -> None:
        accounts = SetAccounts(Account("tao_admin", "a"), Account("tao_replicator", "r"))
        super().__init__(database, accounts, seen_from="east", statement_seconds=1.0)
        self._found = list(found)
        self.asked = 0

    async def members(self) -> list[SetMember]:
        self.asked += 1
        status = self._found.pop(0) if len(self._found) > 1 else self._found[0]
        master = SetMember("east-db", "east", state_of(None), is_master=True)
        others = [SetMember(f"{at}-db", at, None if each is None else state_of(each)) for at, each in status.items()]
        return [master, *others]


def state_of(following: ReplicationStatus | None) -> MemberState:
    return MemberState(following is not None, following, NOTHING, NOTHING)


def behind(seconds: int | None) -> ReplicationStatus:
    return replace(KEEPS_UP, lag_seconds=seconds)


@pytest.fixture
def hold() -> Hold:
    return Hold()


@pytest.fixture
def mover(hold: Hold) -> ShardMover:
    account = Account("tao", "secret")
    moves: ShardMoves = cast("ShardMoves", None)  # nothing of it is used here
    mover = ShardMover(moves, MoveSettings(max_lag_seconds=5), MoverAccounts(account, account), logger("test"))
    mover._hold = cast("LockHold", hold)
    return mover


@pytest.mark.parametrize(
    ("west", "north", "copied"),
    [
        (KEEPS_UP, KEEPS_UP, "west"),
        (behind(1), KEEPS_UP, "north"),
        (replace(KEEPS_UP, receiving=False), KEEPS_UP, "north"),
        (replace(KEEPS_UP, applying=False), KEEPS_UP, "north"),
        (None, KEEPS_UP, "north"),
        (behind(1), behind(2), "east"),
        (None, replace(KEEPS_UP, receiving=False), "east"),
    ],
)
async def test_a_copy_is_read_from_a_replica_that_keeps_up_else_from_the_master(
    mover: ShardMover, west: ReplicationStatus | None, north: ReplicationStatus | None, copied: str
) -> None:
    assert await mover._region_to_copy(Source({"west": west, "north": north})) == copied


async def test_a_copy_is_not_read_from_a_replica_that_is_marked_or_being_seeded(mover: ShardMover) -> None:
    marked = msgspec.structs.replace(DATABASE.servers["west"], down=True)
    database = msgspec.structs.replace(DATABASE, servers={**DATABASE.servers, "west": marked})
    status: dict[str, ReplicationStatus | None] = {"west": KEEPS_UP, "north": KEEPS_UP}
    assert await mover._region_to_copy(Source(status, database=database)) == "north"

    class Seeded(Source):
        async def members(self) -> list[SetMember]:
            return [
                replace(each, state=replace(each.state, seeding=True)) if each.region == "west" and each.state else each
                for each in await Source.members(self)
            ]

    assert await mover._region_to_copy(Seeded(status)) == "north"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Let pauses take no time, and count them."""
    count = 0
    sleep = asyncio.sleep

    async def pause(_: float) -> None:
        nonlocal count
        count += 1
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", pause)
    return lambda: count


async def test_a_copy_pauses_until_no_replica_of_the_source_is_far_behind(
    mover: ShardMover, pauses: Callable[[], int]
) -> None:
    source = Source(
        {"west": behind(6), "north": KEEPS_UP},
        {"west": KEEPS_UP, "north": behind(60)},
        {"west": behind(5), "north": behind(5)},
    )
    await mover._wait_for_replicas(source, [0.0])
    assert (source.asked, pauses()) == (3, 2)


@pytest.mark.parametrize("status", [None, replace(KEEPS_UP, applying=False, lag_seconds=60), behind(None)])
async def test_a_copy_does_not_wait_for_a_replica_that_applies_nothing_or_is_away(
    mover: ShardMover, pauses: Callable[[], int], status: ReplicationStatus | None
) -> None:
    source = Source({"west": status})
    await mover._wait_for_replicas(source, [0.0])
    assert (source.asked, pauses()) == (1, 0)


async def test_the_replicas_are_asked_once_a_second(mover: ShardMover) -> None:
    source, checked_at = Source({"west": KEEPS_UP}), [0.0]
    for _ in range(3):
        await mover._wait_for_replicas(source, checked_at)
    assert source.asked == 1
    checked_at[0] -= 1.0
    await mover._wait_for_replicas(source, checked_at)
    assert source.asked == 2


async def test_a_copy_ends_when_another_process_may_be_moving_the_shard(mover: ShardMover, hold: Hold) -> None:
    hold.is_lost = True
    with pytest.raises(LockLost):
        await mover._wait_for_replicas(Source({"west": KEEPS_UP}), [0.0])
