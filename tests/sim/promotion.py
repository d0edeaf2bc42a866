"""Changes of masters in the simulation, in the steps of `tao.replication.promotion` and in their order.

A planned change waits until the new master has everything. A change after the loss of a master promotes a replica that
lacks what it had not received, as asynchronous replication allows. The lost transactions are recorded in the set's
`Past`, so that the checks know exactly which acknowledged writes may be missing. Leases and locks are left out: they
decide who may promote, and when, before all this.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from tao.model.rows import RowChanges
from tao.model.topology import Database
from tests.sim.database import SimDatabase
from tests.sim.stores import roll_back_all_of
from tests.sim.world import World

SETTLE_SECONDS: Final = 1.0
"""The delay of `tao.watcher.settings.PromotionSettings`."""
_POLL_SECONDS: Final = 0.05


def next_epoch(database: Database) -> int:
    """Return the version epoch under which a new master writes."""
    return database.version_epoch + 1


class Promotions:
    """The changes of masters of one world, one at a time for each database."""

    def __init__(self, world: World) -> None:
        self._world: Final = world
        self._under_way: Final[set[str]] = set()

    def can_begin(self, name: str) -> bool:
        """Return whether the set is complete, so that a change can begin."""
        database = self._database(name)
        servers = [self._world.databases[server.name] for server in database.servers.values()]
        return name not in self._under_way and not any(server.down for server in servers)

    def is_changing(self, server: str) -> bool:
        """Return whether the server's set is in the middle of a change."""
        return any(server in self._names(self._database(name)) for name in self._under_way)

    async def promote(self, name: str, returned: asyncio.Event, *, lost_after: float | None) -> None:
        """Make the server of the other region master.

        ``lost_after``: seconds for which the replica no longer receives from its master before that is lost, until
        ``returned``; None for a planned switch.
        """
        world = self._world
        self._under_way.add(name)
        try:
            database = self._database(name)
            old = world.databases[database.servers[database.master_region].name]
            (new,) = old.replicas
            if lost_after is None:
                old.read_only = True
                roll_back_all_of(old, None)
                await asyncio.sleep(_POLL_SECONDS)  # the commits under way are lost
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

    async def _lose(self, old: SimDatabase, new: SimDatabase, after: float) -> None:
        world = self._world
        received = new.waiting()
        new.stopped_until = max(new.stopped_until, world.loop.now + after + _POLL_SECONDS)
        await asyncio.sleep(after)
        old.lost = True
        roll_back_all_of(old, None)
        world.trace.note("lost", old.name)
        world.single_failures.look()
        old.replicas.clear()
        not_received = max(0, new.waiting() - received)
        gone = new.forget_received(world.random.choice((not_received, world.random.randint(0, not_received))))
        await self._applied(new)
        old.past.lose(new.rows, gone)

    async def _applied(self, new: SimDatabase) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            if new.has_applied_all:
                return

    async def _enthrone(self, database: Database, old: SimDatabase, new: SimDatabase) -> None:
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
