"""The model of a large installation: its documents, and what follows from its figures."""

import msgspec
import pytest

from loadtest.scale.cluster import ClusterFigures
from loadtest.scale.figures import ScaleFigures
from loadtest.scale.in_process import Measured
from loadtest.scale.installation import (
    CHANGES,
    LEADER,
    LOST_LEADER,
    PROMOTION,
    REGION,
    UNRELATED,
    InstallationShape,
    TopologyChange,
    moved_shards,
    subscribers_of,
    topology_of,
)
from loadtest.scale.roles import ChangeCost, RoleFigures, combined, unconfirmed_shards
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


def cluster(one: float, two: float, statements: int = 3) -> ClusterFigures:
    return ClusterFigures(
        shards=100,
        use={},
        writes_per_second=0,
        failed_writes=0,
        relays_with_one_leader=one,
        relays_with_two_leaders=two,
        idle_statements=statements,
        longest_statement_bytes=100 * statements,
        slowest_statement_ms=statements,
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


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.name)
def test_a_change_that_is_made_again_concerns_the_next_server_or_database(change: TopologyChange) -> None:
    first = change.make(topology_of(SHAPE, {}))
    second = change.make(first)
    check_topology(second)
    assert [each.version for each in (first, second)] == [2, 3]
    assert second != msgspec.structs.replace(first, version=3)
    down = [server.name for _, server in second.cache_servers if server.down]
    epochs = [database.version_epoch for database in second.databases]
    assert (len(down), epochs) == ((0, [2, 2, 1, 1]) if change is PROMOTION else (2, [1] * 4))
    assert LEADER not in down


def test_the_cost_of_a_change_is_the_median_of_its_repetitions_and_their_shards_are_added() -> None:
    costs = [
        ChangeCost(cpu_seconds=cpu, settled_seconds=3 - cpu, moved=10, touched=9, unconfirmed=moved)
        for cpu, moved in ((0.5, 4), (2.5, 6), (1.0, 5))
    ]
    assert combined(costs) == ChangeCost(cpu_seconds=1.0, settled_seconds=2.0, moved=30, touched=27, unconfirmed=6)


def test_a_leader_has_unconfirmed_shards_until_all_are_open_and_their_tailers_have_answered() -> None:
    def leader(open_shards: int, unlinked: int) -> int:
        delivery = {"open_shards": open_shards, "unlinked_shards": unlinked}
        return unconfirmed_shards({"hosted_shards": 10, "owned_shards": 2, "delivery": delivery})

    assert [leader(8, 0), leader(12, 4), leader(12, 0)] == [4, 4, 0]
    assert unconfirmed_shards({"unsubscribed_shards": 7}) == 7


@pytest.mark.parametrize("statements", [0, 3])
def test_statements_that_nobody_looked_at_meet_no_aim(statements: int) -> None:
    found = ScaleFigures(SHAPE, cluster=cluster(one=1.0, two=1.0, statements=statements))
    aims = [(aim.aim.partition(" ")[0], aim.met) for aim in found.aims() if "statement" in aim.aim]
    met = [("statements", True), ("longest", True), ("slowest", True)]
    assert aims == (met if statements else [("statements", False)])


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
