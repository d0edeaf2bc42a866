"""gRPC: the stream ``Graph.Session``, every unary method, health and reflection.

It is always on, for any language. A unary call is one request of the message layer and goes to the same handler as a
session's request; this module adds no meaning of its own. `tao.wire.grpc_admission` says who may call.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import grpc
from google.protobuf.message import Message

from tao.model.errors import TaoError, TooLarge, TooManyConnections
from tao.wire.address import parse_address
from tao.wire.doorstep import CallerPlaces, Doorstep
from tao.wire.grpc_admission import CallAdmission, Context, Handlers, OpenServices, abort, encoded, parsed
from tao.wire.grpc_calls import SessionStream, UnaryCall, WatchStream
from tao.wire.grpc_client import SERVER_NAME_KEY
from tao.wire.grpc_proxy import GrpcProxy
from tao.wire.identity import PeerIdentity, readmit
from tao.wire.session import RequestHandler
from tao.wire.settings import ServingSettings
from tao.wire.status import TOPOLOGY_VERSION_KEY
from tao.wire.unary import ChooseShard, UnaryMethod, unary_methods
from tao.wire.v1 import graph_pb2
from tao.wire.v1 import session_pb2 as pb

SERVICE = graph_pb2.DESCRIPTOR.services_by_name["Graph"].full_name


class GrpcServer:
    """Serves sessions and unary calls by handlers. ``name`` and ``topology_version`` are sent to every peer that opens
    a session. ``choose_shard`` chooses the shard of an object that a unary call adds without naming a neighbour."""

    def __init__(
        self,
        handler: RequestHandler,
        settings: ServingSettings,
        *,
        name: str,
        topology_version: Callable[[], int],
        choose_shard: ChooseShard,
        unary_handler: RequestHandler | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``unary_handler`` serves unary calls, whose callers do not know the topology; None: ``handler`` serves them
        too."""
        self._handler = handler
        self._unary_handler = unary_handler or handler
        self._settings = settings
        self._name = name
        self._topology_version = topology_version
        self._choose_shard = choose_shard
        self._server: grpc.aio.Server | None = None
        self.doorstep = Doorstep("grpc", settings.doorstep)
        self.proxy = GrpcProxy(settings, self.doorstep, name, tls)
        self._admission = CallAdmission(settings, self.proxy)
        self._open_services = OpenServices(self._admission, SERVICE)
        self._streams: set[SessionStream] = set()
        self._watches: set[WatchStream] = set()
        self._calls: set[UnaryCall] = set()
        self._places = {kind: CallerPlaces(settings, name, kind) for kind in ("sessions", "watches", "unary calls")}
        self._draining = False
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, address: str) -> str:
        """Listen on the address. Returns it with the port that was assigned. Raises `OSError` when the port is
        taken."""
        where = parse_address(address)
        server = grpc.aio.server(options=server_options(self._settings))
        services = {SERVICE: self._method_handlers(), **self._open_services.handlers()}
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(name, handlers) for name, handlers in services.items()]
        )
        try:
            bound = self.proxy.bind(where)
            server.add_insecure_port(self.proxy.private_address)
        except OSError:
            await self.proxy.close()
            raise
        await server.start()
        self._server = server
        await self._open_services.serve()
        self.proxy.start()
        self._sweep()
        return str(bound)

    async def drain(self, grace_seconds: float) -> None:
        """Report NOT_SERVING, ask sessions to leave, and wait until requests with a deadline have been answered or the
        grace period has passed. Requests that come meanwhile are served. Series go on until `close`."""
        self._draining = True
        await self._open_services.drain()
        for stream in tuple(self._streams):
            stream.go_away()
        connections = (*self._streams, *self._calls)
        waits = [asyncio.ensure_future(connection.until_idle()) for connection in connections]
        if waits:
            _, late = await asyncio.wait(waits, timeout=grace_seconds)
            for wait in late:
                wait.cancel()

    async def close(self) -> None:
        """End every call; answers already given are still written."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for stream in tuple(self._streams):
            stream.end()
        self.proxy.stop_listening()
        if self._server is not None:
            await self._server.stop(grace=self._settings.sweep_interval_seconds)
            self._server = None
        await self.proxy.close()

    def _sweep(self) -> None:
        outdated = [each for each in (*self._streams, *self._watches) if not each.admission_is_current]
        readmit(outdated, lambda stream: stream.check_admission())
        if self.doorstep.begin_sweep():
            self.proxy.turn_late_away()
        self.doorstep.report_left_out()
        seconds = self._settings.sweep_interval_seconds
        self._sweeper = asyncio.get_running_loop().call_later(seconds, self._sweep)

    def _method_handlers(self) -> Handlers:
        handlers: Handlers = {
            method.name: grpc.stream_unary_rpc_method_handler(self._unary(method), response_serializer=encoded)
            for method in unary_methods(self._choose_shard)
        }
        handlers["WatchConfiguration"] = grpc.stream_stream_rpc_method_handler(self._watch)
        handlers["Session"] = grpc.stream_stream_rpc_method_handler(self._session)
        return handlers

    def _unary(self, method: UnaryMethod) -> Callable[[object, Context], Awaitable[Message | None]]:
        async def call(_: object, context: Context) -> Message | None:
            try:
                peer = await self._admission.identify(context)
                with self._place("unary calls", peer):
                    asked = await self._admission.first_message(context, peer)
                    request = method.to_request(parsed(method.asked, asked))
                    unary = UnaryCall(self._unary_handler, self._settings, peer)
                    self._calls.add(unary)
                    try:
                        answer = await unary.ask(request, context.time_remaining())
                    finally:
                        self._calls.discard(unary)
                        unary.peer_gone()
                return self._fitting(method.to_reply(answer))
            except TaoError as error:
                await abort(context, error)
                return None

        return call

    @contextmanager
    def _place(self, kind: str, peer: PeerIdentity) -> Iterator[None]:
        """Give a call of a kind its place. Raises `Overloaded`."""
        places = self._places[kind]
        try:
            counted = places.enter(peer)
        except TooManyConnections as error:
            self._admission.turned_away(error.reason.lower(), peer.address, error.message)
            raise
        try:
            yield
        finally:
            places.leave(counted)

    def _fitting(self, reply: Message) -> Message:
        size, limit = reply.ByteSize(), self._settings.max_message_bytes
        if size > limit:
            raise TooLarge(f"the reply has {size} bytes, more than {limit}; ask for less at a time")
        return reply

    async def _watch(self, _: object, context: Context) -> None:
        try:
            admission = await self._admission.admit(context)
            with self._place("watches", admission.peer):
                asked = parsed(pb.Watch, await self._admission.first_message(context, admission.peer))
                stream = WatchStream(self._handler, self._settings, admission, context)
                self._watches.add(stream)
                try:
                    await stream.run(asked)
                finally:
                    self._watches.discard(stream)
        except TaoError as error:
            await abort(context, error)

    async def _session(self, _: object, context: Context) -> None:
        try:
            admission = await self._admission.admit(context)
            with self._place("sessions", admission.peer):
                await self._serve_session(SessionStream(self._handler, self._settings, admission, context), context)
        except TaoError as error:
            await abort(context, error)

    async def _serve_session(self, stream: SessionStream, context: Context) -> None:
        version = str(self._topology_version())
        await context.send_initial_metadata(((SERVER_NAME_KEY, self._name), (TOPOLOGY_VERSION_KEY, version)))
        self._streams.add(stream)
        try:
            if self._draining:
                stream.go_away()
            await stream.run()
        finally:
            self._streams.discard(stream)
            stream.peer_gone()


def server_options(settings: ServingSettings) -> list[tuple[str, int]]:
    """Return the settings as gRPC server options."""
    silence_ms = int(settings.silence_timeout_seconds * 1000)
    doorstep = settings.doorstep
    greeting_ms = int(doorstep.greeting_timeout_seconds * 1000)
    return [
        ("grpc.max_allowed_incoming_connections", doorstep.max_grpc_connections + doorstep.max_pending),
        ("grpc.max_concurrent_streams", doorstep.max_streams_per_connection),
        # It would fail calls of clients that keep the bound: an ended one is counted until Python has let go of it.
        ("grpc.http.overload_protection", 0),
        ("grpc.max_connection_idle_ms", int(doorstep.idle_connection_seconds * 1000)),
        # The client's first bytes of HTTP/2.
        ("grpc.server_handshake_timeout_ms", greeting_ms),
        ("grpc.http2.settings_timeout", greeting_ms),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.keepalive_time_ms", silence_ms // 2),
        ("grpc.keepalive_timeout_ms", silence_ms // 2),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients ping every few seconds by setting; gRPC's default would disconnect them for it.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
    ]
