"""Links to other cache servers: one session each, made when first needed and made anew when lost.

A link answers two questions for the layers above: how to reach that server now, and how it has been doing lately. What
arrives while it connects waits, bounded in number and by its own deadline. Every answer, time-out and refusal goes to
the link's failure detector; while that holds the server down, requests fail at once, and the link alone asks (by
connecting, or by a read of nothing) until the server has answered well a few times. Whoever has another server to ask
should not spend its time here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from dataclasses import dataclass, field
from typing import Literal

from tao.model.errors import DeadlineExceeded, InternalError, Overloaded, TaoError, Unavailable
from tao.model.topology import CacheServer
from tao.routing.failure_detector import DetectorSettings, FailureDetector, FailureDetectors, Standing
from tao.wire.client_session import Waiter
from tao.wire.deadlines import DeadlineWheel
from tao.wire.frames_client import connect_frames
from tao.wire.grpc_client import connect_grpc
from tao.wire.identity import Credentials
from tao.wire.session import UNANSWERED_KINDS, AnswerHandler, Session, failure
from tao.wire.settings import SessionSettings
from tao.wire.tls import TlsFiles
from tao.wire.v1 import session_pb2 as pb

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How this process reaches cache servers."""

    transport: Literal["auto", "frames", "grpc"] = "auto"
    """``auto``: frames where the topology advertises them, which cost an eighth per message; gRPC elsewhere."""

    session: SessionSettings = field(default_factory=SessionSettings)
    """Bounds of each session."""

    max_waiting: int = 1_000
    """Requests that may wait for a connection being made: some milliseconds of a busy process' traffic."""

    telling_timeout_seconds: float = 0.2
    """A request that had less time than this and was not answered says nothing of the server by itself: it has the
    server probed, and counts when the probe has been unanswered for as long."""

    detector: DetectorSettings = field(default_factory=DetectorSettings)
    """When a server is down or in a brown-out, and how it is probed."""


class Links:
    """All links of a process, one per server. Servers that a newer topology gives another address get a new link.

    ``region``: where this process stands, for servers that are reached at other addresses from there; empty for a
    process that stands in none and takes the usual ones.
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
        """The link to that server, not necessarily connected."""
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

    def keep_only(self, names: set[str]) -> None:
        """Close the links to servers that the topology does not name any more."""
        for name in [name for name in self._links if name not in names]:
            self._retire(self._links.pop(name))
            self._detectors.forget(name)

    def is_down(self, server: CacheServer) -> bool:
        """Whether requests to that server fail fast; a server that was never asked is taken for well."""
        link = self._links.get(server.name)
        return link is not None and link.is_down

    def standings(self) -> dict[str, Standing]:
        """What is held of each server, for metrics and people."""
        return self._detectors.standings()

    def failures(self) -> dict[str, float]:
        """`Link.consecutive_failures` by server, for a gauge: 0 for those that answer."""
        return {name: link.consecutive_failures for name, link in self._links.items()}

    def figures(self) -> dict[str, dict[str, object]]:
        """For ``/stats``, by server: is it connected, and what is held of it, since how many seconds and why."""
        now = asyncio.get_running_loop().time()
        return {
            name: {"up": self._links[name].is_up, **standing.figures(now)}
            for name, standing in self.standings().items()
        }

    async def close(self) -> None:
        """Close every link; requests unanswered fail as UNAVAILABLE."""
        links, self._links = [*self._links.values(), *self._retiring.values()], {}
        await asyncio.gather(*(link.close() for link in links), *self._retiring)

    def _retire(self, link: Link) -> None:
        task = asyncio.get_running_loop().create_task(link.retire())
        self._retiring[task] = link
        task.add_done_callback(self._retiring.pop)


class Link:
    """The way to one server. Made by `Links.to`; belongs to the running loop."""

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
        self._ping = 0  # the number of the probe that is under way on the session; 0 when there is none
        self._probe_began = 0.0
        self._connects_to_probe = False
        self._closed = False
        # What waits for the connection: number -> request, who asks, when its time is up, the tick of that
        self._waiting: dict[int, tuple[pb.Request, AnswerHandler, float, int]] = {}
        self._last_waiting = 0
        self._wheel = DeadlineWheel(self._loop, settings.session.deadline_tick_seconds, self._expire)

    @property
    def is_up(self) -> bool:
        """Connected, and the server does not drain."""
        return self._session is not None and self._session.is_open

    @property
    def consecutive_failures(self) -> int:
        """Failed attempts to connect, and requests and probes whose time was up, since the last answer."""
        return self._detector.consecutive_failures

    @property
    def is_down(self) -> bool:
        """The detector holds the server down: requests fail fast with `Unavailable` (DESIGN.md §9)."""
        return self._detector.is_down

    @property
    def is_impaired(self) -> bool:
        """Down, out of reach or in a brown-out: another server should be asked where there is one."""
        detector = self._detector
        # Whoever is impaired is troubled, and nearly nobody is: one look, for every query.
        return detector.is_troubled and (detector.is_impaired or not self.is_up)

    def address_is_that_of(self, server: CacheServer) -> bool:
        """Whether this link leads to where the topology says that the server is."""
        return (self.server.grpc, self.server.frames) == (server.grpc, server.frames)

    def send(self, request: pb.Request, timeout_seconds: float, on_answer: AnswerHandler) -> None:
        """As `Session.send`. An Acknowledge goes to the session that is up, or nowhere: its series ended with the
        session before."""
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

    async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
        """As `Session.ask`."""
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
        """As `tao.wire.session.Observer`."""
        was_troubled = self._detector.is_troubled
        self._detector.answered(seconds, self._loop.time())
        if self._detector.is_troubled is not was_troubled:
            self._follow_detector()

    def timed_out(self, seconds: float) -> None:
        """As `tao.wire.session.Observer`."""
        now = self._loop.time()
        telling_seconds = self._settings.telling_timeout_seconds
        if seconds >= telling_seconds or (self._ping and now - self._probe_began >= telling_seconds):
            self._detector.failed(now, f"no answer within {seconds:.2f} s")
        else:
            self._detector.suspect(now, f"no answer within {seconds:.2f} s, which is little")
        self._follow_detector()

    async def close(self) -> None:
        """Close; whatever waits or is unanswered fails."""
        await self._stop()
        if self._session is not None:
            await self._session.close()

    async def retire(self) -> None:
        """The server is reached by another address from now on, or by none: what was sent to this one may still be
        answered, until its deadline; a write would have an unknown outcome otherwise. What was not sent fails."""
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
            return DeadlineExceeded("no time was left to send the request")
        if self._detector.is_down or (self._detector.is_troubled and self._connecting is None):
            standing = self._detector.standing()
            return Unavailable(f"{self.server.name} is {standing.health}: {standing.reason}")
        if len(self._waiting) >= self._settings.max_waiting:
            return Overloaded(f"{len(self._waiting)} requests wait for a connection to {self.server.name} already")
        return None

    async def _connect(self) -> None:
        try:
            session = await self._connector.connect(self.server)
        except TaoError as error:
            self._attempt_failed(error)
        except Exception:
            # A bug on the way there must not leave a link that waits for ever.
            _logger.exception("connecting to %s failed", self.server.name)
            self._attempt_failed(InternalError("connecting failed; the log of this process says why"))
        else:
            self._session = session
            session.observer = self
            self._connecting = None
            if self._connects_to_probe:
                self._probe_answered()
            self._send_waiting(session)

    def _attempt_failed(self, error: TaoError) -> None:
        now = self._loop.time()
        if not self._detector.is_troubled:
            _logger.warning("%s cannot be reached: %s", self.server.name, error.message)
        if self._connects_to_probe:
            self._connects_to_probe = False
            self._detector.probe_failed(now, error.message)
        else:
            self._detector.failed(now, error.message)
        self._connecting = None
        # A refused greeting is the operator's to mend and says so; everything else is a server that is not there.
        refused = Unavailable(f"{self.server.name}: {error.message}")
        self._fail_waiting(error if not error.retryable else refused)
        self._follow_detector()

    def _follow_detector(self) -> None:
        """Have a probe sent when the detector wants one."""
        if self._probe_timer is not None:
            self._probe_timer.cancel()
            self._probe_timer = None
        if self._detector.is_troubled and not self._closed:
            self._probe_timer = self._loop.call_at(self._detector.probe_at, self._probe)

    def _probe(self) -> None:
        """One at a time: by connecting, or by a read of nothing, which every server answers at once."""
        self._probe_timer = None
        now = self._loop.time()
        session = self._session
        if self._detector.begin_probe(now):
            self._probe_began = now
            if session is not None and session.is_open:
                self._forget_ping(session)
                # Without a deadline of its own: what has become of it the detector asks, and not the observer.
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
            _logger.warning("%s is asked again", self.server.name)
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
            self._tell(on_answer, error)

    def _forget_waiting(self, on_answer: AnswerHandler) -> None:
        for number, (_, asked_by, _, tick) in list(self._waiting.items()):
            if asked_by == on_answer:
                del self._waiting[number]
                self._wheel.discard(number, tick)

    def _expire(self, number: int) -> None:
        _, on_answer, _, _ = self._waiting.pop(number)
        self._tell(on_answer, DeadlineExceeded(f"{self.server.name} could not be connected to in time"))

    def _tell(self, on_answer: AnswerHandler, error: TaoError) -> None:
        # Through the loop, which logs what a handler raises and goes on with the others.
        self._loop.call_soon(on_answer, failure(error))


class _Connector:
    """Knows by which transport a server is reached."""

    def __init__(self, settings: LinkSettings, credentials: Credentials, tls: TlsFiles | None) -> None:
        self._settings = settings
        self._credentials = credentials
        self._context = None if tls is None else tls.client_context()
        self._channel_credentials = None if tls is None else tls.channel_credentials()

    async def connect(self, server: CacheServer) -> Session:
        """Raises a `TaoError` when no session can be had."""
        settings = self._settings
        if settings.transport == "grpc" or (settings.transport == "auto" and not server.frames):
            return await connect_grpc(server.grpc, settings.session, self._credentials, self._channel_credentials)
        if not server.frames:
            raise Unavailable(f"{server.name} advertises no frames; set transport to auto, or frames at the server")
        return await connect_frames(server.frames, settings.session, self._credentials, self._context)
