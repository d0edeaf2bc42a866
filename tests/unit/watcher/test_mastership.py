"""What the active watcher does, by what it sees."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

import tao.watcher.mastership as mastership_module
from tao.model.errors import Unavailable
from tao.model.ports import Clock
from tao.model.topology import Database, DatabaseServer, Topology
from tao.observability.logs import logger
from tao.replication.accounts import Account
from tao.replication.lease import EVENT_SECONDS, LeaseTerms
from tao.replication.locks import FileLocks, LockHold, Locks, LocksAway, LockTerms
from tao.replication.promotion import Promoter, PromotionResult
from tao.replication.promotion_plan import Heard, PromotionRequest, SetMember
from tao.replication.replication_set import ReplicationSet, SetAccounts
from tao.runtime.clock import LoopClock
from tao.runtime.tasks import BackgroundTasks
from tao.serving.audit import AuditTrail
from tao.watcher.mastership import Action, Mastership, Observation, next_action
from tao.watcher.probes import PeerReports, WatcherContext
from tao.watcher.settings import LeaseSettings, ProbeSettings, WatcherSettings
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings
from tests.rigs.audit_rig import audit_rig
from tests.rigs.pacing import ManualClock
from tests.unit.replication.members import master, replica


def action(
    *members: SetMember,
    silent: float = 0.0,
    closed: int = 0,
    seen_by_its_region: bool = False,
    promote: bool = True,
    rejoin: bool = False,
    semi_sync: bool = False,
    acknowledging: Sequence[str] = (),
    lost_acknowledgements: int = 0,
    waited: bool = False,
    leases: bool = True,
    dead: bool = False,
    marked: Collection[str] = (),
    silent_in_its_region: bool = False,
    unheard: bool = False,
) -> tuple[Action, str]:
    return next_action(
        Observation(
            members,
            silent,
            closed,
            seen_by_its_region,
            semi_sync,
            acknowledging,
            lost_acknowledgements,
            waited,
            dead,
            marked,
            silent_in_its_region,
            unheard,
        ),
        probes=ProbeSettings(),
        auto_promote=promote,
        auto_rejoin=rejoin,
        leases=leases,
    )


def opened(member: SetMember) -> SetMember:
    assert member.state is not None
    return dataclasses.replace(member, state=dataclasses.replace(member.state, read_only=False))


def test_a_healthy_set_needs_nothing() -> None:
    assert action(master("1-1-1"), replica("west", "1-1-1", receiving=True)) == (Action.NOTHING, "")


def test_a_master_is_replaced_only_when_it_has_been_silent_for_long() -> None:
    gone = (master(None), replica("west", "1-1-1"))
    assert action(*gone, silent=4.9)[0] is Action.NOTHING
    assert action(*gone, silent=5.0)[0] is Action.PROMOTE
    assert action(*gone, silent=500.0, promote=False)[0] is Action.NOTHING
    assert action(master(None), silent=500.0)[0] is Action.NOTHING, "there is nobody to promote"


def test_a_master_whose_process_is_dead_is_replaced_at_once_if_nothing_is_lost_with_it() -> None:
    gone = (master(None), replica("west", "1-1-1"))
    assert action(*gone, silent=1.2, dead=True, semi_sync=True, waited=True)[0] is Action.PROMOTE
    assert action(*gone, silent=1.2, dead=True, semi_sync=True)[0] is Action.NOTHING, "it may be back with more"
    assert action(*gone, silent=1.2, dead=True, waited=True)[0] is Action.NOTHING
    assert action(*gone, silent=1.2, semi_sync=True, waited=True)[0] is Action.NOTHING, "it may only be slow"
    seen = action(*gone, silent=1.2, dead=True, semi_sync=True, waited=True, seen_by_its_region=True)
    assert seen[0] is Action.NOTHING


def test_a_master_that_hangs_is_replaced_sooner_than_one_that_may_be_cut_off_if_nothing_is_lost_with_it() -> None:
    gone = (master(None), replica("west", "1-1-1", receiving=True))

    def hangs(*members: SetMember, silent: float = 1.8, waited: bool = True, beside: bool = True) -> Action:
        return action(*members, silent=silent, semi_sync=True, waited=waited, silent_in_its_region=beside)[0]

    assert hangs(*gone) is Action.PROMOTE
    assert hangs(*gone, silent=1.7) is Action.NOTHING, "it pauses"
    assert hangs(*gone, beside=False) is Action.NOTHING, "its region may be cut off for a moment"
    assert hangs(*gone, waited=False) is Action.NOTHING, "it may be back with more"
    assert action(*gone, silent=2.0, waited=True, silent_in_its_region=True)[0] is Action.NOTHING, "asynchronous"
    marked = action(*gone, silent=2.0, semi_sync=True, waited=True, silent_in_its_region=True, marked=["west-db"])[0]
    assert marked is Action.NOTHING, "it would not be renewed during the whole lease"
    assert hangs(*gone, replica("north", None)) is Action.NOTHING


def test_a_master_that_its_own_region_sees_well_is_cut_off_and_not_lost() -> None:
    assert action(master(None), replica("west", "1-1-1"), silent=60.0, seen_by_its_region=True)[0] is Action.NOTHING


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("waited", [False, True])
@pytest.mark.parametrize("leases", [False, True])
def test_a_watcher_that_is_refused_promotes_nobody(dead: bool, waited: bool, leases: bool) -> None:
    """The master is there that refuses it, and may be there where only the watchers refuse it that see the master."""
    refusing = dataclasses.replace(master(None), refuses=True)
    silent = master(None)
    for lost, unheard in ((refusing, False), (silent, True), (refusing, True)):
        found = action(
            lost, replica("west", "1-1-1"), silent=500.0, semi_sync=waited, waited=waited, leases=leases, dead=dead,
            unheard=unheard,
        )  # fmt: skip
        assert found == (Action.NOTHING, "")
    usual = action(silent, replica("west", "1-1-1"), silent=500.0, semi_sync=waited, waited=waited)
    assert usual == (Action.PROMOTE, "")


def test_without_leases_a_master_is_replaced_only_if_it_was_last_seen_to_wait_for_a_replica() -> None:
    gone = (master(None), replica("west", "1-1-1"))
    assert action(*gone, silent=5.0, leases=False, semi_sync=True, waited=True)[0] is Action.PROMOTE
    assert action(*gone, silent=500.0, leases=False, semi_sync=True)[0] is Action.NOTHING, (
        "it may acknowledge writes that nobody receives"
    )
    assert action(*gone, silent=500.0, leases=False, waited=True)[0] is Action.NOTHING
    assert action(*gone, silent=5.0, semi_sync=True)[0] is Action.PROMOTE, "its lease has closed it"


def test_the_replicas_of_a_master_that_refuses_the_watcher_are_given_back_when_a_promotion_has_left_them_stopped() -> (
    None
):
    refusing = dataclasses.replace(master(None), refuses=True)
    stopped, gone = replica("west", "1-1-1", stopped=True), replica("west", "1-1-1", alone=True)
    north = replica("north", "1-1-1", receiving=True)
    assert action(refusing, stopped, semi_sync=True) == (Action.RESTORE, "")
    assert action(refusing, stopped, gone, semi_sync=True) == (Action.RESTORE, "")
    assert action(refusing, stopped, north, semi_sync=True)[0] is Action.NOTHING, "a replica acknowledges"
    assert action(refusing, stopped, semi_sync=True, marked={"west-db"})[0] is Action.NOTHING, "an operator stopped it"
    assert action(refusing, gone, semi_sync=True)[0] is Action.NOTHING, "it may have another history"
    assert action(refusing, stopped)[0] is Action.NOTHING, "its commits wait for nobody"
    assert action(master(None), stopped, semi_sync=True)[0] is Action.NOTHING, "it does not answer"


def test_a_master_found_closed_twice_is_opened() -> None:
    closed = (master("1-1-1", closed=True), replica("west", "1-1-1"))
    assert action(*closed, closed=1)[0] is Action.NOTHING
    assert action(*closed, closed=2)[0] is Action.RESTORE


def test_a_master_that_waits_for_a_replica_while_nobody_follows_it_gets_its_replicas_back() -> None:
    """So a promotion leaves it that failed when the others had been detached."""
    waiting, west = master("1-1-7", waits=True), replica("west", "1-1-7", alone=True)
    assert action(waiting, west, semi_sync=True) == (Action.RESTORE, "")
    assert action(waiting, west, replica("north", None), semi_sync=True)[0] is Action.RESTORE
    north = replica("north", "1-1-7", receiving=True)
    assert action(waiting, west, north, semi_sync=True)[0] is Action.NOTHING
    assert action(master("1-1-7"), west, semi_sync=True)[0] is Action.NOTHING, "its last replica was taken away"
    astray = replica("west", "1-1-7,2-2-9", alone=True)
    assert action(waiting, astray, semi_sync=True)[0] is Action.FINISH, "it cannot follow, and was perhaps promoted"
    assert action(waiting, astray, north, semi_sync=True)[0] is Action.NOTHING
    seeding = replica("west", "1-1-7", alone=True, seeding=True)
    assert action(waiting, seeding, semi_sync=True)[0] is Action.NOTHING, "somebody is at it"


def test_a_master_that_waits_for_replicas_that_a_failed_promotion_has_stopped_gets_them_back() -> None:
    waiting, west = master("1-1-7", waits=True), replica("west", "1-1-7", stopped=True)
    assert action(waiting, west, semi_sync=True) == (Action.RESTORE, "")
    assert action(waiting, west, replica("north", "1-1-7", alone=True), semi_sync=True)[0] is Action.RESTORE
    broken = replica("north", "1-1-7", failed=True)
    assert action(waiting, west, broken, semi_sync=True)[0] is Action.RESTORE, "commits need one replica"
    assert action(waiting, broken, semi_sync=True)[0] is Action.NOTHING, "it would fail again"
    for north in (replica("north", "1-1-7", receiving=True), replica("north", "1-1-7")):
        assert action(waiting, west, north, semi_sync=True)[0] is Action.NOTHING, "it receives, or tries to"
    assert action(master("1-1-7"), west, semi_sync=True)[0] is Action.NOTHING, "its last replica was taken away"
    assert action(waiting, west, semi_sync=True, marked=["west-db"])[0] is Action.NOTHING, "an operator is at it"
    astray = replica("west", "1-1-7,2-2-9", stopped=True)
    assert action(waiting, astray, semi_sync=True)[0] is Action.NOTHING, "it cannot follow"


async def test_a_replica_that_was_stopped_by_hand_is_left_alone_once_it_is_marked(tmp_path: Path) -> None:
    restored = list[str]()

    class Restoring(Broken):
        async def restore(self, database: str) -> PromotionResult:
            restored.append(database)
            raise Unavailable("not in this test")

    tasks, clock = BackgroundTasks("watcher", logger("watcher")), ManualClock()
    mastership = mastership_of(tmp_path, Restoring(), tasks, clock)
    members = [master("1-1-1", waits=True), replica("west", "1-1-1", stopped=True)]
    for marked, expected in (("west", []), ("", ["db"])):
        replicas = set_of(["east", "west"], semi_sync=True, marked=marked)
        mastership.observe(replicas, members, clock.monotonic())
        await turns()
        assert restored == expected
    await tasks.close()


def test_a_server_that_replicates_from_no_master_is_rejoined_only_when_enabled() -> None:
    alone = (master("1-1-1"), replica("west", "1-1-1", alone=True))
    assert action(*alone)[0] is Action.NOTHING
    assert action(*alone, rejoin=True) == (Action.REJOIN, "west-db")
    seeding = replica("west", "", alone=True, seeding=True)
    assert action(master("1-1-1"), seeding, rejoin=True)[0] is Action.NOTHING, "somebody is at it"
    refused = replica("west", "1-1-1,2-2-9", alone=True)
    assert action(master("1-1-1"), refused, rejoin=True)[0] is Action.NOTHING, "it is closed, and cannot follow"
    assert action(master("1-1-1"), opened(refused), rejoin=True) == (Action.REJOIN, "west-db"), "which closes it"


def test_a_master_waits_again_as_soon_as_there_is_a_replica_to_wait_for() -> None:
    west = replica("west", "1-1-1", receiving=True, acknowledges=True)
    unsafe, there = (master("1-1-1"), west), ("west-db",)
    assert action(*unsafe, semi_sync=True, acknowledging=there) == (Action.WAIT, "")
    assert action(*unsafe, semi_sync=True)[0] is Action.NOTHING, "every write would stand still"
    assert action(*unsafe, acknowledging=there)[0] is Action.NOTHING, "the topology does not want it"
    safe = (master("1-1-1", waits=True), west)
    assert action(*safe, semi_sync=True, acknowledging=there)[0] is Action.NOTHING
    closed = (master("1-1-1", closed=True), west)
    assert action(*closed, closed=2, semi_sync=True, acknowledging=there)[0] is Action.RESTORE, (
        "which sees to it as well"
    )
    astray = replica("north", "1-1-1", alone=True)
    assert action(*unsafe, astray, semi_sync=True, acknowledging=there, rejoin=True)[0] is Action.WAIT, "which is quick"
    assert action(master(None), west, semi_sync=True, acknowledging=there)[0] is Action.NOTHING


def test_the_waits_of_commits_that_a_replica_has_are_ended_once_they_were_seen_twice() -> None:
    stuck = (master("1-1-7", waits=True, waiting=1), replica("west", "1-1-7", receiving=True, acknowledges=True))
    assert action(*stuck, semi_sync=True, lost_acknowledgements=1)[0] is Action.NOTHING, "it may be on its way"
    assert action(*stuck, semi_sync=True, lost_acknowledgements=2) == (Action.END_WAITS, "")


class Broken(Promoter):
    """It fails in a way that nobody has thought of."""

    def __init__(self) -> None:
        pass

    async def restore(self, database: str) -> PromotionResult:
        raise KeyError(database)


class HeldLock:
    """The lock of the watcher that acts."""

    def is_held(self) -> bool:
        return True

    def check(self) -> None: ...

    async def touch(self) -> None: ...


def mastership_of(
    folder: Path,
    promoter: Promoter,
    tasks: BackgroundTasks,
    clock: Clock,
    silent_seconds: Callable[[str], float] = lambda server: 0.0,
    *,
    leases: bool = True,
    auto_rejoin: bool = False,
    locks: Locks | None = None,
    audit: AuditTrail | None = None,
) -> Mastership:
    settings = WatcherSettings(
        name="watcher",
        region="east",
        topology_file=folder / "t",
        administrator_user="tao_admin",
        administrator_password="a",
        replicator_password="b",
        leases=leases,
        auto_rejoin=auto_rejoin,
    )
    mastership = Mastership(
        settings,
        promoter,
        locks or FileLocks(folder / "t"),
        PeerReports(
            Links(LinkSettings(), Credentials("watcher", "watcher")),
            lambda: Topology(version=1, shards=1, regions=(), databases=()),
            "east",
            settings.probes,
        ),
        silent_seconds,
        WatcherContext(tasks, clock, logger("watcher"), audit or AuditTrail()),
    )
    mastership.activity = HeldLock()
    return mastership


def one_server() -> ReplicationSet:
    return set_of(["east"])


def east_and_west(*, semi_sync: bool = False) -> ReplicationSet:
    return set_of(["east", "west"], semi_sync=semi_sync)


def set_of(
    regions: Sequence[str], *, semi_sync: bool = False, marked: str = "", master: str = "east"
) -> ReplicationSet:
    servers = {
        region: DatabaseServer(name=f"{region}-db", host="127.0.0.1", port=1, down=region == marked)
        for region in regions
    }
    database = Database(name="db", master_region=master, servers=servers, shards=((0, 1),), semi_sync=semi_sync)
    account = Account("tao_admin", "secret")
    return ReplicationSet(database, SetAccounts(account, account), seen_from="", statement_seconds=1.0)


async def test_an_action_that_fails_unexpectedly_is_logged_counted_and_retried(tmp_path: Path) -> None:
    tasks = BackgroundTasks("watcher", logger("watcher"))
    clock = LoopClock()
    mastership = mastership_of(tmp_path, Broken(), tasks, clock)
    closed = [master("1-1-1", closed=True), replica("west", "1-1-1")]
    with capture_logs() as logs:
        for failed in (1, 2):
            while mastership.failed_actions < failed:
                mastership.observe(east_and_west(), closed, clock.monotonic())
                await asyncio.sleep(0)
        await tasks.close()
    assert len([each for each in logs if each["event"] == "background task failed"]) >= 2
    assert tasks.failed == mastership.failed_actions


async def test_actions_are_audited_with_their_outcome_and_a_failure_that_repeats_once(tmp_path: Path) -> None:
    class Refusing(Broken):
        async def restore(self, database: str) -> PromotionResult:
            raise Unavailable("not yet")

        async def wait_for_replicas(self, database: str) -> None: ...

    tasks, clock = BackgroundTasks("watcher", logger("watcher")), ManualClock()
    with audit_rig(tmp_path) as audit:
        mastership = mastership_of(tmp_path, Refusing(), tasks, clock, audit=audit.trail)
        west = replica("west", "1-1-1", receiving=True, acknowledges=True)
        for _ in range(4):
            mastership.observe(east_and_west(), [master("1-1-1", closed=True), west], clock.monotonic())
            await turns()
        mastership.observe(east_and_west(semi_sync=True), [master("1-1-1"), west], clock.monotonic())
        await turns()
        assert mastership.failed_actions > 1
        assert await audit.shown() == [("server/leader-1", "restore", 2), ("server/leader-1", "wait", 1)]
        failed, done = await audit.records()
        assert (failed["status_code"], failed["unmapped"]["database"]) == ("UNAVAILABLE", "db")
        assert done["unmapped"]["database"] == "db"
    await tasks.close()


async def test_what_was_seen_before_an_action_was_completed_is_no_reason_for_another(tmp_path: Path) -> None:
    done = asyncio.Event()

    class Slow(Broken):
        async def wait_for_replicas(self, database: str) -> None:
            await done.wait()

    tasks, clock = BackgroundTasks("watcher", logger("watcher")), ManualClock()
    mastership = mastership_of(tmp_path, Slow(), tasks, clock)
    unsafe = [master("1-1-1"), replica("west", "1-1-1", receiving=True, acknowledges=True)]
    replicas = east_and_west(semi_sync=True)
    mastership.observe(replicas, unsafe, clock.monotonic())
    clock.now += 1
    before = clock.monotonic()
    clock.now += 1
    done.set()
    await turns()
    assert mastership.actions["wait"] == 1
    for began, actions in ((before, 1), (clock.monotonic(), 2)):
        mastership.observe(replicas, unsafe, began)
        await turns()
        assert mastership.actions["wait"] == actions
    await tasks.close()


async def test_waits_are_ended_only_where_nothing_was_committed_between_two_observations(tmp_path: Path) -> None:
    class Ending(Broken):
        async def end_lost_waits(self, database: str) -> None: ...

    tasks, clock = BackgroundTasks("watcher", logger("watcher")), ManualClock()
    mastership = mastership_of(tmp_path, Ending(), tasks, clock)
    replicas = east_and_west(semi_sync=True)

    async def observe(executed: str, *, waiting: int = 1) -> int:
        clock.now += 1
        west = replica("west", executed, receiving=True, acknowledges=True)
        mastership.observe(replicas, [master(executed, waits=True, waiting=waiting), west], clock.monotonic())
        await turns()
        return mastership.actions["end_waits"]

    for executed in ("1-1-1", "1-1-2", "1-1-3"):
        assert await observe(executed) == 0, "a master under load has waiting commits at all times"
    assert await observe("1-1-3", waiting=0) == 0
    assert await observe("1-1-3") == 0
    assert await observe("1-1-3") == 1
    await tasks.close()


@pytest.mark.parametrize(
    ("waits", "clients", "silent_seconds", "promotes"),
    [(True, 1, 5.0, True), (False, 1, 5.0, False), (True, 2, 5.0, False), (True, 1, 60.0, False)],
    ids=["waits", "waits for none", "waits for a stranger, perhaps", "waited long ago"],
)
async def test_without_leases_what_a_lost_master_was_seen_to_do_decides_and_not_what_the_topology_asks_of_it(
    tmp_path: Path, waits: bool, clients: int, silent_seconds: float, promotes: bool
) -> None:
    """Nothing but its replicas can fence it."""
    promoted: list[str] = []

    class Promoting(Broken):
        async def promote(self, database: str, *_: object, **__: object) -> PromotionResult:
            promoted.append(database)
            raise Unavailable("not in this test")

    tasks, clock, silent = BackgroundTasks("watcher", logger("watcher")), ManualClock(), {"east-db": 0.0}
    mastership = mastership_of(tmp_path, Promoting(), tasks, clock, silent.__getitem__, leases=False)
    west = replica("west", "1-1-1", receiving=True, acknowledges=True)
    replicas = east_and_west(semi_sync=True)
    with capture_logs() as logs:
        mastership.observe(replicas, [master("1-1-1", waits=not waits, clients=1), west], clock.monotonic())
        await turns()  # it is made to wait as soon as it does not
        mastership.observe(replicas, [master("1-1-1", waits=waits, clients=clients), west], clock.monotonic())
        await turns()
        silent["east-db"] = silent_seconds
        for _ in range(2):
            mastership.observe(replicas, [master(None), replica("west", "1-1-1")], clock.monotonic())
            await turns()
    assert promoted == ["db"] * (2 if promotes else 0)
    withheld = [each for each in logs if each["event"] == "promotion_withheld"]
    assert [each["target"] for each in withheld] == ([] if promotes else ["east-db"]), "said once"
    await tasks.close()


@pytest.mark.parametrize(
    ("silent_seconds", "seen", "answered"), [(5.0, False, False), (0.5, False, True), (5.0, True, True)]
)
async def test_a_promotion_learns_whether_its_master_has_answered_a_watcher_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_seconds: float, seen: bool, answered: bool
) -> None:
    """Late, or another watcher of its region: it is slow, and not lost."""
    said, silent = list[bool](), {"east-db": 5.0}

    class Asking(Broken):
        async def promote(
            self, database: str, *_: object, has_answered: Callable[[], bool] = lambda: False, **__: object
        ) -> PromotionResult:
            said.append(has_answered())
            clock.now += 1.0
            silent["east-db"] = silent_seconds
            monkeypatch.setattr(PeerReports, "says_up", lambda *_: seen)
            said.append(has_answered())
            raise Unavailable("not in this test")

    tasks, clock = BackgroundTasks("watcher", logger("watcher")), ManualClock()
    mastership = mastership_of(tmp_path, Asking(), tasks, clock, silent.__getitem__)
    mastership.observe(east_and_west(), [master(None), replica("west", "1-1-1")], clock.monotonic())
    await turns()
    assert said == [False, answered]
    await tasks.close()


async def test_a_promotion_is_given_what_each_replica_had_heard_when_it_heard_something_last(tmp_path: Path) -> None:
    heard = list[dict[str, Heard]]()

    class Promoting(Broken):
        async def promote(self, database: str, request: PromotionRequest, **_: object) -> PromotionResult:
            heard.append(dict(request.heard))
            raise Unavailable("not in this test")

    tasks, clock, silent = BackgroundTasks("watcher", logger("watcher")), ManualClock(), {"east-db": 0.0}
    mastership = mastership_of(tmp_path, Promoting(), tasks, clock, silent.__getitem__)
    replicas = east_and_west(semi_sync=True)
    for number, (mark, seen_at) in enumerate((("6", 1.0), ("7", 2.0), ("7", 3.0), ("7", 4.0))):
        west = replica("west", "1-1-1", receiving=True, heard=mark, seen_at=seen_at)
        silent["east-db"] = 2.0 if number == 3 else 0.0
        east = master("1-1-1" if number < 2 else None, waits=True)
        mastership.observe(replicas, [east, west], clock.monotonic())
        await turns()
    assert heard == [{"west-db": Heard("7", 2.0)}]
    await tasks.close()


@pytest.mark.parametrize(("clients", "fenced"), [(1, True), (2, False), (0, False)])
async def test_a_master_to_which_a_stranger_acknowledges_is_not_fenced_by_its_replicas(
    tmp_path: Path, clients: int, fenced: bool
) -> None:
    asked, silent = list[bool](), {"east-db": 0.0}
    tasks, clock = BackgroundTasks("watcher", logger("watcher")), ManualClock()
    mastership = mastership_of(tmp_path, asks(asked), tasks, clock, silent.__getitem__)
    replicas, west = east_and_west(semi_sync=True), replica("west", "1-1-1", receiving=True, acknowledges=True)
    mastership.observe(replicas, [master("1-1-1", waits=True, clients=clients), west], clock.monotonic())
    silent["east-db"] = 5.0
    mastership.observe(replicas, [master(None), replica("west", "1-1-1")], clock.monotonic())
    await turns()
    assert asked == [fenced]
    await tasks.close()


@pytest.mark.parametrize(
    ("clients", "west_answers", "earlier", "fenced"),
    [
        (1, False, True, True),  # the link to the replica is cut, and then the master dies
        (1, False, False, False),
        (2, False, True, False),  # one of them is a stranger
        (0, True, True, True),  # the link is cut between the answers of the two
    ],
)
async def test_an_observation_that_does_not_show_who_acknowledges_leaves_what_an_earlier_one_has_found(
    tmp_path: Path, clients: int, west_answers: bool, earlier: bool, fenced: bool
) -> None:
    asked, silent = list[bool](), {"east-db": 0.0}
    tasks, clock = BackgroundTasks("watcher", logger("watcher")), ManualClock()
    mastership = mastership_of(tmp_path, asks(asked), tasks, clock, silent.__getitem__)
    replicas, west = east_and_west(semi_sync=True), replica("west", "1-1-1", receiving=True, acknowledges=True)
    if earlier:
        mastership.observe(replicas, [master("1-1-1", waits=True, clients=1), west], clock.monotonic())
    then = west if west_answers else replica("west", None)
    mastership.observe(replicas, [master("1-1-1", waits=True, clients=clients), then], clock.monotonic())
    silent["east-db"] = 5.0
    mastership.observe(replicas, [master(None), replica("west", "1-1-1")], clock.monotonic())
    await turns()
    assert asked == [fenced]
    await tasks.close()


@pytest.mark.parametrize(("regions", "fenced"), [(["east", "west"], True), (["east", "north"], False)])
async def test_what_was_found_about_who_acknowledges_says_nothing_once_the_set_has_other_servers(
    tmp_path: Path, regions: list[str], fenced: bool
) -> None:
    """A server that was taken out of the topology may still acknowledge."""
    asked, silent = list[bool](), {"east-db": 0.0}
    tasks, clock = BackgroundTasks("watcher", logger("watcher")), ManualClock()
    mastership = mastership_of(tmp_path, asks(asked), tasks, clock, silent.__getitem__)
    waiting = master("1-1-1", waits=True, clients=1)
    west = replica("west", "1-1-1", receiving=True, acknowledges=True)
    mastership.observe(east_and_west(semi_sync=True), [waiting, west], clock.monotonic())
    changed = set_of(regions, semi_sync=True)
    mastership.observe(changed, [waiting, replica(regions[1], None)], clock.monotonic())
    silent["east-db"] = 5.0
    mastership.observe(changed, [master(None), replica(regions[1], "1-1-1")], clock.monotonic())
    await turns()
    assert asked == [fenced]
    await tasks.close()


async def test_what_was_seen_longer_ago_than_a_lease_lasts_says_nothing_of_who_acknowledges(tmp_path: Path) -> None:
    asked, silent = list[bool](), {"east-db": 0.0}
    tasks, clock = BackgroundTasks("watcher", logger("watcher")), ManualClock()
    mastership = mastership_of(tmp_path, asks(asked), tasks, clock, silent.__getitem__)
    replicas, west = east_and_west(semi_sync=True), replica("west", "1-1-1", receiving=True, acknowledges=True)
    mastership.observe(replicas, [master("1-1-1", waits=True, clients=1), west], clock.monotonic())
    clock.now += LeaseSettings().terms(semi_sync=True).over_after_seconds
    mastership.observe(replicas, [master("1-1-1", waits=True, clients=1), replica("west", None)], clock.monotonic())
    silent["east-db"] = 5.0
    mastership.observe(replicas, [master(None), replica("west", "1-1-1")], clock.monotonic())
    await turns()
    assert asked == [False]
    await tasks.close()


async def test_a_promotion_that_has_waited_for_its_lock_asks_again_what_is_known_of_acknowledgements(
    tmp_path: Path,
) -> None:
    said, silent = list[bool](), {"east-db": 0.0}

    class Late(Broken):
        async def promote(
            self,
            database: str,
            request: PromotionRequest,
            *,
            still_waits: Callable[[], bool] = lambda: True,
            **_: object,
        ) -> PromotionResult:
            said.extend((request.waited_for_replica, still_waits()))
            assert request.master == "east-db"
            clock.now += LeaseSettings().terms(semi_sync=True).over_after_seconds
            said.append(still_waits())
            raise Unavailable("not in this test")

    tasks, clock = BackgroundTasks("watcher", logger("watcher")), ManualClock()
    mastership = mastership_of(tmp_path, Late(), tasks, clock, silent.__getitem__)
    replicas, west = east_and_west(semi_sync=True), replica("west", "1-1-1", receiving=True, acknowledges=True)
    mastership.observe(replicas, [master("1-1-1", waits=True, clients=1), west], clock.monotonic())
    silent["east-db"] = 5.0
    mastership.observe(replicas, [master(None), replica("west", "1-1-1")], clock.monotonic())
    await turns()
    assert said == [True, True, False]
    await tasks.close()


def asks(asked: list[bool]) -> Promoter:
    """Return a promoter that notes whether the master was seen to wait, and fails."""

    class Asking(Broken):
        async def promote(self, database: str, request: PromotionRequest, **_: object) -> PromotionResult:
            asked.append(request.waited_for_replica)
            raise Unavailable("not in this test")

    return Asking()


async def turns() -> None:
    """Take more turns of the loop than an action takes here."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_loss_of_the_only_server_of_a_database_is_reported_once_and_over_when_it_answers(
    tmp_path: Path,
) -> None:
    tasks, silent = BackgroundTasks("watcher", logger("watcher")), {"east-db": 4.9}
    mastership = mastership_of(tmp_path, Broken(), tasks, LoopClock(), silent.__getitem__)
    replicas = one_server()
    with capture_logs() as logs:
        for seconds, lost in ((4.9, []), (5.0, ["db"]), (9.0, ["db"])):
            silent["east-db"] = seconds
            mastership.observe(replicas, [master(None)], 0.0)
            assert mastership.lost_databases() == lost
        mastership.observe(replicas, [master("1-1-1")], 0.0)
    assert mastership.lost_databases() == []
    (found,) = [each for each in logs if each["event"] == "database_lost"]
    assert (found["database"], found["target"]) == ("db", "east-db")
    assert "no second server" in found["reason"]
    await tasks.close()


def test_a_promotion_outlasts_the_lease_of_a_server_whose_clock_is_slewed() -> None:
    """By a twelfth, the most that chrony does by default."""
    for semi_sync in (True, False):
        terms = LeaseSettings().terms(semi_sync=semi_sync)
        assert terms.reads_over_after_seconds * 11 / 12 > terms.seconds or not terms.grace_seconds
        assert terms.over_after_seconds * 11 / 12 > terms.seconds + terms.grace_seconds + EVENT_SECONDS


def test_only_a_database_with_a_second_server_keeps_a_lease() -> None:
    assert east_and_west().database.keeps_lease
    assert not one_server().database.keeps_lease


async def test_servers_are_prepared_anew_when_their_number_changes_and_the_master_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A promotion takes the length of the master's lease from the other servers."""
    kept: dict[str, LeaseTerms] = {}
    steps: list[str] = []
    away: set[str] = set()

    class Replicas(ReplicationSet):
        @asynccontextmanager
        async def session(self, region: str) -> AsyncIterator[str]:  # type: ignore[override]
            if region in away:
                raise Unavailable("away")
            yield region

    async def lease_terms(region: str, **_: object) -> LeaseTerms:
        return kept.get(region, LeaseTerms())

    async def install_lease(region: str, terms: LeaseTerms, **_: object) -> None:
        kept[region] = terms
        steps.append(f"install {region}")

    async def remove_lease(region: str, **_: object) -> None:
        kept.pop(region)
        steps.append(f"remove {region}")

    async def server_unix_ms(*_: object, **__: object) -> float:
        raise Unavailable("renewals are not of interest here")

    for each in (lease_terms, install_lease, remove_lease, server_unix_ms):
        monkeypatch.setattr(mastership_module, each.__name__, each)
    tasks = BackgroundTasks("watcher", logger("watcher"))
    mastership = mastership_of(tmp_path, Broken(), tasks, LoopClock())

    def replicas_of(former: ReplicationSet) -> Replicas:
        made = Replicas.__new__(Replicas)
        made.__dict__.update(former.__dict__)
        return made

    one, two = replicas_of(one_server()), replicas_of(east_and_west())
    await mastership._renew(one)
    assert steps == []
    away.add("east")
    await mastership._renew(two)
    assert steps == [], "the replica must not promise what its master does not keep"
    away.clear()
    await mastership._renew(two)
    await mastership._renew(two)
    assert steps == ["install east", "install west"]
    kept["east"] = LeaseTerms(9.0)
    await mastership._renew(two)
    await mastership._renew(two)
    assert steps[2:] == ["install east"], "a watcher of another version had prepared it"
    await mastership._renew(one)
    assert steps[3:] == ["remove east"]
    await tasks.close()


async def test_the_other_watchers_of_the_own_region_are_asked_when_they_renewed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, clock = BackgroundTasks("watcher", logger("watcher")), ManualClock()
    mastership = mastership_of(tmp_path, Broken(), tasks, clock)

    async def renewed_seconds_ago(region: str, database: str) -> float:
        assert (region, database) == ("east", "db")
        return 2.0

    monkeypatch.setattr(mastership._peers, "renewed_seconds_ago", renewed_seconds_ago)
    clock.now += 60
    assert await mastership._last_renewal("db", "east") == clock.monotonic() - 2.0
    await tasks.close()


class AwayLocks:
    """Locks in a service that does not answer."""

    can_be_away = True

    @asynccontextmanager
    async def held(self, name: str, *, exclusive: bool, terms: LockTerms | None = None) -> AsyncIterator[LockHold]:
        if name:
            raise LocksAway("etcd did not answer")
        yield HeldLock()


@pytest.mark.parametrize(
    ("semi_sync", "region", "followed", "renewed"),
    [
        (True, "east", True, True),
        (True, "east", False, False),
        (False, "east", True, False),
        (True, "west", True, False),
    ],
)
async def test_while_the_locks_are_away_the_lease_of_a_master_is_renewed_that_all_others_of_its_set_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, semi_sync: bool, region: str, followed: bool, renewed: bool
) -> None:
    steps: list[str] = []

    class Replicas(ReplicationSet):
        @asynccontextmanager
        async def session(self, region: str) -> AsyncIterator[str]:  # type: ignore[override]
            yield region

        async def members(self) -> list[SetMember]:
            steps.append("look")
            return []

        def is_followed_by_all(self, members: Iterable[SetMember]) -> bool:
            return followed

    async def lease_terms(region: str, **_: object) -> LeaseTerms:
        return LeaseSettings().terms(semi_sync=semi_sync)

    async def server_unix_ms(*_: object, **__: object) -> float:
        return 7.0

    async def renew_lease(server: str, since: float, terms: LeaseTerms, **_: object) -> bool:
        steps.append(f"renew {server} from {since:g}")
        return True

    for each in (lease_terms, server_unix_ms, renew_lease):
        monkeypatch.setattr(mastership_module, each.__name__, each)
    tasks = BackgroundTasks("watcher", logger("watcher"))
    mastership = mastership_of(tmp_path, Broken(), tasks, LoopClock(), locks=AwayLocks())
    replicas = Replicas.__new__(Replicas)
    replicas.__dict__.update(east_and_west(semi_sync=semi_sync).__dict__)
    replicas.database = msgspec.structs.replace(replicas.database, master_region=region)  # type: ignore[misc]
    await mastership._renew(replicas)
    assert ("renew east from 7" in steps) is renewed
    assert (mastership.renewals, mastership.missed_renewals) == (int(renewed), int(not renewed))
    if renewed:
        assert steps == ["look", "renew east from 7"]
    await tasks.close()
