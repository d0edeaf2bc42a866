"""The watcher's policy at work: what followers say, what is done about it, and what is left alone."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from tao.model.errors import TaoError, Unavailable
from tao.model.topology import CacheServer, Topology
from tao.observability.logs import logger
from tao.routing.cloning_policy import CloningPolicy
from tao.runtime.tasks import BackgroundTasks
from tao.topology import edits
from tao.topology.clones import hosts_of
from tao.watcher.probes import WatcherContext
from tao.watcher.shard_clones import Cloner, CloningSettings, HotShards
from tao.wire.links import Links
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.pacing import ManualClock
from tests.unit.client.fakes import make_topology

POLICY = CloningPolicy(clone_above=100.0, give_back_below=50.0, rounds_above=2, rounds_below=2, max_copies=1)


class Followers:
    """Links to followers that report these rates, and the topology store, whose documents they use at once."""

    def __init__(self) -> None:
        self.topology = make_topology(near=("n-1", "n-2"), far=())
        self.rates: dict[str, dict[int, float]] = {"n-1": {}, "n-2": {}}
        self.silent: TaoError | None = None

    def to(self, server: CacheServer) -> FollowerLink:
        return FollowerLink(self, server.name)

    async def load(self) -> Topology:
        return self.topology

    async def change(self, expected_version: int, changed: Topology) -> Topology:
        assert expected_version == self.topology.version
        self.topology = changed
        return changed

    async def version_at(self, server: CacheServer) -> int:
        return self.topology.version

    def policy(self, *, dry_run: bool = False, is_active: bool = True) -> HotShards:
        cloner = Cloner(self, self.version_at, CloningSettings(), lambda _: None)
        links = cast("Links", self)
        log = logger("test")
        context = WatcherContext(BackgroundTasks("test", log), ManualClock(), log)
        return HotShards(lambda: self.topology, lambda: is_active, links, cloner, POLICY, context, dry_run=dry_run)

    def hosts(self, shard: int) -> tuple[str, ...]:
        return hosts_of(self.topology.regions[0].followers[0], shard)


class FollowerLink:
    def __init__(self, followers: Followers, name: str) -> None:
        self.followers = followers
        self.name = name

    async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
        if self.followers.silent is not None:
            raise self.followers.silent
        rates = self.followers.rates[self.name]
        traffic = pb.Traffic(shards=list(rates), shard_rates=list(rates.values()))
        return pb.Answer(inspection=pb.Inspection(traffic=traffic))


@pytest.fixture
def followers() -> Followers:
    return Followers()


async def test_a_shard_that_stays_hot_is_cloned_and_the_clone_given_back_when_it_has_cooled_off(
    followers: Followers,
) -> None:
    (home,) = followers.hosts(3)
    policy = followers.policy()
    followers.rates[home] = {3: 500.0, 4: 20.0}
    await policy.once()
    assert followers.topology.version == 1
    await policy.once()
    assert set(followers.hosts(3)) == {"n-1", "n-2"}
    assert followers.topology.regions[0].followers[0].cloned_by_watcher == (3,)
    followers.rates[home] = {4: 20.0}
    await policy.once()
    await policy.once()
    assert followers.hosts(3) == (home,)
    assert policy.done == {"cloned": 1, "given_back": 1, "failed": 0, "would": 0}


async def test_a_dry_run_changes_nothing(followers: Followers) -> None:
    policy = followers.policy(dry_run=True)
    followers.rates[followers.hosts(3)[0]] = {3: 500.0}
    for _ in range(4):
        await policy.once()
    assert followers.topology.version == 1
    assert policy.done["would"] == 2


async def test_clones_made_by_hand_are_not_given_back(followers: Followers) -> None:
    home = followers.hosts(3)[0]
    followers.topology = edits.move_shard(followers.topology, "east", "near", 3, home, *({"n-1", "n-2"} - {home}))
    policy = followers.policy()
    for _ in range(5):
        await policy.once()
    assert len(followers.hosts(3)) == 2


async def test_while_a_follower_does_not_answer_its_tier_is_left_alone(followers: Followers) -> None:
    policy = followers.policy()
    followers.rates[followers.hosts(3)[0]] = {3: 500.0}
    await policy.once()
    followers.silent = Unavailable("away")
    await policy.once()
    followers.silent = None
    await policy.once()
    assert followers.topology.version == 1, "rounds are counted in a row"


async def test_what_cannot_be_done_is_counted_and_tried_again_later(followers: Followers) -> None:
    policy = followers.policy()
    home = followers.hosts(3)[0]
    followers.rates[home] = {3: 500.0}
    await policy.once()
    loaded = followers.topology
    followers.topology = edits.mark_server(loaded, next(iter({"n-1", "n-2"} - {home})), down=True)
    await policy.once()
    assert policy.done["cloned"] == 0, "nobody else is up"


async def test_servers_that_do_not_answer_at_all_in_time_are_named(followers: Followers) -> None:
    async def silent(_: CacheServer) -> int:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets the event")

    cloner = Cloner(followers, silent, CloningSettings(timeout_seconds=0.01), lambda _: None)
    with pytest.raises(Unavailable, match=r"^n-1, n-2 did not hear of topology version 2 within"):
        await cloner.run(await cloner.plan("east", "near", 3, 1))
