"""gRPC: the stream ``Graph.Session``, every unary method, health and reflection.

It is always on, for any language. A unary call is one request of the message layer and goes to the same handler as a
session's request; this module adds no meaning of its own. Health and reflection answer everyone, because a load
balancer has no token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from tao.model.errors import TaoError, TooLarge
from tao.wire.address import TcpAddress, parse_address
from tao.wire.convert import error_to_pb
from tao.wire.grpc_calls import Context, SessionStream, UnaryCall, WatchStream, parsed
from tao.wire.grpc_client import AUTHORIZATION_KEY, BEARER, NAME_KEY, ROLE_KEY, SERVER_NAME_KEY
from tao.wire.identity import PeerIdentity, check_token
from tao.wire.session import RequestHandler
from tao.wire.settings import ServingSettings
from tao.wire.status import TOPOLOGY_VERSION_KEY, status_of, trailers_of
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
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """``unary_handler`` serves unary calls, whose callers do not know the topology; None: ``handler`` serves them
        too."""
        self._handler = handler
        self._unary_handler = unary_handler or handler
        self._settings = settings
        self._name = name
        self._topology_version = topology_version
        self._choose_shard = choose_shard
        self._credentials = credentials
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()
        self._streams: set[SessionStream] = set()
        self._calls: set[UnaryCall] = set()
        self._draining = False

    async def start(self, address: str) -> str:
        """Listen on the address. Returns it with the port that was assigned. Raises `OSError` when the port is
        taken."""
        where = parse_address(address)
        server = grpc.aio.server(
            maximum_concurrent_rpcs=self._settings.max_connections, options=server_options(self._settings)
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._method_handlers()),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            if self._credentials is None:
                port = server.add_insecure_port(str(where))
            else:
                port = server.add_secure_port(str(where), self._credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen at {address}: {error}") from error
        await server.start()
        self._server = server
        for service in ("", SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        return str(TcpAddress(where.host, port)) if isinstance(where, TcpAddress) else str(where)

    async def drain(self, grace_seconds: float) -> None:
        """Report NOT_SERVING, ask sessions to leave, and wait until requests with a deadline have been answered or the
        grace period has passed. Requests that come meanwhile are served. Series go on until `close`."""
        self._draining = True
        await self._health.enter_graceful_shutdown()
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
        for stream in tuple(self._streams):
            stream.end()
        if self._server is not None:
            await self._server.stop(grace=self._settings.sweep_interval_seconds)
            self._server = None

    def _method_handlers(self) -> dict[str, grpc.RpcMethodHandler[bytes, Message]]:
        handlers: dict[str, grpc.RpcMethodHandler[bytes, Message]] = {
            method.name: grpc.unary_unary_rpc_method_handler(self._unary(method), response_serializer=_encode)
            for method in unary_methods(self._choose_shard)
        }
        handlers["WatchConfiguration"] = grpc.unary_stream_rpc_method_handler(self._watch)
        handlers["Session"] = grpc.stream_stream_rpc_method_handler(self._session)
        return handlers

    def _unary(self, method: UnaryMethod) -> Callable[[bytes, Context], Awaitable[Message]]:
        async def call(asked: bytes, context: Context) -> Message:
            try:
                request = method.to_request(parsed(method.asked, asked))
                unary = UnaryCall(self._unary_handler, self._settings, self._peer(context))
                self._calls.add(unary)
                try:
                    answer = await unary.ask(request, context.time_remaining())
                finally:
                    self._calls.discard(unary)
                    unary.peer_gone()
                return self._fitting(method.to_reply(answer))
            except TaoError as error:
                await _abort(context, error)
                raise

        return call

    def _fitting(self, reply: Message) -> Message:
        size, limit = reply.ByteSize(), self._settings.max_message_bytes
        if size > limit:
            raise TooLarge(f"the reply has {size} bytes, more than {limit}; ask for less at a time")
        return reply

    async def _watch(self, asked: bytes, context: Context) -> None:
        try:
            stream = WatchStream(self._handler, self._settings, self._peer(context), context)
            await stream.run(parsed(pb.Watch, asked))
        except TaoError as error:
            await _abort(context, error)

    async def _session(self, _: object, context: Context) -> None:
        try:
            stream = SessionStream(self._handler, self._settings, self._peer(context), context)
        except TaoError as error:
            await _abort(context, error)
            return
        version = str(self._topology_version())
        await context.send_initial_metadata(((SERVER_NAME_KEY, self._name), (TOPOLOGY_VERSION_KEY, version)))
        self._streams.add(stream)
        try:
            if self._draining:
                stream.go_away()
            await stream.run()
        except TaoError as error:
            await _abort(context, error)
        finally:
            self._streams.discard(stream)
            stream.peer_gone()

    def _peer(self, context: Context) -> PeerIdentity:
        shown = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        role = shown.get(ROLE_KEY, "client")
        stated = PeerIdentity(shown.get(NAME_KEY, ""), role, context.peer())
        try:
            check_token(self._settings.accepted_tokens, shown.get(AUTHORIZATION_KEY, "").removeprefix(BEARER), role)
        except TaoError as error:
            self._settings.on_refused(stated, error)
            raise
        return stated


def server_options(settings: ServingSettings) -> list[tuple[str, int]]:
    """Return the settings as gRPC server options."""
    silence_ms = int(settings.silence_timeout_seconds * 1000)
    return [
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.keepalive_time_ms", silence_ms // 2),
        ("grpc.keepalive_timeout_ms", silence_ms // 2),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients ping every few seconds by setting; gRPC's default would disconnect them for it.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        # Two servers on one port would share its clients at random.
        ("grpc.so_reuseport", 0),
    ]


def _encode(message: Message) -> bytes:
    return message.SerializeToString()


async def _abort(context: Context, error: TaoError) -> None:
    await context.abort(status_of(error), error.message, trailers_of(error_to_pb(error)))
