"""A drained server may be stopped when nobody uses it, and is refused when no other server could replace it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from tao.admin import drain
from tao.admin.documents import change_in_file, mark_in_file
from tao.admin.drain import Quiet, drain_cache_server, drain_replica, undrain_cache_server, work_of
from tao.model.errors import OperatorError, TopologyError
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Registration, Tier, Topology
from tao.replication import replication_set
from tao.replication.accounts import Account
from tao.replication.locks import FileLocks, LockHold, LockTerms, mastership_lock
from tao.replication.replication_set import ReplicationSet, SetAccounts
from tao.routing.routes import Routes
from tao.storage.failures import NotListening
from tao.topology import edits
from tao.topology.document import dump_topology, parse_topology
from tests.rigs.pacing import PATIENT_SECONDS

GONE = "127.0.0.1:1"
"""An admin port that refuses."""
NOBODY = Account("nobody", "x")


def tier(name: str, *servers: str) -> Tier:
    """Return a tier of servers that are gone already."""
    return Tier(name=name, servers=tuple(CacheServer(name=each, grpc=GONE, admin=GONE) for each in servers))


def set_admin(file: Path, name: str, admin: str) -> None:
    """Another admin address for a server."""
    found = json.loads(file.read_text())
    for region in found["regions"]:
        for each in (region["leaders"], *region["followers"]):
            for server in each["servers"]:
                if server["name"] == name:
                    server["admin"] = admin
    file.write_text(json.dumps(found))


@pytest.fixture
async def silent() -> AsyncIterator[str]:
    """The admin port of a paused process: it connects, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    region = Region(
        name="east", leaders=tier("leaders", "l-1", "l-2"), followers=(tier("web", "f-1"), tier("api", "f-2"))
    )
    server = DatabaseServer(name="db-1", port=1)
    database = Database(name="db", master_region="east", servers={"east": server}, shards=((0, 3),))
    path = tmp_path / "topology.json"
    path.write_text(dump_topology(Topology(version=1, shards=4, regions=(region,), databases=(database,))))
    return path


def down(file: Path) -> set[str]:
    (region,) = parse_topology(file.read_bytes(), "topology").regions
    return {s.name for each in (region.leaders, *region.followers) for s in each.servers if s.down}


def say_nothing(_: str) -> None:
    pass


async def test_a_server_that_has_stopped_already_is_safe_once_it_is_marked(file: Path) -> None:
    found = await drain_cache_server(file, "l-1", 5, say_nothing)
    assert (found.safe_to_stop, found.marked, found.role, found.topology_version) == (True, True, "leader", 2)
    assert down(file) == {"l-1"}
    assert (await drain_cache_server(file, "l-1", 5, say_nothing)).topology_version == 2, "nothing to change"


@pytest.mark.parametrize("silent_one", ["l-1", "l-2", "f-2"])
async def test_a_server_that_is_silent_may_be_in_use_and_is_waited_for(
    file: Path, silent: str, silent_one: str
) -> None:
    """It may own shards, or send requests by an older document; only a refused connection says that nobody is there."""
    set_admin(file, silent_one, silent)
    found = await drain_cache_server(file, "l-1", 0.01, say_nothing)
    assert (found.safe_to_stop, found.marked) == (False, True)
    assert found.waiting_for == [f"{silent_one} to answer"]


async def test_a_silent_server_that_is_marked_down_does_not_delay_the_drain_of_another(file: Path, silent: str) -> None:
    """Its machine is lost, and would not refuse for ever."""
    set_admin(file, "f-2", silent)
    await mark_in_file(file, "f-2", down=True)
    assert (await drain_cache_server(file, "l-1", 5, say_nothing)).safe_to_stop


@pytest.mark.parametrize("unseen", ["l-1", "f-2"])
async def test_where_a_server_has_no_admin_address_nothing_is_marked(file: Path, unseen: str) -> None:
    set_admin(file, unseen, "")
    with pytest.raises(OperatorError, match=f"{unseen} has no admin address"):
        await drain_cache_server(file, "l-1", 5, say_nothing)
    assert down(file) == set()


async def test_the_last_server_of_a_tier_is_refused(file: Path) -> None:
    await mark_in_file(file, "l-1", down=True)
    with pytest.raises(TopologyError, match="l-2 is the last server of leaders"):
        await drain_cache_server(file, "l-2", 5, say_nothing)
    assert (await drain_cache_server(file, "f-1", 5, say_nothing)).safe_to_stop, "the tier behind stands in"
    with pytest.raises(TopologyError, match="f-2 is the last server of east that has shard 0"):
        await drain_cache_server(file, "f-2", 5, say_nothing)
    assert down(file) == {"l-1", "f-1"}


async def test_a_follower_whose_shards_no_other_server_has_is_refused(file: Path) -> None:
    """A server that is marked down keeps its shards: the others of its tier never serve them."""

    def in_one_tier(found: Topology) -> Topology:
        (region,) = found.regions
        return msgspec.structs.replace(
            found, regions=(msgspec.structs.replace(region, followers=(tier("web", "f-1", "f-2"),)),)
        )

    topology = await change_in_file(file, in_one_tier)
    routes = Routes(topology)
    assert routes.shards_of("f-1")
    with pytest.raises(TopologyError, match="f-1 is the last server of east that has shard"):
        await drain_cache_server(file, "f-1", 5, say_nothing)
    assert down(file) == set()
    clones = dict.fromkeys(routes.shards_of("f-1"), ("f-1", "f-2"))

    def cloned(found: Topology) -> Topology:
        (region,) = found.regions
        (web,) = region.followers
        web = msgspec.structs.replace(web, moved=clones)
        return msgspec.structs.replace(found, regions=(msgspec.structs.replace(region, followers=(web,)),))

    await change_in_file(file, cloned)
    assert (await drain_cache_server(file, "f-1", 5, say_nothing)).safe_to_stop


async def test_a_server_that_has_no_shards_on_the_ring_stands_in_for_no_other(file: Path) -> None:
    await change_in_file(file, lambda found: edits.change_server(found, "l-1", weight=0.0))
    with pytest.raises(TopologyError, match="l-2 is the last server of leaders"):
        await drain_cache_server(file, "l-2", 5, say_nothing)
    assert (await drain_cache_server(file, "l-1", 5, say_nothing)).safe_to_stop
    assert down(file) == {"l-1"}


def registered(file: Path, weight: float, admin: str = GONE, *, leaving: bool = False) -> Topology:
    """A document with a second server of tier ``web`` that has registered itself."""
    entry = CacheServer(
        name="f-3", grpc="127.0.0.1:2", admin=admin, weight=weight, registration=Registration(leaving=leaving)
    )
    topology = edits.add_server(parse_topology(file.read_bytes(), "topology"), "east", "web", entry)
    file.write_text(dump_topology(topology))
    return topology


def entry_of_f3(file: Path) -> CacheServer:
    return Routes(parse_topology(file.read_bytes(), "topology")).server("f-3")


def names(file: Path) -> set[str]:
    return {server.name for _, server in parse_topology(file.read_bytes(), "topology").cache_servers}


@pytest.mark.parametrize("leaving", [False, True])
async def test_a_registered_server_that_has_stopped_is_removed_at_once(file: Path, leaving: bool) -> None:
    registered(file, 1.0, leaving=leaving)
    found = await drain_cache_server(file, "f-3", 5, say_nothing)
    assert (found.safe_to_stop, found.marked, found.waiting_for) == (True, False, [])
    assert found.notes == ["f-3 has left the topology: it registers again when it starts"]
    assert "f-3" not in names(file)


async def test_a_registered_server_that_is_silent_is_asked_to_leave_and_waited_for(file: Path, silent: str) -> None:
    registered(file, 0.375, silent)
    found = await drain_cache_server(file, "f-3", 0.01, say_nothing)
    assert (found.safe_to_stop, found.marked) == (False, False)
    assert found.waiting_for == ["f-3 to leave the ring (3/8 of its share left)"]
    entry = entry_of_f3(file)
    assert (entry.weight, entry.registration) == (0.375, Registration(leaving=True))


async def test_a_registered_server_is_removed_only_when_every_other_one_knows_that_it_has_left(
    file: Path, silent: str
) -> None:
    registered(file, 0.0)
    set_admin(file, "l-2", silent)
    found = await drain_cache_server(file, "f-3", 0.01, say_nothing)
    assert found.waiting_for == ["l-2 to answer"]
    assert "f-3" in names(file)


async def test_a_registered_server_is_removed_only_when_it_knows_that_it_leaves(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would find itself removed as by a watcher, and register again while it runs."""
    registered(file, 0.0)
    own = {"role": "follower", "topology_version": 99, "hits": 0, "misses": 0, "failures": 0}
    own |= {"writes": {"forwarded": 0, "failed": 0}, "registration": {"leaving": False}}

    async def figures(_: Topology, *, wanted: str = "") -> dict[str, dict[str, object]]:
        return {wanted: own}

    monkeypatch.setattr(drain, "figures", figures)
    monkeypatch.setattr(drain, "QUIET_SECONDS", 0.0)
    found = await drain_cache_server(file, "f-3", 0.01, say_nothing)
    assert found.waiting_for == ["f-3 to notice that it leaves"]
    assert "f-3" in names(file)
    own["registration"] = {"leaving": True}
    assert (await drain_cache_server(file, "f-3", 5, say_nothing)).safe_to_stop
    assert "f-3" not in names(file)


async def test_a_follower_is_not_safe_to_stop_while_accepted_writes_wait(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal: dict[str, dict[str, int]] = {"waiting": {"high": 0, "normal": 3, "low": 1}}
    own = {"role": "follower", "topology_version": 99, "hits": 0, "misses": 0, "failures": 0, "journal": journal}
    own |= {"writes": {"forwarded": 0, "failed": 0}}

    async def figures(_: Topology, *, wanted: str = "") -> dict[str, dict[str, object]]:
        return {wanted: own}

    monkeypatch.setattr(drain, "figures", figures)
    monkeypatch.setattr(drain, "QUIET_SECONDS", 0.0)
    found = await drain_cache_server(file, "f-1", 0.01, say_nothing)
    assert found.waiting_for == ["4 accepted writes to be made (or moved: tao journal drain f-1 --to FOLLOWER)"]
    journal["waiting"] = {"high": 0, "normal": 0, "low": 0}
    assert (await drain_cache_server(file, "f-1", 5, say_nothing)).safe_to_stop


async def test_the_last_server_on_the_ring_of_a_tier_does_not_leave_it(file: Path) -> None:
    registered(file, 1.0)
    await mark_in_file(file, "f-1", down=True)
    with pytest.raises(TopologyError, match="f-3 is the last server of web in use"):
        await drain_cache_server(file, "f-3", 5, say_nothing)
    assert entry_of_f3(file).registration == Registration()


async def test_a_server_that_is_undrained_while_it_leaves_stays(file: Path) -> None:
    registered(file, 0.5, leaving=True)
    await undrain_cache_server(file, "f-3", 0.01, say_nothing)
    assert entry_of_f3(file).registration == Registration()


async def test_a_server_that_has_left_by_draining_is_not_undrained_but_started_again(file: Path) -> None:
    registered(file, 1.0)
    assert (await drain_cache_server(file, "f-3", 5, say_nothing)).safe_to_stop
    with pytest.raises(TopologyError, match=r"no server 'f-3' .* registers again when it starts, so start it again"):
        await undrain_cache_server(file, "f-3", 5, say_nothing)


async def test_a_master_is_refused_and_the_command_that_helps_is_named(file: Path) -> None:
    with pytest.raises(TopologyError, match="tao promote db"):
        await drain_replica(file, SetAccounts(NOBODY, NOBODY), "db-1", 5, say_nothing)


def add_replicas(file: Path, *regions: str, port: int = 1) -> None:
    """Regions with replicas of a database whose commits wait for one."""
    before = parse_topology(file.read_bytes(), "topology")
    added = [
        Region(name=each, leaders=tier(f"{each}-leaders", f"{each}-l"), followers=(tier(f"{each}-web", f"{each}-f"),))
        for each in regions
    ]
    (database,) = before.databases
    servers = database.servers | {each: DatabaseServer(name=f"{each}-db", port=port) for each in regions}
    databases = (msgspec.structs.replace(database, servers=servers, semi_sync=True),)
    after = msgspec.structs.replace(before, regions=(*before.regions, *added), databases=databases)
    file.write_text(dump_topology(after))


async def test_a_replica_is_drained_by_the_topology_that_a_promotion_which_held_the_lock_has_left(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former master must not be let go: its commits wait for replicas that follow it no more."""
    add_replicas(file, "west", "north")
    let_go: list[str] = []

    async def let_master_go(replicas: ReplicationSet) -> bool:
        replicas.check_hold()
        marked = [each.name for each in replicas.database.servers.values() if each.down]
        let_go.append(f"{replicas.master.name} without {marked}, held: {replicas._hold is not None}")
        raise OperatorError("that is enough")

    monkeypatch.setattr(ReplicationSet, "let_master_go", let_master_go)
    is_waiting = asyncio.Event()
    locks = FileLocks(file)
    held = locks.held

    @asynccontextmanager
    async def waiting(name: str, *, exclusive: bool, terms: LockTerms | None = None) -> AsyncIterator[LockHold]:
        is_waiting.set()
        async with held(name, exclusive=exclusive, terms=terms) as hold:
            yield hold

    async with locks.held(mastership_lock("db"), exclusive=True):
        monkeypatch.setattr(drain, "topology_locks", lambda _: locks)
        monkeypatch.setattr(locks, "held", waiting)
        draining = asyncio.create_task(
            drain_replica(file, SetAccounts(NOBODY, NOBODY), "north-db", 0.01, say_nothing), name="drain"
        )
        await is_waiting.wait()
        await change_in_file(file, lambda found: edits.promote(found, "db", "west", 2))
    with pytest.raises(OperatorError, match="that is enough"):
        await draining
    assert let_go == ["west-db without ['north-db'], held: True"]


@pytest.fixture
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits wait for other replicas than the one that is drained."""

    async def let_master_go(_: ReplicationSet) -> bool:
        return False

    monkeypatch.setattr(ReplicationSet, "let_master_go", let_master_go)


def is_marked(file: Path, region: str) -> bool:
    return parse_topology(file.read_bytes(), "topology").databases[0].servers[region].down


@pytest.mark.usefixtures("nobody_waits")
async def test_a_replica_that_has_died_is_drained_like_a_server_that_has_stopped(file: Path) -> None:
    add_replicas(file, "north")
    found = await drain_replica(file, SetAccounts(NOBODY, NOBODY), "north-db", PATIENT_SECONDS, say_nothing)
    assert (found.safe_to_stop, found.marked, found.notes) == (True, True, [])
    assert found.describe() == "north-db: safe to stop; then: tao undrain north-db"
    assert is_marked(file, "north")


@pytest.mark.usefixtures("nobody_waits")
async def test_a_replica_that_is_silent_is_waited_for_and_how_to_take_its_mark_away_is_said(
    file: Path, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_STATEMENT_SECONDS", 0.05)
    add_replicas(file, "north", port=int(silent.rpartition(":")[2]))
    found = await drain_replica(file, SetAccounts(NOBODY, NOBODY), "north-db", 0.1, say_nothing)
    assert (found.safe_to_stop, found.marked) == (False, True)
    assert "north-db to answer" in found.waiting_for[0]
    assert "tao topology mark-up north-db" in found.notes[0]


async def test_where_the_administrator_is_refused_nothing_is_marked(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_replicas(file, "north")

    async def refuse(*_: object, **__: object) -> None:
        raise OperatorError("access denied")

    monkeypatch.setattr(replication_set, "open_session", refuse)
    with pytest.raises(OperatorError, match="access denied"):
        await drain_replica(file, SetAccounts(NOBODY, NOBODY), "north-db", 0.1, say_nothing)
    assert not is_marked(file, "north")


async def test_an_error_after_the_mark_says_how_to_take_it_away(file: Path) -> None:
    """Nobody acknowledges, so the master is to wait for none, and it is gone, too."""
    add_replicas(file, "north")
    with pytest.raises(NotListening) as failed:
        await drain_replica(file, SetAccounts(NOBODY, NOBODY), "north-db", 0.1, say_nothing)
    assert "tao topology mark-up north-db" in failed.value.__notes__[0]
    assert is_marked(file, "north")


async def test_a_server_without_an_admin_port_cannot_be_put_back_by_this_command(file: Path) -> None:
    set_admin(file, "f-1", "")
    with pytest.raises(OperatorError, match="no admin address"):
        await undrain_cache_server(file, "f-1", 5, say_nothing)


def test_a_server_is_quiet_when_its_counters_have_stood_still_long_enough() -> None:
    quiet = Quiet()
    assert not quiet.lasts((1, 2), 10.0)
    assert not quiet.lasts((1, 2), 10.9)
    assert quiet.lasts((1, 2), 11.0)
    assert not quiet.lasts((1, 3), 11.1)
    assert quiet.lasts((1, 3), 12.1)


def test_writes_count_as_work_of_followers_and_leaders_alike() -> None:
    reads = {"hits": 5, "misses": 2, "failures": 0}
    assert work_of({**reads, "writes": {"forwarded": 7, "failed": 1}}) == (5, 2, 0, 7, 1)
    assert work_of({**reads, "writes": {"committed": 7, "failed": 1}}) == (5, 2, 0, 7, 1)
