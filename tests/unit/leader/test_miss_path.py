"""Misses of a leader outside the master region: they go to the replica, unless that would take a value back in time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from tao.leader.miss_path import RegionSource, ReplicaSettings
from tao.model.errors import (
    DatabaseDown,
    DeadlineExceeded,
    InternalError,
    NotMine,
    OperatorError,
    Overloaded,
    StaleRead,
    TaoError,
    Unavailable,
)
from tao.model.graph import encode_object
from tao.model.queries import CountQuery, Fetched, ObjectQuery, Query, RangeQuery
from tao.serving.sources import DatabaseSource, FetchRequest, RemoteSource, fetch_and_wait
from tests.rigs.asking import WaitingSource
from tests.rigs.leader_rig import FRIEND, USER, make_id
from tests.rigs.pacing import Gate, Tasks, until

HERE, ELSEWHERE = make_id(64, 0), make_id(64, 1)
"""An object mastered in this region, and one mastered in another."""


@dataclass
class Source(WaitingSource):
    """A source that answers or fails, and records its queries."""

    answer: Fetched
    fault: TaoError | None = None
    gate: Gate | None = None
    asked: list[tuple[Query, int, bool]] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)
    callers: list[str | None] = field(default_factory=list)

    def fetch(self, asked: FetchRequest) -> None:
        self.callers.append(asked.caller)
        super().fetch(asked)

    async def read(self, query: Query, minimum: int, *, critical: bool, timeout_seconds: float) -> Fetched:
        self.asked.append((query, minimum, critical))
        self.timeouts.append(timeout_seconds)
        if self.gate is not None:
            await self.gate.pass_through()
        if self.fault is not None:
            raise self.fault
        return self.answer


class Rig:
    def __init__(self, replica_fault: TaoError | None = None) -> None:
        self.marked_down = False
        self.local = Source(Fetched(encode_object(1, USER, b""), 1, "database"), replica_fault)
        self.master_region = Source(Fetched(encode_object(2, USER, b""), 1, "leader"))
        self.source = RegionSource(
            cast(DatabaseSource, self.local),
            cast(DatabaseSource, self.local),
            cast(RemoteSource, self.master_region),
            lambda shard: shard == 0,
            lambda _: self.marked_down,
            Tasks(),
            ReplicaSettings(max_fallbacks=1),
        )

    async def fetch(self, query: Query, minimum: int = 0, *, critical: bool = False, caller: str = "") -> Fetched:
        return await fetch_and_wait(
            self.source, query, minimum, critical=critical, timeout_seconds=1, caller=caller or None
        )


QUERIES: Sequence[Query] = (
    ObjectQuery(ELSEWHERE), CountQuery(ELSEWHERE, FRIEND), RangeQuery(ELSEWHERE, FRIEND, 0, 10)
)  # fmt: skip


@pytest.mark.parametrize("critical", [False, True])
async def test_a_shard_mastered_in_this_region_is_read_here_and_its_errors_are_returned(critical: bool) -> None:
    rig = Rig()
    assert await rig.fetch(ObjectQuery(HERE), 1, critical=critical) == rig.local.answer
    assert rig.local.asked == [(ObjectQuery(HERE), 1, critical)]
    rig.local.fault = StaleRead("no")
    with pytest.raises(StaleRead):
        await rig.fetch(ObjectQuery(HERE), 9, critical=critical)
    assert rig.master_region.asked == []
    assert rig.source.sent_to_master_region == 0


@pytest.mark.parametrize("query", QUERIES)
async def test_a_shard_mastered_in_another_region_is_read_from_the_replica(query: Query) -> None:
    rig = Rig()
    assert await rig.fetch(query, 1) == rig.local.answer
    assert rig.local.asked == [(query, 1, False)]
    assert rig.master_region.asked == []


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize(
    "fault",
    [
        StaleRead("behind"),
        Unavailable("away"),
        DeadlineExceeded("hangs"),
        OperatorError("no such table"),
        InternalError("an empty table"),
    ],
)
async def test_a_read_goes_to_the_master_region_when_the_replica_is_behind_unavailable_or_not_seeded(
    query: Query, fault: TaoError
) -> None:
    rig = Rig(fault)
    assert await rig.fetch(query, 2) == rig.master_region.answer
    assert rig.master_region.asked == [(query, 2, False)]
    assert rig.source.sent_to_master_region == 1


@pytest.mark.parametrize("query", QUERIES)
async def test_a_critical_read_goes_straight_to_the_master_region(query: Query) -> None:
    rig = Rig()
    assert await rig.fetch(query, 1, critical=True) == rig.master_region.answer
    assert rig.local.asked == []
    assert rig.master_region.asked == [(query, 1, True)]
    assert rig.source.sent_to_master_region == 0


async def test_the_leader_there_learns_the_caller_of_a_critical_read_and_fills_are_nobody_s() -> None:
    """It checks again what the caller may read critically."""
    rig = Rig(StaleRead("behind"))
    for critical in (True, False):
        await rig.fetch(ObjectQuery(ELSEWHERE), 1, critical=critical, caller="web")
    assert rig.master_region.callers == ["web", None]


@pytest.mark.parametrize("fault", [Unavailable("refused"), NotMine("moving"), DeadlineExceeded("silent")])
async def test_a_critical_read_that_no_leader_there_answers_is_made_at_the_master_database(fault: TaoError) -> None:
    rig = Rig()
    rig.master_region.fault = fault
    assert await rig.fetch(ObjectQuery(ELSEWHERE), 1, critical=True) == rig.local.answer
    assert rig.local.asked == [(ObjectQuery(ELSEWHERE), 1, True)]
    rig.local.fault = Unavailable("cut off")
    with pytest.raises(type(fault), match=fault.message):
        await rig.fetch(ObjectQuery(ELSEWHERE), 1, critical=True)


async def test_a_silent_leader_leaves_a_critical_read_time_for_the_master_database() -> None:
    rig = Rig()
    rig.master_region.fault = DeadlineExceeded("silent")
    await fetch_and_wait(rig.source, ObjectQuery(ELSEWHERE), 1, critical=True, timeout_seconds=60.0)
    assert rig.master_region.timeouts == [ReplicaSettings().fallback_seconds]
    assert rig.local.timeouts[0] > ReplicaSettings().fallback_seconds


async def test_the_number_of_critical_reads_that_bypass_a_slow_leader_is_bounded() -> None:
    rig = Rig()
    rig.master_region.fault = DeadlineExceeded("slow")
    gate = rig.local.gate = Gate()
    first = asyncio.ensure_future(rig.fetch(ObjectQuery(ELSEWHERE), critical=True))
    await gate.arrived.wait()
    with pytest.raises(DeadlineExceeded, match="slow"):
        await rig.fetch(ObjectQuery(ELSEWHERE), critical=True)
    gate.open()
    assert await first == rig.local.answer


async def test_a_critical_read_is_not_made_at_a_master_that_its_leader_says_is_down() -> None:
    rig = Rig()
    rig.master_region.fault = DatabaseDown("no answer to probes")
    with pytest.raises(DatabaseDown):
        await rig.fetch(ObjectQuery(ELSEWHERE), critical=True)
    assert rig.local.asked == []


async def test_an_overloaded_replica_does_not_spread_its_load_to_the_master_region() -> None:
    rig = Rig(Overloaded("full"))
    with pytest.raises(Overloaded):
        await rig.fetch(ObjectQuery(ELSEWHERE))
    assert rig.master_region.asked == []


async def test_the_number_of_a_slow_replicas_queries_in_the_master_region_is_bounded() -> None:
    rig = Rig(DeadlineExceeded("late"))
    rig.master_region.gate = gate = Gate()
    reading = asyncio.ensure_future(rig.fetch(ObjectQuery(ELSEWHERE)))
    await gate.arrived.wait()
    with pytest.raises(DeadlineExceeded):
        await rig.fetch(ObjectQuery(ELSEWHERE))
    gate.open()
    assert await reading == rig.master_region.answer
    assert await rig.fetch(ObjectQuery(ELSEWHERE)) == rig.master_region.answer


async def test_when_the_master_region_fails_too_its_error_is_what_the_reader_gets() -> None:
    rig = Rig(StaleRead("behind"))
    rig.master_region.fault = Unavailable("cut off")
    with pytest.raises(Unavailable, match="cut off"):
        await rig.fetch(ObjectQuery(ELSEWHERE), 2)


async def test_a_replica_that_is_marked_down_is_asked_only_when_the_master_region_cannot_be() -> None:
    rig = Rig()
    rig.marked_down = True
    assert await rig.fetch(ObjectQuery(ELSEWHERE)) == rig.master_region.answer
    assert rig.local.asked == []
    assert rig.source.sent_to_master_region == 1
    rig.master_region.fault = Unavailable("cut off")
    assert await rig.fetch(ObjectQuery(ELSEWHERE)) == rig.local.answer


async def test_a_silent_master_region_leaves_a_waiting_reader_time_for_a_replica_that_is_marked_down() -> None:
    rig = Rig()
    rig.marked_down, rig.master_region.fault = True, DeadlineExceeded("silent")
    query = ObjectQuery(ELSEWHERE)
    assert await fetch_and_wait(rig.source, query, 0, critical=False, timeout_seconds=5) == rig.local.answer
    assert rig.master_region.timeouts == [ReplicaSettings().fallback_seconds]


async def test_a_master_marked_down_is_still_read_in_its_own_region() -> None:
    rig = Rig()
    rig.marked_down = True
    assert await rig.fetch(ObjectQuery(HERE)) == rig.local.answer
    assert rig.master_region.asked == []


async def test_a_reader_that_cannot_take_an_error_of_the_replica_has_nothing_fetched_from_the_master_region() -> None:
    rig = Rig(Overloaded("busy"))
    taken: list[Fetched | TaoError] = []

    def take(answer: Fetched | TaoError) -> None:
        taken.append(answer)
        if len(taken) == 1:
            raise ZeroDivisionError

    rig.source.fetch(FetchRequest(ObjectQuery(ELSEWHERE), 1, 0, take, 1.0))
    await until(lambda: len(taken) == 2)
    assert [type(each) for each in taken] == [Overloaded, InternalError]
    assert rig.master_region.asked == []
