"""Asks every cache server now and then whether it is there: a read of nothing, over the wire that everybody uses.

The links' failure detectors judge: failures in a row, slowness, and when a server is well again (DESIGN.md §9).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tao.model.errors import TaoError
from tao.model.topology import CacheServer, Topology
from tao.peers.links import Link, Links
from tao.watcher.marks import Verdict
from tao.watcher.settings import ProbeSettings
from tao.wire.v1 import session_pb2 as pb


class CacheProbes:
    """The cache servers' verdicts, as of the last round."""

    def __init__(self, links: Links, topology: Callable[[], Topology], settings: ProbeSettings) -> None:
        self._links: Final = links
        self._topology: Final = topology
        self._settings: Final = settings
        self.verdicts: dict[str, Verdict] = {}

    async def run(self) -> None:
        """Until cancelled: all of them at once, each round as long as the slowest answer allows."""
        while True:
            servers = [
                server
                for region in self._topology().regions
                for tier in (region.leaders, *region.followers)
                for server in tier.servers
            ]
            verdicts = await asyncio.gather(*map(self._ask, servers))
            self.verdicts = {server.name: verdict for server, verdict in zip(servers, verdicts, strict=True)}
            await asyncio.sleep(self._settings.interval_seconds)

    async def _ask(self, server: CacheServer) -> Verdict:
        link = self._links.to(server)
        if link.is_down:
            return Verdict.DOWN  # the link asks by itself meanwhile
        try:
            await link.ask(pb.Request(read=pb.ReadBatch()), self._settings.timeout_seconds)
        except TaoError:
            # A refusal is an answer; whether a silence counts, and how much, the link's detector knows.
            return self._judged(link)
        return Verdict.UP

    def _judged(self, link: Link) -> Verdict:
        if link.is_down:
            return Verdict.DOWN
        return Verdict.UP if link.is_up else Verdict.UNSURE
