"""The binlog read again: exactly what is missing, or nothing at all."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings as PublishingSettings
from tao.model.changes import ObjectChange, ShardMessages
from tao.model.delivery import Delivery, Position, Span
from tao.model.errors import Unavailable
from tao.observability.logs import logger
from tao.planning.row_events import Translated
from tao.tailer.binlog import BinlogLost, BinlogTransaction
from tao.tailer.rewind import Rewind
from tao.tailer.settings import DeliverySettings, RewindSettings
from tests.rigs.leader_rig import make_id
from tests.rigs.pacing import until
from tests.unit.tailer.test_delivery_path import QUICK, Rig

H = "db@1:0-1"


class Source:
    """A binlog in which transaction n changed shard n % 2 (leader-1 has 0, leader-2 has 1)."""

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
    settings: RewindSettings = USUAL, telling: DeliverySettings = QUICK
) -> tuple[Rig, Source, Rewind, asyncio.Task[None]]:
    """Everything up to 20 was told and acknowledged."""
    rig, source = Rig(telling), Source()
    rig.continuity.begin("0-1-0")
    for number in range(1, 21):
        await rig.path.submit(f"0-1-{number}", meaning_of(BinlogTransaction(gtid=f"0-1-{number}")))
    await rig.path.drained()
    rig.leaders.told.clear()
    rewind = Rewind(
        source,
        rig.continuity,
        rig.path,
        meaning_of,
        lambda history, number: f"0-1-{number}",
        DeliverySettings(),
        settings,
        logger("test"),
    )
    return rig, source, rewind, asyncio.create_task(rewind.run())


async def refused(rewind: Rewind) -> None:
    await until(lambda: rewind.refused)


async def test_what_followed_a_position_is_told_again_to_the_leader_of_now_and_nothing_of_other_shards() -> None:
    rig, source, rewind, task = await rewinding()
    rewind.wanted([Span(1, H, 15, 15)])
    await until(lambda: rewind.shards)
    await rig.path.drained()
    assert source.asked == ["0-1-15"]
    assert rig.leaders.versions(1, "leader-2") == [17, 19]
    assert rig.leaders.versions(0) == []
    spans = [span for _, relay in rig.leaders.told for span in relay.spans]
    assert spans[0].after == 15
    assert spans[-1].number == 19, "that is the newest of the shard"
    assert not spans[-1].more
    task.cancel()


async def test_of_several_relays_with_what_is_told_again_all_but_the_last_say_that_there_is_more() -> None:
    rig, _, rewind, task = await rewinding(telling=dataclasses.replace(QUICK, relay_parts=1))
    rewind.wanted([Span(1, H, 15, 15)])
    await until(lambda: rewind.shards)
    await rig.path.drained()
    spans = [span for _, relay in rig.leaders.told for span in relay.spans]
    assert spans == [Span(1, H, 15, 16, more=True), Span(1, H, 16, 18, more=True), Span(1, H, 18, 19)]
    task.cancel()


async def test_what_is_told_again_and_becomes_void_for_room_leaves_nothing_to_be_waited_for() -> None:
    rig, _, rewind, task = await rewinding()
    rig.leaders.failures["leader-2"] = lambda _: Unavailable("away")
    rewind.wanted([Span(1, H, 15, 15)])
    await until(lambda: rewind.shards and rig.path.repeated)
    lane = rig.path._lanes["leader-2"]
    assert any(part.span.more for part in lane.parts)
    lane.collapse()
    assert [(part.content, part.span.more) for part in lane.parts] == [(1, False)]
    task.cancel()


async def test_a_tailer_that_was_restarted_tells_again_what_a_leader_has_not_heard_of_yet() -> None:
    """Its position on disk was ahead of the last proof, up to which a leader knows that a shard has nothing new."""
    rig, source, rewind, task = await rewinding()
    rig.continuity.begin("0-1-20")
    leader = Publisher(PublishingSettings(), "run-1", lambda _: "db", None, lambda seconds, do: None)
    leader.open_shard(1, 1, 1)
    leader.relayed((), [Span(1, H, 17, 17)])
    deliveries: list[Delivery] = []
    subscription = leader.subscribe("f", [Position(1, "", 0)], deliveries.append)
    news = meaning_of(BinlogTransaction(gtid="0-1-21")).messages
    (span,) = rig.continuity.spans_of("0-1-21", [1])
    leader.relayed(news, [span])
    rig.continuity.acknowledged(span)
    assert subscription.waiting == 1, "18 to 20 may have been told to somebody else"
    rewind.wanted(leader.wants("db"))
    await until(lambda: rewind.shards or rig.leaders.told)
    await rig.path.drained()
    assert source.asked == ["0-1-17"], "where the leader is, which is before the place where reading began"
    for _, relay in rig.leaders.told:
        leader.relayed(relay.changes, relay.spans)
    assert (subscription.waiting, subscription.continued) == (0, 1)
    runs = [part.messages for each in deliveries for part in each.shards if part.messages is not None]
    told = {each.after for run in runs for each in run.messages if isinstance(each, ObjectChange)}
    assert told == {19, 21}
    task.cancel()


async def test_what_is_read_is_told_before_the_reader_which_waits_for_the_server_has_ended() -> None:
    rig, source, rewind, task = await rewinding()
    source.may_end.clear()
    rewind.wanted([Span(1, H, 15, 15)])
    await until(lambda: rig.leaders.versions(1, "leader-2") == [17, 19])
    source.may_end.set()
    task.cancel()


async def test_a_shard_that_needs_no_reading_is_answered_at_once() -> None:
    rig, source, rewind, task = await rewinding()
    rewind.wanted([Span(1, H, 19, 19), Span(0, H, 30, 30)])
    await rig.path.drained()
    spans = {span for _, relay in rig.leaders.told for span in relay.spans}
    assert spans == {Span(1, H, 19, 19), Span(0, H, 20, 20)}
    assert source.asked == []
    task.cancel()


async def test_a_binlog_that_is_purged_or_too_long_tells_nothing_and_is_not_asked_again() -> None:
    for lost, settings in ((True, RewindSettings()), (False, RewindSettings(max_transactions=2))):
        rig, source, rewind, task = await rewinding(settings)
        source.lost = lost
        rewind.wanted([Span(1, H, 3, 3)])
        await refused(rewind)
        assert rig.leaders.told == []
        rewind.wanted([Span(1, H, 3, 3)])
        await rig.path.drained()
        assert [relay.spans for _, relay in rig.leaders.told] == [(Span(1, H, 19, 19),)]
        assert len(source.asked) == 1
        task.cancel()
