"""Subscriptions: a follower hears of everything that changes in the shards it caches (DESIGN.md §7).

A shard is open in the cache from the moment its leader has confirmed the subscription, so nothing is ever answered
from memory that no message could correct. When a leader goes away the follower serves on from what it has -
availability before freshness - and continues where it was once a leader confirms the shard again, the same one or
another, or drops it when that leader cannot continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tao.cache import GraphCache
from tao.delivery.inbox import Inbox, Received
from tao.follower.freshness import Freshness
from tao.follower.series import Series
from tao.model.delivery import Delivery
from tao.model.errors import TaoError
from tao.model.ports import Clock
from tao.model.topology import CacheServer
from tao.observability.logs import Logger
from tao.peers.links import Links
from tao.routing.routes import Routes
from tao.serving.applying import WriteThrough
from tao.serving.configuration import Configuration


@dataclass(frozen=True, slots=True)
class SubscriptionSettings:
    """How subscriptions are kept."""

    retry_seconds: float = 0.2
    """Pause before subscribing again after the leader went away or refused shards: short, because every message of
    that time is missed; long enough for a leader that is taking its shards."""

    write_answer_seconds: float = 60.0
    """After a shard was begun anew, nothing is cached because a write made it: its answer may have been under way since
    before, and what followed it been told before. Longer than any write may take; no longer than floors are remembered,
    which see to it otherwise."""

    acknowledge_seconds: float = 0.05
    """Before what was applied is acknowledged: a message each for a delivery each is a fifth of what the telling of a
    write by itself costs. Less than it takes to fill what a leader sends ahead, at any rate that is to be had."""

    acknowledge_messages: int = 16
    """So many are acknowledged at once: a sixteenth of a MiB each and they are a quarter of what is sent ahead."""

    answer_timeout_seconds: float = 2.0
    """For the answer to asking for shards again: it needs no database, so a leader that takes longer is gone."""


class Subscriptions:
    """One follower's subscriptions, a series per leader."""

    def __init__(
        self,
        name: str,
        place: tuple[str, str],
        cache: GraphCache,
        changes: WriteThrough,
        configuration: Configuration,
        links: Links,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        settings: SubscriptionSettings,
        log: Logger,
    ) -> None:
        self._name: Final = name
        self._region, self._tier = place
        self._cache: Final = cache
        self._changes: Final = changes
        self._configuration: Final = configuration
        self._links: Final = links
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._log: Final = log
        self._inbox: Final = Inbox()
        self._hosted: frozenset[int] = frozenset()
        self._following: dict[str, asyncio.Event] = {}
        self._behind: set[int] = set()
        self._caught_up: Final = asyncio.Event()
        self.freshness: Final = Freshness(clock.unix_ms, lambda shard: configuration.routes.database_of(shard).name)
        """Of the hosted shards."""
        self.messages = 0
        self.resets = 0
        self.gaps = 0
        configuration.on_routes(self.follow_routes)

    @property
    def hosted(self) -> frozenset[int]:
        """Shards of this follower, by the topology."""
        return self._hosted

    @property
    def unsubscribed(self) -> int:
        """Shards that no leader has confirmed (any more)."""
        return len(self._behind)

    def is_told(self, shard: int) -> bool:
        """Whether a leader has confirmed that it tells this follower of the shard's changes, and has not gone since."""
        return shard in self._hosted and shard not in self._behind

    def follow_routes(self, routes: Routes) -> None:
        """Subscribe what this server hosts now, with who leads it now; drop what it does not host any more."""
        hosted = frozenset(routes.tier(self._region, self._tier).shards_of(self._name))
        for shard in self._hosted - hosted:
            self._cache.close_shard(shard)
            self._inbox.forget(shard)
            self._behind.discard(shard)
            self._changes.begin_anew(shard)
        if self._hosted:  # not at a start
            for shard in hosted - self._hosted:
                self._changes.begin_anew(shard)
        # Every series ends with the topology that it was begun under, and whoever leads a shard now confirms it anew.
        self._behind |= hosted
        self._hosted = hosted
        leaders = routes.leaders(self._region)
        self.freshness.follow(lambda shard: leaders.home(shard).name, hosted)
        # Also those that are named no more, so that they end.
        for changed in self._following.values():
            changed.set()
        self._follow_missing()

    async def renew(self, timeout_seconds: float) -> None:
        """After a pause: subscribe everything again, and return when the leaders have confirmed it, hence told what was
        missed, or after ``timeout_seconds``: without leaders what is known is served on."""
        self._behind |= self._hosted
        self._caught_up.clear()
        for changed in self._following.values():
            changed.set()
        if self._behind:
            await _set_within(self._caught_up, timeout_seconds)

    async def keep_following(self) -> None:
        """Follow again whom nothing follows: a task that could not be had, or has failed. Until cancelled."""
        while True:
            await asyncio.sleep(self._settings.answer_timeout_seconds)
            self._follow_missing()

    def _follow_missing(self) -> None:
        for leader in self._configuration.routes.leaders(self._region).servers:
            if leader.name in self._following:
                continue
            began = asyncio.Event()
            try:
                self._spawn(self._follow(leader.name, began))
            except TaoError as error:
                self._log.warning("leader_not_followed", leader=leader.name, reason=error.message)
            else:
                self._following[leader.name] = began

    def _shards_led_by(self, leader: str) -> list[int]:
        return [shard for shard in sorted(self._hosted) if self._is_led_by(leader, shard)]

    def _is_led_by(self, leader: str, shard: int) -> bool:
        return shard in self._hosted and self._configuration.routes.leaders(self._region).home(shard).name == leader

    def _leader(self, name: str) -> CacheServer | None:
        servers = self._configuration.routes.leaders(self._region).servers
        return next((server for server in servers if server.name == name), None)

    async def _follow(self, name: str, changed: asyncio.Event) -> None:
        """Keep a series with one leader, until the topology does not name it any more."""
        try:
            while (leader := self._leader(name)) is not None:
                changed.clear()
                shards = self._shards_led_by(name)
                if shards:
                    await self._hear(leader, shards, changed)
                    # One that moved may be confirmed by its new leader already.
                    self._behind.update(shard for shard in shards if self._is_led_by(name, shard))
                    await _set_within(changed, self._settings.retry_seconds)
                else:
                    await changed.wait()
        finally:
            del self._following[name]

    async def _hear(self, leader: CacheServer, shards: list[int], changed: asyncio.Event) -> None:
        """One series of deliveries; ends with the connection or a changed topology."""
        series = Series(
            self._links.to(leader),
            self._name,
            self._inbox.positions_for(shards),
            lambda delivery: self._receive(delivery, leader.name),
            self._settings.answer_timeout_seconds,
            self._settings.acknowledge_seconds,
            self._settings.acknowledge_messages,
        )
        moved = asyncio.ensure_future(changed.wait())
        ended = asyncio.ensure_future(series.ended.wait())
        try:
            while not (ended.done() or moved.done()):
                await asyncio.wait(
                    (ended, moved), timeout=self._settings.retry_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                series.ask_again(self._inbox.positions_for)
            if series.reason:
                self._log.info("subscription_ended", leader=leader.name, reason=series.reason)
        finally:
            ended.cancel()
            moved.cancel()
            series.close()
            if series.failed:
                self._void(leader.name, shards)

    def _void(self, leader: str, shards: list[int]) -> None:
        """Drop these shards' entries, and their positions: the next subscription begins with their reset. One that
        another leader tells by now has been subscribed already, and goes on empty."""
        for shard in shards:
            if self._is_led_by(leader, shard):
                self._inbox.forget(shard)
            self._begin_anew(shard)

    def _begin_anew(self, shard: int) -> None:
        if self._cache.is_open(shard):
            self._cache.bump_shard(shard)
            self._changes.begin_anew(shard)

    def _receive(self, delivery: Delivery, leader: str) -> set[int]:
        """Apply a delivery; returns the shards that have to be asked for again."""
        leaders = self._configuration.routes.leaders(self._region)
        # Of a shard that another leads by now, a leader that does not know it yet has nothing to say.
        current = tuple(part for part in delivery.shards if leaders.home(part.position.shard).name == leader)
        received = self._inbox.receive(msgspec.structs.replace(delivery, shards=current))
        with self._cache.witness.because(f"delivery {delivery.number} of {leader}"):
            self._take(received)
        missing = {shard for shard in (*received.refused, *received.gaps) if self._is_led_by(leader, shard)}
        self._behind |= missing
        if not self._behind:
            self._caught_up.set()
        # Last: what a delivery proves is true once its messages are applied.
        self.freshness.confirmed(leader, received.confirmed)
        self.freshness.heard(leader, delivery.proven, self.is_told)
        if delivery.reached:
            self._inbox.prove(delivery.reached, self.freshness.told_by(leader, self.is_told))
        return missing

    def _take(self, received: Received) -> None:
        for shard in received.resets:
            self._begin_anew(shard)
        self.resets += len(received.resets)
        self.gaps += len(received.gaps)
        for shard in received.confirmed:
            if shard in self._hosted and not self._cache.is_open(shard):
                self._cache.open_shard(shard)
                self._changes.opened(shard)
        self._behind.difference_update(received.confirmed)
        for messages in received.messages:
            # Also a delivery without messages tells the version epoch.
            if self._cache.is_open(messages.shard):
                self._cache.open_shard(messages.shard, messages.version_epoch)
            self.messages += len(messages.messages)
            self._changes.hear(messages)


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
