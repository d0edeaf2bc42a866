"""Access to a running cluster of several regions: its parts by region, faults, and the final comparison."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiomysql

from tao.admin.access import Access, ReaderLogin, access_of
from tao.admin.cache_verification import verify_caches
from tao.admin.repair import find_broken_pairs
from tao.admin.replica_verification import compare_replicas
from tao.admin.replication import follow, hold, replicas
from tao.client import Assoc
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability, Flavour
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.line_control import Cut, Heal, ask_line
from tao.devcluster.state_folder import service_accounts
from tao.model.ids import SHARD_SHIFT
from tao.model.relay import Relay
from tao.model.topology import Topology
from tao.routing.routes import Routes
from tao.schema.registry import load_schema
from tao.storage.names import schema_name
from tao.topology import edits
from tao.topology.document import parse_topology
from tao.topology.file_store import TopologyFile
from tao.wire.convert import relay_to_pb
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings
from tao.wire.v1 import session_pb2 as pb
from tests.e2e.cluster_access import LOOK_SECONDS, killed_at_the_end, patient_stats
from tests.rigs.pacing import PATIENT_SECONDS

RTT_MS = 20.0
EAST_WEST = ("east", "west")


async def until(condition: Callable[[], Awaitable[object]], what: str = "") -> None:
    """Wait until other processes make a condition true."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENT_SECONDS
    while not await condition():
        assert loop.time() < deadline, what or "the condition did not become true in time"
        await asyncio.sleep(LOOK_SECONDS)


def plain(edges: Sequence[Assoc]) -> list[tuple[int, int]]:
    """Return ``(id2, time)`` of each edge."""
    return [(edge.id2, edge.time) for edge in edges]


@dataclass(frozen=True)
class Regions:
    """A running cluster of several regions, with the faults that tests cause in it."""

    cluster: DevCluster
    topology: Topology
    routes: Routes

    @property
    def target(self) -> str:
        """Return the topology file, which `connect` takes together with ``region=``."""
        return str(self.cluster.topology_path)

    def tailers(self, region: str) -> list[str]:
        return [name for name, role in self.cluster.processes.items() if role is Role.TAILER and region in name]

    async def tailers_have_begun(self) -> bool:
        """Return whether every tailer has started. A tailer without a position invalidates its region twice: at once,
        and when all rows are visible."""
        for region in self.topology.regions:
            stats = [await patient_stats(self.cluster.admin(leader.name)) for leader in region.leaders.servers]
            if sum(each["voided_shards"] for each in stats) < 2 * self.topology.shards:
                return False
        return True

    async def stats_of_leader(self, region: str, object_id: int) -> dict[str, Any]:
        leader = self.routes.leaders(region).home(object_id >> SHARD_SHIFT)
        return await patient_stats(self.cluster.admin(leader.name))

    async def invalidate_shards_of(self, region: str, *object_ids: int) -> None:
        """Invalidate the shards of these objects in a region, as its tailer does when it cannot determine what has
        changed."""
        links = Links(LinkSettings(), Credentials("test", "tailer"))
        try:
            for shard in {object_id >> SHARD_SHIFT for object_id in object_ids}:
                leader = self.routes.leaders(region).home(shard)
                relay = relay_to_pb(Relay(bulk_shards=(shard,)))
                await links.to(leader).ask(pb.Request(relay=relay), PATIENT_SECONDS)
        finally:
            await links.close()

    async def cut(self, *, silent: bool = False) -> None:
        await ask_line(self.cluster.line_control, Cut(EAST_WEST, silent))

    async def heal(self) -> None:
        await ask_line(self.cluster.line_control, Heal(EAST_WEST))

    async def mark_database_server(self, name: str, *, down: bool) -> None:
        """Mark a database server up or down in the topology, as a watcher does."""
        store = TopologyFile(self.cluster.topology_path, on_error=lambda _: None)
        before = await store.load()
        await store.change(before.version, edits.mark_database_server(before, name, down))

    async def sql(self, server: str, *statements: str, shard: int | None = None) -> None:
        """Run statements as the administrator of one database server."""
        database = self.cluster.database(server)
        account = database.accounts.administrator
        connection = await aiomysql.connect(
            host=database.host,
            port=database.port,
            user=account.user,
            password=account.password,
            autocommit=True,
            db=None if shard is None else schema_name(shard),
        )
        try:
            async with connection.cursor() as cursor:
                for statement in statements:
                    await cursor.execute(statement)
        finally:
            connection.close()

    async def sql_astray(self, server: str, statement: str, shard: int) -> None:
        """Change a row on one server, master or replica, without writing it to the binlog. A MySQL replica is closed to
        administrators too, and is opened for the statement."""
        database = self.cluster.database(server)
        mysql = database.binary.flavour is Flavour.MYSQL
        opening, closing = (("SET GLOBAL read_only = 0",), ("SET GLOBAL super_read_only = 1",)) if mysql else ((), ())
        await self.sql(server, *opening, "SET SESSION sql_log_bin = 0", statement, *closing, shard=shard)

    @asynccontextmanager
    async def replication_held(self) -> AsyncIterator[None]:
        """Hold replication: replicas apply nothing inside the context, and resume where they stopped."""
        held = replicas(self.topology)
        accounts = service_accounts(self.cluster.record.passwords)
        for replica in held:
            await hold(replica, accounts.administrator)
        try:
            yield
        finally:
            for replica in held:
                await follow(replica, accounts.administrator, accounts.replicator)

    @asynccontextmanager
    async def access(self) -> AsyncIterator[Access]:
        reader = service_accounts(self.cluster.record.passwords).reader
        schema = load_schema(self.cluster.schema_path.read_text(), str(self.cluster.schema_path))
        async with access_of(ReaderLogin(self.topology, schema, reader.user, reader.password), "") as access:
            yield access

    async def differences(self) -> list[object]:
        """Return the differences of caches from masters, of replicas from masters, and of edges from their inverses."""
        schema = load_schema(self.cluster.schema_path.read_text(), str(self.cluster.schema_path))
        async with self.access() as access:
            caches = await verify_caches(access.routes, access.links, access.store)
            databases = await compare_replicas(access.routes, schema, access.scans, access.scans_at)
            pairs = await find_broken_pairs(access.routes, schema, access.scans, access.store)
        assert sum(line.entries for line in caches.servers) > 0
        assert sum(line.rows for line in databases.servers) > 0
        errors = [
            *(line.error for line in caches.servers if line.error),
            *(line.error for line in databases.servers if line.error),
        ]
        return [*errors, *caches.findings, *databases.findings, *pairs]

    async def assert_converges(self) -> None:
        """Wait until nothing differs: messages are delivered, and repair has written the pending inverses."""
        deadline = asyncio.get_running_loop().time() + PATIENT_SECONDS
        while found := await self.differences():
            assert asyncio.get_running_loop().time() < deadline, found[:5]


@asynccontextmanager
async def running_regions(folder: Path, shape: Shape) -> AsyncIterator[Regions]:
    """Yield a cluster without syncs at commit, and end it."""
    settings = ClusterSettings(
        state_dir=folder / ".tao-dev", shape=shape, durability=Durability.RELAXED, rtt_ms=RTT_MS, log_level="info"
    )
    async with DevCluster(settings) as cluster, killed_at_the_end(cluster):
        topology = parse_topology(cluster.topology_path.read_bytes(), "topology")
        found = Regions(cluster, topology, Routes(topology))
        await until(found.tailers_have_begun, "the tailers' first invalidation")
        yield found
