"""The real clock behind the `tao.model.ports.Clock` port: the loop's time, and the wall clock for ids and people.

The loop's time and not `time.monotonic`, so that under a loop with virtual time everything agrees on it.
"""

from __future__ import annotations

import asyncio
import time


class LoopClock:
    """Made within a running loop, whose time it gives."""

    __slots__ = ("monotonic",)

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        # Bound once: reading the time is on the hit path.
        self.monotonic = (loop or asyncio.get_running_loop()).time

    @staticmethod
    def unix_ms() -> int:
        """Milliseconds since 1970."""
        return time.time_ns() // 1_000_000
