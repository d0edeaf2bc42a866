"""The honest client, whose requests are measured beside attacks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import count
from typing import Final, Self

import grpc

from loadtest.hostile.attacks import SECONDS, Ports, open_client
from tao.wire.grpc_client import greeting_metadata
from tao.wire.identity import Credentials
from tao.wire.session import Session
from tao.wire.tls import TlsFiles
from tao.wire.v1 import graph_pb2
from tao.wire.v1 import session_pb2 as pb

HONEST: Final = ("hit", "miss", "new connection", "grpc call")
"""The kinds of its requests."""
HIT: Final = 1 << 20
"""The object that it reads again and again; misses have ids above."""
_PAUSE_SECONDS: Final = 0.005


class HonestClient:
    """A client with a token that does one thing after the other, with a pause, in each of its ways at once."""

    def __init__(self, ports: Ports, credentials: Credentials, tls: TlsFiles | None) -> None:
        """``tls``: what it shows and trusts, where the servers have TLS."""
        self._ports: Final = ports
        self._tls: Final = tls
        self._credentials: Final = credentials
        self._ids: Final = count(HIT + 1)
        self._seconds: dict[str, list[float]] = {}
        self._stack: Final = AsyncExitStack()
        self._session: Session
        self._channel: grpc.aio.Channel
        self.failures: list[str] = []

    async def __aenter__(self) -> Self:
        self._session = await open_client(self._ports.frames, self._credentials, self._tls)
        self._stack.push_async_callback(self._session.close)
        options = [("grpc.use_local_subchannel_pool", 1)]
        if self._tls is None:
            channel = grpc.aio.insecure_channel(self._ports.grpc, options)
        else:
            channel = grpc.aio.secure_channel(self._ports.grpc, self._tls.channel_credentials(), options)
        self._channel = await self._stack.enter_async_context(channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def measure(self, seconds: float) -> dict[str, list[float]]:
        """Return the times in seconds that requests of each kind have taken, for so long."""
        self._seconds = {kind: [] for kind in HONEST}
        asks: dict[str, Callable[[], Awaitable[object]]] = dict(
            zip(HONEST, (self._hit, self._miss, self._connect, self._call), strict=True)
        )
        until = time.perf_counter() + seconds
        await asyncio.gather(*(self._repeat(kind, ask, until) for kind, ask in asks.items()))
        return self._seconds

    async def _repeat(self, kind: str, ask: Callable[[], Awaitable[object]], until: float) -> None:
        while (began := time.perf_counter()) < until:
            try:
                await ask()
            except Exception as error:  # noqa: BLE001 - any failure of an honest client is a fault of the run
                self.failures.append(f"{kind}: {type(error).__name__}: {error}")
            self._seconds[kind].append(time.perf_counter() - began)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _read(self, object_id: int) -> None:
        answer = await self._session.ask(pb.Request(read=pb.ReadBatch(obj_ids=[object_id])), SECONDS)
        if answer.read.errors:
            raise RuntimeError(answer.read.errors[0].message)

    async def _hit(self) -> None:
        await self._read(HIT)

    async def _miss(self) -> None:
        await self._read(next(self._ids))

    async def _connect(self) -> None:
        await (await open_client(self._ports.frames, self._credentials, self._tls)).close()

    async def _call(self) -> None:
        get: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary("/tao.v1.Graph/ObjGet")
        asked = graph_pb2.ObjGetRequest(id=HIT).SerializeToString()
        await get(asked, metadata=greeting_metadata(self._credentials), timeout=SECONDS)
