"""Reading the binlog again: exactly the missing messages are sent, or none."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings
from tao.model.changes import ObjectChange, ShardMessages
from tao.model.delivery import Delivery, Position, Span
from tao.model.errors import Unavailable
from tao.observability.logs import logger
from tao.planning.row_events import Translated
from tao.tailer.binlog import BinlogLost, BinlogTransaction
from tao.tailer.continuity import Rewind
from tao.tailer.leader_outbox import contents_of
from tao.tailer.settings import OutboxSettings, RewindSettings
from tests.rigs.leader_rig import make_id
from tests.rigs.pacing import until
from tests.unit.tailer.test_delivery_path import QUICK, Rig

H = "db@1:0-1"


class Source:
    """A binlog in which transaction n changes shard n % 2 (leader-1 leads 0, leader-2 leads 1)."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.lost = False
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def current_position(self) -> str:
        return "0-1-20"

    def position(self, stored: str) -> Any:
        raise AssertionError("not asked for")

    async def batches(self, position: str) -> AsyncGenerator[Sequence[BinlogTransaction], None]:
        self.asked.append(position)
        if self.lost:
            raise BinlogLost("purged")
        try:
            for number in range(int(position.rpartition("-")[2]) + 1, 22):
                yield [BinlogTransaction(gtid=f"0-1-{number}")]
        finally:
            await self.may_end.wait()


def meaning_of(transaction: BinlogTransaction) -> Translated:
    number = int(transaction.gtid.rpartition("-")[2])
    shard = number % 2
    change = ObjectChange(make_id(1, shard), number - 1, number, 1, b"x")
    return Translated((ShardMessages(shard, 1, (change,)),))


USUAL = RewindSettings()


async def rewinding(
    settings: RewindSettings = USUAL, relays: OutboxSettings = QUICK
) -> tuple[Rig, Source, Rewind, asyncio.Task[None]]:
    """Return a rig in which everything up to transaction 20 is acknowledged, with a `Rewind` that runs."""
    rig, source = Rig(relays), Source()
    rig.continuity.begin("0-1-0")
    for number in range(1, 21):
        await rig.path.submit(f"0-1-{number}", meaning_of(BinlogTransaction(gtid=f"0-1-{number}")))
    await rig.path.drained()
    rig.leaders.relayed.clear()
    rewind = Rewind(
        source,
        rig.continuity,
        rig.path.resend,
        lambda transaction: contents_of(meaning_of(transaction), OutboxSettings()),
        lambda history, number: f"0-1-{number}",
        settings,
        logger("test"),
    )
    return rig, source, rewind, asyncio.create_task(rewind.run())


async def refused(rewind: Rewind) -> None:
    await until(lambda: rewind.failed_shards)


async def test_messages_after_a_position_are_sent_again_to_the_present_leader_for_the_wanted_shards_only() -> None:
    rig, source, rewind, task = await rewinding()
    rewind.request([Span(1, H, 15, 15)])
    await until(lambda: rewind.shards)
    await rig.path.drained()
    assert source.asked == ["0-1-15"]
    assert rig.leaders.versions(1, "leader-2") == [17, 19]
    assert rig.leaders.versions(0) == []
    spans = [span for _, relay in rig.leaders.relayed for span in relay.spans]
    assert spans[0].after == 15
    assert spans[-1].number == 19, "the shard's newest transaction"
    assert not spans[-1].more
    task.cancel()


async def test_all_but_the_last_relay_of_resent_messages_say_that_there_is_more() -> None:
    rig, _, rewind, task = await rewinding(relays=dataclasses.replace(QUICK, relay_parts=1))
    rewind.request([Span(1, H, 15, 15)])
    await until(lambda: rewind.shards)
    await rig.path.drained()
    spans = [span for _, relay in rig.leaders.relayed for span in relay.spans]
    assert spans == [
        Span(1, H, 15, 16, more=True),
        Span(1, H, 16, 18, more=True, within=True),
        Span(1, H, 18, 19, within=True),
    ]
    task.cancel()


async def test_resent_messages_that_are_reduced_to_invalidations_leave_nothing_pending() -> None:
    rig, _, rewind, task = await rewinding()
    rig.leaders.failures["leader-2"] = lambda _: Unavailable("away")
    rewind.request([Span(1, H, 15, 15)])
    await until(lambda: rewind.shards and rig.path.retried_relays)
    outbox = rig.path._outboxes["leader-2"]
    assert any(part.span.more for part in outbox.parts)
    outbox.collapse()
    assert [(part.content, part.span.more) for part in outbox.parts] == [(1, False)]
    task.cancel()


async def test_a_restarted_tailer_resends_what_a_leader_may_have_missed() -> None:
    """Its stored position was ahead of the last proof, up to which a leader knows that a shard has nothing new."""
    rig, source, rewind, task = await rewinding()
    rig.continuity.begin("0-1-20")
    leader = Publisher(DeliverySettings(), "run-1", lambda _: "db", None, lambda seconds, do: None)
    leader.open_shard(1, 1, 1)
    leader.publish_relay((), [Span(1, H, 17, 17)])
    deliveries: list[Delivery] = []
    subscription = leader.subscribe("f", [Position(1, "", 0)], deliveries.append)
    news = meaning_of(BinlogTransaction(gtid="0-1-21")).messages
    (span,) = rig.continuity.spans_of("0-1-21", [1])
    leader.publish_relay(news, [span])
    rig.continuity.acknowledge(span)
    assert subscription.waiting == 1, "another leader may have received 18 to 20"
    rewind.request(leader.take_wanted("db"))
    await until(lambda: rewind.shards or rig.leaders.relayed)
    await rig.path.drained()
    assert source.asked == ["0-1-17"], "the leader's position, which is before the one where reading began"
    for _, relay in rig.leaders.relayed:
        leader.publish_relay(relay.changes, relay.spans)
    assert (subscription.waiting, subscription.continued) == (0, 1)
    runs = [part.messages for each in deliveries for part in each.shards if part.messages is not None]
    received = {each.after for run in runs for each in run.messages if isinstance(each, ObjectChange)}
    assert received == {19, 21}
    task.cancel()


async def test_messages_are_resent_before_the_reader_is_closed() -> None:
    rig, source, rewind, task = await rewinding()
    source.may_end.clear()
    rewind.request([Span(1, H, 15, 15)])
    await until(lambda: rig.leaders.versions(1, "leader-2") == [17, 19])
    source.may_end.set()
    task.cancel()


async def test_a_shard_that_needs_no_reading_is_answered_at_once() -> None:
    rig, source, rewind, task = await rewinding()
    rewind.request([Span(1, H, 19, 19), Span(0, H, 30, 30)])
    await rig.path.drained()
    spans = {span for _, relay in rig.leaders.relayed for span in relay.spans}
    assert spans == {Span(1, H, 19, 19), Span(0, H, 20, 20)}
    assert source.asked == []
    task.cancel()


async def test_a_binlog_that_is_purged_or_too_long_is_not_resent_and_not_read_again() -> None:
    for lost, settings in ((True, RewindSettings()), (False, RewindSettings(max_transactions=2))):
        rig, source, rewind, task = await rewinding(settings)
        source.lost = lost
        rewind.request([Span(1, H, 3, 3)])
        await refused(rewind)
        assert rig.leaders.relayed == []
        rewind.request([Span(1, H, 3, 3)])
        await rig.path.drained()
        assert [relay.spans for _, relay in rig.leaders.relayed] == [(Span(1, H, 19, 19),)]
        assert len(source.asked) == 1
        task.cancel()
