"""A change of masters in the simulation, in the steps of `tao.watcher.promotion` and in their order.

A planned one waits until the new master has everything. One for a master that is lost promotes a replica that lacks
what it had not received, as asynchronous replication allows; what that was goes into the set's `Past`, so that the
checks know which acknowledged writes may be missing, and no others. Leases and locks are left out: who may promote, and
when, is decided before all this.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from tao.model.rows import RowChanges
from tao.model.topology import Database
from tests.sim.database import DatabaseServer
from tests.sim.stores import roll_back_all_of
from tests.sim.world import World

SETTLE_SECONDS: Final = 1.0
"""As `tao.watcher.settings.PromotionSettings` has it."""
_POLL_SECONDS: Final = 0.05


def next_epoch(database: Database) -> int:
    """The version epoch under which a new master writes."""
    return database.version_epoch + 1


class Promotions:
    """Those of one world, one at a time for each database."""

    def __init__(self, world: World) -> None:
        self._world: Final = world
        self._under_way: Final[set[str]] = set()

    def can_begin(self, name: str) -> bool:
        """Whether the set is whole."""
        database = self._database(name)
        servers = [self._world.databases[server.name] for server in database.servers.values()]
        return name not in self._under_way and not any(server.down for server in servers)

    def is_changing(self, server: str) -> bool:
        """Whether the server's set is in the middle of it."""
        return any(server in self._names(self._database(name)) for name in self._under_way)

    async def promote(self, name: str, returned: asyncio.Event, *, lost_after: float | None) -> None:
        """Make the other region's server master. ``lost_after``: seconds for which the replica does not hear of its
        master any more before that is lost, until ``returned``; None: it is a planned switch."""
        world = self._world
        self._under_way.add(name)
        try:
            database = self._database(name)
            old = world.databases[database.servers[database.master_region].name]
            (new,) = old.replicas
            if lost_after is None:
                old.read_only = True
                roll_back_all_of(old, None)
                await asyncio.sleep(_POLL_SECONDS)  # what was being committed is
            else:
                await self._lose(old, new, lost_after)
            await self._enthrone(database, old, new)
            if old.lost:
                await returned.wait()
                old.lost = False
                old.follow(new, anew=True)
                self._state(name, down=False)
        finally:
            self._under_way.discard(name)
        world.checks.calmer()

    async def _lose(self, old: DatabaseServer, new: DatabaseServer, after: float) -> None:
        world = self._world
        received = new.waiting()
        new.stopped_until = max(new.stopped_until, world.loop.now + after + _POLL_SECONDS)
        await asyncio.sleep(after)
        old.lost = True
        roll_back_all_of(old, None)
        world.trace.note("lost", old.name)
        world.single_failures.look()
        old.replicas.clear()
        unheard = max(0, new.waiting() - received)
        gone = new.forget_received(world.random.choice((unheard, world.random.randint(0, unheard))))
        await self._applied(new)
        old.past.lose(new.rows, gone)

    async def _applied(self, new: DatabaseServer) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            if new.has_applied_all:
                return

    async def _enthrone(self, database: Database, old: DatabaseServer, new: DatabaseServer) -> None:
        world = self._world
        await self._applied(new)
        old.replicas.clear()
        new.become_master()
        if not old.lost:
            old.follow(new, anew=False)
        epoch = next_epoch(database)
        rows = {
            shard: msgspec.structs.replace(
                row,
                master_server=new.name,
                version_epoch=max(row.version_epoch, epoch),
                generation=row.generation + 1,
            )
            for shard, row in new.truth.shards.items()
        }
        await asyncio.sleep(new.log(RowChanges(), world.schema, rows))
        new.show(RowChanges(), rows)
        self._state(database.name, master=new.region, epoch=epoch, down=old.lost)
        world.trace.note("promoted", new.name, epoch, old.lost)
        await asyncio.sleep(SETTLE_SECONDS)
        new.read_only = False

    def _state(self, name: str, *, master: str = "", epoch: int = 0, down: bool) -> None:
        """In the topology. ``down``: of the server that is not master."""
        world = self._world

        def changed(database: Database) -> Database:
            if database.name != name:
                return database
            region = master or database.master_region
            servers = {
                at: msgspec.structs.replace(server, down=down and at != region)
                for at, server in database.servers.items()
            }
            return msgspec.structs.replace(
                database, master_region=region, version_epoch=epoch or database.version_epoch, servers=servers
            )

        databases = tuple(map(changed, world.topology.databases))
        world.change_topology(msgspec.structs.replace(world.topology, databases=databases))

    def _database(self, name: str) -> Database:
        return next(database for database in self._world.topology.databases if database.name == name)

    @staticmethod
    def _names(database: Database) -> list[str]:
        return [server.name for server in database.servers.values()]
