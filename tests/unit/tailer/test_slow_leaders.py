"""A leader that acknowledges its relays slowly delays no other, uses bounded memory, and loses no invalidation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from math import inf

import pytest

from tao.model.changes import ShardMessages
from tao.model.delivery import Span
from tao.model.errors import Unavailable
from tao.model.relay import Relay, Relayed, Touch
from tao.model.topology import CacheServer
from tao.planning.row_events import Translated
from tao.tailer.leader_outbox import Content, LeaderOutbox, Part, Receipt
from tao.tailer.settings import OutboxSettings
from tests.rigs.leader_rig import make_id
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

    async def relay(self, leader: CacheServer, relay: Relay, timeout_seconds: float) -> Relayed:
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


def touch(number: int, shard: int = 1) -> Touch:
    return Touch(make_id(number, shard), 0, 0)


async def test_an_import_of_many_keys_through_a_slow_leader_touches_all_of_them() -> None:
    rig = PacedRig(OutboxSettings(gather_parts=1, leader_bytes=2_000, slow_seconds=1e-6))
    await rig.submit(1)
    for version in range(2, 52):
        touches = tuple(touch(1_000 * version + key) for key in range(1_000))
        messages = about(change(0, version), change(1, version, b"x" * 1_000)).messages
        await rig.path.submit(f"0-1-{version}", Translated(messages, touches))
        await turns(5)
    assert rig.path.collapses["slow"] > 0
    assert rig.leaders.versions(0) == list(range(1, 52)), "the import does not hold up the other leader"
    await rig.take_all()
    touched = {each for _, relay in rig.leaders.relayed for each in relay.touches}
    assert len(touched) == 50_000
    assert rig.path.unacknowledged_bytes == sum(rig.path.leader_bytes().values()) == 0
    await asyncio.gather(*rig.tasks)


async def test_reading_waits_for_a_leader_with_touches_at_the_common_bound() -> None:
    rig = PacedRig(OutboxSettings(gather_parts=1, relay_parts=10, unacknowledged_bytes=20_000, slow_seconds=1e-6))

    async def submit() -> None:
        for version in range(1, 301):
            await rig.path.submit(f"0-1-{version}", Translated(touches=(touch(version),)))

    submitting = asyncio.ensure_future(submit())
    await turns(500)
    assert not submitting.done()
    assert rig.path.unacknowledged_bytes == 20_000
    while not submitting.done():
        rig.paced.permits.release()
        await turns()
    await rig.take_all()
    assert {each for _, relay in rig.leaders.relayed for each in relay.touches} == set(map(touch, range(1, 301)))
    await asyncio.gather(*rig.tasks)


async def test_touches_of_a_leader_that_is_away_are_given_up_at_the_common_bound_only(rig: PacedRig) -> None:
    rig.leaders.failures["leader-1"] = lambda _: Unavailable("away")
    for version in range(1, 100):
        await rig.path.submit(f"0-1-{version}", Translated(touches=(touch(version, 0),)))
    await until(lambda: rig.path.retried_relays > 0)
    await rig.change_shards(100, (0,))
    assert rig.path.dropped_parts == 0
    await rig.change_shards(101, (0,))
    assert rig.path.dropped_parts > 0
    rig.leaders.failures.clear()
    await rig.path.drained()
    assert any(relay.bulk_shards == (0,) for _, relay in rig.leaders.relayed)


async def test_several_slow_leaders_share_the_common_bound() -> None:
    settings = OutboxSettings(gather_parts=1, relay_bytes=1_000, unacknowledged_bytes=5_000, slow_seconds=1e-6)
    rig = PacedRig(settings)
    rig.leaders.open.clear()
    await rig.submit(*range(1, 200))
    assert rig.path.collapses["slow"] > 1
    assert rig.most_bytes <= 6_000
    rig.leaders.open.set()
    await rig.take_all()
    for shard, leader in ((0, "leader-1"), (1, "leader-2")):
        relays = [relay for name, relay in rig.leaders.relayed if name == leader]
        assert any(relay.bulk_shards == (shard,) for relay in relays)
        assert relays[-1].spans[-1].number == 199
    assert rig.path.unacknowledged_bytes == 0
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


def outbox_of(*contents: Content) -> LeaderOutbox:
    """Return an outbox with one transaction for each content, of shard 1."""
    outbox = LeaderOutbox("leader-1")
    for number, content in enumerate(contents, 1):
        outbox.add(Part(Receipt([]), 1, content, 100, Span(1, "db@1", number - 1, number)))
    return outbox


def changes(*versions: int) -> list[ShardMessages]:
    return [ShardMessages(1, 1, (change(1, version),)) for version in versions]


def test_a_collapse_of_a_slow_leader_keeps_touches_in_their_place() -> None:
    outbox = outbox_of(touch(1), *changes(2, 3), touch(4), touch(5), *changes(6, 7))
    dropped, freed_bytes = outbox.collapse(is_slow=True, with_touches=True)
    assert [(part.content, part.span.after, part.span.number) for part in outbox.parts] == [
        *((touch(1), 0, 1), (1, 1, 3), (touch(4), 3, 4), (touch(5), 4, 5), (1, 5, 7))
    ]
    assert (len(dropped), freed_bytes, outbox.bytes, outbox.touch_bytes, outbox.waiting_bytes) == (2, 200, 300, 300, 0)


def test_a_collapse_replaces_touches_that_nobody_accepts_only_when_it_must() -> None:
    for away in (True, False):
        outbox = outbox_of(touch(1), *changes(2), touch(3))
        outbox.failures = int(away)
        if not away:
            outbox.hold((1,))
            outbox.rejected.add(1)
        assert outbox.collapse() == ([], 100)
        dropped, _ = outbox.collapse(with_touches=True)
        (part,) = outbox.take_all()
        assert (part.content, part.span) == (1, Span(1, "db@1", 0, 3))
        assert (len(dropped), outbox.bytes, outbox.touch_bytes) == (2, 0, 0)


def test_a_collapse_of_a_slow_leader_keeps_the_touches_of_a_held_shard_that_may_be_accepted() -> None:
    outbox = outbox_of(*changes(1, 2), touch(3), *changes(4))
    outbox.hold((1,))
    outbox.collapse(is_slow=True, with_touches=True)
    assert [part.content for part in outbox.held[1]] == [1, touch(3), 1]
    assert (outbox.bytes, outbox.waiting_bytes) == (100, 0)


def test_the_time_of_a_relay_with_touches_does_not_make_a_leader_slow() -> None:
    settings = OutboxSettings(relay_bytes=200, slow_seconds=2.0)
    outbox = outbox_of(touch(1), *changes(2, 3))
    outbox.begin_relay(outbox.parts, list(outbox.parts)[:2], 100.0)
    assert (outbox.sending_bytes, outbox.waiting_bytes) == (100, 100)
    assert outbox.slow_at(settings) == inf
    outbox.end_relay()
    list(outbox.take_acknowledged(outbox.parts, 2, 200.0))
    assert outbox.slow_at(settings) == inf
    assert (outbox.bytes, outbox.touch_bytes) == (100, 0)
