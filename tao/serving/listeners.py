"""The listeners of a cache server: gRPC always, and frames where the topology names an address for them."""

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


class Listeners:
    """The gRPC server and the frame server in front of one request handler."""

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
        """``choose_shard`` returns the shard of a new object whose caller names no neighbour. ``unary_handler`` handles
        gRPC's unary calls, if not ``handler``. ``tls`` applies to both servers; None means plain connections. Raises
        `SettingsError` when the TLS files cannot be used."""
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
            grpc_address=server.grpc,
            tls=None if tls is None else tls.server_context(),
        )

    async def start(self) -> None:
        """Listen at the addresses in the topology. Raises `OSError` when an address is taken."""
        await self._grpc.start(self._server.grpc)
        if self._server.frames:
            await self._frames.start(self._server.frames)

    async def drain(self, grace_seconds: float) -> None:
        """Ask all peers to leave, and wait at most ``grace_seconds`` for the requests under way."""
        await asyncio.gather(self._grpc.drain(grace_seconds), self._frames.drain(grace_seconds))

    async def close(self) -> None:
        """Close every connection."""
        await asyncio.gather(self._grpc.close(), self._frames.close())
