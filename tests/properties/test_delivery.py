"""Whatever is lost on the way, no subscriber misses a message.

A subscriber has every message of a shard in order, or was reset after the last message that it missed. A proof of a
time overtakes no earlier message.
"""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tao.delivery.inbox import Inbox
from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings
from tao.delivery.subscription import Subscription
from tao.model.changes import ObjectInvalidation, ShardMessages
from tao.model.delivery import Delivery, Span
from tests.rigs.effort import examples

SHARDS = st.integers(0, 2)
FOLLOWERS = st.sampled_from(["a", "b"])
SETTINGS = DeliverySettings(
    log_messages_per_shard=6,
    log_bytes_total=240 * 12,
    window_unacknowledged_bytes=1_500,
    max_delivery_messages=3,
    max_delivery_bytes=700,
)


class Follower:
    """A cache that only records, per shard, the messages applied since its last reset and the number of the first.
    ``bases``: how many messages a shard had published before each of its streams began."""

    def __init__(
        self, name: str, hosted: set[int], bases: dict[tuple[int, str], int], published: dict[int, list[int]]
    ) -> None:
        self.name = name
        self.published = published
        self.confirmed: set[int] = set()
        self.lossless = True
        """Whether deliveries arrived once and in order while connected, which is what sessions guarantee."""
        self.bases = bases
        self.start: dict[int, int] = {}
        self.hosted = hosted
        self.inbox = Inbox(lambda _: "db")
        self.wire: deque[Delivery] = deque()
        self.subscription: Subscription | None = None
        self.applied: dict[int, list[int]] = {shard: [] for shard in hosted}

    def connect(self, publisher: Publisher) -> None:
        self.wire.clear()
        self.confirmed.clear()
        self.lossless = True
        wire = self.wire = deque()
        self.subscription = publisher.subscribe(self.name, self.inbox.positions_for(sorted(self.hosted)), wire.append)

    def take(self, acknowledge: bool) -> None:
        delivery = self.wire.popleft()
        received = self.inbox.receive(delivery)
        for shard in received.resets:
            self.applied[shard] = []
        for part in delivery.shards:
            position = part.position
            if part.reset:
                self.start[position.shard] = self.bases[position.shard, position.stream] + position.sequence
        for messages in received.messages:
            for message in messages.messages:
                assert isinstance(message, ObjectInvalidation)
                self.applied[messages.shard].append(message.version)
        self.confirmed |= set(received.confirmed)
        self.confirmed -= {*received.gaps, *received.refused}
        for _, proven in delivery.proven if self.lossless else ():
            for shard in self.confirmed:
                missing = self.published[shard][self.start[shard] + len(self.applied[shard]) :]
                assert all(version > proven for version in missing), "a proof has overtaken a message"
        assert self.subscription is not None
        if acknowledge and not self.subscription.closed:
            self.subscription.acknowledge(delivery.number)
        again = [*received.gaps, *received.refused]
        if again and not self.subscription.closed:
            self.subscription.add(self.inbox.positions_for(again))


class DeliveryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.version = 0
        self.generation = 1
        self.published: dict[int, list[int]] = {0: [], 1: [], 2: []}
        self.bases: dict[tuple[int, str], int] = {}
        self.followers = {
            name: Follower(name, hosted, self.bases, self.published)
            for name, hosted in (("a", {0, 1, 2}), ("b", {0, 2}))
        }
        self.start_leader()
        for follower in self.followers.values():
            follower.connect(self.publisher)

    def anything_on_the_way(self) -> bool:
        return any(follower.wire for follower in self.followers.values())

    def start_leader(self) -> None:
        self.runs += 1
        self.publisher = Publisher(SETTINGS, f"run-{self.runs}", lambda _: "db")
        for shard in range(3):
            self.open(shard)

    def open(self, shard: int) -> None:
        self.bases[shard, f"run-{self.runs}/{self.generation}"] = len(self.published[shard])
        self.publisher.open_shard(shard, self.generation, 1)
        self.publisher.publish_relay((), [Span(shard, "", 0, 0)])

    @rule(shards=st.lists(SHARDS, min_size=1, max_size=6))
    def publish(self, shards: list[int]) -> None:
        batches = []
        for shard in shards:
            self.version += 1
            self.published[shard].append(self.version)
            epoch = 1 + self.version // 20
            batches.append(ShardMessages(shard, epoch, (ObjectInvalidation(shard << 47 | 1, self.version),)))
        self.publisher.publish_all(batches)

    @rule()
    def prove(self) -> None:
        """Prove a "time": the number of messages so far."""
        if self.version:
            self.publisher.prove("db", self.version)

    @precondition(anything_on_the_way)
    @rule(name=FOLLOWERS, count=st.integers(1, 5), acknowledge=st.booleans())
    def take(self, name: str, count: int, acknowledge: bool) -> None:
        follower = self.followers[name]
        for _ in range(min(count, len(follower.wire))):
            follower.take(acknowledge)

    @precondition(anything_on_the_way)
    @rule(name=FOLLOWERS, repeat=st.booleans())
    def lose_or_repeat_one(self, name: str, repeat: bool) -> None:
        wire = self.followers[name].wire
        if not wire:
            return
        self.followers[name].lossless = False  # and no session puts a repeated message behind a later one
        if repeat:
            wire.append(wire[0])
        else:
            wire.popleft()

    @rule(name=FOLLOWERS, again=st.booleans())
    def disconnect(self, name: str, again: bool) -> None:
        follower = self.followers[name]
        follower.wire.clear()
        if again:
            follower.connect(self.publisher)
        elif follower.subscription is not None:
            follower.subscription.close()

    @rule(shard=SHARDS)
    def give_up_and_take_back(self, shard: int) -> None:
        self.generation += 1
        self.publisher.close_shard(shard)
        self.open(shard)

    @rule()
    def restart_leader(self) -> None:
        self.start_leader()
        for follower in self.followers.values():
            follower.connect(self.publisher)

    @invariant()
    def nobody_has_skipped_a_message_since_its_last_reset(self) -> None:
        for follower in self.followers.values():
            for shard, applied in follower.applied.items():
                start = follower.start.get(shard, 0)
                assert applied == self.published[shard][start : start + len(applied)]

    @invariant()
    def the_log_and_what_is_in_flight_are_bounded(self) -> None:
        figures = self.publisher.figures()
        assert figures["log_bytes"] <= SETTINGS.log_bytes_total
        assert figures["log_messages"] <= 3 * SETTINGS.log_messages_per_shard

    def teardown(self) -> None:
        """Connected and undisturbed, every follower reaches the end, with nothing missing before it."""
        for follower in self.followers.values():
            follower.connect(self.publisher)
            while follower.wire:
                follower.take(acknowledge=True)
        for shard in range(3):
            self.version += 1
            self.published[shard].append(self.version)
            message = ObjectInvalidation(shard << 47 | 1, self.version)
            self.publisher.publish(ShardMessages(shard, 1, (message,)))
        for follower in self.followers.values():
            while follower.wire:
                follower.take(acknowledge=True)
            for shard in follower.hosted:
                applied = follower.applied[shard]
                assert applied == self.published[shard][follower.start[shard] :]
                assert applied


TestDelivery = DeliveryMachine.TestCase
TestDelivery.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)
