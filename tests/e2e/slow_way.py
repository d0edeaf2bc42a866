"""A way to a server that can be made slow: a TCP proxy in the test's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class SlowWay:
    """Passes bytes on, ``delay_seconds`` late each."""

    def __init__(self) -> None:
        self.delay_seconds = 0.0
        self.connections = 0

    @asynccontextmanager
    async def to(self, address: str) -> AsyncIterator[str]:
        """The proxy's own address."""
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
