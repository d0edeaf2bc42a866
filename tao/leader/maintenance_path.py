"""What this leader tells other caches: deliveries to those who subscribed (DESIGN.md §7)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from tao.delivery.publisher import Publisher
from tao.delivery.subscription import Subscription
from tao.model.delivery import Delivery
from tao.model.errors import InternalError, InvalidArgument, Unavailable
from tao.wire.convert import delivery_to_pb, position_from_pb
from tao.wire.session import Reply, failure
from tao.wire.v1 import session_pb2 as pb


class Subscribers:
    """Subscribe and Acknowledge requests, onto the publisher. A subscriber has one series, the newest."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher: Final = publisher
        self._series: dict[str, _Series] = {}

    def subscribe(self, request: pb.Request, reply: Reply) -> None:
        """Deliver to the caller from now on, or add shards to the series that it names. Raises `InvalidArgument`."""
        asked = request.subscribe
        name = reply.peer.name
        if asked.subscriber != name:
            raise InvalidArgument(f"{name!r} cannot subscribe as {asked.subscriber!r}: its messages would go astray")
        positions = [position_from_pb(position) for position in asked.positions]
        loop = asyncio.get_running_loop()
        known = self._series.get(name)
        if asked.series:
            if known is None or known.number != asked.series:
                raise InvalidArgument(f"series {asked.series} of {name} is over: subscribe anew")
            known.subscription.add(positions)
            reply.send(pb.Answer(applied=pb.Applied()))
            return

        def deliver(delivery: Delivery) -> None:
            # Converted at once: a delivery that got lost later would be covered by the next proof, unnoticed. Sent in
            # the next turn of the loop, when the writer is answered, too: mostly through this connection, and what is
            # sent in one turn is one message to whoever has to wake up for it.
            try:
                answer = pb.Answer(more=True, delivery=delivery_to_pb(delivery))
            except Exception as error:
                failed = InternalError(f"a delivery to {name} could not be encoded, its series ends: {error!r}")
                loop.call_soon(reply.send, failure(failed))
                raise failed from error
            loop.call_soon(reply.send, answer)

        subscription = self._publisher.subscribe(name, positions, deliver)
        if known is not None:
            known.reply.send(failure(Unavailable(f"{name} has subscribed anew")))
        self._series[name] = series = _Series(request.number, subscription, reply)
        reply.on_close(lambda: self._ended(name, series))

    def acknowledge(self, request: pb.Request, reply: Reply) -> None:
        """The caller has applied a delivery."""
        known = self._series.get(reply.peer.name)
        if known is not None and known.number == request.acknowledge.subscribe_number:
            known.subscription.acknowledge(request.acknowledge.delivery_number)

    def _ended(self, name: str, series: _Series) -> None:
        series.subscription.close()
        if self._series.get(name) is series:
            del self._series[name]


@dataclass(frozen=True, slots=True, eq=False)
class _Series:
    number: int
    subscription: Subscription
    reply: Reply
