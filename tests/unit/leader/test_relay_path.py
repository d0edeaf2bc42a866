"""Relays of a tailer: applied before they are forwarded, as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tao.cache import CacheSettings, GraphCache
from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings
from tao.leader.relay_path import RelayPath, RelayPathSettings, TouchPath
from tao.model.changes import ListInvalidation, ObjectChange, ObjectInvalidation, ShardInvalidation, ShardMessages
from tao.model.delivery import Delivery, Position, Span
from tao.model.errors import DeadlineExceeded, NotMine, ShardBlocked, TaoError
from tao.model.graph import encode_object
from tao.model.relay import Reference, Relay, Touch
from tao.model.writes import TouchKeys
from tao.observability.logs import logger
from tao.serving.configuration import Configuration
from tao.serving.forward_path import apply_messages
from tao.serving.server import SchemaArenas
from tao.wire.convert import error_from_pb, relay_to_pb, relayed_from_pb
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import ARENAS, COMMENT, SCHEMA, USER, make_id, make_topology
from tests.rigs.links_rig import MemoryLinks, MemoryReply
from tests.rigs.pacing import ManualClock, Tasks, until
from tests.rigs.server_context import make_context
from tests.rigs.versions import make_version

V1, V2 = make_version(1, 1), make_version(1, 2)
DATABASES = ["db1", "db2"]
A, B = make_id(64, 0), make_id(64, 1)
MESSAGES = ShardMessages(0, 1, (ObjectChange(A, V1, V2, USER, b"new"),))


class Rig:
    """A leader that serves shards 0 and 1; near-1 has subscribed to both. ``story`` records the events in order."""

    def __init__(self, settings: RelayPathSettings) -> None:
        self.clock = ManualClock()
        self.cache = GraphCache(CacheSettings(arena_bytes=ARENAS), SchemaArenas(SCHEMA, ARENAS))
        self.publisher = Publisher(DeliverySettings(), "leader-1/1", DATABASES.__getitem__)
        self.story: list[str] = []
        self.deliveries: list[Delivery] = []
        for shard in (0, 1):
            self.cache.open_shard(shard, 1)
            self.publisher.open_shard(shard, 1, 1)
        self.subscription = self.publisher.subscribe("near-1", [Position(0), Position(1)], self._deliver)
        self.deliveries.clear()
        self.story.clear()
        self.tasks = Tasks()
        self.hosted: set[int] = set()
        self.touched: list[TouchKeys] = []
        self.touch_faults: list[Exception] = []
        self.path = RelayPath(
            make_context(
                Configuration(make_topology(7), SCHEMA, logger("test")),
                MemoryLinks("leader-1").as_links(),
                self.tasks,
                name="leader-1",
                clock=self.clock,
            ),
            settings,
            self.cache,
            TouchPath(self._commit, self.cache, 2),
            self.publisher,
            hosts=self.hosted.__contains__,
            apply=self._apply,
        )

    def relay(self, relay: Relay, topology_version: int = 7) -> list[pb.Answer]:
        answers: list[pb.Answer] = []
        request = pb.Request(topology_version=topology_version)
        body = request.relay_by_reference if relay.references else request.relay
        body.CopyFrom(relay_to_pb(relay))
        self.path.handle(request, MemoryReply(answers.append, peer="tailer"))
        return answers

    def hold(self, object_id: int) -> None:
        now = self.clock.monotonic()
        self.cache.store_object(self.cache.object_ticket(object_id, now), encode_object(V1, USER, b"old"), 1, now)
        assert self.cache.object(object_id) is not None

    @property
    def messages(self) -> list[ShardMessages]:
        found = [part.messages for delivery in self.deliveries for part in delivery.shards if part.messages is not None]
        return [messages for messages in found if messages.messages]

    def _apply(self, messages: ShardMessages) -> None:
        is_invalidation = any(isinstance(message, ShardInvalidation) for message in messages.messages)
        self.story.append(f"invalidated {messages.shard}" if is_invalidation else "applied")
        apply_messages(self.cache, self.clock, messages, insert=False)

    async def _commit(self, write: TouchKeys, deadline: float) -> None:
        if self.touch_faults:
            raise self.touch_faults.pop(0)
        self.touched.append(write)

    def _deliver(self, delivery: Delivery) -> None:
        self.story.append("delivered")
        self.deliveries.append(delivery)


@pytest.fixture
def make_rig() -> Callable[[], Rig]:
    return lambda: Rig(RelayPathSettings(visible_after_seconds=0.0, max_drops_per_shard=3))


async def test_messages_are_applied_before_they_are_forwarded_and_then_acknowledged(
    make_rig: Callable[[], Rig],
) -> None:
    rig = make_rig()
    rig.hold(A)
    (answer,) = rig.relay(Relay(changes=(MESSAGES,)))
    assert answer.HasField("relayed")
    assert rig.story == ["applied", "delivered"]
    assert rig.cache.object(A) == encode_object(V2, USER, b"new")
    assert rig.messages == [MESSAGES]
    assert rig.path.messages == 1
    assert rig.path.invalidated_shards == 0


async def test_a_relay_that_arrives_twice_changes_nothing_more(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    rig.hold(A)
    for _ in range(2):
        rig.relay(Relay(changes=(MESSAGES,)))
    assert rig.cache.object(A) == encode_object(V2, USER, b"new")


async def test_a_fill_that_a_message_has_overtaken_is_not_kept(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    ticket = rig.cache.object_ticket(A, rig.clock.monotonic())
    rig.relay(Relay(changes=(MESSAGES,)))
    rig.cache.store_object(ticket, encode_object(V1, USER, b"old"), 1, rig.clock.monotonic())
    assert rig.cache.object(A) is None


async def test_a_bulk_changed_shard_is_invalidated_everywhere_at_once_and_again_when_its_rows_are_visible(
    make_rig: Callable[[], Rig],
) -> None:
    rig = make_rig()
    rig.hold(A)
    rig.hold(B)
    answers = rig.relay(Relay(bulk_shards=(0,)))
    assert rig.story == ["invalidated 0", "delivered"]
    assert rig.cache.object(A) is None
    assert rig.cache.object(B) is not None
    rig.hold(A)  # filled by a SELECT that did not see the change yet
    assert answers == [], "until then a restarted leader would have to do it again"
    await until(lambda: answers)
    assert answers[0].HasField("relayed")
    assert rig.path.invalidated_shards == 2
    assert rig.cache.object(A) is None
    assert {message for messages in rig.messages for message in messages.messages} == {ShardInvalidation(0)}
    assert [messages.shard for messages in rig.messages] == [0, 0]


async def test_nothing_of_a_relay_is_applied_when_one_of_its_shards_is_not_served(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    rig.hold(A)
    for foreign in (
        Relay(changes=(MESSAGES, ShardMessages(2, 1, ()))),
        Relay(changes=(MESSAGES,), touches=(Touch(make_id(1, 2), 0, V1),)),
        Relay(changes=(MESSAGES,), bulk_shards=(0, 2), source="db", source_unix_ms=5),
    ):
        with pytest.raises(NotMine, match="shard 2"):
            rig.relay(foreign)
    assert rig.story == []
    assert rig.cache.object(A) == encode_object(V1, USER, b"old")
    assert rig.publisher.proven == {}


async def test_the_proof_of_a_databases_freshness_follows_the_messages_of_the_same_relay(
    make_rig: Callable[[], Rig],
) -> None:
    rig = make_rig()
    rig.relay(Relay(changes=(MESSAGES,), source="db-1", source_unix_ms=5_000))
    rig.relay(Relay(source="db-2", source_unix_ms=6_000))
    rig.relay(Relay(source="db-1"))
    assert [bool(delivery.shards) for delivery in rig.deliveries] == [True, False, False]
    assert [delivery.proven for delivery in rig.deliveries] == [
        (),
        (("db-1", 5_000),),
        (("db-1", 5_000), ("db-2", 6_000)),
    ]


async def test_a_time_is_proved_once_all_earlier_keys_are_touched(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    rig.touch_faults.append(ShardBlocked("a lock was not had", 0))
    relay = Relay(touches=(Touch(A, 0, V1),), source="db-1", source_unix_ms=5_000)
    for proven in ({}, {"db-1": 5_000}):
        answers = rig.relay(relay)
        assert rig.publisher.proven == {}
        await until(answers.__len__)
        assert rig.publisher.proven == proven


@pytest.mark.parametrize("version", [6, 8])
async def test_a_tailer_with_another_topology_proves_nothing(make_rig: Callable[[], Rig], version: int) -> None:
    rig = make_rig()
    (answer,) = rig.relay(Relay(source="db-1", source_unix_ms=5_000), topology_version=version)
    assert answer.HasField("relayed")
    assert rig.publisher.proven == {}


async def test_a_bulk_invalidation_of_types_reaches_the_subscribers(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    rig.hold(A)
    assert rig.path.invalidate([0], "asked", atypes=(COMMENT,)) == 1
    assert rig.cache.object(A) is not None
    assert rig.path.invalidate([0], "asked", otypes=(USER,)) == 1
    assert rig.cache.object(A) is None
    invalidations = [message for messages in rig.messages for message in messages.messages]
    assert invalidations == [ShardInvalidation(0, (), (COMMENT,)), ShardInvalidation(0, (USER,), ())]


async def test_an_operator_s_bulk_invalidation_counts_the_shards_that_are_served(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    rig.hold(A)
    assert rig.path.invalidate([0, 1, 2], "asked") == 2
    assert rig.cache.object(A) is None
    assert sorted(messages.shard for messages in rig.messages) == [0, 1]


async def test_foreign_keys_are_dropped_at_once_and_acknowledged_when_they_are_touched(
    make_rig: Callable[[], Rig],
) -> None:
    rig = make_rig()
    rig.hold(A)
    rig.hold(B)
    answers = rig.relay(Relay(touches=(Touch(A, 0, V1), Touch(A, 4, V1))))
    assert rig.story == ["applied", "delivered"]
    assert rig.cache.object(A) is None
    assert rig.cache.object(B) is not None
    assert [messages.messages for messages in rig.messages] == [(ObjectInvalidation(A, 0), ListInvalidation(A, 4, 0))]
    assert answers == []
    await until(lambda: bool(answers))
    assert answers[0].HasField("relayed")
    assert rig.touched == [TouchKeys(0, (Touch(A, 0, V1), Touch(A, 4, V1)))]
    assert (rig.path.dropped, rig.path.invalidated_shards) == (2, 0)


async def test_a_touch_exceeds_every_version_known_to_this_leader(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    rig.cache.raise_object_floor(A, V2, rig.clock.monotonic())
    answers = rig.relay(Relay(touches=(Touch(A, 0, 0), Touch(A, 0, V1))))
    await until(lambda: bool(answers))
    assert rig.touched == [TouchKeys(0, (Touch(A, 0, V2),))]


async def test_keys_of_a_shard_mastered_in_another_region_are_dropped_and_not_touched(
    make_rig: Callable[[], Rig],
) -> None:
    rig = make_rig()
    rig.hosted.add(0)
    rig.hold(A)
    (answer,) = rig.relay(Relay(touches=(Touch(A, 0, V1),)))
    assert answer.HasField("relayed")
    assert rig.cache.object(A) is None
    assert rig.touched == []


async def test_many_keys_at_once_invalidate_their_shard_and_are_touched_in_small_writes(
    make_rig: Callable[[], Rig],
) -> None:
    rig = make_rig()
    many = tuple(Touch(make_id(number, 0), 0, V1) for number in range(64, 69))
    few = (Touch(B, 0, V1), Touch(B, 4, V1))
    answers = rig.relay(Relay(touches=many + few))
    await until(lambda: bool(answers) and rig.path.invalidated_shards == 2)
    assert rig.story.count("invalidated 0") == 2
    assert [(write.shard, len(write.touches)) for write in rig.touched] == [(0, 2), (0, 2), (0, 1), (1, 2)]
    assert rig.path.dropped == 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ShardBlocked("locked", 0), ShardBlocked),
        (DeadlineExceeded("a list of a billion"), ShardBlocked),
        (NotMine("lost", 7), NotMine),
    ],
)
async def test_keys_that_could_not_be_touched_block_only_their_shard_and_are_sent_again(
    make_rig: Callable[[], Rig], error: TaoError, said: type[TaoError]
) -> None:
    rig = make_rig()
    rig.touch_faults.append(error)
    relay = Relay(touches=(Touch(A, 0, V1), Touch(B, 0, V1)))
    answers = rig.relay(relay)
    await until(lambda: bool(answers))
    assert type(error_from_pb(answers[0].error)) is said
    rig.touched.clear()
    again = rig.relay(relay)
    await until(lambda: bool(again))
    assert again[0].HasField("relayed")
    assert [write.shard for write in rig.touched] == [0, 1]


async def test_a_tailer_is_asked_only_for_shards_of_its_own_database(make_rig: Callable[[], Rig]) -> None:
    """A tailer of another database would say that there is nothing new, though it never got these shards' messages."""
    rig = make_rig()
    for source, shard in (("db1", 0), ("db2", 1)):
        (answer,) = rig.relay(Relay(source=source))
        assert [want.shard for want in answer.relayed.wanted] == [shard]
    # If another database's tailer reports something all the same, it is ignored.
    rig.relay(Relay(source="db1", spans=(Span(1, "db1@1:0-1", 9, 9),)))
    assert rig.publisher.figures()["unlinked_shards"] == 2
    rig.publisher.request_replay(1, "db2@1:0-1", 20)
    (answer,) = rig.relay(Relay(source="db1"))
    assert not answer.relayed.wanted
    (answer,) = rig.relay(Relay(source="db2"))
    assert [(want.shard, want.number) for want in answer.relayed.wanted] == [(1, 20)]


SOURCE = "db1@1:0-1"


def named(*numbers: int, shard: int = 0, place: int = 0) -> Reference:
    return Reference(shard, SOURCE, numbers, place)


def kept(rig: Rig, *numbers: int) -> list[ShardMessages]:
    """Have the leader keep messages of its own commits; return them."""
    batches = [
        ShardMessages(
            0, 1, (ObjectChange(A, make_version(1, number - 1), make_version(1, number), USER, b"%d" % number),)
        )
        for number in numbers
    ]
    for number, batch in zip(numbers, batches, strict=True):
        rig.publisher.committed.keep(SOURCE, number, [batch], rig.clock.monotonic())
    return batches


async def test_a_leader_enters_its_own_messages_where_a_relay_names_them(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    first, _, third = kept(rig, 1, 2, 3)
    second = ShardMessages(0, 1, (ObjectChange(A, make_version(1, 1), make_version(1, 2), USER, b"decoded"),))
    spans = (Span(0, "db1@1:0-1", 0, 3),)
    relay = Relay(changes=(second,), references=(named(1), named(3, place=1)), source="db1", spans=spans)
    (answer,) = rig.relay(relay)
    assert relayed_from_pb(answer.relayed).missing == ()
    assert rig.messages == [ShardMessages(0, 1, first.messages + second.messages + third.messages)]
    assert rig.deliveries[-1].shards[-1].position.reached == 3
    committed = rig.publisher.committed
    assert committed.entered == 2
    assert [committed.find(SOURCE, number, 0) is not None for number in (1, 2, 3)] == [False, True, False]


@pytest.mark.parametrize("is_taken_again", [False, True])
async def test_a_leader_applies_a_commit_of_its_own_once_in_a_generation(
    make_rig: Callable[[], Rig], is_taken_again: bool
) -> None:
    rig = make_rig()
    (batch,) = kept(rig, 1)
    rig.publisher.publish(batch)
    if is_taken_again:
        rig.publisher.open_shard(0, 2, 1)
    rig.relay(Relay(references=(named(1),), source="db1"))
    assert rig.story.count("applied") == is_taken_again
    assert rig.story[-1] == "delivered"


async def test_nothing_of_a_relay_is_entered_while_some_of_it_is_missing(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    kept(rig, 1, 3)
    other = named(3, shard=1)
    relay = Relay(changes=(MESSAGES,), references=(named(1, 2, 3), other), source="db1", bulk_shards=(1,))
    (answer,) = rig.relay(relay)
    relayed = relayed_from_pb(answer.relayed)
    assert relayed.missing == (named(2), other)
    assert relayed.takes_references
    assert rig.story == []
    assert rig.messages == []
    assert rig.publisher.committed.missing == 2
    assert rig.publisher.committed.find(SOURCE, 1, 0) is not None


async def test_a_reference_to_a_shard_that_is_not_served_is_rejected(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    with pytest.raises(NotMine):
        rig.relay(Relay(references=(named(1, shard=2),), source="db1"))


async def test_a_leader_waits_for_a_commit_that_the_tailer_has_read_already(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    with rig.publisher.committed.committing("db1"):
        answers = rig.relay(Relay(references=(named(1),), source="db1"))
        assert answers == []
        (messages,) = kept(rig, 1)
    await until(lambda: answers)
    assert relayed_from_pb(answers[0].relayed).missing == ()
    assert rig.messages == [messages]


async def test_a_leader_does_not_wait_for_the_commits_to_another_database(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    with rig.publisher.committed.committing("db2"):
        (answer,) = rig.relay(Relay(references=(named(1),), source="db1"))
    assert relayed_from_pb(answer.relayed).missing == (named(1),)


async def test_a_leader_says_whether_it_has_committed_to_the_database(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    kept(rig, 1)
    for database, takes in (("db1", True), ("db2", False)):
        (answer,) = rig.relay(Relay(source=database))
        assert relayed_from_pb(answer.relayed).takes_references == takes


async def test_a_leader_that_commits_nothing_more_drops_its_messages_when_they_are_old(
    make_rig: Callable[[], Rig],
) -> None:
    rig = make_rig()
    kept(rig, 1)
    for seconds, is_kept in ((29, True), (2, False)):
        rig.clock.now += seconds
        rig.relay(Relay(source="db1", source_unix_ms=1))
        assert (rig.publisher.committed.find(SOURCE, 1, 0) is not None) == is_kept
    assert rig.publisher.committed.bytes == 0
