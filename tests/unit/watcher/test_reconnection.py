"""Replicas that have lost their masters: when the watcher of their region has them connect again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import cast

import pytest

from tao.model.errors import TaoError
from tao.model.topology import Database, DatabaseServer
from tao.observability.logs import logger
from tao.replication.accounts import Account
from tao.replication.locks import LockTaken
from tao.replication.promotion import Promoter
from tao.replication.promotion_plan import SetMember
from tao.replication.replication_set import ReplicationSet, SetAccounts
from tao.runtime.tasks import BackgroundTasks
from tao.watcher.probes import WatcherContext
from tao.watcher.reconnection import Reconnection
from tests.rigs.pacing import ManualClock, until
from tests.rigs.ports import free_ports
from tests.unit.replication.members import following, master, replica


class Promotions:
    """The one method of a `Promoter` that is called here."""

    def __init__(self) -> None:
        self.reconnected: list[tuple[str, str]] = []
        self.error: TaoError | None = None

    async def connect_again(self, database: str, region: str) -> bool:
        self.reconnected.append((database, region))
        if self.error is not None:
            raise self.error
        return True


class Rig:
    """The watcher of ``west``. The replica there follows a master in ``east``, whose address nobody listens at."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.clock = ManualClock()
        self.tasks = BackgroundTasks("watcher", logger("test"))
        self.promotions = Promotions()
        context = WatcherContext(self.tasks, self.clock, logger("test"))
        self.reconnection = Reconnection("west", cast(Promoter, self.promotions), context)
        servers = {
            "east": DatabaseServer(name="east-db", host="127.0.0.1", port=self.port),
            "west": DatabaseServer(name="west-db", host="127.0.0.1", port=1),
        }
        database = Database(name="db", master_region="east", servers=servers, shards=((0, 3),))
        account = Account("tao_admin", "secret")
        self.replicas = ReplicationSet(database, SetAccounts(account, account), seen_from="", statement_seconds=1.0)
        self.connections = 0
        self._server: asyncio.Server | None = None

    def observe(
        self, *, receiving: bool = False, stopped: bool = False, source: str = "", region: str = "west"
    ) -> None:
        """Observe the replica in this state."""
        member = replica(region, "1-1-1")
        assert member.state is not None
        status = replace(
            following(receiving=receiving),
            source=source or f"127.0.0.1:{self.port}",
            stopped=stopped,
            connecting=not receiving,
        )
        seen = SetMember(member.name, region, replace(member.state, following=status))
        self.reconnection.observe(self.replicas, [master("1-1-1"), seen])

    async def listen(self) -> None:
        """Have the master listen, and count its connections."""

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            writer.close()

        self._server = await asyncio.start_server(connected, "127.0.0.1", self.port)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self.tasks.close()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.close()


async def test_a_replica_connects_again_as_soon_as_its_master_answers(rig: Rig) -> None:
    rig.observe()
    await until(lambda: len(rig.tasks) == 1)
    assert rig.promotions.reconnected == []
    await rig.listen()
    await until(lambda: rig.promotions.reconnected == [("db", "west")])
    assert rig.reconnection.reconnected == 1


async def test_a_replica_is_restarted_once_for_each_time_that_it_loses_its_master(rig: Rig) -> None:
    """The second restart would break off the connection that the first one has begun."""
    rig.observe()
    await asyncio.sleep(0)
    await rig.listen()
    await until(lambda: bool(rig.promotions.reconnected))
    await until(lambda: len(rig.tasks) == 0)
    rig.observe()
    assert len(rig.tasks) == 0
    rig.observe(receiving=True)
    rig.observe()
    assert len(rig.tasks) == 1


async def test_a_replica_whose_master_answers_all_along_is_left_alone(rig: Rig) -> None:
    """Another reason keeps it from its master, which counts broken connections and would refuse the machine."""
    await rig.listen()
    for _ in range(10):
        rig.observe()
        await until(lambda: len(rig.tasks) == 0)
    assert rig.promotions.reconnected == []
    assert rig.connections == 1


@pytest.mark.parametrize(
    "state",
    [{"receiving": True}, {"stopped": True}, {"region": "north"}, {"source": "127.0.0.1:2"}],
    ids=["it receives", "it was stopped", "it is in another region", "it follows another server"],
)
async def test_only_replicas_of_the_region_that_try_to_reach_the_master_are_looked_after(
    rig: Rig, state: dict[str, bool | str]
) -> None:
    rig.observe(**state)  # type: ignore[arg-type]
    assert len(rig.tasks) == 0


@pytest.mark.parametrize("state", [{"receiving": True}, {"stopped": True}], ids=["receives", "stopped"])
async def test_the_look_ends_when_the_replica_has_no_need_of_it(rig: Rig, state: dict[str, bool]) -> None:
    rig.observe()
    rig.observe(**state)  # type: ignore[arg-type]
    await until(lambda: len(rig.tasks) == 0)
    assert rig.promotions.reconnected == []


async def test_a_replica_that_is_not_observed_any_more_is_forgotten(rig: Rig) -> None:
    rig.observe()
    rig.clock.now += 5.1
    await until(lambda: len(rig.tasks) == 0)


async def test_a_promotion_that_is_under_way_is_not_disturbed(rig: Rig) -> None:
    rig.promotions.error = LockTaken("a promotion holds it")
    rig.observe()
    await asyncio.sleep(0)
    await rig.listen()
    await until(lambda: bool(rig.promotions.reconnected))
    await until(lambda: len(rig.tasks) == 0)
    assert rig.reconnection.reconnected == 0
