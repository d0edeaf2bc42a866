"""The shard map: ring, explicit mappings, clones, and the order of fail-over."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tao.model.errors import InvalidArgument, TopologyError
from tao.routing.ring import Ring
from tao.routing.shard_map import ShardMap

RING = Ring({"a": 1, "b": 1, "c": 1, "d": 1})


def test_without_mappings_every_shard_is_at_the_rings_owner() -> None:
    shard_map = ShardMap(64, RING)
    assert [shard_map.servers(shard) for shard in range(64)] == [(RING.owner(shard),) for shard in range(64)]


def test_an_explicit_mapping_wins_over_the_ring_and_moves_nothing_else() -> None:
    plain = ShardMap(64, RING)
    target = next(name for name in "abcd" if name != plain.home(7))
    moved = ShardMap(64, RING, explicit={7: target})
    assert moved.home(7) == target
    assert [moved.servers(s) for s in range(64) if s != 7] == [plain.servers(s) for s in range(64) if s != 7]


def test_clones_stand_beside_the_home_along_the_ring() -> None:
    shard_map = ShardMap(64, RING, clones={5: 3, 6: 99})
    assert shard_map.servers(5) == RING.owners(5, 3)
    assert shard_map.servers(6) == RING.owners(6, 4)


def test_clones_of_a_moved_shard_keep_its_explicit_home() -> None:
    last = RING.owners(5, 4)[3]
    shard_map = ShardMap(64, RING, explicit={5: last, 6: ["b", "a"]}, clones={5: 2, 6: 1})
    assert shard_map.servers(5) == (last, RING.owner(5))
    assert shard_map.servers(6) == ("b", "a")


@pytest.mark.parametrize("shard", [-1, 64, 65535])
def test_a_shard_that_does_not_exist_is_refused(shard: int) -> None:
    with pytest.raises(InvalidArgument, match=f"no shard {shard}"):
        ShardMap(64, RING).servers(shard)


@pytest.mark.parametrize(
    ("shards", "explicit", "clones"),
    [
        (0, {}, {}),
        (65537, {}, {}),
        (64, {64: "a"}, {}),
        (64, {-1: "a"}, {}),
        (64, {1: "x"}, {}),
        (64, {1: []}, {}),
        (64, {1: ["a", "a"]}, {}),
        (64, {}, {64: 2}),
        (64, {}, {1: 0}),
    ],
)
def test_a_mapping_that_cannot_be_is_refused(
    shards: int, explicit: Mapping[int, str | list[str]], clones: Mapping[int, int]
) -> None:
    with pytest.raises(TopologyError):
        ShardMap(shards, RING, explicit, clones)
