"""A port that hangs up on its first connections, and passes the others on."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass
class HangingUp:
    """The port, and how many connections were made to it."""

    where: tuple[str, int]
    hangs_up: int
    """How many connections it still hangs up on."""
    resets: bool
    address: str = ""
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.hangs_up:
            self.hangs_up -= 1
            if self.resets:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(*self.where)
        try:
            await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer))
        finally:
            back.transport.abort()
            writer.transport.abort()


@asynccontextmanager
async def hanging_up(address: str, connections: int, *, resets: bool = False) -> AsyncIterator[HangingUp]:
    """Hang up on so many connections, by a reset or an orderly end, and pass the others on to the address."""
    host, _, port = address.rpartition(":")
    rig = HangingUp((host, int(port)), connections, resets)
    server = await asyncio.start_server(rig.serve, "127.0.0.1", 0)
    rig.address = "127.0.0.1:{1}".format(*server.sockets[0].getsockname())
    try:
        yield rig
    finally:
        server.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.transport.abort()
