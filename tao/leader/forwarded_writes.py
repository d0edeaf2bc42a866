"""Forward writes of shards that are mastered in another region.

The leader passes such writes on to the master region's leader. It applies the changes that come back to its own
cache and to the caches of its tier, and publishes them to its subscribers, before it answers the writer. So a client
reads its own writes in this region without waiting for replication."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final

from tao.delivery.publisher import Publisher
from tao.model.changes import ShardMessages
from tao.model.errors import ProtocolError, RequestError, TaoError
from tao.model.topology import CacheServer
from tao.routing.budgets import work_seconds
from tao.serving.context import ServerContext
from tao.serving.forward_path import ForwardPath, WriteResults, shards_of_write
from tao.wire.convert import error_to_pb, shard_messages_from_pb
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb


class ForwardedWrites:
    """Writes and id reservations of shards that other regions master."""

    def __init__(
        self,
        context: ServerContext,
        publisher: Publisher,
        *,
        hosts: Callable[[int], bool],
        apply: Callable[[ShardMessages, float], None],
    ) -> None:
        """``hosts``: returns whether this leader serves the shard for its region without owning it. ``apply``:
        applies messages to this leader's cache, as `WriteThrough.apply_write` does."""
        self._region: Final = context.region
        self._configuration: Final = context.configuration
        self._hosts: Final = hosts
        self._apply: Final = apply
        self._publisher: Final = publisher
        self._links: Final = context.links
        self._spawn: Final = context.spawn_as("reservation of ids")
        self.path: ForwardPath | None = None

    def is_mastered_here(self, shard: int) -> bool:
        """Return whether the shard's master is in this leader's region."""
        return self._configuration.routes.master_region(shard) == self._region

    def leader(self, shard: int) -> CacheServer:
        """Return the leader of the shard in its master region."""
        routes = self._configuration.routes
        return routes.leaders(routes.master_region(shard)).home(shard)

    def leader_is_down(self, shard: int) -> bool:
        """Return whether the leader in the master region has recently failed to answer."""
        return self._links.to(self.leader(shard)).is_down

    def forward(self, batch: pb.WriteBatch, results: WriteResults, deadline: float) -> list[int]:
        """Forward the writes that another region masters; return the slots to execute here, invalid writes among
        them."""
        slots = range(len(batch.writes))
        if all(database.master_region == self._region for database in self._configuration.routes.topology.databases):
            return list(slots)
        away = [slot for slot in slots if not self._is_executed_here(batch.writes[slot])]
        if away:
            assert self.path is not None, "set by the server"
            self.path.forward(batch, away, results, deadline)
        forwarded = set(away)
        return [slot for slot in slots if slot not in forwarded]

    def _is_executed_here(self, write: pb.Write) -> bool:
        try:
            return write.HasField("settle_edge") or self.is_mastered_here(
                shards_of_write(write, self._configuration.schema)[1]
            )
        except (RequestError, ProtocolError):
            return True  # this leader answers with the error

    def apply_and_publish(self, messages: ShardMessages, sent_at: float = -inf) -> None:
        """Apply and publish the changes of a forwarded write, if this leader hosts the shard. ``sent_at``: see
        `WriteThrough.apply_write`."""
        if self._hosts(messages.shard):
            self._apply(messages, sent_at)
            self._publisher.publish(messages)

    async def apply_remote_changes(self, changes: list[ShardMessages]) -> None:
        """Apply changes that another region's leader has made to the far side of a pair.

        Without this, this region's leader of the far side would learn of them only through replication."""
        assert self.path is not None, "set by the server"
        await self.path.apply_changes([messages for messages in changes if not self.is_mastered_here(messages.shard)])

    def apply(self, request: pb.Request, reply: Reply) -> None:
        """Apply changes that another leader of this tier has forwarded."""
        for changes in request.apply.changes:
            self.apply_and_publish(shard_messages_from_pb(changes))
        reply.send(pb.Answer(applied=pb.Applied()))

    def reserve_ids(self, request: pb.Request, reply: Reply) -> bool:
        """Forward a reservation of ids when another region masters the shard; return whether it was forwarded."""
        if self.is_mastered_here(request.reserve_ids.shard):
            return False
        self._spawn(self._reserve_ids(request, reply))
        return True

    async def _reserve_ids(self, request: pb.Request, reply: Reply) -> None:
        try:
            reply.send(await self.pass_on(request.reserve_ids.shard, request))
        except TaoError as error:
            reply.send(pb.Answer(error=error_to_pb(error)))

    async def pass_on(self, shard: int, request: pb.Request) -> pb.Answer:
        """Return the answer of the leader in the region that masters the shard. Raises `TaoError`."""
        asked = pb.Request()
        asked.CopyFrom(request)
        asked.topology_version = self._configuration.routes.version
        return await self._links.to(self.leader(shard)).ask(asked, work_seconds(request.deadline_ms))
