"""What a leader does for shards that are mastered in another region (DESIGN.md §6, §8).

It passes their writes on to the master region's leader, takes the changes that come back into its own cache and those
of its tier, and tells its subscribers - all before the writer is answered, so that a client reads its own writes here
without waiting for replication.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

from tao.delivery.publisher import Publisher
from tao.model.changes import ShardMessages
from tao.model.errors import ProtocolError, RequestError, TaoError
from tao.model.topology import CacheServer
from tao.peers.links import Links
from tao.routing.deadlines import work_seconds
from tao.serving.configuration import Configuration
from tao.serving.forward_path import ForwardPath, shards_of_write
from tao.serving.write_results import WriteResults
from tao.wire.convert import error_to_pb, shard_messages_from_pb
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb


class Elsewhere:
    """The other regions, as this leader's service sees them."""

    def __init__(
        self,
        region: str,
        configuration: Configuration,
        hosts: Callable[[int], bool],
        apply: Callable[[ShardMessages], None],
        publisher: Publisher,
        links: Links,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """``hosts``: whether this leader serves the shard for its region without owning it. ``apply``: to its cache."""
        self._region: Final = region
        self._configuration: Final = configuration
        self._hosts: Final = hosts
        self._apply: Final = apply
        self._publisher: Final = publisher
        self._links: Final = links
        self._spawn: Final = spawn
        self.path: ForwardPath | None = None

    def is_mastered_here(self, shard: int) -> bool:
        """Whether the shard's master is in this leader's region."""
        return self._configuration.routes.master_region(shard) == self._region

    def leader(self, shard: int) -> CacheServer:
        """The leader of the shard in its master region."""
        routes = self._configuration.routes
        return routes.leaders(routes.master_region(shard)).home(shard)

    def leader_is_down(self, shard: int) -> bool:
        """Whether that one has not answered of late."""
        return self._links.to(self.leader(shard)).is_down

    def take(self, batch: pb.WriteBatch, results: WriteResults, deadline: float) -> list[int]:
        """Forward what is mastered elsewhere; returns the slots to be done here, wrong ones among them."""
        slots = range(len(batch.writes))
        if all(database.master_region == self._region for database in self._configuration.routes.topology.databases):
            return list(slots)
        away = [slot for slot in slots if not self._is_done_here(batch.writes[slot])]
        if away:
            assert self.path is not None, "wired by the server"
            self.path.forward(batch, away, results, deadline)
        forwarded = set(away)
        return [slot for slot in slots if slot not in forwarded]

    def _is_done_here(self, write: pb.Write) -> bool:
        try:
            return write.HasField("settle_edge") or self.is_mastered_here(
                shards_of_write(write, self._configuration.schema)[1]
            )
        except (RequestError, ProtocolError):
            return True  # its error is said here

    def apply_and_tell(self, messages: ShardMessages) -> None:
        """Changes of a forwarded write, of a shard that this leader hosts."""
        if self._hosts(messages.shard):
            self._apply(messages)
            self._publisher.publish(messages)

    async def take_in(self, changes: list[ShardMessages]) -> None:
        """What another region's leader has written for one of this region's, the far side of a pair: this region's own
        leader of that shard would hear of it by replication only."""
        assert self.path is not None, "wired by the server"
        await self.path.take_in([messages for messages in changes if not self.is_mastered_here(messages.shard)])

    def apply(self, request: pb.Request, reply: Reply) -> None:
        """Changes that another leader of this tier has forwarded."""
        for changes in request.apply.changes:
            self.apply_and_tell(shard_messages_from_pb(changes))
        reply.send(pb.Answer(applied=pb.Applied()))

    def reserve_ids(self, request: pb.Request, reply: Reply) -> bool:
        """Whether the ids are to be had in another region; then they are asked for there."""
        if self.is_mastered_here(request.reserve_ids.shard):
            return False
        self._spawn(self._reserve_ids(request, reply))
        return True

    async def _reserve_ids(self, request: pb.Request, reply: Reply) -> None:
        asked = pb.Request(topology_version=self._configuration.routes.version, reserve_ids=request.reserve_ids)
        try:
            leader = self.leader(request.reserve_ids.shard)
            answer = await self._links.to(leader).ask(asked, work_seconds(request.deadline_ms))
        except TaoError as error:
            reply.send(pb.Answer(error=error_to_pb(error)))
        else:
            reply.send(pb.Answer(reserved_ids=answer.reserved_ids))
