"""The ring: order of owners, weights, and what it refuses."""

from __future__ import annotations

import pytest

from tao.model.errors import InvalidArgument, TopologyError
from tao.routing.ring import MAX_POINTS, Ring, RingSettings


def test_the_order_of_servers_in_the_topology_does_not_matter() -> None:
    one = Ring({"a": 1, "b": 1, "c": 2})
    two = Ring({"c": 2, "b": 1, "a": 1})
    assert [one.owners(shard, 3) for shard in range(500)] == [two.owners(shard, 3) for shard in range(500)]


def test_owners_are_different_and_begin_with_the_owner() -> None:
    ring = Ring({f"f{i}": 1 for i in range(5)})
    for shard in range(500):
        owners = ring.owners(shard, 5)
        assert sorted(owners) == ["f0", "f1", "f2", "f3", "f4"]
        assert owners[0] == ring.owner(shard)
        assert ring.owners(shard, 2) == owners[:2]


def test_there_are_no_more_owners_than_servers() -> None:
    assert Ring({"a": 1}).owners(3, 4) == ("a",)
    assert Ring({"a": 1}).owners(3, 0) == ()


def test_a_server_of_weight_zero_is_given_nothing() -> None:
    ring = Ring({"a": 1, "b": 0})
    assert {ring.owner(shard) for shard in range(1000)} == {"a"}
    assert ring.names == {"a", "b"}


def test_a_very_small_weight_still_counts() -> None:
    ring = Ring({"a": 1, "b": 1e-9}, RingSettings(virtual_nodes_per_weight=4))
    assert {ring.owner(shard) for shard in range(1000)} == {"a", "b"}


def test_the_placement_of_shards_never_changes_between_releases() -> None:
    ring = Ring({"f0": 1, "f1": 1, "f2": 1})
    assert "".join(ring.owner(shard)[1] for shard in range(40)) == "2220022012111020212122121220201012020100"


@pytest.mark.parametrize(
    "servers",
    [{}, {"a": 0}, {"a": -1}, {"a": float("nan")}, {"a": float("inf")}, {"a": MAX_POINTS}],
)
def test_a_tier_that_cannot_be_is_refused(servers: dict[str, float]) -> None:
    with pytest.raises(TopologyError):
        Ring(servers)


def test_a_negative_shard_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        Ring({"a": 1}).owner(-1)
