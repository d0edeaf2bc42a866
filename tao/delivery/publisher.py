"""The leader's side of delivery: numbered streams, subscriptions, continuation or reset (DESIGN.md §7).

A leader delivers to those who subscribed, not to its own idea of the ring. Nothing is queued per subscriber: a
subscription is a cursor per shard into the one log, and a cursor that the log's tail has overtaken is continued from
the spool, or becomes a *reset* (the subscriber drops what it holds of the shard). So a slow subscriber costs no memory
and never delays a write.

What the leader tells when it commits is a quicker copy. What the tailer tells is *guaranteed*: it has a position in the
binlog, it is spooled, and a subscriber that knows how far it has been told goes on from there with any leader that is
*linked*, which is to say: the tailer has said that it tells this leader, and nobody else, what comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from tao.delivery.coverage import Coverage
from tao.delivery.message_log import MessageLog, Stream
from tao.delivery.settings import DeliverySettings
from tao.delivery.subscription import Subscription
from tao.delivery.unknowns import Unknowns
from tao.model.changes import ShardMessages
from tao.model.delivery import Delivery, Position, Span, SpoolMark, SpoolRow
from tao.model.errors import InternalError, Overloaded
from tao.model.ports import Spool

Later = Callable[[float, Callable[[], None]], object]
"""Does something after so many seconds."""


class Publisher:
    """All streams and subscriptions of one leader. Synchronous; a subscriber's ``deliver`` only hands over."""

    def __init__(
        self,
        settings: DeliverySettings,
        incarnation: str,
        database_of: Callable[[int], str],
        spool: Spool | None = None,
        later: Later | None = None,
    ) -> None:
        """``incarnation`` names this run of this leader and no other, so that no stream's name ever comes back.
        ``database_of``: by name, for each has a tailer of its own, which knows nothing of the others' shards. Without
        ``spool`` nothing is kept but in memory; without ``later`` no subscriber waits for a tailer."""
        self._settings = settings
        self._incarnation = incarnation
        self.database_of = database_of
        self._spool = spool
        self._later = later
        self._log = MessageLog(settings)
        self._streams: dict[int, Stream] = {}
        self._coverages: dict[int, Coverage] = {}
        self._spooled: set[int] = set()  # shards of which the spool has what follows some position
        self._unknowns = Unknowns(database_of)
        self._reached: dict[str, tuple[str, int]] = {}  # by database
        self._restarts = 0
        self._subscriptions: dict[str, Subscription] = {}
        # In the order in which they came: the same requests then always have the same effects, in a simulation too.
        self._followed: dict[int, dict[Subscription, None]] = {}
        self._before: dict[str, int] = {"resets": 0, "continued": 0}  # by subscriptions that are closed
        self._proven: dict[str, int] = {}
        self._told_proofs: tuple[tuple[str, int], ...] = ()
        self._proofs = 0
        self.on_published: Callable[[ShardMessages], None] = lambda _: None
        """Told of all that is published, cheaply."""
        if spool is not None:
            for mark in spool.marks():
                self._coverages[mark.shard] = Coverage(mark.source, mark.head, mark.after)
                self._spooled.add(mark.shard)
            spool.on_change(self._spool_dropped, self._spool_lost)

    def open_shard(self, shard: int, generation: int, version_epoch: int) -> None:
        """The shard is owned under ``generation``: start its stream. Whoever followed an earlier one continues by its
        position in the binlog, where whatever others wrote between two generations is found, or is reset. The same
        generation again only raises the epoch."""
        stream = self._streams.get(shard)
        if stream is not None:
            if stream.generation == generation:
                stream.version_epoch = max(stream.version_epoch, version_epoch)
                return
            self._drop(stream)
        coverage = self._coverages.setdefault(shard, Coverage())
        name = f"{self._incarnation}/{generation}"
        self._streams[shard] = Stream(shard, name, generation, version_epoch, coverage)
        self._unknowns.lose_sight(shard)
        self._wake(shard)

    def close_shard(self, shard: int) -> None:
        """The shard is given up: its log goes, and its subscribers are told ``refused``."""
        stream = self._streams.get(shard)
        if stream is not None:
            self._drop(stream)
            self._wake(shard)

    def _drop(self, stream: Stream) -> None:
        shard = stream.shard
        del self._streams[shard]
        self._log.drop(stream)
        self._unknowns.forget(shard)
        self._unlink(shard)

    def _unlink(self, shard: int) -> None:
        coverage = self._coverages[shard]
        if coverage.linked:
            coverage.unlink()
            if self._spool is not None and shard in self._spooled:
                self._spool.append((), (self._mark(shard),), _nothing)

    def _mark(self, shard: int) -> SpoolMark:
        coverage = self._coverages[shard]
        after = coverage.head if coverage.spool_after is None else coverage.spool_after
        return SpoolMark(shard, coverage.source, after, coverage.head, coverage.whole)

    def relayed(
        self, batches: Sequence[ShardMessages], spans: Sequence[Span], stored: Callable[[], None] | None = None
    ) -> None:
        """Publish what a tailer tells: these messages are everything in ``spans``. ``stored``: they are in the spool,
        or cannot be. Raises as `publish_all`, with nothing published."""
        for shard in (*(batch.shard for batch in batches), *(span.shard for span in spans)):
            self._require(shard)
        woken = [span.shard for span in spans if self._unknowns.is_unlinked(span.shard)]
        streams = {span.shard: self._streams[span.shard] for span in spans}
        marks = [span.shard for span in spans if self._take(span)]
        # Spooled first: whoever is woken may be sent through the spool at once, for these as well.
        if self._spool is not None and stored is not None:
            rows = [
                SpoolRow(coverage.source, coverage.head, each)
                for batch in batches
                if batch.messages and batch.shard in self._spooled
                if (coverage := self._coverages[batch.shard]).linked
                for each in _pieces(batch, self._settings.max_delivery_messages)
            ]
            self._spool.append(rows, [self._mark(shard) for shard in marks if shard in self._spooled], stored)
        elif stored is not None:
            stored()
        self.publish_all(batches)
        woken.extend(shard for shard, stream in streams.items() if self._streams[shard] is not stream)
        # Not linked before, or begun anew: also who has nothing to hear learns the position. Not before the messages
        # are there: who is told how far it reaches before what is in it misses that when the connection breaks.
        heard = {batch.shard for batch in batches}
        for shard in (*woken, *(shard for shard in marks if self._anyone_waits_for(shard))):
            if shard not in heard:
                self._wake(shard)
        if spans:
            self._tell_proofs()

    def _tell_proofs(self) -> None:
        """To all, once what was proved is known to be true of every shard."""
        told = tuple(self.proven.items())
        if told != self._told_proofs:
            self._told_proofs = told
            self._proofs += 1
            for subscription in tuple(self._subscriptions.values()):
                subscription.pump()

    def _anyone_waits_for(self, shard: int) -> bool:
        return any(subscription.waits_for(shard) for subscription in self._followed.get(shard, ()))

    def _take(self, span: Span) -> bool:
        """Returns whether the shard's coverage counts."""
        shard = span.shard
        stream, coverage = self._streams[shard], self._coverages[shard]
        before = coverage.head
        if coverage.take(span):
            kept_after = before
        else:
            kept_after = span.after
            if stream.relied:
                self._restart(stream)
            else:
                stream.counted_after = stream.last
        self._unknowns.heard(shard, coverage)
        if not coverage.linked:
            return False
        self._streams[shard].relied = True
        if self._spool is not None and coverage.spool_after is None:
            coverage.spool_after = kept_after
            self._spooled.add(shard)
        return True

    def _restart(self, stream: Stream) -> None:
        """Something between two spans was told to others: whoever followed has missed it."""
        shard, coverage = stream.shard, stream.coverage
        after = coverage.memory_after
        self._log.drop(stream)
        coverage.memory_after = after
        self._restarts += 1
        name = f"{self._incarnation}/{stream.generation}.{self._restarts}"
        self._streams[shard] = Stream(shard, name, stream.generation, stream.version_epoch, coverage)

    def wants(self, database: str) -> list[Span]:
        """For the tailer of the database: of these shards it shall say where it goes on, and tell again what came after
        ``number`` (``after`` is the same). Each is said once until it proves time again."""
        return self._unknowns.wants(database, self._coverages)

    def want(self, shard: int, source: str, reached: int) -> None:
        """A subscriber that was told up to there waits for what follows."""
        coverage = self._coverages[shard]
        number = max(reached, coverage.head) if coverage.source == source and coverage.has_after(reached) else reached
        self._unknowns.want(shard, source, number)

    def publish(self, messages: ShardMessages) -> None:
        """Number the messages and wake the shard's subscribers. Raises as `publish_all`."""
        self.publish_all((messages,))

    def publish_all(self, batches: Iterable[ShardMessages]) -> None:
        """Publish what one commit changed on several shards, in one delivery per subscriber where it fits.

        Raises `InternalError` for a shard that is not open: its messages would reach nobody, unnoticed."""
        woken: dict[Subscription, None] = {}
        for batch in batches:
            self._log.append(self._require(batch.shard), batch)
            self.on_published(batch)
            for subscription in self._followed.get(batch.shard, ()):
                subscription.owe(batch.shard)
                woken[subscription] = None
        for subscription in woken:
            subscription.pump()

    def _require(self, shard: int) -> Stream:
        stream = self._streams.get(shard)
        if stream is None:
            raise InternalError(f"messages of shard {shard} were published, but its stream is not open")
        return stream

    def subscribe(
        self, subscriber: str, positions: Sequence[Position], deliver: Callable[[Delivery], None]
    ) -> Subscription:
        """Deliver to ``subscriber`` what happens to these shards from now on. Its first delivery, made before this
        returns, confirms each shard (continuing from the position, or as a reset) or refuses it; those that it does not
        speak of wait for the tailer or the spool, and are confirmed by a later one.

        A second subscription of the same subscriber replaces the first: its old connection is gone or going.
        ``deliver`` must not block; a `TaoError` that it raises, and tells the subscriber, ends the subscription. Raises
        `Overloaded`."""
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

    def prove(self, database: str, unix_ms: int, source: str = "", number: int = 0) -> None:
        """Every commit to the database up to then, and up to that transaction of ``source``, has been published, as far
        as this leader's shards go: subscribers learn it behind what they are owed. A time that is older than one proved
        before says nothing."""
        self._unknowns.ask_again(database)
        if source and (source, number) != self._reached.get(database):
            self._reached[database] = source, number
            for coverage in [stream.coverage for stream in self._streams.values()]:
                coverage.prove(source, number)
            if self._spool is not None:
                self._spool.prove(source, number)
        if unix_ms > self._proven.get(database, 0):
            self._proven[database] = unix_ms
            self._tell_proofs()

    def forget_proofs(self) -> None:
        """The topology has changed. What was proved of the shards so far says nothing of those that come: wait for
        other proofs. And the tailer may have told somebody else of any shard in between: believe no position until it
        says where it goes on."""
        self._proven.clear()
        self._reached.clear()
        self._proofs += 1
        self._unknowns.ask_all_again()
        for shard, stream in self._streams.items():
            self._unknowns.lose_sight(shard)
            self._unlink(shard)
            # Also one that was never linked: who follows it may miss what another leader was told since it was opened.
            stream.relied = stream.relied or shard in self._followed

    @property
    def proven(self) -> Mapping[str, int]:
        """Database → Unix milliseconds, as `prove` was told; not of a database with a shard of which something may have
        been told to others meanwhile."""
        return {name: unix_ms for name, unix_ms in self._proven.items() if self._unknowns.has_times(name)}

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
            "waiting_shards": sum(subscription.waiting for subscription in live),
            "unlinked_shards": self._unknowns.unlinked,
            "restarted_streams_total": self._restarts,
            "resets_total": self._before["resets"] + sum(subscription.resets for subscription in live),
            "continued_total": self._before["continued"] + sum(subscription.continued for subscription in live),
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
    def reached(self) -> tuple[tuple[str, int], ...]:
        """``(source, transaction)``, as `prove` was told; not of a database with a shard of which that is not known."""
        return tuple([place for name, place in self._reached.items() if self._unknowns.has_positions(name)])

    @property
    def spool(self) -> Spool | None:
        """What lies behind the log."""
        return self._spool

    @property
    def later(self) -> Later | None:
        """A clock for those that wait."""
        return self._later

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
        self._before["resets"] += subscription.resets
        self._before["continued"] += subscription.continued

    def _wake(self, shard: int) -> None:
        for subscription in tuple(self._followed.get(shard, ())):
            subscription.owe(shard)
            subscription.pump()

    def _spool_dropped(self, shard: int, source: str, number: int) -> None:
        coverage = self._coverages.get(shard)
        if coverage is not None and coverage.source == source:
            coverage.dropped(number)

    def _spool_lost(self) -> None:
        for shard in self._spooled:
            self._coverages[shard].spool_lost()
        self._spooled.clear()


def _nothing() -> None:
    """A mark that closes a shard is waited for by nobody: without it less is known, and nothing wrong."""


def _pieces(batch: ShardMessages, size: int) -> list[ShardMessages]:
    if len(batch.messages) <= size:
        return [batch]
    runs = [batch.messages[start : start + size] for start in range(0, len(batch.messages), size)]
    return [ShardMessages(batch.shard, batch.version_epoch, run) for run in runs]
