"""Heartbeat rows: one per database, in the lowest shard owned there, without waiting for other databases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings
from tao.leader.heartbeats import Heartbeats, HeartbeatSettings
from tao.model.errors import MasterReadOnly
from tao.observability.logs import logger
from tao.serving.configuration import Configuration
from tests.rigs.leader_rig import SCHEMA, make_topology
from tests.rigs.links_rig import MemoryLinks
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import ManualClock, Tasks, until
from tests.rigs.server_context import make_context


def database_of(shard: int) -> str:
    return f"db-{shard // 2}"


class Rig:
    """Heartbeats of a leader; shards 0 and 1 belong to ``db-0``, 2 and 3 to ``db-1``."""

    def __init__(self) -> None:
        self.store = MemoryStore(4, database_of)
        self.owned = {0, 1, 2, 3}
        self.clock = ManualClock()
        context = make_context(
            Configuration(make_topology(), SCHEMA, logger("test")),
            MemoryLinks("leader-1").as_links(),
            Tasks(),
            name="leader-1",
            clock=self.clock,
        )
        publisher = Publisher(DeliverySettings(), "leader-1/1", database_of)
        settings = HeartbeatSettings(interval_seconds=0.001)
        self.heartbeats = Heartbeats(context, self.store, lambda: self.owned, publisher, settings)

    def start(self) -> None:
        self.running = asyncio.create_task(self.heartbeats.run())

    def shards(self) -> set[int]:
        return {shard for shard, _, _ in self.store.heartbeats}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    made.running.cancel()
    await asyncio.wait((made.running,))


async def test_each_database_has_a_row_in_the_lowest_shard_owned_there(rig: Rig) -> None:
    rig.owned = {1, 2, 3}
    rig.start()
    await until(lambda: len(rig.store.heartbeats) >= 6)
    assert rig.shards() == {1, 2}
    assert set(rig.store.heartbeats) == {(shard, "leader-1", rig.clock.unix_ms()) for shard in (1, 2)}


async def test_a_row_has_the_time_before_its_transaction_began(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = rig.store.write_heartbeat
    began = rig.clock.unix_ms()

    async def slow(shard: int, writer: str, unix_ms: int, *, timeout_seconds: float) -> bool:
        rig.clock.now += 10
        return await inner(shard, writer, unix_ms, timeout_seconds=timeout_seconds)

    monkeypatch.setattr(rig.store, "write_heartbeat", slow)
    rig.start()
    await until(lambda: rig.store.heartbeats)
    assert rig.store.heartbeats[0][2] == began


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
