"""A hint at TLS is given where a server has shown what it speaks, and never where one has simply gone away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tao.model.errors import TaoError, TlsMismatch, Unavailable
from tao.wire.frames_client import connect_frames
from tao.wire.grpc_client import connect_grpc
from tao.wire.identity import Credentials
from tao.wire.settings import SessionSettings
from tao.wire.tls import UNEXPECTED_MESSAGE, ServerCheck, TlsFiles
from tao.wire.tls_mismatch import explained, is_tls_record
from tests.rigs.certificates import TestAuthority
from tests.rigs.pacing import PATIENT_SECONDS
from tests.rigs.ports import free_ports

ME = Credentials("web", "client")
FAILURE = Unavailable("the connection was lost")
SILENT_SECONDS = 0.05


class Answering(asyncio.Protocol):
    """A server that answers the first bytes with its own, if any, and hangs up."""

    def __init__(self, answer: bytes | None) -> None:
        self._answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is not None:
            self._transport.write(self._answer)
            self._transport.close()


@asynccontextmanager
async def served(answer: bytes | None) -> AsyncIterator[str]:
    (port,) = free_ports(1)
    server = await asyncio.get_running_loop().create_server(lambda: Answering(answer), "127.0.0.1", port)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.close()


async def explanation(answer: bytes | None, *, with_tls: bool) -> TaoError:
    seconds = SILENT_SECONDS if answer is None else PATIENT_SECONDS
    async with served(answer) as address:
        return await explained(FAILURE, address, with_tls=with_tls, within_seconds=seconds)


@pytest.mark.parametrize("with_tls", [False, True])
@pytest.mark.parametrize("answer", [b"", None])
async def test_a_server_that_hangs_up_or_is_silent_gets_no_hint(answer: bytes | None, with_tls: bool) -> None:
    assert await explanation(answer, with_tls=with_tls) is FAILURE


@pytest.mark.parametrize("with_tls", [False, True])
async def test_a_server_that_is_gone_gets_no_hint(with_tls: bool) -> None:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    assert await explained(FAILURE, address, with_tls=with_tls, within_seconds=PATIENT_SECONDS) is FAILURE


async def test_what_a_server_answers_with_decides() -> None:
    handshake, alert, plain = b"\x16\x03\x03\x00\x7a", b"\x15\x03\x01\x00\x02\x02\x46", b"\x00\x00\x06\x04\x00"
    for answer in (handshake, alert):
        assert isinstance(await explanation(answer, with_tls=False), TlsMismatch)
        assert await explanation(answer, with_tls=True) is FAILURE
    assert isinstance(await explanation(plain, with_tls=True), TlsMismatch)
    assert await explanation(plain, with_tls=False) is FAILURE


async def test_a_load_balancer_that_refuses_plain_text_in_plain_text_is_not_taken_for_a_server_without_tls() -> None:
    """The handshake may have failed at a certificate: nobody should be told to leave TLS out."""
    refusal = b"HTTP/1.1 400 Bad Request\r\n\r\nThe plain HTTP request was sent to HTTPS port"
    for with_tls in (False, True):
        assert await explanation(refusal, with_tls=with_tls) is FAILURE


def test_a_frame_as_long_as_a_record_is_none() -> None:
    assert is_tls_record(b"\x16\x03\x01\x00")
    assert not is_tls_record(b"\x16\x03\x00\x00"), "a frame of 790 bytes"
    assert not is_tls_record(b"\x16\x03\x01")
    assert not is_tls_record(b"HTTP")


async def test_a_server_that_answers_a_greeting_by_an_alert_is_asked_once() -> None:
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read(1)
        writer.write(UNEXPECTED_MESSAGE)
        writer.close()

    (port,) = free_ports(1)
    async with await asyncio.start_server(answer, "127.0.0.1", port):
        with pytest.raises(TlsMismatch, match=f"^127.0.0.1:{port} speaks TLS"):
            await connect_frames(f"127.0.0.1:{port}", SessionSettings(connect_timeout_seconds=PATIENT_SECONDS), ME)
    assert connections == 1


@pytest.mark.parametrize("transport", ["frames", "grpc"])
@pytest.mark.parametrize("with_tls", [False, True])
async def test_a_server_that_hangs_up_on_everybody_is_unavailable_and_nothing_more(
    transport: str, with_tls: bool, tmp_path: Path
) -> None:
    tls = TlsFiles(authorities=TestAuthority(tmp_path).file) if with_tls else None
    settings = SessionSettings(connect_timeout_seconds=PATIENT_SECONDS)
    async with served(b"") as address:
        if transport == "frames":
            check = None if tls is None else ServerCheck(tls.client_context())
            connecting = connect_frames(address, settings, ME, check)
        else:
            connecting = connect_grpc(address, settings, ME, None if tls is None else tls.channel_credentials())
        with pytest.raises(Unavailable) as failed:
            await connecting
    assert type(failed.value) is Unavailable
