"""The model of a large installation: its documents, and what follows from its figures."""

import pytest

from loadtest.scale.cluster import ClusterFigures
from loadtest.scale.figures import ScaleFigures
from loadtest.scale.in_process import Measured
from loadtest.scale.installation import (
    LEADER,
    LOST_LEADER,
    PROMOTION,
    REGION,
    UNRELATED,
    InstallationShape,
    moved_shards,
    subscribers_of,
    topology_of,
)
from loadtest.scale.roles import ChangeCost, RoleFigures
from tao.routing.routes import Routes
from tao.topology.document import check_topology

SHAPE = InstallationShape(shards=60, leaders=4, followers_per_leader=3, databases=4)
CHANGE = ChangeCost(cpu_seconds=1.0, settled_seconds=1.0, moved=0, touched=7, unconfirmed=7)


def taken(seconds: float) -> Measured:
    return Measured(cpu_seconds=seconds)


def role(proof_seconds: float, resident_mb: float = 80.0) -> RoleFigures:
    return RoleFigures(
        resident_mb=resident_mb,
        base_share=0.01,
        proof_seconds=proof_seconds,
        deliveries_per_proof=1.0,
        changes={LOST_LEADER.name: CHANGE},
    )


def cluster(one: float, two: float) -> ClusterFigures:
    return ClusterFigures(
        shards=100,
        use={},
        writes_per_second=0,
        failed_writes=0,
        relays_with_one_leader=one,
        relays_with_two_leaders=two,
        longest_statement_bytes=0,
        slowest_statement_ms=0,
        lost_leader_detected_seconds=0,
        taken_of_lost_leader=40,
        taken_of_lost_leader_seconds=4,
        takeover_seconds=10,
        promotion_detected_seconds=0,
        promotion_seconds=0,
        writes_again_seconds=0,
    )


def test_the_full_shape_has_nine_thousand_followers() -> None:
    assert InstallationShape().servers == 9_090


def test_documents_are_valid_before_and_after_each_change() -> None:
    topology = topology_of(SHAPE, {})
    check_topology(topology)
    for change in (UNRELATED, LOST_LEADER, PROMOTION):
        check_topology(change.make(topology))


def test_moved_shards_are_those_of_the_lost_leader_or_of_the_promoted_database() -> None:
    topology = topology_of(SHAPE, {})
    shards = set(range(SHAPE.shards))
    lost = Routes(topology).shards_of(f"{REGION}-leader-2")
    assert moved_shards(topology, UNRELATED.make(topology), shards) == 0
    assert moved_shards(topology, LOST_LEADER.make(topology), shards) == len(lost) > 0
    assert moved_shards(topology, PROMOTION.make(topology), shards) == SHAPE.shards // SHAPE.databases


def test_every_tier_subscribes_every_shard_of_the_leader_once() -> None:
    topology = topology_of(SHAPE, {})
    subscribed = sorted(shard for shards in subscribers_of(topology, LEADER).values() for shard in shards)
    led = Routes(topology).shards_of(LEADER)
    assert subscribed == sorted([*led] * (SHAPE.tiers + 1))


def test_relays_grow_with_the_leaders_only_if_a_second_leader_added_some() -> None:
    assert cluster(one=1.0, two=2.0).relays_per_leader(30) == pytest.approx(30)
    assert cluster(one=1.0, two=1.0).relays_per_leader(30) == pytest.approx(1)


def test_what_more_than_doubles_is_named_and_noise_is_not() -> None:
    found = ScaleFigures(
        SHAPE,
        parse={
            "": taken(4.0),
            "shards": taken(3.9),
            "servers": taken(1.0),
        },
        cold_start={"": taken(0.009), "shards": taken(0.001)},
        follower={dimension: role(0.001) for dimension in ("", "shards", "servers", "databases")},
        cluster=cluster(one=1.0, two=2.0),
    )
    assert found.faster_than_linear() == [
        "parsing grows 4.0 times when the servers double",
        "follower, idle grows 2.8 times when the servers double",
    ]
    aims = {(aim.aim, aim.shape): aim for aim in found.aims()}
    assert aims["costs that grow faster than linearly", ""].value == 2
    assert not aims["shards touched at a follower, of those that moved", LOST_LEADER.name].met
    assert aims["cost of a proof with twice the shards, as a multiple", ""].met
