"""`grow`: what is asked, when a size is judged, and by what."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from loadtest import grow
from loadtest.grow import GrowOptions, Growth, HitRate, Requests, Stage, ZipfLoad, _result
from tao.client import Graph
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import Shape
from tao.devcluster.state_folder import ClusterRecord
from tao.model.errors import NotMine, Unavailable
from tao.model.topology import CacheServer, Region, Registration, Tier, Topology

WANTED = GrowOptions(followers=3, after_seconds=1.0, reads=5_000.0, writes=1_000.0)


class FakeGraph:
    """Fails every hundredth read, and answers the others."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def obj_get(self, key: int) -> object:
        self.asked.append(key)
        if len(self.asked) % 100 == 0:
            raise NotMine("not here", 1)
        return object()

    async def obj_update(self, key: int, fields: dict[str, Any]) -> None:
        assert len(fields["value"]) == 500


class FakeCluster:
    """Followers that are numbers: each answers nine of ten reads from its cache, 100 more reads at each look."""

    def __init__(self) -> None:
        self.record = ClusterRecord(shape=Shape())
        self.looks: dict[str, int] = {}
        self.silent: set[str] = set()

    def admin(self, name: str) -> str:
        return name

    async def stats(self, name: str) -> dict[str, int]:
        if name == "follower-1d" or name in self.silent:
            raise Unavailable("it starts")
        self.looks[name] = self.looks.get(name, 0) + 1
        return {"hits": 90 * self.looks[name], "misses": 10 * self.looks[name]}

    async def add_follower(self) -> str:
        self._set(self.record.shape.added_followers + 1)
        return "follower-1c"

    async def remove_follower(self, _: float) -> str:
        self._set(self.record.shape.added_followers - 1)
        return "follower-1c"

    def _set(self, added: int) -> None:
        shape = msgspec.structs.replace(self.record.shape, added_followers=added)
        self.record = msgspec.structs.replace(self.record, shape=shape)

    async def topology(self) -> Topology:
        entry = CacheServer(name="follower-1c", grpc="host:1", registration=Registration())
        region = Region(name="local", leaders=Tier(name="l", servers=()), followers=(Tier(name="t", servers=(entry,)),))
        return Topology(version=1, shards=1, regions=(region,), databases=())


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    cluster = FakeCluster()
    monkeypatch.setattr(grow, "server_stats", cluster.stats)
    return cluster


async def test_objects_are_read_by_a_zipf_law_and_failures_are_counted_by_reason() -> None:
    graph = FakeGraph()
    load = ZipfLoad([cast("Graph", graph)], range(1_000), WANTED)
    running = asyncio.create_task(load.run())
    while load.done.reads < 500:  # noqa: ASYNC110 - the load sets no event
        await asyncio.sleep(0.01)
    running.cancel()
    await load.settle()
    assert load.done.reads == len(graph.asked) == len(load.done.latencies)
    assert load.done.failed_reads == {"NOT_MINE": len(graph.asked) // 100}
    assert load.done.examples[0] == "NOT_MINE: not here"
    assert 0 < load.done.writes < load.done.reads
    assert sum(key < 100 for key in graph.asked) > sum(key >= 900 for key in graph.asked)


async def test_a_hit_rate_is_that_of_the_followers_that_answer_since_the_last_look(cluster: FakeCluster) -> None:
    cluster._set(2)
    rate = HitRate(cast("DevCluster", cluster))
    assert await rate.since() == await rate.since() == 90.0
    assert set(cluster.looks) == {"follower-1a", "follower-1b", "follower-1c"}


async def test_a_follower_that_was_silent_at_a_look_counts_from_the_look_before(cluster: FakeCluster) -> None:
    """And not from its start, when it missed everything."""
    rate = HitRate(cast("DevCluster", cluster))
    await rate.since()
    cluster.silent = {"follower-1a"}
    await rate.since()
    cluster.silent = set()
    assert await rate.since() == 90.0
    assert rate._before["follower-1a"] == (180, 20)


async def test_a_size_is_measured_after_each_change(cluster: FakeCluster) -> None:
    load = ZipfLoad([], (), WANTED)
    wanted = GrowOptions(followers=3, after_seconds=1.0)
    growth = Growth(cast("DevCluster", cluster), load, wanted, window_seconds=0.02, settle_seconds=0.01)
    stages = []
    for grows in (True, False):
        changing = asyncio.create_task(growth.changed(grows=grows))
        while not changing.done():
            load.done.latencies.append(0.001)
            await asyncio.sleep(0.005)
        stages.append(await changing)
    assert [(each.followers, each.change, each.hit_rate) for each in stages] == [
        (3, "+ follower-1c", 90.0),
        (2, "− follower-1c", 90.0),
    ]
    assert stages[0].lowest_hit_rate <= 90.0
    assert stages[0].p99_ms == 1.0


def stage(followers: int, change: str, hit_rate: float) -> Stage:
    return Stage(followers, change, 1.0, hit_rate, hit_rate, 1.0, 2.0)


def test_two_points_below_before_are_allowed_and_no_failed_request() -> None:
    good = [stage(2, "before", 90.0), stage(3, "+ follower-1c", 96.0), stage(2, "− follower-1c", 88.0)]
    assert _result(WANTED, Requests(reads=9, writes=1), good, listed=2).faults == []
    bad = [*good[:2], stage(2, "− follower-1c", 87.9)]
    done = Requests(reads=9, writes=1)
    done.failed_reads["NOT_MINE"] += 1
    faults = _result(WANTED, done, bad, listed=3).faults
    assert len(faults) == 3
    assert faults[0] == "no failed reads: 1"
    assert "2 followers (− follower-1c)): 2.1" in faults[2]
