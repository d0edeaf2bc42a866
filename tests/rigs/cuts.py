"""A TCP way to a local port that a test can cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from tests.rigs.ports import free_ports


class Cut:
    """A way to a port that can be cut, and lose what clients send before."""

    def __init__(self, target: int) -> None:
        self._target = target
        (self.port,) = free_ports(1)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.loses_requests = False
        """What clients send does not arrive; they still get what the server sends."""

    async def heal(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def cut(self) -> None:
        """Close all connections, and accept no more."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(back)
        for task in (
            asyncio.ensure_future(_pass_on(reader, back, lambda: self.loses_requests)),
            asyncio.ensure_future(_pass_on(there, writer, lambda: False)),
        ):
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, loses: Callable[[], bool]) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            if not loses():
                writer.write(data)
                await writer.drain()
    writer.transport.abort()
