"""An admin port is ready, not ready, silent, or not HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tao.admin.server_stats import is_ready, server_stats, wait_until_ready
from tao.devcluster.ports import LOOPBACK, reserve_port
from tao.model.errors import OperatorError, ProtocolError, Unavailable
from tao.runtime.admin_client import admin_get


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[str]:
    """A server that gives these answers one after the other, and the last one from then on."""
    left = list(answers)
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(left.pop(0) if len(left) > 1 else left[0])
                await writer.drain()
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(serve(reader, writer))
        serving.add(task)
        task.add_done_callback(serving.discard)

    server = await asyncio.start_server(accept, LOOPBACK, 0)
    async with server:
        yield f"{LOOPBACK}:{server.sockets[0].getsockname()[1]}"
        # A connection that outlives the test's loop is reported in the middle of a later test.
        await asyncio.gather(*serving)


def http(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d Said\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


async def test_a_server_is_ready_when_it_reports_so() -> None:
    async with answering(http(200, b"ready\n")) as address:
        assert await is_ready(address)
        assert await admin_get(address, "/ready") == (200, b"ready\n")


async def test_waiting_goes_on_until_the_server_is_ready() -> None:
    async with answering(http(503, b"warming"), http(503, b"warming"), http(200, b"")) as address:
        await wait_until_ready(address, 10.0)


async def test_waiting_too_long_raises_the_servers_latest_answer() -> None:
    async with answering(http(503, b"no database")) as address:
        with pytest.raises(OperatorError, match="no database"):
            await wait_until_ready(address, 0.2)


async def test_a_port_without_a_server_is_unavailable_and_not_ready() -> None:
    with reserve_port() as taken:
        address = f"{LOOPBACK}:{taken.port}"
        assert not await is_ready(address)
        with pytest.raises(Unavailable):
            await admin_get(address, "/stats")


async def test_an_answer_that_is_not_http_or_json_is_a_protocol_error() -> None:
    async with answering(b"SSH-2.0-server\r\n\r\n") as address:
        with pytest.raises(ProtocolError):
            await admin_get(address, "/ready")
    async with answering(http(200, b"[1]")) as address:
        with pytest.raises(ProtocolError):
            await server_stats(address)
