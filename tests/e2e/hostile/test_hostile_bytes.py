"""Bytes that no client of the product sends, and requests that no client may send: they affect only their sender."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tao.client import Graph
from tao.model.errors import (
    ProtocolError,
    TaoError,
    Unauthorized,
)
from tao.wire import framing
from tao.wire.settings import MAX_MESSAGE_BYTES
from tao.wire.v1 import frames_pb2
from tao.wire.v1 import session_pb2 as pb
from tests.e2e.hostile_rig import (
    MEGABYTE,
    SHARDS,
    Rig,
    bare_connection,
    frame_from,
    greet,
    new_user,
    resident_mb,
)
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="package"),
]


async def test_bytes_that_are_no_protocol_cost_their_own_connection(rig: Rig) -> None:
    server = rig.routes.server("follower-1a")
    hello = frames_pb2.Hello(protocol_version=99).SerializeToString()
    for garbage in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" * 64,
        framing.frame(framing.HELLO, b"\xff\xff\xff"),
        framing.frame(framing.HELLO, hello),
        framing.frame(framing.REQUEST, pb.Request(number=1).SerializeToString()),
    ):
        async with bare_connection(server) as (reader, writer):
            writer.write(garbage)
            kind, payload = await frame_from(reader)
            assert kind == framing.ERROR
            assert pb.Error.FromString(payload).message
            assert await reader.read() == b""
    for garbage in (
        framing.frame(framing.REQUEST, b"\xff\xff\xff"),
        framing.pack_header(MAX_MESSAGE_BYTES + 1, framing.REQUEST),
        framing.frame(framing.WELCOME, b""),
        framing.frame(77, b"x"),
        b"\x00" * 5,
    ):
        async with bare_connection(server) as (reader, writer):
            await greet(reader, writer)
            writer.write(garbage)
            kind, payload = await frame_from(reader)
            assert (kind, pb.Error.FromString(payload).reason) == (framing.ERROR, "PROTOCOL_ERROR")
            assert await reader.read() == b""


async def test_bytes_that_are_no_message_end_their_grpc_call_and_no_other(rig: Rig) -> None:
    async with grpc.aio.insecure_channel(rig.cluster.client_address) as channel:

        async def refused(method: str, message: bytes) -> tuple[grpc.StatusCode, str]:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/tao.v1.Graph/{method}")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(message, timeout=PATIENT_SECONDS)
            trailers = dict(caught.value.trailing_metadata() or ())
            return caught.value.code(), str(trailers.get("tao-reason", ""))

        wrong = (grpc.StatusCode.INVALID_ARGUMENT, "PROTOCOL_ERROR")
        for method in ("ObjGet", "AssocAdd", "ObjAdd"):
            assert await refused(method, b"\xff\xff\xff") == wrong
        assert (await refused("NoSuch", b""))[0] == grpc.StatusCode.UNIMPLEMENTED
        oversized = b"\x12" * (MAX_MESSAGE_BYTES + 1)
        assert (await refused("ObjGet", oversized))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
        session: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream("/tao.v1.Graph/Session")
        stream = session(timeout=PATIENT_SECONDS)
        await stream.write(b"\xff\xff\xff")
        assert await stream.code() == grpc.StatusCode.INVALID_ARGUMENT
        watch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
            "/tao.v1.Graph/WatchConfiguration"
        )
        assert await watch(b"\xff\xff\xff", timeout=PATIENT_SECONDS).code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_client_that_stops_reading_is_held_back_and_then_cut_off(rig: Rig, graph: Graph) -> None:
    user = await graph.obj_add("user", {"name": "x" * (MEGABYTE // 2)})
    await graph.obj_get(user)
    async with bare_connection(rig.follower_of(user)) as (reader, writer):
        await greet(reader, writer)
        for number in range(1, 400):
            request = pb.Request(number=number, deadline_ms=60_000, read=pb.ReadBatch(obj_ids=[user]))
            writer.write(framing.frame(framing.REQUEST, request.SerializeToString()))
        # 200 MB were requested: the server keeps a bounded part of them, and closes the connection after 10 s.
        server = next(each for each in rig.before if each.name == rig.follower_of(user).name)
        most_mb = 0
        async with asyncio.timeout(PATIENT_SECONDS):
            while not writer.transport.is_closing():
                await rig.bystander.more_rounds(1)
                most_mb = max(most_mb, resident_mb(server.pid))
                writer.write(framing.frame(framing.PING, b"x"))
    assert most_mb < 1000


async def test_requests_between_servers_are_rejected_from_a_client_and_harmless_from_others(
    rig: Rig, graph: Graph
) -> None:
    user = await new_user(graph)
    bad_change = pb.ShardMessages(shard=user >> 47, messages=[pb.Message(list_change=pb.ListChange(put_id2s=[1]))])
    async with rig.session(rig.follower_of(user)) as session:
        for request in (
            pb.Request(),
            pb.Request(subscribe=pb.Subscribe(subscriber="x")),
            pb.Request(settle_pairs=pb.SettlePairs()),
            pb.Request(reserve_ids=pb.ReserveIds(shard=SHARDS, count=1)),
            pb.Request(reserve_ids=pb.ReserveIds(shard=0, count=(1 << 32) - 1)),
        ):
            with pytest.raises(TaoError) as caught:
                await session.ask(request, PATIENT_SECONDS)
            assert caught.value.reason in {"INVALID_ARGUMENT", "UNKNOWN_SHARD", "PROTOCOL_ERROR"}, str(request)
        shards = pb.Invalidate(shards=[user >> 47, SHARDS, (1 << 32) - 1])
        invalidate, inspect = pb.Request(invalidate=shards), pb.Request(inspect=pb.Inspect(obj_ids=[user]))
        apply = pb.Request(apply=pb.ApplyChanges(changes=[bad_change]))
        for request in (apply, invalidate, inspect):
            with pytest.raises(Unauthorized):
                await session.ask(request, PATIENT_SECONDS)
    async with rig.session(rig.follower_of(user), role="follower") as session:
        with pytest.raises(ProtocolError):
            await session.ask(apply, PATIENT_SECONDS)
    async with rig.session(rig.follower_of(user), role="operator") as session:
        assert (await session.ask(invalidate, PATIENT_SECONDS)).invalidated.shards == 1
    leader = rig.routes.leaders(rig.routes.locate(rig.follower_of(user).name).region).home(user >> 47)
    async with rig.session(leader) as session:
        for request in (
            pb.Request(read=pb.ReadBatch(obj_ids=[user])),
            pb.Request(subscribe=pb.Subscribe()),
            invalidate,
        ):
            with pytest.raises(Unauthorized):
                await session.ask(request, PATIENT_SECONDS)
    assert await graph.obj_get(user) is not None
