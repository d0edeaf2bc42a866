"""The one port of both transports: numbered requests, answers in any order.

A role that asks holds a `Session`; a role that serves is a `RequestHandler` and answers through a `Reply`. Neither
knows whether gRPC or frames carried the message. Everything on the way is synchronous, because a cache hit must not
cost a task: answers come by callback, and `Session.ask` is there for callers that prefer to await.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, runtime_checkable

from tao.model.errors import TaoError
from tao.wire.convert import error_to_pb
from tao.wire.identity import PeerIdentity
from tao.wire.v1 import session_pb2 as pb

NO_DEADLINE_MS: Final = (1 << 32) - 1
"""``Request.deadline_ms`` of a series."""

UNANSWERED_KINDS: Final = frozenset({"acknowledge", "forget"})
"""Bodies of requests that have no answer."""

AnswerHandler = Callable[[pb.Answer], None]
"""Called once per answer, never from within `Session.send`. Exactly one call has ``more=False``. It may carry an
``error`` of the server or of the connection."""


class Observer(Protocol):
    """Observes how a server performs. It is called for every request with a deadline, once per message, so it must be
    cheap."""

    def answered(self, seconds: float) -> None:
        """Note that the first part of an answer came this many seconds after its request was sent; minus infinity for
        further parts, and for answers that come too late."""

    def timed_out(self, seconds: float) -> None:
        """Note that no part of an answer came in all the time that its request had."""


class Session(Protocol):
    """The client's side of one connection."""

    observer: Observer | None
    """The observer of requests; none at first."""

    is_open: bool
    """Whether new requests may be sent. It is False also while the server drains: earlier requests are still
    answered."""

    @property
    def server_name(self) -> str:
        """Return the server's name for itself."""

    def send(self, request: pb.Request, timeout_seconds: float, on_answer: AnswerHandler) -> int:
        """Fill in ``number`` and ``deadline_ms``, send the request, and return the number. Never raises: every failure
        becomes an answer with ``error``.

        ``timeout_seconds=math.inf`` is for series (Watch, Subscribe). An Acknowledge has no answer. A Forget has none
        either; it ends the request that ``on_answer`` sent under that number and no other, because numbers of an
        earlier session mean other requests here.

        When the connection breaks, a request fails as UNAVAILABLE; when its time is up, as DEADLINE_EXCEEDED. A *write*
        that may have reached the server fails as OUTCOME_UNKNOWN instead. TOO_LARGE and OVERLOADED mean that nothing
        was sent.
        """

    def hold(self) -> None:
        """Write what is sent from now on when `flush` is called, and not in the next turn of the loop. Each call must
        be followed by one of `flush` in the same turn."""

    def flush(self) -> None:
        """Write at once what has been sent."""

    def forget(self, number: int) -> None:
        """Drop the request: the caller wants no more answers. A series is ended at the server, too."""

    async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
        """Send the request and wait for the whole answer; parts are joined. Raises the `TaoError` that the answer
        carries. Cancelling it forgets the request."""

    async def retire(self) -> None:
        """Accept no new requests, end series as UNAVAILABLE, wait for the other answers until their deadlines, then
        close."""

    async def close(self) -> None:
        """Close the session; unanswered requests fail."""


class Reply(Protocol):
    """The way in which the server answers one request. The handler may keep it as long as the answer takes."""

    @property
    def peer(self) -> PeerIdentity:
        """Return the identity of the peer that sent the request."""

    @property
    def closed(self) -> bool:
        """Return whether the peer has gone or has forgotten the request. Work for it may stop."""

    def send(self, answer: pb.Answer) -> None:
        """Send a part (``more=True``) or the last part of the answer, with its ``number`` filled in. The message is
        encoded at once, so it may be changed and sent to others. It is dropped when the peer has gone."""

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call back once when `closed` becomes true before the last answer was sent; at once when it already is."""


class PassedReply:
    """A `Reply` to the peer of another one. A class that extends it decides in `send` what is answered."""

    def __init__(self, reply: Reply) -> None:
        self._reply: Final = reply
        self.peer: Final = reply.peer
        """The identity of the peer that sent the request."""

    @property
    def closed(self) -> bool:
        """See `Reply.closed`."""
        return self._reply.closed

    def on_close(self, callback: Callable[[], None]) -> None:
        """See `Reply.on_close`."""
        self._reply.on_close(callback)


class RequestHandler(Protocol):
    """The server's side of a role."""

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Answer now, or start tasks that will. A `TaoError` raised here becomes the answer; any other exception is
        logged and answered as INTERNAL."""


class AnswerAtOnce(NamedTuple):
    """What a server answers before it has made a message of the request."""

    encoded: bytes
    """The answer with its number, or the first part of it; empty when nothing can be answered yet."""

    answer_rest: Callable[[pb.Request, Reply], None] | None
    """Called once, after ``encoded`` is sent, answers what is not in it; as `RequestHandler.handle`. None when
    ``encoded`` is the whole answer."""


@runtime_checkable
class AtOnceHandler(Protocol):
    """A `RequestHandler` that also answers some requests without taking them apart into messages."""

    def answer_at_once(self, request: bytes, peer: PeerIdentity) -> AnswerAtOnce | None:
        """Return the answer to an encoded request; None when the request is for `handle`, which would give the same
        answer."""


def failure(error: TaoError) -> pb.Answer:
    """Return the last answer to a request that failed as a whole."""
    return pb.Answer(error=error_to_pb(error))
