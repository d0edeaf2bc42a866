"""A development cluster of one region or several for scenarios: graphs of each region, quiescence, and the final
comparison."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loadtest.conditions import until, within
from loadtest.target import versions_of
from tao.admin.access import Access, ReaderLogin, access_of
from tao.admin.cache_verification import verify_caches
from tao.admin.jobs import list_jobs, pause_kind
from tao.admin.repair import find_broken_pairs
from tao.admin.replica_verification import compare_replicas
from tao.admin.replication import catch_up, replicas, replication_states
from tao.admin.server_stats import server_stats
from tao.client import ClientSettings, Graph, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.state_folder import service_accounts
from tao.etcd.location import EtcdSettings, Location
from tao.model.errors import OperatorError, Unavailable
from tao.model.jobs import JobState
from tao.model.topology import Topology
from tao.replication.accounts import ServiceAccounts
from tao.routing.routes import Routes
from tao.schema.registry import Schema, load_schema
from tao.storage.names import edge_tables_of
from tao.storage.pools import Pools
from tao.storage.session import ServerAccount
from tao.storage.writes import WRITE_SETUP, MySqlWriteStore
from tao.topology.document import parse_topology
from tao.topology.stores import EtcdConnections, open_topology

MASTER: Final = "east"
REMOTE: Final = "west"
SEMI_SYNC_RTT_MS: Final = 20.0
_LOOK_SECONDS: Final = 0.1
_JOBS_LOOK_SECONDS: Final = 1.0
_UNFINISHED: Final = (JobState.WAITING, JobState.PARKED)
_LISTED_JOBS: Final = 10
_BEGIN_SECONDS: Final = 60.0
_ANY_TIME_MS: Final = 1 << 62
_UNDELIVERED: Final = ("pending_shards", "waiting_shards", "unacknowledged_bytes")
"""Figures of a leader's deliveries in its `/stats`: all 0 when its followers have everything."""
_UNSUBSCRIBED: Final = ("unsubscribed_shards",)


def lossless_settings(folder: Path, shape: Shape, *, log_level: str) -> ClusterSettings:
    """Return the settings of a cluster with near regions that loses no write when one thing fails.

    In one region without standbys a database has no second server that could receive its commits."""
    return ClusterSettings(
        state_dir=folder / "two",
        shape=shape,
        rtt_ms=SEMI_SYNC_RTT_MS,
        durability=Durability.RELAXED,
        semi_sync=shape.replicates,
        log_level=log_level,
    )


@dataclass(frozen=True, slots=True)
class Differences:
    """What the comparison of caches, databases and inverses found. ``kinds``: how often what was wrong where; anything
    in it is a fault, a server that could not be asked included. ``compared``: how much was looked at, by kind."""

    kinds: dict[str, int]
    compared: dict[str, int]
    examples: list[str]


@dataclass(frozen=True, slots=True)
class RegionCluster:
    """A running cluster."""

    cluster: DevCluster
    schema: Schema
    read_topology: Callable[[], Topology]

    @property
    def topology(self) -> Topology:
        """The current topology: masters change in a run. Raises `OSError` and `TopologyError` while it is replaced."""
        return self.read_topology()

    @property
    def routes(self) -> Routes:
        """The routes of the current topology."""
        return Routes(self.topology)

    @property
    def accounts(self) -> ServiceAccounts:
        """The accounts of the databases."""
        return service_accounts(self.cluster.record.passwords)

    @property
    def versions(self) -> dict[str, str]:
        """The version of the databases."""
        return versions_of(self.cluster.database(self.named(Role.DATABASE)[0]))

    def named(self, role: Role) -> list[str]:
        """Return the names of all processes of a role."""
        return [name for name, each in self.cluster.processes.items() if each is role]

    async def graph(
        self, region: str, tier: str, stack: AsyncExitStack, timeout_seconds: float, *, attaches: bool = True
    ) -> Graph:
        """Connect a client in that region and tier, which is closed with the stack.

        With ``attaches`` its reads carry the versions of its own writes."""
        settings = ClientSettings(timeout_seconds=timeout_seconds, attach_own_writes=attaches)
        target = str(self.cluster.topology_place)
        return await stack.enter_async_context(connect(target, region=region, tier=tier, settings=settings))

    async def quiet(self, timeout_seconds: float) -> None:
        """Wait, after the last write, until all of it has arrived everywhere.

        Then replicas have what their masters have, leaders have acknowledged to their tailers all that is in the
        binlogs (which they do as soon as it is spooled), followers have received all of it, and no half of a pair of
        edges waits for the other.

        Raises `OperatorError` with what is still missing."""
        topology, shards = self.topology, range(self.routes.shards)
        try:
            async with asyncio.timeout(timeout_seconds), self._intents() as intents:

                async def settled() -> bool:
                    return not await intents.old_intents(shards, before_unix_ms=_ANY_TIME_MS, limit=1)

                async def delivered() -> bool:
                    return not await self._behind()

                await until(settled, _LOOK_SECONDS)
                for replica in replicas(topology):
                    await catch_up(replica, self.accounts.administrator, timeout_seconds)
                await until(delivered, _LOOK_SECONDS)
        except TimeoutError:
            behind = "; ".join(await self._behind()) or "edges wait for repair"
            raise OperatorError(f"not quiet {timeout_seconds:g} s after the last write; {behind}") from None

    async def jobs_ended(self, kinds: Sequence[str], timeout_seconds: float) -> None:
        """Wait until no job of these kinds waits or is parked. Those that have failed are tried at once, as by
        `tao jobs resume`. Raises `OperatorError` with a job that is left."""
        left: list[str] = []

        async def ended() -> bool:
            left.clear()
            for kind in kinds:
                await pause_kind(topology, access.links, kind, paused=False)
                found = await list_jobs(topology, access.links, kind, _UNFINISHED, _LISTED_JOBS)
                left.extend([*found.silent.values(), *map(str, found.jobs)])
            return not left

        async with self.access() as access:
            topology = access.routes.topology
            try:
                async with asyncio.timeout(timeout_seconds):
                    await until(ended, _JOBS_LOOK_SECONDS)
            except TimeoutError:
                raise OperatorError(
                    f"not all jobs have ended {timeout_seconds:g} s after the last: {left[:1]}"
                ) from None

    async def differences(self, on_progress: Callable[[str, int], None]) -> Differences:
        """Compare as `tao verify --all-regions` and `tao repair --dry-run` do."""
        async with self.access() as access:
            caches = await verify_caches(access.routes, access.links, access.store, on_progress=on_progress)
            databases = await compare_replicas(
                access.routes, self.schema, access.scans, access.scans_at, on_progress=on_progress
            )
            pairs = await find_broken_pairs(access.routes, self.schema, access.scans, access.store)
        kinds = Counter(f"cached {fault.kind}: {fault.verdict}" for fault in caches.findings)
        kinds.update(f"replica: {row.table}" for row in databases.findings)
        kinds["cached entries beyond those described"] += caches.wrong - len(caches.findings)
        kinds["rows beyond those described"] += databases.wrong - len(databases.findings)
        kinds["edge without its inverse"] += len(pairs)
        kinds["unchecked server"] += caches.unchecked + databases.unchecked
        errors = [
            f"{line.server}: {line.error}" for found in (caches, databases) for line in found.servers if line.error
        ]
        return Differences(
            kinds=dict(+kinds),
            compared={
                "cached entries": sum(line.entries for line in caches.servers),
                "replicated rows": sum(line.rows for line in databases.servers),
            },
            examples=[*errors, *map(str, [*caches.findings[:3], *databases.findings[:3], *pairs[:3]])],
        )

    async def tailers_have_begun(self) -> bool:
        """Return whether all tailers have begun: one without a position invalidates its region, and once more when all
        rows are visible."""
        for region in self.topology.regions:
            stats = [await server_stats(self.cluster.admin(leader.name)) for leader in region.leaders.servers]
            if sum(each["invalidated_shards"] for each in stats) < 2 * self.topology.shards:
                return False
        return True

    async def _behind(self) -> list[str]:
        """List the tailers and leaders that have not delivered everything, and the followers without a subscription of
        some shard. An idle binlog moves with the heartbeats, so the comparison is true between two of them."""
        ends = await replication_states(self.topology, self.accounts.administrator)
        found: list[str] = []
        for name, role in self.cluster.processes.items():
            if role not in (Role.TAILER, Role.LEADER, Role.FOLLOWER):
                continue
            try:
                stats = await server_stats(self.cluster.admin(name))
            except Unavailable as error:
                found.append(error.message)
                continue
            if role is Role.TAILER:
                end = ends[stats["database_server"]].position
                if _parts(stats["position"]) != _parts(end) or stats["unacknowledged_bytes"] or stats["trouble"]:
                    done = f"{stats['position']} of {end}, {stats['unacknowledged_bytes']} bytes unacknowledged"
                    found.append(f"{name} has delivered {done} {stats['trouble']}".rstrip())
                continue
            owing, kinds = (stats, _UNSUBSCRIBED) if role is Role.FOLLOWER else (stats["delivery"], _UNDELIVERED)
            found += [f"{name}: {owing[kind]} {kind}" for kind in kinds if owing[kind]]
        return found

    @asynccontextmanager
    async def _intents(self) -> AsyncIterator[MySqlWriteStore]:
        leader, routes = self.accounts.leader, self.routes
        servers = {each.server.name: each.server for each in self.topology.database_servers}

        def master(shard: int) -> str:
            return routes.database_server(shard, routes.master_region(shard)).name

        def account(name: str) -> ServerAccount:
            server = servers[name]
            return ServerAccount(server.host, server.port, leader.user, leader.password, server.socket, tls=None)

        pools = Pools(account, WRITE_SETUP)
        try:
            yield MySqlWriteStore(master, pools, edge_tables_of(lambda: self.schema))
        finally:
            await pools.close()

    @asynccontextmanager
    async def access(self) -> AsyncIterator[Access]:
        """Open the databases with the read-only account, and links to the servers."""
        reader = self.accounts.reader
        login = ReaderLogin(self.topology, self.schema, reader.user, reader.password)
        async with access_of(login, "") as access:
            yield access


@asynccontextmanager
async def region_cluster(
    settings: ClusterSettings, on_progress: Callable[[str], None], *, logs: Path | None = None
) -> AsyncIterator[RegionCluster]:
    """Started, with tailers that have begun; stopped at the end, however that comes about. ``logs``: a folder to leave
    the servers' logs in. Raises `OperatorError`."""
    async with DevCluster(settings, on_progress) as cluster, AsyncExitStack() as stack:
        schema = load_schema(cluster.schema_path.read_text(), str(cluster.schema_path))
        read_topology = await stack.enter_async_context(_topology_reader(cluster.topology_place))
        regions = RegionCluster(cluster, schema, read_topology)
        on_progress("waiting for the tailers to begin")
        await within(_BEGIN_SECONDS, regions.tailers_have_begun, _LOOK_SECONDS, "the tailers have not begun")
        try:
            yield regions
        finally:
            if logs is not None:
                await asyncio.to_thread(_keep_logs, settings.state_dir, logs)


@asynccontextmanager
async def _topology_reader(place: Location) -> AsyncIterator[Callable[[], Topology]]:
    """Give what reads the topology: a file each time, and of etcd the newest document that was heard of."""
    if isinstance(place, Path):
        yield lambda: parse_topology(place.read_bytes(), str(place))
        return
    etcd = EtcdConnections(EtcdSettings())
    store = open_topology(place, etcd, lambda _: None)
    heard = [await store.load()]
    stop = store.watch(heard.append)
    try:
        yield lambda: heard[-1]
    finally:
        stop()
        await etcd.close()


def _keep_logs(state_dir: Path, target: Path) -> None:
    """Copies of them, and of the topology."""
    target.mkdir(parents=True, exist_ok=True)
    for path in (*state_dir.glob("servers/*.log*"), *state_dir.glob("*/server.log*"), *state_dir.glob("topology.json")):
        where = path.name if path.parent.name in ("servers", state_dir.name) else f"{path.parent.name}.log"
        shutil.copyfile(path, target / where)


def _parts(position: str) -> set[str]:
    """Return the parts of a GTID position, in whatever order it was written."""
    return {part.strip().lower() for part in position.split(",") if part.strip()}
