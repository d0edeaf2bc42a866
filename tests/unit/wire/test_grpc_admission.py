"""Who may call over gRPC is decided from the metadata: of a stranger no message is read, and one with a credential has
a time for its first one."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]

from tao.wire import grpc_proxy
from tao.wire.doorstep import AddressPool, Place
from tao.wire.grpc_admission import _HeldPlace
from tao.wire.grpc_client import greeting_metadata
from tao.wire.grpc_proxy import SAVED_CALLS
from tao.wire.grpc_server import SERVICE, GrpcServer
from tao.wire.http2_refusal import PREFACE
from tao.wire.identity import CLIENT, AcceptedCredentials, AcceptedToken, Credentials, PeerAuthenticator
from tao.wire.session import Reply
from tao.wire.settings import DoorstepSettings, ServingSettings
from tao.wire.tls_mismatch import is_http2
from tao.wire.v1 import graph_pb2
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.certificates import TestAuthority
from tests.rigs.garbage import garbage_types
from tests.rigs.pacing import ManualClock, until
from tests.rigs.paused_handshake import PausedHandshake

SECONDS = 20.0
OBJECT = graph_pb2.ObjGetRequest(id=1 << 47 | 1).SerializeToString()
CREDENTIAL = greeting_metadata(Credentials("web", "client", "secret"))
WRONG = greeting_metadata(Credentials("web", "client", "guessed"))
DOORSTEP = DoorstepSettings(
    greeting_timeout_seconds=SECONDS, max_pending_per_address=2, max_open_calls_per_address=2, max_log_lines=3
)
METHODS = ("ObjGet", "AssocAdd", "WatchConfiguration", "Session")


class Objects:
    """Finds every object."""

    def handle(self, request: pb.Request, reply: Reply) -> None:
        reply.send(pb.Answer(read=pb.ReadAnswer(values=[bytes(8) + b"\1\0\0\0"])))


Open = grpc.aio.StreamUnaryCall[bytes, bytes]


class Port:
    """A server that asks for a token, and calls of it whose messages a test sends itself."""

    def __init__(self, server: GrpcServer, address: str, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.channel = channel
        self.address = address

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Port]:
        """Open a connection of its own to the same server."""
        async with grpc.aio.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            yield Port(self.server, self.address, channel)

    def open(self, method: str, metadata: tuple[tuple[str, str], ...] = CREDENTIAL, service: str = SERVICE) -> Open:
        """Open a call without sending a message."""
        opened: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = self.channel.stream_unary(f"/{service}/{method}")
        return opened(metadata=metadata, timeout=SECONDS)

    async def get(self, message: bytes = OBJECT, compression: grpc.Compression | None = None) -> grpc.StatusCode:
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(f"/{SERVICE}/ObjGet")
        return await method(message, metadata=CREDENTIAL, timeout=SECONDS, compression=compression).code()


@asynccontextmanager
async def serving(doorstep: DoorstepSettings, tls: ssl.SSLContext | None = None) -> AsyncIterator[Port]:
    tokens = tuple(
        AcceptedToken(token, CLIENT, sha256(token.encode()).digest(), caller)
        for token, caller in (("secret", "web"), ("other", "batch"))
    )
    settings = ServingSettings(authenticator=PeerAuthenticator(AcceptedCredentials(tokens)), doorstep=doorstep)
    server = GrpcServer(Objects(), settings, name="srv", topology_version=lambda: 1, choose_shard=lambda: 0, tls=tls)
    address = await server.start("127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
            yield Port(server, address, channel)
    finally:
        await server.close()


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    async with serving(DOORSTEP) as port:
        yield port


@pytest.mark.parametrize("method", METHODS)
async def test_a_stranger_is_refused_before_it_has_sent_a_message(port: Port, method: str) -> None:
    for metadata in ((), WRONG):
        assert await port.open(method, metadata).code() is grpc.StatusCode.UNAUTHENTICATED
    assert await port.get() is grpc.StatusCode.OK
    assert port.server.doorstep.turned_away == {"unauthorized": 2}


async def test_a_call_that_sends_no_message_ends_after_the_time_for_it() -> None:
    async with serving(replace(DOORSTEP, greeting_timeout_seconds=0.1)) as port:
        call = port.open("ObjGet")
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "sent no message within 0.1 s" in str(await call.details())
        session = port.open("Session")  # A session may wait for its first request as long as it likes.
        assert await port.open("WatchConfiguration").code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not session.done()
        session.cancel()


async def test_calls_without_a_message_displace_each_other_and_no_whole_call(port: Port) -> None:
    calls = [port.open("ObjGet") for _ in range(6)]
    doorstep = port.server.doorstep
    # All of them have come: two that come while a whole call is read would take its place, because two is all there is.
    await until(lambda: doorstep.turned_away["displaced"] + len(doorstep.pending) == 6)
    assert await port.get() is grpc.StatusCode.OK
    assert doorstep.turned_away["displaced"] == 5
    await until(lambda: sum(call.done() for call in calls) == 5)
    (pending,) = (call for call in calls if not call.done())
    assert {await call.code() for call in calls if call.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    await pending.write(OBJECT)
    await pending.done_writing()
    assert await pending.code() is grpc.StatusCode.OK


async def test_a_call_whose_time_has_just_passed_can_be_displaced() -> None:
    loop, pool, entered, lost = asyncio.get_running_loop(), AddressPool(1, 1), list[Place](), list[str]()

    async def call() -> None:
        async with asyncio.timeout(None) as time_limit:
            with _HeldPlace(pool, "ipv4:192.0.2.1:5", time_limit) as held:
                time_limit.reschedule(0.0)
                # Runs after the time limit has passed, and before this task.
                loop.call_soon(lambda: entered.append(pool.enter("192.0.2.1", lambda _: None)))
                try:
                    await asyncio.Event().wait()
                finally:
                    lost.append(held.lost)

    with pytest.raises(TimeoutError):
        await call()
    assert len(entered) == 1
    assert lost == [""]


async def test_a_stranger_learns_the_health_of_the_server_and_its_message_is_not_read(port: Port) -> None:
    stub = health_pb2_grpc.HealthStub(port.channel)
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    unread = port.open("Check", (), "grpc.health.v1.Health")
    assert health_pb2.HealthCheckResponse.FromString(await unread).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="no such"), metadata=CREDENTIAL)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert not port.server.doorstep.turned_away
    await port.server.drain(0.0)
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_watches_of_the_health_are_bounded_per_address(port: Port) -> None:
    stub = health_pb2_grpc.HealthStub(port.channel)
    watches = []
    for _ in range(3):
        watches.append(stub.Watch(health_pb2.HealthCheckRequest()))
        assert (await watches[-1].read()).status == health_pb2.HealthCheckResponse.SERVING
    assert await watches.pop(0).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await port.server.drain(0.0)
    for watch in watches:
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


async def test_reflection_is_for_callers_with_a_credential(port: Port) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(port.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    assert await stub.ServerReflectionInfo(iter([asked])).code() is grpc.StatusCode.UNAUTHENTICATED
    listed = await stub.ServerReflectionInfo(iter([asked]), metadata=CREDENTIAL).read()
    assert SERVICE in {each.name for each in listed.list_services_response.service}


async def test_a_message_that_is_too_large_when_decompressed_is_refused(port: Port) -> None:
    assert await port.get(compression=grpc.Compression.Gzip) is grpc.StatusCode.OK
    bomb = bytes(100 << 20)
    assert await port.get(bomb, grpc.Compression.Gzip) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_crowd_of_strangers_is_counted_and_not_all_logged(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        calls = [port.open("ObjGet", WRONG) for _ in range(30)]
        for call in calls[:10]:
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        for call in calls[10:]:
            call.cancel()  # a caller that is gone before its refusal leaves no traceback either
        assert await port.get() is grpc.StatusCode.OK
    assert len(caplog.messages) == 3
    assert all("is turned away: the token is missing or wrong" in each for each in caplog.messages)


async def test_a_client_with_more_calls_than_a_connection_may_have_waits_with_the_rest() -> None:
    async with serving(DoorstepSettings()) as port, port.connection() as connection:
        codes = await asyncio.gather(*(connection.get() for _ in range(200)))
    assert set(codes) == {grpc.StatusCode.OK}


async def test_a_crowd_of_refused_calls_is_held_and_fills_its_own_connections() -> None:
    doorstep = replace(
        DOORSTEP,
        refusals_per_second=0.001,
        held_refusal_seconds=SECONDS,
        max_held_refusals=5,
        max_streams_per_connection=4,
    )
    async with serving(doorstep) as port, port.connection() as stranger:
        # The one that goes beyond what a second has, and those that then fill the connection.
        assert await stranger.open("ObjGet", WRONG).code() is grpc.StatusCode.UNAUTHENTICATED
        held = [stranger.open("ObjGet", WRONG) for _ in range(8)]
        await until(lambda: port.server.doorstep.turned_away["unauthorized"] == 5)
        assert await port.get() is grpc.StatusCode.OK
        assert not any(call.done() for call in held)
        # Beyond the bound on all held calls, another connection's are refused at once again, all but one.
        async with port.connection() as another:
            first, second = another.open("Session", WRONG), another.open("WatchConfiguration", WRONG)
            await until(lambda: first.done() or second.done())
            assert port.server.doorstep.turned_away["unauthorized"] == 7
        for call in held:
            call.cancel()
        await until(lambda: port.server._admission._held == 0)


@pytest.mark.parametrize("method", METHODS)
async def test_a_caller_with_all_the_calls_that_it_may_have_locks_nobody_out(method: str) -> None:
    async with serving(DoorstepSettings(max_connections_per_caller=2)) as port:
        calls = [port.open(method) for _ in range(3)]
        await until(lambda: any(call.done() for call in calls))
        (refused,) = (call for call in calls if call.done())
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "of web already" in str(await refused.details())
        other = port.open(method, greeting_metadata(Credentials("batch", "client", "other")))
        assert port.server.doorstep.turned_away == {"too_many_connections": 1}
        if method == "ObjGet":
            await other.write(OBJECT)
            await other.done_writing()
            assert await other.code() is grpc.StatusCode.OK
        for call in (*calls, other):
            call.cancel()
        await until(lambda: not any(map(len, port.server._places.values())))


# ---- the proxy in front of gRPC -------------------------------------------------------------------------------------


async def test_calls_of_a_stranger_reach_grpc_at_a_bounded_rate_and_an_honest_call_is_not_behind_them() -> None:
    doorstep = DoorstepSettings(stranger_calls_per_second=0.001)
    async with serving(doorstep) as port, port.connection() as stranger, port.connection() as honest:
        assert await honest.get() is grpc.StatusCode.OK
        calls = [stranger.open("ObjGet", WRONG) for _ in range(30)]
        await until(lambda: port.server.doorstep.turned_away["unauthorized"] == SAVED_CALLS)
        # The calls that were saved up are spent; a connection that has shown its credential needs none.
        codes = await asyncio.gather(*(honest.get() for _ in range(20)))
        assert set(codes) == {grpc.StatusCode.OK}
        assert port.server.doorstep.turned_away["unauthorized"] == SAVED_CALLS
        for call in calls:
            call.cancel()


async def test_a_connection_that_has_shown_a_credential_leaves_the_strangers_and_gives_its_turns_back() -> None:
    async with serving(DoorstepSettings(stranger_connections_per_second=0.001, max_pending_per_address=3)) as port:
        # Each of them takes a turn that nobody else gives back in a thousand seconds.
        for _ in range(10):
            async with port.connection() as connection:
                assert await connection.get() is grpc.StatusCode.OK
                assert len(port.server.proxy.strangers) == 0
                assert len(port.server.proxy.places) == 1
            await until(lambda: len(port.server.proxy.places) == 0)


async def test_silent_connections_displace_each_other_and_nobody_else() -> None:
    async with serving(replace(DOORSTEP, max_pending_per_address=4)) as port:
        assert await port.get() is grpc.StatusCode.OK
        host, _, number = port.address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(number)) for _ in range(12)]
        await until(lambda: port.server.doorstep.turned_away["displaced"] == 8)
        assert len(port.server.proxy.strangers) == 4
        assert await port.get() is grpc.StatusCode.OK
        reads = [asyncio.ensure_future(reader.read()) for reader, _ in silent]  # each up to its end
        await until(lambda: sum(read.done() for read in reads) == 8)
        for _, writer in silent:
            writer.transport.abort()
        await until(lambda: len(port.server.proxy.strangers) == 0)
        await asyncio.gather(*reads, return_exceptions=True)


async def test_connections_that_wait_for_their_turn_displace_none_that_has_begun(tmp_path: Path) -> None:
    files = TestAuthority(tmp_path).issue("srv")
    doorstep = DoorstepSettings(
        max_pending_per_address=8,  # the turns of two starts with TLS
        stranger_connections_per_second=0.001,
        greeting_timeout_seconds=SECONDS,
    )
    async with serving(doorstep, files.server_context()) as port:
        newcomer = await PausedHandshake.begin(port.address, files.client_context())
        host, _, number = port.address.rpartition(":")
        crowd = [await asyncio.open_connection(host, int(number)) for _ in range(24)]
        await until(lambda: port.server.doorstep.turned_away["displaced"] == 17)
        assert is_http2(await newcomer.say(PREFACE))
        newcomer.close()
        for _, writer in crowd:
            writer.transport.abort()


async def test_connections_that_wait_for_their_turn_can_be_displaced() -> None:
    doorstep = replace(DOORSTEP, max_pending_per_address=2, stranger_connections_per_second=0.001)
    async with serving(doorstep) as port:
        host, _, number = port.address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(number)) for _ in range(6)]
        await until(lambda: port.server.doorstep.turned_away["displaced"] == 4)
        assert len(port.server.proxy.starts) <= 2
        for _, writer in silent:
            writer.transport.abort()


async def test_a_client_of_another_protocol_is_turned_away_before_grpc_sees_it(port: Port) -> None:
    host, _, number = port.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    with suppress(ConnectionError):
        await reader.read()
    await until(lambda: port.server.doorstep.turned_away["protocol_error"] == 1)
    writer.transport.abort()


async def test_a_call_that_did_not_come_by_the_proxy_is_refused_whatever_it_shows(port: Port) -> None:
    address = port.server.proxy.private_address
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        inside = Port(port.server, address, channel)
        assert await inside.open("ObjGet").code() is grpc.StatusCode.UNAVAILABLE
        assert await inside.open("Session").code() is grpc.StatusCode.UNAVAILABLE
    assert await port.get() is grpc.StatusCode.OK


async def test_one_caller_has_half_of_the_grpc_connections(port: Port) -> None:
    async with AsyncExitStack() as stack, serving(DoorstepSettings(max_grpc_connections=4)) as small:
        connections = [await stack.enter_async_context(small.connection()) for _ in range(3)]
        codes = [await connection.get() for connection in connections]
        assert codes == [grpc.StatusCode.OK, grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED]
        assert small.server.doorstep.turned_away == {"too_many_connections": 1}


async def test_a_client_that_does_not_read_keeps_no_connection_that_grpc_has_ended() -> None:
    settings = ServingSettings(blocked_timeout_seconds=0.01)
    server = GrpcServer(Objects(), settings, name="srv", topology_version=lambda: 1, choose_shard=lambda: 0)
    host, _, number = (await server.start("127.0.0.1:0")).rpartition(":")
    _, writer = await asyncio.open_connection(host, int(number), limit=1)
    await until(lambda: len(server.proxy.strangers) == 1 and bool(server.proxy._by_name))
    (connection,) = server.proxy._by_name.values()
    connection.from_upstream(bytes(64 << 20))
    connection.upstream_lost()
    await asyncio.wait_for(connection.closed, SECONDS)
    writer.transport.abort()
    await server.close()


async def test_a_client_that_does_not_read_is_disconnected_although_grpc_goes_on() -> None:
    patient = DoorstepSettings(greeting_timeout_seconds=1_000.0)
    settings = ServingSettings(blocked_timeout_seconds=0.01, doorstep=patient)
    server = GrpcServer(Objects(), settings, name="srv", topology_version=lambda: 1, choose_shard=lambda: 0)
    host, _, number = (await server.start("127.0.0.1:0")).rpartition(":")
    _, writer = await asyncio.open_connection(host, int(number), limit=1)
    await until(lambda: len(server.proxy.strangers) == 1 and bool(server.proxy._by_name))
    (connection,) = server.proxy._by_name.values()
    connection.from_upstream(bytes(64 << 20))
    await asyncio.wait_for(connection.closed, SECONDS)
    assert len(server.proxy.strangers) == 0
    writer.transport.abort()
    await server.close()


async def test_calls_that_end_leave_nothing_of_the_server_to_the_garbage_collector(port: Port) -> None:
    assert await port.get() is grpc.StatusCode.OK
    with garbage_types() as found:
        for _ in range(3):
            assert await port.get() is grpc.StatusCode.OK
        await until(lambda: len(port.server.doorstep.pending) == 0)
    assert not found.keys() & {"_HeldPlace", "Timeout", "Place"}


# ---- the time of a stranger ----------------------------------------------------------------------------------------

PATIENT = replace(
    DOORSTEP,
    greeting_timeout_seconds=5.0,
    idle_connection_seconds=3_600,  # gRPC itself would wait an hour for a call
    max_pending_per_address=16,
    max_open_calls_per_address=16,
)
GO_AWAY = bytes((0, 0, 8, 7, 0, 0, 0, 0, 0)) + bytes(8)  # last stream 0, no error
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # the preface, and empty settings


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """The clock by which connections are late."""
    clock = ManualClock()
    monkeypatch.setattr(grpc_proxy, "monotonic", clock.monotonic)
    return clock


async def connected(
    port: Port, sent: bytes = HTTP2, tls: ssl.SSLContext | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*port.address.rsplit(":", 1), ssl=tls)
    writer.write(sent)
    return reader, writer


@pytest.mark.parametrize(("sent", "is_http2"), [(HTTP2, True), (HTTP2[:10], False), (b"", False)])
async def test_a_stranger_that_makes_no_call_is_turned_away_however_long_grpc_would_wait(
    clock: ManualClock, sent: bytes, is_http2: bool
) -> None:
    async with serving(replace(PATIENT, greeting_timeout_seconds=3_600)) as port:
        reader, writer = await connected(port, sent)
        await until(lambda: len(vars(port.server.proxy)["_expected"]) == 1)
        head = await reader.read(9)  # of gRPC's settings
        (connection,) = vars(port.server.proxy)["_expected"]
        await until(lambda: vars(connection)["_splitter"].is_before_calls is is_http2)
        clock.now += 3_601
        received = head + await reader.read()  # to its end
        writer.close()
        assert received.endswith(GO_AWAY) is is_http2, "a client that connected ahead may make its call elsewhere"
        assert port.server.doorstep.turned_away == {"late": 1}
        assert len(port.server.proxy.strangers) == 0


async def test_a_client_that_connected_ahead_with_tls_may_make_its_call_elsewhere(
    clock: ManualClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = TestAuthority(tmp_path).issue("srv")
    async with serving(replace(PATIENT, greeting_timeout_seconds=3_600), files.server_context()) as port:
        reader, writer = await connected(port, HTTP2, files.client_context())
        received = await reader.read(9)  # of gRPC's settings
        (connection,) = vars(port.server.proxy)["_expected"]
        await until(lambda: vars(connection)["_splitter"].is_before_calls)
        clock.now += 3_601
        received += await reader.read()  # to its end
        writer.close()
        assert received.endswith(GO_AWAY)
        await until(connection.closed.done)
        connection.data_received(bytes((0, 0, 0, 1, 4, 0, 0, 0, 1)))  # a call that was on its way
        assert vars(connection)["_splitter"].is_before_calls
        assert len(port.server.proxy.strangers) == 0
    assert not [each.message for each in caplog.records if each.name == "asyncio"]


async def test_a_stranger_gains_no_time_by_calls_that_are_refused(clock: ManualClock) -> None:
    async with serving(PATIENT) as port:
        for seconds, late in ((4.0, 0), (4.0, 1)):
            assert await port.open("ObjGet", WRONG).code() is grpc.StatusCode.UNAUTHENTICATED
            clock.now += seconds
            port.server.proxy.turn_late_away()
            assert port.server.doorstep.turned_away["late"] == late


async def test_a_connection_is_not_late_once_a_call_was_admitted(clock: ManualClock) -> None:
    async with serving(PATIENT) as port:
        async with port.connection() as web, port.connection() as balancer:
            health = health_pb2_grpc.HealthStub(balancer.channel)
            await health.Check(health_pb2.HealthCheckRequest())
            assert await web.get() is grpc.StatusCode.OK
            _, stranger = await connected(port)
            await until(lambda: len(vars(port.server.proxy)["_expected"]) == 1)
            clock.now += 60.0
            port.server.proxy.turn_late_away()
            await until(lambda: len(vars(port.server.proxy)["_connections"]) == 2)
            stranger.close()
            await health.Check(health_pb2.HealthCheckRequest())
            assert await web.get() is grpc.StatusCode.OK
        assert port.server.doorstep.turned_away == {"late": 1}


async def test_a_call_that_waits_for_its_turn_is_not_late(clock: ManualClock) -> None:
    slow = replace(PATIENT, stranger_calls_per_second=0.001)
    async with serving(slow) as port, AsyncExitStack() as stack:
        proxy = port.server.proxy
        for _ in range(SAVED_CALLS):
            other = await stack.enter_async_context(port.connection())
            assert await other.open("ObjGet", WRONG).code() is grpc.StatusCode.UNAUTHENTICATED
        before = set(vars(proxy)["_expected"])
        waits = await stack.enter_async_context(port.connection())
        call = waits.open("ObjGet", WRONG)
        await until(lambda: len(proxy.calls) == 1)
        clock.now += 60.0
        proxy.turn_late_away()
        assert port.server.doorstep.turned_away["late"] == len(before)
        (connection,) = vars(proxy)["_expected"]
        proxy.calls.withdraw(vars(connection)["_call"])
        connection._pass_call()
        proxy.turn_late_away()
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        clock.now += 60.0
        proxy.turn_late_away()
        assert not vars(proxy)["_expected"]


async def test_nobody_is_turned_away_right_after_a_pause_of_the_process(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(PATIENT) as port:
        sweeps: list[None] = []
        monkeypatch.setattr(port.server.doorstep, "begin_sweep", lambda: sweeps.append(None))  # False, as after a pause
        reader, writer = await connected(port)
        assert await reader.read(9), "gRPC's settings"
        clock.now += 60.0
        seen = len(sweeps)
        await until(lambda: len(sweeps) > seen + 1)
        assert port.server.doorstep.turned_away == {}
        monkeypatch.setattr(port.server.doorstep, "begin_sweep", lambda: True)
        await reader.read()
        writer.close()
        assert port.server.doorstep.turned_away == {"late": 1}
