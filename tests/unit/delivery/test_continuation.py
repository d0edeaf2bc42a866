"""A subscriber with a binlog position from another leader: it continues when this leader has what follows the position,
waits while the tailer may send it, and is reset otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tao.delivery.inbox import Inbox
from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings
from tao.model.changes import ObjectInvalidation, ShardMessages
from tao.model.delivery import Delivery, Position, Span
from tests.rigs.memory_spool import MemorySpool, SpoolDisk

H = "db@1:0-1"
SETTINGS = DeliverySettings(log_messages_per_shard=4, max_delivery_messages=3)


class Leader:
    def __init__(
        self,
        disk: SpoolDisk | None = None,
        run: str = "run-1",
        call: Callable[[Callable[[], None]], object] = lambda do: do(),
    ) -> None:
        """``call`` runs what the spool reports."""
        self.timers: list[Callable[[], None]] = []
        spool = None if disk is None else MemorySpool(disk, call)
        self.publisher = Publisher(SETTINGS, run, lambda _: "db", spool, lambda _, do: self.timers.append(do))
        self.publisher.open_shard(1, 1, 1)
        self.stored = 0

    def relay(self, after: int, *numbers: int) -> None:
        """Relay messages of shard 1 that cover the transactions after ``after``, up to the last of ``numbers``."""
        messages = tuple(ObjectInvalidation(1 << 47 | 1, number) for number in numbers)
        span = Span(1, H, after, numbers[-1] if numbers else after)
        self.publisher.publish_relay([ShardMessages(1, 1, messages)], [span], self._stored)

    def relay_part(self, span: Span, version: int) -> None:
        """Relay a part of a transaction."""
        messages = (ObjectInvalidation(1 << 47 | 1, version),)
        self.publisher.publish_relay([ShardMessages(1, 1, messages)], [span], self._stored)

    def pass_time(self) -> None:
        while self.timers:
            self.timers.pop(0)()

    def _stored(self) -> None:
        self.stored += 1

    def subscribe(self, position: Position) -> list[Delivery]:
        deliveries: list[Delivery] = []
        subscription = self.publisher.subscribe("f", [position], deliveries.append)
        assert not subscription.closed
        return deliveries


def versions(deliveries: list[Delivery]) -> list[int]:
    runs = [part.messages.messages for each in deliveries for part in each.shards if part.messages is not None]
    return [message.version for run in runs for message in run if isinstance(message, ObjectInvalidation)]


def outcomes(deliveries: list[Delivery]) -> list[str]:
    parts = [part for each in deliveries for part in each.shards]
    return ["reset" if part.reset else "continued" if part.continued else "more" for part in parts]


def claim(deliveries: list[Delivery]) -> tuple[str, int]:
    position = deliveries[-1].shards[-1].position
    return position.source, position.reached


AT_11 = Position(1, "another run/1", 7, H, 11)


def test_a_subscriber_of_a_new_leader_waits_for_the_tailer_and_continues_without_a_reset() -> None:
    leader = Leader()
    deliveries = leader.subscribe(AT_11)
    assert outcomes(deliveries) == []
    assert leader.publisher.take_wanted("db") == [Span(1, H, 11, 11)]
    assert leader.publisher.take_wanted("db") == [], "each span is returned once"
    leader.relay(11, 13)
    assert outcomes(deliveries) == ["continued"]
    assert versions(deliveries) == [13]
    assert claim(deliveries) == (H, 13)


def test_a_subscriber_waits_for_messages_that_another_leader_received_meanwhile() -> None:
    leader = Leader()
    deliveries = leader.subscribe(AT_11)
    leader.relay(20, 21)
    assert outcomes(deliveries) == []
    leader.relay(11, 15)
    leader.relay(15, 20)
    assert outcomes(deliveries) == ["continued"]
    assert sorted(versions(deliveries)) == [15, 20, 21]
    assert claim(deliveries) == (H, 21)


def test_a_subscriber_whose_wait_expires_is_reset() -> None:
    leader = Leader()
    deliveries = leader.subscribe(AT_11)
    for timer in leader.timers:
        timer()
    assert outcomes(deliveries) == ["reset"]


def test_a_position_of_another_history_is_reset() -> None:
    leader = Leader()
    leader.relay(11, 12)
    assert outcomes(leader.subscribe(Position(1, "x", 1, "db@0:0-1", 12))) == ["reset"]


@pytest.mark.parametrize("is_resent", [True, False])
def test_messages_lost_with_a_leader_without_a_spool_are_resent_or_the_shard_is_reset(
    is_resent: bool,
) -> None:
    before = Leader()
    before.relay(10, 11)
    lost = before.subscribe(Position(1, "another run/1", 7, H, 11))
    before.relay(11, 12)
    assert before.stored == 2, "the tailer continues even if the delivery is lost"
    assert lost, "the subscriber never received it"
    after = Leader(run="run-2")
    deliveries = after.subscribe(Position(1, "run-1/1", 1, H, 11))
    assert after.publisher.take_wanted("db") == [Span(1, H, 11, 11)], "what was sent before is requested"
    after.relay(12, 13)
    assert outcomes(deliveries) == [], "12 is missing"
    if is_resent:
        after.relay(11, 12)
        assert (outcomes(deliveries), sorted(versions(deliveries)), claim(deliveries)) == (
            ["continued"],
            [12, 13],
            (H, 13),
        )
    else:
        for timer in after.timers:
            timer()
        assert outcomes(deliveries)[0] == "reset"


def test_a_restarted_leader_continues_from_its_spool_once_the_tailer_links_the_shard() -> None:
    disk = SpoolDisk()
    before = Leader(disk)
    before.relay(10, 11)
    for number in range(12, 22):
        before.relay(number - 1, number)
    assert before.stored == 11
    after = Leader(disk, "run-2")
    deliveries = after.subscribe(Position(1, "run-1/1", 3, H, 13))
    assert outcomes(deliveries) == []
    assert after.publisher.take_wanted("db") == [Span(1, H, 21, 21)]
    after.relay(21)
    assert outcomes(deliveries)[0] == "continued"
    assert "reset" not in outcomes(deliveries)
    assert versions(deliveries) == list(range(14, 22))
    assert claim(deliveries) == (H, 21)


def test_a_lost_spool_continues_only_subscribers_that_have_everything() -> None:
    disk = SpoolDisk()
    before = Leader(disk)
    before.relay(10, *range(11, 22))
    spool = before.publisher.spool
    assert isinstance(spool, MemorySpool)
    spool.fail()
    assert outcomes(before.subscribe(Position(1, "x", 3, H, 13))) == []  # the tailer may read it again
    assert outcomes(before.subscribe(Position(1, "x", 3, H, 21))) == ["continued"]


def test_a_gap_between_two_relays_resets_followers() -> None:
    leader = Leader()
    deliveries = leader.subscribe(Position(1))
    leader.relay(10, 11)
    leader.relay(15, 16)
    for timer in leader.timers:
        timer()
    assert outcomes(deliveries) == ["reset", "more", "reset"]
    assert versions(deliveries) == [11]


def test_times_and_positions_are_proved_only_once_the_tailer_has_linked_every_shard() -> None:
    leader = Leader()
    deliveries = leader.subscribe(Position(1))
    leader.publisher.prove("db", 1_000, H, 30)
    leader.pass_time()
    assert not deliveries[-1].proven
    assert not deliveries[-1].reached
    leader.relay(11)
    leader.pass_time()
    assert deliveries[-1].proven == (("db", 1_000),)
    assert list(deliveries[-1].reached) == [(H, 30)]
    leader.publisher.prove("db", 2_000, H, 40)
    leader.pass_time()
    assert list(deliveries[-1].reached) == [(H, 40)]
    leader.publisher.forget_proofs([1])
    before = len(deliveries)
    leader.publisher.prove("db", 3_000, H, 50)
    leader.pass_time()
    assert len(deliveries) == before, "another leader may have received messages under a topology in between"


class Follower:
    """A subscriber of two shards of one leader, which takes what arrives when the test says so."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._inbox = Inbox(lambda _: "db")
        self._arrived: list[Delivery] = []

    def connect(self) -> None:
        self._inbox.begin_stream("leader")
        self._inbox.suspend((1, 2))
        positions = self._inbox.positions_for((1, 2))
        self._subscription = self._publisher.subscribe("f", positions, self._arrived.append, takes_repeats=True)

    def disconnect(self) -> None:
        self._subscription.close()
        self._arrived.clear()

    def take(self) -> list[int]:
        """Take what has arrived. Returns the shards that had to be reset."""
        resets: list[int] = []
        while self._arrived:
            delivery = self._arrived.pop(0)
            received = self._inbox.receive(delivery)
            self._inbox.confirm("leader", received.confirmed)
            self._inbox.prove("leader", delivery)
            self._subscription.acknowledge(delivery.number)
            resets += received.resets
        return resets


def test_an_idle_shard_stays_warm_whose_repeats_have_left_the_log() -> None:
    publisher = Publisher(DeliverySettings(log_bytes_total=4_000), "run", lambda _: "db")
    for shard in (1, 2):
        publisher.open_shard(shard, 1, 1)
    publisher.publish_relay([ShardMessages(1, 1, ()), ShardMessages(2, 1, ())], [Span(1, H, 0, 1), Span(2, H, 0, 1)])
    follower = Follower(publisher)
    follower.connect()
    assert sorted(follower.take()) == [1, 2]
    own = ShardMessages(1, 1, (ObjectInvalidation(1 << 47 | 1, 5),))
    publisher.publish(own)
    publisher.publish_relay([own], [Span(1, H, 1, 2)])  # a repeat, which is left out
    publisher.prove("db", 10, H, 2)
    assert follower.take() == []
    for number in range(3, 200):
        busy = ShardMessages(2, 1, (ObjectInvalidation(2 << 47 | number, number),))
        publisher.publish_relay([busy], [Span(2, H, number - 1, number)])
        assert follower.take() == []
    publisher.prove("db", 20, H, 199)
    follower.disconnect()
    follower.connect()
    assert follower.take() == []


FIRST_PART = Span(1, H, 11, 11, more=True)
LAST_PART = Span(1, H, 11, 12, within=True)


def test_a_subscriber_at_the_position_before_a_transaction_in_parts_misses_no_part() -> None:
    leader = Leader()
    deliveries = leader.subscribe(AT_11)
    leader.relay_part(FIRST_PART, 121)
    assert outcomes(deliveries) == [], "nobody is continued within a transaction"
    leader.relay_part(LAST_PART, 122)
    assert outcomes(deliveries) == ["continued"]
    assert versions(deliveries) == [121, 122]
    assert claim(deliveries) == (H, 12)


def test_a_part_in_the_spool_is_replayed_to_a_subscriber_at_the_position_before_it() -> None:
    leader = Leader(SpoolDisk())
    leader.relay(10, 11)
    leader.relay_part(FIRST_PART, 121)
    leader.relay_part(LAST_PART, 122)
    for number in range(13, 17):  # the memory log has no room for the parts any more
        leader.relay(number - 1, number)
    deliveries = leader.subscribe(AT_11)
    assert outcomes(deliveries)[0] == "continued"
    assert versions(deliveries)[:6] == [121, 122, 13, 14, 15, 16]


def test_a_leader_that_received_only_the_last_part_of_a_transaction_does_not_continue_what_precedes_it() -> None:
    leader = Leader()
    stream = leader.subscribe(Position(1))
    leader.relay(10, 11)
    assert claim(stream) == (H, 11)
    leader.publisher.forget_proofs([1])
    leader.relay_part(LAST_PART, 122)  # another leader has acknowledged the first
    deliveries = leader.subscribe(AT_11)
    assert outcomes(deliveries) == []
    assert leader.publisher.take_wanted("db") == [Span(1, H, 11, 11)]
    leader.relay_part(FIRST_PART, 121)
    leader.relay_part(LAST_PART, 122)
    assert outcomes(deliveries) == ["continued"]
    assert set(versions(deliveries)) == {121, 122}


def test_a_restarted_leader_has_not_what_came_of_a_transaction_before_it_crashed() -> None:
    disk = SpoolDisk()
    before = Leader(disk)
    before.relay(10, 11)
    before.relay_part(FIRST_PART, 121)
    after = Leader(disk, "run-2")
    deliveries = after.subscribe(AT_11)
    after.relay_part(LAST_PART, 122)
    assert outcomes(deliveries) == []
    after.pass_time()
    assert outcomes(deliveries) == ["reset"]


def test_a_part_that_has_left_the_log_before_the_last_came_is_not_taken_for_held() -> None:
    leader = Leader()
    leader.relay(10, 11)
    leader.relay_part(FIRST_PART, 121)
    for version in range(4):
        leader.publisher.publish(ShardMessages(1, 1, (ObjectInvalidation(1 << 47 | 2, version),)))
    leader.relay_part(LAST_PART, 122)
    assert outcomes(leader.subscribe(AT_11)) == []


def test_a_spool_that_lost_the_first_part_of_a_transaction_begins_behind_it() -> None:
    leader = Leader(SpoolDisk())
    leader.relay(10, 11)
    spool = leader.publisher.spool
    assert isinstance(spool, MemorySpool)
    leader.relay_part(FIRST_PART, 121)
    spool.fail()
    leader.relay_part(LAST_PART, 122)
    for number in range(13, 17):
        leader.relay(number - 1, number)
    assert outcomes(leader.subscribe(AT_11)) == []
    assert outcomes(leader.subscribe(Position(1, "x", 7, H, 12))) == ["continued", "more"]


def test_dropping_a_part_from_the_spool_does_not_make_its_transaction_complete() -> None:
    disk = SpoolDisk()
    leader = Leader(disk)
    leader.relay(10, 11)
    leader.relay_part(FIRST_PART, 121)
    spool = leader.publisher.spool
    assert isinstance(spool, MemorySpool)
    spool.drop_oldest(2)
    after = Leader(disk, "run-2")
    assert after.publisher.take_wanted("db") == [Span(1, H, 11, 11)]


def test_messages_after_a_part_are_kept_no_earlier_than_it_when_the_shard_loses_its_link() -> None:
    leader = Leader()
    leader.relay(10, 11)
    leader.relay_part(FIRST_PART, 121)
    leader.publisher.forget_proofs([1])
    for version in (5, 6):
        leader.publisher.publish(ShardMessages(1, 1, (ObjectInvalidation(1 << 47 | 1, version),)))
    deliveries = leader.subscribe(AT_11)
    leader.relay(11)
    assert outcomes(deliveries) == ["continued"]
    assert versions(deliveries) == [121, 5, 6]


def test_a_leader_that_may_have_missed_a_part_does_not_go_on_within_the_transaction() -> None:
    """The shard moved away and back, and another leader may have received the part in the middle."""
    leader = Leader()
    stream = leader.subscribe(Position(1))
    leader.relay(10, 11)
    leader.relay_part(FIRST_PART, 121)
    leader.publisher.forget_proofs([1])
    leader.relay_part(LAST_PART, 123)
    leader.pass_time()
    assert outcomes(stream)[-1] == "reset"


def test_a_replay_is_given_up_whose_rows_were_dropped_although_they_have_been_sent_again_since() -> None:
    """The spool is read behind a drop, and both are reported later. Between the reports the tailer sends again what
    was dropped, for another subscriber, and more than the memory log keeps."""
    reports: list[Callable[[], None]] = []
    leader = Leader(SpoolDisk(), call=reports.append)
    for number in range(11, 21):
        leader.relay(number - 1, number)
    for report in reports:
        report()
    reports.clear()
    spool = leader.publisher.spool
    assert isinstance(spool, MemorySpool)
    spool.drop_oldest(10)
    deliveries = leader.subscribe(AT_11)
    *drops, read = reports
    for report in drops:
        report()
    leader.relay(10, *range(11, 21))
    read()
    assert outcomes(deliveries) == ["reset"]


def test_a_replay_reads_no_more_while_it_finds_nothing_and_nothing_comes() -> None:
    """The memory log has lost a part of a transaction of which more is to come, so it does not have the rest."""
    reports: list[Callable[[], None]] = []
    disk = SpoolDisk()
    before = Leader(disk)
    for number in range(11, 31):
        before.relay(number - 1, number)
    leader = Leader(disk, "run-2", reports.append)
    leader.relay(30)
    deliveries = leader.subscribe(AT_11)
    part = ShardMessages(1, 1, tuple(ObjectInvalidation(1 << 47 | each, 31) for each in range(1, 7)))
    leader.publisher.publish_relay([part], [Span(1, H, 30, 30, more=True)], lambda: None)
    for _ in range(200):
        if reports:
            reports.pop(0)()
    assert not reports
    assert "reset" not in outcomes(deliveries)
    leader.relay_part(Span(1, H, 30, 31, within=True), 31)
    while reports:
        reports.pop(0)()
    assert claim(deliveries) == (H, 31)
    assert set(range(12, 32)) <= set(versions(deliveries))


def test_a_replay_ends_when_a_span_that_is_sent_again_shows_that_nothing_is_missing() -> None:
    """A replay that waits for its turn at the spool needs it no more."""
    disk, reports = SpoolDisk(), list[Callable[[], None]]()

    def start(run: str, spool: MemorySpool) -> Publisher:
        settings = replace(SETTINGS, catching_up_shards=1)
        publisher = Publisher(settings, run, lambda _: "db", spool, lambda _, __: None)
        for shard in (1, 2):
            publisher.open_shard(shard, 1, 1)
        return publisher

    def relay(publisher: Publisher, span: Span, *numbers: int) -> None:
        messages = tuple(ObjectInvalidation(span.shard << 47 | 1, number) for number in numbers)
        publisher.publish_relay([ShardMessages(span.shard, 1, messages)] if messages else [], [span], lambda: None)

    before = start("run-1", MemorySpool(disk))
    for shard in (1, 2):
        for number in range(11, 31):
            relay(before, Span(shard, H, number - 1, number), number)
        relay(before, Span(shard, H, 30, 40))
    publisher = start("run-2", MemorySpool(disk, reports.append))
    for shard in (1, 2):
        relay(publisher, Span(shard, H, 40, 40))
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(1, "x", 1, H, 11), Position(2, "x", 1, H, 35)], deliveries.append)
    assert outcomes(deliveries) == []
    relay(publisher, Span(2, H, 33, 40))
    assert outcomes(deliveries) == ["continued"]
    assert claim(deliveries) == (H, 40)
