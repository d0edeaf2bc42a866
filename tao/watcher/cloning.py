"""Clones of a shard begin and end while it is read and written, by the command and by the watcher (DESIGN.md §10).

`tao.topology.cloning` says what the documents are; this stores the first, waits until every server of the tier goes by
it, and stores the second. Whatever interrupts it leaves a shard that is served and told as it should; the next call
goes on from what the document says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from tao.model.errors import TaoError, TopologyConflict, TopologyError, Unavailable
from tao.model.topology import CacheServer, Topology
from tao.peers.links import Links
from tao.topology.cloning import Cloning, plan_copies, tier_of
from tao.wire.v1 import session_pb2 as pb


class TopologyStore(Protocol):
    """What of `tao.topology.file_store.TopologyFile` it needs."""

    async def load(self) -> Topology: ...

    async def change(self, expected_version: int, changed: Topology) -> Topology: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CloningSettings:
    """How the servers of a tier are waited for."""

    hear_seconds: float = 30.0
    """For every server of the tier to go by a new document, which takes one that is well half a second. One that does
    not is to be marked down first: it hands changes to whom its old document names."""

    poll_seconds: float = 0.1
    """Between two questions to a server."""

    answer_seconds: float = 2.0
    """For the answer to one."""

    max_conflicts: int = 5
    """Other changes of the document that may come between."""


VersionAt = Callable[[CacheServer], Awaitable[int]]
"""The topology version that a server goes by now. Raises a `TaoError`."""


class Cloner:
    """Changes how many servers serve a shard."""

    def __init__(
        self,
        store: TopologyStore,
        version_at: VersionAt,
        settings: CloningSettings,
        on_step: Callable[[str], None],
    ) -> None:
        """``on_step`` is told what is done, or waited for, for people."""
        self._store: Final = store
        self._version_at: Final = version_at
        self._settings: Final = settings
        self._on_step: Final = on_step

    async def plan(self, region: str, tier: str, shard: int, copies: int, *, by_watcher: bool = False) -> Cloning:
        """What `run` would do. Raises as `plan_copies`."""
        return plan_copies(await self._store.load(), region, tier, shard, copies, by_watcher=by_watcher)

    async def run(self, cloning: Cloning) -> Topology:
        """Do it, and return the document by which every server of the tier goes then. Raises `TopologyError` when
        the shard was placed otherwise since the plan, `Unavailable` when a server does not hear in time."""
        if cloning.is_nothing:
            return await self._store.load()
        stored = await self._change(lambda found: self._first_of(found, cloning))
        self._on_step(f"version {stored.version}: changes go to {', '.join((*cloning.between, *cloning.told))}")
        await self._until_heard(cloning, stored.version)
        stored = await self._change(cloning.second)
        self._on_step(f"version {stored.version}: served by {', '.join(cloning.after)}")
        await self._until_heard(cloning, stored.version)
        return stored

    @staticmethod
    def _first_of(found: Topology, cloning: Cloning) -> Topology:
        now = plan_copies(
            found,
            cloning.region,
            cloning.tier,
            cloning.shard,
            len(cloning.after) - 1,
            by_watcher=cloning.by_watcher,
        )
        if now != cloning:
            where = f"shard {cloning.shard} of {cloning.region}/{cloning.tier}"
            raise TopologyError(f"{where} is served by {', '.join(now.before)} by now: look again")
        return cloning.first(found)

    async def _change(self, edit: Callable[[Topology], Topology]) -> Topology:
        """By compare-and-set, again when something else in the document was changed at the same time."""
        for left in reversed(range(self._settings.max_conflicts)):
            before = await self._store.load()
            try:
                return await self._store.change(before.version, edit(before))
            except TopologyConflict:
                if not left:
                    raise
        raise AssertionError("max_conflicts is at least 1")

    async def _until_heard(self, cloning: Cloning, version: int) -> None:
        waiting: list[str] = []
        try:
            async with asyncio.timeout(self._settings.hear_seconds):
                while True:
                    tier = tier_of(await self._store.load(), cloning.region, cloning.tier)  # marks may have come
                    servers = [server for server in tier.servers if not server.down]
                    heard = await asyncio.gather(*(self._has_heard(server, version) for server in servers))
                    waiting = [server.name for server, has in zip(servers, heard, strict=True) if not has]
                    if not waiting:
                        return
                    self._on_step(f"waiting for {', '.join(waiting)} to go by version {version}")
                    await asyncio.sleep(self._settings.poll_seconds)
        except TimeoutError:
            raise Unavailable(
                f"{', '.join(waiting)} did not hear of topology version {version} within "
                f"{self._settings.hear_seconds:g} s: mark down what is gone, then do this again"
            ) from None

    async def _has_heard(self, server: CacheServer, version: int) -> bool:
        try:
            return await self._version_at(server) >= version
        except TaoError:
            return False


def asking_by(links: Links, settings: CloningSettings) -> VersionAt:
    """Ask the servers themselves."""

    async def version_at(server: CacheServer) -> int:
        answer = await links.to(server).ask(pb.Request(get_topology=pb.GetTopology()), settings.answer_seconds)
        return answer.topology.version

    return version_at
