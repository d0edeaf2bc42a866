"""The private cluster of a demonstration: started in a folder of its own, looked into, and gone at the end.

Everything it does is what an operator or an application can do: the development cluster, the SDK, the servers' admin
ports and inspection. The folder goes with it, whatever the end: success, failure or Ctrl-C.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from tao.cli.checking.access import Access, access_of
from tao.cli.demonstration.figures import DemonstrationFailed, ServerFigures
from tao.cli.demonstration.private_cluster import private_cluster
from tao.cli.export_scan import ReaderLogin
from tao.cli.waiting import WaitDisplay
from tao.client import ClientSettings, Graph, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import Role, Shape
from tao.devcluster.readiness import server_stats
from tao.devcluster.schema_copy import read_schema
from tao.devcluster.state_folder import service_accounts
from tao.model.graph import MAX_TIME
from tao.storage.names import edge_tables_of
from tao.storage.pools import Pools
from tao.storage.reads import READ_SETUP
from tao.storage.session import ServerAccount
from tao.storage.writes import MySqlWriteStore
from tao.topology.document import parse_topology

SHAPE: Final = Shape(tiers=2, followers=2, leaders=2, databases=1, shards=16)
_BUFFER_POOL_MB: Final = 256  # the whole graph fits, as it does in the memory of a well-sized database
_TIMEOUT_SECONDS: Final = 20.0  # a CI machine may be busy: what is slow is shown to be slow, it does not fail

_SETTLE_SECONDS: Final = 180.0  # leaders settle some fifty copies a second: enough for all that a slow machine owes
_SETTLE_PAUSE_SECONDS: Final = 0.1


class Stage:
    """A running cluster. Made by `open_stage`."""

    def __init__(self, cluster: DevCluster, folder: Path, start_seconds: float) -> None:
        self.folder = folder
        self.start_seconds = start_seconds
        self._cluster = cluster

    @property
    def target(self) -> str:
        """What clients connect to."""
        return str(self._cluster.topology_path)

    @asynccontextmanager
    async def graph(self, tier: str) -> AsyncIterator[Graph]:
        """A client of the tier, with a connection open to each of its servers: latencies shown are those of queries,
        not of connecting."""
        settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        async with connect(self.target, tier=tier, settings=settings) as graph:
            await asyncio.gather(*(graph.reserve_ids(1, shard=shard) for shard in range(SHAPE.shards)))
            yield graph

    @asynccontextmanager
    async def access(self) -> AsyncIterator[Access]:
        """The operator's ways in: inspection of caches, and the databases by the read-only account."""
        async with access_of(self._reader_login(), token="") as access:
            yield access

    async def settle(self) -> float:
        """Wait until every edge has its copy at its other end; the seconds that took.

        A write that finds the other end's leader too busy is acknowledged all the same, with a note in the database of
        the copy that is owed, and leaders settle such notes in the background. Raises `DemonstrationFailed` when that
        takes longer than it may."""
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
            raise DemonstrationFailed(f"edges still lack their other end after {_SETTLE_SECONDS:g} s") from None
        finally:
            await pools.close()

    async def forget_everything(self) -> None:
        """Restart all leaders and followers: their memory is empty then, the database has everything."""
        with WaitDisplay() as display:
            for names in (SHAPE.leader_names, self.followers()):
                display.show(f"restarting {', '.join(names)}")
                await asyncio.gather(*map(self._cluster.restart, names))

    def followers(self, *tiers: str) -> list[str]:
        """Names of the followers of these tiers, or of all."""
        return [name for tier in tiers or SHAPE.tier_names for name in SHAPE.follower_names(tier)]

    async def hits_and_misses(self, names: list[str]) -> tuple[int, int]:
        """Reads that these servers have answered from memory, and had to fetch, since they started."""
        found = await asyncio.gather(*(self._stats(name) for name in names))
        return sum(each["hits"] for each in found), sum(each["misses"] for each in found)

    async def servers(self) -> list[ServerFigures]:
        """Every process with the memory that it takes."""
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
        # Any: which figures there are is the role's affair.
        return await server_stats(self._cluster.admin(name))


@asynccontextmanager
async def open_stage() -> AsyncIterator[Stage]:
    """Start a cluster in a temporary folder; stop it and remove the folder at the end.

    Raises `OperatorError` when it cannot be started."""
    began = time.monotonic()
    async with private_cluster(SHAPE, buffer_pool_mb=_BUFFER_POOL_MB) as (cluster, folder):
        yield Stage(cluster, folder, time.monotonic() - began)


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
