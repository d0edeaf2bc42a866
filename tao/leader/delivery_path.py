"""Deliver this leader's messages to subscribed caches: its publisher with the spool, and requests of subscribers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from tao.delivery.publisher import Publisher
from tao.delivery.spool import SqliteSpool
from tao.delivery.subscription import Subscription
from tao.leader.settings import LeaderSettings
from tao.model.delivery import Delivery
from tao.model.errors import InternalError, InvalidArgument, Unavailable
from tao.model.ports import Clock
from tao.observability.logs import Logger
from tao.observability.metrics import Metrics
from tao.wire.convert import delivery_to_pb, position_from_pb
from tao.wire.session import Reply, failure
from tao.wire.v1 import session_pb2 as pb

_MANY_MESSAGES: Final = 64
"""Messages from which on a delivery is large: some 4 KB, which take a subscriber half a millisecond."""


class SpooledPublisher:
    """A publisher that is ready, and the spool behind it."""

    def __init__(self, publisher: Publisher, spool: SqliteSpool | None) -> None:
        self.publisher: Final = publisher
        self._spool: Final = spool

    async def close(self) -> None:
        """Store the messages that are on their way to the spool."""
        if self._spool is not None:
            await self._spool.close()

    def figures(self) -> dict[str, object]:
        """Return the numbers for `/stats`."""
        spool = self._spool
        if spool is None:
            return {**self.publisher.figures(), "spool": None}
        kept = {"bytes": spool.bytes, "rows_total": spool.rows, "dropped_rows_total": spool.dropped_rows}
        faults = {"failures_total": spool.failures, "set_aside_total": spool.set_aside, "trouble": spool.trouble}
        return {**self.publisher.figures(), "spool": {**kept, **faults}}

    def register(self, metrics: Metrics) -> None:
        """Register the metrics."""
        for name, help_text in (
            ("log_messages", "Messages kept for subscribers that reconnect."),
            ("log_bytes", "Estimated memory of kept messages."),
            ("committed_bytes", "Estimated memory of messages of own commits that the tailer has not come to."),
            ("pending_shards", "Subscribed shards with messages that are not delivered yet."),
            ("owed_shards", "The former name of `delivery_pending_shards`."),
            ("unacknowledged_bytes", "Bytes sent to subscribers and not acknowledged."),
            (
                "waiting_shards",
                "Subscribed shards that wait for the tailer or the spool before they are continued or reset.",
            ),
            ("unlinked_shards", "Open shards whose position in the binlog the tailer has not reported yet."),
        ):
            metrics.gauge(f"delivery_{name}", help_text, partial(self.figure, name))
        metrics.gauge_family(
            "subscribed_shards_total",
            "Subscriptions, by outcome: continued by the position in the binlog, or reset (cold); and streams "
            "restarted because another leader had received messages between two relays.",
            "outcome",
            lambda: {
                "continued": self.figure("continued_total"),
                "reset": self.figure("resets_total"),
                "stream_restarted": self.figure("restarted_streams_total"),
            },
        )
        metrics.gauge_family(
            "relay_references_total",
            "Transactions of a shard that a tailer has named without their messages: this leader has entered its own "
            "messages, or was missing them.",
            "outcome",
            lambda: {
                "entered": self.figure("references_entered_total"),
                "missing": self.figure("references_missing_total"),
            },
        )
        spool = self._spool
        if spool is None:
            return
        metrics.gauge("spool_bytes", "Size of the encoded messages in the spool.", lambda: spool.bytes)
        metrics.gauge_family(
            "spool_rows_total",
            "Rows stored, and rows dropped because of their age or the spool's size.",
            "event",
            lambda: {"stored": spool.rows, "dropped": spool.dropped_rows},
        )
        metrics.gauge_family(
            "spool_faults_total",
            "Failures of the disk, and unreadable files set aside.",
            "fault",
            lambda: {"failure": spool.failures, "set_aside": spool.set_aside},
        )

    def figure(self, name: str) -> float:
        """Return one value of `Publisher.figures`."""
        return self.publisher.figures()[name]


async def open_publisher(
    settings: LeaderSettings, database_of: Callable[[int], str], clock: Clock, log: Logger
) -> SpooledPublisher:
    """Open the spool, if one is configured, and a publisher that continues from it."""
    spool = None
    if settings.spool.folder is not None:
        spool = SqliteSpool(settings.spool.folder, settings.spool, log)
        await spool.open()
    # The process id and time make the names of streams unique to this run of this leader.
    incarnation = f"{settings.name}-{os.getpid()}-{clock.unix_ms()}"
    return SpooledPublisher(Publisher(settings.delivery, incarnation, database_of, spool, _later), spool)


def _later(seconds: float, do: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(seconds, do)


class Subscribers:
    """Handles Subscribe and Acknowledge requests. A subscriber has one series of deliveries, the newest."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher: Final = publisher
        self._series: dict[str, _Series] = {}
        self._proved = Delivery(0), pb.Delivery()  # the last delivery that only proves, and what it was converted into

    def subscribe(self, request: pb.Request, reply: Reply) -> None:
        """Deliver to the caller from now on, or add shards to the series that it names. Raises `InvalidArgument`."""
        asked = request.subscribe
        name = reply.peer.name
        if asked.subscriber != name:
            raise InvalidArgument(
                f"{name!r} cannot subscribe as {asked.subscriber!r}; a server subscribes under its own name"
            )
        positions = [position_from_pb(position) for position in asked.positions]
        known = self._series.get(name)
        if asked.series:
            if known is None or known.number != asked.series:
                raise InvalidArgument(f"series {asked.series} of {name} has ended; subscribe again")
            known.subscription.add(positions)
            reply.send(pb.Answer(applied=pb.Applied()))
            return

        outgoing = _Outgoing(reply)

        def deliver(delivery: Delivery) -> None:
            # Converted at once: a delivery that failed later would be covered by the next proof, unnoticed.
            try:
                answer = pb.Answer(more=True, delivery=self._converted(delivery))
            except Exception as error:
                failed = InternalError(f"a delivery to {name} could not be encoded, its series ends: {error!r}")
                outgoing.add(failure(failed))
                raise failed from error
            outgoing.add(answer, _is_large(delivery))

        subscription = self._publisher.subscribe(name, positions, deliver, takes_repeats=asked.takes_repeats)
        if known is not None:
            known.reply.send(failure(Unavailable(f"{name} has a newer subscription")))
        self._series[name] = series = _Series(request.number, subscription, reply)
        reply.on_close(lambda: self._ended(name, series))

    def acknowledge(self, request: pb.Request, reply: Reply) -> None:
        """Record that the caller has applied a delivery."""
        known = self._series.get(reply.peer.name)
        if known is not None and known.number == request.acknowledge.subscribe_number:
            known.subscription.acknowledge(request.acknowledge.delivery_number)

    def _converted(self, delivery: Delivery) -> pb.Delivery:
        """Convert a delivery; one proof, which goes to every subscriber, only once."""
        last, converted = self._proved
        if delivery.shards or delivery.refused or not delivery.proven:
            return delivery_to_pb(delivery)
        if delivery.proven is not last.proven or delivery.reached is not last.reached:
            converted = delivery_to_pb(delivery)
            self._proved = delivery, converted
        converted.delivery_number = delivery.number  # the answer has a copy
        return converted

    def _ended(self, name: str, series: _Series) -> None:
        series.subscription.close()
        if self._series.get(name) is series:
            del self._series[name]


class _Outgoing:
    """The deliveries of one series on their way to the subscriber, in order.

    They are sent in the next turn of the loop, when the writer is answered, too: mostly both use this connection, and
    what is sent in one turn wakes the receiver once. A large one is sent at once. Its receiver then applies it while
    the answers to its many writers are made."""

    def __init__(self, reply: Reply) -> None:
        self._reply: Final = reply
        self._unsent: list[pb.Answer] = []

    def add(self, answer: pb.Answer, is_large: bool = False) -> None:
        self._unsent.append(answer)
        if is_large:
            self._send()
        elif len(self._unsent) == 1:
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        answers, self._unsent = self._unsent, []
        for answer in answers:
            self._reply.send(answer)


def _is_large(delivery: Delivery) -> bool:
    return sum([len(part.messages.messages) for part in delivery.shards if part.messages]) >= _MANY_MESSAGES


@dataclass(frozen=True, slots=True, eq=False)
class _Series:
    """The deliveries of one subscription to one subscriber."""

    number: int
    subscription: Subscription
    reply: Reply
