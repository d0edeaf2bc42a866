"""An operator who uses the product's own commands on the simulated cluster: clones of shards, planned restarts.

The code of `tao shard clone`, `tao drain` and `tao undrain` runs here unchanged, in a process of its own: it changes
the topology document by compare-and-set, and asks servers over the network and on their admin pages. Other failures at
the same time may keep a command from completing; the state that it leaves then must be safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from tao.admin.drain import drain_cache_server, undrain_cache_server
from tao.model.errors import TaoError
from tao.watcher.shard_clones import Cloner, CloningSettings, topology_version_of
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings
from tests.sim.network import SESSION
from tests.sim.plans import Fault
from tests.sim.topologies import servers_of, tiers_of
from tests.sim.world import World

_WAIT_SECONDS: Final = 15.0
"""Deadline of one command, in seconds: all commands have ended before an act is over."""


class Operator:
    """An operator, who may run several commands side by side."""

    def __init__(self, world: World) -> None:
        self._world: Final = world

    def clone(self, fault: Fault) -> Callable[[], None] | None:
        """Clone a shard to one more server or to all of a tier, and later end the clone."""
        world = self._world
        tiers = [
            (region, tier)
            for region, tier in tiers_of(world.topology)
            if tier != "leaders" and len(servers_of(world.topology, (region, tier))) > 1
        ]
        if not tiers:
            return None
        place = tiers[fault.other % len(tiers)]
        most = len(servers_of(world.topology, place)) - 1
        shard = fault.pick % world.shape.shards
        self._begin("clone", self._set_copies(place, shard, 1 + fault.other % most))
        return lambda: self._begin("unclone", self._set_copies(place, shard, 0))

    def restart(self, fault: Fault) -> None:
        """Drain a leader or follower, stop it, start it again, and give it back its shards."""
        world = self._world
        names = [*world.names("leader"), *world.names("follower")]
        self._begin("restart", self._restart(names[fault.pick % len(names)]))

    def _begin(self, what: str, job: Coroutine[Any, Any, str]) -> None:
        self._world.spawn(self._record_result(what, job), self._world.operator)

    async def _record_result(self, what: str, job: Coroutine[Any, Any, str]) -> None:
        try:
            result = await job
        except TaoError as error:
            result = f"{error.reason}: {error.message}"
        self._world.trace.note("operator", what, result)

    async def _set_copies(self, place: tuple[str, str], shard: int, copies: int) -> str:
        settings = CloningSettings(timeout_seconds=_WAIT_SECONDS)
        links = Links(LinkSettings(session=SESSION), Credentials(self._world.operator.name, "operator"))
        store = self._world.open_topology()
        cloner = Cloner(store, topology_version_of(links, settings), settings, self._show)
        try:
            stored = await cloner.run(await cloner.plan(*place, shard, copies))
        finally:
            await links.close()
        return f"shard {shard} of {'/'.join(place)}: version {stored.version}"

    async def _restart(self, name: str) -> str:
        world = self._world
        drained = await drain_cache_server(world.place, name, _WAIT_SECONDS, self._show)
        if drained.safe_to_stop:
            await world.stop(name)
            await asyncio.sleep(0.5)
            world.start_server(name)
        if drained.safe_to_stop and not drained.marked:
            return drained.describe()  # it registers again by itself
        undrained = await undrain_cache_server(world.place, name, 2 * _WAIT_SECONDS, self._show)
        return f"{drained.describe()}; {undrained.describe()}"

    def _show(self, text: str) -> None:
        self._world.trace.note("operator sees", text)
