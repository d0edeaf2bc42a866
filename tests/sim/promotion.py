"""Changes of masters in the simulation, in the steps of `tao.replication.promotion` and in their order.

A planned change waits until the new master has everything. A change after the loss of a master promotes a replica that
lacks what it had not received, as asynchronous replication allows. The lost transactions are recorded in the set's
`Past`, so that the checks know exactly which acknowledged writes may be missing. An operator makes these changes, under
the lock of the database. Watchers make theirs in `tests.sim.watchers`, after the lease of the lost master.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Final

import msgspec

from tao.model.ids import LostTimes
from tao.model.rows import RowChanges
from tao.model.topology import Database
from tao.replication.locks import LockHold, LockTaken, hold_exclusively, mastership_lock
from tao.topology.edits import shards_of
from tests.sim.database import SimDatabase, unix_ms
from tests.sim.stores import roll_back_all_of
from tests.sim.world import World

SETTLE_SECONDS: Final = 1.0
"""The delay of `tao.watcher.settings.PromotionSettings`."""
_POLL_SECONDS: Final = 0.05
_LOCK_SECONDS: Final = 10.0
_BACK_SECONDS: Final = 2.0
"""From the return of a database server until an operator looks whether it was replaced."""


def next_epoch(database: Database, known: int) -> int:
    """Return the version epoch under which a new master writes. ``known``: the highest in its shards' rows."""
    return max(database.version_epoch, known) + 1


async def applied(new: SimDatabase) -> None:
    """Wait until a replica has applied everything that it has received."""
    while True:
        await asyncio.sleep(_POLL_SECONDS)
        if new.has_applied_all:
            return


def enthrone(world: World, database: Database, old: SimDatabase, new: SimDatabase, *, lacks_commits: bool) -> int:
    """Make a server that has applied everything master, still closed, and have the old one follow it if that still
    answers. Return the new version epoch."""
    old.replicas.clear()
    new.become_master()
    if not old.down and old.read_only:
        old.follow(new, anew=False)
    held = {shard: row for shard, row in new.truth.shards.items() if shard in shards_of(database)}
    epoch = next_epoch(database, max((row.version_epoch for row in held.values()), default=0))
    names = {server.name for server in database.servers.values()}  # any other is the fence of a move
    rows = {
        shard: msgspec.structs.replace(
            row,
            master_server=new.name,
            version_epoch=max(row.version_epoch, epoch),
            generation=row.generation + 1,
        )
        for shard, row in held.items()
        if row.master_server in names
    }
    changes = RowChanges()
    if lacks_commits:
        stored, lost = new.truth.reserved_times, LostTimes.at(unix_ms(world.loop.now))
        changes.put_reserved_times = {
            # A row that is fenced may have been freed by commits that are lost.
            shard: lost.begin(
                stored.get(shard, 0),
                lacks_epoch=row.version_epoch < database.version_epoch or row.master_server not in names,
            )
            for shard, row in held.items()
        }
    new.log(changes, world.schema, rows)
    new.show(changes, rows)
    return epoch


class Promotions:
    """An operator's changes of masters of one world, one at a time for each database."""

    def __init__(self, world: World) -> None:
        self._world: Final = world
        self._under_way: Final[set[str]] = set()

    def can_begin(self, name: str) -> bool:
        """Return whether the set is complete, so that a change can begin."""
        return name not in self._under_way and self._is_complete(name)

    def is_changing(self, server: str) -> bool:
        """Return whether the server's set is in the middle of a change."""
        return any(server in self._names(self._database(name)) for name in self._under_way)

    async def promote(self, name: str, returned: asyncio.Event, *, lost_after: float | None) -> None:
        """Make the server of the other region master.

        ``lost_after``: seconds for which the replica no longer receives from its master before that is lost, until
        ``returned``; None for a planned switch.
        """
        self._under_way.add(name)
        try:
            async with self._exclusively(name):
                if not self._is_complete(name):
                    return
                old = self._master(name)
                await self._change(name, old, lost_after)
            if old.lost:
                await returned.wait()
                await self._world.until_documents_change()
                old.lost = False
                old.follow(self._master(name), anew=True)
                self._state(name, down=False)
        except LockTaken:
            return  # a watcher was at it all the time
        finally:
            self._under_way.discard(name)
        self._world.checks.calmer()

    async def rejoin(self, server: SimDatabase) -> None:
        """Have a server that is back follow the master that a watcher has promoted meanwhile, if one has."""
        await asyncio.sleep(_BACK_SECONDS)
        name = next(each.name for each in self._world.topology.databases if server.name in self._names(each))
        async with self._exclusively(name):
            master = self._master(name)
            if server is not master and server not in master.replicas:
                self._world.trace.note("rejoins", server.name, master.name)
                server.follow(master, anew=True)
        self._world.checks.calmer()

    async def _change(self, name: str, old: SimDatabase, lost_after: float | None) -> None:
        (new,) = old.replicas
        if lost_after is None:
            old.read_only = True
            roll_back_all_of(old, None)
            await asyncio.sleep(_POLL_SECONDS)  # the commits under way are lost
        else:
            await self._lose(old, new, lost_after)
        await applied(new)
        await self._world.until_documents_change()
        epoch = enthrone(self._world, self._database(name), old, new, lacks_commits=old.lost)
        self._state(name, master=new.region, epoch=epoch, down=old.lost)
        self._world.trace.note("promoted", new.name, epoch, old.lost)
        await asyncio.sleep(SETTLE_SECONDS)
        new.open(self._world.loop.now)
        self._world.check_masters(self._database(name))

    def _exclusively(self, name: str) -> AbstractAsyncContextManager[LockHold]:
        documents = self._world.documents
        locks = self._world.open_locks() if documents is None else documents.local_locks()
        return hold_exclusively(locks, mastership_lock(name), _LOCK_SECONDS)

    def _is_complete(self, name: str) -> bool:
        servers = [self._world.databases[each] for each in self._names(self._database(name))]
        is_whole = len(self._master(name).replicas) == len(servers) - 1
        return len(servers) > 1 and is_whole and not any(server.down for server in servers)

    def _master(self, name: str) -> SimDatabase:
        database = self._database(name)
        return self._world.databases[database.servers[database.master_region].name]

    async def _lose(self, old: SimDatabase, new: SimDatabase, after: float) -> None:
        world = self._world
        received = new.waiting()
        new.stopped_until = max(new.stopped_until, world.loop.now + after + _POLL_SECONDS)
        await asyncio.sleep(after)
        old.lost = True
        old.restarts += 1
        roll_back_all_of(old, None)
        world.trace.note("lost", old.name)
        world.single_failures.look()
        old.replicas.clear()
        not_received = max(0, new.waiting() - received)
        gone = new.forget_received(world.random.choice((not_received, world.random.randint(0, not_received))))
        await applied(new)
        old.past.lose(new.rows, gone)

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
