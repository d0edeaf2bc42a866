"""The admin port answers a fixed set of pages, and bears bad clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

import pytest
from structlog.testing import capture_logs

from tao import __version__
from tao.observability.logs import logger
from tao.runtime.admin import AdminPages, AdminServer, AdminSettings
from tao.wire.settings import DoorstepSettings
from tests.rigs.pacing import PATIENT_SECONDS


@dataclass
class Figures:
    why_not: str = ""
    broken: bool = False
    metrics: bytes = b"tao_x_total 1\n"

    def stats(self) -> dict[str, object]:
        if self.broken:
            raise RuntimeError("broken figure")
        return {"entries": 3}


@dataclass
class Port:
    figures: Figures
    host: str
    port: int

    async def raw(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(request)
            return await asyncio.wait_for(reader.read(), PATIENT_SECONDS)
        finally:
            writer.close()

    async def get(self, page: str, method: str = "GET") -> tuple[int, bytes]:
        head, _, body = (await self.raw(f"{method} {page} HTTP/1.1\r\nHost: x\r\n\r\n".encode())).partition(b"\r\n\r\n")
        return int(head.split()[1]), body


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    figures = Figures()
    pages = AdminPages(metrics=lambda: figures.metrics, stats=figures.stats, not_ready=lambda: figures.why_not)
    server = AdminServer(
        AdminSettings(
            request_timeout_seconds=0.3,
            max_readers=2,
            request_bytes=1_024,
            doorstep=DoorstepSettings(max_pending=4, max_log_lines=1, greeting_timeout_seconds=0.3),
        ),
        pages,
        logger("test"),
    )
    host, _, number = (await server.start()).rpartition(":")
    yield Port(figures, host, int(number))
    await server.close()


async def test_the_pages(port: Port) -> None:
    assert await port.get("/health") == (200, b"ok\n")
    assert await port.get("/metrics?x=1") == (200, b"tao_x_total 1\n")
    status, body = await port.get("/stats")
    found = json.loads(body)
    assert (status, found["entries"], found["version"]) == (200, 3, __version__)
    assert found["clock_unix_ms"] > 0
    assert await port.get("/health", "HEAD") == (200, b"")


async def test_readiness_says_why_not(port: Port) -> None:
    assert await port.get("/ready") == (200, b"ready\n")
    port.figures.why_not = "draining"
    assert await port.get("/ready") == (503, b"draining\n")
    assert (await port.get("/health"))[0] == 200


async def test_a_missing_page_or_a_forbidden_method_is_reported(port: Port) -> None:
    assert (await port.get("/other"))[0] == 404
    assert (await port.get("/stats", "POST"))[0] == 405
    assert b" 400 " in await port.raw(b"\x16\x03\x01 nonsense\r\n\r\n")


async def test_a_page_that_fails_is_logged_and_the_others_still_work(port: Port) -> None:
    port.figures.broken = True
    with capture_logs() as logs:
        assert (await port.get("/stats"))[0] == 500
    assert logs[0]["event"] == "admin page failed"
    assert (await port.get("/health"))[0] == 200


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", 0), ("localhost", 0), ("192.0.2.1", 1)])
async def test_an_address_that_others_may_reach_is_noted(host: str, expected: int) -> None:
    figures = Figures()
    pages = AdminPages(metrics=lambda: figures.metrics, stats=figures.stats, not_ready=lambda: figures.why_not)
    server = AdminServer(AdminSettings(host), pages, logger("test"))
    with capture_logs() as logs, suppress(OSError):  # the last address is no machine's
        await server.start()
    await server.close()
    assert sum(each["event"] == "admin_port_exposed" for each in logs) == expected


async def test_an_oversized_request_is_refused(port: Port) -> None:
    assert b" 431 " in await port.raw(b"GET /health HTTP/1.1\r\nX: " + b"x" * 3_000)


async def assert_dropped(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionResetError):  # dropped by a reset: as good
        assert await asyncio.wait_for(reader.read(), PATIENT_SECONDS) == b""


async def test_silent_clients_are_dropped_and_keep_no_probe_from_its_answer(port: Port) -> None:
    with capture_logs() as logs:
        silent = [await asyncio.open_connection(port.host, port.port) for _ in range(20)]
        assert await port.get("/health") == (200, b"ok\n")
        assert await port.get("/ready") == (200, b"ready\n")
        for reader, writer in silent:
            await assert_dropped(reader)
            writer.close()
    assert [each["event"] for each in logs] == ["admin_client_turned_away"]


async def test_clients_that_do_not_read_a_large_page_give_way_to_the_next(port: Port) -> None:
    port.figures.metrics = b"x" * (8 << 20)
    slow = [await asyncio.open_connection(port.host, port.port, limit=1) for _ in range(4)]
    for _, writer in slow:
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert await port.get("/health") == (200, b"ok\n")
    assert len((await port.get("/metrics"))[1]) == 8 << 20
    for _, writer in slow:
        writer.transport.abort()
