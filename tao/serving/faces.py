"""A cache server's two faces: gRPC, always, and frames where the topology advertises them (DESIGN.md §11)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tao.model.topology import CacheServer
from tao.wire.frames_server import FrameServer
from tao.wire.grpc_server import GrpcServer
from tao.wire.session import RequestHandler
from tao.wire.settings import ServingSettings
from tao.wire.tls import TlsFiles


class Faces:
    """Both servers in front of one handler, and of another for unary calls where that is wanted."""

    def __init__(
        self,
        server: CacheServer,
        handler: RequestHandler,
        settings: ServingSettings,
        topology_version: Callable[[], int],
        choose_shard: Callable[[], int],
        unary_handler: RequestHandler | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        """``choose_shard``: where a new object goes whose caller names no neighbour. ``unary_handler``: for gRPC's
        unary calls, when not ``handler``. ``tls``: for both, or None for plain connections. Raises `SettingsError` when
        its files cannot be used."""
        self._server: Final = server
        self._grpc: Final = GrpcServer(
            handler,
            settings,
            name=server.name,
            topology_version=topology_version,
            choose_shard=choose_shard,
            unary_handler=unary_handler,
            credentials=None if tls is None else tls.server_credentials(),
        )
        self._frames: Final = FrameServer(
            handler,
            settings,
            name=server.name,
            topology_version=topology_version,
            tls=None if tls is None else tls.server_context(),
        )

    async def start(self) -> None:
        """Listen where the topology says. Raises `OSError` when an address is taken."""
        await self._grpc.start(self._server.grpc)
        if self._server.frames:
            await self._frames.start(self._server.frames)

    async def drain(self, grace_seconds: float) -> None:
        """Send everybody elsewhere, and wait for what is under way."""
        await asyncio.gather(self._grpc.drain(grace_seconds), self._frames.drain(grace_seconds))

    async def close(self) -> None:
        """Close every connection."""
        await asyncio.gather(self._grpc.close(), self._frames.close())
