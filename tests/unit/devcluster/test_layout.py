"""The layout of a development cluster: names, shards, topology."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest

from tao.devcluster.configuration import build_topology, crossings, line_routes
from tao.devcluster.layout import LINE, PORT_KINDS, Role, Shape
from tao.devcluster.state_folder import ClusterRecord, TopologyOutline, outline_of
from tao.model.errors import SettingsError
from tao.model.topology import Topology
from tao.topology import edits
from tao.topology.document import check_topology, dump_topology, parse_topology


def ports_of(shape: Shape) -> dict[str, dict[str, int]]:
    free = count(20_000)
    ports = {member.name: {kind: next(free) for kind in PORT_KINDS.get(member.role, ())} for member in shape.members}
    return {**ports, LINE: {crossing.key: next(free) for crossing in crossings(shape)}}


def topology_of(shape: Shape) -> Topology:
    record = ClusterRecord(shape=shape, ports=ports_of(shape), topology_version=7)
    topology = build_topology(record, TopologyOutline())
    check_topology(topology)
    assert parse_topology(dump_topology(topology), "test") == topology
    return topology


def test_the_default_is_two_tiers_of_two_followers_two_leaders_a_tailer_and_16_shards() -> None:
    shape = Shape().check()
    roles = list(shape.server_names.values())
    assert roles == [Role.DATABASE] + [Role.LEADER] * 2 + [Role.TAILER] + [Role.FOLLOWER] * 4
    assert shape.tier_names == ["tier-1", "tier-2"]
    assert shape.shards == 16


def test_a_cluster_that_starts_again_has_its_shards_where_they_moved_and_those_that_were_added() -> None:
    shape = Shape(shards=8, databases=2).check()
    record = ClusterRecord(shape=shape, ports=ports_of(shape), topology_version=7)
    first = build_topology(record, TopologyOutline())
    changed = edits.add_shards(edits.move_to_database(first, 1, "db-2"), 4)
    former = msgspec.json.decode(dump_topology(changed), type=TopologyOutline)
    again = build_topology(record, former)
    assert (again.shards, again.databases) == (12, changed.databases)
    check_topology(again)


@pytest.mark.parametrize(("shards", "databases"), [(1, 1), (16, 1), (16, 3), (7, 7), (256, 5)])
def test_every_shard_lies_on_one_database_and_the_databases_are_evenly_full(shards: int, databases: int) -> None:
    ranges = Shape(shards=shards, databases=databases).check().shard_ranges
    held = [shard for first, last in ranges.values() for shard in range(first, last + 1)]
    assert held == list(range(shards))
    sizes = [last - first + 1 for first, last in ranges.values()]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(tiers=1, followers=1, leaders=1),
        Shape(tiers=3, followers=4, leaders=3, databases=2, shards=9),
        Shape(regions=2),
        Shape(regions=4, tiers=1, databases=4, mixed_mastership=True),
        Shape(standby=True),
        Shape(regions=2, databases=2, mixed_mastership=True, standby=True),
    ],
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
        (Shape(regions=5), "--regions 5: there are names for 4"),
        (Shape(regions=2, mixed_mastership=True), "--mixed-mastership: 1 databases"),
        (Shape(databases=2, mixed_mastership=True), "--mixed-mastership"),
    ],
)
def test_an_impossible_shape_is_refused_with_the_name_of_the_option(shape: Shape, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        shape.check()


def test_one_region_has_plain_names_and_nothing_between_regions() -> None:
    shape = Shape(databases=2)
    assert list(shape.server_names)[:4] == ["db-1", "db-2", "leader-1", "leader-2"]
    assert crossings(shape) == []
    assert {member.role for member in shape.members} == {Role.DATABASE, Role.LEADER, Role.TAILER, Role.FOLLOWER}
    assert [name for name, role in shape.server_names.items() if role is Role.TAILER] == ["tailer-1", "tailer-2"]


def test_each_database_has_its_standby_in_its_masters_region() -> None:
    shape = Shape(regions=2, databases=2, mixed_mastership=True, standby=True).check()
    databases = {database.name: database for database in topology_of(shape).databases}
    for name, region in (("db-1", "east"), ("db-2", "west")):
        assert databases[name].master_region == region
        assert {at: server.name for at, server in databases[name].standbys.items()} == {region: f"{region}-{name}b"}
        assert {server.name for server in databases[name].servers.values()} == {f"east-{name}", f"west-{name}"}
        (other,) = {"east", "west"} - {region}
        assert set(databases[name].standbys[region].reached_from) == {other}, "a replica there may follow it one day"
    assert topology_of(Shape()).databases[0].standbys == {}


def test_a_cluster_that_starts_again_has_the_server_as_master_that_was_promoted() -> None:
    shape = Shape(standby=True).check()
    record = ClusterRecord(shape=shape, ports=ports_of(shape), topology_version=7)
    first = build_topology(record, TopologyOutline())
    promoted = edits.promote(first, "db-1", "local/standby", 2)
    again = build_topology(record, msgspec.json.decode(dump_topology(promoted), type=TopologyOutline))
    assert again.databases == promoted.databases == build_topology(record, outline_of(promoted)).databases
    assert again.databases[0].servers["local"].name == "db-1b"


def test_each_region_has_a_full_set_and_a_tailer_for_each_of_its_database_servers() -> None:
    shape = Shape(regions=2, databases=2, followers=1).check()
    assert [member.name for member in shape.members if member.region == "west"] == [
        "west-db-1",
        "west-db-2",
        "west-leader-1",
        "west-leader-2",
        "west-tailer-1",
        "west-tailer-2",
        "west-follower-1a",
        "west-follower-2a",
    ]
    east, west = topology_of(shape).regions
    assert (east.name, west.name) == ("east", "west")
    assert [tailer.database for tailer in west.tailers] == ["db-1", "db-2"]


def test_the_first_region_is_master_of_all_databases_unless_mastership_is_mixed() -> None:
    assert Shape(regions=2, databases=3).master_regions == {"db-1": "east", "db-2": "east", "db-3": "east"}
    mixed = Shape(regions=2, databases=3, mixed_mastership=True)
    assert mixed.master_regions == {"db-1": "east", "db-2": "west", "db-3": "east"}


def test_servers_that_another_region_calls_are_reached_only_through_the_line() -> None:
    shape = Shape(regions=2, followers=1)
    topology = topology_of(shape)
    leads = {f"127.0.0.1:{route.listen}": route for route in line_routes(shape, ports_of(shape))}
    east, _ = topology.regions
    for leader in east.leaders.servers:
        assert set(leader.reached_from) == {"west"}
        seen = leader.seen_from("west")
        for address, usual in ((seen.grpc, leader.grpc), (seen.frames, leader.frames)):
            route = leads.pop(address)
            assert (route.source, route.target, f"{route.host}:{route.port}") == ("west", "east", usual)
    master = topology.databases[0].servers["east"]
    route = leads.pop(f"127.0.0.1:{master.seen_from('west').port}")
    assert (route.source, route.target, route.port) == ("west", "east", master.port)
    assert {route.target for route in leads.values()} == {"west"}
    assert all(not server.reached_from for tier in east.followers for server in tier.servers)
