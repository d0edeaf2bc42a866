"""What the region's tailer relays: every commit of the region's databases, whoever made it (DESIGN.md §7).

The leader applies a relay before it forwards it, so that no subscriber can fill from here what the message has
overtaken. Most of it this leader has told already, when it committed; versions make the second telling harmless. What
was changed by someone who keeps no versions names no version to apply: the whole shard is void then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from tao.delivery.publisher import Publisher
from tao.model.changes import ShardInvalidation, ShardMessages
from tao.model.errors import NotMine
from tao.wire.convert import relay_from_pb
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """How foreign writes reach caches."""

    visible_after_seconds: float = 0.1
    """A binlog runs a few milliseconds ahead of what a SELECT sees. A value without a version step that is read again
    too early looks like the new one, so a shard is voided a second time after this."""


class RelayPath:
    """Relays, onto this leader's cache and its subscribers."""

    def __init__(
        self,
        serves: Callable[[int], bool],
        apply: Callable[[ShardMessages], None],
        bump: Callable[[int], None],
        publisher: Publisher,
        version_epoch: Callable[[int], int],
        topology_version: Callable[[], int],
        settings: RelaySettings,
    ) -> None:
        """``serves``: whether the shard is this leader's, owned or hosted. ``apply`` and ``bump``: of its cache."""
        self._serves: Final = serves
        self._apply: Final = apply
        self._bump: Final = bump
        self._publisher: Final = publisher
        self._version_epoch: Final = version_epoch
        self._topology_version: Final = topology_version
        self._settings: Final = settings
        self.messages = 0
        self.voided = 0

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Apply, forward, and acknowledge. Raises `NotMine`, with nothing applied, for a shard that is not served."""
        relay = relay_from_pb(request.relay)
        void = {touch.shard for touch in relay.touches} | set(relay.bulk_shards)
        for shard in {messages.shard for messages in relay.changes} | void:
            if not self._serves(shard):
                raise NotMine(f"this leader does not serve shard {shard}", self._topology_version())
        for messages in relay.changes:
            self._apply(messages)
            self.messages += len(messages.messages)
        self._publisher.publish_all(relay.changes)
        if void:
            self.void(void)
            asyncio.get_running_loop().call_later(self._settings.visible_after_seconds, self.void, void)
        # Of another topology the tailer may have told another leader what it says here that all have been told.
        if relay.source_unix_ms and request.topology_version == self._topology_version():
            self._publisher.prove(relay.source, relay.source_unix_ms)
        reply.send(pb.Answer(relayed=pb.Relayed()))

    def void(self, shards: Iterable[int]) -> int:
        """Bulk invalidation, here and at all subscribers, of the served ones among these shards. Returns how many."""
        done = 0
        for shard in shards:
            if self._serves(shard):
                done += 1
                self._bump(shard)
                invalidation = ShardInvalidation(shard)
                self._publisher.publish(ShardMessages(shard, self._version_epoch(shard), (invalidation,)))
        self.voided += done
        return done
