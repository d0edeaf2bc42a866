"""Is a server of the cluster ready, and what are its figures: asked of its admin port."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tao.model.errors import OperatorError, ProtocolError, Unavailable
from tao.runtime.admin_client import admin_get

_READY_PAUSE_SECONDS = 0.03
_HTTP_OK = 200


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
