"""A cluster that is lost, and restored from a backup that was made while clients wrote.

The databases are backed up a moment apart. Later all servers are lost. New ones begin with what the backup has, with
the numbers that `tao backup restore` lets them begin with, and the product's own repair makes the pairs whole that the
cut between the databases left half. Clients go on with their tokens. What was written since the backup is lost, and
the histories of the databases know it (`Past.lose`).

A backup may lack more than writes: the promotion of a replica that lacks commits, or another restore of that backup.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from tao.admin.access import Access
from tao.admin.backup import choose_sources
from tao.admin.backup_files import BinlogIndex, DatabaseDump, FileEntry, Manifest
from tao.admin.repair import find_faults, repair_faults
from tao.admin.restore import TargetState, epoch_after, plan_restore
from tao.model.edge_states import NO_OPERATION, EdgeRegisters, NodeState
from tao.model.errors import TaoError
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT, LostTimes
from tao.model.rows import IntentKey, ListRow
from tao.replication.shard_move_plan import master_of
from tao.routing.routes import Routes
from tao.schema.types import STATES_TABLE
from tao.storage.dialect import Dialect
from tao.storage.names import DEFAULT_EDGE_TABLE
from tao.topology import edits
from tao.topology.edits import shards_of
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings
from tests.sim.database import SimDatabase, unix_ms
from tests.sim.loop import Process
from tests.sim.network import SESSION
from tests.sim.plans import RESTORE_AGAIN, RESTORE_UNPROMOTED, Fault
from tests.sim.promotion import Promotions
from tests.sim.rows import Rows
from tests.sim.stores import SimReadStore, SimWriteStore, run_at
from tests.sim.topologies import REGIONS
from tests.sim.world import World

_ROLES: Final = ("leader", "follower", "tailer", "watcher", "worker")
_NO_FILE: Final = FileEntry(name="dump", size_bytes=0, sha256="")
_POLL_SECONDS: Final = 0.1
_READY_SECONDS: Final = 60.0
_PAGE_SECONDS: Final = 5.0
_LIVED_SECONDS: Final = (2.0, 40.0)
"""Time that a restored cluster serves before it is lost again: while it may give out no ids, and once it may."""
_SERVED_SECONDS: Final = 4.0
"""Time that a promoted master serves before everything is lost."""


class _Backup:
    """The backup of one database: its rows, and the position that has them."""

    def __init__(self, server: SimDatabase, position: str) -> None:
        self.rows: Final = Rows()
        self.rows.take_over(server.rows)
        self.position = position
        """Later that of the last restore: everything after it is lost by the next one."""


class Restores:
    """Losses of one world, and its restores."""

    def __init__(self, world: World, promotions: Promotions) -> None:
        self._world: Final = world
        self._promotions: Final = promotions
        self._is_under_way = False

    def begin(self, fault: Fault) -> None:
        """Back up now, lose everything some seconds later, and restore it."""
        if not self._is_under_way:
            self._is_under_way = True
            self._world.spawn(self._lose_and_restore(fault))

    async def _lose_and_restore(self, fault: Fault) -> None:
        world = self._world
        backups, shapes = {}, [each.shards for each in world.topology.databases]
        for source in choose_sources(world.topology):
            backups[source.database.name] = await self._back_up(source.master.name, source.server.name)
            await asyncio.sleep(fault.other / 1000)
        await asyncio.sleep(2.0 + fault.seconds % 10.0)
        if fault.kind == RESTORE_UNPROMOTED:
            await self._replace_master(fault.pick % world.shape.shards)
        for _ in range(2 if fault.kind == RESTORE_AGAIN else 1):
            if [each.shards for each in world.topology.databases] != shapes:
                break  # this backup is of other shards
            await self._lose_all(backups)
            await asyncio.sleep(_LIVED_SECONDS[fault.other % 2] if fault.kind == RESTORE_AGAIN else 0.0)
        self._is_under_way = False

    async def _replace_master(self, shard: int) -> None:
        """Lose a shard's master with its last commits, and let its successor serve for a while."""
        world, master = self._world, self._world.master_of(shard)
        name = next(each.name for each in world.topology.databases if master_of(each) == master.name)
        replaced, returned = asyncio.Event(), asyncio.Event()
        returned.set()

        async def replace() -> None:
            if self._promotions.can_begin(name):
                await self._promotions.promote(name, returned, lost_after=_POLL_SECONDS)
            replaced.set()

        world.spawn(replace(), world.operator)
        await replaced.wait()
        world.checks.looked_at["restores_of_promoted"] += world.master_of(shard) is not master
        await asyncio.sleep(_SERVED_SECONDS)

    async def _lose_all(self, backups: dict[str, _Backup]) -> None:
        """Lose all servers, and go on with the backups."""
        world = self._world
        names = [name for role in _ROLES for name in world.names(role)]
        for name in names:
            if world.is_up(name):
                world.kill(name)
        await asyncio.sleep(1.0)  # what was being committed is committed, or rolled back
        await world.until_documents_change()
        world.disks.clear()
        world.spools.clear()
        pairs = self._restore(backups)
        for name in names:
            world.start_server(name)
        await self._until_ready()
        await self._repair()
        for master in world.masters:
            master.past.repaired_pairs.update(pairs)
        world.checks.looked_at["restores"] += 1
        world.checks.calmer()

    async def _back_up(self, master: str, name: str) -> _Backup:
        """Copy what a server has, once it has everything that its master had."""
        world, server = self._world, self._world.databases[name]
        begun = world.databases[master].position
        if name == master:
            await asyncio.sleep(_POLL_SECONDS)  # until it shows all that it has
            return _Backup(server, begun)
        while not server.shows(begun):  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(_POLL_SECONDS)
        return _Backup(server, server.visible_position)

    def _restore(self, backups: dict[str, _Backup]) -> set[IntentKey]:
        """Begin anew with the backups. Return the pairs of which the databases may have lost an edge."""
        world, epochs = self._world, dict[str, int]()
        topology = world.topology
        targets = {
            each.name: [
                TargetState(server=server, is_master=server.name == master_of(each), dialect=Dialect.MARIADB.value)
                for server in each.servers.values()
            ]
            for each in topology.databases
        }
        now = unix_ms(world.loop.now)
        for plan in plan_restore(self._manifest(backups), BinlogIndex(), topology, targets, former=topology):
            master, backup = world.databases[plan.master.name], backups[plan.database.name]
            lost = master.after(backup.position)
            assert lost is not None, "the binlog is whole"
            gone, rows = [*lost], Rows()
            rows.take_over(backup.rows)
            for shard in set(rows.shards) - shards_of(plan.database):
                rows.forget(shard)
            epoch = epoch_after(plan, max(row.version_epoch for row in rows.shards.values()))
            epochs[plan.database.name] = epoch
            _begin_with(rows, plan.master.name, epoch, LostTimes.at(now))
            master.past.lose(rows, gone)
            for server in plan.database.servers.values():
                world.databases[server.name].restore(rows)
            backup.position = master.position
        world.change_topology(edits.raise_epochs(topology, epochs))
        return {pair for master in world.masters for pair in master.past.lost_pairs}

    def _manifest(self, backups: dict[str, _Backup]) -> Manifest:
        topology, now = self._world.topology, unix_ms(self._world.loop.now)
        dumps = [
            DatabaseDump(
                name=each.name,
                server=master_of(each),
                region=each.master_region,
                dialect=Dialect.MARIADB.value,
                position=backups[each.name].position,
                version_epoch=each.version_epoch,
                shards=each.shards,
                snapshot_unix_ms=now,
                statement_bytes=1,
                file=_NO_FILE,
            )
            for each in topology.databases
        ]
        return Manifest(
            tao_version="simulated",
            begun_unix_ms=now,
            ended_unix_ms=now,
            shards=topology.shards,
            documents=(),
            databases=tuple(dumps),
        )

    async def _until_ready(self) -> None:
        end = self._world.loop.now + _READY_SECONDS
        while self._world.not_ready() and self._world.loop.now < end:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(_POLL_SECONDS)

    async def _repair(self) -> None:
        """Run `tao repair` until it has repaired all that it finds."""
        world = self._world
        process = Process("repair", REGIONS[0])
        world.dead.append(process)
        repaired = asyncio.Event()

        def time_ns() -> int:
            return unix_ms(world.loop.now) * 1_000_000

        async def repair() -> None:
            routes = Routes(world.topology)
            links = Links(LinkSettings(session=SESSION), Credentials("repair", "operator"))
            while True:
                try:
                    access = _access(world, routes, links)
                    faults = await find_faults(access, world.schema, inverses=True, counts=True, time_ns=time_ns)
                    repairs = await repair_faults(access, faults)
                    world.trace.note("repairs", len(faults.pairs), len(faults.counts), len(faults.intents))
                    world.checks.looked_at["repaired_pairs"] += len(faults.pairs)
                    if repairs.complete(faults):
                        break
                except TaoError as error:
                    world.trace.note("repair failed", error.message)
                await asyncio.sleep(1.0)
            await links.close()
            repaired.set()

        world.spawn(repair(), process)
        await repaired.wait()


def _begin_with(rows: Rows, master: str, version_epoch: int, lost: LostTimes) -> None:
    """Do what `tao.replication.server_statements.raise_epoch` does to the rows of all shards."""
    for shard, row in rows.shards.items():
        lacks_epoch = row.version_epoch < version_epoch
        rows.reserved_times[shard] = lost.begin(rows.reserved_times.get(shard, 0), lacks_epoch=lacks_epoch)
        rows.shards[shard] = msgspec.structs.replace(
            row,
            master_server=master,
            version_epoch=max(row.version_epoch, version_epoch),
            owner="",
            generation=row.generation + 1,
        )


def _access(world: World, routes: Routes, links: Links) -> Access:
    def master(shard: int) -> str:
        return world.master_of(shard).name

    store: Any = SimReadStore(world, master, master, None, None)  # Any: they replace classes, not protocols
    intents: Any = SimWriteStore(world, master, None, None)
    scans: Any = SimScans(world)
    return Access(
        routes=routes,
        links=links,
        store=store,
        scans=scans,
        slow_scans=scans,
        intents=intents,
        scans_at=lambda _: scans,
    )


class SimScans:
    """Replaces `tao.storage.scans.Scans` for a repair: of the masters."""

    def __init__(self, world: World) -> None:
        self._world: Final = world

    async def scan_edges(self, shard: int, table: str, after: EdgeKey, limit: int) -> list[tuple[EdgeKey, Edge]]:
        """See `Scans.scan_edges`."""
        rows = await self._rows(shard)
        return sorted(
            (EdgeKey(key.id1, key.atype, id2), edge)
            for key, edges in rows.edges.items()
            if key.id1 >> SHARD_SHIFT == shard and self._table(key.atype) == table
            for id2, edge in edges.items()
            if EdgeKey(key.id1, key.atype, id2) > after
        )[:limit]

    async def scan_registers(self, shard: int, after: EdgeKey, limit: int) -> list[tuple[EdgeKey, EdgeRegisters]]:
        """See `Scans.scan_registers`."""
        rows = await self._rows(shard)
        found = [each for each in rows.registers.items() if each[0].id1 >> SHARD_SHIFT == shard and each[0] > after]
        return sorted(found, key=lambda each: each[0])[:limit]

    async def read_registers(self, shard: int, keys: Sequence[EdgeKey]) -> list[tuple[EdgeKey, EdgeRegisters]]:
        """See `Scans.read_registers`."""
        rows = await self._rows(shard)
        return [(key, rows.registers.get(key, NO_OPERATION)) for key in keys if rows.edge(key) is not None]

    async def read_nodes(self, shard: int, keys: set[ListKey]) -> dict[ListKey, NodeState]:
        """See `Scans.read_nodes`."""
        rows = await self._rows(shard)
        return {key: rows.nodes[key] for key in sorted(keys) if key in rows.nodes}

    async def scan_lists(self, shard: int, after: ListKey, limit: int) -> list[tuple[ListKey, ListRow]]:
        """See `Scans.scan_lists`."""
        rows = await self._rows(shard)
        found = [each for each in rows.lists.items() if each[0].id1 >> SHARD_SHIFT == shard and each[0] > after]
        return sorted(found, key=lambda each: each[0])[:limit]

    async def count_edges(self, shard: int, table: str, after: ListKey, limit: int) -> list[tuple[ListKey, int]]:
        """See `Scans.count_edges`."""
        rows = await self._rows(shard)
        return sorted(
            (key, len(edges))
            for key, edges in rows.edges.items()
            if edges and key.id1 >> SHARD_SHIFT == shard and self._table(key.atype) == table and key > after
        )[:limit]

    async def count_again(self, shard: int, _: str, key: ListKey) -> tuple[ListRow, int]:
        """See `Scans.count_again`."""
        rows = await self._rows(shard)
        return rows.lists.get(key, ListRow(0, 0)), len(rows.edges.get(key, ()))

    def _table(self, atype: int) -> str:
        found = self._world.schema.atype(atype)
        return STATES_TABLE if found.states else found.table or DEFAULT_EDGE_TABLE

    async def _rows(self, shard: int) -> Rows:
        server = self._world.master_of(shard)

        async def look() -> Rows:
            return server.rows

        return await run_at(self._world, server, look, _PAGE_SECONDS)
