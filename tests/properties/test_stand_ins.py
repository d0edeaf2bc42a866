"""The leaders of shards whose leaders are down, for any tier, mapping and set of failures."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tao.model.topology import CacheServer, Region, Tier, Topology
from tao.routing.routes import Routes
from tests.rigs.effort import examples

SHARDS = 256
NAMES = ("a", "b", "c", "d", "e")
FOLLOWERS = Tier(name="f", servers=(CacheServer(name="f-1", grpc="127.0.0.1:1"),))


@st.composite
def leader_tiers(draw: st.DrawFn) -> Tier:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    servers = tuple(
        CacheServer(name=name, grpc="127.0.0.1:1", weight=draw(st.sampled_from((1.0, 2.0)))) for name in names
    )
    hosts = st.lists(st.sampled_from(names), min_size=1, unique=True).map(tuple)
    return Tier(name="leaders", servers=servers, moved=draw(st.dictionaries(st.integers(0, SHARDS - 1), hosts)))


def leaders(tier: Tier, down: set[str], former: Routes | None = None) -> tuple[list[str], Routes]:
    """Return the leader's name of each shard."""
    servers = tuple(
        CacheServer(name=each.name, grpc=each.grpc, weight=each.weight, down=each.name in down) for each in tier.servers
    )
    region = Region(
        name="east", leaders=Tier(name="leaders", servers=servers, moved=tier.moved), followers=(FOLLOWERS,)
    )
    routes = Routes(Topology(version=1, shards=SHARDS, regions=(region,), databases=()), former)
    return [routes.leaders("east").home(shard).name for shard in range(SHARDS)], routes


@given(leader_tiers(), st.sets(st.sampled_from(NAMES)), st.sampled_from(NAMES))
@settings(max_examples=examples(60), deadline=None)
def test_only_shards_of_the_leader_marked_down_move_and_they_move_to_leaders_that_are_up(
    tier: Tier, down: set[str], falls: str
) -> None:
    before, _ = leaders(tier, down - {falls})
    after, _ = leaders(tier, down | {falls})
    up = {server.name for server in tier.servers} - down - {falls}
    for old, new in zip(before, after, strict=True):
        if up:
            assert new in up
            assert new == old or old == falls


@given(leader_tiers(), st.sets(st.sampled_from(NAMES)))
@settings(max_examples=examples(60), deadline=None)
def test_each_shard_has_one_leader_and_the_same_from_any_earlier_document(tier: Tier, down: set[str]) -> None:
    _, healthy = leaders(tier, set())
    found, routes = leaders(tier, down)
    again, _ = leaders(tier, down, healthy)
    assert again == found
    wanted = [shard for server in tier.servers for shard in routes.shards_of(server.name)]
    assert sorted(wanted) == list(range(SHARDS))
    assert all(shard in routes.shards_of(name) for shard, name in enumerate(found[:16]))


@given(leader_tiers())
@settings(max_examples=examples(30), deadline=None)
def test_with_every_leader_down_each_shard_stays_at_its_home(tier: Tier) -> None:
    homes, _ = leaders(tier, set())
    assert leaders(tier, set(NAMES))[0] == homes
