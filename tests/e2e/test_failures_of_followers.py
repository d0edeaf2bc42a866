"""Followers that die, hang or are slow, and a database that hangs, under traffic, with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiomysql
import pytest
import pytest_asyncio

from tao.client import ClientSettings, Graph, OutcomeUnknown, RetryableError, TaoError, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ONLY_REGION, Shape
from tao.routing.failure_detector import DetectorSettings
from tao.routing.routes import Routes
from tao.topology.document import parse_topology
from tao.wire.frames_client import connect_frames
from tao.wire.identity import Credentials
from tao.wire.links import LinkSettings
from tao.wire.session import Session
from tao.wire.v1 import session_pb2 as pb
from tests.e2e.cluster_access import (
    LOOK_SECONDS,
    PACE_SECONDS,
    PATIENT,
    PATIENT_SESSION,
    assert_converges,
    patient_stats,
    running_cluster,
)
from tests.e2e.delay_proxy import DelayProxy
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="module"),
]

NEAR, FAR = "follower-1a", "follower-2a"
STAND_STILL_SECONDS = 1.6
"""Length of a pause in seconds, long enough to be detected. It is a fixed sleep, because there is no condition to wait
for."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    shape = Shape(tiers=2, followers=1, leaders=1, databases=1, shards=4)
    async with running_cluster(tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(PATIENT_SECONDS):
        while not await condition():  # noqa: ASYNC110 - the state of other processes
            await asyncio.sleep(LOOK_SECONDS)


async def stats_of(cluster: DevCluster, name: str) -> dict[str, Any]:
    return await patient_stats(cluster.admin(name))


async def pid_of(cluster: DevCluster, name: str) -> int:
    (pid,) = [process.pid for process in (await cluster.status()).processes if process.name == name]
    assert pid is not None
    return pid


class Traffic:
    """Light traffic of hits, misses and writes that records its errors."""

    def __init__(self, graph: Graph, users: Sequence[int]) -> None:
        self.graph, self.users = graph, users
        self.reads = self.writes = 0
        self.failed_reads: list[TaoError] = []
        self.failed_writes: list[TaoError] = []

    async def read(self) -> None:
        while True:
            user = self.users[self.reads % len(self.users)]
            self.reads += 1
            try:
                assert await self.graph.obj_get(user) is not None
                # a key that was never read before
                await self.graph.assoc_range(user + (self.reads << 6), "follows", 0, 10)
            except TaoError as error:
                self.failed_reads.append(error)
            await asyncio.sleep(PACE_SECONDS)

    async def write(self) -> None:
        while True:
            self.writes += 1
            try:
                await self.graph.obj_update(self.users[self.writes % len(self.users)], {"home": f"{self.writes}"})
            except TaoError as error:
                self.failed_writes.append(error)
            await asyncio.sleep(PACE_SECONDS)

    async def more(self, count: int = 20) -> None:
        """Wait until ``count`` more reads and writes have started."""
        reads, writes = self.reads + count, self.writes + count

        async def done() -> bool:
            return self.reads >= reads and self.writes >= writes

        await until(done)


@asynccontextmanager
async def traffic(target: str, settings: ClientSettings = PATIENT) -> AsyncIterator[Traffic]:
    async with connect(target, settings=settings) as graph:
        users = [await graph.obj_add("user", {"name": "n"}) for _ in range(8)]
        running = Traffic(graph, users)
        tasks = [asyncio.create_task(job()) for job in (running.read, running.read, running.read, running.write)]
        try:
            await running.more()
            yield running
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) for each in results), results


async def survives(
    cluster: DevCluster, begin: Callable[[], Awaitable[object]], end: Callable[[], Awaitable[object]]
) -> None:
    """Assert that no read fails while the near follower goes and comes back, nor a write whose outcome is certain."""
    async with traffic(str(cluster.topology_path)) as running:
        await begin()
        try:
            await until(lambda: health_is(running, NEAR, {"down", "probing"}))
            failed_before = len(running.failed_writes)
            assert all(isinstance(error, OutcomeUnknown) for error in running.failed_writes)
            await running.more(50)
            assert len(running.failed_writes) - failed_before <= 1, "more failed than the one write under way"
            async with connect(str(cluster.topology_path), settings=PATIENT) as late:
                assert await late.obj_get(running.users[0]) is not None
        finally:
            await end()
        await until(lambda: health_is(running, NEAR, {"up"}))
        asked = (await stats_of(cluster, NEAR))["hits"]

        async def is_asked_again() -> bool:
            return bool((await stats_of(cluster, NEAR))["hits"] > asked)

        await until(is_asked_again)
        await running.more(50)
        assert running.failed_reads == []
        assert running.graph.stats.retries_refused == 0


async def health_is(running: Traffic, name: str, wanted: set[str]) -> bool:
    return running.graph.servers().get(name, {}).get("health") in wanted


async def test_a_killed_follower_costs_no_read(cluster: DevCluster) -> None:
    await survives(cluster, lambda: cluster.kill(NEAR), lambda: cluster.restart(NEAR))


async def test_a_follower_that_hangs_costs_no_read(cluster: DevCluster) -> None:
    pid = await pid_of(cluster, NEAR)

    async def send(number: signal.Signals) -> None:
        os.kill(pid, number)

    await survives(cluster, lambda: send(signal.SIGSTOP), lambda: send(signal.SIGCONT))


@asynccontextmanager
async def connected(cluster: DevCluster, name: str) -> AsyncIterator[Session]:
    """Yield a session with exactly this server; the SDK would fail over to another one."""
    routes = Routes(parse_topology(cluster.topology_path.read_bytes(), "topology"))
    servers = [server for tier in routes.follower_tiers(ONLY_REGION) for server in tier.servers]
    (address,) = [server.frames for server in servers if server.name == name]
    session = await connect_frames(address, PATIENT_SESSION, Credentials("witness", "client"))
    try:
        yield session
    finally:
        await session.close()


async def wire_values(session: Session, user: int, atype: int) -> dict[int, bytes]:
    """Return the object and its newest edges as encoded on the wire, by slot."""
    read = pb.ReadBatch(obj_ids=[user], range_id1s=[user], range_atypes=[atype], range_positions=[0], range_limits=[5])
    answer = (await session.ask(pb.Request(read=read), PATIENT_SECONDS)).read
    assert not answer.errors
    return dict(zip(answer.slots or range(2), answer.values, strict=True))


async def test_a_follower_paused_during_writes_answers_nothing_older_when_it_resumes(
    cluster: DevCluster,
) -> None:
    pid = await pid_of(cluster, NEAR)
    async with (
        connect(str(cluster.topology_path), tier="tier-2", settings=PATIENT) as graph,
        connected(cluster, NEAR) as near,
        connected(cluster, FAR) as far,
    ):
        user, friend = [await graph.obj_add("user", {"name": "n", "home": "old"}) for _ in range(2)]
        follows = graph.schema.atype("follows").number
        before = await wire_values(near, user, follows)
        assert await wire_values(far, user, follows) == before
        os.kill(pid, signal.SIGSTOP)
        try:
            # The follower reads this request before any message that its leader sends from now on.
            first = asyncio.create_task(wire_values(near, user, follows))
            await asyncio.sleep(STAND_STILL_SECONDS)
            await graph.obj_update(user, {"home": "new"})
            await graph.assoc_add(user, "follows", friend, 1)
            asked = [asyncio.create_task(wire_values(near, user, follows)) for _ in range(20)]
            truth = await wire_values(far, user, follows)  # the requests before this one have been sent by now, too
            assert all(truth[slot] != before[slot] for slot in range(2))
        finally:
            os.kill(pid, signal.SIGCONT)
        assert [await each for each in asked] == [truth] * len(asked)
        assert await first in (before, truth)
    await assert_converges(cluster)


def advertise(cluster: DevCluster, name: str, frames: str) -> str:
    """Store a topology in which clients reach the server at another address; return the former address."""
    document = json.loads(cluster.topology_path.read_text())
    tiers = [tier for region in document["regions"] for tier in region["followers"]]
    (server,) = [server for tier in tiers for server in tier["servers"] if server["name"] == name]
    former: str = server["frames"]
    server["frames"] = frames
    document["version"] += 1
    written = cluster.topology_path.with_suffix(".new")
    written.write_text(json.dumps(document))
    written.replace(cluster.topology_path)
    return former


async def test_a_slow_route_is_a_brown_out_and_is_left_for_a_fast_one(cluster: DevCluster) -> None:
    proxy = DelayProxy()
    direct = advertise(cluster, NEAR, "127.0.0.1:1")
    async with proxy.to(direct) as address:
        advertise(cluster, NEAR, address)
        links = LinkSettings(detector=DetectorSettings(slow_seconds=0.2))
        async with traffic(str(cluster.topology_path), ClientSettings(timeout_seconds=10, links=links)) as running:

            async def goes_that_way() -> bool:
                return proxy.connections > 0

            await until(goes_that_way)
            proxy.delay_seconds = 0.3
            await until(lambda: health_is(running, NEAR, {"suspect"}))
            assert str(running.graph.servers()[NEAR]["reason"]).startswith("slow")
            asked = (await stats_of(cluster, FAR))["hits"]
            await running.more(50)
            assert (await stats_of(cluster, FAR))["hits"] > asked
            proxy.delay_seconds = 0.0
            await until(lambda: health_is(running, NEAR, {"up"}))
            assert (running.failed_reads, running.failed_writes) == ([], [])
    advertise(cluster, NEAR, direct)


async def test_while_the_database_hangs_hits_continue_misses_fail_early_and_no_storm_follows(
    cluster: DevCluster,
) -> None:
    async def database_is(wanted: set[str]) -> bool:
        pools = (await stats_of(cluster, "leader-1"))["databases"]["read"]
        return all(pool["health"] in wanted for pool in pools.values())

    pid = await pid_of(cluster, "db-1")
    async with connect(str(cluster.topology_path), settings=ClientSettings(timeout_seconds=2)) as graph:
        user = await graph.obj_add("user", {"name": "n"})
        assert await graph.obj_get(user) is not None
        selects = await selects_of(cluster)
        asked = 0
        refusals: set[str] = set()

        async def miss() -> None:
            nonlocal asked
            asked += 1
            try:
                await graph.assoc_range(user + (asked << 6), "follows", 0, 10)
            except RetryableError as error:
                refusals.add(error.message)

        os.kill(pid, signal.SIGSTOP)
        try:
            storm = [asyncio.create_task(miss()) for _ in range(300)]
            await until(lambda: database_is({"down", "probing"}))
            await asyncio.gather(*storm)
            for _ in range(200):
                await miss()
                assert await graph.obj_get(user) is not None
            stats = await stats_of(cluster, "leader-1")
            assert stats["fills"]["under_way"] < 100
            assert all(pool["waiting"] == 0 for pool in stats["databases"]["read"].values())
        finally:
            os.kill(pid, signal.SIGCONT)
        assert any("is down" in message for message in refusals), refusals
        await until(lambda: database_is({"up"}))
        await graph.assoc_range(user, "likes", 0, 10)
        assert await selects_of(cluster) - selects < 300, "more were asked for, and refused"


async def selects_of(cluster: DevCluster) -> int:
    """Return the number of reading statements that the database counts."""
    database = cluster.database("db-1")
    account = database.accounts.administrator
    connection = await aiomysql.connect(
        host=database.host, port=database.port, user=account.user, password=account.password
    )
    try:
        async with connection.cursor() as cursor:
            await cursor.execute("SHOW GLOBAL STATUS LIKE 'Com_select'")
            ((_, count),) = await cursor.fetchall()
            return int(count)
    finally:
        connection.close()
