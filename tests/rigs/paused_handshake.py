"""A client that pauses in the middle of its TLS handshake, as one does for the round trip of its line."""

from __future__ import annotations

import asyncio
import ssl

from tao.wire import framing
from tao.wire.identity import Credentials
from tao.wire.v1 import frames_pb2


class PausedHandshake:
    """It has sent its first message, and has the server's part of the handshake."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext) -> None:
        self._reader = reader
        self._writer = writer
        self._received, self._sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._sent, server_hostname="localhost")

    @classmethod
    async def begin(cls, address: str, context: ssl.SSLContext) -> PausedHandshake:
        """Connect, and begin a handshake whose rest is for `greet` or `say`."""
        host, _, port = address.rpartition(":")
        paused = cls(*await asyncio.open_connection(host, int(port)), context)
        while not paused._shake_hands():
            paused._flush()
            await paused._read()
        return paused

    async def greet(self, credentials: Credentials) -> bytes:
        """Send the rest of the handshake and the greeting, and return as `say` does."""
        hello = frames_pb2.Hello(
            protocol_version=framing.PROTOCOL_VERSION,
            name=credentials.name,
            role=credentials.role,
            token=credentials.token,
        )
        return await self.say(framing.frame(framing.HELLO, hello.SerializeToString()))

    async def say(self, first: bytes) -> bytes:
        """Send the rest of the handshake and the first bytes of a client, and return those of the server. Raises
        `EOFError` or `ConnectionError` when it has closed the connection."""
        self._tls.write(first)
        self._flush()
        while True:
            try:
                return self._tls.read(1 << 14)
            except ssl.SSLWantReadError:
                await self._read()

    def close(self) -> None:
        self._writer.transport.abort()

    def _shake_hands(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def _flush(self) -> None:
        self._writer.write(self._sent.read())

    async def _read(self) -> None:
        received = await self._reader.read(1 << 14)
        if not received:
            raise EOFError("the server has closed the connection")
        self._received.write(received)
