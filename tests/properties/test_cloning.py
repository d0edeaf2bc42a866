"""Clones of shards, changed at random and interrupted anywhere.

A server that serves a shard receives its changes from every server that follows the document before or after.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tao.model.errors import TopologyError
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.routing.routes import Routes
from tao.topology import edits
from tao.topology.clones import hosts_of, plan_copies
from tests.rigs.effort import examples

SHARDS = 4
NAMES = ("f-0", "f-1", "f-2", "f-3")


def start() -> Topology:
    def tier(name: str, names: tuple[str, ...]) -> Tier:
        return Tier(name=name, servers=tuple(CacheServer(name=each, grpc="127.0.0.1:7") for each in names))

    region = Region(name="east", leaders=tier("leaders", ("l-0",)), followers=(tier("web", NAMES),))
    database = Database(
        name="db", master_region="east", servers={"east": DatabaseServer(name="d")}, shards=((0, SHARDS - 1),)
    )
    return Topology(version=1, shards=SHARDS, regions=(region,), databases=(database,))


EXTENTS = st.sampled_from(["both", "first"])
STEPS = st.lists(st.tuples(st.integers(0, SHARDS - 1), st.integers(0, 3), EXTENTS), max_size=8)


@settings(deadline=None, max_examples=examples(50))
@given(STEPS)
def test_servers_by_one_document_are_notified_by_the_next_and_by_the_one_before(
    steps: list[tuple[int, int, str]],
) -> None:
    topology, documents = start(), [start()]
    for shard, copies, extent in steps:
        plan = plan_copies(topology, "east", "web", shard, copies)
        assert len(plan.after) == copies + 1
        assert plan.after[0] == hosts_of(topology.regions[0].followers[0], shard)[0], "the home stays"
        topology = plan.first(topology)
        documents.append(topology)
        if extent == "both":
            topology = plan.second(topology)
            documents.append(topology)
            tier = topology.regions[0].followers[0]
            assert (hosts_of(tier, shard), tier.told.get(shard)) == (plan.after, None)
    routes = [Routes(each).tier("east", "web") for each in documents]
    for one, other in pairwise(routes):
        for shard in range(SHARDS):
            assert set(one.hosts(shard)) <= set(other.receivers(shard))
            assert set(other.hosts(shard)) <= set(one.receivers(shard))


@settings(deadline=None, max_examples=examples(30))
@given(st.integers(0, SHARDS - 1), st.integers(0, 3), st.integers(0, 3))
def test_copies_come_and_go_at_the_end_and_the_ring_has_the_shard_again(shard: int, more: int, fewer: int) -> None:
    topology = start()
    for copies in (more, min(more, fewer), 0):
        plan = plan_copies(topology, "east", "web", shard, copies)
        assert plan.after[: min(len(plan.before), copies + 1)] == plan.before[: copies + 1]
        topology = plan.second(plan.first(topology))
    assert topology.regions == start().regions


def test_a_new_clone_is_up_and_a_tier_that_is_too_small_is_refused() -> None:
    home, second, *_ = plan_copies(start(), "east", "web", 1, 3).after
    topology = edits.mark_server(start(), second, down=True)
    assert second not in plan_copies(topology, "east", "web", 1, 2).after
    with pytest.raises(TopologyError, match="for 2 copies of shard 1 beside its home at most"):
        plan_copies(topology, "east", "web", 1, 3)
    for tier, shard, copies in (("leaders", 1, 1), ("web", SHARDS, 1), ("web", 1, -1)):
        with pytest.raises(TopologyError):
            plan_copies(topology, "east", tier, shard, copies)
    assert plan_copies(topology, "east", "web", 1, 0).after == (home,)
    assert plan_copies(topology, "east", "web", 1, 0).is_nothing


def test_clones_of_a_watcher_are_remembered_until_they_are_given_back() -> None:
    plan = plan_copies(start(), "east", "web", 1, 1, by_watcher=True)
    topology = plan.second(plan.first(start()))
    assert topology.regions[0].followers[0].cloned_by_watcher == (1,)
    back = plan_copies(topology, "east", "web", 1, 0, by_watcher=True)
    assert back.second(back.first(topology)).regions[0].followers[0].cloned_by_watcher == ()
    by_hand = plan_copies(topology, "east", "web", 1, 2)
    topology = by_hand.second(by_hand.first(topology))
    assert topology.regions[0].followers[0].cloned_by_watcher == ()
