"""What this leader tells other caches: deliveries to subscribers, and calls to other leaders (DESIGN.md §6, §7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tao.delivery.publisher import Publisher
from tao.delivery.subscription import Subscription
from tao.leader.inverse_path import InversePath
from tao.leader.ownership import Ownership
from tao.model.changes import ShardInvalidation, ShardMessages
from tao.model.delivery import Delivery
from tao.model.ports import Clock
from tao.model.writes import SettleEdge
from tao.peers.links import Links
from tao.serving.configuration import Configuration
from tao.wire.convert import (
    delivery_to_pb,
    error_from_pb,
    position_from_pb,
    shard_messages_from_pb,
    write_to_pb,
)
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb


class Subscribers:
    """Subscribe and Acknowledge requests, onto the publisher."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher: Final = publisher
        self._by_name: dict[str, tuple[int, Subscription]] = {}

    def subscribe(self, request: pb.Request, reply: Reply) -> None:
        """Deliver to the caller from now on. A name has one subscription, the newest."""
        name = request.subscribe.subscriber or reply.peer.name

        def deliver(delivery: Delivery) -> None:
            reply.send(pb.Answer(more=True, delivery=delivery_to_pb(delivery)))

        positions = [position_from_pb(position) for position in request.subscribe.positions]
        subscription = self._publisher.subscribe(name, positions, deliver)
        self._by_name[name] = (request.number, subscription)
        reply.on_close(lambda: self._ended(name, subscription))

    def acknowledge(self, request: pb.Request, reply: Reply) -> None:
        """The caller has applied a delivery."""
        number, subscription = self._by_name.get(reply.peer.name, (0, None))
        if subscription is not None and number == request.acknowledge.subscribe_number:
            subscription.acknowledge(request.acknowledge.delivery_number)

    def _ended(self, name: str, subscription: Subscription) -> None:
        subscription.close()
        if self._by_name.get(name, (0, None))[1] is subscription:
            del self._by_name[name]


class SettlingLeaders:
    """`OtherLeaders` over links; a shard that this leader owns itself (on another database) is settled here."""

    def __init__(
        self, configuration: Configuration, region: str, links: Links, ownership: Ownership, clock: Clock
    ) -> None:
        self._configuration: Final = configuration
        self._region: Final = region
        self._links: Final = links
        self._ownership: Final = ownership
        self._clock: Final = clock
        self.here: InversePath | None = None

    async def settle(self, shard: int, settles: Sequence[SettleEdge], timeout_seconds: float) -> list[ShardMessages]:
        """As `tao.leader.inverse_path.OtherLeaders`."""
        if shard in self._ownership.owned and self.here is not None:
            deadline = self._clock.monotonic() + timeout_seconds
            told: list[ShardMessages] = []
            for settle in settles:
                written, _ = await self.here.write(settle, deadline, sub_write=True)
                told.extend(written.messages)
            return told
        routes = self._configuration.routes
        leader = routes.leaders(self._region).home(shard)
        batch = pb.WriteBatch(writes=[write_to_pb(settle) for settle in settles], want_changes=True)
        request = pb.Request(topology_version=routes.version, write=batch)
        answer = await self._links.to(leader).ask(request, timeout_seconds)
        for result in answer.write.results:
            if result.HasField("error"):
                raise error_from_pb(result.error)
        return [shard_messages_from_pb(messages) for messages in answer.write.changes]


def invalidate_shards(
    shards: Sequence[int], ownership: Ownership, publisher: Publisher, bump: Callable[[int], None]
) -> int:
    """Bulk invalidation of the owned ones among these shards, here and at all subscribers. Returns how many."""
    done = 0
    for shard in shards:
        row = ownership.owned.get(shard)
        if row is not None:
            bump(shard)
            publisher.publish(ShardMessages(shard, row.version_epoch, (ShardInvalidation(shard),)))
            done += 1
    return done
