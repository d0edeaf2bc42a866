"""The real clock behind the `tao.model.ports.Clock` port: the loop's time, and the wall clock for ids and people.

It reads the loop's time, not `time.monotonic`, so that everything agrees under a loop with virtual time.
"""

from __future__ import annotations

import asyncio
import time


class LoopClock:
    """The clock of the running event loop."""

    __slots__ = ("monotonic",)

    def __init__(self) -> None:
        # Bound once, because cache hits read the time.
        self.monotonic = asyncio.get_running_loop().time

    @staticmethod
    def unix_ms() -> int:
        """Return the milliseconds since 1970."""
        return time.time_ns() // 1_000_000
