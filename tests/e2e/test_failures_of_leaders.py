"""A leader dies, or is paused and resumes, under traffic.

Reads go on, another leader takes its shards over, no acknowledged write is lost, and nothing is stale afterwards. There
is no watcher here: the tests set the marks that a watcher would, when they need them.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from tao.client import Graph, TaoError, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ONLY_REGION, Shape
from tao.model.graph import decode_object
from tao.model.ids import SHARD_SHIFT
from tao.model.topology import CacheServer, Topology
from tao.routing.routes import Routes
from tao.topology import edits
from tao.topology.document import parse_topology
from tao.topology.file_store import TopologyFile
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings
from tao.wire.v1 import session_pb2 as pb
from tests.e2e.cluster_access import (
    LOOK_SECONDS,
    PACE_SECONDS,
    PATIENT,
    assert_converges,
    patient_stats,
    running_cluster,
)
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="module"),
]

SHARDS = 8
READERS = 4
STAND_STILL_SECONDS = 1.6
"""Length of a pause in seconds, long enough to be detected. It is a fixed sleep, because there is no condition to wait
for."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    shape = Shape(tiers=2, followers=1, leaders=2, databases=1, shards=SHARDS)
    async with running_cluster(tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


def topology_of(cluster: DevCluster) -> Topology:
    return parse_topology(cluster.topology_path.read_bytes(), "topology")


async def mark(cluster: DevCluster, name: str, *, down: bool) -> None:
    store = TopologyFile(cluster.topology_path, on_error=lambda _: None)
    before = await store.load()
    await store.change(before.version, edits.mark_server(before, name, down))


def led_by(cluster: DevCluster, name: str) -> set[int]:
    """Return the shards of a leader according to the current topology document."""
    return set(Routes(topology_of(cluster)).shards_of(name))


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for ``condition``, a function or a coroutine function."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENT_SECONDS
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return
        assert loop.time() < deadline, what
        await asyncio.sleep(LOOK_SECONDS)


async def until_owned(cluster: DevCluster, name: str, shards: int) -> None:
    async def owned() -> bool:
        return int((await patient_stats(cluster.admin(name)))["owned_shards"]) == shards

    await until(owned, f"{name} does not own {shards} shards")


async def users_on(graph: Graph, shards: set[int], count: int) -> list[int]:
    """Create users on these shards, cached only in this graph's tier and at their leader."""
    found: list[int] = []
    while len(found) < count:
        batch = await asyncio.gather(*(graph.obj_add("user", {"name": "u", "home": "old"}) for _ in range(50)))
        found += [user for user in batch if user >> SHARD_SHIFT in shards]
    return found[:count]


@dataclass
class Reader:
    """A client that continuously reads new users and one that is cached."""

    graph: Graph
    users: Sequence[int]
    reads: int = 0
    errors: list[TaoError] = field(default_factory=list)

    async def run(self) -> None:
        for user in self.users:
            for each in (user, self.users[0]):
                try:
                    found = await self.graph.obj_get(each)
                    assert found is not None
                except TaoError as error:
                    self.errors.append(error)
                self.reads += 1
            await asyncio.sleep(0.002)


class Writer:
    """A client that writes one object repeatedly and records the last acknowledged value."""

    def __init__(self, graph: Graph, user: int) -> None:
        self.graph, self.user = graph, user
        self.tried = self.acknowledged = self.failures = 0

    async def run(self) -> None:
        while True:
            self.tried += 1
            try:
                await self.graph.obj_update(self.user, {"home": str(self.tried)})
            except TaoError:
                self.failures += 1
            else:
                self.acknowledged = self.tried
            await asyncio.sleep(PACE_SECONDS)

    async def more(self, writes: int = 5) -> None:
        before = self.acknowledged
        await until(lambda: self.acknowledged >= before + writes, "no write is acknowledged")

    async def check(self, graphs: Sequence[Graph]) -> None:
        """Wait until every tier shows the acknowledged value, or a later one that was tried."""
        for graph in graphs:

            async def shows_it(graph: Graph = graph) -> bool:
                found = await graph.obj_get(self.user)
                assert found is not None
                assert int(str(found.fields["home"])) <= self.tried
                return self.acknowledged <= int(str(found.fields["home"]))

            await until(shows_it, f"a tier does not show what was acknowledged last, {self.acknowledged}")


@dataclass
class Traffic:
    """Clients of both tiers, and writers on shards of one leader."""

    near: Graph
    far: Graph
    writers: list[Writer]

    async def stop_and_check(self, cluster: DevCluster, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in self.writers:
            await writer.check((self.near, self.far))
        await assert_converges(cluster)


async def traffic_on(cluster: DevCluster, stack: AsyncExitStack, shards: set[int]) -> Traffic:
    target = str(cluster.topology_path)
    near, far = [
        await stack.enter_async_context(connect(target, tier=tier, settings=PATIENT)) for tier in ("tier-1", "tier-2")
    ]
    return Traffic(near, far, [Writer(near, user) for user in await users_on(near, shards, 2)])


async def test_while_a_killed_leader_is_replaced_no_read_fails_and_no_acknowledged_write_is_lost(
    cluster: DevCluster,
) -> None:
    shards = led_by(cluster, "leader-1")
    async with AsyncExitStack() as stack:
        traffic = await traffic_on(cluster, stack, shards)
        unread = await users_on(traffic.near, shards, 4 * READERS * 50)
        tasks = [asyncio.create_task(writer.run()) for writer in traffic.writers]
        for writer in traffic.writers:
            await writer.more()
        # These are misses in the other tier: until the leader is marked down, only the database can answer them.
        parts = [unread[number :: 4 * READERS] for number in range(4 * READERS)]
        await cluster.kill("leader-1")
        before = [Reader(traffic.far, part) for part in parts[: 2 * READERS]]
        await asyncio.gather(*(reader.run() for reader in before))
        assert sum((await direct_reads(cluster)).values()) > 0
        await mark(cluster, "leader-1", down=True)
        during = [Reader(traffic.far, part) for part in parts[2 * READERS : 3 * READERS]]
        await asyncio.gather(*(reader.run() for reader in during))
        for writer in traffic.writers:
            await writer.more()
        await until_owned(cluster, "leader-2", SHARDS)
        # The leader returns, and takes its shards when it is marked up.
        await cluster.restart("leader-1")
        await until_owned(cluster, "leader-1", 0)
        await mark(cluster, "leader-1", down=False)
        after = [Reader(traffic.far, part) for part in parts[3 * READERS :]]
        await asyncio.gather(*(reader.run() for reader in after))
        await until_owned(cluster, "leader-1", len(shards))
        for writer in traffic.writers:
            await writer.more()
        failed = [error for reader in (*before, *during, *after) for error in reader.errors]
        assert failed == []
        await traffic.stop_and_check(cluster, tasks)


async def test_a_leader_replaced_while_paused_loses_no_write_and_serves_nothing_stale(
    cluster: DevCluster,
) -> None:
    shards = led_by(cluster, "leader-1")
    pid = next(process.pid for process in (await cluster.status()).processes if process.name == "leader-1")
    assert pid is not None
    async with AsyncExitStack() as stack:
        traffic = await traffic_on(cluster, stack, shards)
        witness, *unread = await users_on(traffic.near, shards, 50)
        links = Links(LinkSettings(), Credentials("witness", "operator"))
        stack.push_async_callback(links.close)
        leader = next(server for server in topology_of(cluster).regions[0].leaders.servers if server.name == "leader-1")
        assert await asked_of(links, leader, witness) == "old", "it has it in its cache"
        tasks = [asyncio.create_task(writer.run()) for writer in traffic.writers]
        for writer in traffic.writers:
            await writer.more()
        os.kill(pid, signal.SIGSTOP)
        try:
            # The paused leader does not answer at all: misses wait for their timeout, and then bypass it.
            found = await asyncio.gather(*map(traffic.far.obj_get, unread))
            assert None not in found
            await asyncio.sleep(STAND_STILL_SECONDS)
            await mark(cluster, "leader-1", down=True)
            await until_owned(cluster, "leader-2", SHARDS)
            for writer in traffic.writers:
                await writer.more()
            await traffic.near.obj_update(witness, {"home": "new"})
            # The leader reads these requests first when it resumes.
            waiting = [asyncio.create_task(asked_of(links, leader, witness)) for _ in range(20)]
            await asyncio.sleep(0)
        finally:
            os.kill(pid, signal.SIGCONT)
        answers = await asyncio.gather(*waiting)
        assert set(answers) <= {"new", "NOT_MINE", "UNAVAILABLE"}, answers
        for writer in traffic.writers:
            await writer.more()
        await until_owned(cluster, "leader-1", 0)
        await mark(cluster, "leader-1", down=False)
        await until_owned(cluster, "leader-1", len(shards))
        for writer in traffic.writers:
            await writer.more()

        async def is_new() -> bool:
            [seen] = await traffic.far.obj_get_many([witness])
            return seen is not None and seen.fields["home"] == "new"

        await until(is_new, "the other tier does not show what was written meanwhile")
        await traffic.stop_and_check(cluster, tasks)


async def test_without_a_topology_file_servers_go_on_by_the_one_they_have(
    cluster: DevCluster,
) -> None:
    async with AsyncExitStack() as stack:
        traffic = await traffic_on(cluster, stack, set(range(SHARDS)))
        tasks = [asyncio.create_task(writer.run()) for writer in traffic.writers]
        document = cluster.topology_path.read_bytes()
        cluster.topology_path.unlink()
        try:
            for writer in traffic.writers:
                await writer.more(50)
            assert [writer.failures for writer in traffic.writers] == [0, 0]
        finally:
            cluster.topology_path.write_bytes(document)
        await mark(cluster, "follower-2a", down=False)
        version = topology_of(cluster).version
        await until(lambda: traffic.near.topology.version == version, "the next document is not followed")
        await traffic.stop_and_check(cluster, tasks)


async def asked_of(links: Links, leader: CacheServer, user: int) -> str:
    """Return the value of the user's home at exactly this leader, or the reason of its error."""
    request = pb.Request(read=pb.ReadBatch(obj_ids=[user]))
    try:
        answer = await links.to(leader).ask(request, PATIENT_SECONDS)
    except TaoError as error:
        return error.reason
    if answer.read.errors:
        return answer.read.errors[0].reason
    data = decode_object(answer.read.values[0])[2]
    return "new" if b"new" in data else "old"


async def direct_reads(cluster: DevCluster) -> dict[str, int]:
    """Return the number of queries that bypassed the leaders, by follower."""
    tiers = Routes(topology_of(cluster)).follower_tiers(ONLY_REGION)
    followers = [server.name for tier in tiers for server in tier.servers]
    return {name: (await patient_stats(cluster.admin(name)))["direct_reads"] for name in followers}
