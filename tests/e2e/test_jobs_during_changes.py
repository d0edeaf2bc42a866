"""Jobs go on while their shard moves to another database, and while its master is switched to another region: each edge
is marked once in effect.

A page of the test's function waits until the test has permitted it. Pages are permitted one by one during the change,
and the last one after it, so the job runs throughout the change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from tao.client import Graph, Job, TaoError, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import Shape
from tao.model.ids import SHARD_SHIFT
from tests.e2e.cluster_access import LOOK_SECONDS, PATIENT
from tests.e2e.job_workers import install, workers_of
from tests.e2e.region_access import running_regions, until
from tests.e2e.steady_writers import command, regions_of, topology_of
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [
    pytest.mark.database,
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
]

SHAPE = Shape(regions=2, tiers=1, followers=1, leaders=1, databases=2, shards=4)
PAGE = 2
PAGES = 30
LEASE_SECONDS = 12.0
"""The last page waits for half of it at most, and is repeated where the change takes longer."""
MODULE = f'''
import asyncio
from pathlib import Path

HERE = Path(__file__).parent


async def mark(graph, edges):
    """Add the edge (id2, follows, id1) for each edge once the page is permitted."""
    while not (HERE / f"permitted {{edges[0].id2}}").exists():
        await asyncio.sleep({LOOK_SECONDS})
    await graph.assoc_add_many([(edge.id2, "follows", edge.id1, edge.time) for edge in edges])
'''


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    async with running_regions(tmp_path_factory.mktemp("regions"), SHAPE) as found:
        yield found.cluster


@pytest_asyncio.fixture(loop_scope="module")
async def graph(cluster: DevCluster) -> AsyncIterator[Graph]:
    async with connect(str(cluster.topology_path), region="east", settings=PATIENT) as found:
        yield found


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a folder with an installed package that has the function."""
    install(tmp_path, "jobs_of_test", MODULE, {"mark": "jobs_of_test:mark"})
    return tmp_path


class MarkingJob:
    """A job that marks each friend of a user, and the permissions of its pages."""

    def __init__(self, job: Job, package: Path, user: int, friends: Sequence[int]) -> None:
        self.job = job
        self.user = user
        self.friends = friends
        newest_first = friends[::-1]
        self._permits = [package / f"permitted {newest_first[start]}" for start in range(0, len(friends), PAGE)]

    async def edges(self) -> int:
        """Return how many edges are done, as far as it is known: the leader may be unreachable during a change."""
        with contextlib.suppress(TaoError):
            await self.job.refresh()
        return self.job.edges

    async def permit_one_by_one(self) -> None:
        """Permit each page but the last when the one before is reported, until cancelled."""
        while True:
            done = await self.edges() // PAGE
            for permit in self._permits[: min(done + 1, PAGES - 1)]:
                permit.touch()
            await asyncio.sleep(LOOK_SECONDS)

    def permit_all(self) -> None:
        for permit in self._permits:
            permit.touch()

    async def until_it_goes_on(self) -> None:
        """Wait until another page is done."""
        before = await self.edges()

        async def is_further() -> bool:
            return await self.edges() > min(before, PAGE * (PAGES - 2))

        await until(is_further, f"the job stands still at {before} edges")

    async def assert_ends_right(self, graph: Graph) -> None:
        """Assert that the job has not ended yet, let it end, and assert that each edge is marked once."""
        assert not (await self.job.refresh()).done
        self.permit_all()
        assert (await self.job.wait(timeout=PATIENT_SECONDS * 2)).done
        assert self.job.edges == len(self.friends)
        for time, friend in enumerate(self.friends, 1):
            marks = await graph.assoc_range(friend, "follows", 0, 10, critical=True)
            assert [(edge.id2, edge.time) for edge in marks] == [(self.user, time)]
            assert await graph.assoc_count(friend, "follows", critical=True) == 1


@asynccontextmanager
async def marking(cluster: DevCluster, graph: Graph, package: Path, shard: int) -> AsyncIterator[MarkingJob]:
    """Yield a job of a user of the shard, of which some pages are done. At the end it goes on and ends right."""
    user = await graph.obj_add("user", {"name": "Ada"}, near=shard << SHARD_SHIFT | 1)
    assert user >> SHARD_SHIFT == shard
    friends = [await graph.obj_add("user", {"name": f"friend {number}"}) for number in range(PAGES * PAGE)]
    await graph.assoc_add_many([(user, "friend", friend, time) for time, friend in enumerate(friends, 1)])
    async with workers_of(cluster, package, PAGE, LEASE_SECONDS) as workers:
        for region in ("east", "west"):
            await workers.start(region)
        job = await graph.add_job("each_edge", {"function": "mark", "atype": "friend", "id1": user}, near=user)
        marked = MarkingJob(job, package, user, friends)
        permits = asyncio.create_task(marked.permit_one_by_one())
        try:
            await marked.until_it_goes_on()
            yield marked
            await marked.until_it_goes_on()
        finally:
            permits.cancel()
        await marked.assert_ends_right(graph)
    await regions_of(cluster).assert_converges()


async def test_a_job_goes_on_while_its_shard_moves(cluster: DevCluster, graph: Graph, package: Path) -> None:
    shard = 1
    databases = topology_of(cluster).databases
    here = regions_of(cluster).routes.database_of(shard).name
    there = next(each.name for each in databases if each.name != here)
    async with marking(cluster, graph, package, shard) as marked:
        status, moved, errors = await command(
            cluster, "database", "move", str(shard), "--to", there, "--steady-seconds", "0.5"
        )
        assert (status, moved.get("writes_stood_seconds") is not None) == (0, True), errors
        assert regions_of(cluster).routes.database_of(shard).name == there
        assert not marked.job.done


async def test_a_job_goes_on_while_the_master_of_its_shard_is_switched(
    cluster: DevCluster, graph: Graph, package: Path
) -> None:
    shard = 2
    routes = regions_of(cluster).routes
    database, here = routes.database_of(shard).name, routes.master_region(shard)
    there = "west" if here == "east" else "east"
    async with marking(cluster, graph, package, shard) as marked:
        status, _, errors = await command(cluster, "promote", database, "--to", there)
        assert status == 0, errors
        assert regions_of(cluster).routes.master_region(shard) == there
        assert not marked.job.done
