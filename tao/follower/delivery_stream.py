"""The stream of deliveries from one leader to one follower: subscribed once, acknowledged, and ended on both sides.

A leader that refuses some shards, or leaves a gap in them, goes on with the others; the follower subscribes those again
and adds them to the stream, which the protocol calls a series. The stream ends with the connection, or when the
follower closes it. One acknowledgement covers all deliveries before it, and only a leader that has sent as much as it
may waits for it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from tao.model.delivery import Delivery, Position
from tao.wire.convert import delivery_from_pb, error_from_pb, position_to_pb
from tao.wire.session import AnswerHandler
from tao.wire.v1 import session_pb2 as pb


class DeliveringLink(Protocol):
    """The part of a link that a stream needs."""

    def send(self, request: pb.Request, timeout_seconds: float, on_answer: AnswerHandler) -> None:
        """See `tao.wire.links.Link.send`."""


class DeliveryStream:
    """A subscription of some shards at one leader.

    ``ended`` is set when nothing more will come, and ``reason`` is why the leader or the connection ended it.
    ``failed``: a delivery could not be applied, so that the cache's entries of these shards cannot be trusted.
    """

    def __init__(
        self,
        link: DeliveringLink,
        subscriber: str,
        positions: Sequence[Position],
        receive: Callable[[Delivery], set[int]],
        timeout_seconds: float,
        acknowledge_seconds: float,
        acknowledge_messages: int,
    ) -> None:
        """``receive`` applies a delivery and returns the shards to subscribe again. Deliveries are acknowledged after
        ``acknowledge_seconds`` or ``acknowledge_messages`` messages."""
        self.ended: Final = asyncio.Event()
        self.reason = ""
        self.failed = False
        self._link: Final = link
        self._subscriber: Final = subscriber
        self._receive: Final = receive
        self._timeout_seconds: Final = timeout_seconds
        self._acknowledge_seconds: Final = acknowledge_seconds
        self._acknowledge_messages: Final = acknowledge_messages
        self._applied = 0  # the number of the last delivery
        self._unacknowledged_messages = 0
        self._timer: asyncio.TimerHandle | None = None
        self._number = 0
        self._last_came = False
        self._missing: set[int] = set()
        link.send(self._subscribe(positions), math.inf, self._take)

    def ask_again(self, positions_for: Callable[[Iterable[int]], Sequence[Position]]) -> None:
        """Subscribe again the shards that were refused or had a gap, if there are any, and add them to the stream."""
        if self._missing and self._number and not self.ended.is_set():
            asked, self._missing = self._missing, set()
            request = self._subscribe(positions_for(sorted(asked)), self._number)
            self._link.send(request, self._timeout_seconds, lambda answer: self._added(asked, answer))

    def close(self) -> None:
        """End the stream, and say so to the leader, which would go on for ever otherwise."""
        self.ended.set()
        self._stop_timer()
        self._forget()

    def _subscribe(self, positions: Sequence[Position], series: int = 0) -> pb.Request:
        asked = [position_to_pb(position) for position in positions]
        return pb.Request(subscribe=pb.Subscribe(subscriber=self._subscriber, positions=asked, series=series))

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
        self._applied = delivery.number
        self._unacknowledged_messages += sum([len(part.messages.messages) for part in delivery.shards if part.messages])
        if self._unacknowledged_messages >= self._acknowledge_messages:
            self._acknowledge()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._acknowledge_seconds, self._acknowledge)

    def _acknowledge(self) -> None:
        self._stop_timer()
        self._unacknowledged_messages = 0
        if not self.ended.is_set():
            acknowledge = pb.Acknowledge(subscribe_number=self._number, delivery_number=self._applied)
            self._link.send(pb.Request(acknowledge=acknowledge), self._timeout_seconds, _no_answer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _added(self, asked: set[int], answer: pb.Answer) -> None:
        if not answer.HasField("error"):
            return
        error = error_from_pb(answer.error)
        if error.retryable:
            self._missing |= asked
        else:
            # The leader does not know this stream any more.
            self.reason = error.message
            self.ended.set()

    def _forget(self) -> None:
        if self._number and not self._last_came:
            self._last_came = True
            forget = pb.Request(forget=pb.Forget(forgotten_number=self._number))
            self._link.send(forget, self._timeout_seconds, self._take)


def _no_answer(_: pb.Answer) -> None:
    """Ignore the answer: an acknowledgement has none, and when it cannot be sent, the stream ends with a reason of its
    own."""
