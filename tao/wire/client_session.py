"""The client's side of a session, independent of the transport: numbers, unanswered requests, deadlines, failures.

Both transports share it, so that a request fails in the same way on both. A transport adds how a request leaves
(`_transmit`) and calls back when an answer arrives, the server drains or the connection is lost.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod

from tao.model.errors import DeadlineExceeded, OutcomeUnknown, Overloaded, TaoError, TooLarge, Unavailable
from tao.wire.convert import error_in, join_answers
from tao.wire.deadlines import DeadlineWheel
from tao.wire.session import NO_DEADLINE_MS, UNANSWERED_KINDS, AnswerHandler, Observer, failure
from tao.wire.settings import SessionSettings
from tao.wire.v1 import session_pb2 as pb

_logger = logging.getLogger(__name__)

_NO_TICK = -1
_WRITING_KINDS = frozenset({"write", "keep_copies"})
"""Kinds of requests whose outcome is unknown when they are sent and not answered."""


class NumberedSession(ABC):
    """Implements `tao.wire.session.Session` over a transport."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: str, settings: SessionSettings) -> None:
        self._loop = loop
        self._address = address
        self._settings = settings
        self._wheel = DeadlineWheel(loop, settings.deadline_tick_seconds, self._expire)
        # number -> handler, tick of the deadline, whether a failure leaves the outcome unknown, time of sending
        self._pending: dict[int, tuple[AnswerHandler, int, bool, float]] = {}
        self._last_number = 0
        self._connected = False
        self._draining = False
        self.is_open = False
        """Connected and not draining; an attribute, since every message reads it."""
        self._gone = asyncio.Event()
        self.observer: Observer | None = None
        self.server_name = ""

    def send(self, request: pb.Request, timeout_seconds: float, on_answer: AnswerHandler) -> int:
        """See `Session.send`."""
        number = self._last_number = self._last_number + 1
        request.number = number
        kind = request.WhichOneof("body")
        if kind in UNANSWERED_KINDS:
            request.deadline_ms = NO_DEADLINE_MS
            if kind == "forget" and not self._is_asked_by(request.forget.forgotten_number, on_answer):
                return number
            if self._connected:
                self._transmit(request.SerializeToString())
            if kind == "forget":
                # No answer will end it here.
                self._let_go(request.forget.forgotten_number)
            return number
        endless = timeout_seconds == math.inf
        request.deadline_ms = NO_DEADLINE_MS if endless else to_deadline_ms(timeout_seconds)
        message = request.SerializeToString()
        settings = self._settings
        # One test for all that `_refusal` names.
        if not (
            self._connected
            and timeout_seconds > 0
            and len(message) <= settings.max_message_bytes
            and len(self._pending) < settings.max_unanswered
            and self._unsent_bytes() <= settings.max_unsent_bytes
        ):
            refusal = self._refusal(len(message), timeout_seconds)
            self._pending[number] = (on_answer, _NO_TICK, False, math.inf)
            self._loop.call_soon(self._fail_request, number, refusal)
            return number
        tick = _NO_TICK if endless else self._wheel.add(number, timeout_seconds)
        self._pending[number] = (on_answer, tick, kind in _WRITING_KINDS, self._loop.time())
        self._transmit(message)
        return number

    def hold(self) -> None:
        """See `Session.hold`."""
        return

    def flush(self) -> None:
        """See `Session.flush`."""
        return

    def forget(self, number: int) -> None:
        """See `Session.forget`."""
        entry = self._pending.get(number)
        if entry is None:
            return
        if entry[1] == _NO_TICK and self._connected:
            self._last_number += 1
            forget = pb.Forget(forgotten_number=number)
            request = pb.Request(number=self._last_number, deadline_ms=NO_DEADLINE_MS, forget=forget)
            self._transmit(request.SerializeToString())
        self._let_go(number)

    def _is_asked_by(self, number: int, on_answer: AnswerHandler) -> bool:
        entry = self._pending.get(number)
        return entry is not None and entry[0] == on_answer

    def _let_go(self, number: int) -> None:
        """Drop a request whose caller has gone."""
        entry = self._pending.pop(number, None)
        if entry is None:
            return
        if entry[1] != _NO_TICK:
            self._wheel.discard(number, entry[1])
        self._close_when_drained()

    async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
        """See `Session.ask`."""
        waiter = Waiter(self._loop)
        number = self.send(request, timeout_seconds, waiter.take)
        try:
            return await waiter.answer()
        except asyncio.CancelledError:
            self.forget(number)
            raise

    async def retire(self) -> None:
        """See `Session.retire`."""
        self._draining, self.is_open = True, False
        for number in [number for number, entry in self._pending.items() if entry[1] == _NO_TICK]:
            self._fail_request(number, Unavailable(f"the session with {self._address} is being closed here"))
        self._close_when_drained()
        if self._connected:
            await self._gone.wait()
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """See `Session.close`."""

    @abstractmethod
    def _transmit(self, message: bytes) -> None:
        """Send an encoded request; must not raise."""

    @abstractmethod
    def _unsent_bytes(self) -> int:
        """Return the bytes that wait for the server to read them."""

    @abstractmethod
    def _shut(self) -> None:
        """Close the connection in an orderly way: it is drained, and nothing is unanswered."""

    def _refusal(self, message_bytes: int, timeout_seconds: float) -> TaoError:
        settings = self._settings
        if not self._connected:
            return Unavailable(f"the connection to {self._address} is closed; connect again")
        if timeout_seconds <= 0:
            return DeadlineExceeded("no time was left to send the request")
        if message_bytes > settings.max_message_bytes:
            return TooLarge(f"a request of {message_bytes} bytes exceeds {settings.max_message_bytes}; split it")
        if len(self._pending) >= settings.max_unanswered:
            return Overloaded(f"{len(self._pending)} requests to {self._address} are unanswered already")
        return Overloaded(f"{self._address} does not read what was sent before")

    def _answer_arrived(self, answer: pb.Answer) -> None:
        number = answer.number
        if number == 0:
            self._server_drains()
            return
        entry = self._pending.get(number)
        # The request was forgotten or its deadline has passed. The answer is late, but it shows that the server is
        # alive.
        if entry is None:
            if self.observer is not None:
                self.observer.answered(-math.inf)
            return
        if self.observer is not None and entry[1] != _NO_TICK:
            self.observer.answered(self._loop.time() - entry[3])
        if not answer.more:
            self._settle(answer, number)
            return
        if entry[3] != math.inf:
            # Only the first part measures the server; later parts may wait for other servers.
            self._pending[number] = (*entry[:3], math.inf)
        self._tell(entry[0], answer)

    def _settle(self, answer: pb.Answer, number: int) -> None:
        entry = self._pending.pop(number, None)
        if entry is None:  # forgotten, or its deadline has passed
            return
        on_answer, tick = entry[:2]
        if tick != _NO_TICK:
            self._wheel.discard(number, tick)
        self._tell(on_answer, answer)
        if self._draining:
            self._close_when_drained()

    def _tell(self, on_answer: AnswerHandler, answer: pb.Answer) -> None:
        try:
            on_answer(answer)
        except Exception:
            # A bug of one caller must not cost the others on this session their answers.
            _logger.exception("an answer handler failed; session with %s goes on", self._address)

    def _expire(self, number: int) -> None:
        _, _, is_write, sent_at = self._pending[number]
        if self.observer is not None and sent_at != math.inf:
            self.observer.timed_out(self._loop.time() - sent_at)
        error: TaoError
        if is_write:
            error = OutcomeUnknown(f"{self._address} has not answered the write in time; it may have been committed")
        else:
            error = DeadlineExceeded(f"{self._address} has not answered in time")
        self._fail_request(number, error)

    def _fail_request(self, number: int, error: TaoError) -> None:
        answer = failure(error)
        answer.number = number
        self._settle(answer, number)

    def _opened(self) -> None:
        """Send requests from now on: the server has accepted the connection."""
        self._connected, self.is_open = True, not self._draining

    def _server_drains(self) -> None:
        self._draining, self.is_open = True, False
        self._close_when_drained()

    def _close_when_drained(self) -> None:
        if self._draining and self._connected and not self._pending:
            self._shut()

    def _lost(self, error: TaoError) -> None:
        """Fail every unanswered request, because the connection is lost."""
        self._connected = self.is_open = False
        self._gone.set()
        self._wheel.stop()
        pending, self._pending = self._pending, {}
        for number, (on_answer, _, is_write, _) in pending.items():
            outcome = error
            if is_write:
                outcome = OutcomeUnknown(f"the write may have been committed: {error.message}")
            answer = failure(outcome)
            answer.number = number
            self._tell(on_answer, answer)


class Waiter:
    """Collects the answers of a request, which come by callback, into one answer to await."""

    __slots__ = ("_future", "_parts")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[pb.Answer] = loop.create_future()
        self._parts: list[pb.Answer] = []

    def take(self, answer: pb.Answer) -> None:
        """Take one answer; an `AnswerHandler`."""
        if self._future.done():  # cancelled
            return
        if answer.more or self._parts:
            self._parts.append(answer)
            if answer.more:
                return
            answer = join_answers(self._parts)
        self._future.set_result(answer)

    async def answer(self) -> pb.Answer:
        """Return the whole answer. Raises the `TaoError` that it carries."""
        answer = await self._future
        error = error_in(answer)
        if error is not None:
            raise error
        return answer


def to_deadline_ms(timeout_seconds: float) -> int:
    """Return the ``deadline_ms`` of a request, in milliseconds. Raises `OverflowError` for an infinite time."""
    # At least 1, because 0 means expired and half a millisecond is still some time; at most the largest deadline. `min`
    # and `max` would cost more than everything else that a deadline does.
    deadline_ms = int(timeout_seconds * 1000)
    if 0 < deadline_ms < NO_DEADLINE_MS:
        return deadline_ms
    return 1 if deadline_ms <= 0 else NO_DEADLINE_MS - 1
