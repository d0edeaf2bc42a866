"""gRPC calls as connections of the message layer: with one request (unary, watch) or with many (session)."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from typing import NoReturn

from tao.model.errors import DeadlineExceeded, TaoError, Unavailable
from tao.wire.convert import error_in, join_answers
from tao.wire.grpc_admission import Context, parsed
from tao.wire.identity import Admission, PeerIdentity
from tao.wire.server_session import ServedConnection
from tao.wire.session import NO_DEADLINE_MS, RequestHandler, failure
from tao.wire.settings import ServingSettings
from tao.wire.v1 import session_pb2 as pb

_logger = logging.getLogger(__name__)


class UnaryCall(ServedConnection):
    """One request and one answer, in however many parts it comes."""

    def __init__(self, handler: RequestHandler, settings: ServingSettings, peer: PeerIdentity) -> None:
        super().__init__(handler, settings, peer)
        self._parts: list[pb.Answer] = []
        self._answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def transmit(self, answer: pb.Answer) -> None:
        # The handler may change and reuse the message after sending it.
        part = pb.Answer()
        part.CopyFrom(answer)
        self._parts.append(part)
        if not answer.more and not self._answered.done():
            self._answered.set_result(None)

    def go_away(self) -> None:
        """Do nothing: it sends no more requests."""

    async def ask(self, request: pb.Request, remaining_seconds: float | None) -> pb.Answer:
        """Return the answer. Raises the error that it carries, and `DeadlineExceeded`."""
        seconds = self._settings.unary_deadline_seconds if remaining_seconds is None else remaining_seconds
        request.number = 1
        request.deadline_ms = max(0, min(math.floor(seconds * 1000), NO_DEADLINE_MS - 1))
        self.receive(request)
        try:
            async with asyncio.timeout(seconds):
                await self._answered
        except TimeoutError:
            raise DeadlineExceeded(f"the call was not answered within {seconds:.3f} s") from None
        answer = join_answers(self._parts)
        error = error_in(answer)
        if error is not None:
            raise error
        return answer


class _Outgoing(ServedConnection):
    """Sends answers through a gRPC stream, one after the other, from a queue that is bounded in bytes."""

    def __init__(
        self, handler: RequestHandler, settings: ServingSettings, admission: Admission, context: Context
    ) -> None:
        super().__init__(handler, settings, admission.peer)
        self._admission = admission
        self._context = context
        self._out: deque[bytes] = deque()
        self._out_bytes = 0
        self._something_to_send = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._ending = False
        self._overflowed = False
        self._error: TaoError | None = None

    def end(self) -> None:
        """Write the answers given so far, then end the stream."""
        self._ending = True
        self._something_to_send.set()

    def go_away(self) -> None:
        """Do nothing: a stream of one series has no new requests."""

    @property
    def admission_is_current(self) -> bool:
        """Whether `check_admission` has nothing to do."""
        return self._ending or self._admission.is_current or self.is_leaving(asyncio.get_running_loop().time())

    def check_admission(self) -> None:
        """Send a peer away whose credential is no longer accepted, and end its stream in time: see `dismiss`."""
        refusal = self._admission.refusal()
        if self.dismiss(refusal, asyncio.get_running_loop().time()) and refusal is not None:
            self._error = refusal
            self.end()

    @property
    def unsent_bytes(self) -> int:
        return self._out_bytes

    def _put(self, message: bytes) -> None:
        self._out.append(message)
        self._out_bytes += len(message)
        self._something_to_send.set()
        if self._out_bytes > self._settings.write_high_water_bytes:
            self._room.clear()
            if self._out_bytes > self._settings.max_unsent_bytes:
                self._out.clear()
                self._overflowed = True

    def _cut_off(self, why: str) -> NoReturn:
        _logger.warning("%s %s; its stream is dropped", self.peer, why)
        self.peer_gone()
        # A status would wait behind the messages that the peer does not read. A cancelled call is reset without one.
        raise asyncio.CancelledError

    async def _write(self) -> None:
        """Return when the stream is to end; cancel the call when the peer does not read."""
        while True:
            while self._out:
                message = self._out.popleft()
                try:
                    async with asyncio.timeout(self._settings.blocked_timeout_seconds):
                        await self._context.write(message)
                except TimeoutError:
                    self._cut_off("does not read its answers")
                self._out_bytes -= len(message)
                if self._out_bytes <= self._settings.write_high_water_bytes:
                    self._room.set()
            if self._overflowed:
                self._cut_off("has left too much unread")
            if self._ending:
                return
            self._something_to_send.clear()
            await self._something_to_send.wait()


class SessionStream(_Outgoing):
    """``Graph.Session``. A client that has sent its last request (half-close) still gets all its answers."""

    def transmit(self, answer: pb.Answer) -> None:
        for message in self.fitting(answer):
            self._put(message)

    def go_away(self) -> None:
        """Send an answer of number 0: new requests belong on a new session."""
        self._put(failure(Unavailable("the server is draining; connect again")).SerializeToString())

    async def run(self) -> None:
        """Run until the client has gone or the server ends the session. Raises the error that it ends with."""
        reading = asyncio.ensure_future(self._read())
        writing = asyncio.ensure_future(self._write())
        try:
            await asyncio.wait([reading, writing], return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and not writing.done():
                await reading
                self.end()
            await writing
        finally:
            reading.cancel()
            writing.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)
        if self._error is not None:
            raise self._error

    async def _read(self) -> None:
        while True:
            await self._room.wait()
            request: object = await self._context.read()
            if not isinstance(request, bytes):  # the client has sent its last request
                await self.until_idle()
                return
            self.receive(parsed(pb.Request, request))


class WatchStream(_Outgoing):
    """``Graph.WatchConfiguration``: the events of one Watch request."""

    def transmit(self, answer: pb.Answer) -> None:
        if not answer.HasField("error"):
            self._put(answer.watch.SerializeToString())
        self._error = self._error or error_in(answer)
        if not answer.more:
            self.end()

    async def run(self, asked: pb.Watch) -> None:
        """Run until the client has gone or the series ends. Raises the error that it ends with."""
        self.receive(pb.Request(number=1, deadline_ms=NO_DEADLINE_MS, watch=asked))
        try:
            await self._write()
        finally:
            self.peer_gone()
        if self._error is not None:
            raise self._error
