"""A flood of new gRPC connections that goes on: what it does not touch, and that what it keeps out comes in after it.

Strangers open connections as fast as they can, one after the other, and each new one takes the place of an older one.
So at the gRPC port a newcomer may wait for as long as the flood lasts, which the threat model says. The test pins the
rest of it: open connections, the other ports, memory, and the end of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest

from loadtest.hostile.attacks import SECONDS, Connection
from tao.wire.grpc_client import greeting_metadata
from tao.wire.settings import DoorstepSettings
from tests.e2e.doorstep_rig import WEB, Follower, Honest, honest_clients, running_follower

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

STRANGERS = 600
"""Connections at a time, which is more than twice the places of one address."""
MOST = 6_000
"""Connections of the whole flood: some twelve seconds of what the port accepts."""
ENOUGH = 2_000
"""Connections after which the flood has lasted for long enough: each place was taken several times."""
OPEN_KINDS = ("frames", "new connection", "grpc", "health", "probe")


class Flood:
    """Connections that say nothing. When the server has closed one, there is a new one in its place."""

    def __init__(self, follower: Follower) -> None:
        self._address = follower.ports.grpc
        self.opened = 0

    async def run(self) -> None:
        while self.opened < MOST:
            self.opened += 1
            with suppress(OSError):
                connection = await Connection.open(self._address)
                try:
                    await connection.closed()
                finally:
                    connection.writer.transport.abort()


@asynccontextmanager
async def flooding(follower: Follower) -> AsyncIterator[Flood]:
    flood = Flood(follower)
    strangers = [asyncio.create_task(flood.run()) for _ in range(STRANGERS)]
    try:
        yield flood
    finally:
        for stranger in strangers:
            stranger.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)


async def rounds(honest: Honest, kinds: tuple[str, ...], more: int) -> None:
    wanted = {kind: len(honest.seconds.get(kind, ())) + more for kind in kinds}
    async with asyncio.timeout(SECONDS):
        while any(len(honest.seconds.get(kind, ())) < wanted[kind] for kind in kinds):  # noqa: ASYNC110 - as elsewhere
            await asyncio.sleep(0.02)


async def newcomer(follower: Follower) -> None:
    async with follower.channel() as channel:
        schema: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/tao.v1.Graph/Schema")
        await schema(b"", metadata=greeting_metadata(WEB), timeout=SECONDS, wait_for_ready=True)


async def test_a_flood_of_grpc_connections_touches_no_open_connection_and_no_other_port_and_ends_with_its_sender(
    tmp_path: Path,
) -> None:
    async with running_follower(tmp_path) as follower, honest_clients(follower) as honest:
        await rounds(honest, OPEN_KINDS, 1)  # its gRPC connection has shown its credential
        before_mb = follower.memory_mb
        async with flooding(follower) as flood:
            while flood.opened < ENOUGH:
                await rounds(honest, OPEN_KINDS, 5)
            assert follower.memory_mb < before_mb + 60
        await newcomer(follower)
        assert (await follower.turned_away())["grpc displaced"] >= DoorstepSettings().max_pending_per_address
        assert honest.failures == []
        # Some lines a second: how many that are depends on the machine.
        assert len(follower.log_lines()) < flood.opened / 5
