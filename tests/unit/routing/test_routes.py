"""Routes computed from a topology document."""

from __future__ import annotations

import msgspec
import pytest

from tao.model.errors import InvalidArgument, TopologyError
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.routing.routes import Routes, ServerLocation
from tao.routing.shard_map import Ring


def tier(name: str, servers: int, moved: dict[int, tuple[str, ...]] | None = None, down: str = "") -> Tier:
    names = [f"{name}-{index}" for index in range(servers)]
    return Tier(
        name=name,
        servers=tuple(CacheServer(name=n, grpc="127.0.0.1:1", down=n == down) for n in names),
        moved=moved or {},
    )


def database(name: str, master: str, *ranges: tuple[int, int]) -> Database:
    servers = {region: DatabaseServer(name=f"{name}-{region}") for region in ("east", "west")}
    return Database(name=name, master_region=master, servers=servers, shards=ranges)


def topology(followers: Tier | None = None) -> Topology:
    east = Region(name="east", leaders=tier("lead", 2), followers=(followers or tier("f", 3), tier("g", 2)))
    west = Region(name="west", leaders=tier("lead-w", 1), followers=(tier("h", 2),))
    databases = (database("d1", "east", (0, 31), (48, 63)), database("d2", "west", (32, 47)))
    return Topology(version=7, shards=64, regions=(east, west), databases=databases)


def test_every_shard_has_one_home_in_each_tier_and_every_server_lists_its_shards() -> None:
    routes = Routes(topology())
    assert (routes.version, routes.shards) == (7, 64)
    for tier_name, size in (("f", 3), ("g", 2)):
        found = routes.tier("east", tier_name)
        assert sorted(shard for server in found.servers for shard in routes.shards_of(server.name)) == list(range(64))
        assert len({found.home(shard).name for shard in range(64)}) == size
        for shard in range(64):
            assert shard in routes.shards_of(found.home(shard).name)


def test_an_explicitly_mapped_shard_has_its_home_first_and_its_clones_after() -> None:
    routes = Routes(topology(tier("f", 3, moved={5: ("f-2", "f-0")})))
    found = routes.tier("east", "f")
    assert [server.name for server in found.hosts(5)] == ["f-2", "f-0"]
    assert found.home(5).name == "f-2"
    assert 5 in routes.shards_of("f-0")


def test_a_server_that_is_down_keeps_its_shards_and_is_marked_down() -> None:
    before = Routes(topology())
    after = Routes(topology(tier("f", 3, down="f-1")), before)
    for shard in range(64):
        home = after.tier("east", "f").home(shard)
        assert home.name == before.tier("east", "f").home(shard).name
        assert home.down == (home.name == "f-1")


def test_a_shards_leader_is_the_first_server_up_in_its_mapping_then_along_the_ring() -> None:
    def leader_of(*down: str) -> str:
        servers = tuple(CacheServer(name=n, grpc="127.0.0.1:1", down=n in down) for n in ("a", "b", "c", "d"))
        lead = Tier(name="lead", servers=servers, moved={5: ("c", "a")})
        east = Region(name="east", leaders=lead, followers=(tier("f", 1),))
        routes = Routes(Topology(version=1, shards=64, regions=(east,), databases=()))
        [mine] = [server.name for server in servers if 5 in routes.shards_of(server.name)]
        assert mine == routes.leaders("east").home(5).name
        assert [server.name for server in routes.leaders("east").hosts(5)] == [mine], "a shard has one leader"
        return mine

    others = Ring(dict.fromkeys("abcd", 1.0)).owners(5, 4)
    assert leader_of() == leader_of("a") == "c"
    assert leader_of("c") == "a"
    assert leader_of("c", "a") == next(name for name in others if name in ("b", "d"))
    assert leader_of("a", "b", "c", "d") == "c", "with no server up, all callers at least ask the same one"


def test_a_tier_whose_placement_did_not_change_keeps_its_map() -> None:
    before = Routes(topology())
    kept, changed = before.tier("east", "g").map, before.tier("east", "f").map
    after = Routes(topology(tier("f", 4)), before)
    assert after.tier("east", "g").map is kept
    assert after.tier("east", "f").map is not changed


def test_leaders_servers_and_locations_are_found_by_name() -> None:
    routes = Routes(topology())
    assert routes.leaders("west").home(3).name == "lead-w-0"
    assert routes.leaders("west").role == "leader"
    assert [found.tier for found in routes.follower_tiers("east")] == ["f", "g"]
    assert routes.server("g-1").name == "g-1"
    assert routes.locate("g-1") == ServerLocation("east", "g", "follower")
    assert routes.lists("follower", "g-1", "east")
    assert routes.lists("follower", "g-1")
    assert not routes.lists("leader", "g-1", "east")
    assert not routes.lists("follower", "g-1", "west")
    assert not routes.lists("watcher", "g-1")
    assert routes.lists("follower", "", "east")
    assert not routes.lists("watcher", "")
    assert not routes.lists("operator", "zzz")
    assert routes.locate("lead-0") == ServerLocation("east", "lead", "leader")


def test_a_shard_is_in_one_database_with_a_server_in_each_region() -> None:
    routes = Routes(topology())
    assert [routes.database_of(shard).name for shard in (0, 31, 32, 47, 48, 63)] == ["d1", "d1", "d2", "d2", "d1", "d1"]
    assert routes.database_server(40, "east").name == "d2-east"
    assert routes.master_region(40) == "west"


def test_a_region_reads_its_own_servers_binlog_and_the_masters_while_that_server_is_down() -> None:
    def read_by_east(*down: str) -> str:
        servers = {name: DatabaseServer(name=name, down=name in down) for name in ("east", "west")}
        found = Database(name="d", master_region="west", servers=servers, shards=((0, 63),))
        return Routes(msgspec.structs.replace(topology(), databases=(found,))).binlog_server("d", "east").name

    assert read_by_east() == read_by_east("west") == "east"
    assert read_by_east("east") == "west"
    assert read_by_east("east", "west") == "east", "the master is down, too"
    with pytest.raises(TopologyError, match="north"):
        Routes(topology()).binlog_server("d1", "north")


@pytest.mark.parametrize("shard", [-1, 64])
def test_an_unknown_shard_is_an_error(shard: int) -> None:
    routes = Routes(topology())
    with pytest.raises(InvalidArgument, match=str(shard)):
        routes.tier("east", "f").home(shard)
    with pytest.raises(InvalidArgument, match=str(shard)):
        routes.database_of(shard)


def test_unknown_names_are_errors_that_name_them() -> None:
    routes = Routes(topology())
    with pytest.raises(TopologyError, match="north"):
        routes.leaders("north")
    with pytest.raises(TopologyError, match="zzz"):
        routes.tier("east", "zzz")
    with pytest.raises(TopologyError, match="zzz"):
        routes.locate("zzz")
    with pytest.raises(TopologyError, match="north"):
        routes.database_server(1, "north")


def test_a_shard_without_a_database_is_an_error() -> None:
    bare = msgspec.structs.replace(topology(), databases=())
    with pytest.raises(InvalidArgument, match="no database"):
        Routes(bare).master_region(1)
