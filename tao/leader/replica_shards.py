"""Serve shards whose master is in another region (the paper's slave leader): from the replica, and by forwarding.

No leader owns such a shard in this region: the master region orders its writes. This leader fills from the region's
replica, gets every commit from the region's tailer, and publishes it to its subscribers. So the topology alone
decides which leader serves the shard.

Writes are passed on to the master region's leader. This leader applies the changes that come back to its own cache and
to the caches of its tier, and publishes them to its subscribers, before it answers the writer. So a client reads its
own writes in this region without waiting for replication."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import inf
from typing import Final

from tao.cache import GraphCache
from tao.delivery.publisher import Publisher
from tao.model.changes import ShardMessages
from tao.model.errors import ProtocolError, RequestError, TopologyError
from tao.model.topology import CacheServer
from tao.observability.logs import Logger
from tao.serving.configuration import ServerContext
from tao.serving.forward_path import (
    AppliesWrites,
    ForwardPath,
    ForwardSettings,
    WriteResults,
    WriteThrough,
    shards_of_write,
)
from tao.wire.convert import coordinating_shards, shard_messages_from_pb
from tao.wire.identity import PeerIdentity
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb


@dataclass(frozen=True, slots=True)
class ReplicaShardSettings:
    """How replica shards change hands."""

    settle_seconds: float = 2.0
    """Delay between the topology that gives this leader a shard and caching it, at a start too. For a moment the
    tailer may still follow the former topology, and send another leader the changes of keys that this one has
    filled."""

    write_answer_seconds: float = 60.0
    """After a replica shard was opened or reset, writes through other leaders add nothing to its cache for this long.
    An answer may have been in progress since before the reset, and the changes that followed it may have been delivered
    before, or to another leader. Longer than any write may take, and not longer than version floors are remembered,
    which protect the cache from such answers otherwise."""


class ReplicaShards:
    """The replica shards of one leader. Each opening numbers its stream anew, so that a subscriber starts over."""

    def __init__(
        self,
        cache: GraphCache,
        changes: WriteThrough,
        publisher: Publisher,
        settings: ReplicaShardSettings,
        log: Logger,
    ) -> None:
        """``changes``: notified when a shard is reset."""
        self._cache: Final = cache
        self._changes: Final = changes
        self._publisher: Final = publisher
        self._settings: Final = settings
        self._log: Final = log
        self._hosted: frozenset[int] = frozenset()
        self._opened: set[int] = set()
        self._openings = 0
        self._due: dict[int, object] = {}

    @property
    def shards(self) -> frozenset[int]:
        """Return the shards served here without being owned."""
        return self._hosted

    @property
    def open_count(self) -> int:
        """Return how many of them are cached by now."""
        return len(self._opened)

    def serve(self, shards: Iterable[int], affected: AbstractSet[int]) -> None:
        """Serve exactly these shards from now on. ``affected``: those of which other leaders may have received changes
        by topologies in between that this leader has not seen; they are reset."""
        hosted = frozenset(shards)
        self._change(hosted - affected)
        self._change(hosted)

    def reset(self) -> None:
        """Drop everything cached of these shards, and cache again once it is kept fresh.

        While this process was paused, the region's tailer may have sent changes to another leader."""
        self.serve(self._hosted, self._hosted)

    def note_pause(self) -> None:
        """Note that this process was paused, and that no other leader received changes of these shards meanwhile.

        What is cached is continued. Answers to writes may have been under way for longer than version floors are
        kept."""
        self._changes.note_begun(*self._opened)

    def _change(self, hosted: frozenset[int]) -> None:
        for shard in self._opened - hosted:
            self._opened.discard(shard)
            self._cache.close_shard(shard)
            self._publisher.close_shard(shard)
        self._due = {shard: order for shard, order in self._due.items() if shard in hosted}
        added = hosted - self._hosted
        self._hosted = hosted
        if added:
            # The order has an identity, so that a shard that left and came back waits its own time.
            order = object()
            self._due.update(dict.fromkeys(added, order))
            asyncio.get_running_loop().call_later(self._settings.settle_seconds, self._open, added, order)

    def _open(self, shards: frozenset[int], order: object) -> None:
        opening = [shard for shard in sorted(shards & self._hosted) if self._due.get(shard) is order]
        for shard in opening:
            self._openings += 1
            self._opened.add(shard)
            del self._due[shard]
            self._cache.open_shard(shard)
            self._changes.note_begun(shard)
            # Negative, so that a subscriber never confuses this stream with one from when this leader owned the shard.
            self._publisher.open_shard(shard, -self._openings, 0)
        if opening:
            self._log.info("replica_shards_opened", opened=len(self._opened))


class ForwardedWrites:
    """Writes and id reservations of shards that other regions master."""

    def __init__(
        self,
        context: ServerContext,
        settings: ForwardSettings,
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
        self._path: Final = ForwardPath(
            context,
            settings,
            next_hop=self.leader,
            hosts=lambda shard: self._configuration.routes.leaders(context.region).hosts(shard),
            changes=AppliesWrites(shard_messages_from_pb, self.apply_and_publish),
            admit=lambda _: None,
        )

    def is_mastered_here(self, shard: int) -> bool:
        """Return whether the shard's master is in this leader's region."""
        return self._configuration.routes.master_region(shard) == self._region

    def may_pass_on(self, peer: PeerIdentity) -> bool:
        """Return whether a request of this peer may go on to another region.

        What another region has sent goes no further: it came by another topology than this leader's, and would come
        back from there, until one of the two learns of the other's. Its sender refreshes its topology instead."""
        if peer.role == "leader":
            return False
        try:
            return self._configuration.routes.locate(peer.name).region == self._region
        except TopologyError:
            return True  # an operator, or a follower that is new in this region

    def leader(self, shard: int) -> CacheServer:
        """Return the leader of the shard in its master region."""
        routes = self._configuration.routes
        return routes.leaders(routes.master_region(shard)).home(shard)

    def leader_is_down(self, shard: int) -> bool:
        """Return whether the leader in the master region has recently failed to answer."""
        return self._links.to(self.leader(shard)).is_down

    def forward(
        self, request: pb.Request, slots: Sequence[int], results: WriteResults, deadline: float, peer: PeerIdentity
    ) -> Sequence[int]:
        """Forward those of a peer's writes that another region masters; return the slots to execute here, invalid
        writes among them."""
        writes = request.write.writes
        if all(database.master_region == self._region for database in self._configuration.routes.topology.databases):
            return slots
        away = [slot for slot in slots if not self._is_executed_here(writes[slot])]
        if away:
            self._path.forward(request, away, results, deadline, peer)
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
            if self._publisher.stream(messages.shard) is not None:  # else it is not cached yet
                self._publisher.publish(messages)

    async def apply_remote_changes(self, changes: list[ShardMessages]) -> None:
        """Apply changes that another region's leader has made to the far side of a pair.

        Without this, this region's leader of the far side would learn of them only through replication."""
        await self._path.apply_changes([messages for messages in changes if not self.is_mastered_here(messages.shard)])

    def apply(self, request: pb.Request, reply: Reply) -> None:
        """Apply changes that another leader of this tier has forwarded."""
        for changes in request.apply.changes:
            self.apply_and_publish(shard_messages_from_pb(changes))
        reply.send(pb.Answer(applied=pb.Applied()))

    def reserve_ids(self, request: pb.Request, reply: Reply) -> bool:
        """Forward a reservation of ids when another region masters the shard; return whether it was forwarded."""
        if self.is_mastered_here(request.reserve_ids.shard):
            return False
        self._path.reserve_ids(request, reply)
        return True

    def settle_pairs(self, request: pb.Request, reply: Reply) -> bool:
        """Forward a request to settle pairs when another region masters one of the coordinating shards; return whether
        it was forwarded."""
        if all(map(self.is_mastered_here, coordinating_shards(request.settle_pairs))):
            return False
        self._path.settle_pairs(request, reply)
        return True
