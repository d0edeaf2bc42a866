"""The servers of `peers`, from their start to their end, and the load processes that ask them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import msgspec

from loadtest.client_process import run_job
from loadtest.peer_servers import PeerServer, private_server
from loadtest.peers.arena import Rivals
from loadtest.peers.caches import LOOKASIDES
from loadtest.peers.contestants import POSTGRES, TAO
from loadtest.peers.databases import (
    REDO_MB,
    address_of,
    disk_bytes,
    enlarge_redo,
    io_method,
    private_mysql,
    resize_pool,
)
from loadtest.peers.figures import ServerMemory, memory_of
from loadtest.peers.jobs import PeersFillJob, PeersJob, PeersResult
from loadtest.peers.postgres_server import PostgresServer, data_place, private_postgres
from loadtest.peers.resource_limits import AppliedLimits, ServerGroups, server_groups
from loadtest.peers.staleness import StaleJob, StaleReads
from loadtest.peers.warm_up import WarmBounds
from loadtest.published.jobs import Subject
from loadtest.published.run import SCHEMA
from loadtest.rounds import Pace
from loadtest.scenario import BenchSettings, Progress
from loadtest.target import FOLLOWER, LEADER, pids_of, versions_of
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database import DatabaseInstance
from tao.devcluster.layout import ClusterSettings, Role, Shape

CACHE_SERVERS: Final = 2
_SMALLEST_CACHE_MB: Final = 4
_SMALLEST_POOL_MB: Final = 8
"""The smallest buffer pool of MySQL and MariaDB."""
_POOL_MB: Final = 1024
_TOY_POOL_MB: Final = 64
_STALE_NODES: Final = 2_000
_TOY_STALE_NODES: Final = 400
_DATABASE: Final = "db-1"
_MYSQL: Final = "mysql"
"""The name of the MySQL or MariaDB server of the peers."""


class DatabaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """One database server of a run."""

    data_mb: int
    """The tables and indexes on disk after loading."""
    data_io: str
    """How it reads and writes them."""
    limits: AppliedLimits | None
    """What was limited; None where everything fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersSize:
    """The graph, and how much of it the servers hold."""

    subject: Subject
    payload_bytes: int
    cache_mb: int
    """The memory of each cache server."""
    data_per_pool: float
    """Data on disk, as a multiple of the buffer pools; 0: everything fits."""
    disk_operations: int
    """The limit of disk operations a second of each database, where the data exceeds its buffer pool."""

    @classmethod
    def of(cls, subject: Subject, cache_share: float, data_per_pool: float, disk_operations: int) -> Self:
        """Return the size of a graph, with caches of this share of its payloads."""
        payload_bytes = subject.plan().payload_bytes
        return cls(
            subject=subject,
            payload_bytes=payload_bytes,
            cache_mb=max(_SMALLEST_CACHE_MB, round(payload_bytes * cache_share) >> 20),
            data_per_pool=data_per_pool,
            disk_operations=disk_operations,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsOutcome:
    """What the turns of all contestants gave."""

    result: PeersResult
    memory: dict[str, list[ServerMemory]]
    """The memory of the cache servers afterwards, by contestant."""
    databases: dict[str, DatabaseReport]
    buffer_pool_mb: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersRun:
    """The peers' servers, which run as long as the stack of `open_peers`."""

    settings: BenchSettings
    progress: Progress
    contestants: tuple[str, ...]
    size: PeersSize
    caches: Mapping[str, Sequence[PeerServer]]
    cache_programs: dict[str, str]
    """Name and version of the program of each contestant's cache servers."""
    mysql: DatabaseInstance | None
    postgres: PostgresServer | None
    groups: Mapping[str, ServerGroups]
    """The control groups of the databases, by name; none where everything fits."""

    async def turns(self, shapes: tuple[str, ...], awaiters: int, warm: WarmBounds, rate: float) -> TurnsOutcome:
        """Load the graph into every database and let the contestants take turns."""
        settings = self.settings
        with ExitStack() as groups_of_tao:
            groups = dict(self.groups)
            if self.size.data_per_pool:
                groups[TAO] = groups_of_tao.enter_context(server_groups(TAO, settings.work_dir))
            async with self._cluster("peers", tiers=1) as cluster:
                own = cluster.database(_DATABASE)
                settings.versions.update(versions_of(own))
                await enlarge_redo(own)
                if TAO in groups:
                    groups[TAO].enter((await pids_of(cluster))[_DATABASE])
                rivals = self._rivals(cluster, self.size.subject)
                await run_job(PeersFillJob(rivals=rivals), self.progress, settings.work_dir / "fill.log", int)
                data = await self._data_bytes(own)
                buffer_pool_mb = await self._resized(own, data)
                pids = await pids_of(cluster)
                job = PeersJob(
                    rivals=rivals,
                    server_pids=self._server_pids(cluster, pids),
                    admins=(cluster.admin(FOLLOWER), cluster.admin(LEADER)),
                    shapes=shapes,
                    awaiters=awaiters,
                    warm=warm,
                    pace=Pace(settings.rounds, settings.round_seconds),
                    rate=rate,
                    groups=groups,
                    operations_per_second=self.size.disk_operations,
                )
                result = await run_job(job, self.progress, settings.work_dir / "peers.log", PeersResult)
                return TurnsOutcome(
                    result=result,
                    memory=await self._memory(job, pids),
                    databases={
                        name: DatabaseReport(
                            data_mb=each >> 20,
                            data_io=await self._data_io(name, own),
                            limits=result.limits.get(name),
                        )
                        for name, each in data.items()
                    },
                    buffer_pool_mb=buffer_pool_mb,
                )

    async def stale(self) -> dict[str, list[StaleReads]]:
        """Look for stale reads; returns them by contestant."""
        settings = self.settings
        nodes = _TOY_STALE_NODES if settings.toy else _STALE_NODES
        async with self._cluster("stale", tiers=2) as cluster:
            rivals = self._rivals(cluster, msgspec.structs.replace(self.size.subject, nodes=nodes))
            job = StaleJob(rivals=rivals, seconds=0.5 if settings.toy else 5.0)
            return await run_job(job, self.progress, settings.work_dir / "stale.log", dict[str, list[StaleReads]])

    async def _data_bytes(self, own: DatabaseInstance) -> dict[str, int]:
        """Return the bytes on disk of each database, ``own`` being that of tao."""
        found = {TAO: await disk_bytes(own.socket_path.parent, "*.ibd")}
        if self.mysql is not None:
            found[_MYSQL] = await disk_bytes(self.mysql.socket_path.parent, "*.ibd")
        if self.postgres is not None:
            found[POSTGRES] = await disk_bytes(self.postgres.tables, "*")
        return found

    async def _resized(self, own: DatabaseInstance, data: Mapping[str, int]) -> int:
        """Give each database its part of the smallest one's data as buffer pool, if the data is to exceed it. Returns
        the size of each pool."""
        if not self.size.data_per_pool:
            return _pool_mb(self.settings)
        megabytes = max(_SMALLEST_POOL_MB, int(min(data.values()) / self.size.data_per_pool) >> 20)
        self.progress.step(f"giving every database a buffer pool of {megabytes} MB")
        for database in (own, self.mysql):
            if database is not None:
                await resize_pool(database, megabytes)
        if self.postgres is not None:
            await self.postgres.stop()
            await self.postgres.start(megabytes)
            self.groups[POSTGRES].enter(self.postgres.pid)
        return megabytes

    async def _data_io(self, name: str, own: DatabaseInstance) -> str:
        if name == POSTGRES:
            return "through the kernel's page cache"
        database = own if name == TAO else self.mysql
        assert database is not None
        return await io_method(database)

    def _server_pids(self, cluster: DevCluster, pids: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """Return the servers that each contestant keeps busy, with their process ids."""
        found: dict[str, dict[str, int]] = {}
        for name in self.contestants:
            if name == TAO:
                # A tailer caches nothing, and works for every write.
                tailers = (each for each, role in cluster.processes.items() if role is Role.TAILER)
                found[name] = {each: pids[each] for each in (_DATABASE, FOLLOWER, LEADER, *tailers)}
            elif name == POSTGRES:
                assert self.postgres is not None
                found[name] = {POSTGRES: self.postgres.pid}
            else:
                assert self.mysql is not None
                found[name] = {_MYSQL: self.mysql.process.pid}
            found[name] |= {f"{name}-{number}": each.pid for number, each in enumerate(self.caches.get(name, ()))}
        return found

    async def _memory(self, job: PeersJob, pids: Mapping[str, int]) -> dict[str, list[ServerMemory]]:
        of_caches = {name: [each.pid for each in servers] for name, servers in self.caches.items()}
        return await memory_of(
            self.size.cache_mb << 20,
            job.admins if TAO in self.contestants else (),
            job.rivals.cache_ports,
            {TAO: [pids[FOLLOWER], pids[LEADER]], **of_caches},
        )

    def _cluster(self, name: str, tiers: int) -> DevCluster:
        own = ClusterSettings(
            state_dir=self.settings.work_dir / name,
            shape=Shape(tiers=tiers, followers=1, leaders=1, databases=1, shards=self.size.subject.shards),
            schema_file=SCHEMA,
            buffer_pool_mb=_pool_mb(self.settings),
            cache_mb=self.size.cache_mb,
            log_level="warning",
        )
        return DevCluster(own, self.progress.step)

    def _rivals(self, cluster: DevCluster, subject: Subject) -> Rivals:
        return Rivals(
            contestants=self.contestants,
            topology_file=str(cluster.topology_path),
            subject=subject,
            cache_ports={name: tuple(each.port for each in servers) for name, servers in self.caches.items()},
            mysql=None if self.mysql is None else address_of(self.mysql),
            postgres=None if self.postgres is None else self.postgres.address,
        )


async def open_peers(
    settings: BenchSettings,
    progress: Progress,
    contestants: tuple[str, ...],
    size: PeersSize,
    stack: AsyncExitStack,
) -> PeersRun:
    """Start the servers of the peers that take part; they run until the stack ends. Raises `OperatorError`."""
    groups: dict[str, ServerGroups] = {}

    def group(name: str, data: Path) -> ServerGroups | None:
        """Make the groups before the server starts, so that they are removed after it has ended."""
        if size.data_per_pool:
            groups[name] = stack.enter_context(server_groups(name, data))
        return groups.get(name)

    mysql = postgres = None
    if set(contestants) - {TAO, POSTGRES}:
        own = group(_MYSQL, settings.work_dir)
        mysql = await stack.enter_async_context(private_mysql(settings.work_dir / _MYSQL, _pool_mb(settings)))
        if own is not None:
            own.enter(mysql.process.pid)
    if POSTGRES in contestants:
        own = group(POSTGRES, data_place())
        server = private_postgres(settings.work_dir / "postgres.log", _pool_mb(settings), REDO_MB)
        postgres = await stack.enter_async_context(server)
        settings.versions[POSTGRES] = postgres.version()
        if own is not None:
            own.enter(postgres.pid)
    caches: dict[str, list[PeerServer]] = {}
    programs: dict[str, str] = {}
    for name in (each for each in contestants if each in LOOKASIDES):
        kind = LOOKASIDES[name]
        version = settings.versions[kind.program.used_name()] = kind.program.version()
        programs[name] = f"{kind.program.used_name()} {version}"
        for number in range(CACHE_SERVERS):
            cache = private_server(kind.program, settings.work_dir / f"{name}-{number}", size.cache_mb + kind.own_mb)
            caches.setdefault(name, []).append(await stack.enter_async_context(cache))
    return PeersRun(
        settings=settings,
        progress=progress,
        contestants=contestants,
        size=size,
        caches=caches,
        cache_programs=programs,
        mysql=mysql,
        postgres=postgres,
        groups=groups,
    )


def _pool_mb(settings: BenchSettings) -> int:
    """Return the buffer pool in which everything fits, with which the databases are loaded."""
    return _TOY_POOL_MB if settings.toy else _POOL_MB
