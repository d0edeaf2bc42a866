"""A follower's subscriptions: it receives every change of the shards that it caches.

A shard is open in the cache from the moment its leader has confirmed the subscription, so that no cached entry is
served that a message could not correct. When the leader fails, the follower goes on serving what it has cached:
availability comes before freshness. Once the same leader or another one confirms the shard again, the follower
continues at its position, or drops the shard when that leader cannot continue there.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import msgspec

from tao.cache import GraphCache
from tao.delivery.inbox import Inbox, Received
from tao.follower.delivery_stream import DeliveryStream
from tao.follower.freshness import Freshness
from tao.model.delivery import Delivery
from tao.model.errors import TaoError
from tao.model.topology import CacheServer
from tao.routing.routes import Routes
from tao.serving.configuration import ServerContext
from tao.serving.forward_path import WriteThrough


@dataclass(frozen=True, slots=True)
class SubscriptionSettings:
    """Pauses, time limits and acknowledgements of subscriptions."""

    retry_seconds: float = 0.2
    """Pause before subscribing again after a leader failed or refused shards: short, because every message of that time
    is missed; long enough for a leader that is taking its shards."""

    write_answer_seconds: float = 60.0
    """For this long after the follower began to receive a shard's changes, or began anew, writes through other
    followers insert nothing into its cache: the answer to a write may have been under way since before, and the changes
    that followed the write may have been sent before. Longer than any write may take; no longer than the cache keeps
    version floors, which prevent the same otherwise."""

    acknowledge_seconds: float = 0.05
    """Longest time between applying a delivery and acknowledging it. One acknowledgement for each delivery would cost a
    fifth of what sending the change of a single write costs. Shorter than it takes to fill what a leader may send
    ahead, at any rate that is reached."""

    acknowledge_messages: int = 16
    """Messages that are acknowledged at once: at a sixteenth of a MiB each they are a quarter of what may be sent
    ahead."""

    answer_timeout_seconds: float = 2.0
    """Longest wait for the answer to subscribing shards again: the leader needs no database for it, so one that takes
    longer has failed."""


class Subscriptions:
    """The subscriptions of one follower, one stream for each leader."""

    def __init__(
        self,
        context: ServerContext,
        cache: GraphCache,
        changes: WriteThrough,
        settings: SubscriptionSettings,
    ) -> None:
        configuration = context.configuration
        self._name: Final = context.name
        self._region: Final = context.region
        self._tier: Final = context.tier
        self._cache: Final = cache
        self._changes: Final = changes
        self._configuration: Final = configuration
        self._links: Final = context.links
        self._spawn: Final = context.spawn_as("subscription")
        self._settings: Final = settings
        self._log: Final = context.log
        self._inbox: Final = Inbox()
        self._hosted: frozenset[int] = frozenset()
        self._following: dict[str, asyncio.Event] = {}
        self._behind: set[int] = set()
        self._caught_up: Final = asyncio.Event()
        self.freshness: Final = Freshness(
            context.clock.unix_ms, lambda shard: configuration.routes.database_of(shard).name
        )
        """The staleness bounds of the hosted shards."""
        self.messages = 0
        self.resets = 0
        self.gaps = 0
        configuration.on_routes(self.follow_routes)

    @property
    def hosted(self) -> frozenset[int]:
        """The shards that the topology assigns to this follower."""
        return self._hosted

    @property
    def unsubscribed(self) -> int:
        """Number of shards that no leader confirms (any more)."""
        return len(self._behind)

    def is_subscribed(self, shard: int) -> bool:
        """Return whether a leader has confirmed that it sends this follower the shard's changes, and has not failed
        since."""
        return shard in self._hosted and shard not in self._behind

    def follow_routes(self, routes: Routes) -> None:
        """Subscribe the hosted shards at their current leaders, and drop the shards that are not hosted any more."""
        hosted = frozenset(routes.tier(self._region, self._tier).shards_of(self._name))
        for shard in self._hosted - hosted:
            self._cache.close_shard(shard)
            self._inbox.forget(shard)
            self._behind.discard(shard)
        # Every stream ends with the topology under which it began, and the current leader of a shard confirms it again.
        self._behind |= hosted
        self._hosted = hosted
        leaders = routes.leaders(self._region)
        self.freshness.follow(lambda shard: leaders.home(shard).name, hosted)
        # Also the leaders that the topology does not name any more, so that their tasks end.
        for changed in self._following.values():
            changed.set()
        self._follow_missing()

    async def renew(self, timeout_seconds: float) -> None:
        """Subscribe everything again after a pause. Return when the leaders have confirmed it, and hence sent what was
        missed, or after ``timeout_seconds``: without leaders the follower goes on serving what is cached."""
        self._behind |= self._hosted
        self._caught_up.clear()
        for changed in self._following.values():
            changed.set()
        if self._behind:
            await _wait_for(self._caught_up, timeout_seconds)

    async def keep_following(self) -> None:
        """Start the missing tasks that follow leaders, which could not be started or have failed, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.answer_timeout_seconds)
            self._follow_missing()

    def _follow_missing(self) -> None:
        for leader in self._configuration.routes.leaders(self._region).servers:
            if leader.name in self._following:
                continue
            changed = asyncio.Event()
            try:
                self._spawn(self._follow(leader.name, changed))
            except TaoError as error:
                self._log.warning("leader_subscription_failed", leader=leader.name, reason=error.message)
            else:
                self._following[leader.name] = changed

    def _shards_led_by(self, leader: str) -> list[int]:
        return [shard for shard in sorted(self._hosted) if self._is_led_by(leader, shard)]

    def _is_led_by(self, leader: str, shard: int) -> bool:
        return shard in self._hosted and self._configuration.routes.leaders(self._region).home(shard).name == leader

    def _leader(self, name: str) -> CacheServer | None:
        servers = self._configuration.routes.leaders(self._region).servers
        return next((server for server in servers if server.name == name), None)

    async def _follow(self, name: str, changed: asyncio.Event) -> None:
        """Keep a stream from one leader, until the topology does not name it any more."""
        try:
            while (leader := self._leader(name)) is not None:
                changed.clear()
                shards = self._shards_led_by(name)
                if shards:
                    await self._receive_stream(leader, shards, changed)
                    # The new leader of a shard that moved may have confirmed it already.
                    self._behind.update(shard for shard in shards if self._is_led_by(name, shard))
                    await _wait_for(changed, self._settings.retry_seconds)
                else:
                    await changed.wait()
        finally:
            del self._following[name]

    async def _receive_stream(self, leader: CacheServer, shards: list[int], changed: asyncio.Event) -> None:
        """Receive one stream of deliveries, until the connection ends or the topology changes."""
        stream = DeliveryStream(
            self._links.to(leader),
            self._name,
            self._inbox.positions_for(shards),
            lambda delivery: self._receive(delivery, leader.name),
            self._settings.answer_timeout_seconds,
            self._settings.acknowledge_seconds,
            self._settings.acknowledge_messages,
        )
        moved = asyncio.ensure_future(changed.wait())
        ended = asyncio.ensure_future(stream.ended.wait())
        try:
            while not (ended.done() or moved.done()):
                await asyncio.wait(
                    (ended, moved), timeout=self._settings.retry_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                stream.ask_again(self._inbox.positions_for)
            if stream.reason:
                self._log.info("subscription_ended", leader=leader.name, reason=stream.reason)
        finally:
            ended.cancel()
            moved.cancel()
            stream.close()
            if stream.failed:
                self._invalidate(leader.name, shards)

    def _invalidate(self, leader: str, shards: list[int]) -> None:
        """Drop these shards' entries, and their positions, so that the next subscription begins with a reset. A shard
        that another leader sends by now is subscribed already, and continues with an empty cache."""
        for shard in shards:
            if self._is_led_by(leader, shard):
                self._inbox.forget(shard)
            self._drop_entries(shard)

    def _drop_entries(self, shard: int) -> None:
        if self._cache.is_open(shard):
            self._cache.bump_shard(shard)
            self._changes.note_begun(shard)

    def _receive(self, delivery: Delivery, leader: str) -> set[int]:
        """Apply a delivery. Returns the shards that have to be subscribed again."""
        leaders = self._configuration.routes.leaders(self._region)
        # Ignore what a former leader, which does not know its successor yet, says about a shard.
        current = tuple(part for part in delivery.shards if leaders.home(part.position.shard).name == leader)
        received = self._inbox.receive(msgspec.structs.replace(delivery, shards=current))
        with self._cache.recorder.caused_by(f"delivery {delivery.number} of {leader}"):
            self._apply(received)
        missing = {shard for shard in (*received.refused, *received.gaps) if self._is_led_by(leader, shard)}
        self._behind |= missing
        if not self._behind:
            self._caught_up.set()
        # Last, because the times that a delivery reports hold only once its messages are applied.
        self.freshness.note_confirmed(leader, received.confirmed)
        self.freshness.note_proven(leader, delivery.proven, self.is_subscribed)
        if delivery.reached:
            self._inbox.prove(delivery.reached, self.freshness.shards_of(leader, self.is_subscribed))
        return missing

    def _apply(self, received: Received) -> None:
        for shard in received.resets:
            self._drop_entries(shard)
        self.resets += len(received.resets)
        self.gaps += len(received.gaps)
        for shard in received.confirmed:
            if shard in self._hosted and not self._cache.is_open(shard):
                self._cache.open_shard(shard)
                self._changes.note_begun(shard)
        self._behind.difference_update(received.confirmed)
        for messages in received.messages:
            # A delivery without messages carries the version epoch, too.
            if self._cache.is_open(messages.shard):
                self._cache.open_shard(messages.shard, messages.version_epoch)
            self.messages += len(messages.messages)
            self._changes.apply(messages)


async def _wait_for(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
