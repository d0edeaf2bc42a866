"""A cluster of one region with two watchers: a dead leader is replaced under load; dead watchers stop no write."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from tao.admin.status import View, cluster_view
from tao.client import Graph, TaoError, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ONLY_REGION, Role, Shape
from tao.devcluster.processes import read_record
from tao.devcluster.state_folder import StateFolder
from tao.model.ids import SHARD_SHIFT
from tao.model.topology import Topology
from tao.routing.routes import Routes
from tao.topology.document import parse_topology
from tests.e2e.cluster_access import PATIENT, assert_converges, patient_stats, running_cluster
from tests.e2e.region_access import until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="module"),
]

SHAPE = Shape(tiers=1, followers=2, leaders=2, shards=8, watchers=2)
WATCHERS = ("watcher-1", "watcher-2")
OBJECTS = 24


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    async with running_cluster(tmp_path_factory.mktemp("cluster"), SHAPE) as cluster:
        yield cluster


def topology_of(cluster: DevCluster) -> Topology:
    return parse_topology(cluster.topology_path.read_bytes(), "topology")


def marked(cluster: DevCluster) -> set[str]:
    (region,) = topology_of(cluster).regions
    servers = [server for tier in (region.leaders, *region.followers) for server in tier.servers]
    return {server.name for server in servers if server.down} | {each.name for each in region.tailers if each.down}


async def until_marked(cluster: DevCluster, *names: str) -> None:
    async def are_marked() -> bool:
        return marked(cluster) == set(names)

    await until(are_marked, f"{names} are not what is marked down")


async def active(cluster: DevCluster) -> list[str]:
    found = [name for name in WATCHERS if name in cluster.running]
    stats = await asyncio.gather(*(patient_stats(cluster.admin(name)) for name in found))
    return [name for name, each in zip(found, stats, strict=True) if each["active"]]


async def view(cluster: DevCluster) -> View:
    return await cluster_view(topology_of(cluster), 5.0)


async def signal_to(cluster: DevCluster, name: str, number: signal.Signals) -> None:
    identity = read_record(StateFolder(cluster.topology_path.parent).process_record(name, Role.WATCHER))
    assert identity is not None
    identity.signal(number)


@dataclass
class Load:
    """Clients that write and read objects of all shards, at some hundred requests a second.

    A read fails also when it finds less than what was acknowledged before it began.
    """

    graph: Graph
    acknowledged: dict[int, int]
    attempted: dict[int, int]
    write_errors: list[TaoError] = field(default_factory=list)
    read_failures: list[str] = field(default_factory=list)

    async def write(self, user: int) -> None:
        while True:
            self.attempted[user] += 1
            number = self.attempted[user]
            try:
                await self.graph.obj_update(user, {"home": str(number)})
                self.acknowledged[user] = number
            except TaoError as error:
                self.write_errors.append(error)
            await asyncio.sleep(0.1)

    async def read(self, user: int) -> None:
        while True:
            least = self.acknowledged[user]
            try:
                found = await self.graph.obj_get(user)
                if found is None or int(str(found.fields["home"])) < least:
                    self.read_failures.append(f"{user} is {found}, not {least}")
            except TaoError as error:
                self.read_failures.append(f"{error.reason}: {error.message}")
            await asyncio.sleep(0.1)

    async def goes_on(self) -> None:
        """Wait until each object has been written again twice."""
        before = dict(self.acknowledged)

        async def all_have() -> bool:
            return all(number >= before[user] + 2 for user, number in self.acknowledged.items())

        await until(all_have, f"writes do not continue: {self.write_errors[-1:]}")


@asynccontextmanager
async def load_on(cluster: DevCluster) -> AsyncIterator[Load]:
    async with connect(str(cluster.topology_path), settings=PATIENT) as graph:
        users = [await graph.obj_add("user", {"name": "u", "home": "0"}) for _ in range(OBJECTS)]
        load = Load(graph, dict.fromkeys(users, 0), dict.fromkeys(users, 0))
        tasks = [asyncio.create_task(job(user)) for user in users for job in (load.write, load.read)]
        try:
            await load.goes_on()
            yield load
            await load.goes_on()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert load.read_failures == []
        for user, number in load.acknowledged.items():
            found = await graph.obj_get(user, critical=True)
            assert found is not None
            assert number <= int(str(found.fields["home"])) <= load.attempted[user], "an acknowledged write is lost"


async def test_the_shards_of_a_killed_leader_are_written_elsewhere_and_nothing_is_lost(cluster: DevCluster) -> None:
    async with load_on(cluster) as load:
        tier = Routes(topology_of(cluster)).tier(ONLY_REGION, "leaders")
        assert any(tier.home(user >> SHARD_SHIFT).name == "leader-1" for user in load.acknowledged)
        await cluster.kill("leader-1")
        await load.goes_on()
        await until_marked(cluster, "leader-1")
        await cluster.restart("leader-1")
        await until_marked(cluster)
        await load.goes_on()
    assert all(error.retryable or error.reason == "OUTCOME_UNKNOWN" for error in load.write_errors)
    await assert_converges(cluster)


async def test_followers_and_tailers_are_marked_while_they_are_dead(cluster: DevCluster) -> None:
    await cluster.kill("follower-1a")
    await cluster.kill("tailer-1")
    await until_marked(cluster, "follower-1a", "tailer-1")
    found = await view(cluster)
    assert [row.state for row in found.tailers] == ["does not answer, marked down"]
    for name in ("follower-1a", "tailer-1"):
        await cluster.restart(name)
    await until_marked(cluster)


async def test_without_a_living_watcher_writes_go_on_and_status_says_so(cluster: DevCluster) -> None:
    async def one_acts() -> bool:
        return len(await active(cluster)) == 1

    async with load_on(cluster) as load:
        await until(one_acts, "no watcher acts, or both do")
        (first,) = await active(cluster)
        (other,) = {*WATCHERS} - {first}
        await signal_to(cluster, first, signal.SIGSTOP)
        try:

            async def other_acts() -> bool:
                return (await patient_stats(cluster.admin(other)))["active"] is True

            await until(other_acts, "the other watcher does not act")
            assert f"{ONLY_REGION}: watcher {first} does not answer" in "; ".join((await view(cluster)).problems)
            await cluster.kill(other)
            found = await view(cluster)
            assert found.problems[0].startswith("no watcher acts: nobody marks down or replaces what fails. Start")
            assert [row.acts for row in found.watchers] == [None, None]
            await load.goes_on()
            # Its own clock says so: a database without a second server has no lease that could run out.
            assert (await view(cluster)).databases[0].servers == {"db-1": "up"}
        finally:
            await signal_to(cluster, first, signal.SIGCONT)
        await cluster.restart(other)
    assert load.write_errors == []

    await until(one_acts, "no watcher acts")
    # What was killed meanwhile is replaced again.
    async with load_on(cluster) as load:
        await cluster.kill("leader-2")
        await load.goes_on()
        await cluster.restart("leader-2")


async def test_the_loss_of_the_only_database_server_is_said_and_writes_go_on_when_it_is_back(
    cluster: DevCluster,
) -> None:
    await cluster.kill("db-1")

    async def is_said() -> bool:
        alone = "It has no second server that could be promoted"
        return any("takes no writes" in each and each.endswith(alone) for each in (await view(cluster)).problems)

    await until(is_said, "the loss of the database is not said")
    await cluster.restart("db-1")
    async with connect(str(cluster.topology_path), settings=PATIENT) as graph:

        async def all_shards_take_writes() -> bool:
            try:
                found = [await graph.obj_add("user", {"name": "back"}) for _ in range(4 * SHAPE.shards)]
            except TaoError:
                return False
            return len({user >> SHARD_SHIFT for user in found}) == SHAPE.shards

        await until(all_shards_take_writes, "writes do not go on")
