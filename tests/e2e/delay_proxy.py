"""A TCP proxy in the test's event loop that delays the traffic to a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class DelayProxy:
    """Forwards bytes in both directions, each chunk delayed by ``delay_seconds``."""

    def __init__(self) -> None:
        self.delay_seconds = 0.0
        self.connections = 0

    @asynccontextmanager
    async def to(self, address: str) -> AsyncIterator[str]:
        """Start the proxy in front of ``address``, and yield the proxy's address."""
        host, _, port = address.rpartition(":")
        tasks: set[asyncio.Task[None]] = set()

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while chunk := await reader.read(1 << 16):
                    await asyncio.sleep(self.delay_seconds)
                    writer.write(chunk)
            except OSError:
                return  # the other direction has closed
            finally:
                writer.close()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            try:
                far_reader, far_writer = await asyncio.open_connection(host, int(port))
            except OSError:
                writer.close()
                return
            for one in (pump(reader, far_writer), pump(far_reader, writer)):
                tasks.add(asyncio.create_task(one))

        proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        finally:
            proxy.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
