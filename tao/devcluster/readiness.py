"""Asking a server's admin port: is it ready, and what are its figures.

A GET over a plain connection: the admin port speaks HTTP/1.1, one request a connection is enough here, and an HTTP
client would be one more dependency for four lines of text.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tao.model.errors import OperatorError, ProtocolError, Unavailable

_MAX_ANSWER_BYTES = 16 << 20
_READY_PAUSE_SECONDS = 0.03
_PROBE_SECONDS = 2.0
_HTTP_OK = 200


async def admin_get(address: str, path: str, timeout_seconds: float = _PROBE_SECONDS) -> tuple[int, bytes]:
    """Status and body of ``GET path`` at ``host:port``.

    Raises `Unavailable` when nobody answers in time, `ProtocolError` when the answer is not HTTP.
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_seconds):
            reader, writer = await asyncio.open_connection(host, int(port), limit=_MAX_ANSWER_BYTES)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                length = int(headers.get("content-length", "0"))
                if length > _MAX_ANSWER_BYTES:
                    raise ProtocolError(f"{address}{path} answers with {length} bytes: more than any admin page has")
                return int(lines[0].split()[1]), await reader.readexactly(length)
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise Unavailable(f"{address}{path} does not answer: {str(error) or type(error).__name__}") from error
    except (ValueError, IndexError, asyncio.LimitOverrunError) as error:
        raise ProtocolError(f"{address}{path} does not speak HTTP: {error}") from error


async def is_ready(address: str) -> bool:
    """True when the server says that it can serve; False when it says no or does not answer."""
    try:
        status, _ = await admin_get(address, "/ready")
    except Unavailable:
        return False
    return status == _HTTP_OK


async def wait_until_ready(address: str, timeout_seconds: float) -> None:
    """Return once the server is ready. Raises `OperatorError` with its last words when that takes longer."""
    last = "it does not answer"
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                try:
                    status, body = await admin_get(address, "/ready")
                except Unavailable as error:
                    last = error.message
                else:
                    if status == _HTTP_OK:
                        return
                    last = body.decode(errors="replace").strip()[:200]
                await asyncio.sleep(_READY_PAUSE_SECONDS)
    except TimeoutError:
        raise OperatorError(f"not ready within {timeout_seconds:g} s ({last})") from None


async def server_stats(address: str) -> dict[str, Any]:
    """The figures of a server, as its ``/stats`` gives them. Raises as `admin_get`.

    `Any`: which figures there are is each role's affair."""
    status, body = await admin_get(address, "/stats")
    if status != _HTTP_OK:
        raise Unavailable(f"{address}/stats answers with status {status}")
    try:
        figures = json.loads(body)
    except ValueError as error:
        raise ProtocolError(f"{address}/stats is not JSON: {error}") from error
    if not isinstance(figures, dict):
        raise ProtocolError(f"{address}/stats is not a JSON object")
    return figures
