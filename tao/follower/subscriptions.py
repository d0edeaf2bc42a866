"""A follower's subscriptions: it receives every change of the shards that it caches, and knows how fresh they are.

A shard is open in the cache from the moment its leader has confirmed the subscription, so that no cached entry is
served that a message could not correct. When the leader fails, the follower goes on serving what it has cached:
availability comes before freshness. Once the same leader or another one confirms the shard again, the follower
continues at its position, or drops the shard when that leader cannot continue there.

A stream of deliveries is subscribed once, acknowledged, and ended on both sides. A leader that refuses some shards, or
leaves a gap in them, goes on with the others; the follower subscribes those again and adds them to the stream, which
the protocol calls a series. The stream ends with the connection, or when the follower closes it. One acknowledgement
covers all deliveries before it, and only a leader that has sent as much as it may waits for it.

A change of the topology affects only the shards that other leaders lead since, or may have led in between
(`tao.routing.topology_changes`). They are added to the streams of their present leaders; a former leader, whose
deliveries of them are ignored, ends them itself. The other shards go on, confirmed and fresh. A shard that leaves the
follower stays in its leader's stream, and its deliveries are ignored: the protocol cannot end a single shard, and a new
stream would leave the others unconfirmed for a moment.

A leader reports in its stream the time up to which it has sent every change of a database. That holds only for the
shards that this leader sends to this follower (`Inbox.confirm`): a shard that its leader has not confirmed, or that
another leader owns by now, keeps the time that it had. Without reports the bound simply grows, whichever part of the
chain has broken. The clocks of leaders and followers are compared, so their difference is part of the bound.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

import msgspec

from tao.cache import GraphCache
from tao.delivery.inbox import Inbox, Received
from tao.model.delivery import Delivery, Position
from tao.model.errors import TaoError
from tao.model.topology import CacheServer
from tao.routing.routes import Routes
from tao.routing.topology_changes import affected_shards
from tao.serving.configuration import ServerContext
from tao.serving.forward_path import WriteThrough
from tao.wire.convert import delivery_from_pb, error_from_pb, subscribe_to_pb
from tao.wire.links import LinkPort
from tao.wire.v1 import session_pb2 as pb


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

    acknowledge_proofs_seconds: float = 10.0
    """Longest time until a delivery that only proves freshness is acknowledged. It takes 64 bytes of what may be sent
    ahead, and comes from each leader once a second: acknowledging each would double what an idle follower sends and
    receives. Well below the 30 s of silence after which a leader gives a follower up."""

    subscribe_shards: int = 250
    """Shards in one request to a leader; the next are asked for once it has answered. To ask for a shard and to open it
    takes some 20 µs, so that reads of cached entries wait for 5 ms at most."""

    answer_timeout_seconds: float = 2.0
    """Longest wait for the answer to subscribing shards again: the leader needs no database for it, so one that takes
    longer has failed."""


_MAX_UNHOSTED_PART: Final = 0.5
"""Part of a stream's shards that may have left the follower, before a new stream replaces it. The leader sends their
changes for nothing: with half of the shards, at most as much again as the follower needs. A tier of four grows to eight
before its followers subscribe anew."""

PositionsFor = Callable[[Iterable[int]], Sequence[Position]]
"""Returns the positions from which subscriptions to shards continue."""


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
        self._own_shards: Final = context.own_shards
        self._cache: Final = cache
        self._changes: Final = changes
        self._configuration: Final = configuration
        self._links: Final = context.links
        self._spawn: Final = context.spawn_as("subscription")
        self._settings: Final = settings
        self._log: Final = context.log
        database_of = lambda shard: configuration.routes.database_of(shard).name  # noqa: E731 - two users
        self._inbox: Final = Inbox(database_of)
        self.hosted: frozenset[int] = frozenset()
        """The shards that the topology assigns to this follower."""
        self._followed: Routes | None = None
        self._streams: dict[str, _LeaderStream] = {}
        self._behind: set[int] = set()
        self._caught_up: Final = asyncio.Event()
        self.freshness: Final = Freshness(context.clock.unix_ms, database_of, self._inbox.proven_unix_ms)
        """The staleness bounds of the hosted shards."""
        self.messages = 0
        self.resets = 0
        self.gaps = 0
        configuration.on_routes(self.follow_routes)

    @property
    def unsubscribed(self) -> int:
        """Number of shards that no leader confirms (any more)."""
        return len(self._behind)

    def is_subscribed(self, shard: int) -> bool:
        """Return whether a leader has confirmed that it sends this follower the shard's changes, and has not failed
        since."""
        return shard in self.hosted and shard not in self._behind

    def follow_routes(self, routes: Routes) -> None:
        """Subscribe the hosted shards at their current leaders, and drop the shards that are not hosted any more."""
        hosted = self._own_shards(routes)
        for shard in self.hosted - hosted:
            self._cache.close_shard(shard)
            self._inbox.forget(shard)
            self._behind.discard(shard)
        former, self._followed = self._followed, routes
        affected = hosted - self.hosted
        if former is not None:
            affected |= hosted & affected_shards(former, routes, self._region).led
        self._mark_unconfirmed(affected)
        self.hosted = hosted
        self._redirect_streams(routes, affected)
        self._follow_missing()

    def _redirect_streams(self, routes: Routes, affected: frozenset[int]) -> None:
        """Add the affected shards to the streams of their leaders, and end the streams that cannot go on."""
        leaders = routes.leaders(self._region)
        affected_by_leader: dict[str, set[int]] = {}
        for shard in sorted(affected):
            affected_by_leader.setdefault(leaders.home(shard).name, set()).add(shard)
        homes = {home.name: home for home in map(leaders.home, self.hosted)}
        for name, leader_stream in self._streams.items():
            stream = leader_stream.stream
            if (
                stream is None
                or name not in homes  # its shards have other leaders, or it has left the topology
                or stream.link is not self._links.to(homes[name])  # it has other addresses
                or len(stream.shards - self.hosted) > _MAX_UNHOSTED_PART * len(stream.shards)
            ):
                leader_stream.changed.set()
            elif name in affected_by_leader:
                stream.add(affected_by_leader[name])

    async def renew(self, timeout_seconds: float) -> None:
        """Subscribe everything again after a pause. Return when the leaders have confirmed it, and hence sent what was
        missed, or after ``timeout_seconds``: without leaders the follower goes on serving what is cached."""
        # The answer to a write may have been under way for longer than version floors are kept.
        self._changes.note_begun(*self.hosted)
        self._mark_unconfirmed(self.hosted)
        self._caught_up.clear()
        for leader_stream in self._streams.values():
            leader_stream.changed.set()
        if self._behind:
            await _wait_for(self._caught_up, timeout_seconds)

    async def keep_following(self) -> None:
        """Start the missing tasks that follow leaders, which could not be started or have failed, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.answer_timeout_seconds)
            self._follow_missing()

    def _follow_missing(self) -> None:
        for leader in self._configuration.routes.leaders(self._region).servers:
            if leader.name in self._streams:
                continue
            leader_stream = _LeaderStream()
            try:
                self._spawn(self._follow(leader.name, leader_stream))
            except TaoError as error:
                self._log.warning("leader_subscription_failed", leader=leader.name, reason=error.message)
            else:
                self._streams[leader.name] = leader_stream

    def _shards_led_by(self, leader: str) -> list[int]:
        led = self._configuration.routes.leaders(self._region).shards_of(leader)
        return [shard for shard in led if shard in self.hosted]

    def _is_led_by(self, leader: str, shard: int) -> bool:
        return shard in self.hosted and self._configuration.routes.leaders(self._region).home(shard).name == leader

    def _leader(self, name: str) -> CacheServer | None:
        servers = self._configuration.routes.leaders(self._region).servers
        return next((server for server in servers if server.name == name), None)

    async def _follow(self, name: str, leader_stream: _LeaderStream) -> None:
        """Keep a stream from one leader, until the topology does not name it any more."""
        changed = leader_stream.changed
        try:
            while (leader := self._leader(name)) is not None:
                changed.clear()
                shards = self._shards_led_by(name)
                if shards:
                    await self._receive_stream(leader, shards, leader_stream)
                    # The new leader of a shard that moved may have confirmed it already.
                    self._mark_unconfirmed(self._shards_led_by(name))
                    await _wait_for(changed, self._settings.retry_seconds)
                else:
                    await changed.wait()
        finally:
            del self._streams[name]
            self._inbox.end_stream(name)

    async def _receive_stream(self, leader: CacheServer, shards: list[int], leader_stream: _LeaderStream) -> None:
        """Receive one stream of deliveries, until the connection ends or a change of the topology ends it."""
        self._inbox.begin_stream(leader.name)
        stream = leader_stream.stream = DeliveryStream(
            self._links.to(leader),
            self._name,
            shards,
            self._positions_at(leader.name),
            lambda delivery: self._receive(delivery, leader.name),
            self._settings,
        )
        moved = asyncio.ensure_future(leader_stream.changed.wait())
        ended = asyncio.ensure_future(stream.ended.wait())
        try:
            await asyncio.wait((ended, moved), return_when=asyncio.FIRST_COMPLETED)
            if stream.reason:
                self._log.info("subscription_ended", leader=leader.name, reason=stream.reason)
        finally:
            leader_stream.stream = None
            ended.cancel()
            moved.cancel()
            stream.close()
            if stream.failed:
                self._invalidate(leader.name, sorted(stream.shards))

    def _positions_at(self, leader: str) -> PositionsFor:
        """Return what gives the positions from which the leader continues shards, of those that it still leads."""

        def positions_for(shards: Iterable[int]) -> list[Position]:
            home = self._configuration.routes.leaders(self._region).home
            led = [shard for shard in shards if shard in self.hosted and home(shard).name == leader]
            return self._inbox.positions_for(led)

        return positions_for

    def _invalidate(self, leader: str, shards: list[int]) -> None:
        """Drop these shards' entries, and their positions, so that the next subscription begins with a reset. A shard
        that another leader sends by now is subscribed already, and continues with an empty cache."""
        for shard in shards:
            if self._is_led_by(leader, shard):
                self._inbox.forget(shard)
            self._drop_entries(shard)

    def _mark_unconfirmed(self, shards: Iterable[int]) -> None:
        """Note that no leader confirms these shards any more: its proofs do not hold for them either."""
        self._behind.update(shards)
        self._inbox.suspend(shards)

    def _drop_entries(self, shard: int) -> None:
        if self._cache.is_open(shard):
            self._cache.bump_shard(shard)
            self._changes.note_begun(shard)

    def _receive(self, delivery: Delivery, leader: str) -> set[int]:
        """Apply a delivery. Returns the shards that have to be subscribed again."""
        missing: set[int] = set()
        if delivery.shards or delivery.refused:  # all that an idle leader delivers are proofs
            missing = self._receive_parts(delivery, leader)
        if not self._behind:
            self._caught_up.set()
        # Last, because the times that a delivery reports hold only once its messages are applied.
        self._inbox.prove(leader, delivery)
        return missing

    def _receive_parts(self, delivery: Delivery, leader: str) -> set[int]:
        """Apply what a delivery says of shards. Returns those that have to be subscribed again."""
        leaders = self._configuration.routes.leaders(self._region)
        # Ignore what a former leader, which does not know its successor yet, says about a shard.
        current = tuple([part for part in delivery.shards if leaders.home(part.position.shard).name == leader])
        received = self._inbox.receive(msgspec.structs.replace(delivery, shards=current))
        with self._cache.recorder.caused_by(f"delivery {delivery.number} of {leader}"):
            self._apply(received)
        missing = {shard for shard in (*received.refused, *received.gaps) if self._is_led_by(leader, shard)}
        self._mark_unconfirmed(missing)
        hosted, behind = self.hosted, self._behind
        subscribed = [shard for shard in received.confirmed if shard in hosted and shard not in behind]
        self._inbox.confirm(leader, subscribed)
        return missing

    def _apply(self, received: Received) -> None:
        for shard in received.resets:
            self._drop_entries(shard)
        self.resets += len(received.resets)
        self.gaps += len(received.gaps)
        # A delivery without messages carries the version epoch, too.
        epochs = {messages.shard: messages.version_epoch for messages in reversed(received.messages)}
        hosted, is_open = self.hosted, self._cache.is_open
        opened = [shard for shard in received.confirmed if shard in hosted and not is_open(shard)]
        for shard in opened:
            self._cache.open_shard(shard, epochs.get(shard, 0))
        self._changes.note_begun(*opened)
        self._behind.difference_update(received.confirmed)
        for messages in received.messages:
            shard, epoch = messages.shard, messages.version_epoch
            if self._cache.version_epoch(shard) < epoch and self._cache.is_open(shard):
                self._cache.open_shard(shard, epoch)
            if messages.messages:
                self.messages += len(messages.messages)
                self._changes.apply(messages)


class _LeaderStream:
    """The stream of one leader that is open now, if any, and the event that ends it."""

    __slots__ = ("changed", "stream")

    def __init__(self) -> None:
        self.changed: Final = asyncio.Event()
        self.stream: DeliveryStream | None = None


async def _wait_for(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


class DeliveryStream:
    """A subscription of some shards at one leader.

    Many shards are asked for piece by piece, so that neither side is busy for long at a time. ``ended`` is set when
    nothing more will come, and ``reason`` is why the leader or the connection ended it.
    ``failed``: a delivery could not be applied, so that the cache's entries of these shards cannot be trusted.
    """

    def __init__(
        self,
        link: LinkPort,
        subscriber: str,
        shards: Iterable[int],
        positions_for: PositionsFor,
        receive: Callable[[Delivery], set[int]],
        settings: SubscriptionSettings,
    ) -> None:
        """``positions_for`` returns the positions from which shards continue, of those that the leader still leads.
        ``receive`` applies a delivery and returns the shards to subscribe again."""
        self.ended: Final = asyncio.Event()
        self.reason = ""
        self.failed = False
        self.shards: Final = set(shards)
        """The shards that this stream was ever asked for."""
        self.link: Final = link
        self._subscriber: Final = subscriber
        self._positions_for: Final = positions_for
        self._receive: Final = receive
        self._settings: Final = settings
        self._loop: Final = asyncio.get_running_loop()
        self._applied = 0  # the number of the last delivery
        self._unacknowledged_messages = 0
        self._acknowledging: asyncio.TimerHandle | None = None
        self._acknowledge_at = inf  # the loop's time at which that is due
        self._retrying: asyncio.TimerHandle | None = None
        self._number = 0
        self._last_came = False
        self._unasked: Final = deque(shards)
        self._asking = False  # the leader has not answered yet that it has added the shards asked for last
        self._missing: set[int] = set()
        link.send(self._subscribe(positions_for(self._take_unasked())), math.inf, self._take)

    def add(self, shards: Iterable[int]) -> None:
        """Subscribe these shards in this stream, too, or again."""
        self.shards.update(shards)
        self._missing.update(shards)
        self._ask_again()

    def _ask_again(self) -> None:
        """Subscribe the shards that were added, were refused or had a gap, if there are any, in this stream."""
        if self._retrying is not None:
            self._retrying.cancel()
            self._retrying = None
        self._unasked.extend(sorted(self._missing.difference(self._unasked)))
        self._missing.clear()
        self._ask_more()

    def close(self) -> None:
        """End the stream, and say so to the leader, which would go on for ever otherwise."""
        self.ended.set()
        for timer in (self._acknowledging, self._retrying):
            if timer is not None:
                timer.cancel()
        self._forget()

    def _subscribe(self, positions: Sequence[Position], series: int = 0) -> pb.Request:
        return subscribe_to_pb(self._subscriber, positions, series)

    def _take_unasked(self) -> list[int]:
        unasked = self._unasked
        return [unasked.popleft() for _ in range(min(len(unasked), self._settings.subscribe_shards))]

    def _ask_more(self) -> None:
        """Ask for the next shards, if there are any, once the leader has answered the request before."""
        if not self._number or self._asking or self.ended.is_set():
            return
        positions: Sequence[Position] = ()
        while self._unasked and not positions:
            positions = self._positions_for(self._take_unasked())
        if positions:
            self._asking = True
            request = self._subscribe(positions, self._number)
            asked = [position.shard for position in positions]
            self.link.send(request, self._settings.answer_timeout_seconds, lambda answer: self._added(asked, answer))

    def _take(self, answer: pb.Answer) -> None:
        self._last_came = not answer.more
        if self.ended.is_set():
            # The number of the request was not known yet when the stream was closed.
            self._number = answer.number
            self._forget()
            return
        if answer.HasField("error"):
            self.reason = answer.error.message
            self.ended.set()
            return
        self._number = answer.number
        try:
            delivery = delivery_from_pb(answer.delivery)
            self._missing |= self._receive(delivery)
        except Exception:
            # The delivery may be applied in part, and the leader would never send it again.
            self.failed = True
            self.ended.set()
            raise
        if not answer.more:
            self.ended.set()
        self._ask_more()
        self._retry_later()
        self._applied = delivery.number
        self._unacknowledged_messages += sum([len(part.messages.messages) for part in delivery.shards if part.messages])
        settings = self._settings
        if self._unacknowledged_messages >= settings.acknowledge_messages:
            self._acknowledge()
        else:
            only_proves = not (delivery.shards or delivery.refused)
            seconds = settings.acknowledge_proofs_seconds if only_proves else settings.acknowledge_seconds
            self._acknowledge_within(seconds)

    def _retry_later(self) -> None:
        """Subscribe what is missing after a pause. A stream without missing shards needs no timer."""
        if self._missing and self._retrying is None and not self.ended.is_set():
            self._retrying = self._loop.call_later(self._settings.retry_seconds, self._ask_again)

    def _acknowledge_within(self, seconds: float) -> None:
        due = self._loop.time() + seconds
        if due >= self._acknowledge_at:
            return
        if self._acknowledging is not None:
            self._acknowledging.cancel()
        self._acknowledge_at = due
        self._acknowledging = self._loop.call_at(due, self._acknowledge)

    def _acknowledge(self) -> None:
        if self._acknowledging is not None:
            self._acknowledging.cancel()
            self._acknowledging = None
        self._acknowledge_at = inf
        self._unacknowledged_messages = 0
        if not self.ended.is_set():
            acknowledge = pb.Acknowledge(subscribe_number=self._number, delivery_number=self._applied)
            self.link.send(pb.Request(acknowledge=acknowledge), self._settings.answer_timeout_seconds, _no_answer)

    def _added(self, asked: Sequence[int], answer: pb.Answer) -> None:
        self._asking = False
        if not answer.HasField("error"):
            self._ask_more()
            return
        error = error_from_pb(answer.error)
        if error.retryable:
            self._missing.update(asked)
            self._retry_later()
        else:
            # The leader does not know this stream any more.
            self.reason = error.message
            self.ended.set()

    def _forget(self) -> None:
        if self._number and not self._last_came:
            self._last_came = True
            forget = pb.Request(forget=pb.Forget(forgotten_number=self._number))
            self.link.send(forget, self._settings.answer_timeout_seconds, self._take)


def _no_answer(_: pb.Answer) -> None:
    """Ignore the answer: an acknowledgement has none, and when it cannot be sent, the stream ends with a reason of its
    own."""


class Freshness:
    """How far the cached entries of each shard are behind their master at most."""

    def __init__(
        self, unix_ms: Callable[[], int], database_of: Callable[[int], str], proven_unix_ms: Callable[[int], int]
    ) -> None:
        """``database_of`` maps a shard to the name of its database, ``proven_unix_ms`` to the time up to which every
        change has been received (0: nothing is known)."""
        self._unix_ms: Final = unix_ms
        self._database_of: Final = database_of
        self._proven_unix_ms: Final = proven_unix_ms

    def staleness_ms(self, shard: int) -> float:
        """Return how far the cached entries of the shard are behind at most; infinite when nothing is known."""
        return self._age_ms(self._proven_unix_ms(shard))

    def by_database(self, hosted: Iterable[int]) -> dict[str, float]:
        """Return the bound of each database in seconds, which is that of its shard that may be furthest behind."""
        oldest: dict[str, int] = {}
        proven_unix_ms, database_of = self._proven_unix_ms, self._database_of
        for shard in hosted:
            database, proven = database_of(shard), proven_unix_ms(shard)
            if proven < oldest.get(database, inf):
                oldest[database] = proven
        return {database: self._age_ms(proven) / 1000 for database, proven in oldest.items()}

    def _age_ms(self, proven_unix_ms: int) -> float:
        return max(0, self._unix_ms() - proven_unix_ms) if proven_unix_ms else inf
