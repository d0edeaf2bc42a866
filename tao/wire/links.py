"""Links to other cache servers: one session per server, opened on first use and reopened when it is lost.

A link shows the layers above how to reach a server now and how healthy the server is. Requests that arrive while the
link connects wait, bounded in number and each by its own deadline. Every answer, timeout and refused connection goes to
the link's failure detector. While the detector considers the server down, requests fail at once, so that callers with
an alternative server lose no time here. Meanwhile the link alone probes the server (by connecting, or with an empty
read batch) until it has answered well a few times in a row.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tao.model.errors import (
    DeadlineExceeded,
    InternalError,
    OperatorError,
    Overloaded,
    TaoError,
    TlsMismatch,
    Unavailable,
    is_tls_refusal,
)
from tao.model.topology import CacheServer, ServerPlace
from tao.routing.failure_detector import DetectorSettings, DetectorState, FailureDetector, FailureDetectors
from tao.wire.client_session import Waiter
from tao.wire.deadlines import DeadlineWheel
from tao.wire.frames_client import connect_frames
from tao.wire.grpc_client import connect_grpc
from tao.wire.identity import Credentials, ExpectedServer
from tao.wire.session import UNANSWERED_KINDS, AnswerHandler, Session, failure
from tao.wire.settings import SessionSettings
from tao.wire.tls import ClientTls, ServerCheck, TlsFiles
from tao.wire.tls_mismatch import certificate_refused, explained, is_broken_handshake
from tao.wire.v1 import session_pb2 as pb

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Settings of a process' links to cache servers."""

    transport: Literal["auto", "frames", "grpc"] = "auto"
    """``auto`` uses frames where the topology advertises them, which cost an eighth of gRPC per message, and gRPC
    where it does not."""

    session: SessionSettings = field(default_factory=SessionSettings)
    """Bounds of each session."""

    max_waiting: int = 1_000
    """Requests that may wait while a connection is being made: a few milliseconds of a busy process' traffic."""

    telling_timeout_seconds: float = 0.2
    """A timeout shorter than this is no evidence of a failure by itself. It starts a probe of the server, and counts as
    a failure once the probe has been unanswered for this long."""

    detector: DetectorSettings = field(default_factory=DetectorSettings)
    """Bounds at which a server counts as down or degraded, and settings of its probes."""


class LinkPort(Protocol):
    """The part of `Link` that request forwarding needs; tests substitute it."""

    def send(self, request: pb.Request, timeout_seconds: float, on_answer: AnswerHandler) -> None:
        """See `Link.send`."""


class GatheringLinkPort(LinkPort, Protocol):
    """A `LinkPort` whose user says when it has sent all that goes together."""

    def hold(self) -> None:
        """See `Link.hold`."""

    def flush(self) -> None:
        """See `Link.flush`."""


class LinksPort(Protocol):
    """The part of `Links` that request forwarding needs; tests substitute it."""

    def to(self, server: CacheServer) -> GatheringLinkPort:
        """See `Links.to`."""


class Links:
    """All links of a process, one per server. A server whose address changes in a newer topology gets a new link.

    ``region`` is the region of this process: some servers have a different address there. Empty: use the default
    addresses.
    """

    def __init__(
        self, settings: LinkSettings, credentials: Credentials, tls: TlsFiles | None = None, *, region: str = ""
    ) -> None:
        self._region = region
        self._settings = settings
        self._connector = _Connector(settings, credentials, tls)
        self._detectors: FailureDetectors[str] = FailureDetectors(settings.detector, random.random)
        self._links: dict[str, Link] = {}
        self._retiring: dict[asyncio.Task[None], Link] = {}

    def to(self, server: CacheServer) -> Link:
        """Return the link to that server, which may not be connected yet."""
        server = server.seen_from(self._region)
        link = self._links.get(server.name)
        if link is not None and link.address_is_that_of(server):
            return link
        if link is not None:
            self._retire(link)
            self._detectors.forget(server.name)
        detector = self._detectors.of(server.name, asyncio.get_running_loop().time())
        link = self._links[server.name] = Link(server, self._settings, self._connector, detector)
        return link

    def keep_only(self, places: Mapping[str, ServerPlace]) -> None:
        """Close the links to all servers other than those named: the topology does not name them any more. The
        certificates of servers, where they have ids, must say the role and region that ``places`` has."""
        self._connector.places = places
        for name in [name for name in self._links if name not in places]:
            self._retire(self._links.pop(name))
            self._detectors.forget(name)

    def is_down(self, server: CacheServer) -> bool:
        """Return whether requests to that server fail fast. A server without a link counts as healthy."""
        return self.is_down_at(server.name)

    def refusal_at(self, name: str) -> str:
        """Return `Link.refusal` of the server of that name."""
        link = self._links.get(name)
        return "" if link is None else link.refusal

    def is_down_at(self, name: str) -> bool:
        """Return whether requests to the server of that name fail fast."""
        link = self._links.get(name)
        return link is not None and link.is_down

    def states(self) -> dict[str, DetectorState]:
        """Return the state of each server's failure detector, for metrics and people."""
        return self._detectors.states()

    def failures(self) -> dict[str, float]:
        """Return `Link.consecutive_failures` by server, for a gauge; 0 for servers that answer."""
        return {name: link.consecutive_failures for name, link in self._links.items()}

    def figures(self) -> dict[str, dict[str, object]]:
        """Return, by server, whether it is connected and the state of its failure detector, for ``/stats``."""
        now = asyncio.get_running_loop().time()
        return {
            name: {"up": self._links[name].is_up, **standing.figures(now)} for name, standing in self.states().items()
        }

    async def close(self) -> None:
        """Close every link. Unanswered requests fail with `Unavailable`."""
        links, self._links = [*self._links.values(), *self._retiring.values()], {}
        await asyncio.gather(*(link.close() for link in links), *self._retiring)

    def _retire(self, link: Link) -> None:
        task = asyncio.get_running_loop().create_task(link.retire())
        self._retiring[task] = link
        task.add_done_callback(self._retiring.pop)


class Link:
    """The connection to one server. Created by `Links.to`; bound to the running event loop."""

    def __init__(
        self, server: CacheServer, settings: LinkSettings, connector: _Connector, detector: FailureDetector
    ) -> None:
        self.server = server
        self._settings = settings
        self._connector = connector
        self._detector = detector
        self._loop = asyncio.get_running_loop()
        self._session: Session | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._ping = 0  # the number of the request that probes the session; 0 when no probe is under way
        self._probe_began = 0.0
        self._connects_to_probe = False
        self._refusal_text = ""
        self._failures_since_refusal = 0
        self._closed = False
        # Requests that wait for the connection: number -> request, handler, deadline in loop time, tick of the deadline
        self._waiting: dict[int, tuple[pb.Request, AnswerHandler, float, int]] = {}
        self._last_waiting = 0
        self._wheel = DeadlineWheel(self._loop, settings.session.deadline_tick_seconds, self._expire)

    @property
    def is_up(self) -> bool:
        """True while the session is open and the server is not draining."""
        return self._session is not None and self._session.is_open

    @property
    def consecutive_failures(self) -> int:
        """Failed connection attempts and timed-out requests and probes since the last answer."""
        return self._detector.consecutive_failures

    @property
    def is_down(self) -> bool:
        """True while the detector considers the server down: requests then fail fast with `Unavailable`."""
        return self._detector.is_down

    @property
    def refusal(self) -> str:
        """Why the server or this process has refused the other at the latest attempts to connect; "" when it has not.
        Then ``is_down`` says nothing of the server's health: nobody but this process may be concerned."""
        return self._refusal_text

    @property
    def is_impaired(self) -> bool:
        """True while another server should be asked where there is one: this one is down, unreachable or degraded."""
        detector = self._detector
        # An impaired detector is also troubled, and nearly none is: the usual case costs one attribute per query.
        return detector.is_suspect and (detector.is_impaired or not self.is_up)

    def address_is_that_of(self, server: CacheServer) -> bool:
        """Return whether the link uses the addresses that the topology gives for ``server``."""
        return (self.server.grpc, self.server.frames) == (server.grpc, server.frames)

    def send(self, request: pb.Request, timeout_seconds: float, on_answer: AnswerHandler) -> None:
        """Send a request as `Session.send` does, connecting first if necessary.

        A request without an answer (an Acknowledge) goes to the open session or is dropped: the delivery series that it
        acknowledges ended with the session before."""
        session = self._session
        if session is not None and session.is_open and not self._detector.is_down:
            session.send(request, timeout_seconds, on_answer)
            return
        if request.WhichOneof("body") in UNANSWERED_KINDS:
            if session is not None:
                session.send(request, timeout_seconds, on_answer)
            return
        refusal = self._refusal(timeout_seconds)
        if refusal is not None:
            self._loop.call_soon(on_answer, failure(refusal))
            return
        number = self._last_waiting = self._last_waiting + 1
        endless = timeout_seconds == float("inf")
        tick = 0 if endless else self._wheel.add(number, timeout_seconds)
        self._waiting[number] = (request, on_answer, self._loop.time() + timeout_seconds, tick)
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())

    def hold(self) -> None:
        """Hold what is sent until `flush` is called, as `Session.hold` does."""
        if self._session is not None:
            self._session.hold()

    def flush(self) -> None:
        """Write at once what has been sent to the open session."""
        if self._session is not None:
            self._session.flush()

    async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
        """Send a request and return the answer, as `Session.ask` does."""
        session = self._session
        if session is not None and session.is_open and not self._detector.is_down:
            return await session.ask(request, timeout_seconds)
        waiter = Waiter(self._loop)
        self.send(request, timeout_seconds, waiter.take)
        try:
            return await waiter.answer()
        except asyncio.CancelledError:
            self._forget_waiting(waiter.take)
            raise

    def answered(self, seconds: float) -> None:
        """See `tao.wire.session.Observer`."""
        was_suspect = self._detector.is_suspect
        self._detector.answered(seconds, self._loop.time())
        if self._detector.is_suspect is not was_suspect:
            self._follow_detector()

    def timed_out(self, seconds: float) -> None:
        """See `tao.wire.session.Observer`."""
        now = self._loop.time()
        telling_seconds = self._settings.telling_timeout_seconds
        if seconds >= telling_seconds or (self._ping and now - self._probe_began >= telling_seconds):
            self._detector.failed(now, f"no answer within {seconds:.2f} s")
        else:
            self._detector.suspect(now, f"no answer within {seconds:.2f} s, which is a short timeout")
        self._follow_detector()

    async def close(self) -> None:
        """Close the link. Waiting and unanswered requests fail."""
        await self._stop()
        if self._session is not None:
            await self._session.close()

    async def retire(self) -> None:
        """Close the link because the server has another address now, or none.

        Requests that were sent may still be answered until their deadlines: a write would have an unknown outcome
        otherwise. Requests that were not sent fail."""
        await self._stop()
        if self._session is not None:
            await self._session.retire()

    async def _stop(self) -> None:
        self._closed = True
        self._follow_detector()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        self._fail_waiting(Unavailable(f"the link to {self.server.name} was closed here"))

    def _refusal(self, timeout_seconds: float) -> TaoError | None:
        if self._closed:
            return Unavailable(f"the link to {self.server.name} was closed here")
        if timeout_seconds <= 0:
            return DeadlineExceeded("the deadline passed before the request was sent")
        if self._detector.is_down or (self._detector.is_suspect and self._connecting is None):
            standing = self._detector.state()
            return Unavailable(f"{self.server.name} is {standing.health}: {standing.reason}")
        if len(self._waiting) >= self._settings.max_waiting:
            return Overloaded(
                f"{len(self._waiting)} requests (max_waiting) already wait for a connection to {self.server.name}"
            )
        return None

    async def _connect(self) -> None:
        try:
            session = await self._connector.connect(self.server)
        except TaoError as error:
            self._attempt_failed(error)
        except Exception:
            # An unexpected error must not leave a link whose requests wait for ever.
            _logger.exception("connecting to %s failed", self.server.name)
            self._attempt_failed(InternalError("connecting failed; see the log of this process"))
        else:
            self._session = session
            session.observer = self
            self._connecting = None
            self._refusal_text = ""
            if self._connects_to_probe:
                self._probe_answered()
            self._send_waiting(session)

    def _attempt_failed(self, error: TaoError) -> None:
        now = self._loop.time()
        if not self._detector.is_suspect:
            _logger.warning("%s cannot be reached: %s", self.server.name, error.message)
        if self._connects_to_probe:
            self._connects_to_probe = False
            self._detector.probe_failed(now, error.message)
        else:
            self._detector.failed(now, error.message)
        self._connecting = None
        self._note_refusal(error)
        # A rejected greeting is for the operator to fix and keeps its error; anything else means an unavailable server.
        kind = TlsMismatch if isinstance(error, TlsMismatch) else Unavailable
        is_named = error.message.startswith(f"{self.server.name} ")  # one that is known by its address alone
        refused = kind(error.message if is_named else f"{self.server.name}: {error.message}")
        self._fail_waiting(error if not error.retryable else refused)
        self._follow_detector()

    def _note_refusal(self, error: TaoError) -> None:
        """Note whether a failed attempt was refused. One that failed otherwise is no more than a lost connection; as
        many in a row as usual show that the server is down by now."""
        if error.is_refusal or isinstance(error, OperatorError):
            self._refusal_text, self._failures_since_refusal = error.message, 0
        elif self._refusal_text:
            self._failures_since_refusal += 1
            if self._failures_since_refusal >= self._settings.detector.failures_until_down:
                self._refusal_text = ""

    def _follow_detector(self) -> None:
        """Schedule the next probe if the detector wants one."""
        if self._probe_timer is not None:
            self._probe_timer.cancel()
            self._probe_timer = None
        if self._detector.is_suspect and not self._closed:
            self._probe_timer = self._loop.call_at(self._detector.probe_at, self._probe)

    def _probe(self) -> None:
        """Probe the server, one probe at a time: connect, or send an empty read batch, which any server answers."""
        self._probe_timer = None
        now = self._loop.time()
        session = self._session
        if self._detector.begin_probe(now):
            self._probe_began = now
            if session is not None and session.is_open:
                self._forget_ping(session)
                # No deadline: the detector's own probe timeout decides, and the observer must not count it again.
                self._ping = session.send(pb.Request(read=pb.ReadBatch()), math.inf, self._ping_answered)
            else:
                self._connects_to_probe = True
                if self._connecting is None:
                    self._connecting = self._loop.create_task(self._connect())
        self._follow_detector()

    def _forget_ping(self, session: Session) -> None:
        if self._ping:
            session.forget(self._ping)
            self._ping = 0

    def _ping_answered(self, answer: pb.Answer) -> None:
        if answer.number != self._ping:
            return
        self._ping = 0
        if answer.error.reason in (Unavailable.reason, Overloaded.reason):
            self._detector.probe_failed(self._loop.time(), answer.error.message)
            self._follow_detector()
        else:
            self._probe_answered()

    def _probe_answered(self) -> None:
        now = self._loop.time()
        self._connects_to_probe = False
        was_down = self._detector.is_down
        self._detector.probe_answered(now - self._probe_began, now)
        if was_down and not self._detector.is_down:
            _logger.warning("%s is up again", self.server.name)
        self._follow_detector()

    def _send_waiting(self, session: Session) -> None:
        waiting, self._waiting = self._waiting, {}
        now = self._loop.time()
        self._wheel.stop()
        for request, on_answer, until, _ in waiting.values():
            session.send(request, until - now, on_answer)

    def _fail_waiting(self, error: TaoError) -> None:
        waiting, self._waiting = self._waiting, {}
        self._wheel.stop()
        for _, on_answer, _, _ in waiting.values():
            self._fail(on_answer, error)

    def _forget_waiting(self, on_answer: AnswerHandler) -> None:
        for number, (_, asked_by, _, tick) in list(self._waiting.items()):
            if asked_by == on_answer:
                del self._waiting[number]
                self._wheel.discard(number, tick)

    def _expire(self, number: int) -> None:
        _, on_answer, _, _ = self._waiting.pop(number)
        self._fail(on_answer, DeadlineExceeded(f"{self.server.name} could not be connected to in time"))

    def _fail(self, on_answer: AnswerHandler, error: TaoError) -> None:
        # Call the handler from the loop, which logs an exception that it raises and goes on with the other handlers.
        self._loop.call_soon(on_answer, failure(error))


class _Connector:
    """Opens sessions over the transport that the settings and the server's addresses select."""

    def __init__(self, settings: LinkSettings, credentials: Credentials, tls: TlsFiles | None) -> None:
        self._settings = settings
        self._credentials = credentials
        self._tls = None if tls is None else ClientTls(tls)
        self.places: Mapping[str, ServerPlace] = {}

    async def connect(self, server: CacheServer) -> Session:
        """Open a session to ``server``. Raises `TaoError` when none can be opened."""
        settings, tls = self._settings, self._tls
        if tls is not None:
            tls.refresh()
        if settings.transport == "grpc" or (settings.transport == "auto" and not server.frames):
            return await self._connect_grpc(server)
        if not server.frames:
            raise Unavailable(
                f"{server.name} has no frames address in the topology; set transport to auto, or give it one"
            )
        check = None if tls is None else ServerCheck(tls.context, tls.cluster, self._expected(server))
        return await connect_frames(server.frames, settings.session, self._credentials, check)

    async def _connect_grpc(self, server: CacheServer) -> Session:
        settings, tls, loop = self._settings.session, self._tls, asyncio.get_running_loop()
        if tls is None:
            return await connect_grpc(server.grpc, settings, self._credentials)
        until = loop.time() + settings.connect_timeout_seconds
        try:
            return await self._connect_grpc_by_tls(server, tls)
        except Unavailable as failure:
            # A server that has been silent for all that time has refused nobody, and its failure must not come later.
            left = until - loop.time()
            if failure.is_refusal or left <= 0.0 or not await tls.is_refused(server.grpc, left):
                raise
            raise certificate_refused(server.grpc) from failure

    async def _connect_grpc_by_tls(self, server: CacheServer, tls: ClientTls) -> Session:
        settings, expected = self._settings.session, self._expected(server)
        shown = await self._look(tls, server, expected)
        try:
            return await connect_grpc(server.grpc, settings, self._credentials, tls.channel_credentials(shown))
        except Unavailable:
            if not shown:
                raise
            again = await self._look(tls, server, expected)
            if again == shown and expected.name:
                raise
        # It has got a new certificate since the first look, or behind an address alone another server has answered.
        return await connect_grpc(server.grpc, settings, self._credentials, tls.channel_credentials(again))

    async def _look(self, tls: ClientTls, server: CacheServer, expected: ExpectedServer) -> bytes:
        try:
            async with asyncio.timeout(self._settings.session.connect_timeout_seconds):
                return await tls.look(server.grpc, expected)
        except OSError as error:  # among them TimeoutError
            failure: TaoError = Unavailable(f"the certificate at {server.grpc} cannot be looked at: {error!r}")
            failure.is_refusal = is_tls_refusal(error)
            if is_broken_handshake(error):
                seconds = self._settings.session.connect_timeout_seconds
                failure = await explained(failure, server.grpc, with_tls=True, within_seconds=seconds)
            raise failure from error

    def _expected(self, server: CacheServer) -> ExpectedServer:
        # A server that is known by its address alone has that for a name.
        if server.name in (server.grpc, f"frames:{server.frames}"):
            return ExpectedServer()
        return ExpectedServer(server.name, *self.places.get(server.name, ()))
