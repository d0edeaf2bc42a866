"""A stream of deliveries ends on both sides, and goes on when some of its shards are refused."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tao.cache import CacheSettings, GraphCache
from tao.follower.subscriptions import DeliveryStream, Subscriptions, SubscriptionSettings
from tao.model.changes import ObjectInvalidation, ShardMessages
from tao.model.delivery import Delivery, Position, ShardDelivery
from tao.model.errors import Unavailable
from tao.model.topology import CacheServer, Topology
from tao.observability.logs import logger
from tao.serving.configuration import Configuration
from tao.serving.forward_path import WriteThrough
from tao.serving.server import SchemaArenas
from tao.wire.convert import delivery_to_pb, error_to_pb
from tao.wire.frames_server import FrameServer
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings
from tao.wire.session import AnswerHandler
from tao.wire.settings import ServingSettings
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import ARENAS, SCHEMA, LeaderRig, make_topology
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import ManualClock, SetTimers, Tasks, until
from tests.rigs.server_context import make_context


def one_leader(address: str) -> Topology:
    topology = make_topology()
    region = topology.regions[0]
    leader = CacheServer(name="leader-1", grpc="127.0.0.1:1", frames=address)
    leaders = msgspec.structs.replace(region.leaders, servers=(leader,), moved={})
    return msgspec.structs.replace(topology, regions=(msgspec.structs.replace(region, leaders=leaders),))


async def test_a_refused_shard_is_subscribed_again_in_the_same_stream_and_the_others_stay() -> None:
    store = MemoryStore(4)
    leader = LeaderRig(store, store)
    await leader.take(0, 1, 2)
    server = FrameServer(leader.service, ServingSettings(), name="leader-1", topology_version=lambda: 1)
    topology = one_leader(await server.start("127.0.0.1:0"))
    cache = GraphCache(CacheSettings(arena_bytes=ARENAS, credit_slots=1009), SchemaArenas(SCHEMA, ARENAS))
    configuration = Configuration(topology, SCHEMA, logger("test"))
    links, tasks = Links(LinkSettings(), Credentials("near-1", "follower", "")), Tasks()
    subscriptions = Subscriptions(
        make_context(configuration, links, tasks, clock=ManualClock()),
        cache,
        WriteThrough(cache, ManualClock(), 60.0),
        SubscriptionSettings(retry_seconds=0.001),
    )
    subscriptions.follow_routes(configuration.routes)
    hosted = subscriptions.hosted
    await until(lambda: set(cache.open_shards()) == hosted - {3})
    connection = next(iter(server.connections))
    assert subscriptions.unsubscribed == len(hosted & {3})
    await leader.take(0, 1, 2, 3)
    await until(lambda: not subscriptions.unsubscribed)
    assert set(cache.open_shards()) == hosted
    assert connection.series == 1
    await tasks.close()
    await until(lambda: connection.series == 0)
    await links.close()
    await server.close()
    await leader.close()


class DeliveringLeader:
    """The link of one series, and what was acknowledged by it."""

    def __init__(self) -> None:
        self.acknowledged: list[int] = []
        self.applied: list[int] = []
        self._deliver: AnswerHandler = lambda _: None

    def send(self, request: pb.Request, timeout_seconds: float, on_answer: AnswerHandler) -> None:
        if request.HasField("subscribe"):
            self._deliver = on_answer
        elif request.HasField("acknowledge"):
            self.acknowledged.append(request.acknowledge.delivery_number)

    def apply(self, delivery: Delivery) -> set[int]:
        self.applied.append(delivery.number)
        return set()

    def deliver(self, number: int) -> None:
        messages = ShardMessages(0, 1, (ObjectInvalidation(1, number),))
        part = ShardDelivery(Position(0, "a/1", number), messages=messages)
        self._deliver(pb.Answer(number=7, more=True, delivery=delivery_to_pb(Delivery(number, (part,)))))

    def prove(self, number: int) -> None:
        delivery = Delivery(number, proven=(("db", number),))
        self._deliver(pb.Answer(number=7, more=True, delivery=delivery_to_pb(delivery)))


async def test_one_acknowledgement_covers_many_deliveries_and_needs_no_further_one() -> None:
    leader = DeliveringLeader()
    settings = SubscriptionSettings(acknowledge_seconds=0.01, acknowledge_messages=4)
    series = DeliveryStream(leader, "near-1", [], lambda _: [], leader.apply, settings)
    for number in range(1, 7):
        leader.deliver(number)
    assert leader.acknowledged == [4]
    await until(lambda: leader.acknowledged == [4, 6])
    leader.deliver(7)
    series.close()
    # Ends after the acknowledgement of 7 was due, on a slow machine too: timers run in the order in which they are due.
    await asyncio.sleep(0.02)
    assert leader.acknowledged == [4, 6]
    assert leader.applied == [1, 2, 3, 4, 5, 6, 7]


class AskedLeader:
    """The link of one series: the shards of each request, and how it is answered."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int]] = []
        self.answers: list[AnswerHandler] = []

    def send(self, request: pb.Request, timeout_seconds: float, on_answer: AnswerHandler) -> None:
        if request.HasField("subscribe"):
            shards = [position.shard for position in request.subscribe.positions]
            self.asked.append((shards, request.subscribe.series))
            self.answers.append(on_answer)


def make_stream(leader: AskedLeader, shards: int, piece: int) -> DeliveryStream:
    settings = SubscriptionSettings(subscribe_shards=piece, retry_seconds=0.001)
    return DeliveryStream(
        leader, "near-1", range(shards), lambda shards: [Position(each) for each in shards], lambda _: set(), settings
    )


async def test_shards_added_before_the_first_answer_are_asked_for_after_it() -> None:
    leader = AskedLeader()
    stream = make_stream(leader, shards=2, piece=3)
    stream.add([5, 4])
    stream.add([5])
    assert leader.asked == [([0, 1], 0)], "the number of the series is not known yet"
    leader.answers[0](pb.Answer(number=7, more=True, delivery=delivery_to_pb(Delivery(1))))
    assert leader.asked[1:] == [([4, 5], 7)]
    stream.close()


async def test_shards_added_while_a_piece_is_under_way_are_asked_for_after_it() -> None:
    leader = AskedLeader()
    stream = make_stream(leader, shards=6, piece=3)
    leader.answers[0](pb.Answer(number=7, more=True, delivery=delivery_to_pb(Delivery(1))))
    assert leader.asked[1:] == [([3, 4, 5], 7)]
    stream.add([4, 8])
    assert len(leader.asked) == 2
    leader.answers[1](pb.Answer(applied=pb.Applied()))
    assert leader.asked[2:] == [([4, 8], 7)], "its leader may have changed since it was asked for"
    leader.answers[2](pb.Answer(applied=pb.Applied()))
    assert len(leader.asked) == 3
    assert stream.shards == {0, 1, 2, 3, 4, 5, 8}
    stream.close()


async def test_many_shards_are_asked_for_in_pieces_one_after_the_other() -> None:
    leader = AskedLeader()
    stream = make_stream(leader, shards=8, piece=3)
    assert leader.asked == [([0, 1, 2], 0)], "the number of the series is not known yet"
    leader.answers[0](pb.Answer(number=7, more=True, delivery=delivery_to_pb(Delivery(1))))
    leader.answers[0](pb.Answer(number=7, more=True, delivery=delivery_to_pb(Delivery(2))))
    assert leader.asked[1:] == [([3, 4, 5], 7)]
    leader.answers[1](pb.Answer(applied=pb.Applied()))
    assert leader.asked[2:] == [([6, 7], 7)]
    leader.answers[2](pb.Answer(error=error_to_pb(Unavailable("busy"))))
    assert len(leader.asked) == 3
    await until(lambda: leader.asked[3:] == [([6, 7], 7)])
    stream.close()


async def test_a_stream_without_missing_shards_sets_no_timer_but_the_one_of_its_acknowledgement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader = DeliveringLeader()
    stream = DeliveryStream(leader, "near-1", [], lambda _: [], leader.apply, SubscriptionSettings())
    counted = SetTimers(monkeypatch)
    for number in range(1, 21):
        leader.prove(number)
    assert (len(counted.timers), leader.acknowledged) == (1, [])
    leader.deliver(21)
    assert (len(counted.timers), leader.acknowledged) == (2, []), "messages are acknowledged sooner"
    stream.close()


async def test_proofs_alone_are_acknowledged_later_and_all_at_once() -> None:
    leader = DeliveringLeader()
    settings = SubscriptionSettings(acknowledge_seconds=60.0, acknowledge_proofs_seconds=0.01)
    stream = DeliveryStream(leader, "near-1", [], lambda _: [], leader.apply, settings)
    for number in range(1, 41):
        leader.prove(number)
    assert leader.acknowledged == []
    await until(lambda: leader.acknowledged == [40])
    stream.close()
