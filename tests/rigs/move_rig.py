"""Two databases without caches: shards that move between them, and a writer that writes as a leader does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tao.admin.replication import catch_up, follow, lead, replicas
from tao.admin.shard_mover import MoverAccounts, ShardMover
from tao.devcluster.database import DatabaseInstance, InstanceSettings, default_cache_folder
from tao.devcluster.database_program import Durability, ServerOptions, find_server_binary
from tao.model.errors import TaoError, TopologyError
from tao.model.ids import SHARD_SHIFT
from tao.model.rows import ObjectRow, RowChanges, ShardRow, WriteKeys
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.observability.logs import logger
from tao.replication.accounts import Account, ServiceAccounts, TlsDemand
from tao.replication.locks import FileLocks
from tao.replication.promotion import Promoter, PromotionSettings
from tao.replication.replication_set import SetAccounts
from tao.replication.shard_move import MoveSettings, ShardMoves
from tao.replication.shard_move_plan import MoveStep
from tao.routing.routes import Routes
from tao.storage.dialect import SessionSetup
from tao.storage.migrations import migrate
from tao.storage.names import schema_name
from tao.storage.pools import Pools
from tao.storage.result_packets import Row
from tao.storage.session import DatabaseSession, ServerAccount, open_session
from tao.storage.writes import WRITE_SETUP, MySqlWriteStore
from tao.topology.document import dump_topology, parse_topology
from tao.topology.file_store import TopologyFile
from tao.wire.tls import TlsFiles
from tests.rigs.pacing import PATIENT_SECONDS

SHARDS: Final = 32
"""The first half of them are at `SOURCE`, the others at `TARGET`."""
SOURCE, TARGET = "db-1", "db-2"


QUICK: Final = MoveSettings(steady_seconds=0.0, rows_per_range=50, switch_seconds=10.0, takeover_seconds=0.0)


@dataclass
class MoveRig:
    """The servers by name (``east-db-1``), and a store that writes as a leader does."""

    servers: dict[str, DatabaseInstance]
    accounts: ServiceAccounts
    topology_path: Path
    pools: list[Pools] = field(default_factory=list)

    @property
    def topology(self) -> Topology:
        return parse_topology(self.topology_path.read_bytes(), "topology")

    def holder(self, shard: int) -> str:
        """Return the database that holds a shard."""
        return Routes(self.topology).database_of(shard).name

    def moves(self, settings: MoveSettings = QUICK, *, account: Account | None = None) -> ShardMoves:
        """``account``: in place of the administrator's, such as the watcher's."""
        accounts = SetAccounts(account or self.accounts.administrator, self.accounts.replicator)
        return ShardMoves(self._file(), FileLocks(self.topology_path), accounts, settings)

    def mover(
        self, on_step: Callable[[MoveStep], Awaitable[None]] | None = None, settings: MoveSettings = QUICK
    ) -> ShardMover:
        accounts = MoverAccounts(self.accounts.leader, self.accounts.replicator)
        return ShardMover(self.moves(settings), settings, accounts, logger("test"), on_step=on_step)

    def promoter(self) -> Promoter:
        settings = PromotionSettings(lock_seconds=5.0, settle_seconds=0.0, acknowledging_seconds=10.0)
        accounts = SetAccounts(self.accounts.administrator, self.accounts.replicator)
        return Promoter(self._file(), FileLocks(self.topology_path), accounts, settings)

    def _file(self) -> TopologyFile:
        def fail(error: TopologyError) -> None:
            raise error

        return TopologyFile(self.topology_path, on_error=fail)

    @asynccontextmanager
    async def session(self, server: str) -> AsyncIterator[DatabaseSession]:
        login = self._login(server, self.accounts.administrator)
        session = await open_session(login, server, SessionSetup(writes=True), deadline=soon())
        try:
            yield session
        finally:
            session.abort()

    async def rows(self, server: str, sql: str) -> list[Row]:
        async with self.session(server) as session:
            return (await session.run(sql, deadline=soon()))[0]

    def store(self) -> MySqlWriteStore:
        """Return a leader's store, which finds masters in the present topology."""

        def master_of(shard: int) -> str:
            database = Routes(self.topology).database_of(shard)
            return database.servers[database.master_region].name

        pools = Pools(lambda server: self._login(server, self.accounts.leader), WRITE_SETUP)
        self.pools.append(pools)
        return MySqlWriteStore(master_of, pools, lambda _: "assocs")

    def _login(self, server: str, account: Account) -> ServerAccount:
        return account.at(DatabaseServer(name=server, port=self.servers[server].port))

    async def written(self, server: str, shard: int) -> dict[int, bytes]:
        """Return the objects of a shard at a server."""
        sql = f"SELECT id, data FROM {schema_name(shard)}.objects"
        return {int(key): data for key, data in await self.rows(server, sql)}


class Writer:
    """A leader of the shard: it takes it, writes objects one after the other, and takes it again when it lost it."""

    def __init__(self, store: MySqlWriteStore, shard: int, name: str = "leader-1") -> None:
        self._store: Final = store
        self._name: Final = name
        self.shard: Final = shard
        self.next = 0
        self.acknowledged: dict[int, bytes] = {}
        self.unknown: set[int] = set()
        self.rejected = 0
        self._row: ShardRow | None = None

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self.write_one()
            await asyncio.sleep(0.002)

    async def write_one(self) -> bool:
        """Write the next object. Returns whether that was acknowledged; the error of a leader is a retry."""
        number = self.next
        key, data = self.shard << SHARD_SHIFT | 1 + number % 200, str(number).encode()
        try:
            if self._row is None:
                self._row = (await self._store.take_ownership([self.shard], self._name, timeout_seconds=5))[self.shard]
            server = self._store.server_of(self.shard)
            async with self._store.transaction(server, timeout_seconds=5) as transaction:
                rows, _ = await transaction.lock_and_read([self.shard], WriteKeys(objects={key}))
                row = rows[self.shard]
                if (row.owner, row.generation, row.master_server) != (self._name, self._row.generation, server):
                    self._row = None
                    self.rejected += 1
                    return False
                await transaction.apply(RowChanges(put_objects=[ObjectRow(key, 1, number + 1, False, data)]))
                self.unknown.add(key)  # until it is acknowledged: this task may be cancelled in the middle
                await transaction.commit()
        except TaoError:
            self.rejected += 1
            self._row = None
            return False
        self.acknowledged[key] = data
        self.unknown.discard(key)
        self.next += 1
        return True

    async def more(self, count: int) -> None:
        """Wait until ``run`` has written some more."""
        until = self.next + count
        async with asyncio.timeout(PATIENT_SECONDS):
            while self.next < until:  # noqa: ASYNC110 - counts what another task does
                await asyncio.sleep(0.005)


@asynccontextmanager
async def writing(writer: Writer) -> AsyncIterator[Writer]:
    """Run the writer until the context ends."""
    task = asyncio.create_task(writer.run())
    try:
        yield writer
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def soon() -> float:
    return asyncio.get_running_loop().time() + PATIENT_SECONDS


def _topology(ports: dict[str, int], regions: tuple[str, ...], shards: int, at_source: int) -> Topology:
    def region(name: str) -> Region:
        leader, follower = (CacheServer(name=f"{name}-{kind}", grpc="127.0.0.1:1") for kind in ("l", "f"))
        return Region(
            name=name,
            leaders=Tier(name="leaders", servers=(leader,)),
            followers=(Tier(name="web", servers=(follower,)),),
        )

    def database(name: str, shards: tuple[int, int]) -> Database:
        servers = {each: DatabaseServer(name=f"{each}-{name}", port=ports[f"{each}-{name}"]) for each in regions}
        return Database(name=name, master_region="east", servers=servers, shards=(shards,))

    databases = (database(SOURCE, (0, at_source - 1)), database(TARGET, (at_source, shards - 1)))
    return Topology(version=1, shards=shards, regions=tuple(map(region, regions)), databases=databases)


@asynccontextmanager
async def move_rig(
    folder: Path,
    accounts: ServiceAccounts,
    *,
    regions: tuple[str, ...] = ("east",),
    tls: TlsFiles | None = None,
    shards: int = SHARDS,
    at_source: int = SHARDS // 2,
) -> AsyncIterator[MoveRig]:
    """Start the masters, which are in east, and a replica of each in every other region. ``tls``: the certificate that
    all show, and then demand of everybody. ``at_source``: how many of the shards, the first ones, are at `SOURCE`."""
    names = [f"{region}-{database}" for database in (SOURCE, TARGET) for region in regions]
    servers = {
        name: DatabaseInstance(
            find_server_binary(os.environ),
            InstanceSettings(
                folder=folder / name,
                accounts=accounts,
                cache_folder=default_cache_folder(os.environ),
                demand=None if tls is None else TlsDemand.CERTIFICATE,
                options=ServerOptions(
                    server_id=number,
                    gtid_domain=1 + (TARGET in name),
                    replicated=len(regions) > 1,
                    read_only=len(regions) > 1,
                    durability=Durability.RELAXED,
                    tls=tls,
                ),
            ),
        )
        for number, name in enumerate(names, start=1)
    }
    await asyncio.gather(*(server.start() for server in servers.values()))
    rig = MoveRig(servers, accounts, folder / "topology.json")
    try:
        topology = _topology({name: server.port for name, server in servers.items()}, regions, shards, at_source)
        rig.topology_path.write_text(dump_topology(topology))
        administrator = accounts.administrator
        for database in topology.databases:
            master = database.servers["east"]
            await lead(master, administrator, keeps_lease=False)
            ((first, last),) = database.shards
            await migrate(administrator.at(master), range(first, last + 1), {}, master.name)
        for replica in replicas(topology):
            await follow(replica, administrator, accounts.replicator)
            await catch_up(replica, administrator, PATIENT_SECONDS)
        yield rig
    finally:
        for pools in rig.pools:
            await pools.close()
        await asyncio.gather(*(server.kill() for server in servers.values() if server.is_running))
