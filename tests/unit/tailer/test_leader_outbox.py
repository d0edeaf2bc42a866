"""Messages that the region's leader published itself wait for more of their kind; no others do."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import msgspec

from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings
from tao.model.changes import ShardInvalidation, ShardMessages
from tao.model.delivery import Delivery, Position, Span
from tao.model.errors import NotMine, Unavailable
from tao.model.relay import Touch
from tao.planning.row_events import Translated
from tao.routing.routes import Routes
from tao.tailer.binlog import BinlogTransaction, UndecodedRows
from tao.tailer.leader_outbox import LeaderOutbox, Part, Receipt, head_of, relay_of
from tao.tailer.settings import OutboxSettings
from tests.rigs.leader_rig import make_id, make_topology
from tests.rigs.pacing import until
from tests.unit.tailer.test_delivery_path import BOTH, Rig, about, change, turns

NEVER = OutboxSettings(gather_seconds=3_600, gather_parts=4, backoff_first_seconds=0.001, backoff_max_seconds=0.002)


async def test_messages_that_the_leader_published_itself_wait_for_more_and_share_a_relay() -> None:
    rig = Rig(replace(NEVER, gather_seconds=0.05))
    for version in range(1, 4):
        await rig.path.submit(f"t{version}", about(change(0, version)))
        await turns()
    assert not rig.leaders.relayed
    await rig.path.drained()
    assert [len(relay.changes[0].messages) for _, relay in rig.leaders.relayed] == [3]
    assert rig.acknowledged == ["t1", "t2", "t3"]


async def test_enough_parts_are_sent_without_waiting() -> None:
    rig = Rig(NEVER)
    for version in range(1, 7):
        await rig.path.submit(f"t{version}", about(change(0, version)))
        await turns()
    assert [len(relay.changes[0].messages) for _, relay in rig.leaders.relayed] == [4]
    for version in range(7, 9):
        await rig.path.submit(f"t{version}", about(change(0, version)))
    await rig.path.drained()
    assert rig.leaders.versions(0) == list(range(1, 9))


async def test_an_urgent_part_takes_the_deferred_parts_of_its_leader_along() -> None:
    for urgent, proven in ((Translated(touches=(Touch(make_id(1, 0), 4, 9),)), 0), (about(), 5_000)):
        rig = Rig(NEVER)
        await rig.path.submit("t1", about(change(0, 1)))
        await turns()
        assert not rig.leaders.relayed
        await rig.path.submit("t2", urgent, proven)
        await rig.path.drained()
        assert [relay.changes[0].shard for leader, relay in rig.leaders.relayed if leader == "leader-1"] == [0]


async def test_parts_without_a_position_or_committed_in_another_region_are_sent_at_once() -> None:
    for gtid, master in (("", "east"), ("t1", "west")):
        rig = Rig(NEVER)
        topology = make_topology(leaders=BOTH)
        databases = tuple(msgspec.structs.replace(each, master_region=master) for each in topology.databases)
        rig.routes = Routes(msgspec.structs.replace(topology, databases=databases))
        await rig.path.submit(gtid, about(change(0, 1)))
        await rig.path.drained()
        assert rig.leaders.versions(0) == [1]


async def test_a_leader_that_comes_back_receives_deferred_parts_at_once() -> None:
    rig = Rig(NEVER)
    rig.leaders.failures["leader-1"] = lambda _: Unavailable("away") if len(rig.leaders.attempts) < 3 else None
    for version in range(1, 6):
        await rig.path.submit(f"t{version}", about(change(0, version)))
    await rig.path.submit("t6", about(change(0, 6)), 5_000)
    await rig.path.drained()
    assert rig.leaders.versions(0) == [1, 2, 3, 4, 5, 6]


async def test_parts_that_waited_behind_a_held_shard_are_not_deferred_again_once_it_is_accepted() -> None:
    rig = Rig(NEVER)
    rig.leaders.failures["leader-1"] = lambda _: NotMine("no", 1)
    await rig.path.submit("t1", Translated(bulk_shards=(0,)))
    await until(lambda: bool(rig.path._outboxes["leader-1"].rejected))
    await rig.path.submit("t2", about(), 5_000)
    rig.leaders.failures.clear()
    await until(lambda: any(relay.source_unix_ms for leader, relay in rig.leaders.relayed if leader == "leader-1"))
    await rig.path.drained()
    assert rig.acknowledged == ["t1", "t2"]


def test_undecoded_rows_count_for_the_messages_that_a_leader_applies_for_them() -> None:
    settings = OutboxSettings(relay_parts=10)
    rows = UndecodedRows(1, 100, lambda: BinlogTransaction(gtid=""), messages=4)
    parts = deque(Part(Receipt([]), 1, rows, 100, Span(1, "db@1", number, number + 1)) for number in range(8))
    assert len(head_of(parts, settings)) == 2
    large = Part(Receipt([]), 1, UndecodedRows(1, 100, rows.decode, messages=40), 100, Span(1, "db@1", 8, 9))
    assert head_of(deque([large, *parts]), settings) == [large], "or it would never be sent"


def parts_of_shard(*spans: Span) -> LeaderOutbox:
    """Return the outbox of a leader that is away, with one change of shard 1 for each span."""
    outbox = LeaderOutbox("leader-1")
    outbox.failures = 1
    for span in spans:
        outbox.add(Part(Receipt([]), 1, ShardMessages(1, 1, (change(1, span.number),)), 100, span))
    return outbox


def test_an_invalidation_stands_for_all_parts_that_it_replaces() -> None:
    outbox = parts_of_shard(Span(1, "db@1", 8, 20), Span(1, "db@1", 20, 22), Span(1, "db@1", 22, 24, more=True))
    dropped, _ = outbox.collapse()
    assert [(part.content, part.span) for part in outbox.parts] == [(1, Span(1, "db@1", 8, 24))]
    assert len(dropped) == 2


def test_parts_of_several_histories_are_replaced_by_an_invalidation_of_each() -> None:
    outbox = parts_of_shard(Span(1, "db@1", 8, 20), Span(1, "db@1", 20, 22), Span(1, "db@2", 0, 3), Span(1, "", 0, 0))
    outbox.collapse()
    assert [(part.content, part.span) for part in outbox.parts] == [
        (1, Span(1, "db@1", 8, 22)),
        (1, Span(1, "db@2", 0, 3)),
        (1, Span(1, "", 0, 0)),
    ]


def test_a_subscriber_that_had_some_of_the_replaced_parts_receives_the_invalidation() -> None:
    """It had them of the leader that is away, and subscribes at the next one when that has taken the relay."""
    outbox = parts_of_shard(Span(1, "db@1", 8, 20), Span(1, "db@1", 20, 22))
    outbox.collapse()
    relay = relay_of(outbox.parts, "db")
    leader = Publisher(DeliverySettings(), "run-2", lambda _: "db")
    leader.open_shard(1, 1, 1)
    leader.publish_relay([ShardMessages(1, 1, (ShardInvalidation(1),))], relay.spans)
    deliveries: list[Delivery] = []
    leader.subscribe("follower", [Position(1, "run-1/1", 24, "db@1", 20)], deliveries.append)
    (part,) = deliveries[0].shards
    assert part.reset or (part.messages is not None and part.messages.messages == (ShardInvalidation(1),))
