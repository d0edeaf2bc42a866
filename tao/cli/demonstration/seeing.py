"""How soon something that was written is seen elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from tao.cli.demonstration.figures import DemonstrationFailed

SEEN_SECONDS: Final = 20.0
"""Within which another tier or region must show a write: hundreds of times what it normally takes."""


async def seconds_until(condition: Callable[[], Awaitable[bool]], what: str, where: str) -> float:
    """Seconds until it holds, asked again and again. Raises `DemonstrationFailed`, with what was not seen where."""
    began = time.perf_counter()
    try:
        async with asyncio.timeout(SEEN_SECONDS):
            while not await condition():
                pass
    except TimeoutError:
        raise DemonstrationFailed(f"{what} was not seen in the other {where} within {SEEN_SECONDS:g} s") from None
    return time.perf_counter() - began
