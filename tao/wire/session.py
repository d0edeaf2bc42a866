"""The one port of both transports: numbered requests, answers in any order (DESIGN.md §11).

A role that asks holds a `Session`; a role that serves is a `RequestHandler` and answers through a `Reply`. Neither
learns whether gRPC or frames carried the message. Everything on the way is synchronous, because a cache hit must not
cost a task: answers come by callback, and whoever prefers to wait uses `Session.ask`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from tao.model.errors import TaoError
from tao.wire.convert import error_to_pb
from tao.wire.identity import PeerIdentity
from tao.wire.v1 import session_pb2 as pb

NO_DEADLINE_MS: Final = (1 << 32) - 1
"""``Request.deadline_ms`` of a series."""

UNANSWERED_KINDS: Final = frozenset({"acknowledge", "forget"})
"""Bodies of requests that have no answer."""

AnswerHandler = Callable[[pb.Answer], None]
"""Called once per answer, never from within `Session.send`. Exactly one call has ``more=False``, and it may carry an
``error``: of the server, or of the way there."""


class Observer(Protocol):
    """Who wants to know how a server does. Told of every request with a deadline, cheaply: once per message."""

    def answered(self, seconds: float) -> None:
        """The first part of an answer came so long after its request was sent; minus infinity for further parts,
        and for what comes too late."""

    def timed_out(self, seconds: float) -> None:
        """Nothing of an answer came in all the time that its request had."""


class Session(Protocol):
    """The client's side of one connection."""

    observer: Observer | None
    """Told how requests fare; nobody at first."""

    @property
    def is_open(self) -> bool:
        """New requests may be sent. False also while the server drains: what was sent before is still answered."""

    @property
    def server_name(self) -> str:
        """As the server calls itself."""

    def send(self, request: pb.Request, timeout_seconds: float, on_answer: AnswerHandler) -> int:
        """Fill in ``number`` and ``deadline_ms``, send, and return the number. Never raises: what goes wrong becomes an
        answer with ``error``.

        ``timeout_seconds=math.inf`` is for series (Watch, Subscribe). An Acknowledge has no answer, and neither
        has a Forget, which ends what ``on_answer`` has asked under that number and nothing else: numbers of a session
        before mean others here. A *write* that may
        have reached the server fails as OUTCOME_UNKNOWN, everything else as UNAVAILABLE when the connection breaks and
        as DEADLINE_EXCEEDED when its time is up; TOO_LARGE and OVERLOADED mean that nothing was sent."""

    def forget(self, number: int) -> None:
        """The caller wants no more answers of that number. A series is ended at the server, too."""

    async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
        """Send and wait for the whole answer; one that comes in parts is put together. Raises the `TaoError` that the
        answer carries. Cancelling it forgets the request."""

    async def retire(self) -> None:
        """Take no new requests, end series as UNAVAILABLE, wait for the other answers until their deadlines, close."""

    async def close(self) -> None:
        """Close; requests unanswered fail."""


class Reply(Protocol):
    """How the server answers one request; given to the handler with it. May be kept as long as the answer takes."""

    @property
    def peer(self) -> PeerIdentity:
        """Who asked."""

    @property
    def closed(self) -> bool:
        """Nobody waits any more: the peer is gone or has forgotten the request. Work for it may stop."""

    def send(self, answer: pb.Answer) -> None:
        """Send a part (``more=True``) or the last of the answer. Fills in ``number``; the message is encoded at once,
        so it may be changed and sent to others. Dropped when nobody waits."""

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call back once when `closed` becomes true before the last answer was sent; at once when it already is."""


class RequestHandler(Protocol):
    """What a role serves."""

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Answer now, or start tasks that will. A `TaoError` raised here becomes the answer; any other exception is
        logged and answered as INTERNAL."""


def failure(error: TaoError) -> pb.Answer:
    """The last answer to a request that failed as a whole."""
    return pb.Answer(error=error_to_pb(error))
