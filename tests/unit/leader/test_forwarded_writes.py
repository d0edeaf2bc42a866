"""Writes of shards mastered in another region: forward, apply and publish the changes, then answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from tao.cache import CacheSettings, GraphCache
from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings
from tao.leader.replica_shards import ForwardedWrites
from tao.model.changes import ObjectChange, ShardInvalidation, ShardMessages
from tao.model.delivery import Delivery, Position
from tao.model.errors import Overloaded, TaoError
from tao.model.graph import ABSENT, encode_object
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.model.writes import AssocAdd, ObjAdd, SettleEdge, Write
from tao.observability.logs import logger
from tao.serving.configuration import Configuration
from tao.serving.forward_path import ForwardSettings, WriteResults, WriteThrough
from tao.serving.server import SchemaArenas
from tao.wire.convert import error_from_pb, error_to_pb, shard_messages_to_pb, write_to_pb
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import ARENAS, COMMENT, FRIEND, SCHEMA, USER, make_id
from tests.rigs.links_rig import MemoryLinks, MemoryReply
from tests.rigs.pacing import ManualClock, Tasks, quiet, until
from tests.rigs.server_context import make_context
from tests.rigs.versions import make_version

HERE, ELSEWHERE = make_id(64, 0), make_id(64, 1)
V1 = make_version(1, 1)
LATE_ANSWER_SECONDS = 60.0
CHANGES = ShardMessages(1, 1, (ObjectChange(ELSEWHERE, 0, V1, USER, b"new"),))


def topology(*, shard_1_in: str) -> Topology:
    """Return a topology with shard 0 mastered in east."""

    def region(name: str, leader: str) -> Region:
        return Region(
            name=name,
            leaders=Tier(name="leaders", servers=(CacheServer(name=leader, grpc=f"{leader}:7000"),)),
            followers=(Tier(name="near", servers=(CacheServer(name=f"{name}-near-1", grpc=f"{name}-near-1:7000"),)),),
        )

    def database(shard: int, master_region: str) -> Database:
        servers = {name: DatabaseServer(name=f"db-{shard}-{name}") for name in ("east", "west")}
        return Database(name=f"db-{shard}", master_region=master_region, servers=servers, shards=((shard, shard),))

    return Topology(
        version=1,
        shards=2,
        regions=(region("east", "leader-east"), region("west", "leader-west")),
        databases=(database(0, "east"), database(1, shard_1_in)),
    )


class West:
    """The leader of the other region. It records its requests and executes them unless ``fault`` is set."""

    def __init__(self) -> None:
        self.writes: list[str] = []
        self.reserved = 0
        self.fault: TaoError | None = None

    def handle(self, request: pb.Request, reply: Reply) -> None:
        if self.fault is not None:
            raise self.fault
        if request.HasField("reserve_ids"):
            self.reserved += request.reserve_ids.count
            reply.send(pb.Answer(reserved_ids=pb.ReservedIds(ids=[ELSEWHERE])))
            return
        assert request.write.want_changes
        self.writes += [write.WhichOneof("operation") or "" for write in request.write.writes]
        count = len(request.write.writes)
        answer = pb.WriteAnswer(slots=range(count), results=[pb.WriteResult(id=ELSEWHERE)] * count)
        answer.changes.append(shard_messages_to_pb(CHANGES))
        reply.send(pb.Answer(write=answer))


class Rig:
    """``leader-east``, which owns shard 0 and serves shard 1 when west masters it. near-1 has subscribed."""

    def __init__(self, shard_1_in: str = "west") -> None:
        self.clock = ManualClock()
        self.tasks = Tasks()
        self.links = MemoryLinks("leader-east")
        self.west = West()
        self.links["leader-west"].handler = self.west
        self.configuration = Configuration(topology(shard_1_in=shard_1_in), SCHEMA, logger("test"))
        self.cache = GraphCache(CacheSettings(arena_bytes=ARENAS), SchemaArenas(SCHEMA, ARENAS))
        self.changes = WriteThrough(self.cache, self.clock, LATE_ANSWER_SECONDS)
        self.publisher = Publisher(DeliverySettings(), "leader-east/1", lambda _: "db")
        self.hosted = {1}
        self.cache.open_shard(1, 1)
        self.changes.note_begun(1)
        self.clock.now += LATE_ANSWER_SECONDS + 1
        self.publisher.open_shard(1, 1, 1)
        self.deliveries: list[Delivery] = []
        self.publisher.subscribe("near-1", [Position(1)], self.deliveries.append)
        self.deliveries.clear()
        self.context = make_context(
            self.configuration, self.links.as_links(), self.tasks, name="leader-east", clock=self.clock
        )
        self.forwarded = ForwardedWrites(
            self.context,
            ForwardSettings(first_pause_seconds=0.001),
            self.publisher,
            hosts=lambda shard: shard in self.hosted,
            apply=self.changes.apply_write,
        )
        self.answers: list[pb.Answer] = []

    def take(self, *writes: Write | pb.Write) -> list[int]:
        """Forward the writes; return the slots to execute here."""
        messages = [write if isinstance(write, pb.Write) else write_to_pb(write) for write in writes]
        request = pb.Request(write=pb.WriteBatch(writes=messages))
        reply = MemoryReply(self.answers.append)
        results = WriteResults(reply, len(messages), want_changes=False)
        slots = range(len(messages))
        return list(self.forwarded.forward(request, slots, results, self.clock.monotonic() + 5, reply.peer))

    async def results(self) -> dict[int, pb.WriteResult]:
        """Return the results of the forwarded writes, by slot."""
        await until(lambda: self.answers)
        return {
            slot: result
            for answer in self.answers
            for slot, result in zip(answer.write.slots, answer.write.results, strict=True)
        }


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    assert rig.tasks.errors == []
    await rig.tasks.close()


def new_object(object_id: int) -> ObjAdd:
    return ObjAdd(object_id, USER, b"new", allocated=False)


async def test_a_write_of_a_shard_mastered_in_this_region_is_not_forwarded(rig: Rig) -> None:
    assert rig.forwarded.is_mastered_here(0)
    assert not rig.forwarded.is_mastered_here(1)
    assert rig.forwarded.leader(1).name == "leader-west"
    assert rig.take(new_object(HERE), AssocAdd(HERE, COMMENT, ELSEWHERE, 1, b"")) == [0, 1]
    everything = Rig(shard_1_in="east")
    assert everything.take(new_object(HERE), new_object(ELSEWHERE)) == [0, 1]
    await quiet()
    assert rig.west.writes == everything.west.writes == []


async def test_an_answer_older_than_an_invalidation_of_its_shard_updates_cached_entries_and_adds_none(
    rig: Rig,
) -> None:
    """The invalidation stands for changes that are no longer known: changes after the write may be among them."""
    west = rig.links["leader-west"]
    west.hold_answers.add("write")
    rig.take(new_object(ELSEWHERE))
    await until(lambda: west.held)
    rig.changes.apply(ShardMessages(1, 1, (ShardInvalidation(1),)))
    west.let_go()
    await rig.results()
    assert rig.cache.object(ELSEWHERE) is None
    now = rig.clock.now
    rig.cache.store_object(rig.cache.object_ticket(ELSEWHERE, now), encode_object(V1, USER, b"new"), 1, now)
    rig.changes.apply_write(ShardMessages(1, 1, (ObjectChange(ELSEWHERE, V1, V1 + 1, USER, b"newer"),)))
    assert rig.cache.object(ELSEWHERE) == encode_object(V1 + 1, USER, b"newer")


async def test_long_after_an_invalidation_writes_add_to_the_cache_again(rig: Rig) -> None:
    rig.changes.note_begun(1)
    rig.clock.now += LATE_ANSWER_SECONDS + 1
    rig.take(new_object(ELSEWHERE))
    await rig.results()
    assert rig.cache.object(ELSEWHERE) is not None


async def test_a_forwarded_write_is_cached_and_published_before_its_writer_is_answered(rig: Rig) -> None:
    order: list[str] = []
    rig.publisher.subscribe("near-2", [Position(1)], lambda _: order.append("delivered"))
    order.clear()
    request = pb.Request(write=pb.WriteBatch(writes=[write_to_pb(new_object(ELSEWHERE))]))
    reply = MemoryReply(lambda _: order.append("held" if rig.cache.object(ELSEWHERE) else "answered too early"))
    results = WriteResults(reply, 1, want_changes=False)
    assert rig.forwarded.forward(request, [0], results, rig.clock.monotonic() + 5, reply.peer) == []
    await until(lambda: len(order) == 2)
    assert order == ["delivered", "held"]
    assert rig.cache.object(ELSEWHERE) == encode_object(V1, USER, b"new")
    assert [part.messages for delivery in rig.deliveries for part in delivery.shards] == [CHANGES]


async def test_only_writes_mastered_in_another_region_are_forwarded(rig: Rig) -> None:
    assert rig.take(new_object(HERE), new_object(ELSEWHERE), new_object(HERE)) == [0, 2]
    assert list(await rig.results()) == [1]
    assert rig.west.writes == ["obj_add"]


@pytest.mark.parametrize(("id1", "id2"), [(HERE, ELSEWHERE), (ELSEWHERE, HERE)])
async def test_a_pair_is_written_where_its_smaller_id_is_mastered_whichever_end_is_named_first(
    rig: Rig, id1: int, id2: int
) -> None:
    assert rig.take(AssocAdd(id1, FRIEND, id2, 1, b"")) == [0]
    # For an edge without inverse, the end that is named first decides.
    assert rig.take(AssocAdd(ELSEWHERE, COMMENT, HERE, 1, b"")) == []
    await quiet()
    assert rig.west.writes == ["assoc_add"]


async def test_a_copy_from_another_leader_and_an_invalid_write_are_not_forwarded(rig: Rig) -> None:
    settle = write_to_pb(SettleEdge(ELSEWHERE, FRIEND, HERE, present=False))
    nonsense: Sequence[pb.Write] = (
        settle, pb.Write(), write_to_pb(AssocAdd(1 << 63, COMMENT, HERE, 1, b"")),
        write_to_pb(AssocAdd(ELSEWHERE, 999, HERE, 1, b"")),
    )  # fmt: skip
    assert rig.take(*nonsense) == [0, 1, 2, 3]


async def test_an_error_of_the_master_region_reaches_the_writer(rig: Rig) -> None:
    rig.west.fault = Overloaded("its queue is full")
    assert rig.take(new_object(ELSEWHERE)) == []
    (result,) = (await rig.results()).values()
    assert isinstance(error_from_pb(result.error), Overloaded)
    assert rig.cache.object(ELSEWHERE) is None


async def test_changes_of_a_shard_that_is_not_served_here_are_ignored(rig: Rig) -> None:
    rig.hosted.clear()
    rig.forwarded.apply_and_publish(CHANGES)
    assert rig.cache.object(ELSEWHERE) is None
    assert rig.deliveries == []


async def test_changes_forwarded_by_another_leader_of_this_tier_are_applied_and_published(rig: Rig) -> None:
    gone = ShardMessages(1, 1, (ObjectChange(ELSEWHERE, V1, make_version(1, 2), ABSENT, b""),))
    for changes in (CHANGES, gone):
        answers: list[pb.Answer] = []
        request = pb.Request(apply=pb.ApplyChanges(changes=[shard_messages_to_pb(changes)]))
        rig.forwarded.apply(request, MemoryReply(answers.append, peer="leader-2"))
        assert [answer.HasField("applied") for answer in answers] == [True]
    assert rig.cache.object(ELSEWHERE) == encode_object(make_version(1, 2), ABSENT, b"")
    assert [part.messages for delivery in rig.deliveries for part in delivery.shards] == [CHANGES, gone]


async def test_ids_are_reserved_where_the_shard_is_mastered(rig: Rig) -> None:
    async def reserve(shard: int) -> pb.Answer | None:
        answer: asyncio.Future[pb.Answer] = asyncio.get_running_loop().create_future()
        request = pb.Request(deadline_ms=5_000, reserve_ids=pb.ReserveIds(shard=shard, count=3))
        if not rig.forwarded.reserve_ids(request, MemoryReply(answer.set_result)):
            return None
        return await answer

    assert await reserve(0) is None
    answer = await reserve(1)
    assert answer is not None
    assert list(answer.reserved_ids.ids) == [ELSEWHERE]
    assert rig.west.reserved == 3
    rig.west.fault = Overloaded("full")
    answer = await reserve(1)
    assert answer is not None
    assert answer.error == error_to_pb(rig.west.fault)
