"""The leader's side of delivery: numbered streams, subscriptions, and their continuation or reset.

A leader delivers to the servers that subscribed, not to those that its own view of the ring would choose. It queues
nothing per subscriber: a subscription is a cursor per shard into one common log. A cursor that the log has left behind
continues from the spool or is *reset*: the subscriber drops what it holds of the shard. So a slow subscriber costs no
memory and never delays a write.

A message that the leader publishes when it commits is only a faster copy. A message from the tailer is *guaranteed*: it
has a position in the binlog and is spooled. A subscriber that knows its position continues from there with any leader
whose shard is *linked*: the tailer has said that it sends what comes next to this leader and to no other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from tao.delivery.committed_messages import CommittedMessages
from tao.delivery.coverage import Coverage, UnconfirmedShards
from tao.delivery.message_log import MessageLog, Stream
from tao.delivery.settings import DeliverySettings
from tao.delivery.subscription import Later, Proof, Subscription
from tao.model.changes import ShardMessages
from tao.model.delivery import Delivery, Position, Span, SpoolMark, SpoolRow
from tao.model.errors import InternalError, Overloaded
from tao.model.ports import Spool


class Publisher:
    """All streams and subscriptions of one leader. Synchronous; a subscriber's ``deliver`` must not block."""

    def __init__(
        self,
        settings: DeliverySettings,
        incarnation: str,
        database_of: Callable[[int], str],
        spool: Spool | None = None,
        later: Later | None = None,
    ) -> None:
        """``incarnation`` names this run of this leader and no other, so that no stream name is ever used twice.
        ``database_of`` returns the name of a shard's database: each database has a tailer of its own, which knows
        nothing of other shards. Without ``spool`` messages are kept in memory only; without ``later`` no subscriber
        waits for a tailer."""
        self._settings = settings
        self._incarnation = incarnation
        self.database_of = database_of
        self._spool = spool
        self._later = later
        self._log = MessageLog(settings)
        self.committed = CommittedMessages(settings)
        """The messages of this leader's commits that its tailers have not come to."""
        self._streams: dict[int, Stream] = {}
        self._open_shards: defaultdict[str, set[int]] = defaultdict(set)  # by database: those of the streams
        self._coverages: dict[int, Coverage] = {}
        self._spooled: set[int] = set()  # shards of which the spool has every message after some position
        self._unconfirmed = UnconfirmedShards(database_of)
        self._reached: dict[str, tuple[str, int]] = {}  # by database
        self._restarts = 0
        self._subscriptions: dict[str, Subscription] = {}
        # In the order of subscription: the same requests then always have the same effects, in a simulation too.
        self._followed: dict[int, dict[Subscription, None]] = {}
        self._closed_counts: dict[str, int] = {"resets": 0, "continued": 0}  # of subscriptions that are closed
        self._proven: dict[str, int] = {}
        self._delivered_proofs: tuple[tuple[str, int], ...] = ()
        self._proofs_scheduled = False  # a later turn of the event loop delivers what has been proved by then
        self._proofs = 0
        self.on_published: Callable[[ShardMessages], None] = lambda _: None
        """Called with every published batch, but not with one that was published before; must be fast."""
        if spool is not None:
            for mark in spool.marks():
                self._coverages[mark.shard] = Coverage(mark.source, mark.head, mark.after)
                self._spooled.add(mark.shard)
            spool.on_change(self._on_spool_dropped, self._on_spool_lost)

    def open_shard(self, shard: int, generation: int, version_epoch: int) -> None:
        """Start the stream of a shard that this leader owns under ``generation``.

        Followers of an earlier stream continue by their binlog position, after which they find the writes that other
        leaders made between the two generations, or are reset. Opening the same generation again only raises the
        epoch."""
        stream = self._streams.get(shard)
        if stream is not None:
            if stream.generation == generation:
                stream.version_epoch = max(stream.version_epoch, version_epoch)
                return
            self._drop(stream)
        coverage = self._coverages.setdefault(shard, Coverage())
        name = f"{self._incarnation}/{generation}"
        self._streams[shard] = Stream(shard, name, generation, version_epoch, coverage)
        self._open_shards[self.database_of(shard)].add(shard)
        self._unconfirmed.add(shard)
        self._wake(shard)

    def close_shard(self, shard: int) -> None:
        """End the stream of a shard that this leader gives up. Subscribers receive ``refused`` for it."""
        stream = self._streams.get(shard)
        if stream is not None:
            self._drop(stream)
            self._wake(shard)

    def _drop(self, stream: Stream) -> None:
        shard = stream.shard
        del self._streams[shard]
        self._open_shards[self.database_of(shard)].discard(shard)
        self._log.drop(stream)
        self._unconfirmed.remove(shard)
        self._unlink(shard)

    def _unlink(self, shard: int) -> None:
        coverage = self._coverages[shard]
        if coverage.linked:
            coverage.unlink()
            if self._spool is not None and shard in self._spooled:
                # Nothing waits for this mark: if it is lost, less is known after a restart, but nothing is wrong.
                self._spool.append((), (self._mark(shard),), lambda: None)

    def _mark(self, shard: int) -> SpoolMark:
        coverage = self._coverages[shard]
        after = coverage.head if coverage.spool_after is None else coverage.spool_after
        return SpoolMark(shard, coverage.source, after, coverage.head, coverage.complete)

    def publish_relay(
        self, batches: Sequence[ShardMessages], spans: Sequence[Span], stored: Callable[[], None] | None = None
    ) -> None:
        """Publish a tailer's messages, which are everything that ``spans`` cover.

        ``stored`` is called when the messages are in the spool, or cannot be stored. Raises as `publish_all`, with
        nothing published."""
        for shard in (*(batch.shard for batch in batches), *(span.shard for span in spans)):
            self._require(shard)
        woken = [span.shard for span in spans if self._unconfirmed.is_unlinked(span.shard)]
        streams = {span.shard: self._streams[span.shard] for span in spans}
        linked = [span.shard for span in spans if self._extend_coverage(span)]
        # Spool the messages first: a woken subscriber may read the spool at once, and has to find these messages there.
        if self._spool is not None and stored is not None:
            rows = [
                SpoolRow(coverage.source, coverage.arriving, each)
                for batch in batches
                if batch.messages and batch.shard in self._spooled
                if (coverage := self._coverages[batch.shard]).linked
                for each in _split(batch, self._settings.max_delivery_messages)
            ]
            self._spool.append(rows, [self._mark(shard) for shard in linked if shard in self._spooled], stored)
        elif stored is not None:
            stored()
        self.publish_all(batches)
        woken.extend(shard for shard, stream in streams.items() if self._streams[shard] is not stream)
        # Followers of a newly linked or restarted stream receive its position even when there is no message for them.
        # This must come after the messages: a subscriber that received the position before the messages that it
        # covers would miss them if its connection broke in between.
        published = {batch.shard for batch in batches}
        linked_and_awaited = (shard for shard in linked if self._anyone_waits_for(shard))
        self._wake(*(shard for shard in (*woken, *linked_and_awaited) if shard not in published))
        if spans:
            self._schedule_proofs()

    def _schedule_proofs(self) -> None:
        """Deliver the proven times, together with those that are proved until then, if they have changed."""
        if self._later is None:
            self._deliver_proofs()
        elif not self._proofs_scheduled and tuple(self.proven.items()) != self._delivered_proofs:
            self._proofs_scheduled = True
            self._later(self._settings.gather_proofs_seconds, self._deliver_scheduled_proofs)

    def _deliver_scheduled_proofs(self) -> None:
        self._deliver_proofs()
        assert self._later is not None
        self._later(self._settings.proofs_seconds - self._settings.gather_proofs_seconds, self._end_proof_pause)

    def _end_proof_pause(self) -> None:
        self._proofs_scheduled = False
        self._schedule_proofs()

    def _deliver_proofs(self) -> None:
        """Deliver the proven times to all subscribers if they have changed for any database."""
        proof = self.proof
        if proof.proven != self._delivered_proofs:
            self._delivered_proofs = proof.proven
            self._proofs += 1
            for subscription in tuple(self._subscriptions.values()):
                subscription.pump(proof)

    def _anyone_waits_for(self, shard: int) -> bool:
        return any(subscription.waits_for(shard) for subscription in self._followed.get(shard, ()))

    def _extend_coverage(self, span: Span) -> bool:
        """Add the span to its shard's coverage. Returns whether the shard is linked."""
        shard = span.shard
        stream, coverage = self._streams[shard], self._coverages[shard]
        before = coverage.arriving  # the spool may lack what has come of the next transaction
        if coverage.extend(span):
            kept_after = before
        else:
            kept_after = coverage.memory_after
            if stream.must_be_gapless:
                self._restart(stream)
            else:
                stream.positions_after = stream.last
        self._unconfirmed.update(shard, coverage)
        if not coverage.linked:
            return False
        self._streams[shard].must_be_gapless = True
        if self._spool is not None and coverage.spool_after is None:
            coverage.spool_after = kept_after
            self._spooled.add(shard)
        return True

    def _restart(self, stream: Stream) -> None:
        """Start a new stream after a gap between two spans: followers have missed what other leaders received."""
        shard, coverage = stream.shard, stream.coverage
        after = coverage.memory_after
        self._log.drop(stream)
        coverage.memory_after = after
        self._restarts += 1
        name = f"{self._incarnation}/{stream.generation}.{self._restarts}"
        self._streams[shard] = Stream(shard, name, stream.generation, stream.version_epoch, coverage)

    def take_wanted(self, database: str) -> list[Span]:
        """Return the shards about which this leader asks the tailer of the database.

        For each shard the tailer is to say where it continues, and to send again what came after ``number`` (``after``
        is the same). A shard is returned once, and again after the tailer's next proof of time."""
        return self._unconfirmed.take_wanted(database, self._coverages)

    def request_replay(self, shard: int, source: str, reached: int) -> None:
        """Have the tailer send again what follows ``reached``, the position of a subscriber that waits for it."""
        coverage = self._coverages[shard]
        number = max(reached, coverage.head) if coverage.source == source and coverage.has_after(reached) else reached
        self._unconfirmed.request_replay(shard, source, number)

    def publish(self, messages: ShardMessages) -> None:
        """Number the messages and wake the shard's subscribers. Raises as `publish_all`."""
        self.publish_all((messages,))

    def publish_all(self, batches: Iterable[ShardMessages]) -> None:
        """Publish what one commit changed in several shards, in one delivery per subscriber where it fits.

        Raises `InternalError` for a shard that is not open, since its messages would silently reach no subscriber."""
        woken: dict[Subscription, None] = {}
        for batch in batches:
            stream = self._require(batch.shard)
            is_repeated = stream.holds(batch)
            self._log.append(stream, batch)
            if not is_repeated:
                self.on_published(batch)
            for subscription in self._followed.get(batch.shard, ()):
                subscription.mark_pending(batch.shard)
                woken[subscription] = None
        for subscription in woken:
            subscription.pump()

    def has_published(self, batch: ShardMessages) -> bool:
        """Return whether all of these messages, and not only equal ones, were published in the shard's stream."""
        stream = self._streams.get(batch.shard)
        return stream is not None and stream.holds(batch)

    def _require(self, shard: int) -> Stream:
        stream = self._streams.get(shard)
        if stream is None:
            raise InternalError(f"messages of shard {shard} cannot be published: its stream is not open")
        return stream

    def subscribe(
        self,
        subscriber: str,
        positions: Sequence[Position],
        deliver: Callable[[Delivery], None],
        *,
        takes_repeats: bool = False,
    ) -> Subscription:
        """Deliver the messages of these shards to ``subscriber`` from now on.

        The first delivery is made before this returns. It confirms each shard (continued from its position, or reset)
        or refuses it, up to `max_delivery_shards`; the deliveries of the next turns of the event loop have the others.
        A shard that none of them mentions waits for the tailer or the spool, and a later delivery confirms it.

        A second subscription of the same subscriber replaces the first, whose connection is broken or closing.
        ``deliver`` must not block. When it raises a `TaoError`, which it has to send to the subscriber, the
        subscription ends. ``takes_repeats``: as in `Subscription`. Raises `Overloaded` when there are too many
        subscribers."""
        former = self._subscriptions.get(subscriber)
        if former is None and len(self._subscriptions) >= self._settings.max_subscribers:
            raise Overloaded(
                f"this leader already has {self._settings.max_subscribers} subscribers, the bound max_subscribers"
            )
        if former is not None:
            former.close()
        subscription = Subscription(subscriber, self, deliver, self._settings, takes_repeats=takes_repeats)
        self._subscriptions[subscriber] = subscription
        subscription.add(positions)
        return subscription

    def prove(self, database: str, unix_ms: int, source: str = "", number: int = 0) -> None:
        """Record that every commit to this leader's shards of the database up to ``unix_ms``, and up to transaction
        ``number`` of ``source``, has been published.

        Subscribers receive this proof after their pending messages, with the proofs of other databases
        (`DeliverySettings.proofs_seconds`). A time older than the last one is ignored."""
        self._unconfirmed.ask_again(database)
        if source and (source, number) != self._reached.get(database):
            self._reached[database] = source, number
            for shard in self._open_shards[database]:
                self._coverages[shard].prove(source, number)
            if self._spool is not None:
                self._spool.prove(source, number)
        if unix_ms > self._proven.get(database, 0):
            self._proven[database] = unix_ms
            self._schedule_proofs()

    def forget_proofs(self, shards: Iterable[int]) -> None:
        """Forget what is proven of these shards, which a change of the topology has affected, and of their databases.

        Proofs about the former shards say nothing about the shards that are added, so new proofs are needed. The tailer
        may also have sent messages of these shards to another leader in between, so none of their positions counts
        until the tailer says where the shard continues."""
        affected = sorted(shards)
        databases = dict.fromkeys(map(self.database_of, affected))
        for database in databases:
            self._proven.pop(database, None)
            self._reached.pop(database, None)
            self._unconfirmed.ask_again(database)
        self._proofs += bool(databases)
        for shard in affected:
            stream = self._streams.get(shard)
            if stream is not None:
                self._unconfirmed.add(shard)
                self._unlink(shard)
                # Even when it was never linked: its followers may miss what another leader received since it was
                # opened.
                stream.must_be_gapless = stream.must_be_gapless or shard in self._followed

    @property
    def proven(self) -> Mapping[str, int]:
        """Database → the Unix milliseconds passed to `prove`, without the databases of which another leader may have
        received messages meanwhile."""
        return {name: unix_ms for name, unix_ms in self._proven.items() if self._unconfirmed.has_times(name)}

    def figures(self) -> dict[str, float]:
        """Return sizes and counts for metrics, named with their units."""
        live = self._subscriptions.values()
        pending = sum(subscription.pending for subscription in live)
        return {
            "log_messages": len(self._log),
            "log_bytes": self._log.bytes,
            "log_evicted_messages_total": self._log.evicted,
            "committed_bytes": self.committed.bytes,
            "references_entered_total": self.committed.entered,
            "references_missing_total": self.committed.missing,
            "open_shards": len(self._streams),
            "subscribers": len(self._subscriptions),
            "subscribed_shards": sum(subscription.followed for subscription in live),
            "pending_shards": pending,
            "owed_shards": pending,  # the former name
            "unacknowledged_bytes": sum(subscription.unacknowledged_bytes for subscription in live),
            "waiting_shards": sum(subscription.waiting for subscription in live),
            "unlinked_shards": self._unconfirmed.unlinked,
            "restarted_streams_total": self._restarts,
            "resets_total": self._closed_counts["resets"] + sum(subscription.resets for subscription in live),
            "continued_total": self._closed_counts["continued"] + sum(subscription.continued for subscription in live),
        }

    # ---- `tao.delivery.subscription.StreamSource`, for subscriptions ------------------------------------------------

    @property
    def log(self) -> MessageLog:
        """See `StreamSource`."""
        return self._log

    def stream(self, shard: int) -> Stream | None:
        """See `StreamSource`."""
        return self._streams.get(shard)

    @property
    def proof(self) -> Proof:
        """See `StreamSource`: what was passed to `prove`, without the positions of databases of which a shard is
        unconfirmed."""
        has_positions = self._unconfirmed.has_positions
        reached = tuple([position for name, position in self._reached.items() if has_positions(name)])
        return Proof(tuple(self.proven.items()), reached)

    @property
    def spool(self) -> Spool | None:
        """See `StreamSource`."""
        return self._spool

    @property
    def later(self) -> Later | None:
        """See `StreamSource`."""
        return self._later

    @property
    def proofs(self) -> int:
        """See `StreamSource`."""
        return self._proofs

    def follow(self, shard: int, subscription: Subscription) -> None:
        """See `StreamSource`."""
        self._followed.setdefault(shard, {})[subscription] = None

    def unfollow(self, shard: int, subscription: Subscription) -> None:
        """See `StreamSource`."""
        followers = self._followed.get(shard)
        if followers is not None:
            followers.pop(subscription, None)
            if not followers:
                del self._followed[shard]

    def remove(self, subscription: Subscription) -> None:
        """See `StreamSource`."""
        if self._subscriptions.get(subscription.subscriber) is subscription:
            del self._subscriptions[subscription.subscriber]
        self._closed_counts["resets"] += subscription.resets
        self._closed_counts["continued"] += subscription.continued

    def _wake(self, *shards: int) -> None:
        woken: dict[Subscription, None] = {}
        for shard in shards:
            for subscription in self._followed.get(shard, ()):
                subscription.mark_pending(shard)
                woken[subscription] = None
        for subscription in woken:
            subscription.pump()

    def _on_spool_dropped(self, shard: int, source: str, number: int) -> None:
        coverage = self._coverages.get(shard)
        if coverage is not None and coverage.source == source:
            coverage.note_spool_dropped(number)
        for subscription in self._followed.get(shard, ()):
            subscription.note_spool_dropped(shard, source, number)

    def _on_spool_lost(self) -> None:
        for shard in self._spooled:
            self._coverages[shard].note_spool_lost()
        self._spooled.clear()
        for subscription in self._subscriptions.values():
            subscription.note_spool_lost()


def _split(batch: ShardMessages, size: int) -> list[ShardMessages]:
    if len(batch.messages) <= size:
        return [batch]
    runs = [batch.messages[start : start + size] for start in range(0, len(batch.messages), size)]
    return [ShardMessages(batch.shard, batch.version_epoch, run) for run in runs]
