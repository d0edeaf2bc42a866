"""Deliveries to a leader's subscribers over the wire."""

from __future__ import annotations

from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings
from tao.leader.delivery_path import Subscribers
from tao.model.changes import ObjectInvalidation, ShardMessages
from tao.model.delivery import Span
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.pacing import quiet

SUBSCRIBE = pb.Request(number=1, subscribe=pb.Subscribe(subscriber="follower-1", positions=[pb.Position(shard=3)]))


def invalidation(version: int) -> ShardMessages:
    return ShardMessages(3, 1, (ObjectInvalidation(make_id(1, 3), version),))


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
