"""The private cluster of the demonstration: started in a folder of its own, which is removed at the end.

It uses only what an operator or an application can use: the development cluster, the SDK, the servers' admin ports and
inspection. The folder is removed after success, failure and Ctrl-C alike.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from tao.admin.access import Access, ReaderLogin, access_of
from tao.admin.documents import example_schema_file, read_schema
from tao.admin.server_stats import server_stats
from tao.client import ClientSettings, Graph, connect
from tao.demonstration.figures import DemonstrationFailed, ServerFigures
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.state_folder import service_accounts
from tao.model.graph import MAX_TIME
from tao.storage.names import edge_tables_of
from tao.storage.pools import Pools
from tao.storage.reads import READ_SETUP
from tao.storage.session import ServerAccount
from tao.storage.writes import MySqlWriteStore
from tao.terminal import WaitDisplay
from tao.topology.document import parse_topology

SHAPE: Final = Shape(tiers=2, followers=2, leaders=2, databases=1, shards=16)
_BUFFER_POOL_MB: Final = 256  # the whole graph fits, as in a well-sized database
_TIMEOUT_SECONDS: Final = 20.0  # a CI machine may be busy: a slow answer is shown as slow, and does not fail

_SETTLE_SECONDS: Final = 180.0  # leaders settle some fifty inverse edges a second: enough for a slow machine
_SETTLE_PAUSE_SECONDS: Final = 0.1


class Stage:
    """A running private cluster. `open_stage` makes it."""

    def __init__(self, cluster: DevCluster, folder: Path, start_seconds: float) -> None:
        self.folder = folder
        self.start_seconds = start_seconds
        self._cluster = cluster

    @property
    def target(self) -> str:
        """The topology file, which clients connect to."""
        return str(self._cluster.topology_path)

    @asynccontextmanager
    async def graph(self, tier: str) -> AsyncIterator[Graph]:
        """Open a client of a tier, with a connection to each of its servers, so that no query includes connecting."""
        settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        async with connect(self.target, tier=tier, settings=settings) as graph:
            await asyncio.gather(*(graph.reserve_ids(1, shard=shard) for shard in range(SHAPE.shards)))
            yield graph

    @asynccontextmanager
    async def access(self) -> AsyncIterator[Access]:
        """Give an operator's access: inspection of caches, and the databases with the read-only account."""
        async with access_of(self._reader_login(), token="") as access:
            yield access

    async def settle(self) -> float:
        """Wait until every edge has its inverse, and return the seconds that it took.

        A write that finds the leader of the other end too busy is acknowledged with an intent in the database, and
        leaders settle intents in the background. Raises `DemonstrationFailed` when that takes too long."""
        began = time.monotonic()
        login = self._reader_login()
        (name,) = SHAPE.database_names
        database = self._cluster.database(name)
        pools = Pools(lambda _: ServerAccount(database.host, database.port, login.user, login.password), READ_SETUP)
        store = MySqlWriteStore(lambda _shard: name, pools, edge_tables_of(lambda: login.schema))
        try:
            async with asyncio.timeout(_SETTLE_SECONDS):
                while True:
                    if not await store.old_intents(range(SHAPE.shards), before_unix_ms=MAX_TIME, limit=1):
                        return time.monotonic() - began
                    await asyncio.sleep(_SETTLE_PAUSE_SECONDS)
        except TimeoutError:
            raise DemonstrationFailed(f"edges still lack their inverse after {_SETTLE_SECONDS:g} s") from None
        finally:
            await pools.close()

    async def restart_caches(self) -> None:
        """Restart all leaders and followers, so that only the database has the data."""
        with WaitDisplay() as display:
            for names in (self.leaders(), self.followers()):
                display.show(f"restarting {', '.join(names)}")
                await asyncio.gather(*map(self._cluster.restart, names))

    def followers(self, *tiers: str) -> list[str]:
        """Return the names of the followers of these tiers, or of all tiers."""
        return [each.name for tier in tiers or SHAPE.tier_names for each in SHAPE.select(Role.FOLLOWER, tier=tier)]

    def leaders(self) -> list[str]:
        """Return the names of the leaders."""
        return [each.name for each in SHAPE.select(Role.LEADER)]

    async def hits_and_misses(self, names: list[str]) -> tuple[int, int]:
        """Return how many reads these servers have answered from memory, and how many they had to fetch."""
        found = await asyncio.gather(*(self._stats(name) for name in names))
        return sum(each["hits"] for each in found), sum(each["misses"] for each in found)

    async def servers(self) -> list[ServerFigures]:
        """Return the memory of every process."""
        figures = []
        for process in (await self._cluster.status()).processes:
            caches = process.role in (Role.LEADER, Role.FOLLOWER)
            stats = await self._stats(process.name) if caches else None
            figures.append(
                ServerFigures(
                    name=process.name,
                    role=process.role,
                    entries=None if stats is None else sum(stats["entries"].values()),
                    cache_bytes=None if stats is None else stats["bytes"],
                    resident_bytes=_resident_bytes(process.pid),
                )
            )
        return figures

    def _reader_login(self) -> ReaderLogin:
        reader = service_accounts(self._cluster.record.passwords).reader
        topology = parse_topology(self._cluster.topology_path.read_bytes(), self.target)
        return ReaderLogin(topology, read_schema(self._cluster.schema_path)[0], reader.user, reader.password)

    async def _stats(self, name: str) -> dict[str, Any]:
        return await server_stats(self._cluster.admin(name))


@asynccontextmanager
async def open_stage() -> AsyncIterator[Stage]:
    """Start a cluster in a temporary folder; stop it and remove the folder at the end. Raises `OperatorError`."""
    began = time.monotonic()
    async with private_cluster(SHAPE, buffer_pool_mb=_BUFFER_POOL_MB) as (cluster, folder):
        yield Stage(cluster, folder, time.monotonic() - began)


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def private_cluster(
    shape: Shape, *, buffer_pool_mb: int = 64, rtt_ms: float | None = None
) -> AsyncIterator[tuple[DevCluster, Path]]:
    """Start a cluster with the example schema in a temporary folder, and stop it and remove the folder at the end.

    Gives the cluster and a folder for other files. Raises `OperatorError` when it cannot be started."""
    display = WaitDisplay()
    # The names are short: the path of a Unix socket may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="tao-") as made:
        settings = ClusterSettings(
            state_dir=Path(made) / "c",
            shape=shape,
            schema_file=example_schema_file(),
            buffer_pool_mb=buffer_pool_mb,
            rtt_ms=rtt_ms,
            log_level="warning",
        )
        cluster = DevCluster(settings, display.show)
        with display:
            await cluster.start()
        try:
            yield cluster, Path(made)
        finally:
            with display:
                await cluster.stop()


SEEN_SECONDS: Final = 20.0
"""The time limit for another tier or region to show a write: hundreds of times the usual time."""


async def seconds_until(condition: Callable[[], Awaitable[bool]], what: str, where: str) -> float:
    """Return the seconds until the condition holds. Raises `DemonstrationFailed` when that takes too long."""
    began = time.perf_counter()
    try:
        async with asyncio.timeout(SEEN_SECONDS):
            while not await condition():
                pass
    except TimeoutError:
        raise DemonstrationFailed(f"{what} was not seen in the other {where} within {SEEN_SECONDS:g} s") from None
    return time.perf_counter() - began
