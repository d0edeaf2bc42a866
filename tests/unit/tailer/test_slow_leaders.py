"""A leader that acknowledges its relays slowly delays no other, uses bounded memory, and loses no invalidation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from math import inf

import pytest

from tao.model.changes import ShardMessages
from tao.model.delivery import Span
from tao.model.relay import Relay
from tao.model.topology import CacheServer
from tao.tailer.leader_outbox import LeaderOutbox, Part, Receipt
from tao.tailer.settings import OutboxSettings
from tests.rigs.pacing import until
from tests.unit.tailer.test_delivery_path import Leaders, Rig, about, change, turns

IMPATIENT = OutboxSettings(
    gather_parts=1, relay_bytes=1_000, unacknowledged_bytes=20_000, leader_bytes=2_000, slow_seconds=1e-6
)
"""Any leader counts as slow once its outbox is full."""
PATIENT = OutboxSettings(
    gather_parts=1, relay_bytes=1_000, unacknowledged_bytes=20_000, leader_bytes=2_000, slow_seconds=3_600
)


class PacedLeaders(Leaders):
    """Leaders of which ``leader-2`` takes one relay for each permit."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = asyncio.Semaphore(0)

    async def relay(self, leader: CacheServer, relay: Relay, timeout_seconds: float) -> Sequence[Span]:
        if leader.name == "leader-2":
            await self.permits.acquire()
        return await super().relay(leader, relay, timeout_seconds)


class PacedRig(Rig):
    def __init__(self, settings: OutboxSettings) -> None:
        self.paced = PacedLeaders()
        super().__init__(settings, self.paced)
        self.most_bytes = 0

    async def submit(self, *versions: int) -> None:
        """Change a key of the quick leader and one of the slow leader in each of some transactions."""
        for version in versions:
            await self.change_shards(version, (0, 1))
            await turns(5)
            self.most_bytes = max(self.most_bytes, self.path.unacknowledged_bytes)

    async def change_shards(self, version: int, shards: Sequence[int]) -> None:
        await self.path.submit(f"0-1-{version}", about(*(change(shard, version) for shard in shards)))

    async def take_all(self) -> None:
        """Let the slow leader take everything."""
        draining = asyncio.ensure_future(self.path.drained())
        while not draining.done():
            self.paced.permits.release()
            await turns()
        await draining


@pytest.fixture
async def rig() -> AsyncIterator[PacedRig]:
    rig = PacedRig(IMPATIENT)
    yield rig
    for task in rig.tasks:
        task.cancel()
    await asyncio.gather(*rig.tasks, return_exceptions=True)


async def test_the_progress_of_other_leaders_does_not_depend_on_a_slow_one(rig: PacedRig) -> None:
    await rig.submit(*range(1, 300))
    await until(lambda: rig.leaders.versions(0) == list(range(1, 300)))
    assert not rig.leaders.versions(1), "the slow leader has taken nothing yet"
    assert rig.path.collapses["slow"] > 1
    assert rig.most_bytes <= 2 * IMPATIENT.leader_bytes
    assert rig.acknowledged == []


async def test_a_slow_leader_receives_invalidations_in_place_of_what_it_did_not_take_in_time(rig: PacedRig) -> None:
    for first in range(1, 300, 30):
        await rig.submit(*range(first, first + 30))
        rig.paced.permits.release()
    await rig.take_all()
    relays = [relay for leader, relay in rig.leaders.relayed if leader == "leader-2"]
    known = 0
    for relay in relays:
        versions = [message.after for each in relay.changes for message in each.messages if hasattr(message, "after")]
        assert versions == sorted(versions)
        known = max([known, *versions])
        if relay.bulk_shards:
            known = 300  # nothing is cached any more
    assert known == 300
    assert any(relay.bulk_shards == (1,) for relay in relays)
    spans = [span for relay in relays for span in relay.spans]
    assert all(span.after == before.number for before, span in pairwise(spans))
    assert spans[-1].number == 300
    assert rig.acknowledged[-1] == "0-1-300"
    assert rig.path.unacknowledged_bytes == sum(rig.path.leader_bytes().values()) == 0


async def test_a_reader_that_catches_up_waits_for_a_leader_that_is_about_to_make_room() -> None:
    rig = PacedRig(PATIENT)
    submitting = asyncio.ensure_future(rig.submit(*range(1, 60)))
    while not submitting.done():
        await turns(200)
        rig.paced.permits.release()
    await rig.take_all()
    assert rig.leaders.versions(1) == list(range(1, 60))
    assert sum(rig.path.collapses.values()) == 0
    assert rig.most_bytes <= PATIENT.leader_bytes + 2 * PATIENT.relay_bytes
    await asyncio.gather(*rig.tasks)


async def test_a_reader_that_waits_goes_on_once_the_leader_counts_as_slow() -> None:
    rig = PacedRig(OutboxSettings(gather_parts=1, relay_bytes=1_000, leader_bytes=2_000, slow_seconds=0.05))
    await rig.submit(*range(1, 60))
    assert rig.path.collapses["slow"] > 0
    assert not rig.leaders.versions(1)
    await rig.take_all()
    await asyncio.gather(*rig.tasks)


def outbox_with(parts: int) -> LeaderOutbox:
    outbox = LeaderOutbox("leader-1")
    for number in range(1, parts + 1):
        span = Span(1, "db@1", number - 1, number)
        outbox.add(Part(Receipt([]), 1, ShardMessages(1, 1, (change(1, number),)), 100, span))
    return outbox


def test_a_leader_is_slow_at_the_pace_of_its_last_relay_or_of_the_one_under_way() -> None:
    settings = OutboxSettings(relay_bytes=1_000, slow_seconds=2.0)
    outbox = outbox_with(parts=40)
    assert outbox.slow_at(settings) == inf, "nothing has been sent"
    head = list(outbox.parts)[:10]
    outbox.begin_relay(outbox.parts, head, 100.0)
    assert outbox.waiting_bytes == 3_000
    assert outbox.slow_at(settings) == 100.5, "four relays, each within half a second"
    assert list(outbox.take_acknowledged(outbox.parts, 10, 101.0)) == head
    outbox.end_relay()
    assert (outbox.bytes, outbox.waiting_bytes) == (3_000, 3_000)
    assert outbox.slow_at(settings) == -inf, "three relays, a second each"
    outbox.relay_seconds = 0.1
    assert outbox.slow_at(settings) == inf


def test_a_collapse_leaves_the_relay_under_way_as_it_is_and_counts_what_it_frees() -> None:
    outbox = outbox_with(parts=40)
    head = list(outbox.parts)[:10]
    outbox.begin_relay(outbox.parts, head, 0.0)
    dropped, freed_bytes = outbox.collapse(is_slow=True)
    assert list(outbox.parts)[:10] == head
    assert [(part.content, part.span) for part in list(outbox.parts)[10:]] == [(1, Span(1, "db@1", 10, 40))]
    assert (len(dropped), freed_bytes, outbox.bytes, outbox.waiting_bytes) == (29, 100, 1_000, 0)
