"""What the region's tailer relays: every commit of the region's databases, whoever made it (DESIGN.md §7).

The leader applies a relay before it forwards it, so that no subscriber can fill from here what the message has
overtaken. Most of it this leader has told already, when it committed; versions make the second telling harmless.

What was changed by someone who keeps no versions names no version to apply. Its keys are dropped at once, here and at
the subscribers. A fill that is under way then may still bring the old value under the same version; so the owner of
the shard *touches* them (`tao.leader.touch_path`), and the version that this gives them follows through the binlog into
every region, in order, and makes an end of all older ones. A relay is acknowledged when its keys have been touched: one
that the owner could not touch is told again, to the next owner if need be.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from tao.delivery.publisher import Publisher
from tao.leader.touch_path import TouchPath
from tao.model.changes import ListInvalidation, ObjectInvalidation, ShardInvalidation, ShardMessages
from tao.model.delivery import Span
from tao.model.errors import InternalError, NotMine, ShardBlocked, TaoError
from tao.model.ports import Clock
from tao.model.relay import Relay, Touch, TouchKind
from tao.model.versions import NEVER_WRITTEN
from tao.wire.convert import error_to_pb, relay_from_pb, span_to_pb
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """How foreign writes reach caches."""

    visible_after_seconds: float = 0.1
    """A binlog runs a few milliseconds ahead of what a SELECT sees. A value without a version step that is read again
    too early looks like the new one, so a shard is voided a second time after this."""

    max_drops_per_shard: int = 256
    """Keys of one shard in one relay that are dropped one by one. A relay takes along what has gathered while the one
    before it was under way; more than this in so short a time is a bulk import, and the shard is voided as a whole. Its
    keys are touched all the same."""

    touched_keys_per_write: int = 256
    """Keys that are given new versions, and lists counted, by one write: some ten milliseconds under lock, which writes
    of the same keys wait for."""


class RelayPath:
    """Relays, onto this leader's cache and its subscribers."""

    def __init__(
        self,
        serves: Callable[[int], bool],
        hosts: Callable[[int], bool],
        apply: Callable[[ShardMessages], None],
        because: Callable[[str], AbstractContextManager[object]],
        touches: TouchPath,
        publisher: Publisher,
        version_epoch: Callable[[int], int],
        topology_version: Callable[[], int],
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        settings: RelaySettings,
    ) -> None:
        """``serves``: whether the shard is this leader's, owned or hosted; ``hosts``: whether its owner is in another
        region. ``apply`` to its cache, ``because`` of its witness."""
        self._serves: Final = serves
        self._hosts: Final = hosts
        self._apply: Final = apply
        self._because: Final = because
        self.touches: Final = touches
        self._publisher: Final = publisher
        self._version_epoch: Final = version_epoch
        self._topology_version: Final = topology_version
        self._clock: Final = clock
        self._spawn: Final = spawn
        self._settings: Final = settings
        self.messages = 0
        self.voided = 0
        self.dropped = 0
        """Keys dropped because someone else changed them."""

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Apply, forward, touch, and acknowledge. Raises `NotMine`, with nothing applied, for a shard that is not
        served."""
        relay = relay_from_pb(request.relay)
        foreign = Counter(touch.shard for touch in relay.touches)
        for shard in {messages.shard for messages in relay.changes} | foreign.keys() | set(relay.bulk_shards):
            if not self._serves(shard):
                raise NotMine(f"this leader does not serve shard {shard}", self._topology_version())
        cause = f"binlog of {relay.source} up to {relay.position}"
        with self._because(cause):
            for messages in relay.changes:
                self._apply(messages)
                self.messages += len(messages.messages)
        most = self._settings.max_drops_per_shard
        void = {*relay.bulk_shards, *(shard for shard, keys in foreign.items() if keys > most)}
        with self._because(f"changed by someone else: {cause}"):
            dropped = self._drop([touch for touch in relay.touches if touch.shard not in void])
        # A void shard has been told this much only when it has been voided again: so far it is a quicker copy.
        self._publisher.publish_all(messages for messages in relay.changes if messages.shard in void)
        self.void(void, cause)
        kept = asyncio.Event()
        told = [*(messages for messages in relay.changes if messages.shard not in void), *dropped]
        self._publisher.relayed(told, self._spans(relay, lambda shard: shard not in void), kept.set)
        own = [touch for touch in relay.touches if not self._hosts(touch.shard)]
        if own or void or not kept.is_set():
            self._spawn(self._finish(relay, own, void, kept, request, reply))
        else:
            self._done(relay, request, reply)

    def _spans(self, relay: Relay, chosen: Callable[[int], bool]) -> list[Span]:
        # What only says where a shard goes on is nothing to a leader that has given it up, and nothing at all from a
        # tailer that reads another database: it would be taken at its word that it has told everything.
        return [
            span
            for span in relay.spans
            if chosen(span.shard)
            and self._serves(span.shard)
            and self._publisher.database_of(span.shard) == relay.source
        ]

    def _done(self, relay: Relay, request: pb.Request, reply: Reply) -> None:
        """Everything in the relay has been told, and is kept."""
        # Of another topology the tailer may have told another leader what it says here that all have been told.
        if relay.source_unix_ms and request.topology_version == self._topology_version():
            self._publisher.prove(relay.source, relay.source_unix_ms, *relay.reached)
        wanted = map(span_to_pb, self._publisher.wants(relay.source))
        reply.send(pb.Answer(relayed=pb.Relayed(wanted=wanted)))

    async def _finish(
        self,
        relay: Relay,
        own: Sequence[Touch],
        void: set[int],
        kept: asyncio.Event,
        request: pb.Request,
        reply: Reply,
    ) -> None:
        try:
            if void:
                await asyncio.sleep(self._settings.visible_after_seconds)
                await self._void_again(relay, void)
            if not own or await self._touched(own, request, reply):
                await kept.wait()
                self._done(relay, request, reply)
        except NotMine as error:
            reply.send(pb.Answer(error=error_to_pb(error)))
        except Exception as error:
            failure = InternalError(f"{type(error).__name__} in the relay path; see the leader's log")
            reply.send(pb.Answer(error=error_to_pb(failure)))
            raise

    async def _void_again(self, relay: Relay, void: set[int]) -> None:
        """Now what made the shards void can be seen by whoever reads. Raises `NotMine`."""
        for shard in void:
            if not self._serves(shard):
                raise NotMine(f"this leader does not serve shard {shard} any more", self._topology_version())
        told = [messages for messages in relay.changes if messages.shard in void]
        for shard in void:
            invalidation = ShardMessages(shard, self._version_epoch(shard), (ShardInvalidation(shard),))
            with self._because(f"binlog of {relay.source} up to {relay.position}"):
                self._apply(invalidation)
            told.append(invalidation)
        self.voided += len(void)
        kept = asyncio.Event()
        self._publisher.relayed(told, self._spans(relay, void.__contains__), kept.set)
        await kept.wait()

    async def _touched(self, touches: Sequence[Touch], request: pb.Request, reply: Reply) -> bool:
        """Whether they are; if not, that has been answered."""
        deadline = self._clock.monotonic() + request.deadline_ms / 1000
        try:
            await self.touches.touch(touches, deadline)
        except NotMine:
            raise
        except TaoError as error:
            # Whatever it was, it is this shard's: what the tailer has to tell of others must not wait for it.
            reply.send(pb.Answer(error=error_to_pb(ShardBlocked(f"keys not touched yet: {error.message}"))))
            return False
        return True

    def _drop(self, touches: Iterable[Touch]) -> list[ShardMessages]:
        """Forget these keys, whatever their version. Returns what makes all subscribers do likewise."""
        by_shard: dict[int, list[ObjectInvalidation | ListInvalidation]] = {}
        for touch in touches:
            by_shard.setdefault(touch.shard, []).append(
                ObjectInvalidation(touch.id, NEVER_WRITTEN)
                if touch.kind is TouchKind.OBJECT
                else ListInvalidation(touch.id, touch.atype, NEVER_WRITTEN)
            )
        # No version epoch: what is older than the cache's own drops its key and tells nothing.
        told = [ShardMessages(shard, 0, tuple(dropped)) for shard, dropped in by_shard.items()]
        for messages in told:
            self._apply(messages)
            self.dropped += len(messages.messages)
        return told

    def void(
        self, shards: Iterable[int], cause: str, *, otypes: tuple[int, ...] = (), atypes: tuple[int, ...] = ()
    ) -> int:
        """Bulk invalidation, here and at all subscribers, of the served ones among these shards: of everything, or of
        these types. Returns how many shards."""
        done = 0
        with self._because(cause):
            for shard in shards:
                if self._serves(shard):
                    done += 1
                    invalidation = ShardInvalidation(shard, otypes, atypes)
                    messages = ShardMessages(shard, self._version_epoch(shard), (invalidation,))
                    self._apply(messages)
                    self._publisher.publish(messages)
        self.voided += done
        return done
