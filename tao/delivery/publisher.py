"""The leader's side of delivery: numbered streams, subscriptions, continuation or reset (DESIGN.md §7).

A leader delivers to those who subscribed, not to its own idea of the ring. Nothing is queued per subscriber: a
subscription is a cursor per shard into the one log, and a cursor that the log's tail has overtaken becomes a *reset*
(the subscriber drops what it holds of the shard). So a slow subscriber costs no memory and never delays a write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from tao.delivery.message_log import MessageLog, Stream
from tao.delivery.settings import DeliverySettings
from tao.delivery.subscription import Subscription
from tao.model.changes import ShardMessages
from tao.model.delivery import Delivery, Position
from tao.model.errors import InternalError, Overloaded


class Publisher:
    """All streams and subscriptions of one leader. Synchronous; a subscriber's ``deliver`` only hands over."""

    def __init__(self, settings: DeliverySettings, incarnation: str) -> None:
        """``incarnation`` names this run of this leader and no other, so that no stream's name ever comes back."""
        self._settings = settings
        self._incarnation = incarnation
        self._log = MessageLog(settings)
        self._streams: dict[int, Stream] = {}
        self._subscriptions: dict[str, Subscription] = {}
        # In the order in which they came: the same requests then always have the same effects, in a simulation too.
        self._followed: dict[int, dict[Subscription, None]] = {}
        self._resets_before = 0
        self._proven: dict[str, int] = {}
        self._proofs = 0
        self.on_published: Callable[[ShardMessages], None] = lambda _: None
        """Told of all that is published, cheaply."""

    def open_shard(self, shard: int, generation: int, version_epoch: int) -> None:
        """The shard is owned under ``generation``: start its stream. Whoever followed an earlier one is reset, because
        between two generations someone else may have written. The same generation again only raises the epoch."""
        name = f"{self._incarnation}/{generation}"
        stream = self._streams.get(shard)
        if stream is not None:
            if stream.name == name:
                stream.version_epoch = max(stream.version_epoch, version_epoch)
                return
            self._log.drop(stream)
        self._streams[shard] = Stream(shard, name, version_epoch)
        self._wake(shard)

    def close_shard(self, shard: int) -> None:
        """The shard is given up: its log goes, and its subscribers are told ``refused``."""
        stream = self._streams.pop(shard, None)
        if stream is not None:
            self._log.drop(stream)
            self._wake(shard)

    def publish(self, messages: ShardMessages) -> None:
        """Number the messages and wake the shard's subscribers. Raises as `publish_all`."""
        self.publish_all((messages,))

    def publish_all(self, batches: Iterable[ShardMessages]) -> None:
        """Publish what one commit changed on several shards, in one delivery per subscriber where it fits.

        Raises `InternalError` for a shard that is not open: its messages would reach nobody, unnoticed."""
        woken: dict[Subscription, None] = {}
        for batch in batches:
            stream = self._streams.get(batch.shard)
            if stream is None:
                raise InternalError(f"messages of shard {batch.shard} were published, but its stream is not open")
            self._log.append(stream, batch)
            self.on_published(batch)
            for subscription in self._followed.get(batch.shard, ()):
                subscription.owe(batch.shard)
                woken[subscription] = None
        for subscription in woken:
            subscription.pump()

    def subscribe(
        self, subscriber: str, positions: Sequence[Position], deliver: Callable[[Delivery], None]
    ) -> Subscription:
        """Deliver to ``subscriber`` what happens to these shards from now on. Its first delivery, made before this
        returns, confirms each shard (continuing from the position, or as a reset) or refuses it.

        A second subscription of the same subscriber replaces the first: its old connection is gone or going.
        ``deliver`` must not block; a `TaoError` that it raises ends the subscription. Raises `Overloaded`."""
        former = self._subscriptions.get(subscriber)
        if former is None and len(self._subscriptions) >= self._settings.max_subscribers:
            raise Overloaded(
                f"this leader has its {self._settings.max_subscribers} subscribers (max_subscribers) already"
            )
        if former is not None:
            former.close()
        subscription = Subscription(subscriber, self, deliver, self._settings)
        self._subscriptions[subscriber] = subscription
        subscription.add(positions)
        return subscription

    def prove(self, database: str, unix_ms: int) -> None:
        """Every commit to the database up to then has been published, as far as this leader's shards go: subscribers
        learn it behind what they are owed. A time that is older than one proved before says nothing."""
        if unix_ms > self._proven.get(database, 0):
            self._proven[database] = unix_ms
            self._proofs += 1
            for subscription in tuple(self._subscriptions.values()):
                subscription.pump()

    def forget_proofs(self) -> None:
        """What was proved of the shards so far says nothing of those that come: wait for other proofs."""
        self._proven.clear()
        self._proofs += 1

    @property
    def proven(self) -> Mapping[str, int]:
        """Database → Unix milliseconds, as `prove` was told."""
        return self._proven

    def figures(self) -> dict[str, float]:
        """Depths for metrics, named with their units."""
        live = self._subscriptions.values()
        return {
            "log_messages": len(self._log),
            "log_bytes": self._log.bytes,
            "log_evicted_messages_total": self._log.evicted,
            "open_shards": len(self._streams),
            "subscribers": len(self._subscriptions),
            "subscribed_shards": sum(subscription.followed for subscription in live),
            "owed_shards": sum(subscription.owed for subscription in live),
            "unacknowledged_bytes": sum(subscription.unacknowledged_bytes for subscription in live),
            "resets_total": self._resets_before + sum(subscription.resets for subscription in live),
        }

    # What follows is for `Subscription` alone.

    @property
    def log(self) -> MessageLog:
        """The messages that cursors point into."""
        return self._log

    def stream(self, shard: int) -> Stream | None:
        """The open stream of a shard."""
        return self._streams.get(shard)

    @property
    def proofs(self) -> int:
        """Changes with `proven`."""
        return self._proofs

    def follow(self, shard: int, subscription: Subscription) -> None:
        """Wake the subscription when the shard has news."""
        self._followed.setdefault(shard, {})[subscription] = None

    def unfollow(self, shard: int, subscription: Subscription) -> None:
        """No longer wake it for this shard."""
        followers = self._followed.get(shard)
        if followers is not None:
            followers.pop(subscription, None)
            if not followers:
                del self._followed[shard]

    def forget(self, subscription: Subscription) -> None:
        """The subscription is closed."""
        if self._subscriptions.get(subscription.subscriber) is subscription:
            del self._subscriptions[subscription.subscriber]
        self._resets_before += subscription.resets

    def _wake(self, shard: int) -> None:
        for subscription in tuple(self._followed.get(shard, ())):
            subscription.owe(shard)
            subscription.pump()
