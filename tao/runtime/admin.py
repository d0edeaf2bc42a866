"""The admin port: metrics, health, readiness and statistics over plain HTTP, for scrapers, probes and `tao stats`.

It is written by hand, because it needs one request line and a fixed set of pages without bodies: a web framework would
be a server's largest dependency and its largest attack surface. It listens on loopback by default, reads a bounded
request within a bounded time, and answers one request a connection, so a stuck client holds nothing.

A connection is pending at the doorstep until its request has arrived (`tao.wire.doorstep`), and nothing is made for it
before its first bytes. Health and readiness are
then answered at once. Only the large pages have a bounded number of readers, of which a slow one gives way to the next:
however many clients are silent or slow, a probe is answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

import msgspec

from tao import __version__
from tao.observability.logs import Logger
from tao.wire.address import TcpAddress, is_loopback
from tao.wire.doorstep import AddressPool, Doorstep, name_of
from tao.wire.http2_refusal import PREFACE, Http2Refusal
from tao.wire.listener import Listener
from tao.wire.settings import DoorstepSettings
from tao.wire.silent_connections import SilentConnection, SilentConnections

_SWEEP_SECONDS: Final = 0.25
"""Interval at which it is checked which connections are late with their request."""
_TEXT = "text/plain; charset=utf-8"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_JSON = "application/json"
_END_OF_HEADERS = b"\r\n\r\n"
_PREFACE_HEAD, _, _PREFACE_REST = PREFACE.partition(_END_OF_HEADERS)


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """Address and bounds of the admin port."""

    host: str = "127.0.0.1"
    """Loopback by default: the pages have no authentication, and an agent on the machine can scrape them."""
    port: int = 0
    """0: any free port."""
    request_bytes: int = 8_192
    """Bound of a request's line and headers; browsers and scrapers send well under 2 KB."""
    request_timeout_seconds: float = 5.0
    """From the first bytes of a request to having sent the answer; a scrape takes milliseconds."""
    max_readers: int = 32
    """Clients that large pages are sent to at a time; a scraper and a few people need five."""
    doorstep: DoorstepSettings = field(default_factory=DoorstepSettings)
    """Bounds on connections whose request has not arrived."""


@dataclass(frozen=True, slots=True)
class AdminPages:
    """The contents of the pages. All are called in the event loop and must be quick."""

    metrics: Callable[[], bytes]
    """``/metrics``: the Prometheus text."""
    stats: Callable[[], Mapping[str, object]]
    """``/stats``: statistics for people and the CLI, as JSON."""
    not_ready: Callable[[], str]
    """``/ready``: the reason why the server should get no traffic (503), or "" when it should (200)."""


class AdminServer:
    """The admin port. ``/health`` answers 200 as long as the event loop runs."""

    def __init__(self, settings: AdminSettings, pages: AdminPages, log: Logger, grpc_address: str = "") -> None:
        """``grpc_address`` is where a gRPC client is referred to; empty for a server without such a port."""
        self._settings = settings
        self._grpc_address = grpc_address
        self._pages = pages
        self._log = log
        self.doorstep = Doorstep("admin", settings.doorstep)
        self._readers = AddressPool(settings.max_readers, settings.max_readers)
        self._silent: Final = SilentConnections(self.doorstep.pending, self._begin, self._turned_away)
        per_second = settings.doorstep.accepts_per_second
        self._listener: Final = Listener("admin", per_second, self._silent.add, turn_ended=self._silent.look_at_new)
        self._requests: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self) -> str:
        """Listen. Returns the address, ``host:port``. Raises `OSError` when the port is taken."""
        settings = self._settings
        if not is_loopback(TcpAddress(settings.host, settings.port)):
            self._log.warning(
                "admin_port_exposed",
                address=f"{settings.host}:{settings.port}",
                reason="it has no authentication; let only what scrapes and probes reach it",
            )
        bound = self._listener.bind(TcpAddress(settings.host, settings.port))
        self._silent.start()
        self._listener.start()
        self._sweep()
        return str(bound)

    async def close(self) -> None:
        """Stop listening, and drop the requests under way."""
        self._listener.stop()
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._silent.close()
        for request in self._requests:
            request.cancel()
        if self._requests:
            await asyncio.wait(tuple(self._requests))

    def _sweep(self) -> None:
        self.doorstep.sweep()
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)

    def _begin(self, connection: SilentConnection) -> None:
        """Read the request of a connection that has sent its first bytes."""
        place = connection.place
        request = asyncio.create_task(self._serve(connection), name="admin request")

        def displace(reason: str) -> None:
            request.cancel()
            self._turned_away(reason, name_of(connection.peer))

        place.displace = displace
        self._requests.add(request)
        request.add_done_callback(lambda ended: self._ended(ended, connection))

    def _ended(self, request: asyncio.Task[None], connection: SilentConnection) -> None:
        self._requests.discard(request)
        self.doorstep.pending.leave(connection.place)
        if request.cancelled():
            connection.socket.close()  # it may have been cancelled before it began

    def _turned_away(self, reason: str, peer: str) -> None:
        if self.doorstep.turn_away(reason):
            self._log.warning("admin_client_turned_away", peer=peer, reason=reason)

    async def _serve(self, connection: SilentConnection) -> None:
        settings, place = self._settings, connection.place
        try:
            reader, writer = await asyncio.open_connection(sock=connection.socket, limit=settings.request_bytes)
        except OSError:
            connection.socket.close()
            return
        try:
            async with asyncio.timeout(settings.request_timeout_seconds):
                request = await reader.readuntil(_END_OF_HEADERS)
                if request == _PREFACE_HEAD + _END_OF_HEADERS:
                    await self._refuse_grpc(reader, writer)
                    return
                displace = place.displace
                self.doorstep.pending.leave(place)
                await self._send(writer, self._answer(request), place.address, displace)
        except asyncio.LimitOverrunError:
            writer.write(_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TEXT, b"request too large\n"))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            writer.transport.abort()  # The client sent nothing that could be answered, or does not read the answer.
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        finally:
            writer.close()

    async def _send(
        self, writer: asyncio.StreamWriter, answer: bytes, address: str, displace: Callable[[str], None]
    ) -> None:
        """Send an answer to one of the readers, which may lose its place among them."""
        place = self._readers.enter(address, displace)
        try:
            writer.write(answer)
            await writer.drain()
        finally:
            self._readers.leave(place)

    async def _refuse_grpc(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a gRPC client in its own protocol, until it leaves."""
        host, port = writer.get_extra_info("sockname")[:2]
        where = f"the gRPC port is {self._grpc_address}" if self._grpc_address else "this server has no gRPC port"
        refusal = Http2Refusal(f"{host}:{port} is an admin port (HTTP/1.1), which does not speak gRPC; {where}")
        if self.doorstep.turn_away("wrong_port"):
            self._log.warning(
                "grpc_client_at_admin_port",
                peer=str(writer.get_extra_info("peername")),
                grpc_address=self._grpc_address,
            )
        await reader.readexactly(len(_PREFACE_REST))
        writer.write(refusal.greeting)
        while data := await reader.read(self._settings.request_bytes):
            writer.write(refusal.feed(data))
            await writer.drain()

    def _answer(self, request: bytes) -> bytes:
        line = request.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(line) != 3 or not line[2].startswith("HTTP/1."):
            return _response(HTTPStatus.BAD_REQUEST, _TEXT, b"not an HTTP/1.x request\n")
        method, target = line[0], line[1].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, b"only GET and HEAD\n", "Allow: GET, HEAD\r\n")
        try:
            status, kind, body = self._page(target)
        except Exception:  # noqa: BLE001 - one broken figure must not take the health check with it
            self._log.exception("admin page failed", page=target)
            status, kind, body = HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, b"this page failed; see the log\n"
        return _response(status, kind, body, head=method == "HEAD")

    def _page(self, target: str) -> tuple[HTTPStatus, str, bytes]:
        match target:
            case "/health":
                return HTTPStatus.OK, _TEXT, b"ok\n"
            case "/ready":
                why = self._pages.not_ready()
                status = HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK
                return status, _TEXT, f"{why or 'ready'}\n".encode()
            case "/metrics":
                return HTTPStatus.OK, _PROMETHEUS, self._pages.metrics()
            case "/stats":
                return HTTPStatus.OK, _JSON, msgspec.json.encode({**self._pages.stats(), **_own_stats()})
            case _:
                return HTTPStatus.NOT_FOUND, _TEXT, b"there are /health, /ready, /metrics and /stats\n"


def _own_stats() -> dict[str, object]:
    """Return what every server says: its version, and its wall clock, which `tao doctor` compares with the others'."""
    return {"version": __version__, "clock_unix_ms": time.time_ns() // 1_000_000}


def _response(status: HTTPStatus, kind: str, body: bytes, headers: str = "", *, head: bool = False) -> bytes:
    text = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        f"Cache-Control: no-store\r\nConnection: close\r\n{headers}\r\n"
    )
    return text.encode() + (b"" if head else body)
