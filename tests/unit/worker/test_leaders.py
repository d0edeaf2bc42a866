"""How a worker asks the leaders of its region for jobs: all at once, for no more than it has room for."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tao.model.errors import Unavailable
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import JobPriority
from tao.routing.routes import Routes
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb
from tao.worker.leaders import LinkedLeaders
from tests.rigs.leader_rig import make_topology
from tests.rigs.links_rig import MemoryLinks
from tests.rigs.pacing import until

NAMES = tuple(f"leader-{number}" for number in range(1, 6))
LEASE_MS = 30_000


class Jobs:
    """A leader with so many jobs of each priority."""

    def __init__(self, number: int, *jobs: int) -> None:
        self.number = number
        self.left = list(jobs)

    def handle(self, request: pb.Request, reply: Reply) -> None:
        found = pb.JobList()
        for priority, limit in enumerate(request.lease_jobs.limits):
            for _ in range(min(limit, self.left[priority])):
                self.left[priority] -= 1
                found.jobs.add(id=self.number << SHARD_SHIFT | 1, kind="walk", priority=priority, worker="worker")
        reply.send(pb.Answer(jobs=found))


class Cluster:
    """Five leaders, asked by a worker."""

    def __init__(self) -> None:
        self.links = MemoryLinks("worker")
        routes = Routes(make_topology(leader_servers=NAMES))
        self.leaders = LinkedLeaders(self.links.as_links(), lambda: routes, "east", 5.0)
        self.jobs = [Jobs(number, 0, 0, 0) for number in range(len(NAMES))]
        for name, jobs in zip(NAMES, self.jobs, strict=True):
            self.links[name].handler = jobs

    async def lease(self, *limits: int) -> Counter[tuple[int, int]]:
        """Return how many jobs came from each leader, by its number and their priority."""
        rows = await self.leaders.lease(["walk"], limits, LEASE_MS)
        return Counter((row.id >> SHARD_SHIFT, row.priority) for row in rows)


@pytest.mark.parametrize("limits", [(8, 4, 2), (0, 1, 0), (0, 0, 2), (64, 0, 0)])
async def test_no_more_jobs_are_leased_than_there_is_room_for(limits: tuple[int, int, int]) -> None:
    cluster = Cluster()
    for jobs in cluster.jobs:
        jobs.left = [100, 100, 100]
    leased = await cluster.lease(*limits)
    assert [sum(leased[each, priority] for each in range(5)) for priority in JobPriority] == list(limits)


@pytest.mark.parametrize("number", range(5))
async def test_one_leader_that_alone_has_jobs_fills_the_room(number: int) -> None:
    cluster = Cluster()
    cluster.jobs[number].left = [0, 3, 100]
    assert await cluster.lease(8, 1, 2) == {(number, 1): 1, (number, 2): 2}


async def test_leaders_are_asked_at_once_and_share_a_sixth_of_the_lease() -> None:
    cluster = Cluster()
    for jobs in cluster.jobs:
        jobs.left = [0, 1, 0]
    for name in NAMES:
        cluster.links[name].hold_requests = {"lease_jobs"}
    leasing = asyncio.create_task(cluster.lease(0, 5, 0))
    await until(lambda: all(cluster.links[name].held for name in NAMES))
    assert {cluster.links[name].sent[0].deadline_ms for name in NAMES} == {LEASE_MS // 6}
    for name in NAMES:
        cluster.links[name].let_go()
    assert sum((await leasing).values()) == 5


async def test_leaders_that_are_away_are_left_out_unless_all_are() -> None:
    cluster = Cluster()
    cluster.jobs[4].left = [0, 2, 0]
    for name in NAMES[:4]:
        cluster.links[name].down = True
    assert await cluster.lease(0, 2, 0) == {(4, 1): 2}
    cluster.links[NAMES[4]].down = True
    with pytest.raises(Unavailable, match="is down"):
        await cluster.lease(0, 2, 0)
