"""The shard map: ring, explicit mappings, clones, and the order of fail-over."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tao.model.errors import InvalidArgument, TopologyError
from tao.routing.shard_map import MAX_POINTS, Ring, ShardMap


def test_the_order_of_servers_in_the_topology_does_not_matter() -> None:
    one = Ring({"a": 1, "b": 1, "c": 2})
    two = Ring({"c": 2, "b": 1, "a": 1})
    assert [one.owners(shard, 3) for shard in range(500)] == [two.owners(shard, 3) for shard in range(500)]


def test_owners_are_distinct_and_begin_with_the_owner() -> None:
    ring = Ring({f"f{i}": 1 for i in range(5)})
    for shard in range(500):
        owners = ring.owners(shard, 5)
        assert sorted(owners) == ["f0", "f1", "f2", "f3", "f4"]
        assert owners[0] == ring.owner(shard)
        assert ring.owners(shard, 2) == owners[:2]


def test_there_are_no_more_owners_than_servers() -> None:
    assert Ring({"a": 1}).owners(3, 4) == ("a",)
    assert Ring({"a": 1}).owners(3, 0) == ()


def test_a_server_of_weight_zero_gets_no_shards() -> None:
    ring = Ring({"a": 1, "b": 0})
    assert {ring.owner(shard) for shard in range(1000)} == {"a"}
    assert ring.names == {"a", "b"}


def test_a_very_small_weight_still_gets_shards() -> None:
    ring = Ring({"a": 1, "b": 1e-9})
    assert {ring.owner(shard) for shard in range(1000)} == {"a", "b"}


def test_the_placement_of_shards_never_changes_between_releases() -> None:
    ring = Ring({"f0": 1, "f1": 1, "f2": 1})
    assert "".join(ring.owner(shard)[1] for shard in range(40)) == "2220022012111020212122121220201012020100"


@pytest.mark.parametrize(
    "servers",
    [{}, {"a": 0}, {"a": -1}, {"a": float("nan")}, {"a": float("inf")}, {"a": MAX_POINTS}],
)
def test_an_invalid_tier_is_rejected(servers: dict[str, float]) -> None:
    with pytest.raises(TopologyError):
        Ring(servers)


def test_a_negative_shard_is_rejected() -> None:
    with pytest.raises(InvalidArgument):
        Ring({"a": 1}).owner(-1)


RING = Ring({"a": 1, "b": 1, "c": 1, "d": 1})


def test_without_mappings_every_shard_is_at_its_ring_owner() -> None:
    shard_map = ShardMap(64, RING, {})
    assert [shard_map.servers(shard) for shard in range(64)] == [(RING.owner(shard),) for shard in range(64)]


def test_an_explicit_mapping_takes_precedence_over_the_ring_and_moves_nothing_else() -> None:
    plain = ShardMap(64, RING, {})
    target = next(name for name in "bcd" if name != plain.home(7))
    moved = ShardMap(64, RING, {7: (target, "a")})
    assert moved.servers(7) == (target, "a")
    assert [moved.servers(s) for s in range(64) if s != 7] == [plain.servers(s) for s in range(64) if s != 7]


@pytest.mark.parametrize("shard", [-1, 64, 65535])
def test_an_unknown_shard_is_rejected(shard: int) -> None:
    with pytest.raises(InvalidArgument, match=f"no shard {shard}"):
        ShardMap(64, RING, {}).servers(shard)


@pytest.mark.parametrize(
    ("shards", "explicit"),
    [
        (0, {}),
        (65537, {}),
        (64, {64: ("a",)}),
        (64, {-1: ("a",)}),
        (64, {1: ("x",)}),
        (64, {1: ()}),
        (64, {1: ("a", "a")}),
    ],
)
def test_an_invalid_mapping_is_rejected(shards: int, explicit: Mapping[int, tuple[str, ...]]) -> None:
    with pytest.raises(TopologyError):
        ShardMap(shards, RING, explicit)
