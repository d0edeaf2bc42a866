"""A server of a replication set is rebuilt from its master: emptied, given a copy, told which transactions that is, and
attached (DESIGN.md §9).

For a former master that has diverged, an empty server, and one whose seeding ended halfway. The process may end after
any step, and the next run begins anew: that a server has a part of the data is written at the server itself, so until
the copy is whole nobody reads there, promotes or attaches it (`tao.storage.seeding`).

The lock of the database is held only while the server is taken out of use, so that no promotion chooses it just then:
renewals of the master's lease want that lock, too, and a copy takes as long as it takes. A promotion meanwhile is
found out at the end, when the copy is compared with whoever is master by then.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import StrEnum
from typing import Final

import msgspec

from tao.model.errors import OperatorError, TopologyConflict, TopologyError
from tao.model.ports import TopologyStore
from tao.model.topology import Database, Topology
from tao.storage.database_tools import Copied, DatabaseTools, copy_shards, find_tools
from tao.storage.failures import TablesMissing
from tao.storage.seeding import (
    ServerContents,
    begin_seeding,
    contents,
    drop_everything,
    end_seeding,
    note_position,
)
from tao.topology import edits
from tao.watcher.locks import Locks, held_alone, mastership_lock
from tao.watcher.promotion import Promoter
from tao.watcher.promotion_plan import discarded
from tao.watcher.replication_set import ReplicationSet, SetAccounts
from tao.watcher.settings import PromotionSettings

_STALL_SECONDS: Final = 300.0
"""For which no byte of a copy may move: a lock on the master's tables, or a network that is gone, and not a disk."""

_EMPTYING_SECONDS: Final = 600.0
"""For the statements that drop what a server has: a large table's files take a while to go."""


class SeedingRefused(OperatorError):
    """Nothing was changed: seeding that server now could lose data that nobody else has. The message says why."""

    reason = "SEEDING_REFUSED"


class SeedStep(StrEnum):
    """In their order."""

    MARK = "marking it down: its region reads elsewhere"
    CLOSE = "closing it to everybody"
    EMPTY = "dropping what it has"
    COPY = "copying the master"
    POSITION = "noting which transactions it has"
    ADMIT = "letting servers in again"
    FOLLOW = "having it follow the master, and catch up"


class SeedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a seeding would do. ``discards``: transactions of the server that nobody will have afterwards; ``drops``,
    ``copies``: shards; ``about_bytes``: of the master's data, as it estimates them."""

    server: str
    region: str
    database: str
    master: str
    half_seeded: bool
    discards: str
    drops: int
    copies: int
    about_bytes: int


class Seeded(msgspec.Struct, frozen=True, kw_only=True):
    """What a seeding has done. ``position``: GTIDs of the copy; ``statement_bytes``: of the statements that it took."""

    server: str
    follows: str
    shards: int
    statement_bytes: int
    position: str


class Reseeder:
    """Seedings, one of a server at a time."""

    def __init__(
        self,
        store: TopologyStore,
        locks: Locks,
        accounts: SetAccounts,
        settings: PromotionSettings,
        promoter: Promoter,
        *,
        on_step: Callable[[SeedStep], Awaitable[None]] | None = None,
        on_copied: Callable[[Copied, int], None] | None = None,
    ) -> None:
        """``on_step`` is called before each step; ``on_copied`` with how far the copy is, and of how many shards."""
        self._store: Final = store
        self._locks: Final = locks
        self._accounts: Final = accounts
        self._settings: Final = settings
        self._promoter: Final = promoter
        self._on_step: Final = on_step
        self._on_copied: Final = on_copied

    async def plan(self, server: str) -> SeedPlan:
        """Look, and change nothing. Raises `SeedingRefused`, or `TopologyError` when there is no such server."""
        return await self._plan(await self._set(server), server)

    async def seed(self, server: str) -> Seeded:
        """Rebuild a server. Raises `SeedingRefused` with everything as before; another `TaoError` when a step failed:
        the server is then out of use, and the next run begins anew. `LockTaken` while another run is under way."""
        with self._locks.held(f"seeding-of-{server}", alone=True):
            replicas = await self._set(server)
            async with replicas.session(replicas.database.master_region) as session:
                tools = await find_tools(session.dialect, os.environ)
            await self._begin(SeedStep.MARK)
            await self._plan(replicas, server)
            await self._mark(server)
            await self._begin(SeedStep.CLOSE)
            region = replicas.region_of(server)
            async with held_alone(self._locks, mastership_lock(replicas.database.name), self._settings.lock_seconds):
                replicas = await self._set(server)
                await self._plan(replicas, server)  # once more: now nobody changes who is master
                await replicas.let_master_go()
                async with replicas.session(region) as session:
                    await begin_seeding(session, deadline=replicas.soon() + self._settings.catch_up_seconds)
            await self._begin(SeedStep.EMPTY)
            async with replicas.session(region) as session:
                await drop_everything(session, deadline=replicas.soon() + _EMPTYING_SECONDS)
            await self._begin(SeedStep.COPY)
            master, copied = await self._copy(replicas, region, tools)
            await self._begin(SeedStep.POSITION)
            async with replicas.session(region) as session:
                await note_position(session, master.binlog_state, copied.position, deadline=replicas.soon())
            await self._begin(SeedStep.ADMIT)
            async with replicas.session(region) as session:
                await end_seeding(session, deadline=replicas.soon())
        await self._begin(SeedStep.FOLLOW)
        await self._promoter.rejoin(replicas.database.name, server)
        follows = (await self._set(server)).master.name
        return Seeded(
            server=server,
            follows=follows,
            shards=len(master.shards),
            statement_bytes=copied.statement_bytes,
            position=copied.position,
        )

    async def _plan(self, replicas: ReplicationSet, server: str) -> SeedPlan:
        database, region = replicas.database, replicas.region_of(server)
        if region == database.master_region:
            raise SeedingRefused(f"{server} is the master of {database.name} by the topology: there is nobody above it")
        member, master = await replicas.beside_master(region)
        for each in (member, master):
            if each.state is None:
                raise SeedingRefused(f"{each.name} does not answer: {each.error}")
        if master.state is not None and master.state.following is not None:
            raise SeedingRefused(
                f"{master.name} is the master by the topology, and follows {master.state.following.source}: which of "
                "them has the truth? `tao promote` settles it"
            )
        theirs, own = await self._contents(replicas, database.master_region), await self._contents(replicas, region)
        if theirs.server_id == own.server_id:
            raise SeedingRefused(
                f"{server} and {master.name} have one server_id: are they one server by two addresses?"
            )
        if not theirs.shards:
            raise SeedingRefused(f"{master.name} has no shard: is it the right master? `tao migrate` makes them")
        epoch = 0
        with suppress(TablesMissing):  # it is empty, or half seeded
            epoch = await replicas.highest_epoch(region)
        if epoch > database.version_epoch:
            raise SeedingRefused(
                f"a promotion of {server} was interrupted when it could not be undone any more: "
                f"tao promote {database.name} --to {region} ends it"
            )
        return SeedPlan(
            server=server,
            region=region,
            database=database.name,
            master=master.name,
            half_seeded=member.state is not None and member.state.seeding,
            discards=discarded(member, master),
            drops=len(own.shards),
            copies=len(theirs.shards),
            about_bytes=theirs.data_bytes,
        )

    async def _mark(self, server: str) -> None:
        """By hand, so that no watcher takes the mark away when it sees the server follow."""
        while True:
            topology = await self._store.load()
            marked = edits.mark_database_server(topology, server, down=True)
            if msgspec.structs.replace(marked, version=topology.version) == topology:
                return
            try:
                await self._store.change(topology.version, marked)
            except TopologyConflict:
                continue  # a watcher was faster, with a mark of its own
            await asyncio.sleep(self._settings.settle_seconds)  # for all to see it
            return

    async def _copy(self, replicas: ReplicationSet, region: str, tools: DatabaseTools) -> tuple[ServerContents, Copied]:
        master = await self._contents(replicas, replicas.database.master_region)

        def progress(copied: Copied) -> None:
            if self._on_copied is not None:
                self._on_copied(copied, len(master.shards))

        copied = await copy_shards(
            tools,
            replicas.login(replicas.database.master_region),
            replicas.login(region),
            master.shards,
            stall_seconds=_STALL_SECONDS,
            on_progress=progress,
        )
        return master, copied

    async def _contents(self, replicas: ReplicationSet, region: str) -> ServerContents:
        async with replicas.session(region) as session:
            return await contents(session, deadline=replicas.soon() + self._settings.catch_up_seconds)

    async def _set(self, server: str) -> ReplicationSet:
        return ReplicationSet(
            database_with(await self._store.load(), server),
            self._accounts,
            seen_from="",
            statement_seconds=self._settings.statement_seconds,
        )

    async def _begin(self, step: SeedStep) -> None:
        if self._on_step is not None:
            await self._on_step(step)


def database_with(topology: Topology, server: str) -> Database:
    """The database that a server belongs to. Raises `TopologyError` when there is none."""
    for database in topology.databases:
        if any(each.name == server for each in database.servers.values()):
            return database
    raise TopologyError(f"there is no database server {server!r}")
