"""The private clusters of the demonstration, each in a folder of its own that is removed at the end.

Only what an operator or an application can use is used: the development cluster, the SDK, the servers' admin ports and
inspection. The folder is removed after success, failure and Ctrl-C alike.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from tao.admin.access import Access, ReaderLogin, access_of
from tao.admin.documents import example_schema_file, read_schema
from tao.admin.server_stats import server_stats
from tao.client import ClientSettings, Graph, connect
from tao.demonstration.narration import DemonstrationFailed
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.state_folder import service_accounts
from tao.model.graph import MAX_TIME
from tao.model.topology import Topology
from tao.replication.accounts import ServiceAccounts
from tao.schema.registry import Schema
from tao.terminal import WaitDisplay
from tao.topology.document import parse_topology

_TIMEOUT_SECONDS: Final = 20.0  # a CI machine may be busy: a slow answer is shown as slow, and does not fail
_SETTLE_SECONDS: Final = 180.0  # leaders settle some fifty inverse edges a second: enough for a slow machine
_SETTLE_PAUSE_SECONDS: Final = 0.1
_SEEN_SECONDS: Final = 20.0  # for another tier or region to show a write: hundreds of times the usual time
Answer = TypeVar("Answer")


class Stage:
    """A running private cluster. `open_stage` makes it. ``folder`` is for other files."""

    def __init__(self, cluster: DevCluster, folder: Path, start_seconds: float) -> None:
        self.cluster = cluster
        self.folder = folder
        self.start_seconds = start_seconds
        self.shape = cluster.record.shape

    @property
    def target(self) -> str:
        """The topology file, which clients connect to."""
        return str(self.cluster.topology_path)

    @property
    def topology(self) -> Topology:
        """The current topology."""
        return parse_topology(self.cluster.topology_path.read_bytes(), self.target)

    @property
    def schema(self) -> Schema:
        """The schema of the servers."""
        return read_schema(self.cluster.schema_path)[0]

    @property
    def accounts(self) -> ServiceAccounts:
        """The accounts of the databases."""
        return service_accounts(self.cluster.record.passwords)

    @asynccontextmanager
    async def graph(self, tier: str, region: str | None = None) -> AsyncIterator[Graph]:
        """Open a client of a tier, with a connection to each of its servers, so that no query includes connecting."""
        settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        async with connect(self.target, region=region, tier=tier, settings=settings) as graph:
            await asyncio.gather(*(graph.reserve_ids(1, shard=shard) for shard in range(self.shape.shards)))
            yield graph

    @asynccontextmanager
    async def access(self) -> AsyncIterator[Access]:
        """Give an operator's access: inspection of caches, and the databases with the read-only account."""
        reader = self.accounts.reader
        async with access_of(ReaderLogin(self.topology, self.schema, reader.user, reader.password), token="") as access:
            yield access

    async def settle(self) -> float:
        """Wait until every edge has its inverse, and return the seconds that it took.

        A write that finds the leader of the other end too busy is acknowledged with an intent in the database, and
        leaders settle intents in the background. Raises `DemonstrationFailed` when that takes too long."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(_SETTLE_SECONDS), self.access() as access:
                # No message says that the last intent is settled.
                while await access.intents.old_intents(range(self.shape.shards), before_unix_ms=MAX_TIME, limit=1):  # noqa: ASYNC110
                    await asyncio.sleep(_SETTLE_PAUSE_SECONDS)
        except TimeoutError:
            raise DemonstrationFailed(f"edges still lack their inverse after {_SETTLE_SECONDS:g} s") from None
        return time.monotonic() - began

    async def restart_caches(self) -> None:
        """Restart all leaders and followers, so that only the database has the data."""
        with WaitDisplay() as display:
            for names in (self.names(Role.LEADER), self.names(Role.FOLLOWER)):
                display.show(f"restarting {', '.join(names)}")
                await asyncio.gather(*map(self.cluster.restart, names))

    def names(self, role: Role, tier: str = "") -> list[str]:
        """Return the names of the servers of a role, and of a tier."""
        return [member.name for member in self.shape.select(role, tier=tier)]

    async def hits_and_misses(self, names: list[str]) -> tuple[int, int]:
        """Return how many reads these servers have answered from memory, and how many they had to fetch."""
        found = await asyncio.gather(*map(self.stats, names))
        return sum(each["hits"] for each in found), sum(each["misses"] for each in found)

    async def stats(self, name: str) -> dict[str, Any]:
        """Return what a server's admin port says. (`Any`: JSON.)"""
        return await server_stats(self.cluster.admin(name))


@asynccontextmanager
async def open_stage(shape: Shape, *, buffer_pool_mb: int = 64, rtt_ms: float | None = None) -> AsyncIterator[Stage]:
    """Start a cluster with the example schema in a temporary folder, and stop it and remove the folder at the end.

    Raises `OperatorError` when it cannot be started."""
    display, began = WaitDisplay(), time.monotonic()
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
            yield Stage(cluster, Path(made), time.monotonic() - began)
        finally:
            with display:
                await cluster.stop()


async def timed(query: Awaitable[Answer]) -> tuple[float, Answer]:
    """Return the seconds that a query took, and its answer."""
    began = time.perf_counter()
    answer = await query
    return time.perf_counter() - began, answer


async def seconds_until(condition: Callable[[], Awaitable[object]], what: str, where: str) -> float:
    """Return the seconds until the condition holds. Raises `DemonstrationFailed` when that takes too long."""
    began = time.perf_counter()
    try:
        async with asyncio.timeout(_SEEN_SECONDS):
            while not await condition():
                pass
    except TimeoutError:
        raise DemonstrationFailed(f"{what} was not seen in the other {where} within {_SEEN_SECONDS:g} s") from None
    return time.perf_counter() - began
