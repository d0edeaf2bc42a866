"""Deliveries to a leader's subscribers over the wire."""

from __future__ import annotations

import pytest

from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings
from tao.leader.delivery_path import Subscribers
from tao.model.changes import ObjectInvalidation, ShardMessages
from tao.model.delivery import Delivery, Span
from tao.wire.convert import delivery_to_pb
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.pacing import quiet

SUBSCRIBE = pb.Request(number=1, subscribe=pb.Subscribe(subscriber="follower-1", positions=[pb.Position(shard=3)]))


def invalidation(version: int) -> ShardMessages:
    return ShardMessages(3, 1, (ObjectInvalidation(make_id(1, 3), version),))


async def test_a_proof_is_converted_once_for_all_subscribers(monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[Delivery] = []

    def counting(delivery: Delivery) -> pb.Delivery:
        converted.append(delivery)
        return delivery_to_pb(delivery)

    publisher = Publisher(DeliverySettings(), "run-1", lambda _: "db")
    publisher.open_shard(3, generation=1, version_epoch=1)
    publisher.publish_relay((), [Span(3, "db@1:0-1", 1, 1)])
    subscribers = Subscribers(publisher)
    answers: dict[str, list[pb.Answer]] = {f"follower-{number}": [] for number in range(5)}
    for name, received in answers.items():
        request = pb.Request(number=1, subscribe=pb.Subscribe(subscriber=name, positions=[pb.Position(shard=3)]))
        subscribers.subscribe(request, MemoryReply(received.append, peer=name))
        publisher.publish(invalidation(len(name)))  # their deliveries have different numbers
    await quiet()
    monkeypatch.setattr("tao.leader.delivery_path.delivery_to_pb", counting)
    for time in (5_000, 6_000):
        publisher.prove("db", time, "db@1:0-1", time)
    await quiet()
    assert len(converted) == 2
    for number, received in enumerate(answers.values()):
        proofs = [answer.delivery for answer in received if answer.delivery.proven_databases]
        assert [list(each.proven_unix_ms) for each in proofs] == [[5_000], [6_000]]
        assert [list(each.reached_numbers) for each in proofs] == [[5_000], [6_000]]
        assert [each.delivery_number for each in proofs] == [7 - number, 8 - number]


async def test_a_delivery_that_cannot_be_encoded_ends_the_series_before_a_proof_covers_it() -> None:
    publisher = Publisher(DeliverySettings(), "run-1", lambda _: "db")
    publisher.open_shard(3, generation=1, version_epoch=1)
    publisher.publish_relay((), [Span(3, "db@1:0-1", 1, 1)])
    answers: list[pb.Answer] = []
    Subscribers(publisher).subscribe(SUBSCRIBE, MemoryReply(answers.append, peer="follower-1"))
    publisher.publish(invalidation(7))
    publisher.publish(invalidation(1 << 70))
    publisher.publish(invalidation(8))
    publisher.prove("db", 5_000)
    await quiet()
    assert [answer.HasField("error") for answer in answers] == [False, False, True]
    assert "could not be encoded" in answers[-1].error.message


async def test_a_large_delivery_is_sent_at_once_and_after_those_that_wait() -> None:
    publisher = Publisher(DeliverySettings(), "run-1", lambda _: "db")
    publisher.open_shard(3, generation=1, version_epoch=1)
    publisher.publish_relay((), [Span(3, "db@1:0-1", 1, 1)])
    answers: list[pb.Answer] = []
    Subscribers(publisher).subscribe(SUBSCRIBE, MemoryReply(answers.append, peer="follower-1"))
    await quiet()
    answers.clear()
    publisher.publish(invalidation(7))
    assert answers == []
    publisher.publish(ShardMessages(3, 1, tuple(ObjectInvalidation(make_id(1, 3), 8 + each) for each in range(64))))
    publisher.publish(invalidation(90))
    assert [len(answer.delivery.shards[0].messages.messages) for answer in answers] == [1, 64]
    await quiet()
    assert [answer.delivery.delivery_number for answer in answers] == [2, 3, 4]
