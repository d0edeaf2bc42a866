"""Access to a running cluster for tests: connections that bypass the SDK, and a client that must not be affected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from tao.admin.access import ReaderLogin, access_of
from tao.admin.cache_verification import verify_caches
from tao.admin.repair import find_broken_pairs
from tao.admin.server_stats import server_stats
from tao.client import ClientSettings, Graph, TaoError, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape
from tao.devcluster.state_folder import service_accounts
from tao.schema.registry import load_schema
from tao.topology.document import parse_topology
from tao.wire.settings import SessionSettings
from tests.rigs.pacing import PATIENT_SECONDS

PATIENT = ClientSettings(timeout_seconds=10.0, connect_timeout_seconds=20.0)
"""The settings of a client whose requests have to be answered, on a machine that may be slow and busy. They are not
longer, because the first server of a read that hangs costs the half."""
PATIENT_SESSION = SessionSettings(connect_timeout_seconds=PATIENT_SECONDS)
LOOK_SECONDS = 0.05
"""Between two looks at what other processes do: each costs them a request."""
PACE_SECONDS = 0.02
"""Between two requests of a client that goes on for as long as a test lasts. One in a closed loop would take from its
servers, and from the tests beside it, the time that they need."""


async def patient_stats(admin: str) -> dict[str, Any]:
    """Return the figures of a server, which has more time to answer than an operator gives it. (`Any`: each role has
    its own figures.)"""
    return await server_stats(admin, PATIENT_SECONDS)


@asynccontextmanager
async def running_cluster(folder: Path, shape: Shape, *, step_seconds: float = 5.0) -> AsyncIterator[DevCluster]:
    """Yield a cluster without syncs at commit, and end it. ``step_seconds``: between two steps of the weight of a
    follower that registers itself."""
    settings = ClusterSettings(
        state_dir=folder, shape=shape, durability=Durability.RELAXED, log_level="info", step_seconds=step_seconds
    )
    async with DevCluster(settings) as cluster, killed_at_the_end(cluster):
        yield cluster


@asynccontextmanager
async def killed_at_the_end(cluster: DevCluster) -> AsyncIterator[None]:
    """Kill the processes of a cluster whose data nobody needs any more. To stop them in their order takes several
    seconds, and as much of a core as half of their start."""
    try:
        yield
    finally:
        await asyncio.gather(*map(cluster.kill, cluster.processes))


def replace_text(path: Path, text: str) -> None:
    """Write a file that servers look at meanwhile, so that none of them sees a part of it."""
    written = path.with_suffix(".written")
    written.write_text(text)
    written.replace(path)


async def assert_caches_equal_the_database(cluster: DevCluster) -> None:
    """Assert that `tao verify` finds no difference, and that no edge lacks its inverse."""
    reader = service_accounts(cluster.record.passwords).reader
    topology = parse_topology(cluster.topology_path.read_bytes(), "topology")
    schema = load_schema(cluster.schema_path.read_text(), str(cluster.schema_path))
    login = ReaderLogin(topology, schema, reader.user, reader.password)
    async with access_of(login, "") as access:
        # In this order: once no inverse is pending, nothing is written that caches have yet to hear of.
        assert await find_broken_pairs(access.routes, schema, access.scans, access.store) == []
        report = await verify_caches(access.routes, access.links, access.store)
        assert report.clean, report.findings[:5] or report
        assert sum(line.entries for line in report.servers) > 0


async def assert_converges(cluster: DevCluster) -> None:
    """Wait until caches equal the database, and repair has written the pending inverses."""
    deadline = asyncio.get_running_loop().time() + PATIENT_SECONDS
    while True:
        try:
            await assert_caches_equal_the_database(cluster)
        except AssertionError:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.5)
        else:
            return


class Bystander:
    """An unrelated client that reads and writes continuously and compares what it reads with what it wrote."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.rounds = 0
        self.errors: list[TaoError | AssertionError] = []

    async def run(self) -> None:
        """Run rounds until cancelled."""
        me = await self.graph.obj_add("user", {"name": "bystander"})
        while True:
            try:
                await self._round(me)
            except (TaoError, AssertionError) as error:
                self.errors.append(error)
            self.rounds += 1
            await asyncio.sleep(2 * PACE_SECONDS)  # a round has several requests

    async def _round(self, me: int) -> None:
        home = f"round {self.rounds}"
        await self.graph.obj_update(me, {"home": home})
        found = await self.graph.obj_get(me)
        assert found is not None, f"{me} is not found"
        assert found.fields["home"] == home, f"{found.fields['home']!r} instead of {home!r}"
        friend = await self.graph.obj_add("user", {"name": "friend"})
        pending = self.graph.stats.inverse_pending
        await self.graph.assoc_add(me, "friend", friend, self.rounds)
        if self.graph.stats.inverse_pending > pending:
            return  # The answer reported that repair writes the inverse later.
        there = [edge.time for edge in await self.graph.assoc_range(me, "friend", 0, 1)]
        back = [edge.time for edge in await self.graph.assoc_range(friend, "friend", 0, 5)]
        assert there == back == [self.rounds], f"{there}, {back} in round {self.rounds}"

    async def more_rounds(self, count: int) -> None:
        """Wait until ``count`` more rounds have ended."""
        until = self.rounds + count
        async with asyncio.timeout(PATIENT_SECONDS):
            while self.rounds < until:  # noqa: ASYNC110 - counts the rounds of another task
                await asyncio.sleep(0.01)


@asynccontextmanager
async def bystander_of(cluster: DevCluster) -> AsyncIterator[Bystander]:
    """Yield a running bystander."""
    async with connect(str(cluster.topology_path), settings=PATIENT) as graph:
        bystander = Bystander(graph)
        task = asyncio.create_task(bystander.run())
        try:
            yield bystander
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
