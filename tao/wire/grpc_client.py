"""The client's end of a session over the gRPC stream ``Graph.Session``.

A message costs more than on frames, but the stream passes every proxy and load balancer that speaks HTTP/2, and every
server offers it.
"""

from __future__ import annotations

import asyncio
from collections import deque

import grpc

from tao.model.errors import Overloaded, TaoError, Unavailable
from tao.wire.address import parse_address
from tao.wire.client_session import NumberedSession
from tao.wire.identity import Credentials
from tao.wire.session import Session
from tao.wire.settings import SessionSettings
from tao.wire.status import Trailers, error_of, has_reason
from tao.wire.tls_mismatch import explained
from tao.wire.v1 import session_pb2 as pb

SESSION_METHOD = "/tao.v1.Graph/Session"
SERVER_NAME_KEY = "tao-server-name"
NAME_KEY = "tao-name"
ROLE_KEY = "tao-role"
AUTHORIZATION_KEY = "authorization"
BEARER = "Bearer "

_Method = grpc.aio.StreamStreamMultiCallable[bytes, pb.Answer]
_Call = grpc.aio.StreamStreamCall[bytes, pb.Answer]


def channel_options(settings: SessionSettings) -> list[tuple[str, int]]:
    """Return the settings as gRPC channel options."""
    return [
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.keepalive_time_ms", int(settings.ping_interval_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", int(settings.ping_timeout_seconds * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        # A session is one stream: it reconnects under its own back-off (tao.wire.links), not under gRPC's.
        ("grpc.enable_retries", 0),
        # Sessions of one process must not share one connection.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def greeting_metadata(credentials: Credentials) -> tuple[tuple[str, str], ...]:
    """Return as metadata what a Hello says on frames."""
    stated = ((NAME_KEY, credentials.name), (ROLE_KEY, credentials.role))
    return (*stated, (AUTHORIZATION_KEY, BEARER + credentials.token)) if credentials.token else stated


async def connect_grpc(
    address: str,
    settings: SessionSettings,
    credentials: Credentials,
    channel_credentials: grpc.ChannelCredentials | None = None,
) -> Session:
    """Connect and wait for the server's greeting. Raises as `tao.wire.frames_client.connect_frames` does."""
    target, metadata = str(parse_address(address)), greeting_metadata(credentials.with_token())
    options = channel_options(settings)
    if channel_credentials is None:
        channel = grpc.aio.insecure_channel(target, options)
    else:
        channel = grpc.aio.secure_channel(target, channel_credentials, options)
    try:
        async with asyncio.timeout(settings.connect_timeout_seconds):
            call, server_name = await _greeted(channel, metadata)
    except TimeoutError:
        await channel.close()
        raise Unavailable(f"{address} did not answer within {settings.connect_timeout_seconds} s") from None
    except Unavailable as failure:
        await channel.close()
        if failure.is_refusal:  # a server has said it
            raise
        with_tls, seconds = channel_credentials is not None, settings.connect_timeout_seconds
        raise await explained(failure, address, with_tls=with_tls, within_seconds=seconds) from None
    except BaseException:
        await channel.close()
        raise
    return GrpcSession(asyncio.get_running_loop(), address, settings, channel, call, server_name)


async def _greeted(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> tuple[_Call, str]:
    """Begin a session, and return it with the name of the server. Raises what the server or gRPC ends the call with."""
    method: _Method = channel.stream_stream(SESSION_METHOD, response_deserializer=pb.Answer.FromString)
    try:
        call: _Call = method(metadata=metadata)
        greeting = await call.initial_metadata()
        names = [value for key, value in greeting or () if key == SERVER_NAME_KEY]
        if not names or call.done():  # A server that accepts sends its name first; a rejection may lag behind.
            raise _refusal(await call.code(), await call.details(), await call.trailing_metadata() or ())
    except grpc.aio.AioRpcError as error:
        raise _refusal(error.code(), error.details(), error.trailing_metadata() or ()) from error
    return call, str(names[0])


def _refusal(code: grpc.StatusCode, details: str | None, trailers: Trailers) -> TaoError:
    error = error_of(code, details, trailers)
    error.is_refusal = has_reason(trailers) and not isinstance(error, Overloaded)
    return error


class GrpcSession(NumberedSession):
    """A `Session` over a gRPC stream; made by `connect_grpc`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: str,
        settings: SessionSettings,
        channel: grpc.aio.Channel,
        call: _Call,
        server_name: str,
    ) -> None:
        super().__init__(loop, address, settings)
        self.server_name = server_name
        self._channel = channel
        self._call = call
        self._out: deque[bytes] = deque()
        self._out_bytes = 0
        self._something_to_send = asyncio.Event()
        self._opened()
        self._failure: TaoError | None = None
        self._writer = loop.create_task(self._write())
        self._reader = loop.create_task(self._read())

    async def close(self) -> None:
        """See `Session.close`."""
        self._end(Unavailable(f"the session with {self._address} was closed here"))
        await asyncio.wait([self._reader, self._writer])

    def _transmit(self, message: bytes) -> None:
        self._out.append(message)
        self._out_bytes += len(message)
        self._something_to_send.set()

    def _unsent_bytes(self) -> int:
        return self._out_bytes

    def _shut(self) -> None:
        self._end(Unavailable(f"{self._address} is draining; connect again"))

    def _end(self, error: TaoError) -> None:
        self._failure = self._failure or error
        self._writer.cancel()
        self._call.cancel()  # wakes the reader, which closes the channel
        self._lost(self._failure)

    async def _write(self) -> None:
        try:
            while True:
                await self._something_to_send.wait()
                self._something_to_send.clear()
                while self._out:
                    message = self._out.popleft()
                    self._out_bytes -= len(message)
                    await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader learns the reason and reports it

    async def _read(self) -> None:
        error: TaoError = Unavailable(f"{self._address} has ended the session")
        try:
            while (answer := await self._call.read()) is not grpc.aio.EOF:
                assert isinstance(answer, pb.Answer)
                self._answer_arrived(answer)
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                error = error_of(code, await self._call.details(), await self._call.trailing_metadata() or ())
        except grpc.aio.AioRpcError as failed:
            error = error_of(failed.code(), failed.details(), failed.trailing_metadata() or ())
        except asyncio.CancelledError:
            # `_end` has cancelled the call; a task cancelled from outside takes the same way.
            error = Unavailable(f"the session with {self._address} was cancelled")
        finally:
            self._end(error)
            await self._channel.close()
