"""The layout of a development cluster: names, shards, topology."""

from __future__ import annotations

import pytest

from tao.devcluster.layout import CachePorts, Role, Shape, build_topology
from tao.model.errors import SettingsError
from tao.topology.document import check_topology, dump_topology, parse_topology


def topology_of(shape: Shape) -> object:
    servers = [name for name, role in shape.server_names.items() if role is not Role.DATABASE]
    ports = {name: CachePorts(20_000 + 3 * i, 20_001 + 3 * i, 20_002 + 3 * i) for i, name in enumerate(servers)}
    databases = {name: 30_000 + i for i, name in enumerate(shape.database_names)}
    topology = build_topology(shape, 7, ports, databases)
    check_topology(topology)
    assert parse_topology(dump_topology(topology), "test") == topology
    return topology


def test_the_default_is_two_tiers_of_two_followers_two_leaders_one_database_and_16_shards() -> None:
    shape = Shape().check()
    roles = list(shape.server_names.values())
    assert roles == [Role.DATABASE] + [Role.LEADER] * 2 + [Role.FOLLOWER] * 4
    assert shape.tier_names == ["tier-1", "tier-2"]
    assert shape.shards == 16


@pytest.mark.parametrize(("shards", "databases"), [(1, 1), (16, 1), (16, 3), (7, 7), (256, 5)])
def test_every_shard_lies_on_one_database_and_the_databases_are_evenly_full(shards: int, databases: int) -> None:
    ranges = Shape(shards=shards, databases=databases).check().shard_ranges
    held = [shard for first, last in ranges.values() for shard in range(first, last + 1)]
    assert held == list(range(shards))
    sizes = [last - first + 1 for first, last in ranges.values()]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(tiers=1, followers=1, leaders=1), Shape(tiers=3, followers=4, leaders=3, databases=2, shards=9)],
)
def test_the_topology_of_every_shape_passes_the_rules_of_topologies(shape: Shape) -> None:
    topology_of(shape.check())


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        (Shape(tiers=0), "--tiers 0"),
        (Shape(followers=27), "--followers 27"),
        (Shape(leaders=-1), "--leaders -1"),
        (Shape(databases=17), "--databases 17"),
        (Shape(shards=70_000), "--shards 70000"),
        (Shape(tiers=20, followers=20), "processes"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_the_name_of_the_option(shape: Shape, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        shape.check()
