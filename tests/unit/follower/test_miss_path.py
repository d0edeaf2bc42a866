"""Misses while no leader can serve go to the database, within bounds, and never below a known version."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import cast

import pytest

from tao.client.settings import ClientSettings
from tao.follower.miss_path import DirectReadSettings, FollowerSources, MissPath
from tao.model.errors import DatabaseDown, DeadlineExceeded, NotMine, Overloaded, StaleRead, TaoError, Unavailable
from tao.model.graph import encode_object
from tao.model.queries import Fetched, ObjectQuery, Query
from tao.serving.sources import Databases, fetch_and_wait
from tests.rigs.asking import WaitingSource
from tests.rigs.leader_rig import USER, make_id
from tests.rigs.pacing import Gate, Tasks

HERE, ELSEWHERE = make_id(64, 0), make_id(64, 1)
"""An object mastered in this region, one in another."""


@dataclass
class Source(WaitingSource):
    """Answers, or fails; remembers what it was asked."""

    version: int
    fault: TaoError | None = None
    gate: Gate | None = None
    asked: list[tuple[Query, int, bool]] = field(default_factory=list)
    given_seconds: float = 0.0

    async def read(self, query: Query, minimum: int, *, critical: bool, timeout_seconds: float) -> Fetched:
        assert timeout_seconds > 0
        self.asked.append((query, minimum, critical))
        self.given_seconds = timeout_seconds
        if self.gate is not None:
            await self.gate.pass_through()
        if self.fault is not None:
            raise self.fault
        return Fetched(encode_object(self.version, USER, b""), 1, "source")


@dataclass
class FakeDatabases:
    down: bool = False
    regions: int = 2

    def is_mastered_here(self, shard: int) -> bool:
        return shard == 0

    def other_region(self, shard: int) -> str | None:
        return "other" if self.regions > 1 else None

    def local_is_down(self, shard: int) -> bool:
        return self.down


class Rig:
    def __init__(self, leader_fault: TaoError | None = None, *, max_under_way: int = 4) -> None:
        self.leaders, self.database, self.other_region = Source(3, leader_fault), Source(1), Source(2)
        self.databases = FakeDatabases()
        self.leader_is_down = False
        self.is_subscribed = True
        self.tasks = Tasks()
        self.path = MissPath(
            FollowerSources(self.leaders, self.database, self.other_region),
            cast(Databases, self.databases),
            lambda _: self.leader_is_down,
            lambda _: self.is_subscribed,
            self.tasks,
            DirectReadSettings(max_under_way=max_under_way),
        )

    async def fetch(self, object_id: int = HERE, minimum: int = 0, *, critical: bool = False) -> Fetched:
        return await fetch_and_wait(self.path, ObjectQuery(object_id), minimum, critical=critical, timeout_seconds=1)


async def test_a_leader_that_answers_is_the_only_one_asked() -> None:
    rig = Rig()
    assert (await rig.fetch(minimum=7)).keep
    assert rig.leaders.asked == [(ObjectQuery(HERE), 7, False)]
    assert rig.database.asked == rig.other_region.asked == []


@pytest.mark.parametrize("fault", [Unavailable("away"), NotMine("moving"), DeadlineExceeded("slow")])
async def test_a_leader_that_cannot_serve_is_bypassed_with_the_same_minimum(fault: TaoError) -> None:
    rig = Rig(fault)
    assert (await rig.fetch(minimum=7)).value == encode_object(1, USER, b"")
    assert rig.database.asked == [(ObjectQuery(HERE), 7, False)]
    assert rig.path.direct_reads == 1


@pytest.mark.parametrize("fault", [Overloaded("too much"), StaleRead("nobody has it")])
async def test_other_errors_of_a_leader_are_returned(fault: TaoError) -> None:
    rig = Rig(fault)
    with pytest.raises(type(fault)):
        await rig.fetch()
    assert rig.database.asked == []


@pytest.mark.parametrize("fault", [Unavailable("away"), NotMine("moving"), DeadlineExceeded("slow")])
async def test_a_critical_read_needs_the_master_database_and_no_leader(fault: TaoError) -> None:
    rig = Rig(fault)
    await rig.fetch(HERE, 7, critical=True)
    assert rig.database.asked == [(ObjectQuery(HERE), 7, True)]
    await rig.fetch(ELSEWHERE, critical=True)
    assert rig.other_region.asked == [(ObjectQuery(ELSEWHERE), 0, True)]
    assert len(rig.database.asked) == 1, "a replica has nothing to say to it"
    assert rig.path.direct_reads == 2


async def test_a_critical_read_goes_to_the_leader_while_it_can_serve() -> None:
    rig = Rig()
    await rig.fetch(critical=True)
    assert rig.leaders.asked == [(ObjectQuery(HERE), 0, True)]
    assert rig.database.asked == rig.other_region.asked == []


async def test_a_critical_read_whose_master_is_down_is_refused() -> None:
    rig = Rig(DatabaseDown("no answer to probes"))
    with pytest.raises(DatabaseDown):
        await rig.fetch(critical=True)
    assert rig.database.asked == rig.other_region.asked == []


@pytest.mark.parametrize(
    ("subscribed", "down", "kept"), [(True, False, True), (False, False, False), (True, True, False)]
)
async def test_an_answer_may_be_cached_only_while_a_leader_sends_changes(
    subscribed: bool, down: bool, kept: bool
) -> None:
    rig = Rig(NotMine("moving"))
    rig.is_subscribed, rig.leader_is_down = subscribed, down
    assert (await rig.fetch()).keep is kept


@pytest.mark.parametrize("fault", [StaleRead("behind"), Unavailable("away"), DeadlineExceeded("hangs")])
async def test_another_region_s_leader_is_asked_for_what_the_replica_lacks(fault: TaoError) -> None:
    rig = Rig(Unavailable("away"))
    rig.database.fault = fault
    fetched = await rig.fetch(ELSEWHERE, 2)
    assert fetched.value == encode_object(2, USER, b"")
    assert not fetched.keep
    assert rig.other_region.asked == [(ObjectQuery(ELSEWHERE), 2, False)]


@pytest.mark.parametrize("fault", [Unavailable("away"), DatabaseDown("down"), DeadlineExceeded("hangs")])
async def test_while_the_master_is_down_another_region_is_asked_at_the_same_minimum(fault: TaoError) -> None:
    rig = Rig(DatabaseDown("the leader knows"))
    rig.database.fault = fault
    fetched = await rig.fetch(HERE, 2)
    assert fetched.value == encode_object(2, USER, b"")
    assert not fetched.keep
    assert rig.other_region.asked == [(ObjectQuery(HERE), 2, False)]


@pytest.mark.parametrize("object_id", [HERE, ELSEWHERE])
async def test_a_database_that_hangs_leaves_a_waiting_client_time_for_another_region(object_id: int) -> None:
    rig = Rig(DeadlineExceeded("its database hangs"))
    rig.database.fault = DeadlineExceeded("hangs")
    found = await fetch_and_wait(rig.path, ObjectQuery(object_id), 0, critical=False, timeout_seconds=5)
    assert found.value == encode_object(2, USER, b"")
    client, follower = ClientSettings(), DirectReadSettings()
    assert rig.leaders.given_seconds + rig.database.given_seconds < client.timeout_seconds * client.first_attempt_share
    assert rig.database.given_seconds == follower.database_seconds


async def test_a_database_with_busy_connections_is_bypassed_if_another_region_has_a_copy() -> None:
    rig = Rig(DeadlineExceeded("its database hangs"))
    rig.database.fault = Overloaded("no connection came free in time")
    fetched = await rig.fetch()
    assert fetched.value == encode_object(2, USER, b"")
    rig.databases.regions = 1
    with pytest.raises(Overloaded):
        await rig.fetch()


async def test_a_fetch_waits_for_the_database_when_no_other_region_has_a_copy() -> None:
    rig = Rig(Unavailable("away"))
    rig.databases.regions = 1
    await rig.fetch()
    assert rig.database.given_seconds > DirectReadSettings().database_seconds


async def test_a_replica_that_is_marked_down_is_not_asked_while_the_other_region_answers() -> None:
    rig = Rig(Unavailable("away"))
    rig.databases.down = True
    await rig.fetch(ELSEWHERE)
    assert rig.database.asked == []
    assert len(rig.other_region.asked) == 1


@pytest.mark.parametrize("object_id", [HERE, ELSEWHERE])
@pytest.mark.parametrize("fault", [Unavailable("cut off"), DeadlineExceeded("silent"), NotMine("moving")])
async def test_a_database_that_is_marked_down_is_read_in_time_when_the_other_region_cannot_serve(
    fault: TaoError, object_id: int
) -> None:
    rig = Rig(DeadlineExceeded("its master region is silent"))
    rig.databases.down, rig.other_region.fault = True, fault
    found = await fetch_and_wait(rig.path, ObjectQuery(object_id), 1, critical=False, timeout_seconds=5)
    assert found.value == encode_object(1, USER, b"")
    assert not found.keep, "nobody sends this region the changes that the mark stands for"
    assert rig.database.asked == [(ObjectQuery(object_id), 1, False)]
    client = ClientSettings()
    waited_seconds = rig.leaders.given_seconds + rig.other_region.given_seconds
    assert waited_seconds < client.timeout_seconds * client.first_attempt_share


async def test_an_overloaded_region_is_not_relieved_by_a_replica_that_is_marked_down() -> None:
    rig = Rig(Unavailable("away"))
    rig.databases.down, rig.other_region.fault = True, Overloaded("full")
    with pytest.raises(Overloaded):
        await rig.fetch(ELSEWHERE)
    assert rig.database.asked == []


async def test_when_neither_the_other_region_nor_a_marked_replica_can_serve_the_error_is_the_region_s() -> None:
    rig = Rig(Unavailable("away"))
    rig.databases.down = True
    rig.other_region.fault, rig.database.fault = Unavailable("cut off"), Unavailable("gone away")
    with pytest.raises(Unavailable, match="cut off"):
        await rig.fetch(ELSEWHERE)
    with pytest.raises(Unavailable, match=r"cut off.*gone away"):
        await rig.fetch(HERE)


async def test_what_the_master_database_lacks_is_refused_as_stale_and_can_be_tried_again() -> None:
    rig = Rig(Unavailable("away"))
    rig.database.fault = StaleRead("version 9 is not there yet")
    with pytest.raises(StaleRead) as caught:
        await rig.fetch(minimum=9)
    assert caught.value.retryable
    assert rig.other_region.asked == []


@pytest.mark.parametrize("marked", [False, True])
async def test_without_leader_and_database_the_error_says_why_neither_can_serve(marked: bool) -> None:
    rig = Rig(Unavailable("leader-1: connection refused"))
    rig.databases.down, rig.databases.regions = marked, 1
    rig.database.fault = Unavailable("db-1: gone away")
    with pytest.raises(Unavailable, match="connection refused.*" + ("marked down" if marked else "gone away")):
        await rig.fetch()


async def test_direct_reads_are_bounded() -> None:
    rig = Rig(Unavailable("away"), max_under_way=2)
    gate = rig.database.gate = Gate()
    reading = [asyncio.ensure_future(rig.fetch()) for _ in range(2)]
    await gate.arrived.wait()
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 queries are at the databases"):
        await rig.fetch()
    gate.open()
    await asyncio.gather(*reading)
    assert (await rig.fetch()).version_epoch == 1
