"""The server's side of one connection, independent of the transport: replies, unanswered requests, handler failures.

Both transports share it, so that a handler sees the same on both. A transport adds how an answer leaves (`transmit`)
and calls `receive` and `peer_gone`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from tao.model.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    OutcomeUnknown,
    Overloaded,
    TaoError,
    TooLarge,
)
from tao.wire.answer_parts import read_parts
from tao.wire.identity import PeerIdentity
from tao.wire.session import NO_DEADLINE_MS, Reply, RequestHandler, failure
from tao.wire.settings import ServingSettings
from tao.wire.v1 import session_pb2 as pb

_logger = logging.getLogger(__name__)


class ServedConnection(ABC):
    """One peer and its unanswered requests. Requests with a deadline and series are counted apart: a server that drains
    waits for requests with a deadline and not for series, which never end."""

    def __init__(self, handler: RequestHandler, settings: ServingSettings, peer: PeerIdentity) -> None:
        self.peer = peer
        self.closed = False
        self.unanswered = 0
        self.series = 0
        self._handler = handler
        self._settings = settings
        self._watched: dict[int, OpenReply] = {}
        self._idle_waiter: asyncio.Future[None] | None = None
        self._max_unanswered = settings.max_unanswered
        self._refused_for: TaoError | None = None
        """Why further requests are refused."""
        self._dismissed_at: float | None = None

    @abstractmethod
    def transmit(self, answer: pb.Answer) -> None:
        """Encode and send an answer. It must not raise, and is called only while not `closed`."""

    @property
    def unsent_bytes(self) -> int:
        """Return the bytes of answers that wait for the peer to read them."""
        return 0

    @property
    def has_unanswered(self) -> bool:
        """Whether a request with a deadline, of those that have arrived, has had no answer yet."""
        return self.unanswered > 0

    def receive(self, request: pb.Request) -> None:
        """Pass a request to the handler, unless it is rejected here. Does not raise."""
        kind = request.WhichOneof("body")
        if kind == "forget":
            watched = self._watched.get(request.forget.forgotten_number)
            if watched is not None:
                watched.forgotten()
            return
        if kind == "acknowledge":
            self._run(self._handler.handle, request, OpenReply(self, request.number, finished=True))
            return
        if self.unanswered + self.series >= self._max_unanswered:
            full = Overloaded(f"{self._max_unanswered} requests are unanswered already; wait")
            self._refuse(request, self._refused_for or full)
        elif request.deadline_ms == 0:
            self._refuse(request, DeadlineExceeded("the request had expired when it was sent (deadline_ms is 0)"))
        elif kind is None:
            self._refuse(request, InvalidArgument("the request has no body that this version of the server knows"))
        else:
            endless = request.deadline_ms == NO_DEADLINE_MS
            if endless:
                self.series += 1
            else:
                self.unanswered += 1
            self._run(self._handler.handle, request, OpenReply(self, request.number, endless=endless))

    def receive_rest(self, request: pb.Request, answer_rest: Callable[[pb.Request, Reply], None]) -> None:
        """Have the rest of a request answered, of which a part was answered at once: see `AnswerAtOnce`. Does not
        raise."""
        self.unanswered += 1
        self._run(answer_rest, request, OpenReply(self, request.number))

    def finished(self, reply: OpenReply) -> None:
        """Remove a reply that has had its last answer, or whose request was cancelled."""
        if self._watched:
            self._watched.pop(reply.number, None)
        if reply.endless:
            self.series -= 1
            return
        self.unanswered -= 1
        if self._idle_waiter is not None and not self.unanswered and not self._idle_waiter.done():
            self._idle_waiter.set_result(None)

    def watch(self, reply: OpenReply) -> None:
        """Call this reply when the peer leaves or forgets the request."""
        self._watched[reply.number] = reply

    @abstractmethod
    def go_away(self) -> None:
        """Ask the peer to send new requests on a new connection."""

    def dismiss(self, refusal: TaoError | None, now: float) -> bool:
        """Send a peer away whose credential is refused, or keep it after all (None). Returns whether its connection has
        to end; otherwise call this again once it `is_leaving` no more. ``now``: the time in seconds.

        The peer has `leaving_seconds` to leave. Then its further requests are refused, and the connection ends when
        those under way have been answered, and those that have arrived refused: a write that is cut off leaves its
        caller without its outcome."""
        if refusal is None:
            self._dismissed_at = self._refused_for = None
            self._max_unanswered = self._settings.max_unanswered
            return False
        if self._dismissed_at is None:
            self._dismissed_at = now
            self.go_away()
            return False
        self._refused_for, self._max_unanswered = refusal, 0
        return not self.is_leaving(now)

    def is_leaving(self, now: float) -> bool:
        """Return whether the peer was dismissed and has time left."""
        if self._dismissed_at is None:
            return False
        settings, seconds = self._settings, now - self._dismissed_at
        if self._refused_for is None:
            return seconds < settings.leaving_seconds
        return self.has_unanswered and seconds < settings.leaving_seconds + settings.unary_deadline_seconds

    async def until_idle(self) -> None:
        """Wait until every request with a deadline has been answered."""
        if self.unanswered and not self.closed:
            if self._idle_waiter is None or self._idle_waiter.done():
                self._idle_waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._idle_waiter])

    def peer_gone(self) -> None:
        """Close all replies, because the peer has gone."""
        if self.closed:
            return
        self.closed = True
        watched, self._watched = self._watched, {}
        for reply in watched.values():
            reply.forgotten()
        if self._idle_waiter is not None and not self._idle_waiter.done():
            self._idle_waiter.set_result(None)

    def fitting(self, answer: pb.Answer) -> Sequence[bytes]:
        """Return the encoded answer: several messages for a read that is too large for one, an error in place of any
        other answer that is."""
        message = answer.SerializeToString()
        settings = self._settings
        limit = settings.max_message_bytes
        # Half of what may be unsent: a read that can be repeated must not be what disconnects its client.
        room = settings.max_unsent_bytes // 2 - self.unsent_bytes
        if len(message) <= limit and len(message) <= room:
            return (message,)
        if answer.HasField("read"):
            parts = read_parts(answer, limit // 2, limit // 4 * 3, max(0, room))
            encoded = [part.SerializeToString() for part in parts]
            if all(len(each) <= limit for each in encoded):
                return encoded
        if len(message) <= limit:
            return (message,)
        error: TaoError = TooLarge(f"the answer has {len(message)} bytes, more than {limit}; ask for less at a time")
        if answer.HasField("write"):
            # Part of it is committed, so the error must not sound as if nothing were.
            error = OutcomeUnknown(
                f"the answer has {len(message)} bytes, more than {limit}: read to find out whether it was written"
            )
        instead = failure(error)
        instead.number, instead.more = answer.number, answer.more
        return (instead.SerializeToString(),)

    def _refuse(self, request: pb.Request, error: TaoError) -> None:
        answer = failure(error)
        answer.number = request.number
        self.transmit(answer)

    def _run(self, handle: Callable[[pb.Request, Reply], None], request: pb.Request, reply: OpenReply) -> None:
        try:
            handle(request, reply)
        except TaoError as error:
            reply.fail(error)
        except Exception:
            _logger.exception("the handler failed on a %s request of %s", request.WhichOneof("body"), self.peer)
            reply.fail(InternalError("the server failed on this request; see its log"))


class OpenReply:
    """Implements `tao.wire.session.Reply`. A request that has no answer is ``finished`` from the start."""

    __slots__ = ("_callbacks", "_connection", "_finished", "_forgotten", "endless", "number")

    def __init__(
        self, connection: ServedConnection, number: int, *, endless: bool = False, finished: bool = False
    ) -> None:
        self._connection = connection
        self._finished = finished
        self._forgotten = False
        self._callbacks: list[Callable[[], None]] | None = None
        self.number = number
        self.endless = endless

    @property
    def peer(self) -> PeerIdentity:
        return self._connection.peer

    @property
    def closed(self) -> bool:
        return self._forgotten or self._connection.closed

    def send(self, answer: pb.Answer) -> None:
        """See `Reply.send`."""
        if self._finished:
            if not self.closed:
                _logger.error("an answer after the last one (request %d of %s) was dropped", self.number, self.peer)
            return
        connection = self._connection
        if not answer.more:
            self._finished = True
            self._callbacks = None
            connection.finished(self)
        if not connection.closed:
            answer.number = self.number
            connection.transmit(answer)

    def fail(self, error: TaoError) -> None:
        """Answer with an error, unless the last answer has been sent."""
        if not self._finished:
            self.send(failure(error))

    def on_close(self, callback: Callable[[], None]) -> None:
        """See `Reply.on_close`."""
        if self.closed:
            callback()
        elif not self._finished:
            if self._callbacks is None:
                self._callbacks = []
                self._connection.watch(self)
            self._callbacks.append(callback)

    def forgotten(self) -> None:
        """Close the reply, because the peer no longer waits for it."""
        if self._finished:
            return
        self._finished = self._forgotten = True
        self._connection.finished(self)
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            try:
                callback()
            except Exception:
                _logger.exception("a close callback failed (request %d of %s)", self.number, self.peer)
