"""Heartbeat rows: one per database and second, in the lowest shard owned there, without waiting for other databases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings
from tao.leader.heartbeats import Heartbeats, HeartbeatSettings
from tao.model.errors import MasterReadOnly, SettingsError
from tao.model.topology import Topology
from tao.observability.logs import logger
from tao.serving.configuration import Configuration
from tests.rigs.leader_rig import SCHEMA, make_topology
from tests.rigs.links_rig import MemoryLinks
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import ManualClock, Tasks, quiet, until
from tests.rigs.server_context import make_context


def database_of(shard: int) -> str:
    return f"db-{shard // 2}"


def two_databases(*leaders: str, homes: dict[int, tuple[str, ...]] | None = None) -> Topology:
    """Return a topology of the leaders, with shards 0 and 1 in ``db-0``, 2 and 3 in ``db-1``. ``homes``: shards that
    are not the first leader's."""
    topology = make_topology(leader_servers=leaders, leaders=homes)
    (database,) = topology.databases
    databases = tuple(
        msgspec.structs.replace(database, name=f"db-{number}", shards=((2 * number, 2 * number + 1),))
        for number in range(2)
    )
    return msgspec.structs.replace(topology, databases=databases)


class Rig:
    """Heartbeats of a leader; shards 0 and 1 belong to ``db-0``, 2 and 3 to ``db-1``."""

    def __init__(self, name: str = "leader-1", topology: Topology | None = None, store: MemoryStore | None = None):
        self.name = name
        self.store = store or MemoryStore(4, database_of)
        self.owned = {0, 1, 2, 3}
        self.clock = ManualClock()
        context = make_context(
            Configuration(topology or two_databases("leader-1"), SCHEMA, logger("test")),
            MemoryLinks(name).as_links(),
            Tasks(),
            name=name,
            clock=self.clock,
        )
        publisher = Publisher(DeliverySettings(), f"{name}/1", database_of)
        settings = HeartbeatSettings(interval_seconds=0.002, takeover_seconds=0.001)
        self.heartbeats = Heartbeats(context, self.store, lambda: self.owned, publisher, settings)

    def start(self) -> None:
        self.running = asyncio.create_task(self.heartbeats.run())
        self.ticking = asyncio.create_task(self.tick())

    async def tick(self) -> None:
        """Let time go on."""
        while True:
            await asyncio.sleep(0)
            self.clock.now += 0.001

    def shards(self) -> set[int]:
        return {shard for shard, _, _ in self.store.heartbeats}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    for task in (made.running, made.ticking):
        task.cancel()
    await asyncio.wait((made.running, made.ticking))


async def test_each_database_has_a_row_in_the_lowest_shard_owned_there(rig: Rig) -> None:
    rig.owned = {1, 2, 3}
    rig.start()
    await until(lambda: len(rig.store.heartbeats) >= 6)
    assert rig.shards() == {1, 2}
    assert {writer for _, writer, _ in rig.store.heartbeats} == {"leader-1"}


async def test_a_row_has_the_time_before_its_transaction_began(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = rig.store.write_heartbeat
    began: list[int] = []

    async def slow(shard: int, writer: str, unix_ms: int, *, timeout_seconds: float) -> bool:
        began.append(rig.clock.unix_ms())
        rig.clock.now += 10
        return await inner(shard, writer, unix_ms, timeout_seconds=timeout_seconds)

    monkeypatch.setattr(rig.store, "write_heartbeat", slow)
    rig.start()
    await until(lambda: rig.store.heartbeats)
    assert rig.store.heartbeats[0][2] == began[0]


async def test_a_read_only_database_does_not_affect_others_and_gets_its_row_once_it_accepts_writes(rig: Rig) -> None:
    rig.store.ownership_faults["db-0"] = MasterReadOnly("db-0 is read-only")
    rig.start()
    await until(lambda: len(rig.store.heartbeats) >= 3)
    assert rig.shards() == {2}
    assert rig.heartbeats.statuses["db-0"].trouble == "db-0 is read-only"
    assert rig.heartbeats.statuses["db-1"].trouble == ""
    rig.store.ownership_faults.clear()
    await until(lambda: 0 in rig.shards())
    assert rig.heartbeats.statuses["db-0"].trouble == ""


async def test_a_database_that_hangs_has_one_row_in_progress_and_delays_no_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    inner: Callable[..., Awaitable[bool]] = rig.store.write_heartbeat

    async def hang(shard: int, writer: str, unix_ms: int, *, timeout_seconds: float) -> bool:
        if shard == 0:
            asked.append(shard)
            await asyncio.Event().wait()
        return await inner(shard, writer, unix_ms, timeout_seconds=timeout_seconds)

    monkeypatch.setattr(rig.store, "write_heartbeat", hang)
    rig.start()
    await until(lambda: len(rig.store.heartbeats) >= 5)
    assert rig.shards() == {2}
    assert asked == [0]


async def test_a_leader_writes_no_row_to_a_database_where_it_no_longer_owns_a_shard(rig: Rig) -> None:
    rig.start()
    await until(lambda: len(rig.heartbeats.statuses) == 2)
    rig.owned = {2, 3}
    await until(lambda: list(rig.heartbeats.statuses) == ["db-1"])


async def test_each_heartbeat_reports_whether_commits_of_its_database_wait_for_a_replica(rig: Rig) -> None:
    rig.start()
    await until(lambda: len(rig.store.heartbeats) >= 2)
    assert rig.heartbeats.statuses["db-0"].waits_for_replica is False
    rig.store.waits_for_replica = True
    await until(lambda: rig.heartbeats.statuses["db-0"].waits_for_replica)


class Region:
    """Several leaders over one store. Each ``step`` is half a second; a row arrives at all leaders in the next one."""

    def __init__(self, topology: Topology, *names: str) -> None:
        self.store = MemoryStore(4, database_of)
        self.leaders = {name: Rig(name, topology, self.store) for name in names}
        for rig in self.leaders.values():
            rig.heartbeats._settings = HeartbeatSettings()  # type: ignore[misc]
        self.dead: set[str] = set()

    async def steps(self, count: int, seconds: float = 0.5) -> list[tuple[str, int]]:
        """Return the writer and the shard of each row written in so many steps."""
        before = len(self.store.heartbeats)
        for _ in range(count):
            arrived = list(self.store.heartbeats)
            for name, rig in self.leaders.items():
                rig.clock.now += seconds
                for shard, _, unix_ms in arrived:
                    rig.heartbeats.heard(database_of(shard), unix_ms)
                if name not in self.dead:
                    rig.heartbeats._write_due()
            await quiet()
        return [(writer, shard) for shard, writer, _ in self.store.heartbeats[before:]]


THREE = ("leader-1", "leader-2", "leader-3")


async def test_one_leader_writes_the_rows_of_a_database_while_the_others_hear_of_them() -> None:
    region = Region(two_databases(*THREE, homes={0: ("leader-2",), 2: ("leader-3",)}), *THREE)
    await region.steps(2)  # each writes one when it starts
    assert sorted(await region.steps(20)) == [("leader-2", 0)] * 10 + [("leader-3", 2)] * 10


async def test_the_next_leader_writes_the_rows_when_the_first_is_gone_and_yields_when_it_is_back() -> None:
    region = Region(two_databases(*THREE), *THREE)
    await region.steps(4)
    region.dead.add("leader-1")
    rows = await region.steps(21)
    assert {writer for writer, _ in rows} == {"leader-2"}
    assert len(rows) >= 2 * 6, "a row of each database in every one and a half seconds"
    region.dead.add("leader-2")
    assert {writer for writer, _ in await region.steps(20)} == {"leader-3"}
    region.dead.clear()
    await region.steps(2)
    assert {writer for writer, _ in await region.steps(20)} == {"leader-1"}


async def test_leaders_that_hear_of_no_row_write_them_themselves() -> None:
    """The tailer of their region is away, and other regions still read the rows."""
    region = Region(two_databases(*THREE), *THREE)
    for rig in region.leaders.values():
        rig.heartbeats.heard = lambda *_: None  # type: ignore[method-assign]
    assert {writer for writer, _ in await region.steps(20)} == set(THREE)


async def test_a_leader_that_hears_of_another_s_row_knows_its_age_and_not_whether_commits_wait() -> None:
    rig = Rig()
    rig.heartbeats._write_due()
    await quiet()
    assert rig.heartbeats.statuses["db-0"].waits_for_replica is False
    rig.clock.now += 5
    rig.heartbeats.heard("db-0", rig.clock.unix_ms())
    beats = rig.heartbeats.summary()["heartbeats"]
    assert isinstance(beats, dict)
    assert beats["db-0"] == {"age_seconds": 0.0, "trouble": "", "waits_for_replica": None}
    assert beats["db-1"]["age_seconds"] == 5.0


def test_the_pause_between_two_leaders_must_divide_the_interval() -> None:
    for takeover_seconds in (2.0, 0.4, 0.0, -1.0):
        with pytest.raises(SettingsError, match=f"takeover_seconds is {takeover_seconds}"):
            HeartbeatSettings(interval_seconds=1.0, takeover_seconds=takeover_seconds)
    HeartbeatSettings(interval_seconds=0.3, takeover_seconds=0.1)


async def test_rows_are_written_at_whole_seconds_whenever_the_leader_started() -> None:
    for started in (1_000.0, 1_000.3, 1_000.6):
        region = Region(two_databases("leader-1"), "leader-1")
        region.leaders["leader-1"].clock.now = started
        await region.steps(1, seconds=0.0)
        region.leaders["leader-1"].clock.now = 1_001.0
        await region.steps(1, seconds=0.0)
        await region.steps(6)
        times = [unix_ms % 1_000_000 for shard, _, unix_ms in region.store.heartbeats if shard == 0]
        assert times[1:] == [1_000, 2_000, 3_000, 4_000], started


async def test_the_rows_of_a_clock_that_falls_behind_keep_nobody_from_writing() -> None:
    for dead, substitute in (("", "leader-2"), ("leader-2", "leader-3")):
        region = Region(two_databases(*THREE), *THREE)
        region.dead.add(dead)
        await region.steps(4)
        assert {writer for writer, _ in await region.steps(20)} == {"leader-1"}
        for _ in range(80):
            region.leaders["leader-1"].clock.now -= 0.05
            await region.steps(1)
        assert substitute in {writer for writer, _ in await region.steps(20)}


async def test_the_rows_of_a_clock_that_is_ahead_are_replaced_soon_after_its_leader_is_gone() -> None:
    region = Region(two_databases(*THREE), *THREE)
    region.leaders["leader-1"].clock.now += 60
    await region.steps(4)
    region.dead.add("leader-1")
    assert len(await region.steps(6)) >= 2 * 2


async def test_a_clock_that_is_set_back_stops_no_rows() -> None:
    region = Region(two_databases("leader-1"), "leader-1")
    await region.steps(4)
    region.leaders["leader-1"].clock.now -= 60
    assert len(await region.steps(10)) >= 2 * 5
