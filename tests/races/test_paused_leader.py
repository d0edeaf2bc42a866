"""A leader is paused, another replaces it, and it resumes with a request to answer.

    follower                      leader 1 (generation 1)        leader 2
                                  caches list at version 1
                                  (paused)
                                                                 takes the shard: generation 2
                                                                 writes version 2
    reads, by an old topology  →  resumes: a hit, version 1
                                  … unless it checks first:
                                  generation 2, not its own
                              ←   version 2, from the database

These tests run in one process, with a clock that the test moves; those with SIGSTOP are in
`tests/e2e/test_failures_of_leaders.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest

from tao.leader.server import PAUSE_SENSITIVE
from tao.model.edge_block import decode_block
from tao.model.errors import Fenced, Unavailable
from tao.model.writes import AssocAdd
from tao.observability.logs import logger
from tao.serving.requests import PauseDetector, PauseSettings
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, LeaderRig, make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import Gate, ManualClock, until
from tests.rigs.region_rig import RegionRig

A, B = make_id(64), make_id(128)
READ = pb.Request(
    read=pb.ReadBatch(range_id1s=[A], range_atypes=[COMMENT], range_positions=[0], range_limits=[10]), deadline_ms=5_000
)


@dataclass
class Leaders:
    """Two leaders of one store; the first detects pauses."""

    store: MemoryStore
    one: LeaderRig
    two: LeaderRig
    clock: ManualClock
    guard: PauseDetector

    async def ask_one(self) -> pb.Answer:
        answers: list[pb.Answer] = []
        self.guard.handle(READ, MemoryReply(answers.append, peer="near-1"))
        await self.guard.tick()
        await until(lambda: answers and not answers[-1].more)
        return answers[-1]

    def pause_one(self) -> None:
        self.clock.now += PauseSettings().pause_seconds + 0.1


@pytest.fixture
async def leaders() -> AsyncIterator[Leaders]:
    store, clock = MemoryStore(4), ManualClock()
    one, two = LeaderRig(store, store, clock=clock), LeaderRig(store, store, name="leader-2")
    guard = PauseDetector(one.service, PAUSE_SENSITIVE, one.ownership.confirm, clock, PauseSettings(), logger("test"))
    await one.take(0)
    await guard.tick()
    await one.write(AssocAdd(A, COMMENT, B, 1, b""))
    yield Leaders(store, one, two, clock, guard)
    for rig in (one, two):
        await rig.close()
        assert rig.tasks.errors == []


def times(answer: pb.Answer) -> list[int]:
    assert not answer.read.errors, answer.read.errors
    return [edge.time for edge in decode_block(answer.read.values[0])]


async def test_a_leader_that_was_replaced_while_it_was_paused_serves_nothing_of_the_time_before(
    leaders: Leaders,
) -> None:
    assert times(await leaders.ask_one()) == [1]
    leaders.pause_one()
    await leaders.two.take(0)
    await leaders.two.write(AssocAdd(A, COMMENT, B + 1, 2, b""))
    assert times(await leaders.ask_one()) == [2, 1], "from the database"
    with pytest.raises(Exception, match="does not own"):
        await leaders.one.write(AssocAdd(A, COMMENT, B + 2, 3, b""))
    assert [edge.time for edge in leaders.store.edges(A, COMMENT)] == [2, 1]


async def test_a_leader_that_was_not_replaced_keeps_its_cache(leaders: Leaders) -> None:
    leaders.pause_one()
    reads = len(leaders.store.reads)
    assert times(await leaders.ask_one()) == [1]
    assert len(leaders.store.reads) == reads
    assert leaders.guard.stalls == 1


async def test_a_leader_that_cannot_check_caches_nothing_until_it_has_retaken_its_shards(
    leaders: Leaders,
) -> None:
    leaders.one.ownership.want((0,))
    leaders.pause_one()
    leaders.store.ownership_faults["db"] = Unavailable("away")
    reads = len(leaders.store.reads)
    for _ in range(2):
        assert times(await leaders.ask_one()) == [1]
    assert len(leaders.store.reads) == reads + 2, "each from the database"
    taking = asyncio.ensure_future(leaders.one.ownership.take())
    await until(lambda: leaders.one.ownership.complete)
    taking.cancel()
    assert leaders.one.ownership.row(0).generation == 2


async def test_a_takeover_that_was_under_way_when_the_leader_was_paused_counts_for_nothing(leaders: Leaders) -> None:
    """The database accepted the takeover before the pause, and the leader gets the answer after it."""
    one, two, store = leaders.one, leaders.two, leaders.store
    answer = Gate()
    take_ownership = store.take_ownership

    async def slowly(shards: Sequence[int], owner: str, *, timeout_seconds: float):  # type: ignore[no-untyped-def]
        rows = await take_ownership(shards, owner, timeout_seconds=timeout_seconds)
        if owner == one.name and not answer.arrived.is_set():
            await answer.pass_through()
        return rows

    store.take_ownership = slowly  # type: ignore[method-assign]
    one.ownership.want((0, 1))
    taking = asyncio.ensure_future(one.ownership.take())
    await answer.arrived.wait()
    leaders.pause_one()
    await two.take(1)
    await leaders.guard.tick()
    answer.open()
    await until(lambda: store.shards[1].generation == 3)  # taken, taken over, taken once more
    await until(lambda: one.ownership.complete)
    assert one.ownership.row(1).generation == 3
    taking.cancel()


async def test_a_paused_leaders_write_is_refused_by_the_row(leaders: Leaders) -> None:
    leaders.pause_one()
    await leaders.two.take(0)
    with pytest.raises(Fenced):
        await leaders.one.write(AssocAdd(A, COMMENT, B + 1, 2, b""))
    assert [edge.time for edge in leaders.store.edges(A, COMMENT)] == [1]


async def test_a_follower_that_was_paused_receives_what_it_missed_before_it_answers(region: RegionRig) -> None:
    """The follower's connection broke during the pause, and it does not know that yet."""
    near, link = region.near, region.near.links["leader-1"]
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    clock = ManualClock()
    guard = PauseDetector(
        near.service, frozenset({"read"}), near.subscriptions.renew, clock, PauseSettings(), logger("test")
    )
    await guard.tick()
    link.hold_answers.add("subscribe")
    await region.leader.write(AssocAdd(A, COMMENT, B + 1, 2, b""))
    await until(lambda: link.held)
    link.held.clear()  # messages sent on a connection that nobody reads any more
    link.hold_answers.clear()
    clock.now += 1.6
    answers: list[pb.Answer] = []
    guard.handle(READ, MemoryReply(answers.append))
    assert not answers, "not from the cache of before"
    resets = near.subscriptions.resets
    await guard.tick()
    await until(lambda: answers)
    assert times(answers[-1]) == [2, 1]
    assert near.subscriptions.resets == resets, "it received what it missed, and its cache is warm"


async def test_a_follower_without_a_leader_serves_what_it_has_after_a_pause(region: RegionRig) -> None:
    near, link = region.near, region.near.links["leader-1"]
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    link.break_off()
    await near.subscriptions.renew(0.05)
    assert await near.times(A, COMMENT) == [1], "availability before freshness"
