"""A leader's subscriptions: continuation, reset, refusal, flow control."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings
from tao.delivery.subscription import Later
from tao.model.changes import Message, ObjectInvalidation, ShardMessages
from tao.model.delivery import Delivery, Position, Span
from tao.model.errors import InternalError, Overloaded, ProtocolError

SETTINGS = DeliverySettings(log_messages_per_shard=8, max_delivery_messages=4)


def message(shard: int, version: int) -> ObjectInvalidation:
    return ObjectInvalidation(shard << 47 | 1, version)


def batch(shard: int, *versions: int, epoch: int = 1) -> ShardMessages:
    return ShardMessages(shard, epoch, tuple(message(shard, version) for version in versions))


def leader(
    *shards: int, settings: DeliverySettings = SETTINGS, incarnation: str = "run-1", later: Later | None = None
) -> Publisher:
    publisher = Publisher(settings, incarnation, lambda _: "db-1", None, later)
    for shard in shards:
        publisher.open_shard(shard, generation=1, version_epoch=1)
    return publisher


def messages_of(deliveries: list[Delivery]) -> list[Message]:
    parts = [part for delivery in deliveries for part in delivery.shards]
    return [message for part in parts if part.messages for message in part.messages.messages]


def test_a_new_subscriber_is_reset_in_owned_shards_and_refused_in_others() -> None:
    deliveries: list[Delivery] = []
    leader(3).subscribe("f", [Position(3), Position(4)], deliveries.append)
    (first,) = deliveries
    assert first.number == 1
    assert [(part.position, part.reset) for part in first.shards] == [(Position(3, "run-1/1", 0), True)]
    assert first.refused == (4,)


def test_a_returning_subscriber_receives_only_what_it_missed() -> None:
    publisher = leader(3)
    publisher.publish(batch(3, 10, 11))
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(3, "run-1/1", 1)], deliveries.append)
    assert [part.reset for part in deliveries[0].shards] == [False]
    assert messages_of(deliveries) == [message(3, 11)]


def test_a_shard_without_new_messages_is_confirmed_with_its_version_epoch() -> None:
    publisher = leader(3)
    publisher.publish(batch(3, 10, epoch=5))
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(3, "run-1/1", 1)], deliveries.append)
    (part,) = deliveries[0].shards
    assert (part.reset, part.position.sequence, part.messages) == (False, 1, ShardMessages(3, 5, ()))


@pytest.mark.parametrize("position", [Position(3, "run-0/1", 1), Position(3, "run-1/1", 99), Position(3, "run-1/1", 1)])
def test_a_position_that_cannot_be_continued_is_reset(position: Position) -> None:
    publisher = leader(3)
    publisher.publish(batch(3, *range(12)))  # the log holds 8: what follows number 1 is gone
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [position], deliveries.append)
    assert [(part.position.sequence, part.reset) for part in deliveries[0].shards] == [(12, True)]


def test_the_first_delivery_mentions_every_shard_however_many_messages_wait() -> None:
    publisher = leader(1, 2, 3)
    publisher.publish_all([batch(shard, *range(6)) for shard in (1, 2, 3)])
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(shard, "run-1/1", 0) for shard in (1, 2, 3)], deliveries.append)
    assert [part.position for part in deliveries[0].shards] == [
        Position(1, "run-1/1", 4),
        Position(2, "run-1/1", 0),
        Position(3, "run-1/1", 0),
    ]
    assert len(messages_of(deliveries)) == 18
    assert max(len(messages_of([delivery])) for delivery in deliveries) <= 4


def test_the_changes_of_one_commit_to_several_shards_share_a_delivery() -> None:
    publisher = leader(1, 2)
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(1), Position(2)], deliveries.append)
    publisher.publish_all([batch(1, 7), batch(2, 8)])
    assert [part.position.shard for part in deliveries[1].shards] == [1, 2]


def test_a_run_never_mixes_version_epochs() -> None:
    publisher = leader(1)
    publisher.publish_all([batch(1, 7, epoch=1), batch(1, 8, epoch=2)])
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(1, "run-1/1", 0)], deliveries.append)
    assert [part.messages for delivery in deliveries for part in delivery.shards] == [
        batch(1, 7, epoch=1),
        batch(1, 8, epoch=2),
    ]


def test_sending_stops_at_the_window_until_a_delivery_is_acknowledged() -> None:
    publisher = leader(1, settings=replace(SETTINGS, window_unacknowledged_bytes=600))
    deliveries: list[Delivery] = []
    subscription = publisher.subscribe("f", [Position(1)], deliveries.append)
    for version in range(6):
        publisher.publish(batch(1, version))
    sent = len(deliveries)
    assert len(messages_of(deliveries)) < 6
    assert subscription.pending == 1
    while subscription.pending:
        subscription.acknowledge(deliveries[-1].number)
    assert len(deliveries) > sent
    assert messages_of(deliveries) == [message(1, version) for version in range(6)]


def test_a_subscriber_that_falls_behind_the_log_is_reset_and_costs_no_memory() -> None:
    publisher = leader(1, settings=replace(SETTINGS, window_unacknowledged_bytes=1))
    deliveries: list[Delivery] = []
    subscription = publisher.subscribe("f", [Position(1)], deliveries.append)
    for version in range(100):
        publisher.publish(batch(1, version))
    assert publisher.figures()["log_messages"] == 8
    subscription.acknowledge(1)
    (part,) = deliveries[-1].shards
    assert (part.reset, part.position.sequence) == (True, 100)


def test_a_message_larger_than_the_window_is_still_sent() -> None:
    publisher = leader(1, settings=replace(SETTINGS, max_delivery_bytes=1, window_unacknowledged_bytes=200))
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(1)], deliveries.append)
    publisher.publish(batch(1, 5))
    assert messages_of(deliveries) == [message(1, 5)]


def test_the_common_log_evicts_the_oldest_messages_of_any_shard() -> None:
    publisher = leader(1, 2, settings=replace(SETTINGS, log_bytes_total=240 * 4))
    publisher.publish_all([batch(1, 1, 2), batch(2, 3, 4), batch(1, 5, 6)])
    assert publisher.figures()["log_bytes"] == 240 * 4
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(1, "run-1/1", 2), Position(2, "run-1/1", 0)], deliveries.append)
    assert messages_of(deliveries) == [message(1, 5), message(1, 6), message(2, 3), message(2, 4)]


def test_a_closed_shard_is_refused_and_forgotten() -> None:
    publisher = leader(1)
    deliveries: list[Delivery] = []
    subscription = publisher.subscribe("f", [Position(1)], deliveries.append)
    publisher.publish(batch(1, 1))
    publisher.close_shard(1)
    assert deliveries[-1].refused == (1,)
    assert subscription.followed == 0
    assert publisher.figures()["log_bytes"] == 0
    publisher.open_shard(1, 2, 1)
    publisher.publish(batch(1, 2))
    assert deliveries[-1].refused == (1,)


def test_a_new_generation_of_the_same_leader_resets_its_subscribers() -> None:
    publisher = leader(1)
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(1)], deliveries.append)
    publisher.open_shard(1, 1, 1)
    assert len(deliveries) == 1
    publisher.open_shard(1, 2, 1)
    (part,) = deliveries[-1].shards
    assert (part.reset, part.position) == (True, Position(1, "run-1/2", 0))


def test_a_second_subscription_of_one_subscriber_replaces_the_first() -> None:
    publisher = leader(1)
    old: list[Delivery] = []
    new: list[Delivery] = []
    first = publisher.subscribe("f", [Position(1)], old.append)
    publisher.subscribe("f", [Position(1, "run-1/1", 0)], new.append)
    first.close()
    publisher.publish(batch(1, 1))
    assert (len(old), len(new)) == (1, 2)
    assert publisher.figures()["subscribers"] == 1
    with pytest.raises(ProtocolError, match="closed"):
        first.add([Position(1)])


def test_shards_can_be_added_to_a_subscription_and_dropped_from_it() -> None:
    publisher = leader(1, 2)
    deliveries: list[Delivery] = []
    subscription = publisher.subscribe("f", [Position(1)], deliveries.append)
    subscription.add([Position(2)])
    assert [part.position.shard for part in deliveries[1].shards] == [2]
    subscription.drop([1])
    publisher.publish(batch(1, 1))
    assert len(deliveries) == 2


def test_a_subscriber_may_acknowledge_and_add_shards_within_deliver() -> None:
    publisher = leader(1, 2, settings=replace(SETTINGS, window_unacknowledged_bytes=1))
    deliveries: list[Delivery] = []

    def deliver(delivery: Delivery) -> None:
        deliveries.append(delivery)
        subscription = subscriptions[0] if subscriptions else None
        if subscription is not None:
            if delivery.number == 2:
                subscription.add([Position(2)])
            subscription.acknowledge(delivery.number)

    subscriptions = []
    subscriptions.append(publisher.subscribe("f", [Position(1)], deliver))
    subscriptions[0].acknowledge(1)
    publisher.publish(batch(1, *range(8)))
    assert [delivery.number for delivery in deliveries] == list(range(1, len(deliveries) + 1))
    assert len(messages_of(deliveries)) == 8
    assert subscriptions[0].followed == 2


def test_a_delivery_error_ends_the_subscription_and_not_the_write() -> None:
    publisher = leader(1)

    def broken(_: Delivery) -> None:
        raise InternalError("it could not be encoded")

    subscription = publisher.subscribe("f", [Position(1)], broken)
    publisher.publish(batch(1, 1))
    assert subscription.closed
    assert publisher.figures()["subscribers"] == 0


def test_publishing_to_a_closed_shard_is_an_internal_error() -> None:
    with pytest.raises(InternalError, match="shard 9"):
        leader(1).publish(batch(9, 1))


def test_acknowledging_an_unsent_delivery_is_a_protocol_error() -> None:
    subscription = leader(1).subscribe("f", [Position(1)], lambda _: None)
    with pytest.raises(ProtocolError, match="7"):
        subscription.acknowledge(7)


def test_subscribers_are_bounded() -> None:
    publisher = leader(1, settings=replace(SETTINGS, max_subscribers=1))
    publisher.subscribe("f", [], lambda _: None)
    with pytest.raises(Overloaded, match="max_subscribers"):
        publisher.subscribe("g", [], lambda _: None)


def linked(publisher: Publisher) -> Publisher:
    """Link shard 1: the tailer has said where it continues."""
    publisher.publish_relay((), [Span(1, "db-1@1:0-1", 1, 1)])
    return publisher


def test_a_proven_time_is_delivered_once_and_to_later_subscribers() -> None:
    publisher = linked(leader(1))
    early: list[Delivery] = []
    publisher.subscribe("f", [Position(1)], early.append)
    publisher.prove("db-1", 5_000)
    publisher.prove("db-1", 5_000)
    publisher.prove("db-1", 4_000)  # a second tailer that is behind
    assert [delivery.proven for delivery in early] == [(), (("db-1", 5_000),)]
    late: list[Delivery] = []
    publisher.subscribe("g", [Position(1)], late.append)
    assert [delivery.proven for delivery in late] == [(), (("db-1", 5_000),)]


def test_a_proven_time_waits_for_every_pending_message() -> None:
    publisher = linked(leader(1, settings=replace(SETTINGS, window_unacknowledged_bytes=200)))
    deliveries: list[Delivery] = []
    subscription = publisher.subscribe("f", [Position(1)], deliveries.append)
    publisher.publish(batch(1, 1))
    publisher.publish(batch(1, 2, 3))
    publisher.prove("db-1", 5_000)
    assert [delivery.proven for delivery in deliveries if delivery.proven] == []
    while not deliveries[-1].proven:
        subscription.acknowledge(deliveries[-1].number)
    assert messages_of(deliveries) == [message(1, version) for version in (1, 2, 3)]


def test_a_topology_change_disturbs_the_proofs_of_affected_databases_only() -> None:
    publisher = Publisher(SETTINGS, "run-1", lambda shard: f"db-{shard}")
    publisher.open_shard(1, generation=1, version_epoch=1)
    linked(publisher)
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(1)], deliveries.append)
    publisher.prove("db-1", 5_000)
    for affected in ([], [2], [7]):
        publisher.forget_proofs(affected)
    assert publisher.figures()["unlinked_shards"] == 0
    assert publisher.proven == {"db-1": 5_000}
    publisher.prove("db-1", 6_000)
    assert deliveries[-1].proven == (("db-1", 6_000),)


def test_proofs_from_before_a_topology_change_are_not_delivered_for_added_shards() -> None:
    publisher = linked(leader(1))
    publisher.prove("db-1", 5_000)
    publisher.forget_proofs([1])
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(1)], deliveries.append)
    assert [delivery.proven for delivery in deliveries] == [()]
    publisher.prove("db-1", 4_500)
    assert not deliveries[-1].proven, "another leader may have received messages in between"
    linked(publisher)
    assert deliveries[-1].proven == (("db-1", 4_500),)


def test_a_subscription_of_many_shards_is_confirmed_in_pieces_at_different_turns_of_the_loop() -> None:
    turns: list[Callable[[], None]] = []
    bounds = replace(SETTINGS, max_delivery_shards=3)
    publisher = leader(*range(1, 9), settings=bounds, later=lambda _, do: turns.append(do))
    publisher.publish_relay((), [Span(shard, "db-1@1:0-1", 1, 1) for shard in range(1, 9)])
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(shard) for shard in range(1, 9)], deliveries.append)
    assert [[part.position.shard for part in each.shards] for each in deliveries] == [[1, 2, 3]]
    publisher.prove("db-1", 5_000)
    publisher.publish(batch(1, 1))
    publisher.publish(batch(8, 2))  # which confirms shard 8 ahead of its turn
    assert [[part.position.shard for part in each.shards] for each in deliveries[1:]] == [[1], [8]]
    for _ in range(4):
        turns.pop(0)()
    assert [[part.position.shard for part in each.shards] for each in deliveries[3:]] == [[4, 5, 6], [7], []]
    assert [each.proven for each in deliveries if each.proven] == [(("db-1", 5_000),)]
    assert not deliveries[-1].shards, "the time is proved once every shard is confirmed"


def test_relays_that_link_many_shards_wake_each_subscriber_once() -> None:
    publisher = leader(1, 2, 3)
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(shard) for shard in (1, 2, 3)], deliveries.append)
    publisher.publish_relay((), [Span(shard, "db-1@1:0-1", 1, 1) for shard in (1, 2, 3)])
    assert [[part.position.reached for part in each.shards] for each in deliveries] == [[0, 0, 0], [1, 1, 1]]


class Timers:
    """The later calls of a publisher: ``pass_time`` makes those that are due."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def later(self, seconds: float, do: Callable[[], None]) -> object:
        self.due.append((self.now + seconds, do))
        return None

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while due := sorted((each for each in self.due if each[0] <= end), key=lambda each: each[0]):
            self.due.remove(due[0])
            self.now = due[0][0]
            due[0][1]()
        self.now = end


def test_the_proofs_of_all_databases_reach_a_subscriber_in_one_delivery_a_second() -> None:
    timers = Timers()
    publisher = Publisher(SETTINGS, "run-1", lambda shard: f"db-{shard}", None, timers.later)
    for shard in range(30):
        publisher.open_shard(shard, 1, 1)
    publisher.publish_relay((), [Span(shard, f"db-{shard}@1:0-1", 1, 1) for shard in range(30)])
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(shard) for shard in range(30)], deliveries.append)
    timers.pass_time(5)
    deliveries.clear()
    for second in range(1, 11):
        for shard in range(30):
            publisher.prove(f"db-{shard}", 1_000 * second + shard, f"db-{shard}@1:0-1", second)
            timers.pass_time(0.005)
        timers.pass_time(0.85)
        assert len(deliveries) == second
        proven = tuple((f"db-{shard}", 1_000 * second + shard) for shard in range(30))
        assert deliveries[-1].proven == proven
        assert deliveries[-1].reached == tuple((f"db-{shard}@1:0-1", second) for shard in range(30))


def test_a_proof_is_put_together_once_for_all_subscribers() -> None:
    timers = Timers()
    publisher = linked(leader(1, later=timers.later))
    deliveries: list[Delivery] = []
    for name in range(100):
        publisher.subscribe(f"f{name}", [Position(1)], deliveries.append)
    deliveries.clear()
    publisher.prove("db-1", 5_000, "db-1@1:0-1", 7)
    timers.pass_time(1)
    assert [(each.proven, each.reached) for each in deliveries] == [((("db-1", 5_000),), (("db-1@1:0-1", 7),))] * 100
    assert len({(id(each.proven), id(each.reached)) for each in deliveries}) == 1


def test_a_proof_takes_some_of_the_window_but_nothing_waits_for_its_acknowledgement() -> None:
    publisher = linked(leader(1, settings=replace(SETTINGS, window_unacknowledged_bytes=600)))
    deliveries: list[Delivery] = []
    subscription = publisher.subscribe("f", [Position(1)], deliveries.append)
    subscription.acknowledge(1)
    for time in range(1, 31):
        publisher.prove("db-1", time)
    assert publisher.figures()["unacknowledged_bytes"] == 0
    assert len(deliveries) == 1 + 10
    subscription.acknowledge(deliveries[-1].number)
    assert deliveries[-1].proven == (("db-1", 30),)


def test_proofs_that_come_all_the_time_are_delivered_once_a_second() -> None:
    timers = Timers()
    publisher = linked(leader(1, later=timers.later))
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(1)], deliveries.append)
    deliveries.clear()
    for tick in range(1, 101):
        publisher.prove("db-1", tick)
        timers.pass_time(0.1)
    assert len(deliveries) == 10
    timers.pass_time(1)
    assert deliveries[-1].proven == (("db-1", 100),)
    timers.pass_time(100)
    assert len(deliveries) == 11, "nothing new is proved"


def test_a_proof_that_no_longer_holds_when_it_is_due_is_not_delivered() -> None:
    timers = Timers()
    publisher = linked(leader(1, later=timers.later))
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(1)], deliveries.append)
    publisher.prove("db-1", 5_000)
    publisher.forget_proofs([1])
    timers.pass_time(3)
    assert not any(each.proven for each in deliveries)


def test_a_repeat_counts_in_the_next_delivery_without_being_in_it() -> None:
    publisher = leader(3)
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(3)], deliveries.append, takes_repeats=True)
    committed = batch(3, 10)
    publisher.publish(committed)
    before = len(deliveries)
    publisher.publish(committed)
    assert len(deliveries) == before
    publisher.publish(batch(3, 11))
    (part,) = deliveries[-1].shards
    assert (part.position.sequence, part.repeated) == (3, 1)
    assert messages_of(deliveries) == [message(3, 10), message(3, 11)]


def test_an_equal_message_is_no_repeat() -> None:
    publisher = leader(3)
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(3)], deliveries.append, takes_repeats=True)
    publisher.publish(batch(3, 10))
    publisher.publish(batch(3, 10))
    assert messages_of(deliveries) == [message(3, 10), message(3, 10)]


@pytest.mark.parametrize("position", [Position(3), Position(3, "run-1/1", 1)])
def test_a_subscriber_that_joins_after_a_message_receives_its_repeat(position: Position) -> None:
    publisher = leader(3)
    committed = batch(3, 10)
    publisher.publish(committed)
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [position], deliveries.append, takes_repeats=True)
    publisher.publish(committed)
    assert messages_of(deliveries) == [message(3, 10)]


def test_a_subscriber_that_knows_no_repeats_receives_them() -> None:
    publisher = leader(3)
    deliveries: list[Delivery] = []
    publisher.subscribe("f", [Position(3)], deliveries.append)
    committed = batch(3, 10)
    publisher.publish(committed)
    publisher.publish(committed)
    assert messages_of(deliveries) == [message(3, 10), message(3, 10)]


def test_a_message_is_no_repeat_of_one_that_has_been_evicted() -> None:
    publisher = leader(3)
    deliveries: list[Delivery] = []
    committed = batch(3, 10)
    publisher.publish(committed)
    publisher.publish(batch(3, *range(11, 19)))
    assert not publisher.has_published(committed)
    publisher.subscribe("f", [Position(3, "run-1/1", 9)], deliveries.append, takes_repeats=True)
    publisher.publish(committed)
    assert messages_of(deliveries) == [message(3, 10)]


def test_messages_are_not_repeated_across_streams() -> None:
    publisher = leader(3)
    committed = batch(3, 10)
    publisher.publish(committed)
    publisher.close_shard(3)
    publisher.open_shard(3, generation=2, version_epoch=1)
    assert not publisher.has_published(committed)
