"""Apply the relays of the region's tailer: every commit of the region's databases, foreign writers' included.

The leader applies a relay before it forwards it, so that no subscriber can fill from here a value that the message has
overtaken. Most of a relay this leader has published already, when it committed; versions make the repetition harmless.

What this leader has committed itself, a relay may name without its messages. Those that the leader has kept take their
place; when some are missing, nothing of the relay is entered, and the tailer decodes them.

A change by a foreign writer, which keeps no versions, gives no version to apply. Its keys are dropped at once, here and
at the subscribers. A fill in progress may still bring the old value under the same version. So the owner of the shard
*touches* these keys: it gives them a new version, which follows through the binlog into every region, in order, and
supersedes all older ones. A relay is acknowledged when its keys have been touched. If the owner could not touch them,
the tailer sends the relay again, to the next owner if the shard has moved.

A touch is a write like any other: it runs under the lanes, the shard's lock and the generation, in the order of the
shard's own commits. It appears in the binlog as a version that rises alone, so no tailer takes it for one more foreign
change. Keys are touched by the hundred in one transaction."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from tao.cache import GraphCache
from tao.delivery.publisher import Publisher
from tao.model.changes import ListInvalidation, ObjectInvalidation, ShardInvalidation, ShardMessages
from tao.model.delivery import Span
from tao.model.errors import InternalError, NotMine, ShardBlocked, TaoError
from tao.model.relay import Relay, Relayed, Touch, TouchKind, missing_of, with_messages
from tao.model.versions import NEVER_WRITTEN
from tao.model.writes import TouchKeys
from tao.observability.metrics import Metrics
from tao.serving.configuration import ServerContext
from tao.wire.convert import error_to_pb, relay_from_pb, relayed_to_pb
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb


class TouchPath:
    """Executes touches as writes of this leader."""

    def __init__(
        self,
        commit: Callable[[TouchKeys, float], Awaitable[object]],
        cache: GraphCache,
        keys_per_write: int,
    ) -> None:
        """``commit``: executes the write before a time of the clock. ``keys_per_write``: keys touched by one write."""
        self._commit: Final = commit
        self._cache: Final = cache
        self._keys_per_write: Final = keys_per_write
        self.keys = 0
        """Keys that got a new version."""
        self.failed = 0
        """Keys that did not, and are sent again."""

    async def touch(self, touches: Iterable[Touch], deadline: float) -> None:
        """Give all of these keys new versions. Lists also get the count of their edges.

        Raises the first `TaoError` when some keys may be untouched; another attempt does no harm."""
        writes = list(self._writes(touches))
        results = await asyncio.gather(*(self._commit(write, deadline) for write in writes), return_exceptions=True)
        failure: BaseException | None = None
        for write, result in zip(writes, results, strict=True):
            if isinstance(result, BaseException):
                self.failed += len(write.touches)
                # An exception that is no TaoError is a bug here, and must not be hidden by a busy database.
                if failure is None or not isinstance(result, TaoError):
                    failure = result
            else:
                self.keys += len(write.touches)
        if failure is not None:
            raise failure

    def _writes(self, touches: Iterable[Touch]) -> Iterator[TouchKeys]:
        by_shard: dict[int, dict[tuple[int, int], Touch]] = {}
        for touch in touches:
            keys = by_shard.setdefault(touch.shard, {})
            key = touch.id, touch.atype
            known = keys.get(key)
            version = max(touch.version, self._floor(touch) if known is None else known.version)
            keys[key] = msgspec.structs.replace(touch, version=version)
        size = self._keys_per_write
        for shard, keys in by_shard.items():
            merged = tuple(keys.values())
            for start in range(0, len(merged), size):
                yield TouchKeys(shard, merged[start : start + size])

    def _floor(self, touch: Touch) -> int:
        """Return the highest version that the cache knows of for the key, 0 when it knows none."""
        if touch.kind is TouchKind.OBJECT:
            return self._cache.floor_of_object(touch.id)
        return self._cache.floor_of_list(touch.id, touch.atype)


@dataclass(frozen=True, slots=True)
class RelayPathSettings:
    """How foreign writes reach caches."""

    visible_after_seconds: float = 0.1
    """A binlog runs a few milliseconds ahead of what a SELECT sees. A value without a version step that is read
    again too early looks like the new one, so a shard is invalidated a second time after this delay."""

    max_drops_per_shard: int = 256
    """Keys of one shard in one relay that are dropped one by one. A relay includes everything that was queued while
    the previous one was in progress. More keys in so short a time are a bulk import, and the shard is invalidated as
    a whole. Its keys are touched all the same."""

    touched_keys_per_write: int = 256
    """Keys that one write touches, and lists that it counts: some ten milliseconds under lock, which writes of the
    same keys wait for."""


class RelayPath:
    """Applies relays to this leader's cache and publishes them to its subscribers."""

    def __init__(
        self,
        context: ServerContext,
        settings: RelayPathSettings,
        cache: GraphCache,
        touches: TouchPath,
        publisher: Publisher,
        *,
        hosts: Callable[[int], bool],
        apply: Callable[[ShardMessages], None],
    ) -> None:
        """``hosts``: returns whether the shard is served here for an owner in another region. ``apply``: applies
        messages to the cache."""
        self._serves: Final = cache.is_open
        self._hosts: Final = hosts
        self._apply: Final = apply
        self._caused_by: Final = cache.recorder.caused_by
        self.touches: Final = touches
        self._publisher: Final = publisher
        self._committed: Final = publisher.committed
        self._version_epoch: Final = cache.version_epoch
        self._configuration: Final = context.configuration
        self._clock: Final = context.clock
        self._spawn: Final = context.spawn_as("relay")
        self._settings: Final = settings
        self.on_heartbeat: Callable[[str, int], None] = lambda *_: None
        """Called with a database and the time in a heartbeat row that its tailer has read."""
        self.messages = 0
        self.invalidated_shards = 0
        self.dropped = 0
        """Keys dropped because a foreign writer changed them."""

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Apply a relay, forward it, touch its foreign keys, and acknowledge it.

        Raises `NotMine`, with nothing applied, for a shard that is not served."""
        is_whole = request.HasField("relay")
        relay = relay_from_pb(request.relay if is_whole else request.relay_by_reference)
        if self._committed.commits(relay.source) and missing_of(relay, self._committed.find):
            self._spawn(self._enter_after_commits(relay, request, reply))
        else:
            self._enter(relay, request, reply)

    async def _enter_after_commits(self, relay: Relay, request: pb.Request, reply: Reply) -> None:
        try:
            await self._committed.commits_end(relay.source)
            self._enter(relay, request, reply)
        except Exception as error:  # noqa: BLE001 - answered, and raised again there
            self._fail(error, reply)

    def _enter(self, relay: Relay, request: pb.Request, reply: Reply) -> None:
        """Apply and forward a relay of which nothing is missing; else answer what is."""
        foreign = Counter(touch.shard for touch in relay.touches)
        named = {messages.shard for messages in relay.changes} | {reference.shard for reference in relay.references}
        for shard in named | foreign.keys() | set(relay.bulk_shards):
            if not self._serves(shard):
                raise NotMine(f"this leader does not serve shard {shard}", self._configuration.routes.version)
        self._committed.expire(self._clock.monotonic())
        if relay.references:
            missing = missing_of(relay, self._committed.find)
            if missing:
                self._committed.missing += sum(len(each.numbers) for each in missing)
                reply.send(pb.Answer(relayed=relayed_to_pb(Relayed(missing=missing, takes_references=True))))
                return
            relay = with_messages(relay, self._committed.find)
        with self._caused_by(relay.cause):
            for messages in relay.changes:
                # What was published under this generation was applied before.
                if not self._publisher.has_published(messages):
                    self._apply(messages)
                self.messages += len(messages.messages)
        most = self._settings.max_drops_per_shard
        bulk = {*relay.bulk_shards, *(shard for shard, keys in foreign.items() if keys > most)}
        with self._caused_by(f"changed by a foreign writer: {relay.cause}"):
            dropped = self._drop_keys([touch for touch in relay.touches if touch.shard not in bulk])
        # For a shard that changed in bulk this is an early copy only: the relay counts as delivered when the shard
        # has been invalidated again.
        self._publisher.publish_all(messages for messages in relay.changes if messages.shard in bulk)
        self.invalidate(bulk, relay.cause)
        kept = asyncio.Event()
        changes = [*(messages for messages in relay.changes if messages.shard not in bulk), *dropped]
        self._publisher.publish_relay(changes, self._spans(relay, lambda shard: shard not in bulk), kept.set)
        own = [touch for touch in relay.touches if not self._hosts(touch.shard)]
        if own or bulk or not kept.is_set():
            self._spawn(self._finish(relay, own, bulk, kept, request, reply))
        else:
            self._acknowledge(relay, request, reply)

    def _spans(self, relay: Relay, chosen: Callable[[int], bool]) -> list[Span]:
        # A span continues a shard's stream. A leader that has given the shard up has no use for it. A span of a tailer
        # that reads another database must be ignored, because it would claim that everything has been delivered.
        return [
            span
            for span in relay.spans
            if chosen(span.shard)
            and self._serves(span.shard)
            and self._publisher.database_of(span.shard) == relay.source
        ]

    def _acknowledge(self, relay: Relay, request: pb.Request, reply: Reply) -> None:
        """Acknowledge a relay once everything in it has been published and is kept for subscribers."""
        if relay.source_unix_ms:
            self.on_heartbeat(relay.source, relay.source_unix_ms)
        # Under another topology the tailer may have sent another leader the messages that this proof would cover.
        if relay.source_unix_ms and request.topology_version == self._configuration.routes.version:
            self._publisher.prove(relay.source, relay.source_unix_ms, *relay.reached)
        for reference in relay.references:
            self._committed.entered += len(reference.numbers)
            for number in reference.numbers:
                self._committed.release(reference.source, number, reference.shard)
        wanted = tuple(self._publisher.take_wanted(relay.source))
        relayed = Relayed(wanted=wanted, takes_references=self._committed.has_of(relay.source))
        reply.send(pb.Answer(relayed=relayed_to_pb(relayed)))

    async def _finish(
        self,
        relay: Relay,
        own: Sequence[Touch],
        bulk: set[int],
        kept: asyncio.Event,
        request: pb.Request,
        reply: Reply,
    ) -> None:
        try:
            if bulk:
                await asyncio.sleep(self._settings.visible_after_seconds)
                await self._invalidate_again(relay, bulk)
            if not own or await self._touch(own, request, reply):
                await kept.wait()
                self._acknowledge(relay, request, reply)
        except Exception as error:  # noqa: BLE001 - answered, and raised again there
            self._fail(error, reply)

    @staticmethod
    def _fail(error: Exception, reply: Reply) -> None:
        """Answer a relay that was not entered. Raises what is a fault of this leader."""
        if isinstance(error, NotMine):
            reply.send(pb.Answer(error=error_to_pb(error)))
            return
        failure = InternalError(f"{type(error).__name__} in the relay path; see the leader's log")
        reply.send(pb.Answer(error=error_to_pb(failure)))
        raise error

    async def _invalidate_again(self, relay: Relay, bulk: set[int]) -> None:
        """Invalidate bulk changed shards once more, now that a SELECT sees the change. Raises `NotMine`."""
        for shard in bulk:
            if not self._serves(shard):
                raise NotMine(f"this leader does not serve shard {shard} any more", self._configuration.routes.version)
        changes = [messages for messages in relay.changes if messages.shard in bulk]
        for shard in bulk:
            invalidation = ShardMessages(shard, self._version_epoch(shard), (ShardInvalidation(shard),))
            with self._caused_by(relay.cause):
                self._apply(invalidation)
            changes.append(invalidation)
        self.invalidated_shards += len(bulk)
        kept = asyncio.Event()
        self._publisher.publish_relay(changes, self._spans(relay, bulk.__contains__), kept.set)
        await kept.wait()

    async def _touch(self, touches: Sequence[Touch], request: pb.Request, reply: Reply) -> bool:
        """Return whether the keys are touched; if not, the relay has been answered with the error."""
        deadline = self._clock.monotonic() + request.deadline_ms / 1000
        try:
            await self.touches.touch(touches, deadline)
        except NotMine:
            raise
        except TaoError as error:
            # Whatever the error, report it as this shard's: the tailer's messages for other shards must not wait for
            # it.
            reply.send(pb.Answer(error=error_to_pb(ShardBlocked(f"keys not touched yet: {error.message}"))))
            return False
        return True

    def _drop_keys(self, touches: Iterable[Touch]) -> list[ShardMessages]:
        """Drop these keys from the cache, whatever their version. Returns messages that make all subscribers drop
        them."""
        by_shard: dict[int, list[ObjectInvalidation | ListInvalidation]] = {}
        for touch in touches:
            by_shard.setdefault(touch.shard, []).append(
                ObjectInvalidation(touch.id, NEVER_WRITTEN)
                if touch.kind is TouchKind.OBJECT
                else ListInvalidation(touch.id, touch.atype, NEVER_WRITTEN)
            )
        # No version epoch: an epoch below the cache's own drops the key and conveys nothing else.
        changes = [ShardMessages(shard, 0, tuple(dropped)) for shard, dropped in by_shard.items()]
        for messages in changes:
            self._apply(messages)
            self.dropped += len(messages.messages)
        return changes

    def invalidate(
        self, shards: Iterable[int], cause: str, *, otypes: tuple[int, ...] = (), atypes: tuple[int, ...] = ()
    ) -> int:
        """Invalidate the served ones among these shards, here and at all subscribers: everything, or only these types.

        Returns the number of shards."""
        done = 0
        with self._caused_by(cause):
            for shard in shards:
                if self._serves(shard):
                    done += 1
                    invalidation = ShardInvalidation(shard, otypes, atypes)
                    messages = ShardMessages(shard, self._version_epoch(shard), (invalidation,))
                    self._apply(messages)
                    self._publisher.publish(messages)
        self.invalidated_shards += done
        return done

    def register(self, metrics: Metrics) -> None:
        """Register the metrics."""
        metrics.gauge_family(
            "foreign_keys_total",
            "Keys that foreign writers changed: dropped from caches, given a new version, or left for another attempt.",
            "event",
            lambda: {"dropped": self.dropped, "touched": self.touches.keys, "failed": self.touches.failed},
        )
