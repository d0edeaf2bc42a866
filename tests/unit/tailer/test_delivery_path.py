"""Relays to leaders: order, retries, bounds, and when a transaction is finished."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tao.model.changes import ListInvalidation, Message, ObjectChange, ObjectInvalidation, ShardMessages
from tao.model.errors import NotMine, TaoError, TooLarge, Unavailable
from tao.model.relay import Relay, Relayed, Touch
from tao.model.topology import CacheServer
from tao.observability.logs import logger
from tao.planning.row_events import Translated
from tao.routing.routes import Routes
from tao.tailer.continuity import Continuity
from tao.tailer.delivery_path import DeliveryPath, RelayScope
from tao.tailer.settings import OutboxSettings
from tao.topology import edits
from tests.rigs.leader_rig import make_id, make_topology

QUICK = OutboxSettings(gather_parts=1, backoff_first_seconds=0.001, backoff_max_seconds=0.002)
BOTH: dict[int, tuple[str, ...]] = {0: ("leader-1",), 1: ("leader-2",), 2: ("leader-1",)}


class Leaders:
    """A `LeaderPort` that records relays by leader; leaders can be away, hold answers back, or not own a shard."""

    def __init__(self) -> None:
        self.relayed: list[tuple[str, Relay]] = []
        self.attempts: list[tuple[str, Relay]] = []
        self.failures: dict[str, Callable[[Relay], TaoError | None]] = {}
        self.open = asyncio.Event()
        self.open.set()
        self.under_way: dict[str, int] = {}

    async def relay(self, leader: CacheServer, relay: Relay, timeout_seconds: float) -> Relayed:
        assert not self.under_way.get(leader.name)
        self.under_way[leader.name] = 1
        try:
            self.attempts.append((leader.name, relay))
            await self.open.wait()
            fails = self.failures.get(leader.name)
            if fails is not None and (failure := fails(relay)) is not None:
                raise failure
            self.relayed.append((leader.name, relay))
        finally:
            self.under_way[leader.name] = 0
        return Relayed()

    def versions(self, shard: int, leader: str | None = None) -> list[int]:
        """Return the versions of the relayed object changes, in order."""
        return [
            message.after if isinstance(message, ObjectChange) else -1
            for name, relay in self.relayed
            for each in relay.changes
            for message in each.messages
            if each.shard == shard and leader in (None, name)
        ]


class Rig:
    def __init__(self, settings: OutboxSettings = QUICK, leaders: Leaders | None = None) -> None:
        self.leaders = leaders or Leaders()
        self.routes = Routes(make_topology(leaders=BOTH))
        self.next_routes: Routes | None = None
        self.acknowledged: list[str] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.continuity = Continuity("db", lambda: 1, lambda _: True)
        self.path = DeliveryPath(
            RelayScope("east", "db", lambda: self.routes, lambda: self.refresh()),  # noqa: PLW0108 - tests replace it
            self.leaders,
            self.continuity,
            self.acknowledged.append,
            lambda job: self.tasks.add(asyncio.create_task(job)),
            settings,
            logger("test"),
        )

    async def refresh(self) -> None:
        if self.next_routes is not None:
            self.routes = self.next_routes


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    for task in rig.tasks:
        task.cancel()
    await asyncio.gather(*rig.tasks, return_exceptions=True)


def change(shard: int, version: int, data: bytes = b"x") -> ObjectChange:
    return ObjectChange(make_id(1, shard), version - 1, version, 1, data)


def about(*messages: Message) -> Translated:
    return Translated(tuple(ShardMessages(message.shard, 1, (message,)) for message in messages))


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_each_leader_receives_its_shards_messages_in_order(rig: Rig) -> None:
    for version in range(1, 6):
        await rig.path.submit(f"t{version}", about(change(0, version), change(1, version), change(2, version)))
    await rig.path.drained()
    for shard, leader in ((0, "leader-1"), (1, "leader-2"), (2, "leader-1")):
        assert rig.leaders.versions(shard, leader) == rig.leaders.versions(shard) == [1, 2, 3, 4, 5]
    assert rig.acknowledged == ["t1", "t2", "t3", "t4", "t5"]
    assert rig.path.unacknowledged_bytes == 0
    assert all(relay.source == "db" for _, relay in rig.leaders.relayed)


async def test_parts_queued_while_a_relay_is_under_way_share_the_next_relay(rig: Rig) -> None:
    rig.leaders.open.clear()
    for version in range(1, 9):
        await rig.path.submit(f"t{version}", about(change(0, version)))
        await turns()
    rig.leaders.open.set()
    await rig.path.drained()
    assert [len(relay.changes[0].messages) for _, relay in rig.leaders.relayed] == [1, 7]


async def test_a_transaction_is_finished_only_after_all_before_it(rig: Rig) -> None:
    rig.leaders.failures["leader-1"] = lambda _: Unavailable("away")
    await rig.path.submit("t1", about(change(0, 1)))
    await rig.path.submit("t2", about(change(1, 1)))
    await rig.path.submit("t3", Translated())
    await turns(200)
    assert rig.leaders.versions(1) == [1]
    assert rig.acknowledged == []
    del rig.leaders.failures["leader-1"]
    await rig.path.drained()
    assert rig.acknowledged == ["t1", "t2", "t3"]


async def test_a_transaction_without_messages_is_finished_at_once(rig: Rig) -> None:
    await rig.path.submit("t1", Translated())
    await rig.path.submit("", Translated())
    assert rig.acknowledged == ["t1"]


async def test_relays_to_a_leader_that_is_away_are_retried_in_the_same_order(rig: Rig) -> None:
    failing = 3

    def away(_: Relay) -> TaoError | None:
        nonlocal failing
        failing -= 1
        return Unavailable("away") if failing >= 0 else None

    rig.leaders.failures["leader-1"] = away
    for version in range(1, 6):
        await rig.path.submit(f"t{version}", about(change(0, version)))
        await turns()
    await rig.path.drained()
    assert rig.leaders.versions(0) == [1, 2, 3, 4, 5]
    assert rig.path.retried_relays == 3


async def test_all_remaining_parts_of_a_moved_shard_go_to_its_new_leader(rig: Rig) -> None:
    rig.leaders.failures["leader-1"] = lambda relay: (
        NotMine("shard 0 is not mine", 2) if any(each.shard == 0 for each in relay.changes) else None
    )
    rig.next_routes = Routes(make_topology(2, leaders=BOTH | {0: ("leader-2",)}))
    rig.leaders.open.clear()
    for version in range(1, 4):
        await rig.path.submit(f"t{version}", about(change(0, version), change(2, version)))
    rig.leaders.open.set()
    await rig.path.drained()
    assert rig.leaders.versions(0, "leader-2") == [1, 2, 3]
    assert rig.leaders.versions(2, "leader-1") == [1, 2, 3]
    assert rig.acknowledged == ["t1", "t2", "t3"]


async def test_a_moved_shard_keeps_its_order_while_its_former_outbox_has_parts_of_it(rig: Rig) -> None:
    rig.leaders.open.clear()
    await rig.path.submit("t1", about(change(0, 1)))
    await turns()
    rig.routes = Routes(make_topology(2, leaders=BOTH | {0: ("leader-2",)}))
    await rig.path.submit("t2", about(change(0, 2)))
    await turns()
    assert [leader for leader, _ in rig.leaders.attempts] == ["leader-1"]
    rig.leaders.open.set()
    await rig.path.drained()
    await rig.path.submit("t3", about(change(0, 3)))
    await rig.path.drained()
    assert rig.leaders.versions(0) == [1, 2, 3]
    assert [leader for leader, _ in rig.leaders.relayed][-1] == "leader-2"


async def test_a_leader_that_left_the_topology_needs_no_proof(rig: Rig) -> None:
    rig.leaders.failures["leader-2"] = lambda _: Unavailable("gone")
    await rig.path.submit("t1", about(change(1, 1)), 77)
    await turns()
    rig.routes = Routes(make_topology(2, leader_servers=("leader-1",)))
    await rig.path.drained()
    assert rig.leaders.versions(1, "leader-1") == [1]
    assert rig.acknowledged == ["t1"]


async def test_submit_waits_while_too_much_is_unacknowledged() -> None:
    rig = Rig(OutboxSettings(unacknowledged_bytes=1_000))
    rig.leaders.open.clear()

    async def submit() -> None:
        for version in range(1, 20):
            await rig.path.submit(f"t{version}", about(change(0, version)))

    submitting = asyncio.create_task(submit())
    await turns(100)
    assert not submitting.done()
    assert 1_000 <= rig.path.unacknowledged_bytes <= 1_500
    rig.leaders.open.set()
    await submitting
    await rig.path.drained()
    assert rig.leaders.versions(0) == list(range(1, 20))
    await asyncio.gather(*rig.tasks)


async def test_every_leader_receives_the_proof_of_a_time_after_all_messages_up_to_it(rig: Rig) -> None:
    rig.leaders.open.clear()
    await rig.path.submit("t1", about(change(0, 1)))
    await turns()
    await rig.path.submit("t2", about(change(0, 2)), 5_000)
    await turns()
    rig.leaders.open.set()
    await rig.path.drained()
    proofs = [(leader, relay.source_unix_ms) for leader, relay in rig.leaders.relayed]
    assert [each for each in proofs if each[0] == "leader-1"] == [("leader-1", 0), ("leader-1", 5_000)]
    assert [each for each in proofs if each[0] == "leader-2"] == [("leader-2", 5_000)]


async def test_no_time_is_proved_to_a_shards_new_leader_while_the_former_outbox_has_parts_of_it(rig: Rig) -> None:
    rig.leaders.failures["leader-1"] = lambda _: Unavailable("away") if not rig.leaders.versions(1) else None
    await rig.path.submit("t1", about(change(0, 1)))
    rig.routes = Routes(make_topology(2, leaders=BOTH | {0: ("leader-2",)}))
    await rig.path.submit("t2", about(), 5_000)
    await turns(3)
    proofs = [relay.source_unix_ms for leader, relay in rig.leaders.attempts if leader == "leader-2"]
    assert not any(proofs)
    await rig.path.submit("t3", about(change(1, 1)))  # after which leader-1 is there
    await rig.path.drained()
    await rig.path.submit("t4", about(), 6_000)
    await rig.path.drained()
    assert rig.leaders.relayed[-1][1].source_unix_ms == 6_000
    assert rig.leaders.versions(0) == [1]


async def test_touches_go_to_the_leader_of_the_shard(rig: Rig) -> None:
    touch = Touch(make_id(1, 0), 4, 9)
    await rig.path.submit("t1", Translated(touches=(touch,), bulk_shards=(1,)))
    await rig.path.drained()
    assert {(leader, relay.touches, relay.bulk_shards) for leader, relay in rig.leaders.relayed} == {
        *(("leader-1", (touch,), ()), ("leader-2", (), (1,))),
    }
    assert rig.acknowledged == ["t1"]


async def test_content_that_a_leader_rejects_is_replaced_by_invalidations_of_its_shards(rig: Rig) -> None:
    rig.leaders.failures["leader-1"] = lambda relay: TooLarge("no") if relay.changes else None
    await rig.path.submit("t1", about(change(0, 1), change(2, 1)))
    await rig.path.drained()
    assert [relay.bulk_shards for _, relay in rig.leaders.relayed] == [(0, 2)]
    assert rig.path.rejected_relays == 1
    assert rig.acknowledged == ["t1"]


async def test_parts_of_shards_outside_the_topology_are_counted_and_skipped(rig: Rig) -> None:
    await rig.path.submit(
        "t1", Translated((ShardMessages(900, 1, (change(900, 1),)),), (Touch(make_id(1, 901), 0, 1),))
    )
    assert rig.acknowledged == ["t1"]
    assert rig.path.unrouted_parts == 2


async def test_relays_are_bounded_and_an_oversized_message_becomes_an_invalidation() -> None:
    rig = Rig(OutboxSettings(relay_bytes=2_000, relay_parts=3, large_message_bytes=5_000))
    large = ObjectChange(make_id(2, 0), 7, 8, 1, b"x" * 6_000)
    messages = (*(change(0, version, b"y" * 500) for version in range(1, 12)), large)
    await rig.path.submit("t1", Translated((ShardMessages(0, 3, messages),)))
    await rig.path.drained()
    messages_sent = [message for _, relay in rig.leaders.relayed for each in relay.changes for message in each.messages]
    assert messages_sent == [*messages[:-1], ObjectInvalidation(large.id, 8)]
    assert max(len(each.messages) for _, relay in rig.leaders.relayed for each in relay.changes) <= 3
    assert {each.version_epoch for _, relay in rig.leaders.relayed for each in relay.changes} == {3}
    await rig.path.submit("t2", about(*(ListInvalidation(make_id(1, 0), number, 1) for number in range(50))))
    await rig.path.drained()
    assert all(len(relay.changes[0].messages) <= 3 for _, relay in rig.leaders.relayed)
    await asyncio.gather(*rig.tasks)


async def test_shards_of_a_leader_that_is_marked_down_go_to_its_substitute_at_once(rig: Rig) -> None:
    """Even when nothing has failed yet. No time is proved to a leader that is down."""
    rig.leaders.open.clear()
    await rig.path.submit("t1", about(change(0, 1)))
    await turns()
    for version in (2, 3):
        await rig.path.submit(f"t{version}", about(change(0, version)))
    rig.routes = Routes(edits.mark_server(make_topology(2, leaders=BOTH), "leader-1", True))
    await rig.path.submit("t4", about(), 5_000)
    rig.leaders.open.set()
    await rig.path.drained()
    assert rig.leaders.versions(0, "leader-1") == [1], "it was under way when the leader was marked down"
    assert rig.leaders.versions(0, "leader-2") == [2, 3]
    assert {leader for leader, relay in rig.leaders.relayed if relay.source_unix_ms} <= {"leader-2"}
    assert rig.acknowledged == ["t1", "t2", "t3", "t4"]


async def test_a_part_that_moves_behind_a_waiting_proof_invalidates_the_proof(rig: Rig) -> None:
    rig.leaders.open.clear()
    await rig.path.submit("t1", about(change(1, 1)))
    await rig.path.submit("t2", about(change(0, 1)))
    await turns()  # one relay to each leader is under way
    await rig.path.submit("t3", about(change(0, 2)))
    await rig.path.submit("t4", about(), 5_000)
    rig.routes = Routes(make_topology(2, leaders=BOTH | {0: ("leader-2",)}))
    rig.leaders.open.set()
    await rig.path.drained()
    proofs = [relay for leader, relay in rig.leaders.relayed if leader == "leader-2" and relay.source_unix_ms]
    assert not proofs
    await rig.path.submit("t5", about(), 6_000)
    await rig.path.drained()
    assert rig.leaders.relayed[-1][1].source_unix_ms == 6_000
