"""Two database servers of one set, a topology that says which is the master, and a promoter, without caches."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tao.admin.replication import catch_up, follow, lead, replicas
from tao.devcluster.database import DatabaseInstance, InstanceSettings, default_cache_folder
from tao.devcluster.database_program import Durability, ServerOptions, find_server_binary
from tao.model.errors import TopologyError
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.replication.accounts import Account, ServiceAccounts, TlsDemand
from tao.replication.locks import FileLocks
from tao.replication.promotion import OnStep, Promoter, PromotionSettings
from tao.replication.replica_seed import Reseeder, SeedStep
from tao.replication.replication_set import SetAccounts
from tao.replication.server_statements import fence, member_state
from tao.storage.dialect import SessionSetup
from tao.storage.migrations import migrate
from tao.storage.result_packets import Row
from tao.storage.session import DatabaseSession, open_session
from tao.topology.document import dump_topology, parse_topology
from tao.topology.file_store import TopologyFile
from tao.wire.tls import TlsFiles
from tests.rigs.pacing import PATIENT_SECONDS

SHARDS = 2
EAST, WEST = "east", "west"


@dataclass(frozen=True)
class ReplicationRig:
    """The two servers, each named by its region."""

    servers: dict[str, DatabaseInstance]
    accounts: ServiceAccounts
    topology_path: Path

    @property
    def topology(self) -> Topology:
        return parse_topology(self.topology_path.read_bytes(), "topology")

    @property
    def database(self) -> Database:
        return self.topology.databases[0]

    def promoter(self, on_step: OnStep | None = None, *, file: type[TopologyFile] = TopologyFile) -> Promoter:
        """Return a promoter with bounds that suit tests on one machine."""

        return Promoter(*self._parts(file, self.accounts.watcher), on_step=on_step)

    def reseeder(self, on_step: Callable[[SeedStep], Awaitable[None]] | None = None) -> Reseeder:
        """Return what makes replica seeds, with the same bounds."""
        return Reseeder(*self._parts(), self.promoter(), on_step=on_step)

    def _parts(
        self, file: type[TopologyFile] = TopologyFile, account: Account | None = None
    ) -> tuple[TopologyFile, FileLocks, SetAccounts, PromotionSettings]:
        def fail(error: TopologyError) -> None:
            raise error

        return (
            file(self.topology_path, on_error=fail),
            FileLocks(self.topology_path),
            SetAccounts(account or self.accounts.administrator, self.accounts.replicator),
            PromotionSettings(lock_seconds=0.0, settle_seconds=0.0, acknowledging_seconds=10.0),
        )

    @asynccontextmanager
    async def session(self, region: str, *, as_leader: bool = False) -> AsyncIterator[DatabaseSession]:
        account = self.accounts.leader if as_leader else self.accounts.administrator
        server = DatabaseServer(name=region, port=self.servers[region].port)
        session = await open_session(
            account.at(server), region, SessionSetup(writes=True), deadline=statement_deadline()
        )
        try:
            yield session
        finally:
            session.abort()

    async def close(self, region: str) -> None:
        """Close a server to writes."""
        async with self.session(region) as session, self.session(region) as other:
            await fence(session, other, deadline=statement_deadline())

    async def write(self, region: str, number: int) -> None:
        """Write as a leader does; raises the error that a leader would get."""
        async with self.session(region, as_leader=True) as session:
            insert = "INSERT INTO tao_00000.objects VALUES (%s, 1, 1, 0, ''); COMMIT"
            await session.run(insert, (number,), deadline=statement_deadline())

    async def rows(self, region: str, sql: str) -> list[Row]:
        async with self.session(region) as session:
            return (await session.run(sql, deadline=statement_deadline()))[0]

    async def written(self, region: str) -> set[int]:
        return {int(row[0]) for row in await self.rows(region, "SELECT id FROM tao_00000.objects")}

    async def open_servers(self) -> set[str]:
        """Return the servers that accept writes."""
        asked = {region: await self.rows(region, "SELECT @@GLOBAL.read_only") for region in self.servers}
        return {region for region, rows in asked.items() if not rows[0][0]}


def statement_deadline() -> float:
    return asyncio.get_running_loop().time() + PATIENT_SECONDS


def _topology(ports: dict[str, int], *, semi_sync: bool) -> Topology:
    def region(name: str) -> Region:
        leader, follower = (CacheServer(name=f"{name}-{kind}", grpc="127.0.0.1:1") for kind in ("l", "f"))
        return Region(
            name=name,
            leaders=Tier(name="leaders", servers=(leader,)),
            followers=(Tier(name="web", servers=(follower,)),),
        )

    servers = {name: DatabaseServer(name=name, port=port) for name, port in ports.items()}
    database = Database(name="db", master_region=EAST, servers=servers, shards=((0, SHARDS - 1),), semi_sync=semi_sync)
    return Topology(version=1, shards=SHARDS, regions=(region(EAST), region(WEST)), databases=(database,))


@asynccontextmanager
async def replication_rig(
    folder: Path, accounts: ServiceAccounts, *, semi_sync: bool = False, tls: TlsFiles | None = None
) -> AsyncIterator[ReplicationRig]:
    """Start east as master and west as its replica, which has caught up with the tables of the shards. ``tls``: the
    certificate that both show, and then demand of everybody."""
    servers = {
        region: DatabaseInstance(
            find_server_binary(os.environ),
            InstanceSettings(
                folder=folder / region,
                accounts=accounts,
                cache_folder=default_cache_folder(os.environ),
                demand=None if tls is None else TlsDemand.CERTIFICATE,
                options=ServerOptions(
                    server_id=number,
                    gtid_domain=1,
                    replicated=True,
                    read_only=True,
                    semi_sync=True,
                    durability=Durability.RELAXED,
                    tls=tls,
                ),
            ),
        )
        for number, region in enumerate((EAST, WEST), start=1)
    }
    await asyncio.gather(*(server.start() for server in servers.values()))
    try:
        topology = _topology({region: server.port for region, server in servers.items()}, semi_sync=semi_sync)
        path = folder / "topology.json"
        path.write_text(dump_topology(topology))
        master = topology.databases[0].servers[EAST]
        await lead(master, accounts.administrator)
        (replica,) = replicas(topology)
        await follow(replica, accounts.administrator, accounts.replicator)
        administrator = accounts.administrator
        await migrate(administrator.at(master), range(SHARDS), {}, master.name)
        await catch_up(replica, administrator, PATIENT_SECONDS)
        yield ReplicationRig(servers, accounts, path)
    finally:
        await asyncio.gather(*(server.kill() for server in servers.values() if server.is_running))


class Killed(BaseException):
    """The effect of SIGKILL on code: nothing is cleaned up except what the kernel takes back."""


async def assert_is_master(rig: ReplicationRig, region: str, other: str) -> None:
    """Assert that only this server accepts writes, the other one follows it and has everything, and rows and topology
    agree."""
    assert await rig.open_servers() == {region}
    assert rig.database.master_region == region
    number = 1 + max(await rig.written(region), default=0)
    await rig.write(region, number)
    await until_arrived(rig, other, number)
    assert await rig.written(region) == await rig.written(other)
    for shard in range(SHARDS):
        ((master, epoch),) = await rig.rows(region, f"SELECT master_server, version_epoch FROM tao_{shard:05d}.shard")
        assert (master.decode(), epoch) == (region, rig.database.version_epoch)


async def until_arrived(rig: ReplicationRig, region: str, number: int) -> None:
    async with asyncio.timeout(PATIENT_SECONDS):
        while number not in await rig.written(region):  # noqa: ASYNC110 - the replica makes the condition true
            await asyncio.sleep(0.01)


async def waits_for_replica(rig: ReplicationRig, region: str) -> bool:
    async with rig.session(region) as session:
        return (await member_state(session, deadline=statement_deadline())).waits_for_replica
