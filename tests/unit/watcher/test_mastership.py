"""What the active watcher does, by what it sees."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from structlog.testing import capture_logs

from tao.model.ports import Clock
from tao.model.topology import Database, DatabaseServer
from tao.observability.logs import logger
from tao.runtime.clock import LoopClock
from tao.runtime.tasks import BackgroundTasks
from tao.storage.accounts import Account
from tao.watcher.locks import FileLocks
from tao.watcher.mastership import Deed, Mastership, Sight, next_deed
from tao.watcher.peers import PeerViews
from tao.watcher.promotion import Promoted, Promoter
from tao.watcher.promotion_plan import Member
from tao.watcher.replication_set import ReplicationSet, SetAccounts
from tao.watcher.settings import WatcherSettings
from tests.rigs.pacing import ManualClock
from tests.unit.watcher.members import master, replica


def deed(
    *members: Member,
    silent: float = 0.0,
    closed: int = 0,
    vouched: bool = False,
    promote: bool = True,
    rejoin: bool = False,
    semi_sync: bool = False,
    acknowledging: Sequence[str] = (),
) -> tuple[Deed, str]:
    return next_deed(
        Sight(members, silent, closed, vouched, semi_sync, acknowledging),
        gone_seconds=5.0,
        auto_promote=promote,
        auto_rejoin=rejoin,
    )


def test_a_healthy_set_needs_nothing() -> None:
    assert deed(master("1-1-1"), replica("west", "1-1-1", receiving=True)) == (Deed.NOTHING, "")


def test_a_master_is_replaced_only_when_it_has_been_silent_for_long() -> None:
    gone = (master(None), replica("west", "1-1-1"))
    assert deed(*gone, silent=4.9)[0] is Deed.NOTHING
    assert deed(*gone, silent=5.0)[0] is Deed.PROMOTE
    assert deed(*gone, silent=500.0, promote=False)[0] is Deed.NOTHING
    assert deed(master(None), silent=500.0)[0] is Deed.NOTHING, "there is nobody to promote"


def test_a_master_that_its_own_region_sees_well_is_cut_off_and_not_lost() -> None:
    assert deed(master(None), replica("west", "1-1-1"), silent=60.0, vouched=True)[0] is Deed.NOTHING


def test_a_master_found_closed_twice_is_opened() -> None:
    closed = (master("1-1-1", closed=True), replica("west", "1-1-1"))
    assert deed(*closed, closed=1)[0] is Deed.NOTHING
    assert deed(*closed, closed=2)[0] is Deed.RESTORE


def test_a_server_that_follows_nobody_is_brought_back_only_where_that_is_wanted() -> None:
    alone = (master("1-1-1"), replica("west", "1-1-1", alone=True))
    assert deed(*alone)[0] is Deed.NOTHING
    assert deed(*alone, rejoin=True) == (Deed.REJOIN, "west-db")
    seeding = replica("west", "", alone=True, seeding=True)
    assert deed(master("1-1-1"), seeding, rejoin=True)[0] is Deed.NOTHING, "somebody is at it"


def test_a_master_waits_again_as_soon_as_there_is_a_replica_to_wait_for() -> None:
    west = replica("west", "1-1-1", receiving=True, acknowledges=True)
    unsafe, there = (master("1-1-1"), west), ("west-db",)
    assert deed(*unsafe, semi_sync=True, acknowledging=there) == (Deed.WAIT, "")
    assert deed(*unsafe, semi_sync=True)[0] is Deed.NOTHING, "every write would stand still"
    assert deed(*unsafe, acknowledging=there)[0] is Deed.NOTHING, "the topology does not want it"
    safe = (master("1-1-1", waits=True), west)
    assert deed(*safe, semi_sync=True, acknowledging=there)[0] is Deed.NOTHING
    closed = (master("1-1-1", closed=True), west)
    assert deed(*closed, closed=2, semi_sync=True, acknowledging=there)[0] is Deed.RESTORE, "which sees to it as well"
    astray = replica("north", "1-1-1", alone=True)
    assert deed(*unsafe, astray, semi_sync=True, acknowledging=there, rejoin=True)[0] is Deed.WAIT, "which is quick"
    assert deed(master(None), west, semi_sync=True, acknowledging=there)[0] is Deed.NOTHING


class Broken(Promoter):
    """It fails in a way that nobody has thought of."""

    def __init__(self) -> None:
        pass

    async def restore(self, database: str) -> Promoted:
        raise KeyError(database)


class Mine:
    """The lock of the watcher that acts."""

    def is_mine(self) -> bool:
        return True

    def check(self) -> None: ...

    def beat(self) -> None: ...


def mastership_of(folder: Path, promoter: Promoter, tasks: BackgroundTasks, clock: Clock) -> Mastership:
    settings = WatcherSettings(
        name="watcher", region="east", topology_file=folder / "t", administrator_password="a", replicator_password="b"
    )
    mastership = Mastership(
        settings,
        promoter,
        FileLocks(settings.topology_file),
        PeerViews({}, settings.probes),
        lambda server: 0.0,
        tasks,
        clock,
        logger("watcher"),
    )
    mastership.activity = Mine()
    return mastership


def east_and_west(*, semi_sync: bool = False) -> ReplicationSet:
    servers = {region: DatabaseServer(name=f"{region}-db", host="127.0.0.1", port=1) for region in ("east", "west")}
    database = Database(name="db", master_region="east", servers=servers, shards=((0, 1),), semi_sync=semi_sync)
    account = Account("tao_admin", "secret")
    return ReplicationSet(database, SetAccounts(account, account), seen_from="", statement_seconds=1.0)


async def test_a_deed_that_fails_unforeseen_is_told_counted_and_tried_again(tmp_path: Path) -> None:
    tasks = BackgroundTasks("watcher", logger("watcher"))
    clock = LoopClock()
    mastership = mastership_of(tmp_path, Broken(), tasks, clock)
    closed = [master("1-1-1", closed=True), replica("west", "1-1-1")]
    with capture_logs() as logs:
        for failed in (1, 2):
            while mastership.failed_deeds < failed:
                mastership.looked(east_and_west(), closed, clock.monotonic())
                await asyncio.sleep(0)
        await tasks.close()
    assert len([each for each in logs if each["event"] == "background task failed"]) >= 2
    assert tasks.failed == mastership.failed_deeds


async def test_what_was_seen_before_a_deed_was_done_is_no_reason_for_another(tmp_path: Path) -> None:
    done = asyncio.Event()

    class Slow(Broken):
        async def wait_for_replicas(self, database: str) -> None:
            await done.wait()

    tasks, clock = BackgroundTasks("watcher", logger("watcher")), ManualClock()
    mastership = mastership_of(tmp_path, Slow(), tasks, clock)
    unsafe = [master("1-1-1"), replica("west", "1-1-1", receiving=True, acknowledges=True)]
    replicas = east_and_west(semi_sync=True)
    mastership.looked(replicas, unsafe, clock.monotonic())
    clock.now += 1
    before = clock.monotonic()
    clock.now += 1
    done.set()
    await turns()
    assert mastership.deeds["wait"] == 1
    for began, deeds in ((before, 1), (clock.monotonic(), 2)):
        mastership.looked(replicas, unsafe, began)
        await turns()
        assert mastership.deeds["wait"] == deeds
    await tasks.close()


async def turns() -> None:
    """Of the loop, more than a deed takes here."""
    for _ in range(10):
        await asyncio.sleep(0)
