"""`Links` without a network: servers of one process call each other, and a test can hold their messages back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import cast

from tao.model.errors import TaoError, Unavailable
from tao.model.topology import CacheServer
from tao.wire.client_session import Waiter, to_deadline_ms
from tao.wire.identity import PeerIdentity
from tao.wire.links import Links
from tao.wire.session import NO_DEADLINE_MS, UNANSWERED_KINDS, AnswerHandler, RequestHandler, failure
from tao.wire.v1 import session_pb2 as pb


def _role_of(name: str) -> str:
    """Return the role of a server, from the names that the rigs give: leader-1, follower-1a, client."""
    own = ("client", "operator", "watcher", "worker", "tailer")
    return name if name in own else "leader" if name.startswith("leader") else "follower"


class MemoryReply:
    """A `Reply` in memory. Answers travel as bytes, as over a network."""

    def __init__(
        self, on_answer: Callable[[pb.Answer], None], number: int = 1, peer: str = "client", caller: str = ""
    ) -> None:
        self._on_answer = on_answer
        self._number = number
        self._on_close: list[Callable[[], None]] = []
        self._peer = PeerIdentity(peer, _role_of(peer), caller=caller)
        self.closed = False

    @property
    def peer(self) -> PeerIdentity:
        return self._peer

    def send(self, answer: pb.Answer) -> None:
        if not self.closed:
            self.closed = not answer.more
            answer.number = self._number
            self._on_answer(pb.Answer.FromString(answer.SerializeToString()))

    def on_close(self, callback: Callable[[], None]) -> None:
        self._on_close.append(callback)

    def close(self) -> None:
        """Note that the peer is gone."""
        self.closed = True
        for callback in self._on_close:
            callback()


class MemoryLink:
    """A link to one server.

    ``hold_requests`` and ``hold_answers`` name kinds of messages that wait in ``held`` for `let_go`; ``down`` fails
    what is sent; ``faults`` fail the next requests of a kind.
    """

    def __init__(self, name: str, caller: str) -> None:
        self.name = name
        self.caller = caller
        self.handler: RequestHandler | None = None
        self.down = False
        self.hold_requests: set[str] = set()
        self.hold_answers: set[str] = set()
        self.held: list[Callable[[], None]] = []
        self.faults: dict[str, list[TaoError]] = {}
        self.sent: list[pb.Request] = []
        self.replies: dict[int, MemoryReply] = {}
        self._last = 0

    @property
    def is_down(self) -> bool:
        """Answer as `tao.wire.links.Link.is_down`, but without delay."""
        return self.down

    @property
    def is_impaired(self) -> bool:
        """Answer as `tao.wire.links.Link.is_impaired`."""
        return self.down

    def hold(self) -> None:
        """Send on: every message is an event of its own here."""

    def flush(self) -> None:
        """See `hold`."""

    def send(self, request: pb.Request, timeout_seconds: float, on_answer: AnswerHandler) -> int:
        self._last += 1
        number = self._last
        kind = request.WhichOneof("body") or ""
        copy = pb.Request.FromString(request.SerializeToString())
        copy.number = number
        copy.deadline_ms = NO_DEADLINE_MS if timeout_seconds == math.inf else to_deadline_ms(timeout_seconds)
        self.sent.append(copy)
        if kind == "forget":
            self.replies[copy.forget.forgotten_number].close()
            return number
        loop = asyncio.get_running_loop()
        faults = self.faults.get(kind)
        if faults:
            loop.call_soon(on_answer, failure(faults.pop(0)))
        elif self.down or self.handler is None:
            if kind not in UNANSWERED_KINDS:
                loop.call_soon(on_answer, failure(Unavailable(f"{self.name} is down")))
        elif kind in self.hold_requests:
            self.held.append(lambda: self._deliver(copy, kind, on_answer))
        else:
            loop.call_soon(self._deliver, copy, kind, on_answer)
        return number

    async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
        waiter = Waiter(asyncio.get_running_loop())
        self.send(request, timeout_seconds, waiter.take)
        return await waiter.answer()

    def let_go(self) -> None:
        """Deliver what was held, in order, and hold nothing from then on."""
        self.hold_requests.clear()
        self.hold_answers.clear()
        held, self.held = self.held, []
        for each in held:
            each()

    def break_off(self) -> None:
        """Lose the connection: series end with an error."""
        self.down = True
        for reply in list(self.replies.values()):
            if not reply.closed:
                reply.send(failure(Unavailable("the connection broke")))
                reply.close()

    def _deliver(self, request: pb.Request, kind: str, on_answer: AnswerHandler) -> None:
        def answered(answer: pb.Answer) -> None:
            if kind in self.hold_answers:
                self.held.append(lambda: on_answer(answer))
            else:
                asyncio.get_running_loop().call_soon(on_answer, answer)

        reply = self.replies[request.number] = MemoryReply(answered, request.number, self.caller)
        assert self.handler is not None
        try:
            self.handler.handle(request, reply)
        except TaoError as error:
            reply.send(failure(error))


class MemoryLinks:
    """The links of one caller: ``links["leader-1"]`` is its link to that server."""

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._links: dict[str, MemoryLink] = {}

    def __getitem__(self, name: str) -> MemoryLink:
        return self._links.setdefault(name, MemoryLink(name, self._caller))

    def to(self, server: CacheServer) -> MemoryLink:
        return self[server.name]

    def is_down(self, server: CacheServer) -> bool:
        """Return what a failure detector would have found by now."""
        return self[server.name].down

    def as_links(self) -> Links:
        """Return these links for constructors, which use only `to`, `is_down`, and sending over a link."""
        return cast(Links, self)
