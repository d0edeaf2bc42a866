"""The request handler of a follower: which path serves which kind of request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tao.cache import GraphCache
from tao.model.changes import ShardInvalidation, ShardMessages
from tao.model.errors import InvalidArgument, TaoError
from tao.model.ids import SHARD_SHIFT
from tao.routing.budgets import work_seconds
from tao.serving.access_rules import FOLLOWER_RULES, check_role
from tao.serving.configuration import Configuration
from tao.serving.context import ServerContext
from tao.serving.forward_path import ForwardPath
from tao.serving.inspection import inspect
from tao.serving.read_service import ReadService
from tao.wire.convert import error_to_pb, shard_messages_from_pb
from tao.wire.links import Links
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb


class FollowerService:
    """The `RequestHandler` of a follower's sessions."""

    def __init__(
        self,
        context: ServerContext,
        cache: GraphCache,
        reads: ReadService,
        writes: ForwardPath,
        apply: Callable[[ShardMessages], None],
    ) -> None:
        """``apply`` applies to the cache what a write has changed."""
        configuration = context.configuration
        self._cache: Final = cache
        self._apply_write: Final = apply
        self._configuration: Final = configuration
        self._region: Final = context.region
        self._links: Final = context.links
        self._clock: Final = context.clock
        self._spawn: Final = context.spawn_as("request to a leader")
        self._paths: Final[dict[str, Callable[[pb.Request, Reply], None]]] = {
            "read": reads.handle,
            "write": writes.handle,
            "apply": self._apply,
            "reserve_ids": lambda request, reply: self._ask_leader(request.reserve_ids.shard, request, reply),
            "settle_pairs": self._settle_pairs,
            "get_topology": lambda _, reply: reply.send(pb.Answer(topology=configuration.topology_document())),
            "get_schema": lambda _, reply: reply.send(pb.Answer(schema=configuration.schema_document())),
            "watch": configuration.watch,
            "inspect": lambda request, reply: reply.send(
                pb.Answer(inspection=inspect(cache, reads.traffic, request.inspect))
            ),
            "invalidate": self._invalidate,
        }

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Serve one request. Whatever the cache can answer is answered before this returns."""
        kind = request.WhichOneof("body") or "nothing"
        path = self._paths.get(kind)
        if path is None:
            raise InvalidArgument(f"a follower does not serve {kind!r} requests; ask a leader")
        check_role(FOLLOWER_RULES, kind, reply.peer.role)
        path(request, reply)

    def _apply(self, request: pb.Request, reply: Reply) -> None:
        """Apply the changes of a write that another server of this tier has forwarded."""
        for changes in request.apply.changes:
            self._apply_write(shard_messages_from_pb(changes))
        reply.send(pb.Answer(applied=pb.Applied()))

    def _invalidate(self, request: pb.Request, reply: Reply) -> None:
        asked = request.invalidate
        otypes, atypes = tuple(asked.otypes), tuple(asked.atypes)
        shards = [shard for shard in asked.shards if self._cache.is_open(shard)]
        with self._cache.recorder.caused_by(f"asked by {reply.peer.name}"):
            for shard in shards:
                invalidation = ShardInvalidation(shard, otypes, atypes)
                epoch = self._cache.version_epoch(shard)
                self._cache.apply_message(invalidation, epoch, self._clock.monotonic())
        reply.send(pb.Answer(invalidated=pb.Invalidated(shards=len(shards))))

    def _settle_pairs(self, request: pb.Request, reply: Reply) -> None:
        """Have the inverses settled that a reader's token names as pending."""
        shards = {pair.low_id >> SHARD_SHIFT for pair in request.settle_pairs.pairs}
        if len(shards) != 1:
            raise InvalidArgument(f"a request settles pairs of one coordinating shard, not of {len(shards)}")
        self._ask_leader(shards.pop(), request, reply)

    def _ask_leader(self, shard: int, request: pb.Request, reply: Reply) -> None:
        """Answer with what this region's leader of the shard answers."""
        self._spawn(self._relay(shard, request, reply))

    async def _relay(self, shard: int, request: pb.Request, reply: Reply) -> None:
        try:
            reply.send(await ask_leader(self._links, self._configuration, self._region, shard, request))
        except TaoError as error:
            reply.send(pb.Answer(error=error_to_pb(error)))


async def ask_leader(
    links: Links, configuration: Configuration, region: str, shard: int, request: pb.Request
) -> pb.Answer:
    """Return the answer of the region's leader of the shard. Raises `TaoError`."""
    routes = configuration.routes
    asked = pb.Request()
    asked.CopyFrom(request)
    asked.topology_version = routes.version
    return await links.to(routes.leaders(region).home(shard)).ask(asked, work_seconds(request.deadline_ms))
