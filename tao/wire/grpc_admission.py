"""The admission of gRPC calls: who may call is decided from the metadata, before a message is read.

grpc.aio reads the message of a unary method before it calls the handler, decompressed and whole, and waits for it for
as long as the client likes. So every method here is declared with a stream of requests, which on the wire is the same:
its handler is called when the metadata has arrived, and reads by itself. Of a caller without a credential no message is
read at all. One with a credential has a time for its first message, and a place at the doorstep until then.

Nothing can be served before the calls that have arrived earlier. So the calls of connections that have shown no
credential arrive at a bounded rate (`tao.wire.grpc_proxy`), and a crowd of refused calls of the others is answered
slowly: a connection whose calls are all held can send no more of them.

Health checks answer everyone, because a load balancer has no credential. A stranger gets the state of the server,
whatever service its unread message names; its calls are bounded per address.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final, Self, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection, reflection_pb2  # type: ignore[import-untyped]

from tao.model.errors import DeadlineExceeded, Overloaded, ProtocolError, TaoError
from tao.wire.convert import error_to_pb
from tao.wire.doorstep import LATE, AddressPool, Place
from tao.wire.grpc_client import AUTHORIZATION_KEY, BEARER, NAME_KEY, ROLE_KEY
from tao.wire.grpc_proxy import GrpcProxy, ProxiedConnection
from tao.wire.identity import CLIENT, Admission, Credentials, PeerIdentity, ShownCredentials
from tao.wire.settings import ServingSettings
from tao.wire.status import status_of, trailers_of

_logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[bytes, bytes]
Handlers: TypeAlias = "dict[str, grpc.RpcMethodHandler[bytes, Message]]"

Asked = TypeVar("Asked", bound=Message)


def parsed(kind: type[Asked], message: bytes) -> Asked:
    """Parse the message of a call. Raises `ProtocolError`; a deserializer of gRPC's own would end the call as UNKNOWN,
    with a traceback in the log and no reason."""
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise ProtocolError(f"not a message of type {kind.DESCRIPTOR.full_name}: {error}") from error


def encoded(message: Message) -> bytes:
    """Return the message as bytes: a serializer for gRPC."""
    return message.SerializeToString()


async def abort(context: Context, error: TaoError) -> None:
    """End a call with the error. gRPC ignores what its handler returns afterwards."""
    try:
        await context.abort(status_of(error), error.message, trailers_of(error_to_pb(error)))
    except grpc.aio.InternalError:
        # The caller has gone. gRPC would log a traceback for it, which strangers could have as many of as they like.
        return


class CallAdmission:
    """Admits the calls of one gRPC server."""

    def __init__(self, settings: ServingSettings, proxy: GrpcProxy) -> None:
        """``proxy`` has the connections by which calls come."""
        doorstep = settings.doorstep
        self.doorstep: Final = proxy.doorstep
        self._authenticator: Final = settings.authenticator
        self._proxy: Final = proxy
        self._on_refused: Final = settings.on_refused
        self._open_calls: Final = AddressPool(doorstep.max_open_calls, doorstep.max_open_calls_per_address)
        self._held = 0
        self._prompt_until = 0.0
        """The time for which prompt refusals have been made, each for its part of a second."""

    def peer(self, context: Context) -> PeerIdentity:
        """Return who calls. Raises as `tao.wire.identity.identify`, and `Overloaded` when its connection finds no
        place."""
        connection = self._connection(context)
        peer = self._authenticator.identify(_shown(context, connection))
        connection.prove(peer)
        return peer

    async def identify(self, context: Context) -> PeerIdentity:
        """Return who calls. A caller that is turned away is counted, and held for a while if there are many. Raises as
        `peer`."""
        connection = self._connection(context)
        shown = _shown(context, connection)
        try:
            peer = self._authenticator.identify(shown)
        except TaoError as error:
            await self._refuse(shown, error)
            raise
        self._prove(connection, peer)
        return peer

    async def admit(self, context: Context) -> Admission:
        """Admit the caller of a stream that stays open; else as `identify`."""
        connection = self._connection(context)
        shown = _shown(context, connection)
        try:
            admission = self._authenticator.admit(shown)
        except TaoError as error:
            await self._refuse(shown, error)
            raise
        self._prove(connection, admission.peer)
        return admission

    def _prove(self, connection: ProxiedConnection, peer: PeerIdentity) -> None:
        try:
            connection.prove(peer)
        except TaoError as error:
            self.turned_away(error.reason.lower(), peer.address, error.message)
            raise

    async def _refuse(self, shown: ShownCredentials, error: TaoError) -> None:
        """Count a caller that is turned away, and hold it while there are many of them."""
        self.turned_away(error.reason.lower(), shown.address, error.message)
        self._on_refused(PeerIdentity(shown.stated.name, shown.stated.role, shown.address), error)
        doorstep, now = self.doorstep.settings, time.monotonic()
        if self._prompt_until <= now + 1.0:
            self._prompt_until = max(self._prompt_until, now) + 1 / doorstep.refusals_per_second
        elif self._held < doorstep.max_held_refusals:
            self._held += 1
            try:
                await asyncio.sleep(doorstep.held_refusal_seconds + self._held / 1_000)
            finally:
                self._held -= 1

    async def first_message(self, context: Context, peer: PeerIdentity) -> bytes:
        """Read the first message of a caller that was identified as ``peer``. Raises `DeadlineExceeded`, and
        `Overloaded` when the call has lost its place at the doorstep."""
        seconds, connection = self.doorstep.settings.greeting_timeout_seconds, self._connection(context)
        held: _HeldPlace | None = None
        try:
            async with asyncio.timeout(seconds) as time_limit:
                with _HeldPlace(self.doorstep.pending, connection.network, time_limit) as held:
                    message: object = await context.read()
        except TimeoutError:
            error: TaoError = DeadlineExceeded(f"the call sent no message within {seconds} s")
            if held is not None and held.lost:
                error = Overloaded("newer calls have taken the place of this one, which has sent no message yet")
            self.turned_away(held.lost if held is not None and held.lost else LATE, peer.address, error.message)
            raise error from None
        if not isinstance(message, bytes):
            raise ProtocolError("the call ended without a message")
        return message

    def admit_stranger(self, context: Context) -> None:
        """Note that a call is admitted that needs no credential."""
        self._connection(context).call_admitted()

    @asynccontextmanager
    async def open_call(self, context: Context) -> AsyncIterator[None]:
        """Run a call that needs no credential within the bounds of such calls. Raises `Overloaded` when newer ones have
        taken its place."""
        connection = self._connection(context)
        held: _HeldPlace | None = None
        try:
            async with asyncio.timeout(None) as time_limit:
                with _HeldPlace(self._open_calls, connection.network, time_limit) as held:
                    yield
        except TimeoutError:
            if held is None or not held.lost:
                raise
            error = Overloaded("newer calls of this kind have taken the place of this one")
            self.turned_away(held.lost, connection.address, error.message)
            raise error from None

    def _connection(self, context: Context) -> ProxiedConnection:
        return self._proxy.connection_of(context.peer())

    def turned_away(self, reason: str, address: str, why: str) -> None:
        if self.doorstep.turn_away(reason):
            _logger.warning("a call of %s is turned away: %s", address, why)


def _shown(context: Context, connection: ProxiedConnection) -> ShownCredentials:
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    token = metadata.get(AUTHORIZATION_KEY, "").removeprefix(BEARER)
    stated = Credentials(metadata.get(NAME_KEY, ""), metadata.get(ROLE_KEY, CLIENT), token)
    return ShownCredentials(stated, connection.uris, connection.address)


class _HeldPlace:
    """A place in a pool that a call holds. Losing it ends the time limit of the call."""

    __slots__ = ("_address", "_place", "_pool", "_time_limit", "lost")

    def __init__(self, pool: AddressPool, address: str, time_limit: asyncio.Timeout) -> None:
        self._pool = pool
        self._address = address
        self._time_limit = time_limit
        self._place: Place
        self.lost = ""
        """Why the place was lost."""

    def __enter__(self) -> Self:
        self._place = self._pool.enter(self._address, self._displace)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.leave(self._place)

    def _displace(self, reason: str) -> None:
        # Raised where the time limit has passed already: the call ends by it, and its task has not run yet.
        with suppress(RuntimeError):
            self._time_limit.reschedule(0.0)
            self.lost = reason


class OpenServices:
    """gRPC's own services: health, for everyone, and reflection, for callers with a credential."""

    def __init__(self, admission: CallAdmission, service: str) -> None:
        """``service`` is the name of the service whose state is reported."""
        self._admission: Final = admission
        self._service: Final = service
        self._health: Final = health.aio.HealthServicer()
        names = (service, health.SERVICE_NAME, reflection.SERVICE_NAME)
        self._reflection: Final = reflection.aio.ReflectionServicer(names)

    def handlers(self) -> dict[str, Handlers]:
        """Return the handlers of the methods, by service and method."""
        return {
            health.SERVICE_NAME: {
                "Check": grpc.stream_unary_rpc_method_handler(self._check, response_serializer=encoded),
                "Watch": grpc.stream_stream_rpc_method_handler(self._watch, response_serializer=encoded),
            },
            reflection.SERVICE_NAME: {
                "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
                    self._reflect, response_serializer=encoded
                )
            },
        }

    async def serve(self) -> None:
        """Report SERVING from now on."""
        for name in ("", self._service):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def drain(self) -> None:
        """Report NOT_SERVING from now on."""
        await self._health.enter_graceful_shutdown()

    async def _check(self, _: object, context: Context) -> Message | None:
        try:
            reply: Message = await self._health.Check(await self._asked_of_health(context), context)
        except TaoError as error:
            await abort(context, error)
            return None
        return reply

    async def _watch(self, _: object, context: Context) -> None:
        try:
            async with self._admission.open_call(context):
                await self._health.Watch(await self._asked_of_health(context), context)
        except TaoError as error:
            await abort(context, error)

    async def _asked_of_health(self, context: Context) -> health_pb2.HealthCheckRequest:
        try:
            peer = self._admission.peer(context)
        except TaoError:
            self._admission.admit_stranger(context)
            return health_pb2.HealthCheckRequest()
        return parsed(health_pb2.HealthCheckRequest, await self._admission.first_message(context, peer))

    async def _reflect(self, _: object, context: Context) -> None:
        try:
            await self._admission.identify(context)
            async with self._admission.open_call(context):
                async for reply in self._reflection.ServerReflectionInfo(_reflection_requests(context), context):
                    await context.write(reply)
        except TaoError as error:
            await abort(context, error)


async def _reflection_requests(context: Context) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
    while isinstance(message := await context.read(), bytes):
        yield parsed(reflection_pb2.ServerReflectionRequest, message)
