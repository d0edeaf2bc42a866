"""What a tailer relays: applied before it is forwarded, all of it or nothing, void where no version tells."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tao.cache import CacheSettings, GraphCache
from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings
from tao.leader.relay_path import RelayPath, RelaySettings
from tao.leader.touch_path import TouchPath, touched_floor
from tao.model.changes import ListInvalidation, ObjectChange, ObjectInvalidation, ShardInvalidation, ShardMessages
from tao.model.delivery import Delivery, Position, Span
from tao.model.errors import DeadlineExceeded, NotMine, ShardBlocked, TaoError
from tao.model.graph import encode_object
from tao.model.relay import Relay, Touch
from tao.model.writes import TouchKeys
from tao.serving.applying import apply_messages
from tao.serving.cache_types import SchemaArenas
from tao.wire.convert import error_from_pb, relay_to_pb
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import ARENAS, COMMENT, SCHEMA, USER, make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.pacing import ManualClock, Tasks, until
from tests.rigs.versions import make_version

V1, V2 = make_version(1, 1), make_version(1, 2)
DATABASES = ["db1", "db2"]
A, B = make_id(64, 0), make_id(64, 1)
MESSAGES = ShardMessages(0, 1, (ObjectChange(A, V1, V2, USER, b"new"),))


class Rig:
    """A leader that serves shards 0 and 1; near-1 has subscribed to both. What happens is in ``story``, in order."""

    def __init__(self, settings: RelaySettings) -> None:
        self.clock = ManualClock()
        self.cache = GraphCache(CacheSettings(arena_bytes=ARENAS), SchemaArenas(SCHEMA, ARENAS))
        self.publisher = Publisher(DeliverySettings(), "leader-1/1", DATABASES.__getitem__)
        self.story: list[str] = []
        self.told: list[Delivery] = []
        for shard in (0, 1):
            self.cache.open_shard(shard, 1)
            self.publisher.open_shard(shard, 1, 1)
        self.subscription = self.publisher.subscribe("near-1", [Position(0), Position(1)], self._deliver)
        self.told.clear()
        self.story.clear()
        self.tasks = Tasks()
        self.hosted: set[int] = set()
        self.touched: list[TouchKeys] = []
        self.touch_faults: list[Exception] = []
        self.path = RelayPath(
            self.cache.is_open,
            self.hosted.__contains__,
            self._apply,
            self.cache.witness.because,
            TouchPath(self._commit, lambda touch: touched_floor(self.cache, touch), 2),
            self.publisher,
            self.cache.version_epoch,
            lambda: 7,
            self.clock,
            self.tasks,
            settings,
        )

    def relay(self, relay: Relay, topology_version: int = 7) -> list[pb.Answer]:
        answers: list[pb.Answer] = []
        request = pb.Request(relay=relay_to_pb(relay), topology_version=topology_version)
        self.path.handle(request, MemoryReply(answers.append, peer="tailer"))
        return answers

    def hold(self, object_id: int) -> None:
        now = self.clock.monotonic()
        self.cache.store_object(self.cache.object_ticket(object_id, now), encode_object(V1, USER, b"old"), 1, now)
        assert self.cache.object(object_id) is not None

    @property
    def messages(self) -> list[ShardMessages]:
        found = [part.messages for delivery in self.told for part in delivery.shards if part.messages is not None]
        return [messages for messages in found if messages.messages]

    def _apply(self, messages: ShardMessages) -> None:
        is_void = any(isinstance(message, ShardInvalidation) for message in messages.messages)
        self.story.append(f"void {messages.shard}" if is_void else "applied")
        apply_messages(self.cache, self.clock, messages, insert=False)

    async def _commit(self, write: TouchKeys, deadline: float) -> None:
        if self.touch_faults:
            raise self.touch_faults.pop(0)
        self.touched.append(write)

    def _deliver(self, delivery: Delivery) -> None:
        self.story.append("told")
        self.told.append(delivery)


@pytest.fixture
def make_rig() -> Callable[[], Rig]:
    return lambda: Rig(RelaySettings(visible_after_seconds=0.0, max_drops_per_shard=3))


async def test_messages_are_applied_before_they_are_forwarded_and_then_acknowledged(
    make_rig: Callable[[], Rig],
) -> None:
    rig = make_rig()
    rig.hold(A)
    (answer,) = rig.relay(Relay(changes=(MESSAGES,)))
    assert answer.HasField("relayed")
    assert rig.story == ["applied", "told"]
    assert rig.cache.object(A) == encode_object(V2, USER, b"new")
    assert rig.messages == [MESSAGES]
    assert rig.path.messages == 1
    assert rig.path.voided == 0


async def test_a_relay_told_twice_changes_nothing_more(make_rig: Callable[[], Rig]) -> None:
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


async def test_a_void_shard_is_so_here_and_at_subscribers_now_and_once_all_rows_are_visible(
    make_rig: Callable[[], Rig],
) -> None:
    rig = make_rig()
    rig.hold(A)
    rig.hold(B)
    answers = rig.relay(Relay(bulk_shards=(0,)))
    assert rig.story == ["void 0", "told"]
    assert rig.cache.object(A) is None
    assert rig.cache.object(B) is not None
    rig.hold(A)  # by a SELECT that did not see the change yet
    assert answers == [], "until then a restarted leader would have to do it again"
    await until(lambda: answers)
    assert answers[0].HasField("relayed")
    assert rig.path.voided == 2
    assert rig.cache.object(A) is None
    assert {message for messages in rig.messages for message in messages.messages} == {ShardInvalidation(0)}
    assert [messages.shard for messages in rig.messages] == [0, 0]


async def test_of_a_relay_with_a_shard_that_is_not_served_nothing_is_applied(make_rig: Callable[[], Rig]) -> None:
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


async def test_how_fresh_each_database_is_is_told_behind_the_messages_of_the_same_relay(
    make_rig: Callable[[], Rig],
) -> None:
    rig = make_rig()
    rig.relay(Relay(changes=(MESSAGES,), source="db-1", source_unix_ms=5_000))
    rig.relay(Relay(source="db-2", source_unix_ms=6_000))
    rig.relay(Relay(source="db-1"))
    assert [bool(delivery.shards) for delivery in rig.told] == [True, False, False]
    assert [delivery.proven for delivery in rig.told] == [
        (),
        (("db-1", 5_000),),
        (("db-1", 5_000), ("db-2", 6_000)),
    ]


async def test_a_time_is_proved_once_the_keys_of_before_are_touched(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    rig.touch_faults.append(ShardBlocked("a lock was not had", 0))
    relay = Relay(touches=(Touch(A, 0, V1),), source="db-1", source_unix_ms=5_000)
    for proven in ({}, {"db-1": 5_000}):
        answers = rig.relay(relay)
        assert rig.publisher.proven == {}
        await until(answers.__len__)
        assert rig.publisher.proven == proven


@pytest.mark.parametrize("version", [6, 8])
async def test_a_tailer_that_goes_by_another_topology_proves_nothing(make_rig: Callable[[], Rig], version: int) -> None:
    rig = make_rig()
    (answer,) = rig.relay(Relay(source="db-1", source_unix_ms=5_000), topology_version=version)
    assert answer.HasField("relayed")
    assert rig.publisher.proven == {}


async def test_a_bulk_invalidation_of_types_is_followed_by_the_subscribers(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    rig.hold(A)
    assert rig.path.void([0], "asked", atypes=(COMMENT,)) == 1
    assert rig.cache.object(A) is not None
    assert rig.path.void([0], "asked", otypes=(USER,)) == 1
    assert rig.cache.object(A) is None
    told = [message for messages in rig.messages for message in messages.messages]
    assert told == [ShardInvalidation(0, (), (COMMENT,)), ShardInvalidation(0, (USER,), ())]


async def test_an_operator_s_bulk_invalidation_counts_the_shards_that_are_served(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    rig.hold(A)
    assert rig.path.void([0, 1, 2], "asked") == 2
    assert rig.cache.object(A) is None
    assert sorted(messages.shard for messages in rig.messages) == [0, 1]


async def test_keys_that_someone_else_changed_are_dropped_at_once_and_acknowledged_when_they_are_touched(
    make_rig: Callable[[], Rig],
) -> None:
    rig = make_rig()
    rig.hold(A)
    rig.hold(B)
    answers = rig.relay(Relay(touches=(Touch(A, 0, V1), Touch(A, 4, V1))))
    assert rig.story == ["applied", "told"]
    assert rig.cache.object(A) is None
    assert rig.cache.object(B) is not None
    assert [messages.messages for messages in rig.messages] == [(ObjectInvalidation(A, 0), ListInvalidation(A, 4, 0))]
    assert answers == []
    await until(lambda: bool(answers))
    assert answers[0].HasField("relayed")
    assert rig.touched == [TouchKeys(0, (Touch(A, 0, V1), Touch(A, 4, V1)))]
    assert (rig.path.dropped, rig.path.voided) == (2, 0)


async def test_a_touch_goes_above_what_this_leader_has_heard_of(make_rig: Callable[[], Rig]) -> None:
    rig = make_rig()
    rig.cache.raise_object_floor(A, V2, rig.clock.monotonic())
    answers = rig.relay(Relay(touches=(Touch(A, 0, 0), Touch(A, 0, V1))))
    await until(lambda: bool(answers))
    assert rig.touched == [TouchKeys(0, (Touch(A, 0, V2),))]


async def test_keys_of_a_shard_that_another_region_masters_are_dropped_and_left_to_it(
    make_rig: Callable[[], Rig],
) -> None:
    rig = make_rig()
    rig.hosted.add(0)
    rig.hold(A)
    (answer,) = rig.relay(Relay(touches=(Touch(A, 0, V1),)))
    assert answer.HasField("relayed")
    assert rig.cache.object(A) is None
    assert rig.touched == []


async def test_many_keys_at_once_void_their_shard_and_are_touched_a_few_at_a_time(
    make_rig: Callable[[], Rig],
) -> None:
    rig = make_rig()
    many = tuple(Touch(make_id(number, 0), 0, V1) for number in range(64, 69))
    few = (Touch(B, 0, V1), Touch(B, 4, V1))
    answers = rig.relay(Relay(touches=many + few))
    await until(lambda: bool(answers) and rig.path.voided == 2)
    assert rig.story.count("void 0") == 2
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
async def test_keys_that_could_not_be_touched_are_told_again_and_hold_up_their_shard_alone(
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


async def test_a_tailer_is_asked_of_the_shards_of_its_own_database_alone(make_rig: Callable[[], Rig]) -> None:
    """Of another's it would say that there is nothing new, which nobody has told it."""
    rig = make_rig()
    for source, shard in (("db1", 0), ("db2", 1)):
        (answer,) = rig.relay(Relay(source=source))
        assert [want.shard for want in answer.relayed.wanted] == [shard]
    # And what another's says all the same is not believed.
    rig.relay(Relay(source="db1", spans=(Span(1, "db1@1:0-1", 9, 9),)))
    assert rig.publisher.figures()["unlinked_shards"] == 2
    rig.publisher.want(1, "db2@1:0-1", 20)
    (answer,) = rig.relay(Relay(source="db1"))
    assert not answer.relayed.wanted
    (answer,) = rig.relay(Relay(source="db2"))
    assert [(want.shard, want.number) for want in answer.relayed.wanted] == [(1, 20)]
